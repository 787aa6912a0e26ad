"""Example batches taken from whatever a run draws its batches from, and given back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..optim.generators import rng_state, set_rng_state

__all__ = ["can_visit", "stop_drawing", "take", "visit"]


def take(batches: Iterable[Any], count: int, params: Sequence[Tensor]) -> tuple[list[Any], Iterable[Any]]:
    """Return copies of the first batches, and what the run is to draw from now.

    Of a sequence or of what can be iterated anew (a DataLoader), that is the same object, its position, generators and
    workers as before; of an iterator, one that gives the taken batches once more.

    Raises
    ------
    TypeError
        For what cannot be iterated, or a tensor, which is one batch.
    ValueError
        Where there is no batch.
    """
    if isinstance(batches, Tensor) or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError(f"batches is a {type(batches).__name__}, expected a list of batches, a loader or an iterator.")
    data: Iterable[Any] = batches
    if isinstance(batches, Sequence):
        taken = list(batches[:count])
    elif isinstance(batches, Iterator):
        taken = list(islice(batches, count))
        data = chain(taken, batches)
    else:
        taken = _peek(batches, count, params)
    if not taken:
        raise ValueError("there is no batch to try a step on: batches is empty.")
    return [tree_map(_copy, batch) for batch in taken], data


def _copy(leaf: Any) -> Any:
    # A step that changes its batch in place must not change the user's.
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def can_visit(data: Any) -> bool:
    """Whether it is a loader: iterated anew each time, by more than a look into a list."""
    return hasattr(data, "__iter__") and not isinstance(data, Iterator | Sequence | Tensor)


@contextmanager
def visit(loader: Any, params: Sequence[Tensor]) -> Iterator[None]:
    """Iterate a loader anew inside; afterwards its position, generators and workers are as before."""
    held = rng_state(params)
    generators = [(generator, generator.get_state()) for generator in _generators(loader)]
    resumable = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    position = loader.state_dict() if resumable else None
    attributes = getattr(loader, "__dict__", {})
    workers = attributes.get("_iterator")  # persistent ones, in the middle of an epoch perhaps
    if workers is not None:
        attributes["_iterator"] = None
    try:
        yield
    finally:
        if "_iterator" in attributes:
            attributes["_iterator"] = workers
        if resumable:
            loader.load_state_dict(position)
        for generator, state in generators:
            generator.set_state(state)
        set_rng_state(held)


def stop_drawing(batches: Iterator[Any]) -> None:
    """End an iteration that is not drawn to its end, and what draws for it."""
    close = getattr(batches, "close", None)
    if callable(close):
        close()


def _peek(loader: Any, count: int, params: Sequence[Tensor]) -> list[Any]:
    """First batches of a new iteration, of which no trace stays."""
    with visit(loader, params):
        return list(islice(iter(loader), count))


def _generators(loader: Any) -> list[torch.Generator]:
    owners = (
        loader,
        getattr(loader, "sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    )
    found = {id(g): g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    return list(found.values())
