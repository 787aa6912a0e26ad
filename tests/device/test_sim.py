"""The torch device over `sim`, and the tests of other rooms that run on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# No latency: what is tested is the order of things, and each operator makes several copies.
ENVIRONMENT = {"OXYTORCH_DEVICE": "sim", "OXYTORCH_SIM": "latency_us=0,memory=1GiB"}

FACTS = """
import torch
import torch_device

device = torch_device.load()
calls = torch.ops.oxytorch_device
before = calls.allocated_bytes()
here = torch.randn(3, 4, device=device)
assert calls.allocated_bytes() >= before + 48, "memory comes from the backend"
assert here.device == torch.device("sim", 0)

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)
model(here).sum().backward()
assert all(p.grad.device == device for p in model.parameters())

# Operators agree with the CPU, views and strides included.
there = here.cpu()
for run in (
    lambda t: t.t().contiguous(),
    lambda t: t[:, 1:3].mul(2).sum(0),
    lambda t: t.clone().view(2, 6).add_(1),
    lambda t: torch.stack([t, t.neg()]).amax((0, 2)),
    lambda t: t.clone().t().copy_(torch.arange(12.0, device=t.device).view(4, 3)),
    lambda t: t.clone().index_copy_(0, torch.tensor([2], device=t.device), torch.ones(1, 4, device=t.device)),
    lambda t: torch.view_as_real(torch.complex(t, t).conj().resolve_conj()),
):
    assert torch.equal(run(here).cpu(), run(there))
part = here.clone()
part[1:, ::2] = 0  # a view that is not dense: its neighbours stay
assert torch.equal(part.cpu()[:, 1::2], there[:, 1::2]) and not part.cpu()[1:, ::2].any()

# What the host reads is counted; what operators copy is not.
reads = torch_device.host_reads()
here.matmul(here.t()).relu_()
assert torch_device.host_reads() == reads
here[0, 0].item()
here.cpu()
assert torch_device.host_reads() == reads + 2

try:
    here + there
except RuntimeError as refused:
    assert "at least two" in str(refused), refused
else:
    raise AssertionError("an operand on the CPU was let through")

del here, part, model
assert calls.allocated_bytes() == before, "memory goes back to the backend"
"""


def test_the_device_is_one_of_torch() -> None:
    path = os.pathsep.join([str(ROOT / "tests" / "device"), *sys.path])
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", FACTS], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tests", ["tests/optim/test_device.py", "tests/optim/test_stability_device.py"])
def test_runs_on_sim(tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-q"]
    done = subprocess.run(
        [*command, "--import-mode=importlib", "--tb=short", tests],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " failed" not in done.stdout
