"""Strategies of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from ... import optim
from ...model.parking import move_to_file, move_to_memory, parked_parts, populate, read_ahead, rest
from ...optim import sharded
from ...optim.slot import OptimizerSlot, narrowed, params_of, plain_step
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
        options["step_in_backward"] = run.updates_in_backward
        if "clip_norm" in taken:
            options["clip_norm"] = run.clip_norm
        if "guard" in taken:
            options["nonfinite"] = run.nonfinite
        if "average" in taken:
            options["ema_decay"] = run.ema_decay
        tail = optim.replace(slot.original, **options)
        if "average" in taken:
            tail.load_ema_state_dict({"ema": dict(enumerate(taken["average"]))})
        tail._accumulating = run.updates_in_backward  # the run says which backward completes gradients
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
    cost="the optimizer's running averages are rounded to 8 bits; the wide ones wait in a file while it may be taken "
    "back.",
)
class Int8State(_Tail):
    """The step tail with running averages of one byte an element: a quarter of the memory to read and write."""

    _options: ClassVar[dict[str, Any]] = {"state_dtype": "int8"}

    def __init__(self) -> None:
        super().__init__()
        self._wide: dict[OptimizerSlot, dict[Tensor, dict[str, Any]]] = {}
        self._steps: dict[OptimizerSlot, dict[Tensor, Tensor]] = {}
        self._is_settled = False  # else the wide averages stay in memory: trials ask for them again and again

    def settle_in(self, run: Run) -> None:  # noqa: ARG002
        self._is_settled = True
        for slot in self._wide:
            self._let_wait(slot)

    def _let_wait(self, slot: OptimizerSlot) -> None:
        cast(Any, slot.optimizer)._step_tail()  # has its own averages then, made of the wide ones
        _to_files(self._wide[slot])

    def fits(self, run: Run, slot: OptimizerSlot) -> bool | str:
        if not isinstance(slot.original, torch.optim.Adam):
            return f"{type(slot.original).__name__} is not Adam or AdamW"
        return super().fits(run, slot)

    def put(self, run: Run, slot: OptimizerSlot) -> None:
        wide = {param: dict(entries) for param, entries in slot.original.state.items()}
        self._wide[slot] = wide
        self._steps[slot] = {param: entries["step"].clone() for param, entries in wide.items() if entries}
        super().put(run, slot)
        if self._is_settled:
            self._let_wait(slot)

    def take_back(self, run: Run, slot: OptimizerSlot) -> None:
        own = slot.original
        native, params = cast(Any, slot.optimizer)._step_tail(), cast(Any, slot.optimizer)._params()
        steps = {i: own.state[param]["step"] for i, param in enumerate(params) if own.state.get(param)}
        super().take_back(run, slot)
        wide, since = self._wide.pop(slot), self._steps.pop(slot)
        for index, step in steps.items():  # decoded one at a time
            param = params[index]
            entries: dict[str, Any] = wide.get(param) or {}
            untrained = entries and torch.equal(step, since[param])
            averages = entries if untrained else native.decoded_state(index)
            fresh: dict[str, Tensor] = {"step": step.clone()}
            fresh |= {k: averages[k] for k in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if k in averages}
            for name, value in fresh.items():
                if name in entries:
                    entries[name].copy_(value)
                    move_to_memory(entries[name])
                    fresh[name] = entries[name]
            own.state[param].clear()
            own.state[param].update(fresh)


def _tensors(state: dict[Tensor, dict[str, Any]], params: Iterable[Tensor] | None = None) -> Iterator[Tensor]:
    """Plain tensors that an optimizer keeps, of all its parameters unless given."""
    chosen = state.values() if params is None else (state.get(p) or {} for p in params)
    return (value for entries in chosen for value in entries.values() if type(value) is Tensor)


def _to_files(state: dict[Tensor, dict[str, Any]]) -> None:
    for tensor in _tensors(state):
        move_to_file(tensor)


def _is_by_parameter(own: torch.optim.Optimizer) -> bool | str:
    """Whether an optimizer is known to step each parameter by itself, or why it is not for a part at a time."""
    if isinstance(own, TailOptimizer):
        return "the optimizer is one of oxytorch.optim already"
    if type(own) not in _TORCH:
        return f"{type(own).__name__} may look at all parameters together"
    if any(group.get("differentiable") for group in own.param_groups):
        return "a differentiable step was asked for"
    return True


@strategy(
    "state_in_file",
    kind="exact",
    group="optimizer",
    settle=2,
    max_speedup=1.0,
    cost="the optimizer's state is in a file, in TMPDIR or /var/tmp, read and written in each step.",
)
class StateInFile(_OfOptimizers):
    """The optimizer's state is in a file, and a part of it at a time in memory. With the goal memory alone."""

    def fits(self, run: Run, slot: OptimizerSlot) -> bool | str:
        if (where := on_device(run, "cpu")) is not True:
            return where
        return _is_by_parameter(slot.original)

    def put(self, run: Run, slot: OptimizerSlot) -> None:  # noqa: ARG002
        own = slot.original
        is_native = type(own) in CLASSES and not _told(own) and not differs(own)
        slot.replace_step(partial(self._step, own, native_step if is_native else plain_step))
        _to_files(own.state)

    def take_back(self, run: Run, slot: OptimizerSlot) -> None:
        for tensor in _tensors(slot.original.state):
            move_to_memory(tensor)
        super().take_back(run, slot)

    def _step(self, own: Any, step: Callable[[Any], Any], closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = self._parts(own)
        for place, part in enumerate(parts, 1):
            for tensor in _tensors(own.state, chain(*parts[place : place + 1])):
                read_ahead(tensor)
            for tensor in _tensors(own.state, part):
                populate(tensor)
            with narrowed(own, part):
                step(own)
            for tensor in _tensors(own.state, part):
                move_to_file(tensor)  # what the step has made
                rest(tensor)
        return loss

    @staticmethod
    def _parts(own: Any) -> list[list[Tensor]]:
        params = [param for param in params_of(own) if param.grad is not None]
        sizes = [sum(t.nbytes for t in _tensors(own.state, [p])) or 2 * p.nbytes for p in params]
        each = iter(params)
        return [list(islice(each, count)) for count in parked_parts(sizes)]


@strategy(
    "update_in_backward",
    kind="trade",
    group="update",
    needs_loop=True,
    settle=2,
    max_speedup=1.0,
    cost="gradients are gone after a step; one that fails in its backward has updated some parameters.",
)
class UpdateInBackward(Strategy):
    """Each parameter is updated when its gradient arrives, and the gradient let go. With the goal memory alone."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def applies(self, run: Run) -> bool | str:
        if run.own_step is not None:
            return "the user's own step is called whole"
        if len(run.slots) > 1:
            return "there are several optimizers"
        if why := run.needs_all_gradients:
            return why
        if run.original._optimizer_step_pre_hooks:
            return "the optimizer has hooks that look at gradients before its step"
        if sharded.reduces_after_backward(run.params):
            return "gradients are reduced over processes after they arrive"
        return _is_by_parameter(run.original)

    def apply(self, run: Run) -> None:
        self._switch(run, on=True)
        try:
            for place, param in enumerate(run.params):
                if param.requires_grad:
                    hook = partial(self._arrived, run, place)
                    self._hooks.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        except BaseException:
            self.revert(run)
            raise

    def revert(self, run: Run) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._switch(run, on=False)

    @staticmethod
    def _switch(run: Run, *, on: bool) -> None:
        run.updates_in_backward = on
        if isinstance(run.optimizer, TailOptimizer):
            run.renew("optimizer")

    @staticmethod
    def _arrived(run: Run, place: int, param: Tensor) -> None:
        if run.completes_gradients:
            run.update_begun = True
            run.slots[0].step_one(place)
            param.grad = None
