"""Races a step under a memory budget against the ways to checkpoint that torch has, at the same measured peak.

The models are those of _memory_models.py, and train by AdamW. Rivals: `plain` keeps everything; `per layer` puts every
block under torch.utils.checkpoint (use_reentrant=False); `selective` does so and keeps the results of matrix products,
convolutions, recurrences and attention; `sequential` is torch.utils.checkpoint.checkpoint_sequential over the blocks at
the number of segments that has the lowest peak, where the blocks are a chain. Ours is oxytorch.memory.fit, once with
the peak of each rival as its budget, and once with budgets of 60 and 40 % of what activations take, and the least; of
the last two also with a `file` for what blocks save, in /var/tmp or TMPDIR.

With --compile the model under torch.compile takes part too, as it is and with torch._functorch.config's
activation_memory_budget at 0.6, 0.4 and 0.2 of what it would keep: minutes of compiling for each model. Its buffers are
tensors of torch's allocator, so that the meter counts them; it does not see scratch of its kernels within a thread.

Every contender has a model of its own with the same weights, takes its turns in a random order each round, and has the
same number of threads. Peaks are those of tensors, exact, by oxytorch.memory.Meter.

    python bench/race/memory.py [--threads 2] [--starts 4] [--seconds 3] [--quick] [--compile] [--case NAME]...
        [--keep PATH] [--json PATH]

Ratios are paired by round, a start counts by its median, and intervals hold 95%. Prints the ratios, and writes
bench/report/memory.{json,html}.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import oxytorch as ox
import torch
from _memory_models import TASKS, Chain, made
from _race import (
    MOST_ROUNDS,
    Contender,
    Measured,
    add_options,
    all_starts,
    facts,
    is_wanted,
    new_report,
    over_starts,
    progress,
    race,
    ratio,
    text,
    write,
)
from oxytorch.memory.pack import Format
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SCHEMA = "oxytorch-memory/1"
PLAIN, LAYERS, SELECTIVE, SEQUENTIAL = "plain", "per layer", "selective", "sequential"
RIVALS = (LAYERS, SELECTIVE, SEQUENTIAL)
LEAST, LEAST_IN_FILE = "fit least", "fit least, file"
# Shares of the activations of a plain step, and formats for saved tensors.
OURS: dict[str, tuple[float, tuple[Format, ...]]] = {
    "fit 60 %": (0.6, ("lossless",)),
    "fit 40 %": (0.4, ("lossless",)),
    "fit 40 %, file": (0.4, ("lossless", "file")),
    LEAST: (0.0, ("lossless",)),
    LEAST_IN_FILE: (0.0, ("lossless", "file")),
}
COMPILED = {"compiled": 1.0, "compiled, 60 %": 0.6, "compiled, 40 %": 0.4, "compiled, 20 %": 0.2}

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten.mkldnn_rnn_layer.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def kept_products() -> Any:
    """The contexts of torch's selective checkpointing that keep what takes long to compute."""

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    LAYERS: partial(checkpoint, use_reentrant=False),
    SELECTIVE: partial(checkpoint, use_reentrant=False, context_fn=kept_products),
}


class Step:
    """A training step of one contender, with a model of its own."""

    def __init__(self, model: str, quick: bool, call: Callable[..., Tensor] | None = None) -> None:
        self.task = made(model, quick=quick)
        self.net, self.batch = self.task.net, self.task.draw()
        self.forward: Callable[..., Tensor] = self.net
        if call is not None:
            self.net.call = call
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        self.plan: ox.memory.MemoryPlan | None = None

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.task.loss(self.batch, self.forward).backward()
        self.optimizer.step()

    def peak(self) -> int:
        """Bytes that a step takes beyond what lives between steps."""
        self()
        with ox.memory.Meter() as meter:
            self()
        return meter.peak_bytes

    def fit(self, budget: int, formats: tuple[Format, ...] = ("lossless",)) -> None:
        self.plan = ox.memory.fit(self.net, self, budget, formats=formats, blocks=self.net.blocks_by_name())


def best_segments(model: str, quick: bool) -> Step:
    """checkpoint_sequential at the number of segments that has the lowest peak."""
    step = Step(model, quick)
    found = []
    for segments in range(2, len(step.net.blocks_by_name()) + 1):
        step.net.segments = segments
        found.append((step.peak(), segments))
    step.net.segments = min(found)[1]
    return step


def compiled(model: str, quick: bool, budget: float) -> tuple[Step, int]:
    """The step of a compiled model, after its first steps, and its peak."""
    step = Step(model, quick)
    torch.compiler.reset()
    step.forward = torch.compile(step.net)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        step()
        return step, step.peak()


