"""`oxytorch bench`: the bundled benchmarks, and the regression gate for continuous integration.

The gate measures a training step against a baseline.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from oxytorch.cli import Commands

__all__ = ["add_command"]

LEAST_STARTS = 5


def _bundled() -> dict[str, Path]:
    """Scripts of the benchmarks that come with the package, by name; in a checkout they are those of `bench/race`."""
    packaged = Path(__file__).parent / "race"
    folder = packaged if packaged.is_dir() else Path(__file__).resolve().parents[3] / "bench" / "race"
    return {path.stem.replace("_", "-"): path for path in sorted(folder.glob("[!_]*.py"))}


def _run(arguments: argparse.Namespace) -> int:
    words, benchmarks = arguments.words, _bundled()
    if words and words[0] in benchmarks:
        script = benchmarks[words[0]]
        # A package's folder is no place for reports.
        out = ["--out", "oxytorch-report"] if script.is_relative_to(Path(__file__).parent) else []
        return subprocess.run([sys.executable, str(script), *out, *words[1:]], check=False).returncode
    from .command import run  # noqa: PLC0415  (no other command needs it)

    return run(_gate_parser(benchmarks).parse_args(words))


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


class _WholeNames(argparse.HelpFormatter):
    """Breaks no line within a name such as "step-tail"."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        return "\n".join(lines)


def _gate_parser(benchmarks: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oxytorch bench",
        description="Measures a training step in several processes and compares it with a baseline file, which is "
        "written where it is not there. Exit status: 0 good, 1 slower or larger by more than the threshold, 2 bad "
        "usage or a baseline of another machine.",
        epilog=f"Bundled benchmarks, run by name (`oxytorch bench NAME --help` lists the options of one): "
        f"{', '.join(benchmarks) or 'none in this installation'}.",
        formatter_class=_WholeNames,
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
    return parser


def add_command(commands: Commands) -> None:
    """Add `oxytorch bench`."""
    # What follows has options of the gate or of a benchmark: no character starts an option here, so all is passed on.
    parser = commands.add_parser(
        "bench",
        help="run a bundled benchmark, or: is a training step slower, or larger, than its baseline?",
        add_help=False,
        prefix_chars="\0",
    )
    parser.add_argument("words", nargs="*")
    parser.set_defaults(run=_run)
