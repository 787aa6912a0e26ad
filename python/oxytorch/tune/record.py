"""Training steps taken with everything written down that a verifier needs: state before, gradients, loss, what drew."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.batches import copied
from ..generators import rng_state, set_rng_state
from ..model.graph import digest_of_rng, entries, has_bytes, value_digest
from ..model.parking import is_parked, park, rest
from ..model.reach import Binding, bindings
from ..optim.slot import OptimizerSlot
from ..optim.tail import TailOptimizer

if TYPE_CHECKING:
    from .run import Run

__all__ = [
    "OptimizerCall", "State", "Step", "copied", "counters", "digests", "load", "names", "own", "take", "take_one",
]  # fmt: skip

_COUNTER = 64  # elements: a tensor of so few is a scale or a counter

_PLAIN = (bool, int, float, str)
#: How an optimizer computes, not what.
IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable", "param_names", "initial_lr")


@dataclass
class State:
    """Values at one moment, copied: of the optimizer's parameters in its order, buffers and other tensors by name."""

    params: list[Tensor]
    buffers: dict[str, Tensor]
    states: list[dict[str, Any]]
    extras: dict[str, Tensor]
    rng: dict[str, Any]

    @classmethod
    def of(cls, run: Run, roots: Sequence[tuple[str, Any]]) -> State:
        """Copy what is there now."""
        return cls(
            [park(p) for p in run.params],
            {name: park(b) for name, b in run.model.named_buffers()},
            states(run),
            {name: park(t) for name, t in extras(run, roots)},
            rng_state(run.params),
        )


@dataclass
class OptimizerCall:
    """One call of an optimizer's step: the gradients that it was given, unscaled, and its groups' settings.

    What clips in the update multiplies gradients by `factor`. `which` of the run's optimizers it is; gradients are in
    the order of the run's parameters, of which another optimizer's have None. Of several optimizers `after` is what the
    step left in the parameters of this one.
    """

    grads: list[Tensor | None]
    settings: list[dict[str, Any]]
    factor: float = 1.0
    which: int = 0
    after: list[Tensor] = field(default_factory=list)

    @classmethod
    def hashed(cls, run: Run, which: int = 0, arrived: Arrived | None = None) -> OptimizerCall:
        """Hash what the optimizer is about to use, one gradient at a time: nothing is copied."""
        return cls._made(run, which, value_digest, arrived)

    @classmethod
    def of(cls, run: Run, which: int = 0, arrived: Arrived | None = None) -> OptimizerCall:
        """Copy what the optimizer is about to use, or has `arrived` and is used already."""

        def keep(grad: Tensor) -> Tensor:
            return grad if is_parked(grad) else park(grad.to_dense() if grad.is_sparse else grad)

        return cls._made(run, which, keep, arrived)

    @classmethod
    def _made(
        cls, run: Run, which: int, keep: Callable[[Tensor], Any], arrived: Arrived | None = None
    ) -> OptimizerCall:
        original = run.slots[which].original
        scale = getattr(original, "grad_scale", None)
        mine = own(run, which)
        used = {} if arrived is None else arrived.sums
        found = [used.get(i, p.grad) if i in mine else None for i, p in enumerate(run.params)]
        grads: list[Any] = [
            None if grad is None else keep(grad.detach() if scale is None else grad.detach() / scale) for grad in found
        ]
        return cls(grads, settings(original), which=which)


class Arrived:
    """Gradients of a step's backwards as they arrive, summed as autograd sums them.

    Parameters
    ----------
    run : Run
        Of one optimizer. One that updates in backward has none left when the optimizer steps.
    leave : bool
        Whether they are let go of as soon as they are copied, so that no two are in memory.
    """

    def __init__(self, run: Run, *, leave: bool = False) -> None:
        self.sums: dict[int, Tensor] = {}
        each = [(i, p) for i, p in enumerate(run.params) if p.requires_grad]
        if leave:
            self._hooks = [p.register_post_accumulate_grad_hook(partial(self._take, i)) for i, p in each]  # type: ignore[no-untyped-call]
        else:
            self._hooks = [p.register_hook(partial(self._add, i)) for i, p in each]  # type: ignore[no-untyped-call]

    def _add(self, place: int, grad: Tensor) -> None:
        grad = grad.detach()
        self.sums[place] = self.sums[place] + grad if place in self.sums else grad.clone()

    def _take(self, place: int, param: Tensor) -> None:
        if param.grad is not None and not param.grad.is_sparse:
            before = self.sums.get(place)
            self.sums[place] = park(param.grad if before is None else before + param.grad)
            param.grad = None

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


