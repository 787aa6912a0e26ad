"""What tests of operators share: roundings of dtypes, a number of threads or a kernel for a while, counted graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oxytorch import _C

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def native(name: str, *, everywhere: bool = False) -> Iterator[None]:
    """The native operator of this name; the test is skipped on a processor without, unless it is `everywhere`."""
    operators = _C.tune.NativeOperators()
    (report,) = operators.install([name])
    assert report.installed or not everywhere, report.reason
    if not report.installed:
        pytest.skip(report.reason)
    try:
        yield
    finally:
        operators.uninstall()


def compiled_for_any_size(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """`function`, compiled as a whole, and a list of the graphs that this takes."""
    torch._dynamo.reset()
    graphs = []

    def counted(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    return torch.compile(function, backend=counted, fullgraph=True, dynamic=True), graphs
