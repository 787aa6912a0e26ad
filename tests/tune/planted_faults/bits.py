"""Faults under a claim of the same bits, and steps that fail late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from oxytorch.tune.run import Run, plain_step
from torch import Tensor

from .planting import fault, forward, instead_of_step, step_of


@fault("conv", "exact", since=3)
def one_bit_of_one_weight(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        plain_step(optimizer)
        if now():
            flat = run.model[4].weight.data.view(-1)
            flat[0] = torch.nextafter(flat[0], flat[0].new_tensor(9.0))

    with instead_of_step(run, step):
        yield


@fault("gpt", "exact")
def a_random_number_too_many(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        loss = plain(batch)
        torch.rand(1)
        return loss

    with step_of(run, step):
        yield


@fault("conv", "exact")
def sums_in_another_order(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with step_of(run, lambda batch, plain: plain((batch[0].flip(0), batch[1].flip(0)))):
        yield


@fault("mlp", "tolerance", since=2)
def nan_from_a_late_step(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    run.call.outputs("planted", lambda out: out * float("nan") if now() else out)
    yield
    run.call.outputs("planted", None)


@fault("mlp", "tolerance", since=1)
def throws_at_a_late_step(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def call(x: Tensor) -> Tensor:
        if now():
            raise torch.OutOfMemoryError("planted")
        return run.model._call_impl(x)

    with forward(run, call):
        yield
