"""Every planted fault is caught under its claim, every healthy strategy passes, and the run is left as it was."""

from __future__ import annotations

from functools import cache

import planted_faults
import pytest
import torch
from oxytorch.tune.verify import Ruling, Verifier
from planted_faults import FAULTS, HEALTHY, LARGE, Fault, workload

from .workloads import bfloat16_lstm

pytestmark = [
    pytest.mark.cpu_only("the verifier of these is the CPU's float64"),
    pytest.mark.usefixtures("one_thread"),
]


@cache
def verifier(name: str) -> Verifier:
    return Verifier(*workload(name, torch.device("cpu"), {}))


def ruling(fault: Fault) -> Ruling:
    return planted_faults.ruling(verifier(fault.workload), fault.strategy(), fault.kind)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    found = ruling(FAULTS[name])
    assert not found.held, found.reason
    assert found.reason


@pytest.mark.parametrize("name", [name for name in HEALTHY if name not in LARGE])  # those: bench/tune/planted_faults.py
def test_a_healthy_strategy_passes(name: str) -> None:
    if name == "bfloat16_autocast_on_lstm_clipped" and not bfloat16_lstm():
        pytest.skip("torch computes no LSTM in bfloat16 on this CPU")
    found = ruling(HEALTHY[name])
    assert found.held, found.reason


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 110
    assert sum(fault.acts is not None for fault in FAULTS.values()) >= 40
    assert (
        sum(fault.workload not in ("mlp", "conv", "gpt", "scaled", "overflowing") for fault in HEALTHY.values()) >= 40
    )
    assert {fault.kind for fault in FAULTS.values()} == {"exact", "tolerance", "precision", "trade"}
    assert sum(fault.since > 0 for fault in FAULTS.values()) >= 10
