"""torch's own optimizer cases (torch.testing._internal.common_optimizers.optim_db) run against ours."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import oxytorch.optim
import pytest
import torch
import torch_device
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

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


def tolerance(name: str) -> dict[str, float]:
    # Muon multiplies in bf16, here matrices of one shape together.
    if name == "Muon":
        return {"rtol": 3e-2, "atol": 3e-2}
    # Centered RMSprop subtracts nearly equal averages.
    return {"rtol": 1e-4, "atol": 1e-4} if name == "RMSprop" else {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("composite", [False, True], ids=["native", "composite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize(("name", "index"), CASES)
def test_trajectory_is_that_of_torch(name: str, index: int, dtype: torch.dtype, composite: bool) -> None:
    if name == "Muon" and dtype.is_complex:
        pytest.skip("Muon takes real matrices")
    cls, peer, kwargs = case(name, index)
    results = []
    for optimizer in (cls, peer):
        weight, bias, data = make_model(dtype, name=name)
        extra = {"force_composite": composite} if optimizer is cls else {}
        opt = optimizer([weight, bias], **copy.deepcopy(kwargs), **extra)
        closure = closure_of(opt, weight, bias, data)
        for _ in range(7):
            opt.step(closure)
        results.append((weight, bias, opt.state_dict()))
    (w, b, state), (peer_w, peer_b, peer_state) = results
    torch.testing.assert_close(w, peer_w, **tolerance(name))
    torch.testing.assert_close(b, peer_b, **tolerance(name))
    assert state["param_groups"] == peer_state["param_groups"]
    # torch counts steps on the CPU unless asked to capture.
    torch.testing.assert_close(state["state"], peer_state["state"], check_device=False, **tolerance(name))


@pytest.mark.parametrize(("name", "index"), CASES)
def test_param_groups_take_their_own_options(name: str, index: int) -> None:
    cls, peer, kwargs = case(name, index)
    results = []
    for optimizer in (cls, peer):
        weight, bias, data = make_model(name=name)
        groups = [{"params": [weight], "weight_decay": 0.3}, {"params": [bias], "lr": 0.05}]
        opt = optimizer(groups, **copy.deepcopy(kwargs))
        irrelevant = torch.nn.Parameter(torch.ones(3, 1, device=DEVICE))
        opt.add_param_group({"params": [irrelevant]})
        closure = closure_of(opt, weight, bias, data)
        for i in range(6):
            if i == 3:
                opt.param_groups[0]["lr"] = 1e-4
            opt.step(closure)
        results.append((weight, bias, irrelevant))
        assert torch.equal(irrelevant, torch.ones_like(irrelevant))
    torch.testing.assert_close(results[0], results[1], **tolerance(name))


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
