"""What tensors take, exact to the byte, and a limit on the memory of the process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .. import _C
from ..base import parse_size, system_info

__all__ = [
    "BlockEvent",
    "Meter",
    "PeakPart",
    "PhaseUse",
    "Timeline",
    "available_bytes",
    "leaks",
    "limit",
    "region",
    "resident_bytes",
    "set_limit",
]

BlockEvent = _C.memory.BlockEvent
PeakPart = _C.memory.PeakPart
PhaseUse = _C.memory.PhaseUse
Timeline = _C.memory.Timeline


@contextmanager
def region(name: str) -> Iterator[None]:
    """Name the part of a model that runs on this thread within the `with`.

    A timeline says of each tensor in which region it was made. What backward makes belongs to the region whose forward
    recorded the node that runs. Regions nest; the innermost counts.

    Parameters
    ----------
    name : str
        Any name.
    """
    opened = _C.memory.OpenRegion(name)
    try:
        yield
    finally:
        opened.end()


class _Regions:
    """Hooks that make each module of a model a region of its name."""

    def __init__(self, model: nn.Module) -> None:
        self._open: list[_C.memory.OpenRegion] = []
        self._handles = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._begin(name or type(model).__name__)))
            self._handles.append(module.register_forward_hook(self._end, always_call=True))

    def _begin(self, name: str) -> Any:
        def begin(*_: Any) -> None:
            self._open.append(_C.memory.OpenRegion(name))

        return begin

    def _end(self, *_: Any) -> None:
        # A forward that began before the hooks were there has none of its own.
        if self._open:
            self._open.pop().end()

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        while self._open:
            self._open.pop().end()


class Meter:
    """Counts what tensors take, from ``with`` or `start()` to its end.

    On the CPU an allocator around torch's own counts the bytes that tensors ask for, exactly, on all threads. It does
    not see memory that does not come from torch's allocator: `torch.from_numpy` and `torch.frombuffer`, shared memory,
    mapped files, and scratch that oneDNN, MKL and LAPACK take from malloc; `resident_bytes()` has those too. Tensors
    made before anything was counted are not seen, nor that they go. On another device torch's allocator of that device
    is asked: for its peak, which then begins anew for torch's own statistics too, and for a timeline by what it reports
    to a profiler: of the thread that begins the meter, and of backward passes that begin on it.

    Any number may run at once (32 with their open phases), one of them with a timeline.

    Parameters
    ----------
    model : nn.Module, optional
        Its modules become regions of a timeline, by name.
    device : torch.device or str
        Whose tensors are counted.
    timeline : bool
        Record each block of memory: for some steps, not for a run. A device is waited for where regions begin and end.
    sites : bool
        Record the Python calls that took it too: microseconds a block. Needs `timeline`.

    Raises
    ------
    NotImplementedError
        Where another allocator than torch's serves CPU tensors; for a device whose allocator has no statistics, or with
        a timeline reports no blocks.
    RuntimeError
        For a second timeline, for one of a device where torch's profiler runs, and for figures of a meter that has not
        begun.

    Examples
    --------
    >>> import oxytorch as ox, torch
    >>> with ox.memory.Meter() as meter:
    ...     with meter.phase("forward"):
    ...         kept = torch.zeros(1000)
    >>> meter.peak_bytes, meter.live_bytes, meter.phases[0].peak_bytes
    (4000, 4000, 4000)
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        device: torch.device | str = "cpu",
        timeline: bool = False,
        sites: bool = False,
    ) -> None:
        if model is not None and not timeline:
            raise ValueError("model= names the regions of a timeline; pass timeline=True too")
        self._model = model
        self._options: dict[str, Any] = {"device": torch.device(device), "timeline": timeline, "sites": sites}
        self._meter: _C.memory.Meter | None = None
        self._exit = ExitStack()

    def start(self) -> Meter:
        """Begin to count, anew where it has counted before."""
        self.stop()
        self._meter = _C.memory.Meter(**self._options)
        if self._model is not None:
            self._exit.callback(_Regions(self._model).close)
        return self

    def stop(self) -> None:
        """Count no longer. Figures stay what they are."""
        self._exit.close()
        if self._meter is not None:
            self._meter.stop()

    def __enter__(self) -> Meter:
        """See `start`."""
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """See `stop`."""
        self.stop()

    def _begun(self) -> _C.memory.Meter:
        if self._meter is None:
            raise RuntimeError("this meter has not begun; use it in a with statement, or call start()")
        return self._meter

    @property
    def live_bytes(self) -> int:
        """Bytes of tensors made since it began that are live, less those of older ones that went."""
        return self._begun().live_bytes()

    @property
    def peak_bytes(self) -> int:
        """The most that `live_bytes` was."""
        return self._begun().peak_bytes()

    @property
    def allocations(self) -> int:
        """Times that CPU tensors took memory since it began."""
        return self._begun().allocations()

    @property
    def phases(self) -> list[PhaseUse]:
        """Phases that have ended, in order."""
        return self._begun().phases()

    def reset_peak(self) -> None:
        """Begin the peak anew from what is live."""
        self._begun().reset_peak()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Give a part of a step a peak of its own in `phases`. Phases may nest."""
        opened = _C.memory.OpenPhase(self._begun(), name)
        try:
            yield
        finally:
            opened.end()

    def timeline(self) -> Timeline:
        """Return each block that was taken and given back. Needs ``timeline=True``, as the three below."""
        return self._begun().timeline()

    def peak_parts(self) -> list[PeakPart]:
        """Return what made the peak, by phase, region and site, the largest first."""
        return self._begun().peak_parts()

    def live_parts(self) -> list[PeakPart]:
        """Return what is left, by phase, region and site, the largest first."""
        return self._begun().live_parts()

    def table(self, most_parts: int = 12) -> str:
        """Return peak and phases, and of a timeline what made the peak, as text."""
        return self._begun().table(most_parts)

    def to_memory_viz(self, path: str | Path) -> None:
        """Write the timeline in the format of ``torch.cuda.memory._dump_snapshot``.

        https://pytorch.org/memory_viz and ``torch/cuda/_memory_viz.py`` read it.
        """
        timeline = self.timeline()
        frames = [[_frame(line) for line in site.splitlines()] for site in timeline.sites]
        trace = []
        for event in timeline.events:
            named = [timeline.names[index] for index in (event.phase, event.region) if index >= 0]
            where = [{"filename": "", "line": 0, "name": name} for name in reversed(named)]
            common = {"addr": event.address, "size": abs(event.bytes), "stream": 0, "time_us": event.time_ns // 1000}
            calls = (frames[event.site] if event.site >= 0 else []) + where
            actions = ["alloc"] if event.bytes >= 0 else ["free_requested", "free_completed"]
            trace += [{"action": action, "frames": calls, **common} for action in actions]
        snapshot = {"segments": [], "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}
        Path(path).write_bytes(pickle.dumps(snapshot))


def _frame(line: str) -> dict[str, Any]:
    place, _, function = line.rpartition(" ")
    file, _, number = place.rpartition(":")
    return {"filename": file, "line": int(number), "name": function}


def leaks(step: Callable[[], object], steps: int = 5, device: torch.device | str = "cpu") -> list[PeakPart]:
    """Return what each training step leaves behind, by the line that made it: bytes and blocks a step, the most first.

    Memory that a step only replaces, as gradients and caches are, is not in it.

    Parameters
    ----------
    step : callable
        Takes one training step. It is called two times before anything is looked at.
    steps : int
        To be looked at; at least 3.
    device : torch.device or str
        Whose tensors are looked at.

    Raises
    ------
    ValueError
        For fewer steps.

    Examples
    --------
    >>> losses = []
    >>> for leak in ox.memory.leaks(lambda: losses.append(model(x).sum())):  # with its graph
    ...     print(leak.bytes, leak.site)
    """
    return _C.memory.leaks(step, steps, torch.device(device))


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory now, tensors and everything else."""
    return _C.memory.resident_bytes()


