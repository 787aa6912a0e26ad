"""Memory of a run, looked at and cleaned up at the boundaries of its steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from .. import _C
from .batch import release_cache

__all__ = ["MemoryConfig", "MemoryManager", "MemoryUse"]

MemoryUse = _C.memory.MemoryUse


@dataclass(frozen=True)
class MemoryConfig:
    """What a `MemoryManager` does by itself.

    Attributes
    ----------
    limit : int or str, optional
        Hard limit on the process, ``"8GiB"`` or ``"80%"`` of what it may use; see `set_limit`.
    warn_at, critical_at : float
        Shares of what the process may use from which the levels "warning" and "critical" are reached.
    clean_at : float
        Share from which a check cleans up; above 1: none does.
    clean_every : int
        Steps between two clean-ups, whatever is in use; 0: none.
    cache_limit : int or str, optional
        What allocators may keep free, ``"512MiB"`` or a share: a check that finds more cleans up. None: their own
        limits.
    check_every : int
        Steps between two checks, each of which reads files of the kernel.
    """

    limit: int | str | None = None
    warn_at: float = 0.8
    critical_at: float = 0.95
    clean_at: float = 0.9
    clean_every: int = 0
    cache_limit: int | str | None = None
    check_every: int = 10


class MemoryManager:
    """Live figures of a process, thresholds with callbacks, and clean-up, at the boundaries of its steps.

    Parameters
    ----------
    config : MemoryConfig, optional
    **settings
        Those of `MemoryConfig`, in place of one.

    Raises
    ------
    ValueError
        For shares that are not above 0 or a warning above what is critical, intervals below 0, and sizes that are none
        or a limit below what is resident already.
    NotImplementedError
        Where a limit cannot be set.

    Examples
    --------
    >>> memory = MemoryManager(warn_at=0.7, clean_every=1000)
    >>> memory.on("warning", lambda use: print(use))
    >>> trainer = ox.Trainer(model, optimizer, loss_fn, memory=memory)  # which calls memory.step()
    """

    def __init__(self, config: MemoryConfig | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise TypeError(f"config was given beside {', '.join(settings)}. Give one of them.")
        self.config = config if config is not None else MemoryConfig(**settings)
        named = {field.name: getattr(self.config, field.name) for field in fields(MemoryConfig)}
        for key in ("limit", "cache_limit"):
            named[key] = "" if named[key] is None else str(named[key])
        self._native = _C.memory.MemoryManager(**named)
        self._native.on_clean(_release)

    def use(self) -> MemoryUse:
        """Return what is in use now."""
        return self._native.use()

    def on(self, level: str, callback: Callable[[MemoryUse], Any]) -> None:
        """Call back when a check finds this level, or a higher one, after a lower one.

        Once, until a check has found less than 0.95 of its share again. What it throws passes through.

        Parameters
        ----------
        level : {"warning", "critical", "normal"}
            "normal" is reached at the first check.
        callback : callable
            Takes a `MemoryUse`.
        """
        self._native.on(level, callback)

    def on_clean(self, release: Callable[[], Any]) -> None:
        """Call `release` first in each clean-up: it lets go of what the program keeps for reuse."""
        self._native.on_clean(release)

    def clean(self) -> int:
        """Collect garbage, and give memory that is only kept for reuse back to the kernel and the device.

        Returns
        -------
        int
            Bytes by which less is resident. The steps that follow fault in anew what they use.
        """
        return self._native.clean()

    def revert(self) -> None:
        """Lift its limit; the rest goes on."""
        self._native.revert()

    def step(self) -> None:
        """To be called after each training step; `Trainer` does."""
        self._native.step()

    def check(self) -> str:
        """Do what `step` does after each `check_every` steps; return the level."""
        return self._native.check()

    @property
    def level(self) -> str:
        """As the last check found it: "normal", "warning" or "critical"."""
        return self._native.level

    @property
    def steps(self) -> int:
        """Calls of `step`."""
        return self._native.steps

    @property
    def clean_ups(self) -> int:
        """So far."""
        return self._native.clean_ups

    @property
    def bytes_cleaned(self) -> int:
        """Bytes that all clean-ups gave back."""
        return self._native.bytes_cleaned

    @property
    def events(self) -> list[str]:
        """What happened, in sentences, the last 100."""
        return self._native.events

    def report(self) -> str:
        """Return figures and events as text."""
        return self._native.report()

    def __repr__(self) -> str:
        """Return level and figures."""
        return f"<MemoryManager: {self.level}, {self.use()}>"


def _release() -> None:
    gc.collect()
    release_cache()
