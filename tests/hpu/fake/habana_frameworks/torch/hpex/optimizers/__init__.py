"""The fused AdamW, by the recurrence of the bridge's source: eps is added before the bias correction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["FusedAdamW"]


class FusedAdamW(torch.optim.Optimizer):
    """One step count a group; moments in the parameters' dtype; an empty group is an error."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        moments_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if not group["params"]:
                raise RuntimeError("optimizer_adamw: expected a non-empty list of tensors")
            beta1, beta2 = group["betas"]
            given = [p for p in group["params"] if p.grad is not None]
            if not given:
                continue
            group["step"] = group.get("step", 0) + 1
            size = group["lr"]
            if group.get("bias_correction", True):
                size *= math.sqrt(1 - beta2 ** group["step"]) / (1 - beta1 ** group["step"])
            for p in given:
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                p.mul_(1 - group["weight_decay"] * group["lr"])
                p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-size)
        return loss
