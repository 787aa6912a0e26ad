"""Oxytorch's contenders: the Trainer at a level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oxytorch
import torch
from torch import Tensor, nn

from .workloads import Batch, Workload

__all__ = ["Ours"]


class Ours:
    """What a user of Oxytorch writes: the plain loop's optimizer and schedule, handed to a Trainer."""

    def __init__(
        self,
        workload: Workload,
        steps: int,
        loss: Callable[[nn.Module, Batch], Tensor],
        level: str,
        *,
        compiled: bool,
        steps_planned: int,
    ) -> None:
        recipe = workload.recipe
        self.model = workload.make_model()
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.lr_factor(steps))
        options: dict[str, Any] = {"compile": "default"} if compiled else {}
        self.trainer = oxytorch.Trainer(
            self.model,
            optimizer,
            loss,
            config=level,
            scheduler=schedule,
            clip_norm=recipe.clip_norm,
            ema_decay=recipe.ema_decay,
            steps_planned=steps_planned,
            **options,
        )

    def step(self, batch: Batch) -> Tensor:
        """One optimizer step."""
        return self.trainer.step(batch)

    def averaged(self) -> dict[str, Tensor]:
        """The averaged weights beside the model's buffers."""
        with self.trainer.ema_weights():
            return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def report(self) -> dict[str, Any]:
        """The trainer's account of its settings."""
        return self.trainer.report().to_dict()
