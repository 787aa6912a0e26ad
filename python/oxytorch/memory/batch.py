"""The largest batch that fits, and how fast each batch size is: found by running real steps, leaving no trace."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from .._C import memory as _native
from ..base import parse_size, system_info
from ..model.snapshot import snapshot_of_step

__all__ = ["BatchPlan", "BatchTrial", "batch_curve", "largest_batch", "release_cache", "set_memory_fraction"]

BatchPlan = _native.BatchPlan
BatchTrial = _native.BatchTrial


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
        _native.give_back_host_memory()

    def begin(self) -> None:
        _native.reset_host_peak()

    def peak(self) -> int:
        return int(system_info()["memory"]["peak_resident"])

    @contextmanager
    def capped(self, limit: int) -> Iterator[None]:
        cap = _native.cap_host_memory(limit)
        try:
            yield
        finally:
            cap.revert()

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
        found = torch.accelerator.current_accelerator(check_available=True)
        device = found if found is not None else "cpu"
    device = torch.device(device)
    return _Host() if device.type == "cpu" else _Device(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether it is one of having run out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_native.says_out_of_memory(str(error)))


def _searched(
    step: Callable[[Any], Any],
    make_batch: Callable[[int], Any],
    limit: int | str | None,
    state: Sequence[Any] | None,
    device: torch.device | str | None,
    steps: int,
    samples: int | None,
    current: int | None,
    **options: Any,
) -> BatchPlan:
    """Run the sizes that the native search names, each from the same state and leaving it as it was."""
    if steps < 1:
        raise ValueError(f"steps is {steps}, expected at least 1.")
    memory = _memory_of(device)
    total = memory.total()
    usable = total if limit is None else min(parse_size(limit, total), total)
    snapshot = snapshot_of_step(step, state)
    memory.release()
    memory.begin()
    search = _native.BatchSearch(usable, memory.peak(), **options)
    while (size := search.next()) is not None:
        try:
            found = _run(step, make_batch, size, memory, usable, steps)
        finally:
            snapshot.restore()
            memory.release()
        if isinstance(found, str):
            search.ran_out(found)
        else:
            search.ran(*found)
    return search.plan(samples, current)


def _run(
    step: Callable[[Any], Any], make_batch: Callable[[int], Any], size: int, memory: _Memory, limit: int, steps: int
) -> tuple[int, list[float]] | str:
    """Return the peak and the seconds of each timed step; or what said that there was no memory."""
    memory.begin()
    times: list[float] = []
    try:
        with memory.capped(limit):
            batch = make_batch(size)
            for _ in range(steps + 1):
                began = time.perf_counter()
                step(batch)
                memory.synchronize()
                times.append(time.perf_counter() - began)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        error.__traceback__ = None  # its frames hold tensors
        return str(error)
    return memory.peak(), times[1:]


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
    `step` throws for any other reason passes through, the state put back. The device side has not been measured
    on a card.

    Examples
    --------
    >>> plan = largest_batch(train, lambda n: (torch.randn(n, 3, 64, 64), torch.randint(10, (n,))), limit="2GB")
    >>> print(plan.table())
    """
    return _searched(
        step, make_batch, limit, state, device, steps, samples, current,
        start=start, most=most, multiple=multiple, headroom=headroom, resolution=resolution,
    )  # fmt: skip


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
    return _searched(
        step, make_batch, limit, state, device, steps, samples, current,
        start=start, most=most, headroom=headroom, curve=True,
    )  # fmt: skip


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
