"""Gradients that a step drops anyway, out of memory while things are tried."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..model.graph import has_bytes
from ..model.parking import park, rest
from ..optim.slot import clears_as_torch

if TYPE_CHECKING:
    from .run import Run

__all__ = ["gradients_away"]


@contextmanager
def gradients_away(run: Run) -> Iterator[None]:
    """Inside, gradients that each step drops before its backward are in files and take no memory; then they are back.

    A step of the user's own may add to them, and what somebody else refers to would not be let go: those stay.
    """
    plain = all(clears_as_torch(slot.original) for slot in run.slots)
    params = {id(p): p for p in run.params}.values()
    going = [p for p in params if run.own_step is None and plain and _may_go(p)]
    held = [(p, park(p.grad)) for p in going if p.grad is not None]
    try:
        for p, _ in held:
            p.grad = None
        yield
    finally:
        for p, grad in held:
            p.grad = grad.clone()
            rest(grad)


def _may_go(param: Tensor) -> bool:
    """Whether a parameter has a gradient on the host that is dense and nobody else's."""
    grad = param.grad
    if grad is None or type(grad) is not Tensor or not has_bytes(grad) or grad.device.type != "cpu":
        return False
    if grad.requires_grad or grad.__dict__ or grad._is_view():
        return False
    del grad
    alone = torch.zeros(1, requires_grad=True)
    alone.grad = torch.zeros(1)
    return _references(param) == _references(alone)


def _references(param: Tensor) -> tuple[int, int, int]:
    """How many refer to a gradient: in C++, to its memory, in Python."""
    grad = param.grad
    assert grad is not None
    use_count = grad._use_count()  # type: ignore[attr-defined]
    return use_count, torch._C._storage_Use_Count(grad.untyped_storage()._cdata), sys.getrefcount(grad)
