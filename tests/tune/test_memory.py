"""Tuning gives back what only it needed, the moment that it ends, and does not peak far above training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("measures resident memory of the host")

PROGRAM = r"""
import ctypes, json, re, sys
from pathlib import Path
import torch
from torch import nn
import oxytorch as ox

def now(name):
    return int(re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) / 1024

base = now("VmRSS")
torch.manual_seed(0)
width = int(sys.argv[3])
layers = [nn.Linear(256, width), nn.ReLU(), *(m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU()))]
model = nn.Sequential(*layers, nn.Linear(width, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
batches = [(torch.randn(64, 256), torch.randint(10, (64,))) for _ in range(4)]
criterion = nn.CrossEntropyLoss()

def step(batch):
    optimizer.zero_grad()
    criterion(model(batch[0]), batch[1]).backward()
    optimizer.step()

# Holes of the C library's heap come and go by more than 100 MiB from run to run of a plain loop: it is trimmed first.
def in_use():
    ctypes.CDLL(None).malloc_trim(0)
    return now("VmRSS") - base

for _ in range(6):
    for batch in batches:
        step(batch)
training = now("VmHWM") - base
before = in_use()
Path("/proc/self/clear_refs").write_text("5")
names = sys.argv[2].split(",")
options = dict(level=sys.argv[1], strategies=names, tune_seconds=2, remember=False)
plan = ox.accelerate(model, optimizer, criterion, batches, **options)
after = now("VmRSS") - base
peak = now("VmHWM") - base
for batch in batches:
    step(batch)
going = in_use()
print(json.dumps(dict(training=training, before=before, peak=peak, after=after, going=going, accepted=plan.accepted)))
"""


def measured(level: str, strategies: str, width: int) -> dict[str, float]:
    """MiB beside what the process had before it made the model."""
    command = [sys.executable, "-c", PROGRAM, level, strategies, str(width)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


BASIC = "allocator,host_pool,native_step,foreach"
ADVANCED = "allocator,host_pool,step_tail,fused,bf16_autocast"


@pytest.mark.parametrize(
    ("level", "strategies", "width"),
    [
        ("basic", BASIC, 1536),  # 8M parameters
        ("advanced", ADVANCED, 1536),
        pytest.param("advanced", ADVANCED, 2176, marks=pytest.mark.slow),  # 15M
    ],
)
def test_what_only_tuning_needed_is_given_back(level: str, strategies: str, width: int) -> None:
    found = measured(level, strategies, width)
    print(level, width, found)
    # What stays: the state, the batches, code that was loaded meanwhile; not a second copy of the state.
    assert found["after"] < found["before"] + 60, found
    assert found["going"] < found["before"] + 60, found
    # Copies of large tensors are in files, as are gradients as given and all that a step in float64 saves. Beside the
    # run itself the verifier has slices of a tensor's update in float64, and once the model; a candidate on trial
    # (foreach) has its own.
    assert found["peak"] < {"basic": 1.5, "advanced": 1.7}[level] * found["training"], found
