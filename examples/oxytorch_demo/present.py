"""The demo's figures for a reader at a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oxytorch.base import Interval
from rich.console import Console
from rich.table import Table

from .measure import ALLOCATOR, Row, WorkloadResult

__all__ = [
    "OURS",
    "bytes_text",
    "foot",
    "ratio_text",
    "refusals",
    "sentences",
    "share_text",
    "show",
    "show_end",
    "time_text",
    "to_json",
]

OURS = frozenset({"basic", "advanced", "advanced compiled", "oxytorch optim", "oxytorch trainer"})
"""Contenders whose held-out loss decides the exit status."""


def to_json(document: object) -> str:
    """JSON with null where a figure is missing; NaN is not JSON."""

    def clean(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(item) for item in value]
        return value

    return json.dumps(clean(document), indent=1)


def _interval_text(interval: Interval, text: Callable[[float], str]) -> str:
    if math.isnan(interval.low):
        return f"{text(interval.mid)} (one start)"
    return f"{text(interval.mid)} [{text(interval.low)}, {text(interval.high)}]"


def time_text(interval: Interval) -> str:
    """Milliseconds with the interval, to three digits."""
    scale = 1e3
    digits = max(0, 2 - math.floor(math.log10(max(interval.mid * scale, 1e-9))))
    return _interval_text(interval, lambda value: f"{value * scale:.{digits}f}")


def ratio_text(interval: Interval | None) -> str:
    """A ratio with its interval."""
    if interval is None:
        return ""
    return _interval_text(interval, lambda value: f"{value:.2f}")


def bytes_text(count: float) -> str:
    """MiB without decimals."""
    return f"{count / 2**20:,.0f} MiB"


def share_text(share: float) -> str:
    """Per cent, or nothing where it was not measured."""
    return "" if math.isnan(share) else f"{100 * share:.1f}%"


def _verdict_text(row: Row) -> str:
    return {"inside": "in band", "better": "below band", "worse": "ABOVE BAND"}[row.verdict]


def refusals(result: WorkloadResult) -> list[str]:
    """What the trainer was asked for and did not do, with its reasons."""
    return [
        f"{row.contender}: {note['name']} refused: {note['reason']}"
        for row in result.rows
        for note in row.notes
        if note.get("state") == "refused"
    ]


def sentences(result: WorkloadResult) -> list[str]:
    """One plain sentence per contender of ours."""
    stock = f"the best stock loop ({result.choice})" if result.row("stock") else ""
    lines = []
    for row in result.rows:
        if row.contender not in OURS:
            continue
        verdict = {
            "inside": f"its held-out loss is inside the {result.reference} loop's seed band",
            "better": f"its held-out loss is below the {result.reference} loop's seed band",
            "worse": f"its held-out loss is WORSE than the {result.reference} loop's seed band",
        }[row.verdict]
        speed = ratio_text(row.speedup_plain)
        text = f"{result.name}: {row.contender} runs at {speed} times the {result.reference} loop's speed"
        if row.speedup_stock is not None:
            text += f" and {ratio_text(row.speedup_stock)} times that of {stock}"
        lines.append(f"{text}; {verdict}.")
    return lines


def _table(result: WorkloadResult) -> Table:
    table = Table(title=result.title, title_justify="left", title_style="bold")
    table.add_column("")
    mallopt, stock = (result.row(name) is not None for name in (ALLOCATOR, "stock"))
    headings = ["ms a step", f"{result.unit}/s", f"x {result.reference}"]
    headings += [f"x {ALLOCATOR}"] if mallopt else []
    headings += ["x stock"] if stock else []
    headings += ["outside fwd+bwd", "peak memory", f"loss at {result.steps}", "held-out loss", "verdict"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "verdict" else "right")
    for row in result.rows:
        ours = row.contender in OURS
        cells = [
            row.contender,
            time_text(row.step_seconds),
            f"{row.units_per_second:,.0f}",
            ratio_text(row.speedup_plain) if row.contender != result.reference else "1",
            *([ratio_text(row.speedup_mallopt) if row.contender != ALLOCATOR else "1"] if mallopt else []),
            *([ratio_text(row.speedup_stock) if row.contender != "stock" else "1"] if stock else []),
            share_text(row.outside_share),
            bytes_text(row.peak_bytes),
            f"{row.train_loss:.4f}",
            f"{row.held_out_loss:.4f}",
            _verdict_text(row),
        ]
        table.add_row(*cells, style="bold" if ours else "")
    return table


def _repaid(result: WorkloadResult, row: Row) -> str:
    reference = result.row(result.reference)
    saved = 0.0 if reference is None else reference.step_seconds.mid - row.step_seconds.mid
    return f", repaid after {row.tuning_seconds / saved:,.0f} steps" if saved > 0 else ""


def foot(result: WorkloadResult) -> list[str]:
    """What a reader must know to read the table."""
    lines = [
        f"Held-out band of the {result.reference} loop over {result.starts} seed{'s' if result.starts > 1 else ''}: "
        f"{result.band[0]:.4f} to {result.band[1]:.4f}."
        + (f" Best stock options here: {result.choice}." if result.choice else "")
    ]
    if result.starts == 1:
        lines.append(
            "One start only: no intervals, for it says nothing of the spread between starts; the band is 1% wide."
        )
    compiled = {row.contender: row.compile_seconds for row in result.rows if row.compile_seconds > 0}
    if compiled:
        text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in compiled.items())
        lines.append(f"Compiling, not in the step time: {text}.")
    tuned = [row for row in result.rows if row.tuning_seconds > 0]
    if tuned:
        text = ", ".join(f"{row.contender} {row.tuning_seconds:.1f} s{_repaid(result, row)}" for row in tuned)
        lines.append(f"Tuning, once, in a run before; the runs above check what it found and go on: {text}.")
    warm = {row.contender: row.first_step_seconds for row in result.rows if row.first_step_seconds > 1.0}
    if warm:
        text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in warm.items())
        lines.append(f"First step, not in the step time (a trainer checks there what it remembers): {text}.")
    return lines


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=170)


def show(result: WorkloadResult) -> None:
    """Print one workload's table and sentences."""
    console = _console()
    console.print()
    console.print(_table(result))
    for line in [*foot(result), *sentences(result), *refusals(result)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def show_end(machine: dict[str, str], page: Path) -> None:
    """Print where it was measured and where the report is."""
    console = _console()
    console.print()
    facts = ", ".join(f"{key} {value}" for key, value in machine.items() if value)
    console.print(f"Measured on: {facts}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"Report: {page.resolve()}", highlight=False, markup=False, soft_wrap=True)
