"""Whole training steps timed under two combinations of strategies, in the order that a duel asks for."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .._C import tune as _native
from ..base import median
from .run import Run, shapes

__all__ = ["Bench", "Keeps", "SideFailed", "clock"]

#: Seconds; tests put a clock of their own here.
clock = time.perf_counter

_BLOCK_SECONDS = 0.004  # of steps measured in a row: a host's time slice, and above the waiting for an accelerator
_MOST_STEPS = 64  # in a row
_LONG_STEP = 0.05  # seconds: caches that one step fills are a small part of such a one, so it is measured at once
_BASELINE_BLOCKS = 3

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
        self.optimizer_share = 0.0  #: of that step, what the optimizer's takes
        self._steps = 1
        self._next = 0
        self._fresh = 0  # steps not to be measured, after a switch

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
        """Return the median seconds of a step as given; what the user's own step throws passes through."""
        self.rewind()
        self._warm_up()
        times = [self._timed(1) for _ in range(_BASELINE_BLOCKS)]
        self._steps = max(1, min(_MOST_STEPS, round(_BLOCK_SECONDS / max(median(times), 1e-6))))
        if self._steps > 1:
            times = [self._timed(self._steps) for _ in range(_BASELINE_BLOCKS)]
        self.step_seconds = median(times)
        self.optimizer_share = min(1.0, self._optimizer_seconds() / self.step_seconds)
        self.rewind()
        return self.step_seconds

    def _optimizer_seconds(self) -> float:
        """Take a step and return what the user's optimizer takes of it."""
        began: list[float] = []
        taken: list[float] = []

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
            self._step()
        finally:
            for hook in hooks:
                hook.remove()
        return sum(taken)

    def duel(self, incumbent: Names, challenger: Names, options: Any) -> tuple[Any, float]:
        """Return the result of a duel, and the seconds that turning the challenger on took once.

        Raises
        ------
        SideFailed
            Where a side threw; nothing is in force then, and the state is restored.
        """
        # The duel counts one step for each block; what it may take is for all steps, those between blocks too.
        taken = self._steps + self._settle(set(incumbent) ^ set(challenger))
        options.budget_seconds /= taken
        options.repay_steps /= taken
        duel = _native.Duel(options)
        self.guarded((), self.escrow.restore)
        self.guarded(incumbent, self._warm_up)
        began = clock()
        warm = self.guarded(challenger, self._warm_up)
        warming = clock() - began
        pair = 0
        first = True
        while (side := duel.next()) is not None:
            # Both sides of a pair take the same batches.
            self._next = pair * self._steps
            names = challenger if side == "challenger" else incumbent
            duel.record(side, self.guarded(names, self._block))
            pair, first = (pair, False) if first else (pair + 1, True)
        result = duel.result()
        return result, max(0.0, warming - warm * result.challenger)

    def plain_step(self) -> None:
        """Take a step with nothing in force and undo it; what the user's own step throws passes through."""
        self.guarded((), self.escrow.restore)
        self._next = 0
        try:
            self._step()
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
        return max(0, steps - 1) if self.step_seconds > _LONG_STEP else steps

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
                self._step()
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

    def _step(self) -> None:
        batches = self.run.batches
        self.loss = self.run.step(batches[self._next % len(batches)])
        self._next += 1
