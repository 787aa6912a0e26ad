"""The slices of `make gpu`: what each runs, and what it keeps of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counts import cases, outcome

from .machine import ROOT, Machine, keep_times, sources_digest
from .runner import Document, Outcome, Part, write_json

FILES_A_PART = 20
"""Of Python tests: starting the workers costs seconds, and a part that is cut off runs anew."""
ON_DEVICE = re.compile(r"^import torch_device|\bdevice: torch\.device", re.MULTILINE)
"""In a file with tests that go by OXYTORCH_DEVICE."""
MOST_FAILURES = 100
STARTS, QUICK_STARTS = 2, 1
TAIL_CASES = ("large", "small", "graph", "waits", "table")
WORKLOADS = ("gpt", "resnet", "bert")
SOON = (
    "eager,stock 1,stock compiled,stock reduce-overhead,stock graph,stock compiled graph,oxytorch basic,"
    "oxytorch advanced,oxytorch plan.step"
)
AUTOTUNE_SECONDS = 300.0
"""With less time max-autotune is left out, which compiles GPT-2 small for 110 s: a start cut off keeps nothing."""
PROGRESS = re.compile(r"\[(\d+)/(\d+)\]")


@dataclass(frozen=True)
class Slice:
    """One line of `make gpu ARGS=--list`."""

    name: str
    about: str
    parts: Callable[[Machine], list[Part]]
    devices: tuple[str, ...] = ("cuda", "cpu")

    @property
    def file(self) -> str:
        """Its document's name."""
        return f"{self.name.replace('-', '_')}.json"


# --- build -----------------------------------------------------------------------------------------------------------


def build_stamp(machine: Machine) -> Path:
    """The file that holds the digest of the sources that were built."""
    return machine.build / ".gpu-built"


def is_built(machine: Machine) -> bool:
    """Whether this machine's build folder holds a whole build of these sources."""
    stamp = build_stamp(machine)
    return stamp.exists() and stamp.read_text(encoding="utf-8") == sources_digest()


def build_parts(machine: Machine) -> list[Part]:
    """Everything, tests and benchmarks too; ninja goes on where it was cut off."""

    def prepare(_kept: Document) -> None:
        keep_times(machine.build)

    def collect(outcome: Outcome) -> Document:
        seen = [PROGRESS.match(line) for line in outcome.tail]
        last = next((found for found in reversed(seen) if found), None)
        done, total = (int(last[1]), int(last[2])) if last else (0, 0)
        if outcome.status == 0:
            build_stamp(machine).write_text(sources_digest(), encoding="utf-8")
            print(f"build: done, {total} units in this run")
        elif outcome.status is None:
            print(f"build: {done} of {total} units that were left, run it again")
        return {"units": done, "of": total}

    command = [str(ROOT / "tools/build.sh"), "all"]
    return [Part("build", lambda _s: command, collect, goes_on=True, prepare=prepare, must_succeed=True)]


# --- conformance -----------------------------------------------------------------------------------------------------


