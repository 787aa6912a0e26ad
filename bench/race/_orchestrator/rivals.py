"""Which switches the stock rivals have on this machine, as the screening found them (bench/race/rivals.json)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from .switches import IMAGES, MALLOPT, Switches

PATH = Path(__file__).resolve().parents[1] / "rivals.json"
STOCK = ("stock 1", "stock 2", "stock compiled", "lightning", "accelerate")
ON_CUDA = ("stock 1", "stock compiled", "stock reduce-overhead", "stock max-autotune", "stock graph",
           "stock compiled graph")  # fmt: skip


def machine_class(facts: dict[str, str]) -> str:
    """Machines of one class share what was found: instructions and threads decide."""
    return f"{facts['threads']} threads, {facts['instructions']}"


def load(path: Path) -> dict[str, Any]:
    """The whole file; empty where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"machines": {}}  # type: ignore[no-any-return]


def store(path: Path, machine: str, workload: str, found: dict[str, Any]) -> None:
    """Put one workload's findings into the file."""
    document = load(path)
    document["machines"].setdefault(machine, {})[workload] = found
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def unscreened(workload: str, has_bf16: bool) -> dict[str, Switches]:
    """What one would write without trying: for a machine that was not screened."""
    good = Switches(
        "fused",
        "bf16" if has_bf16 else "fp32",
        channels_last=workload in IMAGES,
        allocator=MALLOPT,
        flush_denormals=True,
    )
    compiled = Switches(
        "fused", good.precision, good.channels_last, allocator=MALLOPT, compile="default", flush_denormals=True
    )
    return {"stock 1": good, "stock compiled": compiled, "lightning": good, "accelerate": good}


def rivals(path: Path, machine: str, workload: str, has_bf16: bool) -> tuple[dict[str, Switches], bool]:
    """Switches of each contender that has some, and whether the screening of this machine found them."""
    fixed = {"eager": Switches(), "eager + mallopt": Switches(allocator=MALLOPT)}
    found = load(path)["machines"].get(machine, {}).get(workload)
    if found is None:
        return {**fixed, **unscreened(workload, has_bf16)}, False
    return {**fixed, **{name: Switches(**said) for name, said in found["rivals"].items()}}, True


def cuda_rivals(workload: str) -> dict[str, Switches]:
    """What one would write for a card; few enough to race them all, so nothing is screened."""
    good = Switches("fused", "bf16", channels_last=workload in IMAGES, device="cuda")
    compiled = {
        "stock compiled": "default",
        "stock reduce-overhead": "reduce-overhead",
        "stock max-autotune": "max-autotune",
    }
    return {
        "eager": Switches(device="cuda"),
        "stock 1": good,
        **{name: replace(good, compile=mode) for name, mode in compiled.items()},
        "stock graph": replace(good, graph=True),
        "stock compiled graph": replace(good, graph=True, compile="default"),
    }


def cpp_rivals(workload: str, has_bf16: bool) -> dict[str, Switches]:
    """LibTorch's loop as it comes and with what C++ has of these switches; few enough to race them all."""
    precision = "bf16" if has_bf16 else "fp32"
    allocators = (MALLOPT, "tcmalloc")
    best = [Switches("", precision, channels_last=workload in IMAGES, allocator=allocator) for allocator in allocators]
    return {"eager": Switches(), "eager + mallopt": Switches(allocator=MALLOPT), "stock 1": best[0], "stock 2": best[1]}
