"""The way into a model's forward: what is entered around it and what is called, changed without touching the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = ["Call", "Calls", "widened"]

Factory = Callable[[], AbstractContextManager[Any]]
Transform = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


class Call:
    """Stands in a module's way of being called, as ``torch.nn.Module.compile`` does.

    ``model(...)`` runs: transforms of the inputs, then every scope entered, then the function (the module's own call,
    or a compiled one), then transforms of the outputs. It takes the place that ``Module.compile`` uses, so pickling,
    ``deepcopy``, ``state_dict`` and hooks are as before, and scopes stand outside of the compiled part.

    While nothing is registered the module is called as ever: nothing is installed. Each change goes by a name, or by an
    object of its own. All who change the same module share one `Call`, see `of`: of two, the second to be installed
    would take the first away when it goes.

    Parameters
    ----------
    model : torch.nn.Module
        A module that ``model.compile()`` was called on keeps that function as its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own: Callable[..., Any] | None = None  # what was there when it was installed
        self._scopes: dict[Hashable, Factory] = {}
        self._inputs: dict[Hashable, Transform] = {}
        self._outputs: dict[Hashable, Callable[[Any], Any]] = {}
        self._function: Callable[..., Any] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Call:
        """Return the module's `Call`."""
        call = _CALLS.get(id(model))
        if call is None:
            call = _CALLS[id(model)] = cls(model)
        return call

    @property
    def was_compiled(self) -> bool:
        """Whether ``model.compile()`` had been called on the module."""
        return (self._own if self._is_installed() else self._model._compiled_call_impl) is not None

    def scope(self, name: Hashable, factory: Factory | None) -> None:
        """Enter ``factory()`` around each forward; None takes it away."""
        self._set(self._scopes, name, factory)

    def inputs(self, name: Hashable, transform: Transform | None) -> None:
        """Change (args, kwargs) on the way in; None takes it away."""
        self._set(self._inputs, name, transform)

    def outputs(self, name: Hashable, transform: Callable[[Any], Any] | None) -> None:
        """Change what the model returns; None takes it away."""
        self._set(self._outputs, name, transform)

    def function(self, function: Callable[..., Any] | None) -> None:
        """Call this in place of the module's own call, e.g. ``torch.compile(model._call_impl)``; None takes it away."""
        self._function = function
        self._install()

    def _set(self, table: dict[Hashable, Any], name: Hashable, value: Any) -> None:
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value
        self._install()

    def _is_installed(self) -> bool:
        return self._model._compiled_call_impl == self._run

    def _install(self) -> None:
        is_wanted = bool(self._scopes or self._inputs or self._outputs or self._function)
        if is_wanted == self._is_installed():
            return
        if is_wanted:
            self._own = self._model._compiled_call_impl
            self._model._compiled_call_impl = self._run
        elif self._own is not None:
            self._model._compiled_call_impl = self._own
        else:  # the class says None, and the module has no attribute of its own
            self._model.__dict__.pop("_compiled_call_impl", None)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        for change in self._inputs.values():
            args, kwargs = change(args, kwargs)
        function = self._function or self._own or self._model._call_impl
        result = _within(list(self._scopes.values()), function, args, kwargs)
        for restore in self._outputs.values():
            result = restore(result)
        return result


def _within(scopes: list[Factory], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not scopes:
        return function(*args, **kwargs)
    with scopes[0]():
        return _within(scopes[1:], function, args, kwargs)


_CALLS: WeakValueDictionary[int, Call] = WeakValueDictionary()  # by id of the module, which its Call keeps alive


class Calls:
    """The ways into several models, changed alike."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    @property
    def was_compiled(self) -> bool:
        """Whether ``model.compile()`` had been called on one of them."""
        return any(call.was_compiled for call in self._calls)

    def scope(self, name: Hashable, factory: Factory | None) -> None:
        """See `Call.scope`."""
        for call in self._calls:
            call.scope(name, factory)

    def inputs(self, name: Hashable, transform: Transform | None) -> None:
        """See `Call.inputs`."""
        for call in self._calls:
            call.inputs(name, transform)

    def outputs(self, name: Hashable, transform: Callable[[Any], Any] | None) -> None:
        """See `Call.outputs`."""
        for call in self._calls:
            call.outputs(name, transform)


def widened(result: Any) -> Any:
    """Return outputs of 16 bits as float32, so that the loss is computed in float32."""

    def wide(leaf: Any) -> Any:
        narrow = isinstance(leaf, Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
        return leaf.float() if narrow else leaf

    return wide(result) if isinstance(result, Tensor) else tree_map(wide, result)