def into(path: Path, command: list[str]) -> list[str]:
    """The command with its standard output in a file, which is not left from an earlier run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return ["bash", "-c", 'out=$1; shift; "$@" > "$out"', "into", str(path), *command]


def conformance_parts(machine: Machine) -> list[Part]:
    """The backend contract on the card."""
    report = machine.work / "conformance.json"
    fixtures = machine.build / "tests/cuda/fixtures"
    fake = machine.device == "fake"
    # That backend has the kernels also where there is no nvcc: the fake driver takes any image for them.
    target = str(fixtures / "liboxytorch-backend-cuda-faults.so") if fake else machine.device
    environment = {}
    if fake:
        environment["OXYTORCH_CUDA_DRIVER"] = str(fixtures / "fake/libcuda.so.1")
        environment["OXY_FAKE_CUDA"] = "devices=2,memory=67108864"

    def collect(_outcome: Outcome) -> Document:
        said = json.loads(report.read_text(encoding="utf-8"))
        if "checks" not in said:
            return {**said, "problem": f"the backend was refused: {said.get('refused')}"}
        bad = [check for check in said["checks"] if check["verdict"] not in ("pass", "skip")]
        if not said["checks"]:
            return {**said, "problem": f"unusable here: {said['reason']}"}
        print(f"conformance: {said['passed']} passed, {said['skipped']} skipped, {said['failed']} failed")
        skipped = {check["name"]: check["seen"] for check in said["checks"] if check["verdict"] == "skip"}
        counts = {"passed": said["passed"], "skipped": said["skipped"], "failed": said["failed"]}
        head = {"backend": said["backend"], "reason": said["reason"], "devices": said["devices"]}
        return {**head, **counts, "bad": bad, "skips": skipped}

    command = machine.step("python3", "-m", "oxytorch", "conformance", target, "--json")
    return [Part("checks", lambda _s: into(report, command), collect, environment, accepted=(0, 1))]


# --- tests -----------------------------------------------------------------------------------------------------------


def read_junit(path: Path, suites: Path) -> Document:
    """Counts and failures of a JUnit file, and of the suites that ctest ran."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures: list[dict[str, str]] = []
    for case in cases(path, suites):
        counts[outcome(case)] += 1
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        if bad is not None:
            why = (bad.get("message") or bad.text or "").strip().replace(f"{ROOT}/", "")
            failures.append({"test": f"{case.get('classname')}::{case.get('name')}", "why": why[:300]})
    return {**counts, "failures": failures[:MOST_FAILURES]}


def chunks(files: list[Path], size: int) -> list[list[Path]]:
    """The same files in the same order always make the same parts."""
    return [files[start : start + size] for start in range(0, len(files), size)]


def test_parts(machine: Machine) -> list[Part]:
    """The C++ tests, the Python tests that go by the device, then the others some twenty files at a time."""
    cores = str(machine.cores)
    device = "cpu" if machine.device == "fake" else machine.device
    environment = {"OXYTORCH_DEVICE": device, "OMP_WAIT_POLICY": "passive"}
    suites = machine.build / "test-suites"

    def part(name: str, command: Callable[[Path], list[str]]) -> Part:
        report = machine.work / f"tests-{name.replace(' ', '-').replace('/', '-')}.xml"

        def start(_seconds: float) -> list[str]:
            report.parent.mkdir(parents=True, exist_ok=True)
            for old in (report, *suites.glob("*.xml")):
                old.unlink(missing_ok=True)
            return machine.step(*command(report))

        def collect(_outcome: Outcome) -> Document:
            found = read_junit(report, suites)
            print(f"{name}: {found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped")
            return found

        return Part(name, start, collect, environment, accepted=(0, 1, 8))  # 8: ctest, where tests failed

    def ctest(*labels: str) -> Callable[[Path], list[str]]:
        base = ["ctest", "--test-dir", str(machine.build), "-j", cores, "--timeout", "300", "--no-tests=error"]
        return lambda report: [*base, *labels, "--output-junit", str(report)]

    def pytest(files: list[Path]) -> Callable[[Path], list[str]]:
        names = [path.relative_to(ROOT).as_posix() for path in files]
        return lambda report: ["python3", "-m", "pytest", "-n", cores, f"--junit-xml={report}", *names]

    if machine.device == "fake":
        return [part("C++", ctest("-L", "^cuda$"))]
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    if machine.quick:
        few = [path for path in files if path.parent.name == "base"]
        return [part("C++", ctest("-L", "^base$")), part("Python", pytest(few))]
    first = [file for file in files if ON_DEVICE.search(file.read_text(encoding="utf-8"))]
    groups = chunks([file for file in files if file not in first], FILES_A_PART)
    others = [part(f"Python, the rest {n} of {len(groups)}", pytest(group)) for n, group in enumerate(groups, 1)]
    on_device = part("Python on the device", pytest(first))
    return [part("C++", ctest("-L", "torch", "-LE", "device")), on_device, *others]


# --- races -----------------------------------------------------------------------------------------------------------


