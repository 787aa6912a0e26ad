"""`make gpu`: slices that end when their time is up, go on where they were, and keep what they found."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.cpu_only("rehearses the slices of make gpu")

ROOT = Path(__file__).resolve().parents[2]
STEPS = ROOT / "tools"
HEAD = {"schema": "oxytorch-gpu/1", "slice": "made-up", "command": "make gpu", "machine": {}}
# Long enough that only its time ends it.
SLEEPS = "import time; time.sleep(600)"


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], ModuleType]]:
    sys.path.insert(0, str(STEPS))
    yield importlib.import_module
    sys.path.remove(str(STEPS))


@pytest.fixture
def runner(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = load("_gpu.runner")
    monkeypatch.setattr(found, "GRACE", 0.5)
    return found


@pytest.fixture
def slices(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("_gpu.slices")


def machine(load: Callable[[str], ModuleType], folder: Path, device: str = "cuda", quick: bool = False) -> Any:
    return load("_gpu.machine").Machine(
        device=device,
        quick=quick,
        python=sys.executable,
        preset="other-torch",
        build=folder / "build",
        cores=16,
        results=folder / "results",
        work=folder / "work",
        environment=dict(os.environ),
        facts={"GPU": "made-up card", "torch": "2.11.0+cu130"},
    )


def python(script: str) -> Callable[[float], list[str]]:
    return lambda _seconds: [sys.executable, "-c", script]


def run(runner: ModuleType, path: Path, parts: list[Any], seconds: float = 60) -> dict[str, Any]:
    return runner.run_slice(path, HEAD, parts, seconds, dict(os.environ), path.parent / "logs")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(STEPS / "gpu.py"), "--python", sys.executable, *words]
    return subprocess.run(script, capture_output=True, text=True, timeout=120)


def test_the_list_shows_every_slice_as_not_run_yet(tmp_path: Path) -> None:
    said = command("--list", "--device", "cpu", "--results", str(tmp_path))
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [
        "build",
        "conformance",
        "tests",
        "step-tail",
        "loader",
        "memory",
        "accelerate",
    ]
    assert all("not run yet" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_it_says_what_to_do() -> None:
    said = command()
    assert said.returncode == 2 and "no CUDA device" in said.stderr and "--device cpu" in said.stderr


@pytest.mark.parametrize("words", [("--slice", "quantum"), ("--again",), ("--minutes", "10"), ("--minutes", "0")])
def test_words_that_mean_nothing_are_refused(words: tuple[str, ...]) -> None:
    assert command("--device", "cpu", *words).returncode == 2


def test_a_part_goes_on_where_its_time_ended(runner: ModuleType, tmp_path: Path) -> None:
    """A made-up ninja: one unit a run, then it waits."""
    done = tmp_path / "units"
    script = f"""
import pathlib, time
path = pathlib.Path({str(done)!r})
count = int(path.read_text()) if path.exists() else 0
path.write_text(str(count + 1))
print("[%d/2]" % (count + 1), flush=True)
time.sleep(0 if count else 600)
"""
    part = runner.Part("compile", python(script), lambda outcome: {"said": outcome.tail[0]}, goes_on=True)
    path = tmp_path / "build.json"
    first = run(runner, path, [part], 3)
    assert done.read_text() == "1"
    assert first["parts"]["compile"]["unfinished"] and first["parts"]["compile"]["said"] == "[1/2]"
    assert first["complete"] is False and runner.read_json(path) == first
    second = run(runner, path, [part])
    assert second["complete"] and "unfinished" not in second["parts"]["compile"]
    run(runner, path, [part])
    assert done.read_text() == "2"  # what is done is not run again
    again = runner.run_part(part, {"seconds": 100.0}, 60.0, 60.0, {}, tmp_path / "log")
    assert again["seconds"] >= 100.0  # of both runs


def test_nothing_that_was_started_outlives_its_time(runner: ModuleType, tmp_path: Path) -> None:
    script = f"""
