"""The command line of a race on a device that comes to figures, and its reports."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _race import ROOT, Figure, add_figures, facts, new_report, show_figures, write
from device_tail import Times

Measure = Callable[[torch.device, bool, float], tuple[list[Figure], Times]]
"""Of a device, whether quick, and seconds of measuring: figures, and seconds of a step by contender and round."""


def run(about: str | None, name: str, schema: str, measure: Measure, seconds: float) -> int:
    """Run it as the command line says; the exit status."""
    title = (about or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=seconds, help="of measuring")
    parser.add_argument("--quick", action="store_true", help="a small case: to see that it works")
    parser.add_argument("--json", type=Path, help="a second place for the JSON")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "report", help="folder of the reports")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"{name}: there is no CUDA device here.", file=sys.stderr)
        return 2
    figures, times = measure(device, arguments.quick, 0.5 if arguments.quick else arguments.seconds)
    machine = facts(torch.get_num_threads(), device.type)
    show_figures(figures)
    report = new_report(title, None, machine)
    add_figures(report, figures)
    document = {
        "schema": schema,
        "machine": machine,
        "figures": [figure.to_json() for figure in figures],
        "step_seconds": {each: values.tolist() for each, values in times.items()},
    }
    write(report, document, arguments.out, name, arguments.json)
    return 0
