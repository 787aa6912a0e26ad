"""Every operator by narrower instruction sets, in one process for each: a process keeps the set that it began with.

A module of this folder says in `NARROWER` which of its tests run there too (as for pytest's ``-k``), and in `bits()`
makes tensors that have the same bits by every set.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oxytorch import _C
from torch import Tensor

HERE = Path(__file__).parent
MODULES = sorted(path.stem for path in HERE.glob("test_*.py") if path != Path(__file__))
PROGRAM = """
import importlib, sys, pytest, torch
here, modules, isa, to = sys.argv[1], sys.argv[2].split(","), sys.argv[3], sys.argv[4]
sys.path.insert(0, here.rpartition("/")[0])
from oxytorch import _C
assert _C.base.active_isa() == isa
made = {}
for name in modules:
    module = importlib.import_module(f"ops.{name}")
    if hasattr(module, "bits"):
        made[name] = module.bits()
    chosen = getattr(module, "NARROWER", {}).get(isa)
    if chosen and pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"{here}/{name}.py", "-k", chosen]):
        sys.exit(f"{name} failed")
torch.save(made, to)
"""


def bits_here() -> dict[str, list[Tensor]]:
    modules = {name: importlib.import_module(f".{name}", __package__) for name in MODULES}
    return {name: module.bits() for name, module in modules.items() if hasattr(module, "bits")}


@pytest.mark.cpu_only("the kernels are the CPU's")
@pytest.mark.parametrize("isa", [isa for isa in ("scalar", "avx2") if isa in _C.base.supported_isas()])
def test_narrower_instruction_sets(isa: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(HERE), ",".join(MODULES), isa, str(tmp_path / "bits")]
    variables = {**os.environ, "OXYTORCH_ISA": isa}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    here, there = bits_here(), torch.load(tmp_path / "bits")
    assert here.keys() == there.keys() and len(here) >= 5
    for name, tensors in here.items():
        assert all(a.equal(b) for a, b in zip(tensors, there[name], strict=True)), name
