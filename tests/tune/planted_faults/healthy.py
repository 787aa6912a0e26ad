"""What must pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from oxytorch import optim
from oxytorch.tune.run import Run
from torch.nn.attention import SDPBackend, sdpa_kernel

from .planting import Plant, autocast, healthy, instead_of_step, set_for, settings_while, step_of
from .random_numbers import drawing


@healthy("mlp", "exact")
def nothing(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    yield


@healthy("gpt", "exact")
def nothing_at_all(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    yield


@healthy("scaled", "exact")
def nothing_in_a_loop(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    yield


@healthy("overflowing", "tolerance")
def nothing_in_a_loop_that_skips(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    yield


@healthy("scaled", "tolerance")
def nothing_in_a_loop_claimed_as_tolerance(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    yield


def bfloat16_autocast(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run):
        yield


for _on in ("mlp", "conv", "gpt"):
    healthy(_on, "precision")(bfloat16_autocast)


@healthy("conv", "tolerance")
def rows_in_another_order(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with step_of(run, lambda batch, plain: plain((batch[0].flip(0), batch[1].flip(0)))):
        yield


@healthy("conv", "tolerance")
def channels_last(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    run.call.inputs("planted", lambda a, k: ((a[0].contiguous(memory_format=torch.channels_last),), k))
    yield
    run.call.inputs("planted", None)


def optimizer_flag(flag: str) -> Plant:
    def plant(run: Run, now: Callable[[], bool]) -> Iterator[None]:
        with instead_of_step(run, lambda o: settings_while(o, **{flag: True})):
            yield

    plant.__name__ = flag
    return plant


for _on in ("mlp", "conv", "gpt"):
    healthy(_on, "exact")(optimizer_flag("foreach"))
    healthy(_on, "tolerance")(optimizer_flag("fused"))


def step_tail(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    clip = run.clip_norm
    run.replace_optimizer(optim.replace(run.original, nonfinite="propagate", clip_norm=clip))
    run.clip_norm = None
    yield
    run.replace_optimizer(None)
    run.clip_norm = clip


for _on in ("mlp", "conv", "gpt"):
    healthy(_on, "tolerance")(step_tail)


@healthy("gpt", "tolerance")
def math_attention(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    run.call.scope("planted", lambda: sdpa_kernel([SDPBackend.MATH]))
    yield
    run.call.scope("planted", None)


@healthy("gpt", "tolerance")
def masks_drawn_in_another_way(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with drawing(run, 0.1):
        yield


@healthy("gpt", "tolerance")
def two_micro_batches(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run, micro_batches=2):
        yield


@healthy("mlp", "exact")
def data_in_memory(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        batches = list(run.data)
    with set_for(run, data=batches):
        yield
