"""The exact optimum that the plans of `fit` are compared with is the best of all choices."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.cpu_only("no tensors")

BLOCKS, ACTIONS = 6, 3


@pytest.fixture(scope="module")
def race(import_race: Callable[[str], ModuleType]) -> ModuleType:
    module = import_race("memory_plan")
    if module.highs() is None:
        pytest.skip("highspy is not installed; tools/peers.sh installs it into build/peers")
    return module


def drawn(race: ModuleType, seed: int) -> Any:
    """Spans as a tape has them: what actions lower, what they raise, and what counts with some actions alone."""
    order = random.Random(seed)
    seconds = [[0.0, order.uniform(1e-5, 1e-3), order.uniform(1e-4, 1e-2)] for _ in range(BLOCKS)]
    seconds[order.randrange(BLOCKS)][1] = math.inf
    spans = []
    for _ in range(14):
        lowered = [
            (block, [0, order.randrange(-20_000, 400_000), order.randrange(-20_000, 900_000)])
            for block in sorted(order.sample(range(BLOCKS), order.randrange(BLOCKS)))
        ]
        counts = [order.random() < 0.5 for _ in range(ACTIONS)]
        only_with = (order.randrange(BLOCKS), counts) if order.random() < 0.5 else None
        spans.append(race.Span(order.randrange(1_000_000, 4_000_000), lowered, only_with))
    return race.Program(spans, seconds)


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_best_of_all_choices(race: ModuleType, seed: int) -> None:
    program = drawn(race, seed)
    everyone = [list(choice) for choice in itertools.product(range(ACTIONS), repeat=BLOCKS)]
    known = [(program.peak(choice), program.cost(choice)) for choice in everyone if math.isfinite(program.cost(choice))]
    lowest, plain = min(known)[0], program.peak([0] * BLOCKS)
    found = program.lowest()
    assert program.peak(found.choice) == lowest and found.bound == pytest.approx(lowest, abs=4)
    assert program.cheapest(lowest - 4) is None
    for part in range(5):
        budget = lowest + max(plain - lowest, 0) * part // 4
        best = min(cost for peak, cost in known if peak <= budget)
        found = program.cheapest(budget)
        assert found.is_proven and program.peak(found.choice) <= budget
        assert program.cost(found.choice) == pytest.approx(best, rel=1e-5, abs=1e-9)
        assert found.bound == pytest.approx(best, rel=1e-4, abs=1e-8)


def test_budgets_go_down_to_the_lowest_peak(race: ModuleType) -> None:
    assert race.budgets(1000, 650) == {"90 %": 900, "80 %": 800, "70 %": 700, "least": 650}
    assert list(race.budgets(1000, 1000)) == ["least"]
