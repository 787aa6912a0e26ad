"""Environment variables: a registry of those that exist, a judge of those that are set, and presets.

The registry holds what public sources say of the settings of CUDA, NCCL, libfabric and EFA, Intel Gaudi, OpenMP, memory
allocators, PyTorch, oneDNN, MKL, Gloo and launchers. A name outside their prefixes is yours and gets no verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import _C
from .base import neighbours

if TYPE_CHECKING:
    from .cli import Commands

__all__ = [
    "EnvironmentIssue",
    "Preset",
    "PresetSetting",
    "Setting",
    "lint_env",
    "lint_file",
    "lint_script",
    "preset",
    "settings",
]

_native = _C.environment

BACKENDS = ("cuda", "hpu", "cpu")
COMPONENTS = ("torch", "nccl", "aws-ofi-nccl", "libfabric", "gaudi", "cuda", "glibc")


@dataclass(frozen=True)
class Setting:
    """One row of the registry.

    `family` is ``"nccl"``, ``"gaudi"`` and so on; `since` and `until` (the first version without it) count versions of
    `component`; `default` is ``""`` where unset is the default; `allowed` says in words what may be set.
    """

    name: str
    family: str
    component: str
    kind: str
    low: int | None
    high: int | None
    choices: list[str]
    grammar: str
    allowed: str
    default: str
    since: str
    until: str
    deprecated: str
    replacement: str
    what: str
    evidence: str


@dataclass(frozen=True)
class EnvironmentIssue:
    """One judgement.

    Attributes
    ----------
    verdict : str
        ``"unknown"``, ``"obsolete"``, ``"harmful"``, ``"contradicting"``, ``"bad value"``, or ``"fine"`` on request.
    severity : str
        ``"note"`` (leaving it is all right), ``"warning"`` (costs speed or does nothing) or ``"error"`` (the run fails,
        hangs or computes something else).
    name, value : str
        The setting as it was found.
    message : str
        What is wrong and what to do.
    other : str
        The setting that it contradicts, or ``""``.
    replacement : str
        What to set instead, or the nearest real name, or ``""``.
    evidence : str
        The public source.
    file, line : str and int
        Where it stands; ``""`` and 0 in an environment.
    """

    verdict: str
    severity: str
    name: str
    value: str
    message: str
    other: str = ""
    replacement: str = ""
    evidence: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.line else ""
        return f"{place}{self.severity}: {self.message}"


@dataclass(frozen=True)
class PresetSetting:
    """One setting of a preset, with the reason and the public source."""

    name: str
    value: str
    reason: str
    evidence: str


@dataclass(frozen=True)
class Preset:
    """Settings for one goal on one device; `advice` says what to leave alone, `shell` is all of it as shell text."""

    goal: str
    device: str
    advice: str
    settings: list[PresetSetting]
    shell: str

    def as_dict(self) -> dict[str, str]:
        """Return the settings as name and value."""
        return {setting.name: setting.value for setting in self.settings}


def settings() -> list[Setting]:
    """Return the registry, ordered by family."""
    return [Setting(**row) for row in _native.settings()]


def _context(
    backend: str | None,
    versions: Mapping[str, str] | None,
    cores: int | None,
    efa: bool | None,
    compile: bool | None,
    determinism: bool | None,
    openmp: str | None,
    fine: bool,
    neighbours: str = "",
) -> _C.environment.Context:
    if backend not in (None, "", *BACKENDS):
        raise ValueError(f"there is no backend {backend!r} to judge for; choose 'cuda', 'hpu' or 'cpu'.")
    unknown = sorted(set(versions or {}) - set(COMPONENTS))
    if unknown:
        raise ValueError(f"versions of {', '.join(unknown)} are not counted; those are {', '.join(COMPONENTS)}.")
    context = _native.Context()
    context.backend = backend or ""
    context.versions = dict(versions or {})
    context.cores = cores
    context.efa = efa
    context.compile = compile
    context.determinism = determinism
    context.openmp = openmp or ""
    context.fine = fine
    context.neighbours = neighbours
    return context


def _loaded_openmp() -> str:
    """Return the OpenMP library of this process: "libgomp", "libiomp5", "libomp", or "" where unknown."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ""
    return next((name for name in ("libiomp5", "libomp", "libgomp") if f"/{name}" in maps), "")


def _this_process() -> dict[str, Any]:
    """Return what is known of the process that asks."""
    best = _C.backend.best()
    versions = {"torch": torch.__version__.split("+")[0]}
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        # Without a card here the names that are set say more: it may be a login node.
        "backend": best if best in ("cuda", "hpu") else None,
        "versions": versions,
        "cores": _C.base.cores()["usable"],
        "openmp": _loaded_openmp(),
    }