def tail_parts(machine: Machine) -> list[Part]:
    """Each case in a process of its own: an error of the card ends the process that met it."""

    def part(case: str) -> Part:
        report = machine.work / f"step-tail-{case}.json"
        words = ["python3", "bench/race/cuda/device_tail.py", "--device", machine.device, "--case", case]
        words += ["--json", str(report), "--out", str(machine.work), *(["--quick"] if machine.quick else [])]
        words += ["--program", str(machine.build / "bench/backend/backend_bench")]

        def start(_seconds: float) -> list[str]:
            report.unlink(missing_ok=True)
            return machine.step(*words)

        def collect(_outcome: Outcome) -> Document:
            document = json.loads(report.read_text(encoding="utf-8"))
            return {"cases": document["cases"], "figures": document["figures"]}

        return Part(case, start, collect)

    return [part(case) for case in TAIL_CASES]


def figures_part(machine: Machine, name: str, race: str) -> list[Part]:
    """One part: a race of bench/race/cuda that comes to figures."""
    report = machine.work / f"{race}.json"
    words = ["python3", f"bench/race/cuda/{race}.py", "--device", machine.device]
    words += ["--json", str(report), "--out", str(machine.work), *(["--quick"] if machine.quick else [])]

    def start(_seconds: float) -> list[str]:
        report.unlink(missing_ok=True)
        return machine.step(*words)

    def collect(_outcome: Outcome) -> Document:
        document = json.loads(report.read_text(encoding="utf-8"))
        return {"step_seconds": document["step_seconds"], "figures": document["figures"]}

    return [Part(name, start, collect)]


def accelerate_parts(machine: Machine) -> list[Part]:
    """The orchestrator's race, one workload at a time; what its compilers found is kept for the next run."""
    starts = QUICK_STARTS if machine.quick else STARTS

    def part(workload: str) -> Part:
        report = machine.work / f"accelerate-{workload}.json"

        def prepare(kept: Document) -> None:
            report.unlink(missing_ok=True)
            if kept:
                write_json(report, kept["document"])

        def start(seconds: float) -> list[str]:
            words = ["python3", "bench/race/orchestrator.py", "--device", machine.device, "--workloads", workload]
            words += ["--starts", str(starts), "--keep", str(report), "--json", str(report), "--out", str(machine.work)]
            words += ["--cache", str(machine.work / "cache"), "--minutes", f"{seconds / 60:.2f}", "--verbose"]
            if machine.device == "cpu":  # enough to see that it works
                words += ["--contenders", "eager,stock 1,oxytorch basic"]
            elif seconds < AUTOTUNE_SECONDS:
                words += ["--contenders", SOON]
            return machine.step(*words, *(["--quick"] if machine.quick else []))

        def collect(_outcome: Outcome) -> Document:
            if not report.exists():
                return {}
            document: Any = json.loads(report.read_text(encoding="utf-8"))
            entries = document["workloads"][workload]["entries"].values()
            done = max((len(entry["starts"]) for entry in entries), default=0)
            print(f"{workload}: {done} of {starts} starts" + ("" if done >= starts else ", run it again"))
            return {"document": document, "starts": done, **({"unfinished": True} if done < starts else {})}

        return Part(workload, start, collect, goes_on=True, prepare=prepare)

    return [part(workload) for workload in WORKLOADS]


SLICES = (
    Slice("build", "compile for this machine's torch and CUDA", build_parts, ("cuda", "cpu", "fake")),
    Slice("conformance", "the backend contract, on the card", conformance_parts, ("cuda", "cpu", "fake")),
    Slice("tests", "C++ and Python tests with OXYTORCH_DEVICE=cuda", test_parts, ("cuda", "cpu", "fake")),
    Slice("step-tail", "clip, AdamW and moving average against torch's fused, foreach, compiled", tail_parts),
    Slice(
        "loader",
        "batches of oxytorch.data.Loader copied beside steps: their rate, and what a step waits",
        lambda machine: figures_part(machine, "copies", "loader_copies"),
    ),
    Slice(
        "memory",
        "a decoder of 1.3 billion parameters under memory budgets, against every layer checkpointed",
        lambda machine: figures_part(machine, "budgets", "budgets"),
    ),
    Slice(
        "accelerate",
        "GPT, ResNet and BERT in bf16 against torch.compile, max-autotune, CUDA graphs; a workload a run",
        accelerate_parts,
    ),
)
