"""Holds a training run's whole state while things are tried on it, puts it back, and proves that by hash."""

from __future__ import annotations

import pickle
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..model.snapshot import Entry, Snapshot, entries, generator_state, has_bytes, stateful, storage_bytes
from ..optim.generators import rng_state
from .record import digest

__all__ = ["Escrow"]


class Escrow(Snapshot):
    """Everything that steps change of a model, an optimizer and what else a run has, held and put back bit for bit.

    As a context manager it restores and proves at the end, whatever was thrown inside. For what is held and what is
    out of reach see `oxytorch.model.snapshot.Snapshot`.

    Parameters
    ----------
    model : torch.nn.Module
    optimizer : torch.optim.Optimizer
    *others
        GradScaler, schedulers, loaders, ``torch.Generator``, anything with ``state_dict`` and ``load_state_dict``;
        None is left out.

    Attributes
    ----------
    held : str
        Digest of the state at the time of taking.

    Raises
    ------
    ValueError
        For a lazy parameter, which has no value yet.

    Examples
    --------
    >>> with Escrow(model, optimizer, scaler):
    ...     train(10)
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *others: Any) -> None:
        named = [
            ("model", model),
            ("optimizer", optimizer),
            *((f"others[{i}]", other) for i, other in enumerate(others)),
        ]
        super().__init__([(name, root) for name, root in named if root is not None])
        self._held = self._parts()
        self.held = _total(self._held)

    def digest(self) -> str:
        """Hash the present state: values, layouts, containers, random states; 32 hexadecimal digits."""
        return _total(self._parts())

    def prove(self) -> None:
        """Check that the present state is the one held.

        Raises
        ------
        RuntimeError
            Names the first thing that is not as it was.
        """
        now = self._parts()
        if now == self._held:
            return
        pairs = zip(now, self._held, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(now), len(self._held)))
        place = (self._held if at < len(self._held) else now)[at][0]
        raise RuntimeError(
            f"the training state was not restored: {place} is not as it was. Something outside of the escrow's reach "
            "changes it; the model and optimizer may have been trained on."
        )

    def __enter__(self) -> Escrow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
        self.prove()

    def _parts(self) -> list[tuple[str, str]]:
        """Path and hash of every object of the graph, in order."""
        states = [(f"{name}.state_dict()", root.state_dict()) for name, root in self.roots if stateful(root)]
        memory: dict[int, int] = {}
        parts = [(entry.path, digest(_content(entry, memory))) for entry in entries([*self.roots, *states])]
        return [*parts, *((f"random state of {name}", digest([state])) for name, state in _random_states(self.params))]


def _random_states(params: list[Tensor]) -> list[tuple[str, bytes]]:
    state = rng_state(params)
    named = {f"torch on {device}": _bytes_of(bits) for device, bits in state.pop("torch").items()}
    return [*named.items(), *((name, pickle.dumps(value)) for name, value in state.items())]


def _total(parts: list[tuple[str, str]]) -> str:
    return digest(f"{path} {found}\n".encode() for path, found in parts)[:32]


def _content(entry: Entry, memory: dict[int, int]) -> list[Any]:
    """What is hashed of an object itself; what it holds has entries of its own."""
    value, kind = entry.value, entry.kind
    name = f"{type(value).__qualname__}:"
    if entry.again is not None:
        return [f"{name}{entry.again}".encode()]
    if kind == "scalar":
        return [name.encode(), value if isinstance(value, bytes) else repr(value).encode()]
    if kind == "opaque":
        return [f"{name}{id(value)}".encode()]
    if kind == "tensor":
        return [name.encode(), *_of_tensor(value, memory)]
    if kind == "generator":
        state = generator_state(value)
        return [_bytes_of(state) if isinstance(state, Tensor) else pickle.dumps(state)]
    if kind == "array":
        return [f"{name}{value.dtype}{value.shape}".encode(), value.tobytes()]
    if kind == "set":
        return [name.encode(), *sorted(repr(item).encode() for item in value)]
    if isinstance(value, bytearray):
        return [value]
    keys = [id(key) if isinstance(key, Tensor) else key for key in value] if kind == "dict" else ()
    length = len(value) if hasattr(value, "__len__") and kind != "object" else 0
    return [f"{name}{length}{keys!r}".encode()]


def _of_tensor(tensor: Tensor, memory: dict[int, int]) -> list[Any]:
    facts = f"{tensor.dtype}{tuple(tensor.shape)}{tensor.requires_grad}{tensor.device}"
    if not has_bytes(tensor):
        return [facts.encode()]
    place = tensor.untyped_storage()._cdata
    first = place not in memory
    number = memory.setdefault(place, len(memory))
    facts += f"{tensor.stride()}{tensor.storage_offset()}#{number}"
    return [facts.encode(), *([_bytes_of(storage_bytes(tensor.detach()))] if first else [])]


def _bytes_of(data: Tensor) -> Any:
    return data.cpu().numpy().data if data.numel() else b""
