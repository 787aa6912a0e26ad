"""Memory of a training run: what tensors take, limits, budgets, checkpointing, the host pool, batch sizes that fit."""

from __future__ import annotations

from .batch import BatchPlan, BatchTrial, batch_curve, largest_batch, release_cache, set_memory_fraction
from .checkpoint import checkpoint, checkpoint_sequential, selective_checkpoint
from .fit import MemoryPlan, fit
from .forecast import BatchForecast, will_it_fit
from .host_pool import HostPoolStats, host_pool_stats, use_host_pool
from .manager import MemoryConfig, MemoryManager, MemoryUse
from .meter import (
    BlockEvent,
    Meter,
    PeakPart,
    PhaseUse,
    Timeline,
    available_bytes,
    leaks,
    limit,
    region,
    resident_bytes,
    set_limit,
)
from .pack import PackedReport, PackSavedTensors

__all__ = [
    "BatchForecast",
    "BatchPlan",
    "BatchTrial",
    "BlockEvent",
    "HostPoolStats",
    "MemoryConfig",
    "MemoryManager",
    "MemoryPlan",
    "MemoryUse",
    "Meter",
    "PackSavedTensors",
    "PackedReport",
    "PeakPart",
    "PhaseUse",
    "Timeline",
    "available_bytes",
    "batch_curve",
    "checkpoint",
    "checkpoint_sequential",
    "fit",
    "host_pool_stats",
    "largest_batch",
    "leaks",
    "limit",
    "region",
    "release_cache",
    "resident_bytes",
    "selective_checkpoint",
    "set_limit",
    "set_memory_fraction",
    "use_host_pool",
    "will_it_fit",
]
