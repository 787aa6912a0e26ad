"""A tuned DataLoader gives the batches of the given one and leaves its random generators behind, whatever is chosen."""

from __future__ import annotations

import gc
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oxytorch.data import loader_search
from oxytorch.data.rebuilt_loader import LoaderSetting, RebuiltLoader
from oxytorch.data.tune import TunedLoader, tune
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, Subset, WeightedRandomSampler

pytestmark = pytest.mark.cpu_only("batches are drawn on the host")

Choice = Callable[[LoaderSetting], bool]
CHOICES: dict[str, Choice] = {
    "workers": lambda one: one.workers == 1,
    "no workers": lambda one: one.workers == 0 and not one.ahead,
    "ahead": lambda one: one.ahead > 0,
    "prefetch": lambda one: one.workers > 0 and one.prefetch == 4,
}


class Rows(Dataset[tuple[Tensor, int]]):
    """Rows whose values say which they are, with what the test needs to be wrong with them."""

    def __init__(self, count: int = 37, noise: str = "", broken: int = -1) -> None:
        self.count, self.noise, self.broken = count, noise, broken
        self.shift = 0
        self.own = np.random.default_rng(3)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.broken:
            raise ValueError(f"row {index} is broken")
        if self.noise == "worker" and torch.utils.data.get_worker_info() is not None:
            raise OSError("no file handles left")
        value = {
            "torch": lambda: torch.rand(()).item(),
            "python": random.random,
            "numpy": np.random.random,
            "own": self.own.random,
            "clock": time.perf_counter_ns,
        }.get(self.noise, int)()
        return torch.tensor([index, self.shift, value]), index


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    gc.collect()
    deadline = time.monotonic() + 20

    def left() -> list[Any]:
        ahead = [thread for thread in threading.enumerate() if thread.name == "oxytorch prefetch"]
        return [*multiprocessing.active_children(), *ahead]

    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left()


@pytest.fixture
def prefer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Choice], list[LoaderSetting]]:
    """Make a setting look faster than all others; what was measured is written down."""

    def chosen(is_fast: Choice, gain: float = 2.0) -> list[LoaderSetting]:
        seen: list[LoaderSetting] = []

        def epoch_seconds(search: Any, setting: LoaderSetting, at_least: float) -> float:
            seen.append(setting)
            # What leads to a setting looks a little faster too, so that the search gets there.
            leads = setting.workers == 1
            return 1.0 / gain if is_fast(setting) else 1.0 / (1.2 if leads and gain > 1.5 else 1.0)

        monkeypatch.setattr(loader_search.LoaderSearch, "_epoch_seconds", epoch_seconds)
        return seen

    return chosen


def loader(**options: Any) -> DataLoader[Any]:
    rows = {key: options.pop(key) for key in ("count", "noise", "broken") if key in options}
    return DataLoader(Rows(**rows), **{"batch_size": 4, "shuffle": True, **options})


def epochs(data: Any, count: int = 3, steps: int | None = None) -> list[Tensor]:
    """Batches of some epochs, with a step's own draws between them, and where the generators are in the end."""
    torch.manual_seed(7)
    if data.generator is not None:
        data.generator.manual_seed(7)
    found: list[Tensor] = []
    for _ in range(count):
        for i, batch in enumerate(data):
            if i == steps:
                break
            found += [torch.cat([torch.as_tensor(part).reshape(-1).double() for part in batch]), torch.rand(2)]
    return [*found, torch.rand(2)]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def tuned(data: DataLoader[Any], **options: Any) -> TunedLoader:
    return tune(data, **{"seconds": 0.5, "step": lambda _batch: None, **options})


def weights() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + i % 3 for i in range(37)], 29)


GIVEN: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": loader,
    "generator": lambda: loader(generator=torch.Generator().manual_seed(5)),
    "in order": lambda: loader(shuffle=False, drop_last=True),
    "weighted": lambda: loader(shuffle=None, sampler=weights()),
    "single": lambda: loader(batch_size=None),
    "replacement": lambda: loader(shuffle=None, sampler=RandomSampler(range(37), replacement=True)),
    "own batches": lambda: loader(batch_size=1, shuffle=None, batch_sampler=[[0, 3], [1], [5, 2, 4], [7], [8], [6]]),
    "two workers": lambda: loader(num_workers=2, prefetch_factor=3),
    "any order": lambda: loader(num_workers=1, in_order=False),
}


PAIRS = [
    *((given, choice) for given in ("shuffled", "two workers") for choice in CHOICES),
    *((given, choice) for given in list(GIVEN)[1:-2] for choice in ("ahead", "workers")),
    ("any order", "no workers"),
]


