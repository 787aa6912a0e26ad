"""Steps of torch's optimizers in native code, with the bits of torch's own loop over tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..optim.slot import params_of, plain_step

__all__ = ["CLASSES", "differs", "native_step"]

CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "dampening")


def native_step(own: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Step as the class of `own`, one of `CLASSES`, does.

    torch's own step is taken where state has still to be made, a gradient is sparse, a number is complex or a
    hyperparameter is a tensor.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    found = [_tensors(own, group) for group in own.param_groups]
    if any(tensors is None for tensors in found):
        return plain_step(own, None if closure is None else lambda: loss)
    for group, tensors in zip(own.param_groups, found, strict=True):
        if tensors:
            _step(own, group, tensors)
    return loss


def _step(own: Any, group: dict[str, Any], tensors: list[list[Tensor]]) -> None:
    if isinstance(own, torch.optim.SGD):
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
        _C.tune.sgd_step(*tensors, **{name: group[name] for name in names})
        return
    beta1, beta2 = group["betas"]
    _C.tune.adam_step(
        *tensors,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled_weight_decay=group.get("decoupled_weight_decay", isinstance(own, torch.optim.AdamW)),
        maximize=group["maximize"],
    )


def _tensors(own: Any, group: dict[str, Any]) -> list[list[Tensor]] | None:
    """Return what the native step takes, in its order; an empty list where no gradient is there, None for torch."""
    params = [p for p in group["params"] if p.grad is not None]
    numbers = [group[name] for name in _NUMBERS if name in group] + list(group.get("betas", ()))
    if any(isinstance(number, Tensor) for number in numbers):
        return None
    if any(p.grad.layout is not torch.strided or p.is_complex() for p in params):
        return None
    if not params:
        return []
    lists = [params, [p.grad for p in params]]
    states = [own.state.get(p) for p in params]
    if isinstance(own, torch.optim.SGD):
        if group["momentum"] == 0:
            return [*lists, []]
        buffers: list[Any] = [state.get("momentum_buffer") if state else None for state in states]
        return None if any(buffer is None for buffer in buffers) else [*lists, buffers]
    if not all(states):
        return None
    wanted = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"]
    return lists + [
        [] if name == "max_exp_avg_sq" and not group["amsgrad"] else [state[name] for state in states]
        for name in wanted
    ]


def differs(own: Any) -> str:
    """Return why the native step may not stand for that of `own`; empty where every bit of a trial agrees.

    The trial is of small tensors with the options of each group, four steps long; `own` is not touched.
    """
    if reason := _C.tune.native_step_differs():
        return str(reason)
    generator = torch.Generator().manual_seed(3)
    start = [[torch.randn(size, generator=generator) for size in (1, 37, 1030)] for _ in own.param_groups]
    grads = [[[torch.randn(t.shape, generator=generator) for t in group] for group in start] for _ in range(4)]

    def trained(step: Callable[[Any], Any]) -> list[Tensor]:
        groups = [
            {**group, "params": [t.clone().requires_grad_() for t in tensors]}
            for group, tensors in zip(own.param_groups, start, strict=True)
        ]
        copy = type(own)(groups, lr=own.defaults["lr"])
        for each in grads:
            for group, values in zip(copy.param_groups, each, strict=True):
                for param, value in zip(group["params"], values, strict=True):
                    param.grad = value.clone()
            step(copy)
        params = params_of(copy)
        held = [v for p in params for v in copy.state[p].values() if isinstance(v, Tensor)]
        return [p.detach() for p in params] + held

    with torch.device("cpu"):
        wanted, found = trained(plain_step), trained(native_step)
    if all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)):
        return ""
    return f"the native step differs from that of {type(own).__name__} of torch {torch.__version__}"
