"""Inter-op threads, which torch takes once in a process: what comes of a wish is in the report, never an exception."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("threads of the host")

BEGIN = """
import logging, oxytorch as ox, torch
from torch import nn
def made(threads):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"level": "basic", "interop_threads": threads}
    return ox.Trainer(model, optimizer, nn.MSELoss(), config, calibrate=False)
def line(trainer):
    trainer.step((torch.ones(1, 2), torch.ones(1, 2)))
    return trainer.report()["interop_threads"]
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], str]:
    """Run a program, from a file as TorchScript wants it; what it writes to stderr."""

    def program(code: str) -> str:
        file = tmp_path / "program.py"
        file.write_text(BEGIN + code)
        done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return program


def test_the_first_wish_is_granted_and_stays(run: Callable[[str], str]) -> None:
    said = run("""
one = made(3)
assert torch.get_num_interop_threads() == 3
assert line(one).state == "on" and "3 operators" in line(one).reason, line(one)
again, other = made(3), made(2)
assert line(again).state == "on" and "already" in line(again).reason
assert line(other).state == "refused" and "once in a process" in line(other).reason and "keeps 3" in line(other).reason
one.revert()
assert torch.get_num_interop_threads() == 3
""")
    assert said.count("interop_threads stays 3") == 1
    assert said.count("2 were asked for") == 1


def test_a_wish_after_parallel_work_is_refused_in_the_report(run: Callable[[str], str]) -> None:
    run("""
def g(x: torch.Tensor) -> torch.Tensor:
    return x + 1
@torch.jit.script
def beside(x: torch.Tensor) -> torch.Tensor:
    return torch.jit.wait(torch.jit.fork(g, x))
beside(torch.ones(1))
now = torch.get_num_interop_threads()
one = made(now + 1)
assert line(one).state == "refused" and f"keeps {now}" in line(one).reason, line(one)
one.revert()
""")


def test_accelerate_takes_it_too(run: Callable[[str], str]) -> None:
    run("""
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.ones(1, 2), torch.ones(1, 2))]
plan = ox.accelerate(model, optimizer, nn.MSELoss(), batches, config={"interop_threads": 3}, strategies=[],
                     remember=False)
assert torch.get_num_interop_threads() == 3 and plan.report()["interop_threads"].state == "on"
""")
