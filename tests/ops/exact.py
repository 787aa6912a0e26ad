"""Attention in fp64, by the definition: what tests of attention hold results to."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    mask: Tensor | None,
    scale: float,
    window: tuple[int, int],
    soft_cap: float,
    keep: Tensor | float = 1.0,
) -> list[Tensor]:
    """Output and gradients of query, key and value."""
    q, k, v = (t.detach().double().requires_grad_() for t in (query, key, value))
    group = q.size(1) // k.size(1)
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        scores = scores + mask.double() if mask.dtype != torch.bool else scores.masked_fill(~mask, -math.inf)
    before, after = window
    apart = torch.arange(k.size(2)) - torch.arange(q.size(2))[:, None]
    if after >= 0:
        scores = scores.masked_fill(apart > after, -math.inf)
    if before >= 0:
        scores = scores.masked_fill(apart < -before, -math.inf)
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0)
    output = (weights * keep) @ v.repeat_interleave(group, 1)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), grad_output.double())]
