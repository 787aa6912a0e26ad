"""A step taken once more, as given or in float64: what loss, gradients, buffers should be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .._C import tune as _native
from .._C.memory import give_back_host_memory, parked_bytes
from .._C.trainer import map_large_blocks
from ..memory.pack import PackSavedTensors
from ..model.parking import park, rest
from ..model.snapshot import Snapshot
from ..optim.slot import OptimizerSlot
from .record import Arrived, OptimizerCall, State, Step, copied, load, names, own, rng_digest
from .update import clip_factor

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Truth", "compared", "measure", "moved", "taken_again", "truth"]


@dataclass
class Truth:
    """Loss, gradients as the optimizers get them and buffers after the step; `rng` as the step left it.

    `dtype` is that of the loss. Gradients are those of one call of an optimizer after the other, `which` says of which.
    """

    loss: float
    grads: list[Tensor | None]
    buffers: dict[str, Tensor]
    rng: str
    dtype: torch.dtype
    which: Sequence[int] = (0,)

    @property
    def calls(self) -> list[OptimizerCall]:
        """The gradients, by the calls of the optimizers."""
        each = len(self.grads) // max(len(self.which), 1)
        return [OptimizerCall(self.grads[i * each :][:each], [], which=one) for i, one in enumerate(self.which) if each]


@contextmanager
def _noting(run: Run, taken: Sequence[OptimizerCall], arrived: Arrived | None = None) -> Iterator[list[OptimizerCall]]:
    """The optimizers noting what they are given while inside, or what has `arrived`; none steps.

    Of several, each leaves in its parameters what it left in the calls that were `taken`: what the next one is given
    depends on that.
    """
    calls: list[OptimizerCall] = []
    befores: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def noting(which: int, slot: OptimizerSlot) -> Any:
        def note(closure: Any = None) -> Any:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            calls.append(OptimizerCall.of(run, which, arrived))
            same = taken[len(calls) - 1] if len(calls) <= len(taken) else None
            if same is not None and same.which == which and same.after:
                with torch.no_grad():
                    for p, value in zip(slot.params, same.after, strict=True):
                        p.copy_(value)
                        rest(value)
            return result

        return note

    try:
        for which, slot in enumerate(run.slots):
            table = slot.original.__dict__
            befores.append((table, {key: table[key] for key in ("step", "_opt_called") if key in table}))
            table["step"] = noting(which, slot)
            table["_opt_called"] = True
        yield calls
    finally:
        for table, before in befores:
            for key in ("step", "_opt_called"):
                table.pop(key, None)
            table.update(before)


@contextmanager
def _float64(run: Run, roots: Sequence[tuple[str, Any]]) -> Iterator[None]:
    """The run's model in float64 while inside."""
    criterion = [("loss_fn", loss) for loss in run.losses if isinstance(loss, nn.Module)]
    snapshot = Snapshot([*roots, *criterion])
    default = torch.get_default_dtype()
    mapped = map_large_blocks()  # a heap would hold twice what is in use
    try:
        torch.set_default_dtype(torch.float64)
        _widen([run.model, *(root for _, root in criterion)], run.params)
        with _native.KeepDouble():
            yield
    finally:
        torch.set_default_dtype(default)
        snapshot.restore()
        mapped.revert()
        give_back_host_memory()  # what was let go would stay resident below what comes next


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


@contextmanager
def _little_memory(run: Run) -> Iterator[Arrived | None]:
    """What takes twice the memory in float64 is in files while inside: saved tensors, and gradients where they may go.

    Gives the gradients that go.
    """
    packed = PackSavedTensors("file", least=parked_bytes) if run.device.type == "cpu" else None
    if packed is not None:
        run.call.scope("files", lambda: nullcontext() if packed.others_keep() else packed)
    may_go = run.own_step is None and len(run.slots) == 1 and not run.needs_all_gradients
    arrived = Arrived(run, leave=True) if may_go else None
    try:
        yield arrived
    finally:
        if arrived is not None:
            arrived.remove()
        run.call.scope("files", None)


Counters = Mapping[tuple[str, Any], Any]


def taken_again(
    run: Run,
    roots: Sequence[tuple[str, Any]],
    before: State,
    batch: Any,
    counters: Counters,
    taken: Sequence[OptimizerCall] = (),
    arrived: Arrived | None = None,
) -> Truth:
    """Take a step's forward and backward once more, from a state, with what is active now; the run stands there then.

    Without a gradient where the step called no optimizer, as one that a scaler skips. `taken` are the calls of
    optimizers in that step, of which several are followed from one to the next. `arrived` has the gradients that do not
    stay until the optimizer steps.
    """
    with _noting(run, taken, arrived) as calls:
        load(run, roots, before, counters)
        loss = run.step(copied(batch)).detach()
        buffers = {name: b.detach().clone() for name, b in run.model.named_buffers()}
        judged = compared(run, calls)
        grads = [grad for call in judged for grad in call.grads]
        which = [call.which for call in judged]
        return Truth(float(loss), grads, buffers, rng_digest(run), loss.dtype, which)


def compared(run: Run, calls: Sequence[OptimizerCall]) -> Sequence[OptimizerCall]:
    """Calls whose gradients are judged: where one optimizer steps again from where it is, later ones are not known."""
    return calls[:1] if len(run.slots) == 1 else calls


def truth(
    run: Run,
    roots: Sequence[tuple[str, Any]],
    before: State,
    batch: Any,
    counters: Counters,
    taken: Sequence[OptimizerCall] = (),
) -> Truth:
    """Compute a step's loss, gradients and buffers in float64, from a state; nothing of the run is changed.

    Parameters
    ----------
    taken : sequence of OptimizerCall
        See `taken_again`.

    Raises
    ------
    Exception
        Whatever the model throws in float64.
    """

    def wide(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().double() if leaf.is_floating_point() else leaf.clone()

    with _float64(run, roots), _little_memory(run) as arrived:
        right = taken_again(run, roots, before, tree_map(wide, batch), counters, taken, arrived)
    if not right.grads:
        raise RuntimeError("the optimizer was not stepped")
    if any(t is not None and t.dtype is not torch.float64 for t in right.grads) or right.dtype is not torch.float64:
        raise RuntimeError("the step computes in a dtype of its own, whatever that of its inputs")
    return right


def moved(before: State, nudge: _native.Nudge) -> State:
    """Return the state with its parameters moved."""

    def apart(value: Tensor) -> Tensor:
        found = nudge.moved(value)
        rest(value)
        return park(found)

    return replace(before, params=list(map(apart, before.params)))


def measure(
    run: Run, step: Step, right: Truth, buffers: dict[str, Tensor], clip_norm: float | None
) -> _native.ValueErrors:
    """Measure a step, and the buffers that it left, against the truth."""
    meter = _native.ValueMeter(step.value, right.loss)
    labels = names(run)
    given = compared(run, step.calls)
    for mine, exact in zip(given, right.calls, strict=False):
        factor = 1.0 if clip_norm is None else clip_factor(mine.grads, clip_norm)
        for i in own(run, mine.which) if mine.which == exact.which else ():
            meter.gradient(labels[i], mine.grads[i], factor, exact.grads[i])
            rest()
    if [call.which for call in given] != [call.which for call in right.calls]:
        meter.stepped(len(given) >= len(right.calls), len(given) < len(right.calls))
    for name, wanted in right.buffers.items():
        before = None if step.before is None else step.before.buffers.get(name)
        meter.buffer(name, buffers.get(name), wanted, before)
    return meter.found()
