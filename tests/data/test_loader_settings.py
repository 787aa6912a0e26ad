"""The settings num_workers, prefetch, pin_memory and cache: other ways to the same batches, or a sentence."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oxytorch as ox
import pytest
import torch
from oxytorch.data.loader_settings import with_settings
from oxytorch.data.rebuilt_loader import RebuiltLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

pytestmark = pytest.mark.cpu_only("draws on the host")


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def torch_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(23.0)), batch_size=4, **options)


def native_loader(folder: Path, **options: Any) -> ox.data.Loader:
    if not (folder / "rows.npy").exists():  # it is mapped by the loaders before
        np.save(folder / "rows.npy", np.arange(46.0, dtype="float32").reshape(23, 2))
    return ox.data.Loader(ox.data.open(str(folder / "rows.npy")), 4, shuffle=True, seed=1, **options)


def epochs(loader: Any, count: int = 2) -> list[list[float]]:
    torch.manual_seed(7)
    found = []
    for _ in range(count):
        found += [(b["array"] if isinstance(b, dict) else b[0]).flatten().tolist() for b in loader]
        found.append([float(torch.rand(()))])
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", ["in order", "shuffled", "of a generator", "batch sampler"])
@pytest.mark.parametrize(
    "named", [{"num_workers": 0}, {"num_workers": 1}, {"prefetch": 3}, {"num_workers": 2, "prefetch": 5}]
)
def test_a_torch_loader_gives_the_same_batches(named: dict[str, int], order: str, workers: int) -> None:
    def made() -> DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": workers}
        if order == "shuffled":
            options["shuffle"] = True
        if order == "of a generator":
            options |= {"shuffle": True, "generator": torch.Generator().manual_seed(3)}
        if order == "batch sampler":
            data = TensorDataset(torch.arange(23.0))
            return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, True), num_workers=workers)
        return torch_loader(**options)

    other, lines = with_settings(made(), named)
    assert [line.name for line in lines if line.is_in_effect] == list(named)
    assert epochs(made()) == epochs(other)
    if isinstance(other, RebuiltLoader):
        assert other.num_workers == named.get("num_workers", workers)
        depth = named.get("prefetch")
        assert depth is None or depth == (other.prefetch_factor if other.num_workers else other.ahead)
    for line in lines:
        line.revert()


@pytest.mark.parametrize(
    "named", [{"num_workers": 1}, {"num_workers": 3, "prefetch": 7}, {"cache": "1MiB"}, {"cache": "auto"}]
)
def test_a_loader_of_ours_is_changed_where_it_stands(named: dict[str, Any], tmp_path: Path) -> None:
    whole = epochs(native_loader(tmp_path))
    loader = native_loader(tmp_path, threads=2)
    same, lines = with_settings(loader, named)
    assert same is loader and all(line.is_in_effect for line in lines)
    assert epochs(loader) == whole
    assert loader._native.threads == named.get("num_workers", 2)
    assert loader._native.prefetch == named.get("prefetch", 2 + loader._native.threads // 2)
    assert ("cache" in loader.stats()) == ("cache" in named)
    for line in lines:
        line.revert()
    assert (loader._native.threads, loader._native.prefetch) == (2, 3)
    assert "cache" not in loader.stats()
    assert epochs(native_loader(tmp_path), 3)[14:20] == epochs(loader, 1)[:6]


def test_a_change_in_the_middle_of_an_epoch_loses_no_batch(tmp_path: Path) -> None:
    whole = [batch["array"].tolist() for batch in native_loader(tmp_path)]
    for at, change in itertools.product(range(6), ({"threads": 3}, {"prefetch": 1}, {"cache": "1MiB"})):
        loader = native_loader(tmp_path, threads=1)
        seen = []
        for i, batch in enumerate(loader):
            seen.append(batch["array"].tolist())
            if i == at:
                loader.change(**change)
        assert seen == whole, (at, change)
    with pytest.raises(TypeError, match="no 'batch_size' to change, only threads, prefetch, cache"):
        loader.change(batch_size=3)
    with pytest.raises(ValueError, match="threads is -1"):
        loader.change(threads=-1)
    assert loader.change(threads=2, cache=None) == (1, "1MiB")


class Mine(DataLoader[Any]):
    pass


@pytest.mark.parametrize(
    ("loader", "named", "reason"),
    [
        (lambda: [1, 2], {"num_workers": 2, "cache": "1GB"}, "come from a list, not from a torch DataLoader"),
        (lambda: iter([1]), {"prefetch": 2}, "come from a list_iterator"),
        (lambda: Mine(TensorDataset(torch.arange(3.0))), {"num_workers": 2}, "come from a Mine"),
        (lambda: DataLoader(Numbers()), {"num_workers": 2}, "iterable, and decides itself which worker"),
        (lambda: torch_loader(worker_init_fn=print), {"num_workers": 2}, "worker_init_fn is called in workers only"),
        (torch_loader, {"cache": "1GB"}, "keeps no samples"),
    ],
)
def test_what_a_loader_cannot_have_is_said(loader: Any, named: dict[str, Any], reason: str) -> None:
    given = loader()
    same, lines = with_settings(given, named)
    assert same is given and [line.name for line in lines] == list(named)
    assert not any(line.is_in_effect for line in lines) and all(reason in line.reason for line in lines)


def test_a_loader_of_ours_needs_a_thread(tmp_path: Path) -> None:
    _, (line,) = with_settings(native_loader(tmp_path), {"num_workers": 0})
    assert not line.is_in_effect and "needs one" in line.reason


def test_a_stream_has_no_cache() -> None:
    _, (line,) = with_settings(ox.data.Loader(Numbers()), {"cache": "1MiB"})
    assert not line.is_in_effect and "have no numbers" in line.reason


@pytest.mark.parametrize(
    "named", [{}, {"num_workers": "auto", "prefetch": "keep", "pin_memory": "auto", "cache": "off"}]
)
def test_nothing_asked_for_changes_nothing(named: dict[str, Any]) -> None:
    given = torch_loader()
    assert with_settings(given, named) == (given, [])


class Slow(Dataset[Any]):
    """Samples that take as long as a few steps."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        x = torch.full((8,), float(i))
        for _ in range(200):
            x = x.sin()
        return x, torch.tensor(i % 3)


