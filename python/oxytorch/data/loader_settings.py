"""The settings num_workers, prefetch, pin_memory and cache, brought about on a loader that was made without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .._C import data as _native
from ..config import PerformanceConfig
from .loader import Loader
from .rebuilt_loader import LoaderSetting, RebuiltLoader

__all__ = ["LOADER_SETTINGS", "LoaderLine", "with_settings"]

#: By key of a configuration, the value that leaves a loader as it was made.
LOADER_SETTINGS = {"num_workers": "keep", "prefetch": "keep", "pin_memory": "keep", "cache": "off"}


@dataclass
class LoaderLine:
    """What became of one of the settings, as a setting of the process says it.

    Attributes
    ----------
    name : str
    is_in_effect : bool
    reason : str
        Why it is or is not.
    cost : str
    revert : callable
        Takes it back.
    """

    name: str
    is_in_effect: bool
    reason: str
    cost: str = ""
    revert: Callable[[], None] = field(default=lambda: None, repr=False)


def with_settings(
    loader: Any, named: Mapping[str, Any], device: torch.device | None = None
) -> tuple[Iterable[Any], list[LoaderLine]]:
    """Return a loader of the same batches in the same order, with settings that a configuration names.

    Parameters
    ----------
    loader : iterable
        An `oxytorch.data.Loader` is changed where it stands, a torch DataLoader is made anew with the same samplers,
        data set and generator. Others, such as a list, are returned as they are.
    named : mapping
        Of the keys of `LOADER_SETTINGS`; "auto" and what leaves a loader as it was made may be among the values.
    device : torch.device, optional
        Of the model. An `oxytorch.data.Loader` that was given none puts its batches there.

    Returns
    -------
    loader, lines
        A line for each setting that asks for something; not in effect where this kind of loader cannot have it.
    """
    wanted = {key: named[key] for key, off in LOADER_SETTINGS.items() if named.get(key, off) not in (off, "auto")}
    if named.get("cache") == "auto":
        wanted["cache"] = "auto"
    if isinstance(loader, Loader):
        settings = _native.LoaderSettings(loader._native, PerformanceConfig(**wanted)._native, device)
        told = settings.lines
        return loader, [LoaderLine(t.name, t.is_in_effect, t.reason, t.cost, settings.revert) for t in told]
    if not wanted:
        return loader, []
    if type(loader) in (DataLoader, RebuiltLoader):  # what a subclass does besides cannot be made anew
        return _of_torch(loader, wanted)
    words = f"batches come from a {type(loader).__name__}, not from a torch DataLoader or an oxytorch.data.Loader."
    return loader, [LoaderLine(key, False, words) for key in wanted]


def _of_torch(loader: DataLoader[Any], wanted: Mapping[str, Any]) -> tuple[Iterable[Any], list[LoaderLine]]:
    given = LoaderSetting.of(loader)
    setting = given
    lines = []
    workers = wanted.get("num_workers")
    if workers is not None:
        if why := _reason_against(loader, workers):
            lines.append(LoaderLine("num_workers", False, why))
        else:
            setting = setting.with_workers(workers)
            lines.append(LoaderLine("num_workers", True, f"{workers} processes draw batches, in the order as before."))
    if (prefetch := wanted.get("prefetch")) is not None:
        by = "each worker" if setting.workers else "a thread of this process"
        setting = replace(setting, prefetch=prefetch) if setting.workers else replace(setting, ahead=prefetch)
        lines.append(LoaderLine("prefetch", True, f"{prefetch} batches ahead, by {by}.", "they wait in memory."))
    if (pinned := wanted.get("pin_memory")) is not None:
        if pinned == "on" and not torch.accelerator.is_available():
            lines.append(LoaderLine("pin_memory", False, "there is no accelerator to copy to."))
        else:
            setting = replace(setting, pinned=pinned == "on")
            lines.append(LoaderLine("pin_memory", True, "as it was asked for."))
    if "cache" in wanted:
        words = "a torch DataLoader keeps no samples: it has what a data set returns, which may differ each time. "
        lines.append(LoaderLine("cache", False, words + "Use oxytorch.data.Loader."))
    if setting == given:
        return loader, lines
    made = RebuiltLoader(loader, setting)
    for line in lines:
        line.revert = made.close
    return made, lines


def _reason_against(loader: DataLoader[Any], workers: int) -> str:
    """Why a DataLoader cannot have this number of workers with the same batches; empty where it can."""
    if workers == loader.num_workers:
        return ""
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is iterable, and decides itself which worker draws what. Give it to the DataLoader."
    if (workers == 0) != (loader.num_workers == 0) and loader.worker_init_fn is not None:
        return "its worker_init_fn is called in workers only. Give num_workers to the DataLoader."
    return ""
