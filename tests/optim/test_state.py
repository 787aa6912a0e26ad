"""State as it travels: to and from torch, between formats, through copies and files; and what may not change it."""

from __future__ import annotations

import copy
import hashlib
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import oxytorch.optim
import pytest
import torch
import torch_device
from referee import moments_of, params_of, ulp

DEVICE = torch_device.chosen()

SHAPES = [(257,), (16, 33), (3,), (0,), ()]
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1, "amsgrad": True},
    "Adam": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Lion": {"weight_decay": 0.1},
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Muon": {},
}
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"state_dtype": "bf16", "stochastic_rounding": True, "seed": 3},
    "int8": {"state_dtype": "int8", "stochastic_rounding": True, "seed": 4},
    "masters": {"master_weights": True, "copy_dtype": "fp16"},
    "seven bytes": {"master_weights": "int8", "state_dtype": "int8", "stochastic_rounding": True, "seed": 5},
}


def make_params(name: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(16, 33), (5, 5)] if name == "Muon" else SHAPES
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]


def make(name: str, tail: dict[str, Any], dtype: torch.dtype = torch.bfloat16, **extra: Any):
    return getattr(oxytorch.optim, name)(make_params(name, dtype), lr=1e-2, **OPTIONS[name], **tail, **extra)


def run(opt: Any, steps: range) -> None:
    for i in steps:
        generator = torch.Generator().manual_seed(100 + i)
        for p in params_of(opt):
            p.grad = (0.1 * torch.randn(p.shape, generator=generator)).to(p.device, p.dtype)
        opt.step()


def tensors_of(opt: Any) -> list[torch.Tensor]:
    """Every tensor that a step may write, gradients apart."""
    state = [value for p in params_of(opt) for value in (opt.state.get(p) or {}).values() if value is not None]
    averages = list(opt.ema_state_dict()["ema"].values()) if hasattr(opt, "ema_state_dict") else []
    copies = [c for c in opt.copies() if c is not None] if hasattr(opt, "copies") else []
    return [*(p.detach() for p in params_of(opt)), *state, *averages, *copies]


def digest(opt: Any) -> str:
    sha = hashlib.sha256()
    for tensor in tensors_of(opt):
        sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        sha.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return sha.hexdigest()


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(tensors_of(a), tensors_of(b), strict=True))


# ---- a step that is not applied


