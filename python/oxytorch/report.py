"""What a trainer did: settings with reasons, costs and gains, and where the time of a step went."""

from __future__ import annotations

import html
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    """

    level: str
    settings: list[SettingLine]
    timings: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    verdict: str = ""

    def __getitem__(self, name: str) -> SettingLine:
        """Return the line of one setting; KeyError where there is none."""
        for line in self.settings:
            if line.name == name:
                return line
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)

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

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the report as one HTML page that needs no network; also write it where ``path`` is given."""
        e = html.escape
        lines = "".join(
            f"<tr><td>{e(s.name)}</td><td class='{e(s.state)}'>{e(s.state)}</td>"
            f"<td>{f'{s.gain:.2f}x' if s.gain is not None else ''}</td><td>{e(s.reason)}</td><td>{e(s.cost)}</td></tr>"
            for s in self.settings
        )
        step = self.timings.get("step", 0.0)
        bars = "".join(
            f"<tr><td>{e(name)}</td><td>{seconds * 1e3:.3f} ms</td><td><div class='bar' style='width:"
            f"{(300 * seconds / step) if step else 0:.0f}px'></div></td></tr>"
            for name, seconds in self.timings.items()
        )
        counts = "".join(f"<tr><td>{e(name)}</td><td>{value:g}</td></tr>" for name, value in self.counters.items())
        text = (
            "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Oxytorch trainer</title><style>"
            "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em}"
            "table{border-collapse:collapse;margin:1em 0}td,th{padding:.3em .8em;border-bottom:1px solid #ddd;"
            "text-align:left;vertical-align:top}.on{color:#176b2c}.refused{color:#a33}.off{color:#777}"
            ".bar{height:.9em;background:#3a6ea5}</style></head><body>"
            f"<h1>Oxytorch trainer</h1><p>Level {e(self.level)}. {e(self.verdict)}</p>"
            f"<h2>Settings</h2><table><tr><th>setting</th><th>state</th><th>gain</th><th>why</th><th>cost</th></tr>"
            f"{lines}</table><h2>Time of a step</h2><table>{bars}</table><h2>Counters</h2><table>{counts}"
            "</table></body></html>\n"
        )
        if path is not None:
            write_whole(path, text)
        return text
