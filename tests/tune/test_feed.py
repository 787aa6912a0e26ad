"""Drawing batches while a step is taken: the same batches, in the same order, from the same random numbers."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch._C.tune import Certificate
from oxytorch.data.ahead import Ahead, Prefetched
from oxytorch.model.snapshot import Snapshot
from oxytorch.tune import Run, Strategy
from oxytorch.tune.verify import Verifier
from oxytorch.tune.watch import Watch
from planted import Clock, Net, batches, clock, made
from planted_faults import ruling
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.cpu_only("batches are drawn on the host")
__all__ = ["clock"]

FEEDS = ("prefetch", "loader_workers")


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows that take a while, of which some may be broken or random."""

    def __init__(self, count: int = 40, seconds: float = 0.0, broken: int = -1, noise: str = "") -> None:
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
        self.seconds, self.broken, self.noise = seconds, broken, noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        if index == self.broken:
            raise ValueError(f"row {index} is broken")
        x = self.x[index]
        if self.noise == "torch":
            x = x + torch.randn(6)
        elif self.noise == "python":
            x = x + random.random()
        return x, torch.tensor(index % 3)


def batches_of(data: Any) -> list[Tensor]:
    return [torch.cat([x, y[:, None]], 1) for x, y in data]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def loader(**options: Any) -> DataLoader[Any]:
    rows = {key: options.pop(key) for key in ("count", "seconds", "broken", "noise") if key in options}
    return DataLoader(Rows(**rows), **{"batch_size": 4, "shuffle": True, **options})


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 3))


def run_of(data: Any) -> Run:
    net = model()
    run = Run(
        net,
        torch.optim.SGD(net.parameters(), lr=1e-2),
        nn.CrossEntropyLoss(),
        [next(iter(data))],
        data=data,
        owns_loop=True,
    )
    run.fetch_share = 0.5  # as a bench would have found
    return run


def threads() -> int:
    return sum(thread.name == "oxytorch prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("count", [0, 1, 4, 5, 40])
@pytest.mark.parametrize("depth", [1, 2, 9])
def test_batches_and_random_numbers_are_those_of_the_loader(count: int, depth: int) -> None:
    given = loader(count=count, shuffle=count > 0)
    ahead = Prefetched(given, depth)
    assert len(ahead) == len(given) and ahead.batch_size == 4
    left, right = [], []
    for data, found in ((given, left), (ahead, right)):
        torch.manual_seed(5)
        for _epoch in range(2):
            for x, _y in data:
                found.append(x + torch.randn(6))  # a step's own draws, between those of the loader
        found.append(torch.randn(3))
    assert same(left, right)
    assert threads() == 0


@pytest.mark.parametrize("name", FEEDS)
def test_a_strategy_is_exact_and_goes_back(name: str) -> None:
    data = loader(generator=torch.Generator().manual_seed(3))
    run = run_of(data)
    strategy = run.strategy(name)
    assert strategy.applies(run) is True
    torch.manual_seed(5)
    data.generator.manual_seed(3)
    usual = batches_of(data)
    end = torch.get_rng_state()
    data.generator.manual_seed(3)
    run.set_active([name])
    assert run.data is not data
    torch.manual_seed(5)
    assert same(batches_of(run.data), usual)
    assert torch.equal(torch.get_rng_state(), end)
    run.set_active(())
    assert run.data is data


@pytest.mark.parametrize("name", FEEDS)
@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([(torch.randn(4, 6), torch.zeros(4, dtype=torch.int64))], ("list", "DataLoader")),
        (loader(noise="torch"), ("random",)),
        (loader(noise="python"), ("random",)),
    ],
    ids=["list", "torch", "python"],
)
def test_what_cannot_be_drawn_ahead_is_left_alone(name: str, data: Any, why: tuple[str, ...]) -> None:
    run = run_of(data)
    state = random.getstate(), torch.get_rng_state()
    answer = run.strategy(name).applies(run)
    assert isinstance(answer, str) and any(word in answer for word in why)
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])
    assert threads() == 0


def test_a_loader_that_is_quick_or_saved_is_left_alone() -> None:
    run = run_of(loader())
    run.fetch_share = 0.001
    assert "0.1 % of a step" in str(run.strategy("prefetch").applies(run))

    class Resumable(DataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, _state: Any) -> None:
            pass

    run = run_of(Resumable(Rows()))
    assert "position is saved" in str(run.strategy("prefetch").applies(run))
    assert "DataLoader" in str(run.strategy("loader_workers").applies(run))


