"""Faults of gradients: stale, of other rows, weighted or clipped in another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from oxytorch.tune.run import Run, plain_step, rows, split
from torch import Tensor, nn

from .planting import autocast, before_optimizer, fault, instead_of_step, set_for, step_of


@fault("mlp", "tolerance", since=2)
def stale_gradient(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    last: list[Tensor] = []

    def swap(params: list[Tensor]) -> None:
        held = [p.grad.clone() for p in params]
        if now() and last:
            for p, g in zip(params, last, strict=True):
                p.grad.copy_(g)
        last[:] = held

    with before_optimizer(run, swap):
        yield


@fault("gpt", "precision", since=1)
def stale_gradient_of_one_layer(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    last: list[Tensor] = []

    def swap(_: list[Tensor]) -> None:
        weight = run.model.up.weight
        held = weight.grad.clone()
        if now() and last:
            weight.grad.copy_(last[0])
        last[:] = [held]

    with autocast(run), before_optimizer(run, swap):
        yield


def accumulate(run: Run, batch: Any, pieces: int, weight: Callable[[Any], float], drop: int = 0) -> Tensor:
    run.original.zero_grad()
    parts = split(batch, pieces)
    total = torch.zeros((), device=run.device)
    for part in parts[: len(parts) - drop]:
        loss = run.loss(part)
        (loss * weight(part)).backward()
        total = total + loss.detach() * rows(part) / rows(batch)
    if run.clip_norm is not None:
        nn.utils.clip_grad_norm_(run.params, run.clip_norm)
    run.original.step()
    return total


@fault("gpt", "tolerance")
def wrong_accumulation_divisor(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with step_of(run, lambda batch, _: accumulate(run, batch, 2, lambda _: 1.0)):
        yield


@fault("conv", "precision")
def accumulation_divides_by_one_more(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), step_of(run, lambda batch, _: accumulate(run, batch, 1, lambda _: 16 / 17)):
        yield


@fault("gpt", "tolerance")
def micro_batches_weighted_equally(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with step_of(run, lambda batch, _: accumulate(run, batch, 3, lambda _: 1 / 3)):
        yield


@fault("gpt", "tolerance", since=2)
def last_micro_batch_dropped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        return accumulate(run, batch, 4, lambda part: rows(part) / rows(batch), drop=1) if now() else plain(batch)

    with step_of(run, step):
        yield


@fault("mlp", "tolerance")
def remainder_dropped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with step_of(run, lambda batch, plain: plain((batch[0][:28], batch[1][:28]))):
        yield


@fault("conv", "precision", since=3)
def last_row_dropped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        return plain((batch[0][:-1], batch[1][:-1]) if now() else batch)

    with autocast(run), step_of(run, step):
        yield


@fault("mlp", "tolerance")
def labels_shifted_by_one_row(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with step_of(run, lambda batch, plain: plain((batch[0], batch[1].roll(1)))):
        yield


@fault("gpt", "tolerance")
def one_layer_transposed(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with before_optimizer(run, lambda _: run.model.out.weight.grad.copy_(run.model.out.weight.grad.t().clone())):
        yield


@fault("gpt", "precision", since=2)
def one_layer_gradient_zeroed(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), before_optimizer(run, lambda _: run.model.norm.bias.grad.zero_() if now() else None):
        yield


@fault("mlp", "tolerance", since=1)
def frozen_layer(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        run.model[0].weight.requires_grad_(not now())
        return plain(batch)

    with step_of(run, step):
        yield
    run.model[0].weight.requires_grad_(True)


@fault("conv", "tolerance", since=3)
def sign_of_one_bias(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with before_optimizer(run, lambda _: run.model[9].bias.grad.neg_() if now() else None):
        yield


@fault("mlp", "tolerance", since=2)
def gradients_not_zeroed(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    zero = run.original.zero_grad
    run.original.zero_grad = lambda *_, **__: None if now() else zero()
    yield
    del run.original.__dict__["zero_grad"]


@fault("conv", "tolerance")
def gradients_through_bfloat16(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def narrow(params: list[Tensor]) -> None:
        for p in params:
            p.grad.copy_(p.grad.bfloat16())

    with before_optimizer(run, narrow):
        yield


@fault("mlp", "tolerance")
def clip_threshold_doubled(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run, clip_norm=1.0):
        yield


@fault("mlp", "tolerance")
def clipped_after_the_step(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        plain_step(optimizer)
        nn.utils.clip_grad_norm_(run.params, 0.5)

    with set_for(run, clip_norm=None), instead_of_step(run, step):
        yield


@fault("mlp", "tolerance")
def clipped_each_by_itself(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def each(params: list[Tensor]) -> None:
        for p in params:
            nn.utils.clip_grad_norm_(p, 0.5)

    with set_for(run, clip_norm=None), before_optimizer(run, each):
        yield
