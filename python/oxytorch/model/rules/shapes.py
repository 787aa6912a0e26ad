"""Shapes and dtypes that the hardware multiplies slowly."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from ..finding import Finding
from ..recorder import Op
from .step import Step, fastest, places, rule, severity

_WIDE = 64  # below it a dimension is a number of classes or colours, not of features


def _up(size: int, grid: int) -> int:
    return -(-size // grid) * grid


@rule
def off_grid_shape(step: Step) -> Iterator[Finding]:
    """Wide dimensions that are no multiple of 8, and attention heads that are none."""
    for op in step.recorder.forward:
        module = step.module(op.module)
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or op.call != 1 or not op.outputs:
            continue
        if op.name not in ("addmm", "mm", "bmm", "convolution", "mkldnn_convolution"):
            continue
        if isinstance(module, nn.Linear):
            sizes = {"in_features": module.in_features, "out_features": module.out_features}
        else:
            sizes = {"in_channels": module.in_channels, "out_channels": module.out_channels}
        off = {name: size for name, size in sizes.items() if size >= _WIDE and size % 8}
        share = step.share([op])
        if not off:
            continue
        gain = _padded_gain(module, op) if isinstance(module, nn.Linear) else None
        padded = ", ".join(f"{name} {_up(size, 8)} (or {_up(size, 64)})" for name, size in off.items())
        yield Finding(
            "off_grid_shape",
            severity(share) if share >= 0.01 and (gain is None or gain > 1.02) else "info",
            (op.module or "",),
            f"{type(module).__name__} has {', '.join(f'{n}={s}' for n, s in off.items())}.",
            "Tensor cores take 16-bit tiles of multiples of 8 elements, best of 64; vector units of 16 floats. What "
            "is off falls back to slower kernels or is padded in each call.",
            {**off, "measured_here": "forward of this layer, as it is against padded" if gain else "share only"},
            f"Pad to {padded}; padded rows of a vocabulary never occur as targets and are masked in the logits.",
            share,
            gain,
        )
    seen = set()
    for op in step.recorder.forward:
        if "scaled_dot_product" not in op.name or not op.inputs:
            continue
        width = op.inputs[0].shape[-1]
        if width % 8 and op.module not in seen:
            seen.add(op.module)
            share = step.share([op])
            yield Finding(
                "off_grid_shape",
                "low" if share < 0.05 else "medium",
                places([op]),
                f"An attention head has {width} elements.",
                "Fused attention wants a multiple of 8; others are padded in each call, or are not fused.",
                {"head_width": width, "heads": op.inputs[0].shape[1] if len(op.inputs[0].shape) == 4 else 1},
                f"Choose width and number of heads so that a head has {_up(width, 8)} elements.",
                share,
            )


def _padded_gain(module: nn.Linear, op: Op) -> float | None:
    rows = math.prod(op.outputs[0].shape[:-1])
    weight = module.weight
    if rows * max(weight.shape) > 1 << 27:
        return None
    generator = torch.Generator().manual_seed(0)

    def seconds(out: int, width: int) -> float:
        left = torch.randn(rows, width, generator=generator).to(weight)
        right = torch.randn(out, width, generator=generator).to(weight)
        return fastest(lambda: F.linear(left, right), weight.device.type)

    return seconds(*weight.shape) / seconds(_up(weight.shape[0], 8), _up(weight.shape[1], 8))


@rule
def float64_leak(step: Step) -> Iterator[Finding]:
    """Arithmetic in float64 in a model that is not."""
    if any(p.dtype == torch.float64 for p in step.model.parameters()):
        return
    wide = [
        op
        for op in step.recorder.ops
        if not op.is_view and any(f.dtype == torch.float64 and f.numel > 1 for f in op.outputs)
    ]
    if not wide:
        return
    first = wide[0]
    share = sum(op.seconds for op in wide) / step.recorder.seconds if step.recorder.seconds else 0.0
    yield Finding(
        "float64_leak",
        "high" if share >= 0.05 else "medium",
        places([first]),
        f"{first.name} made float64 of {', '.join(sorted({str(f.dtype) for f in first.inputs})) or 'nothing'}.",
        "float64 runs at half the speed of float32 on a CPU, at a small fraction of it on most GPUs, and spreads to "
        "whatever it meets.",
        {"operators_in_float64": len(wide), "line": first.source, "modules": len(places(wide))},
        "Give the constant or array dtype=torch.float32, or the tensor's own dtype; numpy's default is float64.",
        share,
    )
