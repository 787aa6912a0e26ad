"""A copy of an object graph that training changes (modules, optimizers, tensors, containers), put back bit for bit."""

from __future__ import annotations

import copy
import enum
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from ..optim.generators import rng_state, set_rng_state
from ..optim.tail import TailOptimizer
from .parking import park, rest
from .reach import Binding, Reach, bindings, is_code, is_left_alone, of_classes, unheld

__all__ = ["Entry", "Reach", "Snapshot", "entries"]

_SCALARS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)
_OPAQUE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, Dataset, torch.jit.ScriptFunction)
_OF_TORCH = (nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, Sampler, DataLoader)
_FOREIGN = ("torch", "numpy", "builtins", "threading", "logging", "weakref", "_thread", "pybind11_builtins")
_DATA = ("dataset", "data_source")  # what a loader or sampler only reads
_NATIVE = ("_tail", "_loaded_ema", "_built_params", "_outdated")  # how a step tail keeps what it keeps
_LONG = 1000  # values in a container of plain ones that are held and compared together
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True)
class Entry:
    """One object of the graph: `kind` says how it is held; `again` is its earlier place where it was met before.

    `reached` is it by code alone, see `Reach`: no other root holds it.
    """

    path: str
    value: Any
    kind: str
    again: int | None = None
    reached: bool = False


def entries(roots: Iterable[tuple[str, Any]]) -> Iterator[Entry]:
    """Walk everything that the roots hold, each object once, in an order that depends on the graph alone."""
    seen: dict[int, int] = {}
    keep: list[Any] = []  # ids stay unique while their objects live
    stack = [(path, value, False) for path, value in roots][::-1]
    while stack:
        path, value, reached = stack.pop()
        if isinstance(value, Reach):
            value, reached = value.function, True
        kind = _kind_reached(value) if reached else _kind(value)
        if kind in ("scalar", "opaque"):
            yield Entry(path, value, kind, None, reached)
            continue
        if id(value) in seen:
            yield Entry(path, value, kind, seen[id(value)], reached)
            continue
        seen[id(value)] = len(seen)
        keep.append(value)
        yield Entry(path, value, kind, None, reached)
        inside = _children(path, value, kind)
        if reached:
            inside += [(f"{path}.{one.name}", one.value) for one in _bindings(value, kind) if not one.is_empty]
        stack.extend((name, item, reached) for name, item in reversed(inside))


def _bindings(value: Any, kind: str) -> list[Binding]:
    """What code that is met by `Reach` refers to."""
    return bindings(value) if kind == "code" else of_classes(value) if kind in ("object", "slots") else []


def _kind_reached(value: Any) -> str:
    if is_code(value):
        return "code"
    kind = _kind(value)
    if kind == "object" and not isinstance(value, _OF_TORCH) and is_left_alone(value):
        return "opaque"
    return "stateful" if kind == "opaque" and not isinstance(value, type) and stateful(value) else kind


def _kind(value: Any) -> str:
    if isinstance(value, _SCALARS):
        return "scalar"
    if isinstance(value, Tensor):
        return "tensor"
    for kind, types in (("dict", dict), ("sequence", list | deque), ("tuple", tuple), ("set", set)):
        if isinstance(value, types):
            return kind
    if isinstance(value, bytearray):
        return "sequence"
    if isinstance(value, torch.Generator | random.Random) or _numpy_random(value):
        return "generator"
    if _numpy_array(value):
        return "array"
    if isinstance(value, _OPAQUE):
        return "opaque"
    if not hasattr(value, "__dict__"):
        return "slots" if _slots(value) else "opaque"
    foreign = type(value).__module__.partition(".")[0] in _FOREIGN
    return "opaque" if foreign and not isinstance(value, _OF_TORCH) else "object"


