"""A check of the watch takes no random number from other threads, gives none twice, and compares like with like."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import oxytorch as ox
import pytest
import torch
from oxytorch.tune.same_draws import SameDraws
from planted import Clock, Net, batches, clock, drifting, made, only
from torch import Tensor, nn

pytestmark = pytest.mark.cpu_only("plants times and faults")
__all__ = ["clock"]

CRITERION = nn.CrossEntropyLoss()
DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: int(torch.randint(2**62, ())),
    "torch in place": lambda: float(torch.empty((), dtype=torch.float64).normal_()),
    "python": lambda: random.getrandbits(62),
    "numpy": lambda: int(np.random.randint(2**62)),
}


class Neighbour:
    """A thread that draws one number from a default generator whenever it is asked, as one that loads data does."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.numbers: list[Any] = []
        self._draw = draw
        self._asked: queue.Queue[bool] = queue.Queue()
        self._done: queue.Queue[bool] = queue.Queue()

    def ask(self) -> None:
        """Let it draw now, and wait until it has."""
        self._asked.put(True)
        self._done.get()

    def _work(self) -> None:
        while self._asked.get():
            self.numbers.append(self._draw())
            self._done.put(True)

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._work)
        thread.start()
        try:
            yield
        finally:
            self._asked.put(False)
            thread.join()


class Beside(Net):
    """Draws its dropout while a neighbour draws too: once in each forward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.listen(lambda: None)

    def listen(self, ask: Callable[[], None]) -> None:
        object.__setattr__(self, "ask", ask)  # a function is no state that a check would put back

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = super().forward(x)
        self.ask()  # type: ignore[operator]
        return first + super().forward(x)


def trained(clock: Clock, draw: Callable[[], Any]) -> tuple[list[Any], bool]:
    """Train over two checks of the watch; what the neighbour drew, and whether the strategy stayed."""
    model = Beside(clock)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with only(made(clock, "slow", 0.002)):
        plan = ox.accelerate(model, optimizer, CRITERION, batches(), remember=False)
    assert plan.accepted == ("cheaper_slow",)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    neighbour = Neighbour(draw)
    model.listen(neighbour.ask)
    with neighbour.running():
        for step, (x, y) in enumerate(batches(120)):
            if step == 20:
                plan._watch.doubt()
            optimizer.zero_grad()
            CRITERION(model(x), y).backward()
            optimizer.step()
    stayed = plan.accepted == ("cheaper_slow",)
    plan.revert()
    return neighbour.numbers, stayed


@pytest.mark.parametrize("source", DRAWS)
def test_no_number_comes_twice(source: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", bytes)  # which draws the steps that are checked
    numbers, stayed = trained(clock, DRAWS[source])
    assert len(numbers) == 120 + 2 * 3  # two in each check: one asked for, and two at steps that are drawn
    assert len(set(numbers)) == len(numbers)
    assert stayed


def test_what_the_thread_draws_does_not_depend_on_checks(clock: Clock) -> None:
    """Without dropout, its numbers are those of the generator in order: none is lost."""
    torch.manual_seed(4)
    expected = [int(torch.randint(2**62, ())) for _ in range(6)]
    torch.manual_seed(4)
    neighbour = Neighbour(DRAWS["torch"])
    with neighbour.running():
        for _ in range(2):
            with SameDraws([], own=True) as draws:
                neighbour.ask()
                first = torch.nn.functional.dropout(torch.ones(64), 0.5)
                draws.again()
                neighbour.ask()
                second = torch.nn.functional.dropout(torch.ones(64), 0.5)
            assert torch.equal(first, second) and not draws.disturbed
            neighbour.ask()
    assert neighbour.numbers == expected


FACTORIES: list[Callable[[], Tensor]] = [
    lambda: torch.rand(5),
    lambda: torch.randn(5),
    lambda: torch.randint(100, (5,)),
    lambda: torch.randperm(9),
    lambda: torch.rand_like(torch.ones(3)),
    lambda: torch.normal(torch.zeros(4), torch.ones(4)),
    lambda: torch.bernoulli(torch.full((20,), 0.5)),
    lambda: torch.multinomial(torch.ones(9), 4),
    lambda: torch.poisson(torch.full((9,), 4.0)),
    lambda: torch.empty(4).exponential_(),
    lambda: torch.nn.functional.rrelu(-torch.ones(9), training=True),
    lambda: torch.nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 2, 4, 4), dropout_p=0.5),
    lambda: torch.distributions.Gamma(torch.ones(5), torch.ones(5)).sample(),
    nn.LSTM(3, 3, 2, dropout=0.5)(torch.ones(4, 2, 3))[0].detach,
    lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)(torch.ones(2, 3, 8)).detach(),
    lambda: nn.init.xavier_uniform_(torch.empty(3, 3)),
]


@pytest.mark.parametrize("number", range(len(FACTORIES)))
def test_every_kind_of_draw_is_the_threads_own_and_the_usual_one(number: int) -> None:
    make = FACTORIES[number]
    torch.manual_seed(3)
    expected = make()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with SameDraws([], own=True) as draws:
        first = make()
        draws.again()
        second = make()
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert torch.equal(torch.get_rng_state(), before)
    given = torch.Generator().manual_seed(5)
    with SameDraws([], own=True):
        torch.rand(3, generator=given)
    assert not torch.equal(given.get_state(), torch.Generator().manual_seed(5).get_state())


def test_a_model_that_draws_from_python_beside_threads_is_not_compared(clock: Clock) -> None:
    with SameDraws([], own=True) as draws:
        random.random()
        draws.again()
        again = random.random()
    alone = threading.active_count() == 1
    assert bool(draws.disturbed) is not alone
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    try:
        state = random.getstate()
        with SameDraws([], own=True) as draws:
            random.random()
            draws.again()
            random.random()
        assert "python random numbers were drawn" in draws.disturbed and random.getstate() != state
        with SameDraws([], own=False) as draws:
            torch.ones(3).sum()
            draws.again()
        assert not draws.disturbed
        with SameDraws([], own=False) as draws:
            torch.rand(3)
            draws.again()
        assert "torch" in draws.disturbed
    finally:
        waiting.set()
        thread.join()
    assert again is not None


def test_what_drifts_is_still_found_beside_a_thread(clock: Clock) -> None:
    Drifts = drifting(clock)
    model = Beside(clock)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with only(Drifts):
        plan = ox.accelerate(model, optimizer, CRITERION, batches(), remember=False)
    neighbour = Neighbour(DRAWS["torch"])
    model.listen(neighbour.ask)
    Drifts.scale = 1.001
    with neighbour.running():
        for x, y in batches(60):
            optimizer.zero_grad()
            CRITERION(model(x), y).backward()
            optimizer.step()
    assert plan.accepted == () and "losses of one batch" in plan.rejected["drifts"]
