"""What a configuration asks of `accelerate`: settings of the process, strategies taken out, strategies put in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .. import _C
from .._C import tune as _native
from ..base import log, parse_size, system_info
from ..config import PerformanceConfig
from ..report import SettingLine
from .strategy import Strategy, offer

__all__ = ["Asked", "named_by_user"]

Classes = Mapping[str, type[Strategy]]


def named_by_user(settings: PerformanceConfig) -> dict[str, Any]:
    """Settings that the user named, against those that come with the level."""
    return {name: value for name, value in settings if not settings.origin(name).startswith("level ")}


class Asked:
    """What the user's own settings decide before anything is measured.

    Parameters
    ----------
    settings : PerformanceConfig
    strategies : mapping
        Classes on offer by name.
    excluded : iterable of str
        Names that the caller does not want tried.

    Attributes
    ----------
    skipped : dict
        Why strategies are not tried.
    required : list of Requirement
        By setting, the strategies of which one is put in force whatever it gains.
    host : list
        Settings of the process that are applied, to be taken back in the reverse order.

    Raises
    ------
    NotImplementedError
        For a value that no strategy brings about.
    ValueError
        For one whose strategies are all excluded, not offered or above the level.
    """

    def __init__(self, settings: PerformanceConfig, strategies: Classes, excluded: Iterable[str]) -> None:
        self.settings = settings
        self.host: list[Any] = []
        self._named = named_by_user(settings)
        offers = [offer(name, cls) for name, cls in strategies.items()]
        self.skipped, self.required = _native.asked_of(settings._native, offers, list(excluded))

    # -- the process ---------------------------------------------------------------------------------------------

    @property
    def retain_limit(self) -> int | None:
        """Bytes that the allocator may keep; None: its own choice."""
        limit = self.settings.allocator_retain_limit
        return None if limit == "auto" else parse_size(limit, system_info()["memory"]["limit"])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the settings of the process; they are taken back where the body throws."""
        try:
            if self.settings.deterministic:
                self._add(_C.trainer.use_deterministic_algorithms())
            if isinstance(threads := self._named.get("threads"), int):
                self._add(_C.trainer.size_threads(threads))
            if self._named.get("flush_denormals") == "on":
                self._add(_C.trainer.flush_denormals())
            if self._named.get("allocator") == "retain":
                self._add(_C.trainer.tune_allocator(self.retain_limit))
            yield
        except BaseException:
            self.revert()
            raise

    def _add(self, setting: Any) -> None:
        self.host.append(setting)
        if not setting.is_in_effect:
            log("warn", f"accelerate: {setting.name} was asked for and is left out: {setting.reason}")

    def lines(self) -> list[SettingLine]:
        """Return a line for a report of each setting of the process that was asked for."""
        return [SettingLine(s.name, "on" if s.is_in_effect else "refused", s.reason, s.cost) for s in self.host]

    def revert(self) -> None:
        """Take the settings of the process back."""
        while self.host:
            self.host.pop().revert()
