"""Memory of a training run: the pool of host memory under torch's CPU tensors, and batch sizes that fit."""

from __future__ import annotations

from .batch import BatchPlan, BatchTrial, batch_curve, largest_batch, release_cache, set_memory_fraction
from .host_pool import HostPoolStats, host_pool_stats, use_host_pool

__all__ = [
    "BatchPlan",
    "BatchTrial",
    "HostPoolStats",
    "batch_curve",
    "host_pool_stats",
    "largest_batch",
    "release_cache",
    "set_memory_fraction",
    "use_host_pool",
]
