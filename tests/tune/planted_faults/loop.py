"""Faults of the user's own loop and of its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from oxytorch.tune.run import Run
from torch.utils.data import DataLoader

from .planting import fault, part_of_loop, set_for


@fault("scaled", "tolerance")
def unscale_missing(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    loop = run.loop  # type: ignore[attr-defined]
    with (
        part_of_loop(run, "unscale", lambda _: None),
        part_of_loop(run, "optimizer", lambda o: o.step()),
        set_for(loop.scaler, update=lambda: None),
    ):
        yield
    del loop.scaler.update


@fault("scaled", "tolerance", since=2)
def moving_average_skipped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    plain = run.loop.steps["average"]  # type: ignore[attr-defined]
    with part_of_loop(run, "average", lambda: None if now() else plain()):
        yield


@fault("scaled", "tolerance")
def schedule_forgotten(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with part_of_loop(run, "schedule", lambda: None):
        yield


@fault("overflowing", "tolerance")
def overflow_ignored(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        for p in run.params:
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()

    with part_of_loop(run, "optimizer", step):
        yield


@fault("mlp", "exact")
def last_batch_of_the_epoch_dropped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run, data=DataLoader(run.data.dataset, batch_size=16, drop_last=True)):
        yield


@fault("gpt", "exact")
def epochs_begin_without_drawing_their_seed(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        batches = list(run.data)  # dropout goes on from another state than after a loader's first draw
    with set_for(run, data=batches):
        yield


@fault("mlp", "exact")
def batches_in_another_order(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        batches = list(run.data)[::-1]
    with set_for(run, data=batches):
        yield
