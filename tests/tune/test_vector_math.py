"""The functions of MKL whose kernels are chosen before torch's threads race for them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from oxytorch import _C
from oxytorch.demo import serve

pytestmark = pytest.mark.cpu_only("the functions are the CPU's")


def by_header() -> set[str]:
    """What torch hands to MKL, by the header that does."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vml.h"
    return set(re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_function_that_torch_takes_from_mkl_is_resolved() -> None:
    assert by_header() == set(_C.trainer.resolve_vector_math())


def test_the_rivals_of_the_demo_get_the_same() -> None:
    names = re.search(r'names = "([\w ]+)"', inspect.getsource(serve.prepare_torch))
    assert names is not None and set(names[1].split()) == by_header()


def test_it_is_done_at_import_below_every_mode() -> None:
    with torch.device("meta"), torch.inference_mode():
        assert "sqrt" in _C.trainer.resolve_vector_math()
