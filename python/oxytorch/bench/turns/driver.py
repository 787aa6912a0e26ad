"""Starts contenders as processes and drives them in turn, so that only one computes at any time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

__all__ = ["Block", "Run", "Start", "WorkerFailed", "WorkerProcess", "python_command", "race"]

_BOOTSTRAP = (
    "import importlib, json, sys, types; package = types.ModuleType('oxytorch_turns'); "
    "package.__path__ = [sys.argv.pop(1)]; sys.modules['oxytorch_turns'] = package; "
    "sys.path[:0] = json.loads(sys.argv.pop(1)); importlib.import_module(sys.argv.pop(1)).main()"
)


class WorkerFailed(RuntimeError):
    """A contender's process died, hung or answered nonsense; the message says which and shows what it printed."""


def python_command(task: dict[str, Any], module: str, *paths: Path) -> list[str]:
    """The command line of a Python contender: ``module``'s ``main()``, looked for in these folders first.

    It has the modules of this folder as the package ``oxytorch_turns``: rivals never import oxytorch.
    """
    folder = str(Path(__file__).resolve().parent)
    said = json.dumps({**task, "coordinator": os.getpid()})
    return [sys.executable, "-c", _BOOTSTRAP, folder, json.dumps([str(path) for path in paths]), module, said]


class WorkerProcess:
    """A contender's process and its two pipes."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._buffer = b""
        # A session of its own: Ctrl-C reaches the coordinator alone, which then ends every worker.
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, command: str) -> None:
        """Write one command line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended before it was told to") from None

    def receive(self, timeout: float) -> dict[str, Any]:
        """Wait at most ``timeout`` seconds for one answer."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._failure(f"gave no answer for {timeout:.0f} s")
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise self._failure("ended before it was told to")
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            raise self._failure(f"answered {line[:200]!r}, which is not JSON") from None
        if not isinstance(message, dict):
            raise self._failure(f"answered {line[:200]!r}, which is not an object")
        return message

    def _failure(self, what: str) -> WorkerFailed:
        if "ended" in what:
            try:
                code = self._process.wait(timeout=5)
                what += f" (exit status {code})" if code >= 0 else f" (killed by signal {-code})"
            except subprocess.TimeoutExpired:
                pass
        self._errors.seek(0)
        text = self._errors.read()[-4000:].decode(errors="replace").strip()
        printed = f"It printed:\n{text}" if text else "It printed nothing."
        return WorkerFailed(f"the worker {self.name!r} {what}. {printed}")

    def close(self) -> None:
        """Kill the process and free its pipes; nothing if that was done before."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._errors.close()


@dataclass
class Block:
    """What one contender did in one turn."""

    seconds: list[float]
    inner: list[float] | None
    losses: list[float]
    page_faults: int


@dataclass
class Run:
    """What one contender did in one start."""

    contender: str
    seed: int
    compile_seconds: float
    blocks: list[Block] = field(default_factory=list)
    held_out_loss: float = float("nan")
    peak_bytes: int = 0
    notes: list[dict[str, Any]] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    ready: dict[str, Any] = field(default_factory=dict)
    """What the worker said before its first turn."""


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)  # JSON has no NaN


def _block(answer: dict[str, Any]) -> Block:
    # A trainer in C++ shows its phases in its report alone.
    inner = answer["inner"] if any(answer["inner"]) else None
    return Block(answer["seconds"], inner, [_number(loss) for loss in answer["losses"]], int(answer["page_faults"]))


Start = dict[str, Run]
"""One start: every contender's run with the same seed."""


def race(
    commands: dict[str, list[str]],
    *,
    seed: int,
    steps: int,
    block: int,
    environment: dict[str, str],
    timeout: float,
    on_turn: Callable[[str, int], None],
    evaluate: bool = True,
    prepare: bool = False,
    on_failure: Callable[[str, WorkerFailed], None] | None = None,
) -> Start:
    """Run one start: all processes alive at once, driven in turn in a random order, ``block`` steps each.

    ``on_turn(name, steps)`` is called after each turn, with 0 steps when a worker is ready. With ``prepare`` each
    worker is told to prepare when all are ready, one after the other, so that what it does then can be timed. A worker
    that fails is handed to ``on_failure`` and left out from there on.

    Raises
    ------
    WorkerFailed
        Without ``on_failure``, when a worker dies or gives no answer within ``timeout`` seconds. No process outlives
        the call, whatever happens.
    """
    workers: dict[str, WorkerProcess] = {}
    runs: Start = {}
    order = random.Random(seed)

    def lose(name: str, failed: WorkerFailed) -> None:
        if on_failure is None:
            raise failed
        workers.pop(name).close()
        runs.pop(name, None)
        on_failure(name, failed)

    def hear(name: str) -> dict[str, Any] | None:
        try:
            return workers[name].receive(timeout)
        except WorkerFailed as failed:
            lose(name, failed)
            return None

    def tell(name: str, command: str) -> bool:
        try:
            workers[name].send(command)
        except WorkerFailed as failed:
            lose(name, failed)
        return name in workers

    def in_turn(command: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for name in order.sample(list(workers), len(workers)):
            if tell(name, command) and (answer := hear(name)) is not None:
                yield name, answer

    try:
        for name, command in commands.items():
            workers[name] = WorkerProcess(name, command, environment)
        for name in list(workers):
            if (said := hear(name)) is not None:
                runs[name] = Run(name, seed, float(said.get("compile_seconds", 0.0)), ready=said)
                on_turn(name, 0)
        if prepare:
            for name, said in in_turn("prepare"):
                runs[name].compile_seconds, runs[name].ready = float(said.get("compile_seconds", 0.0)), said
                on_turn(name, 0)
        done = 0
        while done < steps:
            count = min(block, steps - done)
            for name, answer in in_turn(f"run {count}"):
                runs[name].blocks.append(_block(answer))
                on_turn(name, count)
            done += count
        if evaluate:  # Nothing is timed any more: all at once.
            for name in [name for name in list(workers) if tell(name, "finish")]:
                if (final := hear(name)) is not None:
                    runs[name].held_out_loss = _number(final["held_out_loss"])
                    runs[name].peak_bytes = int(final["peak_bytes"])
                    report = final["report"] or {}
                    runs[name].notes = list(report.get("settings", []))
                    runs[name].phases = dict(report.get("timings", {}))
        return runs
    finally:
        for worker in workers.values():
            worker.close()
