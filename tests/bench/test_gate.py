"""The regression gate: its verdicts on injected and on recorded times, its file, and a run of the real command."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oxytorch import cli
from oxytorch.bench import gate, measure
from oxytorch.bench.turns.driver import Block, Run

pytestmark = pytest.mark.cpu_only("times on the CPU, or times that are made up")

SUBJECT = "train.py:make"
# Rounds that the race of the step tail recorded: contenders in turn, as a subject and its calibration are.
RECORDED = Path(__file__).with_name("recorded_rounds.json")
"""Rounds of the race of the step tail on a busy machine of two cores."""


def measurement(relative: list[float], losses: tuple[float, ...] = (3.0, 2.0, 1.0), peak: float = 1e9) -> Any:
    """Starts that took `relative` times the calibration."""
    return gate.Measurement(
        step_seconds=[0.01 * each for each in relative],
        relative=list(relative),
        peak_bytes=[peak + index for index in range(len(relative))],
        loss_steps=list(range(len(losses))),
        loss_low=list(losses),
        loss_high=list(losses),
    )


def noisy(seed: int, scale: float = 1.0, starts: int = 6) -> list[float]:
    """Starts that fall into two modes 20% apart, with a little around each."""
    draw = random.Random(seed)
    return [scale * draw.choice((1.0, 1.2)) * math.exp(draw.gauss(0.0, 0.01)) for _ in range(starts)]


# --- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("few", "many"), [(3, 3), (5, 4), (6, 6)])
def test_counts_are_those_of_mann_whitney(few: int, many: int) -> None:
    expected = [0] * (few * many + 1)
    for chosen in itertools.combinations(range(few + many), few):
        expected[sum(place - rank for rank, place in enumerate(chosen))] += 1
    assert gate._counts((many + index, index) for index in range(1, few + 1)) == expected


def test_counts_are_those_of_kendall() -> None:
    expected = [0] * 11
    for order in itertools.permutations(range(5)):
        expected[sum(a > b for a, b in itertools.combinations(order, 2))] += 1
    assert gate._counts((index, 1) for index in range(2, 6)) == expected


def test_interval_covers_as_often_as_it_says() -> None:
    draw = np.random.default_rng(3)
    missed = 0
    for _ in range(2000):
        before, after = np.exp(draw.standard_cauchy((2, 6)) * 0.05)  # tails as wild as they come
        interval = gate.ratio_interval(list(before), list(1.3 * after), 0.9)
        missed += not interval.low <= 1.3 <= interval.high
    assert interval.confidence >= 0.9
    assert missed / 2000 < 1.0 - interval.confidence + 3 * math.sqrt(0.1 * 0.9 / 2000)


def test_too_few_starts_say_what_they_reach() -> None:
    interval = gate.ratio_interval([1.0, 1.1, 1.2], [2.0, 2.1, 2.2])
    assert interval.confidence == pytest.approx(0.9)
    assert (interval.low, interval.high) == (pytest.approx(2.0 / 1.2), pytest.approx(2.2))


# --- verdicts ---------------------------------------------------------------------------------------------------------


def recorded_runs() -> Iterator[tuple[list[float], list[float]]]:
    """Two runs of six starts of equal programs: an early and a late half of the rounds, six windows of each."""
    for times in json.loads(RECORDED.read_text())["cases"].values():
        long = [rounds for rounds in times.values() if len(rounds) >= 96]
        for subject, calibration in itertools.combinations(long, 2):
            ratios = [a / b for a, b in zip(subject, calibration, strict=True)]
            size = len(ratios) // 12
            windows = [statistics.median(ratios[i * size : (i + 1) * size]) for i in range(12)]
            yield windows[:6], windows[6:]
            yield windows[6:], windows[:6]


def test_a_hundred_recorded_runs_raise_at_most_one_alarm() -> None:
    runs = list(recorded_runs())
    verdicts = [gate.judge(gate.ratio_interval(before, after), 0.05) for before, after in runs]
    assert len(runs) >= 100
    assert verdicts.count("more") <= len(runs) // 100


def test_a_sleep_of_a_fifth_is_caught_in_recorded_noise() -> None:
    slower = [(before, [1.2 * each for each in after]) for before, after in recorded_runs()]
    verdicts = [gate.judge(gate.ratio_interval(*pair), 0.05) for pair in slower]
    assert verdicts.count("more") >= 0.99 * len(slower)


def test_modes_raise_no_alarm_and_hide_no_slowdown() -> None:
    equal = [gate.judge(gate.ratio_interval(noisy(2 * i), noisy(2 * i + 1)), 0.05) for i in range(1000)]
    assert equal.count("more") <= 10
    slower = [gate.judge(gate.ratio_interval(noisy(i, starts=12), noisy(i + 500, 1.4, 12)), 0.05) for i in range(100)]
    assert slower.count("more") >= 95


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((1.1, 1.2, 1.3), "more"),
        ((1.01, 1.03, 1.04), "same"),  # slower beyond doubt, and by less than the threshold
        ((0.98, 1.0, 1.02), "same"),
        ((0.9, 1.1, 1.3), "unclear"),
        ((0.8, 1.0, 1.2), "unclear"),
        ((0.7, 0.8, 0.9), "less"),
    ],
)
def test_verdicts(interval: tuple[float, float, float], expected: str) -> None:
    assert gate.judge(gate.Interval(*interval, 0.99), 0.05) == expected


def test_losses_that_move_are_found() -> None:
    before = measurement([1.0] * 6)
    assert gate.compare_losses(before, measurement([2.0] * 6)) is None
    assert gate.compare_losses(before, measurement([1.0] * 6, (3.0, 2.0000001, 1.0))) == (1, pytest.approx(5e-8))
    assert gate.compare_losses(before, measurement([1.0] * 6, (3.0, math.nan, 1.0))) is not None
    wide = gate.Measurement(**{**before.to_json(), "loss_low": [2.9, 1.9, 0.9], "loss_high": [3.1, 2.1, 1.1]})
    assert gate.compare_losses(wide, measurement([1.0] * 6, (3.05, 1.95, 1.0))) is None
    assert gate.compare_losses(wide, measurement([1.0] * 6, (3.05, 1.95, 1.3)))[0] == 2


def test_trend_finds_growth_and_says_when_the_limit_is_met() -> None:
    draw = random.Random(4)
    grown = gate.trend("peak memory", "bytes", [100.0 + 2.0 * i + draw.gauss(0, 0.5) for i in range(15)], limit=200.0)
    assert grown is not None and grown.slope.low > 0 and grown.slope.low <= 2.0 <= grown.slope.high
    assert grown.runs_left == pytest.approx(36, abs=3)
    flat = gate.trend("step", "s", [1.0 + draw.gauss(0, 0.1) for _ in range(15)], limit=2.0)
    assert flat is not None and flat.slope.low < 0 < flat.slope.high and flat.runs_left is None
    assert gate.trend("step", "s", [1.0, 2.0, 3.0, 4.0]) is None


def test_starts_are_summed_up_without_the_first_turn() -> None:
    def blocks(seconds: list[list[float]], losses: list[list[float]]) -> list[Block]:
        return [Block(s, None, loss, 0) for s, loss in zip(seconds, losses, strict=True)]

    seconds, nothing = [[9.0, 9.0], [9.0, 2.0], [9.0, 4.0]], [[math.nan] * 2] * 3
    starts = [
        {
            "subject": Run("subject", 0, 0.0, blocks(seconds, [[5, 4], [3, 2], [1, 0.5 + i]]), peak_bytes=7),
            "calibration": Run("calibration", 0, 0.0, blocks([[9, 9], [9, 1], [9, 1]], nothing)),
        }
        for i in range(2)
    ]
    summed = measure.summed_up(starts)
    assert summed.step_seconds == [3.0, 3.0] and summed.relative == [3.0, 3.0] and summed.peak_bytes == [7.0, 7.0]
    assert summed.loss_low == [5, 4, 3, 2, 1, 0.5] and summed.loss_high[-1] == 1.5


# --- the command ------------------------------------------------------------------------------------------------------


class Machine:
    """Hands out made-up measurements in place of real ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.next = measurement(noisy(1))
        self.key = {"cpu": "made up", "torch": "2.13"}
        self.plans: list[Any] = []
        self.file = folder / "baseline.json"
        monkeypatch.setattr(
            measure, "probe", lambda _subject, threads, _timeout: measure.MeasurementPlan(threads, 3, 2)
        )
        monkeypatch.setattr(measure, "machine_key", lambda _threads: dict(self.key))
        monkeypatch.setattr(measure, "take", self._take)

    def _take(self, _subject: str, plan: Any, _starts: int, _timeout: float, _on_start: Any) -> Any:
        self.plans.append(plan)
        return self.next

    def run(self, *more: str) -> int:
        return cli.main(["bench", SUBJECT, "--baseline", str(self.file), *more])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_first_run_writes_the_baseline_and_the_second_compares(machine: Machine, capsys: Any) -> None:
    assert machine.run() == 0
    assert "baseline written" in capsys.readouterr().out
    machine.next = measurement(noisy(2))
    assert machine.run() == 0
    assert machine.plans[0] == machine.plans[1]  # measured alike, from the file
    said = capsys.readouterr().out
    assert "SLOWER" not in said and "losses   as before, bit for bit" in said


