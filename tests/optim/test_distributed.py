"""The optimizers over several processes: sharded parameters (DTensor, FSDP2) and DistributedDataParallel, with gloo.

This file is also the program of each process: `test_distributed.py RANK WORLD PORT FOLDER`. A group of processes runs
all its scenarios in one go, and each test looks at the outcome of one.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oxytorch.optim
import pytest
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.cpu_only("processes joined by gloo")

SCENARIOS: dict[int, dict[str, Callable[[Path], None]]] = {2: {}, 4: {}}

ALGORITHMS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 1e-1, "momentum": 0.9, "nesterov": True},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "momentum": 0.9, "centered": True},
}


def scenario(world: int, *cases: Any):
    """Run the function in `world` processes, once for each case."""

    def add(function):
        for case in cases or (None,):
            name = function.__name__ if case is None else f"{function.__name__}[{case}]"
            SCENARIOS[world][name] = lambda folder, case=case: function(folder, *([] if case is None else [case]))
        return function

    return add


def mesh(*shape: int, names: tuple[str, ...] = ()):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names or None)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Odd sizes, and layers so narrow that the last rank holds none of their elements."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3), nn.Tanh(), nn.Linear(3, 1))
    return made.to(dtype)


def sharded_model(device_mesh=None, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    made = model(dtype)
    for layer in made:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=device_mesh, **options)
    return fully_shard(made, mesh=device_mesh, **options)


def batch(step: int) -> torch.Tensor:
    """Another one on each rank."""
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(17 * step + dist.get_rank()))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [whole(p.detach()) for group in optimizer.param_groups for p in group["params"]]


def whole_grads(optimizer: torch.optim.Optimizer) -> list[torch.Tensor | None]:
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return [None if g is None else whole(g) for g in grads]


def same(ours, theirs, **tolerance) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(whole(a.detach()).double(), b.detach().double(), **tolerance)


def referee(name: str, params, **options) -> torch.optim.Optimizer:
    """Torch's optimizer on whole parameters in fp64; Lion, which torch has not, is our own there."""
    doubles = [nn.Parameter(p.double()) for p in params]
    if name == "Lion":
        return oxytorch.optim.Lion(doubles, nonfinite="propagate", **options)
    return getattr(torch.optim, name)(doubles, **options)


def referee_step(peer: torch.optim.Optimizer, grads, clip: float | None = None) -> torch.Tensor:
    params = peer.param_groups[0]["params"]
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.double()
    norm = nn.utils.clip_grad_norm_(params, clip if clip is not None else float("inf"))
    peer.step()
    return norm


def raises(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=text):
        call()


def train(net, optimizer, step: int) -> None:
    optimizer.zero_grad()
    net(batch(step)).square().mean().backward()
    optimizer.step()


def check_against_whole(net, name: str) -> None:
    options = ALGORITHMS[name]
    opt = getattr(oxytorch.optim, name)(
        net.parameters(), clip_norm=0.1, ema_decay=0.9, collect_stats=True, copy_dtype="bf16", **options
    )
    peer = referee(name, whole_params(opt), **options)
    average = [p.detach().clone() for p in peer.param_groups[0]["params"]]
    for i in range(4):
        opt.zero_grad()
        net(batch(i)).square().mean().backward()
        grads, before = whole_grads(opt), whole_params(opt)
        norm = referee_step(peer, grads, 0.1)
        opt.step()
        torch._foreach_lerp_(average, [p.detach() for p in peer.param_groups[0]["params"]], 0.1)
        stats = opt.tail_stats()
        torch.testing.assert_close(stats.grad_norm.double(), norm, rtol=1e-6, atol=0)
        torch.testing.assert_close(stats.grad_norms, torch.stack([g.norm() for g in grads]))
        after = whole_params(opt)
        torch.testing.assert_close(stats.param_norms, torch.stack([p.norm() for p in after]))
        moved = torch.stack([(p - q).norm() for p, q in zip(after, before, strict=True)])
        torch.testing.assert_close(stats.update_norms, moved, rtol=1e-4, atol=1e-7)
    theirs = peer.param_groups[0]["params"]
    same(opt.param_groups[0]["params"], theirs, rtol=1e-5, atol=2e-6)
    same(opt.ema_state_dict()["ema"].values(), average, rtol=1e-5, atol=2e-6)
    same(opt.copies(), [p.bfloat16() for p in whole_params(opt)], rtol=0, atol=0)
    for p in opt.param_groups[0]["params"]:
        for key, value in opt.state[p].items():
            assert key == "step" or (value.placements == p.placements and value.shape == p.shape), key
    kept = whole_params(opt)
    with opt.ema_weights():
        same(opt.param_groups[0]["params"], average, rtol=1e-5, atol=2e-6)
        net(batch(9))
    assert all(torch.equal(p, q) for p, q in zip(whole_params(opt), kept, strict=True))


