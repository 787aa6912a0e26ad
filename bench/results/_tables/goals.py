"""What `accelerate` does to memory, in few lines: of the race of its goals."""

from __future__ import annotations

from _race import Measured, Times, over_starts, ratio
from oxytorch.base import Interval

from .documents import best_and_worst, read, table
from .orchestrator import NAMES

# A row: its title, the goal, and what was measured.
ROWS = (
    ('peak of tensors in a step, `goal="memory"`', "memory", "tensors: tuned"),
    ("peak of the process in such a step", "memory", "resident: tuned"),
    ("time of such a step", "memory", "time"),
    ('peak of tensors in a step, `goal="speed"`', "speed", "tensors: tuned"),
    ('peak of tensors while tuning, `goal="speed"`', "speed", "tensors: tuning"),
    ('peak of the process while tuning, `goal="speed"`', "speed", "resident: tuning"),
)


def over_given(times: Times, what: str) -> Interval:
    """Over the step as given, which a time is already."""
    return over_starts(times[what]) if what == "time" else ratio(times, what, f"{what.partition(':')[0]}: given")


def summary() -> str | None:
    """The best and the worst of each row over the workloads."""
    document = read("goals.json")
    if document is None:
        return None
    cases = Measured.from_json(document).cases
    workloads = [name for name in NAMES if f"{name}: speed" in cases]
    rows = [
        best_and_worst(title, [(over_given(cases[f"{w}: {goal}"], what), NAMES[w]) for w in workloads], larger=False)
        for title, goal, what in ROWS
    ]
    return table([f"times those of the step as given, {len(workloads)} training loops", "best", "worst"], rows)
