"""
The step tail.
"""

from __future__ import annotations

__all__: list[str] = list()
