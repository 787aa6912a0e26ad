"""The manager on the device that OXYTORCH_DEVICE names (cpu unless set): the verdict stays there; reactions follow.

make test runs this file on fake devices too.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import oxytorch as ox
import pytest
import torch
import torch_device
from oxytorch.optim import NumericalStabilityManager
from torch import Tensor, nn

DEVICE = torch_device.chosen()
ON_HOST = DEVICE.type == "cpu"


def train(policy: str, bad: dict[int, float], steps: int = 60, **options: Any) -> tuple[Any, list[Tensor]]:
    """Steps with gradients and losses of ones; ``bad`` names factors of single steps."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(7, 5, generator=generator).to(DEVICE))
    guard = NumericalStabilityManager(ox.optim.AdamW([p], lr=1e-2, ema_decay=0.9), policy, every=10, **options)
    seen = []
    for i in range(steps):
        factor = bad.get(i, 1.0)
        p.grad = torch.full((7, 5), factor, device=DEVICE)
        guard.step(torch.tensor(factor, device=DEVICE))
        seen.append(p.detach().cpu().clone())
    return guard, seen


@pytest.mark.parametrize("factor", [100.0, math.nan])
def test_a_spike_is_left_out_by_the_device_in_its_own_step(factor: float) -> None:
    guard, seen = train("skip", {45: factor})
    assert torch.equal(seen[45], seen[44]) and not torch.equal(seen[46], seen[45])
    assert {event.step for event in guard.events} == {46}
    assert len(guard.events) == 2  # loss and norm


def test_backoff_sets_in_when_the_verdict_has_arrived() -> None:
    guard, seen = train("backoff", {45: 100.0}, backoff_factor=0.25, backoff_steps=3)
    moved = [float((b - a).norm()) for a, b in pairwise(seen[40:])]
    first = 5 if ON_HOST else 6
    assert moved[4] == 0
    assert moved[first] < 0.5 * moved[3] and moved[first + 4] > 0.8 * moved[3]
    assert guard.optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("late", [0, 1])
def test_a_rollback_restores_the_snapshot_before_the_spike(late: int) -> None:
    # Step 50 or 51 spikes; a snapshot is taken after step 50 where the host knows of nothing.
    guard, seen = train("rollback", {49 + late: 100.0}, steps=51 + late)
    place = 50 + late
    target = 40 if late == 0 else 50
    end = seen[place - 1] if ON_HOST else seen[place]
    assert torch.equal(end, seen[target - 1])
    assert {(event.step, event.action) for event in guard.events} == {(place, f"rolled back to step {target}")}


def test_a_spike_of_the_step_that_was_undone_does_not_roll_back_again() -> None:
    guard, _ = train("rollback", {45: 100.0, 46: 100.0}, steps=56)
    actions = [event.action for event in guard.events]
    assert guard._rollbacks == (2 if ON_HOST else 1)
    assert ("undone by the rollback" in actions) == (not ON_HOST)


def test_the_step_path_copies_one_log_to_the_host_and_reads_nothing() -> None:
    if DEVICE.type == "cpu":
        pytest.skip("test_stability.py counts the reads on CPU")
    p = nn.Parameter(torch.ones(5, device=DEVICE))
    guard = NumericalStabilityManager(ox.optim.SGD([p], lr=0.1), "rollback", every=1000)
    loss = torch.ones((), device=DEVICE)
    p.grad = torch.ones(5, device=DEVICE)
    guard.step(loss)
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                guard.step(loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    before = torch.ops.oxytorch_device.host_reads()
    for _ in range(5):
        guard.step(loss)
    assert torch.ops.oxytorch_device.host_reads() - before == 5
