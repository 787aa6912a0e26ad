"""The largest batch that fits, and how fast each batch size is: found by running real steps, leaving no trace."""

from __future__ import annotations

import ctypes
import gc
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from ..base import format_size, median, parse_size, system_info
from ..model.snapshot import Reach, Snapshot

__all__ = ["BatchPlan", "BatchTrial", "batch_curve", "largest_batch", "release_cache", "set_memory_fraction"]

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "alloc_failed")
_SLOWER = 1.02  # a doubled batch must give so many times the samples a second to be worth another doubling


@dataclass(frozen=True)
class BatchTrial:
    """One batch size, as it ran."""

    size: int
    """Samples in the batch."""
    fits: bool
    """Whether its steps ran within the limit, headroom left."""
    peak_bytes: int | None
    """Most memory in use during the steps; None where they ran out of it."""
    step_seconds: float | None
    """Median of the steps after the first; None where they ran out of memory."""
    reason: str
    """Why it does not fit; empty where it does."""

    @property
    def samples_per_second(self) -> float:
        """Samples a second; 0 where it did not run."""
        return self.size / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True)
class BatchPlan:
    """What batch sizes take and give. Every size in it has been run."""

    largest: int
    """The largest size that ran within the limit with headroom left."""
    fastest: int
    """The smallest size within 2 % of the most samples a second."""
    trials: tuple[BatchTrial, ...]
    """By size."""
    limit_bytes: int
    headroom: float
    """Share of the limit that is left free."""
    samples: int | None
    """In an epoch, where given."""
    current: int | None
    """The batch size of today, where given."""

    def split(self, batch: int) -> tuple[int, int]:
        """Return (samples a piece, pieces) that make up exactly `batch` with the fewest pieces that fit.

        Accumulating gradients over the pieces keeps the batch, and so the updates, as they are.

        Raises
        ------
        ValueError
            For a batch under 1.
        """
        if batch < 1:
            raise ValueError(f"batch is {batch}, expected at least 1.")
        pieces = next(n for n in range(1, batch + 1) if batch % n == 0 and batch // n <= self.largest)
        return batch // pieces, pieces

    def table(self) -> str:
        """Return the sizes as a table, and what another batch size does to convergence."""
        heads = ["batch", "fits", "peak", "step", "samples/s"]
        if self.samples:
            heads.append("updates/epoch")
        rows = [heads]
        for trial in self.trials:
            ran = trial.step_seconds is not None
            row = [
                str(trial.size),
                "yes" if trial.fits else "no",
                format_size(trial.peak_bytes) if trial.peak_bytes is not None else "-",
                f"{1e3 * trial.step_seconds:.4g} ms" if trial.step_seconds is not None else "-",
                f"{trial.samples_per_second:.4g}" if ran else "-",
            ]
            if self.samples:
                row.append(str(math.ceil(self.samples / trial.size)))
            rows.append(row)
        widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines += [f"{trial.size}: {trial.reason}" for trial in self.trials if trial.reason]
        lines.append(
            f"Limit {format_size(self.limit_bytes)}, {self.headroom:.0%} of it left free. Largest that ran: "
            f"{self.largest}; fastest: {self.fastest}."
        )
        return "\n".join([*lines, self._convergence()])

    def _convergence(self) -> str:
        if self.current is None or self.current == self.fastest:
            change = (
                "A batch k times as large makes 1/k as many updates an epoch, with a k-th of the gradient's variance"
            )
        else:
            ratio = self.fastest / self.current
            change = (
                f"A batch of {self.fastest} in place of {self.current} makes {1 / ratio:.3g} times as many updates an "
                f"epoch, with {1 / ratio:.3g} times the gradient's variance"
            )
        return (
            f"{change}: the run converges otherwise, and may need more epochs. Learning rates are commonly scaled with "
            "the batch (SGD) or with its square root (Adam); nothing was changed here. split(batch) keeps the batch by "
            "accumulating over pieces that fit."
        )


class _Memory(Protocol):
    """Where a step's memory is: measured, capped and given back."""

    def total(self) -> int:
        """Bytes that this process may come to use."""

    def release(self) -> None:
        """Give back what is only cached."""

    def begin(self) -> None:
        """Start measuring the peak."""

    def peak(self) -> int:
        """Return the peak since begin(), bytes."""

    def capped(self, limit: int) -> Any:
        """Return a context in which going over the limit raises instead of ending the process."""

    def synchronize(self) -> None:
        """Wait for the device."""


class _Host:
    """Resident memory of this process. Allocations over the limit fail by RLIMIT_DATA, so that nothing is killed."""

    def total(self) -> int:
        memory = system_info()["memory"]
        return int(memory["resident"]) + int(memory["available"])

    def release(self) -> None:
        gc.collect()
        with suppress(AttributeError):  # glibc's
            ctypes.CDLL(None).malloc_trim(0)

    def begin(self) -> None:
        with suppress(OSError):  # without the right to, the peak is that of the process since it began
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return int(system_info()["memory"]["peak_resident"])

    @contextmanager
    def capped(self, limit: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_DATA)
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        mapped = int(fields["VmData"].split()[0]) * 1024
        room = max(0, limit - int(system_info()["memory"]["resident"]))
        cap = mapped + room if before[0] == resource.RLIM_INFINITY else min(mapped + room, before[0])
        resource.setrlimit(resource.RLIMIT_DATA, (cap, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)

    def synchronize(self) -> None:
        """Nothing is in flight."""


class _Device:
    """What torch's caching allocator has taken from a device; over the limit it raises by itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.api = torch.get_device_module(device)

    def total(self) -> int:
        free, _ = self.api.mem_get_info(self.device)
        return int(free) + int(self.api.memory_reserved(self.device))

    def release(self) -> None:
        gc.collect()
        self.api.empty_cache()

    def begin(self) -> None:
        self.api.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return int(self.api.max_memory_reserved(self.device))

    @contextmanager
    def capped(self, limit: int) -> Iterator[None]:
        _, total = self.api.mem_get_info(self.device)
        before = self.api.get_per_process_memory_fraction(self.device)
        self.api.set_per_process_memory_fraction(min(before, limit / total), self.device)
        try:
            yield
        finally:
            self.api.set_per_process_memory_fraction(before, self.device)

    def synchronize(self) -> None:
        self.api.synchronize(self.device)


def _memory_of(device: torch.device | str | None) -> _Memory:
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = found if found is not None else "cpu"
    device = torch.device(device)
    return _Host() if device.type == "cpu" else _Device(device)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OUT_OF_MEMORY)


class _Bench:
    """Runs sizes, each from the same state and leaving it as it was."""

    def __init__(
        self,
        step: Callable[[Any], Any],
        make_batch: Callable[[int], Any],
        limit: int | str | None,
        headroom: float,
        state: Sequence[Any] | None,
        device: torch.device | str | None,
        steps: int,
    ) -> None:
        if not 0 <= headroom < 1:
            raise ValueError(f"headroom is {headroom}, expected a share from 0 up to but not including 1.")
        if steps < 1:
            raise ValueError(f"steps is {steps}, expected at least 1.")
        self.step, self.make_batch, self.steps = step, make_batch, steps
        self.memory = _memory_of(device)
        total = self.memory.total()
        self.limit = total if limit is None else min(parse_size(limit, total), total)
        self.headroom = headroom
        self.usable = int(self.limit * (1 - headroom))
        named = [("step", Reach(step))] if state is None else [(f"state[{i}]", one) for i, one in enumerate(state)]
        self.snapshot = Snapshot(named)
        self.trials: dict[int, BatchTrial] = {}
        self.memory.release()
        self.memory.begin()
        self.base = self.memory.peak()

    def run(self, size: int) -> BatchTrial:
        if size not in self.trials:
            try:
                self.trials[size] = self._run(size)
            finally:
                self.snapshot.restore()
                self.memory.release()
        return self.trials[size]

    def _run(self, size: int) -> BatchTrial:
        self.memory.begin()
        times: list[float] = []
        try:
            with self.memory.capped(self.limit):
                batch = self.make_batch(size)
                for _ in range(self.steps + 1):
                    began = time.perf_counter()
                    self.step(batch)
                    self.memory.synchronize()
                    times.append(time.perf_counter() - began)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            error.__traceback__ = None  # its frames hold tensors
            return BatchTrial(size, False, None, None, f"ran out of memory ({str(error).splitlines()[0][:120]})")
        peak = self.memory.peak()
        fits = peak <= self.usable
        over = f"took {format_size(peak)}, over the {format_size(self.usable)} that may be used"
        return BatchTrial(size, fits, peak, median(times[1:]), "" if fits else over)

    def predicted(self, size: int) -> float:
        """Peak of a size not run yet, bytes: on from the largest that fits, as steeply as memory has grown so far."""
        known = sorted((t.size, t.peak_bytes) for t in self.trials.values() if t.fits and t.peak_bytes is not None)
        points = [(0, self.base), *known]
        slope = max((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points))
        return points[-1][1] + max(0.0, slope) * (size - points[-1][0])

    def first(self, start: int) -> BatchTrial:
        trial = self.run(start)
        if not trial.fits:
            raise torch.OutOfMemoryError(
                f"a batch of {start} {trial.reason}, of a limit of {format_size(self.limit)}; raise limit=, or start= "
                "from a smaller batch."
            )
        return trial

    def plan(self, samples: int | None, current: int | None) -> BatchPlan:
        trials = tuple(self.trials[size] for size in sorted(self.trials))
        fit = [trial for trial in trials if trial.fits]
        most = max(trial.samples_per_second for trial in fit)
        fastest = next(trial.size for trial in fit if trial.samples_per_second * _SLOWER >= most)
        return BatchPlan(fit[-1].size, fastest, trials, self.limit, self.headroom, samples, current)


def _checked(start: int, most: int, multiple: int) -> None:
    if multiple < 1 or start < 1 or start % multiple != 0:
        raise ValueError(f"start is {start} and multiple {multiple}; start must be a positive multiple of multiple.")
    if most < start:
        raise ValueError(f"most is {most}, expected at least start, which is {start}.")


def largest_batch(
    step: Callable[[Any], Any],
    make_batch: Callable[[int], Any],
    limit: int | str | None = None,
    *,
    start: int = 1,
    most: int = 1 << 20,
    multiple: int = 1,
    headroom: float = 0.1,
    resolution: float = 0.02,
    steps: int = 2,
    state: Sequence[Any] | None = None,
    device: torch.device | str | None = None,
    samples: int | None = None,
    current: int | None = None,
) -> BatchPlan:
    """Find the largest batch whose training step runs within a memory limit, by running it.

    Sizes double until one does not fit or is predicted not to, then the gap between the last that ran and the first
    that did not is halved. A straight line through the peaks measured so far only chooses which size to run next. After
    every trial, and after an error, parameters, optimizer and random states are what they were before, bit for bit.

    Parameters
    ----------
    step : callable
        Takes a batch and does a whole training step with it: forward, backward, optimizer.
    make_batch : callable
        Takes a number of samples and returns such a batch.
    limit : int or str, optional
        Bytes for the whole process (``"8GB"``, ``"50%"``): resident memory on a CPU, what torch's allocator has taken
        on a device. Default: all that this process can get now.
    start, most : int
        The first size, and the largest to try.
    multiple : int
        Sizes are multiples of it.
    headroom : float
        Share of the limit that the peak must leave free.
    resolution : float
        The search ends where what is left between fitting and not fitting is under this share of the size.
    steps : int
        Timed steps of each size, after one that is not.
    state : sequence, optional
        What the steps change (model, optimizer, scheduler, scaler). Default: all that `step` reaches by closures, as
        its object, or by the names of globals, and what that reaches in turn.
    device : torch.device or str, optional
        Where the step runs. Default: the accelerator where there is one, else the CPU.
    samples : int, optional
        In an epoch: the table then says how many updates an epoch makes.
    current : int, optional
        The batch size of today, which the table compares with.

    Returns
    -------
    BatchPlan
        `largest` and `fastest` are sizes that were run; `table()` also says what another batch does to convergence.

    Raises
    ------
    torch.OutOfMemoryError
        Where not even `start` fits.
    ValueError
        For arguments that do not fit together.

    Notes
    -----
    On a CPU an allocation beyond the limit is refused to this process while a size runs (``RLIMIT_DATA``), so that the
    kernel's out-of-memory killer is not met; memory that other processes take meanwhile is out of its reach. What
    `step` throws for any other reason passes through, the state put back. The device side was not run on a device yet.

    Examples
    --------
    >>> plan = largest_batch(train, lambda n: (torch.randn(n, 3, 64, 64), torch.randint(10, (n,))), limit="2GB")
    >>> print(plan.table())
    """
    _checked(start, most, multiple)
    bench = _Bench(step, make_batch, limit, headroom, state, device, steps)
    bench.first(start)
    good, bad = start, (most // multiple + 1) * multiple
    refused = guided = False
    while bad - good > max(multiple, int(good * resolution) // multiple * multiple):
        size = good + _stride(bench, good, multiple, refused, guided, bad - good)
        guided = not guided
        if bench.run(min(size, bad - multiple)).fits:
            good = min(size, bad - multiple)
        else:
            bad, refused = min(size, bad - multiple), True
    return bench.plan(samples, current)


def _stride(bench: _Bench, good: int, multiple: int, refused: bool, guided: bool, room: int) -> int:
    """Return how far beyond `good` to try: to where memory is predicted to end, or else where the bounds close fast.

    The prediction has every second turn: alone it would creep where memory grows in jumps.
    """
    ahead = bench.predicted(good)
    slope = bench.predicted(good + 1) - ahead
    reach = (bench.usable - ahead) / slope if slope > 0 else math.inf
    if not refused and reach >= good:
        return good  # doubled
    whole = int(min(reach, room)) // multiple * multiple
    if not guided and multiple <= whole < room:
        return whole
    return max(multiple, (room // 2 if refused else good // 8) // multiple * multiple)


def batch_curve(
    step: Callable[[Any], Any],
    make_batch: Callable[[int], Any],
    limit: int | str | None = None,
    *,
    start: int = 1,
    most: int = 1 << 20,
    headroom: float = 0.1,
    steps: int = 5,
    state: Sequence[Any] | None = None,
    device: torch.device | str | None = None,
    samples: int | None = None,
    current: int | None = None,
) -> BatchPlan:
    """Measure samples a second against batch size, doubling until it no longer pays or fits.

    It ends after two doublings in a row that gave under 2 % more samples a second. Parameters, errors and what is left
    behind (nothing) are those of `largest_batch`; `largest` is the largest size that was run, not the largest that
    would fit.
    """
    _checked(start, most, 1)
    bench = _Bench(step, make_batch, limit, headroom, state, device, steps)
    best = bench.first(start).samples_per_second
    size, idle = start, 0
    while idle < 2 and 2 * size <= most and bench.predicted(2 * size) <= bench.usable:
        size *= 2
        trial = bench.run(size)
        if not trial.fits:
            break
        idle = idle + 1 if trial.samples_per_second < _SLOWER * best else 0
        best = max(best, trial.samples_per_second)
    return bench.plan(samples, current)


def set_memory_fraction(fraction: float, device: torch.device | str | None = None) -> None:
    """Let torch's allocator take at most this share of a device's memory; over it, it raises OutOfMemoryError.

    Raises
    ------
    NotImplementedError
        On a CPU, where torch's allocator keeps no account.
    ValueError
        For a share that is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}, expected over 0 and at most 1.")
    memory = _memory_of(device)
    if not isinstance(memory, _Device):
        raise NotImplementedError("a CPU has no memory fraction in torch; give limit= to largest_batch instead.")
    memory.api.set_per_process_memory_fraction(fraction, memory.device)


def release_cache(device: torch.device | str | None = None) -> None:
    """Give back memory that allocators only keep: torch's cache on a device, glibc's free pages on a CPU."""
    _memory_of(device).release()
