"""A copy of what training changes, put back bit for bit, and proven by hash to be back where that is asked for."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..generators import rng_state, set_rng_state
from ..optim.tail import TailOptimizer
from .graph import (
    OF_TORCH,
    TENSOR_HOOKS,
    Entry,
    bindings_of,
    bytes_of,
    content,
    digest,
    entries,
    generator_state,
    has_bytes,
    slot_values,
    stateful,
    storage_bytes,
)  # fmt: skip
from .parking import park, rest
from .reach import Reach, position, unheld
from .several import numbered

__all__ = ["Snapshot", "snapshot_of_step", "untouched"]

_NAMED = 6  # of what code reaches, in a sentence


def _words(data: Tensor) -> Tensor:
    return data.view(torch.int64) if data.numel() % 8 == 0 and data.storage_offset() == 0 else data


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two byte tensors are the same; NaN is a pattern like any other."""
    return torch.equal(_words(left), _words(right))


def _memories(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors if has_bytes(t)}


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator) or not hasattr(generator, "bit_generator"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


class _Tensor:
    """A tensor's own attributes; its memory is held apart, once for all views of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.data = tensor.data if has_bytes(tensor) else None
        self.grad = tensor.grad if tensor.is_leaf else None
        self.requires_grad = tensor.requires_grad
        self.attributes = dict(tensor.__dict__)
        self.hooks = {name: getattr(tensor, name) for name in TENSOR_HOOKS}

    def restore(self) -> None:
        tensor, data = self.tensor, self.data
        if data is not None and not _same_place(tensor, data):
            tensor.data = data
        if tensor.is_leaf:
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
            if tensor.grad is not self.grad:
                tensor.grad = self.grad
        _restore_dict(tensor.__dict__, self.attributes)
        for name, hooks in self.hooks.items():
            if getattr(tensor, name) is not hooks:
                setattr(tensor, name, hooks)


def _same_place(tensor: Tensor, data: Tensor) -> bool:
    return (
        tensor.data_ptr() == data.data_ptr()
        and tensor.dtype == data.dtype
        and tensor.shape == data.shape
        and tensor.stride() == data.stride()
        and tensor.untyped_storage()._cdata == data.untyped_storage()._cdata
    )


def _restore_dict(live: dict[Any, Any], held: dict[Any, Any]) -> None:
    if len(live) == len(held) and all(
        a is b and x is y for (a, x), (b, y) in zip(live.items(), held.items(), strict=True)
    ):
        return
    live.clear()
    live.update(held)


def _restore_container(live: Any, held: Any) -> None:
    if isinstance(live, dict):
        _restore_dict(live, held)
    elif isinstance(live, set):
        if live != held:
            live.clear()
            live.update(held)
    elif len(live) != len(held) or any(a is not b for a, b in zip(live, held, strict=True)):
        live.clear()
        live.extend(held)


class Snapshot:
    """Holds everything that the roots reach and that training may change, puts it back, and proves it by hash if asked.

    Held are tensors (values, memory, layout, gradient, flags, hooks, each memory once however many views it has),
    dicts, lists, sets, deques, numpy arrays, generators, the attributes of modules, optimizers, schedulers, scalers,
    samplers, loaders and of plain Python objects; objects with ``state_dict`` that are roots by that as well; and the
    default random generators. References stay the same objects. A root that is a `Reach` is walked as code: closure
    cells, bound objects, defaults, attributes, the globals that it names, and so on from there. Out of reach: what only
    a data set, a running iterator, a file or another library's native object holds; `unheld` names those.

    As a context manager it restores at the end, whatever was thrown inside, and proves that where it is hashed.

    Parameters
    ----------
    roots : iterable of (str, object)
        Names for error messages, and objects; None is left out.
    hashed : bool
        Whether to hash the state when it is taken, which `prove` and `moved` compare with. It reads every byte once.
    default_generators : bool
        Whether to hold torch's, Python's and numpy's default generators; False where other threads draw from them.
    leave_out : iterable of torch.Tensor
        Tensors that nothing writes to meanwhile: their memory is not copied.

    Attributes
    ----------
    held : str
        Digest of the state when it was taken; empty where it is not hashed.
    reached : list of str
        Places of modules, optimizers, generators and the like that are held by a `Reach` alone.
    unheld : list of (str, object)
        Places and objects that a `Reach` found and that cannot be held.

    Raises
    ------
    ValueError
        For a lazy parameter or buffer, which has no value yet.

    Examples
    --------
    >>> with Snapshot.of(model, optimizer, scaler):
    ...     train(10)
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        *,
        hashed: bool = False,
        default_generators: bool = True,
        leave_out: Iterable[Tensor] = (),
    ) -> None:
        self.roots = roots = [(name, root) for name, root in roots if root is not None]
        self._tensors: list[_Tensor] = []
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        self._left_out = _memories(leave_out)
        self._containers: list[tuple[Any, Any]] = []
        self._others: list[Callable[[], None]] = []
        self.reached: list[str] = []
        self.unheld: list[tuple[str, Any]] = []
        params: list[Tensor] = []
        for entry in entries(roots):
            if entry.again is None:
                self._hold(entry)
                self._note(entry)
                if isinstance(entry.value, nn.Parameter):
                    params.append(entry.value)
        self._others += [_held_state(root) for _, root in roots if stateful(root)]
        self.params = params
        self._rng = rng_state(params) if default_generators else None
        self._positions = [position(value) for _, value in self.unheld] if hashed else []
        self._held, self._held_by_code = self._parts() if hashed else ([], [])
        self.held = _total([*self._held, *self._held_by_code]) if hashed else ""

    @classmethod
    def of(
        cls,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *others: Any,
        reach: Mapping[str, Callable[..., Any] | None] | None = None,
        hashed: bool = True,
        default_generators: bool = True,
        leave_out: Iterable[Tensor] = (),
    ) -> Snapshot:
        """Take one of a training run.

        Parameters
        ----------
        model : torch.nn.Module or list of them
        optimizer : torch.optim.Optimizer or list of them
        *others
            GradScaler, schedulers, loaders, ``torch.Generator``, anything with ``state_dict`` and ``load_state_dict``.
        reach : mapping of str to callable
            Functions by name: what their closures, objects, defaults and globals reach is held too.
        """
        named = [
            *numbered("model", model),
            *numbered("optimizer", optimizer),
            *numbered("others", others),
            *((name, None if function is None else Reach(function)) for name, function in (reach or {}).items()),
        ]
        return cls(named, hashed=hashed, default_generators=default_generators, leave_out=leave_out)

    def nbytes(self, device: torch.device, leave_out: Iterable[Tensor] = ()) -> int:
        """Return the bytes of the tensors of a device that are held, each memory once, without those of `leave_out`."""
        others = _memories(leave_out)
        held = (live for c, (live, _) in self._memory.items() if c not in others and live.device == device)
        return sum(live.numel() * live.element_size() for live in held)

    def _note(self, entry: Entry) -> None:
        """Note what code alone reaches."""
        if not entry.reached:
            return
        value = entry.value
        if entry.kind == "opaque" and unheld(value) and all(value is not other for _, other in self.unheld):
            self.unheld.append((entry.path, value))
        trains = entry.kind in ("generator", "stateful") or isinstance(value, (*OF_TORCH, Tensor))
        if isinstance(value, nn.Module):
            trains = any(True for _ in (*value.parameters(), *value.buffers()))
        within = any(entry.path.startswith((f"{path}.", f"{path}[")) for path in self.reached)
        if trains and not within:
            self.reached.append(entry.path)
        self._others += [one.rebind for one in bindings_of(value, entry.kind) if one.rebind is not None]

    def _hold(self, entry: Entry) -> None:
        value, kind = entry.value, entry.kind
        if kind == "tensor":
            self._hold_tensor(entry.path, value)
        elif kind == "generator":
            state = generator_state(value)
            self._others.append(lambda: _set_generator_state(value, state))
        elif kind == "array":
            held = value.copy()
            self._others.append(lambda: value.__setitem__(..., held) if value.flags.writeable else None)
        elif kind in ("dict", "sequence", "set"):
            self._containers.append((value, dict(value) if kind == "dict" else value.copy()))
        elif kind == "stateful":
            self._others.append(_held_state(value))
        elif kind == "slots":
            self._others.append(_held_slots(value))
        elif kind == "object":
            self._containers.append((value.__dict__, dict(value.__dict__)))
            if isinstance(value, TailOptimizer):
                value._order_codes()
                self._others.append(_held_averages(value))

    def _hold_tensor(self, path: str, tensor: Tensor) -> None:
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{path} is lazy and has no value yet; run the model once on a batch first.")
        self._tensors.append(_Tensor(tensor))
        if has_bytes(tensor) and tensor.untyped_storage()._cdata not in self._left_out:
            live = storage_bytes(tensor.detach())
            self._memory.setdefault(tensor.untyped_storage()._cdata, (live, park(live)))

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, bit for bit; memory whose bits are as they were is not written."""
        for container, held in self._containers:
            _restore_container(container, held)
        for tensor in self._tensors:
            tensor.restore()
        for live, held in self._memory.values():
            if not same_bits(live, held):
                live.copy_(held)
            rest(held)
        for restore in self._others:
            restore()
        if self._rng is not None:
            set_rng_state(self._rng)

    def digest(self) -> str:
        """Hash the present state: values, layouts, containers, random states; 32 hexadecimal digits."""
        own, by_code = self._parts()
        return _total([*own, *by_code])

    def prove(self) -> None:
        """Check that the present state is the one held.

        Raises
        ------
        RuntimeError
            Names the first thing that is not as it was; also where the snapshot is not hashed.
        """
        if not self.held:
            raise RuntimeError("this snapshot has no hash to compare with; take it with hashed=True.")
        now, _ = self._parts()
        if now == self._held:
            return
        pairs = zip(now, self._held, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(now), len(self._held)))
        place = (self._held if at < len(self._held) else now)[at][0]
        raise RuntimeError(
            f"the training state was not restored: {place} is not as it was. Something outside of the snapshot's reach "
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

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
        if self.held:
            self.prove()

    def _parts(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Path and hash of every object of the graph, in order; apart what code alone reaches."""
        states = [(f"{name}.state_dict()", root.state_dict()) for name, root in self.roots if stateful(root)]
        memory: dict[int, int] = {}
        own: list[tuple[str, str]] = []
        by_code: list[tuple[str, str]] = []
        roots = sorted([*self.roots, *states], key=lambda root: isinstance(root[1], Reach))  # code comes last
        for entry in entries(roots):
            (by_code if entry.reached else own).append((entry.path, digest(content(entry, memory))))
        if self._rng is not None:
            own += ((f"random state of {name}", digest([state])) for name, state in _random_states(self.params))
        return own, by_code


