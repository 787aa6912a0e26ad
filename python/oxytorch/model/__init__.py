"""What costs time in a model, edits that keep its function, smaller models, and files for inference."""

from __future__ import annotations

from .finding import Advice, Finding
from .optimizer import ModelOptimizer, Outcome
from .rules import RULES

__all__ = ["RULES", "Advice", "Finding", "ModelOptimizer", "Outcome"]
