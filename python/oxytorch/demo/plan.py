"""What the demo was asked to do."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["FIRST_SEED", "START_SECONDS", "Plan", "environment"]

START_SECONDS = 2.5
"""What starting one worker costs, for the plan: importing torch, mostly."""
FIRST_SEED = 1000


@dataclass(frozen=True)
class Plan:
    """What the arguments ask for; times in seconds."""

    threads: int
    seconds: float
    timeout: float
    quick: bool
    contenders: tuple[str, ...]
    environment: dict[str, str]
    steps_planned: int
    """Of the run that trainers tune for."""


def environment(threads: int) -> dict[str, str]:
    """The workers' environment: equal threads, and no settings of allocators or thread pools from outside.

    How idle threads wait (OMP_WAIT_POLICY) makes torch's LSTM twice as slow or as fast.
    """
    kept_out = ("MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_")
    result = {name: value for name, value in os.environ.items() if not name.startswith(kept_out)}
    for name in ("LD_PRELOAD", "GLIBC_TUNABLES"):
        result.pop(name, None)
    result["OMP_NUM_THREADS"] = result["MKL_NUM_THREADS"] = str(threads)
    return result
