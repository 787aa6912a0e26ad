"""What tests of recurrent layers share: a native operator for a while, random cases, how far off results may be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from oxytorch import _C
from torch import Tensor, nn

from .rounding import ROUNDING, native

DTYPES = [torch.float32, torch.bfloat16]
LUCK = {torch.float32: 16, torch.bfloat16: 2}
Layer = type[nn.LSTM] | type[nn.GRU]


#: A recurrent layer by its kernel.
installed = partial(native, everywhere=True)


def handed_on() -> int:
    """Calls that native operators have left to torch's."""
    return _C.tune.NativeOperators.handed_on()


class Case:
    """Random sizes, layouts and uses of the results, by a seed."""

    def __init__(self, kind: Layer, seed: int, dtype: torch.dtype) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.kind, self.dtype, self.states = kind, dtype, 2 if kind is nn.LSTM else 1
        batch, steps = draw.choice([1, 2, 3, 16, 17, 33, 130]), draw.choice([1, 2, 3, 7, 20])
        features, hidden = draw.choice([1, 7, 16, 33, 64]), draw.choice([1, 5, 16, 24, 33, 64, 100])
        self.layers, self.first = draw.choice([1, 1, 2]), draw.random() < 0.5
        self.module = kind(
            features, hidden, self.layers, bias=draw.random() < 0.8, batch_first=self.first,
            bidirectional=draw.random() < 0.4,
        ).to(dtype)  # fmt: skip
        sizes = (batch, steps, features) if self.first else (steps, batch, features)
        layout = draw.choice(["plain", "wide", "spread"])
        self.input = torch.randn(sizes).to(dtype)
        if layout == "wide":
            self.input = torch.randn(*sizes[:2], features + 3).to(dtype)[..., 1 : features + 1]
        elif layout == "spread":
            self.input = torch.randn(*sizes[:2], 2 * features).to(dtype)[..., ::2]
        states = self.layers * (2 if self.module.bidirectional else 1)
        has_state = draw.random() < 0.6
        self.state = [torch.randn(states, batch, hidden).to(dtype) for _ in range(self.states)] if has_state else []
        uses = [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)] if self.states > 1 else [(1, 1), (1, 0), (0, 1)]
        self.uses = draw.choice(uses)

    def results(self, dtype: torch.dtype, autocast: bool = False) -> list[Tensor]:
        """Outputs, and gradients of everything, computed in a dtype; in float64 afterwards."""
        module = self.kind(
            self.module.input_size, self.module.hidden_size, self.layers, bias=self.module.bias,
            batch_first=self.first, bidirectional=self.module.bidirectional,
        ).to(dtype)  # fmt: skip
        module.load_state_dict(self.module.state_dict())
        inputs = [self.input.to(dtype).detach()] if dtype != self.dtype else [self.input.detach()]
        inputs += [one.detach().to(dtype) for one in self.state]
        for one in inputs:
            one.requires_grad_()
        state: Any = (tuple(inputs[1:]) if self.states > 1 else inputs[1]) if self.state else None
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            output, last = module(inputs[0], state)
        outputs = (output, *(last if self.states > 1 else (last,)))
        noise = torch.Generator().manual_seed(7)
        loss = torch.zeros((), dtype=dtype)
        for used, one in zip(self.uses, outputs, strict=True):
            weights = torch.randn(one.shape, generator=noise).to(self.dtype)
            if used:
                loss = loss + (one * weights.to(dtype)).sum()
        wanted = [*inputs, *module.parameters()]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [t.detach().double() for t in (*outputs, *grads) if t is not None]


def assert_no_further_off(
    exact: Sequence[Tensor], torchs: Sequence[Tensor], ours: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Each of `ours` is no further from `exact` than twice torch's, rounded to the dtype."""
    assert len(ours) == len(exact)
    errors = []
    for right, theirs, mine in zip(exact, torchs, ours, strict=True):
        # One tensor may be exact by luck: what is left of a gradient after steps is a difference of larger numbers.
        allowed = 2 * (theirs - right).norm() + LUCK[dtype] * ROUNDING[dtype] * right.norm()
        assert (mine - right).norm() <= allowed + 1e-30, (mine.shape, (mine - right).norm(), allowed)
        size = float(right.norm())
        errors.append([float((one - right).norm()) / size if size else 0.0 for one in (mine, theirs)])
    mine, theirs = torch.tensor(errors).square().mean(0).sqrt().tolist()
    assert mine <= 2 * theirs + ROUNDING[dtype], (mine, theirs)


class Reads(nn.Module):
    """A classifier of sequences."""

    def __init__(self, kind: Layer, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = kind(16, 24, 2, batch_first=True, dropout=dropout)
        self.out = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.layer(x)[0][:, -1])
        return result
