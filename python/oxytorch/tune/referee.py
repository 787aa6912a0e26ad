"""The user's own model in float64: what loss, gradients and buffers of a step should be, and how far off is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..model.snapshot import Snapshot
from ..optim.generators import set_rng_state
from .record import Call, State, Step, names, rng_digest
from .update import clip, rms

if TYPE_CHECKING:
    from .run import Run

__all__ = ["FLOAT32", "REDUCED", "Allowance", "Errors", "Excess", "Truth", "judge", "measure", "truth"]

_TINY = 500  # elements, up to which a tensor's own error is a matter of luck
_LUCK = 10.0
_TIMES = 3.0


@dataclass(frozen=True)
class Allowance:
    """What is allowed beside `_TIMES` the error of the yardstick, relative to the value.

    Attributes
    ----------
    tensor : float
        To a tensor's root mean square.
    whole : float
        To that of all gradients together, for tensors whose own gradient cancels.
    slope, loss : float
    """

    tensor: float
    whole: float
    slope: float
    loss: float


#: Sums in another order; and products of 8 to 10 bits of mantissa.
FLOAT32 = Allowance(tensor=3e-5, whole=1e-6, slope=3e-5, loss=1e-5)
REDUCED = Allowance(tensor=1e-2, whole=1e-3, slope=1e-2, loss=5e-3)


@dataclass
class Truth:
    """Loss, gradients as the optimizer gets them and buffers after the step, in float64; `rng` as the step left it."""

    loss: float
    grads: list[Tensor | None]
    buffers: dict[str, Tensor]
    rng: str


@contextmanager
def float64(run: Run, roots: Sequence[tuple[str, Any]]) -> Iterator[list[Call]]:
    """The run's model in float64 while inside, its optimizer noting what it is given and stepping nothing."""
    criterion = [("loss_fn", run.loss_fn)] if isinstance(run.loss_fn, nn.Module) else []
    snapshot = Snapshot([*roots, *criterion])
    calls: list[Call] = []
    default = torch.get_default_dtype()

    def note(closure: Any = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        calls.append(Call.of(run))
        return result

    try:
        torch.set_default_dtype(torch.float64)
        _widen([run.model, *(root for _, root in criterion)], run.params)
        run.original.__dict__["step"] = note
        run.original.__dict__["_opt_called"] = True
        yield calls
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


def truth(run: Run, roots: Sequence[tuple[str, Any]], before: State, batch: Any) -> Truth:
    """Compute a step's loss, gradients and buffers in float64, from a state; nothing of the run is changed.

    Raises
    ------
    Exception
        Whatever the model throws in float64.
    """

    def wide(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().double() if leaf.is_floating_point() else leaf.clone()

    with float64(run, roots) as calls:
        with torch.no_grad():
            for p, value in zip(run.params, before.params, strict=True):
                p.copy_(value)
            for name, buffer in run.model.named_buffers():
                if name in before.buffers:
                    buffer.copy_(before.buffers[name])
        set_rng_state(before.rng)
        loss = run.step(tree_map(wide, batch)).detach()
        if not calls:
            raise RuntimeError("the optimizer was not stepped")
        first = calls[0]
        if loss.dtype is not torch.float64 or any(g is not None and g.dtype is not torch.float64 for g in first.grads):
            raise RuntimeError("the step computes in a dtype of its own, whatever that of its inputs")
        buffers = {name: b.detach().clone() for name, b in run.model.named_buffers()}
        return Truth(float(loss), first.grads, buffers, rng_digest(run))


@dataclass
class Errors:
    """How far one step was from the truth: root mean squares by name, and of what size the truth is."""

    loss: float
    loss_size: float
    slope: float
    whole: float
    grads: dict[str, tuple[float, float, int]]
    buffers: dict[str, tuple[float, float, int]]
    wrong: list[str] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """Largest error of a gradient, against its size or that of all together where its own cancels."""
        return max((error / max(size, self.whole, 1e-300) for error, size, _ in self.grads.values()), default=0)


def measure(run: Run, step: Step, right: Truth, buffers: dict[str, Tensor], clip_norm: float | None) -> Errors:
    """Measure a step, and the buffers that it left, against the truth."""
    errors = Errors(abs(step.value - right.loss), abs(right.loss), 0.0, 0.0, {}, {})
    if not math.isfinite(step.value):
        errors.wrong.append(f"the loss is {step.value}")
    given = step.calls[0].grads if step.calls else [None] * len(run.params)
    given = given if clip_norm is None else clip(given, clip_norm)
    along = square = 0.0
    count = 0
    for name, grad, wanted in zip(names(run), given, right.grads, strict=True):
        if grad is None or wanted is None:
            if grad is not wanted:
                errors.wrong.append(f"{name} has {'no' if grad is None else 'a'} gradient")
            continue
        if grad.shape != wanted.shape:
            errors.wrong.append(f"the gradient of {name} has shape {tuple(grad.shape)}")
            continue
        off = grad.double() - wanted
        if not bool(off.isfinite().all()):
            errors.wrong.append(f"the gradient of {name} is not finite")
        errors.grads[name] = (rms(off), rms(wanted), wanted.numel())
        along += float((off * wanted).sum())
        square += float(wanted.square().sum())
        count += wanted.numel()
    errors.slope = along / square if square else 0.0
    errors.whole = math.sqrt(square / max(count, 1))
    _measure_buffers(step, right, buffers, errors)
    return errors


def _measure_buffers(step: Step, right: Truth, buffers: dict[str, Tensor], errors: Errors) -> None:
    for name, wanted in right.buffers.items():
        now = buffers.get(name)
        if now is None or now.shape != wanted.shape:
            errors.wrong.append(f"the buffer {name} is {'missing' if now is None else 'of another shape'}")
        elif not wanted.is_floating_point():
            if not torch.equal(now, wanted):
                errors.wrong.append(f"the buffer {name} differs")
        else:
            change = rms(wanted - step.before.buffers[name].double()) if name in step.before.buffers else rms(wanted)
            places = rms(wanted) * torch.finfo(now.dtype).eps
            errors.buffers[name] = (max(rms(now.double() - wanted) - places, 0.0), change, wanted.numel())


@dataclass(frozen=True)
class Excess:
    """Something beyond what is allowed; `relative` is the error against the size of the truth."""

    words: str
    relative: float


def judge(found: Errors, usual: Errors, allowance: Allowance) -> list[Excess]:
    """Return what is further off than the yardstick's error and the allowance explain."""
    excess = [Excess(words, math.inf) for words in found.wrong]
    size = max(found.loss_size, 1e-12)
    if not found.loss <= _TIMES * usual.loss + allowance.loss * size:
        excess.append(Excess(f"the loss is off by {found.loss / size:.2g}", found.loss / size))
    if not abs(found.slope) <= _TIMES * abs(usual.slope) + allowance.slope:
        excess.append(Excess(f"gradients are {1 + found.slope:.4f} times what they should be", abs(found.slope)))
    for kind, mine, theirs in (("gradient of", found.grads, usual.grads), ("buffer", found.buffers, usual.buffers)):
        for name, (error, scale, count) in mine.items():
            base = theirs.get(name, (0.0, 0.0, 0))[0]
            floor = allowance.whole * found.whole if kind == "gradient of" else 0.0
            if not error <= (_LUCK if count <= _TINY else _TIMES) * base + allowance.tensor * scale + floor:
                relative, before = error / max(scale, 1e-300), base / max(scale, 1e-300)
                words = f"the {kind} {name} is off by {relative:.2g} of its size, {before:.2g} as given"
                excess.append(Excess(words, relative))
    return excess
