"""Compares the choices of oxytorch.memory.fit with exact optima: the same recorded steps, solved as 0/1 programs.

For each model of the memory race a step is recorded, and for budgets from 90 % of what its activations take down to the
lowest peak, in steps of 10 %, the choice that adds the least time within the budget is found twice: by Oxytorch's
search, and by HiGHS. The gap is how much more time ours adds, promised to be at most 2 %; planning for 200 blocks is
promised to take under a second. What the optimum adds to a plain step is what no plan of these actions can be below.

    python bench/race/memory_plan.py [--threads 2] [--quick] [--case NAME]... [--json PATH]

Needs highspy, which tools/peers.sh installs into build/peers. Writes bench/report/memory_plan.{json,html}.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import statistics
import sys
import time
import timeit
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import oxytorch as ox
import torch
from _memory_models import TASKS, made
from _peers import PEERS
from _race import ROOT, facts, is_wanted, new_report, progress, write
from torch import nn

SCHEMA = "oxytorch-memory-plan/1"
MOST_GAP, MOST_SECONDS, BLOCKS = 0.02, 1.0, 200
SOLVER_SECONDS = 20.0  # for one budget; without a proof by then the best bound counts
PLAIN_STEPS = 5
MIB = 2.0**20
HEAD = ["model", "blocks", "budget", "ours adds", "the optimum adds", "of a plain step", "gap", "planning"]
SHOWN = ("60 %", "40 %", "least")

Choice = list[int]
"""An action for each block; 0 is to keep everything."""


def highs() -> ModuleType | None:
    """The solver, None where it is not installed."""
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))  # last: what the environment has comes first
    try:
        import highspy  # noqa: PLC0415
    except ImportError:
        return None
    return highspy


@dataclass(frozen=True)
class Span:
    """A part of a step: the most that is live in it, and by how much the actions of blocks lower that."""

    live: int
    lowered: Sequence[tuple[int, Sequence[int]]]
    """Block, and bytes by action; below 0 where that raises it."""
    only_with: tuple[int, Sequence[bool]] | None = None
    """It counts where this block takes one of these actions."""

    @property
    def highest(self) -> int:
        return self.live - sum(min(0, *by_action) for _, by_action in self.lowered)


@dataclass(frozen=True)
class Found:
    choice: Choice
    bound: float
    """What no choice is below: seconds, or bytes of the lowest peak."""
    is_proven: bool
    """Whether `choice` is as good as that."""


@dataclass(frozen=True)
class Program:
    """Which action each block takes, as a 0/1 program."""

    spans: Sequence[Span]
    seconds: Sequence[Sequence[float]]
    """By block and action; infinite where a block lacks the action."""

    def peak(self, choice: Choice) -> int:
        counting = (s for s in self.spans if s.only_with is None or s.only_with[1][choice[s.only_with[0]]])
        return max(
            (s.live - sum(by_action[choice[block]] for block, by_action in s.lowered) for s in counting), default=0
        )

    def cost(self, choice: Choice) -> float:
        return sum(by_action[action] for by_action, action in zip(self.seconds, choice, strict=True))

    def cheapest(self, budget: int) -> Found | None:
        """The least time with a peak within the budget; None where no choice is."""
        return self._solved(budget)

    def lowest(self) -> Found:
        """The lowest peak, whatever it costs."""
        found = self._solved(None)
        assert found is not None
        return found

    def _solved(self, budget: int | None) -> Found | None:
        highspy = highs()
        assert highspy is not None
        solver = highspy.Highs()
        for option, value in (
            ("output_flag", False),
            ("threads", 1),
            ("time_limit", SOLVER_SECONDS),
            ("mip_rel_gap", 0.0),
        ):
            solver.setOptionValue(option, value)
        # Milliseconds and MiB: HiGHS takes what is below 1e-6 for nothing.
        column: list[list[int]] = []
        for by_action in self.seconds:
            column.append([])
            for seconds in by_action:
                column[-1].append(solver.getNumCol())
                is_there = math.isfinite(seconds)
                solver.addCol(
                    1e3 * seconds if is_there and budget is not None else 0.0, 0.0, float(is_there), 0, [], []
                )
                solver.changeColIntegrality(column[-1][-1], highspy.HighsVarType.kInteger)
            solver.addRow(1.0, 1.0, len(column[-1]), column[-1], [1.0] * len(column[-1]))
        peak = solver.getNumCol()
        if budget is None:
            solver.addCol(1.0, 0.0, highspy.kHighsInf, 0, [], [])
        else:
            solver.addCol(0.0, budget / MIB, budget / MIB, 0, [], [])
        for span in self.spans:
            beyond = span.highest - (budget or 0)
            if beyond <= 0:
                continue
            # live - lowered <= peak, or an action with which this does not count.
            row = {peak: 1.0}
            for block, by_action in span.lowered:
                for action, lowered in enumerate(by_action):
                    row[column[block][action]] = lowered / MIB
            if span.only_with is not None:
                block, counts = span.only_with
                for action, does in enumerate(counts):
                    if not does:
                        row[column[block][action]] = row.get(column[block][action], 0.0) + beyond / MIB
            solver.addRow(span.live / MIB, highspy.kHighsInf, len(row), list(row), list(row.values()))
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        values = solver.getSolution().col_value or [0.0] * solver.getNumCol()  # none was found in time
        choice = [max(range(len(each)), key=lambda action, each=each: values[each[action]]) for each in column]
        bound = solver.getInfo().mip_dual_bound * (MIB if budget is None else 1e-3)
        return Found(choice, bound, status == highspy.HighsModelStatus.kOptimal)


def budgets(plain: int, least: int) -> dict[str, int]:
    """From 90 % of a plain step's peak to the lowest one."""
    shares = {f"{10 * tenths} %": plain * tenths // 10 for tenths in range(9, 0, -1)}
    return {name: budget for name, budget in shares.items() if budget > least} | {"least": least}


def compared(name: str, tape: Any, plain_seconds: float) -> list[dict[str, Any]]:
    """Ours beside the optimum, at each budget."""
    program = program_of(tape)
    kept = [0] * len(program.seconds)
    least = tape.lowest()[1]
    rows = []
    for share, budget in budgets(program.peak(kept), least).items():
        began = time.perf_counter()
        ours, peak, seconds, is_optimal = tape.plan(budget)
        took = time.perf_counter() - began
        is_read = program.peak(ours) == peak and math.isclose(program.cost(ours), seconds, abs_tol=1e-9)
        assert is_read, "the planner and this program read the tape differently"
        best = program.cheapest(budget)
        assert best is not None, "HiGHS finds no choice where there is one"
        rows.append(
            {
                "model": name, "blocks": len(kept), "plain": plain_seconds, "budget": share, "bytes": budget,
                "planning": took, "ours": seconds,
                "optimum": program.cost(best.choice), "bound": best.bound, "is_proven": best.is_proven,
                "is_optimal": is_optimal,
                "gap": max(seconds / best.bound - 1, 0.0) if best.bound > 0 else 0.0,
            }
        )  # fmt: skip
    lowest = program.lowest()
    # A program with the lowest peak as its cost, in bytes.
    rows[-1] |= {"lowest_peak": least, "lowest_peak_bound": lowest.bound}
    return rows


class Deep(nn.Sequential):
    """As many blocks as planning is promised to be quick for, no two of one size."""

    def __init__(self) -> None:
        sizes = range(64, 64 + BLOCKS)
        super().__init__(*(nn.Sequential(nn.Linear(32, 2 * n), nn.GELU(), nn.Linear(2 * n, 32)) for n in sizes))

    def blocks_by_name(self) -> list[str]:
        return [str(i) for i in range(len(self))]


# --- what a recorded step is to the planner ---------------------------------------------------------------------------


def tape_of(net: Any, loss: Any) -> tuple[Any, float]:
    """A step as `fit` records it: as it is, and with every block under each action; and seconds of it as it is."""
    names, fitting = net.blocks_by_name(), importlib.import_module("oxytorch.memory.fit")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    step()  # makes the optimizer's state
    plain_seconds = statistics.median(timeit.repeat(step, number=1, repeat=PLAIN_STEPS))
    tape = fitting._recorded(net, step, names)
    for action in ("selective", "lossless"):
        put = fitting._Planned(net, ox._C.memory.BlockChoice(action, names))
        tape.add(action, fitting._recorded(net, step, names))
        put.close()
    return tape, plain_seconds


def program_of(tape: Any) -> Program:
    """Its spans, and what each action of each block costs."""
    return Program([Span(*each) for each in tape.spans()], tape.seconds())


def tapes(arguments: argparse.Namespace) -> dict[str, tuple[Any, float]]:
    """By model, and of one with many blocks; with seconds of a plain step."""
    found = {}
    for name in TASKS:
        if is_wanted(arguments, name):
            progress(f"recording {name} ...")
            task = made(name, quick=arguments.quick)
            batch = task.draw()
            found[name] = tape_of(task.net, lambda task=task, batch=batch: task.loss(batch))
    if is_wanted(arguments, name := f"{BLOCKS} blocks"):
        progress(f"recording {name} ...")
        deep, x = Deep(), torch.randn(64, 32)
        found[name] = tape_of(deep, lambda: deep(x).square().mean())
    return found


def cells(row: dict[str, Any]) -> list[str]:
    """Of the table."""
    seconds = row["optimum"] if row["is_proven"] else row["bound"]
    optimum = f"{'' if row['is_proven'] else 'at least '}{1e3 * seconds:.3f} ms"
    share = f"{100 * seconds / row['plain']:.1f} %"
    gap, planning = f"{100 * row['gap']:.2f} %", f"{1e3 * row['planning']:.1f} ms"
    ours = f"{1e3 * row['ours']:.3f} ms"
    return [row["model"], str(row["blocks"]), row["budget"], ours, optimum, share, gap, planning]


def summary(document: dict[str, Any]) -> list[list[str]]:
    """Rows of HEAD at the budgets that are promised something."""
    return [cells(row) for row in document["rows"] if row["budget"] in SHOWN]


def show(line: list[str]) -> None:
    print("  ".join(f"{cell:<20}" for cell in line).rstrip(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small models, to see that it works")
    parser.add_argument("--case", action="append", help="only models whose name holds this; may be repeated")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--out", type=Path, default=ROOT / "bench/report")
    parser.add_argument("--json", type=Path, help="write the JSON document there too")
    arguments = parser.parse_args()
    if highs() is None:
        print("memory_plan: highspy is not installed; tools/peers.sh installs it. Nothing was compared.")
        return 0
    torch.set_num_threads(arguments.threads)
    machine_facts = facts(arguments.threads)
    rows, table = [], []
    show(HEAD)
    for name, (tape, plain_seconds) in tapes(arguments).items():
        progress(f"solving {name} ...")
        for row in compared(name, tape, plain_seconds):
            rows.append(row)
            table.append(cells(row))
            show(table[-1])
    gap, planning = max(row["gap"] for row in rows), max(row["planning"] for row in rows)
    print(f"\nThe largest gap is {100 * gap:.2f} %, promised at most {100 * MOST_GAP:g} %.")
    print(f"The longest planning took {planning:.3f} s, promised at most {MOST_SECONDS:g} s for {BLOCKS} blocks.")
    report = new_report("Race: memory plans", __doc__, machine_facts)
    report.table(HEAD, table, "Gaps")
    document = {"schema": SCHEMA, "machine": machine_facts, "rows": rows}
    write(report, document, arguments.out, "memory_plan", arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