def contenders(model: str, arguments: argparse.Namespace) -> tuple[dict[str, Step], dict[str, int], dict[str, str]]:
    """Steps by contender, the peaks that they were made for, and why others are absent."""
    quick = arguments.quick
    steps = {PLAIN: Step(model, quick)} | {name: Step(model, quick, call) for name, call in CHECKPOINTS.items()}
    absent = {}
    if isinstance(steps[PLAIN].net, Chain):
        steps[SEQUENTIAL] = best_segments(model, quick)
    else:
        absent[SEQUENTIAL] = "its blocks are no chain, which checkpoint_sequential needs"
    peaks = {name: step.peak() for name, step in steps.items()}
    lowest_peaks: dict[tuple[Format, ...], int] = {}
    for _, formats in OURS.values():
        if formats not in lowest_peaks:
            probe = Step(model, quick)
            probe.fit(1 << 40, formats)
            assert probe.plan is not None
            lowest_peaks[formats] = probe.plan.floor
            # A plan counts what lives between steps too.
            between = probe.plan.plain_peak - peaks[PLAIN]
    fitted: dict[str, tuple[int, tuple[Format, ...]]] = {
        f"fit to {name}": (peaks[name] + between, ("lossless",)) for name in RIVALS if name in peaks
    }
    for name, (share, formats) in OURS.items():
        lowest = lowest_peaks[formats] + lowest_peaks[formats] // 500
        fitted[name] = max(between + int(share * peaks[PLAIN]), lowest), formats
    for name, (budget, formats) in fitted.items():
        step = Step(model, quick)
        for slack in (1.0, 1.01, 1.05):  # the floor is a prediction
            try:
                step.fit(int(slack * budget), formats)
            except torch.OutOfMemoryError as error:
                absent[name] = str(error)
                progress(f"{model}, {name}: {error}")
                continue
            steps[name], peaks[name] = step, step.peak()
            absent.pop(name, None)
            assert peaks[name] + between <= slack * budget, (name, peaks[name] + between, budget)
            break
    for name, share in COMPILED.items() if arguments.compile else ():
        progress(f"compiling {model}, {name} ...")
        try:
            steps[name], peaks[name] = compiled(model, quick, share)
        except Exception as failed:  # whatever it is, the race goes on and says so
            absent[name] = f"does not run here: {type(failed).__name__}: {str(failed).strip().partition(chr(10))[0]}"
    return steps, peaks, absent


def measure(arguments: argparse.Namespace) -> Measured:
    """One start: every case that was asked for, in this process."""
    torch.set_num_threads(arguments.threads)
    ox._C.trainer.tune_allocator(None)
    seconds, rounds = (0.2, 5) if arguments.quick else (arguments.seconds, MOST_ROUNDS)
    found = Measured()
    for model in TASKS:
        if not is_wanted(arguments, model):
            continue
        progress(f"planning {model} ...")
        steps, peaks, found.absent[model] = contenders(model, arguments)
        progress(f"racing {model} ...")
        found.cases[model] = race([Contender(name, {"step": step}) for name, step in steps.items()], seconds, rounds)
        found.layout += [(f"{model}: {name}", peak, None) for name, peak in peaks.items()]
    return found


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def tables(found: Measured) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Headings and rows of what was measured, by kind."""
    peaks = {what: int(bytes_) for what, bytes_, _ in found.layout}
    budgets: list[list[str]] = []
    beside: list[list[str]] = []
    least: list[tuple[float, list[str]]] = []
    for model, times in found.cases.items():
        share = {name: peaks[f"{model}: {name}"] / peaks[f"{model}: {PLAIN}"] for name in times}
        for name in (PLAIN, *OURS, *COMPILED):
            if name in times:
                of_plain = text(ratio(times, name, PLAIN))
                budgets.append([model, name, percent(share[name]), text(over_starts(times[name]), 1e3), of_plain])
        for rival in RIVALS:
            ours = f"fit to {rival}"
            if ours in times:
                of = [percent(share[name]) for name in (rival, ours)]
                beside.append([model, rival, *of, *(text(ratio(times, rival, other)) for other in (PLAIN, ours))])
        if LEAST in times:
            row = [model, f"{peaks[f'{model}: {PLAIN}'] / 2**20:.1f} MiB"]
            for name in (LEAST, LEAST_IN_FILE):
                if name in times:
                    of = f"{peaks[f'{model}: {name}'] / 2**20:.1f} MiB, {percent(1 - share[name])} less"
                    row += [of, text(ratio(times, name, PLAIN))]
                else:
                    row += ["left out", ""]
            least.append((share[LEAST], row))
    absent = [[model, name, why] for model, names in found.absent.items() for name, why in names.items()]
    return {
        "budgets": (["model", "step", "peak, of plain", "ms", "times as long as plain"], budgets),
        "rivals": (
            [
                "model",
                "torch's",
                "its peak",
                "ours",
                "torch's step, times as long as plain",
                "torch's step, times as long as ours",
            ],
            beside,
        ),
        "least": (
            [
                "model",
                "activations of a plain step",
                "at the least budget",
                "times as long as plain",
                "at the least with a file",
                "times as long as plain",
            ],
            [row for _, row in sorted(least)],
        ),
        "absent": (["model", "absent", "why"], absent),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--compile", action="store_true", help="torch.compile's activation_memory_budget too (minutes)")
    arguments = parser.parse_args()
    machine_facts = facts(arguments.threads)
    found = all_starts(arguments, machine_facts, SCHEMA, measure)
    report = new_report("Race: memory", __doc__, machine_facts)
    for kind, (headings, rows) in tables(found).items():
        if rows:
            for row in (headings, *rows):
                print("  ".join(f"{cell:<22}" for cell in row).rstrip())
            print()
            report.table(headings, rows, kind.capitalize())
    print("Measured on: " + ", ".join(f"{key} {value}" for key, value in machine_facts.items() if value))
    document: dict[str, Any] = {"schema": SCHEMA, "machine": machine_facts, **found.to_json()}
    write(report, document, arguments.out, "memory", arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
