"""The values of a performance configuration that a trainer uses, typed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import PerformanceConfig


@dataclass(frozen=True)
class Settings:
    """One trainer's settings; names and meanings are those of ``PerformanceConfig``, 0 and "none" become None."""

    level: str
    precision: str
    channels_last: str
    threads: str | int
    flush_denormals: str
    allocator: str
    allocator_retain_limit: str
    step_tail: str
    optimizer_state: str | None
    attention: str
    compile: str
    accumulate: int
    clip_norm: float | None
    clip_value: float | None
    ema_decay: float | None
    nonfinite: str
    grad_scaler: str
    schedule: str | None
    warmup_steps: int
    min_lr_ratio: float
    max_steps: int | None
    early_stopping_patience: int | None
    early_stopping_min_delta: float
    early_stopping_mode: str
    early_stopping_restore_best: bool
    progress: str
    seed: int | None
    deterministic: bool


def resolve(
    config: PerformanceConfig | Mapping[str, Any] | str | os.PathLike[str], overrides: Mapping[str, Any]
) -> Settings:
    """Make settings from what ``PerformanceConfig.of`` takes, with overrides on top.

    Raises
    ------
    TypeError, ValueError
        As ``PerformanceConfig`` does, for a key or value that does not exist.
    """
    c = PerformanceConfig.of(config, **overrides).to_dict()
    return Settings(
        level=c["level"],
        precision=c["precision"],
        channels_last=c["channels_last"],
        threads=c["threads"],
        flush_denormals=c["flush_denormals"],
        allocator=c["allocator"],
        allocator_retain_limit=c["allocator_retain_limit"],
        step_tail=c["step_tail"],
        optimizer_state=None if c["optimizer_state"] == "auto" else c["optimizer_state"],
        attention=c["attention"],
        compile=c["compile"],
        accumulate=c["accumulation_steps"],
        clip_norm=c["clip_norm"] or None,
        clip_value=c["clip_value"] or None,
        ema_decay=c["ema_decay"] or None,
        nonfinite=c["nonfinite"],
        grad_scaler=c["grad_scaler"],
        schedule=None if c["schedule"] == "none" else c["schedule"],
        warmup_steps=c["warmup_steps"],
        min_lr_ratio=c["min_lr_ratio"],
        max_steps=c["max_steps"] or None,
        early_stopping_patience=c["early_stopping_patience"] or None,
        early_stopping_min_delta=c["early_stopping_min_delta"],
        early_stopping_mode=c["early_stopping_mode"],
        early_stopping_restore_best=c["early_stopping_restore_best"],
        progress=c["progress"],
        seed=None if c["seed"] == "auto" else c["seed"],
        deterministic=c["deterministic"],
    )
