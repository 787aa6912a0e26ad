"""Offers candidates that do nothing to `oxytorch.accelerate` on real steps, and counts those that it takes.

    python bench/tune/null_candidates.py --candidates 1000 --json results.json

Exit status 1 where more than 1 % are accepted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import oxytorch as ox
import torch
from oxytorch.tune import Run, Strategy
from torch import nn


def null(number: int) -> type[Strategy]:
    """A strategy that changes nothing."""

    def nothing(_self: Strategy, _run: Run) -> None:
        return

    return type(f"Null{number}", (Strategy,), {"name": f"null_{number}", "apply": nothing, "revert": nothing})


def offer(first: int, count: int, width: int) -> list[Any]:
    """Return what became of `count` candidates in one call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [(torch.randn(16, width), torch.randint(10, (16,))) for _ in range(4)]
    plan = ox.accelerate(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        batches,
        strategies=[null(first + i) for i in range(count)],
        remember=False,
        tune_seconds=1e9,
        seed=first,
    )
    plan.revert()
    # A candidate taken by its own paired test counts, also where the closing one against nothing dropped it.
    return [entry for entry in plan.certificate.entries if entry.status != "skipped"]


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=1000)
    parser.add_argument("--a-call", type=int, default=50, help="candidates offered in one call")
    parser.add_argument("--width", type=int, default=64, help="of the model")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    began = time.perf_counter()
    entries: list[Any] = []
    while len(entries) < arguments.candidates:
        left = arguments.candidates - len(entries)
        entries += offer(len(entries), min(arguments.a_call, left), arguments.width)
    taken = [entry for entry in entries if entry.status == "accepted" or "all together" in entry.reason]
    result = {
        "candidates": len(entries),
        "accepted": len(taken),
        "share": len(taken) / len(entries),
        "pairs": sum(entry.pairs for entry in entries),
        "seconds": round(time.perf_counter() - began, 1),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return int(result["share"] > 0.01)


if __name__ == "__main__":
    sys.exit(main())
