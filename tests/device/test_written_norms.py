"""RMS normalization that a model writes out (`native_layer_norm`) on the device of the run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oxytorch import _C
from oxytorch.tune import Run
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 24


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + 1e-5)).to(x.dtype)


class Model(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.head = nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x + self.layer(x)))
        return out


def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(32, WIDTH).to(device), torch.randint(4, (32,)).to(device)


@pytest.fixture
def served(device: torch.device) -> torch.device:
    if not _C.tune.DeferredSums.serves(device):
        pytest.skip(f"not served on {device.type}")
    return device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_one_norm(dtype: torch.dtype, served: torch.device) -> None:
    def trained(device: torch.device, dtype: torch.dtype, scope: Any = None) -> list[Tensor]:
        model = Model(Norm()).to(dtype).to(device)
        x, y = batch(device)
        with scope or nullcontext():
            loss = F.cross_entropy(model(x.to(dtype)), y)
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in model.parameters()]
        return [t.detach().cpu().double() for t in (loss, *grads) if t is not None]

    before = _C.tune.DeferredSums.written()
    found = trained(served, dtype, _C.tune.DeferredSums().scope())
    assert _C.tune.DeferredSums.written() == before + 1
    theirs, exact = trained(served, dtype), trained(torch.device("cpu"), torch.float64)
    for one, torchs, true in zip(found, theirs, exact, strict=True):
        assert float((one - true).norm()) <= 2 * float((torchs - true).norm()) + 1e-3 * float(true.norm())


def test_the_strategy_is_for_the_device(served: torch.device) -> None:
    def strategy(norm: nn.Module) -> tuple[Run, Any]:
        model = Model(norm).to(served)
        run = Run(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, [batch(served)], owns_loop=True)
        return run, run.strategy("native_layer_norm").applies(run)

    run, applies = strategy(Norm())
    assert applies is True
    before = _C.tune.DeferredSums.written()
    run.set_active(["native_layer_norm"])
    first = float(run.step(run.batches[0]))
    assert _C.tune.DeferredSums.written() == before + 1
    assert float(run.step(run.batches[0])) < first
    run.set_active([])
    run.step(run.batches[0])
    assert _C.tune.DeferredSums.written() == before + 2
    assert (strategy(nn.RMSNorm(WIDTH))[1] is True) == (served.type == "cpu")


def test_devices_that_are_not_served() -> None:
    assert not _C.tune.DeferredSums.serves(torch.device("meta"))
    assert not _C.tune.DeferredSums.serves(torch.device("hpu"))
