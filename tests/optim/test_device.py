"""The step tail on the device that OXYTORCH_DEVICE names (cpu unless set), against torch's stack and the CPU kernels.

On cpu the composed path stands for a device without kernels; make test runs this file on fake devices too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import oxytorch.optim
import pytest
import torch
import torch_device
from referee import check_step, join, snapshot

DEVICE = torch_device.chosen()
# A device without kernels of its own has one path; elsewhere the composed one is asked for.
PATHS = [False, True] if DEVICE.type in ("cpu", "cuda") else [False]
SHAPES = [(257,), (33, 65), (8, 3, 3, 3), (), (3000,)]
MATRICES = [(33, 65), (64, 8), (5, 5)]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "AdamW": {"eps": 1e-3, "amsgrad": True},
    "Adam": {"eps": 1e-3, "weight_decay": 0.1, "maximize": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Lion": {"weight_decay": 0.1},
    "Adagrad": {"eps": 1e-3, "lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "RMSprop": {"eps": 1e-3, "momentum": 0.9, "centered": True},
    "Muon": {"weight_decay": 0.1},
}
# Options of the tail, with the dtype of the parameters.
TAILS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain": (torch.float32, {"clip_norm": 1.0, "ema_decay": 0.9, "collect_stats": True}),
    "clip_value": (torch.float32, {"clip_value": 0.5, "copy_dtype": "bf16"}),
    "agc": (torch.float32, {"agc": 0.1, "copy_dtype": "fp16", "ema_decay": 0.5}),
    "bf16_state": (torch.float32, {"state_dtype": "bf16", "clip_norm": 1.0}),
    "int8_state": (torch.float32, {"state_dtype": "int8", "clip_norm": 1.0, "ema_decay": 0.9}),
    "masters": (torch.bfloat16, {"master_weights": True, "clip_norm": 1.0}),
    "half_masters": (torch.float16, {"master_weights": "fp32", "copy_dtype": "bf16"}),
    "seven_bytes": (torch.bfloat16, {"master_weights": "int8", "state_dtype": "int8", "clip_norm": 1.0}),
    "stochastic": (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": "bf16", "seed": 7}),
    "stochastic_int8": (
        torch.bfloat16,
        {"stochastic_rounding": True, "state_dtype": "int8", "master_weights": "int8", "ema_decay": 0.9},
    ),
}


def host_reads() -> int:
    """Values read by the host so far, where the device counts them."""
    return torch.ops.oxytorch_device.host_reads() if DEVICE.type not in ("cpu", "cuda") else 0


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Fail where the host waits for a device."""
    before = host_reads()
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert host_reads() == before


def made(shapes, dtype: torch.dtype, seed: int, device: torch.device | str = DEVICE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def parameters(shapes, dtype: torch.dtype, device: torch.device | str = DEVICE) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(t) for t in made(shapes, dtype, 0, device)]


def shapes_of(name: str) -> list[tuple[int, ...]]:
    return MATRICES if name == "Muon" else SHAPES


def give(params, grads) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()


def contents(opt) -> dict[str, torch.Tensor]:
    """Every tensor the optimizer owns or updates, on the host and as bits."""
    found = {f"param{i}": p.detach() for i, p in enumerate(opt._params())}
    for i, p in enumerate(opt._params()):
        found |= {f"{key}{i}": t for key, t in opt.state[p].items()}
    found |= {f"ema{i}": t for i, t in opt.ema_state_dict()["ema"].items()}
    found |= {f"copy{i}": t for i, t in enumerate(opt.copies()) if t is not None}
    return {key: t.cpu().clone().reshape(-1).view(torch.uint8) for key, t in found.items()}


