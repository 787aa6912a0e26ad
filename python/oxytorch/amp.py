"""Mixed precision: torch's autocast and loss scaler, with unscale, check and skip inside the step tail."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from . import _C

__all__ = ["GradScaler", "autocast", "hardware_support", "recommend_dtype"]

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
    RuntimeError
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
            raise RuntimeError(f"autocast would be slow: {reason} Use float32, or insist with allow_slow=True.")
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
