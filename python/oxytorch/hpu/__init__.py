"""Intel Gaudi cards: what they tell, what Habana's bridge counts, and Habana's fused kernels.

Verified against fakes and public headers; never run on a Gaudi. ``python -m oxytorch.hpu`` prints, on a card, a verdict
on each thing that could not be tried here.

Nothing of Habana's is imported by this module before it is asked for. A process holds one card, ``hpu:0``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..backend import available_backends

__all__ = [
    "Amount",
    "Card",
    "FusedAdamW",
    "Memory",
    "Reading",
    "Status",
    "cards",
    "counters",
    "fallback_operators",
    "is_lazy",
    "mark_step",
    "mark_steps",
    "memory",
    "status",
]

BRIDGE = "habana_frameworks.torch"


# ---- what the cards tell


@dataclass(frozen=True)
class Card:
    """One Gaudi card, as ``libhlml.so`` tells it now.

    Attributes
    ----------
    name, serial, uuid : str
        Empty where the card does not tell.
    minor, module : int
        Number of the device file and of the module on the board; -1 where unknown.
    own : bool
        Whether it is this process's card.
    lost : bool
        Whether it fell off the bus or is being reset.
    values : dict of str to float
        Meters by name, a sample up to a second old; units are in ``docs/hpu.md`` and in ``units``.
    unknown : dict of str to str
        Meters that have no value now, each with one sentence why.
    units : dict of str to str
        Unit of each meter: "B", "%", "W", "J", "degC", "MHz", "ns", or "1" for counts.
    """

    name: str
    serial: str
    uuid: str
    minor: int
    module: int
    own: bool
    lost: bool
    values: dict[str, float]
    unknown: dict[str, str]
    units: dict[str, str]


@dataclass(frozen=True)
class Status:
    """Whether this process can use a Gaudi card, and why not.

    Attributes
    ----------
    usable : bool
        Whether the backend ``hpu`` has a device.
    reason : str
        One sentence.
    library, hlml, driver : str
        Path of ``libhlml.so``, its version and the driver's; empty where unknown.
    problem : str
        Why cards cannot be read; empty where they can.
    lazy : bool
        Whether the bridge is in lazy mode.
    """

    usable: bool
    reason: str
    library: str
    hlml: str
    driver: str
    problem: str
    lazy: bool


@functools.cache
def _ask(path: str) -> Callable[[Any, int], int]:
    function = ctypes.CDLL(path).oxy_hpu_report
    function.restype, function.argtypes = ctypes.c_uint64, [ctypes.c_char_p, ctypes.c_uint64]
    return cast("Callable[[Any, int], int]", function)


def _backend() -> tuple[bool, str, str]:
    """Whether the backend is usable, its reason and its library."""
    for entry in available_backends():
        if entry["name"] == "hpu":
            return entry["score"] > 0, entry["reason"], entry["origin"]
    return False, "this build has no backend hpu", ""


def _report() -> dict[str, Any]:
    """What the backend's library reports of all cards."""
    path = _backend()[2]
    if not path:
        return {
            "problem": "this build has no backend hpu",
            "library": "",
            "hlml": "",
            "driver": "",
            "own": -1,
            "cards": [],
        }
    text, size = ctypes.create_string_buffer(1 << 16), 0
    while (size := _ask(path)(text, len(text))) > len(text):  # more cards than there was room for
        text = ctypes.create_string_buffer(size)
    found: dict[str, Any] = json.loads(text.value)
    return found


def status() -> Status:
    """Return whether this process can use a Gaudi card, and why not."""
    usable, reason, _ = _backend()
    told = _report()
    return Status(usable, reason, told["library"], told["hlml"], told["driver"], told["problem"], is_lazy())


def cards() -> list[Card]:
    """Return every Gaudi card of this machine, whether or not this process can use it; empty where none can be read.

    The first call waits up to 2 seconds for ``libhlml.so``; later ones return the newest sample, which a thread of the
    backend renews at most once a second, and only while someone asks.
    """
    told = _report()
    return [
        Card(**{**card, "own": index == told["own"], "units": told["units"]})
        for index, card in enumerate(told["cards"])
    ]


# ---- what the bridge counts


@dataclass(frozen=True)
class Reading:
    """Named numbers, and for each that is missing one sentence why.

    Attributes
    ----------
    values : dict of str to float
    unknown : dict of str to str
    """

    values: dict[str, float]
    unknown: dict[str, str]


#: Our name, the bridge's metric and its entry.
_METRICS = {
    "recompiles": ("graph_compilation", "TotalNumber"),
    "recompile_time": ("graph_compilation", "TotalTime"),
    "recipe_hits": ("recipe_cache", "TotalHit"),
    "recipe_misses": ("recipe_cache", "TotalMiss"),
    "cpu_fallbacks": ("cpu_fallback", "TotalNumber"),
    "defragmentations": ("memory_defragmentation", "TotalNumber"),
}


