"""What a reversible change is: one interface for the edits of `ModelOptimizer` and for the strategies of the tuner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from .call import Call

__all__ = ["KINDS", "Change", "Kind", "Subject", "widest"]

Kind = Literal["exact", "tolerance", "precision", "trade"]
KINDS: tuple[Kind, ...] = ("exact", "tolerance", "precision", "trade")


def widest(kinds: Iterable[Kind]) -> Kind:
    """Return the kind that may do most to the numbers; "exact" of none."""
    return KINDS[max((KINDS.index(kind) for kind in kinds), default=0)]


class Subject(Protocol):
    """What a change is made to: a training run (`oxytorch.tune.run.Run`), or a model with an example.

    Attributes
    ----------
    model : torch.nn.Module
    call : Call
        The way into the model.
    device : torch.device
    """

    model: nn.Module
    call: Call
    device: torch.device

    def forward(self) -> Any:
        """Run forward on an example, under what is active; it leaves the traces that a forward leaves."""

    def uses(self, part: str) -> bool:
        """Whether a step has an operator with this in its name, such as ``"convolution"``; leaves no trace."""

    def state_of(self, param: Tensor) -> Mapping[str, Any]:
        """Return what an optimizer keeps of a parameter; empty where there is none."""


class Change:
    """One reversible change: `apply` makes it whole or not at all, `revert` undoes it.

    Attributes
    ----------
    name : str
        What reports and configurations call it.
    kind : {"exact", "tolerance", "precision", "trade"}
        What it may do to the numbers, and so how it is verified; a claim that is checked.
    cost : str
        What it costs beside time, one sentence; empty where nothing.
    inference : bool
        Whether it is for evaluation alone, without gradients.
    moved : set of str
        Results that it moves on purpose, such as ``"buffer norm.running_mean"``.
    """

    name: str = ""
    kind: Kind = "exact"
    cost: str = ""
    inference: bool = False
    moved: Set[str] = frozenset()

    def applies(self, run: Any) -> bool | str:  # noqa: ARG002
        """Return True, or why it is not for this `Subject` (False is "does not apply"). Must change nothing."""
        return True

    def apply(self, run: Any) -> None:
        """Make it active, whole or not at all: what it throws makes it a failed one, reported once."""
        raise NotImplementedError

    def revert(self, run: Any) -> None:
        """Take it back: every object, attribute and bit that `apply` touched is as before; trained values stay."""
        raise NotImplementedError
