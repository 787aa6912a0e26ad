"""Narrow state and the 7-byte layout train to where fp32 does; `bench/race/convergence.py` is the whole of it."""

from __future__ import annotations

import statistics
from typing import Any

import oxytorch.optim
import pytest
import torch
from torch.nn import functional as F

pytestmark = [
    pytest.mark.cpu_only("trains at length; what a device computes is held to the CPU in test_device.py"),
    pytest.mark.usefixtures("one_thread"),
]

SEEDS = range(5)
STEPS = 400
SEVEN_BYTES = {"state_dtype": "int8", "master_weights": "int8"}


def data(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and the classes that a fixed random network gives them."""
    teacher = torch.Generator().manual_seed(99)
    first, second = torch.randn(24, 32, generator=teacher), torch.randn(32, 8, generator=teacher)
    x = torch.randn(rows, 24, generator=torch.Generator().manual_seed(seed))
    return x, (torch.tanh(x @ first) @ second).argmax(1)


def trained(seed: int, dtype: torch.dtype, **options: Any) -> tuple[float, oxytorch.optim.AdamW]:
    """Held-out loss of a two-layer network after training; the learning rate falls to where bf16 would lose updates."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((24, 96), (96,), (96, 8), (8,))
    params = [(torch.randn(s, generator=generator) * (0.2 if len(s) > 1 else 0.0)).to(dtype) for s in shapes]
    for param in params:
        param.requires_grad_()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(x.to(dtype) @ params[0] + params[1])
        return F.cross_entropy((hidden @ params[2] + params[3]).float(), y)

    optimizer = oxytorch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.99), clip_norm=1.0, seed=seed, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.99 * step / STEPS)
    x, y = data(1000 + seed, 64 * STEPS)
    for start in range(0, len(x), 64):
        optimizer.zero_grad()
        loss(x[start : start + 64], y[start : start + 64]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(loss(*data(7, 4096))), optimizer


@pytest.fixture(scope="module")
def reference() -> list[float]:
    losses = [trained(seed, torch.float32)[0] for seed in SEEDS]
    assert max(losses) < 1.3  # a guess among 8 classes gives 2.08
    return losses


def above(reference: list[float], losses: list[float]) -> float:
    """How far the mean lies above fp32's, in standard deviations of fp32's seeds."""
    return (statistics.fmean(losses) - statistics.fmean(reference)) / statistics.stdev(reference)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"state_dtype": "int8"}),
        (torch.bfloat16, SEVEN_BYTES),
        (torch.bfloat16, {**SEVEN_BYTES, "stochastic_rounding": True}),
    ],
    ids=["int8 state", "7 bytes", "7 bytes, stochastic rounding"],
)
def test_narrow_layouts_end_within_seed_noise(
    reference: list[float], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    runs = [trained(seed, dtype, **options) for seed in SEEDS]
    for _, optimizer in runs:
        assert all(state["exp_avg"].dtype == torch.int8 for state in optimizer.state.values())
        assert all(("low_bits" in state) == ("master_weights" in options) for state in optimizer.state.values())
    assert above(reference, [loss for loss, _ in runs]) < 0.5


def test_bf16_weights_without_low_bits_do_not(reference: list[float]) -> None:
    assert above(reference, [trained(seed, torch.bfloat16)[0] for seed in SEEDS]) > 1.0
