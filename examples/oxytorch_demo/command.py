"""`oxytorch demo`: calibrate, tune, race, show."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from oxytorch.bench.turns import machine
from oxytorch.bench.turns.driver import Start, WorkerFailed, python_command, race
from oxytorch.bench.turns.environment import FIRST_SEED, environment
from oxytorch.bench.turns.times import block_seconds
from oxytorch.demo import examples
from oxytorch.report import write_whole

from . import page, present, workloads
from .contenders import StockChoice
from .measure import ALLOCATOR, WorkloadResult, summarise
from .options import START_SECONDS, DemoOptions
from .progress import DemoProgress
from .workloads import Workload

__all__ = ["run"]

CONTENDERS = ("plain", ALLOCATOR, "stock", "basic", "advanced")
TUNING_SECONDS = 30.0
STEPS_PLANNED = 10_000
"""Tuning may take 15 % of the run, so that of a long one is not quick; a quick demo plans the run of its recipe."""
COMPILED = ("plain compiled", "stock compiled", "advanced compiled")


@dataclass(frozen=True)
class Calibration:
    """Which of stock PyTorch's options won, and seconds per step of each."""

    choice: StockChoice
    seconds: dict[StockChoice, float]

    def training_seconds(self, contenders: int) -> float:
        """Expected seconds of one step of every contender, from the plain and the best stock step."""
        slow, fast = self.seconds[StockChoice()], self.seconds[self.choice]
        return slow + 1.4 * slow + 2.0 * fast + max(0, contenders - 5) * fast


def _commands(workload: Workload, tasks: dict[str, dict[str, Any]], options: DemoOptions) -> dict[str, list[str]]:
    planned = options.run_of(workload.recipe.quick_run)
    shared = {"workload": workload.name, "threads": options.threads, "steps_planned": planned}
    return {
        name: python_command({**shared, **task}, "oxytorch_demo.worker", examples()) for name, task in tasks.items()
    }