def test_batches_are_ready_before_they_are_asked_for() -> None:
    class Source:
        drawn = tuple(threading.Event() for _ in range(3))

        def __iter__(self) -> Iterator[int]:
            for number, event in enumerate(self.drawn):
                event.set()
                yield number

    ahead = iter(Prefetched(Source(), depth=2))
    assert next(ahead) == 0
    assert all(event.wait(10) for event in Source.drawn)
    assert list(ahead) == [1, 2]


def test_workers_draw_in_other_processes() -> None:
    class Processes(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.x[index], torch.tensor(os.getpid())

    run = run_of(DataLoader(Processes(), batch_size=4))
    assert all((y == os.getpid()).all() for _, y in run.given_data or ())
    run.set_active(["loader_workers"])
    assert all((y != os.getpid()).all() for _, y in run.data or ())


def test_what_the_loader_throws_comes_in_its_place() -> None:
    ahead = iter(Prefetched(loader(shuffle=False, broken=13)))
    for _ in range(3):
        next(ahead)
    with pytest.raises(ValueError, match="row 13 is broken"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    assert threads() == 0


@pytest.mark.parametrize("closed", [True, False])
def test_an_iteration_that_is_left_early_ends_its_thread(closed: bool) -> None:
    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    ahead = Ahead(endless(), 2)
    assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
    thread = ahead._thread
    assert thread is not None
    if closed:
        ahead.close()
        ahead.close()
        with pytest.raises(StopIteration):
            next(ahead)
    else:
        del ahead
    thread.join(10)
    assert not thread.is_alive()


def test_batches_are_drawn_under_the_loops_own_gradient_mode() -> None:
    def modes() -> Iterator[bool]:
        while True:
            yield torch.is_grad_enabled()

    with torch.no_grad():
        ahead = Ahead(modes(), 2)
        assert [next(ahead) for _ in range(3)] == [False] * 3
        ahead.close()


def train(plan: ox.tune.Plan, epochs: int) -> list[float]:
    return [float(plan.step(batch)) for _ in range(epochs) for batch in plan.data]


@pytest.mark.parametrize("count", [400, 396])
def test_an_epoch_that_ends_early_is_found_however_long_it_is(count: int) -> None:
    class Feed(Strategy):
        def apply(self, run: Run) -> None:
            run.data = loader(count=count, shuffle=False)

        def revert(self, run: Run) -> None:
            run.data = run.given_data

    run = run_of(loader(count=400, shuffle=False))
    found = ruling(Verifier(run, Snapshot.of(run.model, run.original), steps=1), Feed, "exact")
    assert found.held is (count == 400), found.reason
    assert found.held or found.reason == "an epoch has 99 batches, 100 as given"


def test_a_slow_loader_is_drawn_ahead_and_the_run_is_the_same() -> None:
    losses = []
    for names in ([], ["prefetch", "loader_workers"]):
        data = loader(seconds=0.001, generator=torch.Generator().manual_seed(3))
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        torch.manual_seed(7)
        before = torch.get_rng_state(), data.generator.get_state()
        plan = ox.accelerate(
            net, optimizer, nn.CrossEntropyLoss(), data, strategies=names, loop="plan", remember=False, tune_seconds=60
        )
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(data.generator.get_state(), before[1])
        for name in names:  # measured: with a machine that is busy, perhaps for nothing
            entry = next(entry for entry in plan.certificate.entries if entry.strategy == name)
            assert entry.pairs > 0 or entry.status == "accepted", entry.reason
        losses.append(train(plan, 2))
        assert threads() == 0
        plan.revert()
        assert plan.data is data
    assert losses[0] == losses[1]


def test_a_check_of_the_watch_leaves_the_feed_as_it_is(clock: Clock) -> None:
    class Doubled(Strategy):
        name = "doubled"
        feeds = True

        def apply(self, run: Run) -> None:
            self.before, run.data = run.data, (*run.data, *run.data)  # type: ignore[misc]

        def revert(self, run: Run) -> None:
            run.data = self.before

    net = Net(clock)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    given = batches()
    classes = {cls.name: cls for cls in (Doubled, made(clock, "slow", 0.002))}
    run = Run(net, optimizer, nn.CrossEntropyLoss(), given, data=given, owns_loop=True, strategies=classes)
    run.set_active(classes)
    certificate = Certificate()
    watch = Watch(run, certificate)
    seen = set()
    for step in range(100):
        seen.add(run.active)
        assert len(run.data) == 2 * len(given)  # type: ignore[arg-type]
        run.step(given[step % len(given)])
    watch.stop()
    assert seen == {("doubled", "cheaper_slow"), ("doubled",)} and not certificate.events


def test_in_the_users_own_loop_the_loader_is_the_users(clock: Clock) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    plan = ox.accelerate(net, optimizer, nn.CrossEntropyLoss(), loader(), strategies=list(FEEDS), remember=False)
    assert all("loop='plan'" in plan.rejected[name] for name in FEEDS)