def test_a_slower_step_fails_and_an_update_takes_it_as_it_is(machine: Machine, capsys: Any) -> None:
    machine.next = measurement([1.0, 1.01, 0.99, 1.02, 0.98, 1.0])
    assert machine.run() == 0
    machine.next = measurement([1.2 * each for each in machine.next.relative], losses=(3.0, 2.5, 1.0))
    capsys.readouterr()
    assert machine.run("--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "regression" and result["time"]["verdict"] == "more"
    assert result["losses"] == {"step": 1, "share": pytest.approx(0.25)}
    assert machine.run("--threshold", "25%") == 0
    assert machine.run("--update") == 0 and machine.run() == 0
    assert "NUMBERS MOVED" not in capsys.readouterr().out.splitlines()[-1]


def test_a_larger_step_fails(machine: Machine, capsys: Any) -> None:
    assert machine.run() == 0
    machine.next = measurement(machine.next.relative, peak=1.3e9)
    assert machine.run() == 1
    assert "memory   LARGER: +30.0%" in capsys.readouterr().out


def test_another_machine_is_not_compared(machine: Machine, capsys: Any) -> None:
    assert machine.run() == 0
    before = machine.file.read_text()
    machine.key["torch"] = "2.14"
    assert machine.run() == 2
    assert "torch was '2.13' and is '2.14'" in capsys.readouterr().err
    assert machine.file.read_text() == before
    assert machine.run("--update") == 0


def test_history_grows_and_shows_its_trend(machine: Machine, capsys: Any) -> None:
    for index in range(8):
        machine.next = measurement(noisy(index), peak=1e9 + index * 2**20)
        assert machine.run("--label", f"commit {index}") == 0
    history = json.loads(machine.file.read_text())["subjects"][SUBJECT]["history"]
    assert [entry["label"] for entry in history] == [f"commit {index}" for index in range(8)]
    assert (
        "trend    peak memory +1.00 MiB [+1.00 MiB, +1.00 MiB] a run over 8 runs; the machine's limit in"
        in (capsys.readouterr().out.splitlines()[-1])
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "--baseline", "b.json"],
        [SUBJECT, "--baseline", "b.json", "--threshold", "-1"],
        [SUBJECT, "--baseline", "b.json", "--starts", "3"],
        [SUBJECT],
    ],
)
def test_bad_usage_is_refused(arguments: list[str], machine: Machine) -> None:
    try:
        status = cli.main(["bench", *arguments])
    except SystemExit as left:
        status = int(left.code or 0)
    assert status == 2


