"""The training step: one engine, which `Trainer`, `Plan.step` and the trials of the tuner go through."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from .model.loss import is_criterion, loss_of, scalar_loss
from .model.several import listed, numbered
from .optim.slot import OptimizerSlot

__all__ = ["Loss", "Losses", "Models", "Optimizers", "StepFunction", "TrainingStep", "is_closure", "no_phase"]

StepFunction = Callable[[Any], Tensor]
Phase = Callable[[str], AbstractContextManager[Any]]
Models = nn.Module | Sequence[nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Loss = Callable[..., Tensor] | nn.Module
Losses = Loss | Sequence[Loss] | None

_NOTHING: AbstractContextManager[None] = nullcontext()


def is_closure(batch: Any) -> bool:
    """Whether it is a function that returns the loss, in the place of a batch; some classes of batches are callable."""
    return callable(batch) and not hasattr(batch, "__getitem__")


def no_phase(_name: str) -> AbstractContextManager[Any]:
    """Time nothing."""
    return _NOTHING


class _Models(nn.Module):
    """Several models as one, to be walked: what they hold is named ``model[0].weight`` and so on."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        for name, model in numbered("model", models):
            self.add_module(name, model)


class TrainingStep:
    """Takes the steps of a training run.

    `step` is the least that trains: gradients of before are dropped, forward, loss, backward, clip, optimizer. It is
    what the tuner tries things on. `take` is the step of the run, in this order:

    1. at the begin of a window of batches, gradients of before are dropped;
    2. forward and loss under `scope`, the loss over the window's batches, times the scale, and backward;
    3. once the window is full: `guard` looks at the gradients, they are unscaled and clipped by value and norm, the
       optimizer steps, the moving average follows, the scheduler steps.

    An optimizer of oxytorch.optim that a strategy has put in place does some of 3 inside of its own step.

    What throws in it leaves no trace of the window.

    With several optimizers `take` does what `step` does: a window is one batch. One loss is of all of them: their
    gradients are dropped, forward, loss, backward, and each clips its own and steps. Of several losses there is one for
    each optimizer, and all that is done for the first one, its step too, before the next one begins.

    Parameters
    ----------
    model : torch.nn.Module or list of them
    optimizer : torch.optim.Optimizer or list of them
    loss_fn : callable or list of them, optional
        ``loss_fn(model, batch)``, `model` being what was given, or a criterion, and then a batch is (inputs, targets).
        A batch may also be a closure that returns the loss, where there is one loss.
    own_step : callable, optional
        The user's own step: takes a batch, does all of zero_grad, forward, backward and optimizer step, returns the
        loss. Then a window is one batch, and clipping, guard and scale are the function's.
    clip_norm : float, optional

    Attributes
    ----------
    model : torch.nn.Module
        Of several models one that holds them, to walk what they hold; it is not called.
    models : tuple of torch.nn.Module
    slots : tuple of OptimizerSlot
        Of each optimizer the object that is stepped, and the one that does the work.
    original, optimizer : torch.optim.Optimizer
        Those of the first slot.
    params : list of Tensor
        Of all optimizers, in their order.
    scope : context manager
        Around forward and loss; entered anew each time.
    phase : callable
        Times the parts of `take`: "forward", "backward", "tail", or "step" where they cannot be told apart.
    accumulation : int
        Batches of a window.
    micro, taken : int
        Batches of the window so far, and optimizer steps.
    scaler, scheduler, clip_value, ema_decay
        What `take` does beside; None where it does not.
    guard : NonFiniteGuard, optional
        Looks at the gradients before they are used, where the optimizer does not; its policy is `nonfinite`.
    update_begun : bool
        Whether the last `take` went as far as the optimizers' update: one that threw before it can be taken again.
    skipped : int
        Steps that optimizers which were in place for a while have left out.
    average : list of Tensor, optional
        The moving average of each parameter, where the optimizer does not keep it.
    keeps_gradients : bool
        Whether those of a window stay until the next one begins; else they are dropped once they are applied.
    completes_gradients : bool
        Whether a backward is running after which nothing more is added to the gradients of its step.
    updates_in_backward : bool
        Whether each parameter is updated there, as its gradient arrives, and the gradient let go.
    whole_step : callable, optional
        Takes a whole step in place of the eager one.
    seconds : tuple of float
        Of forward, backward and the rest, in the last `take`.
    """

    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        loss_fn: Losses,
        *,
        own_step: StepFunction | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self.given_models = model
        self.given_optimizers = optimizer
        self.models: tuple[nn.Module, ...] = listed(model)
        self.model: nn.Module = model if isinstance(model, nn.Module) else _Models(self.models)
        optimizers = listed(optimizer)
        named = [name if len(optimizers) > 1 else "" for name, _ in numbered("optimizer", optimizers)]
        self.slots = tuple(map(OptimizerSlot, optimizers, named))
        self.loss_fn = loss_fn
        self.own_step = own_step
        self.clip_norm = clip_norm
        self.scope: AbstractContextManager[Any] = _NOTHING
        self.phase: Phase = no_phase
        self.whole_step: StepFunction | None = None
        self.params: list[Tensor] = [p for slot in self.slots for p in slot.params]
        self.accumulation = 1
        self.micro = 0
        self.taken = 0
        self.update_begun = False
        self.clip_value: float | None = None
        self.scaler: Any = None
        self.guard: Any = None
        self.nonfinite = "propagate"
        self.skipped = 0
        self.scheduler: Any = None
        self.ema_decay: float | None = None
        self.average: list[Tensor] | None = None
        self.keeps_gradients = True
        self.completes_gradients = False
        self.updates_in_backward = False
        self._is_to_follow = False
        self.seconds = (0.0, 0.0, 0.0)
        self._criterion = len(self.losses) == 1 and is_criterion(self.losses[0])

    @property
    def losses(self) -> tuple[Loss, ...]:
        """What `loss_fn` lists, or it alone."""
        return () if self.loss_fn is None else listed(self.loss_fn)

    @property
    def original(self) -> torch.optim.Optimizer:
        """The first optimizer object that is stepped."""
        return self.slots[0].original

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that does its work."""
        return self.slots[0].optimizer

    # -- the least that trains -----------------------------------------------------------------------------------

    def loss(self, batch: Any, number: int | None = None) -> Tensor:
        """Return the loss of a batch, or of a closure, under what is active; of several that `number`, or their sum.

        Raises
        ------
        TypeError, ValueError
            Where it is no scalar tensor, or the batch does not fit.
        """
        if len(self.losses) > 1 and number is None:
            return cast(Tensor, sum(self.loss(batch, i) for i in range(len(self.losses))))
        if len(self.losses) <= 1 and is_closure(batch):
            return scalar_loss(batch())
        self.check(batch)
        loss_fn = self.losses[number or 0]
        if self._criterion:
            return scalar_loss(loss_fn(self.model(batch[0]), batch[1]))
        return loss_of(loss_fn, self.given_models, batch)

    def check(self, batch: Any) -> None:
        """Refuse a batch that the loss cannot be of, with TypeError."""
        if not self.losses:
            raise TypeError("there is no loss_fn: give one, or pass step() a closure that returns the loss.")
        if len(self.losses) > 1 and is_closure(batch):
            raise TypeError(f"a closure returns one loss, and there are {len(self.losses)}: pass step() a batch.")
        if self._criterion and not (isinstance(batch, Sequence) and len(batch) == 2):
            raise TypeError(
                f"the loss is a criterion, so a batch is (inputs, targets); this one is a {type(batch).__name__}. "
                "Pass loss_fn(model, batch) for another shape."
            )

    def step(self, batch: Any) -> Tensor:
        """Take one whole step on one batch; return the detached loss."""
        return self.eager_step(batch) if self.whole_step is None else self.whole_step(batch)

    def eager_step(self, batch: Any) -> Tensor:
        """`step` without `whole_step`."""
        if self.own_step is not None:
            return scalar_loss(self.own_step(batch)).detach()
        if len(self.losses) <= 1:
            return self._part(batch, None, self.slots)
        parts = [self._part(batch, number, (slot,)) for number, slot in enumerate(self.slots)]
        return cast(Tensor, sum(parts))

    def _part(self, batch: Any, number: int | None, slots: Sequence[OptimizerSlot]) -> Tensor:
        """Do all that is done for one of several losses, or for the only one; return it, detached."""
        for slot in slots:
            slot.original.zero_grad()
        loss = self._backward(batch, number)
        self.update(slots)
        return loss

    def update(self, slots: Sequence[OptimizerSlot] | None = None) -> None:
        """Look at the gradients, clip those of each optimizer and let it step; of all optimizers unless given."""
        if self._admitted():
            for slot in self.slots if slots is None else slots:
                self._clip(slot.params)
                slot.original.step()

    def pieces(self, batch: Any) -> list[tuple[Any, float]]:
        """What of a batch goes through forward together, and its share of the rows."""
        return [(batch, 1.0)]

    def _backward(
        self,
        batch: Any,
        number: int | None = None,
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
                loss = self.loss(piece) if number is None else self.loss(piece, number)
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

    @contextmanager
    def _window(self, more: bool) -> Iterator[None]:
        """Around a backward after which more is added: what works in backward must not take the sum."""
        accumulate = getattr(self.optimizer, "accumulate", None) if more else None
        self.completes_gradients = not more
        try:
            with _NOTHING if accumulate is None else accumulate():
                yield
        finally:
            self.completes_gradients = False

    def _clip(self, params: Sequence[Tensor]) -> None:
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(params, self.clip_value)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(params, self.clip_norm)

    # -- the step of the run -------------------------------------------------------------------------------------

    def take(self, batch: Any) -> Tensor:
        """Take one batch, and the optimizer once the window is full; return the batch's detached loss."""
        several = len(self.slots) > 1
        if self.own_step is not None or several or (self.whole_step is not None and self._is_least()):
            self._is_to_follow = self.average is not None
            self.update_begun = True  # it cannot be told
            try:
                with self.phase("step"):
                    loss = self.step(batch)
            except BaseException:
                if several and self.own_step is None:
                    self.abandon()
                raise
            self.seconds = (0.0, 0.0, 0.0)
            self.follow()
            self._count()
            return loss
        if self.micro == 0 and self.keeps_gradients:
            self.original.zero_grad()
        self.update_begun = False
        began = time.perf_counter()
        try:
            loss = self._backward(
                batch,
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
        self.update_begun = True
        if self._admitted():
            self._is_to_follow = self.average is not None
            self._step_optimizer()
            self.follow()
        if not self.keeps_gradients:
            self._drop_gradients()
        self.micro = 0
        self._count()

    def is_plain(self) -> bool:
        """Whether a step of the run is, but for `guard` and what follows it, one batch and no more than `step`."""
        return self.accumulation == 1 and self.clip_value is None and self.scaler is None

    @property
    def needs_all_gradients(self) -> str:
        """Why gradients may not go as they arrive, as something looks at all of them; empty where nothing does."""
        if self.clip_norm is not None or self.clip_value is not None:
            return "gradients are clipped, which takes all of them"
        if self.guard is not None or self.scaler is not None:
            return "a step with a gradient that is not finite is left out, which is known after backward"
        return ""

    def _is_least(self) -> bool:
        return self.is_plain() and self.guard is None

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
                self._clip(self.params)
                self.original.step()
                return
            if clips:
                self.scaler.unscale_(optimizer)
                self._clip(self.params)
            self.scaler.step(optimizer)
            self.scaler.update()
        finally:
            if has_tail:
                optimizer.grad_divisor = divisor

    def follow(self) -> None:
        """Move the average after the step that is being taken, once.

        Whoever takes the average over at the end of a step, as hooks of the optimizer may, calls this first; a step in
        which the optimizer kept it has moved it already.
        """
        if self._is_to_follow and self.average is not None and self.ema_decay is not None:
            with torch.no_grad():
                torch._foreach_lerp_(self.average, self.params, 1 - self.ema_decay)
        self._is_to_follow = False

    def _count(self) -> None:
        self.taken += 1
        if hasattr(self.original.step, "_wrapped_by_lr_sched"):  # of a step that was left out its scheduler would warn
            self.original._opt_called = True  # type: ignore[attr-defined]
        if self.scheduler is not None:
            self.scheduler.step()

    def _drop_gradients(self) -> None:
        for p in self.params:
            p.grad = None
