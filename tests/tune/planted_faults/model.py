"""Faults of the model: its buffers, formats, masks, weights and layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from oxytorch.tune.run import Run
from torch import Tensor, nn
from torch.func import functional_call

from .planting import autocast, fault, forward, set_for


@fault("mlp", "tolerance")
def batch_norm_momentum(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run.model[1], momentum=0.11):
        yield


@fault("conv", "tolerance")
def batch_norm_in_eval_mode(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run.model[1], training=False):
        yield


@fault("mlp", "tolerance")
def last_layer_in_bfloat16(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    last = run.model[5]
    last.forward = lambda x: F.linear(x.bfloat16(), last.weight.bfloat16(), last.bias.bfloat16()).float()
    yield
    del last.forward


@fault("gpt", "precision")
def loss_in_bfloat16(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with (
        autocast(run),
        set_for(run, loss_fn=lambda m, b: F.cross_entropy(m(b[0]).bfloat16().flatten(0, 1), b[1].flatten()).float()),
    ):
        yield


@fault("gpt", "tolerance")
def causal_mask_forgotten(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run.model, causal=False):
        yield


@fault("gpt", "precision")
def causal_mask_forgotten_in_bfloat16(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), set_for(run.model, causal=False):
        yield


@fault("gpt", "tolerance")
def tied_weights_untied(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    copy = run.model.table.weight.detach().clone().requires_grad_()
    model = run.model

    def call(tokens: Tensor) -> Tensor:
        return F.linear(model.body(model.table(tokens)), copy)

    with forward(run, call):
        yield


@fault("gpt", "tolerance")
def stale_weights_in_a_compiled_function(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    model = run.model
    frozen = {"up.weight": model.up.weight.detach().clone()}

    def call(tokens: Tensor) -> Tensor:
        up = frozen["up.weight"] + 0.0 * model.up.weight
        return functional_call(model, {"up.weight": up + (model.up.weight - model.up.weight.detach())}, (tokens,))

    with forward(run, run_once(model, call)):
        yield


def run_once(model: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Let `functional_call` reach the module itself, and not this function again."""

    def inner(*args: Any) -> Any:
        held = model._compiled_call_impl
        model._compiled_call_impl = None
        try:
            return call(*args)
        finally:
            model._compiled_call_impl = held

    return inner


@fault("conv", "tolerance")
def layout_that_scrambles_channels(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    run.call.inputs("planted", lambda args, kwargs: ((args[0].permute(0, 2, 3, 1).reshape(args[0].shape),), kwargs))
    yield
    run.call.inputs("planted", None)


@fault("gpt", "tolerance")
def gradient_stopped_in_a_branch(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run.model, down=Detached(run.model.down)):
        yield


class Detached(nn.Module):
    """A fused block whose backward forgot its input."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.detach(), self.weight, self.bias)
