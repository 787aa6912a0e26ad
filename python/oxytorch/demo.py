"""`oxytorch demo`: the example ``oxytorch_demo``, from a checkout's examples or from where a wheel has them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oxytorch.cli import Commands

__all__ = ["add_command", "examples"]


def examples() -> Path:
    """The folder that ``oxytorch_demo`` is imported from."""
    packaged = Path(__file__).resolve().parent / "examples"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "examples"


def _run(arguments: argparse.Namespace) -> int:
    sys.path.append(str(examples()))
    from oxytorch_demo.command import run  # noqa: PLC0415  (its needs are the demo's alone)

    return run(arguments)


def add_command(commands: Commands) -> None:
    """Add `oxytorch demo`."""
    parser = commands.add_parser(
        "demo",
        help="train three models with plain PyTorch, with the best of stock PyTorch and with Oxytorch, and compare",
        description="Trains an MLP, a CNN and a byte-level GPT with plain PyTorch, with the best of stock PyTorch and "
        "with Oxytorch, on data that this machine has. Exit status 1: a held-out loss is worse than it should be, or "
        "a contender failed.",
    )
    parser.add_argument(
        "--only", action="append", choices=("mlp", "cnn", "gpt"), help="this model only; may be repeated"
    )
    parser.add_argument(
        "--compile", action="store_true", help="add torch.compile'd contenders (compiling takes minutes)"
    )
    parser.add_argument("--cpp", action="store_true", help="the GPT from a C++ program, with no Python in the process")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, to see that everything works")
    parser.add_argument("--json", metavar="FILE", help="write every figure as JSON; '-' prints it instead of the table")
    parser.add_argument(
        "--out", metavar="DIR", default="oxytorch-report", help="folder of the HTML report (%(default)s)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads of every contender (cores of this process)")
    parser.add_argument("--seconds", type=float, metavar="S", default=110.0, help="training time in all (%(default)s)")
    parser.add_argument(
        "--steps-planned",
        type=int,
        metavar="N",
        help="length of the run whose beginning this is: tuning is to repay itself in it (10,000; with --quick 500)",
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", default=180.0, help="longest wait for a worker (%(default)s)"
    )
    parser.set_defaults(run=_run)
