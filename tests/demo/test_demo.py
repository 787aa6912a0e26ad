"""The demo: its figures from made-up answers, its processes under planted faults, and a short run of the real thing."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from oxytorch.bench.turns.driver import Block, Run, WorkerFailed, WorkerProcess, python_command, race
from oxytorch.bench.turns.environment import environment
from oxytorch.bench.turns.times import ends, over_starts
from oxytorch.cli import main
from oxytorch.demo import examples
from oxytorch_demo import command, measure, workloads
from oxytorch_demo.present import foot, ratio_text, sentences, time_text, to_json

pytestmark = pytest.mark.cpu_only("races on the CPU")

THREADS = 1  # two would spin beside other tests


def task(contender: str, **more: Any) -> dict[str, Any]:
    return {"workload": "mlp", "contender": contender, "seed": 1, "steps": 6, "threads": THREADS, **more}


def worker_command(each: dict[str, Any]) -> list[str]:
    return python_command(each, "oxytorch_demo.worker", examples())


def drive(tasks: dict[str, dict[str, Any]], timeout: float = 120.0) -> dict[str, Run]:
    commands = {name: worker_command(each) for name, each in tasks.items()}
    return race(
        commands,
        seed=1,
        steps=6,
        block=3,
        environment=environment(THREADS),
        timeout=timeout,
        on_turn=lambda _name, _count: None,
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- data and recipe --------------------------------------------------------------------------------------------------


def test_text_is_the_standard_library_and_held_out_files_are_not_trained_on() -> None:
    train, held = workloads.library_text()
    assert len(train) > 1_000_000 and len(held) > 100_000
    assert b"def " in train and b"def " in held
    assert held[:2000] not in train


@pytest.mark.parametrize("name", workloads.NAMES)
def test_batches_depend_on_the_seed_alone(name: str) -> None:
    workload = workloads.load(name)
    first, again, other = (workload.make_batches(seed, 2) for seed in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        assert all((x == y).all() for x, y in zip(a, b, strict=True))
    assert not (first[0][0] == other[0][0]).all()
    assert math.isfinite(workload.loss(workload.make_model(), first[0]).item())
    assert first[0][0].shape[0] * (first[0][0].shape[1] if name == "gpt" else 1) == workload.units_per_step


def test_schedule_warms_up_and_ends_at_a_tenth() -> None:
    factor = workloads.load("mlp").recipe.lr_factor(100)
    rates = [factor(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[10] == pytest.approx(1.0) and rates[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[10:]))


# --- figures ----------------------------------------------------------------------------------------------------------


def made_up(contender: str, seed: int, step: float, held: float, turns: int = 6) -> Run:
    rng = np.random.default_rng(seed)
    run = Run(contender, seed, 0.0, held_out_loss=held, peak_bytes=1 << 20)
    for _ in range(turns):
        seconds = (step * (1 + 0.01 * rng.random(4))).tolist()
        seconds[0] *= 50  # the first step of a turn is not timed
        run.blocks.append(Block(seconds, [0.75 * value for value in seconds], [1.0, 0.9, 0.8, 0.7], 10))
    run.blocks[0].seconds = [100.0] * 4  # nor is the first turn
    return run


def result_of(held: dict[str, list[float]], steps: dict[str, float]) -> measure.WorkloadResult:
    starts = [
        {name: made_up(name, 100 * index + 1, steps[name], held[name][index]) for name in held}
        for index in range(len(held["plain"]))
    ]
    return measure.summarise(workloads.load("mlp"), "fp32", starts)


def test_figures_leave_out_warm_up_and_pair_by_turn() -> None:
    held = {"plain": [1.0, 1.1, 1.2], "stock": [1.0, 1.1, 1.2], "advanced": [1.01, 1.1, 1.2]}
    result = result_of(held, {"plain": 0.02, "stock": 0.012, "advanced": 0.01})
    row = result.row("advanced")
    assert row is not None and row.speedup_stock is not None
    assert row.step_seconds.low <= row.step_seconds.mid <= row.step_seconds.high
    assert row.step_seconds.mid == pytest.approx(0.01, rel=0.02)
    # The same noise in both: pairing by turn takes it out, and the interval is narrow.
    assert row.speedup_plain.mid == pytest.approx(2.0, rel=1e-6)
    assert row.speedup_plain.high - row.speedup_plain.low < 1e-6
    assert row.speedup_stock.mid == pytest.approx(1.2, rel=1e-6)
    assert row.outside_share == pytest.approx(0.25, abs=1e-6)
    assert row.units_per_second == pytest.approx(12_800, rel=0.02)
    assert "2.00" in sentences(result)[0] and "inside" in sentences(result)[0]


def test_interval_is_as_wide_as_the_spread_between_starts() -> None:
    rng = np.random.default_rng(0)
    turns = 1 + 0.001 * rng.standard_normal((4, 50))
    bimodal = turns + np.array([[0.0], [0.0], [0.5], [0.5]])
    assert over_starts(turns).high - over_starts(turns).low < 0.01
    wide = over_starts(bimodal)
    assert wide.low < 1.01 and wide.high > 1.49


@pytest.mark.parametrize("starts", [2, 3, 4, 8])
@pytest.mark.parametrize(("between", "within"), [(0.1, 0.01), (0.001, 0.1)], ids=["starts", "turns"])
def test_intervals_hold_the_truth_whatever_dominates(starts: int, between: float, within: float) -> None:
    rng = np.random.default_rng(5)
    logs = between * rng.standard_normal((1000, starts, 1)) + within * rng.standard_normal((1000, starts, 6))
    intervals = [over_starts(2.0 * np.exp(each)) for each in logs]
    assert np.mean([low <= 2.0 <= high for low, _, high, _ in intervals]) >= 0.93


def test_one_start_has_no_interval() -> None:
    result = result_of(
        {"plain": [1.0], "stock": [1.0], "advanced": [1.0]}, {"plain": 0.02, "stock": 0.012, "advanced": 0.01}
    )
    row = result.row("advanced")
    assert row is not None
    assert time_text(row.step_seconds) == "10.0 (one start)" and ratio_text(row.speedup_plain) == "2.00 (one start)"
    assert ends(row.speedup_plain) == (None, None)
    assert "no intervals" in " ".join(foot(result))
    step = json.loads(to_json(result.to_json()))["rows"][-1]["step_seconds"]
    assert step["low"] is None and step["high"] is None and step["mid"] == pytest.approx(0.01, rel=0.02)


def test_phases_that_cannot_be_seen_come_from_the_trainers_report() -> None:
    runs = [made_up("torch", 1, 0.01, 1.0), made_up("trainer", 1, 0.01, 1.0)]
    for block in runs[1].blocks:
        block.inner = None
    runs[1].phases = {"forward": 0.006, "backward": 0.003, "tail": 0.001}
    result = measure.summarise(workloads.load("mlp"), "", [{run.contender: run for run in runs}])
    assert result.reference == "torch"
    assert [row.outside_share for row in result.rows] == pytest.approx([0.25, 0.1], abs=1e-6)


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([1.02, 1.12, 1.19], "inside"),
        ([1.3, 1.4, 1.5], "worse"),
        ([0.5, 0.6, 0.7], "better"),
        ([1.0, 1.1, float("nan")], "worse"),
    ],
)
def test_verdict_is_by_the_seed_band(losses: list[float], verdict: str) -> None:
    result = result_of({"plain": [1.0, 1.1, 1.2], "advanced": losses}, {"plain": 0.02, "advanced": 0.01})
    row = result.row("advanced")
    assert row is not None and row.verdict == verdict and row.worse == (verdict == "worse")


def test_json_has_null_for_what_is_missing() -> None:
    assert json.loads(to_json({"a": [float("nan"), 1.5], "b": (float("inf"),)})) == {"a": [None, 1.5], "b": [None]}


# --- processes --------------------------------------------------------------------------------------------------------


def test_rivals_train_alike_and_never_import_oxytorch() -> None:
    runs = drive({"plain": task("plain"), "stock": task("stock", forbid="oxytorch")})
    losses = [[loss for block in runs[name].blocks for loss in block.losses] for name in ("plain", "stock")]
    assert len(losses[0]) == 6 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert runs["plain"].held_out_loss == pytest.approx(runs["stock"].held_out_loss, rel=1e-3)
    assert runs["plain"].peak_bytes > 1 << 20
    inner = runs["plain"].blocks[1].inner
    assert inner is not None and all(0 < a < b for a, b in zip(inner, runs["plain"].blocks[1].seconds, strict=True))


def test_a_worker_that_dies_is_named_with_what_it_printed() -> None:
    with pytest.raises(
        WorkerFailed, match=r"'stock' ended before it was told to \(exit status 3\)(.|\n)*planted fault"
    ):
        drive({"plain": task("plain"), "stock": task("stock", die_at=4)})


def test_a_worker_that_hangs_is_named_and_nothing_is_left_behind() -> None:
    commands = [worker_command(task("plain", hang_at=1))]
    worker = WorkerProcess("plain", commands[0], environment(THREADS))
    try:
        worker.receive(120.0)
        worker.send("run 3")
        with pytest.raises(WorkerFailed, match=r"gave no answer for 2 s(.|\n)*planted fault"):
            worker.receive(2.0)
        assert alive(worker.pid)
    finally:
        worker.close()
    assert not alive(worker.pid)


def test_workers_end_with_the_coordinator() -> None:
    code = (
        "import os, time; from pathlib import Path; from oxytorch.bench.turns.environment import environment; "
        "from oxytorch.bench.turns.driver import WorkerProcess, python_command; "
        f"command = python_command({task('plain')!r}, 'oxytorch_demo.worker', Path({str(examples())!r})); "
        "w = WorkerProcess('plain', command, environment(2)); "
        "print(w.receive(120.0)['pid'], flush=True); time.sleep(600)"
    )
    coordinator = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert coordinator.stdout is not None
    pid = int(coordinator.stdout.readline())
    assert alive(pid)
    os.kill(coordinator.pid, signal.SIGKILL)
    coordinator.wait()
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)
    coordinator.stdout.close()


def test_workers_see_no_settings_of_the_callers_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "MKL_DYNAMIC", "MALLOC_ARENA_MAX", "LD_PRELOAD")
    for name in outside:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    seen = environment(2)
    assert not set(outside) & seen.keys() and seen["OMP_NUM_THREADS"] == seen["MKL_NUM_THREADS"] == "2"
    assert seen["PATH"] == os.environ["PATH"]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    """Each workload that the demo starts, and what stands on the screen by then; nothing is trained."""
    started: list[tuple[str, str]] = []

    def raced(workload: workloads.Workload, *_: object) -> measure.WorkloadResult:
        started.append((workload.name, (started[-1][1] if started else "") + capsys.readouterr().out))
        starts = [{name: made_up(name, 1, 0.01, 1.0) for name in ("plain", "advanced")}]
        return measure.summarise(workload, "fp32", starts)

    monkeypatch.setattr(command, "race_workload", raced)
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)
    return started


def test_the_quickest_model_comes_first_and_its_table_before_the_next_starts(
    order: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--quick", "--out", str(tmp_path)]) == 0
    shares = [workloads.load(name).recipe.share for name, _ in order]
    assert len(order) == len(workloads.NAMES) and shares == sorted(shares)
    titles = [workloads.load(name).title for name, _ in order]
    for index, (_, seen) in enumerate(order):
        assert [title in seen for title in titles] == [place < index for place in range(len(titles))]
    end = capsys.readouterr().out
    assert titles[-1] in end and "Measured on" in end and str(tmp_path / "demo.html") in end
    page = (tmp_path / "demo.html").read_text()
    assert all(title in page for title in titles)


def test_json_on_the_screen_is_json_alone(
    order: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--quick", "--only", "mlp", "--json", "-", "--out", str(tmp_path)]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["workloads"]] == [name for name, _ in order]


def test_bad_arguments_are_refused() -> None:
    for arguments in (["--only", "lstm"], ["--threads", "0"]):
        done = subprocess.run(
            [sys.executable, "-m", "oxytorch", "demo", *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stderr
        assert "lstm" in done.stderr or "threads" in done.stderr
