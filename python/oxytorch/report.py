"""What a trainer did: settings with reasons, costs and gains, and where the time of a step went."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .monitor import Report

__all__ = ["SettingLine", "TrainingReport"]


@dataclass
class SettingLine:
    """One setting of a run.

    Parameters
    ----------
    name
        ``"allocator"``, ``"precision"`` ...
    state
        ``"on"``, ``"off"`` (not asked for) or ``"refused"`` (asked for, and not done).
    reason
        Why, in one sentence.
    cost
        What it costs; empty where nothing.
    gain
        Seconds of a step without the setting over those with it; ``None`` where not measured.
    """

    name: str
    state: str
    reason: str
    cost: str = ""
    gain: float | None = None


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Write a file whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


@dataclass
class TrainingReport:
    """A trainer's account of itself; ``str()`` is a table.

    Parameters
    ----------
    level
        Level of the configuration.
    settings
        One line a setting.
    timings
        Seconds a step by phase (``data``, ``forward``, ``backward``, ``tail``, ``step``), means since the start.
    counters
        ``steps``, ``batches``, ``page_faults_per_step`` and others.
    verdict
        Where to look next, one sentence.
    pages
        Functions that make documents for below it in the HTML page, such as what `gradient_checkpointing` found.
    """

    level: str
    settings: list[SettingLine]
    timings: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    verdict: str = ""
    pages: list[Callable[[], Report]] = field(default_factory=list, repr=False, compare=False)

    def __getitem__(self, name: str) -> SettingLine:
        """Return the line of one setting; KeyError where there is none."""
        for line in self.settings:
            if line.name == name:
                return line
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the pages as plain values."""
        plain = asdict(replace(self, pages=[]))
        del plain["pages"]
        return plain

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the report as JSON; also write it where ``path`` is given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            write_whole(path, text + "\n")
        return text

    def __str__(self) -> str:
        rows = [("setting", "state", "gain", "why")]
        for line in self.settings:
            gain = f"{line.gain:.2f}x" if line.gain is not None else ""
            rows.append(
                (line.name, line.state, gain, f"{line.reason} {'Cost: ' + line.cost if line.cost else ''}".strip())
            )
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        out = [f"Oxytorch trainer, level {self.level}"]
        out += ["  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3])) for row in rows]
        if self.timings:
            step = self.timings.get("step", 0.0)
            parts = [
                f"{name} {seconds * 1e3:.3f} ms" + (f" ({seconds / step:.0%})" if step and name != "step" else "")
                for name, seconds in self.timings.items()
            ]
            out.append("time of a step: " + ", ".join(parts))
        if self.counters:
            out.append(", ".join(f"{name} {value:g}" for name, value in self.counters.items()))
        if self.verdict:
            out.append("verdict: " + self.verdict)
        return "\n".join(out)

    def page(self) -> Report:
        """Return the report as a document, with what was found beside it."""
        lines = [(s.name, s.state, s.reason, s.cost, s.gain) for s in self.settings]
        made = Report.of_training(
            self.level, lines, list(self.timings.items()), list(self.counters.items()), self.verdict
        )
        for page in self.pages:
            made.append(page())
        return made

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the report as one HTML page that needs no network; also write it where ``path`` is given."""
        text = self.page().to_html()
        if path is not None:
            write_whole(path, text)
        return text
