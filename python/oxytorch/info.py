"""What Oxytorch found: versions, processor, memory, backends."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
from typing import TYPE_CHECKING, Any

import torch

from . import _C
from .base import format_size, system_info
from .machine import host_report, host_report_text

if TYPE_CHECKING:
    from .cli import Commands


def info(host: bool = False) -> dict[str, Any]:
    """Return the facts that decide what Oxytorch does here; every value can be written as JSON.

    Parameters
    ----------
    host
        Whether to look at the host's settings too.

    Returns
    -------
    dict
        ``version``; ``torch``, the version that is running, and ``torch_built``, the one Oxytorch was built against;
        ``python``; ``threads`` (torch's intra-operation threads); all keys of `oxytorch.base.system_info`;
        ``backends``, as from `oxytorch.available_backends`; with `host` also ``host``, as from
        `oxytorch.machine.host_report`.
    """
    facts = {
        "version": _C.__version__,
        "torch": str(torch.__version__),
        "torch_built": _C.torch_version,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        **system_info(),
        "backends": _backends(),
    }
    if host:
        facts["host"] = host_report()
    return facts


def _backends() -> list[dict[str, Any]]:
    if importlib.util.find_spec("oxytorch.backend") is None:
        return []
    found: list[dict[str, Any]] = importlib.import_module("oxytorch.backend").available_backends()
    return found


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else format_size(count)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The same facts for a reader."""
    cores, memory, features = facts["cores"], facts["memory"], facts["features"]
    quota = "no quota" if cores["quota"] is None else f"a quota of {cores['quota']:g}"
    native = "in hardware" if features["native_bf16"] else "not in hardware"
    sets = [name for name, has in features.items() if has and not name.startswith("native_")]
    lines = [
        ("oxytorch", facts["version"]),
        ("torch", f"{facts['torch']}, built for {facts['torch_built']}, {facts['threads']} threads"),
        ("python", facts["python"]),
        ("processor", facts["processor"] or "unknown"),
        ("cores", f"{cores['usable']} to use ({cores['affinity']} by affinity, {quota}; {cores['logical']} in all)"),
        (
            "memory",
            f"{_bytes(memory['available'])} free of {_bytes(memory['limit'])}, {_bytes(memory['resident'])} taken",
        ),
        ("kernels", f"{facts['isa']} (of {', '.join(facts['isas'])})"),
        ("bf16", native),
        ("features", " ".join(sets) or "none"),
    ]
    lines += [("backend", f"{one['name']} (score {one['score']}): {one['reason']}") for one in facts["backends"]]
    return lines


def _run_host(data_directory: str, as_json: bool) -> int:
    rows = host_report(data_directory)
    print(json.dumps(rows, indent=2) if as_json else host_report_text(data_directory).rstrip())
    return int(any(row["verdict"] == "change" for row in rows))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.host is not None:
        return _run_host(arguments.host, arguments.json)
    facts = info()
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        for key, value in _lines(facts):
            print(f"{key:<10} {value}")
    return 0


def add_command(commands: Commands) -> None:
    """Add `oxytorch info`."""
    parser = commands.add_parser("info", help="what Oxytorch found: versions, processor, memory, backends")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--host",
        nargs="?",
        const="",
        metavar="DATA_DIRECTORY",
        help="instead: the host's settings that training feels, with the command to change each that slows it down "
        "(exit status 1 where there is one); nothing is changed",
    )
    parser.set_defaults(run=_run)
