"""Strategies of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from ... import optim
from ...optim.slot import OptimizerSlot, plain_step
from ...optim.tail import TailOptimizer
from ..native_step import CLASSES, differs, native_step
from ..observe import on_device
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


class _OfOptimizers(Strategy):
    """Acts on each optimizer of the run that it fits."""

    def __init__(self) -> None:
        self._taken: list[OptimizerSlot] = []

    def fits(self, run: Run, slot: OptimizerSlot) -> bool | str:
        """Return True, or why it is not for this one."""
        raise NotImplementedError

    def put(self, run: Run, slot: OptimizerSlot) -> None:
        """Make it active on one, whole or not at all."""
        raise NotImplementedError

    def take_back(self, run: Run, slot: OptimizerSlot) -> None:  # noqa: ARG002
        """Let the optimizer itself step again."""
        slot.replace_step(None)

    def applies(self, run: Run) -> bool | str:
        whys = [(slot.name, self.fits(run, slot)) for slot in run.slots]
        if any(why is True for _, why in whys):
            return True
        return "; ".join(f"{name}: {why}" if name else str(why) for name, why in whys)

    def apply(self, run: Run) -> None:
        try:
            for slot in run.slots:
                if len(run.slots) == 1 or self.fits(run, slot) is True:
                    self.put(run, slot)
                    self._taken.append(slot)
        except BaseException:
            self.revert(run)
            raise

    def revert(self, run: Run) -> None:
        failure: Exception | None = None
        while self._taken:
            try:
                self.take_back(run, self._taken.pop())
            except Exception as error:  # noqa: PERF203  (the others are taken back all the same)
                failure = failure or error
        if failure is not None:
            raise failure


@strategy("native_step", kind="exact", group="optimizer", max_speedup=1.8, expected_speedup=1.15)
class NativeStep(_OfOptimizers):
    """Adam, AdamW and SGD in one native pass over each tensor, each term rounded as torch's loop rounds it."""

    def fits(self, run: Run, slot: OptimizerSlot) -> bool | str:
        if (where := on_device(run, "cpu")) is not True:
            return where
        if type(slot.original) not in CLASSES:
            return f"there is no native step of {type(slot.original).__name__}"
        return _told(slot.original) or True

    def put(self, run: Run, slot: OptimizerSlot) -> None:  # noqa: ARG002
        own = slot.original
        if reason := differs(own):
            raise RuntimeError(reason)
        slot.replace_step(lambda closure: native_step(own, closure))


class _Flag(_OfOptimizers):
    """torch's own other implementation of the step: flags of the groups, set while it steps and at no other time."""

    _flag = ""
    _classes: tuple[type, ...] = ()

    def fits(self, run: Run, slot: OptimizerSlot) -> bool | str:  # noqa: ARG002
        if type(slot.original) not in self._classes:
            return f"{type(slot.original).__name__} has no {self._flag} step"
        return _told(slot.original) or True

    def put(self, run: Run, slot: OptimizerSlot) -> None:  # noqa: ARG002
        own = slot.original

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

        slot.replace_step(step)


@strategy("foreach", kind="exact", group="optimizer", max_speedup=1.3, expected_speedup=1.01)
class Foreach(_Flag):
    """torch's optimizer takes all parameters through each operation together."""

    _flag = "foreach"
    _classes = _TORCH

    def fits(self, run: Run, slot: OptimizerSlot) -> bool | str:
        if run.device.type != "cpu":
            return "it is torch's own choice there"
        return super().fits(run, slot)


@strategy("fused", kind="tolerance", group="optimizer", max_speedup=1.5, expected_speedup=1.1)
class Fused(_Flag):
    """torch's fused step: one pass over each parameter."""

    _flag = "fused"
    _classes = _FUSED

    def fits(self, run: Run, slot: OptimizerSlot) -> bool | str:
        if any(not p.is_floating_point() for p in slot.params):
            return "the fused step takes floating-point parameters only"
        return super().fits(run, slot)


