"""What every contender's process has in common."""

from __future__ import annotations

import os

__all__ = ["FIRST_SEED", "environment"]

FIRST_SEED = 1000


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
