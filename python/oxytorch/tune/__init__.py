"""Acceleration that proves itself: strategies tried on the user's own step, measured, verified, certified."""

from __future__ import annotations

from . import strategies
from .accelerate import accelerate
from .plan import Plan
from .run import Run
from .strategy import STRATEGIES, Strategy, strategy

__all__ = ["STRATEGIES", "Plan", "Run", "Strategy", "accelerate", "strategies", "strategy"]
