"""Every optimizer, format and option against an fp64 referee, step by step, natively and composed."""

from __future__ import annotations

from typing import Any

import oxytorch.optim
import pytest
import torch
from referee import check_step, params_of, snapshot

pytestmark = pytest.mark.cpu_only("the referee itself")

SHAPES = [(257,), (9, 65), (8, 3, 3, 3), (), (0, 4)]
MATRICES = [(9, 65), (16, 16), (40, 8), (1, 7)]

RULES: dict[str, list[dict[str, Any]]] = {
    "AdamW": [{"weight_decay": 0.1}, {"amsgrad": True, "maximize": True, "betas": (0.8, 0.95), "eps": 1e-3}],
    "Adam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True, "amsgrad": True}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.8, "dampening": 0.3}],
    "Lion": [{"weight_decay": 0.1}, {"betas": (0.95, 0.98), "maximize": True}],
    "Adagrad": [{"weight_decay": 0.1, "lr_decay": 0.1}, {"initial_accumulator_value": 0.3, "maximize": True}],
    "RMSprop": [{"weight_decay": 0.1}, {"momentum": 0.9, "centered": True}, {"alpha": 0.5, "eps": 1e-3}],
    "Muon": [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}],
}
CASES = [(name, options) for name, many in RULES.items() for options in many]
TAILS: dict[str, dict[str, Any]] = {
    "plain": {"nonfinite": "propagate"},
    "norm": {"clip_norm": 0.7, "ema_decay": 0.9, "collect_stats": True},
    "value": {"clip_value": 0.02, "copy_dtype": "fp16"},
    "agc": {"agc": 0.01, "agc_eps": 1e-2, "ema_decay": 0.5},
    "bf16 state": {"state_dtype": "bf16", "clip_norm": 0.7},
    "int8 state": {"state_dtype": "int8", "clip_norm": 0.7, "ema_decay": 0.9},
    "masters": {"master_weights": True, "ema_decay": 0.9, "copy_dtype": "bf16"},
    "seven bytes": {"master_weights": "int8", "state_dtype": "int8", "clip_norm": 0.7, "ema_decay": 0.9},
    "random": {"stochastic_rounding": True, "state_dtype": "bf16", "seed": 11},
    "random seven bytes": {"stochastic_rounding": True, "master_weights": "int8", "state_dtype": "int8", "seed": 5},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(name: str, dtype: torch.dtype, tail: dict[str, Any], options: dict[str, Any], seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = MATRICES if name == "Muon" else SHAPES
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    return getattr(oxytorch.optim, name)(params, lr=1e-2, **options, **tail), generator


def set_grads(opt, generator: torch.Generator, scale: float = 1.0) -> list[torch.Tensor | None]:
    for p in params_of(opt):
        p.grad = (scale * 0.05 * torch.randn(p.shape, generator=generator)).to(p.dtype)
    return [p.grad.clone() for p in params_of(opt)]


@pytest.mark.parametrize("composite", [False, True], ids=["native", "composite"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(CASES)])
def test_each_step_is_that_of_the_referee(name: str, options: dict, tail: str, composite: bool) -> None:
    turn = CASES.index((name, options)) + list(TAILS).index(tail)
    for dtype in DTYPES[turn % 3 :][:1] if composite else DTYPES[: 2 + turn % 2]:
        if dtype == torch.float16 and TAILS[tail].get("master_weights") == "int8":
            continue
        opt, generator = make(name, dtype, {**TAILS[tail], "force_composite": composite}, options)
        for _ in range(3):
            grads = set_grads(opt, generator)
            before = snapshot(opt)
            opt.step()
            check_step(opt, before, grads)
        assert opt._tail.native is (not composite and name != "Muon")


@pytest.mark.parametrize("composite", [False, True], ids=["native", "composite"])
@pytest.mark.parametrize("name", RULES)
def test_scale_divisor_and_conditions(name: str, composite: bool) -> None:
    opt, generator = make(name, torch.float32, {"clip_norm": 0.5, "force_composite": composite}, {})
    opt.grad_divisor = 3.0
    for i in range(6):
        opt.grad_scale, opt.found_inf = torch.tensor(2.0**i), torch.zeros(())
        opt.skip = torch.tensor(1.0 if i == 2 else 0.0)
        grads = set_grads(opt, generator, 3 * 2.0**i)
        size = torch.stack([g.norm() for g in grads]).norm() / (3 * 2.0**i)
        opt.norm_limit = size * (0.9 if i == 4 else 1.1)
        before = snapshot(opt)
        opt.step()
        if i in (2, 4):
            assert float(opt.tail_stats().applied) == 0 and float(opt.tail_stats().found_inf) == 0
            assert all(torch.equal(b.weight, p.detach().double()) for b, p in zip(before, params_of(opt), strict=True))
        else:
            check_step(opt, before, grads, 3 * 2.0**i)
    assert int(opt.tail_stats().skipped) == 2
    opt.grad_divisor = -1.0
    with pytest.raises(ValueError, match="grad_divisor is -1"):
        opt.step()
