"""Mixed precision: torch's autocast and loss scaler, with unscale, check and skip inside the step tail."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from . import _C

__all__ = ["GradScaler", "autocast", "recommend_dtype"]

_warned: set[str] = set()


def recommend_dtype(device: str | torch.device = "cpu") -> tuple[torch.dtype, str]:
    """Return the dtype in which matrix products run best on a device, and why.

    Parameters
    ----------
    device
        A device or its type, such as ``"cpu"`` or ``"cuda"``.

    Returns
    -------
    tuple of torch.dtype and str
        ``torch.bfloat16`` where the hardware multiplies it natively, otherwise ``torch.float32``; and one sentence.
    """
    dtype, reason = _C.amp.recommend_dtype(torch.device(device).type)
    return dtype, reason


class autocast(torch.autocast):
    """torch's ``autocast``, with one warning where the hardware makes the chosen dtype slow.

    Parameters
    ----------
    device_type
        ``"cpu"``, ``"cuda"`` ...
    dtype
        ``torch.bfloat16`` or ``torch.float16``; torch's default for the device where not given.
    enabled, cache_enabled
        As in torch.
    """

    def __init__(
        self,
        device_type: str = "cpu",
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        super().__init__(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
        if enabled and device_type == "cpu" and "cpu" not in _warned:
            advised, reason = recommend_dtype("cpu")
            if advised is torch.float32:
                _warned.add("cpu")
                warnings.warn(f"autocast on this CPU will be slow. Better {reason}", stacklevel=2)


class GradScaler(torch.amp.GradScaler):
    """torch's ``GradScaler``; with optimizers of ``oxytorch.optim`` it never reads the device on the host.

    With those, ``step`` hands the scale to the step tail, which unscales, checks and skips on its own: there is no
    separate pass over the gradients. Other optimizers are served as in torch. ``state_dict`` is torch's.

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
        if min_scale is not None:
            init_scale = max(init_scale, min_scale)
        if max_scale is not None:
            init_scale = min(init_scale, max_scale)
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._min_scale = min_scale
        self._max_scale = max_scale

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
            A number or a 0-dim float32 tensor; ``None`` for torch's rule.
        """
        super().update(new_scale)
        if self._enabled and self._scale is not None and (self._min_scale is not None or self._max_scale is not None):
            self._scale.clamp_(self._min_scale, self._max_scale)
