"""What a measurement says beside an older one: nothing here starts or times anything."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from ..base import Interval

__all__ = ["Measurement", "Trend", "Verdict", "compare_losses", "judge", "ratio_interval", "trend"]

CONFIDENCE = 0.99
TREND_CONFIDENCE = 0.95
LEAST_TREND = 5

Verdict = Literal["same", "more", "less", "unclear"]


@dataclass(frozen=True)
class Measurement:
    """What several starts of one subject gave.

    ``step_seconds`` is each start's median; ``relative`` the same over what the calibration took in the same turns, so
    that a machine that is slower as a whole cancels; ``loss_low`` and ``loss_high`` the range over starts at the steps
    ``loss_steps``, which are equal where training is deterministic.
    """

    step_seconds: list[float]
    relative: list[float]
    peak_bytes: list[float]
    loss_steps: list[int]
    loss_low: list[float]
    loss_high: list[float]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))


def _counts(factors: Iterable[tuple[int, int]]) -> list[int]:
    """Coefficients of the product of ``(1 - q^top) / (1 - q^bottom)``: how many orders give each count."""
    counts = [1]
    for top, bottom in factors:
        grown = counts + [0] * top
        for index in range(len(grown) - 1, top - 1, -1):
            grown[index] -= grown[index - top]
        for index in range(bottom, len(grown)):
            grown[index] += grown[index - bottom]
        counts = grown[: len(counts) + top - bottom]
    return counts


def _middle(values: Iterable[float], counts: Sequence[int], confidence: float) -> Interval:
    """Median of pairwise values, between those that the exact distribution of their signs leaves at the ends.

    Where even the outermost do not reach ``confidence``, what they do reach is said.
    """
    ordered = sorted(values)
    total, below, cut = sum(counts), counts[0], 0
    while 2 * (below + counts[cut + 1]) <= (1.0 - confidence) * total:
        cut += 1
        below += counts[cut]
    return Interval(ordered[cut], statistics.median(ordered), ordered[-1 - cut], 1.0 - 2 * below / total)


def ratio_interval(before: Sequence[float], after: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """How many times as large ``after`` is, with an interval that assumes nothing of how either is distributed.

    The Hodges-Lehmann estimate, between the quantiles of the Mann-Whitney statistic (Hollander, Wolfe and Chicken,
    Nonparametric Statistical Methods, 4.3): starts of one process fall into modes, and a mean with a standard deviation
    would take a lucky draw of modes for a finding. Six starts against six reach 99%.
    """
    few, many = len(before), len(after)
    counts = _counts((many + index, index) for index in range(1, few + 1))
    return _middle((b / a for a in before for b in after), counts, confidence)


def judge(interval: Interval, threshold: float) -> Verdict:
    """``"more"`` beyond doubt and by more than the threshold, ``"less"`` likewise, ``"unclear"`` where noise hides it.

    ``"same"`` says that an increase by more than the threshold is ruled out.
    """
    if interval.low > 1.0 and interval.mid > 1.0 + threshold:
        return "more"
    if interval.high < 1.0 and interval.mid < 1.0 / (1.0 + threshold):
        return "less"
    return "unclear" if interval.high > 1.0 + threshold else "same"


def compare_losses(before: Measurement, after: Measurement) -> tuple[int, float] | None:
    """The first step at which the losses of all starts lie outside what the baseline's gave, and by what share.

    None where they agree, or where the step returns no loss.
    """
    rows = zip(before.loss_steps, before.loss_low, before.loss_high, after.loss_low, after.loss_high, strict=False)
    for step, low, high, new_low, new_high in rows:
        gap = max(new_low - high, low - new_high)
        if gap > 0.0 or math.isnan(low) != math.isnan(new_low):
            return step, gap / max(abs(low), abs(high), 1e-300)
    return None


@dataclass(frozen=True)
class Trend:
    """Change of one figure from run to run of the history, and the run at which it meets its limit."""

    what: str
    unit: str
    runs: int
    slope: Interval
    runs_left: float | None


def trend(what: str, unit: str, values: Sequence[float], limit: float | None = None) -> Trend | None:
    """A line through the history; None where it is too short to say.

    The Theil-Sen slope, between the quantiles of Kendall's statistic. ``runs_left`` is given where the slope is above
    zero beyond doubt: how many runs until the line meets ``limit``.
    """
    if len(values) < LEAST_TREND:
        return None
    counts = _counts((index, 1) for index in range(2, len(values) + 1))
    pairs = combinations(enumerate(values), 2)
    slope = _middle(((b - a) / (j - i) for (i, a), (j, b) in pairs), counts, TREND_CONFIDENCE)
    left = None
    if limit is not None and slope.low > 0.0:
        left = max(0.0, (limit - values[-1]) / slope.mid)
    return Trend(what, unit, len(values), slope, left)
