"""Oxytorch: native training acceleration for PyTorch."""

from __future__ import annotations

# torch first: its libraries must be loaded before ours.
import torch as _torch

from ._torch_check import require_same_torch as _require_same_torch

try:
    from ._build_info import TORCH_VERSION as _BUILT_FOR
except ModuleNotFoundError:
    raise ImportError("oxytorch is not built in this source tree: run `make build`.") from None

_require_same_torch(_BUILT_FOR, _torch.__version__)

from . import _C

# Before torch's threads race for it: the first square root of a process may come out with few bits otherwise.
_C.trainer.resolve_vector_math()

from .backend import available_backends as available_backends

__version__: str = _C.__version__

from . import accelerator as accelerator
from . import amp as amp
from . import data as data
from . import environment as environment
from . import hpu as hpu
from . import machine as machine
from . import memory as memory
from . import model as model
from . import monitor as monitor
from . import ops as ops
from . import optim as optim
from . import tune as tune
from .accelerator import GPUConfig as GPUConfig
from .config import PerformanceConfig as PerformanceConfig
from .info import info as info
from .machine import TopologyConfig as TopologyConfig
from .monitor import PerformanceMonitor as PerformanceMonitor
from .trainer import EarlyStopping as EarlyStopping
from .trainer import PerformanceOptimizer as PerformanceOptimizer
from .trainer import StepGraph as StepGraph
from .trainer import Trainer as Trainer
from .tune import accelerate as accelerate
