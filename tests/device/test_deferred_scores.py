"""Attention that a model writes out (`native_attention`) on the device of the run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oxytorch import _C
from oxytorch.tune import Run
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 11, 8


class Attention(nn.Module):
    """Causal, by a mask that is filled in, or with a bias that learns, or behind dropout."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.head = nn.Linear(12, 3 * HEADS * WIDTH), nn.Linear(HEADS * WIDTH, 4)
        self.bias = nn.Parameter(torch.randn(1, HEADS, TOKENS, TOKENS))
        self.register_buffer("hidden", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(BATCH, TOKENS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / WIDTH**0.5
        if self.kind == "bias":
            scores = scores + self.bias
        elif self.kind == "causal":
            scores = scores.masked_fill(self.hidden, float("-inf"))
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
        y = F.dropout(weights, 0.0 if self.kind != "dropout" else 0.2) @ v
        out: Tensor = self.head(y.transpose(1, 2).reshape(BATCH, TOKENS, HEADS * WIDTH)).mean(1)
        return out


def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, TOKENS, 12).to(device), torch.randint(4, (BATCH,)).to(device)


@pytest.fixture
def served(device: torch.device) -> torch.device:
    if not _C.tune.DeferredScores.serves(device):
        pytest.skip(f"not served on {device.type}")
    return device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "causal", "bias", "dropout"])
def test_it_is_one_call(kind: str, dtype: torch.dtype, served: torch.device) -> None:
    def trained(device: torch.device, dtype: torch.dtype, scope: Any = None) -> list[Tensor]:
        model = Attention(kind).to(dtype).to(device)
        x, y = batch(device)
        torch.manual_seed(2)
        with scope or nullcontext():
            loss = F.cross_entropy(model(x.to(dtype)), y)
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in model.parameters()]
        return [t.detach().cpu().double() for t in (loss, *grads) if t is not None]

    scores = _C.tune.DeferredScores()
    before = scores.joined()
    found = trained(served, dtype, scores.scope())
    assert scores.joined() == before + (kind != "dropout" or served.type == "cpu")
    theirs = trained(served, dtype)
    if kind == "dropout":  # of the device's own draws
        for one, torchs in zip(found, theirs, strict=True):
            torch.testing.assert_close(one, torchs, rtol=0.05, atol=0.01)
        return
    for one, torchs, true in zip(found, theirs, trained(torch.device("cpu"), torch.float64), strict=True):
        assert float((one - true).norm()) <= 2 * float((torchs - true).norm()) + 1e-3 * float(true.norm())


def test_the_strategy_is_for_the_device(served: torch.device) -> None:
    def strategy(kind: str) -> tuple[Run, Any]:
        model = Attention(kind).to(served)
        run = Run(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, [batch(served)], owns_loop=True)
        return run, run.strategy("native_attention").applies(run)

    run, applies = strategy("causal")
    assert applies is True
    before = _C.tune.DeferredScores.joined()
    run.set_active(["native_attention"])
    first = float(run.step(run.batches[0]))
    assert _C.tune.DeferredScores.joined() == before + 1
    assert float(run.step(run.batches[0])) < first
    run.set_active([])
    run.step(run.batches[0])
    assert _C.tune.DeferredScores.joined() == before + 2
    assert (strategy("dropout")[1] is True) == (served.type == "cpu")


def test_devices_that_are_not_served() -> None:
    assert not _C.tune.DeferredScores.serves(torch.device("meta"))
    assert not _C.tune.DeferredScores.serves(torch.device("hpu"))
