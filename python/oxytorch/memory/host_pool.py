"""The pool of host memory under torch's CPU tensors."""

from __future__ import annotations

from dataclasses import dataclass

from .. import _C
from ..base import parse_size, system_info

__all__ = ["HostPoolStats", "host_pool_stats", "use_host_pool"]


@dataclass(frozen=True)
class HostPoolStats:
    """Bytes and counts of the pool of host memory."""

    live_bytes: int
    """In tensors that are alive."""
    peak_bytes: int
    """The most `live_bytes` has been."""
    retained_bytes: int
    """Of pages that the pool keeps beyond `live_bytes`; an upper bound on what is resident."""
    limit_bytes: int
    """Above which free pages go back to the kernel."""
    hits: int
    """Tensors served from memory that had been used before."""
    misses: int
    """Tensors that took fresh memory."""
    returned_bytes: int
    """Given back to the kernel since the pool was made."""
    huge_page_bytes: int
    """Resident bytes of the pool that lie on huge pages."""


def use_host_pool(limit: int | str | None = None) -> _C.trainer.HostSetting:
    """Put a pool of huge pages under torch's CPU tensors.

    A step then finds the memory of the step before instead of faulting it in again, page by page. Results keep every
    bit. Tensors under 16 KiB stay with torch's allocator.

    Parameters
    ----------
    limit : int or str, optional
        Bytes that the pool may hold free (``"4GB"``, ``"25%"`` of the memory this process may use, or a number); above
        it, free pages go back to the kernel as they are freed. Default: half of what is available now.

    Returns
    -------
    HostSetting
        What was done or why not, what it costs, and `revert()`, which hands new tensors to torch's allocator again and
        gives free memory back. Tensors that live in the pool stay valid.

    Raises
    ------
    ValueError
        For a limit that is no size.

    Notes
    -----
    The setting is that of the whole process. Put it in and take it out with no step running; any number of times.
    """
    return _C.memory.use_host_pool(None if limit is None else parse_size(limit, system_info()["memory"]["limit"]))


def host_pool_stats() -> HostPoolStats:
    """Read the pool's counts; zeros where it was never in use. Takes milliseconds: not for every step."""
    counts = _C.memory.host_pool_stats()
    values = {name: getattr(counts, name) for name in HostPoolStats.__annotations__ if name != "huge_page_bytes"}
    return HostPoolStats(**values, huge_page_bytes=_C.memory.host_pool_huge_page_bytes())
