"""Trains the demo's models with narrow optimizer state and tests that they end as fp32 does, within seed noise.

Every layout trains from the same initialisations on the same batches, one run for each of five seeds, with the demo's
recipe (AdamW, warm-up and cosine, clipping). A layout passes on a model if its mean held-out loss over the seeds is at
most one standard deviation of fp32's seeds above fp32's mean.

    python bench/race/convergence.py [--seeds 5] [--steps N] [--model NAME]... [--quick] [--json PATH]

Prints means, spreads and paired differences, and writes bench/report/convergence.{json,html}. The losses depend on the
number of threads and the instruction set only through torch's own forward and backward. The exit status is 1 if a
layout fails the test in a run of five seeds or more.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oxytorch.optim
import torch
from _race import ROOT, facts, new_report, progress, write
from oxytorch_demo import workloads
from torch import Tensor, nn

T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5% by number of paired seeds."""

SEVEN_BYTES = {"state_dtype": "int8", "master_weights": "int8"}


@dataclass(frozen=True)
class Layout:
    """How weights and state are kept. bf16 weights also compute in bf16."""

    name: str
    options: dict[str, Any]
    bf16_weights: bool = False


FP32 = Layout("fp32", {})
LAYOUTS = (
    FP32,
    Layout("int8 state", {"state_dtype": "int8"}),
    Layout("7 bytes", SEVEN_BYTES, bf16_weights=True),
    Layout("7 bytes, stochastic rounding", {**SEVEN_BYTES, "stochastic_rounding": True}, bf16_weights=True),
)


def train(workload: workloads.Workload, layout: Layout, seed: int, steps: int) -> float:
    """Held-out loss after training."""
    torch.manual_seed(seed)
    model = workload.make_model()
    if layout.bf16_weights:
        for parameter in model.parameters():
            # Norms' weights and biases stay fp32, as in any mixed recipe; they are under 1% of these models.
            if parameter.dim() > 1:
                parameter.data = parameter.data.bfloat16()
    recipe = workload.recipe
    optimizer = oxytorch.optim.AdamW(
        model.parameters(),
        lr=recipe.lr,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        clip_norm=recipe.clip_norm,
        seed=seed,
        **layout.options,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.lr_factor(steps))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=layout.bf16_weights):
            return workload.loss(model, batch)

    for batch in workload.make_batches(1000 + seed, steps):
        optimizer.zero_grad()
        loss(batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return held_out_loss(workload, model, loss)


def held_out_loss(workload: workloads.Workload, model: nn.Module, loss: Any) -> float:
    """Mean over the held-out batches."""
    model.eval()
    batches = workload.held_out()
    with torch.no_grad():
        total = sum(float(loss(batch)) * len(batch[1]) for batch in batches)
    return total / sum(len(batch[1]) for batch in batches)


@dataclass(frozen=True)
class Row:
    """One layout on one model against fp32 from the same seeds."""

    model: str
    layout: str
    losses: list[float]
    reference: list[float]

    @property
    def mean(self) -> float:
        """Mean held-out loss."""
        return statistics.fmean(self.losses)

    @property
    def noise(self) -> float:
        """Standard deviation of fp32 over its seeds."""
        return statistics.stdev(self.reference)

    @property
    def difference(self) -> tuple[float, float]:
        """Mean of the paired differences to fp32, with half of its 95% t interval."""
        pairs = [ours - theirs for ours, theirs in zip(self.losses, self.reference, strict=True)]
        half = T_975.get(len(pairs), 2.0) * statistics.stdev(pairs) / math.sqrt(len(pairs))
        return statistics.fmean(pairs), half

    @property
    def within(self) -> bool:
        """Whether it ends within fp32's seed noise."""
        return self.difference[0] <= self.noise

    def cells(self) -> list[str]:
        """Table cells."""
        start = [self.model, self.layout, f"{self.mean:.4f}"]
        if self.layout == FP32.name:
            return [*start, f"{self.noise:.4f}", "", ""]
        difference, half = self.difference
        return [*start, "", f"{difference:+.4f} +- {half:.4f}", "yes" if self.within else "NO"]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": self.model,
            "layout": self.layout,
            "losses": self.losses,
            "mean": self.mean,
            "fp32_seed_stdev": self.noise,
            "difference": self.difference[0],
            "difference_half_interval": self.difference[1],
            "within": self.within,
        }


HEADINGS = ["model", "layout", "mean held-out loss", "seed noise", "difference to fp32, 95%", "within noise"]


def show(rows: list[Row], machine_facts: dict[str, str]) -> None:
    """Print the table."""
    widths = (7, 30, 20, 12, 26, 0)
    for cells in (HEADINGS, *(row.cells() for row in rows)):
        print("".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    print("\nTest: mean over the seeds at most one standard deviation of fp32's seeds above fp32's mean.")
    print("Measured on: " + ", ".join(f"{key} {value}" for key, value in machine_facts.items() if value))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="steps of each run (default: the recipe's)")
    parser.add_argument("--model", action="append", choices=workloads.NAMES, help="only this; may be repeated")
    parser.add_argument("--quick", action="store_true", help="the MLP, 20 steps, two seeds, to see that it works")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--out", type=Path, default=ROOT / "bench/report")
    parser.add_argument("--json", type=Path, help="write the JSON document there too")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.seeds, arguments.steps = ["mlp"], 2, 20
    if not 2 <= arguments.seeds <= max(T_975):
        parser.error(f"--seeds is {arguments.seeds}; a spread needs 2 to {max(T_975)}.")
    return arguments


def main() -> int:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    machine_facts = facts(arguments.threads)
    rows: list[Row] = []
    names = arguments.model or workloads.NAMES
    began, done = time.perf_counter(), 0
    for name in names:
        workload = workloads.load(name)
        steps = arguments.steps or workload.recipe.steps
        reference: list[float] = []
        for layout in LAYOUTS:
            losses = []
            for seed in range(arguments.seeds):
                losses.append(train(workload, layout, seed, steps))
                done += 1
                of = len(names) * len(LAYOUTS) * arguments.seeds
                elapsed = time.perf_counter() - began
                progress(f"[{done}/{of}, {elapsed:.0f} s] {name}, {layout.name}, seed {seed}: {losses[-1]:.4f}")
            reference = reference or losses
            rows.append(Row(name, layout.name, losses, reference))
    show(rows, machine_facts)
    report = new_report("Convergence with narrow state", __doc__, machine_facts)
    report.table(list(HEADINGS), [row.cells() for row in rows], "Held-out loss")
    document = {
        "schema": "oxytorch-convergence/1",
        "machine": machine_facts,
        "seeds": arguments.seeds,
        "test": "mean over the seeds at most one standard deviation of fp32's seeds above fp32's mean",
        "rows": [row.to_json() for row in rows],
    }
    write(report, document, arguments.out, "convergence", arguments.json)
    return int(arguments.seeds >= 5 and not all(row.within for row in rows))


if __name__ == "__main__":
    sys.exit(main())
