"""Plants small random faults in the sources, one at a time, and counts how many the tests notice.

    python tests/mutation/run.py --count 200 --seed 0             # the whole run, hours; `make mutation` is this
    python tests/mutation/run.py --count 30 --paths python/oxytorch/optim src/kernels --minutes 20
    python tests/mutation/run.py --list --count 20                # what would be planted
    python tests/mutation/run.py --only 3f2a...                   # one again, with the tests' output
    python tests/mutation/run.py --reach                          # first: which Python test runs which line

Faults are planted in copies of the tree under build/mutation, never in the tree itself. Results are appended to
build/mutation/results.jsonl: an interrupted run goes on where it stopped, and results stay valid until the mutated file
changes. A report of the run is in build/mutation/report.json. Exit code 1: fewer than `--least` were caught.

A fault is caught when the same test fails twice on it, so that a test that fails on a busy machine catches nothing.
With a record of `--reach`, a fault in Python meets the tests that run its line, quick ones first, for up to
`REACHED_SECONDS`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from mutants import Mutant, mutants_of
from reached import is_recorded, tests_of_line
from suites import PATHS, Stage, stages_of

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutation"
EQUIVALENT = Path(__file__).parent / "equivalent.json"
SUFFIXES = (".py", ".cpp", ".h")
BUILD_SECONDS = 1800
# A test may hang on a fault: what it may take is a multiple of what it takes without one.
PATIENCE, LEAST_SECONDS = 6.0, 60.0
# Tests that run a line, by the time that they take without a fault; a line of the training step is run by hundreds.
REACHED_SECONDS = 150.0


class Unbuilt(Exception):
    """The fault does not compile, so no test could ever meet it."""


class Tree:
    """A copy of the sources in which faults are planted; `preset` is the CMake preset that is built in it."""

    def __init__(self, root: Path, folder: Path, preset: str) -> None:
        self.root, self.folder, self.preset = root, folder, preset
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another run plants its faults in {self.folder}; wait for it.") from None
        self._copy()

    def _copy(self) -> None:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=self.root, capture_output=True, check=True).stdout.decode().split("\0")
        wanted = {name for name in listed if name and (self.root / name).is_file()}
        if self.preset != "core-only":  # the built module, which git ignores; a tree with its own build replaces it
            package = self.root / "python" / "oxytorch"
            built = [*package.rglob("*.so"), package / "_build_info.py", *(package / "bin").glob("*")]
            wanted |= {file.relative_to(self.root).as_posix() for file in built if file.is_file()}
        known = self.folder / ".files"
        before = set(known.read_text().splitlines()) if known.exists() else set()
        for name in before - wanted:
            (self.folder / name).unlink(missing_ok=True)
        for name in wanted:
            source, target = self.root / name, self.folder / name
            if self.preset == "dev" and name.endswith(".so") and target.exists():
                continue  # it was built here
            if not target.exists() or source.read_bytes() != target.read_bytes():  # else its time stays: no rebuild
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
                shutil.copymode(source, target)
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text("\n".join(sorted(wanted)))
        (self.folder / "build").mkdir(exist_ok=True)
        self._link(".venv")
        if not self.preset:
            self._link("build/dev")  # what the Python tests read of a build

    def _link(self, name: str) -> None:
        link = self.folder / name
        if not link.is_symlink() and (self.root / name).exists():
            link.symlink_to(self.root / name)

    def environment(self) -> dict[str, str]:
        """Of the programs that run in the copy."""
        kept = {key: value for key, value in os.environ.items() if key not in ("OXYTORCH_ISA", "OXYTORCH_LOG")}
        return {
            **kept,
            "PYTHONPATH": str(self.folder / "python"),
            "PYTHONDONTWRITEBYTECODE": "1",  # a mutant as long as the source, in the same second, has the same cache
            "PATH": f"{self.folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OXYTORCH_CACHE": str(self.folder / "build" / "cache"),
        }

    def build(self, targets: tuple[str, ...]) -> None:
        """Build targets; raises `Unbuilt` with the compiler's words."""
        folder = self.folder / "build" / self.preset
        if not (folder / "build.ninja").exists():
            done, output = run(["cmake", "--preset", self.preset, "-DOXYTORCH_UNITY=OFF"], self, BUILD_SECONDS)
            if done != 0:
                raise SystemExit(f"cmake --preset {self.preset} failed in {self.folder}:\n{output[-3000:]}")
        done, output = run(["ninja", "-C", str(folder), "-j", str(os.cpu_count()), *targets], self, BUILD_SECONDS)
        if done != 0:
            raise Unbuilt(output[-2000:])

    def stage(self, stage: Stage, seconds: float) -> tuple[int | None, str]:
        """Build and run a stage; the code is 0 where all passed, None where the time ran out."""
        if stage.preset:
            self.build(stage.targets)
        if not stage.programs:
            named = self.folder / "build" / "tests.txt"
            named.write_text("\n".join(stage.tests))
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", f"@{named}"]
            return run(command, self, seconds)
        output = ""
        for test in stage.tests:
            place, _, chosen = test.partition(":")
            name, _, device = place.partition("@")
            program = next((self.folder / "build" / stage.preset / "tests").rglob(name))
            flags = ["--gtest_brief=1", "--gtest_fail_fast", f"--gtest_filter={chosen or '*'}"]
            code, output = run([str(program), *flags], self, seconds, {"OXYTORCH_DEVICE": device} if device else None)
            if code != 0:
                return code, output
        return 0, output

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """The fault, for a while."""
        file = self.folder / mutant.path
        before = file.read_bytes()
        file.write_bytes(mutant.applied(before))
        try:
            yield
        finally:
            file.write_bytes(before)


