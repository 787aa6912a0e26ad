"""Strategies of `torch.compile`: each really compiled and run, forward and backward, before it counts."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from ...data.batches import shapes
from ...generators import rng_state, set_rng_state
from ..observe import kernel_seconds, observe, on_device, operator_seconds, rehearse
from ..run import told
from ..strategy import Strategy, strategy

if TYPE_CHECKING:
    from ..run import Run

__all__: list[str] = []

# What changes the operators that the compiler sees without changing what it is told to watch for.
_TRACED = (
    "native_attention",
    "math_attention",
    "math_attention_bf16",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)
# Where one of these changes, a function is compiled anew: the operators are others, or guards on dtype and layout fail.
_RENEWED_BY = (*_TRACED, "bf16_autocast", "onednn_bf16", "channels_last", "channels_last_3d")
_INTERACTS = (
    "bf16_autocast",
    "channels_last",
    "allocator",
    "host_pool",
    "native_attention",
    "math_attention",
    "math_attention_bf16",
    "flash_attention",  # what the host spends on a kernel counts no more once they are launched as one
    "efficient_attention",
    "cudnn_attention",
)


# Operators that call a library's kernels (products, convolutions, recurrences, attention), compiled or not.
_LIBRARY = re.compile(
    r"::_?(mm|bmm|mv|addmm|addmv|baddbmm|linear|convolution|conv|mkldnn|thnn|scaled_dot_product|flash)"
)
_FUSED = 0.5  # of the time outside of those: what fusing loops and leaving out Python's part takes away


def fused_speedup(seconds: float, named: Mapping[str, float]) -> float:
    """Return what a compiler is likely to make of a step of this length, by what its operators take, by name."""
    library = sum(value for name, value in named.items() if _LIBRARY.search(name))
    return 1 / (1 - _FUSED * max(0.0, 1 - library / seconds))


# Kernels of libraries on a card, by parts of their names: products, convolutions, attention.
_LIBRARY_KERNEL = re.compile(r"gemm|gemv|cutlass|cudnn|xmma|nvjet|conv|dgrad|wgrad|flash|fmha|splitK", re.IGNORECASE)
_BUSY = 0.9  # of a step: a card with more to do than that does not wait for the host
# Of the host's part: GPT-2 small in bf16 on an H200 took 24.2 ms eager and 20.8 compiled (bench/results/gpu).
_HOST = 0.85


def launched_speedup(seconds: float, kernels: Mapping[str, float], graphed: bool) -> float | None:
    """Return what a compiler is likely to make of a step on a card, by what its kernels take; None where none is known.

    The step takes as long as the card or the host, whichever is slower; launching a graph takes next to nothing.
    """
    busy = sum(kernels.values())
    if busy <= 0:
        return None
    library = sum(value for name, value in kernels.items() if _LIBRARY_KERNEL.search(name))
    on_card = library + (1 - _FUSED) * (busy - library)
    on_host = 0.0 if graphed or busy > _BUSY * seconds else _HOST * seconds
    return seconds / min(seconds, max(on_card, on_host))


# Packages whose exceptions are the compiler's; what the model's own code throws is not of them.
_COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")
_AT_ONCE = "force_non_lazy_backward_lowering"
_TRACES_CACHED = "enable_autograd_cache"
_SMALL = 1 << 16  # elements of a buffer


def _is_of_compiler(error: BaseException) -> bool:
    return any(base.__module__.startswith(_COMPILER) for base in type(error).__mro__)


class _Before:
    """What one call of a model moves before its compiler fails behind a graph break: random states and buffers.

    Small buffers are copied before each call, as batch normalization writes its own past their version counters; large
    ones where their counter says that they were written to.
    """

    def __init__(self, model: nn.Module, params: Sequence[Tensor]) -> None:
        self._params = params
        self._places = [(m._buffers, name) for m in model.modules() for name, b in m._buffers.items() if b is not None]
        self._held: list[tuple[Tensor | None, int | None, Tensor | None]] = [(None, None, None)] * len(self._places)
        self._rng: dict[str, Any] = {}

    @torch.no_grad()
    def hold(self) -> None:
        self._rng = rng_state(self._params)
        copies: list[Tensor] = []
        written: list[Tensor] = []
        for place, (buffers, name) in enumerate(self._places):
            now = buffers.get(name)
            then, version, copy = self._held[place]
            new = None if now is None or now.is_inference() or now.numel() <= _SMALL else now._version
            if now is then and (now is None or (new is not None and new == version)):
                continue
            if now is then and now is not None and copy is not None and copy.shape == now.shape:
                copies.append(copy)
                written.append(now)
            else:
                copy = None if now is None else now.detach().clone()
            self._held[place] = (now, new, copy)
        if copies:
            torch._foreach_copy_(copies, written)

    @torch.no_grad()
    def restore(self) -> None:
        for (buffers, name), (then, version, copy) in zip(self._places, self._held, strict=True):
            buffers[name] = then
            if then is not None and copy is not None and (version is None or then._version != version):
                then.copy_(copy)
        set_rng_state(self._rng)


class _Compile(Strategy):
    """The model's forward and backward by torch's compiler, random numbers drawn as without it.

    Where the compiler fails in a step of the run, the model is called as given, from the state in which that call
    found random generators and buffers: the step is taken once. No call compiles again then.
    """

    group = "compile"
    interacts = _INTERACTS
    renewed_by = _RENEWED_BY
    _mode = "default"
    _dynamic = False
    _graphed = False
    """Whether its kernels are launched as one graph of the card."""
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
        if run.device.type == "cuda":
            return launched_speedup(*kernel_seconds(run), self._graphed)
        return fused_speedup(*operator_seconds(run)) if run.device.type == "cpu" else None

    def apply(self, run: Run) -> None:
        random = observe(run).random  # before the function is in place
        surroundings = self._surroundings(run)
        known = any(key[1:] == surroundings for key in self._functions)
        for model, call in zip(run.models, run.calls, strict=True):
            call.function(self._call(run, model, random))
        if known or not run.batches or self.name in run.fallbacks:  # without a batch the first step compiles
            return
        breaks = _graph_breaks()
        start = time.perf_counter()
        try:
            rehearse(run)
        except BaseException:
            self.revert(run)
            self._functions = {key: made for key, made in self._functions.items() if key[1:] != surroundings}
            raise
        if self.name in run.fallbacks:
            return
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
        before = _Before(model, run.params)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.name in run.fallbacks:
                return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            key = (model, *self._surroundings(run))
            before.hold()
            try:
                if key not in self._functions:
                    self._functions[key] = self._compiled(model, random)
                with _compiling(alone=not key[1:]):
                    return self._functions[key](*args, **kwargs)
            except Exception as error:
                if not run.falls_back or not (_is_of_compiler(error) or key not in self._functions):
                    raise
                why = told(error)
            before.restore()
            result = model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # throws what is the model's own
            run.fall_back(self.name, why)
            return result

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


@contextmanager
def _compiling(*, alone: bool) -> Iterator[None]:
    """Inside, what is compiled is compiled with its backward: a failure of it is then seen before anything has run.

    Unless it is `alone`, traced graphs are not cached: torch finds them again by what is called, whatever operators
    that came to when it was traced.
    """
    wanted = {_AT_ONCE: True, **({} if alone else {_TRACES_CACHED: False})}
    before = {name: getattr(functorch_config, name) for name in wanted if hasattr(functorch_config, name)}
    for name in before:  # torch has not always had them
        setattr(functorch_config, name, wanted[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(functorch_config, name, value)


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


@strategy("compile_reduce_overhead", kind="tolerance", part_of=("step_graph",), unseen_memory=True)
class CompileReduceOverhead(_Compile):
    """`torch.compile` with the kernels of a graph launched as one."""

    _mode = "reduce-overhead"
    _graphed = True

    def applies(self, run: Run) -> bool | str:
        return super().applies(run) if (where := on_device(run, "cuda")) is True else where

    def _call(self, run: Run, model: nn.Module, random: bool) -> Callable[..., Any]:
        inner = super()._call(run, model, random)

        def call(*args: Any, **kwargs: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return inner(*args, **kwargs)

        return call
