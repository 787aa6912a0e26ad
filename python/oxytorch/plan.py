"""`oxytorch plan`: what a training step takes in memory, and what it would cost to fit it to less."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ._C.memory import budget_bytes
from .base import format_duration, format_size
from .bench.step import made_by, step_of, training_step
from .memory import MemoryPlan, available_bytes, fit, will_it_fit
from .memory.fit import device_of
from .memory.pack import Format
from .monitor import Bar, Report
from .report import write_whole
from .tune.run import resized

if TYPE_CHECKING:
    from .cli import Commands

__all__ = ["add_command"]

SCHEMA = "oxytorch-plan/1"
POINTS = 9  # of the curve
_PLENTY = 1 << 62


def add_command(commands: Commands) -> None:
    """Add `plan` to the command."""
    parser = commands.add_parser(
        "plan",
        help="what a training step takes in memory, and what it costs to fit it to less",
        description="Takes some training steps on the CPU, and prints what their tensors take, whether that fits, and "
        "what running blocks of the model again in backward, or packing what they save, would bring and cost. Exit "
        "status: 0 the step fits (in every --budget and with every --batch that is given), 1 it does not, 2 bad usage.",
    )
    parser.add_argument(
        "subject",
        metavar="SCRIPT_OR_MODULE:FUNCTION",
        help="a function that returns (model, optimizer, loss_fn, batches) or (model, step)",
    )
    parser.add_argument(
        "--budget",
        action="append",
        default=[],
        metavar="SIZE",
        help="fit to 900MiB, or to 50%% of memory; may be repeated",
    )
    parser.add_argument(
        "--batch",
        action="append",
        default=[],
        type=_samples,
        metavar="N",
        help="tell whether a step with N samples would fit, from steps with small batches; may be repeated",
    )
    parser.add_argument(
        "--format",
        action="append",
        default=[],
        choices=("bf16", "int8", "file"),
        help="let saved tensors be kept like this too; bf16 and int8 round gradients, file writes to TMPDIR in each "
        "step; may be repeated",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads (torch's own number)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write plan.html there, with the curve as a plot")
    parser.set_defaults(run=_run)


def _samples(said: str) -> int:
    if not said.isdecimal() or int(said) < 1:
        raise argparse.ArgumentTypeError(f"{said!r} is no number of samples; give 1 or more")
    return int(said)


def _given(named: str) -> tuple[Any, ...]:
    """What the function of a script returns: (model, optimizer, loss_fn, batches) or (model, step)."""
    given = made_by(named)
    if isinstance(given, tuple) and len(given) in (2, 4) and isinstance(given[0], nn.Module):
        return given
    raise TypeError(
        f"{named} returned a {type(given).__name__}; (model, optimizer, loss_fn, batches) or (model, step) is needed, "
        "since blocks of the model are planned"
    )


def _bytes(tensors: Iterable[Any]) -> int:
    seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(seen.values())


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer | None, plan: MemoryPlan) -> dict[str, int]:
    """What the peak is made of; what is left when the rest is known is made in the step."""
    states = optimizer.state.values() if optimizer is not None else ()
    parts = {
        "parameters": _bytes(model.parameters()),
        "buffers": _bytes(model.buffers()),
        "optimizer state": _bytes(v for state in states for v in state.values() if isinstance(v, torch.Tensor)),
    }
    return {**parts, "gradients, activations and the rest": plan.plain_peak - sum(parts.values())}


def _planned(model: nn.Module, step: Callable[[], Any], budget: str, formats: list[Format]) -> dict[str, Any]:
    try:
        with fit(model, step, budget, formats=formats) as plan:
            return {
                "budget": budget,
                "fits": True,
                "peak_bytes": plan.measured_peak,
                "step_seconds": plan.seconds,
                "plain_step_seconds": plan.plain_seconds,
                "full": list(plan.full),
                "selective": list(plan.selective),
                "packed": {format: list(names) for format, names in plan.packed.items()},
                "same_bits": plan.same_bits,
                "text": plan.table(),
            }
    except torch.OutOfMemoryError as error:
        return {"budget": budget, "fits": False, "text": str(error)}


def _forecast(named: str, given: tuple[Any, ...], samples: int) -> dict[str, Any]:
    """Whether a step with a batch of so many samples would fit: those of the first batch, over and over."""
    if len(given) != 4:
        raise TypeError(f"{named} returned (model, step); --batch needs (model, optimizer, loss_fn, batches)")
    *training, batches = given
    first = next(iter(batches))
    step = training_step(*training)
    told = will_it_fit(step, lambda count: resized(first, count), samples, device=device_of(given[0]))
    return {
        "samples": samples,
        "fits": told.fits,
        "bytes": told.bytes,
        "available_bytes": told.available,
        "text": str(told),
    }


def _measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], Report]:
    """Return the figures, and a page on what running blocks again or packing them would save."""
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    given = _given(arguments.subject)
    model, optimizer, step = given[0], given[1] if len(given) == 4 else None, step_of(arguments.subject, given)
    device = device_of(model)
    for budget in arguments.budget:
        budget_bytes(budget, device)  # refused before anything runs
    reach = available_bytes(device) + _bytes([*model.parameters(), *model.buffers()])
    step()  # makes the optimizer's state
    batches = [_forecast(arguments.subject, given, samples) for samples in arguments.batch]
    formats: list[Format] = ["lossless", *arguments.format]
    with fit(model, step, _PLENTY, formats=formats) as plan:
        parts = _parts(model, optimizer, plan)
        found = {
            "schema": SCHEMA,
            "subject": arguments.subject,
            "peak_bytes": plan.plain_peak,
            "floor_bytes": plan.floor,
            "reach_bytes": reach,
            "fits": plan.plain_peak <= reach,
            "parts": parts,
            "curve": [{"peak_bytes": peak, "added_seconds": seconds} for peak, seconds in plan.curve(POINTS)],
            "blocks": "\n".join(plan.table().splitlines()[:-1]),  # the last one is of the budget, which is none
            "budgets": [_planned(model, step, budget, formats) for budget in arguments.budget],
            "batches": batches,
        }
        return found, plan.report()


def _page(found: dict[str, Any], blocks: Report) -> Report:
    """Everything as one page."""
    page = Report(f"Memory of a training step: {found['subject']}")
    page.paragraph(_verdict(found))
    bars = [Bar(part, size / 2**20) for part, size in found["parts"].items()]
    page.bar_chart(bars, "What the peak is made of", "memory", "MiB")
    page.append(blocks)
    for one in found["budgets"]:
        page.heading(f"Fitted to {one['budget']}").preformatted(one["text"].strip())
    if found["batches"]:
        page.heading("Other batches, told from steps with small ones")
        for one in found["batches"]:
            page.paragraph(one["text"])
    return page


def _verdict(found: dict[str, Any]) -> str:
    verdict = "it fits." if found["fits"] else "it does not fit."
    return (
        f"A step's tensors take {format_size(found['peak_bytes'])} at the most. This process can reach "
        f"{format_size(found['reach_bytes'])}: {verdict}"
    )


def _text(found: dict[str, Any]) -> str:
    peak = found["peak_bytes"]
    lines = [
        _verdict(found),
        "",
        *(f"  {part:<36} {format_size(size)}" for part, size in found["parts"].items()),
        "",
        found["blocks"].strip(),
        "",
        "Budgets that could be kept, and what they would add to a step, predicted:",
    ]
    for point in found["curve"]:
        share = f"{point['peak_bytes'] / peak:.0%}"
        added = format_duration(point["added_seconds"])
        lines.append(f"  {format_size(point['peak_bytes']):>10}  {share:>5}  + {added}")
    for one in found["budgets"]:
        lines += ["", f"Fitted to {one['budget']}:", one["text"].strip()]
    if found["batches"]:
        lines += ["", "Other batches, told from steps with small ones:"]
        lines += [f"  {one['text']}" for one in found["batches"]]
    return "\n".join(lines)


def _run(arguments: argparse.Namespace) -> int:
    try:
        found, blocks = _measure(arguments)
        if arguments.out is not None:
            path = write_whole(arguments.out / "plan.html", _page(found, blocks).to_html())
            print(f"Report: {path}", file=sys.stderr)
    except (TypeError, ValueError, AttributeError, OSError, ImportError) as error:
        print(f"oxytorch plan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1) if arguments.json else _text(found))
    return 0 if found["fits"] and all(one["fits"] for one in [*found["budgets"], *found["batches"]]) else 1
