"""What `accelerate` does to memory, in few lines: of the race of its goals."""

from __future__ import annotations

from _race import Measured, ratio, text

from .documents import read, table
from .orchestrator import NAMES

# What a row is of, the goal, what is compared with what is as given; nothing: a time, as it stands.
ROWS = (
    ('tensors of a step, `goal="memory"`', "memory", "tensors: tuned"),
    ("the process in such a step", "memory", "resident: tuned"),
    ("time of such a step", "memory", "time"),
    ('tensors of a step, `goal="speed"`', "speed", "tensors: tuned"),
    ("tensors while that is tuned", "speed", "tensors: tuning"),
    ("the process while that is tuned", "speed", "resident: tuning"),
)


def summary() -> str | None:
    """The best and the worst of each row over the workloads."""
    document = read("goals.json")
    if document is None:
        return None
    cases = Measured.from_json(document).cases
    workloads = sorted({name.partition(":")[0] for name in cases}, key=list(NAMES).index)
    rows = []
    for title, goal, what in ROWS:
        found = []
        for workload in workloads:
            times = {**cases[f"{workload}: {goal}"], "1": [[1.0]]}
            given = "1" if what == "time" else f"{what.partition(':')[0]}: given"
            found.append((ratio(times, what, given), NAMES[workload]))
        found.sort(key=lambda each: each[0].mid)
        rows.append([title, *(f"{text(got)}, {which}" for got, which in (found[0], found[-1]))])
    head = f"peak of memory, over the step as given ({len(workloads)} training loops)"
    return table([head, "best", "worst"], rows)
