"""What the demo was asked to do."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["START_SECONDS", "DemoOptions"]

START_SECONDS = 2.5
"""What starting one worker costs, for the progress bar: importing torch, mostly."""


@dataclass(frozen=True)
class DemoOptions:
    """What the arguments ask for; times in seconds."""

    threads: int
    seconds: float
    timeout: float
    quick: bool
    contenders: tuple[str, ...]
    environment: dict[str, str]
    steps_planned: int
    """Of the run that trainers tune for."""
