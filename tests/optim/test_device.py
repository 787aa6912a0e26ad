"""The step tail on the device that OXYTORCH_DEVICE names (cpu unless set), against torch's fused stack."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager

import oxytorch.optim
import pytest
import torch

DEVICE = torch.device(os.environ.get("OXYTORCH_DEVICE", "cpu"))
SHAPES = [(257,), (33, 65), (8, 3, 3, 3), (), (3000,)]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Make torch raise where the host would wait for a CUDA device."""
    if DEVICE.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in SHAPES]


def grads(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("composite", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"amsgrad": True, "eps": 1e-3}),
        ("Adam", {"weight_decay": 0.1, "eps": 1e-3}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_follows_torch_with_scaler_clip_and_average(name, options, composite, dtype) -> None:
    ours, theirs = make(dtype), make(dtype)
    opt = getattr(oxytorch.optim, name)(
        ours, lr=1e-2, clip_norm=1.0, ema_decay=0.9, force_composite=composite, **options
    )
    peer = getattr(torch.optim, name)(theirs, lr=1e-2, fused=True, **options)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=3)
    scaler.scale(torch.ones((), device=DEVICE))
    average = [p.detach().clone() for p in theirs]
    skipped = 0
    for i in range(8):
        scale = scaler.get_scale()
        made = [g * scale for g in grads(i, dtype)]
        if i in (2, 5):
            made[4][17] = float("inf")
        for p, g in zip(ours, made, strict=True):
            p.grad = g.clone()
        for q, g in zip(theirs, made, strict=True):
            q.grad = g.clone() / scale
        kept = copy.deepcopy([p.detach() for p in ours]), opt.ema_state_dict()["ema"]
        scaler.step(opt)
        scaler.update()
        if i in (2, 5):
            skipped += 1
            assert all(torch.equal(a, b) for a, b in zip(ours, kept[0], strict=True))
            assert scaler.get_scale() == scale / 2
            continue
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        peer.step()
        torch._foreach_lerp_(average, [q.detach() for q in theirs], 0.1)
    assert int(opt.tail_stats().skipped) == skipped
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 5e-3, torch.float64: 1e-6}[dtype]
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    if dtype in (torch.float32, torch.float64):
        for mine, their in zip(opt.ema_state_dict()["ema"].values(), average, strict=True):
            torch.testing.assert_close(mine, their, rtol=tolerance, atol=tolerance)
    steps = {float(s["step"]) for s in opt.state.values() if "step" in s}
    assert steps <= {8.0 - skipped}


@pytest.mark.parametrize("composite", [False, True])
def test_the_host_never_waits_for_the_device(composite: bool) -> None:
    params = make(torch.float32)
    opt = oxytorch.optim.AdamW(params, clip_norm=1.0, ema_decay=0.9, collect_stats=composite, force_composite=composite)
    scale, found = torch.full((), 4.0, device=DEVICE), torch.zeros((), device=DEVICE)
    for p, g in zip(params, grads(0, torch.float32), strict=True):
        p.grad = g
    opt.step()
    with no_synchronisation():
        for i in range(5):
            opt.param_groups[0]["lr"] = 1e-3 / (i + 1)
            opt.grad_scale, opt.found_inf = scale, found
            opt.step()
    assert float(opt.state[params[0]]["step"]) == 6


def test_statistics_and_averages_live_on_the_device() -> None:
    params = make(torch.float32)
    opt = oxytorch.optim.AdamW(params, ema_decay=0.9, collect_stats=True)
    for p, g in zip(params, grads(0, torch.float32), strict=True):
        p.grad = g
    before = [p.detach().clone() for p in params]
    opt.step()
    stats = opt.tail_stats()
    assert stats.grad_norm.device == params[0].device
    expected = torch.stack([g.norm() for g in grads(0, torch.float32)])
    torch.testing.assert_close(stats.grad_norms, expected)
    moved = torch.stack([(p.detach() - b).norm() for p, b in zip(params, before, strict=True)])
    torch.testing.assert_close(stats.update_norms, moved)
    kept = [p.detach().clone() for p in params]
    with opt.ema_weights():
        assert not torch.equal(params[0], kept[0])
    assert all(torch.equal(p, k) for p, k in zip(params, kept, strict=True))