import pathlib, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "{SLEEPS}"])
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
child.wait()
"""
    run(runner, tmp_path / "x.json", [runner.Part("stubborn", python(script), lambda _: {})], 3)
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")

    def runs() -> bool:
        return status.exists() and "(zombie)" not in status.read_text()

    tries = 200  # it was killed, and may need a moment on a busy machine
    while runs() and tries:
        tries -= 1
        time.sleep(0.05)
    assert tries


def test_a_part_that_had_the_whole_slice_and_did_not_finish_is_a_result(runner: ModuleType, tmp_path: Path) -> None:
    quick = runner.Part("quick", python("print('x')"), lambda _: {"good": True})
    slow = runner.Part("slow", python(SLEEPS), lambda _: {"good": True})
    path = tmp_path / "tests.json"
    found = run(runner, path, [slow, quick], 3)
    assert "did not finish" in found["parts"]["slow"]["problem"]
    assert run(runner, path, [slow, quick])["parts"]["quick"]["good"]


def test_a_part_that_began_late_is_run_again(runner: ModuleType, tmp_path: Path) -> None:
    outcome = runner.run_part(runner.Part("slow", python(SLEEPS), lambda _: {}), {}, 1.0, 500.0, {}, tmp_path / "log")
    assert outcome == {}


def test_failures_are_results_and_the_next_part_runs(runner: ModuleType, tmp_path: Path) -> None:
    def no_report(_outcome: Any) -> dict[str, Any]:
        raise FileNotFoundError("report.json")

    bad = runner.Part("bad", python("print('the card is gone'); raise SystemExit(3)"), no_report)
    good = runner.Part("good", python("raise SystemExit(1)"), lambda _: {"failures": 2}, accepted=(0, 1))
    found = run(runner, tmp_path / "x.json", [bad, good])
    assert found["complete"] and found["parts"]["bad"]["problem"] == "exit status 3: the card is gone"
    assert found["parts"]["bad"]["printed"] == ["the card is gone"]
    assert found["parts"]["good"]["failures"] == 2 and "problem" not in found["parts"]["good"]
    must = runner.Part("must", python("raise SystemExit(1)"), lambda _: {"units": 0}, must_succeed=True)
    found = run(runner, tmp_path / "y.json", [must, good])
    assert not found["complete"] and "good" not in found["parts"]
    fixed = runner.Part("must", python(""), lambda _: {"units": 1}, must_succeed=True)
    assert run(runner, tmp_path / "y.json", [fixed, good])["complete"]


def test_a_document_is_written_whole_or_not_at_all(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "x.json"
    runner.write_json(path, {"a": 1})

    def full(_self: Path, _target: Path) -> None:
        raise OSError("no space left on device")

    with pytest.raises(TypeError):
        runner.write_json(path, {"a": object()})
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        runner.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


def test_files_that_did_not_change_keep_their_times(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = load("_gpu.machine")
    monkeypatch.setattr(machines, "ROOT", tmp_path)
    monkeypatch.setattr(machines, "PACK", tmp_path / "build" / "gpu-pack")
    (tmp_path / "src").mkdir()
    same, changed = tmp_path / "src" / "same.cpp", tmp_path / "src" / "changed.cpp"
    for path in (same, changed):
        path.write_text("int x;\n")
        os.utime(path, ns=(10**18, 10**18))
    machines.keep_times(tmp_path / "build")
    before = machines.sources_digest()
    changed.write_text("int y;\n")
    for path in (same, changed):  # another copy of the tree
        os.utime(path, ns=(2 * 10**18, 2 * 10**18))
    machines.keep_times(tmp_path / "build")
    assert same.stat().st_mtime_ns == 10**18 and changed.stat().st_mtime_ns == 2 * 10**18
    assert machines.sources_digest() != before
    digest = machines.sources_digest()
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "x.json").write_text("{}")
    assert machines.sources_digest() == digest  # a result is no source


def test_results_of_another_card_are_not_gone_on_from(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    gpu = load("gpu")
    here = machine(load, tmp_path)
    which = gpu.SLICES[1]
    here.results.mkdir()
    (here.results / which.file).write_text(json.dumps({"machine": {**here.facts, "GPU": "another"}, "parts": {}}))
    with pytest.raises(gpu.Unusable, match=r"another.*made-up card"):
        gpu.document_of(here, which)


def test_documents_and_logs_are_copied(load: Callable[[str], ModuleType], runner: ModuleType, tmp_path: Path) -> None:
    gpu = load("gpu")
    parts = [runner.Part("one", python("print('hello')"), lambda _: {"passed": 1, "failed": 1})]
    which = load("_gpu.slices").Slice("tests", "made up", lambda _machine: parts)
    here = machine(load, tmp_path)
    assert not gpu.run_one(here, which, 60.0, False, tmp_path / "copy")  # a test failed
    assert (tmp_path / "copy" / "tests.json").read_text() == (here.results / "tests.json").read_text()
    with tarfile.open(tmp_path / "copy" / "logs.tar.gz") as logs:
        assert "./tests-one.log" in logs.getnames()
    parts[0] = runner.Part("one", python(""), lambda _: {"passed": 2, "failed": 0})
    assert not gpu.run_one(here, which, 60.0, False, None)  # it has its result
    assert gpu.run_one(here, which, 60.0, True, None)  # from its beginning


def test_a_build_counts_only_where_it_is(
    load: Callable[[str], ModuleType], slices: ModuleType, runner: ModuleType, tmp_path: Path
) -> None:
    """The documents come along to a fresh machine, the build folder does not."""
    gpu = load("gpu")
    here = machine(load, tmp_path)
    runner.write_json(here.results / "build.json", {"machine": here.facts, "parts": {"build": {"seconds": 1.0}}})
    assert gpu.state(here, gpu.SLICES[0]) == "not built here" and not gpu.is_complete(here, gpu.SLICES[0])
    here.build.mkdir()
    (part,) = slices.build_parts(here)
    part.collect(runner.Outcome(0, 1.0, ["[7/7] Linking"]))
    assert gpu.state(here, gpu.SLICES[0]) == "done" and gpu.is_complete(here, gpu.SLICES[0])


def test_an_interrupted_build_says_how_far_it_is(
    load: Callable[[str], ModuleType], slices: ModuleType, runner: ModuleType, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (part,) = slices.build_parts(machine(load, tmp_path))
    lines = ["[311/480] Building a", "[312/480] Building b", "ninja: build stopped: interrupted by user."]
    assert part.collect(runner.Outcome(None, 500.0, lines)) == {"units": 312, "of": 480}
    assert "312 of 480 units" in capsys.readouterr().out and part.must_succeed and part.goes_on


def test_every_python_test_is_in_one_part(
    load: Callable[[str], ModuleType], slices: ModuleType, tmp_path: Path
) -> None:
    parts = slices.test_parts(machine(load, tmp_path))
    assert parts[0].name == "C++" and all(part.environment["OXYTORCH_DEVICE"] == "cuda" for part in parts)
    named = [word for part in parts for word in part.command(60.0) if word.endswith(".py")]
    here = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    assert sorted(named) == here and len(parts) > 3
    on_device = parts[1].command(60.0)
    assert "tests/optim/test_device.py" in on_device and "tests/base/test_base.py" not in on_device


def test_junit_is_counted_with_what_failed(slices: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"/><testcase classname="a" name="c"><failure '
        'message="1 != 2"/></testcase><testcase classname="a" name="d"><skipped message="no"/></testcase>'
        '<testcase classname="a" name="e" status="disabled"/></testsuite></testsuites>'
    )
    found = slices.read_junit(path, tmp_path / "suites")
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 2)
    assert found["failures"] == [{"test": "a::c", "why": "1 != 2"}]
    # A suite of a program counts as its tests, one that crashed as itself.
    (tmp_path / "suites").mkdir()
    path.write_text(
        '<testsuite><testcase name="p.All/S"/><testcase name="p.T"><failure message="crashed"/></testcase></testsuite>'
    )
    (tmp_path / "suites" / "p.All-S.xml").write_text(
        '<testsuites><testsuite><testcase name="a" status="run" result="completed"/><testcase name="b" status="run" '
        'result="skipped"><skipped message="no"/></testcase><testcase name="c" status="notrun"/></testsuite>'
        "</testsuites>"
    )
    found = slices.read_junit(path, tmp_path / "suites")
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 2)


def test_a_race_goes_on_from_the_starts_that_were_kept(
    load: Callable[[str], ModuleType], slices: ModuleType, runner: ModuleType, tmp_path: Path
) -> None:
    """Also on a machine whose work folder is empty: the document that travels holds the race's own."""
    here = machine(load, tmp_path)
    part = next(part for part in slices.accelerate_parts(here) if part.name == "gpt")
    document = {"workloads": {"gpt": {"entries": {"eager": {"starts": {"1000": {}}}}}}}
    report = here.work / "accelerate-gpt.json"
    part.prepare({"document": document, "unfinished": True})
    assert json.loads(report.read_text()) == document
    found = part.collect(runner.Outcome(None, 500.0, []))
    assert found == {"document": document, "starts": 1, "unfinished": True}
    document["workloads"]["gpt"]["entries"]["eager"]["starts"]["1001"] = {}
    report.write_text(json.dumps(document))
    assert "unfinished" not in part.collect(runner.Outcome(0, 500.0, []))
    part.prepare({})
    assert not report.exists()  # a race from its beginning finds nothing
    assert part.collect(runner.Outcome(None, 1.0, [])) == {}
    words = part.command(300.0)
    assert words[words.index("--device") + 1] == "cuda" and words[words.index("--keep") + 1] == str(report)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"checks": [{"name": "a", "verdict": "pass"}], "passed": 1, "skipped": 0, "failed": 0}, None),
        ({"checks": [], "passed": 0, "skipped": 0, "failed": 0}, "unusable here: no card"),
        ({"refused": "wrong version"}, "the backend was refused: wrong version"),
    ],
)
def test_a_backend_that_proved_nothing_did_not_pass(
    load: Callable[[str], ModuleType], slices: ModuleType, runner: ModuleType, tmp_path: Path, said: dict[str, Any],
    expected: str | None,
) -> None:  # fmt: skip
    here = machine(load, tmp_path)
    (part,) = slices.conformance_parts(here)
    part.command(60.0)
    (here.work / "conformance.json").write_text(
        json.dumps({"backend": "cuda", "reason": "no card", "devices": 1, **said})
    )
    assert part.collect(runner.Outcome(0, 1.0, [])).get("problem") == expected