# ---- FSDP2


@scenario(2, *ALGORITHMS)
def fsdp_equals_one_process(folder: Path, name: str) -> None:
    net = sharded_model()
    assert {p._local_tensor.numel() for p in net[4].parameters()} == ({0} if dist.get_rank() else {1, 3})
    check_against_whole(net, name)


@scenario(2, *ALGORITHMS)
def int8_state_of_shards(folder: Path, name: str) -> None:
    net = sharded_model()
    opt = getattr(oxytorch.optim, name)(net.parameters(), state_dtype="int8", clip_norm=1.0, **ALGORITHMS[name])
    peer = referee(name, whole_params(opt), **ALGORITHMS[name])
    start = whole_params(opt)
    for i in range(4):
        opt.zero_grad()
        net(batch(i)).square().mean().backward()
        referee_step(peer, whole_grads(opt), 1.0)
        opt.step()
    codes = {value.dtype for state in opt.state.values() for key, value in state.items() if key.startswith("exp_avg")}
    assert not codes or codes == {torch.int8, torch.uint8, torch.bfloat16} - (
        {torch.uint8} if name == "Lion" else set()
    )
    moved = torch.cat([(p - q).flatten() for p, q in zip(whole_params(opt), start, strict=True)]).double()
    theirs = peer.param_groups[0]["params"]
    expected = torch.cat([(p.detach() - q).flatten() for p, q in zip(theirs, start, strict=True)])
    assert float((moved - expected).norm() / expected.norm()) < 0.1


@scenario(2)
def mixed_precision_keeps_masters(folder: Path) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = sharded_model(mp_policy=policy)  # fp32 shards: the policy keeps the masters
    check_against_whole(net, "AdamW")
    net = sharded_model(dtype=torch.bfloat16)  # bf16 shards: the optimizer does
    opt = oxytorch.optim.AdamW(net.parameters(), lr=1e-5, clip_norm=1.0, master_weights=True)
    peer = referee("AdamW", whole_params(opt), lr=1e-5)
    for i in range(6):
        opt.zero_grad()
        net(batch(i).bfloat16()).square().mean().backward()
        referee_step(peer, whole_grads(opt), 1.0)
        opt.step()
    theirs = peer.param_groups[0]["params"]
    same((opt.state[p]["master"] for p in net.parameters()), theirs, rtol=1e-6, atol=1e-7)
    same(net.parameters(), [p.bfloat16() for p in theirs], rtol=0.0, atol=2**-9)


