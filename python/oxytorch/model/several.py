"""What may be given as a list, or alone."""

from __future__ import annotations

from typing import Any

__all__ = ["listed", "numbered"]


def listed(given: Any) -> tuple[Any, ...]:
    """Return what was given as a list, or alone."""
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def numbered(name: str, given: Any) -> list[tuple[str, Any]]:
    """Return the same with what messages call each: "name[0]" and so on in a list, "name" alone."""
    if not isinstance(given, list | tuple):
        return [(name, given)]
    return [(f"{name}[{i}]", one) for i, one in enumerate(given)]
