"""
Configuration, units, machine facts, statistics.
"""

from __future__ import annotations

__all__: list[str] = list()
