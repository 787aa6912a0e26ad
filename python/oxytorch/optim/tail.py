"""What all optimizers here share: the native tail in place of `step`."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from .._C import optim as _native
from . import sharded
from .options import TailOptions, TailStats, native_options, with_defaults
from .slot import clear_gradients, params_of, with_hooks
from .stability import Recovery

__all__ = ["TailOptimizer"]


class TailOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose whole step after backward is one native call.

    Attributes
    ----------
    grad_divisor : float
        Gradients are divided by this: the number of micro-batches summed into them. Default 1.
    skip, norm_limit : Tensor
        If set, one-element tensors on the parameters' device: a step is skipped where ``skip`` is not 0, or where the
        norm of the unscaled gradients is above ``norm_limit``. Read on the device.
    grad_scale, found_inf : Tensor
        If set, as `torch.amp.GradScaler` sets them: gradients are divided by the one; the other, where not 0, skips
        the step, and is set to 1 where inf or NaN is found.
    """

    _step_supports_amp_scaling = True
    _algorithm: str = "adam"
    # Entries that a state must have where it has any, and those that torch may leave out.
    _required_state: tuple[str, ...] = ()
    _optional_state: tuple[str, ...] = ()
    _required_hyperparameters: tuple[str, ...] = ("lr",)

    grad_divisor: float = 1.0
    _tail: _native.StepTail | None = None
    _sharded: sharded.Shards | None = None
    _tail_options: TailOptions
    # Averages that no native tail has yet, and whose they are.
    _loaded_ema: list[Tensor | None] | None = None
    _loaded_params: list[Tensor]
    _built_params: list[Tensor]
    _accumulating = False
    _recovery: Recovery | None = None
    _hooks: list[Any]
    _hooked: list[Tensor]
    # The native tail has to be built anew, though parameters and state may be the same objects.
    _outdated = False
    # The optimizer that this one took the place of, and the groups and state that both had when they were last alike.
    _replaced: torch.optim.Optimizer | None = None
    _shared: tuple[Any, Any] = (None, None)

    # ---- construction

    def _init_tail(self, tail: TailOptions) -> None:
        self._tail_options = with_defaults(tail)
        self._new_tail()  # refuses bad options here, where they were written
        self._install_hooks()

    def _new_tail(self) -> _native.StepTail:
        return _native.StepTail(self._algorithm, native_options(self._tail_options))

    def _params(self) -> list[Tensor]:
        return params_of(self)

    # ---- gradients as they arrive

    @property
    def _works_in_backward(self) -> bool:
        return bool(self._tail_options["norm_in_backward"] or self._tail_options["step_in_backward"])

    def _install_hooks(self) -> None:
        for hook in getattr(self, "_hooks", []):
            hook.remove()
        self._hooks = []
        self._hooked = self._params()
        if not self._works_in_backward:
            return
        sharded.refuse_in_backward(self._params())
        this = weakref.ref(self)  # the parameters outlive the optimizer

        def make(index: int) -> Callable[[Tensor], None]:
            def ready(_: Tensor) -> None:
                optimizer = this()
                if optimizer is not None and not optimizer._accumulating:
                    optimizer._grad_ready(index)

            return ready

        for i, param in enumerate(self._hooked):
            if param.requires_grad:
                hook = param.register_post_accumulate_grad_hook(make(i))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _grad_ready(self, index: int) -> None:
        self._follow_replaced()
        tail = self._tail
        in_step = self._tail_options["step_in_backward"]
        if tail is None or self._outdated or (in_step and not tail.holds_of(self.state, self._built_params[index])):
            tail = self._step_tail()
        if tail.grad_ready(index, self.param_groups, self.grad_divisor):
            self._publish_state(tail, [index])

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context for the backward passes of all micro-batches but the last of a step.

        With ``norm_in_backward`` it saves measuring sums that are not complete; with ``step_in_backward`` it keeps
        them from being applied. Without these options it does nothing.
        """
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    # ---- the native tail and its state

    def _averages(self) -> list[Tensor | None]:
        """In the order that the parameters have now, which may be another one than they had."""
        held: dict[int, Tensor | None] = {}
        if self._loaded_ema is not None:
            held = {id(p): average for p, average in zip(self._loaded_params, self._loaded_ema, strict=True)}
        elif self._tail is not None:
            held = {id(p): self._tail.ema(i) for i, p in enumerate(self._built_params)}
        return [held.get(id(p)) for p in self._params()]

    def _load_averages(self, averages: list[Tensor | None], params: list[Tensor]) -> None:
        self._loaded_ema, self._loaded_params = averages, params
        self._outdated = True

    def _build(self) -> _native.StepTail:
        """Hand parameters, groups and state to a new native tail."""
        copies: dict[int, Tensor | None] = {}
        if self._tail is not None:
            self._give_sparse_momentum()  # by it the new one learns which gradients are sparse
            copies = {id(p): self._tail.copy(i) for i, p in enumerate(self._built_params)}
        params, averages = self._params(), self._averages()
        sharded.check(params, self._algorithm, self._tail_options)
        if self._works_in_backward:  # processes may have been joined since the hooks were installed
            sharded.refuse_in_backward(params)
        tail = self._new_tail()
        for group in self.param_groups:
            tail.add_group(group, [sharded.local(p) for p in group["params"]])
        for i, param in enumerate(params):
            self._give_state(tail, i, param, averages[i], copies.get(id(param)))
        self._sharded = sharded.Shards(params) if sharded.any_sharded(params) else None
        if self._sharded is not None:
            tail.set_norm_reducer(self._sharded.reduce)
        self._tail = tail
        self._built_params = params
        self._loaded_ema = None
        self._publish_state(tail)
        self._outdated = False
        if self._works_in_backward and any(a is not b for a, b in zip_longest(params, self._hooked)):
            self._install_hooks()
        return tail

    def _kept_entries(self, param: Tensor) -> dict[str, Tensor]:
        """What of torch's `state` the tail keeps for a parameter, its local part; other entries are the user's."""
        own = self._entries()
        state = {key: value for key, value in (self.state.get(param) or {}).items() if key in own}
        return sharded.local_state(state, param)

    def _give_state(
        self, tail: _native.StepTail, index: int, param: Tensor, ema: Tensor | None, copy: Tensor | None
    ) -> None:
        state = self._kept_entries(param)
        if state or ema is not None or tail.state(index):
            tail.set_state(index, state, ema, copy)

    def _take_over_state(self, tail: _native.StepTail) -> None:
        """Give the tail what somebody exchanged in torch's `state`."""
        for i, param in enumerate(self._built_params):
            now, held = self._kept_entries(param), tail.state(i)
            if now.keys() != held.keys() or any(now[key] is not held[key] for key in now):
                self._give_state(tail, i, param, tail.ema(i), tail.copy(i))
        self._publish_state(tail)

    def _publish_state(self, tail: _native.StepTail, indices: list[int] | None = None) -> None:
        """Show the state that the tail made or converted in torch's `state`."""
        own = self._entries()
        for i in range(len(self._built_params)) if indices is None else indices:
            param = self._built_params[i]
            made = tail.state(i)
            shown = self.state.get(param)
            if shown is None:
                shown = {}
                if made:
                    self.state[param] = shown
            if made and any(sharded.local(shown.get(key)) is not value for key, value in made.items()):
                users = {key: value for key, value in shown.items() if key not in own}
                shown.clear()  # somebody may hold the dict
                shown.update({**sharded.shown_state(made, param), **users})
        tail.remember(self.state)

    def _entries(self) -> frozenset[str]:
        """Names of all that the tail may keep in torch's `state`."""
        names = (*self._required_state, *self._optional_state)
        return frozenset(("step", "master", "low_bits", *names, *(f"{key}_scale" for key in names)))

    def _order_codes(self) -> None:
        """Undo a new layout of 8-bit codes, which their scales do not follow, before somebody reads or copies them."""
        if self._tail is not None:
            self._tail.order_codes()

    def _step_tail(self) -> _native.StepTail:
        self._follow_replaced()
        tail = self._tail
        if tail is None or self._outdated:
            return self._build()
        if not tail.matches(self.param_groups):
            tail.order_codes()
            return self._build()
        if self._sharded is not None and not self._sharded.unmoved():
            return self._build()
        if not tail.holds(self.state):
            self._take_over_state(tail)
        return tail

    def _follow_replaced(self) -> None:
        """Have the same groups and state as the optimizer that this one took the place of.

        Either object may have been given others: by assignment, or by `load_state_dict`.
        """
        old = self._replaced
        if old is None:
            return
        for name, last in zip(("param_groups", "state"), self._shared, strict=True):
            own, theirs = getattr(self, name), getattr(old, name)
            if own is last:
                setattr(self, name, theirs)
            else:
                setattr(old, name, own)
        self._shared = (self.param_groups, self.state)

    def _give_sparse_momentum(self) -> None:
        """Make the momentum sparse where torch keeps, and with Nesterov's step needs, it so: of sparse gradients."""
        if self._tail is None or self._algorithm != "sgd":
            return
        for i, param in enumerate(self._built_params):
            momentum = (self.state.get(param) or {}).get("momentum_buffer")
            kept = self._tail.decoded_state(i).get("momentum_buffer")
            if isinstance(momentum, Tensor) and kept is not None and kept.is_sparse:
                self.state[param]["momentum_buffer"] = momentum.to_sparse(1)

    # ---- for snapshots: what the tail keeps and `state` does not show

    def _unpublished(self) -> dict[str, Tensor]:
        """Moving averages and low-precision copies by name."""
        tail = self._step_tail()
        tail.order_codes()
        kept = [
            (f"{what} {i}", get(i))
            for i in range(tail.param_count)
            for what, get in (("ema", tail.ema), ("copy", tail.copy))
        ]
        return {name: tensor for name, tensor in kept if tensor is not None}

    def _drop_unpublished(self, known: Container[str]) -> None:
        """Forget the averages that are not `known`: their parameters had not been stepped."""
        averages = self._averages()
        kept = [average if f"ema {i}" in known else None for i, average in enumerate(averages)]
        if any(a is not b for a, b in zip(averages, kept, strict=True)):
            self._load_averages(kept, self._params())

    def _adopt_restored(self) -> None:
        """Take parameters and state as they were just written: masters and low bits belong to these weights."""
        tail = self._step_tail()
        for i, param in enumerate(self._built_params):
            self._give_state(tail, i, param, tail.ema(i), tail.copy(i))
        self._publish_state(tail)

    def _grad_norm(self) -> Tensor:
        norm: Tensor = self._step_tail().stats()["grad_norm"]
        return norm

    # ---- torch.optim.Optimizer

    zero_grad = clear_gradients

    @with_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step: finite check, unscale, clip, update, moving average and statistics in one native call.

        Parameters
        ----------
        closure : callable, optional
            Evaluates the model and returns the loss; called first, with gradients enabled.

        Returns
        -------
        The closure's loss, or None.

        Raises
        ------
        RuntimeError
            A parameter's shape, dtype, device or memory changed, or ``nonfinite="raise"`` met inf or NaN. The
            message names the parameter and nothing was changed.
        NotImplementedError
            A sparse gradient, or an input that the options cannot serve.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(group.get("differentiable") for group in self.param_groups):
            # Differentiating through a step needs torch's own composition of operators.
            super().step(None)
            return loss
        tail = self._step_tail()
        shards = self._sharded
        if shards is not None:
            shards.lend_gradients()
        try:
            created = tail.step(
                self.param_groups,
                getattr(self, "grad_scale", None),
                getattr(self, "found_inf", None),
                getattr(self, "skip", None),
                getattr(self, "norm_limit", None),
                self.grad_divisor,
            )
        finally:
            if shards is not None:
                shards.take_back_gradients()
        if created:
            self._publish_state(tail)
        if self._tail_options["nonfinite"] == "rollback":
            self.recovery.after_step(hasattr(self, "grad_scale") or hasattr(self, "found_inf"))
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch."""
        if hasattr(self, "_tail_options"):
            self._order_codes()
        super().add_param_group(param_group)
        self._outdated = True
        if hasattr(self, "_tail_options") and self._works_in_backward:
            self._install_hooks()

    def state_dict(self) -> dict[str, Any]:
        """State and hyperparameters exactly as the torch optimizer of the same name would give them.

        Where `state_dtype` is ``"int8"`` each average has its scales beside it as ``"<name>_scale"``; with master
        weights there is an entry ``"master"`` or ``"low_bits"``. Averages of sharded parameters are given in fp32
        instead of int8, so that they can be split anew; loading them finds the same bytes again.
        """
        self._follow_replaced()
        self._order_codes()
        result = super().state_dict()
        params = self._params()
        result["state"] = {
            key: self._decoded(key, params[key], state)
            if isinstance(key, int) and sharded.is_sharded(params[key])
            else state
            for key, state in result["state"].items()
        }
        return result

    def _decoded(self, index: int, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        scales = {key for key in state if key.endswith("_scale")}
        if not scales:
            return dict(state)
        wide = sharded.shown_state(self._step_tail().decoded_state(index), param)
        return {key: wide.get(key, value) for key, value in state.items() if key not in scales}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict` of this class or of torch's of the same name, in any state format.

        Raises
        ------
        ValueError
            The dict is of another optimizer, or for other parameters: a different number of groups or parameters, an
            entry that this algorithm does not keep or lacks, or a tensor of another shape. Nothing is changed then.
        """
        self._follow_replaced()
        self._check_loadable(state_dict)
        super().load_state_dict(state_dict)
        # torch gives every tensor the parameter's dtype; codes, scales and masters must keep their own.
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, param in zip(saved, self._params(), strict=True):
            for key, value in (state_dict["state"].get(index) or {}).items():
                if isinstance(value, Tensor) and key != "step" and value.dtype != self.state[param][key].dtype:
                    self.state[param][key] = value.to(param.device)
        self._follow_replaced()

    def _check_loadable(self, state_dict: dict[str, Any]) -> None:
        name = type(self).__name__
        known = self._entries()
        for i, group in enumerate(state_dict["param_groups"]):
            missing = [key for key in self._required_hyperparameters if key not in group]
            if missing:
                raise ValueError(f"group {i} of the state dict has no {missing[0]!r}; it is not one of {name}.")
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, param in zip(saved, self._params(), strict=False):
            state = state_dict["state"].get(index) or {}
            unknown = sorted(set(state) - known)
            missing = [key for key in self._required_state if state and key not in state]
            if unknown or missing:
                wrong = f"has {unknown[0]!r}, which {name} does not keep" if unknown else f"lacks {missing[0]!r}"
                raise ValueError(f"the saved state of parameter {index} {wrong}; it is of another optimizer.")
            for key, value in state.items():
                scale = key.endswith("_scale")
                if scale and sharded.is_sharded(param):
                    raise ValueError(
                        f"{key!r} in the saved state of parameter {index} belongs to int8 state of a whole parameter, "
                        "which cannot be split over processes; save it with state_dtype='fp32' for that."
                    )
                if isinstance(value, Tensor) and key != "step" and not scale and value.shape != param.shape:
                    raise ValueError(
                        f"{key!r} in the saved state of parameter {index} has shape {tuple(value.shape)}; "
                        f"the parameter has {tuple(param.shape)}."
                    )

    def __getstate__(self) -> dict[str, Any]:
        self._order_codes()
        return {
            **super().__getstate__(),
            "_tail_options": self._tail_options,
            "_loaded_ema": self._averages(),
            "grad_divisor": self.grad_divisor,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tail_options = state.get("_tail_options") or getattr(self, "_tail_options", None) or with_defaults({})
        if self._tail is not None and "_loaded_ema" not in state:
            state = {**state, "_loaded_ema": self._averages()}
        self._tail = None
        super().__setstate__(state)
        self._loaded_params = self._params()
        if not isinstance(self.state, defaultdict):
            self.state = defaultdict(dict, self.state)
        self._install_hooks()

    # ---- what the tail gives besides

    def tail_stats(self) -> TailStats:
        """Norms and counters of the last step, on the parameters' device; reading their values is up to you."""
        groups = tuple(i for i, group in enumerate(self.param_groups) for _ in group["params"])
        return TailStats(groups=groups, **self._step_tail().stats())

    @property
    def recovery(self) -> Recovery:
        """The snapshots and events of ``nonfinite="rollback"``; AttributeError with another policy."""
        if self._tail_options["nonfinite"] != "rollback":
            raise AttributeError(f'this {type(self).__name__} was not made with nonfinite="rollback".')
        if self._recovery is None:
            self._recovery = Recovery(self)
        return self._recovery

    def copies(self) -> list[Tensor | None]:
        """The weights in `copy_dtype`, in the order of the parameters and written by each step.

        None for a parameter that was never stepped or has that dtype itself.
        """
        tail = self._step_tail()
        found = [(tail.copy(i), param) for i, param in enumerate(self._built_params)]
        return [None if copy is None else sharded.like(copy, param) for copy, param in found]

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Context in which the parameters hold their moving averages; afterwards they are as before, bit for bit.

        Raises
        ------
        RuntimeError
            Without ``ema_decay``, when nested, or when a step is tried inside.
        """
        tail = self._step_tail()
        tail.apply_ema()
        try:
            yield
        finally:
            tail.restore_parameters()

    def ema_state_dict(self) -> dict[str, Any]:
        """The moving averages: ``{"decay": float, "ema": {parameter index: Tensor}}``."""
        params = self._params()
        averages = {i: sharded.like(t, params[i]) for i, t in enumerate(self._averages()) if t is not None}
        return {"decay": self._tail_options["ema_decay"], "ema": averages}

    def load_ema_state_dict(self, state: dict[str, Any]) -> None:
        """Take over averages given by `ema_state_dict`; tensors are copied.

        Raises
        ------
        ValueError
            An index without a parameter, a missing one, or a shape that is not the parameter's.
        """
        params = self._params()
        unknown = sorted(set(state["ema"]) - set(range(len(params))))
        if unknown:
            raise ValueError(f"moving averages for parameters {unknown}, but the optimizer has {len(params)}.")
        loaded: list[Tensor | None] = [None] * len(params)
        for i, average in state["ema"].items():
            if average.shape != params[i].shape:
                raise ValueError(
                    f"the moving average of parameter {i} has shape {tuple(average.shape)}; "
                    f"the parameter has {tuple(params[i].shape)}."
                )
            param = sharded.local(params[i])
            wide = torch.float64 if param.dtype == torch.float64 else torch.float32
            dtype = param.dtype if param.is_complex() else wide
            loaded[i] = torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(
                sharded.local_as(average, params[i])
            )
        self._load_averages(loaded, params)
