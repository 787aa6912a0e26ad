"""What tests of operators share: roundings of the dtypes, a number of threads for a while, other instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def results_by_isa(module: str, tensors: str, sets: Sequence[str], folder: Path) -> list[list[Tensor]]:
    """The tensors that an expression gives in a module of tests/ops, in a process for each instruction set."""
    code = f"""
import sys, torch
sys.path.insert(0, sys.argv[1])
from ops.{module} import *
torch.save({tensors}, sys.argv[2])
"""
    results = []
    for isa in sets:
        command = [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(folder / isa)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OXYTORCH_ISA": isa}, check=False
        )
        if isa == "avx512" and done.returncode:
            pytest.skip("this processor has no AVX-512")
        assert done.returncode == 0, done.stderr[-2000:]
        results.append(torch.load(folder / isa))
    return results
