"""Measures what `oxytorch.accelerate` does to memory, and what that costs: the six raced workloads, with either goal.

The step as given is torch's plain loop in float32. `speed` and `memory` are the goals at level advanced; with `memory,
ultra` state of 8 bits and updates in backward may be tried too. Each is tuned in a process of its own with fresh
weights, for a run of 2,000 steps that are taken by `plan.step`.

What tensors take in a step, as given and tuned, and took at the most while tuning, is what the certificate says; so is
how many times as long a tuned step takes, which tuning measures paired in its last comparison. What is resident is the
most of a step and of all of tuning, less what the process held before the model was there; compilers are in it.

    python bench/race/goals.py [--threads 2] [--starts 4] [--quick] [--case NAME]... [--keep PATH] [--json PATH]

A start is one process for each row; intervals over starts hold 95%. Prints the rows and what was promised of them, and
writes bench/report/goals.{json,html}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import oxytorch as ox
import torch
from _race import (
    Figure,
    Measured,
    Times,
    add_figures,
    add_options,
    all_starts,
    facts,
    is_wanted,
    most_resident,
    new_report,
    over_starts,
    progress,
    ratio,
    resident,
    show_figures,
    text,
    write,
)
from oxytorch.bench.turns.environment import environment

if TYPE_CHECKING:
    from _orchestrator.models import Workload

SCHEMA = "oxytorch-goals/1"
WORKLOADS = ("mlp", "lstm", "cnn", "resnet", "gpt", "bert")
GOALS = {"speed": ("speed", "advanced"), "memory": ("memory", "advanced"), "memory, ultra": ("memory", "ultra")}
PROMISED = {"speed": 1.05, "memory": 0.6, "memory, ultra": 0.6}
WHILE_TUNING = 1.25
BATCHES, STEPS = 8, 2_000


def fresh(workload: Workload) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = workload.make_model()
    return model, torch.optim.AdamW(model.parameters(), lr=workload.lr)


def given_peak(workload: Workload, batch: Any) -> int:
    """The most resident in a step as given."""
    model, optimizer = fresh(workload)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(2):
        step()
    return most_resident(step)


def measure_one(case: str, row: str, quick: bool) -> dict[str, float]:
    """In this process, of which nothing else is asked: bytes, and times as long as given."""
    from _orchestrator.models import make_workload  # noqa: PLC0415  (where _race has made its models found)

    goal, level = GOALS[row]
    workload = make_workload(case)
    batches = workload.make_batches(0, BATCHES)
    given_peak(make_workload("mlp"), make_workload("mlp").make_batches(0, 1)[0])  # loads libraries
    before = resident()
    given = given_peak(workload, batches[0])
    model, optimizer = fresh(workload)
    plans = []

    def tune() -> None:
        plans.append(
            ox.accelerate(
                model, optimizer, workload.loss, batches, level=level, goal=goal, loop="plan", remember=False,
                steps_planned=STEPS, tune_seconds=1 if quick else None,
            )
        )  # fmt: skip

    tuning = most_resident(tune)
    (plan,) = plans
    for batch in batches[:2]:
        plan.step(batch)
    tuned = most_resident(lambda: plan.step(batches[2]))
    made = plan.certificate
    print(plan, file=sys.stderr)
    return {
        "tensors: given": float(made.given_peak_bytes or 0),
        "tensors: tuned": float(made.tuned_peak_bytes or 0),
        "tensors: tuning": float(made.tuning_peak_bytes or 0),
        "resident: given": float(given - before),
        "resident: tuned": float(tuned - before),
        "resident: tuning": float(tuning - before),
        "time": 1 / plan.speedup[1] if plan.accepted else 1.0,
        "seconds of tuning": made.tuning_seconds + made.compile_seconds,
    }


def measure(arguments: argparse.Namespace) -> Measured:
    """One start: a process for each row."""
    found = Measured()
    for case in WORKLOADS:
        if not is_wanted(arguments, case) or (arguments.quick and case != "mlp"):
            continue
        for row in GOALS:
            progress(f"tuning {case}, goal {row} ...")
            command = [sys.executable, __file__, "--one", case, row, *(["--quick"] if arguments.quick else [])]
            command += ["--threads", str(arguments.threads)]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, check=True, text=True, env=environment(arguments.threads)
            )
            said = json.loads(done.stdout.splitlines()[-1])
            found.cases[f"{case}: {row}"] = {name: np.array([value]) for name, value in said.items()}
    return found


def tables(found: Measured) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Headings and rows of what was measured."""

    def mebibytes(times: Times, name: str) -> str:
        return f"{over_starts(times[name]).mid / 2**20:.1f}"

    rows = []
    for name, times in found.cases.items():
        case, _, row = name.partition(": ")
        of_given = [text(ratio(times, f"{kind}: {when}", f"{kind}: given")) for kind, when in (
            ("tensors", "tuned"), ("tensors", "tuning"), ("resident", "tuned"), ("resident", "tuning"))]  # fmt: skip
        rows.append([case, row, mebibytes(times, "tensors: given"), *of_given[:2], text(over_starts(times["time"])),
                     mebibytes(times, "resident: given"), *of_given[2:]])  # fmt: skip
    head = ["workload", "goal", "tensors of a step as given, MiB", "tuned", "while tuning", "times as long as given",
            "resident of a step as given, MiB", "tuned", "while tuning"]  # fmt: skip
    return {"goals": (head, rows)}


def figures(found: Measured) -> list[Figure]:
    """What was promised of the bytes that tensors take."""
    made = []
    for name, times in found.cases.items():
        _, _, row = name.partition(": ")
        of_given = {when: ratio(times, f"tensors: {when}", "tensors: given") for when in ("tuned", "tuning")}
        made.append(Figure(f"{name}: tensors of a step over those as given", of_given["tuned"], PROMISED[row], True))
        made.append(Figure(f"{name}: tensors while tuning", of_given["tuning"], WHILE_TUNING, True))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "GOAL"), help="one row alone, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        torch.set_num_threads(arguments.threads)
        print(json.dumps(measure_one(*arguments.one, arguments.quick)))
        return 0
    machine_facts = facts(arguments.threads)
    found = all_starts(arguments, machine_facts, SCHEMA, measure)
    report = new_report("Race: goals of accelerate", __doc__, machine_facts)
    for kind, (headings, rows) in tables(found).items():
        for row in (headings, *rows):
            print("  ".join(f"{cell:<22}" for cell in row).rstrip())
        report.table(headings, rows, kind.capitalize())
    show_figures(figures(found))
    add_figures(report, figures(found))
    print("Measured on: " + ", ".join(f"{key} {value}" for key, value in machine_facts.items() if value))
    document: dict[str, Any] = {"schema": SCHEMA, "machine": machine_facts, **found.to_json()}
    document["figures"] = [figure.to_json() for figure in figures(found)]
    write(report, document, arguments.out, "goals", arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
