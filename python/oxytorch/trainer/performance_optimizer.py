"""`PerformanceOptimizer`: one call that prepares a model, and a trainer on what was found to pay."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .._C.base import setting_refusal
from ..accelerator import GPUConfig
from ..config import PerformanceConfig
from ..generators import seed_generators
from ..memory import MemoryConfig, MemoryManager
from ..model.loss import call, scalar_loss
from ..tune.accelerate import accelerate
from ..tune.plan import Plan
from .settings import check_arguments
from .trainer import Trainer

__all__ = ["PerformanceOptimizer"]


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
    memory : MemoryConfig, MemoryManager or mapping, optional
        Of ``plan.memory``, whose limit holds while anything is measured too; taken back by ``plan.revert()``.

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
        memory: MemoryConfig | MemoryManager | Mapping[str, Any] | None = None,
    ) -> None:
        self.config = PerformanceConfig.of(config)
        self.memory = memory
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
        """Try, measure, verify, make active; nothing of the run has changed but its speed.

        Parameters
        ----------
        model, optimizer
            As for `oxytorch.accelerate`.
        data
            Batches, a loader or an iterator; ``plan.data`` is what to draw from then: the same batches in the same
            order, from more workers or ahead of the steps where that was found to pay.
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

        Raises
        ------
        ValueError, NotImplementedError
            Before anything ran, for a setting that neither the search nor the trainer can honour.
        """
        for name, given in (("model", model), ("optimizer", optimizer)):
            if isinstance(given, list | tuple):
                raise TypeError(
                    f"{name} is a {type(given).__name__}: plan.trainer takes one model and one optimizer. Give several "
                    "to oxytorch.accelerate, whose plan.step(batch) takes their steps."
                )
        own_step = options.get("step") is not None
        settings = PerformanceConfig.of(self.config)
        if options.get("level") is not None:
            settings.set("level", options.pop("level"))
        settings.check("own_step" if own_step else "performance_optimizer")
        made: dict[str, Any] = {"scheduler": scheduler, "checkpointer": checkpointer, "callbacks": [*callbacks]}
        check_arguments(settings, optimizer, monitor=self.monitor, **made)
        memory = self._memory_manager()
        if self.gpu is not None:
            self.gpu.apply()
        try:
            if isinstance(settings.seed, int):
                seed_generators(settings.seed)  # the search puts generators back to here
            held = [*state, scheduler] if scheduler is not None else [*state]
            loss = loss_fn if loss_fn is not None or own_step else own_loss
            search = settings.copy()
            for key, _ in settings:
                if setting_refusal(key, "accelerate"):
                    search.reset(key)  # the trainer's
            plan = accelerate(model, optimizer, loss, data, config=search, state=held, **{"loop": "data", **options})
        except BaseException:
            if self.gpu is not None:
                self.gpu.revert()
            memory.revert()
            raise
        plan.settings = settings
        plan._gpu = self.gpu
        plan._monitor = self.monitor
        plan._memory = memory
        try:
            plan._trainer = Trainer(
                model, optimizer, loss, settings, monitor=plan.monitor, memory=memory, plan=plan, **made
            )
        except BaseException:
            plan.revert()
            raise
        return plan

    def _memory_manager(self) -> MemoryManager:
        given = self.memory
        if isinstance(given, MemoryManager):
            return given
        if given is not None and not isinstance(given, MemoryConfig | Mapping):
            raise TypeError(
                f"memory is a {type(given).__name__}, expected a MemoryConfig, a MemoryManager or a mapping."
            )
        return MemoryManager(**given) if isinstance(given, Mapping) else MemoryManager(given)


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss that a model computes itself.

    Raises
    ------
    TypeError
        For a model that returns none.
    """
    outputs = call(model, batch)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
    if loss is None or (loss is outputs and not (isinstance(loss, torch.Tensor) and loss.numel() == 1)):
        raise TypeError(
            f"the model returns a {type(outputs).__name__} without a loss. Pass loss_fn: a criterion, "
            "or a function of (model, batch)."
        )
    return scalar_loss(loss)
