"""Time that Python takes, and waits that it forces on a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from ..finding import Finding
from ..recorder import Op
from .step import Step, rule, severity

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


@rule
def python_loop(step: Step) -> Iterator[Finding]:
    """One module, or one line, run many times on little data."""
    inside: dict[str, list[Op]] = defaultdict(list)
    for op in step.recorder.forward:
        if op.module is not None:
            inside[op.module].append(op)
    looped: list[str] = []
    for name, count in step.recorder.calls.items():
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
    for op in step.recorder.forward:
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
        between = [op for op in step.recorder.forward if run[0].index <= op.index <= run[-1].index]
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
    for op in step.recorder.ops:
        crosses = op.name in ("_to_copy", "copy_") and {f.device for f in (*op.inputs, *op.outputs)} > {"cpu"}
        masks = op.name == "index" and any(f.dtype in (torch.bool, torch.uint8) for f in op.inputs[1:])
        if op.name in _SYNCS or crosses or masks:
            kind = "nonzero" if masks else "copy to the host" if crosses else op.name
            found[kind, op.module, op.source, op.backward].append(op)
    for name, module, source in step.recorder.reads:
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
