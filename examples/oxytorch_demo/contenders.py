"""The loops that the demo races. The rivals import nothing of oxytorch; ``ours`` is imported on demand by the worker.

Every contender gets the same model seed, batches, hyperparameters and number of steps, and every one is timed by the
same :class:`PhaseClock`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .workloads import Batch, Workload

__all__ = ["Contender", "PhaseClock", "Plain", "Stock", "StockChoice"]


class PhaseClock:
    """Seconds spent in forward and in backward, read off ``time.perf_counter`` without hooks.

    Forward is the call of the loss function. Backward is ``torch.autograd.backward``, replaced in the worker's process
    for every contender alike, so that a loop hidden inside a trainer is measured like one written out.
    """

    def __init__(self) -> None:
        self.inner = 0.0
        self.saw_backward = False
        backward = torch.autograd.backward

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return backward(*args, **kwargs)
            finally:
                self.inner += time.perf_counter() - began
                self.saw_backward = True

        torch.autograd.backward = timed

    def timed_loss(self, loss: Callable[[nn.Module, Batch], Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
        """``loss`` with its own time added up."""

        def timed(model: nn.Module, batch: Batch) -> Tensor:
            began = time.perf_counter()
            result = loss(model, batch)
            self.inner += time.perf_counter() - began
            return result

        return timed


class Contender(Protocol):
    """One way to train: ``step`` takes a batch as the data gives it and returns the detached loss."""

    def step(self, batch: Batch) -> Tensor:
        """One optimizer step."""
        ...

    def averaged(self) -> dict[str, Tensor]:
        """The averaged weights beside the model's buffers, by name, as a copy."""
        ...

    def report(self) -> dict[str, Any] | None:
        """A trainer's account of itself: ``settings`` and ``timings``."""
        ...


class Plain:
    """What a competent user writes: AdamW, clipping, a cosine schedule, an average of the weights, fp32."""

    def __init__(
        self, workload: Workload, steps: int, loss: Callable[[nn.Module, Batch], Tensor], compiled: bool
    ) -> None:
        recipe = workload.recipe
        self.model = workload.make_model()
        self.parameters = list(self.model.parameters())
        self.loss = loss
        self.forward_model: nn.Module = torch.compile(self.model) if compiled else self.model  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, recipe.lr_factor(steps))
        self.ema = [parameter.detach().clone() for parameter in self.parameters]
        self.clip_norm, self.keep = recipe.clip_norm, recipe.ema_decay

    def step(self, batch: Batch) -> Tensor:
        """One optimizer step, as written in a thousand scripts."""
        self.optimizer.zero_grad()
        loss = self.loss(self.forward_model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            for average, parameter in zip(self.ema, self.parameters, strict=True):
                average.lerp_(parameter, 1.0 - self.keep)
        return loss.detach()

    def averaged(self) -> dict[str, Tensor]:
        """The averaged weights beside the model's buffers."""
        return _averaged(self.model, self.ema)

    def report(self) -> None:
        """Nothing to say."""


@dataclass(frozen=True)
class StockChoice:
    """Which of stock PyTorch's options the calibration found fastest."""

    bf16: bool = False
    channels_last: bool = False
    mallopt: bool = False

    def __str__(self) -> str:
        parts = ["bf16 autocast" if self.bf16 else "fp32"]
        if self.channels_last:
            parts.append("channels_last")
        if self.mallopt:
            parts.append("mallopt")
        return " + ".join(parts)


@dataclass
class Stock:
    """The best eager loop of stock PyTorch: fused AdamW, foreach clipping and averaging, and what ``choice`` says.

    The allocator is the process's, so the worker sets it.
    """

    workload: Workload
    steps: int
    loss: Callable[[nn.Module, Batch], Tensor]
    choice: StockChoice
    compiled: bool
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        recipe = self.workload.recipe
        self.model = self.workload.make_model()
        if self.choice.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.forward_model: nn.Module = torch.compile(self.model) if self.compiled else self.model  # type: ignore[assignment]
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, recipe.lr_factor(self.steps))
        self.ema = [parameter.detach().clone() for parameter in self.parameters]

    def step(self, batch: Batch) -> Tensor:
        """One optimizer step with every fast path that stock PyTorch has."""
        recipe = self.workload.recipe
        if self.choice.channels_last:
            batch = (batch[0].to(memory_format=torch.channels_last), batch[1])
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.choice.bf16):
            loss = self.loss(self.forward_model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, recipe.clip_norm, foreach=True)
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.ema, self.parameters, 1.0 - recipe.ema_decay)  # type: ignore[arg-type]
        return loss.detach()

    def averaged(self) -> dict[str, Tensor]:
        """The averaged weights beside the model's buffers."""
        return _averaged(self.model, self.ema)

    def report(self) -> None:
        """Nothing to say."""


def _averaged(model: nn.Module, ema: list[Tensor]) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state.update({name: average.clone() for name, average in zip(names, ema, strict=True)})
    return state
