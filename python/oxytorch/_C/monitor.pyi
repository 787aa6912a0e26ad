"""
Step and phase times, reports.
"""

from __future__ import annotations

__all__: list[str] = list()
