"""Finds the stock rivals of a workload on this machine among all combinations of stock switches.

1. Every combination of optimizer, precision, memory format, attention, threads and allocator is timed for a moment, in
   one process for each allocator. One whose first step takes several times as long as the best known step is out.
2. The fastest sixth is timed three times more, in a random order.
3. The best few meet in processes of their own, beside the best one compiled in the default mode with each precision,
   format and attention.
4. The best of those compiled meets max-autotune, the other good allocators and the other number of threads.

Lightning and Accelerate get the switches of the fastest of all. These processes and seeds are not those of the race,
so a combination that was lucky here is measured anew there.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from _race import progress
from oxytorch.bench.turns.driver import Run, Start, WorkerFailed, WorkerProcess, python_command
from oxytorch.bench.turns.times import block_seconds
from oxytorch.demo import examples

from .switches import (
    ALLOCATORS,
    DEFAULT,
    MALLOPT,
    MODES,
    Switches,
    compiled_combinations,
    eager_combinations,
    installed,
)

SEED = 1
"""The race's seeds begin at 1,000."""
TIMED_SECONDS = 0.25
OUT_FACTOR, OUT_SECONDS = 4.0, 0.15
"""A first step that takes so many times the best step, and that long at least, for it fetches memory too, is enough."""
ROUNDS, SHARE_KEPT, FINALISTS, KEPT_EAGER = 3, 6, 4, 2

Race = Callable[[dict[str, Switches], int], Start]
"""Races these, each in a process of its own, with this seed."""


@dataclass
class Timings:
    """What is known of each combination: medians of its visits, in seconds a step."""

    visits: dict[Switches, list[float]] = field(default_factory=dict)

    def add(self, switches: Switches, seconds: Iterable[float]) -> None:
        """One more visit; none where it was ruled out."""
        found = list(seconds)
        if found:
            self.visits.setdefault(switches, []).append(statistics.median(found))

    def score(self, switches: Switches) -> float:
        """Seconds a step: the median over visits."""
        return statistics.median(self.visits[switches])

    def best(self, count: int) -> list[Switches]:
        """The fastest of those that were visited most often, fastest first."""
        most = max((len(visits) for visits in self.visits.values()), default=0)
        sure = [switches for switches, visits in self.visits.items() if len(visits) == most]
        return sorted(sure, key=self.score)[:count]

    @property
    def least(self) -> float:
        """The shortest time so far."""
        return min((self.score(switches) for switches in self.visits), default=float("inf"))


class Sweep:
    """The processes of steps 1 and 2: one for each allocator, one computing at a time."""

    def __init__(self, workload: str, allocators: Iterable[str], arguments: Any, environment: dict[str, str]) -> None:
        self.timings, self.timeout = Timings(), arguments.timeout
        self.workers: dict[str, WorkerProcess] = {}
        for allocator in allocators:
            switches = Switches(allocator=allocator)
            task = {"workload": workload, "contender": allocator, "seed": SEED, "threads": arguments.threads}
            task |= {"forbid": "oxytorch", "switches": switches.to_json()}
            command = python_command(
                task, "_orchestrator.screen_worker", Path(__file__).resolve().parents[1], examples()
            )
            self.workers[allocator] = WorkerProcess(allocator, switches.command(command), environment)
        for worker in list(self.workers.values()):
            self.ask(worker, None)

    def ask(self, worker: WorkerProcess, command: dict[str, Any] | None) -> dict[str, Any]:
        """What it answers; an allocator whose process fails is out."""
        try:
            if command is not None:
                worker.send(json.dumps(command))
            return worker.receive(self.timeout)
        except WorkerFailed as failed:
            progress(f"  {worker.name} is left out: {str(failed).strip().splitlines()[-1]}")
            self.workers.pop(worker.name).close()
            return {"seconds": []}

    def visit(self, switches: Switches, steps: int) -> None:
        """Time one combination."""
        worker = self.workers.get(switches.allocator)
        if worker is not None:
            limit = min(max(OUT_FACTOR * self.timings.least, OUT_SECONDS), 1e9)
            command = {"switches": switches.to_json(), "steps": steps, "limit": limit}
            self.timings.add(switches, self.ask(worker, command)["seconds"])

    def steps(self, switches: Switches) -> int:
        """As many as a visit may take."""
        known = self.timings.visits.get(switches)
        seconds = statistics.median(known) if known else self.timings.least
        return max(1, min(50, int(TIMED_SECONDS / seconds)))

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers.values():
            worker.close()


