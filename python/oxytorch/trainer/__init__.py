"""The trainer, its report and the callbacks of ``fit``."""

from __future__ import annotations

from ..report import SettingLine, TrainingReport
from ..step_graph import StepGraph
from .early_stopping import EarlyStopping
from .fit import Callback, FitResult
from .performance_optimizer import PerformanceOptimizer
from .trainer import Trainer

__all__ = [
    "Callback",
    "EarlyStopping",
    "FitResult",
    "PerformanceOptimizer",
    "SettingLine",
    "StepGraph",
    "Trainer",
    "TrainingReport",
]
