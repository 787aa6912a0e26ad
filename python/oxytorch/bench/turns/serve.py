"""What every worker process does with the driver's pipes and with its own figures; nothing here imports oxytorch."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

__all__ = [
    "Answer",
    "begin",
    "check_forbidden",
    "keep_freed_memory",
    "leave",
    "prepare_torch",
    "reset_peak",
    "status_kib",
]

Answer = Callable[[dict[str, Any]], None]


def _die_with_parent(parent: int) -> None:
    """Ask Linux to end this process when the coordinator goes, however it goes."""
    pr_set_pdeathsig = 1
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the coordinator is gone")


def begin() -> tuple[dict[str, Any], Answer]:
    """Read the task from the first argument; return it and the function that answers the driver.

    Answers go to the real standard output; whatever a library prints from here on goes to standard error.
    """
    task: dict[str, Any] = json.loads(sys.argv[1])
    _die_with_parent(task["coordinator"])
    answers: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    return task, answer


def prepare_torch(threads: int) -> None:
    """Give torch its threads, and have MKL choose its kernels before they race for them.

    The first square root of a process may come out with few bits otherwise
    (github.com/pytorch/pytorch/issues/188792), and losses that should be equal are not. Oxytorch does it at import; the
    rivals get it here.
    """
    torch.set_num_threads(threads)
    names = "acos asin atan cos erf erfc erfinv exp log log10 log2 sin sqrt tan tanh trunc"
    for dtype in (torch.float32, torch.float64):
        given = torch.full((16,), 0.5, dtype=dtype)
        for name in names.split():
            getattr(torch, name)(given)


def keep_freed_memory() -> None:
    """The setting of glibc's `malloc` that an expert sets: freed memory stays with the process."""
    mallopt = ctypes.CDLL(None).mallopt
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
    settings = ((m_mmap_threshold, 1 << 30), (m_trim_threshold, (1 << 31) - 1), (m_top_pad, 64 << 20))
    if not all(mallopt(*setting) for setting in settings):
        raise RuntimeError("mallopt refused its settings")


def leave() -> None:
    """End the process: nothing is left to save, and tearing torch down takes as long as a short run."""
    os._exit(0)


def status_kib(key: str) -> int:
    """A size that ``/proc/self/status`` gives in KiB."""
    with Path("/proc/self/status").open(encoding="ascii") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1])
    return 0


def reset_peak() -> None:
    """Count the peak of resident memory from here; where that is refused, the imports' peak counts for all alike."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def check_forbidden(task: dict[str, Any]) -> None:
    """Refuse to go on where a module is loaded that the task forbids."""
    forbidden = task.get("forbid")
    if forbidden and any(name.partition(".")[0] == forbidden for name in sys.modules):
        raise RuntimeError(f"{forbidden} is loaded in the process of {task['contender']!r}")
