"""norm_in_backward and step_in_backward: the plain step's bits, whatever happens between backward and step."""

from __future__ import annotations

import copy
import gc
from typing import Any

import oxytorch.optim
import pytest
import torch
import torch_device
from torch import nn

DEVICE = torch_device.chosen()

OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9},
    "Lion": {},
    "Adagrad": {},
    "RMSprop": {"centered": True},
}
FORMATS: list[dict[str, Any]] = [
    {},
    {"master_weights": True, "ema_decay": 0.9},
    {"master_weights": "int8", "state_dtype": "int8", "stochastic_rounding": True, "ema_decay": 0.9},
]


class Shared(nn.Module):
    """A weight used twice, a parameter without gradient and one that is frozen."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 12)
        self.last = nn.Linear(12, 3)
        self.unused = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(12), requires_grad=False)
        self.to(DEVICE, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(torch.tanh(self.first(x * self.frozen))))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return model(x).float().square().mean()


def pair(name: str, dtype: torch.dtype, hook: dict[str, Any], **options: Any):
    made = []
    for extra in ({}, hook):
        model = Shared(dtype)
        opt = getattr(oxytorch.optim, name)(model.parameters(), lr=1e-2, **OPTIONS[name], **options, **extra)
        made.append((model, opt))
    return made


def assert_same(a: Any, b: Any) -> None:
    (model_a, opt_a), (model_b, opt_b) = a, b
    for p, q in zip(model_a.parameters(), model_b.parameters(), strict=True):
        assert torch.equal(p, q)
        assert opt_a.state.get(p, {}).keys() == opt_b.state.get(q, {}).keys()
        for key, value in opt_a.state.get(p, {}).items():
            assert torch.equal(value, opt_b.state[q][key]), key
    for x, y in zip(opt_a.ema_state_dict()["ema"].values(), opt_b.ema_state_dict()["ema"].values(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("composite", [False, True], ids=["native", "composite"])
@pytest.mark.parametrize("tail", FORMATS, ids=["plain", "masters", "seven bytes"])
@pytest.mark.parametrize("name", OPTIONS)
def test_norm_in_backward_is_the_plain_step(name: str, tail: dict, composite: bool) -> None:
    both = pair(name, torch.bfloat16, {"norm_in_backward": True}, clip_norm=0.001, force_composite=composite, **tail)
    for i in range(6):
        for model, opt in both:
            opt.zero_grad()
            if i % 2:
                with opt.accumulate():
                    (loss_of(model, i) / 2).backward()
            (loss_of(model, 100 + i) / 2).backward()
            if i == 3:
                model.last.weight.grad.mul_(3)  # written in place after it was measured
            if i == 4:
                model.first.weight.grad = model.first.weight.grad * 0.5  # another tensor
            if i == 5:
                model.last.bias.grad = None
            opt.step()
        assert float(both[0][1].tail_stats().grad_norm) == float(both[1][1].tail_stats().grad_norm) > 0.001
        assert_same(*both)


def test_norm_in_backward_under_a_scaler() -> None:
    both = pair("AdamW", torch.float32, {"norm_in_backward": True}, clip_norm=0.001)
    scalers = [torch.amp.GradScaler(DEVICE.type, init_scale=2.0**8, growth_interval=2) for _ in both]
    for i in range(8):
        for (model, opt), scaler in zip(both, scalers, strict=True):
            opt.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            if i == 5:
                model.last.bias.grad[0] = float("inf")
            scaler.step(opt)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same(*both)
    assert int(both[1][1].tail_stats().skipped) == 1


@pytest.mark.parametrize("tail", FORMATS, ids=["plain", "masters", "seven bytes"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("clip", [{}, {"clip_value": 1e-3}, {"agc": 1e-2}], ids=["", "value", "agc"])
def test_step_in_backward_is_the_plain_step(name: str, tail: dict, clip: dict) -> None:
    both = pair(name, torch.bfloat16, {"step_in_backward": True}, nonfinite="propagate", **clip, **tail)
    for i in range(4):
        for model, opt in both:
            opt.zero_grad()
            if i % 2:
                with opt.accumulate():
                    loss_of(model, i).backward()
            loss_of(model, 100 + i).backward()
            if opt is both[1][1]:
                assert all(p.grad is None for p in model.parameters())
            opt.step()
        assert_same(*both)


def test_closures_and_gradients_set_by_hand() -> None:
    for hook in ({"norm_in_backward": True}, {"step_in_backward": True}):
        both = pair("SGD", torch.float32, hook, nonfinite="propagate")
        for i in range(3):
            for model, opt in both:

                def closure(model=model, opt=opt, i=i):
                    opt.zero_grad()
                    loss = loss_of(model, i)
                    loss.backward()
                    model.unused.grad = torch.ones_like(model.unused)  # no hook reports it
                    return loss

                assert float(opt.step(closure)) > 0
            assert_same(*both)


@pytest.mark.parametrize("hook", ["norm_in_backward", "step_in_backward"])
def test_copies_have_their_own_hooks_and_dead_optimizers_none(hook: str) -> None:
    model = Shared(torch.float32)
    opt = oxytorch.optim.SGD(model.parameters(), lr=0.1, nonfinite="propagate", **{hook: True})
    loss_of(model, 0).backward()
    opt.step()
    opt.zero_grad()
    twin, twin_opt = copy.deepcopy((model, opt))
    loss_of(model, 1).backward(), loss_of(twin, 1).backward()
    opt.step(), twin_opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    kept = [q.detach().clone() for q in twin.parameters()]
    loss_of(model, 2).backward()
    opt.step()
    assert all(torch.equal(q, k) for q, k in zip(twin.parameters(), kept, strict=True))
    del opt
    gc.collect()
    before = [p.detach().clone() for p in model.parameters()]
    model.zero_grad()
    loss_of(model, 3).backward()
    assert model.first.weight.grad is not None
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_group_added_later_is_hooked() -> None:
    both = pair("AdamW", torch.float32, {"step_in_backward": True}, nonfinite="propagate")
    for model, opt in both:
        model.extra = nn.Linear(3, 3, device=DEVICE)
        with torch.no_grad():
            model.extra.weight.copy_(torch.eye(3, device=DEVICE)), model.extra.bias.zero_()
        loss_of(model, 0).backward()
        opt.step(), opt.zero_grad()
        opt.add_param_group({"params": list(model.extra.parameters())})
        model.last = nn.Sequential(model.last, model.extra)
        loss_of(model, 1).backward()
        if opt is both[1][1]:
            assert model.extra.weight.grad is None
        opt.step()
    assert_same(*both)


def train_on_micro_batches(divisor: float, **tail: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 3)).to(DEVICE)
    opt = oxytorch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, nonfinite="propagate", **tail)
    opt.grad_divisor = divisor
    for _ in range(3):
        *parts, last = torch.randn(3, 5, 33, device=DEVICE)
        with opt.accumulate():
            for part in parts:
                net(part).square().sum().backward()
        net(last).square().sum().backward()
        opt.step()
        opt.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("options", [{"norm_in_backward": True, "clip_norm": 0.5}, {"step_in_backward": True}])
def test_micro_batches_are_summed_and_divided(options: dict[str, Any]) -> None:
    plain = {"clip_norm": options.get("clip_norm")}
    hooked, expected = train_on_micro_batches(3.0, **options), train_on_micro_batches(3.0, **plain)
    for one, other in zip(hooked, expected, strict=True):
        assert torch.equal(one, other)


def test_a_bad_divisor_is_an_error_of_backward() -> None:
    with pytest.raises(ValueError, match="grad_divisor is 0"):
        train_on_micro_batches(0.0, step_in_backward=True)
