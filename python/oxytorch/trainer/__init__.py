"""The trainer, its report and the callbacks of ``fit``."""

from __future__ import annotations

from .fit import Callback, FitResult
from .report import Report, SettingLine
from .trainer import Trainer

__all__ = ["Callback", "FitResult", "Report", "SettingLine", "Trainer"]
