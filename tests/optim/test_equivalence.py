"""The native tail against torch's fused stack and an fp64 referee, step by step."""

from __future__ import annotations

import copy

import oxytorch.optim
import pytest
import torch
import torch_device
from oxytorch.optim import AdamW

DEVICE = torch_device.chosen()

SHAPES = [(257,), (33, 65), (8, 3, 3, 3), (), (1,), (0, 4), (5000,)]
DECAY = 0.99
MAX_NORM = 2.0


def make_params(dtype: torch.dtype, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in SHAPES]


def make_grads(dtype: torch.dtype, seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [(scale * 0.05 * torch.randn(shape, generator=generator)).to(DEVICE, dtype) for shape in SHAPES]


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance from |value| to the next number of `dtype`, in fp64."""
    digits = {torch.float32: 23, torch.bfloat16: 7}[dtype]
    exponent = torch.frexp(value.abs().double().clamp_min(2.0**-126)).exponent - 1
    return torch.ldexp(torch.ones_like(value, dtype=torch.float64), exponent - digits)


def referee_step(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    state: list[tuple[torch.Tensor, torch.Tensor]],
    step: int,
    scale: float,
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """One AdamW step with unscale and clip in fp64 from the given (already rounded) inputs.

    Returns parameter, second moment, and the size of the largest term of the parameter's sum: terms may cancel, and
    no fp32 evaluation is more exact than the rounding of what it adds.
    """
    lr, beta1, beta2, eps, decay = 1e-2, 0.9, 0.999, 1e-8, 0.1
    wide = [g.double() / scale for g in grads]
    norm = torch.sqrt(sum((g * g).sum() for g in wide))
    coefficient = min(1.0, MAX_NORM / (float(norm) + 1e-6))
    out = []
    for p, unclipped, (old_m, old_v) in zip(params, wide, state, strict=True):
        g = unclipped * coefficient
        size = beta1 * old_m.double().abs() + (1 - beta1) * g.abs()
        m = beta1 * old_m.double() + (1 - beta1) * g
        v = beta2 * old_v.double() + (1 - beta2) * g * g
        rate = lr / (1 - beta1**step) / (torch.sqrt(v) / (1 - beta2**step) ** 0.5 + eps)
        new = p.double() * (1 - lr * decay) - rate * m
        out.append((new, v, torch.stack([p.double().abs(), rate * size, new.abs()]).amax(0)))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thousand_steps_stay_at_the_referee_and_skip_what_torch_skips(dtype: torch.dtype) -> None:
    if DEVICE.type == "cuda" and dtype == torch.bfloat16:
        pytest.skip("torch's GradScaler takes no bfloat16 gradients on a card")
    ours, theirs = make_params(dtype), make_params(dtype)
    opt = AdamW(ours, lr=1e-2, weight_decay=0.1, clip_norm=MAX_NORM, ema_decay=DECAY)
    peer = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, fused=True)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=50)
    peer_scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=50)
    probe = torch.ones((), device=DEVICE)
    scaler.scale(probe), peer_scaler.scale(probe)
    ema = [p.detach().clone() for p in theirs]
    worst = worst_state = 0.0
    steps = 0
    for i in range(1000):
        scale = scaler.get_scale()
        grads = make_grads(dtype, i, scale)
        if i % 97 == 13:
            grads[1][3, 5] = float("inf")
        if i % 131 == 40:
            grads[6][4321] = float("nan")
        bad = i % 97 == 13 or i % 131 == 40
        for p, q, g in zip(ours, theirs, grads, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        before = [p.detach().clone() for p in ours]
        states = [
            (opt.state[p]["exp_avg"].clone(), opt.state[p]["exp_avg_sq"].clone())
            if opt.state[p]
            else (torch.zeros_like(p), torch.zeros_like(p))
            for p in ours
        ]
        averages = [t.clone() for t in opt.ema_state_dict()["ema"].values()]
        scaler.step(opt)
        scaler.update()

        peer_scaler.unscale_(peer)
        torch.nn.utils.clip_grad_norm_(theirs, MAX_NORM)
        taken = int(theirs and peer.state[theirs[0]].get("step", torch.tensor(0.0)))
        peer_scaler.step(peer)
        peer_scaler.update()
        stepped = int(peer.state[theirs[0]]["step"]) > taken
        if stepped:
            torch._foreach_lerp_(ema, [p.detach() for p in theirs], 1 - DECAY)

        assert stepped is not bad
        assert bool(opt.tail_stats().found_inf) is bad
        assert scaler.get_scale() == peer_scaler.get_scale()
        if bad:
            assert all(torch.equal(p, b) for p, b in zip(ours, before, strict=True))
            assert all(torch.equal(opt.state[p]["exp_avg"], m) for p, (m, _) in zip(ours, states, strict=True))
            assert all(torch.equal(opt.state[p]["exp_avg_sq"], v) for p, (_, v) in zip(ours, states, strict=True))
            now = opt.ema_state_dict()["ema"].values()
            assert all(torch.equal(a, b) for a, b in zip(now, averages, strict=True))
            continue
        steps += 1
        assert int(opt.state[ours[0]]["step"]) == steps
        expected = referee_step(before, grads, states, steps, scale)
        for p, (want, v, size) in zip(ours, expected, strict=True):
            if p.numel() == 0:
                continue
            worst = max(worst, float(((p.detach().double() - want).abs() / ulp(size, dtype)).max()))
            state = opt.state[p]
            error = (state["exp_avg_sq"].double() - v).abs() / ulp(v, dtype)
            worst_state = max(worst_state, float(error.max()))
    assert steps == 1000 - len([i for i in range(1000) if i % 97 == 13 or i % 131 == 40])
    exact = 4 if DEVICE.type == "cpu" else 5  # operators round where the kernels of the CPU fuse
    assert worst <= (exact if dtype == torch.float32 else 1), f"{worst} ulp from the referee"
    assert worst_state <= exact
    if dtype == torch.float32:
        # Both have rounded a thousand times; the trajectories stay together. (In bf16 each rounding is a visible step.)
        average = list(opt.ema_state_dict()["ema"].values())
        for mine, their in zip([*ours, *average], [*theirs, *ema], strict=True):
            torch.testing.assert_close(mine, their, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("composite", [False, True])
@pytest.mark.parametrize(
    ("cls", "peer", "options"),
    [
        ("AdamW", torch.optim.AdamW, {}),
        ("AdamW", torch.optim.AdamW, {"amsgrad": True, "maximize": True, "weight_decay": 0.2}),
        ("AdamW", torch.optim.AdamW, {"betas": (0.0, 0.5), "eps": 1e-3}),
        ("Adam", torch.optim.Adam, {"weight_decay": 0.1}),
        ("Adam", torch.optim.Adam, {"amsgrad": True}),
        ("SGD", torch.optim.SGD, {}),
        ("SGD", torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("SGD", torch.optim.SGD, {"momentum": 0.8, "dampening": 0.3, "maximize": True}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_composite_and_native_agree_with_torch(cls, peer, options, dtype, composite) -> None:
    ours = [torch.nn.Parameter(torch.randn(shape, dtype=dtype, device=DEVICE)) for shape in SHAPES[:6]]
    theirs = copy.deepcopy(ours)
    mine = getattr(oxytorch.optim, cls)(ours, lr=1e-2, force_composite=composite, **options)
    other = peer(theirs, lr=1e-2, foreach=False, **options)
    for i in range(6):
        for p, q in zip(ours, theirs, strict=True):
            g = torch.randn(p.shape, dtype=dtype, generator=torch.Generator().manual_seed(i)).to(DEVICE)
            p.grad, q.grad = g.clone(), g.clone()
        mine.step()
        other.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    if DEVICE.type in ("cpu", "hpu"):  # whether other devices have kernels is not said here
        assert mine._tail.native is (dtype == torch.float32 and not composite and DEVICE.type == "cpu")


def test_composite_skips_without_changing_a_byte() -> None:
    params = make_params(torch.float64)
    opt = AdamW(params, clip_norm=1.0, ema_decay=0.9, amsgrad=True)
    for bad in (False, True):
        for p, g in zip(params, make_grads(torch.float64, 3), strict=True):
            p.grad = g
        if bad:
            params[0].grad[0] = float("nan")
            params[0].data[1] = -0.0
            kept = copy.deepcopy((opt.state_dict(), opt.ema_state_dict(), [p.detach() for p in params]))
        opt.step()
    now = (opt.state_dict(), opt.ema_state_dict(), [p.detach() for p in params])
    flat = lambda tree: torch.utils._pytree.tree_flatten(tree)[0]  # noqa: E731
    for a, b in zip(flat(kept), flat(now), strict=True):
        if isinstance(a, torch.Tensor):
            bits = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
            assert torch.equal(*bits)
    assert int(opt.tail_stats().skipped) == 1
