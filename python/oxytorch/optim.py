"""Optimizers whose whole step after backward is one native call.

`AdamW`, `Adam` and `SGD` are the `torch.optim` classes of the same names: subclasses with the same arguments,
`param_groups`, `state_dict`, hooks and schedulers. They take the tail's options besides: clipping by global norm, an
exponential moving average of the parameters, a policy for inf and NaN, statistics. On CPU, fp32 and bf16 parameters
are updated in two passes over memory; other dtypes and devices use torch's own operators with the same algorithm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from ._C import optim as _native
from ._optim_origin import Origin, OriginFinder, TensorFacts, nan_origin

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Origin",
    "OriginFinder",
    "TailOptions",
    "TailStats",
    "TensorFacts",
    "nan_origin",
    "replace",
]


class TailOptions(TypedDict, total=False):
    """Options of the tail that every optimizer here takes.

    Attributes
    ----------
    clip_norm : float or None
        Largest global L2 norm of the gradients; larger ones are scaled down as by ``clip_grad_norm_``.
    ema_decay : float or None
        Decay in [0, 1) of a moving average of the parameters, kept in fp32; see ``ema_weights()``.
    nonfinite : {"skip", "raise", "propagate"}
        What to do with a step whose gradients hold inf or NaN. Under a loss scale it is always skipped.
    collect_stats : bool
        Also take norms of parameters and updates, see ``tail_stats()``.
    zero_grads : bool
        Write zeros over the gradients in the same pass.
    force_composite : bool
        Use torch's operators also where native kernels exist, for comparison.
    """

    clip_norm: float | None
    ema_decay: float | None
    nonfinite: str
    collect_stats: bool
    zero_grads: bool
    force_composite: bool


_TAIL_DEFAULTS: TailOptions = {
    "clip_norm": None,
    "ema_decay": None,
    "nonfinite": "skip",
    "collect_stats": False,
    "zero_grads": False,
    "force_composite": False,
}


def _with_defaults(tail: TailOptions) -> TailOptions:
    unknown = sorted(set(tail) - set(_TAIL_DEFAULTS))
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; the tail takes {', '.join(_TAIL_DEFAULTS)}.")
    return {**_TAIL_DEFAULTS, **tail}


@dataclass(frozen=True)
class TailStats:
    """Results of the last step. The tensors are written in place by each step; clone what you keep.

    Attributes
    ----------
    grad_norm : Tensor
        0-dim float32, global L2 norm of the unscaled gradients before clipping.
    found_inf : Tensor
        0-dim float32, 1 where the step was skipped for inf or NaN.
    skipped : Tensor
        0-dim int64, steps skipped so far.
    grad_norms : Tensor
        float32 [parameters], norm of each unscaled gradient; 0 for a parameter without one.
    param_norms, update_norms : Tensor or None
        float32 [parameters], norms of the new parameters and of what the step added; with ``collect_stats=True``.
    """

    grad_norm: Tensor
    found_inf: Tensor
    skipped: Tensor
    grad_norms: Tensor
    param_norms: Tensor | None = None
    update_norms: Tensor | None = None

    @property
    def update_ratio(self) -> Tensor | None:
        """float32 [parameters], update_norms over param_norms; None without ``collect_stats=True``."""
        if self.param_norms is None or self.update_norms is None:
            return None
        return self.update_norms / self.param_norms.clamp_min(torch.finfo(torch.float32).tiny)


class _Changed:
    """Raised when state that the native tail holds was exchanged from Python."""

    __slots__ = ("raised",)

    def __init__(self) -> None:
        self.raised = True


class _ParamState(dict[str, Any]):
    """State of one parameter: a dict that tells the tail when an entry is replaced."""

    __slots__ = ("_changed",)

    def __init__(self, changed: _Changed, entries: dict[str, Any] | None = None) -> None:
        super().__init__(entries or {})
        self._changed = changed

    def __setitem__(self, key: str, value: Any) -> None:
        self._changed.raised = True
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._changed.raised = True
        super().__delitem__(key)

    def pop(self, *args: Any) -> Any:
        self._changed.raised = True
        return super().pop(*args)

    def clear(self) -> None:
        self._changed.raised = True
        super().clear()

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._changed.raised = True
        super().update(*args, **kwargs)


class _StateMap(defaultdict[Tensor, Any]):
    """torch's `Optimizer.state`, which tells the tail when a parameter's state is replaced."""

    def __init__(self, changed: _Changed, entries: dict[Tensor, dict[str, Any]]) -> None:
        super().__init__(lambda: _ParamState(changed))
        self._changed = changed
        for param, state in entries.items():
            super().__setitem__(param, _ParamState(changed, state) if isinstance(state, dict) else state)

    def __setitem__(self, key: Tensor, value: Any) -> None:
        self._changed.raised = True
        super().__setitem__(key, _ParamState(self._changed, value) if type(value) is dict else value)

    def __delitem__(self, key: Tensor) -> None:
        self._changed.raised = True
        super().__delitem__(key)

    def clear(self) -> None:
        self._changed.raised = True
        super().clear()


def _plain(state: Any) -> Any:
    return dict(state) if isinstance(state, dict) else state


class _TailOptimizer(torch.optim.Optimizer):
    """What the optimizers here add to torch's: the native tail in place of `step`."""

    _step_supports_amp_scaling = True
    _algorithm: str = "adam"
    _tail: _native.StepTail | None = None
    _tail_options: TailOptions
    _loaded_ema: list[Tensor | None] | None = None
    _built_params: list[Tensor]

    def _init_tail(self, tail: TailOptions) -> None:
        self._tail_options = _with_defaults(tail)
        self._watch_state()
        self._new_tail()  # refuses bad options here, where they were written

    def _new_tail(self) -> _native.StepTail:
        options = self._tail_options
        clip_norm, ema_decay = options["clip_norm"], options["ema_decay"]
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm is {clip_norm}; give a number above 0, or None for no clipping.")
        return _native.StepTail(
            self._algorithm,
            clip_norm=clip_norm or 0.0,
            ema_decay=ema_decay or 0.0,
            nonfinite=options["nonfinite"],
            collect_stats=bool(options["collect_stats"]),
            zero_grads=bool(options["zero_grads"]),
            force_composite=bool(options["force_composite"]),
        )

    def _watch_state(self) -> None:
        self._changed = _Changed()
        self.state = _StateMap(self._changed, self.state)
        self._watched = self.state

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _averages(self) -> list[Tensor | None]:
        if self._loaded_ema is not None:
            return self._loaded_ema
        if self._tail is None:
            return [None] * len(self._params())
        return [self._tail.ema(i) for i in range(self._tail.param_count)]

    def _build(self) -> _native.StepTail:
        """Hand parameters, groups and state to a new native tail."""
        old = {}
        if self._tail is not None and self._loaded_ema is None:
            old = {id(p): self._tail.ema(i) for i, p in enumerate(self._built_params)}
        tail = self._new_tail()
        for group in self.param_groups:
            tail.add_group(group)
        if self.state is not self._watched:
            self._watch_state()
        params = self._params()
        for i, param in enumerate(params):
            ema = self._loaded_ema[i] if self._loaded_ema is not None else old.get(id(param))
            state = self.state.get(param) or {}
            if state or ema is not None:
                tail.set_state(i, {k: v for k, v in state.items() if isinstance(v, Tensor)}, ema)
        self._tail = tail
        self._built_params: list[Tensor] = params
        self._loaded_ema = None
        self._changed.raised = False
        return tail

    def _publish_state(self, tail: _native.StepTail) -> None:
        """Show the state that the tail made in torch's `state`."""
        for i, param in enumerate(self._built_params):
            made = tail.state(i)
            if made and len(self.state.get(param) or {}) != len(made):
                self.state[param] = made
        self._changed.raised = False

    def _step_tail(self) -> _native.StepTail:
        tail = self._tail
        if tail is None or self._changed.raised or self.state is not self._watched:
            return self._build()
        return tail if tail.matches(self.param_groups) else self._build()

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
            A sparse gradient.
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
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        if tail.step(self.param_groups, grad_scale, found_inf):
            self._publish_state(tail)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch."""
        super().add_param_group(param_group)
        if self._tail is not None:
            self._changed.raised = True

    def state_dict(self) -> dict[str, Any]:
        """State and hyperparameters exactly as the torch optimizer of the same name would give them."""
        result = super().state_dict()
        result["state"] = {key: _plain(value) for key, value in result["state"].items()}
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "state": {param: _plain(state) for param, state in self.state.items()},
            "_tail_options": self._tail_options,
            "_loaded_ema": self._averages(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tail_options = getattr(self, "_tail_options", None) or _with_defaults({})
        if self._tail is not None and "_loaded_ema" not in state:
            state = {**state, "_loaded_ema": self._averages()}
        self._tail = None
        super().__setstate__(state)
        if not isinstance(self.state, defaultdict):
            self.state = defaultdict(dict, self.state)
        self._watch_state()

    def tail_stats(self) -> TailStats:
        """Norms and counters of the last step, on the parameters' device; reading their values is up to you."""
        return TailStats(**self._step_tail().stats())

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
        averages = {i: t for i, t in enumerate(self._averages()) if t is not None}
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
            wide = torch.float64 if params[i].dtype == torch.float64 else torch.float32
            dtype = params[i].dtype if params[i].is_complex() else wide
            loaded[i] = torch.empty_like(params[i], dtype=dtype, requires_grad=False).copy_(average)
        self._loaded_ema = loaded
        self._changed.raised = True


