"""
Mixed precision.
"""

from __future__ import annotations
import torch
import typing

__all__: list[str] = ["Autocast", "hardware_support", "recommend_dtype"]

class Autocast:
    """
    torch.autocast of a device and a dtype while it is entered.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self, device: str, dtype: torch.dtype) -> None: ...

def hardware_support(device: str, dtype: torch.dtype) -> tuple[bool, str]:
    """
    Whether a device multiplies a dtype natively, and why.
    """

def recommend_dtype(device: str) -> tuple[torch.dtype, str]:
    """
    The dtype in which matrix products run best on a device, and why.
    """
