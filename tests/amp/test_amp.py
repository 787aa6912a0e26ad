"""Autocast and loss scaler against torch's own."""

from __future__ import annotations

import copy
import math
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_device
from oxytorch import amp, optim
from oxytorch._C.amp import Autocast
from torch import nn

DEVICE = torch_device.chosen()


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(DEVICE)


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
        x = torch.randn(4, 7, generator=generator).to(DEVICE)
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
    a = run(amp.GradScaler(DEVICE.type, **options), mine, left, KINDS)
    b = run(torch.amp.GradScaler(DEVICE.type, **options), theirs, right, KINDS)
    assert a == b
    assert [s for s, *_ in a] == [kind is not None for kind in KINDS]
    for p, q in zip(left.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_torchs_own_scaler_drives_our_optimizer() -> None:
    left, right = make(), make()
    a = run(torch.amp.GradScaler(DEVICE.type, growth_interval=3), optim.AdamW(left.parameters()), left, KINDS)
    b = run(amp.GradScaler(DEVICE.type, growth_interval=3), optim.AdamW(right.parameters()), right, KINDS)
    assert a == b


def test_no_separate_pass_and_no_host_read() -> None:
    model = make()
    scaler, optimizer = amp.GradScaler(DEVICE.type), optim.AdamW(model.parameters())
    x = torch.randn(4, 7, device=DEVICE)

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
    scaler, reference = amp.GradScaler(DEVICE.type), torch.amp.GradScaler(DEVICE.type)
    mine, theirs = optim.AdamW(left.parameters()), torch.optim.AdamW(right.parameters(), fused=True)
    x = torch.randn(4, 7, device=DEVICE)
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
    scaler, optimizer = amp.GradScaler(DEVICE.type, init_scale=64.0), optim.AdamW(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(torch.randn(4, 7, device=DEVICE)).sum()).backward()
    poison("inf", model)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == 32.0


def test_state_goes_both_ways() -> None:
    ours, theirs = amp.GradScaler(DEVICE.type, growth_interval=3), torch.amp.GradScaler(DEVICE.type, growth_interval=3)
    model = make()
    run(ours, optim.SGD(model.parameters()), model, [None, "inf", None])
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    again = amp.GradScaler(DEVICE.type)
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == ours.state_dict()


ACTIONS = ("step", "step", "step", "inf", "nan", "skip_one", "unscale", "set_scale", "load", "pickle")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ours", ["AdamW", "SGD"])
def test_a_random_run_of_overflows_equals_torchs(ours: str, seed: int) -> None:
    """Two optimizers under one scaler, every method in random order; scale, tracker and skips as torch's."""
    draw = random.Random(seed)
    options = {"init_scale": 2.0**10, "growth_interval": 3, "growth_factor": 2.0, "backoff_factor": 0.25}
    nets = [[make(s) for s in (1, 2)] for _ in range(2)]
    mine = [getattr(optim, ours)(net.parameters(), lr=1e-2) for net in nets[0]]
    theirs = [getattr(torch.optim, ours)(net.parameters(), lr=1e-2, fused=True) for net in nets[1]]
    pair: list[torch.amp.GradScaler] = [kind(DEVICE.type, **options) for kind in (amp.GradScaler, torch.amp.GradScaler)]
    for turn in range(60):
        action = draw.choice(ACTIONS)
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * seed + turn)).to(DEVICE)
        hit = draw.randrange(2)
        for side, optimizers in enumerate((mine, theirs)):
            scaler = pair[side]
            before = [[p.detach().clone() for p in net.parameters()] for net in nets[side]]
            losses = scaler.scale([net(x).square().mean() for net in nets[side]])
            for loss in losses:
                loss.backward()
            if action in ("inf", "nan"):
                poison(action, nets[side][hit])
            for i, optimizer in enumerate(optimizers):
                if action == "skip_one" and i == hit:
                    continue
                if action == "unscale" and i == hit:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(nets[side][i].parameters(), 0.1)
                scaler.step(optimizer)
            if action == "set_scale":
                scaler.update(
                    torch.tensor(float(2 ** draw.randrange(5, 12)), device=DEVICE) if side == 0 else pair[0]._scale
                )
            else:
                scaler.update()
            if action == "load":
                pair[side].load_state_dict({**scaler.state_dict(), "growth_interval": 2, "backoff_factor": 0.5})
            if action == "pickle":
                pair[side] = pickle.loads(pickle.dumps(scaler))
            for i, net in enumerate(nets[side]):
                still = all(torch.equal(a, b) for a, b in zip(before[i], net.parameters(), strict=True))
                assert still == (i == hit and action in ("inf", "nan", "skip_one")), (turn, action)
                optimizers[i].zero_grad()
        assert pair[0].state_dict() == pair[1].state_dict(), (turn, action)
    for left, right in zip(*nets, strict=True):
        for p, q in zip(left.parameters(), right.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_methods_are_torchs() -> None:
    missing = {name for name in dir(torch.amp.GradScaler) if not name.startswith("_")} - set(dir(amp.GradScaler))
    assert not missing
    scaler = amp.GradScaler(DEVICE.type, 64.0)
    assert scaler.is_enabled()
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.125)
    scaler.set_growth_interval(1)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.125, 1)
    model = make()
    scales = run(scaler, optim.SGD(model.parameters()), model, [None, "inf"])
    assert [scale for _, scale, _ in scales] == [256.0, 32.0]  # type: ignore[misc]
    with pytest.raises(AssertionError, match="growth factor"):
        amp.GradScaler(DEVICE.type, growth_factor=1.0)


