"""What costs time in a model, edits that keep its function, smaller models, and files for inference."""

from __future__ import annotations

from .compare import Comparison, Smaller
from .export import Exported, export
from .finding import Advice, Finding
from .optimizer import ModelOptimizer, Outcome
from .prune import prune
from .quantize import Int4Linear, quantize
from .rules import RULES

__all__ = [
    "RULES",
    "Advice",
    "Comparison",
    "Exported",
    "Finding",
    "Int4Linear",
    "ModelOptimizer",
    "Outcome",
    "Smaller",
    "export",
    "prune",
    "quantize",
]
