"""Strategies of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ... import optim
from ...optim.tail import TailOptimizer
from ..native_step import CLASSES, differs, native_step
from ..observe import on_device
from ..run import plain_step
from ..strategy import Strategy, strategy

if TYPE_CHECKING:
    from ..run import Run

__all__: list[str] = []

_TORCH = tuple(
    getattr(torch.optim, name)
    for name in ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "Rprop")
)
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def _told(own: torch.optim.Optimizer) -> str:
    """Return which way of stepping the user asked for; empty where none."""
    if any(group.get("foreach") is not None or group.get("fused") is not None for group in own.param_groups):
        return "the optimizer was told which implementation to use"
    if any(group.get("differentiable") or group.get("capturable") for group in own.param_groups):
        return "a differentiable or capturable step was asked for"
    return ""


@strategy("native_step", kind="exact", group="optimizer", hopeful=1.8, expected_speedup=1.15)
class NativeStep(Strategy):
    """Adam, AdamW and SGD in one native pass over each tensor, each term rounded as torch's loop rounds it."""

    def applies(self, run: Run) -> bool | str:
        own = run.original
        if (where := on_device(run, "cpu")) is not True:
            return where
        if type(own) not in CLASSES:
            return f"there is no native step of {type(own).__name__}"
        return told if (told := _told(own)) else True

    def apply(self, run: Run) -> None:
        own = run.original
        if reason := differs(own):
            raise RuntimeError(reason)
        run.replace_step(lambda closure: native_step(own, closure))

    def revert(self, run: Run) -> None:
        run.replace_step(None)


class _Flag(Strategy):
    """torch's own other implementation of the step: flags of the groups, set while it steps and at no other time."""

    _flag = ""
    _classes: tuple[type, ...] = ()

    def applies(self, run: Run) -> bool | str:
        own = run.original
        if type(own) not in self._classes:
            return f"{type(own).__name__} has no {self._flag} step"
        return told if (told := _told(own)) else True

    def apply(self, run: Run) -> None:
        own = run.original

        def step(closure: Callable[[], Any] | None) -> Any:
            before = [{key: group.get(key) for key in ("foreach", "fused")} for group in own.param_groups]
            attributes = set(own.__dict__)
            for group in own.param_groups:
                group.update(dict.fromkeys(("foreach", "fused"), False) | {self._flag: True})
            try:
                return plain_step(own, closure)
            finally:
                for group, flags in zip(own.param_groups, before, strict=True):
                    group.update(flags)
                for name in set(own.__dict__) - attributes:
                    del own.__dict__[name]

        run.replace_step(step)

    def revert(self, run: Run) -> None:
        run.replace_step(None)


@strategy("foreach", kind="exact", group="optimizer", hopeful=1.3, expected_speedup=1.01)
class Foreach(_Flag):
    """torch's optimizer takes all parameters through each operation together."""

    _flag = "foreach"
    _classes = _TORCH

    def applies(self, run: Run) -> bool | str:
        if run.device.type != "cpu":
            return "it is torch's own choice there"
        return super().applies(run)


@strategy("fused", kind="tolerance", group="optimizer", hopeful=1.5, expected_speedup=1.1)
class Fused(_Flag):
    """torch's fused step: one pass over each parameter."""

    _flag = "fused"
    _classes = _FUSED

    def applies(self, run: Run) -> bool | str:
        if any(not p.is_floating_point() for p in run.params):
            return "the fused step takes floating-point parameters only"
        return super().applies(run)


