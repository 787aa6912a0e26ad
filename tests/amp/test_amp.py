"""Autocast and loss scaler against torch's own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from oxytorch import amp, optim
from torch import nn


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def poison(kind: str | None, model: nn.Module) -> None:
    if kind is not None:
        grad = model[2].weight.grad
        assert grad is not None
        grad[1, 2] = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[kind]


def run(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module, kinds: list[str | None]
) -> list[object]:
    seen: list[object] = []
    generator = torch.Generator().manual_seed(3)
    for kind in kinds:
        x = torch.randn(4, 7, generator=generator)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(x).square().mean()).backward()
        poison(kind, model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        seen.append((skipped, scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    return seen


KINDS: list[str | None] = [None, "inf", None, None, "nan", "nan", None, None, None, None, "-inf", None] * 3


@pytest.mark.parametrize("ours", ["AdamW", "SGD"])
def test_same_skipped_steps_and_scales_as_torch(ours: str) -> None:
    left, right = make(), make()
    options = {"growth_interval": 3, "init_scale": 1024.0}
    mine = getattr(optim, ours)(left.parameters(), lr=1e-2)
    theirs = getattr(torch.optim, ours)(right.parameters(), lr=1e-2, fused=True)
    a = run(amp.GradScaler("cpu", **options), mine, left, KINDS)
    b = run(torch.amp.GradScaler("cpu", **options), theirs, right, KINDS)
    assert a == b
    assert [s for s, *_ in a] == [kind is not None for kind in KINDS]
    for p, q in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_torchs_own_scaler_drives_our_optimizer() -> None:
    left, right = make(), make()
    a = run(torch.amp.GradScaler("cpu", growth_interval=3), optim.AdamW(left.parameters()), left, KINDS)
    b = run(amp.GradScaler("cpu", growth_interval=3), optim.AdamW(right.parameters()), right, KINDS)
    assert a == b


def test_no_separate_pass_and_no_host_read() -> None:
    model = make()
    scaler, optimizer = amp.GradScaler("cpu"), optim.AdamW(model.parameters())
    x = torch.randn(4, 7)

    def step() -> None:
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = {event.key for event in profile.key_averages()}
    assert "aten::_amp_update_scale_" in names
    assert "aten::_local_scalar_dense" not in names
    assert "aten::_amp_foreach_non_finite_check_and_unscale_" not in names


def test_unscale_before_step() -> None:
    left, right = make(), make()
    scaler, reference = amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    mine, theirs = optim.AdamW(left.parameters()), torch.optim.AdamW(right.parameters(), fused=True)
    x = torch.randn(4, 7)
    for model, s, o in ((left, scaler, mine), (right, reference, theirs)):
        s.scale(model(x).square().sum() * 100).backward()
        s.unscale_(o)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        s.step(o)
        s.update()
    for p, q in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.scale(left(x).sum()).backward()
        scaler.step(mine)
        scaler.step(mine)


def test_unscale_finds_inf() -> None:
    model = make()
    scaler, optimizer = amp.GradScaler("cpu", init_scale=64.0), optim.AdamW(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(torch.randn(4, 7)).sum()).backward()
    poison("inf", model)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == 32.0


def test_state_goes_both_ways() -> None:
    ours, theirs = amp.GradScaler("cpu", growth_interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    model = make()
    run(ours, optim.SGD(model.parameters()), model, [None, "inf", None])
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    again = amp.GradScaler("cpu")
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == ours.state_dict()


def test_bounds() -> None:
    model = make()
    scaler = amp.GradScaler("cpu", 8.0, growth_interval=1, min_scale=4.0, max_scale=16.0)
    kinds: list[str | None] = ["inf"] * 3 + [None] * 4
    scales = [scale for _, scale, _ in run(scaler, optim.SGD(model.parameters()), model, kinds)]  # type: ignore[misc]
    assert scales == [4.0, 4.0, 4.0, 8.0, 16.0, 16.0, 16.0]
    with pytest.raises(ValueError, match="min_scale"):
        amp.GradScaler("cpu", min_scale=2.0, max_scale=1.0)


def test_plain_optimizers_and_a_disabled_scaler_work_as_in_torch() -> None:
    left, right = make(), make()
    a = run(amp.GradScaler("cpu"), torch.optim.RMSprop(left.parameters()), left, KINDS[:6])
    b = run(torch.amp.GradScaler("cpu"), torch.optim.RMSprop(right.parameters()), right, KINDS[:6])
    assert a == b
    off = amp.GradScaler("cpu", enabled=False)
    loss = torch.ones(())
    assert off.scale(loss) is loss
    assert off.state_dict() == {}


def test_closures_are_refused() -> None:
    model = make()
    scaler, optimizer = amp.GradScaler("cpu"), optim.AdamW(model.parameters())
    scaler.scale(model(torch.randn(2, 7)).sum()).backward()
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(optimizer, closure=lambda: None)


def test_autocast_casts_and_nests() -> None:
    model = make()
    x = torch.randn(2, 7)
    with amp.autocast("cpu", torch.bfloat16):
        assert model(x).dtype is torch.bfloat16
        with amp.autocast("cpu", enabled=False):
            assert model(x).dtype is torch.float32
        assert model(x).dtype is torch.bfloat16
    assert model(x).dtype is torch.float32


def test_autocast_warns_once_where_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amp, "_warned", set())
    monkeypatch.setattr(amp, "recommend_dtype", lambda _device: (torch.float32, "float32: no such instructions."))
    with pytest.warns(UserWarning, match="slow"):
        amp.autocast("cpu", torch.bfloat16)
    assert amp._warned == {"cpu"}


def test_recommendation_follows_the_processor() -> None:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    dtype, reason = amp.recommend_dtype("cpu")
    assert (dtype is torch.bfloat16) == ("avx512_bf16" in flags or "amx_bf16" in flags)
    assert reason.startswith(("bfloat16:", "float32:"))
