"""Where inf or NaN first appeared: the module and the operator, forward or backward, and what it was given."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_OWN = (str(Path(torch.__file__).parent), __file__)
# What these return or read of their target is whatever lay in memory.
_UNWRITTEN = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_"}


@dataclass(frozen=True)
class TensorFacts:
    """What an operator was given or gave back, as it was then.

    Attributes
    ----------
    name : str
        The operator's name of the argument, ``"output"``, or the name of a parameter or buffer.
    shape : tuple of int
    dtype : str
        Such as ``"float16"``.
    min, max : float or None
        Over the finite elements; None where there are none.
    nan, inf : int
        Elements that are NaN, and that are inf or -inf.
    first : tuple of int or None
        Index of the first element that is not finite.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    min: float | None
    max: float | None
    nan: int
    inf: int
    first: tuple[int, ...] | None

    @property
    def finite(self) -> bool:
        """Whether no element is inf or NaN."""
        return self.nan + self.inf == 0

    @property
    def of_largest(self) -> float:
        """Largest finite magnitude as a share of the largest number of the dtype."""
        if self.min is None or self.max is None:
            return 0.0
        return max(abs(self.min), abs(self.max)) / torch.finfo(getattr(torch, self.dtype)).max

    def __str__(self) -> str:
        span = "nothing finite" if self.min is None else f"{self.min:.4g} to {self.max:.4g}"
        bad = "all finite" if self.finite else f"{self.nan} nan, {self.inf} inf, first at {list(self.first or ())}"
        near = f", {self.of_largest:.0%} of the largest {self.dtype}" if self.of_largest > 0.5 else ""
        return f"{self.name}: {self.dtype} {list(self.shape)}, {span}{near}, {bad}"