def run(
    command: list[str], tree: Tree, seconds: float, variables: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a command in a tree; its exit code, None where it took longer, and what it said."""
    log = tree.folder / "build" / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=tree.folder,
            env={**tree.environment(), **(variables or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that what it started ends with it
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, log.read_text(errors="replace")


def catcher(stage: Stage, code: int | None, output: str) -> str:
    """Name the test that noticed."""
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    found = found or re.findall(r"\[  FAILED  \] ([\w./]+)", output)
    return found[0] if found else f"{stage.name} (exit code {code})"


class Record:
    """What is known of mutants and of the time that stages take, on disk."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "results.jsonl"
        self.times_file = folder / "seconds.json"
        folder.mkdir(parents=True, exist_ok=True)
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.results = {(entry["id"], entry["file"]): entry for entry in map(json.loads, lines)}
        self.seconds: dict[str, float] = json.loads(self.times_file.read_text()) if self.times_file.exists() else {}

    def add(self, entry: dict[str, Any]) -> None:
        """Keep a result."""
        self.results[entry["id"], entry["file"]] = entry
        with self.file.open("a") as out:
            out.write(json.dumps(entry) + "\n")

    def time(self, stage: Stage, seconds: float) -> None:
        """Keep what a stage took without a fault."""
        self.seconds[stage.name] = round(seconds, 1)
        self.times_file.write_text(json.dumps(self.seconds, indent=1))


def file_hash(root: Path, path: str) -> str:
    """Results are of one content of the file."""
    return hashlib.sha256((root / path).read_bytes()).hexdigest()[:12]


class Runner:
    """Plants mutants and runs the stages of their file until one notices."""

    def __init__(self, root: Path, work: Path, without_torch: bool = False, quick: bool = False) -> None:
        self.root, self.work, self.record = root, work, Record(work)
        self.without_torch, self.quick = without_torch, quick
        self._trees: dict[str, Tree] = {}
        self._built: set[str] = set()

    def tree(self, preset: str) -> Tree:
        """Return the copy in which this preset is built; made at the first call."""
        if preset not in self._trees:
            self._trees[preset] = Tree(self.root, self.work / (preset or "python"), preset)
        return self._trees[preset]

    def allowed(self, stage: Stage) -> float:
        """Return the seconds that a stage may take; the first time it is run without a fault, and must pass."""
        tree = self.tree(stage.preset)
        if stage.preset and stage.name not in self._built:  # what does not build now is no fault's doing
            try:
                tree.build(stage.targets)
            except Unbuilt as error:
                raise SystemExit(f"without any fault, {stage.name} does not build:\n{error}") from None
            self._built.add(stage.name)
        if stage.name not in self.record.seconds:
            begun = time.monotonic()
            code, output = tree.stage(stage, BUILD_SECONDS)
            if code != 0:
                raise SystemExit(f"without any fault, {stage.name} fails:\n{output[-4000:]}")
            self.record.time(stage, time.monotonic() - begun)
        return max(LEAST_SECONDS, PATIENCE * self.record.seconds[stage.name])

    def stages(self, mutant: Mutant) -> list[Stage]:
        """Return the stages that a fault must pass to survive."""
        stages = stages_of(self.root, mutant.path)
        if not mutant.path.endswith(".py"):
            return stages
        tests = tests_of_line(self.root, mutant.path, mutant.line)
        if tests is None:
            return stages
        chosen: list[str] = []
        total = 0.0
        for test, seconds in sorted(tests.items(), key=lambda item: item[1]):
            total += seconds
            if total > REACHED_SECONDS and chosen:
                break
            chosen.append(test)
        seconds = LEAST_SECONDS + PATIENCE * min(total, REACHED_SECONDS)
        reaching = [Stage(tuple(chosen), seconds=seconds)] if chosen else []
        return reaching if is_recorded(self.root, mutant.path) else [*reaching, *stages]

    def noticed(self, tree: Tree, stage: Stage, seconds: float) -> tuple[int | None, str]:
        """Run a stage; where a test fails, that test again: the code is 0 unless it fails twice. And which it was."""
        left = stage
        while True:
            code, output = tree.stage(left, seconds)
            by = catcher(left, code, output)
            if code == 0 or code is None or len(left.tests) == 0:
                return code, by
            if left.programs:
                program = next((test for test in left.tests if test.partition(":")[0] in output), left.tests[0])
                again = Stage((f"{program.partition(':')[0]}:{by}",), left.preset, programs=True)
                if " " in by or tree.stage(again, seconds)[0] != 0:
                    return code, by
                return 0, ""  # a failure of the moment: the rest of the stage is taken as passed
            if "::" not in by or tree.stage(Stage((by,), left.preset), seconds)[0] != 0:
                return code, by
            left = Stage(tuple(test for test in left.tests if test != by), left.preset)
            if len(left.tests) == len(stage.tests):
                return 0, ""

    def judge(self, mutant: Mutant) -> dict[str, Any]:
        """Plant one and say what became of it."""
        begun = time.monotonic()
        entry: dict[str, Any] = {
            "id": mutant.id, "file": file_hash(self.root, mutant.path), "path": mutant.path, "line": mutant.line,
            "kind": mutant.kind, "before": mutant.before, "after": mutant.after, "status": "survived", "by": "",
        }  # fmt: skip
        stages = self.stages(mutant)
        kept = [stage for stage in stages if not (self.without_torch and stage.preset == "dev")]
        kept = kept[:-1] if self.quick and len(kept) == len(stages) > 1 else kept
        entry["partial"] = len(kept) < len(stages)
        for stage in kept:
            seconds = stage.seconds or self.allowed(stage)  # before anything is planted
            tree = self.tree(stage.preset)
            with tree.planted(mutant):
                try:
                    code, by = self.noticed(tree, stage, seconds)
                except Unbuilt as error:
                    entry |= {"status": "invalid", "by": str(error)[-300:]}
                    break
            if code != 0:
                entry |= {"status": "timeout" if code is None else "killed", "by": by}
                break
        return entry | {"seconds": round(time.monotonic() - begun, 1)}


def chosen(root: Path, paths: list[str], seed: int) -> list[Mutant]:
    """Return mutants in random order: a random line, then one of its faults, so that no dense line is drawn often."""
    lines: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for folder in paths:
        place = root / folder
        for file in [place] if place.is_file() else sorted(place.rglob("*")):
            if file.suffix in SUFFIXES and "__pycache__" not in file.parts:
                for mutant in mutants_of(root, file.relative_to(root).as_posix()):
                    lines[mutant.path, mutant.line].append(mutant)
    generator = random.Random(seed)
    order = sorted(lines)
    generator.shuffle(order)
    return [generator.choice(lines[line]) for line in order]


def record_reach(tree: Tree) -> int:
    """Run the Python tests of what is mutated, module by module, and note the lines that each runs."""
    modules = sorted({Path(path).stem for path in PATHS if path.startswith("python/")})
    for module in modules:
        folder = ROOT / "build" / "mutation" / "reached" / module
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "reached",
                   "--reached", str(folder), f"tests/{module}"]  # fmt: skip
        code, output = run(
            command, tree, 4 * BUILD_SECONDS, {"PYTHONPATH": f"{tree.folder / 'python'}:{Path(__file__).parent}"}
        )
        print(f"{module}: {output.strip().splitlines()[-1] if output.strip() else code}", flush=True)
        if code not in (0, 1):  # a test that fails is left out
            return 1
    return 0