@dataclass
class Step:
    """A step that was taken; the run stands after it until the next one is.

    Of one that is not observed, `before` is None and its calls have settings alone.
    """

    index: int
    before: State | None
    loss: Tensor
    calls: list[OptimizerCall] = field(default_factory=list)
    rng: str = ""

    @property
    def value(self) -> float:
        """The loss."""
        return float(self.loss)


def take(
    run: Run,
    roots: Sequence[tuple[str, Any]],
    count: int,
    observed: Container[int] | None = None,
    *,
    hashed: bool = False,
) -> Iterator[Step]:
    """Take steps on the run's batches in turn, one each time that the next is asked for; `observed`: all unless given.

    An optimizer's hooks are the same for every step, so that what steps cannot tell which of them are observed.
    `hashed` is for `digests` alone, which needs no copies.
    """
    for index in range(count):
        yield take_one(run, roots, index, observed=observed is None or index in observed, hashed=hashed)


def take_one(
    run: Run,
    roots: Sequence[tuple[str, Any]],
    index: int,
    *,
    before: State | None = None,
    observed: bool = True,
    hashed: bool = False,
) -> Step:
    """Take one step, on the batch of that index, from where the run stands: `before`, if that is known; see `take`."""
    if before is None and observed and not hashed:
        before = State.of(run, roots)
    step = Step(index, before, torch.zeros(()))
    what = OptimizerCall.hashed if hashed else OptimizerCall.of
    several = len(run.slots) > 1 and observed and not hashed
    arrived = Arrived(run) if run.updates_in_backward and observed else None

    def watch(which: int, slot: OptimizerSlot) -> list[Any]:
        def note(*_: Any) -> None:
            step.calls.append(
                what(run, which, arrived) if observed else OptimizerCall([], settings(slot.original), which=which)
            )

        def note_left(*_: Any) -> None:
            step.calls[-1].after = [park(p) for p in slot.params]

        hooks = [slot.original.register_step_pre_hook(note)]
        return [*hooks, slot.original.register_step_post_hook(note_left)] if several else hooks

    hooks = [hook for which, slot in enumerate(run.slots) for hook in watch(which, slot)]
    hooks += [] if arrived is None else [arrived]
    try:
        step.loss = run.step(copied(run.batches[index % len(run.batches)])).detach().clone()
    finally:
        for hook in hooks:
            hook.remove()
    step.rng = rng_digest(run)
    return step


def counters(run: Run, roots: Sequence[tuple[str, Any]]) -> dict[tuple[str, Any], Any]:
    """Copy plain values and small tensors beside parameters, buffers and the optimizer: counters, scales, schedules."""
    known = {id(t) for t in (*run.params, *run.model.parameters(), *run.model.buffers())}
    tables, named = _tables(roots)
    held: dict[tuple[str, Any], Any] = {(path, one.name): one for path, one in named if isinstance(one.value, _PLAIN)}
    for path, table in tables:
        for key, value in table.items():
            if value is None or isinstance(value, _PLAIN):
                held[path, key] = value
            elif isinstance(value, Tensor) and _is_counter(value, known):
                held[path, key] = value.detach().clone()
    return held


def load(run: Run, roots: Sequence[tuple[str, Any]], before: State, held: Mapping[tuple[str, Any], Any]) -> None:
    """Let the run stand where a step began: parameters and buffers of `before`, random states, counters as `held`."""
    with torch.no_grad():
        for p, value in zip(run.params, before.params, strict=True):
            p.copy_(value)
            rest(value)
        for name, buffer in run.model.named_buffers():
            if name in before.buffers:
                buffer.copy_(before.buffers[name])
        for path, table in _tables(roots)[0]:
            for key in [key for key in table if (path, key) in held]:
                _load_counter(table, key, held[path, key])
    for one in held.values():
        if isinstance(one, Binding) and one.rebind is not None:
            one.rebind()
    set_rng_state(before.rng)


def _tables(roots: Sequence[tuple[str, Any]]) -> tuple[list[tuple[str, Any]], list[tuple[str, Binding]]]:
    """Attributes of objects and dicts, and names in code, that are no part of the optimizer; by path."""
    others = [root for root in roots if root[0].partition("[")[0] != "optimizer"]
    part = {id(entry.value) for entry in entries([root for root in roots if root[0].partition("[")[0] == "optimizer"])}
    found = [e for e in entries(others) if e.again is None and id(e.value) not in part and "optimizer" not in e.path]
    tables = [(e.path, e.value if e.kind == "dict" else vars(e.value)) for e in found if e.kind in ("dict", "object")]
    code = [(e.path, one) for e in found if e.reached and e.kind == "code" for one in bindings(e.value)]
    return tables, code


def _is_counter(t: Tensor, known: Container[int]) -> bool:
    return t.numel() <= _COUNTER and id(t) not in known and has_bytes(t)


