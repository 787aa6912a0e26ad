"""Whether the bridge was loaded in lazy mode."""

from __future__ import annotations

import os


def is_lazy() -> bool:
    """As in release 1.23: eager unless asked."""
    return os.environ.get("PT_HPU_LAZY_MODE", "0") != "0"
