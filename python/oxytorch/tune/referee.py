"""A step taken once more, as given or in float64: what loss, gradients, buffers should be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .._C import tune as _native
from ..model.parking import park, rest
from ..model.snapshot import Snapshot
from .record import Call, State, Step, copied, load, names, rng_digest
from .update import clip_factor

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Truth", "measure", "taken_again", "truth", "unexplained"]


@dataclass
class Truth:
    """Loss, gradients as the optimizer gets them and buffers after the step; `rng` as the step left it.

    `dtype` is that of the loss.
    """

    loss: float
    grads: list[Tensor | None]
    buffers: dict[str, Tensor]
    rng: str
    dtype: torch.dtype


@contextmanager
def _noting(run: Run) -> Iterator[list[Call]]:
    """The optimizer noting what it is given and stepping nothing while inside."""
    calls: list[Call] = []
    table = run.original.__dict__
    before: dict[str, Any] = {key: table[key] for key in ("step", "_opt_called") if key in table}

    def note(closure: Any = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        calls.append(Call.of(run))
        return result

    try:
        table["step"] = note
        table["_opt_called"] = True
        yield calls
    finally:
        for key in ("step", "_opt_called"):
            table.pop(key, None)
        table.update(before)


@contextmanager
def _float64(run: Run, roots: Sequence[tuple[str, Any]]) -> Iterator[None]:
    """The run's model in float64 while inside."""
    criterion = [("loss_fn", run.loss_fn)] if isinstance(run.loss_fn, nn.Module) else []
    snapshot = Snapshot([*roots, *criterion])
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        _widen([run.model, *(root for _, root in criterion)], run.params)
        yield
    finally:
        torch.set_default_dtype(default)
        snapshot.restore()


def _widen(roots: Sequence[nn.Module], params: Sequence[Tensor]) -> None:
    wide: dict[int, Tensor] = {}

    def convert(t: Tensor) -> Tensor:
        return wide.setdefault(id(t), t.detach().double())

    modules = [module for root in roots for module in root.modules()]
    for p in {id(p): p for p in (*params, *(q for m in modules for q in m.parameters(recurse=False)))}.values():
        if p.is_floating_point():
            p.grad = None
            p.data = p.data.double()
    for module in modules:
        for table in (module._buffers, module.__dict__):
            for name, value in list(table.items()):
                plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
                if plain and value.is_floating_point() and value.dtype is not torch.float64:
                    table[name] = convert(value)


Counters = Mapping[tuple[str, Any], Any]


def taken_again(run: Run, roots: Sequence[tuple[str, Any]], before: State, batch: Any, counters: Counters) -> Truth:
    """Take a step's forward and backward once more, from a state, with what is in force now; the run stands there then.

    Without a gradient where the step called no optimizer, as one that a scaler skips.
    """
    with _noting(run) as calls:
        load(run, roots, before, counters)
        loss = run.step(copied(batch)).detach()
        buffers = {name: b.detach().clone() for name, b in run.model.named_buffers()}
        return Truth(float(loss), calls[0].grads if calls else [], buffers, rng_digest(run), loss.dtype)


def truth(
    run: Run,
    roots: Sequence[tuple[str, Any]],
    before: State,
    batch: Any,
    counters: Counters,
    nudge: tuple[float, torch.Generator] | None = None,
) -> Truth:
    """Compute a step's loss, gradients and buffers in float64, from a state; nothing of the run is changed.

    Parameters
    ----------
    nudge : (float, torch.Generator), optional
        Moves each parameter by a random part of itself, at most that large: what rounding does to the step.

    Raises
    ------
    Exception
        Whatever the model throws in float64.
    """

    def wide(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().double() if leaf.is_floating_point() else leaf.clone()

    if nudge is not None:
        before = replace(before, params=[park(_nudged(p, *nudge)) for p in before.params])
    with _float64(run, roots):
        right = taken_again(run, roots, before, tree_map(wide, batch), counters)
    if not right.grads:
        raise RuntimeError("the optimizer was not stepped")
    if any(t is not None and t.dtype is not torch.float64 for t in right.grads) or right.dtype is not torch.float64:
        raise RuntimeError("the step computes in a dtype of its own, whatever that of its inputs")
    return right


def _nudged(value: Tensor, size: float, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value
    part = torch.rand(value.shape, generator=generator, dtype=torch.float64).to(value.device)
    return value.double() * (1 + size * (2 * part - 1))


def measure(
    run: Run, step: Step, right: Truth, buffers: dict[str, Tensor], clip_norm: float | None
) -> _native.ValueErrors:
    """Measure a step, and the buffers that it left, against the truth."""
    meter = _native.ValueMeter(step.value, right.loss)
    if right.grads and step.calls:
        given = step.calls[0].grads
        factor = 1.0 if clip_norm is None else clip_factor(given, clip_norm)
        for name, grad, exact in zip(names(run), given, right.grads, strict=True):
            meter.gradient(name, grad, factor, exact)
            rest()
    else:
        meter.stepped(bool(step.calls), bool(right.grads))
    for name, wanted in right.buffers.items():
        before = None if step.before is None else step.before.buffers.get(name)
        meter.buffer(name, buffers.get(name), wanted, before)
    return meter.found()


def unexplained(
    grads: Sequence[Tensor | None], right: Truth, jumps: Sequence[Sequence[Tensor | None]]
) -> list[Tensor | None]:
    """Return gradients less what the reference's own jumps explain of their error.

    A unit whose input is within rounding of a kink (of ReLU, of a maximum) may be on either side of it. The gradients
    in float64 of states that differ by a rounding show which ones are, and by how much the gradient jumps there. See
    oxytorch/tune/kinks.h.
    """
    left = _native.unexplained(list(grads), right.grads, [list(jump) for jump in jumps])
    return [old if new is old or new is None else park(new) for old, new in zip(grads, left, strict=True)]
