"""`PerformanceOptimizer`: one call that prepares a model, and a trainer on what was found to pay."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..accelerator import GPUConfig
from ..config import PerformanceConfig
from ..model.escrow import call
from ..tune.accelerate import accelerate
from ..tune.plan import MAKERS, Plan
from .trainer import Trainer

__all__ = ["PerformanceOptimizer", "planned_trainer"]

# What a plan has decided, and its trainer leaves alone.
_DECIDED: dict[str, Any] = {
    "precision": "fp32",
    "channels_last": "off",
    "threads": "keep",
    "flush_denormals": "off",
    "allocator": "system",
    "step_tail": "off",
    "optimizer_state": "auto",
    "attention": "default",
    "compile": "off",
}


class PerformanceOptimizer:
    """Prepares a training run: what `oxytorch.accelerate` does, under a configuration, with a trainer on the result.

    Parameters
    ----------
    config
        A level, a ``PerformanceConfig``, a mapping of its keys or the path of a file.
    gpu : GPUConfig, optional
        Settings of the accelerator, applied before anything is measured and taken back by ``plan.revert()``.
    monitor : PerformanceMonitor, optional
        Times the steps of ``plan.trainer``; one is made unless given.

    Examples
    --------
    >>> run = PerformanceOptimizer("advanced").prepare(model, optimizer, loader, nn.CrossEntropyLoss())
    >>> run.trainer.fit(run.data, epochs=3)
    """

    def __init__(
        self,
        config: PerformanceConfig | Mapping[str, Any] | str | os.PathLike[str] = "advanced",
        *,
        gpu: GPUConfig | None = None,
        monitor: Any = None,
    ) -> None:
        self.config = PerformanceConfig.of(config)
        self.gpu = gpu
        self.monitor = monitor

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Iterable[Any],
        loss_fn: Callable[..., torch.Tensor] | nn.Module | None = None,
        *,
        scheduler: Any = None,
        checkpointer: Any = None,
        callbacks: Iterable[Any] = (),
        state: Iterable[Any] = (),
        **options: Any,
    ) -> Plan:
        """Try, measure, verify, put in force; nothing of the run has changed but its speed.

        Parameters
        ----------
        model, optimizer
            As for `oxytorch.accelerate`.
        data
            Batches, a loader or an iterator; ``plan.data`` is what to draw from then.
        loss_fn
            As there. Without it the model's own loss is taken: what it returns as ``.loss``, ``["loss"]`` or a scalar.
        scheduler, checkpointer, callbacks
            As for `oxytorch.Trainer`, for ``plan.trainer``.
        state
            What else a step changes.
        **options
            Other keywords of `oxytorch.accelerate`: ``loop``, ``step``, ``steps_planned``, ``strategies`` ...

        Returns
        -------
        Plan
            The type that `oxytorch.accelerate` returns.
        """
        if self.gpu is not None:
            self.gpu.apply()
        try:
            held = [*state, scheduler] if scheduler is not None else [*state]
            own_step = options.get("step") is not None
            loss = loss_fn if loss_fn is not None or own_step else own_loss
            plan = accelerate(model, optimizer, loss, data, config=self.config, state=held, **options)
            plan._gpu = self.gpu
            plan._monitor = self.monitor
            plan._trainer = planned_trainer(plan, scheduler=scheduler, checkpointer=checkpointer, callbacks=callbacks)
        except BaseException:
            if self.gpu is not None:
                self.gpu.revert()
            raise
        return plan


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss that a model computes itself.

    Raises
    ------
    TypeError
        For a model that returns none.
    """
    outputs = call(model, batch)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError(
            f"the model returns a {type(outputs).__name__} without a loss. Pass loss_fn: a criterion, "
            "or a function of (model, batch)."
        )
    return loss


def planned_trainer(plan: Plan, **keywords: Any) -> Trainer:
    """Return a trainer on a plan's objects that leaves alone what the plan has decided."""
    settings = plan.settings.copy()
    settings.set("level", "basic")
    run = plan._run
    kind = _PlanTrainer if run.owns_loop or run.own_step is not None else Trainer
    overrides = {**_DECIDED, "clip_norm": run.clip_norm or 0}
    trainer = kind(
        plan.model,
        plan.optimizer,
        run.loss_fn,
        settings,
        monitor=plan.monitor,
        calibrate=False,
        **keywords,
        **overrides,
    )
    if isinstance(trainer, _PlanTrainer):
        trainer.plan = plan
    return trainer


class _PlanTrainer(Trainer):
    """Steps through the plan, whose strategies may have changed the loop itself."""

    plan: Plan

    def _take(self, batch: Any) -> torch.Tensor:
        with self._phase("step"):
            loss = self.plan.step(batch)
        if self.monitor is not None:
            self.monitor.scalar("loss", loss)
        self.batches += 1
        self.global_step += 1
        if self._step_scheduler is not None:
            self._step_scheduler.step()
        return loss


MAKERS["trainer"] = planned_trainer
