"""One recorded step as the rules read it, and the register of rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..finding import Finding
from ..recorder import Op, OperatorRecorder

POINTWISE = {
    "mul", "mul_", "div", "div_", "add", "add_", "sub", "masked_fill", "masked_fill_", "where", "native_dropout",
    "bernoulli_", "_to_copy", "clone", "expand", "neg", "maximum", "copy_", "empty_like", "tanh", "unsqueeze",
}  # fmt: skip
DROPOUTS = {"native_dropout", "bernoulli_"}
MIB = 1 << 20


@dataclass
class Step:
    """What the rules read: a model, and what was seen of one step of it."""

    model: nn.Module
    recorder: OperatorRecorder
    seconds: float
    has_backward: bool
    inference: OperatorRecorder | None = None
    saved: dict[str | None, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    without_grad: set[str] = field(default_factory=set)
    sparse: set[str] = field(default_factory=set)
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    bias_ratio: dict[str, float] = field(default_factory=dict)

    def module(self, name: str | None) -> nn.Module | None:
        """The module of a qualified name; None outside."""
        if name is None:
            return None
        try:
            return self.model.get_submodule(name)
        except AttributeError:
            return None

    def parents(self, op: Op) -> list[Op]:
        """Operators that made the inputs."""
        return [self.recorder.ops[index] for index in op.parents]

    def up(self, op: Op, wanted: Callable[[Op], bool], through: Iterable[str]) -> Op | None:
        """Nearest ancestor that is wanted, over operators of the names in `through`."""
        return _nearest(op, self.parents, wanted, through)

    def down(self, op: Op, wanted: Callable[[Op], bool], through: Iterable[str]) -> Op | None:
        """Nearest descendant that is wanted."""
        return _nearest(op, lambda found: [self.recorder.ops[index] for index in found.children], wanted, through)

    def share(self, ops: Iterable[Op]) -> float:
        """Share of the operators' time, with the backward of these."""
        return self.recorder.share(list(ops))


def _nearest(
    op: Op, beside: Callable[[Op], list[Op]], wanted: Callable[[Op], bool], through: Iterable[str]
) -> Op | None:
    """Nearest forward operator that is wanted, from each to those beside it, through operators of some names."""
    waiting, seen = beside(op), {op.index}
    while waiting:
        found = waiting.pop(0)
        if found.index in seen or found.backward:
            continue
        seen.add(found.index)
        if wanted(found):
            return found
        if found.name in through:
            waiting += beside(found)
    return None


Rule = Callable[[Step], Iterator[Finding]]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Register a rule under its function's name."""
    RULES[function.__name__] = function
    return function


def places(ops: Iterable[Op]) -> tuple[str, ...]:
    """Qualified names of the modules of operators, each once, in order."""
    return tuple(dict.fromkeys(op.module if op.module is not None else "(outside the model)" for op in ops))


def severity(share: float) -> str:
    """How severe a share of the step's time is."""
    return "high" if share >= 0.2 else "medium" if share >= 0.05 else "low"


def fastest(run: Callable[[], Any], device: str = "cpu") -> float:
    """Least seconds of some runs after a first one."""

    def once() -> float:
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    first = once()
    return min(once() for _ in range(min(20, max(3, int(0.02 / max(first, 1e-6))))))
