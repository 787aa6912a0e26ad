"""Normalisation layers that undo or lack something."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor, nn

from ..finding import Finding
from ..recorder import Op
from .step import Step, places, rule

_WEIGHTED = (nn.Linear, nn.modules.conv._ConvNd)


def norms_after(step: Step) -> Iterator[tuple[Op, Op]]:
    """(weighted operator, batch or instance normalisation fed by it alone), in the order that really ran."""
    for op in step.recorder.forward:
        if "batch_norm" not in op.name or not op.parents:
            continue
        source = next((p for p in step.parents(op) if op.inputs and p.outputs and op.inputs[0].key in
                       {fact.key for fact in p.outputs}), None)  # fmt: skip
        if source is None or not isinstance(step.module(source.module), _WEIGHTED):
            continue
        readers = {child for child in source.children if not step.recorder.ops[child].backward}
        if all(step.recorder.ops[child].is_view or child == op.index for child in readers):
            yield source, op


@rule
def bias_before_norm(step: Step) -> Iterator[Finding]:
    """A bias that the normalisation behind it subtracts again."""
    found: list[tuple[Op, Op, Tensor]] = []
    for source, norm in norms_after(step):
        module, behind = step.module(source.module), step.module(norm.module)
        bias = getattr(module, "bias", None)
        uses_batch = isinstance(behind, nn.modules.batchnorm._BatchNorm) and (
            behind.training or not behind.track_running_stats
        )
        instance = isinstance(behind, nn.modules.instancenorm._InstanceNorm) and not behind.track_running_stats
        if bias is not None and (uses_batch or instance):
            found.append((source, norm, bias))
    if found:
        count = sum(bias.numel() for *_, bias in found)
        ratios = [step.bias_ratio[s.module] for s, *_ in found if s.module in step.bias_ratio]
        yield Finding(
            "bias_before_norm",
            "low",
            places(source for source, *_ in found),
            f"{len(found)} layers add a bias right before a normalisation over the batch.",
            "The normalisation subtracts the mean, and the bias with it: it is computed, differentiated and updated to "
            "no effect on training.",
            {
                "biases": count,
                "before": ", ".join(norm.module or "" for _, norm, _ in found[:3]),
                **({"gradient_of_bias_over_weight": max(ratios)} if ratios else {}),
            },
            "Make these layers with bias=False, or apply 'drop_bias_before_norm', which moves the bias into the "
            "running mean.",
        )


@rule
def batch_norm_of_one(step: Step) -> Iterator[Finding]:
    """Batch normalisation over a batch of one."""
    found = [
        op
        for op in step.recorder.forward
        if "batch_norm" in op.name
        and isinstance(behind := step.module(op.module), nn.modules.batchnorm._BatchNorm)
        and behind.training
        and op.inputs[0].shape[0] == 1
    ]
    if found:
        yield Finding(
            "batch_norm_of_one",
            "medium",
            places(found),
            "Batch normalisation in training mode sees one sample.",
            "Its statistics are those of this sample alone, so training and evaluation compute different functions.",
            {"layers": len(found), "values_per_channel": math.prod(found[0].inputs[0].shape[2:])},
            "Take a larger batch, or GroupNorm, which does not look at the batch (a change of the model); with several "
            "processes, nn.SyncBatchNorm.",
        )
