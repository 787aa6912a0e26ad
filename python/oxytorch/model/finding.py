"""What advice is made of: one finding, and the list of them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ..base import format_duration

__all__ = ["Advice", "Finding"]

SEVERITIES = ("high", "medium", "low", "info")


@dataclass(frozen=True)
class Finding:
    """One thing that costs time or memory, or that is likely no intention.

    Attributes
    ----------
    rule : str
        Name of the rule, such as ``"bias_before_norm"``.
    severity : {"high", "medium", "low", "info"}
        ``"info"``: a fact worth knowing, no fault.
    where : tuple of str
        Qualified names of modules or parameters; ``""`` is the model itself.
    what, why : str
        What was seen, and why it costs.
    evidence : dict
        Figures measured or counted on this model and example.
    do : str
        What to change.
    share : float or None
        Share of the operators' time of the step that was spent on it; None where time is not what it costs.
    gain : float or None
        Time of the place as it is over its time changed, measured here; None where not measured.
    """

    rule: str
    severity: str
    where: tuple[str, ...]
    what: str
    why: str
    evidence: dict[str, Any]
    do: str
    share: float | None = None
    gain: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """All attributes as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        places = ", ".join(name or "(the model)" for name in self.where[:4])
        places += f" and {len(self.where) - 4} more" if len(self.where) > 4 else ""
        figures = ", ".join(f"{name} {_text(value)}" for name, value in self.evidence.items())
        share = f", {self.share:.1%} of the step" if self.share is not None else ""
        gain = f"; {self.gain:.2f}x measured" if self.gain is not None else ""
        lines = [
            f"[{self.severity}] {self.rule} in {places}{share}",
            f"{self.what} {self.why}",
            f"seen: {figures}",
            f"do: {self.do}{gain}",
        ]
        return "\n".join(
            textwrap.fill(line, 116, initial_indent="  " if i else "", subsequent_indent="  " if i else "")
            for i, line in enumerate(lines)
        )


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Advice(list[Finding]):
    """Findings, those with the largest share of the step's time first; ``str()`` is the page.

    Attributes
    ----------
    step_seconds : float
        Forward and backward of the example, not recorded, second run.
    operators : list of (str, float)
        The operators that took most time and their share, largest first.
    notes : tuple of str
        What could not be looked at, and why.
    """

    def __init__(
        self,
        findings: Iterable[Finding] = (),
        step_seconds: float = 0.0,
        operators: Iterable[tuple[str, float]] = (),
        notes: Iterable[str] = (),
    ) -> None:
        super().__init__(sorted(findings, key=lambda f: (-(f.share or 0.0), SEVERITIES.index(f.severity), f.rule)))
        self.step_seconds = step_seconds
        self.operators = list(operators)
        self.notes = tuple(notes)

    def of(self, rule: str) -> list[Finding]:
        """Findings of one rule."""
        return [finding for finding in self if finding.rule == rule]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "step_seconds": self.step_seconds,
            "operators": [list(pair) for pair in self.operators],
            "notes": list(self.notes),
            "findings": [finding.to_dict() for finding in self],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def table(self) -> str:
        """One line a finding: share of the step, severity, rule and place."""
        rows = [("share", "severity", "rule", "where")]
        for f in self:
            share = f"{f.share:.1%}" if f.share is not None else ""
            where = (f.where[0] or "(the model)") if f.where else ""
            rows.append((share, f.severity, f.rule, where + (f" +{len(f.where) - 1}" if len(f.where) > 1 else "")))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows)

    def __str__(self) -> str:
        top = ", ".join(f"{name} {share:.0%}" for name, share in self.operators[:4])
        head = f"forward and backward: {format_duration(self.step_seconds)}; operators: {top}"
        body = [self.table(), *map(str, self)] if self else ["nothing found"]
        return "\n\n".join([head, *body, *(f"note: {note}" for note in self.notes)])