@pytest.mark.parametrize(("given", "choice"), PAIRS)
def test_batches_and_random_numbers_are_those_of_the_loader(
    given: str, choice: str, prefer: Callable[[Choice], list[LoaderSetting]]
) -> None:
    data = GIVEN[given]()
    seen = prefer(CHOICES[choice])
    found = tuned(data, seconds=1000)  # measured at once
    assert (found.loader is data) == (CHOICES[choice](LoaderSetting.of(data)) or not any(map(CHOICES[choice], seen)))
    if found.loader is not data:
        assert isinstance(found.loader, DataLoader) and "taken" in str(found)
    assert len(found) == len(data) and found.batch_size == data.batch_size
    assert found.sampler is data.sampler or found.batch_sampler is data.batch_sampler
    for steps in (None, 2):
        assert same(epochs(found, steps=steps), epochs(GIVEN[given](), steps=steps)) or given == "any order"
    found.revert()
    assert found.loader is data


@pytest.mark.parametrize("given", GIVEN)
def test_measuring_leaves_no_trace(given: str) -> None:
    data = GIVEN[given]()
    expected = epochs(GIVEN[given]())
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    drawn = torch.rand(1), random.random(), np.random.random()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    tuned(data, step=lambda batch: torch.rand(5), seconds=0.2)
    assert (torch.rand(1), random.random(), np.random.random()) == drawn
    assert same(epochs(data), expected)


@pytest.mark.parametrize("noise", ["torch", "python", "numpy", "own"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_that_draws_random_numbers_keeps_its_workers(
    noise: str, workers: int, prefer: Callable[[Choice], list[LoaderSetting]]
) -> None:
    data = loader(noise=noise, num_workers=workers, shuffle=False)
    state = data.dataset.own.bit_generator.state  # type: ignore[attr-defined]
    seen = prefer(lambda one: one.prefetch == 4)
    found = tuned(data, seconds=1000)
    assert "random numbers" in found.report[0].note
    assert {(one.workers, one.persistent, one.ahead) for one in seen} <= {(workers, False, 0)}
    assert (found.loader is data) is (workers == 0)
    assert data.dataset.own.bit_generator.state == state  # type: ignore[attr-defined]
    if noise == "torch":
        assert same(epochs(found), epochs(data))


def test_what_is_not_the_same_twice_is_left_alone() -> None:
    found = tuned(loader(noise="clock"))
    assert "same samples twice" in found.report[0].note


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class Special(DataLoader[Any]):
    pass


class Saved(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))

    def __len__(self) -> int:
        return 9

    def state_dict(self) -> dict[str, int]:
        return {}


class Lazy(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return (random.randrange(9) for _ in range(9))

    def __len__(self) -> int:
        return 9


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (DataLoader(Stream()), "iterable"),
        (Special(Rows()), "Special"),
        ([1, 2], "list"),
        (DataLoader(Rows(), sampler=Saved()), "Saved"),
        (DataLoader(Rows(), sampler=Lazy()), "all along"),
        (DataLoader(Rows(), batch_sampler=iter([[1], [2]])), "once"),
        (DataLoader(Rows(0)), "no batches"),
    ],
    ids=["iterable", "subclass", "list", "saved", "all along", "iterator", "empty"],
)
def test_what_cannot_be_made_anew_is_left_as_given(data: Any, why: str) -> None:
    found = tuned(data)
    assert found.loader is data and [why in row.note for row in found.report] == [True]
    assert why in str(found)
    found.revert()
    assert found.loader is data


def test_a_function_of_workers_is_called_where_it_was(prefer: Callable[[Choice], list[LoaderSetting]]) -> None:
    seen = prefer(lambda one: one.workers != 1)
    found = tuned(loader(num_workers=1, worker_init_fn=print), seconds=1000)
    assert all(one.workers > 0 for one in seen)
    assert any("worker_init_fn" in row.note for row in found.report)


def test_a_build_for_a_gpu_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyPI's torch does on a machine without a GPU."""

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert len(list(tuned(GIVEN["in order"]()))) > 0


def test_a_small_gain_is_not_taken(prefer: Callable[..., list[LoaderSetting]]) -> None:
    data = loader()
    prefer(CHOICES["workers"], gain=1.015)
    found = tuned(data, seconds=1000)
    assert found.loader is data and "2 %" in found.report[0].note
    assert found.report[0].ratio == 1
    assert max(row.ratio or 0 for row in found.report) == pytest.approx(1.015)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_loader_raises_is_raised(workers: int) -> None:
    with pytest.raises(ValueError, match="row 2 is broken"):
        tuned(loader(broken=2, shuffle=False, num_workers=workers))