def test_the_pack_has_the_libraries_that_libraries_need(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = load("_gpu.pack")
    needs = {
        "libspdlog-dev": "libspdlog1.10 (= 1), libfmt-dev (>= 9), catch2",
        "libspdlog1.10": "libc6 (>= 2.34), libfmt9 (>= 9.1), libgcc-s1 (>= 3.0), libstdc++6 (>= 11)",
        "libfmt-dev": "libfmt9 (= 9.1)",
    }
    monkeypatch.setattr(pack, "output", lambda *words: needs.get(words[-1], ""))
    assert set(pack.with_libraries(["libspdlog-dev"])) == {"libspdlog-dev", "libspdlog1.10", "libfmt-dev", "libfmt9"}
    with pytest.raises(pack.Unusable, match="run make setup"):
        pack.copy_package("libnone")


def test_the_pack_comes_after_what_the_machine_has(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = load("_gpu.machine")
    monkeypatch.setattr(machines, "PACK", tmp_path)
    (tmp_path / "usr/lib/x86_64-linux-gnu").mkdir(parents=True)
    environment = {"PYTHONPATH": "/theirs"}
    machines.with_pack(environment)
    assert environment["PYTHONPATH"] == f"/theirs{os.pathsep}{tmp_path / 'python'}"
    assert environment["CMAKE_PREFIX_PATH"] == str(tmp_path / "usr")
    assert environment["LD_LIBRARY_PATH"] == str(tmp_path / "usr/lib/x86_64-linux-gnu")
    monkeypatch.setattr(machines, "PACK", tmp_path / "none")
    without: dict[str, str] = {}
    machines.with_pack(without)
    assert without == {}
