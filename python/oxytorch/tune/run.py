"""A training run as strategies see it: model, optimizer, batches, and one step of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .._C import tune as _native
from ..base import log
from ..data.batches import tensors
from ..memory.fit import synchronize
from ..model.call import Call, Calls
from ..model.parking import is_parked
from ..model.several import numbered
from ..optim.slot import plain_step
from ..step import Losses, Models, Optimizers, StepFunction, TrainingStep, is_closure
from .observe import observe
from .strategy import STRATEGIES, Strategy

__all__ = ["Run", "plain_step", "told"]

_LONGEST = 200  # characters of what an exception says


def _as_it_is(batch: Any) -> Any:
    return batch


class Run(TrainingStep):
    """What a strategy gets: the user's objects, one whole training step, and the places where it may be changed.

    Parameters
    ----------
    model : torch.nn.Module or list of them
    optimizer : torch.optim.Optimizer or list of them
    loss_fn : callable or list of them
        See `TrainingStep`.
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
    draws_data : bool
        Whether batches are drawn from `data` as it is then, so that a strategy may change how; so it is where the plan
        takes the steps.
    state : iterable
        What else a step changes, such as a scheduler or a scaler.
    strategies : mapping, optional
        Classes by name that `set_active` may ask for; the registered ones unless given.

    Attributes
    ----------
    calls : tuple of Call
        Of each model: scopes around forward, transforms of inputs and outputs, a compiled function.
    call : Call or Calls
        Of all models at once; its `function` is for one model.
    micro_batches : int
        Pieces that a batch is cut into, gradients averaged over them; for strategies with ``needs_loop``.
    whole_step : callable, optional
        Takes a whole step in place of the eager one; for strategies with ``needs_loop``.
    given_data : iterable, optional
        What `data` was before any strategy.
    place : callable
        Takes a batch as it is drawn and returns it where a step wants it.
    required : tuple of str
        Strategies that the user's settings ask for: `set_active` leaves them active.
    tail_options : mapping
        Of `oxytorch.optim.replace`, for what is put in the place of the user's optimizer.
    asked : mapping
        Settings that the user named, for strategies that have a choice.
    given_clip : float, optional
        What `clip_norm` was before any strategy.
    fetch_share : float
        Of a step of the loop as given, what drawing its batch from `data` takes, as measured; 0 where `data` is no
        loader or the loop draws from elsewhere.
    last : OptimizerSlot
        The one that steps last in a step: with its step one ends and the next one begins.
    falls_back : bool
        Whether a strategy that fails inside of a step lets the step go on without it. False during trials, where it is
        to throw.
    fallbacks : dict of str
        By strategy that failed so, when and why.

    Other attributes are those of `TrainingStep`.
    """

    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        loss_fn: Losses,
        batches: Sequence[Any],
        *,
        step: StepFunction | None = None,
        clip_norm: float | None = None,
        data: Iterable[Any] | None = None,
        owns_loop: bool = False,
        draws_data: bool = False,
        state: Iterable[Any] = (),
        strategies: Mapping[str, type[Strategy]] = STRATEGIES,
    ) -> None:
        super().__init__(model, optimizer, loss_fn, own_step=step, clip_norm=clip_norm)
        self.batches = tuple(batches)
        self.given_clip = clip_norm
        self.data = data
        self.given_data = data
        self.fetch_share = 0.0
        self.place: Callable[[Any], Any] = _as_it_is
        self.required: tuple[str, ...] = ()
        self.tail_options: Mapping[str, Any] = {}
        self.asked: Mapping[str, Any] = {}
        self.owns_loop = owns_loop
        self.draws_data = draws_data or owns_loop
        self.state = tuple(state)
        losses = {} if loss_fn is None else dict(numbered("loss_fn", loss_fn))
        self.functions = {"step": step, **losses}  # code that is the user's, and may reach more
        self.calls = tuple(Call.of(one) for one in self.models)
        self.call = self.calls[0] if len(self.calls) == 1 else Calls(self.calls)
        self.last = self.slots[-1]
        self.micro_batches = 1
        self.falls_back = False
        self.fallbacks: dict[str, str] = {}
        self.device = next((p.device for p in self.params), torch.device("cpu"))
        self.strategies = dict(strategies)
        self._made: dict[str, Strategy] = {}
        self._active: dict[str, Strategy] = {}

    # -- the step ------------------------------------------------------------------------------------------------

    def pieces(self, batch: Any) -> list[tuple[Any, float]]:
        """What of a batch goes through forward together, and its share of the rows."""
        if self.micro_batches == 1 or is_closure(batch):
            return [(batch, 1.0)]
        return [(piece, rows(piece) / rows(batch)) for piece in split(batch, self.micro_batches)]

    @contextmanager
    def _window(self, more: bool) -> Iterator[None]:
        if self.updates_in_backward and not more:  # what the program holds of logits is of the weights as they are
            _native.DeferredLogits.before_weights_change()
        with super()._window(more):
            yield

    def step_of_window(self, batch: Any) -> Tensor:
        """Take a whole step; where batches are accumulated, of the same one as often as there are, up to four times."""
        batches = _native.batches_of_trial(self.accumulation)
        if batches == 1 or self.own_step is not None or len(self.slots) > 1:
            return self.step(batch)
        self.original.zero_grad()
        for left in reversed(range(batches)):
            loss = self._backward(batch, batches=batches, more=left > 0)
        self.update()
        return loss

    def forward(self) -> Tensor:
        """Run forward and loss on the first batch, under what is active."""
        return self.loss(self.batches[0])

    def uses(self, part: str) -> bool:
        """Whether a step has an operator with this in its name; any, where there is no batch to look at."""
        return observe(self).uses(part)

    def state_of(self, param: Tensor) -> Mapping[str, Any]:
        """Return what the user's optimizers keep of a parameter."""
        kept = [(slot.name, slot.original.state.get(param) or {}) for slot in self.slots]
        return {f"{name} {key}".lstrip(): value for name, state in kept for key, value in state.items()}

    def held_bytes(self, batch: Any) -> int:
        """Bytes of the tensors on its device that a step on `batch` begins with, each memory once; without gradients.

        Those are made anew.
        """
        optimizers = [one for slot in self.slots for one in (slot.original, slot.optimizer)]  # seldom two
        state = [v for one in optimizers for each in one.state.values() for v in each.values() if isinstance(v, Tensor)]
        held = [
            *(t for model in self.models for t in (*model.parameters(), *model.buffers())),
            *self.params,
            *tensors(batch),
            *(v for v in state if not is_parked(v)),
        ]
        on_device = (t.untyped_storage() for t in held if t.device == self.device)
        return sum({storage._cdata: storage.nbytes() for storage in on_device}.values())

    def synchronize(self) -> None:
        """Wait until an accelerator has done what it was given."""
        synchronize(self.device)

    # -- strategies ----------------------------------------------------------------------------------------------

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the active strategies."""
        return tuple(self._active)

    @property
    def beside_required(self) -> tuple[str, ...]:
        """Names of the active strategies that the settings do not ask for."""
        return tuple(name for name in self._active if name not in self.required)

    def strategy(self, name: str) -> Strategy:
        """Return this run's object of a registered strategy."""
        if name not in self._made:
            self._made[name] = self.strategies[name]()
        return self._made[name]

    def forget_idle(self) -> None:
        """Drop the objects of strategies that are not active, and the copies and compiled functions they keep."""
        self._made = dict(self._active)

    def set_active(self, names: Iterable[str]) -> None:
        """Make exactly these strategies active: others are taken back, the last first, then the missing ones applied.

        Where one cannot be applied, those of this call are taken back again and its exception passes through. Where one
        cannot be taken back, the others are, nothing is applied, and its exception passes through.
        """
        named = list(names)
        wanted = [*(name for name in self.required if name not in named), *named]
        self._withdraw([name for name in self._active if name not in wanted])
        added: list[str] = []
        try:
            for name in wanted:
                if name not in self._active:
                    self.strategy(name).apply(self)
                    self._active[name] = self.strategy(name)
                    added.append(name)
        except BaseException:
            self._withdraw(added)
            raise

    def renew(self, group: str) -> None:
        """Take back what is active of a group and put it on again, as something that it looks at was changed."""
        for one in [one for one in self._active.values() if one.group == group]:
            one.revert(self)
            one.apply(self)

    def settle(self) -> None:
        """Tell what is active that trials are over and it stays."""
        for one in self._active.values():
            one.settle_in(self)

    def _withdraw(self, names: Sequence[str]) -> None:
        failure: Exception | None = None
        for name in reversed(names):
            try:
                self._active.pop(name).revert(self)
            except Exception as error:  # noqa: PERF203  (the others are taken back all the same)
                failure = failure or error
        if failure is not None:
            raise failure

    def fall_back(self, name: str, why: str) -> None:
        """Note that a strategy failed inside of a step, which goes on without it, as all that follow do."""
        self.fallbacks[name] = f"step {self.taken + 1}: {why}"
        log("warn", f"{name} failed, and the run goes on without it: {self.fallbacks[name]}", "tune")

    # -- the optimizer -------------------------------------------------------------------------------------------

    def replace_step(self, step: Callable[[Callable[[], Any] | None], Any] | None) -> None:
        """See `OptimizerSlot.replace_step`; of the first optimizer."""
        self.slots[0].replace_step(step)

    def replace_optimizer(self, replacement: torch.optim.Optimizer | None) -> None:
        """See `OptimizerSlot.replace_optimizer`; of the first optimizer."""
        self.slots[0].replace_optimizer(replacement)


def rows(batch: Any) -> int:
    """Return the size of the first dimension of a batch's first tensor."""
    return next(int(t.shape[0]) for t in tensors(batch) if t.dim() > 0)


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


def resized(batch: Any, count: int) -> Any:
    """Return a batch of `count` rows, those of `batch` over and over; values without its rows stay as they are."""
    given = rows(batch)

    def part(leaf: Any) -> Any:
        whole = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == given
        return leaf.index_select(0, torch.arange(count, device=leaf.device) % given) if whole else leaf

    return tree_map(part, batch)


def told(error: BaseException) -> str:
    """One line of an exception: a compiler's are pages."""
    error.__traceback__ = None  # its frames hold the tensors that an out-of-memory must let go
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])  # "backend=... raised:"
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
