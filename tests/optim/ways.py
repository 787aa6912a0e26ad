"""The ways in which Python code may have an optimizer step natively, behind one interface."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oxytorch as ox
import oxytorch.optim
import torch
from oxytorch.optim.options import with_defaults
from oxytorch.tune.run import Run
from torch import Tensor, nn

WAYS = ("optim", "replace", "Trainer", "step_tail", "native_step")
# What native_step serves.
NATIVE_STEP = ("Adam", "AdamW", "SGD")


class Weights(nn.Module):
    """A model whose gradients are what the batch says."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(params)


def loss_of(model: Weights, grads: list[Tensor | None]) -> Tensor:
    """A loss with these gradients."""
    terms = [(p * g).sum() for p, g in zip(model.weights, grads, strict=True) if g is not None]
    return sum((term.float() for term in terms), torch.zeros(()))


class Way:
    """An optimizer, as a user holds it, that steps by one of the ways.

    Attributes
    ----------
    opt : torch.optim.Optimizer
        The user's object: its `state` and `param_groups` are what a user edits.
    """

    def __init__(self, way: str, name: str, params: list[nn.Parameter], groups: Any = None, **options: Any) -> None:
        self.way, self.params = way, params
        self.model = Weights(params)
        given = params if groups is None else groups
        if way == "optim":
            self.opt: Any = getattr(oxytorch.optim, name)(given, **options)
            return
        self.opt = getattr(torch.optim, name)(given, **options)
        if way == "replace":
            self.new = oxytorch.optim.replace(self.opt)
        elif way == "Trainer":
            self.trainer = ox.Trainer(self.model, self.opt, loss_of, step_tail="on", calibrate=False, precision="fp32")
            assert self.trainer.has_tail
        else:
            self.run = Run(self.model, self.opt, loss_of, [])
            self.run.set_active([way])

    @property
    def stepping(self) -> Any:
        """The object that does the steps; the user's own under native_step."""
        if self.way == "Trainer":
            return self.trainer.optimizer
        if self.way == "replace":
            return self.new
        return self.run.optimizer if self.way == "step_tail" else self.opt

    @property
    def verified(self) -> Any:
        """What `referee.snapshot` and `referee.check_step` take."""
        return as_tail(self.opt) if self.way == "native_step" else self.stepping

    def step(self, grads: list[Tensor | None]) -> None:
        """Take a step with these gradients."""
        if self.way == "Trainer":
            self.trainer.step(grads)
            return
        for p, g in zip(self.params, grads, strict=True):
            p.grad = g
        (self.new if self.way == "replace" else self.opt).step()


def as_tail(opt: torch.optim.Optimizer) -> Any:
    """A torch optimizer as if it were one of oxytorch without any option."""
    members = {
        "state": property(lambda _: opt.state),
        "param_groups": property(lambda _: opt.param_groups),
        "_tail_options": {**with_defaults({}), "nonfinite": "propagate"},
        "ema_state_dict": lambda _: {"ema": {}},
        "copies": lambda _: [None for group in opt.param_groups for _ in group["params"]],
        "tail_stats": lambda _: SimpleNamespace(applied=1.0),
    }
    return type(type(opt).__name__, (), members)()
