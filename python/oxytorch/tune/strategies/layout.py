"""Strategies of memory layout: edits of a model, tried on its training step."""

from __future__ import annotations

from typing import Any

from ...model import edits
from ..strategy import strategy

__all__: list[str] = []

_TRAITS: dict[str, Any] = {
    "expected_speedup": 1.4,
    "group": "layout",
    "interacts": ("compile", "bf16_autocast", "allocator", "host_pool"),
}

strategy("channels_last", kind="tolerance", **_TRAITS)(edits.ChannelsLast)
strategy("channels_last_3d", kind="tolerance", **_TRAITS)(edits.ChannelsLast3d)