class _Tail(_OfOptimizers):
    """The optimizer of oxytorch.optim in place of torch's, with what of the step it can do by itself.

    Where the loop is the plan's that is clipping, the look at the gradients and the moving average; in the user's own
    loop, and with several optimizers, they stay where they are.
    """

    _options: ClassVar[dict[str, Any]] = {}

    def fits(self, run: Run, slot: OptimizerSlot) -> bool | str:  # noqa: ARG002
        own = slot.original
        if isinstance(own, TailOptimizer):
            return "the optimizer is one of oxytorch.optim already"
        name = type(own).__name__
        if getattr(torch.optim, name, None) is not type(own) or not hasattr(optim, name):
            return f"oxytorch.optim has nothing of the state format of {name}"
        if any(group.get("differentiable") for group in own.param_groups):
            return "a differentiable step was asked for"
        return True

    def put(self, run: Run, slot: OptimizerSlot) -> None:
        run.follow()
        alone = run.owns_loop and run.own_step is None and len(run.slots) == 1
        names = ("clip_norm", "guard", "average") if alone else ()
        taken = {name: getattr(run, name) for name in names if getattr(run, name) is not None}
        options: dict[str, Any] = {"nonfinite": "propagate", **run.tail_options, **self._options}
        if "clip_norm" in taken:
            options["clip_norm"] = run.clip_norm
        if "guard" in taken:
            options["nonfinite"] = run.nonfinite
        if "average" in taken:
            options["ema_decay"] = run.ema_decay
        tail = optim.replace(slot.original, **options)
        if "average" in taken:
            tail.load_ema_state_dict({"ema": dict(enumerate(taken["average"]))})
        slot.replace_optimizer(tail)
        for name in taken:
            setattr(run, name, None)
        self._of_run = taken

    def take_back(self, run: Run, slot: OptimizerSlot) -> None:
        tail: Any = slot.optimizer
        if "average" in self._of_run:
            averages = tail.ema_state_dict()["ema"]
            self._of_run["average"] = [averages[i].to(p.dtype) for i, p in enumerate(run.params)]
        if "guard" in self._of_run and run.taken:
            run.skipped += int(tail.tail_stats().skipped)
        for name, value in self._of_run.items():
            setattr(run, name, value)
        slot.replace_optimizer(None)
        tail._give_sparse_momentum()


@strategy(
    "step_tail",
    kind="tolerance",
    group="optimizer",
    interacts=("channels_last",),
    max_speedup=1.8,
    expected_speedup=1.2,
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

    def __init__(self) -> None:
        super().__init__()
        self._wide: dict[OptimizerSlot, dict[Tensor, dict[str, Any]]] = {}
        self._steps: dict[OptimizerSlot, dict[Tensor, Tensor]] = {}

    def fits(self, run: Run, slot: OptimizerSlot) -> bool | str:
        if not isinstance(slot.original, torch.optim.Adam):
            return f"{type(slot.original).__name__} is not Adam or AdamW"
        return super().fits(run, slot)

    def put(self, run: Run, slot: OptimizerSlot) -> None:
        wide = {param: dict(entries) for param, entries in slot.original.state.items()}
        self._wide[slot] = wide
        self._steps[slot] = {param: entries["step"].clone() for param, entries in wide.items() if entries}
        super().put(run, slot)

    def take_back(self, run: Run, slot: OptimizerSlot) -> None:
        own, tail = slot.original, cast(Any, slot.optimizer)
        decoded = {
            param: (tail._step_tail().decoded_state(index), own.state[param]["step"])
            for index, param in enumerate(tail._params())
            if own.state.get(param)
        }
        super().take_back(run, slot)
        for param, (averages, step) in decoded.items():
            entries: dict[str, Any] = self._wide[slot].get(param) or {}
            untrained = entries and torch.equal(step, self._steps[slot][param])
            fresh: dict[str, Tensor] = {"step": step.clone()}
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                if name in averages:
                    fresh[name] = entries[name] if untrained else averages[name]
            for name, value in fresh.items():
                if name in entries:
                    entries[name].copy_(value)
                    fresh[name] = entries[name]
            own.state[param].clear()
            own.state[param].update(fresh)
