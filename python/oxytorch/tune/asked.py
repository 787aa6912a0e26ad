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
from .strategy import Strategy

__all__ = ["Asked", "named_by_user"]

# Names or groups of strategies: the key of the configuration that is theirs, and the value that takes them out.
_KEYS: dict[str, tuple[str, str]] = {
    "host_memory": ("allocator", "system"),
    "host_pool": ("allocator", "system"),
    "threads": ("threads", "keep"),
    "affinity": ("threads", "keep"),
    "flush_denormals": ("flush_denormals", "off"),
    "layout": ("channels_last", "off"),
    "attention": ("attention", "default"),
    "precision": ("precision", "fp32"),
    "step_tail": ("step_tail", "off"),
    "int8_state": ("optimizer_state", "fp32"),
    "compile": ("compile", "off"),
}

# A value by name is what these strategies do, the first that applies; the others of their group are something else.
_MEANS: dict[tuple[str, str], tuple[str, ...]] = {
    ("precision", "bf16"): ("bf16_autocast",),
    ("channels_last", "on"): ("channels_last", "channels_last_3d"),
    ("attention", "math"): ("math_attention", "math_attention_bf16"),
    ("step_tail", "on"): ("step_tail", "int8_state"),
    ("optimizer_state", "int8"): ("int8_state",),
    ("compile", "default"): ("compile", "compile_dynamic"),
    ("compile", "max-autotune"): ("compile_max_autotune",),
}

# Values that nothing here can bring about, and what can.
_NOTHING: dict[tuple[str, str], str] = {
    ("precision", "fp16"): "float16 needs a loss scale in the loop. Use oxytorch.Trainer(precision='fp16'), or 'bf16'",
    ("optimizer_state", "bf16"): "use oxytorch.optim.replace(optimizer, state_dtype='bf16') before, or 'int8'",
}

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
    wanted : dict
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
        self.skipped: dict[str, str] = {}
        self.wanted: dict[str, tuple[str, ...]] = {}
        self.host: list[Any] = []
        self._named = named_by_user(settings)
        self._excluded = set(excluded)
        for key, value in self._named.items():
            if why := _NOTHING.get((key, value)):
                raise NotImplementedError(f"{key} = {value!r}: accelerate() has no strategy for it; {why}.")
            if names := _MEANS.get((key, value)):
                self._want(key, names, strategies)
        for name, cls in strategies.items():
            self._take_out(name, cls)

    def _want(self, key: str, names: tuple[str, ...], strategies: Classes) -> None:
        here = [name for name in names if name in strategies and name not in self._excluded]
        allowed = tuple(name for name in here if _native.allows(self.settings.level, strategies[name].kind))
        if not allowed:
            why = f"level {self.settings.level!r} does not allow it" if here else f"{names[0]} is not to be tried"
            raise ValueError(
                f"{key} = {self._named[key]!r} was asked for, and {why}. Change the one or the other, or leave "
                f"{key} at its default."
            )
        self.wanted[key] = allowed
        group = strategies[allowed[0]].group
        for name, cls in strategies.items():
            if cls.group == group and name not in names:
                self.skipped.setdefault(name, f"{key} is {self._named[key]!r} in the configuration")

    def _take_out(self, name: str, cls: type[Strategy]) -> None:
        precision = ("precision", "fp32") if cls.kind == "precision" else ("", "")
        key, off = _KEYS.get(name) or (precision if precision[0] else _KEYS.get(cls.group, ("", "")))
        value = self._named.get(key)
        # Of settings of the process the user's own value is applied, and nothing else is to be found out.
        applied = (key == "threads" and isinstance(value, int) and cls.group == "threads") or (
            (key, value, name) in (("flush_denormals", "on", name), ("allocator", "retain", "allocator"))
        )
        if key and (value == off or applied):
            self.skipped.setdefault(name, f"{key} is {value!r} in the configuration")

    def requirements(self) -> list[_native.Requirement]:
        """What is wanted, as the tuner takes it."""
        return [
            _native.Requirement(f"{setting} = {getattr(self.settings, setting)!r}", names)
            for setting, names in self.wanted.items()
        ]

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