class _Tail(Strategy):
    """The optimizer of oxytorch.optim in place of torch's, with what of the step it can do by itself.

    Where the loop is the plan's that is clipping, the look at the gradients and the moving average; in the user's own
    loop they stay where they are.
    """

    _options: ClassVar[dict[str, Any]] = {}

    def applies(self, run: Run) -> bool | str:
        if isinstance(run.original, TailOptimizer):
            return "the optimizer is one of oxytorch.optim already"
        name = type(run.original).__name__
        if getattr(torch.optim, name, None) is not type(run.original) or not hasattr(optim, name):
            return f"oxytorch.optim has nothing of the state format of {name}"
        if any(group.get("differentiable") for group in run.original.param_groups):
            return "a differentiable step was asked for"
        return True

    def apply(self, run: Run) -> None:
        run.follow()
        names = ("clip_norm", "guard", "average") if run.owns_loop and run.own_step is None else ()
        taken = {name: getattr(run, name) for name in names if getattr(run, name) is not None}
        options: dict[str, Any] = {"nonfinite": "propagate", **run.tail_options, **self._options}
        if "clip_norm" in taken:
            options["clip_norm"] = run.clip_norm
        if "guard" in taken:
            options["nonfinite"] = run.nonfinite
        if "average" in taken:
            options["ema_decay"] = run.ema_decay
        tail = optim.replace(run.original, **options)
        if "average" in taken:
            tail.load_ema_state_dict({"ema": dict(enumerate(taken["average"]))})
        run.replace_optimizer(tail)
        for name in taken:
            setattr(run, name, None)
        self._taken = taken

    def revert(self, run: Run) -> None:
        tail: Any = run.optimizer
        if "average" in self._taken:
            averages = tail.ema_state_dict()["ema"]
            self._taken["average"] = [averages[i].to(p.dtype) for i, p in enumerate(run.params)]
        if "guard" in self._taken and run.taken:
            run.skipped += int(tail.tail_stats().skipped)
        for name, value in self._taken.items():
            setattr(run, name, value)
        run.replace_optimizer(None)
        # Where gradients are sparse torch keeps, and with Nesterov's step needs, the momentum sparse too.
        tables = {id(m.weight) for m in run.model.modules() if getattr(m, "sparse", False) and hasattr(m, "weight")}
        for param in run.params:
            momentum = (run.original.state.get(param) or {}).get("momentum_buffer")
            if id(param) in tables and isinstance(momentum, Tensor) and not momentum.is_sparse:
                run.original.state[param]["momentum_buffer"] = momentum.to_sparse(1)


@strategy(
    "step_tail", kind="tolerance", group="optimizer", interacts=("channels_last",), hopeful=1.8, expected_speedup=1.2
)
class StepTail(_Tail):
    """The whole optimizer step as one native call; state stays in torch's format."""


@strategy(
    "int8_state",
    kind="trade",
    group="optimizer",
    interacts=("channels_last",),
    cost="the optimizer's running averages are rounded to 8 bits; the wide ones are kept while it may be taken back.",
)
class Int8State(_Tail):
    """The step tail with running averages of one byte an element: a quarter of the memory to read and write."""

    _options: ClassVar[dict[str, Any]] = {"state_dtype": "int8"}

    def applies(self, run: Run) -> bool | str:
        if not isinstance(run.original, torch.optim.Adam):
            return f"{type(run.original).__name__} is not Adam or AdamW"
        return super().applies(run)

    def apply(self, run: Run) -> None:
        own = run.original
        self._wide = {param: dict(entries) for param, entries in own.state.items()}
        self._steps = {param: entries["step"].clone() for param, entries in self._wide.items() if entries}
        super().apply(run)

    def revert(self, run: Run) -> None:
        tail: Any = run.optimizer
        decoded = {
            param: (tail._step_tail().decoded_state(index), run.original.state[param]["step"])
            for index, param in enumerate(tail._params())
            if run.original.state.get(param)
        }
        super().revert(run)
        for param, (averages, step) in decoded.items():
            entries: dict[str, Any] = self._wide.get(param) or {}
            untrained = entries and torch.equal(step, self._steps[param])
            fresh: dict[str, Tensor] = {"step": step.clone()}
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                if name in averages:
                    fresh[name] = entries[name] if untrained else averages[name]
            for name, value in fresh.items():
                if name in entries:
                    entries[name].copy_(value)
                    fresh[name] = entries[name]
            run.original.state[param].clear()
            run.original.state[param].update(fresh)
