"""Counts the multiplications of a step of each workload of orchestrator.py, and measures how fast they could be done.

A step can take no less than its matrix products and convolutions take at the rate of one large product, so the best
stock rival over that time bounds what anything could be over that rival. Products are counted as operators ask for
them: a convolution by Winograd multiplies less, and so may pass the bound; causal attention counts in full.

With ``--steps`` those workloads are trained too, as ``accelerate(level="advanced")`` leaves them, and steps and large
products take turns, since both are as slow as the neighbours of a virtual machine make them at the moment: what part of
a step its products would take at the rate of the products beside it.

    python bench/race/roofline.py [--threads 2] [--steps gpt,bert] [--quick] [--json FILE]

Prints GFLOP of a step, the rates and the parts, and writes bench/report/roofline.{json,html}.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import _race
import numpy as np
import oxytorch
import torch
from _orchestrator.contenders import STEPS_PLANNED
from _orchestrator.models import make_workload
from orchestrator import CPP, WORKLOADS
from oxytorch_demo.workloads import Batch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

SCHEMA = "oxytorch-roofline/1"
SIZE, QUICK_SIZE, REPEATS = 2048, 256, 15
ROUNDS, QUICK_ROUNDS, STEPS_A_ROUND = 25, 3, 5
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def flops(name: str) -> int:
    """Floating-point operations of the products of one step, forward and backward."""
    workload = make_workload(name, "cpu")
    model, (batch,) = workload.make_model(), workload.make_batches(0, 1)
    # Torch counts neither oneDNN's LSTM nor the CPU's flash attention: take the operators that they are made of.
    with (
        FlopCounterMode(display=False) as counter,
        torch.backends.mkldnn.flags(enabled=name != "lstm"),
        sdpa_kernel(SDPBackend.MATH),
    ):
        workload.loss(model, batch).backward()
    return counter.get_total_flops()


def rate(dtype: torch.dtype, size: int, repeats: int = REPEATS) -> float:
    """Operations a second of one product of large matrices, the median of several."""
    a, b = torch.randn(2, size, size).to(dtype).unbind(0)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(seconds)


def parts_of_steps(name: str, count: int, size: int, rounds: int) -> list[float]:
    """What part of a step of a workload its `count` operations are at the rate of a product beside it, by round."""
    workload = make_workload(name, "cpu")
    torch.manual_seed(0)
    model, batches = workload.make_model(), workload.make_batches(0, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr)
    plan = oxytorch.accelerate(
        model, optimizer, workload.loss, batches, level="advanced", steps_planned=STEPS_PLANNED["cpu"], remember=False
    )

    def step(batch: Batch) -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return time.perf_counter() - began

    found = []
    for index in range(rounds):
        before = rate(torch.bfloat16, size, STEPS_A_ROUND)
        seconds = statistics.median(step(batches[(index + i) % len(batches)]) for i in range(STEPS_A_ROUND))
        beside = (before + rate(torch.bfloat16, size, STEPS_A_ROUND)) / 2
        found.append(count / beside / seconds)
    plan.revert()  # the next workload has a plan of its own
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", default="", help="workloads whose steps are taken, such as gpt,bert")
    parser.add_argument("--quick", action="store_true", help="smaller products, to see that it works")
    parser.add_argument("--out", type=Path, default=_race.ROOT / "bench/report")
    parser.add_argument("--json", type=Path, help="write the JSON document there too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    wanted = [name for name in arguments.steps.split(",") if name]
    names = [name for name in WORKLOADS if not name.startswith(CPP)]
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--steps: there is no workload {unknown[0]!r}; there are {', '.join(names)}")
    machine_facts = _race.facts(arguments.threads)
    size = QUICK_SIZE if arguments.quick else SIZE
    rates = {name: rate(dtype, size) for name, dtype in DTYPES.items()}
    counted = {name: flops(name) for name in names}
    for name, count in counted.items():
        print(f"{name:<8}{count / 1e9:8.2f} GFLOP a step, {1e3 * count / rates['bf16']:8.2f} ms in bf16")
    print(", ".join(f"{value / 1e12:.3f} TFLOP/s in {name}" for name, value in rates.items()))
    parts = {}
    for name in wanted:
        _race.progress(f"steps of {name} and large products in turn")
        parts[name] = parts_of_steps(name, counted[name], size, QUICK_ROUNDS if arguments.quick else ROUNDS)
        low, middle, high = (f"{float(np.quantile(parts[name], q)):.0%}" for q in (0.1, 0.5, 0.9))
        print(f"{name:<8}{middle} of a step at the rate of products beside it ({low} to {high} in 8 of 10 rounds)")
    report = _race.new_report("Matrix products", __doc__, machine_facts)
    report.table(
        ["workload", "GFLOP a step", "part of a step"],
        [
            [name, f"{count / 1e9:.2f}", f"{statistics.median(parts[name]):.0%}" if name in parts else ""]
            for name, count in counted.items()
        ],
        "Steps",
    )
    document = {"schema": SCHEMA, "machine": machine_facts, "flops": counted, "rates": rates, "parts": parts}
    _race.write(report, document, arguments.out, "roofline", arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
