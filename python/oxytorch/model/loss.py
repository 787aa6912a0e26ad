"""Calls a model on an example, and what its loss is."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[..., Any]


def is_criterion(loss_fn: object) -> bool:
    """Whether a loss takes (outputs, targets): a module, or a function of torch.nn.functional, in partial() or not.

    Any other takes (model, batch).
    """
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    return isinstance(loss_fn, nn.Module) or getattr(loss_fn, "__module__", "") == "torch.nn.functional"


def scalar_loss(loss: object) -> Tensor:
    """Return a loss that is one number in a tensor.

    Raises
    ------
    TypeError
        For what is no tensor, such as a tuple of the loss and more.
    ValueError
        For a tensor of another number of elements.
    """
    if not isinstance(loss, Tensor):
        what = f"a {type(loss).__name__}" + (f" of {len(loss)}" if isinstance(loss, tuple | list | dict) else "")
        alone = ": return the loss alone, without the rest" if isinstance(loss, tuple | list | dict) else ""
        raise TypeError(f"the loss is {what}, expected a scalar torch.Tensor{alone}.")
    if loss.numel() != 1:
        raise ValueError(f"the loss has shape {tuple(loss.shape)}, expected a scalar: reduce it, as .mean() does.")
    return loss


def loss_of(loss_fn: Loss, model: nn.Module | Sequence[nn.Module], batch: Any) -> Tensor:
    """Return ``loss_fn(model, batch)``, or of a list of models.

    Raises
    ------
    TypeError
        Where it throws because it takes the model for outputs, or the batch for targets.
    TypeError, ValueError
        Where the loss is no scalar tensor.
    """
    try:
        loss = loss_fn(model, batch)
    except (TypeError, AttributeError) as error:
        calls = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_locals.get("self") is model]
        in_model = any(frame.f_code.co_name in ("forward", "_wrapped_call_impl") for frame in calls)
        is_one = isinstance(model, nn.Module)
        if not is_one or in_model or not any(type(taken).__name__ in str(error) for taken in (model, batch)):
            raise
        raise TypeError(
            f"loss_fn is called as loss_fn(model, batch), which failed: {error}. If it takes (outputs, targets), pass "
            "lambda model, batch: loss_fn(model(batch[0]), batch[1])."
        ) from error
    return scalar_loss(loss)


def call(model: nn.Module, example: Any) -> Any:
    """Return the outputs for an example: a dict is keywords, a list or tuple are positions, else one argument."""
    if isinstance(example, dict):
        return model(**example)
    return model(*example) if isinstance(example, tuple | list) else model(example)


def outputs_and_loss(model: nn.Module, example: Any, loss_fn: Loss | None) -> tuple[Any, Tensor | None]:
    """Return what the model gives and the loss; without `loss_fn` that of `stand_in_loss`.

    Raises
    ------
    TypeError, ValueError
        Where a criterion meets an example that is no (inputs, targets), or the loss is no scalar tensor.
    """
    if loss_fn is None:
        outputs = call(model, example)
        floats = [t for t in tensors_in(outputs) if t.is_floating_point() and t.requires_grad]
        return outputs, sum((stand_in_loss(t) for t in floats), torch.zeros(())) if floats else None
    if not is_criterion(loss_fn):
        loss = loss_of(loss_fn, model, example)
        return loss, loss
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise TypeError(
            f"the loss is a criterion, so an example is (inputs, targets); this one is a {type(example).__name__}. "
            "Pass loss_fn(model, batch) for another shape."
        )
    outputs = call(model, example[0])
    return outputs, scalar_loss(loss_fn(outputs, example[1]))


def stand_in_loss(output: Tensor) -> Tensor:
    """Return the mean squared distance of an output from a fixed wave.

    Of its own mean square the gradient would be rounding alone behind a normalisation, which keeps that constant.
    """
    wave = torch.arange(output.numel(), device=output.device, dtype=torch.float32).cos_()
    return (output.float() - wave.view(output.shape)).square().mean()


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors of a nest, of dataclasses and of Hugging Face's outputs too."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    return [t for item in value for t in tensors_in(item)] if isinstance(value, tuple | list) else []