_TAIL_DOC = """

The arguments are torch's, then those of `TailOptions`. ``foreach``, ``fused`` and ``capturable`` are accepted and
change nothing; with ``differentiable=True`` torch's own step runs.
"""


class AdamW(_TailOptimizer, torch.optim.AdamW):
    __doc__ = "`torch.optim.AdamW` with the native step tail." + _TAIL_DOC

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **tail: Unpack[TailOptions],
    ) -> None:
        torch.optim.AdamW.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._init_tail(tail)


class Adam(_TailOptimizer, torch.optim.Adam):
    __doc__ = "`torch.optim.Adam` with the native step tail." + _TAIL_DOC

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **tail: Unpack[TailOptions],
    ) -> None:
        torch.optim.Adam.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=decoupled_weight_decay,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._init_tail(tail)


class SGD(_TailOptimizer, torch.optim.SGD):
    __doc__ = "`torch.optim.SGD` with the native step tail." + _TAIL_DOC
    _algorithm = "sgd"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **tail: Unpack[TailOptions],
    ) -> None:
        torch.optim.SGD.__init__(
            self,
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self._init_tail(tail)


_REPLACEMENTS: dict[type, type[_TailOptimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
}


def replace(optimizer: torch.optim.Optimizer, **tail: Unpack[TailOptions]) -> _TailOptimizer:
    """Return the Oxytorch optimizer of the same algorithm, carrying on where `optimizer` stands.

    Parameter groups are shared, not copied, so a scheduler built on the old optimizer steers the new one; state
    tensors and step hooks are taken over. Stop using the old optimizer's `step`.

    Parameters
    ----------
    optimizer : torch.optim.AdamW, torch.optim.Adam or torch.optim.SGD
        Exactly one of these classes; an Oxytorch optimizer is returned as it is when no option is given.
    **tail
        Options of the tail: ``clip_norm``, ``ema_decay``, ``nonfinite``, ``collect_stats``, ``zero_grads``.

    Raises
    ------
    TypeError
        Another class, or an unknown option.
    ValueError
        A group with ``differentiable=True``, which only torch's own step can serve.
    """
    options = _with_defaults(tail)
    if isinstance(optimizer, _TailOptimizer):
        if tail:
            raise TypeError(f"{type(optimizer).__name__} already is an Oxytorch optimizer; give it its options there.")
        return optimizer
    target = _REPLACEMENTS.get(type(optimizer))
    if target is None:
        known = ", ".join(f"torch.optim.{cls.__name__}" for cls in _REPLACEMENTS)
        kind = type(optimizer)
        raise TypeError(f"no replacement for {kind.__module__}.{kind.__qualname__}; there is one for {known}.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("this optimizer has differentiable=True, which only torch's own step can serve.")
    made = target.__new__(target)
    made._tail_options = options
    hooks = {key: value for key, value in optimizer.__dict__.items() if key.startswith("_optimizer_")}
    made.__setstate__(
        {
            "defaults": optimizer.defaults,
            "state": optimizer.state,
            "param_groups": optimizer.param_groups,
            "_loaded_ema": None,
            **hooks,
        }
    )
    made._new_tail()
    # The scheduler would else warn that its optimizer never steps; it is the replacement that does.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return made
