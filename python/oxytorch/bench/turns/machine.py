"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

__all__ = ["describe", "has_bf16"]


def _cpu_flags() -> tuple[str, frozenset[str]]:
    model, flags = platform.machine(), frozenset[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = frozenset(value.split())
                break
    except OSError:
        pass
    return model, flags


def has_bf16() -> bool:
    """Whether this processor multiplies bf16 in hardware."""
    return bool(_cpu_flags()[1] & {"avx512_bf16", "amx_bf16", "avx_ne_convert"})


def describe(threads: int) -> dict[str, str]:
    """Facts about the machine, for the foot of a table."""
    model, flags = _cpu_flags()
    wide = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return {
        "cpu": model,
        "instructions": ", ".join(wide) or "baseline",
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(threads),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "libc": " ".join(platform.libc_ver()),
    }
