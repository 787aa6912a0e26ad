"""The regression gate: a training step measured against a baseline, for continuous integration."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oxytorch.cli import Commands

__all__ = ["add_command"]

LEAST_STARTS = 5


def _run(arguments: argparse.Namespace) -> int:
    from .command import run  # noqa: PLC0415  (no other command needs it)

    return run(arguments)


def _share(said: str) -> float:
    try:
        value = float(said.removesuffix("%")) / (100.0 if said.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{said!r} is no share above 0, such as 5% or 0.05")
    return value


def _starts(said: str) -> int:
    if not said.isdecimal() or int(said) < LEAST_STARTS:
        raise argparse.ArgumentTypeError(
            f"{said!r} is no number from {LEAST_STARTS}: with fewer starts one in a hundred could not be told from luck"
        )
    return int(said)


def add_command(commands: Commands) -> None:
    """Add `oxytorch bench`."""
    parser = commands.add_parser(
        "bench",
        help="is a training step slower, or larger, than its baseline?",
        description="Measures a training step in several processes and compares it with a baseline file, which is "
        "written where it is not there. Exit status: 0 good, 1 slower or larger by more than the threshold, 2 bad "
        "usage or a baseline of another machine.",
    )
    parser.add_argument(
        "subject",
        metavar="SCRIPT_OR_MODULE:FUNCTION",
        help="a function that returns a step to call, or (model, optimizer, loss_fn, batches)",
    )
    parser.add_argument("--baseline", metavar="FILE", required=True, help="JSON; one file holds any number of subjects")
    parser.add_argument("--update", action="store_true", help="measure the baseline anew")
    parser.add_argument("--threshold", type=_share, default=0.05, metavar="5%", help="what counts (default 5%%)")
    parser.add_argument("--starts", type=_starts, default=6, metavar="N", help="processes to start (%(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of each (cores of this process)")
    parser.add_argument("--label", default="", metavar="TEXT", help="what to call this run in the history")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="longest wait for a step's turn")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)
