"""A training run as strategies see it: model, optimizer, batches, and one step of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..model.escrow import is_criterion
from .call import Call
from .strategy import STRATEGIES, Strategy

__all__ = ["Run"]

StepFunction = Callable[[Any], Tensor]
Split = Callable[[Any, int], Sequence[Any]]


class Run:
    """What a strategy gets: the user's objects, one whole training step, and the places where it may be changed.

    Parameters
    ----------
    model : torch.nn.Module
    optimizer : torch.optim.Optimizer
    loss_fn : callable
        ``loss_fn(model, batch)``, or a criterion, and then a batch is (inputs, targets).
    batches : sequence
        Some batches of the run, kept.
    step : callable, optional
        The user's own step: takes a batch, does all of zero_grad, forward, backward and optimizer step, returns the
        loss. Without it a step is: zero_grad, loss, backward, clip (with `clip_norm`), step.
    clip_norm : float, optional
    data : iterable, optional
        What batches are drawn from during training, where the user gave more than a list of batches.
    owns_loop : bool
        Whether the plan takes the steps, so that a strategy may change the loop itself.

    Attributes
    ----------
    call : Call
        Scopes around forward, transforms of inputs and outputs, a compiled function.
    micro_batches : int
        Pieces that a batch is cut into, gradients averaged over them; for strategies with ``needs_loop``.
    original : torch.optim.Optimizer
        The user's optimizer object; `optimizer` is the one that steps now.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Tensor] | nn.Module | None,
        batches: Sequence[Any],
        *,
        step: StepFunction | None = None,
        clip_norm: float | None = None,
        data: Iterable[Any] | None = None,
        owns_loop: bool = False,
    ) -> None:
        self.model = model
        self.original = optimizer
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.batches = tuple(batches)
        self.own_step = step
        self.clip_norm = clip_norm
        self.data = data
        self.owns_loop = owns_loop
        self.call = Call(model)
        self.micro_batches = 1
        self.params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = next((p.device for p in self.params), torch.device("cpu"))
        self._criterion = loss_fn is not None and is_criterion(loss_fn)
        self._strategies: dict[str, Strategy] = {}
        self._in_force: dict[str, Strategy] = {}

    # -- the step ------------------------------------------------------------------------------------------------

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch under what is in force."""
        assert self.loss_fn is not None
        if self._criterion:
            return self.loss_fn(self.model(batch[0]), batch[1])
        return self.loss_fn(self.model, batch)

    def step(self, batch: Any) -> Tensor:
        """Take one whole training step; return the detached loss."""
        if self.own_step is not None:
            return self.own_step(batch).detach()
        self.original.zero_grad()
        pieces = [batch] if self.micro_batches == 1 else split(batch, self.micro_batches)
        total: Tensor | None = None
        for piece in pieces:
            loss = self.loss(piece) if len(pieces) == 1 else self.loss(piece) * (rows(piece) / rows(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.params, self.clip_norm)
        self.original.step()
        assert total is not None
        return total

    # -- strategies ----------------------------------------------------------------------------------------------

    @property
    def in_force(self) -> tuple[str, ...]:
        """Names of the strategies in force."""
        return tuple(self._in_force)

    def strategy(self, name: str) -> Strategy:
        """Return this run's object of a registered strategy."""
        if name not in self._strategies:
            self._strategies[name] = STRATEGIES[name]()
        return self._strategies[name]

    def bring(self, names: Iterable[str]) -> None:
        """Put exactly these strategies in force: others are taken back, the last first, then the missing ones applied.

        Where one cannot be applied, those of this call are taken back again and its exception passes through.
        """
        wanted = list(names)
        for name in [n for n in reversed(self._in_force) if n not in wanted]:
            self._in_force.pop(name).revert(self)
        added: list[str] = []
        try:
            for name in wanted:
                if name not in self._in_force:
                    self.strategy(name).apply(self)
                    self._in_force[name] = self.strategy(name)
                    added.append(name)
        except BaseException:
            for name in reversed(added):
                self._in_force.pop(name).revert(self)
            raise

    # -- the optimizer -------------------------------------------------------------------------------------------

    def replace_optimizer(self, replacement: torch.optim.Optimizer | None) -> None:
        """Let `replacement` do the steps of the user's optimizer object; None: itself again.

        Both share param_groups and state, so schedulers, printouts and ``state_dict()`` of the user's object hold, and
        a loop that calls its ``step()`` and ``zero_grad()`` goes through the replacement.
        """
        own = self.original
        for method in ("step", "zero_grad"):
            own.__dict__.pop(method, None)
        self.optimizer = own if replacement is None else replacement
        if replacement is None:
            return
        own.param_groups = replacement.param_groups
        own.state = replacement.state
        own.step = replacement.step  # type: ignore[method-assign]
        own.zero_grad = replacement.zero_grad  # type: ignore[method-assign]


def rows(batch: Any) -> int:
    """Return the size of the first dimension of a batch's first tensor."""
    leaves = tree_leaves(batch)
    return next(int(t.shape[0]) for t in leaves if isinstance(t, Tensor) and t.dim() > 0)


def split(batch: Any, pieces: int) -> list[Any]:
    """Cut every tensor of a batch with its number of rows into pieces; other values are in each piece."""
    count = rows(batch)
    bounds = [count * i // pieces for i in range(pieces + 1)]

    def cut(low: int, high: int) -> Any:
        def part(leaf: Any) -> Any:
            whole = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count
            return leaf[low:high] if whole else leaf

        return tree_map(part, batch)

    return [cut(low, high) for low, high in pairwise(bounds) if high > low]
