"""Runs a model and leaves it as it was: values, buffers, gradients, attributes, hooks, modes and random states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..optim.generators import rng_state, set_rng_state

Loss = Callable[..., Any]


def is_criterion(loss_fn: object) -> bool:
    """Whether a loss takes (outputs, targets); else it takes (model, batch)."""
    return isinstance(loss_fn, nn.Module) or getattr(loss_fn, "__module__", "") == "torch.nn.functional"


def call(model: nn.Module, example: Any) -> Any:
    """Return the outputs for an example: a dict is keywords, a list or tuple are positions, else one argument."""
    if isinstance(example, dict):
        return model(**example)
    return model(*example) if isinstance(example, tuple | list) else model(example)


def outputs_and_loss(model: nn.Module, example: Any, loss_fn: Loss | None) -> tuple[Any, Tensor | None]:
    """Return what the model gives and the loss; without `loss_fn` the mean square of all floating outputs.

    Raises
    ------
    TypeError
        Where a criterion meets an example that is no (inputs, targets).
    """
    if loss_fn is None:
        outputs = call(model, example)
        floats = [t for t in tensors_in(outputs) if t.is_floating_point() and t.requires_grad]
        return outputs, sum((t.float().square().mean() for t in floats), torch.zeros(())) if floats else None
    if not is_criterion(loss_fn):
        loss = loss_fn(model, example)
        return loss, loss
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise TypeError(
            f"the loss is a criterion, so an example is (inputs, targets); this one is a {type(example).__name__}. "
            "Pass loss_fn(model, batch) for another shape."
        )
    outputs = call(model, example[0])
    return outputs, loss_fn(outputs, example[1])


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors of a nest, of dataclasses and of Hugging Face's outputs too."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    return [t for item in value for t in tensors_in(item)] if isinstance(value, tuple | list) else []


class _Module:
    """One module's attributes: the dict itself, and what its dicts and lists hold."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(module.__dict__)
        self.inside = [(value, value.copy()) for value in self.attributes.values() if isinstance(value, dict | list)]

    def tensors(self) -> Iterator[Tensor]:
        for value in (*self.attributes.values(), *(item for _, copy in self.inside for item in _values(copy))):
            if isinstance(value, Tensor):
                yield value

    def restore(self) -> None:
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for value, copy in self.inside:
            if isinstance(value, dict):
                value.clear()
                value.update(copy)
            else:
                value[:] = copy


def _values(container: dict[Any, Any] | list[Any]) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else container


class Escrow:
    """Holds a copy of everything that a step may change, and puts it back.

    Copied: every tensor that a module holds, in a dict or list of its own too; by reference: attributes, parameters,
    buffers, hooks and submodules; and gradients, training flags and all random generators. Out of reach: objects that
    a module only refers to (a tokeniser, a cache class), and values inside tensor subclasses.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [_Module(module) for module in model.modules()]
        held = {id(t): t for module in self._modules for t in module.tensors()}
        self._copies = [(t, t.data, t.detach().clone(), t._version) for t in held.values() if _copyable(t)]
        self._params = list(model.parameters())
        self._grads = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in self._params]
        self._requires = [(t, t.requires_grad) for t in held.values() if t.is_leaf and t.is_floating_point()]
        self._rng = rng_state(self._params)

    def restore(self) -> None:
        """Put everything back, bit for bit."""
        for module in self._modules:
            module.restore()
        with torch.no_grad():
            for tensor, data, copy, _ in self._copies:
                tensor.data = data
                if not _same_bits(tensor, copy):
                    tensor.copy_(copy)
            for parameter, grad, held in self._grads:
                if grad is not None and held is not None and not _same_bits(grad, held):
                    grad.copy_(held)
                parameter.grad = grad
        for tensor, requires in self._requires:
            tensor.requires_grad_(requires)
        set_rng_state(self._rng)


def _copyable(tensor: Tensor) -> bool:
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper of tensors, such as a quantised weight: never trained
        return False
    return tensor.layout is torch.strided and tensor.device.type != "meta" and not nn.parameter.is_lazy(tensor)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.layout is not torch.strided or left.is_quantized or left.is_complex():
        return False
    if left.dtype.itemsize in (1, 2, 4, 8) and left.is_floating_point():
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
        return torch.equal(left.detach().view(bits), right.view(bits))
    return torch.equal(left, right)


@contextmanager
def untouched(model: nn.Module) -> Iterator[Escrow]:
    """Run anything on the model inside; at the end, or when the body throws, the model is what it was.

    Gradients are empty inside.
    """
    escrow = Escrow(model)
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield escrow
    finally:
        escrow.restore()
