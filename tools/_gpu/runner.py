"""Runs the parts of a slice within a time limit, and keeps what they gave in a JSON document."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = "oxytorch-gpu/1"
GRACE = 15.0
"""Seconds that a program has to end after it was asked to; they are taken from the slice's time."""
PRINTED = 20
"""Lines that are kept of what a failing command printed."""
FULL_TURN = 0.8
"""A part that had this share of a slice to itself and did not finish will not finish in the next one either."""

Document = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int | None
    """None where its time was up."""
    seconds: float
    tail: list[str]
    """Its last lines."""

    @property
    def failure(self) -> str:
        """Why it failed; "" where it did not."""
        if self.status in (0, None):
            return ""
        how = f"exit status {self.status}" if (self.status or 0) > 0 else f"killed by signal {-(self.status or 0)}"
        return f"{how}: {next((line for line in reversed(self.tail) if line.strip()), 'it printed nothing').strip()}"


@dataclass(frozen=True)
class Part:
    """One command of a slice, and how to read what it found.

    ``command`` is given the seconds that are left. ``collect`` reads the result after the command ended, also where its
    time was up and ``goes_on`` says that the next run continues it; then ``unfinished`` in the result says so.
    """

    name: str
    command: Callable[[float], list[str]]
    collect: Callable[[Outcome], Document]
    environment: dict[str, str] = field(default_factory=dict)
    goes_on: bool = False
    accepted: tuple[int, ...] = (0,)
    """Exit statuses of a command that ran to its end and left a result."""
    prepare: Callable[[Document], None] = lambda _kept: None
    """Called before the command, with the result of an unfinished run or nothing."""
    must_succeed: bool = False
    """A failure leaves it to be done again; otherwise the failure is the result."""


def write_json(path: Path, document: Document) -> None:
    """Write all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def read_json(path: Path) -> Document:
    """A document, or an empty one where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def is_done(document: Document, part: Part) -> bool:
    """Whether the part has its result."""
    found = document.get("parts", {}).get(part.name)
    return found is not None and not found.get("unfinished") and not (part.must_succeed and found.get("problem"))


def run(command: list[str], environment: dict[str, str], seconds: float, log: Path, stop: int) -> Outcome:
    """Run a command for at most that long and show what it prints; no process of it is left afterwards."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    tail: deque[str] = deque(maxlen=40)
    # A group of its own, so that all it started can be stopped; its end does not depend on ours.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )

    def show() -> None:
        assert process.stdout is not None
        with log.open("wb") as file, process.stdout as printed:
            for line in printed:
                file.write(line)
                text = line.decode(errors="replace")
                tail.append(text.rstrip("\n"))
                sys.stdout.write(text)
                sys.stdout.flush()

    def send(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    in_time = True
    try:
        try:
            process.wait(max(0.1, seconds - GRACE))
        except subprocess.TimeoutExpired:
            in_time = False
            send(stop)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(GRACE, max(0.1, seconds / 2)))
    finally:
        send(signal.SIGKILL)
        process.wait()
        reader.join(timeout=5)
    return Outcome(process.returncode if in_time else None, time.monotonic() - began, list(tail))


def run_part(
    part: Part, kept: Document, seconds: float, whole: float, environment: dict[str, str], log: Path
) -> Document:
    """Run one part; its result, or an empty document where its time was up and nothing is kept."""
    part.prepare(kept)
    outcome = run(part.command(seconds), {**environment, **part.environment}, seconds, log, signal.SIGINT)
    spent = round(outcome.seconds + kept.get("seconds", 0.0), 1)
    if outcome.status is None and not part.goes_on:
        if seconds < FULL_TURN * whole:
            return {}
        return {"problem": f"it did not finish in {outcome.seconds:.0f} s", "seconds": spent}
    printed = outcome.tail[-PRINTED:]
    try:
        found = part.collect(outcome)
    except (OSError, ValueError, KeyError) as problem:  # no result: the command's own words say more
        why = outcome.failure or f"it left no result that can be read ({type(problem).__name__}: {problem})"
        return {"problem": why, "printed": printed, "seconds": spent} if outcome.status is not None else {}
    if outcome.status is not None and outcome.status not in part.accepted:
        found |= {"problem": outcome.failure, "printed": printed}
    if outcome.status is None and found:
        found["unfinished"] = True
    return {**found, "seconds": spent} if found else {}


def run_slice(
    path: Path, head: Document, parts: list[Part], seconds: float, environment: dict[str, str], logs: Path
) -> Document:
    """Run the parts that have no result yet, as far as the time goes; write the document after each."""
    deadline = time.monotonic() + seconds
    document = {**head, "parts": read_json(path).get("parts", {})}
    while left := [part for part in parts if not is_done(document, part)]:
        remaining = deadline - time.monotonic()
        if remaining < min(2 * GRACE, seconds / 2):
            break
        part = left[0]
        print(f"== {head['slice']}: {part.name}, at most {remaining:.0f} s", flush=True)
        kept = document["parts"].get(part.name, {})
        kept = kept if kept.get("unfinished") else {}
        log = logs / f"{head['slice']}-{part.name.replace(' ', '_').replace('/', '_')}.log"
        found = run_part(part, kept, remaining, seconds, environment, log)
        if found:
            document["parts"][part.name] = found
        document["complete"] = all(is_done(document, each) for each in parts)
        write_json(path, document)
        if not is_done(document, part):
            break
    document["complete"] = all(is_done(document, each) for each in parts)
    write_json(path, document)
    return document
