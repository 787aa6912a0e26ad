"""`PerformanceConfig`: every setting of a run, with a level, a default and a reason."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import _C

_Native = _C.base.PerformanceConfig
_KEYS = tuple(_Native.keys())


class PerformanceConfig:
    """Settings of a run, readable and writable as attributes.

    Levels: ``basic`` changes no bit of the result, ``advanced`` adds changes within rounding, ``ultra`` adds opt-in
    trades (8-bit optimizer state). `explain()` prints every value, where it came from and why.

    Parameters
    ----------
    level : {"advanced", "basic", "ultra"}
        Where the defaults come from.
    **overrides
        Settings by name, for example ``clip_norm=1.0`` or ``precision="bf16"``. ``True`` and ``False`` are understood
        for ``on`` and ``off``, ``None`` for ``none``. Other libraries' words are understood too, such as
        ``max_grad_norm=1.0`` or ``compile_model=True``, and sections: ``training={"mixed_precision": True}``.

    Raises
    ------
    ValueError
        For an unknown setting (the nearest right name is in the message) or a value out of range.
    NotImplementedError
        For a word of the field that has no effect here yet, such as ``batch_size``; the message says what to do.
    TypeError
        For a value of a wrong type.

    Examples
    --------
    >>> config = PerformanceConfig("basic", clip_norm=1.0)
    >>> config.precision, config.clip_norm
    ('fp32', 1.0)
    """

    __slots__ = ("_native",)
    __hash__ = None  # type: ignore[assignment]  # it can change

    _native: _Native

    if TYPE_CHECKING:
        level: str
        precision: str
        channels_last: str
        threads: int | str
        interop_threads: int | str
        flush_denormals: str
        allocator: str
        allocator_retain_limit: str
        step_tail: str
        optimizer_state: str
        attention: str
        compile: str
        accumulation_steps: int
        clip_norm: float
        clip_value: float
        ema_decay: float
        nonfinite: str
        grad_scaler: str
        schedule: str
        warmup_steps: int
        min_lr_ratio: float
        max_steps: int
        steps_planned: int
        tune_seconds: float
        remember: bool
        early_stopping_patience: int
        early_stopping_min_delta: float
        early_stopping_mode: str
        early_stopping_restore_best: bool
        memory_limit: str
        goal: str
        max_slowdown: float
        max_growth: float
        gradient_checkpointing: str
        saved_tensors: str
        num_workers: int | str
        prefetch: int | str
        pin_memory: str
        cache: str
        seed: int | str
        deterministic: bool
        progress: str
        log_every: int
        monitor: bool

    def __init__(self, level: str = "advanced", **overrides: Any) -> None:
        object.__setattr__(self, "_native", _Native(level))
        _set_all(self._native, overrides)

    @classmethod
    def _from_native(cls, native: _Native) -> PerformanceConfig:
        config = cls.__new__(cls)
        object.__setattr__(config, "_native", native)
        return config

    @classmethod
    def of(
        cls, value: PerformanceConfig | Mapping[str, Any] | str | os.PathLike[str], **overrides: Any
    ) -> PerformanceConfig:
        """Make a configuration from what a user passes as ``config=``; a copy, with `overrides` on top.

        Parameters
        ----------
        value : PerformanceConfig, mapping, str or path
            A configuration, settings by name, a level, or a file (a path, or a text that ends in .json, .yaml or .yml).
        **overrides
            Settings by name.

        Raises
        ------
        ValueError, TypeError, OSError
            As the constructor and `from_file`; `TypeError` for another kind of `value`.
        """
        if isinstance(value, PerformanceConfig):
            config = value.copy()
        elif isinstance(value, Mapping):
            config = cls.from_dict(value)
        elif isinstance(value, os.PathLike) or (
            isinstance(value, str) and value.lower().endswith((".json", ".yaml", ".yml"))
        ):
            config = cls.from_file(value)
        elif isinstance(value, str):
            config = cls(value)
        else:
            raise TypeError(
                f"config must be a level, a PerformanceConfig, a mapping or a path, not {type(value).__name__}."
            )
        _set_all(config._native, overrides)
        return config

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> PerformanceConfig:
        """Read a .json, .yaml or .yml file of settings; `FileNotFoundError`, `OSError` or as the constructor."""
        return cls._from_native(_Native.from_file(os.fspath(path)))

    @classmethod
    def from_json(cls, text: str) -> PerformanceConfig:
        """Read a JSON object of settings."""
        return cls._from_native(_Native.from_json(text))

    @classmethod
    def from_yaml(cls, text: str) -> PerformanceConfig:
        """Read a YAML mapping of settings."""
        return cls._from_native(_Native.from_yaml(text))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> PerformanceConfig:
        """Settings by name, ``level`` among them; a value may be a section: a mapping of settings."""
        config = cls()
        _set_all(config._native, settings)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Every setting and its value."""
        return {key: self._native.get(key) for key in _KEYS}

    def to_json(self) -> str:
        """Every setting and its value, as a JSON object."""
        return self._native.to_json()

    def to_yaml(self) -> str:
        """Every setting and its value, as a YAML mapping."""
        return self._native.to_yaml()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .json, .yaml or .yml file, whole or not at all."""
        self._native.save(os.fspath(path))

    def set(self, key: str, value: Any) -> None:
        """Set one value by name, or those of a section."""
        _set_all(self._native, {key: value})

    def reset(self, key: str) -> None:
        """Put one setting back to its level's default."""
        self._native.unset(key)

    def origin(self, key: str) -> str:
        """Where a value came from: ``"level advanced"``, ``"file run.yaml"`` or ``"caller"``."""
        return self._native.origin(key)

    def is_given(self, key: str) -> bool:
        """Whether a file or the caller set `key` to another value than the level's default."""
        return _C.base.is_given(self._native, key)

    def check(self, user: str) -> None:
        """Refuse the first setting that was given and that `user` would have to drop.

        Parameters
        ----------
        user : {"trainer", "accelerate", "performance_optimizer", "own_step"}
            What takes this configuration; the last is `PerformanceOptimizer` with ``loop="plan"`` or ``step=``.

        Raises
        ------
        NotImplementedError
            For one that `user` cannot honour.
        ValueError
            For one that another setting leaves without effect, or contradicts.
        """
        _C.base.check_settings(self._native, user)

    def explain(self) -> str:
        """A table: each setting, its value, where it came from, and why it is the default."""
        return self._native.explain()

    def copy(self) -> PerformanceConfig:
        """An independent copy, which remembers where values came from."""
        return self._from_native(_Native(self._native))

    def __copy__(self) -> PerformanceConfig:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> PerformanceConfig:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        native = self._native
        entries = [
            (key, native.get(key), native.source(key), native.origin(key))
            for key in _KEYS
            if native.source(key) != "level"
        ]
        return _rebuild, (type(self), self.level, entries)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PerformanceConfig):
            return NotImplemented
        return self._native.equals(other._native)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.to_dict().items())

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_KEYS})

    def __repr__(self) -> str:
        given = [f"{key}={self._native.get(key)!r}" for key in _KEYS[1:] if self._native.source(key) != "level"]
        return f"PerformanceConfig({', '.join([repr(self.level), *given])})"

    if not TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any:
            if key.startswith("_"):
                raise AttributeError(f"PerformanceConfig has no attribute {key!r}")
            try:
                return self._native.get(key)
            except (ValueError, NotImplementedError) as error:
                raise AttributeError(str(error)) from None

        def __setattr__(self, key: str, value: Any) -> None:
            try:
                _Native.key_of(key)
            except ValueError as error:
                raise AttributeError(str(error)) from None
            self._native.set(key, value)


def _set_all(native: _Native, settings: Mapping[str, Any]) -> None:
    """Set what a mapping says, sections of it included."""
    flat = list(_flat(settings))
    _Native.check_names([key for key, _ in flat])
    for key, value in flat:
        native.set(key, value)


def _flat(settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if not isinstance(key, str):
            raise TypeError(f"settings have names, not {key!r}.")
        if not isinstance(value, Mapping):
            yield section + key, value
        elif value:
            yield from _flat(value, f"{section}{key}.")
        else:
            raise TypeError(
                f"setting {section + key!r} is an empty mapping; a value is a word, a number, true or false."
            )


def _rebuild(kind: type[PerformanceConfig], level: str, entries: list[tuple[str, Any, str, str]]) -> PerformanceConfig:
    native = _Native(level)
    for key, value, source, origin in entries:
        native.set(key, value, source, origin)
    return kind._from_native(native)
