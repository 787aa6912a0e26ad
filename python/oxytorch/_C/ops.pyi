"""
Of training operators, what is no operator.
"""

from __future__ import annotations
import typing

__all__: list[str] = ["PackedWeights"]

class PackedWeights:
    """
    Keeps the packed weights of linear layers while it is entered.
    """
    @staticmethod
    def bytes() -> int:
        """
        What is kept in this process.
        """
    @staticmethod
    def clear() -> None:
        """
        Forgets all that is kept.
        """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self) -> None: ...
