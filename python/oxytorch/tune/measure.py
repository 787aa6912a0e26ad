"""Whole training steps timed under two combinations of strategies, in the order that a duel asks for."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .._C import tune as _native
from .._C.trainer import page_faults
from ..base import median
from .batches import can_visit, stop_drawing, visit
from .run import Run, shapes

__all__ = ["Bench", "Keeps", "SideFailed", "clock"]

#: Seconds; tests put a clock of their own here.
clock = time.perf_counter
#: Processor seconds of this thread.
thread_clock = time.thread_time

_DRAWS = 6  # batches whose drawing is timed
_LEAST_FETCH = 0.01  # of a step
_FEED_STEPS = 6  # in a row: one batch may be waited for while the next is ready

Names = Sequence[str]
_Result = TypeVar("_Result")


class Keeps(Protocol):
    """What puts the run's state back."""

    def restore(self) -> None:
        """Put everything back, bit for bit."""


class SideFailed(Exception):
    """A combination threw while it was put in force or stepped; the cause is the exception."""

    def __init__(self, names: Names, cause: Exception) -> None:
        super().__init__(str(cause))
        self.names = tuple(names)
        self.cause = cause


class Bench:
    """Brings combinations in force and times whole steps of the run on its example batches.

    A block is a few steps in a row: some unmeasured where the combination has just been changed, then as many as last
    long enough for the clock. What changing takes is not part of it.

    Parameters
    ----------
    run : Run
    escrow : Keeps
        Restored before each duel, so that all start from the same numbers.
    """

    def __init__(self, run: Run, escrow: Keeps) -> None:
        self.run = run
        self.escrow = escrow
        self.loss: Tensor | None = None  #: of the last step
        self.step_seconds = 0.0  #: of the run as it was given
        self.spread = 0.0  #: of the blocks that told it, as a share
        self.faults = 0.0  #: page faults of that step
        self.fastest = 0.0  #: least seconds of one, by the best clock
        self.load = _native.LoadWatch()
        self.disturbed = False  #: whether other programs used the processor during the baseline or the last duel
        self.optimizer_share = 0.0  #: of that step, what the optimizer's takes
        self._steps = 1
        self._next = 0
        self._fresh = 0  # steps not to be measured, after a switch
        self._drawing = False  # whether a step draws its batch from the run's data, as the loop does
        self._drawn: dict[int, tuple[Any, Iterator[Any]]] = {}  # iterations under way, by what is iterated

    # -- state ---------------------------------------------------------------------------------------------------

    def rewind(self) -> None:
        """Take everything back and restore the state; what could not be taken back passes through after that."""
        try:
            self.run.bring(())
        finally:
            self.escrow.restore()

    def recover(self) -> None:
        """Rewind after something threw: memory that the exception held is let go, and another failure is no news."""
        try:
            self.rewind()
        except Exception:  # the first failure is the one that is told
            self.rewind()
        gc.collect()
        if self.run.device.type != "cpu" and torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    # -- blocks --------------------------------------------------------------------------------------------------

    def baseline(self) -> float:
        """Return the median seconds of a step as given; what the user's own step throws passes through.

        To be called before anything is tried: trials leave memory laid out otherwise than in a process that was not
        tuned.
        """
        self.rewind()
        self._fresh = 1  # the first step makes the optimizer's state, the second finds the memory that the first freed
        self._warm_up()
        on_host = self.run.device.type == "cpu"  # elsewhere timing an update waits, and would lengthen the step
        self.load.begin()
        with self._updates_timed(on_host) as updates:
            on_processor = thread_clock()
            times, self.faults = self._blocks(1)
            on_processor = (thread_clock() - on_processor) / len(times)
            self.fastest = min(times)
            self._steps = _native.block_steps(median(times))
            if self._steps > 1:
                times, self.faults = self._blocks(self._steps)
        self.disturbed = self.load.end()
        self.step_seconds = median(times)
        self.spread = (max(times) - min(times)) / self.step_seconds
        self.fastest = min(self.fastest, *times)
        if self.disturbed and on_host:  # a step that others hold up has used the processor no longer than ever
            self.fastest = min(self.fastest, max(on_processor, 1e-9))
        if not on_host:
            with self._updates_timed(True) as updates:
                self._step(self.run.batches[0])
        self._look_at_data()
        self.optimizer_share = min(1.0, median(updates or [0.0]) / self.step_seconds)
        self.rewind()
        return self.step_seconds

    def untouched(self) -> tuple[float, float]:
        """Return the seconds and the page faults of a step with nothing active now."""
        self.rewind()
        self._fresh = 1
        with self._draw():
            self._warm_up()
            times, faults = self._blocks(self._steps)
        self.rewind()
        return median(times), faults

    def _blocks(self, steps: int) -> tuple[list[float], float]:
        before = page_faults()
        times = [self._timed(steps) for _ in range(_native.BASELINE_BLOCKS)]
        return times, (page_faults() - before) / steps / len(times)

    def _look_at_data(self) -> None:
        """Time drawing batches between steps; where it takes long enough to be seen, it is part of every step."""
        run = self.run
        if not run.owns_loop or not can_visit(run.data):
            return
        seconds: list[float] = []
        with visit(run.data, run.params):
            batches = iter(run.data)  # type: ignore[arg-type]
            while len(seconds) < _DRAWS:
                began = clock()
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                seconds.append(clock() - began)
                run.step(batch)
                run.synchronize()
            stop_drawing(batches)
        fetching = median(seconds[1:] or [0.0])  # the first starts workers
        run.fetch_share = fetching / (fetching + self.step_seconds)
        self._drawing = run.fetch_share >= _LEAST_FETCH
        if self._drawing:
            self.step_seconds += fetching
            self.fastest += fetching

    @contextmanager
    def _draw(self) -> Iterator[None]:
        """Let steps draw from the run's data inside, if they do; no trace of that stays."""
        if not self._drawing:
            yield
            return
        with visit(self.run.given_data, self.run.params):
            try:
                yield
            finally:
                for _, batches in self._drawn.values():
                    stop_drawing(batches)
                self._drawn.clear()

    def _batch(self) -> Any:
        """Return the next batch: an example, or one from the data as they are in force."""
        if not self._drawing:
            return self.run.batches[self._next % len(self.run.batches)]
        data: Any = self.run.data
        _, batches = self._drawn.setdefault(id(data), (data, iter(())))
        try:
            return next(batches)
        except StopIteration:  # an epoch's end
            self._drawn[id(data)] = (data, iter(data))
            return next(self._drawn[id(data)][1])

    @contextmanager
    def _updates_timed(self, wanted: bool) -> Iterator[list[float]]:
        """Give what each step of the user's optimizer takes inside; a device is waited for before and after it."""
        began: list[float] = []
        taken: list[float] = []
        if not wanted:
            yield taken
            return

        def before(*_: Any) -> None:
            self.run.synchronize()
            began.append(clock())

        def after(*_: Any) -> None:
            self.run.synchronize()
            taken.append(clock() - began[-1])

        hooks = [
            self.run.original.register_step_pre_hook(before),
            self.run.original.register_step_post_hook(after),
        ]
        try:
            yield taken
        finally:
            for hook in hooks:
                hook.remove()

    def updates(self, names: Names, seed: int) -> tuple[dict[str, float], str]:
        """Return how many times as fast as given the update by each of these is, and which is shown to be faster.

        Timed without the rest of a step, of which they take a small part, they are known after a few calls, where whole
        steps would need dozens of pairs. The fastest then meets the one given in a duel of updates; empty where it does
        not win. Left out is what throws: its trial will say so. Nothing where the step is the user's own.
        """
        if self.run.own_step is not None or not names:
            return {}, ""
        self.guarded((), self.escrow.restore)
        self._step(self.run.batches[0])  # leaves gradients
        found: dict[str, float] = {}
        given = self.guarded((), self._update_seconds)
        for name in names:
            with suppress(SideFailed):
                found[name] = given / self.guarded((name,), self._update_seconds)
        fastest = max(found, key=lambda name: found[name], default="")
        proven = fastest if fastest and self._wins(fastest, seed) else ""
        self.guarded((), self.escrow.restore)
        return found, proven

    def _wins(self, name: str, seed: int) -> bool:
        """Whether a duel of updates shows this one to be faster than the one given."""
        duel = _native.Duel(_native.DuelOptions.canary(seed))
        try:
            while (side := duel.next()) is not None:
                names = (name,) if side == "challenger" else ()
                duel.record(side, self.guarded(names, lambda: self._update_seconds(1)))
        except SideFailed:
            return False
        return bool(duel.result().decision == "accept")

    def _update_seconds(self, count: int = _native.BASELINE_BLOCKS) -> float:
        self.run.update()
        times = []
        for _ in range(count):
            self.run.synchronize()
            began = clock()
            self.run.update()
            self.run.synchronize()
            times.append(max(clock() - began, 1e-9))
        return median(times)

    def duel(self, incumbent: Names, challenger: Names, options: Any) -> tuple[Any, float]:
        """Return the result of a duel, and the seconds that turning the challenger on took once.

        Raises
        ------
        SideFailed
            Where a side threw; nothing is in force then, and the state is restored.
        """
        # The duel counts one step for each block; what it may take is for all steps, those between blocks too.
        changed = set(incumbent) ^ set(challenger)
        usual = self._steps
        if any(self.run.strategies[name].feeds for name in changed):
            self._steps = max(usual, _FEED_STEPS)
        taken = self._steps + self._settle(changed)
        options.budget_seconds /= taken
        options.most_seconds /= taken
        options.repay_steps /= taken
        try:
            with self._draw():
                return self._duelled(incumbent, challenger, _native.Duel(options))
        finally:
            self._steps = usual

    def _duelled(self, incumbent: Names, challenger: Names, duel: Any) -> tuple[Any, float]:
        self.guarded((), self.escrow.restore)
        self.guarded(incumbent, self._warm_up)
        began = clock()
        warm = self.guarded(challenger, self._warm_up)
        warming = clock() - began
        self.load.begin()
        pair = 0
        first = True
        while (side := duel.next()) is not None:
            # Both sides of a pair take the same batches.
            self._next = pair * self._steps
            names = challenger if side == "challenger" else incumbent
            duel.record(side, self.guarded(names, self._block))
            pair, first = (pair, False) if first else (pair + 1, True)
        self.disturbed = self.load.end()
        result = duel.result()
        return result, max(0.0, warming - warm * result.challenger)

    def plain_step(self) -> None:
        """Take a step with nothing in force and undo it; what the user's own step throws passes through."""
        self.guarded((), self.escrow.restore)
        self._next = 0
        try:
            self._step(self.run.batches[0])
        finally:
            self.escrow.restore()

    def guarded(self, names: Names, work: Callable[[], _Result]) -> _Result:
        """Do something with exactly these in force.

        Raises
        ------
        SideFailed
            Where it throws; nothing is in force then, and the state is restored. With nothing in force, before either,
            the exception itself passes through.
        """
        suspects = (*self.run.in_force, *names)  # taking one back may throw as well
        try:
            self._switch(names)
            suspects = tuple(names)
            return work()
        except Exception as error:
            if not suspects:  # the user's own step: theirs to see as it is
                raise
            error.__traceback__ = None  # its frames hold the tensors that an out-of-memory must let go
            self.recover()
            raise SideFailed(suspects, error) from error

    def _switch(self, names: Names) -> None:
        self._fresh = self._settle(set(names) ^ set(self.run.in_force))
        self.run.bring(names)

    def _settle(self, changed: Iterable[str]) -> int:
        steps = max((self.run.strategy(name).settle for name in changed), default=0)
        return int(_native.settle_steps(steps, self.step_seconds))

    def _block(self) -> float:
        start = self._next
        for _ in range(self._fresh):
            self._step()
        self._next = start
        return self._timed(self._steps)

    def _warm_up(self) -> int:
        """Take a step with each shape of batch, and the steps that the strategies need to settle; return how many."""
        seen: set[tuple[Any, ...]] = set()
        count = 0
        for index, batch in enumerate(self.run.batches):
            if (found := shapes(batch)) not in seen:
                seen.add(found)
                self._next = index
                self._step(batch)
                count += 1
        for _ in range(max(0, self._fresh + 1 - count)):
            self._step()
            count += 1
        self.run.synchronize()
        return count

    def _timed(self, steps: int) -> float:
        self.run.synchronize()
        began = clock()
        for _ in range(steps):
            self._step()
        self.run.synchronize()
        return max((clock() - began) / steps, 1e-9)

    def _step(self, batch: Any = None) -> None:
        self.loss = self.run.step(self._batch() if batch is None else batch)
        self._next += 1