def lint_env(
    mapping: Mapping[str, str] | None = None,
    *,
    backend: str | None = None,
    versions: Mapping[str, str] | None = None,
    cores: int | None = None,
    efa: bool | None = None,
    compile: bool | None = None,
    determinism: bool | None = None,
    openmp: str | None = None,
    fine: bool = False,
) -> list[EnvironmentIssue]:
    """Judge an environment.

    Parameters
    ----------
    mapping : mapping of str to str, optional
        Names and values; by default those of this process, and then `backend`, `versions`, `cores` and `openmp` are
        those of this process too where they are not given, and for a quarter of a second it is looked whether other
        programs use the same cores.
    backend : {"cuda", "hpu", "cpu"}, optional
        What the run computes on; otherwise the names that are set tell, or nothing that depends on it is judged.
    versions : mapping of str to str, optional
        Versions known, by component: ``torch``, ``nccl``, ``aws-ofi-nccl``, ``libfabric``, ``gaudi``, ``cuda``,
        ``glibc``.
    cores : int, optional
        Hardware threads that one process may use.
    efa : bool, optional
        Whether the network is AWS EFA.
    compile : bool, optional
        Whether the program uses `torch.compile`.
    determinism : bool, optional
        Whether it uses `torch.use_deterministic_algorithms`.
    openmp : {"libgomp", "libiomp5", "libomp"}, optional
        The OpenMP library.
    fine : bool
        List the settings that are fine too, with what they do.

    Returns
    -------
    list of EnvironmentIssue
        Empty where there is nothing to say.

    Raises
    ------
    ValueError
        For an unknown backend or component.
    """
    sharing = ""
    if mapping is None:
        mapping = os.environ
        here = _this_process()
        backend = here["backend"] if backend is None else backend
        versions = {**here["versions"], **(versions or {})}
        cores = here["cores"] if cores is None else cores
        openmp = here["openmp"] if openmp is None else openmp
        others = neighbours()
        sharing = others["said"] if others["share_cores"] else ""
    context = _context(backend, versions, cores, efa, compile, determinism, openmp, fine, sharing)
    return [EnvironmentIssue(**found) for found in _native.lint(dict(mapping), context)]


def lint_script(
    text: str,
    file: str = "",
    *,
    backend: str | None = None,
    versions: Mapping[str, str] | None = None,
    cores: int | None = None,
    efa: bool | None = None,
    compile: bool | None = None,
    determinism: bool | None = None,
    openmp: str | None = None,
    fine: bool = False,
) -> list[EnvironmentIssue]:
    """Judge the settings of a shell or sbatch script, which is read and never run.

    Parameters
    ----------
    text : str
        The script. ``A=B``, ``export``, ``env A=B command``, ``A=B command``, ``unset``, ``#SBATCH --export=`` and
        ``srun --export=``, ``mpirun -x``, ``docker run -e``; quotes, comments, continued lines, ``${A:-default}``.
        A value that depends on the run is not judged.
    file : str
        Its name, for `EnvironmentIssue.file`.

    Other parameters are those of `lint_env`; nothing is taken from this process.

    Returns
    -------
    list of EnvironmentIssue
        By line.
    """
    context = _context(backend, versions, cores, efa, compile, determinism, openmp, fine)
    return [EnvironmentIssue(**found) for found in _native.lint_script(text, file, context)]


def lint_file(path: str | os.PathLike[str], **context: Any) -> list[EnvironmentIssue]:
    """Judge the settings in a file.

    Parameters
    ----------
    path : str or path-like
        A script, as in `lint_script`, or a ``/proc/PID/environ``.
    **context
        As in `lint_env`.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    """
    return _lint_text(Path(path).read_bytes(), os.fspath(path), context)


