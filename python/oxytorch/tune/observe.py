"""What a run's forward and backward do, seen once, with everything left as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C._autograd import DeviceType, _profiler_enabled
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from .. import clock
from ..data.batches import shapes
from ..model.reach import Reach
from ..model.several import numbered
from ..model.snapshot import Snapshot

if TYPE_CHECKING:
    from .run import Run

__all__ = [
    "Observation",
    "Operators",
    "kernel_seconds",
    "near_denormal",
    "observe",
    "on_device",
    "operator_seconds",
    "rehearsal",
    "rehearse",
]


@dataclass(frozen=True)
class Observation:
    """Names of the operators of a step on the first batch, and facts that follow from them.

    Attributes
    ----------
    operators : frozenset of str
        Such as ``"aten::convolution"``.
    random : bool
        Whether one drew random numbers.
    tiny : bool
        Whether a gradient holds numbers near the denormal ones, see `near_denormal`.
    """

    operators: frozenset[str]
    random: bool
    tiny: bool

    def uses(self, part: str) -> bool:
        """Whether an operator has this in its name."""
        return any(part in name for name in self.operators)


class Unknown(Observation):
    """Of a run that cannot be looked at."""

    def uses(self, part: str) -> bool:  # noqa: ARG002
        return True


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operators run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> frozenset[str]:
        """Such as ``"aten::convolution"``."""
        return frozenset(func._schema.name for func in self.seen)

    def uses(self, part: str) -> bool:
        """Whether an operator has this in its name."""
        return any(part in name for name in self.names)


class _Times(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what each operator takes inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.named: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = clock.seconds()
        result = func(*args, **(kwargs or {}))
        self.named[func._schema.name] += clock.seconds() - began  # type: ignore[assignment]
        return result


def _forget_gradients(run: Run) -> None:
    for parameter in run.params if run.own_step is None else ():
        parameter.grad = None


def operator_seconds(run: Run) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step as it is now, and of each operator in its forward and backward, by name."""
    with rehearsal(run):
        for _ in range(2):  # the second finds the memory of the first
            _forget_gradients(run)
            began = clock.seconds()
            backward(run, run.batches[0])
            seconds = clock.seconds() - began
        _forget_gradients(run)
        with _Times() as times:
            backward(run, run.batches[0])
    return max(seconds, 1e-9), dict(times.named)


def kernel_seconds(run: Run) -> tuple[float, dict[str, float]]:
    """Return the seconds of a forward and backward on a card as it is now, and of each kernel in it, by name.

    Without kernels where another profiler runs or this one may not see the card.
    """
    named: dict[str, float] = {}
    with rehearsal(run):
        for _ in range(2):  # the second finds the memory of the first
            _forget_gradients(run)
            torch.cuda.synchronize()
            began = clock.seconds()
            backward(run, run.batches[0])
            torch.cuda.synchronize()
            seconds = clock.seconds() - began
        if not _profiler_enabled():
            _forget_gradients(run)
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                backward(run, run.batches[0])
                torch.cuda.synchronize()
            for event in seen.key_averages():
                if event.device_type == DeviceType.CUDA:
                    named[event.key] = event.self_device_time_total / 1e6
    return max(seconds, 1e-9), named


_SEEN: WeakKeyDictionary[Run, Observation] = WeakKeyDictionary()


def observe(run: Run) -> Observation:
    """Return what a forward and backward on the first batch does; looked at once a run.

    Of a run without batches nothing is known: it may use any operator.
    """
    if not run.batches:
        return Unknown(frozenset(), random=True, tiny=True)
    if run not in _SEEN:
        with rehearsal(run), torch.compiler.set_stance("force_eager"), Operators() as watch:
            backward(run, run.batches[0])
            tiny = any(p.grad is not None and near_denormal(p.grad) for p in run.params)
        _SEEN[run] = Observation(
            watch.names,
            any(torch.Tag.nondeterministic_seeded in func.tags for func in watch.seen),
            tiny,
        )
    return _SEEN[run]


@contextmanager
def rehearsal(run: Run) -> Iterator[None]:
    """Run steps inside; afterwards model, optimizer and generators are what they were."""
    roots: list[tuple[str, Any]] = [("model", run.model), *numbered("state", run.state)]
    if run.own_step is not None:
        roots += [("optimizer", slot.original) for slot in run.slots]
    roots += [(name, Reach(function)) for name, function in run.functions.items() if function is not None]
    held = Snapshot(roots)
    if run.own_step is None:
        for parameter in run.model.parameters():
            parameter.grad = None
    try:
        yield
    finally:
        held.restore()


def backward(run: Run, batch: Any) -> None:
    """Run forward and backward, or, where the user's own function is all there is, the whole step."""
    if run.own_step is None:
        run.loss(batch).backward()  # type: ignore[no-untyped-call]
    else:
        run.step(batch)


def rehearse(run: Run) -> None:
    """Run what is active, forward and backward, on one batch of each shape, and leave no trace."""
    batches = {shapes(batch): batch for batch in reversed(run.batches)}
    for batch in batches.values():
        with rehearsal(run):
            backward(run, batch)


def on_device(run: Run, kind: str) -> bool | str:
    """Return True where the model is on that kind of device, else what a strategy says of it."""
    return True if run.device.type == kind else f"the model is on {run.device.type}"


def near_denormal(tensor: Tensor) -> bool:
    """Whether a number other than 0 is so small that a run may take it below the least normal number."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    # A factor of 1e8 above: Adam's averages fall by 0.9 a step, so that is 170 steps away.
    size = tensor.detach().abs()
    return bool(((size > 0) & (size < torch.finfo(tensor.dtype).tiny * 1e8)).any())