def test_wrong_order_is_refused_as_in_torch() -> None:
    for kind in (amp.GradScaler, torch.amp.GradScaler):
        model = make()
        optimizer = optim.SGD(model.parameters())
        scaler = kind(DEVICE.type)
        for method in (scaler.unscale_, scaler.step):
            with pytest.raises(AssertionError, match="_scale is None"):
                method(optimizer)
        with pytest.raises(AssertionError, match="_scale is None"):
            scaler.update()
        scaler.scale(model(torch.randn(2, 7, device=DEVICE)).sum()).backward()
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="after step"):
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizer)


def test_a_state_that_cannot_be_loaded_changes_nothing() -> None:
    scaler = amp.GradScaler(DEVICE.type, 64.0)
    before = scaler.state_dict()
    with pytest.raises(RuntimeError, match="empty"):
        scaler.load_state_dict({})
    with pytest.raises(KeyError, match="_growth_tracker"):
        scaler.load_state_dict({key: value for key, value in before.items() if key != "_growth_tracker"} | {"scale": 2})
    assert scaler.state_dict() == before
    off = amp.GradScaler(DEVICE.type, enabled=False, min_scale=1.0)
    off.load_state_dict(before)
    assert off.state_dict() == {}


@pytest.mark.parametrize("placed", [False, True])
def test_a_loaded_scale_is_taken_into_the_bounds(placed: bool) -> None:
    for scale, expected in ((2.0**20, 2.0**12), (0.5, 8.0), (64.0, 64.0)):
        ours = amp.GradScaler(DEVICE.type, min_scale=8.0, max_scale=2.0**12)
        if placed:
            ours.scale(torch.ones((), device=DEVICE))
        ours.load_state_dict(torch.amp.GradScaler(DEVICE.type, scale).state_dict())
        assert ours.get_scale() == expected
        ours.scale(torch.ones((), device=DEVICE))
        assert ours.get_scale() == expected
        back = torch.amp.GradScaler(DEVICE.type)
        back.load_state_dict(ours.state_dict())
        assert back.state_dict() == ours.state_dict()
    ours.update(1)
    assert ours.get_scale() == 8.0
    again = pickle.loads(pickle.dumps(ours))
    again.scale(torch.ones((), device=DEVICE))
    again.update(2.0**30)
    assert again.get_scale() == copy.deepcopy(again).get_scale() == 2.0**12


def test_float16_gradients_are_for_the_tail_alone() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16, device=DEVICE))
    scaler, optimizer = amp.GradScaler(DEVICE.type, 8.0), optim.SGD([weight], lr=0.5)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.full_like(weight, 0.5))
    optimizer.zero_grad()
    scaler.scale((weight * 6e4).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.full_like(weight, 0.5))
    assert scaler.get_scale() == 4.0


