"""Watches a certified run from its step boundaries, and takes strategies back where they stop paying or drift."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .. import clock
from .._C import tune as _native
from .._C.memory import give_back_host_memory
from ..base import log
from ..model.snapshot import Snapshot
from ..optim.slot import OptimizerSlot
from .record import copied, rng_digest
from .run import Run
from .same_draws import SameDraws
from .strategy import widest
from .update import clip

__all__ = ["Watch"]

_DEVICE_LOOKS = 50  # steps between two looks at gradients that a device must be waited for


class Watch(_native.Watched):
    """Drives the native watch from the optimizer's step hooks, whoever calls ``step()``.

    A step lasts from one step's end to the next, so a loop of the user's own is watched as it is. At the watch's word a
    step is taken without the strategies, loss and gradients of a batch are compared from a snapshot, or the strategies
    are taken back; always between two steps. Which steps are compared is drawn from the system's entropy and `seed`, so
    that no fault can keep out of their way. Gradients that are not finite make it compare at once, before they are
    applied.

    Parameters
    ----------
    run : Run
        With the active strategies.
    certificate : oxytorch._C.tune.Certificate
        Says what was taken back.
    store : oxytorch._C.tune.CertificateStore, optional
        Forgets it then.
    seed : int
    has_budget : callable, optional
        Whether steps are held to a budget of memory now: a comparison is then of losses alone.

    Attributes
    ----------
    drawn_by : int
        What the compared steps are drawn by.
    batch
        That of the step under way, where the plan takes it.
    """

    def __init__(
        self,
        run: Run,
        certificate: Any,
        store: Any = None,
        seed: int = 0,
        has_budget: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._run = run
        self._has_budget = has_budget
        self._names = run.beside_required
        self._kind = widest(run.strategies[name].kind for name in run.active)
        self.drawn_by = int.from_bytes(os.urandom(6), "little") ^ seed
        self._watch = _native.Watch(
            self,
            certificate,
            store,
            names=self._names,
            # Where batches come from is not the step's: an epoch that begins beside a check is drawn as the others.
            always=[name for name in self._names if run.strategies[name].feeds],
            kind=self._kind,
            drawn_by=self.drawn_by,
            only_when_doubted=run.own_step is not None,  # it may do more than step
        )
        self._busy = False
        self._doubted = False
        self._told = False
        self._probes: dict[OptimizerSlot, Tensor] = {}
        self._last = 0.0
        self.batch: Any = None
        self._handles: list[Any] = []
        try:
            for slot in run.slots:
                self._handles.append(slot.original.register_step_pre_hook(partial(self._before_step, slot)))
            self._handles.append(run.last.original.register_step_post_hook(self._after_step))
            self._decide()
        except BaseException:
            self.stop()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """What is watched, also while a step is taken without it; nothing once it is over."""
        return self._names if self._handles else ()

    def stop(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def doubt(self) -> None:
        """Compare the losses at the next step boundary: a loss was not finite."""
        if self._handles and not self._doubted:
            self._doubted = True
            self._watch.doubt()

    @property
    def step(self) -> int:
        """Steps watched so far."""
        return self._watch.step

    @property
    def reason(self) -> str:
        """What the last check showed."""
        return self._watch.reason

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _before_step(self, slot: OptimizerSlot, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._busy or not self._handles or self._doubted or self._finite(slot):
            return
        self.doubt()
        self._decide()
        if not self._handles:  # they were to blame: what they made is not applied
            for p in slot.params:
                p.grad = None

    def _after_step(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._busy or not self._handles:
            return
        if self._watch.checks:
            self._run.synchronize()
        self._watch.after(clock.seconds() - self._last)
        self._decide()

    def _finite(self, slot: OptimizerSlot) -> bool:
        if self._run.device.type != "cpu" and self.step % _DEVICE_LOOKS:
            return True
        if slot not in self._probes:
            found = [p for p in slot.params if p.grad is not None]
            if not found:
                return True
            self._probes[slot] = min(found, key=lambda p: p.numel())
        grad = self._probes[slot].grad
        if grad is None:
            return True
        return math.isfinite(float(grad.sum()))  # of a sparse one as well

    def _decide(self) -> None:
        """Have what is wanted for the next step active, or end."""
        try:
            if not self._watch.before():
                self.stop()
        except BaseException:
            self.stop()
            raise
        if self._watch.checks:
            self._run.synchronize()
        self._last = clock.seconds()

    # -- what the native watch asks for --------------------------------------------------------------------------

    def activate(self, names: Sequence[str]) -> None:
        """Make these active, beside what the settings ask for."""
        if tuple(names) != self._run.beside_required:
            self._run.set_active(names)

    def has_budget(self) -> bool:
        """Whether steps are held to a budget of memory now."""
        return self._has_budget()

    def compare(self, first: Sequence[str] = ()) -> tuple[float, ...]:
        """Losses of one batch with and without, how far its gradients are, and the seconds; all else is as before then.

        `first`, or what is active, comes first, and that as it stands: put on anew, it might begin anew.
        """
        began = clock.seconds()
        run = self._run
        # A step under way has its gradients in place, a step of the user's own may do more, pieces draw for other rows;
        # and what gradients and a copy of the run take is beyond a budget of memory.
        is_small = self._has_budget() and run.own_step is None
        whole = not is_small and not self._doubted and run.own_step is None and run.micro_batches == 1
        whole = whole and not run.updates_in_backward  # which keeps no gradients
        self._busy = True
        try:
            with SameDraws(run.params, own=not self._is_compiled()) as draws:
                if first:
                    run.set_active(first)
                together = self._seen(whole, is_small=is_small)
                # What acts on the update alone shows in no loss, and taken back it would take its memory.
                run.set_active([name for name in self._names if is_small and self._acts_on_update(name)])
                draws.again()
                without = self._seen(whole, is_small=is_small)
            run.set_active(self._names)
        finally:
            self._busy = False
        if draws.disturbed and math.isfinite(without.loss) and math.isfinite(together.loss):
            if not self._told:
                log("info", f"accelerate: the losses of one batch are not compared: {draws.disturbed}", "tune")
            self._told = True
            return without.loss, without.loss, 0.0, 0.0, clock.seconds() - began
        apart = _native.gradients_apart(together.values, without.values) if together.rng == without.rng else (0.0, 0.0)
        losses = together.loss, without.loss
        del together, without
        give_back_host_memory()  # a heap or pool that keeps memory would hold the copies' from now on
        return *losses, *apart, clock.seconds() - began

    def _acts_on_update(self, name: str) -> bool:
        return _native.acts_on_update(self._run.strategies[name].group)

    def _is_compiled(self) -> bool:
        """Whether something in the step is a function of torch.compile."""
        run = self._run
        functions = (run.own_step, *run.losses, *(module._compiled_call_impl for module in run.model.modules()))
        compiled = any(hasattr(f, "_torchdynamo_orig_callable") for f in functions)
        own = any(type(module).__name__ == "OptimizedModule" for module in run.model.modules())
        by_strategy = any(run.strategies[name].group == "compile" for name in self._names)
        return compiled or own or by_strategy or run.call.was_compiled

    def _seen(self, whole: bool, *, is_small: bool) -> _Seen:
        """Loss, and of a whole step gradients, of one batch from here, with what is active."""
        run = self._run
        batch = run.batches[0] if self.batch is None else self.batch
        # The moving average may be kept by what steps in the place of the user's optimizer.
        tail = [run.optimizer] if run.ema_decay is not None and run.average is None else []
        roots = (run.given_models, run.given_optimizers, *tail, *run.state)
        snapshot = Snapshot.of(
            *roots,
            reach=run.functions,
            hashed=False,
            default_generators=False,
            leave_out=_written_by_steps(run) if is_small else (),
        )
        given: list[Tensor | None] = []
        several = run.slots if len(run.slots) > 1 else ()  # of which one's loss may add to another's gradients
        hooks = [slot.original.register_step_pre_hook(partial(self._keep_gradients, slot, given)) for slot in several]
        try:
            if is_small:
                with torch.no_grad():
                    return _Seen(float(run.loss(batch)))
            if not whole:
                return _Seen(float(run.loss(batch).detach() if run.own_step is None else run.step(batch)))
            loss = float(run.step(copied(batch)))
            if not several:
                self._keep_gradients(run.slots[0], given)
            if self._kind == "exact":  # what the step made of them too
                given += [p.detach().clone() for p in run.params]
            return _Seen(loss, given, rng_digest(run))
        finally:
            for hook in hooks:
                hook.remove()
            snapshot.restore()

    def _keep_gradients(self, slot: OptimizerSlot, given: list[Tensor | None], *_: Any) -> None:
        found: Sequence[Tensor | None] = [p.grad for p in slot.params]
        # Who clips in the update leaves them as they were.
        if self._kind != "exact" and self._run.given_clip is not None:
            found = clip(found, self._run.given_clip)
        given += [None if t is None else t.detach().clone() for t in found]


def _written_by_steps(run: Run) -> list[Tensor]:
    """Parameters, gradients and the optimizers' state, which a loss by itself leaves as they are."""
    found = list(run.params)
    found += [p.grad for p in run.params if p.grad is not None]
    optimizers = [one for slot in run.slots for one in (slot.original, slot.optimizer)]
    found += [t for t in tree_leaves([dict(one.state) for one in optimizers]) if isinstance(t, Tensor)]
    return found


@dataclass(frozen=True)
class _Seen:
    """What a step showed: loss, gradients, random states afterwards."""

    loss: float
    values: Sequence[Tensor | None] = ()
    rng: str = ""
