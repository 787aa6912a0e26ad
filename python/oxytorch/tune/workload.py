"""The training step of a Python program, as the native tuner drives it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import clock
from .._C import memory as _memory
from .._C import tune as _native
from .._C.trainer import page_faults
from ..base import median
from ..data.batches import can_visit, shapes, stop_drawing, visit
from ..memory import Meter
from ..model.snapshot import Snapshot
from ..optim.slot import OptimizerSlot
from .asked import Asked
from .run import Run, told
from .strategy import Kind, offer
from .verify import Ruling, Verifier

__all__ = ["RunWorkload"]

_DRAWS = 6  # batches whose drawing is timed
_NAMED = 6  # of what is not held, in a sentence


class PeakBytes:
    """Counts what tensors take at the most inside of ``with``, what the run holds included.

    Timed steps are not counted: `CountingPaused`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._held = 0
        self._meter: Meter | None = None

    def __enter__(self) -> PeakBytes:
        if _memory.can_count(self._run.device):
            self._held = self._run.held_bytes(self._run.batches[0])
            self._meter = Meter(device=self._run.device).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._meter is not None:
            self._meter.stop()

    @property
    def so_far(self) -> int | None:
        """Bytes; None where they cannot be counted."""
        return None if self._meter is None else self._held + self._meter.peak_bytes


