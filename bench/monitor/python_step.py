"""What a monitored step costs a Python training loop, in microseconds over the same loop without a monitor.

    python bench/monitor/python_step.py [--json FILE]

The document also holds what `monitor_bench` says of C++, where that is built.
"""

from __future__ import annotations

import argparse
import json
import subprocess
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


PROGRAM = Path(__file__).resolve().parents[2] / "build/dev/bench/monitor/monitor_bench"
CPP_NAMES = {"phases:4/scalars:1/": "4 phases, 1 float", "phases:8/scalars:16/": "8 phases, 16 floats"}


def from_cpp() -> dict[str, float]:
    """CPU microseconds of a step in C++."""
    if not PROGRAM.exists():
        return {}
    command = [
        str(PROGRAM),
        "--benchmark_filter=monitored_step",
        "--benchmark_format=json",
        "--benchmark_repetitions=7",
    ]
    runs = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["benchmarks"]
    return {
        said: run["cpu_time"] / 1e3  # from nanoseconds
        for part, said in CPP_NAMES.items()
        for run in runs
        if part in run["name"] and run.get("aggregate_name") == "median"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
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
        base = sorted(figures.pop("bare loop"))[ROUNDS // 2]
        python = {name: sorted(values)[ROUNDS // 2] - base for name, values in figures.items()}
        for name, value in python.items():
            print(f"{name:28s} {value:7.2f} us per step (median of {ROUNDS})")
        if arguments.json is not None:
            document = {"torch": torch.__version__, "python_us": python, "cpp_us": from_cpp()}
            arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        jsonl.close()


main()