def numbers(opt) -> dict[str, torch.Tensor]:
    found = {f"param{i}": p.detach() for i, p in enumerate(opt._params())}
    found |= {f"ema{i}": t for i, t in opt.ema_state_dict()["ema"].items()}
    found |= {f"copy{i}": t for i, t in enumerate(opt.copies()) if t is not None}
    for i, p in enumerate(opt._params()):
        found |= {f"{key}{i}": t for key, t in opt.state[p].items()}
    found = {key: t.cpu() for key, t in found.items()}
    # Neighbouring weights may have far apart low bits: what counts is the weight that both make.
    for i in range(len(opt._params())):
        if f"low_bits{i}" in found:
            bits = found[f"param{i}"].view(torch.int16).int()
            magnitude = ((bits & 0x7FFF) << 8) + found.pop(f"low_bits{i}").int()
            found[f"weight{i}"] = (magnitude << 8).view(torch.float32) * torch.where(bits < 0, -1, 1)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("composite", PATHS)
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop"])
def test_follows_torch_with_scaler_clip_and_average(name, composite, dtype) -> None:
    if name == "RMSprop" and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("torch has no fused RMSprop, and its others round every intermediate")
    if DEVICE.type == "cuda" and dtype == torch.bfloat16:
        pytest.skip("torch's GradScaler takes no bfloat16 gradients on a card")
    ours, theirs = parameters(SHAPES, dtype), parameters(SHAPES, dtype, "cpu")
    opt = getattr(oxytorch.optim, name)(
        ours, lr=1e-2, clip_norm=1.0, ema_decay=0.9, force_composite=composite, **ALGORITHMS[name]
    )
    # torch's fused SGD for the CPU leaves out the weight decay of 16-bit parameters.
    fused = {} if name in ("RMSprop", "SGD") else {"fused": True}
    peer = getattr(torch.optim, name)(theirs, lr=1e-2, **fused, **ALGORITHMS[name])
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=3)
    scaler.scale(torch.ones((), device=DEVICE))
    average = [p.detach().clone() for p in theirs]
    skipped = 0
    for i in range(8):
        scale = scaler.get_scale()
        grads = [g * scale for g in made(SHAPES, dtype, i + 1, "cpu")]
        if i in (2, 5):
            grads[4][17] = float("inf")
        give(ours, [g.to(DEVICE) for g in grads])
        give(theirs, [g / scale for g in grads])
        before = contents(opt) if i == 5 else {}
        held, given = snapshot(opt), [g.to(DEVICE) for g in grads]
        scaler.step(opt)
        scaler.update()
        if i in (2, 5):
            skipped += 1
            after = contents(opt) if before else {}
            assert all(torch.equal(value, after[key]) for key, value in before.items())
            continue
        check_step(opt, held, given, scale)
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        peer.step()
        torch._foreach_lerp_(average, [q.detach() for q in theirs], 0.1)
    assert int(opt.tail_stats().skipped) == skipped
    # Each step is within the bounds of fp64; here the trajectories, of which torch rounds the 16-bit ones otherwise.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 5e-3, torch.float64: 1e-6}[dtype]
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=tolerance, atol=tolerance)
    if dtype in (torch.float32, torch.float64):
        for mine, their in zip(opt.ema_state_dict()["ema"].values(), average, strict=True):
            torch.testing.assert_close(mine.cpu(), their, rtol=tolerance, atol=tolerance)
    assert {float(s["step"]) for s in opt.state.values() if "step" in s} <= {8.0 - skipped}


# What one rounding of difference may do to an element: the unit of the format it is kept in.
UNITS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.int8: 1.0, torch.uint8: 1.0}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("tail", TAILS)
def test_agrees_with_the_kernels_of_the_cpu(name, tail) -> None:
    dtype, options = TAILS[tail]
    shapes = shapes_of(name)
    ours, reference = parameters(shapes, dtype), parameters(shapes, dtype, "cpu")
    composite = DEVICE.type == "cpu"
    make = getattr(oxytorch.optim, name)
    opt = make(ours, lr=1e-2, force_composite=composite, **ALGORITHMS[name], **options)
    peer = make(reference, lr=1e-2, **ALGORITHMS[name], **options)
    opt.grad_divisor = peer.grad_divisor = 2.0
    for i in range(3):
        grads = made(shapes, dtype, i + 1, "cpu")
        give(ours, [g.to(DEVICE) for g in grads])
        give(reference, grads)
        opt.step()
        peer.step()
    here, there = numbers(opt), numbers(peer)
    assert here.keys() == there.keys()
    for key, value in there.items():
        assert here[key].dtype == value.dtype, key
        unit = UNITS[value.dtype]
        # Newton-Schulz runs in bf16, where the order of a sum shows.
        loose = max(unit, 2**-7) if name == "Muon" else unit
        apart = (here[key].double() - value.double()).abs()
        codes = not value.is_floating_point()
        assert bool((apart <= 2 * loose * (1.0 if codes else value.double().abs().clamp_min(1))).all()), key
        if value.dtype in (torch.bfloat16, torch.float16) and name != "Muon":
            assert float((apart > 0).double().mean()) < 0.03, key
    stats, expected = opt.tail_stats(), peer.tail_stats()
    torch.testing.assert_close(stats.grad_norm.cpu(), expected.grad_norm)
    torch.testing.assert_close(stats.grad_norms.cpu(), expected.grad_norms)
    if options.get("collect_stats"):
        torch.testing.assert_close(stats.param_norms.cpu(), expected.param_norms)
        torch.testing.assert_close(stats.update_norms.cpu(), expected.update_norms, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.bfloat16, {"state_dtype": "bf16", "master_weights": "int8"}),
        (torch.bfloat16, {"state_dtype": "int8", "master_weights": "int8"}),
        (torch.float32, {"state_dtype": "int8"}),
        (torch.float32, {"state_dtype": "bf16"}),
    ],
)
def test_stochastic_rounding_draws_the_bits_of_the_cpu(dtype, options, layout) -> None:
    # Powers of two keep every product exact, so that each number is rounded once wherever it is computed.
    def run(device, **extra):
        params = parameters([(300,), (40, 33), ()], dtype, device)
        if layout == "transposed":
            params[1] = torch.nn.Parameter(params[1].detach().t())
        opt = oxytorch.optim.SGD(
            params, lr=2**-7, momentum=0.5, stochastic_rounding=True, seed=2**40 + 3, **options, **extra
        )
        for i in range(3):
            grads = made([(300,), (40, 33), ()], dtype, i + 1, device)
            if layout == "transposed":
                grads[1] = grads[1].t()
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            opt.step()
        return contents(opt)

    native = run("cpu")
    here = run(DEVICE, force_composite=DEVICE.type == "cpu")
    assert here.keys() == native.keys()
    for key, value in native.items():
        assert torch.equal(here[key], value), key


