"""What durations are measured with; tests put clocks of their own here."""

from __future__ import annotations

import time

__all__ = ["seconds", "thread_seconds"]

seconds = time.perf_counter
#: Processor seconds of this thread.
thread_seconds = time.thread_time
