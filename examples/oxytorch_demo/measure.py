"""From what the workers answered to figures with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from oxytorch.base import Interval
from oxytorch.bench.turns.driver import Block, Run, Start
from oxytorch.bench.turns.times import block_seconds, over_starts, timed

__all__ = ["Row", "WorkloadResult", "summarise"]

ALLOCATOR = "plain + mallopt"
BAND_MARGIN = 0.01


def _block_outside(block: Block) -> float:
    if block.inner is None:
        return math.nan
    return 1.0 - sum(timed(block.inner)) / sum(timed(block.seconds))


def _outside_share(runs: list[Run], blocks: NDArray[np.float64]) -> float:
    if not np.isnan(blocks).any():
        return float(np.median(blocks))
    # Not seen from outside: what the trainer measured around its own phases, means over its steps.
    shares = []
    for run in runs:
        phases = {name: seconds for name, seconds in run.phases.items() if name != "step"}
        if {"forward", "backward"} <= phases.keys():
            shares.append(1.0 - (phases["forward"] + phases["backward"]) / sum(phases.values()))
    return float(np.median(shares)) if shares else math.nan


@dataclass(frozen=True)
class Row:
    """One contender's figures on one workload."""

    contender: str
    step_seconds: Interval
    units_per_second: float
    speedup_plain: Interval
    speedup_mallopt: Interval | None
    """Over the plain loop with one `mallopt`; None where that did not take part."""
    speedup_stock: Interval | None
    outside_share: float
    peak_bytes: float
    page_faults_per_step: float
    train_loss: float
    held_out_loss: float
    held_out_losses: list[float]
    verdict: str
    compile_seconds: float
    tuning_seconds: float
    """Of the run in which it tuned itself, once; 0 for a rival."""
    first_step_seconds: float
    notes: list[dict[str, Any]]

    @property
    def worse(self) -> bool:
        """Whether the held-out loss is above the plain loop's band."""
        return self.verdict == "worse"


@dataclass(frozen=True)
class WorkloadResult:
    """Everything measured on one workload."""

    name: str
    title: str
    unit: str
    steps: int
    starts: int
    choice: str
    reference: str
    band: tuple[float, float]
    rows: list[Row]
    losses: dict[str, list[list[float]]]
    """Training loss by contender, start and step."""
    block_seconds: dict[str, list[list[float]]]
    """Seconds per step by contender, start and turn, the first turn left out."""

    def row(self, contender: str) -> Row | None:
        """The row of ``contender`` if it took part."""
        return next((row for row in self.rows if row.contender == contender), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data for machines; times in seconds."""
        data = asdict(self)
        for row in data["rows"]:
            row.update({name: value._asdict() for name, value in row.items() if isinstance(value, Interval)})
        return data


class Subject(Protocol):
    """What was raced, as far as the figures need to know."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def units_per_step(self) -> int: ...


def _verdict(losses: Sequence[float], band: tuple[float, float]) -> str:
    mean = float(np.mean(losses))
    if not math.isfinite(mean):
        return "worse"
    if mean > band[1]:
        return "worse"
    return "better" if mean < band[0] else "inside"


def seed_band(losses: Sequence[float]) -> tuple[float, float]:
    """The plain loop's held-out losses over its seeds, widened by 1% of their mean.

    A contender is judged by its mean over the same seeds. The plain loop's own mean lies inside min..max by
    construction, so without a systematic shift a contender's does too; the 1% keeps a lucky narrow band (few seeds)
    from judging rounding.
    """
    margin = BAND_MARGIN * abs(float(np.mean(losses)))
    return min(losses) - margin, max(losses) + margin


def summarise(
    workload: Subject, choice: str, starts: list[Start], tuning: Mapping[str, float] | None = None
) -> WorkloadResult:
    """Figures of every contender of one workload; `tuning`: seconds that some took once, in a run before."""
    contenders = list(starts[0])

    def table(contender: str, value: Callable[[Block], float]) -> NDArray[np.float64]:
        # The first turn warms up: memory is fetched, primitives are built.
        runs = [start[contender].blocks for start in starts]
        return np.array([[value(block) for block in (blocks[1:] or blocks)] for blocks in runs])

    seconds = {contender: table(contender, block_seconds) for contender in contenders}
    losses = {
        contender: [[loss for block in start[contender].blocks for loss in block.losses] for start in starts]
        for contender in contenders
    }
    steps = len(losses[contenders[0]][0])
    last = max(1, steps // 10)
    held = {contender: [start[contender].held_out_loss for start in starts] for contender in contenders}
    reference = "plain" if "plain" in held else contenders[0]
    band = seed_band(held[reference])

    def over(rival: str, contender: str) -> Interval | None:
        return over_starts(seconds[rival] / seconds[contender]) if rival in seconds else None

    rows = []
    for contender in contenders:
        runs = [start[contender] for start in starts]
        step = over_starts(seconds[contender])
        rows.append(
            Row(
                contender=contender,
                step_seconds=step,
                units_per_second=workload.units_per_step / step.mid,
                speedup_plain=over_starts(seconds[reference] / seconds[contender]),
                speedup_mallopt=over(ALLOCATOR, contender),
                speedup_stock=over("stock", contender),
                outside_share=_outside_share(runs, table(contender, _block_outside)),
                peak_bytes=float(np.median([run.peak_bytes for run in runs])),
                page_faults_per_step=float(
                    np.median([block.page_faults / len(block.seconds) for run in runs for block in run.blocks[1:]])
                    if len(runs[0].blocks) > 1
                    else math.nan
                ),
                train_loss=float(np.mean([series[-last:] for series in losses[contender]])),
                held_out_loss=float(np.mean(held[contender])),
                held_out_losses=held[contender],
                verdict=_verdict(held[contender], band),
                compile_seconds=max(run.compile_seconds for run in runs),
                tuning_seconds=(tuning or {}).get(contender, 0.0),
                first_step_seconds=max(run.blocks[0].seconds[0] for run in runs),
                notes=runs[0].notes,
            )
        )
    return WorkloadResult(
        name=workload.name,
        title=workload.title,
        unit=workload.unit,
        steps=steps,
        starts=len(starts),
        choice=choice,
        reference=reference,
        band=band,
        rows=rows,
        losses=losses,
        block_seconds={contender: values.tolist() for contender, values in seconds.items()},
    )
