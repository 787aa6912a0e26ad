"""What backward keeps, and images that change their layout."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ...base import format_size
from ..finding import Finding
from ..recorder import Fact, Op
from .step import MIB, POINTWISE, Step, places, rule, severity


@rule
def activation_memory(step: Step) -> Iterator[Finding]:
    """Blocks that keep most of what backward needs."""
    total = sum(step.saved.values())
    weights = sum(p.numel() * p.element_size() for p in step.model.parameters())
    if total < 64 * MIB or total < 4 * weights:
        return
    owners: dict[str, int] = {}
    for name, module in step.model.named_modules():
        if name and any(True for _ in module.children()) and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            held = sum(b for n, b in step.saved.items() if n is not None and (n == name or n.startswith(name + ".")))
            if 0.02 * total <= held <= 0.6 * total and not any(name.startswith(f"{o}.") for o in owners):
                owners[name] = held
    blocks = sorted(owners, key=lambda n: -owners[n])
    if len(blocks) < 2:
        return
    yield Finding(
        "activation_memory",
        "info",
        tuple(blocks),
        f"These blocks keep {format_size(sum(owners.values()))} of the {format_size(total)} that backward needs.",
        "Memory for activations grows with the batch; it is what limits the batch here, not the weights.",
        {"kept": format_size(total), "weights": format_size(weights), "largest_block": format_size(owners[blocks[0]])},
        "Where memory is short: apply 'checkpoint:NAME' to these blocks. Each then keeps its input alone and runs "
        "forward twice, with the same gradients bit for bit.",
    )


@rule
def layout_flips(step: Step) -> Iterator[Finding]:
    """Images that change their memory layout between convolutions."""
    convolutions = [op for op in step.recorder.forward if "convolution" in op.name and _images(op.inputs[:1])]
    if not convolutions:
        return
    around = POINTWISE | {"relu", "relu_", "gelu", "silu", "native_layer_norm", "native_batch_norm", "addmm", "mm"}
    flips = []
    for op in step.recorder.forward:
        if op.name not in ("clone", "copy_", "_to_copy") or not _images(op.inputs[:1]) or not _images(op.outputs[:1]):
            continue
        before, after = op.inputs[0].layout, op.outputs[0].layout
        if before == after or "any" in (before, after):
            continue
        is_conv = lambda o: "convolution" in o.name  # noqa: E731
        if step.up(op, is_conv, around) or step.down(op, is_conv, around):
            flips.append(op)
    mixed = [
        op
        for op in convolutions
        if op.inputs[0].layout in ("nhwc", "other")
        and _images(op.inputs[1:2])
        and op.inputs[1].layout == "nchw"
        and _is_flipped(step, op)
    ]
    if flips or mixed:
        share = step.share(flips)
        yield Finding(
            "layout_flips",
            severity(share) if flips else "low",
            places([*flips, *mixed]),
            f"{len(flips)} copies and {len(mixed)} convolutions change the layout of images between NCHW and NHWC.",
            "A permute before or behind a convolution leaves its neighbours a layout that is not theirs, and each "
            "change moves every element.",
            {
                "copies": len(flips),
                "convolutions_with_other_layout": len(mixed),
                "bytes": format_size(
                    sum(op.outputs[0].numel * op.outputs[0].dtype.itemsize for op in (*flips, *mixed))
                ),
                "line": (flips or mixed)[0].source,
            },
            "Hold model and images in channels_last (apply 'channels_last'), where permute(0, 2, 3, 1) is free; and "
            "drop .contiguous() behind a permute.",
            share,
        )


def _images(facts: list[Fact]) -> bool:
    return len(facts) == 1 and len(facts[0].shape) == 4 and facts[0].dtype.is_floating_point


def _is_flipped(step: Step, op: Op) -> bool:
    """Whether the other layout was made inside the model, by something that is no convolution."""
    return any(not p.name.startswith("convolution") for p in step.parents(op)) and any(
        other.inputs[0].layout == "nchw" for other in step.recorder.forward if "convolution" in other.name
    )
