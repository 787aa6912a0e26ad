"""Acceleration that proves itself: strategies tried on the user's own step, measured, verified, certified."""

from __future__ import annotations

from . import strategies
from .accelerate import accelerate
from .higher_order import let_thread_key_through as _let_thread_key_through
from .plan import Plan
from .run import Run
from .strategy import STRATEGIES, Strategy, strategy

__all__ = ["STRATEGIES", "Plan", "Run", "Strategy", "accelerate", "strategies", "strategy"]

_let_thread_key_through()
