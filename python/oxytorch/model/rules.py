"""The rules of advice: each reads one watched step and yields what it finds."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base import format_size
from .finding import Finding
from .watch import Fact, Op, Watch

_POINTWISE = {
    "mul", "mul_", "div", "div_", "add", "add_", "sub", "masked_fill", "masked_fill_", "where", "native_dropout",
    "bernoulli_", "_to_copy", "clone", "expand", "neg", "maximum", "copy_", "empty_like", "tanh", "unsqueeze",
}  # fmt: skip
_PRODUCTS = {"bmm", "mm", "matmul", "baddbmm", "addmm"}
_DROPOUTS = {"native_dropout", "bernoulli_"}
_SYNCS = {
    "_local_scalar_dense": "reads one value on the host (item, float, bool, if)",
    "nonzero": "makes a result whose size only the device knows (nonzero, a boolean mask as index)",
    "masked_select": "makes a result whose size only the device knows",
    "_unique2": "makes a result whose size only the device knows",
    "unique_dim": "makes a result whose size only the device knows",
    "repeat_interleave": "makes a result whose size only the device knows",
}
_MANY = 16  # repetitions from which a loop is one
_SMALL = 65_536  # elements below which an operator's time is mostly its launch
_WIDE = 64  # below it a dimension is a number of classes or colours, not of features
_MIB = 1 << 20


@dataclass
class Step:
    """What the rules read: a model, and what was seen of one step of it."""

    model: nn.Module
    watch: Watch
    seconds: float
    has_backward: bool
    inference: Watch | None = None
    saved: dict[str | None, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    without_grad: set[str] = field(default_factory=set)
    sparse: set[str] = field(default_factory=set)
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    bias_ratio: dict[str, float] = field(default_factory=dict)

    def module(self, name: str | None) -> nn.Module | None:
        """The module of a qualified name; None outside."""
        if name is None:
            return None
        try:
            return self.model.get_submodule(name)
        except AttributeError:
            return None

    def parents(self, op: Op) -> list[Op]:
        """Operators that made the inputs."""
        return [self.watch.ops[index] for index in op.parents]

    def up(self, op: Op, wanted: Callable[[Op], bool], through: Iterable[str]) -> Op | None:
        """Nearest ancestor that is wanted, over operators of the names in `through`."""
        waiting, seen = self.parents(op), {op.index}
        while waiting:
            found = waiting.pop(0)
            if found.index in seen or found.backward:
                continue
            seen.add(found.index)
            if wanted(found):
                return found
            if found.name in through:
                waiting += self.parents(found)
        return None

    def down(self, op: Op, wanted: Callable[[Op], bool], through: Iterable[str]) -> Op | None:
        """Nearest descendant that is wanted."""
        ops, waiting, seen = self.watch.ops, list(op.children), {op.index}
        while waiting:
            found = ops[waiting.pop(0)]
            if found.index in seen or found.backward:
                continue
            seen.add(found.index)
            if wanted(found):
                return found
            if found.name in through:
                waiting += found.children
        return None

    def share(self, ops: Iterable[Op]) -> float:
        """Share of the operators' time, with the backward of these."""
        return self.watch.share(list(ops))


Rule = Callable[[Step], Iterator[Finding]]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Register a rule under its function's name."""
    RULES[function.__name__] = function
    return function


def places(ops: Iterable[Op]) -> tuple[str, ...]:
    """Qualified names of the modules of operators, each once, in order."""
    return tuple(dict.fromkeys(op.module if op.module is not None else "(outside the model)" for op in ops))


def severity(share: float) -> str:
    """How severe a share of the step's time is."""
    return "high" if share >= 0.2 else "medium" if share >= 0.05 else "low"


def fastest(run: Callable[[], Any], device: str = "cpu") -> float:
    """Least seconds of some runs after a first one."""

    def once() -> float:
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    first = once()
    return min(once() for _ in range(min(20, max(3, int(0.02 / max(first, 1e-6))))))


# --- shapes ----------------------------------------------------------------------------------------------------------


