"""torch's own optimizer cases (torch.testing._internal.common_optimizers.optim_db) run against ours."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import oxytorch.optim
import pytest
import torch
import torch_device
from referee import orthogonal
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db
from torch.utils._pytree import tree_leaves, tree_map_only

# torch's internal tests forbid setting flags of torch.backends; other tests of this process set them.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

DEVICE = torch_device.chosen()

OURS = ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Muon")
INFOS = {info.optim_cls.__name__: info for info in optim_db if info.optim_cls.__name__ in OURS}
CASES = [(name, i) for name, info in INFOS.items() for i in range(len(info.optim_inputs_func(device=DEVICE.type)))]
ERRORS = [
    (name, i)
    for name, info in INFOS.items()
    for i in range(len(info.optim_error_inputs_func(device=DEVICE.type, dtype=torch.float32)))
]


def case(name: str, index: int):
    """Ours, torch's class, and a fresh copy of the case's arguments."""
    given = copy.deepcopy(INFOS[name].optim_inputs_func(device=DEVICE.type)[index])
    return getattr(oxytorch.optim, name), INFOS[name].optim_cls, given.kwargs


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0, name: str = ""):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn((10, 5), generator=generator).to(DEVICE, dtype))
    # Muon takes matrices alone.
    shape = (10, 1) if name == "Muon" else (10,)
    bias = torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype))
    data = torch.randn(5, generator=generator).to(DEVICE, dtype)
    return weight, bias, data


def closure_of(opt, weight, bias, data):
    def closure():
        opt.zero_grad()
        loss = (weight.mv(data) + bias.flatten()).abs().pow(2).sum()
        if getattr(opt, "goes_up", False):
            loss = -loss
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize(("name", "index"), CASES)
def test_goes_in_the_right_direction(name: str, index: int) -> None:
    cls, _, kwargs = case(name, index)
    weight, bias, data = make_model(name=name)
    opt = cls([weight, bias], **kwargs)
    closure = closure_of(opt, weight, bias, data)
    first = closure().item()
    for _ in range(20):
        opt.step(closure)
    last = closure().item()
    assert last > first if kwargs.get("maximize") else last < first


def exactly_orthogonal(grad: torch.Tensor, coefficients, steps: int, eps: float) -> torch.Tensor:
    return orthogonal(grad, {"ns_coefficients": coefficients, "ns_steps": steps, "eps": eps})


@contextmanager
def in_fp64(name: str) -> Iterator[None]:
    """Everything that torch computes of an fp64 model is fp64: Muon's products too, which it else takes in bf16."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "Muon":
            patch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", exactly_orthogonal)
        yield