@pytest.mark.parametrize("composite", PATHS)
def test_split_weights_are_rounded_to_the_nearest_of_24_bits(composite) -> None:
    below = torch.arange(256, device=DEVICE)  # in places of 2**-23, of which 256 are one of the low bits
    p = torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16, device=DEVICE))
    opt = oxytorch.optim.SGD([p], lr=1.0, master_weights="int8", force_composite=composite)
    p.grad = (below * -(2.0**-23)).to(torch.bfloat16)
    opt.step()
    assert join(p.detach().cpu(), opt.state[p]["low_bits"].cpu()).tolist() == [1.0] * 128 + [1 + 2.0**-15] * 128


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("tail", TAILS)
def test_a_skipped_step_changes_no_byte_and_no_step_reads_the_device(name, tail) -> None:
    dtype, options = TAILS[tail]
    params = parameters(shapes_of(name), dtype)
    opt = getattr(oxytorch.optim, name)(params, lr=1e-2, **ALGORITHMS[name], **options)
    grads = made(shapes_of(name), dtype, 1)
    found = torch.zeros((), device=DEVICE)
    give(params, grads)
    opt.step()
    before = contents(opt)
    poisoned = [g.clone() for g in grads]
    poisoned[1][0, 0] = float("nan")
    one, zero = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
    with no_synchronisation():
        give(params, poisoned)
        opt.step()  # not finite
        opt.grad_scale, opt.found_inf = torch.full((), 4.0, device=DEVICE), found
        opt.step()  # not finite, and tells the scaler
        give(params, grads)
        opt.step()  # told by the scaler
        del opt.grad_scale, opt.found_inf
        opt.skip = one
        opt.step()
        opt.skip, opt.norm_limit = zero, torch.full((), 1e-3, device=DEVICE)
        opt.step()
    after = contents(opt)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]), key
    assert int(opt.tail_stats().skipped) == 5
    assert float(found) == 1
    opt.skip = opt.norm_limit = None
    with no_synchronisation():
        opt.step()
    assert any(not torch.equal(value, contents(opt)[key]) for key, value in before.items())


@pytest.mark.parametrize("composite", PATHS)
def test_the_host_never_waits_for_the_device(composite: bool) -> None:
    params = parameters(SHAPES, torch.float32)
    rate = torch.full((), 1e-3, device=DEVICE)
    opt = oxytorch.optim.AdamW(
        params, lr=rate, clip_norm=1.0, ema_decay=0.9, collect_stats=composite, force_composite=composite
    )
    scale, found = torch.full((), 4.0, device=DEVICE), torch.zeros((), device=DEVICE)
    give(params, made(SHAPES, torch.float32, 1))
    opt.step()
    with no_synchronisation():
        for i in range(5):
            rate.fill_(1e-3 / (i + 1))
            opt.grad_scale, opt.found_inf = scale, found
            opt.step()
    assert float(opt.state[params[0]]["step"]) == 6


def test_statistics_and_averages_live_on_the_device() -> None:
    params = parameters(SHAPES, torch.float32)
    opt = oxytorch.optim.AdamW(params, ema_decay=0.9, collect_stats=True)
    grads = made(SHAPES, torch.float32, 1)
    give(params, grads)
    before = [p.detach().clone() for p in params]
    opt.step()
    stats = opt.tail_stats()
    assert stats.grad_norm.device == params[0].device
    torch.testing.assert_close(stats.grad_norms, torch.stack([g.norm() for g in grads]))
    moved = torch.stack([(p.detach() - b).norm() for p, b in zip(params, before, strict=True)])
    torch.testing.assert_close(stats.update_norms, moved)
    kept = [p.detach().clone() for p in params]
    with opt.ema_weights():
        assert not torch.equal(params[0], kept[0])
    assert all(torch.equal(p, k) for p, k in zip(params, kept, strict=True))


