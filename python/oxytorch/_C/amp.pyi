"""
Mixed precision.
"""

from __future__ import annotations
import torch

__all__: list[str] = ["recommend_dtype"]

def recommend_dtype(device: str) -> tuple[torch.dtype, str]:
    """
    The dtype in which matrix products run best on a device, and why.
    """