def _children(path: str, value: Any, kind: str) -> list[tuple[str, Any]]:
    if kind == "tensor":
        return _of_tensor(path, value)
    if kind == "dict":
        return [
            (f"{path}[{i if isinstance(key, Tensor) else repr(key)}]", item)
            for i, (key, item) in enumerate(value.items())
        ]
    if kind in ("sequence", "tuple") and not isinstance(value, bytearray):
        return [] if flat(value) else [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    if kind == "slots":
        return [(f"{path}.{name}", item) for name, item in _slot_values(value).items()]
    if kind == "object":
        skip = _DATA if isinstance(value, DataLoader | Sampler) else ()
        native = isinstance(value, TailOptimizer)
        found = {key: item for key, item in vars(value).items() if key not in skip and not (native and key in _NATIVE)}
        inside = [(f"{path}.{key}", item) for key, item in found.items()]
        if native:
            inside += [(f"{path}.ema[{i}]", t) for i, t in enumerate(value._averages())]
            inside += [(f"{path}.copies[{i}]", t) for i, t in enumerate(_copies(value))]
        return inside
    return []


def _slots(value: Any) -> list[str]:
    """Names of the slots of an object of a class that is neither Python's nor torch's."""
    tops = {cls: cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    classes = [cls for cls, top in tops.items() if top not in _FOREIGN and top not in sys.stdlib_module_names]
    slots = [cls.__dict__.get("__slots__", ()) for cls in classes]
    return [name for names in slots for name in ([names] if isinstance(names, str) else names) if name[:2] != "__"]


def _slot_values(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}


def flat(value: Any) -> bool:
    """Whether a long container holds nothing but plain values, which are then no entries of their own."""
    return len(value) > _LONG and all(isinstance(item, _SCALARS) for item in value)


def _copies(optimizer: TailOptimizer) -> list[Tensor | None]:
    tail = optimizer._tail
    return [] if tail is None else [tail.copy(i) for i in range(tail.param_count)]


def _of_tensor(path: str, tensor: Tensor) -> list[tuple[str, Any]]:
    inside: list[tuple[str, Any]] = []
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inside += [(f"{path}.{name}", getattr(tensor, name)) for name in names]
    if tensor.is_leaf:
        inside.append((f"{path}.grad", tensor.grad))
    if tensor.__dict__:
        inside.append((f"{path}.__dict__", tensor.__dict__))
    return inside + [
        (f"{path}.{name}", found) for name in _TENSOR_HOOKS if (found := getattr(tensor, name)) is not None
    ]


def _numpy_random(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)


def _numpy_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject


def has_bytes(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own: not a wrapper of tensors, not meta, not lazy."""
    if hasattr(tensor, "__tensor_flatten__") or nn.parameter.is_lazy(tensor):
        return False
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def storage_bytes(tensor: Tensor) -> Tensor:
    """Return all bytes of the memory that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _words(data: Tensor) -> Tensor:
    return data.view(torch.int64) if data.numel() % 8 == 0 and data.storage_offset() == 0 else data


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two byte tensors are the same; NaN is a pattern like any other."""
    return torch.equal(_words(left), _words(right))


def generator_state(generator: Any) -> Any:
    """Return the state of a generator object of torch, Python or numpy."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


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
        self.hooks = {name: getattr(tensor, name) for name in _TENSOR_HOOKS}

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
    """Holds everything that the roots reach and that training may change, and puts it back.

    Held are tensors (values, memory, layout, gradient, flags, hooks, each memory once however many views it has),
    dicts, lists, sets, deques, numpy arrays, generators, the attributes of modules, optimizers, schedulers, scalers,
    samplers, loaders and of plain Python objects; objects with ``state_dict`` that are roots by that as well; and the
    default random generators. References stay the same objects. A root that is a `Reach` is walked as code: closure
    cells, bound objects, defaults, attributes, the globals that it names, and so on from there. Out of reach: what only
    a data set, a running iterator, a file or another library's native object holds; `unheld` names those.

    Parameters
    ----------
    roots : list of (str, object)
        Names for error messages, and objects.
    default_generators : bool
        Whether to hold torch's, Python's and numpy's default generators; False where other threads draw from them.

    Attributes
    ----------
    reached : list of str
        Places of modules, optimizers, generators and the like that are held by a `Reach` alone.
    unheld : list of (str, object)
        Places and objects that a `Reach` found and that cannot be held.

    Raises
    ------
    ValueError
        For a lazy parameter or buffer, which has no value yet.
    """

    def __init__(self, roots: list[tuple[str, Any]], *, default_generators: bool = True) -> None:
        self.roots = roots
        self._tensors: list[_Tensor] = []
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
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

    def _note(self, entry: Entry) -> None:
        """Note what code alone reaches."""
        if not entry.reached:
            return
        value = entry.value
        if entry.kind == "opaque" and unheld(value) and all(value is not other for _, other in self.unheld):
            self.unheld.append((entry.path, value))
        trains = entry.kind in ("generator", "stateful") or isinstance(value, (*_OF_TORCH, Tensor))
        if isinstance(value, nn.Module):
            trains = any(True for _ in (*value.parameters(), *value.buffers()))
        within = any(entry.path.startswith((f"{path}.", f"{path}[")) for path in self.reached)
        if trains and not within:
            self.reached.append(entry.path)
        self._others += [one.rebind for one in _bindings(value, entry.kind) if one.rebind is not None]

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
        if has_bytes(tensor):
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


def _held_averages(optimizer: TailOptimizer) -> Callable[[], None]:
    """Averages that the native tail made since are forgotten; those that were are held as tensors."""
    held = list(optimizer._averages())

    def restore() -> None:
        now = optimizer._averages()
        if len(now) != len(held) or any(a is not b for a, b in zip(now, held, strict=True)):
            optimizer._loaded_ema = list(held)
            optimizer._outdated = True

    return restore


def stateful(root: Any) -> bool:
    """Whether a root is held by what it gives out itself: no object of torch that is walked."""
    known = isinstance(root, (*_OF_TORCH, torch.Generator))
    return not known and all(callable(getattr(root, name, None)) for name in ("state_dict", "load_state_dict"))


def _held_slots(value: Any) -> Callable[[], None]:
    held = _slot_values(value)

    def restore() -> None:
        for name, item in held.items():
            if getattr(value, name, None) is not item:
                object.__setattr__(value, name, item)
        for name in _slot_values(value).keys() - held.keys():
            object.__delattr__(value, name)

    return restore


def _held_state(root: Any) -> Callable[[], None]:
    state = copy.deepcopy(root.state_dict())
    return lambda: root.load_state_dict(copy.deepcopy(state))
