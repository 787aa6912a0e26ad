"""A DataLoader made anew with other settings, of which neither batches nor random generators tell."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from .ahead import Ahead
from .batches import stop_drawing

__all__ = [
    "SCALARS", "TORCH_PREFETCH", "LoaderSetting", "RebuiltLoader", "end", "is_file", "is_generator", "kept_attributes",
    "reached",
]  # fmt: skip

TORCH_PREFETCH = 2  # batches a worker, where nothing is said
SCALARS = (type(None), bool, int, float, complex, str, bytes)
_LEVELS, _LONG, _MOST = 8, 64, 4096  # of attributes; items of a container; objects


def reached(roots: Iterable[Any]) -> list[Any]:
    """Return what objects hold in attributes and short containers, each once, in the same order each time."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [(root, 0) for root in roots]
    for value, level in waiting:  # it grows meanwhile
        if len(found) == _MOST:
            break
        if isinstance(value, SCALARS):
            found.append(value)
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        found.append(value)
        inside: Iterable[Any] = ()
        if isinstance(value, dict | list | tuple | set):
            if len(value) <= _LONG:
                inside = value.values() if isinstance(value, dict) else value
        elif hasattr(value, "__dict__") and not isinstance(value, type | Tensor | ModuleType):
            inside = vars(value).values()
        if level < _LEVELS:
            waiting.extend((item, level + 1) for item in inside)
    return found


def _facts(roots: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return what shows a change of objects: what they hold, and how often it was written to or how long it is."""

    def mark(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value._version
        return len(value) if isinstance(value, dict | list | set) else None

    return [(value, mark(value)) for value in reached(roots)]


def _are_same(left: Sequence[tuple[Any, Any]], right: Sequence[tuple[Any, Any]]) -> bool:
    def same(a: Any, b: Any) -> bool:
        return a is b or (isinstance(a, SCALARS) and type(a) is type(b) and bool(a == b))

    return len(left) == len(right) and all(same(a, b) and m == n for (a, m), (b, n) in zip(left, right, strict=True))


@contextmanager
def kept_attributes(roots: Iterable[Any]) -> Iterator[None]:
    """Give objects and what they hold the attributes back that they have now.

    A data set that opens its file with the first sample has it closed again: processes that are forked later would
    share its position.
    """
    objects = [value for value in reached(roots) if hasattr(value, "__dict__")]
    held = [(value.__dict__, dict(value.__dict__)) for value in objects if isinstance(value.__dict__, dict)]
    try:
        yield
    finally:
        for live, before in held:
            if live.keys() != before.keys() or any(live[key] is not before[key] for key in before):
                live.clear()
                live.update(before)


def is_file(value: Any) -> bool:
    """Whether it is an open file, whose position processes would share, or an open database."""
    return isinstance(value, io.IOBase) or type(value).__module__.partition(".")[0] in ("h5py", "lmdb", "sqlite3")


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers of torch, Python or numpy."""
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *of_numpy))


@dataclass(frozen=True)
class LoaderSetting:
    """What is chosen; `ahead` is the batches that a thread draws ahead in a process without workers."""

    workers: int
    prefetch: int | None
    persistent: bool
    pinned: bool
    ahead: int = 0

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> LoaderSetting:
        """Return that of a loader."""
        ahead = loader.ahead if isinstance(loader, RebuiltLoader) else 0
        return cls(loader.num_workers, loader.prefetch_factor, loader.persistent_workers, loader.pin_memory, ahead)

    def with_workers(self, workers: int) -> LoaderSetting:
        """Return it with another number of workers."""
        prefetch = (self.prefetch or TORCH_PREFETCH) if workers else None
        return replace(self, workers=workers, prefetch=prefetch, persistent=self.persistent and workers > 0)

    def options(self) -> dict[str, Any]:
        """Return it as arguments of a DataLoader."""
        return {
            "num_workers": self.workers,
            "prefetch_factor": self.prefetch,
            "persistent_workers": self.persistent,
            "pin_memory": self.pinned,
        }

    def __str__(self) -> str:
        parts = [f"{self.workers or 'no'} worker{'s' * (self.workers != 1)}"]
        parts += [f"prefetch {self.prefetch}"] * bool(self.workers)
        parts += ["persistent"] * self.persistent + ["pinned"] * self.pinned
        return ", ".join([*parts, *["drawn ahead by a thread"] * bool(self.ahead)])


def _options(loader: DataLoader[Any], **changes: Any) -> dict[str, Any]:
    """Return arguments that make a DataLoader of the same batches as this one, with some changed.

    The samplers are the same objects, so ``loader.sampler.set_epoch`` goes on working. Without workers, what only
    workers take is left out.
    """
    batches = loader.batch_sampler
    is_own = type(batches) is BatchSampler and batches.sampler is loader.sampler  # that which a DataLoader makes itself
    if "batch_sampler" in changes or "sampler" in changes:
        order: dict[str, Any] = {}
    elif batches is None or is_own:
        order = {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
    else:
        order = {"batch_sampler": batches}
    kept = (
        "dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
        "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
    )  # fmt: skip
    options = {**order, **{name: getattr(loader, name) for name in kept}, **changes}
    if options["num_workers"] == 0:
        options |= {"timeout": 0, "multiprocessing_context": None, "prefetch_factor": None, "persistent_workers": False}
    return options


class RebuiltLoader(DataLoader[Any]):
    """A DataLoader that leaves behind what the given one would: the same position of the random generators."""

    def __init__(self, given: DataLoader[Any], setting: LoaderSetting, **changes: Any) -> None:
        super().__init__(**_options(given, **setting.options(), **changes))
        self.ahead = setting.ahead
        self._draws_seed = setting.persistent and not given.persistent_workers
        self._as_started: list[tuple[Any, Any]] = []

    def __iter__(self) -> Any:
        if self.persistent_workers:
            self._keep_or_end_workers()
        batches = super().__iter__()
        return Ahead(batches, self.ahead) if self.ahead else batches

    def _keep_or_end_workers(self) -> None:
        now = _facts((self.dataset, self.collate_fn))
        if self._iterator is not None and not _are_same(now, self._as_started):
            self.close()  # workers have the data set as it was
        self._as_started = now
        if self._iterator is not None and self._draws_seed:
            # New workers would have been given a seed.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def close(self) -> None:
        """End workers that were kept for the next epoch."""
        workers, self._iterator = self._iterator, None
        end(workers)


def end(batches: Any) -> None:
    """End an iteration with what draws for it."""
    stop_drawing(batches)
    shut_down = getattr(batches, "_shutdown_workers", None)
    if callable(shut_down):
        shut_down()
