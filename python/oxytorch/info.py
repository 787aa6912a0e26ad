"""What Oxytorch found: versions, processor, memory, backends."""

from __future__ import annotations

import argparse
import json
import platform
from typing import TYPE_CHECKING, Any

import torch

from . import __version__

if TYPE_CHECKING:
    from .cli import Commands


def info() -> dict[str, Any]:
    """Return the facts that decide what Oxytorch does here; every value can be written as JSON."""
    return {
        "version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def _run(arguments: argparse.Namespace) -> int:
    facts = info()
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        for key, value in facts.items():
            print(f"{key:<12} {value}")
    return 0


def add_command(commands: Commands) -> None:
    """Add `oxytorch info`."""
    parser = commands.add_parser("info", help="what Oxytorch found: versions, processor, memory, backends")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)
