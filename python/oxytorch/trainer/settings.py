"""The values of a performance configuration that a trainer uses, typed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import _C
from ..config import PerformanceConfig
from ..memory import MemoryManager
from .fit import Callback

if TYPE_CHECKING:
    from ..tune.plan import Plan

# What a plan has decided or done, and its trainer leaves alone: level basic decides nothing.
_DECIDED = (
    *("precision", "channels_last", "threads", "interop_threads", "flush_denormals", "allocator"),
    *(
        "allocator_retain_limit",
        "step_tail",
        "optimizer_state",
        "attention",
        "compile",
        "memory_limit",
        "goal",
        "max_slowdown",
        "max_growth",
        "gradient_checkpointing",
        "saved_tensors",
        "num_workers",
        "prefetch",
        "pin_memory",
        "cache",
        "deterministic",
        "seed",
        "steps_planned",
        "tune_seconds",
    ),
)


@dataclass(frozen=True)
class Settings:
    """What a trainer itself does; names and meanings are those of ``PerformanceConfig``, 0 and "none" become None."""

    level: str
    precision: str
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


def resolve(
    config: PerformanceConfig | Mapping[str, Any] | str | os.PathLike[str], overrides: Mapping[str, Any], user: str
) -> tuple[PerformanceConfig, Settings]:
    """Make settings from what ``PerformanceConfig.of`` takes, with overrides on top; and the configuration.

    Raises
    ------
    TypeError, ValueError
        As ``PerformanceConfig`` does, for a key or value that does not exist.
    NotImplementedError, ValueError
        As ``PerformanceConfig.check``, for a setting that would be dropped.
    """
    chosen = PerformanceConfig.of(config, **overrides)
    chosen.check(user)
    c = chosen.to_dict()
    return chosen, Settings(
        level=c["level"],
        precision=c["precision"],
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
    )


def beside(plan: Plan, config: PerformanceConfig | Mapping[str, Any] | str | os.PathLike[str]) -> PerformanceConfig:
    """Return a configuration for a trainer on a plan, without what the plan has decided."""
    settings = PerformanceConfig.of(config).copy()
    settings.set("level", "basic")
    for key in _DECIDED:
        settings.reset(key)
    settings.set("allocator", "system")
    if (plan.run.owns_loop or plan.run.own_step is not None) and not settings.is_given("nonfinite"):
        settings.set("nonfinite", "propagate")  # looking at all gradients is no part of the step that was measured
    return settings


def check_arguments(
    config: PerformanceConfig,
    optimizer: Any,
    *,
    scheduler: Any = None,
    monitor: Any = None,
    checkpointer: Any = None,
    memory: Any = None,
    callbacks: Sequence[Any] = (),
) -> None:
    """Refuse what a trainer could not use, and settings that contradict the scheduler or the optimizer.

    Raises
    ------
    TypeError
        For a monitor, checkpointer, memory manager or callback of a wrong kind.
    ValueError
        For a schedule beside a scheduler, or an option that an optimizer of ``oxytorch.optim`` was made with otherwise.
    NotImplementedError
        For clipping that comes too late for an optimizer that works in backward.
    """
    if monitor is not None and not hasattr(monitor, "phase"):
        raise TypeError(
            f"monitor is {monitor!r}, expected an oxytorch.monitor.PerformanceMonitor or None: the trainer makes none."
        )
    if memory is not None and not isinstance(memory, MemoryManager):
        raise TypeError(f"memory is a {type(memory).__name__}, expected an oxytorch.memory.MemoryManager or None.")
    if checkpointer is not None and not (hasattr(checkpointer, "save") or callable(checkpointer)):
        raise TypeError(f"checkpointer is a {type(checkpointer).__name__}, expected one with save(), or a callable.")
    for callback in callbacks:
        if not isinstance(callback, Callback) and not callable(callback):
            raise TypeError(f"a callback is a {type(callback).__name__}, expected a Callback or a callable.")
    if scheduler is not None and config.schedule != "none":
        raise ValueError(
            f"schedule = {config.schedule!r} and a scheduler were given, and one alone can set the learning rate. "
            "Leave out one of them."
        )
    own = getattr(optimizer, "_tail_options", None)
    if own is not None:
        _C.base.check_own_tail(
            config._native,
            clip_norm=own["clip_norm"] or 0.0,
            clip_value=own["clip_value"] or 0.0,
            ema_decay=own["ema_decay"] or 0.0,
            nonfinite=own["nonfinite"],
            norm_in_backward=bool(own["norm_in_backward"]),
            step_in_backward=bool(own["step_in_backward"]),
        )
