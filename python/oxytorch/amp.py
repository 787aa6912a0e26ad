"""Mixed precision: torch's autocast and loss scaler, the levels O0 to O3, and what the hardware multiplies natively."""

from __future__ import annotations

import math
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.utils._pytree import tree_map

from . import _C

__all__ = ["LEVELS", "GradScaler", "Prepared", "autocast", "hardware_support", "prepare", "recommend_dtype"]

_warned: set[tuple[str, torch.dtype | None]] = set()


def recommend_dtype(device: str | torch.device = "cpu") -> tuple[torch.dtype, str]:
    """Return the dtype in which matrix products run best on a device, and why.

    Parameters
    ----------
    device
        A device or its type, such as ``"cpu"`` or ``"cuda"``.

    Returns
    -------
    tuple of torch.dtype and str
        ``torch.bfloat16`` where the hardware multiplies it natively, ``torch.float16`` on an older CUDA device,
        otherwise ``torch.float32``; and one sentence.
    """
    dtype, reason = _C.amp.recommend_dtype(torch.device(device).type)
    return dtype, reason


def hardware_support(device: str | torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    """Return whether a device multiplies a dtype natively, and why.

    Parameters
    ----------
    device
        A device or its type, such as ``"cpu"`` or ``"cuda"``.
    dtype
        ``torch.bfloat16``, ``torch.float16``, ``torch.float32`` or ``torch.float64``.

    Returns
    -------
    tuple of bool and str
        On a CPU bfloat16 needs avx512_bf16 or amx_bf16, float16 needs avx512_fp16 or amx_fp16; on CUDA bfloat16 needs
        compute capability 8.0. One sentence names what is there or missing.

    Raises
    ------
    TypeError
        For another dtype.
    """
    native, reason = _C.amp.hardware_support(torch.device(device).type, dtype)
    return native, reason


class autocast(torch.autocast):
    """torch's ``autocast``, which asks first whether the hardware multiplies the dtype natively.

    Parameters
    ----------
    device_type
        ``"cpu"``, ``"cuda"`` ...
    dtype
        ``torch.bfloat16`` or ``torch.float16``; torch's default for the device where not given.
    enabled, cache_enabled
        As in torch.
    allow_slow
        What to do where the dtype is slower than float32 here. None: one warning a process, so that a script runs
        everywhere. False: refuse. True: say nothing.

    Raises
    ------
    NotImplementedError
        With ``allow_slow=False``, where the hardware does not multiply the dtype natively; names what it lacks.
    """

    def __init__(
        self,
        device_type: str = "cpu",
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        allow_slow: bool | None = None,
    ) -> None:
        super().__init__(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
        key = (device_type, self.fast_dtype)
        if not self._enabled or allow_slow or (allow_slow is None and key in _warned):
            return
        native, reason = hardware_support(device_type, self.fast_dtype)
        if native:
            return
        if allow_slow is not None:
            raise NotImplementedError(f"autocast would be slow: {reason} Use float32, or insist with allow_slow=True.")
        _warned.add(key)
        warnings.warn(f"autocast will be slow: {reason}", stacklevel=2)


class GradScaler(torch.amp.GradScaler):
    """torch's ``GradScaler``; with optimizers of ``oxytorch.optim`` it never reads the device on the host.

    With those, ``step`` hands the scale to the step tail, which unscales, checks and skips on its own: there is no
    separate pass over the gradients, and float16 gradients are served too. Other optimizers are served as in torch.
    ``state_dict`` is torch's and loads both ways; the bounds are settings, not state.

    Parameters
    ----------
    device
        Device type of the scale. Default ``"cpu"``.
    init_scale, growth_factor, backoff_factor, growth_interval, enabled
        As in torch.
    min_scale, max_scale
        Bounds that the scale never leaves; ``None`` for none.

    Raises
    ------
    ValueError
        For ``min_scale`` above ``max_scale``.
    AssertionError
        As in torch, for factors that do not grow and shrink.
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
    ) -> None:
        if min_scale is not None and max_scale is not None and min_scale > max_scale:
            raise ValueError(f"min_scale is {min_scale} and max_scale {max_scale}. Make min_scale the smaller one.")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._min_scale = min_scale
        self._max_scale = max_scale
        self._clamp()

    def _clamp(self) -> None:
        low, high = self._min_scale, self._max_scale
        if not self._enabled or (low is None and high is None):
            return
        self._init_scale = max(self._init_scale, -math.inf if low is None else low)
        self._init_scale = min(self._init_scale, math.inf if high is None else high)
        if self._scale is not None:
            self._scale.clamp_(low, high)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step ``optimizer`` with unscaled gradients unless one of them is not finite.

        Parameters
        ----------
        optimizer
            The optimizer whose gradients came from a scaled loss.
        *args, **kwargs
            Passed on to ``optimizer.step``. A closure is refused, as in torch.

        Returns
        -------
        float or None
            What ``optimizer.step`` returned.

        Raises
        ------
        RuntimeError
            For a second call before ``update()``, or for a closure.
        """
        if not self._enabled or not hasattr(optimizer, "tail_stats"):
            return super().step(optimizer, *args, **kwargs)
        if "closure" in kwargs or args:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        stage = state["stage"]
        if stage is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        target: Any = optimizer
        factor = getattr(optimizer, "grad_scale", None)
        if stage is OptState.READY:
            found = torch.zeros((), dtype=torch.float32, device=scale.device)
            state["found_inf_per_device"] = {scale.device: found}
            factor = scale if factor is None else scale * factor
        else:
            parts = [part.to(scale.device, non_blocking=True) for part in state["found_inf_per_device"].values()]
            found = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
        target.grad_scale = factor
        target.found_inf = found
        try:
            result: float | None = optimizer.step(**kwargs)
        finally:
            del target.grad_scale
            del target.found_inf
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Grow or shrink the scale by what the last steps found, or set it to ``new_scale``.

        Parameters
        ----------
        new_scale
            A number or a 0-dim float32 tensor; ``None`` for torch's rule. Taken into the bounds.
        """
        super().update(float(new_scale) if isinstance(new_scale, int) else new_scale)
        self._clamp()

    def abandon(self) -> None:
        """Forget what was unscaled and stepped since the last update, for a step that was given up."""
        if self._enabled:
            self._per_optimizer_states.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch's; a scale outside of the bounds is taken to the nearer one.

        Raises
        ------
        RuntimeError
            For the empty state of a disabled scaler.
        KeyError
            For a missing entry; nothing is changed then.
        """
        if self._enabled and state_dict:
            for key in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"):
                if key not in state_dict:
                    raise KeyError(f"the GradScaler state has no {key!r}. Pass what state_dict() returned.")
        super().load_state_dict(state_dict)
        self._clamp()


LEVELS = ("O0", "O1", "O2", "O3")

_NARROW = (torch.bfloat16, torch.float16)
# Layers that take float32 weights with 16-bit inputs on every device, and those that do so on CPU alone.
_MIXED = (nn.modules.batchnorm._NormBase,)
_MIXED_ON_CPU = (nn.LayerNorm, nn.GroupNorm)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer: torch's own, or one of a class named so, such as LlamaRMSNorm."""
    if isinstance(module, (*_MIXED, *_MIXED_ON_CPU, nn.RMSNorm)):
        return True
    if next(module.children(), None) is not None or next(module.parameters(recurse=False), None) is None:
        return False
    return re.search(r"norm(\dd)?$", type(module).__name__, re.IGNORECASE) is not None


def _cast(tree: Any, sources: tuple[torch.dtype, ...], target: torch.dtype) -> Any:
    def one(leaf: Any) -> Any:
        return leaf.to(target) if isinstance(leaf, torch.Tensor) and leaf.dtype in sources else leaf

    return tree_map(one, tree)


class _Edge:
    """Casts what enters a module and what leaves it."""

    def __init__(
        self,
        inputs: tuple[torch.dtype, ...],
        inside: torch.dtype,
        outputs: tuple[torch.dtype, ...],
        outside: torch.dtype,
    ) -> None:
        self.inputs, self.inside, self.outputs, self.outside = inputs, inside, outputs, outside

    def skips(self, module: nn.Module, args: Any) -> bool:
        """Whether the module takes its inputs as they are."""
        return isinstance(module, _MIXED_ON_CPU) and len(args) > 0 and getattr(args[0], "is_cpu", False)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.skips(module, args):
            return None
        return _cast(args, self.inputs, self.inside), _cast(kwargs, self.inputs, self.inside)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if self.skips(module, args) else _cast(output, self.outputs, self.outside)

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after)


@dataclass(frozen=True)
class Prepared:
    """What ``prepare`` made: what a loop puts around its own forward, backward and step.

    Attributes
    ----------
    model : torch.nn.Module
        The model that was given, changed in place.
    optimizer : torch.optim.Optimizer or None
        The optimizer that was given.
    level : str
        ``"O0"`` to ``"O3"``.
    dtype : torch.dtype
        The dtype of matrix products; ``torch.float32`` at O0.
    scaler : GradScaler
        Disabled where the level needs no loss scale, so that a loop is the same at all levels.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    level: str
    dtype: torch.dtype
    scaler: GradScaler
    _device: str
    _lines: tuple[str, ...]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context for the forward pass: autocast at O1, nothing at the other levels."""
        if self.level != "O1":
            return nullcontext()
        return autocast(self._device, self.dtype, allow_slow=True)  # prepare has asked already

    def explain(self) -> str:
        """Return what was done and why, a line each."""
        return "\n".join(self._lines)


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    level: str = "O1",
    dtype: torch.dtype | None = None,
    *,
    device: str | torch.device | None = None,
    keep_norm_fp32: bool | None = None,
    allow_slow: bool = False,
) -> Prepared:
    """Put a model and its optimizer on a precision level.

    ===== ====================================== ========= ============================= ===========
    level weights                                forward   optimizer                     loss scale
    ===== ====================================== ========= ============================= ===========
    O0    float32                                float32   as it is                      none
    O1    float32                                autocast  as it is                      for float16
    O2    16-bit, normalisation layers float32   16-bit    keeps float32 master weights  for float16
    O3    16-bit                                 16-bit    updates the 16-bit weights    for float16
    ===== ====================================== ========= ============================= ===========

    At O2 and O3 weights and floating-point buffers change dtype in place. Each parameter stays the same object, so an
    optimizer that holds it already, also one that has stepped, works on; gradients are dropped. Calling the model casts
    its floating-point inputs to the 16-bit dtype and its outputs back to float32, so that the loss is taken in float32.

    Parameters
    ----------
    model
        On one device; to be prepared before it is wrapped in ``DistributedDataParallel`` or compiled.
    optimizer
        At O2 one of ``oxytorch.optim`` with ``master_weights="fp32"``. It may be None, and be made afterwards: master
        weights then start from the 16-bit weights.
    level
        ``"O0"`` to ``"O3"``.
    dtype
        ``torch.bfloat16`` or ``torch.float16``; what ``recommend_dtype`` says where not given.
    device
        Where the model runs; that of its parameters where not given.
    keep_norm_fp32
        O2 and O3: whether normalisation layers keep float32 weights; by default at O2. Meant are torch's, and classes
        whose names end in "Norm". They take 16-bit inputs and give 16-bit outputs: BatchNorm and InstanceNorm, and on
        CPU LayerNorm and GroupNorm, do so by themselves; the others are cast at their edge by forward hooks.
    allow_slow
        Also where the hardware does not multiply the dtype natively.

    Returns
    -------
    Prepared

    Raises
    ------
    NotImplementedError
        Where the hardware does not multiply the dtype natively, naming what it lacks; for an optimizer that cannot
        serve the level, naming one that can. Nothing is changed then, nor in the other cases.
    TypeError
        For a model or dtype of a wrong kind.
    ValueError
        For another level, a model without parameters, on several devices, wrapped or prepared already, or at O0 and O1
        with 16-bit weights.
    """
    if level not in LEVELS:
        raise ValueError(f"the precision level is {level!r}, expected O0, O1, O2 or O3.")
    narrow = level in ("O2", "O3")
    own = _check_model(model, level, narrow)
    where = torch.device(device).type if device is not None else own
    chosen, why = _choose_dtype(level, dtype, where, allow_slow)
    if optimizer is not None:
        _check_optimizer(optimizer, level, chosen)
    kind = str(chosen).removeprefix("torch.")
    how = " by autocast, weights in float32" if level == "O1" else ""
    lines = [f"level {level}: products in {kind}{how}.", why]
    if narrow:
        keep = keep_norm_fp32 if keep_norm_fp32 is not None else level == "O2"
        lines += _narrow(model, optimizer, level, chosen, keep)
    scaler = GradScaler(where, enabled=chosen is torch.float16)
    if scaler.is_enabled():
        lines.append("the loss is scaled, since float16 gradients may underflow.")
    else:
        lines.append(f"no loss scale: {kind} has the range of float32.")
    return Prepared(model, optimizer, level, chosen, scaler, where, tuple(lines))


