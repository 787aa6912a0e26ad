"""A model of blocks for budgets of memory, as tests/tune/deep_model.h is in C++."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Deep(nn.Module):
    """Blocks that keep much more than they hand on.

    `plain`: without batch normalisation and dropout, so that a batch can be cut into pieces.
    """

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)

        def block() -> nn.Sequential:
            inner = [nn.GELU()] if plain else [nn.BatchNorm1d(512), nn.GELU(), nn.Dropout(0.1)]
            return nn.Sequential(nn.Linear(32, 512), *inner, nn.Linear(512, 32))

        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(256, 32, generator=generator), torch.randint(5, (256,), generator=generator)
