"""Counts the multiplications of a step of each workload of orchestrator.py, and measures how fast they could be done.

A step can take no less than its matrix products and convolutions take at the rate of one large product, so the best
stock rival over that time bounds what anything could be over that rival. Products are counted as operators ask for
them: a convolution by Winograd multiplies less, and so may pass the bound; causal attention counts in full.

    python bench/race/roofline.py [--threads 2] [--quick] [--json FILE]

Prints GFLOP of a step and the rates, and writes bench/report/roofline.{json,html}.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import _race
import torch
from _orchestrator.models import make_workload
from orchestrator import CPP, WORKLOADS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

SCHEMA = "oxytorch-roofline/1"
SIZE, QUICK_SIZE, REPEATS = 2048, 256, 15
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


def rate(dtype: torch.dtype, size: int) -> float:
    """Operations a second of one product of large matrices, the median of several."""
    a, b = torch.randn(2, size, size).to(dtype).unbind(0)
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="smaller products, to see that it works")
    parser.add_argument("--out", type=Path, default=_race.ROOT / "bench/report")
    parser.add_argument("--json", type=Path, help="write the JSON document there too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine_facts = _race.facts(arguments.threads)
    rates = {name: rate(dtype, QUICK_SIZE if arguments.quick else SIZE) for name, dtype in DTYPES.items()}
    counted = {name: flops(name) for name in WORKLOADS if not name.startswith(CPP)}
    for name, count in counted.items():
        print(f"{name:<8}{count / 1e9:8.2f} GFLOP a step, {1e3 * count / rates['bf16']:8.2f} ms in bf16")
    print(", ".join(f"{value / 1e12:.3f} TFLOP/s in {name}" for name, value in rates.items()))
    report = _race.new_report("Matrix products", __doc__, machine_facts)
    report.table(
        ["workload", "GFLOP a step"], [[name, f"{count / 1e9:.2f}"] for name, count in counted.items()], "Steps"
    )
    document = {"schema": SCHEMA, "machine": machine_facts, "flops": counted, "rates": rates}
    _race.write(report, document, arguments.out, "roofline", arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
