"""The demo's HTML report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from oxytorch.bench.turns.times import ends
from oxytorch.monitor import Bar, Cell, Column, Report, Series

from .measure import ALLOCATOR, WorkloadResult
from .present import OURS, bytes_text, foot, ratio_text, refusals, sentences, share_text, time_text

__all__ = ["write"]

METHOD = (
    "Each contender runs in a process of its own. The processes of one start are alive together and take turns in a "
    "random order, so that only one computes at any time and all of them feel the same machine. Every start has a new "
    "seed, the same for all contenders: the same first weights, the same batches in the same order. The first turn of "
    "a process and the first step of each turn are trained but not timed. A start counts by the median of its turns, a "
    "ratio by the median of its ratios turn by turn. Figures are geometric means over starts; the intervals hold 95%: "
    "Student's t on the logarithms of the starts' figures, so one start has none."
)


def _loss_charts(report: Report, result: WorkloadResult) -> None:
    by_step, by_time = [], []
    for row in result.rows:
        curves = np.asarray(result.losses[row.contender])
        mean, low, high = curves.mean(0).tolist(), curves.min(0).tolist(), curves.max(0).tolist()
        steps = [float(step) for step in range(1, len(mean) + 1)]
        by_step.append(Series(row.contender, steps, mean, low, high))
        by_time.append(Series(row.contender, [step * row.step_seconds.mid for step in steps], mean))
    report.line_chart(
        by_step, "Training loss at equal steps", "step", "loss", notes=["Band: from the lowest to the highest start."]
    )
    report.line_chart(
        by_time, "Training loss against time", "seconds", "loss", notes=["Time: steps times the median step."]
    )


def _distribution(report: Report, result: WorkloadResult) -> None:
    series = []
    for row in result.rows:
        values = np.sort(np.concatenate([np.asarray(run) for run in result.block_seconds[row.contender]])) * 1e3
        shares = (np.arange(len(values)) + 0.5) / len(values) * 100.0
        series.append(Series(row.contender, shares.tolist(), values.tolist()))
    title = "Step time, from the fastest turn to the slowest"
    report.line_chart(series, title, "% of turns", "ms a step", zero_based=True)


def _table(report: Report, result: WorkloadResult) -> None:
    titles = ["ms a step", f"{result.unit} a second", f"times {result.reference}", f"times {ALLOCATOR}"]
    titles += ["times stock", "outside forward and backward", "peak memory", "page faults a step"]
    titles += [f"loss at step {result.steps}", "held-out loss"]
    columns = [Column("contender"), *(Column(title, "right") for title in titles), Column("verdict")]
    rows = []
    for row in result.rows:
        mallopt, stock = row.speedup_mallopt, row.speedup_stock
        verdict = {"inside": "in band", "better": "below band", "worse": "above band"}
        rows.append(
            [
                Cell(row.contender, strong=row.contender in OURS),
                Cell(time_text(row.step_seconds), row.step_seconds.mid * 1e3),
                Cell(f"{row.units_per_second:,.0f}", row.units_per_second),
                Cell(ratio_text(row.speedup_plain), row.speedup_plain.mid),
                Cell(ratio_text(mallopt), mallopt.mid if mallopt else None),
                Cell(ratio_text(stock), stock.mid if stock else None),
                Cell(share_text(row.outside_share), row.outside_share),
                Cell(bytes_text(row.peak_bytes), row.peak_bytes),
                Cell(f"{row.page_faults_per_step:,.0f}", row.page_faults_per_step),
                Cell(f"{row.train_loss:.4f}", row.train_loss),
                Cell(f"{row.held_out_loss:.4f}", row.held_out_loss),
                Cell(verdict[row.verdict], strong=row.worse),
            ]
        )
    report.table(columns, rows, "Figures", foot(result))


def _settings(report: Report, result: WorkloadResult) -> None:
    rows = []
    for row in result.rows:
        for note in row.notes:
            gain = note.get("gain")
            texts = (
                note["name"],
                note["state"],
                f"{gain:.2f}x" if gain else "",
                note["reason"],
                note.get("cost") or "",
            )
            rows.append([row.contender, *map(str, texts)])
    if rows:
        report.table(["contender", "setting", "state", "gain", "why", "cost"], rows, "What the trainer did")


def write(path: Path, results: list[WorkloadResult], machine: dict[str, str]) -> Path:
    """Write the report to ``path``, whole or not at all, and return it."""
    report = Report("Oxytorch demo")
    report.subtitle("Plain PyTorch, the best of stock PyTorch, and Oxytorch on the same data, interleaved")
    for key, value in machine.items():
        report.metadata(key, value)
    for result in results:
        report.heading(result.title)
        for line in [*sentences(result), *refusals(result)]:
            report.paragraph(line)
        _table(report, result)
        bars = [Bar(row.contender, row.speedup_plain.mid, *ends(row.speedup_plain)) for row in result.rows]
        title = f"Speed, {result.reference} loop = 1"
        report.bar_chart(bars, title, f"times {result.reference}", "x", 1.0, result.reference)
        _loss_charts(report, result)
        _distribution(report, result)
        _settings(report, result)
    report.heading("How it was measured")
    report.paragraph(METHOD)
    path.parent.mkdir(parents=True, exist_ok=True)
    report.to_html(path)
    return path
