"""Device backends: which there are, how good each is here, and how another one joins.

Three ways in: built in (`cpu`, `sim`); a library `liboxytorch-backend-<name>.so` in a directory that
`OXYTORCH_BACKEND_PATH` names, or beside Oxytorch's own; a Python entry point of the group `oxytorch.backends`, which
gives the path of such a library, or a callable that returns it. Entry points are loaded when the backends are first
listed; `OXYTORCH_BACKEND_AUTOLOAD=0` leaves them alone. A broken one is a warning with its reason.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from . import _C

if TYPE_CHECKING:
    from .cli import Commands

__all__ = ["BackendInfo", "DeviceInfo", "available_backends", "best", "configure_sim", "load", "problems"]

ENTRY_POINT_GROUP = "oxytorch.backends"


class DeviceInfo(TypedDict):
    """One device: `torch_device` is the type torch knows it by, or None; `memory_bytes` is its memory."""

    name: str
    architecture: str
    torch_device: str | None
    memory_bytes: int


class BackendInfo(TypedDict):
    """One backend: `score` 0 means unusable here, `reason` says why in one sentence."""

    name: str
    score: int
    reason: str
    devices: list[DeviceInfo]
    description: str
    origin: str


def _load_entry_point(entry: importlib.metadata.EntryPoint) -> None:
    try:
        target = entry.load()
        path = target() if callable(target) else target
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"it gives {path!r}, not the path of a library")
        load(path)
    except Exception as error:  # an outsider's code may raise anything
        warnings.warn(
            f"the backend entry point '{entry.name}' ({entry.value}) is left out: {error}. "
            f"Mend or uninstall it, or set OXYTORCH_BACKEND_AUTOLOAD=0.",
            RuntimeWarning,
            stacklevel=4,
        )


@functools.cache
def _autoload() -> None:
    """Load the entry points, once per process."""
    if os.environ.get("OXYTORCH_BACKEND_AUTOLOAD", "1") == "0":
        return
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        _load_entry_point(entry)


def available_backends() -> list[BackendInfo]:
    """List every backend, best score first; those unusable here too.

    Returns
    -------
    list of dict
        Per backend `name`, `score` (0: unusable here), `reason` (one sentence), `devices` (list of dict with `name`,
        `architecture`, `torch_device`, `memory_bytes`), `description` and `origin` ("built in" or a path).

    Warns
    -----
    RuntimeWarning
        For an entry point of the group `oxytorch.backends` that cannot be loaded, once per process. A library in
        `OXYTORCH_BACKEND_PATH` that is refused goes to the log and to :func:`problems`.
    """
    _autoload()
    return cast("list[BackendInfo]", _C.backend.available_backends())


def best() -> str:
    """Return the name of the usable backend with the best score that is not simulated; `"cpu"` is always there."""
    _autoload()
    return _C.backend.best()


def problems() -> list[tuple[str, str]]:
    """Return the libraries that were found and refused, as (path, reason)."""
    available_backends()
    return _C.backend.problems()


def load(path: str | os.PathLike[str]) -> str:
    """Load one backend library; the same file again gives the same backend. It is never unloaded.

    Parameters
    ----------
    path : str or path-like
        A `liboxytorch-backend-<name>.so`.

    Returns
    -------
    str
        The backend's name.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    NotImplementedError
        If it cannot be loaded or exports no backend.
    ValueError
        If its table breaks the contract: another version, too small, an empty slot, a bad name.
    RuntimeError
        If a backend of that name is there already.
    """
    return _C.backend.load(os.fspath(path))


def configure_sim(settings: str) -> None:
    """Set the simulated devices of the backend `sim` from now on.

    Parameters
    ----------
    settings : str
        As in the environment variable `OXYTORCH_SIM`, for example
        `"devices=2,memory=64MiB,latency_us=50,link_gbps=100,fault=alloc:3"`.

    Raises
    ------
    ValueError
        For an unknown setting or a bad value.
    """
    _C.backend.configure_sim(settings)


def conformance_program() -> Path:
    """Return the path of `oxytorch-conformance`: the one in this package, else the one on `PATH`.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    packaged = Path(__file__).parent / "bin" / "oxytorch-conformance"
    if packaged.is_file():
        return packaged
    found = shutil.which("oxytorch-conformance")
    if found is None:
        raise FileNotFoundError("there is no oxytorch-conformance in this package nor on PATH: run `make build`.")
    return Path(found)


def _run_conformance(arguments: argparse.Namespace) -> int:
    command = [str(conformance_program())]
    command += [] if arguments.backend is None else [arguments.backend]
    command += [f"--{flag.replace('_', '-')}" for flag in ("json", "list", "fail_fast") if getattr(arguments, flag)]
    command += [] if arguments.only is None else ["--only", arguments.only]
    command += [] if arguments.timeout is None else ["--timeout", str(arguments.timeout)]
    return subprocess.run(command, check=False).returncode


def add_command(commands: Commands) -> None:
    """Add `oxytorch conformance`."""
    parser = commands.add_parser("conformance", help="does a device backend keep the contract?")
    parser.add_argument("backend", nargs="?", help="a backend library or the name of a backend (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", action="store_true", help="list the checks")
    parser.add_argument("--only", metavar="CHECK,...", help="these checks only")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first check that does not pass")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds after which a check hangs (default: 60)")
    parser.set_defaults(run=_run_conformance)