@scenario(2, "plain", "scaled")
def one_bad_rank_skips_the_step_of_all(folder: Path, how: str) -> None:
    net = sharded_model()
    opt = oxytorch.optim.AdamW(net.parameters(), ema_decay=0.9, clip_norm=1.0)
    train(net, opt, 0)
    kept, state = whole_params(opt), copy.deepcopy(opt.state_dict()["state"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    opt.zero_grad()
    loss = net(batch(1)).square().mean()
    (scaler.scale(loss) if how == "scaled" else loss).backward()
    if dist.get_rank() == 0:
        next(net.parameters()).grad._local_tensor[0, 0] = float("inf")
    if how == "scaled":
        scaler.step(opt)
        scaler.update()
        assert scaler.get_scale() == 2.0
    else:
        opt.step()
    assert int(opt.tail_stats().skipped) == 1
    assert all(torch.equal(p, q) for p, q in zip(whole_params(opt), kept, strict=True))
    for index, entries in opt.state_dict()["state"].items():
        for key, value in entries.items():
            assert torch.equal(whole(value), whole(state[index][key])), key
    train(net, opt, 2)
    assert not torch.equal(whole_params(opt)[0], kept[0])


@scenario(2)
def a_scaler_divides_and_frozen_parameters_stay(folder: Path) -> None:
    net = sharded_model()
    for p in net[2].parameters():
        p.requires_grad_(False)
    opt = oxytorch.optim.AdamW(net.parameters(), lr=1e-2, clip_norm=0.5)
    frozen = [whole(p.detach()).clone() for p in net[2].parameters()]
    peer = referee("AdamW", whole_params(opt), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for i in range(4):
        scale = scaler.get_scale()
        opt.zero_grad()
        scaler.scale(net(batch(i)).square().mean()).backward()
        grads = [None if g is None else g / scale for g in whole_grads(opt)]
        if i == 2:
            scaler.unscale_(opt)
        norm = referee_step(peer, grads, 0.5)
        scaler.step(opt)
        scaler.update()
        torch.testing.assert_close(opt.tail_stats().grad_norm.double(), norm, rtol=1e-5, atol=0)
    assert scaler.get_scale() == 32.0
    same(net.parameters(), peer.param_groups[0]["params"], rtol=1e-5, atol=2e-6)
    assert all(torch.equal(whole(p.detach()), q) for p, q in zip(net[2].parameters(), frozen, strict=True))


def equal_states(one, other) -> None:
    assert one.keys() == other.keys()
    for name, entries in one.items():
        assert entries.keys() == other[name].keys()
        for key, value in entries.items():
            assert torch.equal(whole(value), whole(other[name][key])), (name, key)


@scenario(2, "fp32", "int8", "7 bytes")
def checkpoints_come_back_and_split_anew(folder: Path, kind: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    dtype = torch.bfloat16 if kind == "7 bytes" else torch.float32
    options: dict[str, Any] = {
        "fp32": {},
        "int8": {"state_dtype": "int8"},
        "7 bytes": {"state_dtype": "int8", "master_weights": "int8"},
    }[kind]

    def run(net, optimizer, first: int, last: int) -> None:
        for i in range(first, last):
            optimizer.zero_grad()
            net(batch(i).to(dtype)).square().mean().backward()
            optimizer.step()

    def build(seen=None):
        net = sharded_model(dtype=dtype)
        return net, oxytorch.optim.AdamW(net.parameters(), lr=1e-2, **options)

    net, opt = build()
    run(net, opt, 0, 3)
    saved, weights = copy.deepcopy((get_optimizer_state_dict(net, opt), net.state_dict()))
    moments = [entries["exp_avg"] for entries in saved["state"].values()]
    assert all(hasattr(moment, "placements") for moment in moments)
    where = folder / kind.replace(" ", "_")
    dcp.save({"optim": saved, "model": weights}, checkpoint_id=where)
    # The same shards: it goes on bit for bit.
    other, fresh = build()
    restored = {"optim": get_optimizer_state_dict(other, fresh), "model": other.state_dict()}
    dcp.load(restored, checkpoint_id=where)
    other.load_state_dict(restored["model"])
    set_optimizer_state_dict(other, fresh, restored["optim"])
    equal_states(get_optimizer_state_dict(other, fresh)["state"], saved["state"])
    run(net, opt, 3, 5)
    run(other, fresh, 3, 5)
    assert all(torch.equal(p, q) for p, q in zip(whole_params(opt), whole_params(fresh), strict=True))
    # One process, whole parameters.
    alone = model(dtype)
    single = oxytorch.optim.AdamW(alone.parameters(), lr=1e-2, **{**options, "state_dtype": None})
    for p in alone.parameters():
        p.grad = torch.zeros_like(p)
    single.step()
    target = {"optim": get_optimizer_state_dict(alone, single), "model": alone.state_dict()}
    dcp.load(target, checkpoint_id=where, no_dist=True)
    set_optimizer_state_dict(alone, single, target["optim"])
    for name, entries in get_optimizer_state_dict(alone, single)["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(value.float(), whole(saved["state"][name][key]).float(), rtol=0.0, atol=0.0)
    # Whole state on every rank, split by torch and by us.
    full = StateDictOptions(full_state_dict=True)
    gathered = get_optimizer_state_dict(net, opt, options=full)
    again, third = build()
    set_optimizer_state_dict(again, third, gathered, options=full)
    equal_states(get_optimizer_state_dict(again, third)["state"], get_optimizer_state_dict(net, opt)["state"])
    fourth = oxytorch.optim.AdamW(build()[0].parameters(), lr=1e-2, **options)
    plain = opt.state_dict()
    plain["state"] = {i: {k: whole(v) for k, v in entries.items()} for i, entries in plain["state"].items()}
    fourth.load_state_dict(plain)
    for p in (p for group in fourth.param_groups for p in group["params"]):
        p.grad = torch.zeros_like(p)
    fourth.step()
    first, last = opt.state_dict()["state"][0]["exp_avg"], fourth.state_dict()["state"][0]["exp_avg"]
    decayed = whole(first).float() * 0.9
    assert float((whole(last).float() - decayed).norm()) < 0.02 * float(decayed.norm())


@scenario(2)
def averages_of_shards_are_saved(folder: Path) -> None:
    net = sharded_model()
    opt = oxytorch.optim.SGD(net.parameters(), lr=0.1, ema_decay=0.9)
    train(net, opt, 0)
    saved = opt.ema_state_dict()
    other = sharded_model()
    fresh = oxytorch.optim.SGD(other.parameters(), lr=0.1, ema_decay=0.9)
    fresh.load_ema_state_dict(saved)
    same(fresh.ema_state_dict()["ema"].values(), [whole(t) for t in saved["ema"].values()], rtol=0.0, atol=0.0)
    fresh.load_ema_state_dict({**saved, "ema": {i: whole(t) for i, t in saved["ema"].items()}})
    with fresh.ema_weights():
        same(other.parameters(), [whole(t) for t in saved["ema"].values()], rtol=0.0, atol=0.0)


@scenario(2)
def torchs_optimizer_is_replaced(folder: Path) -> None:
    net, twin = sharded_model(), sharded_model()
    old = torch.optim.AdamW(net.parameters(), lr=1e-2)
    peer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for i in range(2):
        train(net, old, i)
        train(twin, peer, i)
    opt = oxytorch.optim.replace(old)
    for i in range(2, 4):
        train(net, opt, i)
        train(twin, peer, i)
    same(net.parameters(), [whole(p) for p in twin.parameters()], rtol=1e-5, atol=1e-6)


@scenario(2)
def a_compiled_model_is_trained(folder: Path) -> None:
    net, twin = sharded_model(), sharded_model()
    compiled = torch.compile(net, backend="aot_eager")
    opt = oxytorch.optim.AdamW(net.parameters(), lr=1e-2, clip_norm=0.1)
    peer = oxytorch.optim.AdamW(twin.parameters(), lr=1e-2, clip_norm=0.1)
    for i in range(3):
        train(compiled, opt, i)
        train(twin, peer, i)
    same(net.parameters(), [whole(p) for p in twin.parameters()], rtol=1e-5, atol=1e-6)


# ---- other DTensors


def distributed(tensor: torch.Tensor, device_mesh, *placements) -> nn.Parameter:
    from torch.distributed.tensor import distribute_tensor

    return nn.Parameter(distribute_tensor(tensor, device_mesh, placements))


@scenario(2, *ALGORITHMS)
def tensor_parallel_parameters(folder: Path, name: str) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    devices = mesh(2)
    torch.manual_seed(0)
    shapes = [(5, 7), (5, 7), (6, 4), (3,)]
    starts = [torch.randn(shape) for shape in shapes]
    placed = [(Shard(1),), (Replicate(),), (Shard(0),), (Replicate(),)]
    params = [distributed(start, devices, *where) for start, where in zip(starts, placed, strict=True)]
    params.append(nn.Parameter(torch.ones(4)))  # and a plain one beside them
    opt = getattr(oxytorch.optim, name)(params, clip_norm=1.0, **ALGORITHMS[name])
    peer = referee(name, [*starts, torch.ones(4)], **ALGORITHMS[name])
    for _ in range(3):
        grads = [torch.randn(shape) for shape in [*shapes, (4,)]]
        for p, g, where in zip(params, grads, [*placed, None], strict=True):
            p.grad = g if where is None else distribute_tensor(g, devices, where)
        norm = referee_step(peer, grads, 1.0)
        opt.step()
        torch.testing.assert_close(opt.tail_stats().grad_norm.double(), norm, rtol=1e-6, atol=0)
    same(params, peer.param_groups[0]["params"], rtol=1e-5, atol=2e-6)


@scenario(2)
def what_shards_cannot_serve_is_refused(folder: Path) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    devices = mesh(2)
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

    def stepped(optimizer, param):
        param.grad = torch.ones_like(param)
        optimizer.step()

    param = distributed(start, devices, Shard(1))
    raises(NotImplementedError, "agc needs whole rows", lambda: stepped(oxytorch.optim.SGD([param], agc=0.1), param))
    param = distributed(start[:, 0], devices, Shard(0))
    raises(NotImplementedError, "agc needs whole rows", lambda: stepped(oxytorch.optim.SGD([param], agc=0.1), param))
    rows = distributed(start, devices, Shard(0))
    muon = oxytorch.optim.Muon([rows])
    raises(NotImplementedError, "Muon needs whole matrices", lambda: stepped(muon, rows))
    partial = nn.Parameter(DTensor.from_local(start, devices, [Partial()], run_check=False))
    sgd = oxytorch.optim.SGD([partial])
    raises(NotImplementedError, "partial values; redistribute it first", lambda: stepped(sgd, partial))
    misplaced = distributed(start, devices, Shard(0))
    misplaced.grad = distribute_tensor(torch.ones(6, 4), devices, [Replicate()])
    opt = oxytorch.optim.SGD([misplaced])
    raises(NotImplementedError, "the gradient of parameter 0 is placed as", opt.step)
    assert misplaced._local_tensor.grad is None
    for option in ("norm_in_backward", "step_in_backward"):
        raises(
            NotImplementedError,
            "before they are reduced over processes",
            lambda option=option: oxytorch.optim.SGD([rows], nonfinite="propagate", **{option: True}),
        )
    one = nn.Parameter(start.clone())
    single = oxytorch.optim.AdamW([one], state_dtype="int8")
    one.grad = torch.ones_like(one)
    single.step()
    opt = oxytorch.optim.AdamW([rows], state_dtype="int8")
    raises(ValueError, "cannot be split over processes", lambda: opt.load_state_dict(single.state_dict()))


@scenario(2)
def whole_rows_and_whole_matrices_are_served(folder: Path) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    devices = mesh(2)
    start, grad = (torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(2))
    for name, where, options in [("SGD", Shard(0), {"agc": 0.05}), ("Muon", Replicate(), {})]:
        param, alone = distributed(start, devices, where), nn.Parameter(start.clone())
        param.grad, alone.grad = distribute_tensor(grad, devices, [where]), grad
        for p in (param, alone):
            getattr(oxytorch.optim, name)([p], **options).step()
        same([param], [alone], rtol=1e-6, atol=1e-6)


# ---- several dimensions of a mesh


@scenario(4, "AdamW", "SGD")
def hsdp_equals_one_process(folder: Path, name: str) -> None:
    check_against_whole(sharded_model(mesh(2, 2, names=("replicate", "shard"))), name)


@scenario(4)
def shards_of_two_dimensions(folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    devices = mesh(2, 2, names=("data", "tensor"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 3), nn.Tanh(), nn.Linear(3, 1))
    parallelize_module(net, devices["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (net[0], net[2], net[4]):
        fully_shard(layer, mesh=devices["data"])
    # Layer 4 is split over one dimension alone; layer 0 over both, one after the other.
    assert {len(p.placements) for p in net.parameters()} == {1, 2}
    opt = oxytorch.optim.AdamW(net.parameters(), lr=1e-2, clip_norm=0.1)
    peer = referee("AdamW", whole_params(opt), lr=1e-2)
    for i in range(3):
        opt.zero_grad()
        data = torch.randn(4, 7, generator=torch.Generator().manual_seed(i))
        net(data).square().mean().backward()
        norm = referee_step(peer, whole_grads(opt), 0.1)
        opt.step()
        torch.testing.assert_close(opt.tail_stats().grad_norm.double(), norm, rtol=1e-6, atol=0)
    same(net.parameters(), peer.param_groups[0]["params"], rtol=1e-5, atol=2e-6)


# ---- DistributedDataParallel


def doubled(step: int) -> torch.Tensor:
    parts = [torch.randn(4, 7, generator=torch.Generator().manual_seed(17 * step + rank)) for rank in range(2)]
    return torch.cat(parts)


@scenario(2, "plain", "views", "static", "compiled")
def ddp_equals_the_doubled_batch(folder: Path, how: str) -> None:
    options = {"views": {"gradient_as_bucket_view": True}, "static": {"static_graph": True}}.get(how, {})
    net, alone = model(), model()
    wrapped: Any = nn.parallel.DistributedDataParallel(net, **options)
    if how == "compiled":
        wrapped = torch.compile(wrapped, backend="aot_eager")
    tail = {"lr": 1e-2, "clip_norm": 0.1, "ema_decay": 0.9, "zero_grads": how == "views"}
    opt = oxytorch.optim.AdamW(net.parameters(), **tail)
    peer = oxytorch.optim.AdamW(alone.parameters(), **tail)
    for i in range(4):
        wrapped(batch(i)).square().mean().backward()
        alone(doubled(i)).square().mean().backward()
        opt.step()
        peer.step()
        if how != "views":
            opt.zero_grad()
            peer.zero_grad()
    torch.testing.assert_close(opt.tail_stats().grad_norm, peer.tail_stats().grad_norm, rtol=1e-5, atol=0)
    same(net.parameters(), list(alone.parameters()), rtol=1e-5, atol=1e-6)


@scenario(2)
def ddp_accumulates_without_synchronising(folder: Path) -> None:
    net, alone = model(), model()
    wrapped = nn.parallel.DistributedDataParallel(net)
    opt = oxytorch.optim.AdamW(net.parameters(), lr=1e-2, clip_norm=0.1)
    peer = oxytorch.optim.AdamW(alone.parameters(), lr=1e-2, clip_norm=0.1)
    opt.grad_divisor = peer.grad_divisor = 2.0
    for i in range(0, 6, 2):
        with wrapped.no_sync(), opt.accumulate():
            wrapped(batch(i)).square().mean().backward()
        wrapped(batch(i + 1)).square().mean().backward()
        alone(doubled(i)).square().mean().backward()
        alone(doubled(i + 1)).square().mean().backward()
        for optimizer in (opt, peer):
            optimizer.step()
            optimizer.zero_grad()
    same(net.parameters(), list(alone.parameters()), rtol=1e-5, atol=1e-6)


@scenario(2, "norm_in_backward", "step_in_backward")
def ddp_refuses_to_work_in_backward(folder: Path, option: str) -> None:
    raises(
        NotImplementedError,
        "before they are reduced over processes",
        lambda: oxytorch.optim.AdamW(model().parameters(), nonfinite="propagate", **{option: True}),
    )


# ---- running it


def main(rank: int, world: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    outcomes = {}
    for name, run in SCENARIOS[world].items():
        try:
            torch._dynamo.reset()
            run(folder)
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
        (folder / f"{world}-{rank}.json").write_text(json.dumps(outcomes))
        # A rank that failed leaves the others in a collective: they end in its time.
        dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    """Of each world size, by rank: the failure of each scenario, or "" """
    folder = tmp_path_factory.mktemp("distributed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found: dict[int, list[dict[str, str]]] = {}
    for world, names in SCENARIOS.items():
        command = [sys.executable, __file__]
        port = free_port()
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(world), str(port), str(folder)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        said = [process.communicate(timeout=300)[0] for process in processes]
        found[world] = []
        for rank in range(world):
            report = folder / f"{world}-{rank}.json"
            ended = json.loads(report.read_text()) if report.exists() else {}
            missing = f"rank {rank} did not get here:\n{said[rank][-2000:]}"
            found[world].append({name: ended.get(name, missing) for name in names})
    return found


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in SCENARIOS.items() for name in names])
def test_distributed(outcomes, world: int, name: str) -> None:
    failures = [f"rank {rank}: {said[name]}" for rank, said in enumerate(outcomes[world]) if said[name]]
    assert not failures, "\n".join(failures)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
