"""The first hour on a GPU machine, in slices of at most nine minutes that can be repeated.

    make gpu                              the next slice that is not done, on this machine's CUDA card
    make gpu ARGS="--list"                the slices, and how far each is
    make gpu ARGS="--slice tests"         this one; --again from its beginning
    make gpu ARGS="--all"                 slice after slice while there is time
    make gpu ARGS="--device cpu"          rehearse on the CPU in small sizes
    make gpu ARGS="--device fake"         rehearse the CUDA backend on the fake driver of tests/cuda
    make gpu ARGS="--pack"                collect in build/gpu-pack what a GPU machine without a network may lack

A slice ends by itself when its time is up, and the same command goes on from there: ninja with what is not compiled
yet, the tests and the races with the parts that have no result yet. Results go to bench/results/gpu/ (those of a
rehearsal to build/gpu/), from which docs/results-gpu.md is written. The exit status is 0 also where the time was up,
1 where something failed, 2 where this machine cannot run it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _gpu import machine as machines
from _gpu import pack
from _gpu.machine import ROOT, Machine, Unusable
from _gpu.runner import SCHEMA, Document, is_done, read_json, run_slice, write_json
from _gpu.slices import SLICES, Slice, is_built

LONGEST = 9.0
LEAST_SECONDS = 60.0
"""No slice is begun by --all with less time left."""


def slices_of(machine: Machine) -> list[Slice]:
    """Those that this device has."""
    return [each for each in SLICES if machine.device in each.devices]


def document_of(machine: Machine, which: Slice) -> Document:
    """Return what is known of a slice; that of another card or torch is refused."""
    path = machine.results / which.file
    document = read_json(path)
    for fact in ("GPU", "torch"):
        before, now = document.get("machine", {}).get(fact), machine.facts.get(fact)
        if document and before != now:
            raise Unusable(
                f"{path} is of {fact} {before}, and this machine has {now}: --again replaces it, "
                "--results DIR keeps both"
            )
    return document


def is_bad(part: Document) -> bool:
    """Whether a part has no result, or one in which something failed."""
    return bool(part.get("problem") or part.get("failed"))


def state(machine: Machine, which: Slice) -> str:
    """How far a slice is, in words."""
    document = read_json(machine.results / which.file)
    parts = which.parts(machine)
    done = [part for part in parts if is_done(document, part)]
    failed = sum(1 for part in done if is_bad(document["parts"][part.name]))
    said = "not run yet" if not document.get("parts") else f"{len(done)} of {len(parts)} parts"
    if parts and len(done) == len(parts):
        said = "done" if which.name != "build" or is_built(machine) else "not built here"
    return said + (f", {failed} failed" if failed else "")


def is_complete(machine: Machine, which: Slice) -> bool:
    """Whether there is nothing left to do; a build counts only where it lies in this machine's build folder."""
    document = document_of(machine, which)
    whole = all(is_done(document, part) for part in which.parts(machine))
    return whole and (which.name != "build" or is_built(machine))


def show_list(machine: Machine) -> None:
    """One line for each slice."""
    print(f"On {machine.facts.get('GPU', machine.facts['cpu'])}, torch {machine.facts['torch']}, {machine.device}:")
    for which in slices_of(machine):
        print(f"  {which.name:<12} {state(machine, which):<22} {which.about}")


def run_one(machine: Machine, which: Slice, seconds: float, again: bool, copy: Path | None) -> bool:
    """Run a slice as far as the time goes; whether nothing failed."""
    path = machine.results / which.file
    if again:
        path.unlink(missing_ok=True)
    document = document_of(machine, which)
    if which.name == "build" and document:
        # Whether there is something to compile is ninja's to say.
        document["parts"] = {name: {**found, "unfinished": True} for name, found in document["parts"].items()}
        write_json(path, document)
    rehearsed = "" if machine.device == "cuda" else f" --device {machine.device}"
    command = f'make gpu ARGS="--slice {which.name}{rehearsed}"'
    head: dict[str, Any] = {"schema": SCHEMA, "slice": which.name, "command": command, "machine": machine.facts}
    found = run_slice(path, head, which.parts(machine), seconds, machine.environment, machine.work / "logs")
    for name, part in found["parts"].items():
        if is_bad(part):
            print(f"{which.name}: {name}: {part.get('problem') or str(part['failed']) + ' failed'}")
    print(f"{which.name}: {state(machine, which)}" + ("" if found["complete"] else ", run it again"), flush=True)
    if copy is not None:
        copy.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy / which.file)
        shutil.make_archive(str(copy / "logs"), "gztar", machine.work / "logs")
    return not any(is_bad(part) for part in found["parts"].values())


def write_page(machine: Machine) -> None:
    """Write docs/results-gpu.md anew from the documents, once the library is there that the tables need."""
    if machine.results != ROOT / "bench/results/gpu" or not is_built(machine):
        return
    command = machine.step("python3", "bench/results/tables.py")
    subprocess.run(command, env=machine.environment)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="make gpu", description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="show the slices and how far each is")
    parser.add_argument("--slice", choices=[each.name for each in SLICES], help="run this one")
    parser.add_argument("--all", action="store_true", help="go on with the next slices while there is time")
    parser.add_argument("--again", action="store_true", help="forget the slice's results and begin anew")
    parser.add_argument("--device", choices=["cuda", "cpu", "fake"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds; always so on the CPU")
    parser.add_argument("--minutes", type=float, default=LONGEST, help="end within this time (default %(default)s)")
    parser.add_argument("--python", help="the Python whose torch is meant (default: .venv's, else python3)")
    parser.add_argument("--results", type=Path, help="keep the JSON documents there")
    parser.add_argument("--copy", type=Path, help="copy each document there too, and all logs")
    parser.add_argument("--pack", action="store_true", help="collect build/gpu-pack and run nothing")
    made = parser.parse_args(arguments)
    if made.again and not made.slice:
        parser.error("--again needs --slice NAME")
    if not 0 < made.minutes <= LONGEST:
        parser.error(f"--minutes is more than 0 and at most {LONGEST:g}, not {made.minutes:g}")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says."""
    asked = parse(arguments)
    began = time.monotonic()
    try:
        if asked.pack:
            return pack.main(asked.python or machines.default_python())
        machine = machines.find(asked.device, asked.quick, asked.python, asked.results)
        if asked.list:
            show_list(machine)
            return 0
        here = slices_of(machine)
        chosen = [each for each in here if each.name == asked.slice] if asked.slice else here
        if not chosen:
            raise Unusable(f"there is no slice {asked.slice} on {asked.device}: torch has no such device there")
        todo = chosen if asked.slice else [each for each in chosen if not is_complete(machine, each)]
        if asked.slice and asked.slice != "build" and not is_built(machine):
            todo = [SLICES[0], *todo]  # a fresh machine
        if not todo:
            print("make gpu: every slice is done; --slice NAME --again runs one anew")
        good = True
        for index, which in enumerate(todo):
            seconds = 60 * asked.minutes - (time.monotonic() - began)
            if index and (seconds < LEAST_SECONDS or not (asked.all or asked.slice)):
                break
            good = run_one(machine, which, seconds, asked.again and which.name == asked.slice, asked.copy) and good
            if not is_complete(machine, which):
                break
        write_page(machine)
    except Unusable as problem:
        print(f"make gpu: {problem}", file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    # A program that is asked to end stops what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.chdir(ROOT)
    sys.exit(main())
