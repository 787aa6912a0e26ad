"""A training step within a budget of memory: what backward needs of a block is made again or packed, as costs least."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import MethodType, TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _C
from ..base import format_size
from ..model.snapshot import Snapshot, snapshot_of_step
from ..monitor import Report
from .batch import is_out_of_memory
from .checkpoint import checkpoint, selective_checkpoint
from .meter import Meter
from .pack import Format, PackSavedTensors

__all__ = ["MemoryPlan", "blocks_of", "device_of", "fit", "fit_held", "synchronize"]

_native = _C.memory
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_RECORDINGS = 3  # of the step, for the time that each block takes
_PAIRS = 3  # of steps with and without the plan, for the time it costs
_CHECKPOINTS = {"selective": selective_checkpoint, "full": checkpoint}
_ACTIONS = [action for action in _native.block_actions() if action != "keep"]
_FORMATS = [action for action in _ACTIONS if action not in _CHECKPOINTS]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def blocks_of(model: nn.Module) -> list[str]:
    """Return the modules that make up a model's depth: what its lists and sequences hold, and what stands beside them.

    A sequence of layers alone that lies in a list is a block itself.
    """

    def is_container(module: nn.Module) -> bool:
        return isinstance(module, _CONTAINERS)

    def is_flat(module: nn.Module) -> bool:
        return not any(True for child in module.children() for _ in child.children())

    found: list[str] = []

    def walk(prefix: str, module: nn.Module, *, listed: bool) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if is_container(child):
                opened = not (listed and isinstance(child, nn.Sequential) and is_flat(child))
            else:
                opened = not listed and any(isinstance(part, _CONTAINERS) and len(part) > 1 for part in child.modules())
            if opened:
                walk(f"{path}.", child, listed=is_container(child))
            else:
                found.append(path)

    walk("", model, listed=is_container(model))
    return found


class _Recorded:
    """Makes blocks the regions of a timeline, with the tensors that go in and come out."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._open: list[Any] = []
        self._handles = []
        for name in names:
            block = model.get_submodule(name)
            self._handles.append(block.register_forward_pre_hook(self._begin(name), with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._end, always_call=True))

    def _begin(self, name: str) -> Any:
        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._open.append(_native.OpenRegion(name, _tensors((args, kwargs))))

        return begin

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._open:
            self._open.pop().end(_tensors(output))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Wrapped:
    """A block's forward, under an action. Copies and pickles of the block have its forward as it was."""

    def __init__(self, block: nn.Module, kind: Callable[..., Any]) -> None:
        self.block, self.kind = block, kind
        self.own = block.__dict__.get("forward")  # of the object, beside that of its class
        self.forward = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind(self.forward, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.own is not None:
            return copy.deepcopy(self.own, memo)
        return MethodType(type(self.block).forward, copy.deepcopy(self.block, memo))

    def __reduce__(self) -> Any:
        if self.own is not None:
            return _same, (self.own,)
        return getattr, (self.block, "forward")  # of its class: it has no attributes yet when this is loaded


def _same(value: Any) -> Any:
    return value


class _Packed:
    """Calls a function with what it saves packed."""

    def __init__(self, format: Format) -> None:
        self.packed = PackSavedTensors(format)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.packed:
            return function(*args, **kwargs)


class _Planned:
    """Puts blocks under `checkpoint`, `selective_checkpoint` or `PackSavedTensors`, and takes them out."""

    def __init__(self, model: nn.Module, choice: _native.BlockChoice) -> None:
        self._put: list[_Wrapped] = []
        self._packed: list[_Packed] = []
        for action in _ACTIONS:
            if names := choice.names(action):
                kind = self._kind(action)
                for name in names:
                    one = _Wrapped(model.get_submodule(name), kind)
                    one.block.forward = one
                    self._put.append(one)

    def _kind(self, action: str) -> Callable[..., Any]:
        if action in _CHECKPOINTS:
            return _CHECKPOINTS[action]
        self._packed.append(_Packed(cast(Format, action)))
        return self._packed[-1]

    def relative_error(self) -> float:
        """Return the largest of `PackedReport.relative_error`."""
        return max((one.packed.report().relative_error for one in self._packed), default=0.0)

    def close(self) -> None:
        for one in reversed(self._put):
            if one.own is None:
                one.block.__dict__.pop("forward", None)
            else:
                one.block.__dict__["forward"] = one.own
        self._put = []


class MemoryPlan:
    """What is done with which blocks, what it saves and costs. Active until `revert()` or the end of a `with`."""

    def __init__(self, model: nn.Module, search: _native.BudgetSearch) -> None:
        self._model, self._search = model, search
        self._put: _Planned | None = None

    @property
    def planned(self) -> tuple[str, ...]:
        """Names of the modules that are not kept as they are: those of `full`, `selective` and `packed`."""
        return tuple(name for action in _ACTIONS for name in self._search.choice.names(action))

    @property
    def packed(self) -> dict[str, tuple[str, ...]]:
        """Names of the modules under `PackSavedTensors`, by format."""
        by_format = {format: tuple(self._search.choice.names(format)) for format in _FORMATS}
        return {format: names for format, names in by_format.items() if names}

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the modules of which something is made again in backward: those of `full` and `selective`."""
        return self.full + self.selective

    @property
    def full(self) -> tuple[str, ...]:
        """Names of the modules that are run again in backward, under `checkpoint`."""
        return tuple(self._search.choice.names("full"))

    @property
    def selective(self) -> tuple[str, ...]:
        """Names of the modules of which results of cheap operators are made again, under `selective_checkpoint`."""
        return tuple(self._search.choice.names("selective"))

    @property
    def budget(self) -> int:
        """Bytes that the step was to stay within."""
        return self._search.budget

    @property
    def plain_peak(self) -> int:
        """The most bytes that tensors take in a step without the plan."""
        return self._search.plain_peak

    @property
    def predicted_peak(self) -> int:
        """The most bytes that tensors take in a step with it, by the recorded step."""
        return self._search.predicted_peak

    @property
    def measured_peak(self) -> int:
        """The most bytes that tensors took in a step with it."""
        return self._search.measured_peak

    @property
    def floor(self) -> int:
        """The lowest peak that a choice of blocks can reach, by the recorded step."""
        return self._search.floor

    @property
    def plain_seconds(self) -> float:
        """Of a step without the plan, a median of steps in turn; 0 where every block is kept."""
        return self._search.plain_seconds

    @property
    def seconds(self) -> float:
        """Of a step with it, a median of steps in turn; 0 where every block is kept."""
        return self._search.seconds

    @property
    def is_optimal(self) -> bool:
        """Whether no other choice of blocks is faster within the budget, by the recorded step."""
        return self._search.is_optimal

    @property
    def same_bits(self) -> bool | None:
        """Whether a step leaves the bits that one without the plan leaves; None: two steps without it differ."""
        return self._search.same_bits

    @property
    def is_active(self) -> bool:
        """Whether blocks are under the plan now."""
        return self._put is not None

    def curve(self, points: int = 9) -> list[tuple[int, float]]:
        """Return (peak in bytes, seconds added to a step), predicted, from the plain step down to the floor."""
        return self._search.curve(points)

    def table(self) -> str:
        """Return what each block saves and costs, and what the plan comes to, as text."""
        return self._search.table()

    def report(self) -> Report:
        """Return the same as a document with the curve as a plot: ``plan.report().to_html("memory.html")``."""
        return self._search.report()

    def summary(self) -> str:
        """Return what the plan comes to, in a sentence."""
        return self._search.summary()

    @property
    def cost(self) -> str:
        """What it costs, in a sentence; empty where every block is kept."""
        return self._search.cost()

    def revert(self) -> None:
        """Take the plan back: the model is as before, and its steps take the memory they took."""
        if self._put is not None:
            self._put.close()
            self._put = None

    def _apply(self) -> _Planned:
        self.revert()
        self._put = _Planned(self._model, self._search.choice)
        return self._put

    def __enter__(self) -> MemoryPlan:
        """Return the plan, which the end of the `with` reverts."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """See `revert`."""
        self.revert()

    def __repr__(self) -> str:
        """Return peak and budget, and how many blocks are run again, in part or whole, or packed."""
        peak, budget = format_size(self.measured_peak), format_size(self.budget)
        packed = sum(map(len, self.packed.values()))
        blocks = f"{len(self.full)} blocks run again, {len(self.selective)} in part, {packed} packed"
        return f"MemoryPlan({blocks}, peak {peak} of {budget})"


def fit(
    model: nn.Module,
    step: Callable[[], Any],
    budget: int | str,
    *,
    max_slowdown: float = 1.25,
    formats: Sequence[Format] = ("lossless",),
    blocks: Sequence[str] | None = None,
    state: Sequence[Any] | None = None,
) -> MemoryPlan:
    """Bring a training step within a budget of memory by making tensors of its model's blocks again, or packing them.

    A step is recorded: what each block makes in forward and keeps for its backward, and how long its forward takes; and
    once more with every block under `selective_checkpoint`, and under `PackSavedTensors` of each format. Each block is
    then left as it is, put under one of these, or under `checkpoint`, whatever costs the least time within the budget,
    and the step is measured; where its peak is above the budget, the difference is taken off and the choice is made
    again. What the trial steps changed (model, optimizer, random states) is put back. Where a step runs out of memory
    with every block kept, the last blocks are kept, as many as measured steps allow, and the others run again.

    Parameters
    ----------
    model : nn.Module
        In training mode, on one device, whose memory is planned.
    step : callable
        Takes one whole training step: forward, backward, optimizer. It is called about twenty times, and three times
        more for each format.
    budget : int or str
        The most that tensors may take, parameters, gradients and optimizer state included: bytes, ``"900MiB"``, or
        ``"50%"`` of the memory that this process may use, or of all memory of another device. ``"least"``: the lowest
        peak that `max_slowdown` allows.
    max_slowdown : float
        How many times as long a step may take, with ``"least"``.
    formats : sequence of {"lossless", "bf16", "int8", "file"}
        How `PackSavedTensors` may keep what a block saves. "lossless" and "file" keep every bit; "file" writes to
        ``TMPDIR`` in each step; the others round gradients, and the report says by how much what is saved is rounded.
    blocks : sequence of str, optional
        Names of modules that may be planned, and that do not lie in each other. Default: children of the model's lists
        and sequences, and what stands beside them.
    state : sequence, optional
        What the step changes. Default: all that `step` reaches.

    Returns
    -------
    MemoryPlan
        Active; `revert()` takes it back.

    Raises
    ------
    torch.OutOfMemoryError
        Where no choice of blocks is within the budget; the message has the lowest peak. The model is as before.
    ValueError
        For a budget that is no size or under 1 byte, for formats that there are not, for blocks that the model lacks or
        that lie in each other, and where the step calls none of them: a compiled model does not.

    Notes
    -----
    Gradients, buffers and random state keep every bit (see `checkpoint`), unless formats round; the plan compares them
    once. Bytes are those of tensors, as `Meter` counts them.
    """
    is_least = budget == "least"
    limit = None if is_least else _native.budget_bytes(str(budget), device_of(model))
    most = max_slowdown if is_least else None
    return fit_held(
        model,
        step,
        limit,
        lambda: snapshot_of_step(step, state, model),
        blocks,
        max_slowdown=most,
        formats=formats,
    )


def fit_held(
    model: nn.Module,
    step: Callable[[], Any],
    budget: int | None,
    held: Callable[[], Snapshot],
    blocks: Sequence[str] | None = None,
    max_slowdown: float | None = None,
    formats: Sequence[Format] = ("lossless",),
    most: int | None = None,
) -> MemoryPlan:
    """Do what `fit` does; `held()` takes a snapshot of what the step changes.

    Without a budget it is what the tensors of that take and what the process may still take; it is never above `most`
    bytes. With `max_slowdown` it is the lowest peak that this allows. No memory limit holds back the steps that are
    taken here.
    """
    device = device_of(model)
    names = _checked(model, blocks)
    for format in formats:
        if format not in _FORMATS:
            raise ValueError(f"formats has {format!r}; saved tensors are packed as {', '.join(map(repr, _FORMATS))}.")
    with _native.LimitPaused():
        available = _native.available_bytes(device) if budget is None else 0
        snapshot = held()
        try:
            within = snapshot.nbytes(device) + available if budget is None else budget
            within = within if most is None else min(within, most)
            plan = _fitted(model, step, within, names, snapshot, max_slowdown, formats)
        finally:
            snapshot.restore()  # of the attributes of modules too: the plan goes in after it
    if plan.planned:
        plan._apply()
    return plan


def device_of(model: nn.Module) -> torch.device:
    """Return where the parameters of a model are, whose memory is planned."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given."""
    if device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.synchronize(device)


def _checked(model: nn.Module, blocks: Sequence[str] | None) -> list[str]:
    if blocks is None:
        found = blocks_of(model)
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no modules that could be planned; checkpoint() takes functions."
            )
        return found
    named = dict(model.named_modules())
    for name in blocks:
        if name not in named or not name:
            raise ValueError(f"the model has no module {name!r}; named_modules() lists them.")
        if isinstance(named[name], nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"{name!r} is a {type(named[name]).__name__}, which has no forward; name its children.")
    for name in blocks:
        for other in blocks:
            if other.startswith(f"{name}."):
                raise ValueError(f"block {other!r} lies in block {name!r}; give one of them.")
    return list(dict.fromkeys(blocks))