@pytest.mark.parametrize("tail", ["plain", "int8_state", "seven_bytes", "masters"])
def test_state_moves_from_the_cpu_and_back(tail) -> None:
    dtype, options = TAILS[tail]
    here, there = parameters(SHAPES, dtype), parameters(SHAPES, dtype, "cpu")
    opt = oxytorch.optim.AdamW(here, lr=1e-2, **options)
    peer = oxytorch.optim.AdamW(there, lr=1e-2, **options)
    give(there, made(SHAPES, dtype, 1, "cpu"))
    peer.step()
    opt.load_state_dict(peer.state_dict())
    for p, q in zip(here, there, strict=True):
        p.data.copy_(q.data)
    same_state(opt, peer)
    grads = made(SHAPES, dtype, 2)
    give(here, grads)
    before = snapshot(opt)
    opt.step()
    check_step(opt, before, grads)
    assert {t.device.type for s in opt.state.values() for t in s.values()} == {DEVICE.type}
    back = [torch.nn.Parameter(p.detach().cpu()) for p in here]
    again = oxytorch.optim.AdamW(back, lr=1e-2, **options)
    again.load_state_dict(opt.state_dict())
    same_state(again, opt)
    give(back, made(SHAPES, dtype, 3, "cpu"))
    before = snapshot(again)
    again.step()
    check_step(again, before, made(SHAPES, dtype, 3, "cpu"))


def same_state(a, b) -> None:
    """Every bit of the state, on whichever devices."""
    for mine, their in zip(a.state.values(), b.state.values(), strict=True):
        assert mine.keys() == their.keys()
        assert all(torch.equal(mine[key].cpu(), value.cpu()) for key, value in their.items())


def test_raise_names_the_device_step_and_changes_nothing() -> None:
    params = parameters(SHAPES, torch.float32)
    opt = oxytorch.optim.AdamW(params, nonfinite="raise")
    give(params, made(SHAPES, torch.float32, 1))
    opt.step()
    before = contents(opt)
    params[4].grad[3] = float("inf")
    with pytest.raises(RuntimeError, match="inf or NaN in the gradient of"):
        opt.step()
    assert all(torch.equal(value, contents(opt)[key]) for key, value in before.items())


@pytest.mark.parametrize("skip", [False, True])
def test_zeroes_gradients_whether_it_steps_or_not(skip) -> None:
    params = parameters(SHAPES, torch.float32)
    opt = oxytorch.optim.SGD(params, zero_grads=True, momentum=0.9)
    grads = made(SHAPES, torch.float32, 1)
    if skip:
        grads[0][0] = float("inf")
    give(params, grads)
    opt.step()
    assert all(float(p.grad.abs().max()) == 0 for p in params)


def test_updates_in_backward() -> None:
    torch.manual_seed(0)
    here = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    there = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    there.load_state_dict(here.state_dict())
    here = here.to(DEVICE)
    options = {"nonfinite": "propagate", "clip_value": 0.01}
    opt = oxytorch.optim.AdamW(here.parameters(), step_in_backward=True, **options)
    peer = oxytorch.optim.AdamW(there.parameters(), **options)
    for i in range(3):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
        here(batch.to(DEVICE)).square().mean().backward()
        assert all(p.grad is None for p in here.parameters())
        opt.step()
        peer.zero_grad()
        there(batch).square().mean().backward()
        peer.step()
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-4, atol=1e-5)


def test_a_norm_taken_in_backward_is_the_norm() -> None:
    params = parameters(SHAPES, torch.float32)
    opt = oxytorch.optim.AdamW(params, clip_norm=1.0, norm_in_backward=True)
    peers = parameters(SHAPES, torch.float32, "cpu")
    peer = oxytorch.optim.AdamW(peers, clip_norm=1.0)
    for i in range(2):
        grads = made(SHAPES, torch.float32, i, "cpu")
        opt.zero_grad()
        sum((p * g.to(DEVICE)).sum() for p, g in zip(params, grads, strict=True)).backward()
        give(peers, grads)
        opt.step()
        peer.step()
    torch.testing.assert_close(opt.tail_stats().grad_norm.cpu(), peer.tail_stats().grad_norm)
    for p, q in zip(params, peers, strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-5, atol=1e-6)