def _check_model(model: nn.Module, level: str, narrow: bool) -> str:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module.")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(f"the model is wrapped in {type(model).__name__} already. Prepare it before.")
    devices = set()
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} is not initialised yet. Run the model once before.")
        if not narrow and p.dtype in _NARROW:
            raise ValueError(
                f"parameter {name!r} is {p.dtype}, and level {level} keeps weights in float32. Use O2 or O3, or "
                "convert the model with .float() first."
            )
        devices.add(p.device)
    if not devices:
        raise ValueError("the model has no parameters.")
    if len(devices) > 1:
        raise ValueError(f"the parameters are on {len(devices)} devices. Prepare a model on one device.")
    hooks = (getattr(hook, "__self__", None) for m in model.modules() for hook in m._forward_hooks.values())
    if any(isinstance(owner, _Edge) for owner in hooks):
        raise ValueError("the model was prepared already. Prepare a new one.")
    return devices.pop().type


def _choose_dtype(level: str, dtype: torch.dtype | None, device: str, allow_slow: bool) -> tuple[torch.dtype, str]:
    if level == "O0":
        return torch.float32, "nothing is changed."
    advised, why = recommend_dtype(device)
    if dtype is None and advised is torch.float32:
        if not allow_slow:
            raise NotImplementedError(
                f"level {level} does not pay here: {why} Use level O0, or insist with allow_slow=True."
            )
        advised = torch.bfloat16
    chosen = advised if dtype is None else dtype
    if chosen not in _NARROW:
        raise TypeError(f"the dtype of level {level} is {chosen}, expected torch.bfloat16 or torch.float16.")
    native, why = hardware_support(device, chosen)
    if not native and not allow_slow:
        raise NotImplementedError(f"level {level} would be slow: {why} Use level O0, or insist with allow_slow=True.")
    return chosen, why


