"""The optimizers: torch's classes of the same names, and Lion, with the native step tail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .options import TailOptions
from .tail import TailOptimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "Muon", "RMSprop"]


class AdamW(TailOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` with the native step tail.

    The arguments are torch's, then those of `TailOptions`. ``foreach``, ``fused`` and ``capturable`` are accepted and
    change nothing; with ``differentiable=True`` torch's own step runs.
    """

    _required_state = ("step", "exp_avg", "exp_avg_sq")
    _optional_state = ("max_exp_avg_sq",)
    _required_hyperparameters = ("lr", "betas", "eps", "weight_decay")

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


class Adam(TailOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` with the native step tail.

    The arguments are torch's, then those of `TailOptions`. ``foreach``, ``fused`` and ``capturable`` are accepted and
    change nothing; with ``differentiable=True`` torch's own step runs.
    """

    _required_state = ("step", "exp_avg", "exp_avg_sq")
    _optional_state = ("max_exp_avg_sq",)
    _required_hyperparameters = ("lr", "betas", "eps", "weight_decay")

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


class SGD(TailOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` with the native step tail.

    The arguments are torch's, then those of `TailOptions`. ``foreach``, ``fused`` and ``capturable`` are accepted and
    change nothing; with ``differentiable=True`` torch's own step runs.
    """

    _algorithm = "sgd"
    _optional_state = ("momentum_buffer",)
    _required_hyperparameters = ("lr", "momentum", "dampening", "weight_decay", "nesterov")

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

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **tail: Unpack[TailOptions],
    ) -> None:
        torch.optim.Adagrad.__init__(
            self,
            params,
            lr,
            lr_decay,
            weight_decay,
            initial_accumulator_value,
            eps,
            foreach,
            maximize=maximize,
            differentiable=differentiable,
            fused=fused,
        )
        self._init_tail(tail)


class RMSprop(TailOptimizer, torch.optim.RMSprop):
    """`torch.optim.RMSprop` with the native step tail.

    The arguments are torch's, then those of `TailOptions`. ``foreach``, ``fused`` and ``capturable`` are accepted and
    change nothing; with ``differentiable=True`` torch's own step runs.
    """

    _algorithm = "rmsprop"
    _required_state = ("step", "square_avg")
    _optional_state = ("momentum_buffer", "grad_avg")
    _required_hyperparameters = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **tail: Unpack[TailOptions],
    ) -> None:
        torch.optim.RMSprop.__init__(
            self,
            params,
            lr,
            alpha,
            eps,
            weight_decay,
            momentum,
            centered,
            capturable,
            foreach,
            maximize,
            differentiable,
        )
        self._init_tail(tail)


class Muon(TailOptimizer, torch.optim.Muon):
    """`torch.optim.Muon` with the native step tail.

    The arguments are torch's, then those of `TailOptions`. Matrices of one shape are made orthogonal in one batch.
    """

    _algorithm = "muon"
    _required_state = ("momentum_buffer",)
    _required_hyperparameters = ("lr", "momentum", "weight_decay", "nesterov", "ns_coefficients", "eps", "ns_steps")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **tail: Unpack[TailOptions],
    ) -> None:
        torch.optim.Muon.__init__(
            self,
            params,
            lr,
            weight_decay,
            momentum,
            nesterov,
            ns_coefficients,
            eps,
            ns_steps,
            adjust_lr_fn,
        )
        self._init_tail(tail)
