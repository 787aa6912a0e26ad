"""What a monitored step costs a Python training loop, in microseconds over the same loop without a monitor.

Run: python bench/monitor/python_step.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import oxytorch as ox
import torch

STEPS = 20_000
ROUNDS = 7


def per_step(loop: Callable[[int], None]) -> float:
    """CPU microseconds of this thread per step."""
    begin = time.thread_time_ns()
    loop(STEPS)
    return (time.thread_time_ns() - begin) / STEPS / 1e3


def bare(steps: int) -> None:
    for _ in range(steps):
        pass


def phases(mon: ox.PerformanceMonitor, value: object) -> Callable[[int], None]:
    def loop(steps: int) -> None:
        for _ in range(steps):
            with mon.step(samples=32):
                with mon.phase("data"):
                    pass
                with mon.phase("forward"):
                    pass
                with mon.phase("backward"):
                    pass
                with mon.phase("optimizer"):
                    pass
                mon.scalar("loss", value)  # type: ignore[arg-type]

    return loop


def full(mon: ox.PerformanceMonitor) -> Callable[[int], None]:
    names = [f"phase{i}" for i in range(8)]
    scalars = [f"scalar{i}" for i in range(16)]

    def loop(steps: int) -> None:
        for _ in range(steps):
            with mon.step(samples=32):
                for name in names:
                    with mon.phase(name):
                        pass
                for name in scalars:
                    mon.scalar(name, 1.0)

    return loop


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        jsonl = ox.PerformanceMonitor([ox.monitor.Jsonl(Path(folder) / "run.jsonl")])
        contenders = {
            "bare loop": bare,
            "4 phases, 1 float": phases(ox.PerformanceMonitor(), 1.0),
            "4 phases, 1 CPU tensor": phases(ox.PerformanceMonitor(), torch.tensor(1.0)),
            "4 phases, 1 float, JSONL": phases(jsonl, 1.0),
            "8 phases, 16 floats": full(ox.PerformanceMonitor()),
        }
        figures: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(ROUNDS):
            for name, loop in contenders.items():
                figures[name].append(per_step(loop))
        base = sorted(figures["bare loop"])[ROUNDS // 2]
        for name, values in figures.items():
            print(f"{name:28s} {sorted(values)[ROUNDS // 2] - base:7.2f} us per step (median of {ROUNDS})")
        jsonl.close()


main()
