"""Attention that does not run on a fused kernel."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...base import format_size
from ..finding import Finding
from ..recorder import Op
from .step import DROPOUTS, POINTWISE, Step, fastest, places, rule, severity

_PRODUCTS = {"bmm", "mm", "matmul", "baddbmm", "addmm"}


@rule
def unfused_attention(step: Step) -> Iterator[Finding]:
    """softmax(QK^T)V as separate operators."""
    by_kind: dict[str, list[tuple[Op, list[Op]]]] = defaultdict(list)
    for op in step.recorder.forward:
        if op.name not in ("_softmax", "_safe_softmax"):
            continue
        scores = step.up(op, lambda o: o.name in _PRODUCTS, POINTWISE)
        mixed = step.down(op, lambda o: o.name in _PRODUCTS, POINTWISE)
        if scores is None or mixed is None or len(op.outputs[0].shape) < 3 or scores.name in ("mm", "addmm"):
            continue
        module = step.module(op.module)
        kind = "math" if op.name == "_safe_softmax" else "weights" if _is_attention(module) else "hand"
        between = [o for o in step.recorder.forward if scores.index <= o.index <= mixed.index and o.module == op.module]
        by_kind[kind].append((op, between))
    for kind, found in by_kind.items():
        softmaxes = [op for op, _ in found]
        ops = [o for _, between in found for o in between]
        share = step.share(ops)
        first = softmaxes[0]
        matrix = sum(op.outputs[0].numel * op.outputs[0].dtype.itemsize for op in softmaxes)
        what, do = {
            "hand": (
                "Attention is written as product, softmax and product.",
                "Call torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=..., is_causal=...); the "
                "same function within rounding.",
            ),
            "weights": (
                "nn.MultiheadAttention returns its weights, and then is not fused.",
                "Pass need_weights=False where the weights are not used.",
            ),
            "math": (
                "scaled_dot_product_attention fell back to separate operators: " + _math_reason(found[0]),
                "Remove the cause named; torch.nn.attention.sdpa_kernel(...) raises where a kernel is refused and "
                "says why.",
            ),
        }[kind]
        yield Finding(
            "unfused_attention",
            severity(share),
            places(softmaxes),
            what,
            "The matrix of all pairs is written to memory and kept for backward.",
            {
                "calls": len(found),
                "pairs_matrices": format_size(matrix),
                "line": first.source,
                "operators": len(ops),
            },
            do,
            share,
            _attention_gain(found[0]) if kind == "hand" else None,
        )


def _is_attention(module: nn.Module | None) -> bool:
    return isinstance(module, nn.MultiheadAttention)


def _math_reason(found: tuple[Op, list[Op]]) -> str:
    softmax, between = found
    scores = between[0]
    masks = [f for o in between for f in o.inputs if o.name == "add" and f.requires_grad]
    reasons = []
    if any(o.name in DROPOUTS for o in between):
        reasons.append("dropout_p above 0 is not fused on a CPU" if scores.inputs[0].device == "cpu" else "dropout_p")
    if masks and any(f.shape == softmax.outputs[0].shape[-len(f.shape) :] for f in masks if len(f.shape) < 4):
        reasons.append("attn_mask needs a gradient")
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        reasons.append("flash attention is switched off")
    dtype = scores.inputs[0].dtype
    if dtype == torch.float64 and scores.inputs[0].device != "cpu":
        reasons.append("float64 has no fused kernel")
    if softmax.outputs[0].shape[-2:] and len(softmax.outputs[0].shape) == 3:
        reasons.append("q, k and v have three dimensions; four are wanted (batch, heads, length, width)")
    return "; ".join(reasons) + "." if reasons else "the kernels refused these shapes, masks or layouts."


def _attention_gain(found: tuple[Op, list[Op]]) -> float | None:
    softmax, between = found
    shape = softmax.outputs[0].shape
    fact = next((o.inputs[0] for o in between if o.name in _PRODUCTS), None)
    if fact is None or len(shape) < 3 or fact.numel > 1 << 24:
        return None
    lead = math.prod(shape[:-2])
    width = fact.shape[-1]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, lead, n, width, generator=generator).to(fact.device, fact.dtype)
        for n in (shape[-2], shape[-1], shape[-1])
    )

    def by_hand() -> Tensor:
        return (q @ k.transpose(-1, -2) / math.sqrt(width)).softmax(-1) @ v

    with torch.no_grad():
        return fastest(by_hand, fact.device) / fastest(lambda: F.scaled_dot_product_attention(q, k, v), fact.device)
