"""Every planted fault is caught under its claim, every healthy strategy passes, and the run is left as it was."""

from __future__ import annotations

from functools import cache

import planted_faults
import pytest
import torch
from oxytorch.tune.escrow import Escrow
from oxytorch.tune.run import Run
from oxytorch.tune.verify import Ruling, Verifier
from planted_faults import FAULTS, HEALTHY, Fault

pytestmark = [
    pytest.mark.cpu_only("the referee of these is the CPU's float64"),
    pytest.mark.usefixtures("one_thread"),
]


@cache
def bench(name: str) -> tuple[Run, Escrow, Verifier]:
    run, escrow = planted_faults.workload(name, torch.device("cpu"), {})
    return run, escrow, Verifier(run, escrow)


def ruling(fault: Fault) -> Ruling:
    run, escrow, verifier = bench(fault.workload)
    run.strategies = {fault.name: fault.strategy()}
    run._made.clear()
    run.bring([fault.name])
    try:
        found = verifier.check(fault.kind)
        assert run.in_force == (fault.name,), "it is left in force"
    finally:
        run.bring([])
        escrow.restore()
        escrow.prove()
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    found = ruling(FAULTS[name])
    assert not found.held, found.reason
    assert found.reason


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_strategy_passes(name: str) -> None:
    found = ruling(HEALTHY[name])
    assert found.held, found.reason


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 30
    assert {fault.kind for fault in FAULTS.values()} == {"exact", "tolerance", "precision", "trade"}
    assert sum(fault.since > 0 for fault in FAULTS.values()) >= 10
