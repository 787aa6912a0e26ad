"""Watches one step of a model, operator by operator: who called what, on which shapes, for how long, from what."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..optim.origin import caller

_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_HOST_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


@dataclass
class Fact:
    """A tensor as an operator saw it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    key: int
    requires_grad: bool
    device: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def layout(self) -> str:
        """Of four dimensions ``"nchw"`` or ``"nhwc"``; ``"any"`` where both are true, ``"other"`` where none is."""
        _, c, h, w = self.shape
        both = {
            name
            for name, order in (("nchw", (c * h * w, h * w, w, 1)), ("nhwc", (c * h * w, 1, w * c, c)))
            if all(s == o or d == 1 for s, o, d in zip(self.strides, order, self.shape, strict=True))
        }
        return "any" if len(both) == 2 else next(iter(both), "other")


@dataclass
class Op:
    """One operator that ran."""

    index: int
    name: str
    module: str | None
    call: int
    source: str
    backward: bool
    seconds: float
    inputs: list[Fact]
    outputs: list[Fact]
    parents: list[int]
    args: tuple[Any, ...]
    forward: int | None = None
    entries: int = 0
    children: list[int] = field(default_factory=list)

    @property
    def is_view(self) -> bool:
        """Whether it moved no data and wrote none."""
        keys = {fact.key for fact in self.inputs}
        return bool(self.outputs) and not self.writes and all(fact.key in keys for fact in self.outputs)

    @property
    def writes(self) -> bool:
        """Whether it wrote into an argument."""
        return self.name.endswith("_") and not self.name.endswith("__")


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_quantized:
            yield leaf


def key_of(tensor: Tensor) -> int:
    """Identity of a tensor's storage, the same for all its views; 0 where it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _fact(tensor: Tensor) -> Fact:
    return Fact(
        tuple(tensor.shape),
        tensor.dtype,
        tensor.stride(),
        key_of(tensor),
        tensor.requires_grad,
        tensor.device.type,
    )


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: OperatorRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Sees what reaches no operator on a CPU: reads of values by Python."""

    def __init__(self, recorder: OperatorRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS and isinstance(args[0], Tensor):
            self._recorder.reads.append((func.__name__, self._recorder.place()[0], caller(_OWN)))
        return func(*args, **(kwargs or {}))


class OperatorRecorder:
    """Context that records every operator of the code inside.

    Attributes
    ----------
    ops : list of Op
        In order. An operator's parents made its inputs, views looked through.
    reads : list of (str, str or None, str)
        ``tolist``, ``numpy``: the call, the module and the source line.
    calls : Counter of str
        How often each module ran, by qualified name.
    names : dict of int to str
        Qualified name by ``id`` of the module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.ops: list[Op] = []
        self.reads: list[tuple[str, str | None, str]] = []
        self.calls: Counter[str] = Counter()
        self.names = {id(module): name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self._stack: list[tuple[str | None, int]] = []
        self._entries = 0
        self._made: dict[int, int] = {}
        self._alive: list[StorageWeakRef] = []
        self._sequence: dict[int, int] = {}
        self._accelerated = any(p.device.type != "cpu" for p in model.parameters())
        self._exits = ExitStack()

    def __enter__(self) -> OperatorRecorder:
        with ExitStack() as exits:
            exits.enter_context(torch.compiler.set_stance("force_eager"))
            hooks = nn.modules.module
            exits.callback(hooks.register_module_forward_pre_hook(self._enter_module).remove)
            exits.callback(hooks.register_module_forward_hook(self._leave_module, always_call=True).remove)
            exits.enter_context(_Functions(self))
            exits.enter_context(_Dispatch(self))
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()
        self._alive.clear()
        for op in self.ops:
            for parent in op.parents:
                self.ops[parent].children.append(op.index)

    @property
    def forward(self) -> list[Op]:
        """Operators of the forward pass, the loss included."""
        return [op for op in self.ops if not op.backward]

    @property
    def seconds(self) -> float:
        """Time inside operators."""
        return sum(op.seconds for op in self.ops)

    def place(self) -> tuple[str | None, int]:
        """Module that runs now, None outside of all, and which call of it this is."""
        return self._stack[-1] if self._stack else (None, 0)

    def share(self, ops: list[Op]) -> float:
        """Share of the time in operators that these, and the backward operators of theirs, took."""
        indices = {op.index for op in ops}
        spent = sum(op.seconds for op in self.ops if op.index in indices or op.forward in indices)
        return spent / self.seconds if self.seconds else 0.0

    def _enter_module(self, module: nn.Module, _args: Any) -> None:
        name = self.names.get(id(module))
        self._entries += 1
        if name is not None:
            self.calls[name] += 1
        self._stack.append((name, self.calls[name] if name is not None else 0))

    def _leave_module(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._entries += 1
        if self._stack:
            self._stack.pop()

    def _wait(self) -> None:
        if self._accelerated:
            torch.accelerator.synchronize()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator and write it down."""
        node = torch._C._current_autograd_node()
        inputs = [_fact(tensor) for tensor in _tensors((args, kwargs))]
        parents = list(dict.fromkeys(self._made[fact.key] for fact in inputs if fact.key in self._made))
        self._wait()
        start = time.perf_counter()
        result = func(*args, **kwargs)
        self._wait()
        seconds = time.perf_counter() - start
        made = list(_tensors(result))
        index = len(self.ops)
        module, call = self.place()
        op = Op(
            index,
            func._schema.name.split("::")[1],
            module,
            call,
            "" if node is not None else caller(_OWN),
            node is not None,
            seconds,
            inputs,
            [_fact(tensor) for tensor in made],
            parents,
            tuple(arg if isinstance(arg, bool | int | float | None | str | torch.dtype) else None for arg in args),
            entries=self._entries,
        )
        if node is None:
            # The node of a forward operator is made just before the operator runs.
            self._sequence.setdefault(torch._C._autograd._get_sequence_nr() - 1, index)
        else:
            op.forward = self._sequence.get(node._sequence_nr())
            if op.forward is not None:
                op.module = self.ops[op.forward].module
                op.source = self.ops[op.forward].source
        self.ops.append(op)
        if not op.is_view:
            for tensor, fact in zip(made, op.outputs, strict=True):
                if fact.key:
                    self._made[fact.key] = index
                    self._alive.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        return result


@contextmanager
def saved_bytes(model: nn.Module, found: dict[str | None, int]) -> Iterator[None]:
    """Add up, by module, the bytes that the forward inside keeps for backward; each storage once, parameters never.

    No backward may follow for what is made inside.
    """
    names = {id(module): name for name, module in model.named_modules()}
    seen = {key_of(p) for p in model.parameters()}
    stack: list[str | None] = []
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # an output kept with its graph would be a cycle
        key = key_of(tensor)
        if key and key not in seen:
            seen.add(key)
            alive.append(kept)
            place = stack[-1] if stack else None
            found[place] = found.get(place, 0) + tensor.untyped_storage().nbytes()
        return kept

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        if stack:
            stack.pop()

    hooks = nn.modules.module
    with ExitStack() as exits:
        exits.enter_context(torch.compiler.set_stance("force_eager"))
        exits.callback(hooks.register_module_forward_pre_hook(lambda m, _: stack.append(names.get(id(m)))).remove)
        exits.callback(hooks.register_module_forward_hook(leave, always_call=True).remove)
        exits.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept))
        yield
