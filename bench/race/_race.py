"""What the races share: rounds, intervals over starts, promises, the report."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from oxytorch._build_info import BUILD_FOLDER
from oxytorch._C import memory as _memory
from oxytorch.base import Interval, starts_interval, system_info
from oxytorch.bench.turns import machine
from oxytorch.bench.turns.environment import environment
from oxytorch.demo import examples
from torch import Tensor

if TYPE_CHECKING:
    from oxytorch.monitor import Report

sys.path.append(str(examples()))  # oxytorch_demo, whose models are raced

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(BUILD_FOLDER or ROOT / "build/dev")  # where programs in C++ are
LEAST_ROUNDS, MOST_ROUNDS = 7, 200

Times = dict[str, np.ndarray]
"""Seconds of each round, or of each round of each start, by contender, and by ``"contender: phase"`` where there are
several."""


@dataclass
class Contender:
    """What is timed of one contender, phase by phase and in this order, and what it took in each round.

    ``before`` runs ahead of each round's step and is not timed.
    """

    name: str
    phases: dict[str, Callable[[], object]]
    params: list[Tensor] = field(default_factory=list)
    before: Callable[[], object] | None = None
    rounds: list[list[float]] = field(default_factory=list)
    repeats: int = 1

    def run(self, repeats: int = 1) -> list[float]:
        """Seconds of each phase; means over `repeats`."""
        if self.before is not None:
            self.before()
        marks = [time.perf_counter()]
        for phase in self.phases.values():
            for _ in range(repeats):
                phase()
            marks.append(time.perf_counter())
        return [(end - start) / repeats for start, end in itertools.pairwise(marks)]

    def times(self) -> Times:
        """Totals, then phases if there are several."""
        rounds = np.array(self.rounds)
        result = {self.name: rounds.sum(1)}
        if len(self.phases) > 1:
            result |= {f"{self.name}: {phase}": rounds[:, i] for i, phase in enumerate(self.phases)}
        return result


@dataclass(frozen=True)
class Absent:
    """A contender that could not take part, and why."""

    name: str
    why: str


def race(contenders: list[Contender], seconds: float, most_rounds: int = MOST_ROUNDS, pause: float = 0.0) -> Times:
    """Rounds in which every contender steps once (short steps: a group of about a millisecond), order shuffled.

    `pause` seconds pass before each turn where contenders have thread pools of their own, whose idle threads spin.
    """
    for contender in contenders:
        for _ in range(3):
            took = sum(contender.run())
        if contender.before is None and len(contender.phases) == 1:
            contender.repeats = max(1, min(100, int(1e-3 / took)))
    order = random.Random(11)
    began = time.perf_counter()
    for index in range(most_rounds):
        if index >= LEAST_ROUNDS and time.perf_counter() - began > seconds:
            break
        for contender in order.sample(contenders, len(contenders)):
            if pause:
                time.sleep(pause)
            if contender.repeats > 1:
                contender.run()  # Warm caches, as the small cases state.
            contender.rounds.append(contender.run(contender.repeats))
    return {name: values for contender in contenders for name, values in contender.times().items()}


def run_cpp(program: Path, threads: int, seconds: float, names: list[str]) -> dict[str, Times]:
    """What a race in C++ measured (bench/race/rounds.h); `names`: of its cases, all where there are none."""
    command = [str(program), "--threads", str(threads), "--seconds", str(seconds)]
    for name in names:
        command += ["--case", name]
    libraries = os.pathsep.join(
        filter(None, [str(Path(torch.__file__).parent / "lib"), os.environ.get("LD_LIBRARY_PATH")])
    )
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "LD_LIBRARY_PATH": libraries}, timeout=600
    )
    if done.returncode != 0:
        raise SystemExit(f"{program} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    return {case: {name: np.array(values) for name, values in times.items()} for case, times in answer["cases"].items()}


@dataclass
class Measured:
    """What one start gave, or several; the times of a case are arrays of starts x rounds then."""

    cases: dict[str, Times] = field(default_factory=dict)
    absent: dict[str, dict[str, str]] = field(default_factory=dict)
    layout: list[tuple[str, float, float | None]] = field(default_factory=list)
    """What was counted of the narrow layout, with what is promised at most."""

    @property
    def starts(self) -> int:
        """How many, of the case that has fewest."""
        return min(len(np.atleast_2d(values)) for times in self.cases.values() for values in times.values())

    @classmethod
    def joined(cls, parts: list[Measured]) -> Measured:
        """The starts of all, each case with as many rounds as its shortest start has."""
        cases: dict[str, Times] = {}
        for name in dict.fromkeys(name for part in parts for name in part.cases):
            having = [part.cases[name] for part in parts if name in part.cases]
            rounds = min(np.atleast_2d(values).shape[1] for times in having for values in times.values())
            cases[name] = {
                contender: np.concatenate([np.atleast_2d(times[contender])[:, :rounds] for times in having])
                for contender in having[0]
                if all(contender in times for times in having)
            }
        return cls(cases, parts[0].absent, parts[0].layout)

    def to_json(self) -> dict[str, Any]:
        """Plain data; seconds by start and round."""
        cases = {
            case: {name: np.atleast_2d(values).round(9).tolist() for name, values in times.items()}
            for case, times in self.cases.items()
        }
        return {"cases": cases, "absent": self.absent, "layout": self.layout}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Measured:
        """What `to_json` wrote."""
        cases = {
            case: {name: np.array(values) for name, values in times.items()}
            for case, times in document["cases"].items()
        }
        return cls(cases, document["absent"], [tuple(each) for each in document["layout"]])


@dataclass(frozen=True)
class Figure:
    """What was measured and, where something was promised, whether it holds: judged by the estimate.

    ``got`` is None where it could not be measured; ``absent`` says why.
    """

    what: str
    got: Interval | None
    bound: float | None = None
    at_most: bool = False
    absent: str = ""

    @property
    def met(self) -> bool | None:
        """None where nothing was promised or measured."""
        if self.bound is None or self.got is None:
            return None
        return self.got.mid <= self.bound if self.at_most else self.got.mid >= self.bound

    @property
    def verdict(self) -> str:
        """``"met"``, ``"NOT MET"``, ``"absent"`` or nothing."""
        if self.got is None:
            return "absent"
        return {True: "met", False: "NOT MET", None: ""}[self.met]

    @property
    def value(self) -> str:
        """The measured value, or why there is none."""
        return text(self.got) if self.got is not None else self.absent

    @property
    def promise(self) -> str:
        """``">= 8"``, or nothing."""
        return "" if self.bound is None else f"{'<=' if self.at_most else '>='} {self.bound:g}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        got = None
        if self.got is not None:  # JSON has no NaN: one start gives no interval.
            got = [None if math.isnan(value) else value for value in self.got[:3]]
        return {
            "what": self.what,
            "got": got,
            "at_most" if self.at_most else "at_least": self.bound,
            "met": self.met,
            "absent": self.absent,
        }


def text(got: Interval, scale: float = 1.0) -> str:
    """Three significant digits each, whole numbers from a thousand on; counts and single starts have no interval."""
    low, mid, high = (
        f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        for value in (got.low * scale, got.mid * scale, got.high * scale)
    )
    if math.isnan(got.low):
        return f"{mid} (one start)"
    return mid if got.low == got.high else f"{mid} [{low}, {high}]"


def over_starts(values: np.ndarray) -> Interval:
    """Interval of what was measured by start and round, or in the rounds of one start, which gives no interval.

    A start counts by the median of its rounds. A difference of times that noise made negative has no interval either.
    """
    medians = np.median(np.atleast_2d(values), axis=1)
    if (medians <= 0).any():
        return Interval(math.nan, float(np.mean(medians)), math.nan, 0.95)
    return starts_interval(medians)


def ratio(times: Times, slower: str, faster: str) -> Interval:
    """How many times as long `slower` takes, paired by round."""
    return over_starts(np.asarray(times[slower]) / np.asarray(times[faster]))


def same_machine(path: Path, document: dict[str, Any], schema: str, machine_facts: dict[str, str]) -> None:
    """Refuse to go on from a document of another machine or another kind."""
    if document["schema"] != schema:
        raise SystemExit(f"{path} is {document['schema']}, which this race cannot go on from; it writes {schema}")
    for fact in ("cpu", "instructions", "threads", "torch", "GPU"):
        before, now = (each.get(fact, "none") for each in (document["machine"], machine_facts))
        if before != now:
            raise SystemExit(f"{path} was measured with {fact} {before!r}, and this is {now!r}: start a new document")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of a race whose contenders take turns in one process, in several starts of it."""
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument(
        "--starts",
        type=int,
        default=4,
        help="processes, kept ones included; 1 gives no intervals (default %(default)s)",
    )
    parser.add_argument("--keep", type=Path, help="go on from this JSON document of the same machine, if it is there")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="time for each case of a start (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds of the small cases, to see that it works")
    parser.add_argument("--case", action="append", help="only cases whose name holds this; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/report")
    parser.add_argument("--json", type=Path, help="write the JSON document there too")


