"""
Oxytorch's native engine; use the Python package around it.
"""

from __future__ import annotations
from . import base
from . import backend
from . import environment
from . import machine
from . import monitor
from . import data
from . import optim
from . import amp
from . import ops
from . import trainer
from . import tune
from . import accelerator
from . import memory

__all__: list[str] = [
    "accelerator",
    "amp",
    "backend",
    "base",
    "data",
    "environment",
    "machine",
    "memory",
    "monitor",
    "ops",
    "optim",
    "torch_version",
    "trainer",
    "tune",
]
__version__: str
torch_version: str
