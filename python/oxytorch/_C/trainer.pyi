"""
Host settings and the training step.
"""

from __future__ import annotations

__all__: list[str] = list()
