"""What a function can reach beside its arguments: closure cells, its object, defaults, the globals that it names."""

from __future__ import annotations

import functools
import io
import operator
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch.utils.data import Dataset

__all__ = ["Binding", "Reach", "bindings", "is_code", "is_left_alone", "is_library", "of_classes", "position", "unheld"]

_EMPTY = object()  # a cell or a global that is not bound yet
_LIBRARIES = tuple(
    {str(Path(path)) for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))}
    | {str(Path(__file__).parent.parent)}
)
_PLAIN = ("collections", "types", "argparse", "functools", "random", "dataclasses")  # of the standard library
_HARMLESS = ("logging", "threading", "_thread", "weakref", "_weakref", "re", "typing", "abc", "_abc", "oxytorch")
_CODE = (FunctionType, MethodType, functools.partial, functools.partialmethod, staticmethod, classmethod, property)


class Reach:
    """A root that is walked as code: held is what it can reach, not only what its attributes are."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


@dataclass(frozen=True)
class Binding:
    """A name of a function and what it is bound to now; `rebind` binds it so again, None where nothing can change."""

    name: str
    value: Any
    rebind: Callable[[], None] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is bound to it yet."""
        return self.value is _EMPTY


def is_code(value: Any) -> bool:
    """Whether it is walked by `bindings`: functions, methods, partials and what wraps them in a class."""
    return isinstance(value, _CODE)


def bindings(value: Any) -> list[Binding]:
    """Return what code refers to; of a library's functions only closure, object and defaults."""
    if isinstance(value, MethodType):
        return [Binding("__self__", value.__self__), Binding("__func__", value.__func__)]
    if isinstance(value, functools.partial | functools.partialmethod):
        return [Binding("func", value.func), Binding("args", value.args), Binding("keywords", value.keywords)]
    if isinstance(value, staticmethod | classmethod):
        return [Binding("__func__", value.__func__)]
    if isinstance(value, property):
        return [Binding(f.__name__, f) for f in (value.fget, value.fset) if isinstance(f, FunctionType)]
    assert isinstance(value, FunctionType)
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    found = [_of_cell(name, cell) for name, cell in cells]
    found += [Binding(f"default {i}", item) for i, item in enumerate(value.__defaults__ or ())]
    found += [Binding(f"default {name}", item) for name, item in (value.__kwdefaults__ or {}).items()]
    found.append(Binding("__dict__", value.__dict__))
    if not _in_library(value.__code__.co_filename):
        found += _of_globals(value)
    return found


def of_classes(value: Any) -> list[Binding]:
    """Return what an object's own classes hold: methods, which may name globals, and values that all objects share."""
    found: dict[str, Binding] = {}
    for cls in type(value).__mro__:
        if is_library(cls.__module__):
            continue
        for name, item in vars(cls).items():
            if is_code(item):
                found.setdefault(name, Binding(name, item))
            elif isinstance(item, int | float | str | list | dict | set | tuple) and not name.startswith("__"):
                found.setdefault(name, Binding(name, item, _of_class(cls, name, item)))
    return list(found.values())


def _of_class(cls: type, name: str, value: Any) -> Callable[[], None]:
    def rebind() -> None:
        if vars(cls).get(name, _EMPTY) is not value:
            setattr(cls, name, value)

    return rebind


def _of_cell(name: str, cell: Any) -> Binding:
    try:
        value = cell.cell_contents
    except ValueError:
        value = _EMPTY

    def rebind() -> None:
        if value is not _EMPTY:
            cell.cell_contents = value
            return
        with suppress(ValueError):  # it is empty still
            del cell.cell_contents

    return Binding(name, value, rebind)


def _of_globals(function: FunctionType) -> list[Binding]:
    found: list[Binding] = []
    names = set(_names(function.__code__))
    for name in sorted(names):
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        found.append(_named(function.__globals__, name))
        if isinstance(value, ModuleType) and not is_library(value.__name__):
            inside = sorted(names & vars(value).keys())
            found += [Binding(f"{name}.{b.name}", b.value, b.rebind) for b in (_named(vars(value), n) for n in inside)]
    return found


def _named(namespace: dict[str, Any], name: str) -> Binding:
    value = namespace[name]

    def rebind() -> None:
        if namespace.get(name, _EMPTY) is not value:
            namespace[name] = value

    return Binding(name, value, rebind)


def _names(code: CodeType) -> Iterator[str]:
    """Names that the code looks up, those of the functions and comprehensions in it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@functools.cache
def _in_library(file: str) -> bool:
    return file.startswith("<frozen") or any(file.startswith(folder + "/") for folder in _LIBRARIES)


def is_library(module: str) -> bool:
    """Whether a module is installed or of the standard library, not the user's own."""
    top = module.partition(".")[0]
    if top == "__main__":
        return False
    if top in sys.stdlib_module_names:
        return True
    return _in_library(str(getattr(sys.modules.get(module), "__file__", None) or ""))


def is_left_alone(value: Any) -> bool:
    """Whether a reached object is nobody's training state: of the standard library, or this library's own machinery."""
    top = type(value).__module__.partition(".")[0]
    return top == "oxytorch" or (top in sys.stdlib_module_names and top not in _PLAIN)


def unheld(value: Any) -> bool:
    """Whether an object that is not held may have a state: iterators, files, queues, data sets, native objects."""
    if isinstance(value, type | ModuleType | BuiltinFunctionType | Dataset) or is_code(value):
        return isinstance(value, Dataset)
    kind = type(value)
    if kind is object or kind.__module__.partition(".")[0] in _HARMLESS:
        return False
    if hasattr(value, "__next__") or isinstance(value, io.IOBase):
        return True
    by_value = "__eq__" in {name for cls in kind.__mro__[:-1] for name in vars(cls)} and kind.__hash__ is not None
    return not by_value and kind.__module__ != "builtins" and not kind.__module__.startswith("torch")


def position(value: Any) -> Any:
    """Return where an iterator or a file stands as far as it says so; None where it does not."""
    if isinstance(value, io.IOBase):
        try:
            return value.tell()
        except (OSError, ValueError):
            return None
    if hasattr(value, "__next__") and hasattr(value, "__length_hint__"):
        return operator.length_hint(value, -1)
    return None