def available_bytes(device: torch.device | str = "cpu") -> int:
    """Return the bytes that tensors of a device may still take.

    Nine tenths of what is left: on the CPU under `limit`, or without one of what the machine or container has
    available, after memory that is only kept has gone back to the kernel; on another device of what is free or kept by
    torch's allocator.

    Parameters
    ----------
    device : torch.device or str

    Raises
    ------
    NotImplementedError
        Where the kernel, or torch's allocator, does not say.
    """
    return _C.memory.available_bytes(torch.device(device))


def set_limit(size: int | str) -> _C.trainer.HostSetting:
    """Limit the memory of this process: a CPU tensor that would pass it raises `torch.OutOfMemoryError`.

    Running out of memory is then an exception, with nothing taken, in place of a process that the kernel kills. What
    tensors may take is the limit less what the process has in memory beside them; before it raises, free memory that is
    only kept is given back and the process is measured anew.

    Parameters
    ----------
    size : int or str
        Bytes, ``"2GB"``, or ``"80%"`` of the memory that this process may use (the machine's, or its cgroup's).

    Returns
    -------
    HostSetting
        What was done or why not, what it costs, and `revert()`, which lifts the limit.

    Raises
    ------
    ValueError
        For a size that is none, or less than the process has in memory already.

    Notes
    -----
    It holds tensors back alone: other memory counts, but is not refused. 100 to 200 ns a tensor.
    """
    return _C.memory.set_limit(parse_size(size, system_info()["memory"]["limit"]))


def limit() -> int | None:
    """Return the limit that is set, in bytes; None where there is none."""
    return _C.memory.limit()
