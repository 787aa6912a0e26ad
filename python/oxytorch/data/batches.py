"""Example batches taken from whatever a run draws its batches from, and given back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..generators import rng_state, set_rng_state
from ..model.graph import entries

__all__ = [
    "can_visit", "copied", "drawn_by", "generators", "is_nest", "on_device", "shapes", "stop_drawing", "take",
    "tensors", "visit",
]  # fmt: skip

_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


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
    return [copied(batch) for batch in taken], data


def copied(batch: Any) -> Any:
    """Copy a batch, since a step may change it in place: tensors, arrays, containers, objects of any class.

    Raises
    ------
    TypeError
        Where it holds what cannot be copied.
    """
    return tree_map(_copied, batch)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    if isinstance(leaf, _VALUES):
        return leaf
    # A deep copy of a tensor would copy all of the memory that it is a view of, and refuse what has a graph.
    memo: dict[int, Any] = {id(t): _copied(t) for t in tensors(leaf)}
    try:
        return copy.deepcopy(leaf, memo)
    except Exception as error:
        raise TypeError(
            f"a batch holds a {type(leaf).__qualname__}, which cannot be copied ({type(error).__name__}: {error}), and "
            "a trial may change it. Make it copyable by copy.deepcopy, or give batches of tensors and containers."
        ) from error


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device, and whatever else in it has a ``to()``; itself where it is there.

    From pinned memory the host does not wait for the copy.
    """

    def is_there(leaf: Any) -> bool:
        return leaf.device == device if isinstance(leaf, Tensor) else device.type == "cpu" or not _moves(leaf)

    def moved(leaf: Any) -> Any:
        if is_there(leaf):
            return leaf
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf.to(device)

    return batch if all(map(is_there, tree_leaves(batch))) else tree_map(moved, batch)


def _moves(leaf: Any) -> bool:
    return not isinstance(leaf, _VALUES) and callable(getattr(leaf, "to", None))


def is_nest(batch: Any) -> bool:
    """Whether a batch is tensors and plain values in containers alone, which can be cut and put together again."""
    return all(isinstance(leaf, (Tensor, *_VALUES)) for leaf in tree_leaves(batch))


def tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch in order, those inside of objects of any class too."""
    leaves = tree_leaves(batch)
    if is_nest(batch):
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    inside = entries((f"[{i}]", leaf) for i, leaf in enumerate(leaves))
    return [found.value for found in inside if isinstance(found.value, Tensor) and not found.path.endswith(".grad")]


def can_visit(data: Any) -> bool:
    """Whether it is a loader: iterated anew each time, by more than a look into a list."""
    return hasattr(data, "__iter__") and not isinstance(data, Iterator | Sequence | Tensor)


@contextmanager
def visit(loader: Any, params: Sequence[Tensor]) -> Iterator[None]:
    """Iterate a loader anew inside; afterwards its position, generators and workers are as before."""
    held = rng_state(params)
    states = [(generator, generator.get_state()) for generator in generators(loader)]
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
        for generator, state in states:
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


def drawn_by(loader: Any) -> list[Any]:
    """Return what decides the order of a loader's batches, each once: itself and its samplers."""
    batches = getattr(loader, "batch_sampler", None)
    found = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return list({id(one): one for one in found if one is not None}.values())


def generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers draw from, each once."""
    found = {id(g): g for g in (getattr(one, "generator", None) for one in drawn_by(loader))}
    return [g for g in found.values() if isinstance(g, torch.Generator)]


def shapes(batch: Any) -> tuple[Any, ...]:
    """Return the shape of each tensor of a batch."""
    return tuple(tuple(tensor.shape) for tensor in tensors(batch))