def _fitted(
    model: nn.Module,
    step: Callable[[], Any],
    budget: int,
    names: list[str],
    snapshot: Snapshot,
    max_slowdown: float | None,
    formats: Sequence[Format],
) -> MemoryPlan:
    device = device_of(model)
    gc.collect()  # what lies in cycles would go while a step is measured, which would then seem to take less
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held = 0

    def measured() -> tuple[int, float]:
        synchronize(device)
        began = time.perf_counter()
        with Meter(device=device) as meter:
            step()
            synchronize(device)
        return held + whole.live_bytes - meter.live_bytes + meter.peak_bytes, time.perf_counter() - began

    with Meter(device=device) as whole, ExitStack() as undo:
        try:
            step()  # makes gradients and the optimizer's state
            kept = {id(p.grad) for p in model.parameters()}
            # Gradients that the step replaced are alive for the snapshot alone.
            held = snapshot.nbytes(device, leave_out=[g for g in gradients if id(g) not in kept])
            base = held + whole.live_bytes
            tape = _recorded(model, step, names)
            plain_peak, _ = measured()
            fits = True
        except Exception as out_of_memory:
            if max_slowdown is not None or not is_out_of_memory(out_of_memory):
                raise
            fits = False
        if not fits:  # what the error held is free now
            snapshot.restore()
            held = snapshot.nbytes(device, leave_out=gradients)
            return _unrecorded(model, names, budget, snapshot, lambda: measured()[0])
        failed: dict[str, Exception] = {}
        for action in ["selective", *(format for format in _FORMATS if format in formats)]:
            error = _add_action(action, tape, model, step, names, snapshot)
            if error is not None:
                failed[action] = error
        if max_slowdown is None:
            search = _native.BudgetSearch(tape, base, plain_peak, budget)
        else:
            search = _native.BudgetSearch.least(tape, base, plain_peak, measured()[1], max_slowdown)
        for action, error in failed.items():
            search.without(action, str(error))
        plan = MemoryPlan(model, search)
        undo.callback(plan.revert)
        while search.next() is not None:
            put = plan._apply()
            measured()  # what the first step under it takes once
            search.measured(measured()[0])
            search.rounded(put.relative_error())
            if search.is_bound_by_time:
                _time(plan, lambda: measured()[1])
        if plan.planned:
            if not search.is_bound_by_time:
                _time(plan, lambda: measured()[1])
            search.compared(_same_bits(plan, model, step, snapshot))
        return plan  # taken out here, and put in by fit()


