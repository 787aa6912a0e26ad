"""Races the step of each native optimizer against torch's own class of that name.

Every contender works on its own tensors of the same sizes and contents, in turn and in a random order each round, with
the same number of threads. torch's is the one-kernel form (`fused=True`) where it has one on the CPU, otherwise
`foreach=True`; its Muon has one form. Nothing else is in the step: no clipping, no average.

    python bench/race/optimizers.py [--threads 2] [--starts 4] [--seconds 3] [--quick] [--case NAME]... [--keep PATH]
        [--json PATH]

Ratios are paired by round, a start counts by its median, and intervals hold 95%. Prints the ratios, and writes
bench/report/optimizers.{json,html}.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import oxytorch.optim
import torch
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
from torch import Tensor

SCHEMA = "oxytorch-optimizers/1"
OURS, THEIRS = "oxytorch", "torch"
FUSED, FOREACH = {"fused": True}, {"foreach": True}
OPTIMIZERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "AdamW": ({"weight_decay": 0.01}, FUSED),
    "Adam": ({}, FUSED),
    "SGD": ({"momentum": 0.9}, FUSED),
    "Adagrad": ({}, FUSED),
    "RMSprop": ({}, FOREACH),
    "Muon": ({}, {}),
}
"""Hyperparameters of both, and how torch's is made."""
LR = 1e-4
SMALL, LARGE, MATRICES = "200 x 1,000", "16 x 1M", "8 x 256 x 256"
SHAPES: dict[str, list[tuple[int, ...]]] = {
    SMALL: [(1000,)] * 200,
    LARGE: [(1 << 20,)] * 16,
    MATRICES: [(256, 256)] * 8,
}
CASES = [
    (f"{name}, {size}", name, size)
    for name in OPTIMIZERS
    for size in ((MATRICES,) if name == "Muon" else (SMALL, LARGE))  # Muon is for matrices
]


def make_params(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Parameters with gradients, the same for both."""
    generator = torch.Generator().manual_seed(1)
    params = []
    for shape in shapes:
        param = (torch.randn(shape, generator=generator) * 0.02).requires_grad_()
        param.grad = torch.randn(shape, generator=generator) * 0.01
        params.append(param)
    return params


def measure(arguments: argparse.Namespace) -> Measured:
    """One start: every case that was asked for, in this process."""
    torch.set_num_threads(arguments.threads)
    oxytorch._C.trainer.tune_allocator(None)
    seconds, rounds = (0.1, 8) if arguments.quick else (arguments.seconds, MOST_ROUNDS)
    found = Measured()
    for case, name, size in CASES:
        if not is_wanted(arguments, case) or (arguments.quick and size == LARGE):
            continue
        progress(f"racing {case} ...")
        options, how = OPTIMIZERS[name]
        contenders = []
        for contender, module, more in ((OURS, oxytorch.optim, {}), (THEIRS, torch.optim, how)):
            params = make_params(SHAPES[size])
            optimizer = getattr(module, name)(params, lr=LR, **options, **more)
            contenders.append(Contender(contender, {"step": optimizer.step}, params))
        found.cases[case] = race(contenders, seconds, rounds)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    arguments = parser.parse_args()
    machine_facts = facts(arguments.threads)
    found = all_starts(arguments, machine_facts, SCHEMA, measure)
    headings = ["optimizer", "oxytorch, us a step", "torch, us a step", "times as long as oxytorch"]
    rows = [
        [
            case,
            text(over_starts(times[OURS]), 1e6),
            text(over_starts(times[THEIRS]), 1e6),
            text(ratio(times, THEIRS, OURS)),
        ]
        for case, times in found.cases.items()
    ]
    for row in (headings, *rows):
        print(f"{row[0]:<24}{row[1]:<30}{row[2]:<30}{row[3]}".rstrip())
    print("\nMeasured on: " + ", ".join(f"{key} {value}" for key, value in machine_facts.items() if value))
    report = new_report("Race: the optimizers", __doc__, machine_facts)
    report.table(list(headings), rows, "A step of each optimizer")
    document = {"schema": SCHEMA, "machine": machine_facts, **found.to_json()}
    write(report, document, arguments.out, "optimizers", arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
