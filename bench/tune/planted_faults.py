"""How many planted faults each way of checking catches, and how many healthy strategies it refuses.

    python bench/tune/planted_faults.py [--json] [NAME ...]

The faults are those of tests/tune/planted_faults. Beside the verifier stand the checks that other tuners have: what
AITune looks at (outputs finite, shapes as before, under no_grad), nothing (Lightning's tuner, torch.compile's
autotuning, whose VERIFY is empty), the first loss within 5 %, and the outputs of one batch within 1e-3.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "tune"))
from oxytorch.tune.run import Run
from oxytorch.tune.verify import Verifier
from planted_faults import FAULTS, HEALTHY, Fault, workload

OURS = "float64 verifier"


class VerifiedWorkload:
    """One workload with its verifier and what the rivals compare with."""

    def __init__(self, name: str) -> None:
        self.run, self.snapshot = workload(name, torch.device("cpu"), {})
        self.verifier = Verifier(self.run, self.snapshot)
        began = time.perf_counter()
        self.run.step(self.run.batches[0])
        self.run.step(self.run.batches[1])
        self.step_seconds = (time.perf_counter() - began) / 2
        self.usual = {name: self.of(look) for name, (look, _) in RIVALS.items()}

    def of(self, look: Callable[[Run], Any]) -> Any:
        """Look at the run, from the state as held."""
        wanted = self.run.active
        self.run.set_active(())
        self.snapshot.restore()
        self.run.set_active(wanted)
        return look(self.run)

    def caught(self, fault: Fault) -> dict[str, Any]:
        """Return by check whether it refuses this, and our reason."""
        self.run.strategies = {fault.name: fault.strategy()}
        self.run._made.clear()
        self.run.set_active([fault.name])
        try:
            found: dict[str, Any] = {name: self.refuses(name) for name in RIVALS}
            ruling = self.verifier.check(fault.kind)
        finally:
            self.run.set_active(())
            self.snapshot.restore()
        self.snapshot.prove()
        steps = ruling.evidence["seconds"] / self.step_seconds
        return {**found, OURS: not ruling.held, "reason": ruling.reason, "steps": round(steps, 1)}

    def refuses(self, name: str) -> bool:
        """Whether a rival's check refuses what is active; a step that throws is refused by all that look."""
        look, accepts = RIVALS[name]
        try:
            return not accepts(self.of(look), self.usual[name])
        except Exception:
            return True


def outputs(run: Run) -> list[Tensor]:
    with torch.no_grad():
        found = run.model(run.batches[0][0])
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def finite_and_shaped(now: list[Tensor], usual: list[Tensor]) -> bool:
    same = [t.shape for t in now] == [t.shape for t in usual]
    return same and all(bool(t.isfinite().all()) for t in now)


def close(now: list[Tensor], usual: list[Tensor]) -> bool:
    return all(torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-3) for a, b in zip(now, usual, strict=True))


RIVALS: dict[str, tuple[Callable[[Run], Any], Callable[[Any, Any], bool]]] = {
    "none (Lightning, torch.compile)": (lambda _: None, lambda *_: True),
    "NaN, Inf, shapes (AITune)": (outputs, finite_and_shaped),
    "first loss within 5 %": (
        lambda run: float(run.step(run.batches[0])),
        lambda now, usual: abs(now - usual) <= 0.05 * abs(usual),
    ),
    "outputs within 1e-3": (outputs, close),
}


def main() -> int:
    """Print the table, or JSON; 1 where the verifier misses a fault or refuses what is healthy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    workloads: dict[str, VerifiedWorkload] = {}
    rows: dict[str, dict[str, dict[str, Any]]] = {"faults": {}, "healthy": {}}
    for kind, book in (("faults", FAULTS), ("healthy", HEALTHY)):
        for name, fault in book.items():
            if asked.names and name not in asked.names:
                continue
            if fault.workload not in workloads:
                workloads[fault.workload] = VerifiedWorkload(fault.workload)
            found = workloads[fault.workload].caught(fault)
            rows[kind][name] = {"claim": fault.kind, "from step": fault.since + 1, **found}
            print(f"\r{kind} {len(rows[kind])}/{len(book)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    checks = [*RIVALS, OURS]
    counts = {c: {kind: sum(row[c] for row in of.values()) for kind, of in rows.items()} for c in checks}
    if asked.json:
        print(json.dumps({"torch": torch.__version__, "counts": counts, **rows}, indent=1))
    else:
        print(f"{'check':34} {'faults caught':>14} {'false alarms':>13}")
        for c in checks:
            caught, alarms = (f"{counts[c][kind]} of {len(of)}" for kind, of in rows.items())
            print(f"{c:34} {caught:>14} {alarms:>13}")
    return int(counts[OURS]["faults"] < len(rows["faults"]) or counts[OURS]["healthy"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