def calibrate(workload: Workload, options: DemoOptions, progress: DemoProgress) -> Calibration:
    """Race stock PyTorch's own options against each other and keep the fastest: the rival should be strong."""
    layouts = (False, True) if workload.is_image else (False,)
    made = itertools.product((False, True), layouts, (False, True))
    choices = {str(choice): choice for choice in (StockChoice(*each) for each in made)}
    block = 2 if options.quick else max(3, workload.recipe.block // 2)
    steps = block * (2 if options.quick else 3)
    part = f"calibrate {workload.name}"

    def on_turn(_name: str, count: int) -> None:
        progress.advance(part, 0.3 if count else START_SECONDS / 2, f"{workload.name}: calibrating stock PyTorch")

    tasks = {
        name: {"contender": "stock", "choice": asdict(choice), "seed": 1, "steps": steps}
        for name, choice in choices.items()
    }
    start = race(
        _commands(workload, tasks, options),
        seed=1,
        steps=steps,
        block=block,
        environment=options.environment,
        timeout=options.timeout,
        on_turn=on_turn,
        evaluate=False,
    )
    progress.finish(part)
    seconds = {
        choice: min(block_seconds(block) for block in start[name].blocks[1:]) for name, choice in choices.items()
    }
    return Calibration(min(seconds, key=lambda choice: seconds[choice]), seconds)


def _length(
    workload: Workload, calibration: Calibration, contenders: int, options: DemoOptions, share: float
) -> tuple[int, int]:
    """Starts and steps per start that fit the workload's share of the training time, in whole turns."""
    recipe = workload.recipe
    if options.quick:
        return 1, 2 * min(recipe.block, 4)
    fits = share * options.seconds / recipe.starts / calibration.training_seconds(contenders)
    steps = int(min(recipe.steps, max(recipe.least_steps, fits)))
    return recipe.starts, steps - steps % recipe.block


def tune(workload: Workload, options: DemoOptions, progress: DemoProgress) -> dict[str, float]:
    """Let each trainer tune itself in a process of its own, as the first of a user's runs does; seconds that took.

    What it finds is remembered, so that the starts that are raced check it and go on, as later runs do.
    """
    part, seconds = f"tune {workload.name}", {}
    for name in sorted(present.OURS.intersection(options.contenders)):
        progress.advance(part, 0.0, f"{workload.name}: {name} tunes itself, once")
        started = race(
            _commands(workload, {name: {"contender": name, "seed": FIRST_SEED, "steps": 1}}, options),
            seed=FIRST_SEED,
            steps=1,
            block=1,
            environment=options.environment,
            timeout=options.timeout * 10,
            on_turn=lambda _name, _count: None,
            evaluate=False,
        )
        seconds[name] = started[name].blocks[0].seconds[0]
        progress.advance(part, TUNING_SECONDS, f"{workload.name}: {name} tuned itself in {seconds[name]:.0f} s")
    progress.finish(part)
    return seconds


def _rule(contender: str, choice: StockChoice) -> dict[str, Any]:
    # A rival is stock PyTorch: nothing of oxytorch may be loaded beside it.
    rule: dict[str, Any] = {"forbid": "oxytorch"} if contender.startswith(("plain", "stock")) else {}
    return {**rule, "choice": asdict(choice)} if contender.startswith("stock") else rule


def race_workload(workload: Workload, options: DemoOptions, share: float, progress: DemoProgress) -> WorkloadResult:
    """Calibrate and race one workload."""
    names = list(options.contenders)
    calibration = calibrate(workload, options, progress)
    tuning = tune(workload, options, progress)
    starts, steps = _length(workload, calibration, len(names), options, share)
    block = min(workload.recipe.block, 4) if options.quick else workload.recipe.block
    part = f"train {workload.name}"
    step_seconds = calibration.training_seconds(len(names)) / len(names)
    progress.expect(part, starts * len(names) * (steps * step_seconds + START_SECONDS / 2))
    slow = 4 if any("compiled" in name for name in names) else 1
    results: list[Start] = []
    for seed in range(FIRST_SEED, FIRST_SEED + starts):
        label = f"{workload.name}: start {len(results) + 1} of {starts}"

        def on_turn(name: str, count: int, label: str = label) -> None:
            progress.advance(part, count * step_seconds if count else START_SECONDS / 2, f"{label}, {name}")

        tasks = {
            name: {"contender": name, "seed": seed, "steps": steps} | _rule(name, calibration.choice) for name in names
        }
        results.append(
            race(
                _commands(workload, tasks, options),
                seed=seed,
                steps=steps,
                block=block,
                environment=options.environment,
                timeout=options.timeout * slow,
                on_turn=on_turn,
            )
        )
    progress.finish(part)
    return summarise(workload, str(calibration.choice), results, tuning)


def _race_all(names: list[str], options: DemoOptions, show: Callable[[WorkloadResult], None]) -> list[WorkloadResult]:
    """Race one workload after the other; each result is shown before the next workload starts."""
    loaded = [workloads.load(name) for name in names]
    whole = sum(workload.recipe.share for workload in loaded)
    with DemoProgress() as progress:
        for workload in loaded:
            share = workload.recipe.share / whole
            choices = 8 if workload.is_image else 4
            progress.expect(f"calibrate {workload.name}", 5.0 if options.quick else choices * 2.2)
            progress.expect(
                f"tune {workload.name}", TUNING_SECONDS * len(present.OURS.intersection(options.contenders))
            )
            starts = 1 if options.quick else workload.recipe.starts
            train = 4.0 if options.quick else share * options.seconds
            progress.expect(f"train {workload.name}", train + starts * len(CONTENDERS) * START_SECONDS / 2)
        results = []
        for workload in loaded:
            results.append(race_workload(workload, options, workload.recipe.share / whole, progress))
            with progress.paused():
                show(results[-1])
        return results


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; the exit status is 0, or 1 when a contender failed or a held-out loss is worse than its band."""
    if arguments.threads is not None and arguments.threads < 1:
        print(f"oxytorch demo: --threads must be at least 1, not {arguments.threads}", file=sys.stderr)
        return 2
    if arguments.steps_planned is None and not arguments.quick:
        arguments.steps_planned = STEPS_PLANNED
    if arguments.steps_planned is not None and arguments.steps_planned < 1:
        print(f"oxytorch demo: --steps-planned must be at least 1, not {arguments.steps_planned}", file=sys.stderr)
        return 2
    threads = arguments.threads or len(os.sched_getaffinity(0))
    contenders = CONTENDERS + (COMPILED if arguments.compile else ())
    torch.set_num_threads(1)  # The coordinator only waits and counts.
    cache = tempfile.TemporaryDirectory(prefix="oxytorch-demo-")  # what trainers remember, for this demo alone
    settings = {**environment(threads), "OXYTORCH_CACHE": cache.name}
    options = DemoOptions(
        threads,
        arguments.seconds,
        arguments.timeout,
        arguments.quick,
        contenders,
        settings,
        steps_planned=arguments.steps_planned,
    )

    def show(result: WorkloadResult) -> None:
        if arguments.json != "-":
            present.show(result)

    try:
        if arguments.cpp:
            from . import cpp  # noqa: PLC0415

            results = [cpp.race_cpp(options)]
            show(results[0])
        else:
            results = _race_all(arguments.only or list(workloads.NAMES), options, show)
    except (WorkerFailed, ModuleNotFoundError, FileNotFoundError) as error:
        print(f"oxytorch demo: {error}", file=sys.stderr)
        return 1
    finally:
        cache.cleanup()
    document: dict[str, Any] = {
        "schema": "oxytorch-demo/1",
        "machine": machine.describe(threads),
        "quick": options.quick,
        "workloads": [result.to_json() for result in results],
    }
    folder = Path(arguments.out)
    written = page.write(folder / "demo.html", results, document["machine"])
    document["report"] = str(written)
    if arguments.json == "-":
        print(present.to_json(document))
    else:
        if arguments.json:
            write_whole(arguments.json, present.to_json(document) + "\n")
        present.show_end(document["machine"], written)
    return 1 if any(row.worse for result in results for row in result.rows if row.contender in present.OURS) else 0
