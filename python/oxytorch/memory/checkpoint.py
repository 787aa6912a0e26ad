"""Activation checkpointing: forward keeps the inputs of a function alone, and backward runs it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from .. import _C

__all__ = ["checkpoint", "checkpoint_sequential", "selective_checkpoint"]

T = TypeVar("T")


def checkpoint(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return ``function(*args, **kwargs)``, of which autograd keeps the arguments alone.

    Backward runs the function again for what its nodes would have saved. The second forward sees what the first saw:
    the state of torch's random generators, autocast, and every tensor that the function itself changes in place
    (running statistics, counters), as it was before the first; afterwards they are what they were before the second.
    Gradients, buffers and random state keep every bit.

    Parameters
    ----------
    function : callable
        A module or any function; it may call `checkpoint` itself, draw random numbers and have any result. It must
        depend on its arguments, on parameters and on torch's random generators alone.
    *args, **kwargs
        Of any type; tensors are looked for in tuples, lists and dicts too.

    Raises
    ------
    RuntimeError
        From backward: where the second forward did something else than the first, and where an input or something
        that the function made was changed in place after it was saved.
    NotImplementedError
        Inside the transforms of `torch.func`, where torch refuses hooks of saved tensors.

    Notes
    -----
    Second derivatives, ``retain_graph``, hooks and several outputs work as without it. Under `torch.compile` it is
    ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.
    """
    if torch.compiler.is_compiling():
        return torchs_checkpoint(function, *args, use_reentrant=False, **kwargs)  # type: ignore[no-any-return]
    if not _C.memory.records_gradients():
        return function(*args, **kwargs)
    leaves, form = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # Of the tensors nothing stays here.
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    del leaves

    def again(given: list[Tensor]) -> None:
        values = list(others)
        for place, tensor in zip(places, given, strict=True):
            values[place] = tensor
        new_args, new_kwargs = pytree.tree_unflatten(values, form)
        function(*new_args, **new_kwargs)

    return _C.memory.checkpoint(lambda: function(*args, **kwargs), tensors, again)  # type: ignore[no-any-return]


def selective_checkpoint(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return ``function(*args, **kwargs)``, of which autograd does not keep what is cheap to make again.

    Results of elementwise operators, normalisations, softmax, copies, pooling and lookups are given up where they can
    be made again from the rest that autograd keeps; backward runs those operators again when it comes to what needs
    them. Random masks are kept as bits. The function itself is not run again, so that it may do anything; gradients,
    buffers and random state keep every bit.

    Parameters
    ----------
    function : callable
        A module or any other function. Tensors that it makes of under 16 KiB are kept. Inside `checkpoint` and inside
        itself it is only called, as it is with no gradient recorded.
    *args, **kwargs : Any
        What it takes.

    Raises
    ------
    RuntimeError
        From backward, where something that a tensor is made again from was changed in place meanwhile.

    Notes
    -----
    It costs about two microseconds for each operator of the function. Which operators are worth their memory:
    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
    """
    return _C.memory.selective_checkpoint(lambda: function(*args, **kwargs))  # type: ignore[no-any-return]


def checkpoint_sequential(functions: nn.Sequential | Sequence[Callable[..., Any]], segments: int, value: Any) -> Any:
    """Return the result of functions one after another, of which each segment but the last keeps its input alone.

    Parameters
    ----------
    functions : nn.Sequential or sequence of callables
        Each takes what the one before it gave.
    segments : int
        Pieces of equal length; the last takes the rest and keeps everything, as backward begins with it.
    value : Any
        What the first takes.

    Raises
    ------
    ValueError
        For fewer than 1 or more segments than functions.
    """
    steps: list[Callable[..., Any]] = list(functions)
    if not 1 <= segments <= len(steps):
        raise ValueError(f"{segments} segments of {len(steps)} functions; give 1 to {len(steps)}")
    length = len(steps) // segments

    def part(begin: int, end: int) -> Callable[[Any], Any]:
        def run(given: Any) -> Any:
            for step in steps[begin:end]:
                given = step(given)
            return given

        return run

    last = length * (segments - 1)
    for begin in range(0, last, length):
        value = checkpoint(part(begin, begin + length), value)
    return part(last, len(steps))(value)
