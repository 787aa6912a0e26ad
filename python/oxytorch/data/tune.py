"""The settings of a torch DataLoader, chosen by measuring: the same samples in the same order, in less time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .batches import drawn_by
from .loader_search import LoaderSearch, LoaderTrial
from .rebuilt_loader import RebuiltLoader

__all__ = ["LoaderTrial", "TunedLoader", "tune"]


class TunedLoader:
    """A loader with the settings that `tune` found; can be iterated anew and has a length where the loader has.

    Attributes not listed here are those of the loader.

    Attributes
    ----------
    loader : torch.utils.data.DataLoader
        The one to iterate: the given one where no setting was faster. Samplers, data set and generator are the same
        objects as before.
    report : list of LoaderTrial
        What was tried, the loader as given first. ``str()`` of the tuned loader is a table of it.
    """

    def __init__(self, given: Iterable[Any], loader: Iterable[Any], report: list[LoaderTrial]) -> None:
        self._given = given
        self.loader = loader
        self.report = report

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
        return "\n".join([head, *map(str, self.report)])

    def revert(self) -> None:
        """Go back to the loader as it was given. Workers that were kept for the next epoch are ended."""
        if isinstance(self.loader, RebuiltLoader):
            self.loader.close()
        self.loader = self._given


def tune(
    dataloader: DataLoader[Any],
    *,
    seconds: float = 20.0,
    step: Callable[[Any], Any] | None = None,
    progress: bool = False,
) -> TunedLoader:
    """Find faster settings of a DataLoader by measuring: the same samples in the same order, batch for batch.

    Tried are other numbers of workers, a thread that draws ahead where there are none, batches that workers prefetch,
    workers that stay for the next epoch, and pinned memory where there is an accelerator. Settings take turns at
    drawing batches; what they take, with starting the workers, is counted for a whole epoch. One is taken only where
    it is at least 2 % faster, and where its first batches of two epochs and all random generators after them are the
    same as those of the loader as given.

    What random numbers a data set draws depends on the number of workers, so that is left alone for one that does.

    Parameters
    ----------
    dataloader : torch.utils.data.DataLoader
    seconds : float
        How long to measure; a slow loader may take twice that, and a round more.
    step : callable, optional
        Takes a batch: a training step, called between draws, so that what it takes of the processors counts. What it
        changes stays changed, except for the default random generators. Without it what is measured is drawing alone.
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
    Exception
        What drawing from the loader as given, or the step, raises.

    Examples
    --------
    >>> batches = ox.data.tune(loader, step=train_step)
    >>> print(batches)
    >>> for batch in batches: ...
    """
    reason = _reason_to_leave(dataloader)
    if reason:
        return TunedLoader(dataloader, dataloader, [LoaderTrial("as given", note=reason)])
    return TunedLoader(dataloader, *LoaderSearch(dataloader, seconds, step, progress).run())


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
