"""Strategies of `torch.compile`: each really compiled and run, forward and backward, before it counts."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..batches import shapes
from ..observe import observe, on_device, operator_seconds, rehearse
from ..strategy import Strategy, strategy

if TYPE_CHECKING:
    from ..run import Run

__all__: list[str] = []

# What changes the operators that the compiler sees without changing what it is told to watch for.
_TRACED = (
    "math_attention",
    "math_attention_bf16",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)
# Where one of these changes, a function is compiled anew: the operators are others, or guards on dtype and layout fail.
_RENEWED_BY = (*_TRACED, "bf16_autocast", "onednn_bf16", "channels_last", "channels_last_3d")
_INTERACTS = ("bf16_autocast", "channels_last", "allocator", "host_pool", "math_attention", "math_attention_bf16")


# Operators that call a library's kernels (products, convolutions, recurrences, attention), compiled or not.
_LIBRARY = re.compile(
    r"::_?(mm|bmm|mv|addmm|addmv|baddbmm|linear|convolution|conv|mkldnn|thnn|scaled_dot_product|flash)"
)
_FUSED = 0.5  # of the time outside of those: what fusing loops and leaving out Python's part takes away


def fused_speedup(seconds: float, named: Mapping[str, float]) -> float:
    """Return what a compiler is likely to make of a step of this length, by what its operators take, by name."""
    library = sum(value for name, value in named.items() if _LIBRARY.search(name))
    return 1 / (1 - _FUSED * max(0.0, 1 - library / seconds))


class _Compile(Strategy):
    """The model's forward and backward by torch's compiler, random numbers drawn as without it."""

    group = "compile"
    interacts = _INTERACTS
    renewed_by = _RENEWED_BY
    _mode = "default"
    _dynamic = False
    _usual_seconds = 20.0  # on two cores, where no compile of this mode was ever timed on this machine

    def __init__(self) -> None:
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def applies(self, run: Run) -> bool | str:
        if any(hasattr(model, "_orig_mod") for model in run.models) or run.call.was_compiled:
            return "the model is compiled already"
        return True

    def expected_cost(self, run: Run) -> float:
        seconds = _record().get(self._key(run))
        if seconds is None:
            known = [value for key, value in _record().items() if key.startswith(f"{self.name} ")]
            seconds = sum(known) / len(known) if known else self._usual_seconds
        return seconds

    def likely_speedup(self, run: Run) -> float | None:
        if run.device.type != "cpu":
            return None
        seconds, named = operator_seconds(run)
        return fused_speedup(seconds, named)

    def apply(self, run: Run) -> None:
        random = observe(run).random  # before the function is in place
        surroundings = self._surroundings(run)
        known = any(key[1:] == surroundings for key in self._functions)
        for model, call in zip(run.models, run.calls, strict=True):
            call.function(self._call(run, model, random))
        if known or not run.batches:  # without a batch the first step compiles
            return
        breaks = _graph_breaks()
        start = time.perf_counter()
        try:
            rehearse(run)
        except BaseException:
            self.revert(run)
            self._functions = {key: made for key, made in self._functions.items() if key[1:] != surroundings}
            raise
        seconds = time.perf_counter() - start
        _write_record(self._key(run), seconds)
        broken = {reason: count - breaks.get(reason, 0) for reason, count in _graph_breaks().items()}
        number = sum(broken.values())
        self.cost = f"compiling took {seconds:.1f} s"
        if number:
            first = next(reason for reason, count in broken.items() if count > 0).strip().splitlines()[0]
            self.cost += f"; {number} graph breaks, such as: {first}"

    def revert(self, run: Run) -> None:
        for call in run.calls:
            call.function(None)

    def _call(self, run: Run, model: nn.Module, random: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            key = (model, *self._surroundings(run))
            if key not in self._functions:
                self._functions[key] = self._compiled(model, random)
            return self._functions[key](*args, **kwargs)

        return call

    def _surroundings(self, run: Run) -> tuple[str, ...]:
        return tuple(name for name in _TRACED if name in run.active)

    def _compiled(self, model: nn.Module, random: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        # The compiler keeps what it made by code object: one of its own leaves the user's compiled functions alone,
        # and counts recompilations apart.
        forward.__code__ = forward.__code__.replace()
        return torch.compile(forward, dynamic=self._dynamic, options=self._options(random))

    def _options(self, random: bool) -> dict[str, Any]:
        from torch._inductor import list_mode_options  # noqa: PLC0415  (a second to import)

        options = dict(list_mode_options(self._mode, self._dynamic)) if self._mode != "default" else {}
        # Dropout then draws the masks that eager mode draws, also in what is compiled later.
        return {**options, "fallback_random": random}

    def _key(self, run: Run) -> str:
        described = f"{run.model}{run.device.type}{shapes(run.batches[0])}"
        return f"{self.name} {hashlib.sha256(described.encode()).hexdigest()[:16]}"


def _graph_breaks() -> dict[str, int]:
    from torch._dynamo.utils import counters  # noqa: PLC0415  (a second to import)

    return dict(counters["graph_break"])


def _record_file() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # noqa: PLC0415  (a second to import)

    return Path(cache_dir()) / "oxytorch_compile_seconds.json"  # beside the compiler's own cache: cold together


def _record() -> dict[str, float]:
    try:
        return {str(key): float(value) for key, value in json.loads(_record_file().read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _write_record(key: str, seconds: float) -> None:
    file = _record_file()
    record = {**_record(), key: round(seconds, 3)}
    try:
        fresh = file.with_suffix(f".{time.time_ns()}")
        fresh.write_text(json.dumps(record))
        fresh.replace(file)
    except OSError:
        pass  # it only makes the next guess better


@strategy("compile", kind="tolerance", max_speedup=2.5, expected_speedup=1.1)
class Compile(_Compile):
    """`torch.compile` in its default mode."""


@strategy("compile_dynamic", kind="tolerance")
class CompileDynamic(_Compile):
    """`torch.compile` with sizes as variables, for batches that differ in shape."""

    _dynamic = True

    def applies(self, run: Run) -> bool | str:
        if len({shapes(batch) for batch in run.batches}) == 1:
            return "all batches have the same shapes"
        return super().applies(run)


@strategy("compile_max_autotune", kind="tolerance", max_speedup=2.5, expected_speedup=1.03)
class CompileMaxAutotune(_Compile):
    """`torch.compile` that times several kernels for each product."""

    _mode = "max-autotune-no-cudagraphs"
    _usual_seconds = 60.0


@strategy("compile_reduce_overhead", kind="tolerance")
class CompileReduceOverhead(_Compile):
    """`torch.compile` with the kernels of a graph launched as one."""

    _mode = "reduce-overhead"

    def applies(self, run: Run) -> bool | str:
        return super().applies(run) if (where := on_device(run, "cuda")) is True else where

    def _call(self, run: Run, model: nn.Module, random: bool) -> Callable[..., Any]:
        inner = super()._call(run, model, random)

        def call(*args: Any, **kwargs: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return inner(*args, **kwargs)

        return call