@pytest.mark.parametrize("loop", ["yours", "data"])
def test_a_plan_tries_feeds_only_where_the_loop_draws_from_it(loop: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Slow(), batch_size=16)
    plan = ox.accelerate(
        model, optimizer, nn.CrossEntropyLoss(), loader, strategies=["prefetch", "loader_workers"], loop=loop,
        remember=False, tune_seconds=2.0,
    )  # fmt: skip
    tried = {entry.strategy: entry for entry in plan.certificate.entries}
    if loop == "yours":
        assert plan.data is loader
        assert all("loop='data'" in entry.reason and entry.status == "skipped" for entry in tried.values())
    else:
        assert all("loop=" not in entry.reason for entry in tried.values()), plan.explain()
    for old, new in zip(loader, plan.data, strict=True):
        assert torch.equal(old[0], new[0]) and torch.equal(old[1], new[1])
    plan.revert()
    assert plan.data is loader


def test_the_trainer_of_prepare_draws_from_what_was_made_of_the_loader(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(TensorDataset(torch.randn(20, 2), torch.randn(20, 1)), batch_size=5)
    optimizer_of_performance = ox.PerformanceOptimizer({"level": "basic", "num_workers": 1, "remember": False})
    run = optimizer_of_performance.prepare(model, optimizer, loader, nn.MSELoss(), strategies=[])
    drawn: list[Any] = []
    for given in (loader, run.data):
        result = run.trainer.fit(given, max_steps=run.trainer.global_step + 2, progress=False,
                                 callbacks=[lambda trainer, _: drawn.append(trainer._loader)])  # fmt: skip
        assert result.steps == 2
    assert all(one is run.data for one in drawn) and run.data.num_workers == 1
    run.revert()
    assert run.data is loader


def test_the_monitor_is_told_what_was_waited_for(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    monitor = ox.PerformanceMonitor()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    trainer = ox.Trainer(
        model, optimizer, lambda m, b: m(b["array"]).square().mean(), "basic", monitor=monitor, calibrate=False
    )
    trainer.fit(native_loader(tmp_path), epochs=2, progress=False)
    (waits,) = (one for one in monitor.summary().scalars if one.name == "data_wait_seconds")
    assert waits.count == monitor.summary().steps == 12 and waits.last >= 0


SLOW = """
import time
import torch
import oxytorch as ox
from oxytorch.data.loader_settings import with_settings

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.tensor(float(index))

loader = ox.data.Loader(Slow(), 4)
batches = iter(loader)
found = next(batches).tolist()
_, (line,) = with_settings(loader, {"prefetch": 3})
found += next(batches).tolist()
line.revert()
for batch in batches:
    found += batch.tolist()
print(found == list(range(40)))
"""


def test_settings_do_not_wait_for_threads_that_read_in_python() -> None:
    """The threads of before are waited for; they need the interpreter, which the caller must not hold meanwhile."""
    done = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "True", done.stdout + done.stderr
