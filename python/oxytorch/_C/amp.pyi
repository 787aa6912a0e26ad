"""
Mixed precision.
"""

from __future__ import annotations
import torch

__all__: list[str] = ["hardware_support", "recommend_dtype"]

def hardware_support(device: str, dtype: torch.dtype) -> tuple[bool, str]:
    """
    Whether a device multiplies a dtype natively, and why.
    """

def recommend_dtype(device: str) -> tuple[torch.dtype, str]:
    """
    The dtype in which matrix products run best on a device, and why.
    """
