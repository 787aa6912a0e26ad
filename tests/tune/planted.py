"""Strategies whose effect on time and numbers is known, and a clock that makes it certain."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oxytorch import _C
from oxytorch.tune import STRATEGIES, Run, Strategy
from torch import nn

CLOCK = importlib.import_module("oxytorch.clock")
WORKLOAD = importlib.import_module("oxytorch.tune.workload")


@dataclass
class LoadCounters:
    """Seconds since a moment of their own."""

    wall: float = 0.0
    busy: float = 0.0
    waited: float = 0.0


class Clock:
    """Seconds that pass only where a step says so: a verdict by it is the same on each machine."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cost: dict[str, float] = {}  # seconds a step, by what makes it slow
        self.others = 0.0  # cores that other programs use
        self._ticks = 0
        self._looks = LoadCounters()

    def __call__(self) -> float:
        self._ticks += 1
        return self.now + 1e-9 * self._ticks

    def load(self) -> Any:
        """Who uses the processor, with a second from one look to the next."""
        looks = self._looks
        looks.wall += 1.0
        looks.busy += self.others
        looks.waited += self.others / 2
        return _C.tune.LoadSample(wall=looks.wall, own=0.0, busy=looks.busy, waited=looks.waited, cores=2)

    def pass_step(self) -> None:
        # A little jitter, the same in each run, so that no two times are equal.
        self._ticks += 1
        self.now += sum(self.cost.values()) * (1 + 0.002 * ((self._ticks * 2654435761 % 1000) / 1000 - 0.5))


def made(clock: Clock, what: str, seconds: float) -> type[Strategy]:
    """A strategy that takes the cost `what` down to `seconds` a step; numbers are untouched."""

    class Cheaper(Strategy):
        def apply(self, run: Run) -> None:
            self.before = clock.cost[what]
            clock.cost[what] = seconds

        def revert(self, run: Run) -> None:
            clock.cost[what] = self.before

    Cheaper.name = f"cheaper_{what}"
    return Cheaper


def hoarding(clock: Clock) -> type[Strategy]:
    """A faster strategy for which a step takes 8 MiB more, by a hook of the model."""

    class Hoards(Strategy):
        name = "hoards"

        def apply(self, run: Run) -> None:
            self.before, clock.cost["slow"] = clock.cost["slow"], 0.002
            self.handle = run.model.register_forward_hook(self.take)

        def take(self, *_: Any) -> None:
            torch.empty(8 << 20, dtype=torch.uint8)

        def revert(self, run: Run) -> None:
            clock.cost["slow"] = self.before
            self.handle.remove()

    return Hoards


def useless(clock: Clock, number: int, seconds: float = 0.01) -> type[Strategy]:
    """One of many that leave the cost "slow" at `seconds` a step."""
    one = made(clock, "slow", seconds)
    one.name = f"useless_{number}"
    return one


def drifting(clock: Clock) -> Any:
    """A faster strategy whose outputs drift from what they were once its `scale` is not 1."""

    class Drifts(Strategy):
        name = "drifts"
        scale = 1.0

        def apply(self, run: Run) -> None:
            self.before, clock.cost["slow"] = clock.cost["slow"], 0.002
            self.handle = run.model.register_forward_hook(lambda _m, _i, out: out * type(self).scale)

        def revert(self, run: Run) -> None:
            clock.cost["slow"] = self.before
            self.handle.remove()

    return Drifts


class Net(nn.Module):
    """A small model whose forward takes the clock's time; dropout and a buffer make it depend on state."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        object.__setattr__(self, "pass_step", clock.pass_step)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pass_step()
        self.calls += 1
        out: torch.Tensor = self.inner(x)
        return out


def batches(count: int = 3, rows: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [(torch.randn(rows, 6, generator=g), torch.randint(3, (rows,), generator=g)) for _ in range(count)]


@contextmanager
def only(*classes: type[Strategy]) -> Iterator[None]:
    """Let these be all strategies that are registered."""
    before = dict(STRATEGIES)
    STRATEGIES.clear()
    STRATEGIES.update({cls.name: cls for cls in classes})
    try:
        yield
    finally:
        STRATEGIES.clear()
        STRATEGIES.update(before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Clock]:
    """The clock of all measuring, and a folder of its own for certificates."""
    made_clock = Clock()
    monkeypatch.setattr(CLOCK, "seconds", made_clock)
    monkeypatch.setattr(CLOCK, "thread_seconds", made_clock)
    monkeypatch.setattr(WORKLOAD, "page_faults", lambda: 0)
    monkeypatch.setenv("OXYTORCH_CACHE", str(tmp_path / "cache"))
    made_clock.cost["slow"] = 0.01
    made_clock.cost["rest"] = 0.01
    _C.tune.set_load_source(made_clock.load)
    yield made_clock
    _C.tune.set_load_source(None)


Make = Callable[[], torch.optim.Optimizer]


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Every bit that training changes, and every random state."""
    state = optimizer.state_dict()
    tensors = [t.clone() for t in model.state_dict().values()]
    tensors += [t.clone() for s in state["state"].values() for t in s.values() if isinstance(t, torch.Tensor)]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [tensors, grads, torch.get_rng_state(), state["param_groups"], [m.training for m in model.modules()]]


def same(left: Any, right: Any) -> bool:
    """Equal, tensors bit for bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left.nan_to_num(7.5), right.nan_to_num(7.5))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)
