"""Parameters that cost more than they train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...base import format_size
from ..finding import Finding
from .step import MIB, Step, fastest, rule, severity


@rule
def tiny_parameters(step: Step) -> Iterator[Finding]:
    """So many small parameters that the optimizer's launches show in the step."""
    params = [p for p in step.model.parameters() if p.requires_grad]
    tiny = [p for p in params if p.numel() <= 4096]
    if len(tiny) < 64 or len(tiny) * 2 < len(params) or sum(p.numel() for p in params) > 1 << 26:
        return
    copies = [p.detach().clone() for p in params]
    flat = torch.cat([p.flatten().float() for p in copies])

    def optimizer(tensors: list[Tensor]) -> Callable[[], Any]:
        leaves = [nn.Parameter(t) for t in tensors]
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        return torch.optim.AdamW(leaves).step

    many, one = fastest(optimizer(copies)), fastest(optimizer([flat]))
    share = (many - one) / (step.seconds + many)
    if share < 0.05:
        return
    names = tuple(name for name, p in step.model.named_parameters() if p.requires_grad and p.numel() <= 4096)
    yield Finding(
        "tiny_parameters",
        severity(share),
        names,
        f"{len(tiny)} of {len(params)} parameters have at most 4,096 elements.",
        "The optimizer spends its time per tensor, not per element.",
        {
            "adamw_seconds": many,
            "adamw_seconds_as_one_tensor": one,
            "step_seconds": step.seconds,
        },
        "Hold them in one parameter and take views of it, or use an optimizer of oxytorch.optim, whose step is one "
        "native call over all tensors.",
        share,
        many / one,
    )


@rule
def unused_parameters(step: Step) -> Iterator[Finding]:
    """Parameters that no operator read."""
    if not step.has_backward:
        return
    unused = tuple(n for n, p in step.model.named_parameters() if n not in step.used and p.requires_grad)
    if unused:
        sizes = dict(step.model.named_parameters())
        held = sum(sizes[n].numel() * sizes[n].element_size() for n in unused)
        yield Finding(
            "unused_parameters",
            "medium",
            unused,
            f"{len(unused)} parameters took no part in forward.",
            "They cost memory, four times over with AdamW's state and a gradient, and make DistributedDataParallel "
            "wait or fail unless find_unused_parameters is set.",
            {"parameters": sum(sizes[n].numel() for n in unused), "bytes": format_size(held)},
            "Remove them, or use them; if another kind of example uses them, this is no fault.",
        )


@rule
def no_gradient(step: Step) -> Iterator[Finding]:
    """Parameters that forward read and no gradient reached."""
    if not step.has_backward:
        return
    lost = tuple(n for n in dict(step.model.named_parameters()) if n in step.used and n in step.without_grad)
    if lost:
        yield Finding(
            "no_gradient",
            "high",
            lost,
            f"{len(lost)} parameters were used, and backward left them without a gradient.",
            "Something between them and the loss cuts the graph: detach(), no_grad, an argmax, a copy through numpy, "
            "or an output that the loss does not read. They will not train.",
            {"without_gradient": len(lost), "with": len(step.used) - len(lost)},
            "Look at what their modules' outputs pass on the way to the loss; where they are frozen on purpose, say "
            "requires_grad_(False).",
        )


@rule
def embedding_gradient(step: Step) -> Iterator[Finding]:
    """Embeddings whose dense gradient is nearly all zeros, or whose sparse one few optimizers take."""
    for name, module in step.model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        full = f"{name}.weight".lstrip(".")
        if full in step.sparse:
            yield Finding(
                "embedding_gradient",
                "info",
                (name,),
                "This embedding makes sparse gradients.",
                "torch's SGD, SparseAdam and Adagrad take them; AdamW, clip_grad_norm_ with foreach, gradient scaling "
                "and the step tail do not.",
                {"rows": module.num_embeddings},
                "Keep it where the optimizer fits; else sparse=False.",
            )
        touched, rows = step.rows.get(full, (0, 0))
        size = rows * module.embedding_dim * module.weight.element_size()
        if rows and touched * 50 < rows and size >= 16 * MIB:
            ops = [o for o in step.recorder.ops if "embedding_dense_backward" in o.name and o.module == name]
            share = sum(op.seconds for op in ops) / step.recorder.seconds
            yield Finding(
                "embedding_gradient",
                severity(share),
                (name,),
                f"The gradient of {rows} rows is dense, and {touched} of them are not zero.",
                "Backward writes, and the optimizer reads and updates, every row in every step.",
                {"rows": rows, "rows_with_gradient": touched, "gradient": format_size(size)},
                "sparse=True with torch.optim.SparseAdam or SGD for this parameter. It changes the optimizer: rows "
                "without a gradient are then left alone, where AdamW decays and moves them.",
                share,
            )
