"""Step and phase times of a training loop, sinks for them, and reports.

The step path takes no memory in the native part, no lock and no system call, and never waits for a device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import SupportsFloat

import torch

from ._C import monitor as _native
from ._C.monitor import (
    Bar,
    Callback,
    Cell,
    Column,
    Console,
    Distribution,
    Jsonl,
    PhaseSummary,
    Report,
    ScalarSummary,
    Series,
    Sink,
    Summary,
)

__all__ = [
    "Bar",
    "Callback",
    "Cell",
    "Column",
    "Console",
    "Distribution",
    "Jsonl",
    "PerformanceMonitor",
    "PhaseSummary",
    "Report",
    "ScalarSummary",
    "Series",
    "Sink",
    "Summary",
]

_DRAIN_SECONDS = 0.5


class PerformanceMonitor:
    """Times the steps of a training loop and the phases inside them.

    One thread steps; any thread may flush and read summaries meanwhile. Times are the host's: on a device that runs
    behind the host they are the time to launch, not to compute.

    Parameters
    ----------
    sinks
        Receivers of finished steps, for example ``[ox.monitor.Jsonl("run.jsonl"), ox.monitor.Console()]``.
    ring_records
        Finished steps kept for the sinks between drains. When it is full the oldest give way and are counted in
        ``summary().dropped``; the statistics miss nothing.
    max_phases, max_scalars
        Distinct names; their memory is taken here.
    curve_points
        Points kept of each curve of the report; a longer run merges neighbours.
    drain_seconds
        Longest time between two drains to the sinks by a background thread; 0 for no thread, so that only `flush` and
        `close` drain. By default 0.5 if there are sinks and 0 otherwise.

    Raises
    ------
    ValueError
        If a capacity is zero or `drain_seconds` is negative or not finite.

    Examples
    --------
    >>> mon = PerformanceMonitor()
    >>> for loss in (3.0, 2.0, 1.0):
    ...     with mon.step(samples=32):
    ...         with mon.phase("forward"):
    ...             pass
    ...         mon.scalar("loss", loss)
    >>> mon.summary().steps
    3
    """

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        *,
        ring_records: int = 1024,
        max_phases: int = 32,
        max_scalars: int = 64,
        curve_points: int = 512,
        drain_seconds: float | None = None,
    ) -> None:
        sinks = list(sinks)
        if drain_seconds is None:
            drain_seconds = _DRAIN_SECONDS if sinks else 0.0
        self._native = _native.PerformanceMonitor(
            sinks=sinks,
            ring_records=ring_records,
            max_phases=max_phases,
            max_scalars=max_scalars,
            curve_points=curve_points,
            drain_seconds=drain_seconds,
        )
        self._prepare_step: Callable[[int], _native.Step] = self._native.step().prepare
        self._phases: dict[str, _native.Phase] = {}
        self._scalars: dict[str, _native.Scalar] = {}
        # Runs at exit as well, so that the sinks get what is left.
        self._finalizer = weakref.finalize(self, self._native.close)

    def step(self, samples: int = 0) -> AbstractContextManager[None]:
        """One training step, for a ``with`` statement.

        A step left by an exception is not timed, only counted in ``summary().cancelled``.

        Parameters
        ----------
        samples
            Samples (or tokens) of this step; 0 if unknown, and see `set_samples`.

        Raises
        ------
        RuntimeError
            On entering inside another step of this monitor.
        ValueError
            On entering with a negative number.
        """
        return self._prepare_step(samples)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A part of the step, for a ``with`` statement. Phases nest.

        Outside a step a phase is not timed, only counted in ``summary().phases_outside``.

        Raises
        ------
        IndexError
            If `name` is new and there are `max_phases` names already.
        RuntimeError
            On entering from another thread than the step's.
        """
        try:
            return self._phases[name]
        except KeyError:
            return self._phases.setdefault(name, self._native.phase(name))

    def scalar(self, name: str, value: torch.Tensor | SupportsFloat) -> None:
        """Record a value of the step in progress, or outside a step of the latest one.

        Within a step the last call for a name wins. NaN and infinities are kept and counted.

        Parameters
        ----------
        name
            What the value is called in sinks and reports.
        value
            A number, or a real tensor of one element. A tensor on the CPU is read where it lies. One on a device is
            copied there, in stream order, and read at the next drain, so that the step never waits for it.

        Raises
        ------
        IndexError
            If `name` is new and there are `max_scalars` names already.
        TypeError, ValueError
            If `value` is not a number, or a tensor that is complex or has not exactly one element.
        """
        try:
            recorder = self._scalars[name]
        except KeyError:
            recorder = self._scalars.setdefault(name, self._native.scalar(name))
        recorder.record(value)

    def set_samples(self, samples: int) -> None:
        """Set the samples of the step in progress, where the number is learnt inside it.

        Raises
        ------
        RuntimeError
            Outside a step.
        """
        self._native.set_samples(samples)

    def set_next_step(self, step: int) -> None:
        """Number the next step `step`, for resumed runs. The first is 1.

        Raises
        ------
        RuntimeError
            Inside a step.
        """
        self._native.set_next_step(step)

    @property
    def current_step(self) -> int:
        """The number of the step in progress, or else of the latest; 0 before the first."""
        return self._native.current_step

    def add_sink(self, sink: Sink) -> None:
        """Add a receiver for the steps that finish from now on."""
        self._native.add_sink(sink)

    def flush(self) -> None:
        """Hand everything finished to the sinks; reads tensors that wait on a device.

        Raises
        ------
        Exception
            What a sink raised, once; that sink is not called again.
        """
        self._native.flush()

    def close(self) -> None:
        """Flush, close the sinks and stop the background thread. Happens by itself at exit. Idempotent."""
        self._native.close()

    def summary(self) -> Summary:
        """Statistics of all finished steps."""
        return self._native.summary()

    def table(self, unicode: bool | None = None) -> str:
        """The summary as text.

        Parameters
        ----------
        unicode
            Whether to draw lines with box characters; by default on a UTF-8 terminal only.
        """
        return self._native.table(unicode)

    def report(self, title: str = "Training performance") -> Report:
        """Summary, step-time curve, phase shares and the scalars' curves as a `Report`."""
        return self._native.report(title)

    def __enter__(self) -> PerformanceMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PerformanceMonitor(current_step={self.current_step})"