def _metric(name: str) -> dict[str, Any] | str:
    """Entries of one of the bridge's metrics, or why there are none."""
    if BRIDGE not in sys.modules:
        return f"{BRIDGE} is not imported"
    try:
        metric = importlib.import_module(f"{BRIDGE}.hpu.metrics").metric_global(name)
    except (ImportError, AttributeError) as error:
        return f"this bridge has no metrics: {error}"
    if metric is None:
        hint = "; set PT_HPU_ENABLE_CACHE_METRICS=1 before the import" if name == "recipe_cache" else ""
        return f"the bridge does not collect {name}{hint}"
    return dict(metric.stats())


def counters() -> Reading:
    """Return the bridge's counters and the meters of this process's card, ready for ``PerformanceMonitor.scalar``.

    Returns
    -------
    Reading
        ``recompiles``, ``recompile_time`` (as the bridge counts it), ``recipe_hits``, ``recipe_misses``,
        ``cpu_fallbacks``, ``defragmentations``, all since the process started; and each meter of the card, as
        ``card/power`` and so on.
    """
    values: dict[str, float] = {}
    unknown: dict[str, str] = {}
    for name, (metric, entry) in _METRICS.items():
        told = _metric(metric)
        if isinstance(told, str):
            unknown[name] = told
        elif entry in told:
            values[name] = float(told[entry])
        else:
            unknown[name] = f"the bridge's {metric} has no {entry}"
    card = _own_card()
    if isinstance(card, str):
        unknown["card"] = card
    else:
        values |= {f"card/{name}": value for name, value in card.values.items()}
        unknown |= {f"card/{name}": why for name, why in card.unknown.items()}
    return Reading(values, unknown)


def fallback_operators() -> dict[str, int]:
    """Return how often each operator fell back to the CPU since the start; empty where that is not counted."""
    told = _metric("cpu_fallback")
    found = {} if isinstance(told, str) else told.get("FallbackOps", {})
    return {str(name): int(times) for name, times in dict(found).items()}


def _own_card() -> Card | str:
    found = cards()
    own = next((card for card in found if card.own), None)
    if own is not None:
        return own
    if found:
        return f"which of the {len(found)} cards is this process's cannot be told; set HLS_MODULE_ID"
    return _report()["problem"] or "there is no card"


# ---- memory


@dataclass(frozen=True)
class Amount:
    """Bytes, or a count, with where it is from and what it means."""

    value: int
    source: str
    meaning: str


@dataclass(frozen=True)
class Memory:
    """Memory of this process's card; a field is None where nothing tells it.

    Attributes
    ----------
    in_use, peak, limit : Amount or None
        Bytes held by tensors now and at most, and what the bridge's pool may hold.
    largest, allocations, frees : Amount or None
        Bytes of the largest allocation, and counts.
    card_total, card_free, card_used : Amount or None
        Bytes of the card, all processes together. ``card_used`` comes from the process that owns the card, and is None
        when that process has not told for 30 seconds.
    """

    in_use: Amount | None
    peak: Amount | None
    limit: Amount | None
    largest: Amount | None
    allocations: Amount | None
    frees: Amount | None
    card_total: Amount | None
    card_free: Amount | None
    card_used: Amount | None


#: The bridge's keys are not CUDA's: `Limit` is no reservation, though `torch.hpu.memory_reserved` returns it.
_STATISTICS = {
    "in_use": ("InUse", "bytes in live tensors"),
    "peak": ("MaxInUse", "most bytes in live tensors since reset_peak_memory_stats"),
    "limit": ("Limit", "bytes that the bridge's pool may hold"),
    "largest": ("MaxAllocSize", "bytes of the largest allocation"),
    "allocations": ("NumAllocs", "allocations so far"),
    "frees": ("NumFrees", "frees so far"),
}
_CARD = {
    "card_total": ("memory_total", "bytes of the card"),
    "card_free": ("memory_free", "bytes that no process holds"),
    "card_used": ("memory_used", "bytes that processes hold"),
}


def memory() -> Memory:
    """Return the memory of this process's card, each number with its source and meaning."""
    found: dict[str, Amount | None] = dict.fromkeys((*_STATISTICS, *_CARD))
    module = getattr(torch, "hpu", None)
    if module is not None and module.is_available():
        told = module.memory_stats()
        for name, (key, meaning) in _STATISTICS.items():
            if key in told:
                found[name] = Amount(int(told[key]), f"torch.hpu.memory_stats: {key}", meaning)
    card = _own_card()
    if isinstance(card, Card):
        for name, (meter, meaning) in _CARD.items():
            if meter in card.values:
                found[name] = Amount(int(card.values[meter]), f"libhlml.so: {meter}", meaning)
    return Memory(**found)


# ---- lazy mode