def test_a_row_that_is_broken_later_is_raised_too() -> None:
    with pytest.raises(ValueError, match="row 30 is broken"):
        tuned(loader(broken=30, shuffle=False), seconds=5)


def test_what_a_step_raises_is_raised() -> None:
    def step(batch: Any) -> None:
        raise KeyError("step")

    with pytest.raises(KeyError, match="step"):
        tuned(loader(num_workers=1), step=step, seconds=30.0)


def test_what_cannot_be_drawn_in_workers_is_left_out() -> None:
    found = tuned(loader(noise="worker"), step=None, seconds=0.2)
    assert any("no file handles left" in row.note for row in found.report)
    assert not any("worker" in row.setting and row.ratio for row in found.report[1:])


class InFile(Rows):
    """Rows of a file that is opened with the first of them."""

    file: Any = None

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        path.write_bytes(bytes(range(37)))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.file is None:
            self.file = self.path.open("rb", buffering=0)
        self.file.seek(index)
        return torch.tensor([index, 0, self.file.read(1)[0]]), index


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # it is closed by letting go of it
def test_processes_do_not_share_a_file(tmp_path: Path, prefer: Callable[[Choice], list[LoaderSetting]]) -> None:
    rows = InFile(tmp_path / "rows")
    seen = prefer(lambda one: one.workers > 1)
    data = DataLoader(Subset(rows, range(37)), batch_size=4)
    tuned(data, seconds=1000)
    assert any(one.workers for one in seen) and rows.file is None
    seen.clear()
    with (tmp_path / "rows").open("rb", buffering=0) as rows.file:
        found = tuned(data, seconds=1000)
        assert seen and not any(one.workers for one in seen)
        assert any("open file" in row.note for row in found.report)


def test_workers_that_stay_see_a_change_of_the_data_set(prefer: Callable[[Choice], list[LoaderSetting]]) -> None:
    rows = Rows()
    data = DataLoader(Subset(rows, range(12)), batch_size=4)
    prefer(CHOICES["workers"])
    found = tuned(data, seconds=1000)
    assert isinstance(found.loader, RebuiltLoader) and found.loader.persistent_workers
    list(found)
    workers = {child.pid for child in multiprocessing.active_children()}
    assert workers
    list(found)
    assert {child.pid for child in multiprocessing.active_children()} == workers
    rows.shift = 5
    assert all(batch[0][:, 1].eq(5).all() for batch in found)
    assert {child.pid for child in multiprocessing.active_children()} != workers
    found.revert()
    assert not multiprocessing.active_children()


def test_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    steps = []
    found = tuned(loader(), step=steps.append, seconds=5.0, progress=True)
    assert steps
    assert found.report[0].setting == "as given: no workers"
    assert all(row.batches_per_second for row in found.report if not row.note.startswith("it"))
    assert "as given" in capsys.readouterr().err


class Counting(Rows):
    """Each worker counts what it made: one that stays goes on in the next epoch."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.shift += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("data", "stays"), [(Rows(8), True), (Counting(8), False)])
def test_workers_stay_where_that_changes_no_batch(
    prefer: Callable[[Choice], list[LoaderSetting]], data: Rows, stays: bool
) -> None:
    seen = prefer(lambda one: one.persistent)
    given = DataLoader(data, batch_size=2, num_workers=2)
    found = tuned(given, seconds=1000)
    assert any(one.persistent for one in seen) == stays
    assert isinstance(found.loader, RebuiltLoader) == stays
    assert stays or any(row.note == "its batches are others" for row in found.report)
    found.revert()


def test_what_kept_workers_still_make_of_the_epoch_before_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Timed:
        """To begin takes 100 seconds, a batch one."""

        def __init__(self, _loader: Any, _setting: LoaderSetting, **changes: Any) -> None:
            self.order = changes["batch_sampler"]

        def __iter__(self) -> Iterator[Tensor]:
            now[0] += 100

            def batches() -> Iterator[Tensor]:
                for _ in self.order:
                    now[0] += 1
                    yield torch.zeros(1)

            return batches()

        def close(self) -> None:
            pass

    monkeypatch.setattr(loader_search, "RebuiltLoader", Timed)
    monkeypatch.setattr(loader_search.clock, "seconds", lambda: now[0])
    data = DataLoader(Rows(32), batch_size=4)
    search = loader_search.LoaderSearch(data, 1.0, None, False)
    search._take_order()
    two = LoaderSetting.of(data).with_workers(2)
    # Those that start anew take their time in each epoch; those that stay, once.
    assert search._epoch_seconds(two, 0.0) > 100 > search._epoch_seconds(replace(two, persistent=True), 0.0)
