"""What the demo was asked to do."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["START_SECONDS", "Plan"]

START_SECONDS = 2.5
"""What starting one worker costs, for the plan: importing torch, mostly."""


@dataclass(frozen=True)
class Plan:
    """What the arguments ask for; times in seconds."""

    threads: int
    seconds: float
    timeout: float
    quick: bool
    contenders: tuple[str, ...]
    environment: dict[str, str]
    steps_planned: int
    """Of the run that trainers tune for."""
