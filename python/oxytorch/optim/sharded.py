"""Parameters that are shards of larger tensors (DTensor, as FSDP2 makes them): the tail works on the local part."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from .options import TailOptions

__all__ = [
    "Shards",
    "any_sharded",
    "check",
    "is_sharded",
    "like",
    "local",
    "local_as",
    "local_state",
    "reduces_after_backward",
    "refuse_in_backward",
    "shown_state",
]

T = TypeVar("T")


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    # By its attributes: importing torch.distributed.tensor takes a while and is not needed otherwise.
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def any_sharded(params: list[Tensor]) -> bool:
    """Whether some parameter is a DTensor."""
    return any(is_sharded(p) for p in params)


def local(tensor: T) -> T:
    """The local part of a DTensor; anything else as it is."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def _shaped_as_parameter(key: str) -> bool:
    return key != "step" and not key.endswith("_scale")


def like(tensor: Tensor, param: Tensor) -> Tensor:
    """`tensor`, made for the local part of `param`, as a DTensor placed as `param`; as it is where `param` is none."""
    if not is_sharded(param):
        return tensor
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    sharding: Any = param
    return DTensor.from_local(
        tensor, sharding.device_mesh, sharding.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def local_as(tensor: Tensor, param: Tensor) -> Tensor:
    """What of `tensor` belongs to the local part of `param`; it may be whole, or be placed otherwise."""
    if not is_sharded(param) or (not is_sharded(tensor) and tensor.shape == local(param).shape):
        return local(tensor)
    sharding: Any = param
    given: Any = tensor
    if not is_sharded(tensor):
        if tensor.shape != param.shape:
            return tensor  # refused by the native tail, which names it
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415

        given = distribute_tensor(tensor, sharding.device_mesh, sharding.placements, src_data_rank=None)
    elif given.placements != sharding.placements:
        given = given.redistribute(sharding.device_mesh, sharding.placements)
    return local(given)  # type: ignore[no-any-return]


def local_state(state: dict[str, Any], param: Tensor) -> dict[str, Tensor]:
    """The tensors of a parameter's state for its local part."""
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return {key: local_as(t, param) if _shaped_as_parameter(key) else local(t) for key, t in tensors.items()}


def shown_state(state: dict[str, Tensor], param: Tensor) -> dict[str, Tensor]:
    """State of the local part as torch shows it: DTensors, but for counters and scales."""
    return {key: like(t, param) if _shaped_as_parameter(key) else t for key, t in state.items()}


def check(params: list[Tensor], algorithm: str, options: TailOptions) -> None:
    """Refuse what cannot be computed from local parts, naming the parameter."""
    for i, param in enumerate(params):
        if not is_sharded(param):
            continue
        placements = param.placements  # type: ignore[attr-defined]
        if any(p.is_partial() for p in placements):
            raise NotImplementedError(f"parameter {i} is a DTensor with partial values; redistribute it first.")
        split = [p.dim for p in placements if not p.is_replicate()]
        if algorithm == "muon" and split:
            raise NotImplementedError(
                f"parameter {i} is sharded ({placements}); Muon needs whole matrices. Give it replicated parameters."
            )
        if options["agc"] is not None and (any(dim != 0 for dim in split) or (split and param.dim() < 2)):
            raise NotImplementedError(
                f"parameter {i} is sharded through its rows ({placements}); agc needs whole rows. Use clip_norm."
            )


def reduces_after_backward(params: list[Tensor]) -> bool:
    """Whether gradients are of several processes, and so complete only after backward."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return any_sharded(params) or (distributed and torch.distributed.get_world_size() > 1)


def refuse_in_backward(params: list[Tensor]) -> None:
    """Refuse work on gradients as they arrive where they are not complete then."""
    if reduces_after_backward(params):
        raise NotImplementedError(
            "norm_in_backward and step_in_backward see gradients before they are reduced over processes; "
            "use the optimizer without them in a distributed run."
        )


class Shards:
    """The local parts of an optimizer's parameters, and the sum of norms over their meshes."""

    def __init__(self, params: list[Tensor]) -> None:
        self._params = params
        self._locals = [local(p) for p in params]
        # Parameters by the process groups over which they are split.
        self._by_group: dict[tuple[Any, ...], list[int]] = {}
        for i, param in enumerate(params):
            if not is_sharded(param):
                continue
            sharding: Any = param
            groups = tuple(
                sharding.device_mesh.get_group(axis)
                for axis, p in enumerate(sharding.placements)
                if not p.is_replicate()
            )
            if groups:  # a replicated parameter counts once
                self._by_group.setdefault(groups, []).append(i)

    def unmoved(self) -> bool:
        """Whether the local parts are the tensors that were handed over."""
        return all(local(p) is held for p, held in zip(self._params, self._locals, strict=True))

    def lend_gradients(self) -> None:
        """Give the local parts their gradients for the native step."""
        for i, (param, part) in enumerate(zip(self._params, self._locals, strict=True)):
            if part is param or param.grad is None:
                continue
            if param.grad.placements != param.placements:  # type: ignore[attr-defined]
                self.take_back_gradients()
                raise NotImplementedError(
                    f"the gradient of parameter {i} is placed as {param.grad.placements}, "  # type: ignore[attr-defined]
                    f"the parameter as {param.placements}; redistribute the gradient first."  # type: ignore[attr-defined]
                )
            part.grad = local(param.grad)

    def take_back_gradients(self) -> None:
        """The local parts hold no gradient outside a step."""
        for param, part in zip(self._params, self._locals, strict=True):
            if part is not param:
                part.grad = None

    def reduce(self, sums: Tensor) -> Tensor:
        """Sums of squares [parameters] of all shards from those of this process."""
        sums = sums.clone()
        for groups, indices in self._by_group.items():
            part = sums[indices]
            for group in groups:
                torch.distributed.all_reduce(part, group=group)
            sums[indices] = part
        return sums
