"""Writes schedule_table.h: the learning rates of torch's own schedulers, which the C++ ones must equal.

Run with the torch that the table is for: python tests/optim/schedule_table.py > tests/optim/schedule_table.h
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as lrs

STEPS = 24
METRICS = [1.0, 0.9, 0.95, 0.9, 0.91, 0.92, 0.93, 0.5, 0.6, 0.5, 0.7, 0.8, 0.5, 0.49999, 0.6, 0.7, 0.7, 0.7, 0.7, 0.1]


def run(name: str, make: Callable[[Any], Any], steps: int = STEPS, adam: bool = False, plateau: bool = False) -> None:
    params = [[torch.nn.Parameter(torch.zeros(1))] for _ in range(2)]
    groups = [{"params": params[0], "lr": 0.1}, {"params": params[1], "lr": 0.003}]
    optimizer: Any = torch.optim.AdamW(groups) if adam else torch.optim.SGD(groups, momentum=0.9)
    scheduler = make(optimizer)
    rows = []
    for step in range(steps):
        if step > 0:
            optimizer.step()
            scheduler.step(METRICS[step - 1]) if plateau else scheduler.step()
        inertia = [g["betas"][0] if adam else g["momentum"] for g in optimizer.param_groups]
        rows.append([g["lr"] for g in optimizer.param_groups] + inertia)
    print(f"inline const std::vector<std::array<double, 4>> {name} = {{")
    for row in rows:
        print("    {" + ", ".join(float(value).hex() for value in row) + "},")
    print("};")


def warmup_cosine(optimizer: Any) -> Any:
    parts = [lrs.LinearLR(optimizer, 1 / 3, 1.0, 5), lrs.CosineAnnealingLR(optimizer, 15, 1e-4)]
    return lrs.SequentialLR(optimizer, parts, milestones=[5])


def warmup_polynomial_step(optimizer: Any) -> Any:
    parts = [lrs.LinearLR(optimizer, 0.1, 1.0, 4), lrs.PolynomialLR(optimizer, 8, 2.0), lrs.StepLR(optimizer, 3, 0.5)]
    return lrs.SequentialLR(optimizer, parts, milestones=[4, 12])


def warmup_cosine_cycle(optimizer: Any) -> Any:
    parts = [
        lrs.LinearLR(optimizer, 0.01, 1.0, 3),
        lrs.CosineAnnealingLR(optimizer, 4, 1e-4),
        lrs.OneCycleLR(optimizer, 0.3, total_steps=16),
    ]
    return lrs.SequentialLR(optimizer, parts, milestones=[3, 9])


warnings.simplefilter("ignore")
print(f"// Made by schedule_table.py with torch {torch.__version__}; do not edit. A row a step:")
print("// rate of group 0, rate of group 1, momentum or beta1 of each.")
print("#pragma once\n\n#include <array>\n#include <vector>\n\nnamespace table {\n\n// clang-format off")
run("kStep", lambda o: lrs.StepLR(o, 5, 0.3))
run("kLinear", lambda o: lrs.LinearLR(o, 0.25, 0.9, 7))
run("kPolynomial", lambda o: lrs.PolynomialLR(o, 20, 1.7))
run("kCosine", lambda o: lrs.CosineAnnealingLR(o, 7, 1e-4))
run("kWarmupCosine", warmup_cosine)
run("kOneCycleSgd", lambda o: lrs.OneCycleLR(o, [0.5, 0.02], total_steps=20), steps=20)
run("kOneCycleAdam", lambda o: lrs.OneCycleLR(o, 0.3, total_steps=20, pct_start=0.4), steps=20, adam=True)
run("kOneCycleThree", lambda o: lrs.OneCycleLR(o, 0.3, total_steps=20, three_phase=True), steps=20)
run("kOneCycleLine", lambda o: lrs.OneCycleLR(o, 0.3, total_steps=20, anneal_strategy="linear"), steps=20, adam=True)
run("kSequential", warmup_polynomial_step)
run("kSequentialCycle", warmup_cosine_cycle)
run("kPlateau", lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=2, cooldown=1, min_lr=0.001), 20, plateau=True)
run(
    "kPlateauMax",
    lambda o: lrs.ReduceLROnPlateau(o, "max", 0.5, 1, threshold=0.01, threshold_mode="abs"),
    20,
    plateau=True,
)
print(f"inline const std::vector<double> kMetrics = {{{', '.join(m.hex() for m in METRICS)}}};")
print("// clang-format on\n\n}  // namespace table")
