"""Oxytorch: native training acceleration for PyTorch."""

from __future__ import annotations

import torch as _torch  # noqa: F401  (its libraries must be loaded before ours)

from . import _C

__version__: str = _C.__version__
