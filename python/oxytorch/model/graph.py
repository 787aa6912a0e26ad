"""What training may change of an object graph (modules, optimizers, tensors, containers), walked and hashed."""

from __future__ import annotations

import enum
import hashlib
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from ..optim.tail import TailOptimizer
from .reach import Binding, Reach, bindings, is_code, is_left_alone, of_classes

__all__ = ["Entry", "digest", "digest_of_rng", "entries", "has_bytes", "value_digest"]

_SCALARS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)
_OPAQUE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, Dataset, torch.jit.ScriptFunction)
OF_TORCH = (nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, Sampler, DataLoader)
_FOREIGN = ("torch", "numpy", "builtins", "threading", "logging", "weakref", "_thread", "pybind11_builtins")
_DATA = ("dataset", "data_source")  # what a loader or sampler only reads
# How a step tail keeps what it keeps.
_NATIVE = ("_tail", "_loaded_ema", "_loaded_params", "_built_params", "_outdated")
_LONG = 1000  # values in a container of plain ones that are held and compared together
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


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
            inside += [(f"{path}.{one.name}", one.value) for one in bindings_of(value, kind) if not one.is_empty]
        stack.extend((name, item, reached) for name, item in reversed(inside))


def bindings_of(value: Any, kind: str) -> list[Binding]:
    """What code that is met by `Reach` refers to."""
    return bindings(value) if kind == "code" else of_classes(value) if kind in ("object", "slots") else []


def _kind_reached(value: Any) -> str:
    if is_code(value):
        return "code"
    kind = _kind(value)
    if kind == "object" and not isinstance(value, OF_TORCH) and is_left_alone(value):
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
    return "opaque" if foreign and not isinstance(value, OF_TORCH) else "object"


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
        return [(f"{path}.{name}", item) for name, item in slot_values(value).items()]
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


def slot_values(value: Any) -> dict[str, Any]:
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
    return inside + [(f"{path}.{name}", found) for name in TENSOR_HOOKS if (found := getattr(tensor, name)) is not None]


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


def generator_state(generator: Any) -> Any:
    """Return the state of a generator object of torch, Python or numpy."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def stateful(root: Any) -> bool:
    """Whether a root is held by what it gives out itself: no object of torch that is walked."""
    known = isinstance(root, (*OF_TORCH, torch.Generator))
    return not known and all(callable(getattr(root, name, None)) for name in ("state_dict", "load_state_dict"))


# -- hashes ---------------------------------------------------------------------------------------------------------


def digest(parts: Iterable[Any]) -> str:
    """Hash bytes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def value_digest(value: Any) -> str:
    """Hash a tensor's dtype, shape and bytes; the text of anything else."""
    if not isinstance(value, Tensor):
        return repr(value)
    dense = value.to_dense() if value.is_sparse else value
    flat = dense.contiguous().cpu().reshape(-1)
    bits = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return digest([f"{value.dtype}{tuple(value.shape)}".encode(), bits])


def digest_of_rng(state: Mapping[str, Any]) -> str:
    """Hash what `rng_state` returned."""
    rest = {key: value for key, value in state.items() if key != "torch"}
    return digest([*(bits.cpu().numpy().data for bits in state["torch"].values()), pickle.dumps(rest)])


def content(entry: Entry, memory: dict[int, int]) -> list[Any]:
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
        return [name.encode(), *(part for inside in state for part in content(inside, {}))]
    if kind in ("sequence", "tuple") and not isinstance(value, bytearray) and flat(value):
        return [name.encode(), repr(value).encode()]
    if kind == "tensor":
        return [name.encode(), *_tensor_content(value, memory)]
    if kind == "generator":
        state = generator_state(value)
        return [bytes_of(state) if isinstance(state, Tensor) else pickle.dumps(state)]
    if kind == "array":
        return [f"{name}{value.dtype}{value.shape}".encode(), value.tobytes()]
    if kind == "set":
        return [name.encode(), *sorted(repr(item).encode() for item in value)]
    if isinstance(value, bytearray):
        return [value]
    keys = [id(key) if isinstance(key, Tensor) else key for key in value] if kind == "dict" else ()
    length = len(value) if hasattr(value, "__len__") and kind != "object" else 0
    return [f"{name}{length}{keys!r}".encode()]


def _tensor_content(tensor: Tensor, memory: dict[int, int]) -> list[Any]:
    facts = f"{tensor.dtype}{tuple(tensor.shape)}{tensor.requires_grad}{tensor.device}"
    if not has_bytes(tensor):
        return [facts.encode()]
    place = tensor.untyped_storage()._cdata
    first = place not in memory
    number = memory.setdefault(place, len(memory))
    facts += f"{tensor.stride()}{tensor.storage_offset()}#{number}"
    return [facts.encode(), *([bytes_of(storage_bytes(tensor.detach()))] if first else [])]


def bytes_of(data: Tensor) -> Any:
    return data.cpu().numpy().data if data.numel() else b""
