"""Six training workloads on torch's allocator, with glibc tuned, on the pool of huge pages, and on both.

Each is a process of its own, the settings taken in turn in each round; figures are the median over rounds of a round's
median step, and page faults a step.

Run: python bench/memory/host_pool.py [workload ...]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "race"))

import oxytorch as ox
import torch
from _orchestrator.models import MAKERS

ROUNDS = 3
SECONDS = 1.5
NATIVE = ox._C.trainer
POOL, GLIBC = ox.memory.use_host_pool, NATIVE.tune_allocator
# glibc cannot go back to where it started: what tunes it runs after the rest.
SETTINGS = {"torch": [], "pool": [POOL], "glibc tuned": [GLIBC], "both": [POOL, GLIBC]}
TURNS = (("torch", "pool"), ("glibc tuned", "both"))


def measure(name: str) -> None:
    """Print one workload's line."""
    workload = MAKERS[name]()
    torch.manual_seed(0)
    model, batches = workload.make_model(), workload.make_batches(0, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr)

    def steps(seconds: float, least: int) -> tuple[float, float]:
        times: list[float] = []
        faults, end = NATIVE.page_faults(), time.perf_counter() + seconds
        while len(times) < least or time.perf_counter() < end:
            begin = time.perf_counter()
            optimizer.zero_grad()
            workload.loss(model, batches[len(times) % len(batches)]).backward()
            optimizer.step()
            times.append(time.perf_counter() - begin)
        return statistics.median(times) * 1e3, (NATIVE.page_faults() - faults) / len(times)

    steps(0, 3)
    rounds: dict[str, list[tuple[float, float]]] = {}
    for order in TURNS:
        for _ in range(ROUNDS):
            for setting in order:
                applied = [apply() for apply in SETTINGS[setting]]
                assert all(each.is_applied for each in applied), [each.reason for each in applied]
                steps(0, 2)
                rounds.setdefault(setting, []).append(steps(SECONDS, 4))
                for each in reversed(applied):
                    each.revert()
    cells = [[statistics.median(values) for values in zip(*rounds[setting], strict=True)] for setting in SETTINGS]
    print(f"| {name} | {' | '.join(f'{ms:.4g} ({faults:,.0f})' for ms, faults in cells)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        measure(sys.argv[1])
    else:
        print(
            f"| workload, ms a step (page faults) | {' | '.join(SETTINGS)} |\n|{'---|' * (len(SETTINGS) + 1)}",
            flush=True,
        )
        for name in sys.argv[1:] or MAKERS:
            subprocess.run([sys.executable, __file__, name], check=True)
