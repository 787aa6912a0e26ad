"""Options of the step tail and its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

__all__ = ["TailOptions", "TailStats", "native_options", "with_defaults"]


class TailOptions(TypedDict, total=False):
    """Options of the tail that every optimizer here takes.

    Attributes
    ----------
    clip_norm, clip_value, agc : float or None
        At most one kind of clipping. ``clip_norm``: largest global L2 norm of the gradients; larger ones are scaled
        down as by ``clip_grad_norm_``. ``clip_value``: largest magnitude of an element, as ``clip_grad_value_``.
        ``agc``: largest ratio of gradient norm to weight norm of each row (of the whole for vectors), adaptive
        clipping of Brock et al. 2021, arXiv 2102.06171.
    agc_eps : float
        Least weight norm that ``agc`` counts with.
    ema_decay : float or None
        Decay in [0, 1) of a moving average of the parameters, kept in fp32; see ``ema_weights()``.
    nonfinite : {"skip", "raise", "rollback", "propagate"}
        What to do with a step whose gradients hold inf or NaN. Under a loss scale it is always skipped.
        ``"rollback"``: it is skipped, and parameters and state go back to a snapshot; see ``recovery``.
    state_dtype : {None, "fp32", "bf16", "int8"}
        How running averages are kept. None: in the parameter's dtype, as torch does (fp32 beside master weights).
        ``"int8"``: one byte an element and a scale for 32; the errors are in docs/kernels.md.
    master_weights : bool or {"fp32", "int8"}
        What is kept beside 16-bit parameters so that small updates are not lost: True or ``"fp32"``, whole fp32
        weights; ``"int8"``, the next 8 bits of bf16 weights. The latter with ``state_dtype="int8"`` takes 7 bytes a
        parameter, a bf16 gradient included.
    copy_dtype : {None, "bf16", "fp16"} or torch.dtype
        Also keep the weights rounded to this dtype, written in the same pass; see ``copies()``.
    stochastic_rounding : bool
        Round bf16 parameters without masters, 8 low bits, bf16 and int8 state up or down at random, unbiased.
    seed : int
        Of the stochastic rounding. The bits depend on seed, parameter, step and element alone, not on the device.
    norm_in_backward : bool
        Take the gradient norm as gradients arrive, while they are in the cache: the step then reads them once.
    step_in_backward : bool
        Update each parameter when its gradient arrives and free the gradient. Serves neither ``clip_norm`` nor a loss
        scale, and needs ``nonfinite="propagate"``.
    collect_stats : bool
        Also take norms of parameters and updates, see ``tail_stats()``.
    zero_grads : bool
        Write zeros over the gradients in the same pass.
    force_composite : bool
        Use torch's operators also where native kernels exist, for comparison.
    """

    clip_norm: float | None
    clip_value: float | None
    agc: float | None
    agc_eps: float
    ema_decay: float | None
    nonfinite: str
    state_dtype: str | None
    master_weights: bool | str
    copy_dtype: str | torch.dtype | None
    stochastic_rounding: bool
    seed: int
    norm_in_backward: bool
    step_in_backward: bool
    collect_stats: bool
    zero_grads: bool
    force_composite: bool


_TAIL_DEFAULTS: TailOptions = {
    "clip_norm": None,
    "clip_value": None,
    "agc": None,
    "agc_eps": 1e-3,
    "ema_decay": None,
    "nonfinite": "skip",
    "state_dtype": None,
    "master_weights": False,
    "copy_dtype": None,
    "stochastic_rounding": False,
    "seed": 0,
    "collect_stats": False,
    "zero_grads": False,
    "norm_in_backward": False,
    "step_in_backward": False,
    "force_composite": False,
}

_POLICIES = ("skip", "raise", "rollback", "propagate")
_COPY_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def with_defaults(tail: TailOptions) -> TailOptions:
    """Complete `tail`; TypeError for an option that does not exist."""
    unknown = sorted(set(tail) - set(_TAIL_DEFAULTS))
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; the tail takes {', '.join(_TAIL_DEFAULTS)}.")
    return {**_TAIL_DEFAULTS, **tail}


def native_options(tail: TailOptions) -> dict[str, Any]:
    """`tail` as the native tail takes it; ValueError or TypeError for a value that cannot be meant."""
    options: dict[str, Any] = dict(tail)
    for limit in ("clip_norm", "clip_value", "agc"):
        value = options[limit]
        if value is not None and not value > 0:
            raise ValueError(f"{limit} is {value}; give a number above 0, or None for no clipping.")
    for name in ("state_dtype", "nonfinite"):
        if options[name] is not None and not isinstance(options[name], str):
            raise TypeError(f"{name} is {options[name]!r}; give one of its names as a string.")
    seed = options["seed"]
    if not isinstance(seed, int):
        raise TypeError(f"seed is {seed!r}; give an integer.")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; give an integer of 64 bits, at least 0.")
    if options["nonfinite"] not in _POLICIES:
        known = ", ".join(map(repr, _POLICIES[:-1]))
        raise ValueError(f"unknown non-finite policy {options['nonfinite']!r}; use {known} or {_POLICIES[-1]!r}.")
    if options["nonfinite"] == "rollback":
        options["nonfinite"] = "skip"  # which the tail does; the way back is `Recovery`'s
    options["state_dtype"] = options["state_dtype"] or "auto"
    masters = options["master_weights"]
    options["master_weights"] = {True: "fp32", False: "none", None: "none"}.get(masters, masters)
    copy = options["copy_dtype"]
    if isinstance(copy, str):
        if copy not in _COPY_DTYPES:
            raise ValueError(f"copy_dtype is {copy!r}; use 'bf16', 'fp16' or a torch.dtype.")
        options["copy_dtype"] = _COPY_DTYPES[copy]
    return options


@dataclass(frozen=True)
class TailStats:
    """Results of the last step. The tensors are written in place by each step; clone what you keep.

    Attributes
    ----------
    grad_norm : Tensor
        0-dim float32, global L2 norm of the unscaled gradients before clipping.
    found_inf : Tensor
        0-dim float32, 1 where the step was skipped for inf or NaN.
    applied : Tensor
        0-dim float32, 0 where the step was skipped for any reason, else 1.
    skipped : Tensor
        0-dim int64, steps skipped so far.
    grad_norms : Tensor
        float32 [parameters], norm of each unscaled gradient; 0 for a parameter without one.
    groups : tuple of int
        Index of each parameter's group.
    param_norms, update_norms : Tensor or None
        float32 [parameters], norms of the new parameters and of what the step added; with ``collect_stats=True``.
    """

    grad_norm: Tensor
    found_inf: Tensor
    applied: Tensor
    skipped: Tensor
    grad_norms: Tensor
    groups: tuple[int, ...]
    param_norms: Tensor | None = None
    update_norms: Tensor | None = None

    @property
    def update_ratio(self) -> Tensor | None:
        """float32 [parameters], update_norms over param_norms; None without ``collect_stats=True``."""
        if self.param_norms is None or self.update_norms is None:
            return None
        return self.update_norms / self.param_norms.clamp_min(torch.finfo(torch.float32).tiny)

    @property
    def found_infs(self) -> Tensor:
        """Shape [parameters], True where a gradient held inf or NaN."""
        return ~self.grad_norms.isfinite()

    def by_group(self, norms: Tensor) -> Tensor:
        """Shape [groups], the joint norm of each group's parameters from norms of single ones."""
        index = torch.tensor(self.groups, device=norms.device)
        sums = norms.new_zeros(max(self.groups, default=-1) + 1)
        return sums.index_add_(0, index, norms.square()).sqrt_()
