"""`mark_step`, which has an effect in lazy mode alone."""

from __future__ import annotations

from ..utils.internal import is_lazy

_marks: list[str] = []


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """End the graph that lazy mode collects."""
    if is_lazy():
        _marks.append(device_str)
