"""A model before and after a change: bytes, paired speed, error on the user's data."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..base import Interval, format_duration, format_size, paired_ratio_interval
from .loss import call, tensors_in
from .snapshot import untouched

__all__ = ["Comparison"]

Evaluate = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Comparison:
    """What a change cost and brought; ``str()`` is a table.

    Attributes
    ----------
    bytes_before, bytes_after : int
        Parameters and buffers in memory, each storage once, packed weights included.
    zeros_before, zeros_after : float
        Share of the floating-point parameters' elements that are 0; packed integer weights are not looked into.
    seconds_before, seconds_after : float
        Least time of a forward of the example without gradients.
    ratio : Interval
        Time after over time before, median of interleaved pairs with its 95% interval; below 1 is faster.
    error : float
        Norm of the outputs' difference over the norm of the outputs before, on the example.
    metric_before, metric_after : float or None
        What the user's `evaluate` returned.
    """

    bytes_before: int
    bytes_after: int
    zeros_before: float
    zeros_after: float
    seconds_before: float
    seconds_after: float
    ratio: Interval
    error: float
    metric_before: float | None = None
    metric_after: float | None = None

    @property
    def slower(self) -> bool:
        """Whether it is slower beyond doubt: the whole interval is above 1."""
        return self.ratio.low > 1.0

    @property
    def faster(self) -> bool:
        """Whether it is faster beyond doubt."""
        return self.ratio.high < 1.0

    @property
    def verdict(self) -> str:
        """The speed in one sentence."""
        span = f"{self.ratio.mid:.2f} of the time before, {self.ratio.low:.2f} to {self.ratio.high:.2f}"
        word = "SLOWER" if self.slower else "faster" if self.faster else "neither faster nor slower beyond doubt"
        return f"{word} on this machine and example: {span}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self) | {"ratio": self.ratio._asdict(), "verdict": self.verdict}

    def __str__(self) -> str:
        rows = [
            ("", "before", "after"),
            ("size", format_size(self.bytes_before), format_size(self.bytes_after)),
            ("zeros", f"{self.zeros_before:.1%}", f"{self.zeros_after:.1%}"),
            ("forward", format_duration(self.seconds_before), format_duration(self.seconds_after)),
            ("error", "0", f"{self.error:.2e}"),
        ]
        if self.metric_before is not None and self.metric_after is not None:
            rows.append(("metric", f"{self.metric_before:.6g}", f"{self.metric_after:.6g}"))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, self.verdict])


def tensors_of(model: nn.Module) -> Iterable[Tensor]:
    """Every tensor that a model holds, also those inside quantised weights and packed modules."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield from _inner(tensor)
    for module in model.modules():
        packed = getattr(module, "_packed_params", None)
        if isinstance(packed, nn.Module) and hasattr(packed, "_weight_bias"):
            weight_and_bias: Any = packed._weight_bias
            yield from (t for t in weight_and_bias() if isinstance(t, Tensor))


def _inner(tensor: Tensor) -> Iterable[Tensor]:
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _inner(getattr(tensor, name))


def _bytes(model: nn.Module) -> int:
    held = {}
    tensors = list(tensors_of(model))  # packed weights are made when asked for, and must not share an address
    for tensor in tensors:
        key = id(tensor) if tensor.is_quantized else tensor.untyped_storage()._cdata
        held[key] = tensor.numel() * tensor.element_size()
    return sum(held.values())


def _zeros(model: nn.Module) -> float:
    plain = [
        t
        for p in model.parameters()
        for t in _inner(p)
        if t.is_floating_point() and not hasattr(p, "__tensor_flatten__")
    ]
    count = sum(t.numel() for t in plain)
    return sum(int((t == 0).sum()) for t in plain) / count if count else 0.0


def seconds_and_outputs(model: nn.Module, example: Any) -> tuple[float, list[Tensor]]:
    """Time one forward without gradients and return its floating-point outputs."""
    with torch.no_grad():
        start = time.perf_counter()
        outputs = call(model, example)
        found = [t.detach() for t in tensors_in(outputs) if t.is_floating_point()]
        if any(t.device.type != "cpu" for t in found):
            torch.accelerator.synchronize()
        return time.perf_counter() - start, found


def error_between(before: Iterable[Tensor], after: Iterable[Tensor]) -> float:
    """Norm of the difference over the norm of `before`, all tensors as one."""
    pairs = [(a.double(), b.double()) for a, b in zip(before, after, strict=True)]
    difference = math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
    norm = math.sqrt(sum(float(a.square().sum()) for a, _ in pairs))
    return difference / norm if norm else difference


def compare(
    before: nn.Module, after: nn.Module, example: Any, evaluate: Evaluate | None = None, budget: float = 0.5
) -> Comparison:
    """Compare two models in evaluation mode on one example; both are left as they were.

    Parameters
    ----------
    budget : float
        Seconds to spend on timing; 7 to 40 interleaved pairs.
    """
    with untouched(before), untouched(after):
        before.eval()
        after.eval()
        _, expected = seconds_and_outputs(before, example)
        _, found = seconds_and_outputs(after, example)
        once = seconds_and_outputs(before, example)[0] + seconds_and_outputs(after, example)[0]
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(int(min(40, max(7, budget / max(once, 1e-6))))):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                times[which].append(seconds_and_outputs((before, after)[which], example)[0])
        metrics = (evaluate(before), evaluate(after)) if evaluate is not None else (None, None)
        return Comparison(
            _bytes(before),
            _bytes(after),
            _zeros(before),
            _zeros(after),
            min(times[0]),
            min(times[1]),
            paired_ratio_interval(times[1], times[0]),
            error_between(expected, found),
            *metrics,
        )


@dataclass(frozen=True)
class Smaller:
    """A changed copy of a model, and what the change cost and brought.

    Attributes
    ----------
    model : torch.nn.Module
        The new model; the one that was given is not changed.
    comparison : Comparison
    changed : tuple of str
        Qualified names of the layers that were changed.
    skipped : dict of str to str
        Layers that were left as they are, with the reason.
    notes : tuple of str
        By whose code, and what to know about it.
    """

    model: nn.Module
    comparison: Comparison
    changed: tuple[str, ...]
    skipped: dict[str, str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [str(self.comparison), f"changed: {', '.join(self.changed)}"]
        lines += [f"left: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def duplicate(model: nn.Module) -> nn.Module:
    """Copy a model.

    Raises
    ------
    TypeError
        Where it cannot be copied.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise TypeError(f"the model cannot be copied, so there is nothing to change beside it: {error}") from error
