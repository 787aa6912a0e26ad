"""Bad input works as in torch or raises an error that names the parameter; nothing is half done."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import oxytorch.optim
import pytest
import torch
from oxytorch.optim import SGD, AdamW


def params_with_grads(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def named(params) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"layer.{i}", p) for i, p in enumerate(params)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0}, "clip_norm is 0"),
        ({"clip_norm": -1.0}, "clip_norm is -1"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"clip_norm": float("inf")}, "clip_norm is inf"),
        ({"ema_decay": 1.0}, "ema_decay is 1"),
        ({"ema_decay": -0.1}, "ema_decay is -0.1"),
        ({"ema_decay": float("nan")}, "ema_decay is nan"),
        ({"nonfinite": "ignore"}, "unknown non-finite policy 'ignore'; use 'skip', 'raise', 'rollback' or 'propagate'"),
        ({"lr": float("nan")}, "learning rate|lr"),
        ({"lr": -1.0}, "Invalid learning rate"),
    ],
)
def test_bad_options_are_refused_with_their_value(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW(params_with_grads((3,)), **options)
    with pytest.raises(TypeError, match="unknown option 'clip'"):
        AdamW(params_with_grads((3,)), clip=1.0)


@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_lr_that_becomes_nan_is_refused_before_anything_changes(cls) -> None:
    params = params_with_grads((3,), (4,))
    opt = cls(params, lr=0.1)
    opt.step()
    kept = copy.deepcopy((params, opt.state_dict()["state"]))
    for bad in (float("nan"), torch.tensor(float("nan")), float("inf") if cls is AdamW else -1.0):
        opt.param_groups[0]["lr"] = bad
        with pytest.raises(ValueError, match="group 0"):
            opt.step()
    torch.testing.assert_close((params, opt.state_dict()["state"]), kept, rtol=0, atol=0)


def test_not_a_tensor_and_empty_lists() -> None:
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        AdamW(["weight"])
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])
    opt = AdamW([{"params": []}, {"params": params_with_grads((3,))}])
    opt.step()


def test_sparse_parameter_and_sparse_gradient_are_named() -> None:
    dense = params_with_grads((3,))[0]
    sparse = torch.eye(3).to_sparse().requires_grad_()
    opt = AdamW([("dense", dense), ("table", sparse)])
    with pytest.raises(NotImplementedError, match="parameter table is sparse"):
        opt.step()
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    opt = AdamW([("dense", dense), *embedding.named_parameters()])
    embedding(torch.tensor([1])).sum().backward()
    kept = dense.detach().clone()
    with pytest.raises(NotImplementedError, match="weight has a sparse gradient"):
        opt.step()
    assert torch.equal(dense, kept)


def test_mixed_devices_are_named() -> None:
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, device="meta"))]
    opt = AdamW(named(params))
    params[0].grad = torch.ones(2)
    with pytest.raises(NotImplementedError, match=r"parameter layer\.1 is on meta"):
        opt.step()


def test_integer_parameters_without_gradient_are_left_alone_as_in_torch() -> None:
    counter = torch.arange(3)
    weight = params_with_grads((3,))[0]
    AdamW([weight, counter]).step()
    assert torch.equal(counter, torch.arange(3))


def test_duplicate_parameter_is_named() -> None:
    p = params_with_grads((3,))[0]
    with pytest.warns(UserWarning, match="duplicate"):
        opt = AdamW([p, p])
    with pytest.raises(ValueError, match="given twice"):
        opt.step()


def test_changed_shape_dtype_and_freed_memory_are_named() -> None:
    def fresh():
        params = params_with_grads((4, 4), (8,))
        opt = AdamW(named(params))
        opt.step()
        return params, opt

    params, opt = fresh()
    kept = params[0].detach().clone()
    params[1].data = torch.zeros(9)
    with pytest.raises(RuntimeError, match=r"parameter layer\.1 had shape \[8\].*now has \[9\]"):
        opt.step()
    assert torch.equal(params[0], kept)

    params, opt = fresh()
    params[1].grad = None
    params[1].data = params[1].data.double()
    params[1].grad = torch.ones(8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"parameter layer\.1 was of dtype Float.*now Double"):
        opt.step()

    params, opt = fresh()
    params[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"memory of parameter layer\.1 was freed"):
        opt.step()


def test_parameters_replaced_by_assign_are_as_in_torch() -> None:
    def train(cls):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        opt = cls(model.parameters(), lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        opt.step()
        new = {key: torch.full_like(value, 0.5) for key, value in model.state_dict().items()}
        model.load_state_dict(new, assign=True)
        opt.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        opt.step()  # the optimizer holds the old parameters, which have no gradient
        opt.param_groups[0]["params"] = list(model.parameters())
        opt.step()  # and here the new ones
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(train(AdamW), train(torch.optim.AdamW), rtol=1e-6, atol=1e-7)


def test_moved_storage_and_strange_layouts_work_as_in_torch() -> None:
    def train(cls):
        torch.manual_seed(0)
        base = torch.randn(6, 8)
        params = [
            torch.nn.Parameter(base.t()[::2]),  # strided, not dense
            torch.nn.Parameter(torch.randn(4, 5).t()),  # dense, transposed
            torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
            torch.nn.Parameter(torch.zeros(0, 3)),
            torch.nn.Parameter(torch.tensor(1.5)),
        ]
        opt = cls(params, lr=0.1)
        for i in range(4):
            for p in params:
                generator = torch.Generator().manual_seed(i)
                p.grad = torch.randn(p.shape, generator=generator)  # contiguous: not the layout of all parameters
            if i == 2:
                params[1].data = params[1].data.clone()
                params[2].grad = None
            opt.step()
        return [p.detach() for p in params]

    torch.testing.assert_close(train(AdamW), train(torch.optim.AdamW), rtol=1e-5, atol=1e-6)


def test_replaced_state_is_taken_up() -> None:
    params = params_with_grads((4,))
    opt = AdamW(params, lr=0.1)
    opt.step()
    peer = torch.optim.AdamW(copy.deepcopy(params), lr=0.1)
    peer.load_state_dict(copy.deepcopy(opt.state_dict()))
    for o in (opt, peer):
        p = o.param_groups[0]["params"][0]
        p.grad = torch.ones(4)
        o.state[p]["exp_avg"] = torch.full((4,), 3.0)
        o.step()
    torch.testing.assert_close(opt.param_groups[0]["params"], peer.param_groups[0]["params"], rtol=1e-6, atol=1e-7)
    opt.state.clear()
    opt.step()
    assert int(opt.state[params[0]]["step"]) == 1


def test_wrong_state_is_refused_with_the_parameter_named() -> None:
    params = params_with_grads((4,), (5,))
    opt = AdamW(named(params))
    opt.step()
    opt.state[params[1]]["exp_avg"] = torch.zeros(6)
    with pytest.raises(ValueError, match=r"state 'exp_avg' of parameter layer\.1 has shape \[6\]"):
        opt.step()
    with pytest.raises(ValueError, match="doesn't match the size"):
        AdamW(params_with_grads((4,))).load_state_dict(opt.state_dict())


def test_nonfinite_policies() -> None:
    for value in (float("inf"), float("nan")):
        for policy in ("skip", "raise", "propagate"):
            params = params_with_grads((4,), (40000,))
            opt = AdamW(named(params), nonfinite=policy)
            opt.step()
            kept = [p.detach().clone() for p in params]
            params[1].grad[39999] = value
            if policy == "raise":
                with pytest.raises(RuntimeError, match=r"inf or NaN in the gradient of layer\.1; nothing was changed"):
                    opt.step()
            else:
                opt.step()
            unchanged = all(torch.equal(p, k) for p, k in zip(params, kept, strict=True))
            assert unchanged is (policy != "propagate")
            if policy == "propagate":
                assert params[1].isnan().any()
                assert int(opt.tail_stats().skipped) == 0
            if policy == "skip":
                assert int(opt.tail_stats().skipped) == 1


def test_ema_weights_come_and_go_bit_for_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Linear(40, 30).to(dtype)
        opt = AdamW(model.named_parameters(), lr=0.1, ema_decay=0.9)
        for _ in range(3):
            opt.zero_grad()
            model(torch.randn(2, 40, dtype=dtype)).sum().backward()
            opt.step()
        kept = copy.deepcopy(model.state_dict())
        averages = copy.deepcopy(opt.ema_state_dict())
        with opt.ema_weights():
            assert not torch.equal(model.weight, kept["weight"])
            assert torch.equal(model.weight, averages["ema"][0].to(dtype))
            with pytest.raises(RuntimeError, match="stand in"):
                opt.step()
        torch.testing.assert_close(model.state_dict(), kept, rtol=0, atol=0)
        torch.testing.assert_close(opt.ema_state_dict(), averages, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="no moving average"), AdamW(params_with_grads((3,))).ema_weights():
        pass


def test_replace_carries_everything_and_refuses_by_name() -> None:
    params = params_with_grads((4,), (5, 6))
    for old in (torch.optim.AdamW(params, lr=0.1, weight_decay=0.3), torch.optim.SGD(params, lr=0.1, momentum=0.9)):
        old.step()
        reference_params = copy.deepcopy(params)
        for p, q in zip(params, reference_params, strict=True):
            q.grad = p.grad.clone()
        reference = type(old)(reference_params, lr=0.1)
        reference.load_state_dict(copy.deepcopy(old.state_dict()))
        schedule = torch.optim.lr_scheduler.StepLR(old, 1, 0.5)
        reference_schedule = torch.optim.lr_scheduler.StepLR(reference, 1, 0.5)
        new = oxytorch.optim.replace(old)
        assert isinstance(new, type(old)) and new.param_groups is old.param_groups
        for _ in range(3):
            new.step(), schedule.step()
            reference.step(), reference_schedule.step()
        torch.testing.assert_close(params, reference_params, rtol=1e-5, atol=1e-6)
        assert oxytorch.optim.replace(new) is new
        with pytest.raises(TypeError, match="already"):
            oxytorch.optim.replace(new, clip_norm=1.0)
    with pytest.raises(TypeError, match=r"no replacement for torch\.optim\.\w+\.LBFGS"):
        oxytorch.optim.replace(torch.optim.LBFGS(params))
    with pytest.raises(ValueError, match="differentiable"):
        oxytorch.optim.replace(torch.optim.SGD(params, lr=0.1, differentiable=True))


def test_stats_are_the_norms() -> None:
    params = params_with_grads((4,), (5000,), (3,))
    params[2].grad = None
    opt = AdamW(params, lr=0.1, clip_norm=0.5, collect_stats=True)
    before = [p.detach().clone() for p in params]
    opt.step()
    stats = opt.tail_stats()
    norms = torch.tensor([0.0 if p.grad is None else float(p.grad.norm()) for p in params])
    torch.testing.assert_close(stats.grad_norms, norms)
    torch.testing.assert_close(stats.grad_norm, norms.norm())
    moved = torch.stack([(p.detach() - b).norm() for p, b in zip(params, before, strict=True)])
    torch.testing.assert_close(stats.update_norms, moved)
    sizes = torch.tensor([float(p.detach().norm()) for p in params[:2]] + [0.0])
    torch.testing.assert_close(stats.param_norms, sizes)
    torch.testing.assert_close(stats.update_ratio[:2], moved[:2] / sizes[:2])


def test_zero_grads_writes_zeros_also_when_the_step_is_skipped() -> None:
    for bad in (False, True):
        params = params_with_grads((4,), (3, 5))
        params[1].grad = torch.randn(5, 3).t()
        params.append(torch.nn.Parameter(torch.ones(2, dtype=torch.float64)))
        params[2].grad = torch.ones(2, dtype=torch.float64)
        if bad:
            params[0].grad[0] = float("inf")
        AdamW(params, zero_grads=True).step()
        assert all(torch.count_nonzero(p.grad) == 0 for p in params)


NAN, INF = float("nan"), float("inf")
REFUSED = [
    ({"clip_value": 0}, ValueError, "clip_value is 0"),
    ({"clip_value": -2.0}, ValueError, "clip_value is -2"),
    ({"clip_value": NAN}, ValueError, "clip_value is nan"),
    ({"agc": 0.0}, ValueError, "agc is 0"),
    ({"agc": INF}, ValueError, "agc is inf"),
    ({"agc": 0.01, "agc_eps": 0.0}, ValueError, "agc_eps is 0"),
    ({"agc": 0.01, "agc_eps": NAN}, ValueError, "agc_eps is nan"),
    ({"clip_norm": 1.0, "clip_value": 2.0}, ValueError, "more than one kind of clipping"),
    ({"clip_norm": 1.0, "agc": 0.5}, ValueError, "agc 0.5"),
    ({"ema_decay": INF}, ValueError, "ema_decay is inf"),
    ({"state_dtype": "int4"}, ValueError, "unknown state_dtype 'int4'"),
    ({"master_weights": "bf16"}, ValueError, "unknown master_weights 'bf16'"),
    ({"copy_dtype": "fp8"}, ValueError, "copy_dtype is 'fp8'"),
    ({"copy_dtype": torch.float64}, TypeError, "copy_dtype is Double"),
    ({"norm_in_backward": True, "step_in_backward": True}, ValueError, "exclude each other"),
    ({"step_in_backward": True}, NotImplementedError, 'nonfinite = "skip"'),
    ({"step_in_backward": True, "nonfinite": "raise"}, NotImplementedError, 'nonfinite = "raise"'),
    (
        {"step_in_backward": True, "nonfinite": "propagate", "clip_norm": 1.5},
        NotImplementedError,
        r"clip_norm = 1\.5",
    ),
]


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Lion", "Adagrad", "RMSprop", "Muon"])
@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=[str(o) for o, _, _ in REFUSED])
def test_each_option_is_refused_out_of_its_range(name: str, options: dict, error: type, message: str) -> None:
    param = params_with_grads((3, 4))[0]
    kept = param.detach().clone()
    with pytest.raises(error, match=message):
        getattr(oxytorch.optim, name)([param], **options)
    assert torch.equal(param, kept)
    assert not param._post_accumulate_grad_hooks, "a refused optimizer left a hook"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"seed": -1}, ValueError),
        ({"seed": 2**64}, ValueError),
        ({"seed": "zero"}, TypeError),
        ({"seed": 1.0}, TypeError),
        ({"state_dtype": torch.bfloat16}, TypeError),
        ({"nonfinite": False}, TypeError),
        ({"copy_dtype": torch.int32}, TypeError),
    ],
)
def test_values_of_the_wrong_kind_are_named(options: dict, error: type) -> None:
    with pytest.raises(error, match=f"^{next(iter(options))} is "):
        AdamW(params_with_grads((3,)), **options)


@pytest.mark.parametrize(
    ("name", "param", "options", "error", "message"),
    [
        ("AdamW", torch.ones(3, dtype=torch.complex64), {"state_dtype": "int8"}, NotImplementedError, "is complex"),
        ("AdamW", torch.ones(3, dtype=torch.complex64), {"stochastic_rounding": True}, NotImplementedError, "complex"),
        ("SGD", torch.ones(3, dtype=torch.float16), {"master_weights": "int8"}, NotImplementedError, "is float16"),
        ("Muon", torch.ones(3, 3, dtype=torch.complex64), {}, NotImplementedError, "does not support complex"),
    ],
)
def test_formats_that_a_parameter_cannot_have(name, param, options, error, message) -> None:
    good = params_with_grads((4, 4))[0]
    bad = torch.nn.Parameter(param)
    bad.grad = torch.ones_like(bad)
    kept = good.detach().clone(), bad.detach().clone()
    opt = getattr(oxytorch.optim, name)(named([good, bad]), **options)
    with pytest.raises(error, match=message) as raised:
        opt.step()
    assert "layer.1" in str(raised.value)
    assert torch.equal(good, kept[0]) and torch.equal(bad, kept[1])


def test_muon_takes_matrices_alone() -> None:
    with pytest.raises(ValueError, match="2D"):
        oxytorch.optim.Muon(params_with_grads((3,)))


def test_state_of_many_elements_is_encoded_as_that_of_few() -> None:
    shape, few = (331, 601), 32 * 1000  # scales are of 32 elements
    generator = torch.Generator().manual_seed(5)
    average = torch.randn(shape, generator=generator) * 10 ** (6 * torch.rand(shape, generator=generator) - 3)

    def encoded(values: torch.Tensor) -> dict[str, torch.Tensor]:
        p = torch.zeros_like(values, requires_grad=True)
        given = torch.optim.AdamW([p])
        given.state[p] = {"step": torch.tensor(1.0), "exp_avg": values.clone(), "exp_avg_sq": values.square()}
        opt = AdamW([p], state_dtype="int8")
        opt.load_state_dict(given.state_dict())
        names = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
        opt._step_tail()
        made = {name: opt.state[p][name] for name in names}
        assert made["exp_avg"].dtype is torch.int8 and made["exp_avg_sq"].dtype is torch.uint8
        decoded = opt._step_tail().decoded_state(0)
        return {
            name: value.flatten() for name, value in (made | {f"{k} decoded": decoded[k] for k in names[::2]}).items()
        }

    whole = encoded(average)
    parts = [encoded(part) for part in average.flatten().split(few)]
    for name, value in whole.items():
        assert value.equal(torch.cat([part[name] for part in parts])), name


@pytest.mark.parametrize("numel", [0, 1, 3, 31, 33])
def test_int8_state_of_few_elements_works(numel: int) -> None:
    p = params_with_grads((numel,))[0]
    opt = AdamW([p], lr=0.1, state_dtype="int8")
    peer_param = torch.nn.Parameter(p.detach().clone())
    peer = torch.optim.AdamW([peer_param], lr=0.1)
    for i in range(5):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        peer_param.grad = p.grad.clone()
        opt.step(), peer.step()
    assert opt.state[p]["exp_avg"].dtype == torch.int8 and opt.state[p]["exp_avg_sq"].dtype == torch.uint8
    assert opt.state[p]["exp_avg_scale"].shape == (-(-numel // 32),)
    torch.testing.assert_close(p, peer_param, rtol=0, atol=0.05)


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF])
def test_bad_divisors_change_nothing(value: float) -> None:
    params = params_with_grads((4,), (5,))
    opt = AdamW(params, lr=0.1, ema_decay=0.5)
    opt.step()
    kept = copy.deepcopy(([p.detach() for p in params], opt.state_dict()["state"], opt.ema_state_dict()))
    opt.grad_divisor = value
    with pytest.raises(ValueError, match=f"grad_divisor is {value:g}"):
        opt.step()
    now = ([p.detach() for p in params], opt.state_dict()["state"], opt.ema_state_dict())
    torch.testing.assert_close(now, kept, rtol=0, atol=0)


@pytest.mark.parametrize("key", ["exp_avg", "low_bits"])
def test_codes_that_are_not_dense_are_refused(key: str) -> None:
    params = params_with_grads((6, 8))
    params[0].data, params[0].grad = params[0].data.bfloat16(), None
    opt = AdamW(params, state_dtype="int8", master_weights="int8")
    params[0].grad = torch.ones_like(params[0])
    opt.step()
    saved = opt.state_dict()
    saved["state"][0][key] = torch.zeros(6, 16, dtype=torch.int8)[:, ::2]
    with pytest.raises(ValueError, match=f"state '{key}' of parameter .* strides \\[16, 2\\]"):
        opt.load_state_dict(saved)
        opt.step()


@pytest.mark.parametrize("what", ["grad_scale", "found_inf", "skip", "norm_limit"])
def test_inputs_must_be_one_element(what: str) -> None:
    params = params_with_grads((4,))
    kept = params[0].detach().clone()
    opt = AdamW(params)
    setattr(opt, what, torch.ones(2))
    with pytest.raises(ValueError, match=f"{what} must be a one-element tensor on cpu; it has 2 elements"):
        opt.step()
    assert torch.equal(params[0], kept)


def test_step_in_backward_serves_no_condition_on_the_whole_step() -> None:
    for what in ("grad_scale", "found_inf", "skip", "norm_limit"):
        params = params_with_grads((4,))
        kept = params[0].detach().clone()
        opt = SGD(params, step_in_backward=True, nonfinite="propagate")
        setattr(opt, what, torch.ones(()))
        with pytest.raises(NotImplementedError, match="step_in_backward cannot serve"):
            opt.step()
        assert torch.equal(params[0], kept)


HYPERPARAMETERS = [
    ("AdamW", "betas", (1.0, 0.9), r"betas\[0\] = 1"),
    ("AdamW", "betas", (0.9, -0.5), r"betas\[1\] = -0.5"),
    ("AdamW", "eps", -1e-3, r"eps = -0\.001"),
    ("AdamW", "weight_decay", NAN, "weight_decay = nan"),
    ("Lion", "weight_decay", -0.1, "weight_decay = -0.1"),
    ("Lion", "betas", (0.9, 1.5), r"betas\[1\] = 1\.5"),
    ("SGD", "momentum", -0.9, "momentum = -0.9"),
    ("SGD", "dampening", INF, "dampening = inf"),
    ("Adagrad", "lr_decay", -1.0, "lr_decay = -1"),
    ("Adagrad", "eps", NAN, "eps = nan"),
    ("RMSprop", "alpha", -0.1, "alpha = -0.1"),
    ("RMSprop", "momentum", INF, "momentum = inf"),
    ("Muon", "momentum", NAN, "momentum = nan"),
    ("Muon", "ns_steps", 100, "ns_steps = 100"),
]


@pytest.mark.parametrize(("name", "key", "value", "message"), HYPERPARAMETERS)
def test_hyperparameters_that_go_bad_are_refused_before_anything_changes(name, key, value, message) -> None:
    params = params_with_grads((3, 4), (5, 5))
    opt = getattr(oxytorch.optim, name)([{"params": [p]} for p in params], lr=0.1)
    opt.step()
    kept = copy.deepcopy(([p.detach() for p in params], opt.state_dict()["state"]))
    good = opt.param_groups[1][key]
    opt.param_groups[1][key] = value
    with pytest.raises(ValueError, match=f"group 1 has {message}"):
        opt.step()
    torch.testing.assert_close(([p.detach() for p in params], opt.state_dict()["state"]), kept, rtol=0, atol=0)
    opt.param_groups[1][key] = good
    opt.step()
    assert not torch.equal(params[1], kept[0][1])


def test_average_of_another_model_is_refused() -> None:
    opt = AdamW(params_with_grads((4,), (5,)), ema_decay=0.9)
    opt.step()
    before = copy.deepcopy(opt.ema_state_dict())
    for bad, message in (
        ({"decay": 0.9, "ema": {7: torch.zeros(4)}}, r"for parameters \[7\]"),
        ({"decay": 0.9, "ema": {0: torch.zeros(9)}}, r"shape \(9,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            opt.load_ema_state_dict(bad)
        torch.testing.assert_close(opt.ema_state_dict(), before, rtol=0, atol=0)


def test_an_unknown_instruction_set_is_refused_at_import() -> None:
    for value, text in (("bad", "OXYTORCH_ISA is 'bad'"), ("AVX2 ", "OXYTORCH_ISA is 'AVX2 '")):
        done = subprocess.run(
            [sys.executable, "-c", "import oxytorch"],
            capture_output=True,
            text=True,
            env={**os.environ, "OXYTORCH_ISA": value},
            check=False,
        )
        assert done.returncode != 0
        assert text in done.stderr and "'scalar', 'avx2' or 'avx512'" in done.stderr