def _check_optimizer(optimizer: torch.optim.Optimizer, level: str, dtype: torch.dtype) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer.")
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    tail = hasattr(optimizer, "tail_stats")
    masters = tail and _keeps_masters(optimizer)
    if level == "O2" and not masters:
        remedy = 'Give it master_weights="fp32".' if tail else 'Use ox.optim.replace(optimizer, master_weights="fp32").'
        raise NotImplementedError(f"level O2 needs an optimizer with master weights, and {kind} keeps none. {remedy}")
    if level == "O3" and masters:
        raise ValueError("level O3 keeps no master weights, but the optimizer does. Use level O2.")
    scaled = tail or getattr(optimizer, "_step_supports_amp_scaling", False)
    if level == "O3" and dtype is torch.float16 and not scaled:
        raise NotImplementedError(
            f"the loss scale of float16 gradients is not served by {kind}. Use ox.optim.replace(optimizer), or "
            "bfloat16."
        )


def _keeps_masters(optimizer: Any) -> bool:
    return optimizer._tail_options["master_weights"] not in (False, None, "none")


def _narrow(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, level: str, dtype: torch.dtype, keep_norm: bool
) -> list[str]:
    """Convert weights and buffers in place; return what was done."""
    kept = [m for m in model.modules() if keep_norm and _is_norm(m) and (*m.parameters(False), *m.buffers(False))]
    stay = {id(t) for module in kept for t in (*module.parameters(False), *module.buffers(False))}
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    changing = [t for key, t in tensors.items() if key not in stay and t.is_floating_point() and t.dtype != dtype]
    wide = (
        {id(t): t.detach().to(torch.float32, copy=True) for t in changing}
        if level == "O2" and optimizer is not None
        else {}
    )
    for p in model.parameters():
        p.grad = None
    for t in changing:
        t.data = t.data.to(dtype)
    if optimizer is not None:
        _follow(optimizer, {id(t) for t in changing}, wide)
    edge = _Edge(_NARROW, torch.float32, (torch.float32,), dtype)
    for module in kept:
        if not isinstance(module, _MIXED):
            edge.attach(module)
    _Edge((torch.float32, torch.float64), dtype, _NARROW, torch.float32).attach(model)
    kind = str(dtype).removeprefix("torch.")
    lines = [f"{len(changing)} parameters and buffers are {kind}, {len(kept)} normalisation layers are float32."]
    if level == "O3":
        lines.append("the optimizer updates the 16-bit weights: updates below half a unit in the last place are lost.")
    elif optimizer is None:
        lines.append('make an optimizer of oxytorch.optim with master_weights="fp32".')
    else:
        lines.append("the optimizer keeps master weights, started from the float32 weights.")
    return lines


def _follow(optimizer: torch.optim.Optimizer, changed: set[int], wide: dict[int, torch.Tensor]) -> None:
    """Let the state of an optimizer follow parameters that changed dtype."""
    tail = hasattr(optimizer, "tail_stats")
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in changed:
                continue
            state = optimizer.state.get(p, {})
            if tail and id(p) in wide and "master" not in state:
                optimizer.state[p] = {**state, "master": wide[id(p)]}
            elif not tail:
                # As torch's own load_state_dict: moments have the parameter's dtype, the step count keeps its own.
                for key, value in state.items():
                    if key != "step" and isinstance(value, torch.Tensor) and value.is_floating_point():
                        state[key] = value.to(p.dtype)
    if tail:
        optimizer._outdated = True  # type: ignore[attr-defined]
