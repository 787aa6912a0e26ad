"""Counters of the bridge, over those of the fake device."""

from __future__ import annotations

import os
from typing import Any

import torch


class Metric:
    """One metric; `stats()` is a list of pairs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name

    def stats(self) -> list[tuple[str, Any]]:
        calls = torch.ops.oxytorch_device
        if self._name == "graph_compilation":
            count = calls.compilations()
            return [("TotalNumber", count), ("TotalTime", 1000 * count), ("AvgTime", 1000.0 if count else 0)]
        if self._name == "cpu_fallback":
            by_operator = dict(calls.cpu_fallbacks())
            return [("TotalNumber", sum(by_operator.values())), ("FallbackOps", by_operator)]
        if self._name == "recipe_cache":
            return [("TotalHit", 7), ("RecipeHit", {}), ("TotalMiss", 2), ("RecipeMiss", {})]
        return [("TotalNumber", 1), ("TotalSuccessful", 1), ("AvgTime", 5), ("MaxTime", 5)]


def metric_global(name: str) -> Metric | None:
    """One metric of the process; None where it is not collected."""
    if name == "recipe_cache" and os.environ.get("PT_HPU_ENABLE_CACHE_METRICS", "0") in ("0", ""):
        return None
    return (
        Metric(name)
        if name in ("graph_compilation", "cpu_fallback", "memory_defragmentation", "recipe_cache")
        else None
    )
