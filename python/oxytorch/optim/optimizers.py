"""The optimizers: torch's classes of the same names, and Lion, with the native step tail."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .options import TailOptions
from .tail import TailOptimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "Muon", "RMSprop"]


def _with_tail(theirs: type[torch.optim.Optimizer]) -> Callable[..., None]:
    """Return an `__init__` that takes the arguments of torch's class, as this torch has them, and `TailOptions`."""
    signature = inspect.signature(theirs.__init__)

    def __init__(self: TailOptimizer, *args: Any, **kwargs: Any) -> None:
        tail = {name: kwargs.pop(name) for name in list(kwargs) if name not in signature.parameters}
        theirs.__init__(self, *args, **kwargs)
        self._init_tail(cast("TailOptions", tail))

    options = inspect.Parameter("tail", inspect.Parameter.VAR_KEYWORD, annotation="Unpack[TailOptions]")
    shown = signature.replace(parameters=[*signature.parameters.values(), options])
    __init__.__signature__ = shown  # type: ignore[attr-defined]
    return __init__


class AdamW(TailOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` with the native step tail.

    The arguments are torch's, then those of `TailOptions`. ``foreach``, ``fused`` and ``capturable`` are accepted and
    change nothing; with ``differentiable=True`` torch's own step runs.
    """

    _required_state = ("step", "exp_avg", "exp_avg_sq")
    _optional_state = ("max_exp_avg_sq",)
    _required_hyperparameters = ("lr", "betas", "eps", "weight_decay")

    __init__ = _with_tail(torch.optim.AdamW)


class Adam(TailOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` with the native step tail.

    The arguments are torch's, then those of `TailOptions`. ``foreach``, ``fused`` and ``capturable`` are accepted and
    change nothing; with ``differentiable=True`` torch's own step runs.
    """

    _required_state = ("step", "exp_avg", "exp_avg_sq")
    _optional_state = ("max_exp_avg_sq",)
    _required_hyperparameters = ("lr", "betas", "eps", "weight_decay")

    __init__ = _with_tail(torch.optim.Adam)


class SGD(TailOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` with the native step tail.

    The arguments are torch's, then those of `TailOptions`. ``foreach``, ``fused`` and ``capturable`` are accepted and
    change nothing; with ``differentiable=True`` torch's own step runs.
    """

    _algorithm = "sgd"
    _optional_state = ("momentum_buffer",)
    _required_hyperparameters = ("lr", "momentum", "dampening", "weight_decay", "nesterov")

    __init__ = _with_tail(torch.optim.SGD)


class Lion(TailOptimizer):
    """Lion, Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv 2302.06675.

    ``p <- p (1 - lr weight_decay) - lr sign(b1 m + (1 - b1) g)``, then ``m <- b2 m + (1 - b2) g``. The state is
    ``exp_avg``, as in the authors' and the common third-party implementations.

    Parameters
    ----------
    params
        As in torch.
    lr : float or Tensor
        Usually a third to a tenth of AdamW's.
    betas : tuple of float
        b1 and b2, in [0, 1).
    weight_decay : float
        Decoupled; usually three to ten times AdamW's.
    maximize : bool
        Ascend.
    **tail
        Options of the tail, see `TailOptions`.
    """

    _algorithm = "lion"
    _required_state = ("exp_avg",)
    _required_hyperparameters = ("lr", "betas", "weight_decay")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **tail: Unpack[TailOptions],
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Invalid betas: {betas}; each must be in [0, 1).")
        if not weight_decay >= 0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._init_tail(tail)


class Adagrad(TailOptimizer, torch.optim.Adagrad):
    """`torch.optim.Adagrad` with the native step tail.

    The arguments are torch's, then those of `TailOptions`. ``foreach``, ``fused`` and ``capturable`` are accepted and
    change nothing; with ``differentiable=True`` torch's own step runs.
    """

    _algorithm = "adagrad"
    _required_state = ("step", "sum")
    _required_hyperparameters = ("lr", "lr_decay", "weight_decay", "eps")

    __init__ = _with_tail(torch.optim.Adagrad)


class RMSprop(TailOptimizer, torch.optim.RMSprop):
    """`torch.optim.RMSprop` with the native step tail.

    The arguments are torch's, then those of `TailOptions`. ``foreach``, ``fused`` and ``capturable`` are accepted and
    change nothing; with ``differentiable=True`` torch's own step runs.
    """

    _algorithm = "rmsprop"
    _required_state = ("step", "square_avg")
    _optional_state = ("momentum_buffer", "grad_avg")
    _required_hyperparameters = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")

    __init__ = _with_tail(torch.optim.RMSprop)


class Muon(TailOptimizer, torch.optim.Muon):
    """`torch.optim.Muon` with the native step tail.

    The arguments are torch's, then those of `TailOptions`. Matrices of one shape are made orthogonal in one batch.
    """

    _algorithm = "muon"
    _required_state = ("momentum_buffer",)
    _required_hyperparameters = ("lr", "momentum", "weight_decay", "nesterov", "ns_coefficients", "eps", "ns_steps")

    __init__ = _with_tail(torch.optim.Muon)
