"""Elementwise operators that are written out, or without effect."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from ..finding import Finding
from ..recorder import Op
from .step import DROPOUTS, Step, places, rule, severity


@rule
def dropout(step: Step) -> Iterator[Finding]:
    """Dropout on dropout, and dropout in evaluation mode."""
    dropped = {op.index for op in step.recorder.forward if _is_dropout(step, op)}
    twice = [op for op in step.recorder.forward if op.index in dropped and dropped & set(op.parents)]
    if twice:
        share = step.share(twice)
        yield Finding(
            "dropout",
            "low",
            places(twice),
            f"{len(twice)} dropouts take their input straight from another dropout.",
            "Two in a row drop what one with p = 1 - (1 - p1)(1 - p2) drops, at twice the random numbers and passes.",
            {"dropouts": len(twice), "line": twice[0].source},
            "Keep one of them, with that p where the rate is meant.",
            share,
        )
    random = [op for op in step.inference.forward if op.name in DROPOUTS] if step.inference is not None else []
    if random:
        yield Finding(
            "dropout",
            "high",
            places(random),
            "Dropout is at work in evaluation mode.",
            "Predictions are then random. torch.nn.functional.dropout drops unless it is told training=False.",
            {"operators": len(random), "line": random[0].source},
            "Pass training=self.training, or use nn.Dropout.",
        )


def _is_dropout(step: Step, op: Op) -> bool:
    """Whether the operator gives what a dropout gives; on a CPU it is a product with a drawn mask."""
    drawn = {"div_", "bernoulli_"}
    return op.name == "native_dropout" or (
        op.name in ("mul", "mul_") and any(p.name in drawn and _draws(step, p) for p in step.parents(op))
    )


def _draws(step: Step, op: Op) -> bool:
    return op.name == "bernoulli_" or any(p.name == "bernoulli_" for p in step.parents(op))


@rule
def unfused_pointwise(step: Step) -> Iterator[Finding]:
    """GELU and layer normalisation written out; torch has each as one operator, the same function within rounding."""
    chains: dict[str, list[tuple[Op, list[Op]]]] = defaultdict(list)
    for op in step.recorder.forward:
        module = step.module(op.module)
        if module is not None and type(module).__module__.startswith("torch."):
            continue
        kind = _written_out(step, op)
        if kind is not None:
            near = [o for o in step.recorder.forward if abs(o.index - op.index) <= 10 and o.source == op.source]
            chains[kind].append((op, near))
    for kind, found in chains.items():
        heads = [op for op, _ in found]
        ops = {o.index: o for _, near in found for o in near}
        share = step.share(ops.values())
        yield Finding(
            "unfused_pointwise",
            severity(share),
            places(heads),
            f"{kind.partition('(')[0].rpartition('.')[2]} is written out in {len(found)} places.",
            "Every operator reads and writes the whole tensor and keeps it for backward; one operator does it once.",
            {
                "places": len(found),
                "operators": len(ops),
                "elements": heads[0].inputs[0].numel,
                "line": heads[0].source,
            },
            f"Call torch.nn.functional.{kind}: the same function within rounding.",
            share,
        )


def _written_out(step: Step, op: Op) -> str | None:
    scaled = {"mul", "div", "add"}
    if op.name == "erf" and step.down(op, lambda o: o.name == "mul", scaled):
        return "gelu(x)"
    if op.name == "tanh" and step.up(op, lambda o: o.name == "pow" and 3 in o.args, scaled):
        return "gelu(x, approximate='tanh')"
    if op.name in ("rsqrt", "sqrt", "std"):
        spread = (
            op
            if op.name == "std"
            else step.up(op, lambda o: o.name == "var" or (o.name == "mean" and bool(step.up(o, _squares, {}))), scaled)
        )
        used = step.down(op, lambda o: o.name in ("mul", "div"), scaled)
        if spread is not None and used is not None and _over_last(spread) and _centred(step, used):
            return "layer_norm(x, x.shape[-1:], weight, bias, eps)"
    return None


def _squares(op: Op) -> bool:
    return op.name == "pow" and 2 in op.args


def _over_last(op: Op) -> bool:
    before, after = op.inputs[0].shape, op.outputs[0].shape
    return len(before) >= 2 and math.prod(before[:-1]) == math.prod(after) and math.prod(after) > 1


def _centred(step: Step, op: Op) -> bool:
    """Whether a mean was subtracted from what is scaled; without it is RMS normalisation."""
    return (
        step.up(op, lambda o: o.name == "sub" and bool(step.up(o, lambda m: m.name == "mean", ())), {"mul"}) is not None
    )
