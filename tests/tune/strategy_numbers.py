"""Training under strategies: what it leaves of the numbers and of the user's objects, and how far it may be off."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from oxytorch import _C
from oxytorch.tune import Run
from torch import Tensor
from torch.nn import functional as F

from .workloads import WORKLOADS, cells, drawn

CELLS = cells()
UNIT = 2.0**-24  # roundoff of float32


def make(name: str, **options: Any) -> Run:
    run = WORKLOADS[name].run()
    return Run(run.model, run.original, F.cross_entropy, run.batches, **options) if options else run


def process() -> dict[str, Any]:
    """Settings of the process that a strategy could leave changed."""
    return {
        "threads": torch.get_num_threads(),
        "denormals": _C.trainer.flush_state(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "reduced": torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
        "benchmark": torch.backends.cudnn.benchmark,
        "precision": [
            torch._C._get_fp32_precision_getter(backend, op)
            for backend in ("mkldnn", "cuda")
            for op in ("matmul", "conv", "rnn", "all")
        ],
        "random": torch.get_rng_state().tolist(),
    }


def anatomy(run: Run) -> dict[str, Any]:
    """Everything of the user's objects: identities, attributes, layouts and bits."""

    def tensor(value: Tensor) -> tuple[Any, ...]:
        return id(value), value.data_ptr(), value.stride(), value.dtype, value.detach().tolist()

    def value(item: Any) -> Any:
        return tensor(item) if isinstance(item, Tensor) else repr(item)

    found: dict[str, Any] = {"modes": [m.training for m in run.model.modules()]}
    for name, module in run.model.named_modules():
        for key, item in module.__dict__.items():
            inner = item.items() if key in ("_parameters", "_buffers") else [("", item)]
            found.update({f"{name}.{key}.{k}": value(v) for k, v in inner})
        for key, item in module._parameters.items():
            found[f"{name}.{key}.grad"] = None if item is None or item.grad is None else item.grad.tolist()
    optimizer = run.original
    found["optimizer"] = {k: repr(v) for k, v in optimizer.__dict__.items() if k not in ("state", "_opt_called")}
    found["state"] = (id(optimizer.state), type(optimizer.state))
    for p, entries in optimizer.state.items():
        found[f"state {id(p)}"] = (type(entries), {k: value(v) for k, v in entries.items()})
    return found


def losses_of(run: Run, batches: Any = None) -> list[Tensor]:
    torch.manual_seed(2)
    return [run.step(batch).clone() for batch in batches or drawn(run)]


def train(run: Run, batches: Any = None) -> list[Tensor]:
    return losses_of(run, batches) + [p.detach().clone() for p in run.params]


def outcome(run: Run, losses: list[Tensor]) -> dict[str, list[Tensor]]:
    """What training left: losses, weights, gradients of the last step and the optimizer's averages."""
    state = [run.original.state[p] for p in run.params]
    return {
        "loss": [loss.detach().double() for loss in losses],
        "weight": [p.detach().double().clone() for p in run.params],
        "gradient": [p.grad.detach().double().clone() for p in run.params if p.grad is not None],
        "exp_avg": [entries["exp_avg"].double().clone() for entries in state],
        "exp_avg_sq": [entries["exp_avg_sq"].double().clone() for entries in state],
    }


def trained(workload: str, how: str = "plain") -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Train by torch alone, without a strategy; return what is left, and the weights it began with.

    `how` is "plain", "float64", "bfloat16": under torch's own autocast, "compiled": by torch.compile with the same
    masks, or "zero gradients" and "wrong gradients".
    """
    run = WORKLOADS[workload].run(torch.float64 if how == "float64" else torch.float32)
    start = [p.detach().double().clone() for p in run.params]
    losses = []
    model = torch.compile(run.model, options={"fallback_random": True}) if how == "compiled" else run.model
    torch.manual_seed(2)
    for batch in run.batches:
        run.original.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "bfloat16"):
            result = model(batch[0])
        loss = F.cross_entropy(result.double() if how == "float64" else result.float(), batch[1])
        loss.backward()
        for p in run.params:
            if how in ("zero gradients", "wrong gradients"):
                p.grad.mul_(0 if how == "zero gradients" else 1.05)  # type: ignore[union-attr]
        run.original.step()
        losses.append(loss)
    return outcome(run, losses), start


@cache
def reference(workload: str) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Train in float64."""
    return trained(workload, "float64")


def errors(workload: str, got: dict[str, list[Tensor]]) -> dict[str, list[float]]:
    """Return how far off float64 each tensor is, as a part of its size; a weight, as a part of its change."""
    exact, start = reference(workload)
    sizes = {**exact, "weight": [w - s for w, s in zip(exact["weight"], start, strict=True)]}
    return {
        key: [
            float((mine - true).norm() / size.norm().clamp_min(1e-300))
            for mine, true, size in zip(got[key], exact[key], sizes[key], strict=True)
        ]
        for key in exact
        if key in got
    }


@cache
def bounds(workload: str, kind: str) -> dict[str, list[float]]:
    """Return the errors that are allowed: a few times those of torch's own training at that precision.

    "tolerance" rounds as often as plain float32 training, elsewhere. "precision" has the bfloat16 of autocast.
    "trade" may be off by its code: the averages by half a step of 1/127 on a curve of square or fourth roots
    (`kStateError` of the largest in a block of 32), which the step sees, and nothing else.
    """
    exact, start = reference(workload)
    plain = errors(workload, trained(workload)[0])
    # Below this two ways of rounding differ by luck: some units of the last place, of a weight of itself.
    floor = {key: [32 * UNIT for _ in tensors] for key, tensors in exact.items()}
    floor["weight"] = [
        32 * UNIT * max(1.0, float(w.norm() / (w - s).norm())) for w, s in zip(exact["weight"], start, strict=True)
    ]
    if kind == "precision":
        plain = errors(workload, trained(workload, "bfloat16")[0])
        floor = {key: [2.0**-9 + value for value in values] for key, values in floor.items()}  # bfloat16's roundoff
    times = 3 if kind == "precision" else 4
    found = {key: [times * a + b for a, b in zip(plain[key], floor[key], strict=True)] for key in plain}
    if kind == "trade":
        coded = {"weight": 0.02, "exp_avg": 0.03, "exp_avg_sq": 0.03, "gradient": 5e-4, "loss": 2e-5}
        found = {key: [value + coded[key] for value in values] for key, values in found.items()}
    return found


def assert_within(workload: str, kind: str, got: dict[str, list[Tensor]]) -> None:
    allowed = bounds(workload, kind)
    off = [
        f"{key} {number} of {workload} is off by {error:.2g} of its size, allowed {bound:.2g}"
        for key, values in errors(workload, got).items()
        for number, (error, bound) in enumerate(zip(values, allowed[key], strict=True))
        if not error <= bound
    ]
    assert not off, "; ".join(off)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = process()
    yield
    after = process()
    before.pop("random"), after.pop("random")
    assert after == before