def _lint_text(content: bytes, name: str, context: dict[str, Any]) -> list[EnvironmentIssue]:
    text = content.decode(errors="surrogateescape")
    if "\0" not in text:
        return lint_script(text, name, **context)
    pairs = (entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
    return lint_env({key: value for key, value in pairs if key}, **context)


def preset(
    goal: str,
    device: str,
    *,
    cores: int | None = None,
    processes: int = 1,
    efa: bool = False,
    jemalloc: bool = False,
    recipe_cache: str | os.PathLike[str] = "",
) -> Preset:
    """Return few settings that serve a goal on a device, each with its reason; the judge has nothing against them.

    Parameters
    ----------
    goal : {"throughput", "latency"}
        What to serve.
    device : {"cuda", "hpu", "cpu"}
        What the run computes on.
    cores : int, optional
        Physical cores that the training processes of the host share; those of this process by default.
    processes : int
        Training processes of the host.
    efa : bool
        Gaudi: scale out over the host's EFA network cards.
    jemalloc : bool
        CPU: preload jemalloc.
    recipe_cache : str or path-like
        Gaudi: a folder on a local disk for compiled recipes.

    Returns
    -------
    Preset
        `settings`, `advice`, `shell` and `as_dict()`.

    Raises
    ------
    ValueError
        For an unknown goal or device, counts below 1, or a comma in `recipe_cache`.
    """
    if cores is None:
        cores = _C.base.cores()["usable_physical"]
    made = _native.preset(goal, device, cores, processes, efa, jemalloc, os.fspath(recipe_cache))
    made["settings"] = [PresetSetting(**setting) for setting in made["settings"]]
    return Preset(**made)


def _counted(issues: list[EnvironmentIssue]) -> str:
    counts = {severity: sum(one.severity == severity for one in issues) for severity in ("error", "warning", "note")}
    return ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count)


def _run_lint(arguments: argparse.Namespace) -> int:
    versions = dict(pair.split("=", 1) for pair in arguments.version_of)
    context: dict[str, Any] = {
        "backend": arguments.backend,
        "versions": versions,
        "cores": arguments.cores,
        "efa": arguments.efa or None,
        "compile": arguments.compile or None,
        "determinism": arguments.deterministic or None,
        "fine": arguments.all,
    }
    try:
        if arguments.file is None:
            issues = lint_env(**context)
        elif arguments.file == "-":
            issues = _lint_text(sys.stdin.buffer.read(), "stdin", context)
        else:
            issues = lint_file(arguments.file, **context)
    except (OSError, ValueError) as error:
        print(f"oxytorch lint-env: {error}", file=sys.stderr)
        return 2
    found = any(one.severity != "note" for one in issues)
    if arguments.json:
        print(json.dumps({"issues": [asdict(one) for one in issues], "found": found}, indent=2))
    else:
        for one in issues:
            print(str(one).encode(errors="replace").decode())
        where = "the environment" if arguments.file is None else arguments.file
        print(f"{_counted(issues) or 'nothing to say'} in {where}")
    return 1 if found else 0


def _run_preset(arguments: argparse.Namespace) -> int:
    try:
        made = preset(
            arguments.goal,
            arguments.device,
            cores=arguments.cores,
            processes=arguments.processes,
            efa=arguments.efa,
            jemalloc=arguments.jemalloc,
            recipe_cache=arguments.recipe_cache,
        )
    except ValueError as error:
        print(f"oxytorch preset: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(made), indent=2) if arguments.json else made.shell, end="\n" if arguments.json else "")
    return 0


def _version_of(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not COMPONENT=VERSION")
    return text


def add_command(commands: Commands) -> None:
    """Add `oxytorch lint-env` and `oxytorch preset`."""
    lint = commands.add_parser("lint-env", help="which environment variables are unknown, obsolete or harmful?")
    lint.add_argument(
        "file", nargs="?", metavar="FILE", help="a shell or sbatch script, or - (default: this environment)"
    )
    lint.add_argument("--json", action="store_true", help="print JSON")
    lint.add_argument("--backend", choices=BACKENDS, help="what the run computes on")
    lint.add_argument("--cores", type=int, metavar="N", help="hardware threads of one process")
    lint.add_argument("--version-of", type=_version_of, action="append", default=[], metavar="COMPONENT=VERSION",
                      help="a version known, such as nccl=2.27.3; may be given again")  # fmt: skip
    lint.add_argument("--efa", action="store_true", help="the network is AWS EFA")
    lint.add_argument("--compile", action="store_true", help="the program uses torch.compile")
    lint.add_argument("--deterministic", action="store_true", help="the program asks for deterministic algorithms")
    lint.add_argument("--all", action="store_true", help="list the settings that are fine too")
    lint.set_defaults(run=_run_lint)
    make = commands.add_parser("preset", help="environment variables for throughput or latency, as shell text")
    make.add_argument("goal", choices=("throughput", "latency"))
    make.add_argument("--device", choices=BACKENDS, required=True)
    make.add_argument("--json", action="store_true", help="print JSON")
    make.add_argument("--cores", type=int, metavar="N", help="physical cores of the host (default: those here)")
    make.add_argument("--processes", type=int, default=1, metavar="N", help="training processes of the host")
    make.add_argument("--efa", action="store_true", help="Gaudi: scale out over EFA")
    make.add_argument("--jemalloc", action="store_true", help="CPU: preload jemalloc")
    make.add_argument("--recipe-cache", default="", metavar="DIR", help="Gaudi: a folder for compiled recipes")
    make.set_defaults(run=_run_preset)
