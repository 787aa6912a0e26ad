"""Certificates from one run to the next: what they hold for, and the command that lists them."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from .. import _C
from .._C import tune as _native
from ..data.batches import tensors
from .run import Run

if TYPE_CHECKING:
    from ..cli import Commands

__all__ = ["key", "stored"]


def key(run: Run, level: str, options: Iterable[str]) -> Any:
    """Return the key of a run's certificate: hardware, torch, structure of the model and the step, options.

    Parameters
    ----------
    run : Run
        Its example batches give the shapes.
    level : str
    options : iterable of str
        What else decides which strategies are tried and kept.
    """
    return _native.CertificateKey(
        hardware=_hardware(run.device),
        torch=f"{torch.__version__} {torch.version.git_version or ''}".strip(),
        model=hashlib.sha256("\n".join(_structure(run)).encode()).hexdigest()[:16],
        options="; ".join([f"oxytorch {_C.__version__}", f"level {level}", *options]),
    )


def _hardware(device: torch.device) -> str:
    parts = [_native.hardware_key(), f"{torch.get_num_threads()} threads"]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    elif device.type != "cpu":
        parts.append(device.type)
    return ", ".join(parts)


def _structure(run: Run) -> Iterator[str]:
    """What decides how long the parts of a step take, line by line: no value of a weight, no address, no seed."""
    numbers: dict[int, int] = {}  # weights that are tied have one number
    for name, module in run.model.named_modules():
        yield f"module {name} {type(module).__module__}.{type(module).__qualname__} {module.training}"
    for name, p in run.model.named_parameters(remove_duplicate=False):
        yield f"parameter {name} {numbers.setdefault(id(p), len(numbers))} {_tensor(p)} {p.requires_grad}"
    for name, buffer in run.model.named_buffers():
        yield f"buffer {name} {_tensor(buffer)}"
    for optimizer in (slot.original for slot in run.slots):
        yield f"optimizer {type(optimizer).__module__}.{type(optimizer).__qualname__}"
        for group in optimizer.param_groups:
            kinds = {
                name: _setting(value) for name, value in sorted(group.items()) if name not in ("params", "initial_lr")
            }
            yield f"group {len(group['params'])} {kinds}"
            if len(run.slots) > 1:
                yield f"of {[numbers.get(id(p)) for p in group['params']]}"
    for shape in sorted({_batch(batch) for batch in run.batches}):
        yield f"batch {shape}"
    for function in (*(run.losses or (None,)), run.own_step):
        yield f"calls {getattr(function, '__qualname__', None) or type(function).__qualname__}"
    yield f"clips {run.clip_norm is not None}"


def _tensor(tensor: Tensor) -> str:
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return f"{tuple(tensor.shape)} {strides} {tensor.dtype} {tensor.device.type}"


def _setting(value: Any) -> Any:
    """Switches by value; numbers by whether they are zero, since a learning rate decides no time."""
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, tuple | list):
        return [_setting(item) for item in value]
    return f"{type(value).__name__} {'zero' if isinstance(value, int | float) and value == 0 else 'set'}"


def _batch(batch: Any) -> str:
    leaves, spec = tree_flatten(batch)
    return f"{spec} {[type(leaf).__name__ for leaf in leaves]} {[_tensor(found) for found in tensors(batch)]}"


# -- the command -----------------------------------------------------------------------------------------------------


def stored(folder: str = "") -> list[tuple[Path, Any]]:
    """Return the remembered certificates with their files, the newest first; files that are none are left out."""
    found: list[tuple[Path, Any]] = []
    where = _native.CertificateStore(folder).folder
    if not where:  # no folder is set and there is no home
        return found
    for path in Path(where).glob("*.json"):
        try:
            found.append((path, _native.Certificate.load(str(path))))
        except (ValueError, RuntimeError, OSError):  # noqa: PERF203  (each may be none)
            continue
    return sorted(found, key=lambda item: str(item[1].created), reverse=True)


def _matching(which: str) -> list[tuple[Path, Any]]:
    return [(path, found) for path, found in stored() if which == "all" or found.key.digest().startswith(which)]


def _list(as_json: bool) -> int:
    found = stored()
    if as_json:
        print(json.dumps([json.loads(certificate.to_json()) for _, certificate in found], indent=2))
        return 0
    if not found:
        print(f"no certificate in {_native.CertificateStore('').folder}")
    for _, one in found:
        gain = "1.00x" if one.speedup is None else f"{one.speedup.mid:.2f}x"
        names = ", ".join(one.accepted()) or "nothing pays"
        print(f"{one.key.digest()}  {one.created}  level {one.level:<8}  {gain:>6}  {names}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    if arguments.action == "list":
        return _list(arguments.json)
    if arguments.which is None:
        print(f"oxytorch certificates {arguments.action}: which one? Give the start of its digest, or 'all'.")
        return 2
    path = Path(arguments.which)
    if arguments.action == "show" and path.is_file():
        found = [(path, _native.Certificate.load(str(path)))]
    else:
        found = _matching(arguments.which)
    if not found:
        print(f"no certificate {arguments.which!r}; `oxytorch certificates` lists them.")
        return 1
    for path, one in found:
        if arguments.action == "forget":
            path.unlink(missing_ok=True)
            print(f"forgot {one.key.digest()}")
        else:
            print(one.to_json() if arguments.json else one.to_text())
    return 0


def add_command(commands: Commands) -> None:
    """Add `oxytorch certificates`."""
    parser = commands.add_parser("certificates", help="what ox.accelerate found on this machine: list, show, forget")
    parser.add_argument("action", nargs="?", choices=("list", "show", "forget"), default="list")
    parser.add_argument("which", nargs="?", help="the start of a digest, 'all', or a file to show")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)