def is_wanted(arguments: argparse.Namespace, case: str) -> bool:
    """Whether `--case` names a part of this one, or is not given."""
    return arguments.case is None or any(part in case for part in arguments.case)


def another_start(folder: Path, threads: int) -> Measured:
    """The race that is running, in a process of its own."""
    path = folder / "start.json"
    command = [sys.executable, *sys.argv, "--starts", "1", "--out", str(folder), "--json", str(path)]
    command += ["--keep", str(folder / "none")]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False, env=environment(threads))
    if done.returncode != 0:
        raise SystemExit(f"a start failed with status {done.returncode}")
    return Measured.from_json(json.loads(path.read_text(encoding="utf-8")))


def all_starts(
    arguments: argparse.Namespace,
    machine_facts: dict[str, str],
    schema: str,
    measure: Callable[[argparse.Namespace], Measured],
) -> Measured:
    """The starts that `--keep` brings and as many more as `--starts` asks for; a single one runs in this process."""
    starts: list[Measured] = []
    if arguments.keep is not None and arguments.keep.exists():
        document = json.loads(arguments.keep.read_text(encoding="utf-8"))
        same_machine(arguments.keep, document, schema, machine_facts)
        starts.append(Measured.from_json(document))
    if arguments.starts == 1 and not starts:
        starts.append(measure(arguments))
    with tempfile.TemporaryDirectory(prefix="oxytorch-race-") as folder:
        while (done := sum(start.starts for start in starts)) < arguments.starts:
            progress(f"start {done + 1} of {arguments.starts}")
            starts.append(another_start(Path(folder), arguments.threads))
    return Measured.joined(starts)


