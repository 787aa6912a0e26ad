"""Judges what an optimizer's step did, apart from the gradients, by the user's own optimizer in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._C import tune as _native
from .._C.memory import give_back_host_memory
from ..model.parking import park, rest
from ..optim.slot import OptimizerSlot, plain_step
from ..optim.tail import TailOptimizer
from .record import OptimizerCall, State, names, own, states

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Change", "UpdateJudge", "clip", "clip_factor", "compare", "in_float64", "rms", "slices"]

_ELEMENT = 1e-3
_TIMES = 3.0  # what the step as given is off by, so many times
_CODED = 0.05  # of a state that is kept in fewer bits than the parameter
_SAMPLE = 1 << 15  # elements
_PIECES, _LEAST, _MOST = 32, 1 << 13, 1 << 19  # of a model, and elements, that are stepped in float64 at once
_FLOATS = (torch.float32, torch.float64)
#: Of torch, what steps each element by its own gradient and state alone.
_ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD"]
)
_ELEMENTWISE_TAILS = ("adam", "sgd", "lion", "adagrad", "rmsprop")

Cut = tuple[int, int, int]  # dimension, start, length


@dataclass(frozen=True)
class Change:
    """How far a tensor's change is from the verifier's.

    Attributes
    ----------
    error, size, unit : float
        Root mean squares: of the error, of the change in float64, of the unit in the last place.
    slope : float
        Error along the change, relative to it: 0.01 where a learning rate is 1 % too high.
    worst : float
        Of one element, in units of what is allowed to one.
    bias : tuple of float
        Mean error in units of the last place, upwards and outwards from zero, the part along the change taken out.
    bias_error : float
        Standard error of that mean.
    ratio : float
        Mean size of the change in units of the last place.
    count : int
    """

    error: float
    size: float
    unit: float
    slope: float
    worst: float
    bias: tuple[float, float]
    bias_error: float
    ratio: float
    count: int

    @property
    def relative(self) -> float:
        """Error against the size of the change, or the last place where the change is smaller."""
        return self.error / max(self.size, self.unit, 1e-300)


NOTHING = Change(0.0, 0.0, 0.0, 0.0, 0.0, (0.0, 0.0), 0.0, 0.0, 0)


def unit_in_last_place(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance to the next number of `dtype`, in float64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value.abs().clamp_min(info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(value, info.eps), exponent)


def compare(before: Tensor | None, after: Tensor, wanted: Tensor) -> Change:
    """Measure the change from `before` to `after` against that to `wanted`.

    Errors are of all elements. What is counted in units of the last place is of about `_SAMPLE` of them, evenly spread,
    unless an element stands out. On the CPU it is one pass over memory.
    """
    if after.numel() == 0:
        return NOTHING
    wanted = wanted.double()  # of an optimizer that makes state in float32 whatever its parameters are, too
    start = after if before is None else before
    if not _is_metered(after) or start.dtype != after.dtype:
        return _compare_by_torch(before, after, wanted)
    meter = _meter(after)
    _meet(meter, before, after, wanted)
    if meter.stands_out:
        _meet(meter, before, after, wanted)
    return Change(*meter.found(), after.numel())


def _is_metered(t: Tensor) -> bool:
    return t.device.type == "cpu" and t.dtype in _FLOATS


def _element(dtype: torch.dtype) -> float:
    """Share of its change that an element may be off by: at least what arithmetic in its dtype rounds away."""
    return max(_ELEMENT, 2 * torch.finfo(dtype).eps)


def _meter(like: Tensor) -> _native.ChangeMeter:
    return _native.ChangeMeter(like.numel(), like.dtype is torch.float64, _element(like.dtype), _SAMPLE)


def _meet(meter: _native.ChangeMeter, before: Tensor | None, after: Tensor, wanted: Tensor) -> None:
    """Give a meter the next slice."""
    start, now, right = _in_one_order([after if before is None else before, after, wanted.double()])
    meter.add(None if before is None else start, now, right)


def _in_one_order(tensors: list[Tensor]) -> list[Tensor]:
    """As vectors whose elements correspond: in memory's order where that is the same and dense."""
    first = tensors[0]
    dense = first.is_contiguous() or (first.dim() == 4 and first.is_contiguous(memory_format=torch.channels_last))
    if dense and all(t.stride() == first.stride() for t in tensors):
        return [t.detach().as_strided((t.numel(),), (1,)) for t in tensors]
    return [t.detach().reshape(-1).contiguous() for t in tensors]


