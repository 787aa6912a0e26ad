"""Holds a training run's whole state while things are tried on it, puts it back, and proves that by hash."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..model.parking import park, rest
from ..model.reach import Reach, position
from ..model.snapshot import Entry, Snapshot, entries, flat, generator_state, has_bytes, stateful, storage_bytes
from ..optim.generators import rng_state
from .record import digest

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Escrow", "gradients_away"]

_NAMED = 6  # of what code reaches, in a sentence


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
    reach : mapping of str to callable
        Functions by name: what their closures, objects, defaults and globals reach is held too. None is left out.
    default_generators : bool
        See `Snapshot`.

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

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *others: Any,
        reach: Mapping[str, Callable[..., Any] | None] | None = None,
        default_generators: bool = True,
    ) -> None:
        named = [
            ("model", model),
            ("optimizer", optimizer),
            *((f"others[{i}]", other) for i, other in enumerate(others)),
            *((name, None if function is None else Reach(function)) for name, function in (reach or {}).items()),
        ]
        roots = [(name, root) for name, root in named if root is not None]
        super().__init__(roots, default_generators=default_generators)
        self._positions = [position(value) for _, value in self.unheld]
        self._held, self._held_by_code = self._parts()
        self.held = _total([*self._held, *self._held_by_code])

    def digest(self) -> str:
        """Hash the present state: values, layouts, containers, random states; 32 hexadecimal digits."""
        own, by_code = self._parts()
        return _total([*own, *by_code])

    def prove(self) -> None:
        """Check that the present state is the one held.

        Raises
        ------
        RuntimeError
            Names the first thing that is not as it was.
        """
        now, _ = self._parts()
        if now == self._held:
            return
        pairs = zip(now, self._held, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(now), len(self._held)))
        place = (self._held if at < len(self._held) else now)[at][0]
        raise RuntimeError(
            f"the training state was not restored: {place} is not as it was. Something outside of the escrow's reach "
            "changes it; the model and optimizer may have been trained on."
        )

    def moved(self) -> list[str]:
        """Return what code reaches and is not as it was: what is not held went on, or something else changes it."""
        now, held = dict(self._parts()[1]), dict(self._held_by_code)
        went_on = [
            f"{path} ({type(value).__qualname__})"
            for (path, value), before in zip(self.unheld, self._positions, strict=True)
            if position(value) != before
        ]
        return went_on + [path for path in held if now.get(path) != held[path]]

    @property
    def covers(self) -> str:
        """What the hash is of, in words."""
        text = "model, optimizer and random generators"
        if not self.reached:
            return text
        more = f" and {len(self.reached) - _NAMED} more" if len(self.reached) > _NAMED else ""
        return f"{text}, and what only your functions reach ({', '.join(self.reached[:_NAMED])}{more})"

    def __enter__(self) -> Escrow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
        self.prove()

    def _parts(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Path and hash of every object of the graph, in order; apart what code alone reaches."""
        states = [(f"{name}.state_dict()", root.state_dict()) for name, root in self.roots if stateful(root)]
        memory: dict[int, int] = {}
        own: list[tuple[str, str]] = []
        by_code: list[tuple[str, str]] = []
        roots = sorted([*self.roots, *states], key=lambda root: isinstance(root[1], Reach))  # code comes last
        for entry in entries(roots):
            (by_code if entry.reached else own).append((entry.path, digest(_content(entry, memory))))
        if self._rng is not None:
            own += ((f"random state of {name}", digest([state])) for name, state in _random_states(self.params))
        return own, by_code


@contextmanager
def gradients_away(run: Run) -> Iterator[None]:
    """Inside, gradients that each step drops before its backward are in files and take no memory; then they are back.

    A step of the user's own may add to them, and what somebody else refers to would not be let go: those stay.
    """
    optimizer = run.original
    plain = type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad and "zero_grad" not in vars(optimizer)
    going = [p for p in run.params if run.own_step is None and plain and _may_go(p)]
    held = [(p, park(p.grad)) for p in going if p.grad is not None]
    try:
        for p, _ in held:
            p.grad = None
        yield
    finally:
        for p, grad in held:
            p.grad = grad.clone()
            rest(grad)


def _may_go(param: Tensor) -> bool:
    """Whether a parameter has a gradient on the host that is dense and nobody else's."""
    grad = param.grad
    if grad is None or type(grad) is not Tensor or not has_bytes(grad) or grad.device.type != "cpu":
        return False
    if grad.requires_grad or grad.__dict__ or grad._is_view():
        return False
    del grad
    alone = torch.zeros(1, requires_grad=True)
    alone.grad = torch.zeros(1)
    return _references(param) == _references(alone)


def _references(param: Tensor) -> tuple[int, int, int]:
    """How many refer to a gradient: in C++, to its memory, in Python."""
    grad = param.grad
    assert grad is not None
    use_count = grad._use_count()  # type: ignore[attr-defined]
    return use_count, torch._C._storage_Use_Count(grad.untyped_storage()._cdata), sys.getrefcount(grad)


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
    if kind in ("opaque", "code"):
        return [f"{name}{id(value)}".encode()]
    if kind == "stateful":
        state = entries([("", value.state_dict())])
        return [name.encode(), *(part for inside in state for part in _content(inside, {}))]
    if kind in ("sequence", "tuple") and not isinstance(value, bytearray) and flat(value):
        return [name.encode(), repr(value).encode()]
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