def table(results: list[dict[str, Any]], reasons: dict[str, str]) -> str:
    """Return the counts by folder and what survived."""
    by_folder: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in results:
        folder = "/".join(entry["path"].split("/")[: 3 if entry["path"].startswith("python") else 2])
        status = "equivalent" if entry["status"] == "survived" and entry["id"] in reasons else entry["status"]
        by_folder[folder][status] += 1
    total: Counter[str] = sum(by_folder.values(), Counter())
    columns = ("killed", "timeout", "survived", "equivalent", "invalid")
    rows = [f"{'':28}{''.join(f'{name:>12}' for name in columns)}{'caught':>9}"]
    for folder, counts in [*sorted(by_folder.items()), ("all", total)]:
        rows.append(f"{folder:28}{''.join(f'{counts[name]:12}' for name in columns)}{100 * caught(counts):8.1f}%")
    survivors = [entry for entry in results if entry["status"] == "survived" and entry["id"] not in reasons]
    if survivors:
        rows += ["", "survived, to be met by a test or explained in tests/mutation/equivalent.json:"]
        rows += [f"  {e['id']}  {e['path']}:{e['line']}: {e['before']!r} -> {e['after']!r}" for e in survivors]
    return "\n".join(rows)


def caught(counts: Counter[str]) -> float:
    """Share of the faults that change something and compile; a test that hangs on one has noticed it."""
    noticed, all_of_them = counts["killed"] + counts["timeout"], counts["survived"]
    return noticed / (noticed + all_of_them) if noticed + all_of_them else 1.0


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="tests/mutation/run.py")
    words.add_argument("--count", type=int, default=200, help="faults that compile and are not known as equivalent")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--paths", nargs="+", default=list(PATHS), help="files or folders, from the repository's root")
    words.add_argument("--minutes", type=float, default=float("inf"), help="start no further fault after so long")
    words.add_argument("--least", type=float, default=0.9, help="share that must be caught")
    words.add_argument("--without-torch", action="store_true", help="build torch-free C++ alone; leave out the rest")
    words.add_argument(
        "--quick", action="store_true", help="leave out the last stage, which is all tests of the module"
    )
    words.add_argument(
        "--share",
        default="1/1",
        help="plant every n-th fault alone: 1/2 and 2/2 in two clones; their results.jsonl joined are one run",
    )
    words.add_argument("--language", choices=("python", "c++"), help="faults of one alone, to run beside the other's")
    words.add_argument("--reach", action="store_true", help="record which Python test runs which line, and plant none")
    words.add_argument("--list", action="store_true", help="print the faults and plant none")
    words.add_argument("--only", help="id of one fault to plant again, its tests' output printed")
    options = words.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends, and no fault stays planted
    reasons = {entry["id"]: entry["reason"] for entry in json.loads(EQUIVALENT.read_text())}
    share, shares = map(int, options.share.split("/"))
    if options.reach:
        return record_reach(Tree(ROOT, WORK / "python", ""))
    order = chosen(ROOT, options.paths, options.seed)[share - 1 :: shares]
    if options.language:
        order = [m for m in order if m.path.endswith(".py") == (options.language == "python")]
    if options.list:
        print("\n".join(f"{m.id}  {m}" for m in order[: options.count]))
        return 0
    runner = Runner(ROOT, WORK, options.without_torch, options.quick)
    if options.only:
        every = [m for path in sorted({m.path for m in order}) for m in mutants_of(ROOT, path)]
        mutant = next((m for m in every if m.id == options.only), None)
        if mutant is None:
            raise SystemExit(f"there is no mutant {options.only} under {', '.join(options.paths)}")
        entry = runner.judge(mutant)
        runner.record.add(entry)
        log = runner.tree(stages_of(ROOT, mutant.path)[0].preset).folder / "build" / "output.txt"
        print(log.read_text(errors="replace")[-6000:], json.dumps(entry, indent=1), sep="\n")
        return 0
    begun, results, counted = time.monotonic(), [], 0
    for mutant in order:
        if counted >= options.count:
            break
        entry = runner.record.results.get((mutant.id, file_hash(ROOT, mutant.path)))
        # What survived some stages is judged anew by all of them.
        if entry is None or (
            entry["partial"] and entry["status"] == "survived" and not (options.without_torch or options.quick)
        ):
            if time.monotonic() - begun > 60 * options.minutes:
                print(f"{options.minutes:g} minutes are over; the same command goes on from here.")
                break
            entry = runner.judge(mutant)
            runner.record.add(entry)
        counted += entry["status"] != "invalid" and mutant.id not in reasons
        results.append(entry)
        shown = "equivalent" if entry["status"] == "survived" and mutant.id in reasons else entry["status"]
        print(f"{counted:4}  {shown:10} {entry['seconds']:6.1f} s  {mutant}  {entry['by'][:80]}".rstrip(), flush=True)
    statuses = Counter(
        "equivalent" if e["status"] == "survived" and e["id"] in reasons else e["status"] for e in results
    )
    report = {"seed": options.seed, "paths": options.paths, "count": counted, "caught": caught(statuses),
              "statuses": dict(statuses), "mutants": results}  # fmt: skip
    (WORK / "report.json").write_text(json.dumps(report, indent=1))
    print(table(results, reasons))
    return int(caught(statuses) < options.least)


if __name__ == "__main__":
    sys.exit(main())
