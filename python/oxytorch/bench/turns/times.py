"""From the seconds of turns to figures with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...base import Interval, starts_interval
from .driver import Block

__all__ = ["block_seconds", "ends", "over_starts", "timed"]


def over_starts(values: NDArray[np.float64]) -> Interval:
    """Interval of ``values`` (starts x turns) from the median of each start; without ends where there is one start.

    Turns of one process start are more alike than turns of two, because the allocator settles differently in each, so
    a start is one observation, however many turns it takes.
    """
    return starts_interval(np.median(values, axis=1))


def ends(interval: Interval) -> tuple[float | None, float | None]:
    """``low`` and ``high`` for a chart, None where one start gives no interval."""
    return (None, None) if math.isnan(interval.low) else (interval.low, interval.high)


def timed(values: Sequence[float]) -> Sequence[float]:
    """All but the first step of a turn, which finds the caches full of another process: trained, not timed."""
    return values[1:] if len(values) > 1 else values


def block_seconds(block: Block) -> float:
    """Median seconds of a step in one turn."""
    return float(np.median(timed(block.seconds)))
