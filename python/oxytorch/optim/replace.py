"""A user's optimizer replaced where it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .optimizers import SGD, Adagrad, Adam, AdamW, Muon, RMSprop
from .options import TailOptions, with_defaults
from .tail import TailOptimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["replace"]

_REPLACEMENTS: dict[type, type[TailOptimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
    torch.optim.RMSprop: RMSprop,
    torch.optim.Muon: Muon,
}


def replace(optimizer: torch.optim.Optimizer, **tail: Unpack[TailOptions]) -> TailOptimizer:
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
    options = with_defaults(tail)
    if isinstance(optimizer, TailOptimizer):
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
