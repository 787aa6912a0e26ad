"""The documents of bench/results, and how a table and the line under it are written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _race import text
from oxytorch.base import Interval

FOLDER = Path(__file__).resolve().parents[1]
ROOT = FOLDER.parents[1]
NO_INTERVAL = "One start gives no interval."

Document = dict[str, Any]


def read(name: str) -> Document | None:
    """A document of this folder, None where it was not measured yet."""
    path = FOLDER / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """In Markdown."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def measured(command: str, name: str, document: Document, starts: Iterable[int] = ()) -> str:
    """The line under a table: which command wrote its figures, where, and in how many starts where they have some."""
    machine = document["machine"]
    counts = sorted(set(starts))
    intervals = "; 95% intervals over starts" if counts else ""
    said = [f"`{command}`", f"{machine['threads']} threads", machine["cpu"], machine["instructions"].split(", ")[-1]]
    said.append(f"torch {machine['torch'].partition('+')[0]}")
    if counts:
        several = f"{counts[0]} to {counts[-1]}" if counts[0] != counts[-1] else str(counts[0])
        said.append(f"{several} start{'s' if counts[-1] > 1 else ''}")
    sentence = f"{', '.join(said)}{intervals} (<{name}>)."
    return sentence + (f" {NO_INTERVAL}" if counts and counts[0] == 1 else "")


def best_and_worst(title: str, found: Iterable[tuple[Interval, str]], *, larger: bool) -> list[str]:
    """A row: the ends of what was found, each with what it is of. `larger`: the largest is the best."""
    ordered = sorted(found, key=lambda each: each[0].mid, reverse=larger)
    return [title, *(f"{text(got)}, {which}" for got, which in (ordered[0], ordered[-1]))]


def milliseconds(got: Interval) -> str:
    """Of a step, without its interval."""
    return f"{text(Interval(got.mid, got.mid, got.mid, 1.0), 1e3)} ms"