def _held_averages(optimizer: TailOptimizer) -> Callable[[], None]:
    """Averages that the native tail made since are forgotten; those that were are held as tensors."""
    held, params = optimizer._averages(), optimizer._params()

    def restore() -> None:
        now = optimizer._averages()
        if len(now) != len(held) or any(a is not b for a, b in zip(now, held, strict=True)):
            optimizer._load_averages(held, params)

    return restore


def _held_slots(value: Any) -> Callable[[], None]:
    held = slot_values(value)

    def restore() -> None:
        for name, item in held.items():
            if getattr(value, name, None) is not item:
                object.__setattr__(value, name, item)
        for name in slot_values(value).keys() - held.keys():
            object.__delattr__(value, name)

    return restore


def _held_state(root: Any) -> Callable[[], None]:
    state = copy.deepcopy(root.state_dict())
    return lambda: root.load_state_dict(copy.deepcopy(state))


def _random_states(params: list[Tensor]) -> list[tuple[str, bytes]]:
    state = rng_state(params)
    named = {f"torch on {device}": bytes_of(bits) for device, bits in state.pop("torch").items()}
    return [*named.items(), *((name, pickle.dumps(value)) for name, value in state.items())]


def _total(parts: list[tuple[str, str]]) -> str:
    return digest(f"{path} {found}\n".encode() for path, found in parts)[:32]


@contextmanager
def untouched(model: nn.Module) -> Iterator[Snapshot]:
    """Run anything on the model inside; at the end, or when the body throws, the model is what it was.

    Gradients are empty inside.
    """
    with Snapshot.of(model, hashed=False) as snapshot:
        for parameter in model.parameters():
            parameter.grad = None
        yield snapshot


def snapshot_of_step(step: Callable[..., Any], state: Sequence[Any] | None, model: nn.Module | None = None) -> Snapshot:
    """Hold what a training step changes: `state`, or where that is None all that the step reaches; and its model."""
    held = [("step", Reach(step))] if state is None else numbered("state", tuple(state))
    return Snapshot(([] if model is None else [("model", model)]) + held)
