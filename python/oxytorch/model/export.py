"""Files for inference, each read back and compared with the model."""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .compare import error_between, seconds_and_outputs
from .loss import tensors_in
from .snapshot import untouched

__all__ = ["Exported", "export"]


@dataclass(frozen=True)
class Exported:
    """A file for inference that was read back and run.

    Attributes
    ----------
    path : pathlib.Path
    kind : str
    run : callable
        What the file gave when loaded: call it as the model.
    error : float
        Norm of the difference to the model's outputs over their norm, on the example.
    bytes : int
    export_seconds : float
    """

    path: Path
    kind: str
    run: Callable[..., Any]
    error: float
    bytes: int
    export_seconds: float

    def __str__(self) -> str:
        how = "the same bit for bit" if self.error == 0 else f"within {self.error:.1e} of the model"
        return f"{self.path} ({self.kind}, {self.bytes:,} bytes, {self.export_seconds:.1f} s): {how} on the example"


def export(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    kind: str = "aoti",
    *,
    tolerance: float = 1e-4,
    dynamic_shapes: Any = None,
) -> Exported:
    """Write a model for inference, read the file back, and compare it with the model on the example.

    Parameters
    ----------
    model : torch.nn.Module
        Exported in evaluation mode; it is not changed.
    example : Any
        A tuple or list is positions, anything else one argument.
    path : path
        ``.pt2`` for ``"aoti"`` and ``"export"``, ``.pt`` by custom for ``"torchscript"``. A file that is there is
        replaced only by one that was checked.
    kind : {"aoti", "export", "torchscript"}
        ``"aoti"``: compiled ahead of time by AOTInductor for this processor (needs a C++ compiler, and takes a minute);
        C++ loads it by ``torch::inductor::AOTIModelPackageLoader``. ``"export"``: torch.export's program.
        ``"torchscript"``: a trace, for ``torch::jit::load``; torch has deprecated it, and it keeps one way through
        control flow that depends on values.
    tolerance : float
        Largest relative error that is taken.
    dynamic_shapes : optional
        As of ``torch.export.export``; without it shapes are those of the example. A trace keeps none.

    Raises
    ------
    ValueError
        For an unknown kind, or a file whose results are farther off than `tolerance`; nothing is left at `path` then.
    Exception
        What torch throws for a model that it cannot export.
    """
    writers = {"aoti": _aoti, "export": _export, "torchscript": _trace}
    if kind not in writers:
        raise ValueError(f"kind is {kind!r}; there are 'aoti', 'export' and 'torchscript'")
    if isinstance(example, dict):
        raise ValueError("the example is a dict; export takes positions: give a tuple")
    args = tuple(example) if isinstance(example, tuple | list) else (example,)
    target = Path(path)
    # torch looks at the end of the name.
    scratch = target.with_name(f".{target.stem}.{os.getpid()}.{'pt' if kind == 'torchscript' else 'pt2'}")
    try:
        with untouched(model), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated parts of torch call one another
            model.eval()
            expected = seconds_and_outputs(model, args)[1]
            start = time.perf_counter()
            run = writers[kind](model, args, scratch, dynamic_shapes)
            seconds = time.perf_counter() - start
            found = [t for t in tensors_in(run(*args)) if t.is_floating_point()]
        error = error_between(expected, found)
        if not error <= tolerance:
            raise ValueError(
                f"the exported model is off by {error:.2e} on the example, more than tolerance={tolerance:g}; nothing "
                "was written"
            )
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
    return Exported(target, kind, run, error, target.stat().st_size, seconds)


def _export(model: nn.Module, args: Any, path: Path, shapes: Any) -> Callable[..., Any]:
    torch.export.save(torch.export.export(model, args, dynamic_shapes=shapes), path)
    loaded: Callable[..., Any] = torch.export.load(path).module()
    return loaded


def _aoti(model: nn.Module, args: Any, path: Path, shapes: Any) -> Callable[..., Any]:
    inductor: Any = importlib.import_module("torch._inductor")
    program = torch.export.export(model, args, dynamic_shapes=shapes)
    inductor.aoti_compile_and_package(program, package_path=str(path))
    loaded: Callable[..., Any] = inductor.aoti_load_package(str(path))
    return loaded


def _trace(model: nn.Module, args: Any, path: Path, _shapes: Any) -> Callable[..., Any]:
    jit: Any = torch.jit
    jit.save(jit.trace(model, args, check_trace=False), str(path))
    loaded: Callable[..., Any] = jit.load(str(path))
    return loaded