def is_lazy() -> bool:
    """Whether the bridge runs, or would run, in lazy mode, where ``mark_step`` ends a graph.

    Where the bridge is imported it is asked; otherwise ``PT_HPU_LAZY_MODE`` decides, and unset means eager, the default
    of release 1.23 (that of 1.19 was lazy).
    """
    if BRIDGE in sys.modules:
        with contextlib.suppress(ImportError, AttributeError):
            return bool(importlib.import_module(f"{BRIDGE}.utils.internal").is_lazy())
    return os.environ.get("PT_HPU_LAZY_MODE", "0") != "0"


def mark_step() -> None:
    """End the graph that lazy mode collects; nothing in eager mode or without the bridge."""
    if BRIDGE in sys.modules and is_lazy():
        importlib.import_module(f"{BRIDGE}.core").mark_step()


@contextlib.contextmanager
def mark_steps() -> Iterator[bool]:
    """In lazy mode, end the graph before and after each step of every optimizer: after backward, and after the update.

    Yields
    ------
    bool
        Whether graphs are ended: False in eager mode, where nothing is done.
    """
    if BRIDGE not in sys.modules or not is_lazy():
        yield False
        return
    before = register_optimizer_step_pre_hook(lambda *_: mark_step())
    after = register_optimizer_step_post_hook(lambda *_: mark_step())
    try:
        yield True
    finally:
        before.remove()
        after.remove()


# ---- Habana's fused kernels


def _hpex(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"{BRIDGE}.hpex.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f"Habana's {name} is not here: {error}. Use oxytorch.optim.AdamW, which serves every device."
        ) from error


class FusedAdamW(torch.optim.Optimizer):
    """Habana's fused AdamW and clipping behind the interface and the checkpoints of ``torch.optim.AdamW``.

    Its recurrence is the bridge's, not torch's: ``eps`` is added before the bias correction, so that it weighs
    ``1 / sqrt(1 - beta2**t)`` times as much in step ``t``; there is one step count a group; a 16-bit parameter has
    16-bit moments and a 16-bit learning rate. This is why ``oxytorch.optim.AdamW`` does not use it by itself. No
    ``found_inf``, average, master weights or statistics: those are ``oxytorch.optim.AdamW``'s.

    Parameters
    ----------
    params
        Parameters on "hpu", or groups of them; empty groups, which Habana's own class refuses, are left alone.
    lr, betas, eps, weight_decay : float
        As in ``torch.optim.AdamW``; numbers, no tensors.
    clip_norm : float, optional
        Clip by the norm of all gradients with Habana's ``FusedClipNorm`` before each step.

    Attributes
    ----------
    grad_norm : torch.Tensor or None
        Norm of the last step's gradients before clipping; None without ``clip_norm``.

    Raises
    ------
    NotImplementedError
        Where Habana's package is not here, or a parameter is not on "hpu".
    TypeError
        For a learning rate that is a tensor.
    ValueError
        For a value out of range, or a checkpoint whose step counts differ within a group.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        clip_norm: float | None = None,
    ) -> None:
        fused, clipping = _hpex("optimizers", "FusedAdamW"), _hpex("normalization", "FusedClipNorm")
        if isinstance(lr, torch.Tensor):
            raise TypeError("lr is a tensor, and Habana's kernel takes a number. Use oxytorch.optim.AdamW.")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm is {clip_norm}, expected a number above 0, or None.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        everything = [p for group in self.param_groups for p in group["params"]]
        for p in everything:
            if p.device.type != "hpu":
                raise NotImplementedError(f"a parameter is on {p.device}, and Habana's kernel runs on hpu alone.")
        self.grad_norm: torch.Tensor | None = None
        self._fused = fused(everything, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._clip = None if clip_norm is None else clipping(everything, clip_norm)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [group for group in self.param_groups if group["params"]]
        if self._clip is not None:
            self.grad_norm = self._clip.clip_norm([p for group in given for p in group["params"]])
        self._fused.param_groups, self._fused.state = given, self.state
        self._fused.step()
        return loss

    def explain(self) -> str:
        """Return which kernels serve the step, a line each."""
        clip = "Habana's FusedClipNorm" if self._clip is not None else "none"
        return f"clip: {clip}.\nupdate: Habana's FusedAdamW; eps is added before the bias correction."

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint in the form of ``torch.optim.AdamW``."""
        packed = super().state_dict()
        for group in packed["param_groups"]:
            step = float(group.pop("step", 0))
            for index in group["params"]:
                if index in packed["state"]:
                    packed["state"][index] = {**packed["state"][index], "step": torch.tensor(step)}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, of ``torch.optim.AdamW`` or of ``oxytorch.optim.AdamW``."""
        steps = []
        for group in state_dict["param_groups"]:
            found = {float(s["step"]) for i in group["params"] if (s := state_dict["state"].get(i))}
            if len(found) > 1:
                raise ValueError(
                    f"the step counts of one group are {sorted(found)}, and Habana's kernel has one count a group. "
                    "Split the group, or use oxytorch.optim.AdamW."
                )
            steps.append(int(found.pop()) if found else 0)
        super().load_state_dict(state_dict)
        for group, step in zip(self.param_groups, steps, strict=True):
            group["step"] = step