def test_a_step_given_up_can_be_taken_again() -> None:
    model = make()
    scaler, optimizer = amp.GradScaler(DEVICE.type), optim.SGD(model.parameters())
    scaler.scale(model(torch.randn(2, 7, device=DEVICE)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.abandon()
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(2, 7, device=DEVICE)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def test_bounds() -> None:
    model = make()
    scaler = amp.GradScaler(DEVICE.type, 8.0, growth_interval=1, min_scale=4.0, max_scale=16.0)
    kinds: list[str | None] = ["inf"] * 3 + [None] * 4
    scales = [scale for _, scale, _ in run(scaler, optim.SGD(model.parameters()), model, kinds)]  # type: ignore[misc]
    assert scales == [4.0, 4.0, 4.0, 8.0, 16.0, 16.0, 16.0]
    with pytest.raises(ValueError, match="min_scale"):
        amp.GradScaler(DEVICE.type, min_scale=2.0, max_scale=1.0)


def test_plain_optimizers_and_a_disabled_scaler_work_as_in_torch() -> None:
    left, right = make(), make()
    a = run(amp.GradScaler(DEVICE.type), torch.optim.RMSprop(left.parameters()), left, KINDS[:6])
    b = run(torch.amp.GradScaler(DEVICE.type), torch.optim.RMSprop(right.parameters()), right, KINDS[:6])
    assert a == b
    off = amp.GradScaler(DEVICE.type, enabled=False)
    loss = torch.ones((), device=DEVICE)
    assert off.scale(loss) is loss
    assert off.state_dict() == {}


def test_closures_are_refused() -> None:
    model = make()
    scaler, optimizer = amp.GradScaler(DEVICE.type), optim.AdamW(model.parameters())
    scaler.scale(model(torch.randn(2, 7, device=DEVICE)).sum()).backward()
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(optimizer, closure=lambda: None)


def test_autocast_casts_and_nests() -> None:
    model = make()
    x = torch.randn(2, 7, device=DEVICE)
    with amp.autocast(DEVICE.type, torch.bfloat16):
        assert model(x).dtype is torch.bfloat16
        with amp.autocast(DEVICE.type, enabled=False):
            assert model(x).dtype is torch.float32
        assert model(x).dtype is torch.bfloat16
    assert model(x).dtype is torch.float32


def test_the_native_scope_does_what_torchs_does() -> None:
    weight, x = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3)
    state = [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()]

    def inside() -> list[Any]:
        return [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = inside()
    with Autocast("cpu", torch.bfloat16):
        assert inside() == expected
        assert nn.functional.linear(x, weight).dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert nn.functional.linear(x, weight).dtype is torch.float32
            with Autocast("cpu", torch.float16):
                assert inside() == [True, torch.float16, True]
        assert inside() == expected
    assert inside() == state
    with pytest.raises(ValueError, match="nothing is lost"), Autocast("cpu", torch.bfloat16):
        raise ValueError("nothing is lost")
    assert inside() == state
    with pytest.raises(TypeError, match="BFloat16 or"), Autocast("cpu", torch.float64):
        pass
    assert inside() == state


def test_autocast_warns_once_where_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amp, "_warned", set())
    monkeypatch.setattr(amp, "hardware_support", lambda _device, _dtype: (False, "this CPU lacks avx512_bf16."))
    with pytest.warns(UserWarning, match="slow.*avx512_bf16"):
        amp.autocast(DEVICE.type, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.autocast(DEVICE.type, torch.bfloat16)  # the second time
        amp.autocast(DEVICE.type, torch.float16, allow_slow=True)
        amp.autocast(DEVICE.type, torch.float16, enabled=False)
    with pytest.warns(UserWarning, match="slow"):
        amp.autocast(DEVICE.type, torch.float16)


def test_autocast_refuses_what_is_slow_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with amp.autocast(DEVICE.type, torch.bfloat16, allow_slow=True):
        pass
    monkeypatch.setattr(amp, "hardware_support", lambda _device, _dtype: (False, "this CPU lacks avx512_bf16."))
    with pytest.raises(NotImplementedError, match=r"avx512_bf16.*allow_slow=True"):
        amp.autocast(DEVICE.type, torch.bfloat16, allow_slow=False)


def test_recommendation_follows_the_processor() -> None:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    dtype, reason = amp.recommend_dtype("cpu")
    assert (dtype is torch.bfloat16) == ("avx512_bf16" in flags or "amx_bf16" in flags)
    assert reason.startswith(("bfloat16:", "float32:"))


def test_hardware_support_agrees_with_torch() -> None:
    bf16, reason = amp.hardware_support("cpu", torch.bfloat16)
    assert bf16 == (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    assert "neither avx512_bf16 nor amx_bf16" in reason if not bf16 else "natively" in reason
    fp16, reason = amp.hardware_support("cpu", torch.float16)
    assert "neither avx512_fp16 nor amx_fp16" in reason if not fp16 else "natively" in reason
    if not fp16:
        assert not torch.cpu._is_amx_fp16_supported()
    assert amp.hardware_support("cpu", torch.float32)[0]
    assert amp.hardware_support("cuda", torch.bfloat16)[0] == (
        torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    )
    with pytest.raises(TypeError, match=r"[Ff]loat8"):
        amp.hardware_support("cpu", torch.float8_e5m2)


def test_weights_written_between_two_scopes_are_cast_anew() -> None:
    model = nn.Linear(4, 4, bias=False, device=DEVICE)
    x = torch.eye(4, device=DEVICE)
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        with amp.autocast(DEVICE.type, torch.bfloat16, allow_slow=True):
            assert float(model(x).detach()[0, 0]) == value
