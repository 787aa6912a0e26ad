"""Strategies of memory layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..strategy import Strategy, strategy
from .observe import observe

if TYPE_CHECKING:
    from ..run import Run

__all__: list[str] = []


class _ChannelsLast(Strategy):
    """Weights, their gradients and optimizer state, and images on the way in, with channels innermost."""

    _dims = 4
    _format = torch.channels_last

    def __init__(self) -> None:
        self._spare: dict[int, tuple[Tensor, Tensor]] = {}
        self._strides: list[tuple[Tensor, tuple[int, ...]]] = []

    def applies(self, run: Run) -> bool | str:
        if not _weights(run, self._dims):
            return f"no weight has {self._dims} dimensions"
        return True if observe(run).uses("convolution") else "the model has no convolution"

    def apply(self, run: Run) -> None:
        weights = _weights(run, self._dims)
        self._strides = [(p, p.stride()) for p in weights]
        for p in weights:
            last = torch.empty(p.shape, dtype=p.dtype, device="meta").to(memory_format=self._format).stride()
            self._lay_out(run, p, last)
        run.call.inputs(self.name, self._convert)

    def revert(self, run: Run) -> None:
        run.call.inputs(self.name, None)
        for p, strides in self._strides:
            self._lay_out(run, p, strides)

    def _convert(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def last(leaf: Any) -> Any:
            image = isinstance(leaf, Tensor) and leaf.dim() == self._dims and leaf.is_floating_point()
            return leaf.contiguous(memory_format=self._format) if image else leaf

        if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
            return (last(args[0]),), kwargs
        return tree_map(last, (args, kwargs))  # type: ignore[no-any-return]

    def _lay_out(self, run: Run, param: Tensor, strides: tuple[int, ...]) -> None:
        state = run.original.state.get(param) or {}
        kept = [value for value in state.values() if isinstance(value, Tensor) and value.shape == param.shape]
        for tensor in (param, *kept):
            self._swap(tensor, strides)
        if param.grad is not None and param.grad.stride() != strides:
            param.grad.data = _strided(param.grad, strides).copy_(param.grad)

    def _swap(self, tensor: Tensor, strides: tuple[int, ...]) -> None:
        """Give a tensor other strides in a memory of its own, which waits while the tensor is in the other one."""
        if tensor.stride() == strides:
            return
        _, data = self._spare.pop(id(tensor), (tensor, None))
        if data is None or data.stride() != strides or data.dtype != tensor.dtype:
            data = _strided(tensor, strides)
        data.copy_(tensor.data)
        self._spare[id(tensor)] = (tensor, tensor.data)
        tensor.data = data


def _strided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def _weights(run: Run, dims: int) -> list[Tensor]:
    """Parameters of so many dimensions that share their memory with no other tensor."""
    return [
        p
        for p in run.model.parameters()
        if p.dim() == dims
        and p.layout is torch.strided
        and p.is_floating_point()
        and not hasattr(p, "__tensor_flatten__")
        and p.untyped_storage().nbytes() == p.numel() * p.element_size()
    ]


@strategy(
    "channels_last",
    kind="tolerance",
    expected_speedup=1.4,
    group="layout",
    interacts=("compile", "bf16_autocast", "allocator", "host_pool"),
    cost="a second copy of the convolutions' weights and their optimizer state is kept while it may be taken back.",
)
class ChannelsLast(_ChannelsLast):
    """Images and the weights of 2-D convolutions with channels innermost."""


@strategy(
    "channels_last_3d",
    kind="tolerance",
    expected_speedup=1.4,
    group="layout",
    interacts=("compile", "bf16_autocast", "allocator", "host_pool"),
    cost="a second copy of the convolutions' weights and their optimizer state is kept while it may be taken back.",
)
class ChannelsLast3d(_ChannelsLast):
    """Volumes and the weights of 3-D convolutions with channels innermost."""

    _dims = 5
    _format = torch.channels_last_3d
