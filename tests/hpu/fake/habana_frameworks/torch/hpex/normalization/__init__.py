"""Clipping by the norm of all gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["FusedClipNorm"]


class FusedClipNorm:
    """`clip_norm(parameters)` scales the gradients in place and gives their norm before."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], max_norm: float) -> None:
        self.max_norm = max_norm

    def clip_norm(self, parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