def _load_counter(table: Any, key: Any, value: Any) -> None:
    live = table[key]
    if not isinstance(value, Tensor):
        if type(live) is not type(value) or live != value:
            table[key] = value
    elif isinstance(live, Tensor) and live.shape == value.shape:
        live.copy_(value)
    else:
        table[key] = value.clone()


def own(run: Run, which: int) -> range:
    """Places of an optimizer's parameters among those of the run."""
    begin = sum(len(slot.params) for slot in run.slots[:which])
    return range(begin, begin + len(run.slots[which].params))


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Hyperparameters of each group, without what says only how to compute."""
    return [
        {
            k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v
            for k, v in group.items()
            if k not in IMPLEMENTATION
        }
        for group in optimizer.param_groups
    ]


def states(run: Run, *, copy: bool = True) -> list[dict[str, Any]]:
    """Return the optimizer state of each parameter, copied, by torch's names; codes of 8 bits are decoded."""
    return [state for slot in run.slots for state in _states(slot, copy)]


def _states(slot: OptimizerSlot, copy: bool) -> Iterator[dict[str, Any]]:
    tail = slot.optimizer._step_tail() if isinstance(slot.optimizer, TailOptimizer) else None
    # With it, state of another format is converted before a step, not in it.
    for index, p in enumerate(slot.params):
        state = slot.original.state.get(p) or {}
        if tail is not None and any(key.endswith("_scale") for key in state):
            wide = {key: t.to_dense() for key, t in tail.decoded_state(index).items()}
            state = {key: wide.get(key, value) for key, value in state.items() if not key.endswith("_scale")}
        tensors = {key: v.detach() for key, v in state.items() if isinstance(v, Tensor)}
        yield {**state, **({key: park(t) for key, t in tensors.items()} if copy else tensors)}


def extras(run: Run, roots: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors that a step may change and that are no parameter, buffer, gradient or optimizer state."""
    known = {id(t) for t in (*run.params, *run.model.parameters(), *run.model.buffers())}
    states = [state for slot in run.slots for state in slot.original.state.values()]
    known |= {id(v) for state in states for v in state.values() if isinstance(v, Tensor)}
    for entry in entries(roots):
        t = entry.value
        if entry.kind != "tensor" or entry.again is not None or id(t) in known or not has_bytes(t):
            continue
        if t.is_floating_point() and not entry.path.endswith(".grad") and ".copies[" not in entry.path:
            yield entry.path, t


def names(run: Run) -> list[str]:
    """Names of the optimizers' parameters; a second optimizer of one is named with it."""
    known = {id(p): name for name, p in run.model.named_parameters()}
    found: list[str] = []
    for slot in run.slots:
        each = [known.get(id(p), f"parameter {len(found) + i}") for i, p in enumerate(slot.params)]
        others = set(found)
        found += [f"{name} in {slot.name}" if name in others else name for name in each]
    return found


def rng_digest(run: Run) -> str:
    """Hash the random generators' states."""
    return digest_of_rng(rng_state(run.params))


def digests(run: Run, roots: Sequence[tuple[str, Any]], step: Step) -> dict[str, str]:
    """Hash everything that a step left, each thing by its name."""
    labels = names(run)
    tensors: dict[str, Any] = {"loss": step.loss}
    for number, call in enumerate(step.calls):
        mine = own(run, call.which)
        again = sum(earlier.which == call.which for earlier in step.calls[:number])
        call_name = f" in call {again + 1} of the optimizer" if again else ""
        tensors |= {f"gradient of {labels[i]}{call_name}": call.grads[i] for i in mine}
    tensors |= {f"parameter {n}": p.detach() for n, p in zip(labels, run.params, strict=True)}
    tensors |= {f"buffer {n}": b.detach() for n, b in run.model.named_buffers()}
    for n, state in zip(labels, states(run, copy=False), strict=True):
        tensors |= {f"optimizer state {key} of {n}": value for key, value in state.items()}
    tensors |= {name: t.detach() for name, t in extras(run, roots)}
    found = {name: value_digest(value) for name, value in tensors.items()}
    return {**found, **_scalars(roots), "random state": step.rng, "calls of the optimizer": _called(run, step)}


def _called(run: Run, step: Step) -> str:
    if len(run.slots) == 1:
        return str(len(step.calls))
    return ", ".join(run.slots[call.which].name for call in step.calls)


def _scalars(roots: Sequence[tuple[str, Any]]) -> dict[str, str]:
    """Plain numbers that the model and what else there is keeps: counters, histories."""
    return {
        entry.path: repr(entry.value)
        for entry in entries(roots)
        if isinstance(entry.value, _PLAIN) and "optimizer" not in entry.path
    }
