"""The functions of MKL whose kernels are chosen before torch's threads race for them."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oxytorch import _C
from oxytorch.bench.turns import serve

pytestmark = pytest.mark.cpu_only("the functions are the CPU's")


def by_header() -> set[str]:
    """What torch hands to MKL, by the header that does."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vml.h"
    return set(re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_function_that_torch_takes_from_mkl_is_resolved() -> None:
    wanted = {f"{name}.{dtype}" for name in by_header() for dtype in ("float32", "float64")}
    assert wanted == set(_C.trainer.resolve_vector_math())


def test_the_rivals_of_the_demo_get_the_same() -> None:
    names = re.search(r'names = "([\w ]+)"', inspect.getsource(serve.prepare_torch))
    assert names is not None and set(names[1].split()) == by_header()


def test_no_mode_of_the_caller_sees_it() -> None:
    # A process of its own, since it happens once in each: at the import.
    program = "import torch; torch.set_default_device('meta')\nwith torch.inference_mode():\n import oxytorch\n"
    program += "print(len(oxytorch._C.trainer.resolve_vector_math()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == [str(2 * len(by_header()))], done.stderr
