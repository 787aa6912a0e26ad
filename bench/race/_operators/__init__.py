"""The race of operators: its cases and contenders, by kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _race import Contender
from torch import Tensor

OURS, EAGER, COMPILED = "oxytorch", "torch", "compiled"
BF16_WEIGHTS = "bf16 weights"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Case:
    """What is raced: `make` gives the contenders, `scope` is entered while they run.

    `products` is the dtype of its matrix products: a processor that has none of bfloat16 takes minutes for them.
    """

    name: str
    make: Callable[[], list[Contender]]
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    products: torch.dtype = torch.float32


def step_of(calls: dict[str, Callable[..., Any]], inputs: list[Tensor], grads: list[Tensor]) -> list[Contender]:
    """Forward and backward of each."""

    def whole(call: Callable[..., Any]) -> Callable[[], object]:
        def step() -> object:
            made = call(*inputs)
            return torch.autograd.grad(made if isinstance(made, tuple) else (made,), inputs, grads)

        return step

    return [Contender(name, {"step": whole(call)}) for name, call in calls.items()]


def passes_of(forward: Callable[[str], None], backward: Callable[[str], None], names: list[str]) -> list[Contender]:
    """Forward and backward of each by its name, apart."""
    return [Contender(n, {"forward": partial(forward, n), "backward": partial(backward, n)}) for n in names]
