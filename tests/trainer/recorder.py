"""A graph recorder in Python: notes the operators of a step, takes back what they wrote, and plays them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storages(values: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


class Recorder(TorchDispatchMode):
    """What `torch.cuda.CUDAGraph` does, at the level of operators and for any device.

    Results of the recorded step live on at the same addresses, as in a graph's memory pool.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.fresh: set[int] = set()

    def capture_begin(self) -> None:
        self.random = torch.get_rng_state()
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        for tensor, value in self.before.values():
            tensor.copy_(value)
        torch.set_rng_state(self.random)

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a device value was read by the host while recording")
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tree_leaves(kwargs.get(argument.name) if i >= len(args) else args[i]):
                self.note(tensor)
        result = func(*args, **kwargs)
        self.fresh |= storages(result) - storages((args, kwargs))
        self.calls.append((func, args, kwargs, result))
        return result

    def note(self, tensor: Any) -> None:
        """Keep the value from before the step of a tensor that is about to be written."""
        if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.fresh:
            whole = tensor.detach()
            self.before.setdefault(tensor.untyped_storage()._cdata, (whole, whole.clone()))

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, result in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr() and old.numel():
                        old.detach().copy_(new)
