"""The rules of advice: each reads one recorded step and yields what it finds."""

from __future__ import annotations

# Importing them registers their rules.
from . import attention as attention
from . import host as host
from . import memory as memory
from . import normalisation as normalisation
from . import parameters as parameters
from . import pointwise as pointwise
from . import shapes as shapes
from .normalisation import norms_after
from .step import RULES, Step

__all__ = ["RULES", "Step", "norms_after"]
