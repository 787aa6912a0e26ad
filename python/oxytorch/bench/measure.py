"""Starts the subject and the calibration as processes, in turn, and sums up what they took."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .gate import Measurement
from .step import CALIBRATION
from .turns import machine
from .turns.driver import Block, Start, race
from .turns.environment import environment

__all__ = ["MeasurementPlan", "machine_key", "probe", "take"]

TURNS, TURN_SECONDS, MOST_STEPS = 8, 0.25, 500
LOSSES_KEPT = 100
SUBJECT = "subject"


@dataclass(frozen=True)
class MeasurementPlan:
    """How a subject is measured; kept with the baseline, so that the next run does the same.

    ``block`` steps a turn of the subject, ``units`` of work a turn of the calibration.
    """

    threads: int
    block: int
    units: int
    turns: int = TURNS


def machine_key(threads: int) -> dict[str, str]:
    """What must be equal for two measurements to be compared."""
    facts = machine.describe(threads)
    return {key: facts[key] for key in ("cpu", "instructions", "cores", "threads", "torch", "python")}


def _start(subject: str, plan: MeasurementPlan, seed: int, steps: int, timeout: float) -> Start:
    commands = {}
    for name, each in ((SUBJECT, subject), (CALIBRATION, CALIBRATION)):
        task = {"subject": each, "threads": plan.threads, "units": plan.units, "coordinator": os.getpid()}
        commands[name] = [sys.executable, "-m", "oxytorch.bench.step", json.dumps(task)]
    return race(
        commands,
        seed=seed,
        steps=steps,
        block=plan.block,
        environment=environment(plan.threads),
        timeout=timeout,
        on_turn=lambda _name, _steps: None,
    )


def probe(subject: str, threads: int, timeout: float) -> MeasurementPlan:
    """Find out how long a step takes, and plan turns of a quarter of a second."""
    start = _start(subject, MeasurementPlan(threads, 2, 3), 0, 6, timeout)
    lengths = (min(start[name].blocks[-1].seconds) for name in (SUBJECT, CALIBRATION))
    block, units = (max(1, min(MOST_STEPS, round(TURN_SECONDS / length))) for length in lengths)
    return MeasurementPlan(threads, block, max(3, units))


def _turn(block: Block) -> float:
    return statistics.median(block.seconds[1:] or block.seconds)


def summed_up(starts: list[Start]) -> Measurement:
    """Figures of all starts; the first turn of each warms up."""
    turns = {
        name: [[_turn(block) for block in start[name].blocks[1:]] for start in starts]
        for name in (SUBJECT, CALIBRATION)
    }
    losses = [[loss for block in start[SUBJECT].blocks for loss in block.losses] for start in starts]
    steps = [step for step in range(len(losses[0])) if not all(math.isnan(each[step]) for each in losses)]
    steps = steps[:: max(1, math.ceil(len(steps) / LOSSES_KEPT))]
    return Measurement(
        step_seconds=[statistics.median(each) for each in turns[SUBJECT]],
        relative=[
            statistics.median(a / b for a, b in zip(one, other, strict=True))
            for one, other in zip(turns[SUBJECT], turns[CALIBRATION], strict=True)
        ],
        peak_bytes=[float(start[SUBJECT].peak_bytes) for start in starts],
        loss_steps=steps,
        loss_low=[min(each[step] for each in losses) for step in steps],
        loss_high=[max(each[step] for each in losses) for step in steps],
    )


def take(
    subject: str, plan: MeasurementPlan, starts: int, timeout: float, on_start: Callable[[int], Any]
) -> Measurement:
    """Measure ``subject`` in ``starts`` processes.

    Raises
    ------
    WorkerFailed
        When the subject raises, dies or takes over ``timeout`` seconds for a turn; the message has what it printed.
    """
    done = []
    for index in range(starts):
        on_start(index)
        done.append(_start(subject, plan, index, plan.block * plan.turns, timeout))
    return summed_up(done)
