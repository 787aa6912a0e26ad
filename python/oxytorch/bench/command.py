"""`oxytorch bench`: measure, compare, remember, show."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..base import Interval, format_duration, format_size, system_info
from . import measure
from .gate import Measurement, Trend, compare_losses, judge, ratio_interval, trend
from .turns.driver import WorkerFailed

__all__ = ["run"]

SCHEMA = "oxytorch-bench/1"
HISTORY, TREND_RUNS = 200, 20
WORDS = {
    "time": {"more": "SLOWER", "less": "faster", "same": "as before", "unclear": "too noisy to say"},
    "memory": {"more": "LARGER", "less": "smaller", "same": "as before", "unclear": "too noisy to say"},
}


class _Refused(Exception):
    """Bad usage; the message is for the user."""


def _load(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"schema": SCHEMA, "subjects": {}}
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = document["schema"] == SCHEMA
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise _Refused(f"{path} is no baseline of this version ({SCHEMA}); move it away, and the next run writes one")
    return document


def _save(path: Path, document: dict[str, Any]) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def _check_machine(known: dict[str, Any], now: dict[str, str], path: Path) -> None:
    differing = [f"{key} was {known[key]!r} and is {now[key]!r}" for key in now if known.get(key) != now[key]]
    if differing:
        raise _Refused(
            f"the baseline in {path} is of another machine, and times of two machines say nothing about the code: "
            f"{'; '.join(differing)}. Keep a file for each machine, or measure anew with --update."
        )


def _entry(taken: Measurement, machine: dict[str, str], label: str, verdict: str) -> dict[str, Any]:
    return {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "label": label,
        "machine": machine,
        "step_seconds": statistics.median(taken.step_seconds),
        "relative": statistics.median(taken.relative),
        "peak_bytes": statistics.median(taken.peak_bytes),
        "verdict": verdict,
    }


def _trends(history: list[dict[str, Any]], machine: dict[str, str]) -> list[Trend]:
    last = [entry for entry in history if entry["machine"] == machine][-TREND_RUNS:]
    found = [
        # Seconds as they would be at the speed that the machine had in the last run.
        trend("step", "s", [entry["relative"] * last[-1]["step_seconds"] / last[-1]["relative"] for entry in last]),
        trend("peak memory", "bytes", [entry["peak_bytes"] for entry in last], system_info()["memory"]["limit"]),
    ]
    return [each for each in found if each is not None]


def _share(interval: Interval) -> str:
    low, mid, high = (100.0 * (value - 1.0) for value in interval[:3])
    return f"{mid:+.1f}% [{low:+.1f}%, {high:+.1f}%], {interval.confidence:.1%} between starts"


def _trend_text(each: Trend) -> str:
    show = format_duration if each.unit == "s" else lambda size: format_size(round(size))
    low, mid, high = (("-" if value < 0 else "+") + show(abs(value)) for value in each.slope[:3])
    flat = each.slope.low <= 0.0 <= each.slope.high
    text = f"trend    {each.what} {mid} [{low}, {high}] a run over {each.runs} runs"
    text += ": none that shows" if flat else ""
    return text + (f"; the machine's limit in {each.runs_left:,.0f} runs" if each.runs_left is not None else "")


def _report(result: dict[str, Any], before: Measurement | None, taken: Measurement, trends: list[Trend]) -> str:
    lines = [
        f"step     {format_duration(statistics.median(taken.step_seconds))}, "
        f"peak memory {format_size(round(statistics.median(taken.peak_bytes)))}, {len(taken.relative)} starts"
    ]
    if before is None:
        lines.append(f"baseline written to {result['baseline']}")
    else:
        for what in ("time", "memory"):
            said = result[what]
            lines.append(f"{what:<8} {WORDS[what][said['verdict']]}: {_share(Interval(*said['ratio']))}")
            if said["verdict"] == "unclear":
                lines.append(
                    f"         an increase by {result['threshold']:.1%} is not ruled out; --starts adds starts"
                )
        moved = result["losses"]
        if moved == "none":
            lines.append("losses   the step returns none")
        elif moved is None:
            lines.append("losses   as before" + ("" if taken.loss_low != taken.loss_high else ", bit for bit"))
        else:
            lines.append(f"losses   NUMBERS MOVED: first at step {moved['step']}, by {moved['share']:.1e} of the loss")
    return "\n".join(lines + [_trend_text(each) for each in trends])


def _compare(before: Measurement, taken: Measurement, threshold: float) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for what, pair in {
        "time": (before.relative, taken.relative),
        "memory": (before.peak_bytes, taken.peak_bytes),
    }.items():
        ratio = ratio_interval(*pair)
        result[what] = {"ratio": list(ratio), "verdict": judge(ratio, threshold)}
    moved = compare_losses(before, taken)
    result["losses"] = None if moved is None else {"step": moved[0], "share": moved[1]}
    if not taken.loss_steps:
        result["losses"] = "none"
    return result


def _bench(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    path, subject = Path(arguments.baseline), arguments.subject
    if ":" not in subject:
        raise _Refused(f"{subject!r} names no function: write {subject}:FUNCTION")
    document = _load(path)
    known = document["subjects"].get(subject)
    threads = arguments.threads or len(os.sched_getaffinity(0))
    machine = measure.machine_key(threads)
    fresh = known is None or arguments.update
    if not fresh:
        _check_machine(known["machine"], machine, path)
    plan = measure.probe(subject, threads, arguments.timeout) if fresh else measure.MeasurementPlan(**known["plan"])

    def on_start(index: int) -> None:
        print(f"start {index + 1} of {arguments.starts}", file=sys.stderr, flush=True)

    taken = measure.take(subject, plan, arguments.starts, arguments.timeout, on_start)
    before = None if fresh else Measurement(**known["baseline"])
    result: dict[str, Any] = {"subject": subject, "baseline": str(path), "threshold": arguments.threshold}
    result["measured"] = taken.to_json()
    verdict = "baseline"
    if before is not None:
        result |= _compare(before, taken, arguments.threshold)
        verdict = "regression" if "more" in (result["time"]["verdict"], result["memory"]["verdict"]) else "good"
    result["verdict"] = verdict
    history = [*(known["history"] if known else []), _entry(taken, machine, arguments.label, verdict)][-HISTORY:]
    if fresh:
        known = {"plan": asdict(plan), "machine": machine, "baseline": taken.to_json()}
    document["subjects"][subject] = {**known, "history": history}
    _save(path, document)
    trends = _trends(history, machine)
    result["trends"] = [{**asdict(each), "slope": list(each.slope)} for each in trends]
    return result, _report(result, before, taken, trends)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    try:
        result, text = _bench(arguments)
    except (_Refused, WorkerFailed, OSError) as problem:
        print(f"oxytorch bench: {problem}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2) if arguments.json else text)
    return int(result["verdict"] == "regression")
