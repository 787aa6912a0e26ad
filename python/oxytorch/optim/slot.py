"""An optimizer of the user's, and what steps in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as _torchs

from .._C import optim as _native

__all__ = ["OptimizerSlot", "clear_gradients", "clears_as_torch", "narrowed", "params_of", "plain_step", "with_hooks"]

Closure = Callable[[], Any]


def with_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `step` as ``torch.optim.Optimizer.profile_hook_step`` does: hooks are called before it and after it.

    torch also opens a range for the profiler in each step, whether a profiler runs or not, which takes as long as a few
    small operators. Here that is done where one runs.
    """
    recorded = Optimizer.profile_hook_step(step)

    @wraps(step)
    def stepped(own: Any, *args: Any, **kwargs: Any) -> Any:
        if _native.is_recording():
            return recorded(own, *args, **kwargs)
        args = (own, *args)  # hooks are given it too, and may give others
        for before in chain(_torchs._global_optimizer_pre_hooks.values(), own._optimizer_step_pre_hooks.values()):
            instead = before(own, args, kwargs)
            if isinstance(instead, tuple) and len(instead) == 2:
                args, kwargs = instead
            elif instead is not None:
                raise RuntimeError(
                    f"a hook before step returned {instead!r}; it returns None, or a tuple of new arguments and new "
                    "keyword arguments."
                )
        result = step(*args, **kwargs)
        for after in chain(own._optimizer_step_post_hooks.values(), _torchs._global_optimizer_post_hooks.values()):
            after(own, args, kwargs)
        return result

    stepped.hooked = True  # type: ignore[attr-defined]  # torch need not wrap it
    return stepped


def clear_gradients(own: Optimizer, set_to_none: bool = True) -> None:
    """Do what ``torch.optim.Optimizer.zero_grad`` does, in one native call where no profiler shows it."""
    if not (set_to_none and _native.clear_gradients(own.param_groups)):
        Optimizer.zero_grad(own, set_to_none)


def clears_as_torch(optimizer: Optimizer) -> bool:
    """Whether its ``zero_grad`` is neither the user's nor that of a class of the user's."""
    own = vars(optimizer).get("zero_grad", type(optimizer).zero_grad)
    return getattr(own, "__func__", own) in (Optimizer.zero_grad, clear_gradients)


class OptimizerSlot:
    """One optimizer of a training step, which another one may do the work of.

    Parameters
    ----------
    original : torch.optim.Optimizer
        The user's object, which is stepped.
    name : str
        What messages call it, such as "optimizer[1]"; empty where there is one only.

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
        The one that does the work.
    params : list of Tensor
        Its parameters, in its order.
    """

    def __init__(self, original: torch.optim.Optimizer, name: str = "") -> None:
        self.original = original
        self.optimizer = original
        self.name = name
        self.params = params_of(original)
        self._stands_in: Callable[[Closure | None], Any] | None = None
        self._delegate: Any = None
        self._step_before: dict[str, Any] = {}

    def replace_step(self, step: Callable[[Closure | None], Any] | None) -> None:
        """Let ``step(closure)`` do what the user's optimizer object does when stepped; None: itself again.

        Its hooks fire, and learning-rate schedulers made before or meanwhile see it step. Its ``zero_grad``, where that
        is torch's, is one native call meanwhile.
        """
        own = self.original
        if step is None:
            if self._delegate is not None and own.__dict__.get("step") is self._delegate:
                del own.__dict__["step"]
                own.__dict__.update(self._step_before)
            if clears_as_torch(own):
                own.__dict__.pop("zero_grad", None)
            self._stands_in, self._delegate = None, None
            return
        self._stands_in = step
        if self._delegate is None:
            self._step_before = {key: own.__dict__[key] for key in ("step",) if key in own.__dict__}
            self._delegate = MethodType(self._delegated(own.step), own)
            own.step = self._delegate  # type: ignore[method-assign]
            if clears_as_torch(own):
                own.zero_grad = MethodType(clear_gradients, own)  # type: ignore[method-assign]

    def _delegated(self, before: Any) -> Callable[..., Any]:
        def stepped(own: Any, closure: Closure | None = None) -> Any:
            own._opt_called = True
            # A scheduler made meanwhile goes on calling this function after it was taken back.
            return plain_step(own, closure) if self._stands_in is None else self._stands_in(closure)

        delegated = with_hooks(stepped)
        if hasattr(before, "_wrapped_by_lr_sched"):  # its scheduler looks for the mark
            delegated._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return delegated

    def replace_optimizer(self, replacement: torch.optim.Optimizer | None) -> None:
        """Let `replacement` do the steps of the user's optimizer object; None: itself again, with torch's own state.

        `replacement` was made by `oxytorch.optim.replace`, so both share param_groups and state: schedulers, printouts
        and ``state_dict()`` of the user's object hold, edits of either are followed, and a loop that calls its
        ``step()`` goes through the replacement.
        """
        own = self.original
        if self.optimizer is not own:
            for method in ("state_dict", "load_state_dict"):
                own.__dict__.pop(method, None)
            self.optimizer = own
            self.replace_step(None)
        if replacement is None:
            return
        self.optimizer = replacement
        own.state_dict = replacement.state_dict  # type: ignore[method-assign]
        own.load_state_dict = replacement.load_state_dict  # type: ignore[method-assign]
        self.replace_step(lambda closure: plain_step(replacement, closure))

    def step_one(self, place: int) -> None:
        """Let what does the steps do that of one parameter alone, with its gradient; no hook fires.

        One of oxytorch.optim that has taken the place of the user's has ``step_in_backward``, and frees the gradient.
        """
        if self.optimizer is not self.original:
            self.optimizer._grad_ready(place)  # type: ignore[attr-defined]
            return
        with narrowed(self.original, [self.params[place]]):
            plain_step(self.original) if self._stands_in is None else self._stands_in(None)


@contextmanager
def narrowed(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> Iterator[None]:
    """Leave an optimizer's groups with these of its parameters alone, for steps in which each is stepped by itself."""
    chosen = {id(p) for p in params}
    whole = optimizer.param_groups
    own = [[p for p in group["params"] if id(p) in chosen] for group in whole]
    optimizer.param_groups = [{**group, "params": some} for group, some in zip(whole, own, strict=True) if some]
    try:
        yield
    finally:
        optimizer.param_groups = whole


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in their order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def plain_step(optimizer: Any, closure: Closure | None = None) -> Any:
    """Step as the optimizer's class does, without the hooks around it."""
    step = type(optimizer).step
    return (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer, closure)