def resident() -> int:
    """Bytes of this process that are in memory, after what is only kept was given back."""
    gc.collect()
    _memory.give_back_host_memory()
    return int(system_info()["memory"]["resident"])


def most_resident(take: Callable[[], object]) -> int:
    """Bytes of this process that are in memory at the most while `take` runs."""
    resident()
    peak = _memory.most_resident(take)
    if peak is None:
        raise RuntimeError("the kernel does not begin the peak of resident memory anew: /proc/self/clear_refs")
    return peak


def facts(threads: int, device: str = "cpu") -> dict[str, str]:
    """What the figures were measured on."""
    card = {}
    if device == "cuda":
        card = {"GPU": torch.cuda.get_device_name(), "CUDA": str(torch.version.cuda)}
    cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return {
        **machine.describe(threads),
        "isa": str(system_info()["isa"]),
        "L3 cache": cache.read_text(encoding="utf-8").strip() if cache.exists() else "",
        "load before": f"{os.getloadavg()[0]:.1f}",
        **card,
    }


def show_figures(figures: Iterable[Figure]) -> None:
    """One line each."""
    for figure in figures:
        promise = f", promised {figure.promise}" if figure.promise else ""
        print(f"{figure.verdict:<9}{figure.what}: {figure.value}{promise}")


def add_figures(report: Report, figures: Iterable[Figure]) -> None:
    """The table of promises."""
    from oxytorch.monitor import Column  # noqa: PLC0415

    rows = [[figure.what, figure.promise, figure.value, figure.verdict] for figure in figures]
    report.table(["what", Column("promised", "right"), Column("measured", "right"), "verdict"], rows, "Figures")


def new_report(title: str, about: str | None, machine_facts: dict[str, str]) -> Report:
    """A report with its metadata and the first two paragraphs of `about`."""
    from oxytorch.monitor import Report  # noqa: PLC0415

    report = Report(title)
    for key, value in machine_facts.items():
        report.metadata(key, value)
    for paragraph in (about or "").split("\n\n")[:2]:
        report.paragraph(" ".join(paragraph.split()))
    return report


def write(report: Report, document: dict[str, Any], folder: Path, name: str, copy: Path | None) -> None:
    """`name`.json and `name`.html in `folder`, and the JSON at `copy` too."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in filter(None, (folder / f"{name}.json", copy)):
        # All or nothing: a race that is stopped while it writes must not lose what it had.
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps(document) + "\n", encoding="utf-8")
        beside.replace(path)
    report.to_html(folder / f"{name}.html")
    print(f"Report: {folder / f'{name}.html'}")


def progress(line: str) -> None:
    """A line on stderr."""
    print(line, file=sys.stderr, flush=True)