def _unrecorded(
    model: nn.Module, names: list[str], budget: int, snapshot: Snapshot, measured: Callable[[], int]
) -> MemoryPlan:
    """Do the same where a step with everything kept does not fit in memory."""
    search = _native.BudgetSearch.unrecorded(names, budget)
    plan = MemoryPlan(model, search)
    try:
        while search.next() is not None:
            plan._apply()
            try:
                measured()  # makes gradients and the optimizer's state
                search.measured(measured())
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                search.ran_out(str(error))
            plan.revert()
            snapshot.restore()
    finally:
        plan.revert()
    return plan


def _recorded(model: nn.Module, step: Callable[[], Any], names: list[str]) -> _native.StepTape:
    recorded = _Recorded(model, names)
    tapes = []
    try:
        for _ in range(_RECORDINGS):
            with Meter(device=device_of(model), timeline=True) as meter:
                step()
            tapes.append(_native.StepTape.of(meter.timeline(), names))
    finally:
        recorded.close()
    return _native.StepTape.steady(tapes)


def _add_action(
    action: str,
    tape: _native.StepTape,
    model: nn.Module,
    step: Callable[[], Any],
    names: list[str],
    snapshot: Snapshot,
) -> Exception | None:
    """Record what blocks take under an action, or return what the step raised, which went well without."""
    put = _Planned(model, _native.BlockChoice(action, names))
    try:
        tape.add(action, _recorded(model, step, names))
    except Exception as error:
        put.close()
        snapshot.restore()
        step()
        return error
    put.close()
    return None


def _time(plan: MemoryPlan, seconds: Callable[[], float]) -> None:
    plain, planned = [], []
    for _ in range(_PAIRS):
        planned.append(seconds())
        plan.revert()
        plain.append(seconds())
        plan._apply()
    plan._search.timed(statistics.median(plain), statistics.median(planned))


def _same_bits(plan: MemoryPlan, model: nn.Module, step: Callable[[], Any], snapshot: Snapshot) -> bool | None:
    def left(*, planned: bool) -> list[Tensor]:
        plan.revert()
        snapshot.restore()
        if planned:
            plan._apply()
        step()
        return [t.detach().clone() for t in [*model.parameters(), *model.buffers()]]

    plain = left(planned=False)
    if not _equal(plain, left(planned=False)):
        return None
    return _equal(plain, left(planned=True))


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether tensors have the same bits, NaN included."""
    return all(
        a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(one, other, strict=True)
    )
