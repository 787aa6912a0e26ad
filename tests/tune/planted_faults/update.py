"""Faults of the optimizer's update, its settings and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from oxytorch.tune.record import OptimizerCall, State
from oxytorch.tune.run import Run, plain_step
from oxytorch.tune.update import in_float64
from torch import Tensor

from .planting import autocast, fault, instead_of_step, settings_while


@fault("mlp", "tolerance")
def learning_rate_one_percent_high(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with instead_of_step(run, lambda o: settings_while(o, lr=lambda lr: 1.01 * lr)):
        yield


@fault("gpt", "precision", since=3)
def learning_rate_one_percent_high_later(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), instead_of_step(run, lambda o: settings_while(o, lr=lambda lr: 1.01 * lr if now() else lr)):
        yield


@fault("conv", "trade")
def learning_rate_written_to_the_groups(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    before = run.original.param_groups[0]["lr"]
    run.original.param_groups[0]["lr"] = 1.01 * before
    yield
    run.original.param_groups[0]["lr"] = before


@fault("gpt", "tolerance")
def betas_swapped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with instead_of_step(run, lambda o: settings_while(o, betas=lambda b: (b[1], b[0]))):
        yield


@fault("mlp", "tolerance")
def epsilon_1e_6(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with instead_of_step(run, lambda o: settings_while(o, eps=1e-6)):
        yield


@fault("mlp", "tolerance")
def weight_decay_skipped_for_one_group(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with instead_of_step(run, lambda o: settings_while(o, weight_decay=0.0)):
        yield


@fault("mlp", "precision")
def weight_decay_for_all_groups(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), instead_of_step(run, lambda o: settings_while(o, weight_decay=0.1)):
        yield


@fault("gpt", "tolerance")
def bias_correction_missing(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        steps = [state["step"] for state in optimizer.state.values()]
        held = [s.clone() for s in steps]
        for s in steps:
            s.fill_(1e6)
        plain_step(optimizer)
        for s, old in zip(steps, held, strict=True):
            s.copy_(old + 1)

    with instead_of_step(run, step):
        yield


@fault("conv", "tolerance")
def nesterov_forgotten(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with instead_of_step(run, lambda o: settings_while(o, nesterov=False)):
        yield


@fault("conv", "tolerance")
def momentum_in_bfloat16(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        plain_step(optimizer)
        for state in optimizer.state.values():
            state["momentum_buffer"].copy_(state["momentum_buffer"].bfloat16())

    with instead_of_step(run, step):
        yield


def towards_zero(value: Tensor) -> Tensor:
    near = value.float()
    over = near.double().abs() > value.abs()
    return torch.where(over, torch.nextafter(near, torch.zeros_like(near)), near)


@fault("mlp", "tolerance")
def rounding_towards_zero(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        call = OptimizerCall.of(run)
        params, _ = in_float64(run, State.of(run, []), [call], [call.settings])
        plain_step(optimizer)
        with torch.no_grad():
            for p, value in zip(run.params, params, strict=True):
                p.copy_(towards_zero(value))

    with instead_of_step(run, step):
        yield


@fault("gpt", "precision")
def master_weights_lost(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        plain_step(optimizer)
        with torch.no_grad():
            for p in run.params:
                p.copy_(p.bfloat16())

    with autocast(run), instead_of_step(run, step):
        yield


@fault("conv", "tolerance")
def every_fifth_step_twice(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    count = 0

    def step(optimizer: Any) -> None:
        nonlocal count
        count += 1
        for _ in range(2 if count % 5 == 0 else 1):
            plain_step(optimizer)

    with instead_of_step(run, step):
        yield


@fault("mlp", "precision", since=4)
def a_step_skipped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), instead_of_step(run, lambda o: None if now() else plain_step(o)):
        yield


@fault("gpt", "tolerance", since=3)
def state_of_one_parameter_reset(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        if now():
            optimizer.state[run.model.up.bias]["exp_avg"].zero_()
        plain_step(optimizer)

    with instead_of_step(run, step):
        yield


@fault("gpt", "trade")
def state_lost_on_the_way_in(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    for state in run.original.state.values():
        state["exp_avg"].zero_()
    yield
