"""Measures how `oxytorch.data.Loader` brings batches to a device: the rate, what a step waits, pinned memory.

Steps of a fixed length on batches of a file that is in memory: with the batch already there, with `device=` of the
loader, with a copy in the loop, and by torch's DataLoader with workers and pinned memory. They take turns in a random
order each round; a step is timed by the device's own events, over an epoch.

    python bench/race/cuda/loader_copies.py [--device cuda] [--seconds 30] [--quick] [--json PATH] [--out FOLDER]

`--device cpu --quick` runs the same code, to see that it works. Prints the figures and whether each promise is met, and
writes bench/report/loader_copies.{json,html}. The exit status is 0 whether or not promises are met, and 2 where there
is no such device.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from _device_race import run
from _race import LEAST_ROUNDS, MOST_ROUNDS, Figure, ratio
from device_tail import Clock, Times, exactly
from oxytorch.data import Loader, open_raw
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SCHEMA = "oxytorch-loader-copies/1"
ROW = 4096
"""float32 values of a sample."""
THERE, OURS, IN_LOOP, TORCH = "batch already there", "device= of the loader", "a copy in the loop", "torch DataLoader"
COPIES_A_STEP = 4
"""A step takes as long as so many copies of its batch, so that a copy beside it has the time."""
Feeds = dict[str, Callable[[], Iterable[Tensor]]]


class Rows(Dataset[Tensor]):
    """The same file for torch's DataLoader."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size // (4 * ROW)
        self.file: np.ndarray | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        if self.file is None:  # each worker maps it itself
            self.file = np.memmap(self.path, dtype="float32", mode="c", shape=(self.size, ROW))
        return torch.from_numpy(self.file[index])


def pinned_rate(device: torch.device, clock: Clock, count: int) -> float | None:
    """Bytes a second of a large copy from pinned memory; None where there is none."""
    if device.type == "cpu":
        return None
    source = torch.ones(count, pin_memory=True)
    target = torch.empty(count, device=device)
    target.copy_(source, non_blocking=True)
    best = min(clock.seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(10))
    return source.nbytes / best


def step_of(device: torch.device, clock: Clock, seconds: float) -> Callable[[Tensor], None]:
    """A step that reads its batch and multiplies matrices for about so long."""
    weight = torch.randn(ROW, ROW, device=device) if device.type == "cuda" else torch.randn(256, 256)
    out = torch.empty_like(weight)
    torch.mm(weight, weight, out=out)
    once = min(clock.seconds(lambda: torch.mm(weight, weight, out=out), 3) for _ in range(3))
    products = max(1, round(seconds / once))
    total = torch.zeros((), device=device)

    def step(batch: Tensor) -> None:
        total.add_(batch[:, :8].sum())
        for _ in range(products):
            torch.mm(weight, weight, out=out)

    return step


def race(feeds: Feeds, step: Callable[[Tensor], None], clock: Clock, batches: int, seconds: float) -> Times:
    """Seconds of a step by feed and round; the first round, which is no part of it, starts workers."""
    times: dict[str, list[float]] = {name: [] for name in feeds}
    order = np.random.default_rng(5)
    spent = 0.0
    for index in range(MOST_ROUNDS + 1):
        if index > LEAST_ROUNDS and spent > seconds:
            break
        for name in order.permutation(list(feeds)):

            def epoch(feed: Callable[[], Iterable[Tensor]] = feeds[name]) -> None:
                for batch in feed():
                    step(batch)

            took = clock.seconds(epoch)
            if index > 0:
                times[name].append(took / batches)
                spent += took
    return {name: np.array(values) for name, values in times.items()}


def pinned_allocations(device: torch.device) -> int | None:
    """How often torch has asked the driver for pinned memory; None where it does not say."""
    statistics = getattr(torch.cuda, "host_memory_stats", None)
    return int(statistics()["num_host_alloc"]) if device.type == "cuda" and statistics is not None else None


def measure(device: torch.device, quick: bool, seconds: float) -> tuple[list[Figure], Times]:
    """All figures."""
    clock = Clock(device)
    batch, batches = (16, 4) if quick else (4096, 24)  # 64 MiB
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.bin"
        np.random.default_rng(3).random((batch * batches, ROW), dtype="float32").tofile(path)
        rows = open_raw(path, "float32", [ROW])
        peak = pinned_rate(device, clock, 1 << 20 if quick else 1 << 26)
        step = step_of(device, clock, COPIES_A_STEP * 4 * ROW * batch / peak if peak else 1e-4)
        ours = Loader(rows, batch, device=device)
        beside = Loader(rows, batch)
        workers = 0 if quick else 4
        torch_loader = DataLoader(
            Rows(path), batch, num_workers=workers, pin_memory=device.type == "cuda", persistent_workers=workers > 0
        )
        one = next(iter(ours))["array"].clone()

        def moved(given: Iterable[Tensor]) -> Iterator[Tensor]:
            return (each.to(device, non_blocking=True) for each in given)

        feeds: Feeds = {
            THERE: lambda: [one] * batches,
            OURS: lambda: (each["array"] for each in ours),
            IN_LOOP: lambda: moved(each["array"] for each in beside),
            TORCH: lambda: moved(torch_loader),
        }
        for each in ours:  # warms up
            step(each["array"])
        before = pinned_allocations(device)
        times = race(feeds, step, clock, batches, seconds)
        stats = ours.stats()
        for each in ours:
            step(each["array"])
    copied = stats.get("copy_seconds", 0.0)
    rate = stats["copied_bytes"] / copied if copied else None
    no_copy = "" if rate and peak else "nothing is copied on this device"
    after = pinned_allocations(device)
    return [
        Figure("copies from pinned memory, GB/s", exactly(peak / 1e9) if peak else None, absent=no_copy),
        Figure(
            "the loader's copies beside steps, over it",
            exactly(rate / peak) if rate and peak else None,
            0.9,
            absent=no_copy,
        ),
        Figure("a step with device=, over one with its batch there", ratio(times, OURS, THERE), 1.02, at_most=True),
        *(Figure(f"{name}, over device=", ratio(times, name, OURS)) for name in (IN_LOOP, TORCH)),
        Figure(
            "pinned allocations after the first epoch, all feeds",
            None if before is None or after is None else exactly(after - before),
            0,
            at_most=True,
            absent="" if before is not None else "torch does not count them here",
        ),
    ], times


if __name__ == "__main__":
    sys.exit(run(__doc__, "loader_copies", SCHEMA, measure, seconds=30.0))
