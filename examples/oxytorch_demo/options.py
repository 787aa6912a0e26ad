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
    steps_planned: int | None
    """Of the run that trainers tune for; None: what the recipe has for a quick demo."""

    def run_of(self, quick_run: int) -> int:
        """Return the steps of the run that trainers tune for, of a recipe whose quick demo plans `quick_run`."""
        return quick_run if self.steps_planned is None else self.steps_planned
