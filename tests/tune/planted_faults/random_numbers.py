"""Faults of random numbers: masks drawn again, at another rate, or from another state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from oxytorch.tune.run import Run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .planting import autocast, fault, forward, set_for

DROPOUT = F.dropout


@fault("gpt", "tolerance")
def the_same_mask_each_step(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def call(tokens: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return run.model._call_impl(tokens)

    with forward(run, call):
        yield


@fault("gpt", "precision", since=1)
def the_same_mask_each_step_behind_a_moving_generator(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def call(tokens: Tensor) -> Tensor:
        out = run.model._call_impl(tokens)
        if not now():
            return out
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return run.model._call_impl(tokens)

    with autocast(run), forward(run, call):
        yield


@fault("gpt", "tolerance")
def seeded_when_switched_on(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    torch.manual_seed(123)
    yield


@fault("gpt", "tolerance")
def mask_of_another_rate(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run.model.drop, p=0.15):
        yield


@fault("gpt", "tolerance")
def own_masks_of_another_rate(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with drawing(run, 0.15):
        yield


@contextmanager
def drawing(run: Run, rate: float) -> Iterator[None]:
    """Draw masks in another way, as a compiled function does; switched off with dropout."""

    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if F.dropout is not DROPOUT:
                return x
            return x * (torch.rand(x.shape, device=x.device, dtype=torch.float32) >= rate) / (1 - rate)

    with set_for(run.model, drop=Other()):
        yield


@fault("gpt", "precision")
def dropout_in_eval_mode(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), set_for(run.model.drop, training=False):
        yield


@fault("gpt", "tolerance")
def another_mask_in_backward(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    model = run.model

    def call(tokens: Tensor) -> Tensor:
        body = checkpoint(model.body, model.table(tokens), use_reentrant=False, preserve_rng_state=False)
        return model.head(body)

    with forward(run, call):
        yield
