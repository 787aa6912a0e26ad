"""The settings of a loader, chosen by measuring: the same samples in the same order, in less time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .._C import data as _native
from .._C.data import LoaderTrial
from ..generators import unmoved_generators
from .batches import drawn_by
from .loader import Loader
from .loader_search import LoaderSearch
from .rebuilt_loader import RebuiltLoader

__all__ = ["LoaderTrial", "TunedLoader", "tune"]


class TunedLoader:
    """A loader with the settings that `tune` found; can be iterated anew and has a length where the loader has.

    Attributes not listed here are those of the loader.

    Attributes
    ----------
    loader : torch.utils.data.DataLoader or Loader
        The one to iterate: the given one where no setting was faster, and where it is a `Loader`, whose settings are
        changed. Samplers, data set and generator are the same objects as before.
    report : list of LoaderTrial
        What was tried, the loader as given first: ``setting``, ``batches_per_second`` (None where it was not measured),
        ``ratio`` of its speed and that as given, and ``note``. ``str()`` of the tuned loader is a table of it.
    bottleneck : str
        Of a `Loader`, where most of its threads' time goes: "read", "collate" or a stage's name. Else empty.
    """

    def __init__(
        self, given: Iterable[Any], loader: Iterable[Any], report: list[LoaderTrial], bottleneck: str = ""
    ) -> None:
        self._given = given
        self._before: dict[str, Any] = {}  # settings of a Loader
        self.loader = loader
        self.report = report
        self.bottleneck = bottleneck

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __str__(self) -> str:
        head = f"{'setting':<44} {'batches/s':>10} {'ratio':>8}"
        foot = [f"most of the threads' time goes to {self.bottleneck}"] if self.bottleneck else []
        return "\n".join([head, *map(str, self.report), *foot])

    def revert(self) -> None:
        """Go back to the loader as it was given. Workers that were kept for the next epoch are ended."""
        if isinstance(self.loader, RebuiltLoader):
            self.loader.close()
        if isinstance(self._given, Loader) and self._before:
            self._given.change(**self._before)
            self._before = {}
        self.loader = self._given


def tune(
    dataloader: DataLoader[Any] | Loader,
    *,
    seconds: float = 20.0,
    step: Callable[[Any], Any] | None = None,
    memory: str = "auto",
    disk: str = "0",
    progress: bool = False,
) -> TunedLoader:
    """Find faster settings of a loader by measuring: the same samples in the same order, batch for batch.

    Of a `Loader`, the number of threads, batches ahead, and a cache that is split between memory and a disk by what the
    data set would take. A cache is timed with its samples in it and counted by the share of the data set that it would
    hold; the epoch that fills it is slower, and the note says how much. Not tried is a cache of a data set of Python's,
    which may draw at random.

    Of a DataLoader, other numbers of workers, a thread that draws ahead where there are none, batches that workers
    prefetch, workers that stay for the next epoch, and pinned memory where there is an accelerator. What an epoch takes
    is counted, with starting the workers. One is taken only where its first batches of two epochs and all random
    generators after them are the same as those of the loader as given.

    Settings take turns at drawing batches, and one is taken only where it is at least 2 % faster.

    What random numbers a data set draws depends on the number of workers, so that is left alone for one that does.

    Parameters
    ----------
    dataloader : torch.utils.data.DataLoader or Loader
    seconds : float
        How long to measure; a slow loader may take twice that, and a round more.
    step : callable, optional
        Takes a batch: a training step, called between draws, so that what it takes of the processors counts. What it
        changes stays changed, except for the default random generators. Without it what is measured is drawing alone.
    memory, disk : str
        Of a `Loader`, what a cache may take: "2GB", "30%", "auto" (of the memory a quarter of what is available, of the
        disk half of what is free), "0".
    progress : bool
        Whether to write each trial to stderr.

    Returns
    -------
    TunedLoader
        Where nothing is better, or the loader is of a kind that is left alone, with the loader as given and the reason.
        Workers that stay start anew where attributes of the data set were changed between epochs, as far as eight
        levels of attributes and short containers show it; and a second iteration ends the first, as with any
        persistent workers.

    Raises
    ------
    ValueError
        Of a `Loader`, for `seconds` that are not positive and sizes that are none; of a DataLoader, for `memory` or
        `disk`.
    Exception
        What drawing from the loader as given, or the step, raises.

    Examples
    --------
    >>> batches = ox.data.tune(loader, step=train_step)
    >>> print(batches)
    >>> for batch in batches: ...
    """
    if isinstance(dataloader, Loader):
        return _tuned(dataloader, seconds, step, memory, disk, progress)
    if (memory, disk) != ("auto", "0"):
        raise ValueError(
            f"memory={memory!r} and disk={disk!r} are of a cache of samples, which a {type(dataloader).__name__} does "
            "not have; leave them out, or give an oxytorch.data.Loader."
        )
    reason = _reason_to_leave(dataloader)
    if reason:
        return TunedLoader(dataloader, dataloader, [LoaderTrial("as given", note=reason)])
    return TunedLoader(dataloader, *LoaderSearch(dataloader, seconds, step, progress).run())


def _tuned(
    loader: Loader, seconds: float, step: Callable[[Any], Any] | None, memory: str, disk: str, progress: bool
) -> TunedLoader:
    given = None if step is None else lambda columns: step(loader._given(columns))
    tell = (lambda line: print(line, file=sys.stderr)) if progress else None
    if loader._source is not None:
        memory = "0"
    with unmoved_generators([]):
        found = _native.tune(loader._native, seconds, given, memory, disk, "", tell)
    tuned = TunedLoader(loader, loader, found.trials, found.bottleneck)
    if found.trials[0].note == "":  # another setting was taken
        taken: dict[str, Any] = {"threads": found.threads, "prefetch": found.prefetch}
        if loader._options.cache is None and found.cache is not None:
            taken["cache"] = found.cache
        tuned._before = dict(zip(taken, loader.change(**taken), strict=True))
    return tuned


def _reason_to_leave(loader: Any) -> str:
    """Why a loader cannot be made anew with other settings; empty where it can."""
    if type(loader) is not DataLoader:
        return f"it is a {type(loader).__name__}, not a torch DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is iterable, and decides itself which worker draws what"
    for one in drawn_by(loader):
        if hasattr(one, "state_dict"):
            return f"the position of its {type(one).__name__} is saved, and would run ahead of the steps"
        if one is not loader and hasattr(one, "__next__"):
            return f"its {type(one).__name__} can be iterated once only"
    return ""
