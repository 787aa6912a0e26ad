"""Orders in which a loader draws; each is a plain description that the loader makes its sampler of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._C import data as _native

__all__ = ["Bucketed", "Mixed", "Sampling", "ShuffledBlocks", "Weighted", "sampler_of", "window_of"]


@dataclass(frozen=True)
class Weighted:
    """Draws with replacement, each sample with a probability in proportion to its weight.

    Parameters
    ----------
    weights : sequence of float
        One a sample.
    draws : int, optional
        An epoch's; as many as there are samples unless given.
    """

    weights: Sequence[float]
    draws: int | None = None


@dataclass(frozen=True)
class Mixed:
    """Draws from several datasets in proportion to their weights, without an end.

    Of each dataset every sample comes once before one comes again, in an order that differs from pass to pass. Epochs
    are parts of one stream: the second goes on where the first ended, and of any part of it a dataset has its share to
    within a few samples.

    Parameters
    ----------
    weights : sequence of float
        One for each dataset that `concatenate` or `torch.utils.data.ConcatDataset` joined.
    draws : int, optional
        Samples of an epoch; as many as there are unless given.

    Examples
    --------
    >>> both = concatenate(open("web"), open("code"))
    >>> loader = Loader(both, 64, shuffle=Mixed([0.8, 0.2], draws=100_000))
    """

    weights: Sequence[float]
    draws: int | None = None


@dataclass(frozen=True)
class Bucketed:
    """A random order in which samples of like length come together in batches, so that padding takes little.

    Parameters
    ----------
    lengths : sequence of int
        One a sample.
    window : int
        Samples among which like lengths are looked for.
    """

    lengths: Sequence[int]
    window: int = 4096


@dataclass(frozen=True)
class ShuffledBlocks:
    """A random order in which what lies together is read together.

    Parameters
    ----------
    block : int
        Consecutive samples that stay together.
    window : int
        Blocks whose samples are mixed.
    """

    block: int = 256
    window: int = 16


Sampling = Weighted | Mixed | Bucketed | ShuffledBlocks


def sampler_of(order: Sampling | bool | _native.Sampler, parts: Sequence[int], batch: int) -> _native.Sampler:
    """Make the sampler of datasets of these sizes, one behind the other; True shuffles, False does not."""
    size = sum(parts)
    if isinstance(order, _native.Sampler):
        return order
    if isinstance(order, Weighted):
        _matches(len(order.weights), size, "weights")
        return _native.weighted(list(order.weights), size if order.draws is None else order.draws)
    if isinstance(order, Mixed):
        return _native.mixed(parts, list(order.weights), size if order.draws is None else order.draws)
    if isinstance(order, Bucketed):
        _matches(len(order.lengths), size, "lengths")
        return _native.bucketed(list(order.lengths), batch, order.window)
    if isinstance(order, ShuffledBlocks):
        return _native.shuffled_blocks(size, order.block, order.window)
    return _native.shuffled(size) if order else _native.sequential(size)


def window_of(order: Sampling | bool | _native.Sampler, usual: int) -> int:
    """Return how many samples of a stream are mixed at a time."""
    if isinstance(order, ShuffledBlocks):
        return order.block * order.window
    if isinstance(order, bool):
        return usual
    raise ValueError(
        f"a stream cannot be drawn from by {type(order).__name__}: its samples come in order. Give True or "
        "ShuffledBlocks, which mix what lies near."
    )


def _matches(found: int, size: int, what: str) -> None:
    if found != size:
        raise ValueError(f"there are {found} {what} for {size} samples; give one for each.")
