"""The `oxytorch` command.

A subcommand lives in the module it belongs to: a function `add_command(commands)` there adds a parser with
`commands.add_parser(...)` and sets `parser.set_defaults(run=function)`, where `function(arguments)` returns the exit
status. The module's name goes into `COMMAND_MODULES`.

Exit status: 0 good, 1 something was found, 2 bad usage.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from . import __version__

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

#: Modules of this package that add a subcommand, in the order of the help.
COMMAND_MODULES = ("info", "demo", "bench", "plan", "data.convert", "backend", "environment", "tune.remember")

GOOD, FOUND, BAD_USAGE = 0, 1, 2


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command, with every subcommand in it."""
    parser = argparse.ArgumentParser(
        prog="oxytorch",
        description="Native training acceleration for PyTorch.",
        epilog="Exit status: 0 good, 1 something was found, 2 bad usage.",
    )
    parser.add_argument("--version", action="version", version=f"oxytorch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMAND_MODULES:
        add_command: Callable[[Commands], None] = importlib.import_module(f"oxytorch.{name}").add_command
        add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process by default.

    Returns
    -------
    int
        Exit status: 0 good, 1 something was found, 2 bad usage.
    """
    arguments = make_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has left; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except KeyboardInterrupt:
        return 130
    return status