@pytest.mark.parametrize("composite", [False, True], ids=["native", "composite"])
@pytest.mark.parametrize("tail", FORMATS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_that_is_not_finite_changes_no_byte(name: str, tail: str, composite: bool) -> None:
    opt = make(name, {**FORMATS[tail], "force_composite": composite, "ema_decay": 0.9})
    run(opt, range(2))
    before = digest(opt)
    for i, (where, value) in enumerate(((0, float("inf")), (1, float("nan")), (0, -float("inf")))):
        for p in params_of(opt):
            p.grad = torch.ones_like(p)
        params_of(opt)[where].grad.view(-1)[-1] = value
        opt.step()
        assert digest(opt) == before
        assert int(opt.tail_stats().skipped) == i + 1
    run(opt, range(2, 3))
    assert digest(opt) != before


@pytest.mark.parametrize("tail", FORMATS)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_first_step_may_be_skipped(name: str, tail: str) -> None:
    """State is made in a skipped step too; what follows is as if it had never been."""
    opt, fresh = make(name, {**FORMATS[tail], "ema_decay": 0.9}), make(name, {**FORMATS[tail], "ema_decay": 0.9})
    for p in params_of(opt):
        p.grad = torch.full_like(p, float("nan"))
    opt.step()
    run(opt, range(3)), run(fresh, range(3))
    assert same(opt, fresh)


# ---- the same bits everywhere

CHILD = """
import sys, torch
sys.path[:0] = sys.argv[1:]
from test_state import DTYPES, everything
for threads in (1, 2, 3):
    torch.set_num_threads(threads)
    print(everything())
"""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def everything() -> str:
    """Hash over all algorithms, formats and dtypes with native kernels, tensors of several chunks among them."""
    sha = hashlib.sha256()
    kinds = [(name, key) for name in OPTIONS if name != "Muon" for key in FORMATS]  # Muon's products are torch's
    for i, (name, key) in enumerate(kinds):
        dtype = DTYPES[(i + i // len(FORMATS)) % len(DTYPES)] if key != "seven bytes" else torch.bfloat16
        generator = torch.Generator().manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (40001, 257, 3)]
        options = {"clip_norm": 0.5, "ema_decay": 0.9, "collect_stats": True, **OPTIONS[name], **FORMATS[key]}
        opt = getattr(oxytorch.optim, name)(params, lr=1e-2, **options)
        run(opt, range(3))
        assert opt._tail.native
        stats = opt.tail_stats()
        sha.update(digest(opt).encode())
        for t in (stats.grad_norm, stats.param_norms, stats.update_norms):
            sha.update(t.numpy().tobytes())
    return sha.hexdigest()


@pytest.mark.cpu_only("threads and instruction sets of the CPU")
def test_same_bits_for_every_thread_count_instruction_set_and_format() -> None:
    found = {}
    for isa in ("scalar", "avx2", "avx512"):
        command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(Path(torch_device.__file__).parent)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OXYTORCH_ISA": isa}, check=False
        )
        if isa != "scalar" and "which this processor lacks" in done.stderr:
            continue
        assert done.returncode == 0, done.stderr
        found[isa] = done.stdout.split()
    assert len({value for values in found.values() for value in values}) == 1, found


@pytest.mark.parametrize("name", [n for n in OPTIONS if n != "Muon"])
def test_random_rounding_is_unbiased_and_the_same_composed(name: str) -> None:
    dtype = torch.bfloat16
    start = make_params("", dtype)[0].detach()
    results = {composite: [] for composite in (False, True)}
    exact = None
    options = {**OPTIONS[name], **({"initial_accumulator_value": 0.125} if name == "Adagrad" else {})}  # exact in bf16
    for seed in range(100):
        for composite in (False, True) if seed < 10 else (False,):
            p = torch.nn.Parameter(start.clone())
            tail = {"stochastic_rounding": True, "state_dtype": "fp32", "seed": seed, "force_composite": composite}
            opt = getattr(oxytorch.optim, name)([p], lr=1e-2, **options, **tail)
            p.grad = 0.1 * torch.cos(torch.arange(257.0)).to(DEVICE, dtype)
            opt.step()
            results[composite].append(p.detach())
        if exact is None:
            wide = torch.nn.Parameter(start.float())
            opt = getattr(oxytorch.optim, name)([wide], lr=1e-2, **options)
            wide.grad = p.grad.float()
            opt.step()
            exact = wide.detach().double()
    # Native and composed evaluations differ in the last fp32 bits; the decision differs for almost no element.
    agree = torch.stack([a == b for a, b in zip(results[False], results[True], strict=False)])
    assert agree.float().mean() > 0.998
    many = torch.stack(results[False]).double()
    assert ((many - exact).abs() <= ulp(torch.maximum(many.abs(), exact.abs()), dtype)).all()
    # The mean of 100 over 257 elements: 5 sigma of the bias, in units of each element's ulp.
    bias = ((many.mean(0) - exact) / ulp(exact, dtype)).mean()
    assert abs(float(bias)) < 5 * 0.5 / (100 * 257) ** 0.5
    assert len({tuple(r.tolist()) for r in results[False][:5]}) == 5, "the seed has no effect"


# ---- exchange with torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [n for n in OPTIONS if n != "Lion"])
def test_state_goes_to_torch_and_back(name: str, dtype: torch.dtype) -> None:
    ours, theirs = make(name, {}, dtype), getattr(torch.optim, name)(make_params(name, dtype), lr=1e-2, **OPTIONS[name])
    run(theirs, range(5))
    for p, q in zip(params_of(ours), params_of(theirs), strict=True):
        p.data.copy_(q.data)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    a, b = ours.state_dict(), theirs.state_dict()
    assert a["param_groups"] == b["param_groups"]
    for key, state in b["state"].items():
        assert list(state) == list(a["state"][key])
        for entry, value in state.items():
            mine = a["state"][key][entry]
            assert mine is value is None or (torch.equal(mine, value) and mine.dtype == value.dtype)
    run(ours, range(5, 8)), run(theirs, range(5, 8))
    close = {"rtol": 2e-2, "atol": 2e-2} if name == "Muon" else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(params_of(ours), params_of(theirs), **close)
    for p, q in zip(params_of(theirs), params_of(ours), strict=True):
        p.data.copy_(q.data)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    run(ours, range(8, 10)), run(theirs, range(8, 10))
    torch.testing.assert_close(params_of(ours), params_of(theirs), **close)


@pytest.mark.parametrize("target", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("source", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", OPTIONS)
def test_state_is_converted_between_formats(name: str, source: str, target: str) -> None:
    old, new = make(name, {"state_dtype": source}), make(name, {"state_dtype": target})
    run(old, range(4))
    saved = copy.deepcopy(old.state_dict())
    new.load_state_dict(saved)
    new.tail_stats()
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for p, q in zip(params_of(old), params_of(new), strict=True):
        before, after = moments_of(name, old.state[p]), moments_of(name, new.state[q])
        assert before.keys() == after.keys()
        for key, value in before.items():
            kept = new.state[q][key].dtype
            assert kept == types.get(target, kept) and (target != "int8") == kept.is_floating_point
            scale = new.state[q].get(f"{key}_scale")
            assert (scale is not None) == (target == "int8")
            if source == target:
                assert torch.equal(value, after[key])
            elif target != "int8":
                torch.testing.assert_close(after[key], value, rtol=2.0**-8 if target == "bf16" else 1e-6, atol=0)
            else:
                # Half a step of the code, of the group's largest: a square root to 127 or a fourth root to 255 steps.
                largest = float(value.abs().max()) if value.numel() else 0.0
                assert ((after[key] - value).abs() <= largest * 0.03).all()
        if "step" in old.state[p]:
            assert float(new.state[q]["step"]) == float(old.state[p]["step"])
    run(new, range(4, 6))
    assert all(p.isfinite().all() for p in params_of(new))


# ---- copies, files, resuming


@pytest.mark.parametrize("tail", FORMATS)
@pytest.mark.parametrize("name", OPTIONS)
def test_five_steps_and_five_more_are_ten(name: str, tail: str) -> None:
    options = {**FORMATS[tail], "ema_decay": 0.9}
    whole, first = make(name, options), make(name, options)
    run(whole, range(10)), run(first, range(5))
    buffer = io.BytesIO()
    params = [p.detach() for p in params_of(first)]
    torch.save({"params": params, "opt": first.state_dict(), "ema": first.ema_state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    second = make(name, options)
    with torch.no_grad():
        for p, value in zip(params_of(second), saved["params"], strict=True):
            p.copy_(value)
    second.load_state_dict(saved["opt"])
    second.load_ema_state_dict(saved["ema"])
    copies = [copy.deepcopy(first), pickle.loads(pickle.dumps(first)), second, first]
    for resumed in copies:
        run(resumed, range(5, 10))
        assert same(resumed, whole)


def test_a_group_added_between_steps_joins() -> None:
    for tail in FORMATS.values():
        opt, peer = make("AdamW", tail), make("AdamW", tail)
        run(opt, range(3)), run(peer, range(3))
        added = torch.nn.Parameter(torch.ones(70, dtype=torch.bfloat16, device=DEVICE))
        opt.add_param_group({"params": [added], "lr": 0.1})
        run(opt, range(3, 6)), run(peer, range(3, 6))
        count = len(params_of(peer))
        assert all(torch.equal(p, q) for p, q in zip(params_of(opt)[:count], params_of(peer), strict=True))
        assert float(opt.state[added]["step"]) == 3 and not torch.equal(added, torch.ones_like(added))


def test_foreign_state_is_refused_and_nothing_changes() -> None:
    saved = {}
    for name in OPTIONS:
        opt = make(name, {}, torch.float32)
        run(opt, range(2))
        saved[name] = opt.state_dict()
    for name in OPTIONS:
        opt = make(name, {"ema_decay": 0.9, "copy_dtype": "bf16"}, torch.float32)
        run(opt, range(2))
        before, groups = digest(opt), copy.deepcopy([{**g, "params": None} for g in opt.param_groups])
        wrong = [copy.deepcopy(s) for other, s in saved.items() if other != name and {other, name} != {"Adam", "AdamW"}]
        short = copy.deepcopy(saved[name])
        short["param_groups"][0]["params"] = short["param_groups"][0]["params"][:-1]
        more = copy.deepcopy(saved[name])
        more["param_groups"].append(copy.deepcopy(more["param_groups"][0]))
        shapes = copy.deepcopy(saved[name])
        key = next(k for k, v in shapes["state"][0].items() if torch.is_tensor(v) and k != "step")
        shapes["state"][0][key] = torch.zeros(9, 9)
        for bad in (*wrong, short, more, shapes):
            with pytest.raises(ValueError):
                opt.load_state_dict(bad)
            assert digest(opt) == before
            assert [{**g, "params": None} for g in opt.param_groups] == groups
        run(opt, range(2, 3))  # and it goes on


# ---- weights written from outside


@pytest.mark.parametrize("composite", [False, True], ids=["native", "composite"])
@pytest.mark.parametrize("tail", ["masters", "seven bytes"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "Muon"])
def test_weights_loaded_after_a_step_win(name: str, tail: str, composite: bool) -> None:
    tail_options = {**FORMATS[tail], "force_composite": composite, "stochastic_rounding": False}
    opt = make(name, tail_options)
    run(opt, range(3))
    values = [-1.5 * p.detach() for p in params_of(opt)]  # nowhere what the masters round to
    fresh = make(name, tail_options)
    with torch.no_grad():
        for p, q, value in zip(params_of(opt), params_of(fresh), values, strict=True):
            p.copy_(value), q.copy_(value)
    state = copy.deepcopy(opt.state_dict())
    for entry in state["state"].values():
        entry.pop("master", None), entry.pop("low_bits", None)
    fresh.load_state_dict(state)
    run(opt, range(3, 5)), run(fresh, range(3, 5))
    assert all(torch.equal(p, q) for p, q in zip(params_of(opt), params_of(fresh), strict=True))


@pytest.mark.parametrize("tail", ["masters", "seven bytes"])
def test_averages_come_and_go_beside_masters(tail: str) -> None:
    options = {**FORMATS[tail], "ema_decay": 0.9}
    opt, peer = make("AdamW", options), make("AdamW", options)
    for i in range(6):
        run(opt, range(i, i + 1)), run(peer, range(i, i + 1))
        before = digest(opt)
        with opt.ema_weights():
            for p, average in zip(params_of(opt), opt.ema_state_dict()["ema"].values(), strict=True):
                assert torch.equal(p, average.to(p.dtype))
        assert digest(opt) == before
    assert same(opt, peer)


@pytest.mark.parametrize("before", ["nothing", "load_state_dict", "load_ema_state_dict", "deepcopy"])
def test_averages_stay_with_their_parameters_in_whatever_order_these_come(before: str) -> None:
    params = [torch.nn.Parameter(torch.full((5,), float(i))) for i in range(3)]
    opt = oxytorch.optim.SGD(params, lr=0.5, ema_decay=0.5)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    if before == "load_state_dict":
        opt.load_state_dict(opt.state_dict())
    elif before == "load_ema_state_dict":
        opt.load_ema_state_dict(opt.ema_state_dict())
    elif before == "deepcopy":
        opt = copy.deepcopy(opt)
    (group,) = opt.param_groups
    opt.param_groups = [{**group, "params": group["params"][1:]}, {**group, "params": group["params"][:1]}]
    assert [float(t[0]) for t in opt.ema_state_dict()["ema"].values()] == [0.75, 1.75, -0.25]
    for p in params_of(opt):
        p.grad = torch.zeros_like(p)
    opt.step()
    assert [float(t[0]) for t in opt.ema_state_dict()["ema"].values()] == [0.625, 1.625, -0.375]
