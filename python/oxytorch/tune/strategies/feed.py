"""Strategies of where batches come from: drawn while a step is taken, by a thread or by processes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, IterableDataset

from ... import _C
from ...data.ahead import Prefetched
from ...data.batches import can_visit, visit
from ...data.rebuilt_loader import LoaderSetting, RebuiltLoader
from ..record import rng_digest
from ..strategy import Strategy, strategy

if TYPE_CHECKING:
    from ..run import Run

__all__: list[str] = []

_LEAST_SHARE = 0.02  # of a step: what drawing may take and be left alone
_LOOKS = 8  # batches that are watched for random numbers
_MOST_WORKERS = 4


class _Feed(Strategy):
    """Another way to draw the same batches in the same order."""

    group = "feed"
    feeds = True
    _kept: Iterable[Any] | None = None

    def applies(self, run: Run) -> bool | str:
        if not can_visit(run.data):
            return "batches come from a list or an iterator, not from a loader"
        if run.fetch_share < _LEAST_SHARE:
            return f"drawing a batch takes {100 * run.fetch_share:.1f} % of a step"
        if hasattr(run.data, "state_dict"):
            return "the loader's position is saved, and would run ahead of the steps"
        if _draws_random(run):
            return "the data set draws random numbers, which would come in another order"
        return True

    def apply(self, run: Run) -> None:
        if self._kept is None:
            self._kept = self._made(run.given_data)
        run.data = self._kept  # the same each time: an iteration under way goes on

    def revert(self, run: Run) -> None:
        run.data = run.given_data

    def _made(self, loader: Any) -> Iterable[Any]:
        raise NotImplementedError


_RANDOM: WeakKeyDictionary[Run, bool] = WeakKeyDictionary()


def _draws_random(run: Run) -> bool:
    """Whether drawing batches draws random numbers after the first; looked at once a run."""
    if run not in _RANDOM:
        with visit(run.data, run.params):
            batches = iter(run.data)  # type: ignore[arg-type]
            next(batches, None)  # a sampler draws its seed with the first
            before = rng_digest(run)
            for _ in islice(batches, _LOOKS - 1):
                pass
            _RANDOM[run] = rng_digest(run) != before
    return _RANDOM[run]


@strategy(
    "prefetch",
    kind="exact",
    settle=3,
    max_speedup=2.0,
    cost="batches are drawn in a thread of their own, up to two ahead of the steps.",
)
class Prefetch(_Feed):
    """The next batches are drawn by a thread while a step is taken."""

    def _made(self, loader: Any) -> Iterable[Any]:
        return Prefetched(loader)


@strategy(
    "loader_workers",
    kind="exact",
    settle=5,
    max_speedup=8.0,
    cost="each epoch starts processes that draw batches, two ahead each, and hold what the data set writes.",
)
class LoaderWorkers(_Feed):
    """A DataLoader without workers draws its batches in some."""

    def applies(self, run: Run) -> bool | str:
        loader: Any = run.data
        if type(loader) not in (DataLoader, RebuiltLoader):
            return "batches do not come from a torch DataLoader"
        if loader.num_workers > 0:
            return f"the loader has {loader.num_workers} workers already"
        if isinstance(loader.dataset, IterableDataset):
            return "each worker would draw the whole of an iterable data set"
        if loader.worker_init_fn is not None or loader.batch_sampler is None:
            return "the loader has a worker_init_fn or no batches of its own"
        return super().applies(run)

    def _made(self, loader: Any) -> Iterable[Any]:
        workers = max(1, min(_MOST_WORKERS, int(_C.base.cores()["usable"])))
        return RebuiltLoader(loader, LoaderSetting.of(loader).with_workers(workers))