def test_a_file_of_another_kind_is_left_alone(machine: Machine, capsys: Any) -> None:
    machine.file.write_text('{"precious": 1}')
    assert machine.run() == 2
    assert "is no baseline" in capsys.readouterr().err and machine.file.read_text() == '{"precious": 1}'


SCRIPT = """
import numpy, torch
from torch import nn

def make():
    model = nn.Linear(8, 2)
    batches = [(torch.randn(4, 8), torch.randn(4, 2)) for _ in range(3)]
    return model, torch.optim.SGD(model.parameters(), lr=0.01), nn.MSELoss(), batches

def larger():
    held = torch.ones(200 << 18)
    moved = iter(range(10 ** 6))
    return lambda: float(held[0]) + next(moved)

def broken():
    raise RuntimeError("the user's own mistake")

def neither():
    return 3
"""


# Short turns: the baseline keeps how long they are for the runs that follow.
PROGRAM = """
import sys
from oxytorch import cli
from oxytorch.bench import measure
measure.TURN_SECONDS = 0.05
sys.exit(cli.main(["bench", *sys.argv[1:]]))
"""


def bench(folder: Path, subject: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, subject, "--baseline", "baseline.json", "--threads", "1", *more]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
def test_real_runs_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    # A threshold that no machine's noise reaches: this is about everything but the times.
    first = bench(tmp_path, SUBJECT, "--starts", "5", "--threshold", "9000%")
    assert first.returncode == 0, first.stderr
    again = bench(tmp_path, SUBJECT, "--starts", "5", "--threshold", "9000%", "--json")
    assert again.returncode == 0, again.stderr
    result = json.loads(again.stdout)
    assert result["losses"] is None and result["memory"]["verdict"] == "same"
    assert len(result["measured"]["relative"]) == 5 and all(each > 0 for each in result["measured"]["relative"])
    losses = result["measured"]["loss_low"]
    assert losses == result["measured"]["loss_high"] and losses[-1] < losses[0]
    file = tmp_path / "baseline.json"
    file.write_text(file.read_text().replace(SUBJECT, "train:larger"))
    larger = bench(tmp_path, "train:larger", "--starts", "5")
    assert larger.returncode == 1, larger.stderr
    assert "LARGER" in larger.stdout and "NUMBERS MOVED: first at step 0" in larger.stdout


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("train.py:broken", "the user's own mistake"),
        ("train.py:neither", "returned a int"),
        ("train.py:absent", "no attribute 'absent'"),
        ("nowhere.py:make", "there is no script nowhere.py"),
    ],
)
def test_a_subject_that_cannot_run_is_bad_usage(subject: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = bench(tmp_path, subject)
    assert done.returncode == 2 and said in done.stderr
    assert not (tmp_path / "baseline.json").exists()
