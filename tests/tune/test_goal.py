"""The goal memory, and the budget of `accelerate`: a step takes less, as far as it may be slower, and the same bits."""

from __future__ import annotations

import re
from typing import Any

import oxytorch as ox
import pytest
import torch
import torch_device
from deep_model import Deep, batch
from oxytorch.memory import Meter
from oxytorch.model.snapshot import Snapshot
from oxytorch.tune.workload import RunWorkload
from planted import only
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = torch_device.chosen()
CRITERION = nn.CrossEntropyLoss()


def accelerated(model: nn.Module, **options: Any) -> tuple[ox.tune.Plan, Any]:
    optimizer = torch.optim.SGD(model.to(DEVICE).parameters(), lr=0.01)
    inputs, targets = (t.to(DEVICE) for t in batch())
    settled = {"remember": False, "tune_seconds": 1.0, "progress": False, "level": "basic", **options}
    plan = ox.accelerate(model, optimizer, CRITERION, [(inputs, targets)], **settled)

    def step() -> Tensor:
        if options.get("loop") == "plan":
            return plan.step((inputs, targets))
        optimizer.zero_grad()
        loss = CRITERION(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return plan, step


def peak(step: Any) -> int:
    """The most that a step takes beyond what lives between steps."""
    with Meter(device=DEVICE):  # sees gradients that the next step replaces
        step()
        with Meter(device=DEVICE) as meter:
            step()
        return meter.peak_bytes


def test_a_step_takes_the_least_that_time_allows() -> None:
    ends, peaks = [], []
    for options in ({}, {"goal": "memory", "max_slowdown": 50.0}):
        model = Deep(plain=True)
        with only():
            plan, step = accelerated(model, **options)
        peaks.append(peak(step))
        for _ in range(3):
            step()
        ends.append([p.detach().clone() for p in model.parameters()])
        if options:
            assert "That is the least where a step may take 50 times as long." in plan.explain()
            given, now = plan.peak_bytes or (0, 0)
            assert given - now == peaks[0] - peaks[1], "the certificate says what the loop takes"
            assert f"{ox.base.format_size(now)} at the most" in plan.explain()
            plan.revert()
            assert peak(step) == peaks[0]
    assert peaks[1] < 0.5 * peaks[0]
    assert all(a.equal(b) for a, b in zip(*ends, strict=True)), "level basic, and the same bits"


def test_what_takes_less_may_be_slower() -> None:
    with only(*(ox.tune.STRATEGIES[name] for name in ("split_2", "split_4"))):
        plan, step = accelerated(Deep(plain=True), goal="memory", level="advanced", loop="plan", max_slowdown=50.0)
    assert "split_4" in plan.accepted
    assert "of memory instead of" in {e.strategy: e.reason for e in plan.certificate.entries}["split_4"]
    assert all(bool(step().isfinite()) for _ in range(120)), "the watch does not take back what was to be slower"
    assert "split_4" in plan.accepted
    plan.revert()


def test_memory_is_a_budget() -> None:
    model = Deep(plain=True)
    with only():
        plan, _ = accelerated(model, memory="1GiB")
        assert "of the budget of 1.00 GiB as it is" in plan.explain()
        plan.revert()
        given = (plan.peak_bytes or (0, 0))[0]
        plan, _ = accelerated(model, memory=given * 2 // 3)
    assert (plan.peak_bytes or (0, 1 << 60))[1] <= given * 2 // 3
    plan.revert()
    with only(), pytest.raises(torch.OutOfMemoryError, match="the lowest peak of tensors that was reached is"):
        accelerated(model, memory=1000)


def test_memory_that_nobody_sees_is_not_known() -> None:
    class Pool(ox.tune.Strategy):
        """A graph of a device takes its memory from a pool of its own."""

        name, unseen_memory = "pool", True

        def apply(self, run: ox.tune.Run) -> None:
            pass

        def revert(self, run: ox.tune.Run) -> None:
            pass

    model = Deep(plain=True).to(DEVICE)
    inputs, targets = (t.to(DEVICE) for t in batch())
    with only(Pool):
        run = ox.tune.Run(model, torch.optim.SGD(model.parameters(), lr=0.01), CRITERION, [(inputs, targets)])
        workload = RunWorkload(run, Snapshot.of(model))
        assert (workload.step_bytes() or 0) > sum(p.nbytes for p in model.parameters())
        run.set_active(["pool"])
        assert workload.step_bytes() is None
        run.set_active([])


@pytest.mark.cpu_only("what a process has in memory is of the host")
def test_it_looks_at_what_allocators_keep() -> None:
    class KeepsLess(ox.tune.Strategy):
        """An allocator that leaves 64 MiB less in memory, of which no tensor is."""

        name, group = "keeps_less", "host_pool"
        max_speedup = 1.0  # writing the hoard again makes the step after it slower
        hoard = bytearray(b"\1") * (64 << 20)

        def apply(self, run: ox.tune.Run) -> None:
            KeepsLess.hoard = bytearray()

        def revert(self, run: ox.tune.Run) -> None:
            KeepsLess.hoard = bytearray(b"\1") * (64 << 20)

    with only(KeepsLess):
        plan, _ = accelerated(Deep(plain=True), goal="memory", max_slowdown=50.0)
    assert plan.accepted == ("keeps_less",) and not KeepsLess.hoard
    assert re.search(r"the process has [\d.]+ [MG]iB in memory instead of [\d.]+ [MG]iB", " ".join(str(plan).split()))
    plan.revert()
    assert KeepsLess.hoard


def test_the_certificate_says_what_tensors_took_while_tuning() -> None:
    class Greedy(ox.tune.Strategy):
        name, bytes = "greedy", 0

        def applies(self, run: ox.tune.Run) -> str:
            return f"{torch.ones(self.bytes, dtype=torch.uint8, device=DEVICE).numel()} bytes were taken for a while"

    peaks = []
    model = Deep(plain=True)
    held = sum(p.nbytes for p in model.parameters())
    for Greedy.bytes in (0, 64 << 20):
        with only(Greedy):
            plan, _ = accelerated(model)
        peaks.append(plan.certificate.tuning_peak_bytes or 0)
        assert f"while tuning they took {ox.base.format_size(peaks[-1])}" in " ".join(str(plan).split())
    assert (plan.peak_bytes or (1 << 60,))[0] <= peaks[0] < 64 << 20
    assert peaks[1] >= held + (64 << 20)


def test_what_cannot_be_meant() -> None:
    for options, error, words in (
        ({"goal": "less"}, ValueError, "goal"),
        ({"goal": "memory", "max_slowdown": 0.5}, ValueError, "max_slowdown"),
        ({"max_slowdown": 2.0}, ValueError, "the goal is speed"),
        ({"goal": "memory", "max_growth": 2.0}, ValueError, "nothing may take more than as given"),
        ({"max_growth": 0.9}, ValueError, "max_growth"),
        ({"memory": "much"}, ValueError, "gradient_checkpointing"),
        ({"goal": "memory", "config": {"compile": "default"}}, ValueError, "a compiled model calls none of its blocks"),
    ):
        with pytest.raises(error, match=words):
            accelerated(Deep(plain=True), **options)
