"""
The pool of host memory.
"""

from __future__ import annotations
import oxytorch._C.trainer
import typing

__all__: list[str] = [
    "HostPoolStats",
    "give_back_host_memory",
    "host_pool_huge_page_bytes",
    "host_pool_stats",
    "keep_host_pool",
    "pooled_bytes",
    "use_host_pool",
]

class HostPoolStats:
    """
    Bytes and counts of the pool of host memory.
    """
    @property
    def hits(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...
    @property
    def live_bytes(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def retained_bytes(self) -> int: ...
    @property
    def returned_bytes(self) -> int: ...

def give_back_host_memory() -> None:
    """
    Gives free memory of the pool and of glibc's heap back to the kernel, whatever their settings.
    """

def host_pool_huge_page_bytes() -> int:
    """
    Bytes on huge pages now.
    """

def host_pool_stats() -> HostPoolStats:
    """
    Of the process's pool; zeros where it was never in use.
    """

def keep_host_pool() -> oxytorch._C.trainer.HostSetting:
    """
    Lets the pool keep its free pages while it is taken out, until reverted: for trials.
    """

def use_host_pool(
    retain_limit: typing.SupportsInt | typing.SupportsIndex | None = None,
) -> oxytorch._C.trainer.HostSetting:
    """
    Puts the pool under torch's CPU tensors.
    """

pooled_bytes: int
