"""Random numbers of a model: judged apart from its gradients where a strategy draws others than the step as given."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..optim.generators import rng_state, set_rng_state

if TYPE_CHECKING:
    from .run import Run

__all__ = ["backward_error", "draws", "judge_draws", "still"]

_DROPOUTS = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
)  # fmt: skip
_DRAWS = 24
_RISE = 0.03  # of the loss, on either side


@contextmanager
def still(run: Run) -> Iterator[None]:
    """Every dropout with probability zero while inside."""
    before = {name: getattr(F, name) for name in (*_DROPOUTS, "scaled_dot_product_attention")}
    recurrent = [(m, m.dropout) for m in run.model.modules() if isinstance(m, nn.RNNBase)]
    attention = before["scaled_dot_product_attention"]

    def unchanged(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG001
        return input

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, **more: Any) -> Any:  # noqa: ARG001
        return attention(q, k, v, attn_mask, 0.0, **more)

    try:
        for name in _DROPOUTS:
            setattr(F, name, unchanged)
        setattr(F, "scaled_dot_product_attention", attend)  # noqa: B010 (stubs say that it is a built-in)
        for module, _ in recurrent:
            module.dropout = 0.0
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)
        for module, p in recurrent:
            module.dropout = p


def draws(run: Run) -> list[float]:
    """Losses of one batch, one after the other, each with random numbers of its own."""
    with torch.no_grad():
        return [float(run.loss(run.batches[0])) for _ in range(_DRAWS)]


def judge_draws(found: list[float], usual: list[float]) -> str:
    """Return what is wrong with losses drawn, against those of the step as given; empty where nothing."""
    if len(set(usual)) > 2 and len(set(found)) < len(set(usual)) / 2:
        return f"random numbers repeat: {len(set(found))} different losses in {len(found)} draws of one batch"
    spread, normal = statistics.stdev(found), statistics.stdev(usual)
    error = math.sqrt((spread**2 + normal**2) / len(found))
    shift = statistics.fmean(found) - statistics.fmean(usual)
    if abs(shift) > 4.5 * error + 1e-6 * abs(statistics.fmean(usual)):
        sure = abs(shift) / max(error, 1e-300)
        return f"with random numbers the loss is {shift:+.3g} in the mean, {sure:.1f} standard errors"
    if not 1 / 2 < spread / max(normal, 1e-300) < 2:
        return f"random numbers spread the loss {spread / max(normal, 1e-300):.2g} times as far as before"
    return ""


def backward_error(run: Run) -> float:
    """How far the gradient is from the difference quotient of the loss with the same random numbers, relative.

    A recomputation in backward with masks of its own is off by as much as masks matter. Parameters are moved.
    """
    batch = run.batches[0]
    state = rng_state(run.params)

    def loss() -> Tensor:
        set_rng_state(state)
        return run.loss(batch)

    run.original.zero_grad()
    there = loss()
    there.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad.detach().clone() for p in run.params if p.grad is not None]
    moved = [p for p in run.params if p.grad is not None]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    if norm == 0:
        return 0.0
    length = _RISE * abs(float(there.detach())) / norm
    ends = []
    with torch.no_grad():
        for factor in (length / norm, -2 * length / norm):
            torch._foreach_add_(moved, grads, alpha=factor)
            ends.append(float(loss()))
    slope = (ends[0] - ends[1]) / (2 * length)
    return abs(slope / norm - 1)