class RunWorkload(_native.Workload):
    """Takes, changes, puts back and verifies the steps of a run, for a `Tuner`.

    Parameters
    ----------
    run : Run
    snapshot : Snapshot
        Of the run's state as tuning begins.
    asked : Asked, optional
        What the caller's settings take out.
    seed : int
        Of the verifier.
    say : callable, optional
        Shows what is being done.
    peak : PeakBytes, optional
        Begun before the snapshot was taken.
    """

    def __init__(
        self,
        run: Run,
        snapshot: Snapshot,
        asked: Asked | None = None,
        seed: int = 0,
        say: Callable[[str], None] = lambda _: None,
        peak: PeakBytes | None = None,
    ) -> None:
        super().__init__()
        self._peak = peak
        self.run = run
        self.snapshot = snapshot
        self.say = say
        self._asked = {} if asked is None else asked.skipped
        self._seed = seed
        self._loss: Tensor | None = None  # of the last step
        self._verifier: Verifier | None = None
        self._visiting = ExitStack()
        self._drawn: dict[int, tuple[Any, Iterator[Any]]] = {}  # iterations under way, by what is iterated

    # -- what may be tried ---------------------------------------------------------------------------------------

    def offers(self) -> list[_native.Offer]:
        """Every strategy of the run, with why the settings or the loop do not allow it."""
        active = self.run.required
        return [offer(name, cls, self._refused(name), active=active) for name, cls in self.run.strategies.items()]

    def _refused(self, name: str) -> str:
        cls = self.run.strategies[name]
        if cls.needs_loop and not self.run.owns_loop:
            return self._asked.get(name, "it changes the loop itself: loop='plan' and plan.step(batch) allow it")
        if cls.feeds and not self.run.draws_data:
            words = "it changes what batches are drawn from: loop='data' or loop='plan', and plan.data, allow it"
            return self._asked.get(name, words)
        return self._asked.get(name, "")

    def hindrance(self) -> str:
        """Why nothing can be tried at all, by the step as given."""
        processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if processes > 1:
            return f"one of {processes} processes, which would decide differently"
        if self._loss is not None and not bool(torch.isfinite(self._loss).all()):
            return f"the loss of the step as given is {float(self._loss)}: nothing can be verified by it"
        return ""

    def applies(self, name: str) -> bool | str:
        """Ask the strategy."""
        return self.run.strategy(name).applies(self.run)

    def expected_cost(self, name: str) -> float:
        """Ask the strategy."""
        return self.run.strategy(name).expected_cost(self.run)

    def likely_speedup(self, name: str) -> float | None:
        """Ask the strategy."""
        return self.run.strategy(name).likely_speedup(self.run)

    # -- changes and the way back --------------------------------------------------------------------------------

    def active(self) -> Sequence[str]:
        """Names of the active strategies, but for those that are a part of the step as given."""
        return self.run.beside_required

    def activate(self, names: Sequence[str]) -> None:
        """Make exactly these active."""
        self.run.set_active(names)

    def restore(self) -> None:
        """Put the state back, bit for bit."""
        self.snapshot.restore()

    def let_go(self) -> None:
        """Let go of what only the frames of a failure held."""
        gc.collect()
        if not self.on_host() and torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def covered(self) -> dict[str, str]:
        """What was put back after the trials and is covered by the hash, and what is not."""
        found = {"restored": f"{self.snapshot.covers} proven by hash to be what they were"}
        if self.snapshot.unheld:
            named = ", ".join(f"{path} ({type(value).__qualname__})" for path, value in self.snapshot.unheld[:_NAMED])
            more = f" and {len(self.snapshot.unheld) - _NAMED} more" if len(self.snapshot.unheld) > _NAMED else ""
            found["not held, nor covered by the hash"] = f"{named}{more}"
        return found

    # -- steps ---------------------------------------------------------------------------------------------------

    def shapes(self) -> list[int]:
        """Of the examples, the first of each shape."""
        first: dict[tuple[Any, ...], int] = {}
        for index, batch in enumerate(self.run.batches):
            first.setdefault(shapes(batch), index)
        return list(first.values())

    def steps(self, first: int, count: int, updates: bool, drawn: bool) -> tuple[float, list[float]]:
        """Take steps in a row; the seconds of all, and where asked for those of the optimizer's part of each."""
        run = self.run
        examples = run.batches
        with _memory.CountingPaused(), self._updates_timed(updates) as parts:
            run.synchronize()
            began = clock.seconds()
            for index in range(first, first + count):
                self._loss = run.step_of_window(self._draw_one() if drawn else examples[index % len(examples)])
            run.synchronize()
            seconds = clock.seconds() - began
        each = len(parts) // count
        even = len(run.slots) > 1 and each * count == len(parts)  # as many calls in each step
        return seconds, [sum(parts[i : i + each]) for i in range(0, len(parts), each)] if even and each else parts

    @contextmanager
    def _updates_timed(self, wanted: bool) -> Iterator[list[float]]:
        """Give what each step of the user's optimizers takes inside; a device is waited for before and after it.

        Which of several steps last in a step is noted.
        """
        began: list[float] = []
        taken: list[float] = []

        def before(*_: Any) -> None:
            self.run.synchronize()
            began.append(clock.seconds())

        def after(*_: Any) -> None:
            self.run.synchronize()
            taken.append(clock.seconds() - began[-1])

        hooks: list[Any] = []
        for slot in self.run.slots:
            if wanted:
                hooks.append(slot.original.register_step_pre_hook(before))
                hooks.append(slot.original.register_step_post_hook(after))
            if len(self.run.slots) > 1:
                hooks.append(slot.original.register_step_post_hook(partial(self._note_last, slot)))
        try:
            yield taken
        finally:
            for hook in hooks:
                hook.remove()

    def _note_last(self, slot: OptimizerSlot, *_: Any) -> None:
        self.run.last = slot

    def has_update(self) -> bool:
        """Not of a step of the user's own."""
        return self.run.own_step is None

    def update(self) -> float:
        """Clip and let the optimizer step; seconds."""
        with _memory.CountingPaused():
            self.run.synchronize()
            began = clock.seconds()
            self.run.update()
            self.run.synchronize()
            return clock.seconds() - began

    def on_host(self) -> bool:
        """Whether it is a CPU."""
        return self.run.device.type == "cpu"

    def drawing(self, step_seconds: float) -> float:
        """Time drawing batches between steps."""
        run = self.run
        if not run.draws_data or not can_visit(run.data):
            return 0.0
        seconds: list[float] = []
        with _memory.CountingPaused(), visit(run.data, run.params):
            batches = iter(run.data)  # type: ignore[arg-type]
            while len(seconds) < _DRAWS:
                began = clock.seconds()
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                seconds.append(clock.seconds() - began)
                run.step_of_window(run.place(batch))
                run.synchronize()
            stop_drawing(batches)
        fetching = median(seconds[1:] or [0.0])  # the first starts workers
        run.fetch_share = fetching / (fetching + step_seconds)
        return fetching

    def draw(self, on: bool) -> None:
        """Let steps draw from the run's data, of which no trace stays."""
        if on:
            self._visiting.enter_context(visit(self.run.given_data, self.run.params))
            return
        try:
            for _, batches in self._drawn.values():
                stop_drawing(batches)
        finally:
            self._drawn.clear()
            self._visiting.close()

    def _draw_one(self) -> Any:
        """Return the next batch from the data as they are now."""
        data: Any = self.run.data
        _, batches = self._drawn.setdefault(id(data), (data, iter(())))
        try:
            return self.run.place(next(batches))
        except StopIteration:  # an epoch's end
            self._drawn[id(data)] = (data, iter(data))
            return self.run.place(next(self._drawn[id(data)][1]))

    # -- numbers -------------------------------------------------------------------------------------------------

    def verify(self, kind: Kind, glance: bool) -> Ruling:
        """Let the verifier judge what is active; `glance`: by one step, where small errors pass."""
        if self._verifier is None:
            names = self.run.active
            self.run.set_active(())
            self._verifier = Verifier(self.run, self.snapshot, seed=self._seed)
            self.run.set_active(names)
        return self._verifier.check(kind, 1 if glance else None)

    def step_bytes(self) -> int | None:
        """Take steps; the most that tensors take in one, model and optimizer included, where that can be measured."""
        run = self.run
        is_seen = not any(run.strategies[name].unseen_memory for name in run.active)
        if not is_seen or not _memory.can_count(run.device):
            return None
        gc.collect()  # what lies in cycles would go while a step is counted, which would then seem to take less
        with Meter(device=run.device) as whole:
            before = run.held_bytes(run.batches[0])
            run.step_of_window(run.batches[0])  # makes gradients and the optimizer's state
            made = whole.live_bytes
            with Meter(device=run.device) as meter:
                run.step_of_window(run.batches[0])
        return before + made + meter.peak_bytes

    def step_resident(self) -> int | None:
        """Take steps; the most of this process that is in memory in one, where that can be measured."""
        run = self.run
        if not self.on_host():
            return None

        def steps() -> None:
            for _ in range(2):
                run.step_of_window(run.batches[0])

        run.step_of_window(run.batches[0])  # makes gradients and the optimizer's state
        return _memory.most_resident(steps)

    def tuning_bytes(self) -> int | None:
        """Return the most that tensors have taken so far, where that can be measured."""
        return None if self._peak is None else self._peak.so_far

    # -- saying --------------------------------------------------------------------------------------------------

    def told(self, error: BaseException) -> str:
        """One line of an exception."""
        return told(error)

    def seconds(self) -> float:
        """Read the clock."""
        return clock.seconds()

    def processor_seconds(self) -> float:
        """Read the processor's clock of this thread."""
        return clock.thread_seconds()

    def page_faults(self) -> float:
        """Of this process so far."""
        return page_faults()
