"""The demo's progress: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["DemoProgress"]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class DemoProgress:
    """Work measured in expected seconds, so that the time left stays right across models of different speed.

    The expectation may grow or shrink while the demo learns how fast the machine is: ``expect`` replaces the total of
    one part.
    """

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._done: dict[str, float] = {}
        self._began = time.monotonic()
        self._printed = 0.0
        self._label = ""
        self._percent = 0.0
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description:<34}"),
                BarColumn(bar_width=None),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=console,
            )
            self._task = self._bar.add_task("starting", total=1.0, left="")

    def __enter__(self) -> DemoProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar off the terminal while something else is printed."""
        if self._bar is not None:
            self._bar.stop()
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.start()

    def expect(self, part: str, seconds: float) -> None:
        """Set how long ``part`` is expected to take in all."""
        self._parts[part] = seconds

    def finish(self, part: str) -> None:
        """Mark ``part`` as done, however long it took."""
        self._done[part] = self._parts.get(part, 0.0)
        self._show()

    def advance(self, part: str, seconds: float, label: str) -> None:
        """Count ``seconds`` of expected work as done; ``label`` says what is going on."""
        self._done[part] = min(self._parts.get(part, 0.0), self._done.get(part, 0.0) + seconds)
        self._label = label
        self._show()

    def _show(self) -> None:
        total = sum(self._parts.values()) or 1.0
        done = sum(self._done.values())
        elapsed = time.monotonic() - self._began
        # The expectation counts at first, the pace seen so far later on.
        pace = 1.0 if done < 5.0 else elapsed / done
        left = f"about {_clock(pace * (total - done))} left"
        if self._bar is not None:
            self._bar.update(self._task, description=self._label, total=total, completed=done, left=left)
        elif elapsed - self._printed >= 10.0 or self._printed == 0.0:
            self._printed = max(elapsed, 1e-9)
            self._percent = max(self._percent, 100 * done / total)
            print(f"[{self._percent:3.0f}%] {self._label}, {left}", file=sys.stderr, flush=True)