def _compare_by_torch(before: Tensor | None, after: Tensor, wanted: Tensor) -> Change:
    start = torch.zeros_like(wanted) if before is None else before.double()
    change = (wanted - start).reshape(-1)
    error = (after.double() - wanted).reshape(-1)
    count = after.numel()
    square = float(change.dot(change))
    size = math.sqrt(square / count)
    slope = float(error.dot(change)) / square if square > 0 else 0.0
    element = _element(after.dtype)
    stands_out = not float(torch.linalg.vector_norm(error, math.inf)) <= element * size
    every = 1 if stands_out else max(1, count // _SAMPLE)
    some, off, moved = after.reshape(-1)[::every].double(), error[::every], change[::every]
    unit = unit_in_last_place(some, after.dtype)
    places = (off - slope * moved) / unit
    spread = float(places.std()) if count > 1 else math.inf
    return Change(
        rms(error),
        size,
        rms(unit),
        slope,
        float((off.abs() / (4 * unit + element * (moved.abs() + size))).max()),
        (float(places.mean()), float((places * some.sign()).mean())),
        spread / math.sqrt(some.numel()),
        float((moved.abs() / unit).mean()),
        count,
    )


def rms(value: Tensor) -> float:
    """Root mean square; 0 of nothing."""
    return float(torch.linalg.vector_norm(value)) / math.sqrt(max(value.numel(), 1))


class Refused(Exception):
    """The float64 optimizer could not be made or stepped; the message says why."""


class Workspace:
    """Memory for float64 copies that each piece of a step uses anew: fresh memory costs more than arithmetic."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.float64)
        self._used = 0

    def begin(self) -> None:
        """Let what was copied before be written over."""
        self._used = 0

    def copy(self, value: Any) -> Any:
        """Return a copy, of floating-point numbers in float64, with the strides that a clone has; no tensor: itself."""
        if not isinstance(value, Tensor):
            return value
        value, size = value.detach(), value.numel()
        plain = value.layout is torch.strided and value.device.type == "cpu" and type(value) is Tensor
        if not plain or not value.is_floating_point() or size < _SAMPLE:
            return value.to(torch.float64 if value.is_floating_point() else value.dtype, copy=True)
        if self._used + size > self._flat.numel():  # what was copied already keeps the memory that it is in
            self._flat = torch.empty(self._used + 2 * size, dtype=torch.float64)
            self._used = 0
        like = torch.empty_like(value, device="meta")
        held = self._flat.as_strided(like.size(), like.stride(), self._used)
        self._used += size
        return held.copy_(value)


def in_float64(
    run: Run,
    before: State,
    calls: Sequence[OptimizerCall],
    settings: Sequence[list[dict[str, Any]]],
    memory: Workspace | None = None,
    chosen: Sequence[int] | None = None,
    cut: Cut | None = None,
) -> Any:
    """Step a float64 copy of the user's optimizer from a state, with the gradients given; of all parameters or some.

    With `cut`, of that slice of each parameter, its gradient and what state has its shape.

    Returns
    -------
    (list of Tensor, list of dict)
        Parameters and state after the last call, in `memory` until that is used again.

    Raises
    ------
    Refused
        Where this optimizer cannot be copied so.
    """
    memory = Workspace() if memory is None else memory
    memory.begin()
    chosen = range(len(before.params)) if chosen is None else chosen
    copies: dict[int, Tensor] = {}  # a parameter of two optimizers is one
    for i in chosen:
        if id(run.params[i]) not in copies:
            copies[id(run.params[i])] = memory.copy(_slice(before.params[i], cut))
    params = {i: copies[id(run.params[i])] for i in chosen}
    held = {
        i: {
            key: _slice(value, cut if isinstance(value, Tensor) and value.shape == before.params[i].shape else None)
            for key, value in before.states[i].items()
        }
        for i in chosen
    }
    stepped = list(zip(calls, settings, strict=True))
    after: dict[int, dict[str, Any]] = {}
    clones: dict[int, Any] = {}
    mine = {which: [i for i in own(run, which) if i in params] for which in range(len(run.slots))}
    which = 0
    try:
        for which, places in mine.items():
            if places:
                first = next((groups for call, groups in stepped if call.which == which), [])
                of_it = {i: params[i] for i in places}
                clones[which] = _clone(run.slots[which].original, own(run, which).start, of_it, held, first, memory)
        for call, groups in stepped:
            which = call.which
            if which not in clones:
                continue
            for group, values in zip(clones[which].param_groups, groups, strict=True):
                group.update(values)
            for i in mine[which]:
                p, grad = params[i], call.grads[i]
                p.grad = None if grad is None else memory.copy(_slice(grad, cut))
                if p.grad is not None and call.factor != 1:
                    p.grad *= call.factor
            with torch.no_grad():
                plain_step(clones[which])
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, KeyError) as error:
        name = type(run.slots[which].original).__name__
        raise Refused(f"{name} cannot be stepped in float64 ({error})") from error
    for which, clone in clones.items():
        after |= {i: dict(clone.state.get(params[i]) or {}) for i in mine[which]}
    return [params[i].detach() for i in chosen], [after[i] for i in chosen]


def _slice(value: Any, cut: Cut | None) -> Any:
    return value if cut is None else value.narrow(*cut)


def piece_of(run: Run) -> int:
    """Elements that are in float64 at once: a step of a copy takes about ten times their memory."""
    return min(_MOST, max(_LEAST, sum(p.numel() for p in run.params) // _PIECES))


def slices(shape: Sequence[int], most: int) -> list[Cut]:
    """Cut a shape along its longest dimension into slices of at most `most` elements, where rows are no larger."""
    dim = max(range(len(shape)), key=lambda d: shape[d])
    rows = max(1, most // max(1, math.prod(shape) // max(1, shape[dim])))
    return [(dim, at, min(rows, shape[dim] - at)) for at in range(0, shape[dim], rows)]


def _is_elementwise(optimizer: Any) -> bool:
    if isinstance(optimizer, TailOptimizer):
        return optimizer._algorithm in _ELEMENTWISE_TAILS and optimizer._tail_options["agc"] is None
    return type(optimizer) in _ELEMENTWISE


def _pieces(run: Run, calls: Sequence[OptimizerCall]) -> list[list[int]]:
    """Parameters that are stepped together: some, where the optimizer is known to step each by itself."""
    if len({id(p) for p in run.params}) < len(run.params):  # one of two optimizers, which follow each other
        return [list(range(len(run.params)))]
    slots = enumerate(run.slots)
    return [piece for which, slot in slots for piece in _pieces_of(run, slot, list(own(run, which)), calls)]


def _pieces_of(run: Run, slot: OptimizerSlot, every: list[int], calls: Sequence[OptimizerCall]) -> list[list[int]]:
    cls = type(slot.original)
    ours = cls.__module__.startswith("oxytorch.optim.")
    grads = [call.grads[i] for call in calls for i in every]
    if ours and not all(_is_finite(g) for g in grads if g is not None):
        return [every]  # one that is not finite may stop the step of all
    if not ours and (not cls.__module__.startswith("torch.optim.") or cls is torch.optim.LBFGS):
        return [every]
    pieces: list[list[int]] = []
    most, left = piece_of(run), 0
    for i in every:
        size = run.params[i].numel()
        if size > left or not pieces:
            pieces.append([])
            left = most
        pieces[-1].append(i)
        left -= size
    return pieces


def _is_finite(grad: Tensor) -> bool:
    return grad.numel() == 0 or math.isfinite(float(torch.linalg.vector_norm(grad, math.inf)))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _clone(
    original: Any,
    begin: int,
    params: Mapping[int, Tensor],
    held: Mapping[int, dict[str, Any]],
    settings: Sequence[Mapping[str, Any]],
    memory: Workspace,
) -> Any:
    """Make an optimizer of the same class over other parameters, by their place among all; its own `begin` there."""
    place = count(begin)
    groups = [
        {**group, **values, "params": [params[i] for _ in group["params"] if (i := next(place)) in params]}
        for group, values in zip(original.param_groups, settings or [{}] * len(original.param_groups), strict=True)
    ]
    state = {
        p: {k: _copy(v) if k == "step" else memory.copy(v) for k, v in held[i].items()}
        for i, p in params.items()
        if held[i]
    }
    clone: Any = object.__new__(type(original))
    if isinstance(original, TailOptimizer):
        options: Any = {
            **original._tail_options,
            "state_dtype": "fp32",
            "stochastic_rounding": False,
            "clip_norm": None,
        }
        clone.__setstate__(
            {"defaults": original.defaults, "state": state, "param_groups": groups, "_tail_options": options}
        )
        return clone
    methods = ("step", "zero_grad", "state_dict", "load_state_dict")
    clone.__dict__.update({k: v for k, v in vars(original).items() if k not in methods})
    clone.param_groups = groups
    clone.state = defaultdict(dict, state)
    return clone


@dataclass
class UpdateJudge:
    """Compares each step's update of a run with the verifier's; `base` is what the step as given did.

    Attributes
    ----------
    base : UpdateJudge, optional
        None: of the step as given itself, in which nothing is a fault. One that found nothing: as if that had no error.
    found : dict of int to dict
        Of each step that was judged, by name: the changes of parameters and of their state.
    faults : list of str
    notes : list of str
        What could not be judged.
    """

    run: Run
    base: UpdateJudge | None = None
    clip_norm: float | None = None
    loose_state: bool = False
    found: dict[int, dict[str, Change]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    worst: float = 0.0
    _certain: list[str] = field(default_factory=list)  # faults, whatever the step as given does
    _clipping: dict[int, dict[str, float]] = field(default_factory=dict)  # what torch's own norm is off by moves so far
    _memory: Workspace = field(default_factory=Workspace)

    def judge(
        self, index: int, before: State, calls: Sequence[OptimizerCall], settings: Sequence[list[dict[str, Any]]]
    ) -> None:
        """Judge the step that the run has just taken."""
        found: dict[str, Change] = {}
        self.found[index] = found
        now = states(self.run, copy=False)
        given = clipped(calls, self.clip_norm)
        pieces = _pieces(self.run, calls)
        labels = names(self.run)
        try:
            for chosen in pieces:
                if cuts := self._cuts(chosen, before, now):
                    self._judge_slices(index, chosen[0], cuts, before, now[chosen[0]], given, settings, found)
                else:
                    right = zip(*in_float64(self.run, before, given, settings, self._memory, chosen), strict=True)
                    for i, (param, held) in zip(chosen, right, strict=True):
                        found[labels[i]] = compare(before.params[i], self.run.params[i].detach(), param)
                        self._judge_state(index, labels[i], before.states[i], now[i], held, found)
                    del right
                _let_go(pieces)
        except Refused as refused:
            found.clear()
            if str(refused) not in self.notes:
                self.notes.append(str(refused))
            return
        known = len(self.faults)
        self._hold_step(index, found)
        if len(self.faults) > known and self.clip_norm is not None:
            off = max(norm_error(call.grads, self.clip_norm) for call in calls)
            if off > 0:
                self._clipping[index] = self._moved_by(_TIMES * off, before, now, given, settings)
                del self.faults[known:]
                self._hold_step(index, found)

    def _cuts(self, chosen: Sequence[int], before: State, now: Sequence[dict[str, Any]]) -> list[Cut]:
        """How a large parameter that is stepped element by element is cut; empty where it is taken whole."""
        param = self.run.params[chosen[0]]
        slot = next(slot for which, slot in enumerate(self.run.slots) if chosen[0] in own(self.run, which))
        most = piece_of(self.run)
        if len(chosen) > 1 or param.numel() <= most or not _is_elementwise(slot.original):
            return []
        values = [before.params[chosen[0]], *before.states[chosen[0]].values(), *now[chosen[0]].values()]
        large = [param, *(v for v in values if isinstance(v, Tensor) and v.numel() > 1)]
        alike = all(_is_metered(t) and t.shape == param.shape and t.dtype == param.dtype for t in large)
        return slices(param.shape, most) if alike else []

    def _judge_slices(
        self,
        index: int,
        i: int,
        cuts: Sequence[Cut],
        before: State,
        now: dict[str, Any],
        calls: Sequence[OptimizerCall],
        settings: Sequence[list[dict[str, Any]]],
        found: dict[str, Change],
    ) -> None:
        """Judge the step of one parameter, of which no more than a slice is in float64 at once."""
        name, param = names(self.run)[i], self.run.params[i].detach()
        changed = {"": (before.params[i], param)} | {
            key: (before.states[i].get(key), value) for key, value in now.items() if _has_shape(value, param)
        }
        meters: dict[str, _native.ChangeMeter] = {}
        squares: dict[str, float] = defaultdict(float)
        for again in (False, True):
            for cut in cuts:
                (right,), (held,) = in_float64(self.run, before, calls, settings, self._memory, [i], cut)
                cut_too = {"": right} | {k: v for k, v in held.items() if _has_shape(v, right) and k in changed}
                if not meters:
                    whole = {key: value for key, value in held.items() if key not in cut_too}
                    self._judge_state(index, name, before.states[i], now, whole, found)
                for key, wanted in cut_too.items():
                    start, after = changed[key]
                    meter = meters.setdefault(key, _meter(after))
                    _meet(meter, None if start is None else _slice(start, cut), _slice(after, cut), wanted)
                    if not again:
                        squares[key] += float(torch.linalg.vector_norm(wanted, dtype=torch.float64)) ** 2
            if not any(meter.stands_out for meter in meters.values()):
                break
        for key in (key for key in changed if key in meters):
            change = Change(*meters[key].found(), param.numel())
            if key:
                self._find_state(index, f"{key} of {name}", change, math.sqrt(squares[key] / param.numel()), found)
            else:
                found[name] = change

    def _moved_by(
        self,
        off: float,
        before: State,
        now: Sequence[dict[str, Any]],
        calls: Sequence[OptimizerCall],
        settings: Sequence[list[dict[str, Any]]],
    ) -> dict[str, float]:
        """How far each parameter and state moves where all gradients are clipped to a norm that is off by so much."""
        scaled = [replace(call, factor=call.factor * (1 + off)) for call in calls]
        labels = names(self.run)
        squares: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)

        def add(name: str, moved: Tensor) -> None:
            squares[name] += float(torch.linalg.vector_norm(moved, dtype=torch.float64)) ** 2
            counts[name] += moved.numel()

        pieces, other = _pieces(self.run, calls), Workspace()
        for chosen in pieces:
            for cut in self._cuts(chosen, before, now) or (None,):
                left = in_float64(self.run, before, scaled, settings, other, chosen, cut)
                right = in_float64(self.run, before, calls, settings, self._memory, chosen, cut)
                for i, param, held, wanted, wanted_state in zip(chosen, *left, *right, strict=True):
                    add(labels[i], param - wanted)
                    for key, value in held.items():
                        if isinstance(value, Tensor) and value.is_floating_point():
                            add(f"{key} of {labels[i]}", value - wanted_state[key])
            _let_go(pieces)
        return {name: math.sqrt(squares[name] / max(counts[name], 1)) for name in squares}

    def hold_against(self, base: UpdateJudge) -> None:
        """Judge what was found once more, by what the step as given did."""
        self.base, self.worst = base, 0.0
        self.faults = list(self._certain)
        for index, found in self.found.items():
            self._hold_step(index, found)

    def _judge_state(
        self,
        index: int,
        name: str,
        before: dict[str, Any],
        now: dict[str, Any],
        wanted: dict[str, Any],
        found: dict[str, Change],
    ) -> None:
        for key, value in wanted.items():
            what = f"{key} of {name}"
            if key not in now:
                self._be_certain(index, f"the optimizer's {what} is missing")
            elif not isinstance(value, Tensor) or not value.is_floating_point() or key == "step":
                if not _equal(now[key], value):
                    self._be_certain(index, f"the optimizer's {what} is {_short(now[key])}, expected {_short(value)}")
            elif now[key].shape == value.shape:
                self._find_state(index, what, compare(before.get(key), now[key], value), rms(value), found)
            else:
                self._be_certain(index, f"the optimizer's {what} has another shape")

    def _find_state(self, index: int, what: str, change: Change, size: float, found: dict[str, Change]) -> None:
        found[what] = change
        if self.loose_state and change.error > _CODED * size:
            self._be_certain(index, f"the optimizer's {what} is off by {change.error:.2g}, of {size:.2g}")

    def _hold_step(self, index: int, found: dict[str, Change]) -> None:
        if self.base is None or not found:  # of the step as given itself nothing is a fault
            return
        known = self.base.found
        base = known[min(index, max(known))] if known else {}
        clipping = self._clipping.get(index, {})
        words, worst = _native.update_faults(self._named(found), self._named(base), clipping, self.loose_state)
        self.worst = max(self.worst, worst)
        for one in words:
            self._fault(index, one)

    def _named(self, changes: Mapping[str, Change]) -> list[_native.NamedChange]:
        params = set(names(self.run))
        return [
            _native.NamedChange(
                name,
                c.error,
                c.size,
                c.unit,
                c.slope,
                c.worst,
                *c.bias,
                bias_error=c.bias_error,
                ratio=c.ratio,
                count=c.count,
                state=name not in params,
            )
            for name, c in changes.items()
        ]

    def _be_certain(self, index: int, words: str) -> None:
        self._fault(index, words)
        self._certain.append(self.faults[-1])

    def _fault(self, index: int, words: str) -> None:
        self.faults.append(f"step {index + 1}: {words}")


def _let_go(pieces: Sequence[Any]) -> None:
    if len(pieces) > 1:
        rest()
        give_back_host_memory()  # else what is let go stays resident in the heap, below what comes next


def clipped(calls: Sequence[OptimizerCall], norm: float | None) -> Sequence[OptimizerCall]:
    """Clip by norm what a run's optimizer clips itself; gradients that the loop clipped stay."""
    if norm is None:
        return calls
    return [replace(call, factor=clip_factor(call.grads, norm)) for call in calls]


def clip_factor(grads: Sequence[Tensor | None], norm: float) -> float:
    """Return by what `torch.nn.utils.clip_grad_norm_` multiplies, in float64; see oxytorch/tune/measure.h."""
    return _native.clip_factor(list(grads), norm)


def clip(grads: Sequence[Tensor | None], norm: float) -> list[Tensor | None]:
    """Gradients times `clip_factor`, in float64 where it changes them."""
    factor = clip_factor(grads, norm)
    return list(grads) if factor == 1 else [None if g is None else park(g.double() * factor) for g in grads]


def norm_error(grads: Sequence[Tensor | None], norm: float) -> float:
    """How far torch's own norm of gradients is from that in float64, relative; 0 of such as are well below `norm`."""
    return _native.norm_error(list(grads), norm)


def _has_shape(value: Any, like: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == like.shape


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left.double().cpu(), right.double().cpu())
    return bool(left == right)


def _short(value: Any) -> str:
    return f"{float(value):g}" if isinstance(value, Tensor) and value.numel() == 1 else str(value)[:40]
