"""A step taken once more, as given or in float64: what loss, gradients, buffers should be, and how far off they may."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..model.parking import park, rest
from ..model.snapshot import Snapshot
from .record import Call, State, Step, copied, load, names, rng_digest
from .update import clip_factor, rms, slices

if TYPE_CHECKING:
    from .run import Run

__all__ = [
    "FLOAT32", "REDUCED", "UNKNOWN", "Allowance", "Errors", "Excess", "Truth",
    "judge", "measure", "taken_again", "truth", "unexplained",
]  # fmt: skip

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
#: Where float64 cannot say how far off the step as given is itself.
UNKNOWN = Allowance(tensor=1e-3, whole=1e-5, slope=1e-3, loss=1e-4)

_MOST = 2.0  # times the largest jump of the reference that an error may be, and still be explained


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
    if right.grads and step.calls:
        given = step.calls[0].grads
        factor = 1.0 if clip_norm is None else clip_factor(given, clip_norm)
        _measure_gradients(run, given, factor, right.grads, errors)
    elif right.grads or step.calls:
        errors.wrong.append(f"the optimizer is {'not ' if right.grads else ''}stepped")
    _measure_buffers(step, right, buffers, errors)
    return errors


def _measure_gradients(
    run: Run, given: Sequence[Tensor | None], factor: float, right: Sequence[Tensor | None], errors: Errors
) -> None:
    """Measure gradients times a factor, of which no more than a slice is in float64 at once."""
    along = square = 0.0
    count = 0
    for name, grad, exact in zip(names(run), given, right, strict=True):
        if grad is None or exact is None:
            if grad is not exact:
                errors.wrong.append(f"{name} has {'no' if grad is None else 'a'} gradient")
            continue
        if grad.shape != exact.shape:
            errors.wrong.append(f"the gradient of {name} has shape {tuple(grad.shape)}")
            continue
        offs = squares = 0.0
        for cut in slices(grad.shape or (1,)):
            wanted = (exact.narrow(*cut) if exact.dim() else exact).double()
            off = (grad.narrow(*cut) if grad.dim() else grad).double() * factor - wanted
            offs += float(off.square().sum())
            squares += float(wanted.square().sum())
            along += float((off * wanted).sum())
        if not math.isfinite(offs):
            errors.wrong.append(f"the gradient of {name} is not finite")
        size = max(grad.numel(), 1)
        errors.grads[name] = (math.sqrt(offs / size), math.sqrt(squares / size), grad.numel())
        square += squares
        count += grad.numel()
        rest()
    errors.slope = along / square if square else 0.0
    errors.whole = math.sqrt(square / max(count, 1))


def unexplained(
    grads: Sequence[Tensor | None], right: Truth, jumps: Sequence[Sequence[Tensor | None]]
) -> list[Tensor | None]:
    """Return gradients less what the reference's own jumps explain of their error.

    A unit whose input is within rounding of a kink (of ReLU, of a maximum) may be on either side of it. The gradients
    in float64 of states that differ by a rounding show which ones are, and by how much the gradient jumps there. The
    error's part along those jumps, at most `_MOST` times the largest, is rounding; an error of another form stays as
    large as it is, however small that is.
    """
    given, exact = _known(grads), _known(right.grads)
    moves = [_known(jump) for jump in jumps]
    shared = [i for i in given if i in exact and given[i].shape == exact[i].shape]
    weights = {i: 1 / max(float(torch.linalg.vector_norm(exact[i])), 1e-300) for i in shared}

    def vector(i: int, value: Tensor) -> Tensor:
        return (value.double() - exact[i]).flatten() * weights[i]

    count = len(jumps)
    gram, along = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for i in shared:
        moved = torch.stack([vector(i, move[i]) for move in moves])
        gram += (moved @ moved.t()).cpu()
        along += (moved @ vector(i, given[i])).cpu()
    size = float(gram.diagonal().max())
    if not (size > 0 and math.isfinite(size) and bool(along.isfinite().all())):
        return list(grads)
    part = torch.linalg.solve(gram + 1e-9 * size * torch.eye(count, dtype=torch.float64), along)
    part *= min(1.0, _MOST * math.sqrt(size / max(float(part @ gram @ part), 1e-300)))
    left = list(grads)
    for i in shared:
        off = given[i].double()
        for share, move in zip(part.tolist(), moves, strict=True):
            off = off - share * (move[i].double() - exact[i])
        left[i] = park(off)
    return left


def _known(grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
    return {i: g for i, g in enumerate(grads) if g is not None}


def _measure_buffers(step: Step, right: Truth, buffers: dict[str, Tensor], errors: Errors) -> None:
    for name, wanted in right.buffers.items():
        now = buffers.get(name)
        if now is None or now.shape != wanted.shape:
            errors.wrong.append(f"the buffer {name} is {'missing' if now is None else 'of another shape'}")
        elif not wanted.is_floating_point():
            if not torch.equal(now, wanted):
                errors.wrong.append(f"the buffer {name} differs")
        else:
            exact = wanted.double()
            start = None if step.before is None else step.before.buffers.get(name)
            change = rms(exact if start is None else exact - start.double())
            places = rms(exact) * torch.finfo(now.dtype).eps
            errors.buffers[name] = (max(rms(now.double() - exact) - places, 0.0), change, exact.numel())


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
