"""Steps that nobody watches: no range for a profiler is opened, and all that torch promises holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch.optim.slot import OptimizerSlot
from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def ours(params: list[Tensor]) -> torch.optim.Optimizer:
    return ox.optim.AdamW(params, lr=0.1)


def replaced(params: list[Tensor]) -> torch.optim.Optimizer:
    own = torch.optim.AdamW(params, lr=0.1)
    slot = OptimizerSlot(own)
    slot.replace_optimizer(ox.optim.replace(own))
    return own


MAKERS = [ours, replaced]
Maker = Callable[[list[Tensor]], torch.optim.Optimizer]


def params() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in ((3, 2), (5,), ())]


def train(own: torch.optim.Optimizer, given: list[Tensor]) -> None:
    own.zero_grad()
    sum(p.square().sum() for p in given).backward()  # type: ignore[union-attr]
    own.step()


@pytest.mark.parametrize("make", MAKERS)
def test_no_range_is_opened_where_no_profiler_runs(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    given, expected = params(), params()
    torchs = torch.optim.AdamW(expected, lr=0.1)
    for _ in range(3):
        train(torchs, expected)
    own = make(given)
    train(own, given)

    def opened(*_: Any) -> None:
        raise AssertionError("a range was opened")

    monkeypatch.setattr(profiler.record_function, "__enter__", opened)
    train(own, given)
    seen: list[str] = []
    own.register_step_pre_hook(lambda *_: seen.append("before"))
    own.register_step_post_hook(lambda *_: seen.append("after"))
    train(own, given)
    assert seen == ["before", "after"]
    for mine, other in zip(given, expected, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("make", MAKERS)
def test_a_profiler_shows_steps_and_zeroing_as_torchs(make: Maker) -> None:
    given = params()
    own = make(given)
    train(own, given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(own, given)
    names = [event.name for event in profile.events() or []]
    name = type(own).__name__
    assert names.count(f"Optimizer.step#{name}.step") == 1
    assert names.count(f"Optimizer.zero_grad#{name}.zero_grad") == 1


@pytest.mark.parametrize("make", MAKERS)
def test_hooks_fire_once_each_and_may_change_the_arguments(make: Maker) -> None:
    given = params()
    own = make(given)
    train(own, given)
    seen: list[str] = []
    closures: list[int] = []

    def closure() -> Tensor:
        closures.append(1)
        return torch.zeros(())

    def before(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        assert optimizer is own
        seen.append("before")
        return args, {**kwargs, "closure": closure}

    handles = [
        own.register_step_pre_hook(before),
        own.register_step_post_hook(lambda *_: seen.append("after")),
        register_optimizer_step_pre_hook(lambda *_: seen.append("before any")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after any")),
    ]
    train(own, given)
    assert seen == ["before any", "before", "after", "after any"]
    assert closures == [1]
    for handle in handles:
        handle.remove()
        seen.clear()
        train(own, given)
        assert len(seen) == 3 - handles.index(handle)


@pytest.mark.parametrize("make", MAKERS)
def test_a_hook_that_returns_something_else_stops_the_step(make: Maker) -> None:
    given = params()
    own = make(given)
    train(own, given)
    before = [p.detach().clone() for p in given]
    own.register_step_pre_hook(lambda *_: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(RuntimeError, match="hook before step returned 3"):
        own.step()
    assert all(now.equal(then) for now, then in zip(given, before, strict=True))


@pytest.mark.parametrize("make", MAKERS)
def test_zero_grad_is_torchs(make: Maker) -> None:
    given = params()
    own = make(given)
    given[1].requires_grad_(False)
    given[0].square().sum().backward()  # type: ignore[no-untyped-call]
    kept = given[0].grad
    own.zero_grad(set_to_none=False)
    assert given[0].grad is kept and kept is not None and not kept.any()
    assert given[1].grad is None and given[2].grad is None
    own.zero_grad()
    assert [p.grad for p in given] == [None] * 3
    own.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    added = own.param_groups[1]["params"][0]
    added.grad = torch.ones(2).to_sparse()
    own.zero_grad()
    assert added.grad is None


class Watched(nn.Parameter):
    """A parameter of a class of the user's, which sees what happens to its gradient."""

    assigned: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.grad.__set__:  # type: ignore[attr-defined]
            cls.assigned.append(args[1])
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("make", MAKERS)
def test_parameters_of_other_classes_are_asked(make: Maker) -> None:
    given: list[Tensor] = [*params(), Watched(torch.ones(2))]
    own = make(given)
    given[3].grad = torch.ones(2)
    given[0].grad = torch.ones(3, 2)
    Watched.assigned.clear()
    own.zero_grad()
    assert Watched.assigned == [None]
    assert given[0].grad is None and given[3].grad is None


def test_who_has_a_zero_grad_of_his_own_keeps_it() -> None:
    given = params()
    own = torch.optim.AdamW(given, lr=0.1)
    calls: list[bool] = []
    mine = own.zero_grad = lambda set_to_none=True: calls.append(set_to_none)  # type: ignore[method-assign]
    slot = OptimizerSlot(own)
    slot.replace_optimizer(ox.optim.replace(own))
    assert own.zero_grad is mine
    slot.replace_optimizer(None)
    assert own.zero_grad is mine

    class Counting(torch.optim.AdamW):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append(set_to_none)
            super().zero_grad(set_to_none)

    other = Counting(given, lr=0.1)
    slot = OptimizerSlot(other)
    slot.replace_step(lambda closure: None)
    given[0].grad = torch.ones(3, 2)
    other.zero_grad()
    assert calls == [True]
    assert given[0].grad is None
    slot.replace_step(None)
    assert "zero_grad" not in vars(other)


def test_it_goes_with_what_stood_in() -> None:
    own = torch.optim.AdamW(params(), lr=0.1)
    before = own.zero_grad
    slot = OptimizerSlot(own)
    slot.replace_step(lambda closure: None)
    assert "zero_grad" in vars(own)
    slot.replace_step(None)
    assert "zero_grad" not in vars(own)
    assert own.zero_grad == before
    slot.replace_step(lambda closure: None)
    later = own.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    slot.replace_step(None)
    assert own.zero_grad is later
