"""The training step: one engine, which `Trainer`, `Plan.step` and the trials of the tuner go through."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .model.escrow import is_criterion, scalar_loss

__all__ = ["StepFunction", "TrainingStep", "no_phase"]

StepFunction = Callable[[Any], Tensor]
Phase = Callable[[str], AbstractContextManager[Any]]

_NOTHING: AbstractContextManager[None] = nullcontext()


def no_phase(_name: str) -> AbstractContextManager[Any]:
    """Time nothing."""
    return _NOTHING


class TrainingStep:
    """Takes the steps of a training run.

    `step` is the least that trains: gradients of before are dropped, forward, loss, backward, clip, optimizer. It is
    what the tuner tries things on. `take` is the step of the run, in this order:

    1. at the begin of a window of batches, gradients of before are dropped;
    2. forward and loss under `scope`, the loss over the window's batches, times the scale, and backward;
    3. once the window is full: `guard` looks at the gradients, they are unscaled and clipped by value and norm, the
       optimizer steps, the moving average follows, the scheduler steps.

    What throws in it leaves no trace of the window.

    Parameters
    ----------
    model : torch.nn.Module
    optimizer : torch.optim.Optimizer
    loss_fn : callable, optional
        ``loss_fn(model, batch)``, or a criterion, and then a batch is (inputs, targets).
    own_step : callable, optional
        The user's own step: takes a batch, does all of zero_grad, forward, backward and optimizer step, returns the
        loss. Then a window is one batch, and clipping, guard and scale are the function's.
    clip_norm : float, optional

    Attributes
    ----------
    original : torch.optim.Optimizer
        The optimizer object that is stepped; `optimizer` is the one that does the work, which `Run.replace_optimizer`
        may have put behind it.
    given : torch.optim.Optimizer
        The user's object, which schedulers look at.
    compute : callable
        The loss of a batch in `take`; `loss` unless set.
    scope : context manager
        Around forward and loss; entered anew each time.
    phase : callable
        Times the parts of `take`: "forward", "backward", "tail", or "step" where they cannot be told apart.
    accumulation : int
        Batches of a window.
    micro, taken : int
        Batches of the window so far, and optimizer steps.
    scaler, guard, scheduler, clip_value, ema_decay
        What `take` does beside; None where it does not.
    average : list of Tensor, optional
        The moving average of each parameter, where the optimizer does not keep it.
    keeps_gradients : bool
        Whether those of a window stay until the next one begins; else they are dropped once they are applied.
    whole_step : callable, optional
        Takes a whole step in place of the eager one.
    seconds : tuple of float
        Of forward, backward and the rest, in the last `take`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Tensor] | nn.Module | None,
        *,
        own_step: StepFunction | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self.model = model
        self.original = optimizer
        self.optimizer = optimizer
        self.given = optimizer
        self.loss_fn = loss_fn
        self.own_step = own_step
        self.clip_norm = clip_norm
        self.compute: Callable[[Any], Tensor] = self.loss
        self.scope: AbstractContextManager[Any] = _NOTHING
        self.phase: Phase = no_phase
        self.whole_step: StepFunction | None = None
        self.params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.accumulation = 1
        self.micro = 0
        self.taken = 0
        self.clip_value: float | None = None
        self.scaler: Any = None
        self.guard: Any = None
        self.scheduler: Any = None
        self.ema_decay: float | None = None
        self.average: list[Tensor] | None = None
        self.keeps_gradients = True
        self.seconds = (0.0, 0.0, 0.0)
        self._criterion = loss_fn is not None and is_criterion(loss_fn)

    # -- the least that trains -----------------------------------------------------------------------------------

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch under what is active; TypeError or ValueError where it is no scalar tensor."""
        assert self.loss_fn is not None
        if self._criterion:
            return scalar_loss(self.loss_fn(self.model(batch[0]), batch[1]))
        return scalar_loss(self.loss_fn(self.model, batch))

    def step(self, batch: Any) -> Tensor:
        """Take one whole step on one batch; return the detached loss."""
        return self.eager_step(batch) if self.whole_step is None else self.whole_step(batch)

    def eager_step(self, batch: Any) -> Tensor:
        """`step` without `whole_step`."""
        if self.own_step is not None:
            return scalar_loss(self.own_step(batch)).detach()
        self.original.zero_grad()
        loss = self._backward(batch, self.loss)
        self.update()
        return loss

    def update(self) -> None:
        """Clip the gradients and let the optimizer step."""
        self._clip()
        self.original.step()

    def pieces(self, batch: Any) -> list[tuple[Any, float]]:
        """What of a batch goes through forward together, and its share of the rows."""
        return [(batch, 1.0)]

    def _backward(
        self,
        batch: Any,
        compute: Callable[[Any], Tensor],
        *,
        scaler: Any = None,
        phase: Phase = no_phase,
        batches: int = 1,
        more: bool = False,
    ) -> Tensor:
        """Forward, loss and backward of one batch of a window; return the detached loss."""
        clock = time.perf_counter
        forward = backward = 0.0
        total: Tensor | None = None
        pieces = self.pieces(batch)
        for place, (piece, share) in enumerate(pieces, 1):
            began = clock()
            with phase("forward"), self.scope:
                loss = scalar_loss(compute(piece))
            between = clock()
            if share != 1.0:
                loss = loss * share
            scaled = loss if batches == 1 else loss / batches
            if scaler is not None:
                scaled = scaler.scale(scaled)
            with phase("backward"), self._window(more or place < len(pieces)):
                scaled.backward()  # type: ignore[no-untyped-call]
            forward, backward = forward + between - began, backward + clock() - between
            total = loss.detach() if total is None else total + loss.detach()
        self.seconds = (forward, backward, 0.0)
        assert total is not None
        return total

    def _window(self, more: bool) -> AbstractContextManager[Any]:
        """Around a backward after which more is added: an optimizer that works in backward must not take the sum."""
        accumulate = getattr(self.optimizer, "accumulate", None) if more else None
        return _NOTHING if accumulate is None else accumulate()

    def _clip(self) -> None:
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(self.params, self.clip_value)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.params, self.clip_norm)

    # -- the step of the run -------------------------------------------------------------------------------------

    def take(self, batch: Any) -> Tensor:
        """Take one batch, and the optimizer once the window is full; return the batch's detached loss."""
        if self.own_step is not None or (self.whole_step is not None and self._is_least()):
            with self.phase("step"):
                loss = self.step(batch)
            self.seconds = (0.0, 0.0, 0.0)
            self._average()
            self._count()
            return loss
        if self.micro == 0 and self.keeps_gradients:
            self.original.zero_grad()
        began = time.perf_counter()
        try:
            loss = self._backward(
                batch,
                self.compute,
                scaler=self.scaler,
                phase=self.phase,
                batches=self.accumulation,
                more=self.micro + 1 < self.accumulation,
            )
            self.micro += 1
            if self.micro >= self.accumulation:
                with self.phase("tail"):
                    self._apply()
        except BaseException:
            self.abandon()
            raise
        forward, backward, _ = self.seconds
        self.seconds = (forward, backward, time.perf_counter() - began - forward - backward)
        return loss

    def flush(self) -> bool:
        """Step with the batches of an unfinished window, averaged over their number; False where none was waiting."""
        if self.micro == 0:
            return False
        try:
            self._apply()
        except BaseException:
            self.abandon()
            raise
        return True

    def abandon(self) -> None:
        """Drop the gradients of an unfinished window."""
        self._drop_gradients()
        self.micro = 0
        if self.scaler is not None:
            self.scaler.abandon()

    def _apply(self) -> None:
        """Step with the batches of the window; gradients that are not admitted are left out."""
        if self._admitted():
            self._step_optimizer()
            self._average()
        if not self.keeps_gradients:
            self._drop_gradients()
        self.micro = 0
        self._count()

    def _is_least(self) -> bool:
        """Whether a step of the run is, but for what follows it, no more than `step`."""
        return self.accumulation == 1 and self.clip_value is None and self.scaler is None and self.guard is None

    def _admitted(self) -> bool:
        if self.guard is None or self.scaler is not None:  # under a scale what is not finite is skipped by its own rule
            return True
        return bool(self.guard.admits([p.grad for p in self.params if p.grad is not None]))

    def _step_optimizer(self) -> None:
        optimizer: Any = self.optimizer
        has_tail = hasattr(optimizer, "tail_stats")
        clips = self.clip_value is not None or self.clip_norm is not None
        # The losses were divided by the whole window; an unfinished one has had a share of it.
        share = self.micro / self.accumulation
        divisor = optimizer.grad_divisor if has_tail else 1.0
        if share != 1.0:
            if has_tail and not clips:
                optimizer.grad_divisor = divisor * share
            else:
                torch._foreach_mul_([p.grad for p in self.params if p.grad is not None], 1 / share)
        try:
            if self.scaler is None:
                self.update()
                return
            if clips:
                self.scaler.unscale_(optimizer)
                self._clip()
            self.scaler.step(optimizer)
            self.scaler.update()
        finally:
            if has_tail:
                optimizer.grad_divisor = divisor

    def _average(self) -> None:
        if self.average is not None and self.ema_decay is not None:
            with torch.no_grad():
                torch._foreach_lerp_(self.average, self.params, 1 - self.ema_decay)

    def _count(self) -> None:
        self.taken += 1
        if hasattr(self.given.step, "_wrapped_by_lr_sched"):  # of a step that was left out its scheduler would warn
            self.given._opt_called = True  # type: ignore[attr-defined]
        if self.scheduler is not None:
            self.scheduler.step()

    def _drop_gradients(self) -> None:
        for p in self.params:
            p.grad = None
