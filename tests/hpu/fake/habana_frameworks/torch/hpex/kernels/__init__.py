"""Attention in one kernel."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FusedSDPA"]


class FusedSDPA:
    """`FusedSDPA.apply(query, key, value, mask, dropout, causal, scale)`."""

    @staticmethod
    def apply(
        query: Any, key: Any, value: Any, mask: Any = None, p: float = 0.0, causal: bool = False, scale: Any = None
    ) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, p, causal, scale=scale)
