"""
Oxytorch's native engine; use the Python package around it.
"""

from __future__ import annotations
from . import base
from . import backend
from . import environment
from . import machine
from . import monitor
from . import optim
from . import amp
from . import accelerator
from . import trainer
from . import tune

__all__: list[str] = [
    "accelerator",
    "amp",
    "backend",
    "base",
    "environment",
    "machine",
    "monitor",
    "optim",
    "torch_version",
    "trainer",
    "tune",
]
__version__: str
torch_version: str