def sweep(workload: str, arguments: Any, environment: dict[str, str]) -> tuple[Timings, int]:
    """Steps 1 and 2: timings of all eager combinations, and how many there were."""
    allocators = [each for each in ((DEFAULT, MALLOPT) if arguments.quick else ALLOCATORS) if installed(each)]
    eager = eager_combinations(workload, arguments.threads, arguments.quick)
    everything = [replace(switches, allocator=allocator) for switches in eager for allocator in allocators]
    order = random.Random(SEED)
    running = Sweep(workload, allocators, arguments, environment)
    try:
        # What is likely to be good comes first, so that what is slow is out after one step.
        likely = [each for each in everything if each.optimizer == "fused" and each.precision == "bf16"]
        rest = [each for each in everything if each not in likely]
        for switches in [*order.sample(likely, len(likely)), *order.sample(rest, len(rest))]:
            running.visit(switches, 2 if arguments.quick else running.steps(switches))
        kept = running.timings.best(max(3 * FINALISTS, len(everything) // SHARE_KEPT))
        for _ in range(1 if arguments.quick else ROUNDS):
            for switches in order.sample(kept, len(kept)):
                running.visit(switches, 2 if arguments.quick else running.steps(switches))
    finally:
        running.close()
    return running.timings, len(everything)


def seconds(run: Run) -> float:
    """Of a step, from a finished run without its first turn."""
    return statistics.median(block_seconds(block) for block in run.blocks[1:] or run.blocks)


def finals(workload: str, timings: Timings, race: Race, threads: int, quick: bool) -> list[dict[Switches, float]]:
    """Steps 3 and 4: seconds a step of those that met, each in a process of its own.

    Only who met in one race can be compared: the machine is another a minute later. The last race decides.
    """

    def meet(entrants: Iterable[Switches], seed: int) -> dict[Switches, float]:
        unique = list(dict.fromkeys(entrants))
        named = {f"{index}: {switches}": switches for index, switches in enumerate(unique)}
        return {named[name]: seconds(run) for name, run in race(named, seed).items()}

    eager = timings.best(FINALISTS)
    first = meet([*eager, *([] if quick else compiled_combinations(workload, eager[0]))], SEED)
    order = sorted(first, key=first.__getitem__)
    compiled = [each for each in order if each.compile][:1]
    if not compiled:
        return [first]
    # A good allocator for one is a good one for the other more often than not.
    allocators = dict.fromkeys(each.allocator for each in timings.best(3 * FINALISTS))
    others = [replace(compiled[0], allocator=allocator) for allocator in list(allocators)[:3]]
    others += [replace(compiled[0], threads=count) for count in (1, threads) if count != compiled[0].threads]
    again = [each for each in order if not each.compile][: KEPT_EAGER + 1]
    return [first, meet([*again, *compiled, *others, replace(compiled[0], compile=MODES[-1])], SEED + 1)]


def chosen(found: dict[Switches, float]) -> dict[str, Any]:
    """What the race takes: the best eager combinations, the best compiled one, and the best of all for the trainers."""
    order = sorted(found, key=found.__getitem__)
    eager = [each for each in order if not each.compile][:KEPT_EAGER]
    compiled = [each for each in order if each.compile][:1]
    named = {f"stock {place}": each for place, each in enumerate(eager, 1)}
    named |= dict(zip(("stock compiled",), compiled, strict=False))
    named |= dict.fromkeys(("lightning", "accelerate"), order[0])
    return {name: switches.to_json() for name, switches in named.items()}


def screen(workload: str, arguments: Any, environment: dict[str, str], race: Race) -> dict[str, Any]:
    """One workload's entry in rivals.json."""
    began = time.perf_counter()
    progress(f"{workload}: timing all eager combinations")
    timings, count = sweep(workload, arguments, environment)
    progress(f"{workload}: {time.perf_counter() - began:.0f} s; the best of {count} in processes of their own")
    raced = finals(workload, timings, race, arguments.threads, arguments.quick)
    return {
        "rivals": chosen(raced[-1]),
        "combinations": count,
        "seconds": round(time.perf_counter() - began, 1),
        "load before": round(os.getloadavg()[0], 1),
        "sweep_ms": {str(each): round(1e3 * timings.score(each), 3) for each in timings.best(10)},
        "finals_ms": [{str(each): round(1e3 * took, 3) for each, took in sorted_by_time(found)} for found in raced],
    }


def sorted_by_time(found: dict[Switches, float]) -> list[tuple[Switches, float]]:
    """Fastest first."""
    return sorted(found.items(), key=lambda item: item[1])
