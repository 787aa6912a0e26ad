"""Whether two sources of batches give the same ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_leaves

from ..data.batches import stop_drawing, visit
from ..model.graph import digest, value_digest
from .record import rng_digest

if TYPE_CHECKING:
    from .run import Run

__all__ = ["batches_fault"]

_COMPARED = 64  # batches of an epoch


def batches_fault(run: Run, mine: Any, usual: Any, step_draws: Callable[[], bool] | None = None) -> str:
    """Say what is other in the batches that `mine` gives, `usual` being the source as given; empty where nothing is.

    `step_draws`: whether a step draws random numbers, asked where drawing batches leaves the generators in another
    state. None where that does not matter.
    """
    if _length(mine) != _length(usual):
        return f"an epoch has {_length(mine)} batches, {_length(usual)} as given"
    found, after = [], []
    for source in (usual, mine):
        with visit(usual, run.params):
            batches = iter(source)
            found.append([_digest_of(batch) for batch in islice(batches, _COMPARED)])
            after.append(rng_digest(run))
            stop_drawing(batches)
    if found[0] != found[1]:
        at = next((i for i, (a, b) in enumerate(zip(*found, strict=False)) if a != b), min(map(len, found)))
        return f"batch {at + 1} of an epoch is another one"
    if step_draws is not None and after[0] != after[1] and step_draws():
        return "drawing batches leaves the random generators, of which a step draws, in another state"
    return ""


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:
        return None


def _digest_of(batch: Any) -> str:
    return digest(value_digest(leaf).encode() for leaf in tree_leaves(batch))