@dataclass(frozen=True)
class Origin:
    """Where inf or NaN first appeared. ``str()`` of it is the report, `to_dict` the same for programs.

    Attributes
    ----------
    phase : {"forward", "backward", "given"}
        ``"given"``: a parameter, buffer, batch or other tensor held it before; the origin lies outside the model.
    kind : {"nan", "inf"}
    what : str
        ``"operator"``; where given, ``"parameter"``, ``"gradient"`` (left from a step before), ``"buffer"``,
        ``"batch"`` or ``"tensor"`` (another one made before the block).
    name : str
        Of the parameter, buffer or argument that was given; empty otherwise.
    module : str or None
        Qualified name of the module whose code ran, ``""`` for the model itself, None outside of all modules. In
        backward that of the forward operator which is being differentiated.
    module_type : str
    call : int
        Which call of that module this was, from 1.
    op : str
        ``"aten.log.default"``; where given, the operator that first read it.
    node : str or None
        autograd's node in backward, such as ``"LogBackward0"``.
    forward_op : str or None
        In backward, the forward operator that made the node.
    source : str
        File and line that called it.
    inputs, outputs : tuple of TensorFacts
    reached : str
        What it made inf or NaN in the end: ``"the loss"``, ``"the gradient of 'fc.weight'"`` ...
    became_nan : str
        For an inf, the module and operator that made NaN of it; empty where none did.
    notes : tuple of str
    """

    phase: str
    kind: str
    what: str
    name: str
    module: str | None
    module_type: str
    call: int
    op: str
    node: str | None
    forward_op: str | None
    source: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    reached: str = ""
    became_nan: str = ""
    notes: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Module and operator in words."""
        if self.module is None:
            module = "outside of all modules"
        else:
            module = f"in {self.module_type} {self.module!r}" if self.module else f"in the model ({self.module_type})"
            module += f", call {self.call}" if self.call > 1 else ""
        node = f", in backward of {self.forward_op} ({self.node})" if self.node else ""
        return f"{self.op} {module}{node}" + (f", {self.source}" if self.source else "")

    def to_dict(self) -> dict[str, Any]:
        """All attributes as plain Python values."""
        return asdict(self)

    def __str__(self) -> str:
        if self.phase == "given":
            head = f"{self.kind} was given by the {self.what} {self.name!r}, first read by {self.place}"
        else:
            head = f"{self.kind} first appeared in {self.phase}: {self.place}"
        lines = [head, *(f"  in   {facts}" for facts in self.inputs), *(f"  out  {facts}" for facts in self.outputs)]
        lines += [f"  became nan in {self.became_nan}"] if self.became_nan else []
        lines += [f"  reached {self.reached}"] if self.reached else []
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


@dataclass
class _Record:
    """The birth of an inf or NaN; tensors that got theirs from it point here."""

    order: int
    origin: Origin
    intended: bool  # an inf that the program wrote itself, as masks do
    causes: list[_Record]

    def root(self) -> _Record:
        culprits = [cause.root() for cause in self.causes if not cause.intended]
        return min(culprits, key=lambda record: record.order, default=self)


def _floats(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        if value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized:
            yield value


def _readable(tensor: Tensor) -> Tensor:
    # Types of eight bits have no comparisons of their own.
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(_readable(tensor.detach())).all())


def _has_nan(tensor: Tensor) -> bool:
    return bool(torch.isnan(_readable(tensor)).any())


def _facts(name: str, tensor: Tensor) -> TensorFacts:
    values = _readable(tensor.detach())
    good = torch.isfinite(values)
    bad = (~good).nonzero()
    kept = (torch.view_as_real(values[good]) if values.is_complex() else values[good]).double()
    nan = int(torch.isnan(values).sum())
    return TensorFacts(
        name,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        float(kept.min()) if kept.numel() else None,
        float(kept.max()) if kept.numel() else None,
        nan,
        len(bad) - nan,
        tuple(bad[0].tolist()) if len(bad) else None,
    )


def _key(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a subclass without storage of its own
        return None


def caller(own: tuple[str, ...]) -> str:
    """File and line of the innermost frame whose file does not start with one of `own`; empty where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(own) and not file.startswith("<"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@dataclass(frozen=True)
class _Site:
    """An operator's place in forward."""

    module: str | None
    module_type: str
    call: int
    op: str
    source: str


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


class OriginFinder:
    """Watches every operator of a block; made by `nan_origin`.

    Attributes
    ----------
    origin : Origin or None
        After the block: where the inf or NaN came from that reached the loss, a gradient or the model's output; None
        where none did.
    """

    def __init__(self, model: nn.Module, raises: bool) -> None:
        self.origin: Origin | None = None
        self._model = model
        self._raises = raises
        self._exits = ExitStack()

    def __enter__(self) -> OriginFinder:
        self.origin = None
        named = {name.replace("_orig_mod.", ""): module for name, module in self._model.named_modules()}
        self._names = {id(module): name.removesuffix("_orig_mod") for name, module in named.items()}
        self._calls: Counter[int] = Counter()
        self._modules: list[tuple[str, str, int]] = []
        self._sites: dict[int, _Site] = {}
        self._records: dict[int, tuple[StorageWeakRef, _Record]] = {}
        self._births: list[_Record] = []
        self._reached: list[tuple[_Record, str, bool]] = []
        self._differentiated = False
        self._owned = {
            key: (what, name)
            for what, tensors in (
                ("buffer", self._model.named_buffers()),
                ("gradient", ((name, parameter.grad) for name, parameter in self._model.named_parameters())),
                ("parameter", self._model.named_parameters()),
            )
            for name, tensor in tensors
            if tensor is not None and (key := _key(tensor)) is not None
        }
        self._notes: tuple[str, ...] = ()
        with ExitStack() as exits:
            if any(map(_is_compiled, named.values())):
                self._notes = (
                    "compiled code cannot be seen into: torch.compile was switched off for this block "
                    "(torch.compiler.set_stance('force_eager')), so a fault of the compiled code alone does not show.",
                )
                exits.enter_context(torch.compiler.set_stance("force_eager"))
            for handle in (
                nn.modules.module.register_module_forward_pre_hook(self._enter_module),
                nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
                self._model.register_forward_pre_hook(self._enter_model, with_kwargs=True),
                *(
                    parameter.register_post_accumulate_grad_hook(self._gradient_hook(name))  # type: ignore[no-untyped-call]
                    for name, parameter in self._model.named_parameters()
                    if parameter.requires_grad
                ),
            ):
                exits.callback(handle.remove)
            exits.enter_context(_Watch(self._run))
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()
        self.origin = self._judge(error)
        self._records.clear()
        if self._raises and error is None and self.origin is not None:
            raise FloatingPointError(str(self.origin))

    def check(self, tensor: Tensor, name: str = "the loss") -> None:
        """Count an inf or NaN in `tensor` as harm done; for results that no ``backward()`` in the block starts from."""
        self._look(tensor, name, True)

    def _look(self, tensor: Tensor, name: str, final: bool) -> None:
        with _disable_current_modes():
            if not _finite(tensor):
                self._reached.append((self._record_of(name, tensor, "", None), name, final))

    # -- what happens in the block

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._calls[id(module)] += 1
        kind = type(module).__name__
        if not self._modules and module is not self._model:
            self._take_batch({f"args[{i}] of {kind}": arg for i, arg in enumerate(args)})
        name = self._names.get(id(module), f"{kind}, no part of the model")
        self._modules.append((name, kind, self._calls[id(module)]))

    def _leave_module(self, _module: nn.Module, _args: Any, output: Any) -> None:
        name = self._modules.pop()[0] if self._modules else ""
        if self._modules:
            return
        for tensor in _floats(tree_leaves(output)):
            self._look(tensor, f"the output of {name!r}" if name else "the model's output", False)

    def _enter_model(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._take_batch({f"args[{i}]": arg for i, arg in enumerate(args)} | kwargs)

    def _take_batch(self, named: dict[str, Any]) -> None:
        for name, value in named.items():
            for tensor in _floats(tree_leaves(value)):
                key = _key(tensor)
                if key is not None and self._find(tensor) is None:
                    self._owned.setdefault(key, ("batch", name))

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def look(parameter: Tensor) -> None:
            self._differentiated = True
            for gradient in _floats([parameter.grad]):
                self._look(gradient, f"the gradient of {name!r}", True)

        return look

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        node = None if self._modules else torch._C._current_autograd_node()
        name = func._schema.name.split("::")[1]
        if node is None:
            site = self._site(str(func))
            # The node of a forward operator is made just before the operator runs.
            self._sites.setdefault(torch._C._autograd._get_sequence_nr() - 1, site)
            if name == "ones_like" and not self._modules and args[0].numel() == 1:
                self._differentiated = True
                self.check(args[0])  # backward starts with the gradient of the loss
        else:
            forward = self._sites.get(node._sequence_nr())
            site = replace(forward, op=str(func)) if forward else _Site(None, "", 1, str(func), "")
        inputs, written = self._inputs(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if name in _UNWRITTEN:
            return result
        outputs = list(_floats([*tree_leaves(result), *written]))
        bad = [tensor for tensor in outputs if not _finite(tensor)]
        if bad:
            record = self._account(func, site, node, inputs, bad, [*tree_leaves(args), *tree_leaves(kwargs)])
        for tensor in outputs:
            self._forget(tensor)
        for tensor in bad:
            self._remember(tensor, record)
        return result

    def _inputs(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[list[tuple[str, Tensor]], list[Tensor]]:
        """Tensors that the operator reads, as they are before it runs, and those that it will write."""
        read: list[tuple[str, Tensor]] = []
        written: list[Tensor] = []
        for i, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name) if i >= len(args) else args[i]
            tensors = list(_floats(tree_leaves(value)))
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes:
                written += tensors
                if argument.kwarg_only or name in _OVERWRITES:
                    continue
            for j, tensor in enumerate(tensors):
                label = argument.name if isinstance(value, Tensor) else f"{argument.name}[{j}]"
                read.append((label, self._kept(tensor) if writes else tensor))
        return read, written

    def _kept(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor that is about to be overwritten, of the same origin."""
        copy = tensor.clone()
        held, owner = self._find(tensor), self._owned.get(_key(tensor) or 0)
        if held is not None:
            self._remember(copy, held)
        elif owner is not None and (key := _key(copy)) is not None:
            self._owned[key] = owner
        return copy

    def _account(
        self, func: Any, site: _Site, node: Any, inputs: list[tuple[str, Tensor]], bad: list[Tensor], values: list[Any]
    ) -> _Record:
        """Return the record that bad outputs owe to: of a bad input, or a new one."""
        sources = [(name, tensor) for name, tensor in inputs if not _finite(tensor)]
        nan = any(map(_has_nan, bad))
        spoilt = [(name, tensor) for name, tensor in sources if not nan or _has_nan(tensor)]
        records = [self._record_of(name, tensor, str(func), site) for name, tensor in spoilt or sources]
        if spoilt:
            return min(records, key=lambda record: (record.root().intended, record.order))
        written = any(isinstance(value, float) and math.isinf(value) for value in values)
        outputs = tuple(_facts("output", tensor) for tensor in bad)
        origin = self._origin(
            "forward" if node is None else "backward",
            "nan" if nan else "inf",
            "operator",
            "",
            site,
            node,
            tuple(_facts(name, tensor) for name, tensor in inputs),
            outputs,
        )
        return self._born(origin, not nan and (written or not inputs), records)

    def _origin(
        self,
        phase: str,
        kind: str,
        what: str,
        name: str,
        site: _Site,
        node: Any,
        inputs: tuple[TensorFacts, ...],
        outputs: tuple[TensorFacts, ...],
    ) -> Origin:
        forward = self._sites.get(node._sequence_nr()) if node is not None else None
        notes = list(self._notes)
        out = outputs[0].dtype if outputs else ""
        if what == "operator" and kind == "inf" and out in ("float16", "bfloat16") and all(f.finite for f in inputs):
            largest = torch.finfo(getattr(torch, out)).max
            notes.append(f"overflow: the largest {out} is {largest:.5g}.")
        return Origin(
            phase,
            kind,
            what,
            name,
            site.module,
            site.module_type,
            site.call,
            site.op,
            None if node is None else node.name(),
            forward.op if forward else None,
            site.source,
            inputs,
            outputs,
            notes=tuple(notes),
        )

    def _site(self, op: str) -> _Site:
        module, kind, call = self._modules[-1] if self._modules else (None, "", 1)
        return _Site(module, kind, call, op, caller(_OWN))

    def _born(self, origin: Origin, intended: bool, causes: list[_Record]) -> _Record:
        record = _Record(len(self._births), origin, intended, causes)
        self._births.append(record)
        return record

    def _record_of(self, label: str, tensor: Tensor, op: str, site: _Site | None) -> _Record:
        """Return the record of a bad tensor; one that no watched operator made is recorded as given."""
        record = self._find(tensor)
        if record is not None:
            return record
        what, name = self._owned.get(_key(tensor) or 0, ("tensor", label))
        facts = _facts(name, tensor)
        site = site or self._site(op)
        origin = self._origin("given", "nan" if facts.nan else "inf", what, name, site, None, (facts,), ())
        # Masks with inf are given as batches and buffers; a parameter or gradient with inf is broken.
        record = self._born(origin, facts.nan == 0 and what not in ("parameter", "gradient"), [])
        self._remember(tensor, record)
        return record

    # -- which tensor owes its inf or NaN to which record; by storage, since views and autograd's copies share it

    def _find(self, tensor: Tensor) -> _Record | None:
        held = self._records.get(_key(tensor) or 0)
        return held[1] if held is not None and not held[0].expired() else None  # type: ignore[no-untyped-call]

    def _remember(self, tensor: Tensor, record: _Record) -> None:
        key = _key(tensor)
        if key is not None:
            # The weak reference keeps the key from being given to another storage.
            self._records[key] = (StorageWeakRef(tensor.untyped_storage()), record)  # type: ignore[no-untyped-call]

    def _forget(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._records and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            del self._records[key]

    # -- the verdict

    def _judge(self, error: BaseException | None) -> Origin | None:
        # A masked output with inf is no fault where loss and gradients are finite.
        harm = [
            (record, what)
            for record, what, final in self._reached
            if final or (not self._differentiated and not record.root().intended)
        ]
        if not harm and error is not None:
            harm = [(record, "") for record in self._births if not record.root().intended]
        if not harm:
            return None
        record, what = min(harm, key=lambda pair: pair[0].root().order)
        root = record.root()
        nan = next((b for b in self._births if root is not b and b.root() is root and b.origin.kind == "nan"), None)
        return replace(root.origin, reached=what, became_nan=nan.origin.place if nan else "")


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def nan_origin(model: nn.Module, *, raises: bool = False) -> OriginFinder:
    """Context that finds where inf or NaN first appeared in the forward and backward passes run inside.

    A debugging aid: inside, every operator's result is checked, which is slow and waits for the device; outside there
    are no hooks and no cost. An inf or NaN counts once it reaches the loss that ``backward()`` starts from, a
    parameter's gradient, or, where the block runs no backward, the output of the outermost module: a ``-inf`` in an
    attention mask, or rows that are masked away later, raise no alarm. Then its way is followed back to the operator
    that made it of finite inputs, or to the parameter, buffer or batch that already held it.

    Compiled modules run eagerly inside, since compiled code cannot be seen into.

    Parameters
    ----------
    model : torch.nn.Module
        Gives the qualified names. Modules outside of it, such as a loss, are named by their class.
    raises : bool
        Raise the report at the end of the block; otherwise look at ``finder.origin``.

    Returns
    -------
    OriginFinder
        A context manager whose `origin` is set at the end of the block, also where the block raised.

    Raises
    ------
    FloatingPointError
        At the end of the block, with ``raises=True`` and something found.

    Examples
    --------
    >>> model = nn.Linear(4, 1)
    >>> with nan_origin(model) as finder:
    ...     model(torch.ones(2, 4)).mul(0).log().mean().backward()
    >>> finder.origin.op, finder.origin.kind
    ('aten.log.default', 'inf')
    """
    return OriginFinder(model, raises)