def options_for(of_torch: bool, dtype: torch.dtype, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A copy. torch takes the factors of a capturable fp64 step in fp32: its reference step has them as numbers."""
    if of_torch and dtype in (torch.float64, torch.complex128) and kwargs.get("capturable"):
        as_number = tree_map_only(torch.Tensor, lambda option: option.item(), kwargs)
        return {**as_number, "capturable": False}
    return copy.deepcopy(kwargs)


def flat(tree: Any) -> list[torch.Tensor]:
    return [leaf.detach().cpu() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def assert_as_exact_as_torch(
    train: Callable[..., Any], ours: Any, peer: Any, name: str, dtype: torch.dtype, **extra: Any
) -> None:
    """Ours is no farther from the fp64 trajectory than a few times what torch's own rounding makes of it.

    ``train(optimizer, dtype, **extra)`` gives a tree of tensors, the parameters first. For fp64 itself torch's fp32
    trajectory shows how errors grow. Muon multiplies in bf16 whatever the dtype is, and with that is far from fp64:
    ours is to be nearer to torch's than a quarter of that. The bound is below what training changed, so that a missing
    update shows.
    """
    double = torch.complex128 if dtype.is_complex else torch.float64
    single = torch.complex64 if dtype.is_complex else torch.float32
    with in_fp64(name):
        exact = flat(train(peer, double))
    rounded = flat(train(peer, single))
    mine = flat(train(ours, dtype, **extra))
    start = [wide(p.detach().cpu()) for p in make_model(double, name=name)[:2]]
    unit = torch.finfo(single if name == "Muon" else dtype).eps
    of_torch = 0.25 if name == "Muon" else 4 * unit / torch.finfo(single).eps
    for i, (value, torchs, want) in enumerate(zip(mine, rounded, exact, strict=True)):
        allowed = of_torch * largest(wide(torchs) - wide(want)) + 8 * unit * largest(want)
        assert largest(wide(value) - wide(torchs if name == "Muon" else want)) <= allowed, f"tensor {i}"
        if i < 2:
            assert allowed < 0.5 * largest(start[i] - wide(want)), f"tensor {i}: the bound is as large as the update"


@pytest.mark.parametrize("composite", [False, True], ids=["native", "composite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize(("name", "index"), CASES)
def test_trajectory_is_that_of_torch(name: str, index: int, dtype: torch.dtype, composite: bool) -> None:
    if name == "Muon" and dtype.is_complex:
        pytest.skip("Muon takes real matrices")
    cls, peer, kwargs = case(name, index)
    groups = {}

    def train(optimizer: Any, of: torch.dtype, **extra: Any) -> Any:
        weight, bias, data = make_model(of, name=name)
        opt = optimizer([weight, bias], **options_for(optimizer is peer, of, kwargs), **extra)
        closure = closure_of(opt, weight, bias, data)
        for _ in range(7):
            opt.step(closure)
        state = opt.state_dict()
        groups[optimizer] = state["param_groups"]
        return weight, bias, [dict(sorted(entries.items())) for entries in state["state"].values()]

    assert_as_exact_as_torch(train, cls, peer, name, dtype, force_composite=composite)
    assert groups[cls] == groups[peer]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_param_groups_take_their_own_options(name: str, index: int) -> None:
    cls, peer, kwargs = case(name, index)

    def train(optimizer: Any, dtype: torch.dtype) -> Any:
        weight, bias, data = make_model(dtype, name=name)
        groups = [{"params": [weight], "weight_decay": 0.3}, {"params": [bias], "lr": 0.05}]
        opt = optimizer(groups, **options_for(optimizer is peer, dtype, kwargs))
        irrelevant = torch.nn.Parameter(torch.ones(3, 1, device=DEVICE))
        opt.add_param_group({"params": [irrelevant]})
        closure = closure_of(opt, weight, bias, data)
        for i in range(6):
            if i == 3:
                opt.param_groups[0]["lr"] = 1e-4
            opt.step(closure)
        assert torch.equal(irrelevant, torch.ones_like(irrelevant))
        return weight, bias

    assert_as_exact_as_torch(train, cls, peer, name, torch.float32)


@pytest.mark.parametrize("scheduler", ["StepLR", "CosineAnnealingLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_schedulers_drive_the_groups(scheduler: str) -> None:
    arguments = {"StepLR": [2], "CosineAnnealingLR": [10], "OneCycleLR": [0.1, 20], "ReduceLROnPlateau": []}[scheduler]
    results = []
    for optimizer in (oxytorch.optim.AdamW, torch.optim.AdamW):
        weight, bias, data = make_model()
        opt = optimizer([weight, bias], lr=0.01)
        schedule = getattr(torch.optim.lr_scheduler, scheduler)(opt, *arguments)
        closure = closure_of(opt, weight, bias, data)
        for _ in range(10):
            opt.step(closure)
            schedule.step(1.0) if scheduler == "ReduceLROnPlateau" else schedule.step()
        results.append((weight, bias))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "index"), CASES)
def test_state_dict_is_exchanged_with_torch_bit_for_bit(name: str, index: int) -> None:
    cls, peer, kwargs = case(name, index)

    def run(opt, weight, bias, data, steps):
        closure = closure_of(opt, weight, bias, data)
        for _ in range(steps):
            opt.step(closure)

    for source, target in ((cls, peer), (peer, cls), (cls, cls)):
        weight, bias, data = make_model(name=name)
        first = source([weight, bias], **copy.deepcopy(kwargs))
        run(first, weight, bias, data, 4)
        buffer = io.BytesIO()
        torch.save(first.state_dict(), buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        second_weight, second_bias = copy.deepcopy(weight), copy.deepcopy(bias)
        second = target([second_weight, second_bias], lr=123.0)
        second.load_state_dict(saved)
        again = second.state_dict()
        assert again["param_groups"] == saved["param_groups"]
        for key, state in saved["state"].items():
            assert list(state) == list(again["state"][key])
            for entry, value in state.items():
                if value is None:
                    assert again["state"][key][entry] is None
                else:
                    assert (
                        torch.equal(value, again["state"][key][entry])
                        and value.dtype == again["state"][key][entry].dtype
                    )
        # Training goes on from there as if nothing had happened.
        third_weight, third_bias = copy.deepcopy(weight), copy.deepcopy(bias)
        third = target([third_weight, third_bias], **copy.deepcopy(kwargs))
        third.load_state_dict(copy.deepcopy(first.state_dict()))
        run(second, second_weight, second_bias, data, 3)
        run(third, third_weight, third_bias, data, 3)
        assert torch.equal(second_weight, third_weight) and torch.equal(second_bias, third_bias)


@pytest.mark.parametrize(("name", "index"), CASES)
def test_deepcopy_and_pickle_carry_everything_on(name: str, index: int) -> None:
    cls, _, kwargs = case(name, index)
    weight, bias, data = make_model(name=name)
    opt = cls([weight, bias], ema_decay=0.5, clip_norm=1.0, **kwargs)
    closure = closure_of(opt, weight, bias, data)
    for _ in range(3):
        opt.step(closure)
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        copied_weight, copied_bias = other.param_groups[0]["params"]
        assert copied_weight is not weight
        reference = cls([copy.deepcopy(weight), copy.deepcopy(bias)], ema_decay=0.5, clip_norm=1.0, **kwargs)
        reference.load_state_dict(copy.deepcopy(opt.state_dict()))
        reference.load_ema_state_dict(opt.ema_state_dict())
        reference_weight, reference_bias = reference.param_groups[0]["params"]
        other.step(closure_of(other, copied_weight, copied_bias, data))
        reference.step(closure_of(reference, reference_weight, reference_bias, data))
        assert torch.equal(copied_weight, reference_weight)
        for a, b in zip(
            other.ema_state_dict()["ema"].values(), reference.ema_state_dict()["ema"].values(), strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_step_without_gradients_does_nothing(name: str, index: int) -> None:
    cls, peer, kwargs = case(name, index)
    params = [torch.nn.Parameter(torch.randn(2, 3, device=DEVICE)) for _ in range(2)]
    kept = copy.deepcopy(params)
    opt = cls(params, **kwargs)
    opt.step()
    assert all(torch.equal(p, k) for p, k in zip(params, kept, strict=True))
    fresh = peer(params, **kwargs).state_dict()["state"]  # Adagrad makes its state at once
    torch.testing.assert_close(opt.state_dict()["state"], fresh, rtol=0, atol=0, check_device=False)


@pytest.mark.parametrize(("name", "index"), CASES)
def test_hooks_run(name: str, index: int) -> None:
    cls, _, kwargs = case(name, index)
    weight, bias, data = make_model(name=name)
    opt = cls([weight, bias], **kwargs)
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    opt.register_state_dict_post_hook(lambda _, state: seen.append("saved"))
    opt.step(closure_of(opt, weight, bias, data))
    opt.state_dict()
    assert seen == ["before", "after", "saved"]


@pytest.mark.parametrize(("name", "index"), ERRORS)
def test_refuses_what_torch_refuses(name: str, index: int) -> None:
    error = INFOS[name].optim_error_inputs_func(device=DEVICE.type, dtype=torch.float32)[index]
    given = error.optimizer_error_input
    cls = getattr(oxytorch.optim, name)
    if error.error_on is OptimizerErrorEnum.STEP_ERROR:
        opt = cls(given.params, **given.kwargs)
        for p in given.params:
            p.grad = torch.ones_like(p)
        with pytest.raises(error.error_type, match=error.error_regex):
            opt.step()
        return
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            cls(given.params, **given.kwargs)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(error.error_type, match=error.error_regex):
                opt = cls(given.params, **given.kwargs)
                # The case on names adds a group afterwards.
                opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def test_differentiable_falls_back_to_torch() -> None:
    results = []
    for optimizer in (oxytorch.optim.SGD, torch.optim.SGD):
        rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        start = torch.ones(3, dtype=torch.float64, requires_grad=True)
        param = start.clone()
        param.grad = torch.full((3,), 2.0, dtype=torch.float64)
        optimizer([param], lr=rate, differentiable=True).step()
        param.sum().backward()
        results.append((param.detach(), start.grad, rate.grad))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("composite", [False, True], ids=["native", "composite"])
def test_lion_is_that_of_its_paper(composite: bool) -> None:
    for options in ({}, {"weight_decay": 0.3, "betas": (0.95, 0.98)}, {"maximize": True}):
        weight, bias, data = make_model(torch.float64)
        opt = oxytorch.optim.Lion([weight, bias], lr=1e-2, force_composite=composite, **options)
        plain = [weight.detach().clone(), bias.detach().clone()]
        averages = [torch.zeros_like(p) for p in plain]
        (beta1, beta2), decay = opt.defaults["betas"], opt.defaults["weight_decay"]
        for _ in range(10):
            opt.step(closure_of(opt, weight, bias, data))
            for p, m, q in zip(plain, averages, (weight, bias), strict=True):
                g = -q.grad if options.get("maximize") else q.grad
                p.mul_(1 - 1e-2 * decay).sub_(1e-2 * (beta1 * m + (1 - beta1) * g).sign())
                m.mul_(beta2).add_(g, alpha=1 - beta2)
        torch.testing.assert_close([weight.detach(), bias.detach()], plain, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close([opt.state[p]["exp_avg"] for p in (weight, bias)], averages, rtol=1e-12, atol=1e-12)


def test_lion_refuses_what_it_cannot_mean() -> None:
    params = [torch.nn.Parameter(torch.ones(2))]
    for options in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="Invalid"):
            oxytorch.optim.Lion(params, **options)
