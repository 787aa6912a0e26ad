"""Random numbers of a model: judged apart from its gradients where a strategy draws others than the step as given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._C import tune as _native
from ..generators import rng_state, set_rng_state
from ..model.loss import tensors_in

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Draws", "backward_error", "draws", "judge_draws", "still"]

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

    def unchanged(input: Tensor, *_: Any, **__: Any) -> Tensor:
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


@dataclass(frozen=True)
class Draws:
    """Losses of one batch with other random numbers each time, and how far the outputs are from their mean."""

    losses: list[float]
    spreads: list[float]


def draws(run: Run) -> Draws:
    """Run the forward of one batch again and again, each time with the next random numbers."""
    outputs: list[Tensor] = []

    def keep(result: Any) -> Any:
        floats = [t for t in tensors_in(result) if t.is_floating_point()]
        outputs.append(torch.cat([t.detach().float().flatten() for t in floats]) if floats else torch.zeros(1))
        return result

    run.call.outputs("draws", keep)
    try:
        with torch.no_grad():
            losses = [float(run.loss(run.batches[0])) for _ in range(_DRAWS)]
    finally:
        run.call.outputs("draws", None)
    if len(outputs) != _DRAWS:  # a loss that calls the model in another way
        return Draws(losses, [])
    mean = sum(outputs) / _DRAWS
    return Draws(losses, [float((out - mean).square().mean()) for out in outputs])


def judge_draws(found: Draws, usual: Draws) -> str:
    """Return what is wrong with what was drawn, against the step as given; empty where nothing."""
    return _native.draws_fault(found.losses, found.spreads, usual.losses, usual.spreads)


def backward_error(run: Run) -> float:
    """How far the gradient is from the difference quotient of the loss with the same random numbers, relative.

    A recomputation in backward with masks of its own is off by as much as masks matter. Parameters are moved. Of
    several losses the worst: each by the parameters of its own optimizer, since it may hold the others fixed.
    """
    if len(run.losses) <= 1:
        return _backward_error(run, None, run.params)
    return max(_backward_error(run, number, slot.params) for number, slot in enumerate(run.slots))


def _backward_error(run: Run, number: int | None, params: Sequence[Tensor]) -> float:
    batch = run.batches[0]
    state = rng_state(run.params)

    def loss() -> Tensor:
        set_rng_state(state)
        return run.loss(batch) if number is None else run.loss(batch, number)

    for slot in run.slots:
        slot.original.zero_grad()
    there = loss()
    there.backward()  # type: ignore[no-untyped-call]
    moved = list({id(p): p for p in params if p.grad is not None}.values())
    grads = [p.grad.detach().clone() for p in moved if p.grad is not None]
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
