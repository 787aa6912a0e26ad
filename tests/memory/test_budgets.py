"""Budgets from 90 % of what activations take down to the lowest peak, on the models of the memory race.

Each budget is kept, a smaller one never peaks higher, the prediction is close, and training under each plan leaves the
bits that training without one leaves. The budgets of a model are planned from one recording of its step: of two, each
has times of its own for the same blocks, and may choose others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from oxytorch.memory import MemoryPlan, Meter, fit
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench" / "race"))
from _memory_models import TASKS, made

pytestmark = [
    pytest.mark.cpu_only("only the memory of CPU tensors is planned"),
    pytest.mark.usefixtures("one_thread"),
]

EPOCHS, BATCHES = 2, 2
UNTOLD = 32 << 10
"""Bytes of what a second forward alone takes, which no recording tells: of an LSTM 16 KiB, where a step takes 1 MB."""


def varies(name: str) -> float:
    """How much steps differ by themselves: each mask of dropout gives experts other tokens."""
    return 1.01 if "experts" in name else 1.0


class Training:
    """A model with the same weights and batches each time."""

    def __init__(self, name: str) -> None:
        self.task = made(name, quick=True)
        self.batches = [self.task.draw() for _ in range(BATCHES)]
        self.optimizer = torch.optim.AdamW(self.task.net.parameters(), lr=1e-4)

    def step(self, batch: int = 0) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.task.loss(self.batches[batch])
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self, budget: int | str) -> MemoryPlan:
        return fit(self.task.net, self.step, budget, blocks=self.task.net.blocks_by_name())

    def epochs(self) -> dict[str, Tensor]:
        """All that some epochs leave: losses, gradients, parameters, buffers, random state."""
        torch.manual_seed(5)
        left: dict[str, Tensor] = {}
        for epoch in range(EPOCHS):
            for batch in range(BATCHES):
                left[f"loss {epoch}.{batch}"] = self.step(batch)
                for name, each in self.task.net.named_parameters():
                    if each.grad is not None:
                        left[f"gradient {epoch}.{batch} {name}"] = each.grad.clone()
        left |= {name: value.clone() for name, value in self.task.net.state_dict().items()}
        return left | {"next random numbers": torch.rand(4)}

    def peak(self) -> int:
        """Bytes that a step takes beyond what lives between steps."""
        self.step()
        with Meter() as meter:
            self.step()
        return meter.peak_bytes


@dataclass
class Point:
    """What a budget came to."""

    budget: int
    plan: MemoryPlan
    differing: list[str]
    peak: int
    """Of a step of the loop after that, with what lives between steps."""


@dataclass
class Curve:
    name: str
    plain_peak: int
    floor: int
    points: list[Point] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not value.equal(other[name])]


@contextmanager
def recorded_once() -> Iterator[None]:
    """Fits inside it plan from what the first of them recorded."""
    fitting = import_module("oxytorch.memory.fit")
    record, add = fitting._recorded, fitting._add_action
    recording: list[Any] = []
    added: dict[str, Exception | None] = {}

    def added_once(action: str, tape: Any, *args: Any) -> Exception | None:
        if action not in added:
            with pytest.MonkeyPatch.context() as first:
                first.setattr(fitting, "_recorded", record)
                added[action] = add(action, tape, *args)
        return added[action]

    def recorded(*args: Any) -> Any:
        if not recording:
            recording.append(record(*args))
        return recording[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "_recorded", recorded)
        patch.setattr(fitting, "_add_action", added_once)
        yield


@pytest.fixture(scope="module", params=list(TASKS))
def curve(request: pytest.FixtureRequest, one_thread: None) -> Curve:
    with recorded_once():
        return planned(request.param)


def planned(name: str) -> Curve:
    plain = Training(name)
    left, activations = plain.epochs(), plain.peak()
    with Training(name).fit(1 << 40) as loose:
        found = Curve(name, loose.plain_peak, loose.floor)
    between = found.plain_peak - activations
    least = found.floor + found.floor // 500 + 2 * UNTOLD  # the lowest peak is looked for to a part of it
    budgets = [between + activations * tenths // 10 for tenths in range(9, 0, -1)]
    for budget in [*(each for each in budgets if each > least), least]:
        training = Training(name)
        try:
            plan = training.fit(budget)
        except torch.OutOfMemoryError as error:
            found.refused.append(f"budget {budget}, with the lowest peak predicted as {found.floor}: {error}")
            continue
        with plan:
            changed = differing(training.epochs(), left)
            found.points.append(Point(budget, plan, changed, between + training.peak()))
    return found


def told(curve: Curve, wrong: Callable[[Point], bool]) -> list[str]:
    return [f"budget {point.budget}:\n{point.plan.table()}" for point in curve.points if wrong(point)]


def test_every_budget_is_kept(curve: Curve) -> None:
    assert curve.floor < 0.9 * curve.plain_peak and len(curve.points) > 1
    assert not curve.refused
    assert not told(curve, lambda point: point.plan.measured_peak > point.budget)
    assert not told(curve, lambda point: point.peak > varies(curve.name) * point.budget)


def test_a_smaller_budget_never_peaks_higher(curve: Curve) -> None:
    peaks = [curve.plain_peak, *(point.plan.measured_peak for point in curve.points)]
    assert all(now <= varies(curve.name) * before for before, now in pairwise(peaks))


def test_the_predicted_peak_is_within_1_percent(curve: Curve) -> None:
    def is_off(point: Point) -> bool:
        allowed = 0.01 * point.plan.measured_peak + UNTOLD
        return abs(point.plan.predicted_peak - point.plan.measured_peak) > allowed

    assert not told(curve, is_off)


def test_training_leaves_the_same_bits_in_the_second_epoch_too(curve: Curve) -> None:
    assert not {point.budget: point.differing for point in curve.points if point.differing}
    assert all(point.plan.same_bits for point in curve.points)
