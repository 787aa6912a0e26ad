"""torch's `Optimizer.state` as dicts that tell the native tail when an entry is exchanged."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor

__all__ = ["Changed", "ParamState", "StateMap", "plain"]


class Changed:
    """Raised when state that the native tail holds was exchanged from Python."""

    __slots__ = ("raised",)

    def __init__(self) -> None:
        self.raised = True


class ParamState(dict[str, Any]):
    """State of one parameter: a dict that tells the tail when an entry is replaced."""

    __slots__ = ("_changed",)

    def __init__(self, changed: Changed, entries: dict[str, Any] | None = None) -> None:
        super().__init__(entries or {})
        self._changed = changed

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # copies and pickles are torch's own

    def __setitem__(self, key: str, value: Any) -> None:
        self._changed.raised = True
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._changed.raised = True
        super().__delitem__(key)

    def pop(self, *args: Any) -> Any:
        """As of dict."""
        self._changed.raised = True
        return super().pop(*args)

    def clear(self) -> None:
        """As of dict."""
        self._changed.raised = True
        super().clear()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As of dict."""
        self._changed.raised = True
        super().update(*args, **kwargs)


class StateMap(defaultdict[Tensor, Any]):
    """torch's `Optimizer.state`, which tells the tail when a parameter's state is replaced."""

    def __init__(self, changed: Changed, entries: dict[Tensor, dict[str, Any]]) -> None:
        super().__init__(lambda: ParamState(changed))
        self._changed = changed
        for param, state in entries.items():
            super().__setitem__(param, ParamState(changed, state) if isinstance(state, dict) else state)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))

    def __setitem__(self, key: Tensor, value: Any) -> None:
        self._changed.raised = True
        super().__setitem__(key, ParamState(self._changed, value) if type(value) is dict else value)

    def __delitem__(self, key: Tensor) -> None:
        self._changed.raised = True
        super().__delitem__(key)

    def clear(self) -> None:
        """As of dict."""
        self._changed.raised = True
        super().clear()


def plain(state: Any) -> Any:
    """A plain dict where `state` is one of these; anything else as it is."""
    return dict(state) if isinstance(state, dict) else state