def _up(size: int, grid: int) -> int:
    return -(-size // grid) * grid


@rule
def off_grid_shape(step: Step) -> Iterator[Finding]:
    """Wide dimensions that are no multiple of 8, and attention heads that are none."""
    for op in step.watch.forward:
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
    for op in step.watch.forward:
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


# --- normalisation ---------------------------------------------------------------------------------------------------

_WEIGHTED = (nn.Linear, nn.modules.conv._ConvNd)


def norms_after(step: Step) -> Iterator[tuple[Op, Op]]:
    """(weighted operator, batch or instance normalisation fed by it alone), in the order that really ran."""
    for op in step.watch.forward:
        if "batch_norm" not in op.name or not op.parents:
            continue
        source = next((p for p in step.parents(op) if op.inputs and p.outputs and op.inputs[0].key in
                       {fact.key for fact in p.outputs}), None)  # fmt: skip
        if source is None or not isinstance(step.module(source.module), _WEIGHTED):
            continue
        readers = {child for child in source.children if not step.watch.ops[child].backward}
        if all(step.watch.ops[child].is_view or child == op.index for child in readers):
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
        for op in step.watch.forward
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


# --- attention -------------------------------------------------------------------------------------------------------


@rule
def unfused_attention(step: Step) -> Iterator[Finding]:
    """softmax(QK^T)V as separate operators."""
    by_kind: dict[str, list[tuple[Op, list[Op]]]] = defaultdict(list)
    for op in step.watch.forward:
        if op.name not in ("_softmax", "_safe_softmax"):
            continue
        scores = step.up(op, lambda o: o.name in _PRODUCTS, _POINTWISE)
        mixed = step.down(op, lambda o: o.name in _PRODUCTS, _POINTWISE)
        if scores is None or mixed is None or len(op.outputs[0].shape) < 3 or scores.name in ("mm", "addmm"):
            continue
        module = step.module(op.module)
        kind = "math" if op.name == "_safe_softmax" else "weights" if _is_attention(module) else "hand"
        between = [o for o in step.watch.forward if scores.index <= o.index <= mixed.index and o.module == op.module]
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
    if any(o.name in _DROPOUTS for o in between):
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


# --- dtypes ----------------------------------------------------------------------------------------------------------


@rule
def float64_leak(step: Step) -> Iterator[Finding]:
    """Arithmetic in float64 in a model that is not."""
    if any(p.dtype == torch.float64 for p in step.model.parameters()):
        return
    wide = [
        op
        for op in step.watch.ops
        if not op.is_view and any(f.dtype == torch.float64 and f.numel > 1 for f in op.outputs)
    ]
    if not wide:
        return
    first = wide[0]
    share = sum(op.seconds for op in wide) / step.watch.seconds if step.watch.seconds else 0.0
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


# --- Python ----------------------------------------------------------------------------------------------------------


@rule
def python_loop(step: Step) -> Iterator[Finding]:
    """One module, or one line, run many times on little data."""
    inside: dict[str, list[Op]] = defaultdict(list)
    for op in step.watch.forward:
        if op.module is not None:
            inside[op.module].append(op)
    looped: list[str] = []
    for name, count in step.watch.calls.items():
        ops = [op for inner, found in inside.items() if inner == name or inner.startswith(f"{name}.") for op in found]
        if name == "" or count < _MANY or not ops or any(name.startswith(f"{outer}.") for outer in looped):
            continue
        sizes = sorted(max((f.numel for f in op.outputs), default=0) for op in ops)
        if sizes[len(sizes) // 2] > _SMALL:
            continue
        looped.append(name)
        share = step.share(ops)
        yield Finding(
            "python_loop",
            severity(share),
            (name,),
            f"{type(step.module(name)).__name__} ran {count} times in one forward.",
            "Each call launches its operators on little data, so most of the time is launching.",
            {"calls": count, "operators": len(ops), "median_elements": sizes[len(sizes) // 2]},
            "Give the module all steps in one tensor where they do not depend on each other; a recurrence as nn.LSTM "
            "or nn.GRU runs as one operator, and torch.compile fuses what stays a loop.",
            share,
        )
    lines: dict[tuple[str | None, int, str, str], list[Op]] = defaultdict(list)
    for op in step.watch.forward:
        module = step.module(op.module)
        own = module is not None and not type(module).__module__.startswith("torch.")
        if own and op.source and not op.is_view:
            lines[op.module, op.call, op.source, op.name].append(op)
    worst: dict[tuple[str | None, str], list[Op]] = {}
    for (place, _, source, _), ops in lines.items():
        run = _longest_run(ops)
        if len(run) >= _MANY and len(run) > len(worst.get((place, source), ())):
            worst[place, source] = run
    for (place, source), run in worst.items():
        sizes = sorted(max((f.numel for f in op.outputs), default=0) for op in run)
        if sizes[len(sizes) // 2] > _SMALL or any((place or "").startswith(outer) for outer in looped):
            continue
        between = [op for op in step.watch.forward if run[0].index <= op.index <= run[-1].index]
        share = step.share(between)
        yield Finding(
            "python_loop",
            severity(share),
            (place or "",),
            f"One line ran {run[0].name} {len(run)} times in one call of its module.",
            "Each turn of the loop launches its operators on little data, so most of the time is launching.",
            {"turns": len(run), "operators": len(between), "line": source, "median_elements": sizes[len(sizes) // 2]},
            "Stack the tensors and run the operator once over all of them (torch.stack, einsum, scan-like cumsum).",
            share,
        )


def _longest_run(ops: list[Op]) -> list[Op]:
    """The most operators in a row with no module entered between two: a stack of layers is no loop."""
    best: list[Op] = []
    run: list[Op] = []
    for op in ops:
        run = [*run, op] if run and run[-1].entries == op.entries else [op]
        best = max(best, run, key=len)
    return best


@rule
def hidden_sync(step: Step) -> Iterator[Finding]:
    """Values read on the host, and shapes that depend on values."""
    found: dict[tuple[str, str | None, str, bool], list[Op | None]] = defaultdict(list)
    for op in step.watch.ops:
        crosses = op.name in ("_to_copy", "copy_") and {f.device for f in (*op.inputs, *op.outputs)} > {"cpu"}
        masks = op.name == "index" and any(f.dtype in (torch.bool, torch.uint8) for f in op.inputs[1:])
        if op.name in _SYNCS or crosses or masks:
            kind = "nonzero" if masks else "copy to the host" if crosses else op.name
            found[kind, op.module, op.source, op.backward].append(op)
    for name, module, source in step.watch.reads:
        found[name, module, source, False].append(None)
    for (kind, module, source, backward), hits in found.items():
        ops = [op for op in hits if op is not None]
        on_cpu = all(p.device.type == "cpu" for p in step.model.parameters())
        yield Finding(
            "hidden_sync",
            "medium" if not on_cpu else "low",
            (module if module is not None else "(outside the model)",),
            f"{'Backward' if backward else 'Forward'} {_SYNCS.get(kind, 'hands values to Python')}, "
            f"{len(hits)} times a step.",
            "On an accelerator the host then waits for all queued work, and no graph of the step can be recorded. "
            + ("The model is on a CPU now, where it costs only its own time." if on_cpu else ""),
            {"operator": kind, "times": len(hits), "line": source},
            "Keep the value a tensor: torch.where for a branch, masks multiplied in for boolean indexing, logging of "
            "detached tensors after the step.",
            step.share(ops) if ops else None,
        )


# --- parameters ------------------------------------------------------------------------------------------------------


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
        if rows and touched * 50 < rows and size >= 16 * _MIB:
            ops = [o for o in step.watch.ops if "embedding_dense_backward" in o.name and o.module == name]
            share = sum(op.seconds for op in ops) / step.watch.seconds
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


# --- memory and layout -----------------------------------------------------------------------------------------------


@rule
def activation_memory(step: Step) -> Iterator[Finding]:
    """Blocks that keep most of what backward needs."""
    total = sum(step.saved.values())
    weights = sum(p.numel() * p.element_size() for p in step.model.parameters())
    if total < 64 * _MIB or total < 4 * weights:
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
    convolutions = [op for op in step.watch.forward if "convolution" in op.name and _images(op.inputs[:1])]
    if not convolutions:
        return
    around = _POINTWISE | {"relu", "relu_", "gelu", "silu", "native_layer_norm", "native_batch_norm", "addmm", "mm"}
    flips = []
    for op in step.watch.forward:
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
        other.inputs[0].layout == "nchw" for other in step.watch.forward if "convolution" in other.name
    )


# --- what runs and has no effect, or the wrong one -------------------------------------------------------------------


@rule
def dropout(step: Step) -> Iterator[Finding]:
    """Dropout on dropout, and dropout in evaluation mode."""
    dropped = {op.index for op in step.watch.forward if _is_dropout(step, op)}
    twice = [op for op in step.watch.forward if op.index in dropped and dropped & set(op.parents)]
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
    random = [op for op in step.inference.forward if op.name in _DROPOUTS] if step.inference is not None else []
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
    for op in step.watch.forward:
        module = step.module(op.module)
        if module is not None and type(module).__module__.startswith("torch."):
            continue
        kind = _written_out(step, op)
        if kind is not None:
            near = [o for o in step.watch.forward if abs(o.index - op.index) <= 10 and o.source == op.source]
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
