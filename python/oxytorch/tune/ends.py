"""Where a run's losses end, held against what other seeds and orders of the batches give."""

from __future__ import annotations

import statistics
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from .._C import tune as _native
from .record import copied

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Ends"]

_SEEDS = 3


class Ends:
    """The mean loss of the last steps of runs, each from the start.

    Parameters
    ----------
    run : Run
    steps : int
        That each run takes.
    seed : int
        Of the orders and the random numbers of the other runs.
    begin : callable
        Puts the run back to its start, with nothing active.
    stock : callable
        A context under which the run takes its steps by stock autocast, for a dtype.
    """

    def __init__(
        self,
        run: Run,
        steps: int,
        seed: int,
        begin: Callable[[], None],
        stock: Callable[[torch.dtype], AbstractContextManager[None]],
    ) -> None:
        self._run = run
        self._steps = steps
        self._seed = seed
        self._begin = begin
        self._stock = stock
        self._as_given: list[float] = []
        self._reduced: dict[torch.dtype, float] = {}

    def of(self, losses: Sequence[float]) -> float:
        """The end of a run with these losses: their mean over the batches that were last."""
        losses = losses[: self._steps]
        return statistics.fmean(losses[-min(len(self._run.batches), len(losses)) :])

    def as_given(self, losses: Sequence[float]) -> list[float]:
        """Ends of the step as given: by its own losses, and with other orders of batches and other random numbers."""
        if not self._as_given:
            ends = [self.of(losses)]
            generator = torch.Generator().manual_seed(self._seed)
            for number in range(_SEEDS):
                self._begin()
                torch.manual_seed(self._seed + number + 1)
                ends.append(self.of(self._shuffled(generator)))
            self._as_given = ends
        return self._as_given

    def fault(
        self,
        found: Sequence[float],
        given: Sequence[float],
        dtype: torch.dtype | None,
        evidence: MutableMapping[str, float],
    ) -> str:
        """Say where losses end outside of what seeds span, the step as given having `given`; empty where they do not.

        `dtype`: of a change of precision, whose band reaches to where stock autocast ends. Figures go into `evidence`.
        """
        words, figures = _native.end_fault(
            self._steps,
            self.of(found),
            self.of(given),
            given[0],
            lambda: self.as_given(given),
            None if dtype is None else lambda: self._reduced_end(dtype),
        )
        evidence.update(figures)
        return words

    def _reduced_end(self, dtype: torch.dtype) -> float:
        """Where stock autocast ends: with few batches, orders of them say little about how far it may be from here."""
        if dtype not in self._reduced:
            self._begin()
            with self._stock(dtype):
                batches = self._run.batches
                losses = [float(self._run.step(copied(batches[i % len(batches)]))) for i in range(self._steps)]
            self._reduced[dtype] = self.of(losses)
        return self._reduced[dtype]

    def _shuffled(self, generator: torch.Generator) -> list[float]:
        batches = self._run.batches
        losses: list[float] = []
        while len(losses) < self._steps:
            order = torch.randperm(len(batches), generator=generator).tolist()[: self._steps - len(losses)]
            losses += [float(self._run.step(copied(batches[i]))) for i in order]
        return losses
