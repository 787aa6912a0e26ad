"""
The pool of host memory.
"""

from __future__ import annotations
import collections.abc
import oxytorch._C.trainer
import typing

__all__: list[str] = [
    "BatchPlan",
    "BatchSearch",
    "BatchTrial",
    "HostPoolStats",
    "cap_host_memory",
    "give_back_host_memory",
    "host_pool_huge_page_bytes",
    "host_pool_stats",
    "keep_host_pool",
    "pooled_bytes",
    "reset_host_peak",
    "says_out_of_memory",
    "use_host_pool",
]

class BatchTrial:
    """
    One batch size, as it ran.
    """
    def __init__(
        self,
        size: typing.SupportsInt | typing.SupportsIndex,
        fits: bool,
        peak_bytes: typing.SupportsInt | typing.SupportsIndex | None,
        step_seconds: typing.SupportsFloat | typing.SupportsIndex | None,
        reason: str,
    ) -> None: ...
    @property
    def fits(self) -> bool:
        """
        Whether its steps ran within the limit, headroom left.
        """
    @property
    def peak_bytes(self) -> int | None:
        """
        Most memory in use during the steps; None where they ran out of it.
        """
    @property
    def reason(self) -> str:
        """
        Why it does not fit; empty where it does.
        """
    @property
    def samples_per_second(self) -> float:
        """
        0 where it did not run.
        """
    @property
    def size(self) -> int:
        """
        Samples in the batch.
        """
    @property
    def step_seconds(self) -> float | None:
        """
        Median of the steps after the first; None where they ran out of memory.
        """

class BatchPlan:
    """
    What batch sizes take and give. Every size in it has been run.
    """
    def __init__(
        self,
        largest: typing.SupportsInt | typing.SupportsIndex,
        fastest: typing.SupportsInt | typing.SupportsIndex,
        trials: collections.abc.Sequence[BatchTrial],
        limit_bytes: typing.SupportsInt | typing.SupportsIndex,
        headroom: typing.SupportsFloat | typing.SupportsIndex,
        samples: typing.SupportsInt | typing.SupportsIndex | None = None,
        current: typing.SupportsInt | typing.SupportsIndex | None = None,
    ) -> None: ...
    def split(self, batch: typing.SupportsInt | typing.SupportsIndex) -> tuple[int, int]:
        """
        Return (samples a piece, pieces) that make up exactly `batch` with the fewest pieces that fit.

        Accumulating gradients over the pieces keeps the batch, and so the updates, as they are. ValueError for a batch under 1.
        """
    def table(self) -> str:
        """
        Return the sizes as a table, and what another batch size does to convergence.
        """
    @property
    def current(self) -> int | None:
        """
        The batch size of today, where given.
        """
    @property
    def fastest(self) -> int:
        """
        The smallest size within 2 % of the most samples a second.
        """
    @property
    def headroom(self) -> float:
        """
        Share of the limit that is left free.
        """
    @property
    def largest(self) -> int:
        """
        The largest size that ran within the limit with headroom left.
        """
    @property
    def limit_bytes(self) -> int: ...
    @property
    def samples(self) -> int | None:
        """
        In an epoch, where given.
        """
    @property
    def trials(self) -> list[BatchTrial]:
        """
        By size.
        """

class BatchSearch:
    """
    Which batch sizes to run; see oxytorch/memory/batch_search.h.
    """
    def __init__(
        self,
        limit: typing.SupportsInt | typing.SupportsIndex,
        base: typing.SupportsInt | typing.SupportsIndex,
        *,
        start: typing.SupportsInt | typing.SupportsIndex = 1,
        most: typing.SupportsInt | typing.SupportsIndex = 1048576,
        multiple: typing.SupportsInt | typing.SupportsIndex = 1,
        headroom: typing.SupportsFloat | typing.SupportsIndex = 0.1,
        resolution: typing.SupportsFloat | typing.SupportsIndex = 0.02,
        curve: bool = False,
    ) -> None: ...
    def next(self) -> int | None:
        """
        The size to run next; None where the search is over.
        """
    def plan(
        self,
        samples: typing.SupportsInt | typing.SupportsIndex | None,
        current: typing.SupportsInt | typing.SupportsIndex | None,
    ) -> BatchPlan: ...
    def ran(
        self,
        peak_bytes: typing.SupportsInt | typing.SupportsIndex,
        step_seconds: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    ) -> None: ...
    def ran_out(self, why: str) -> None: ...

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

def cap_host_memory(limit: typing.SupportsInt | typing.SupportsIndex) -> oxytorch._C.trainer.HostSetting:
    """
    Has allocations fail that would take this process beyond so many resident bytes, until reverted.
    """

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

def reset_host_peak() -> None:
    """
    Begins the peak of resident memory anew.
    """

def says_out_of_memory(message: str) -> bool:
    """
    Whether an error says that there was no memory.
    """

def use_host_pool(
    retain_limit: typing.SupportsInt | typing.SupportsIndex | None = None,
) -> oxytorch._C.trainer.HostSetting:
    """
    Puts the pool under torch's CPU tensors.
    """

pooled_bytes: int
