"""Trainers make settings of the process active; the next test finds it as it was."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
from oxytorch.tune import Plan

ACCELERATE = importlib.import_module("oxytorch.tune.accelerate")


@pytest.fixture(autouse=True)
def taken_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take back every plan that a test has made, also of trainers that it has let go."""
    made: list[Plan] = []

    class Kept(dict[int, Plan]):
        def __setitem__(self, model: int, plan: Plan) -> None:
            made.append(plan)
            super().__setitem__(model, plan)

    monkeypatch.setattr(ACCELERATE, "_PLANS", Kept())
    yield
    for plan in reversed(made):
        plan.revert()
