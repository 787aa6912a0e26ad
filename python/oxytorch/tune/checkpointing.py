"""The setting `gradient_checkpointing`: which blocks of a run's models are run again in backward, or packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from .._C import memory as _memory
from ..generators import rng_state, set_rng_state
from ..memory.fit import MemoryPlan, blocks_of, fit_held
from ..memory.pack import Format
from ..model.snapshot import Snapshot

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Checkpointing", "StepStart"]


class Checkpointing:
    """What `oxytorch.memory.fit` found for a run; or why it was left out.

    Attributes
    ----------
    plan : MemoryPlan, optional
    reason, cost : str
        Sentences for a report.
    """

    name = "gradient_checkpointing"

    def __init__(self, plan: MemoryPlan | None, reason: str) -> None:
        self.plan = plan
        self.reason = reason
        self.cost = "" if plan is None else plan.cost

    @classmethod
    def of(
        cls,
        run: Run,
        wanted: str,
        why: str = "",
        max_slowdown: float = 0.0,
        *,
        saved_tensors: str = "lossless",
        can_repeat: bool = False,
        most: int | None = None,
    ) -> Checkpointing:
        """Fit the step of a run, with what is active on it, on the first of its batches.

        Parameters
        ----------
        run : Run
        wanted : str
            A budget, "auto": what the process may take, or "least".
        why : str
            What the reason begins with.
        max_slowdown : float
            With "least", how many times as long as now a step may take.
        saved_tensors : str
            The format, beside "lossless", in which they may be packed.
        can_repeat : bool
            Whether each step has a `StepStart` beside it, which takes memory too.
        most : int, optional
            Bytes above which no budget goes.
        """
        if refusal := _memory.timeline_refusal(run.device):
            return cls(None, refusal)
        batch = run.batches[0]

        def held() -> Snapshot:
            given = (run.given_models, run.given_optimizers, *run.state, batch)
            return Snapshot.of(*given, reach=run.functions, hashed=False)

        by_itself = wanted in ("auto", "least")
        if by_itself and not blocks_of(run.model):
            return cls(None, f"{type(run.model).__name__} has no blocks that could be planned.")
        budget = None if by_itself else _memory.budget_bytes(wanted, run.device)

        def step() -> None:
            start = StepStart(run) if can_repeat else None
            run.step_of_window(batch)
            del start

        plan = fit_held(
            run.model,
            step,
            budget,
            held,
            max_slowdown=max_slowdown if wanted == "least" else None,
            formats=["lossless", cast(Format, saved_tensors)],
            most=most,
        )
        return cls(plan, why + plan.summary())

    @property
    def is_in_effect(self) -> bool:
        """Whether the step is within its budget."""
        return self.plan is not None

    def revert(self) -> None:
        """Keep every block."""
        if self.plan is not None:
            self.plan.revert()


class StepStart:
    """What a step changes before its update: buffers and random generators; gradients are dropped by the step itself.

    Parameters
    ----------
    run : Run
        Whose next step may run out of memory.
    """

    def __init__(self, run: Run) -> None:
        self._random = rng_state(run.params)
        self._buffers = list(run.model.buffers())
        self._were = [b.clone() for b in self._buffers]

    def restore(self) -> None:
        """Put it back, so that the step can be taken from its start."""
        with torch.no_grad():
            for buffer, was in zip(self._buffers, self._were, strict=True):
                buffer.copy_(was)
        set_rng_state(self._random)
