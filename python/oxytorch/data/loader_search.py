"""Searches settings of a DataLoader: which give the same batches, and which of those is fastest."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from .. import _C, clock
from .._C.data import LoaderTrial
from ..base import median, quantile
from ..generators import rng_state, unmoved_generators
from ..model.graph import digest, digest_of_rng, generator_state, value_digest
from ..model.snapshot import Snapshot
from .batches import drawn_by, generators, tensors
from .rebuilt_loader import (
    SCALARS,
    TORCH_PREFETCH,
    LoaderSetting,
    RebuiltLoader,
    end,
    is_file,
    is_generator,
    kept_attributes,
    reached,
)

__all__ = ["LoaderSearch"]

_LEAST_GAIN = 1.02
_ROUNDS = (3, 15)  # at least, so that one slow moment decides nothing; and at most
_HOPELESS = 0.8  # of the speed as given, after two rounds
_MOST_BATCHES = 4096  # of an epoch, from which batches are drawn
_COMPARED = 4  # batches, besides the first of each worker, drawn twice
_SHARE_OF_WORKERS = 0.65  # of the seconds, for the number of workers; the rest is for the other settings
_WORKERS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class DrawError(Exception):
    """Drawing a batch raised; the cause says what."""


class LoaderSearch:
    """Measures settings of one loader and chooses."""

    def __init__(
        self, given: DataLoader[Any], seconds: float, step: Callable[[Any], Any] | None, progress: bool
    ) -> None:
        self._loader = given
        self._given = LoaderSetting.of(given)
        self._step = step
        self._seconds = seconds
        self._progress = progress
        self._began = clock.seconds()
        self._of_samples = (given.dataset, given.collate_fn)
        held = reached(self._of_samples)
        self._generators = [*generators(given), *filter(is_generator, held)]
        self._has_file = any(map(is_file, held))
        samplers = [(f"sampler {i}", one) for i, one in enumerate(drawn_by(given)[1:])]
        self._start = Snapshot([*samplers, ("generators", self._generators)])
        self._order: list[Any] = []
        self._batches = 0  # of an epoch
        self._next = 0  # of the order, to draw next
        self._expected: dict[int, Any] = {}
        self._times: dict[LoaderSetting, list[float]] = {}
        self._ratios: dict[LoaderSetting, list[float]] = {}
        self._notes: dict[LoaderSetting, str] = {}

    def run(self) -> tuple[DataLoader[Any], list[LoaderTrial]]:
        """Return the loader to take, which is the given one where none is better, and what was tried."""
        # A build of torch for a GPU names one where there is none.
        device = torch.accelerator.current_accelerator(check_available=True) if self._step is not None else None
        try:
            with self._start, unmoved_generators([] if device is None else [torch.empty(0, device=device)]):
                best, reason = self._choose()
        except DrawError as error:  # of the loader as given
            raise error.__cause__ or error from None
        if best != self._given:
            self._notes[best] = "taken"
        self._notes[self._given] = reason
        self._times.setdefault(self._given, [])
        report = [self._trial(setting) for setting in {**self._times, **self._notes}]
        loader = self._loader if best == self._given else RebuiltLoader(self._loader, best)
        return loader, report

    def _trial(self, setting: LoaderSetting) -> LoaderTrial:
        times, ratios = self._times.get(setting), self._ratios.get(setting)
        given = f"as given: {setting}" if setting == self._given else str(setting)
        speed = self._batches / median(times) if times else None
        return LoaderTrial(given, speed, median(ratios) if ratios else None, self._notes.get(setting, ""))

    def _choose(self) -> tuple[LoaderSetting, str]:
        """Return the best setting, and why the loader as given is or is not that."""
        reason = self._take_order()
        if reason:
            return self._given, reason
        fixed = self._reason_to_keep_workers()
        if fixed and not self._given.workers:
            return self._given, fixed
        best = self._with_best_options(self._given if fixed else self._with_best_workers())
        return best, fixed or ("" if best != self._given else "nothing is at least 2 % faster")

    # -- what can be changed ------------------------------------------------------------------------------------------

    def _take_order(self) -> str:
        """Take the batches' indices at the start of an epoch; return why the loader is left alone, or nothing."""
        sampler = self._loader.sampler if self._loader.batch_sampler is None else self._loader.batch_sampler
        indices = iter(sampler)
        self._order = list(islice(indices, 1))  # a sampler draws its seed with the first
        before = digest_of_rng(rng_state(()))  # of those that a step draws from too
        self._order += islice(indices, _MOST_BATCHES - 1)
        if digest_of_rng(rng_state(())) != before:
            return "its sampler draws random numbers all along, and would draw them earlier"
        try:
            self._batches = len(self._loader)
        except TypeError:  # a sampler without a length: workers are started once
            self._batches = 1_000_000
        return "" if self._order else "it has no batches"

    def _reason_to_keep_workers(self) -> str:
        """Why the number of workers and their lifetime stay; what cannot be drawn in this process is not known."""
        here = self._given.with_workers(0)
        try:
            with self._opened(here, self._order[:_COMPARED]) as loader:
                batches = self._begun(loader)
                before = self._positions()
                for _ in self._drawn(batches):
                    pass
                draws = self._positions() != before
        except DrawError:
            if not self._given.workers:
                raise
            return "the data set cannot be read outside of a worker"
        if draws:
            return "the data set draws random numbers, which other workers would draw otherwise"
        if self._trace(self._given, _COMPARED) != self._trace(self._given, _COMPARED):
            return "the data set does not give the same samples twice"
        return ""

    def _problem(self, setting: LoaderSetting) -> str:
        """Why a setting cannot be taken; empty where its batches are those of the loader as given."""
        if (setting.workers == 0) != (self._given.workers == 0) and self._loader.worker_init_fn is not None:
            return "worker_init_fn is called in workers only"
        if self._has_file and setting.workers > self._given.workers:
            return "the data set holds an open file, whose position more workers would share"
        counts = self._given.workers, setting.workers
        count = _COMPARED + (min(counts) if counts[0] != counts[1] else 0)
        if count not in self._expected:
            self._expected[count] = self._trace(self._given, count)
        try:
            found = self._trace(setting, count)
        except DrawError as error:
            return str(error)
        if found[0] != self._expected[count][0]:
            return "its batches are others"
        return "" if found[1] == self._expected[count][1] else "it leaves random generators elsewhere"

    def _trace(self, setting: LoaderSetting, count: int) -> tuple[list[str], Any]:
        """Hash the first batches of two epochs, and the random generators after them."""
        found: list[str] = []
        # Whether batches come in order is not what differs between settings.
        self._start.restore()
        with self._opened(setting, self._order[:count], in_order=True) as loader:
            for _ in range(2):
                with closing(self._drawn(self._begun(loader))) as batches:
                    found += map(_batch_digest, batches)
            return found, self._positions()

    def _positions(self) -> Any:
        return digest_of_rng(rng_state(())), [pickle.dumps(_plain(generator_state(one))) for one in self._generators]

    # -- drawing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self, setting: LoaderSetting, order: list[Any], **changes: Any) -> Iterator[RebuiltLoader]:
        """A loader of these batches, whose workers are ended."""
        batched = self._loader.batch_sampler is not None
        changes |= {"batch_sampler": order} if batched else {"batch_size": None, "sampler": order}
        if setting.workers and not self._loader.timeout:
            changes["timeout"] = max(30.0, 2 * self._seconds)  # of a worker that hangs
        loader = RebuiltLoader(self._loader, setting, **changes)
        with kept_attributes(() if setting.workers else self._of_samples), closing(loader):
            yield loader

    def _begun(self, loader: RebuiltLoader) -> Any:
        try:
            return iter(loader)
        except Exception as error:
            raise DrawError(_words(error)) from error

    def _drawn(self, batches: Any) -> Generator[Any, None, None]:
        """Yield batches to the end; what drawing raises is a `DrawError`."""
        is_kept = getattr(batches, "_persistent_workers", False)
        try:
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                except Exception as error:
                    raise DrawError(_words(error)) from error
                yield batch
        finally:
            if not is_kept:
                end(batches)

    def _epoch_seconds(self, setting: LoaderSetting, at_least: float) -> float:
        """Draw batches for a while and return what a whole epoch takes by that."""
        count = min(self._batches, len(self._order))
        order = (self._order[self._next :] + self._order[: self._next])[:count]
        with self._opened(setting, order) as loader:
            if setting.persistent:
                next(self._drawn(self._begun(loader)), None)  # they are started once a run
            wave = max(1, setting.workers)  # the first batch of each worker comes with its start
            drawn, of_wave = 0, 0.0
            start = clock.seconds()
            begun = self._begun(loader)
            if setting.persistent:
                start = clock.seconds()  # until here they made what they had been told to of the epoch before
            with closing(self._drawn(begun)) as batches:
                for batch in batches:
                    if self._step is not None:
                        self._step(batch)
                    drawn += 1
                    taken = clock.seconds() - start
                    if drawn == wave:
                        of_wave = taken
                    if drawn > 2 * wave and taken >= at_least:
                        break
                taken = clock.seconds() - start
        self._next = (self._next + drawn) % len(self._order)
        if drawn >= self._batches or drawn <= wave:
            return taken * self._batches / max(1, drawn)
        return of_wave + (taken - of_wave) * (self._batches - wave) / (drawn - wave)

    # -- the search ---------------------------------------------------------------------------------------------------

    def _with_best_workers(self) -> LoaderSetting:
        """Try more and more workers, while that helps."""
        given = self._given
        usable = int(_C.base.cores()["usable"])
        counts = [n for n in _WORKERS if n <= usable] or [0]
        groups = [counts[:3], *(counts[i : i + 2] for i in range(3, len(counts), 2))]
        best = given
        if given.workers and not given.persistent and given.workers not in groups[0]:
            groups[0].append(given.workers)
        for i, group in enumerate(groups):
            settings = [one for n in group for one in self._of_workers(n)]
            if i == 0 and self._step is not None:
                settings += self._possible([replace(given.with_workers(0), ahead=2)])
            self._race(list(dict.fromkeys([given, best, *settings])), _SHARE_OF_WORKERS * (i + 1) / len(groups))
            winners = [one for one, ratios in self._ratios.items() if one != given and self._wins(ratios)]
            best = max(winners, key=lambda one: median(self._ratios[one]), default=given)
            if best not in settings and group[-1] >= given.workers:
                break
        return best

    def _of_workers(self, count: int) -> list[LoaderSetting]:
        """Return that number of workers, which stay where they may: to start them anew takes time in each epoch."""
        given = self._given
        starting = given.with_workers(count)
        choices = [replace(starting, persistent=True), starting] if count else [starting]
        for one in choices:
            if one == given:
                return []
            if self._possible([one]):
                return [one]
        return []

    def _with_best_options(self, best: LoaderSetting) -> LoaderSetting:
        """Try the other settings one after another."""
        options = self._other_options(best)
        for i, change in enumerate(options):
            share = _SHARE_OF_WORKERS + (1 - _SHARE_OF_WORKERS) * (i + 1) / len(options)
            one = replace(best, **change)
            if self._possible([one]):
                rounds = self._race(list(dict.fromkeys([self._given, best, one])), share)
                if self._wins([b / o for b, o in zip(rounds[best], rounds[one], strict=False)]):
                    best = one
        return best

    @staticmethod
    def _other_options(best: LoaderSetting) -> list[dict[str, Any]]:
        options: list[dict[str, Any]] = []
        if best.workers and (best.prefetch or TORCH_PREFETCH) < 2 * TORCH_PREFETCH:
            options.append({"prefetch": 2 * TORCH_PREFETCH})
        if torch.accelerator.is_available() and not best.pinned:
            options.append({"pinned": True})
        return options

    def _possible(self, settings: Sequence[LoaderSetting]) -> list[LoaderSetting]:
        """Return those whose batches are the same, and note why the others are left out."""
        found: list[LoaderSetting] = []
        for setting in settings:
            problem = self._problem(setting)
            if problem:
                self._note(setting, problem)
            else:
                found.append(setting)
        return found

    def _note(self, setting: LoaderSetting, note: str) -> None:
        self._notes[setting] = note
        self._tell(setting)

    def _tell(self, setting: LoaderSetting) -> None:
        if self._progress:
            print(self._trial(setting), file=sys.stderr)

    def _race(self, settings: list[LoaderSetting], share: float) -> dict[LoaderSetting, list[float]]:
        """Let settings draw in turn until their share of the time is over; return seconds of an epoch by round."""
        until = self._began + share * self._seconds
        each = max(0.0, until - clock.seconds()) / (5 * len(settings))
        rounds: dict[LoaderSetting, list[float]] = {one: [] for one in settings}
        racing = settings
        while len(racing) > 1 and len(rounds[self._given]) < _ROUNDS[1]:
            done = len(rounds[self._given])
            if clock.seconds() > (until if done >= _ROUNDS[0] else until + self._seconds):
                break
            first = done % len(racing)
            taken = {setting: self._tried(setting, each) for setting in racing[first:] + racing[:first]}
            for setting, epoch in taken.items():
                rounds[setting] += [] if epoch is None else [epoch]
            racing = [one for one in racing if taken[one] is not None and not self._is_hopeless(rounds, one)]
        for setting, times in rounds.items():
            self._times.setdefault(setting, []).extend(times)
            self._ratios.setdefault(setting, []).extend(g / t for g, t in zip(rounds[self._given], times, strict=False))
            self._tell(setting)
        return rounds

    def _tried(self, setting: LoaderSetting, at_least: float) -> float | None:
        """Seconds of an epoch; None where a setting cannot draw."""
        try:
            return self._epoch_seconds(setting, at_least)
        except DrawError as error:
            if setting == self._given:
                raise
            self._note(setting, str(error))
            return None

    def _is_hopeless(self, rounds: dict[LoaderSetting, list[float]], one: LoaderSetting) -> bool:
        ratios = [g / t for g, t in zip(rounds[self._given], rounds[one], strict=False)]
        return one != self._given and len(ratios) >= 2 and median(ratios) < _HOPELESS

    @staticmethod
    def _wins(ratios: Sequence[float]) -> bool:
        return len(ratios) >= _ROUNDS[0] and median(ratios) >= _LEAST_GAIN and quantile(ratios, 0.25) > 1


def _plain(state: Any) -> Any:
    return state.tolist() if isinstance(state, Tensor) else state


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _batch_digest(batch: Any) -> str:
    """Hash tensors, those inside of any object too, and plain values. Of other objects no more can be told."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, SCALARS) or _is_array(leaf)]
    plain = [leaf.tobytes() if _is_array(leaf) else repr(leaf).encode() for leaf in leaves]
    return digest([*(value_digest(tensor.detach()).encode() for tensor in tensors(batch)), *plain])


def _is_array(leaf: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray) and not leaf.dtype.hasobject
