"""The races run, tell wins from losses, and write their reports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from oxytorch import base
from oxytorch.bench.turns.machine import has_bf16

pytestmark = pytest.mark.cpu_only("races on the CPU")


@pytest.fixture(scope="module")
def race(import_race: Callable[[str], ModuleType]) -> ModuleType:
    return import_race("step_tail")


@pytest.mark.slow
def test_quick_race_reports_every_contender(run_quick: Callable[..., Any], tmp_path: Path) -> None:
    said, document = run_quick("step_tail", "--starts", "2")
    cases = document["cases"]
    assert {"torch fused", "torch foreach", "torch for-loop", "oxytorch"} <= cases["200 x 1,000"].keys()
    assert {"torch fused", "oxytorch"} == cases["200 x 1,000, scaler"].keys()
    assert {"torch fused: tail", "oxytorch: tail"} <= cases["training mlp"].keys()
    for times in cases.values():
        assert len({np.shape(values) for values in times.values()}) == 1  # as many rounds for each, in two starts
        assert all(np.ndim(values) == 2 and len(values) == 2 and np.min(values) > 0 for values in times.values())
    promised = {figure["what"] for figure in document["figures"] if figure["met"] is not None}
    assert "200 x 1,000: over torch fused + clip + foreach average" in promised
    assert "7-byte layout, bytes a parameter, gradient included" in promised
    assert "<svg" in (tmp_path / "step_tail.html").read_text()
    assert "met" in said.lower()


def test_each_optimizer_is_raced(run_quick: Callable[..., Any]) -> None:
    said, document = run_quick("optimizers", "--starts", "1")
    raced = {case.partition(",")[0] for case in document["cases"]}
    assert raced == {"AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Muon"}
    for times in document["cases"].values():
        assert times.keys() == {"oxytorch", "torch"} and np.min(list(times.values())) > 0
    assert "AdamW, 200 x 1,000" in said


def test_each_operator_is_raced(run_quick: Callable[..., Any]) -> None:
    said, document = run_quick("ops", "--starts", "1")
    kinds = {(case.partition(" ")[0], frozenset(times)) for case, times in document["cases"].items()}
    phases = lambda *names: frozenset(f"{n}{phase}" for n in names for phase in (": forward", ": backward", ""))  # noqa: E731
    of_bfloat16 = {
        ("linear", phases("oxytorch", "torch", "bf16 weights")),
        ("head", frozenset({"oxytorch", "torch", "chunks", "bf16 weights"})),
        ("few", frozenset({"oxytorch", "torch", "chunks", "bf16 weights"})),
        ("accumulated", frozenset({"oxytorch", "torch", "bf16 weights"})),
        ("convolution", frozenset({"oxytorch", "torch"})),
    }
    assert kinds == (of_bfloat16 if has_bf16() else set()) | {
        ("attention", phases("oxytorch", "torch flash", "torch math")),
        ("dropout", phases("oxytorch", "torch math")),
        ("packed", phases("oxytorch", "padded", "one by one")),
        ("loss", frozenset({"oxytorch", "torch", "chunks"})),
        ("masked", frozenset({"oxytorch", "torch", "chunks", "chosen rows"})),
        ("norm", phases("oxytorch", "torch")),
        ("sum", frozenset({"oxytorch", "torch"})),
        ("activation", frozenset({"oxytorch", "torch"})),
        ("rotary", frozenset({"oxytorch", "torch"})),
        ("written", frozenset({"oxytorch", "torch", "scaled_dot_product_attention"})),
        ("transformer", frozenset({"oxytorch", "torch", "torch, math attention"})),
        ("embedding", frozenset({"oxytorch", "torch"})),
        ("accumulated", frozenset({"oxytorch", "torch"})),
        ("lstm", phases("oxytorch", "oneDNN", "oneDNN, 1 thread")),
        ("gru", phases("oxytorch", "torch", "torch, 1 thread")),
    }
    assert all(np.min(list(times.values())) > 0 for times in document["cases"].values())
    assert "attention fp32" in said and "linear and cross entropy" in said


def test_each_way_to_save_memory_is_raced(run_quick: Callable[..., Any]) -> None:
    said, document = run_quick("memory", "--starts", "1", "--case", "GPT", "--case", "U-Net")
    assert set(document["cases"]) == {"GPT-2, 12 layers", "U-Net, 5 stages"}
    peaks = {what: peak for what, peak, _ in document["layout"]}
    for model, times in document["cases"].items():
        assert {"plain", "per layer", "selective", "fit 60 %", "fit least"} <= times.keys()
        assert np.min(list(times.values())) > 0
        assert peaks[f"{model}: fit least"] <= peaks[f"{model}: fit 60 %"] < peaks[f"{model}: plain"]
    assert "sequential" in document["cases"]["GPT-2, 12 layers"]
    assert "chain" in document["absent"]["U-Net, 5 stages"]["sequential"]
    assert "torch's step, times as long as ours" in said and "at the least budget" in said


def test_each_way_to_hold_state_is_raced(run_quick: Callable[..., Any]) -> None:
    said, document = run_quick("state", "--starts", "1")
    ((case, times),) = document["cases"].items()
    assert {"plain", "fused", "fused in hooks", "int8_state, in backward", "state_in_file, in backward"} <= times.keys()
    assert {what for what, _, _ in document["layout"]} == {f"{case}: {name}" for name in times}
    assert np.min(list(times.values())) > 0 and "times as long as fused" in said


def test_models_that_nobody_prepared_are_raced(run_quick: Callable[..., Any]) -> None:
    said, document = run_quick("unprepared", "--starts", "1")
    assert {*document["cases"], *document["absent"]} == {
        "torch's encoder, 2 x 16", "written-out GPT, 1 x 16", "LLaMA, 1 x 16",
    }  # fmt: skip
    for times in document["cases"].values():
        assert {"oxytorch", "eager", "oxytorch: bytes", "eager: bytes"} <= times.keys()
        assert all(np.min(list(values)) > 0 for values in times.values())
    assert "times as long" in said


def test_products_and_steps_take_turns(run_quick: Callable[..., Any]) -> None:
    said, document = run_quick("roofline", "--steps", "mlp")
    assert document["flops"]["mlp"] == 2 * 128 * (3 * (784 * 512 + 512 * 512 + 512 * 10) - 784 * 512)
    assert list(document["parts"]) == ["mlp"]
    assert len(document["parts"]["mlp"]) == 3 and min(document["parts"]["mlp"]) > 0
    assert "of a step at the rate of products beside it" in said


def test_what_each_goal_takes_is_measured(run_quick: Callable[..., Any]) -> None:
    said, document = run_quick("goals", "--starts", "1")
    assert list(document["cases"]) == ["mlp: speed", "mlp: memory", "mlp: memory, ultra"]
    for row, times in document["cases"].items():
        assert {"tensors: given", "tensors: tuned", "tensors: tuning", "resident: given", "time"} <= times.keys()
        given, tuned, tuning = (times[f"tensors: {what}"][0][0] for what in ("given", "tuned", "tuning"))
        assert 0 < tuned <= 1.05 * given + (1 << 20) and given <= tuning
        if "ultra" not in row:  # whose state of 8 bits is judged whole
            assert tuning <= 1.25 * given
    assert "while tuning" in said


def test_starts_are_joined_and_one_has_no_interval(race: ModuleType) -> None:
    first, second = (
        race.Measured({"200 x 64": {"torch fused": np.full(rounds, 6.0), "oxytorch": np.full(rounds, ours)}})
        for rounds, ours in ((5, 1.0), (7, 1.5))
    )
    (figure,) = race.figures_of(first)[1]
    assert figure.got.mid == pytest.approx(6.0) and figure.value == "6 (one start)"
    joined = race.Measured.joined([first, second, race.Measured.joined([second])])
    assert joined.starts == 3 and joined.cases["200 x 64"]["oxytorch"].shape == (3, 5)
    (figure,) = race.figures_of(joined)[1]
    assert figure.got == base.starts_interval([6.0, 4.0, 4.0])
    again = race.Measured.from_json(json.loads(json.dumps(joined.to_json())))
    assert race.figures_of(again)[1] == [figure]


def test_a_difference_that_noise_made_negative_has_no_interval(race: ModuleType) -> None:
    got = race.over_starts(np.array([[1.0, 2.0, 3.0], [-1.0, -1.0, 2.0]]))
    assert got.mid == pytest.approx(0.5) and np.isnan([got.low, got.high]).all()


@pytest.mark.slow
def test_quick_convergence_reports_every_layout(run_quick: Callable[..., Any], tmp_path: Path) -> None:
    said, document = run_quick("convergence")
    assert [row["layout"] for row in document["rows"]] == [
        "fp32",
        "int8 state",
        "7 bytes",
        "7 bytes, stochastic rounding",
    ]
    assert all(len(row["losses"]) == document["seeds"] == 2 for row in document["rows"])
    assert "within noise" in said
    assert "int8 state" in (tmp_path / "convergence.html").read_text()


@pytest.mark.parametrize("scaled", [False, True])
def test_contenders_compute_the_same(race: ModuleType, scaled: bool) -> None:
    contenders = race.make_contenders([700, 3], scaled, large=False)
    for contender in contenders:
        for _ in range(3):
            contender.run()
    assert {contender.name for contender in contenders} >= {"torch fused", "oxytorch"}
    before = race.make_params([700, 3])
    for contender in contenders:
        for got, expected, start in zip(contender.params, contenders[0].params, before, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7, msg=contender.name)
            assert not torch.equal(got, start)


@pytest.mark.parametrize("scaled", [False, True])
def test_contenders_with_a_backward_compute_the_same(race: ModuleType, scaled: bool) -> None:
    contenders = race.backward_contenders([700, 3], scaled)
    for contender in contenders:
        for _ in range(3):
            assert len(contender.run()) == len(contender.phases)
    *steppers, alone = contenders
    for contender in steppers:
        for got, expected in zip(contender.params, steppers[0].params, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7, msg=contender.name)
    for got, start in zip(alone.params, race.make_params([700, 3]), strict=True):
        assert torch.equal(got, start)


def test_bare_backwards_are_taken_off_both(race: ModuleType) -> None:
    times = {name: np.full(20, value) for name, value in (("torch fused", 9.0), ("backward alone", 4.0))}
    judge = race.judge_backward(1.8)
    whole, tails = judge(race.Result({**times, "oxytorch, norm in backward": np.full(20, 6.0)}))
    assert whole.got.mid == pytest.approx(1.5) and whole.met is None
    assert tails.got.mid == pytest.approx(2.5) and tails.met
    _, tails = judge(race.Result({**times, "oxytorch, norm in backward": np.full(20, 7.0)}))
    assert tails.got.mid == pytest.approx(5 / 3) and not tails.met


def test_a_missing_peer_is_reported(race: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)  # importing it fails
    peer = race.peer_contender("bitsandbytes AdamW8bit", [700, 3])
    assert isinstance(peer, race.Absent) and "not installed" in peer.why
    sevens = {name: np.full(9, 7.0) for name in ("torch fused", race.SEVEN, race.INT8, race.INT8_ALONE)}
    absent = dict.fromkeys(race._peers.NAMES, "not installed")
    figures = race.judge_narrow(race.Result(sevens, absent))
    assert [figure.verdict for figure in figures] == ["absent", "absent", "met", ""]
    assert figures[0].value == "not installed"


def test_a_promise_is_judged_by_its_estimate(race: ModuleType) -> None:
    judge = race.over_torch(10.0)
    ours = np.full(20, 1.0)
    (figure,) = judge(race.Result({"torch fused": np.full(20, 9.0), "oxytorch": ours}))
    assert figure.got.mid == pytest.approx(9.0) and figure.verdict == "NOT MET"
    (figure,) = judge(race.Result({"torch fused": np.full(20, 11.0), "oxytorch": ours}))
    assert figure.met
    (figure,) = race.cpp_figures({"200 x 64": {"torch::optim": np.full(20, 99.0), "oxytorch": ours}})
    assert not figure.met and figure.bound == 100
    (figure,) = race.judge_statistics(race.Result({race.STATISTICS: np.full(20, 1.01), "oxytorch": ours}))
    assert figure.met and figure.at_most


def test_each_way_to_feed_a_loop_is_raced(races: Path, tmp_path: Path) -> None:
    cases = ("tokens", "tokenise", "tuned vectors")
    command = [sys.executable, str(races / "data.py"), "--quick", "--json", str(tmp_path / "data.json")]
    command += [word for case in cases for word in ("--case", case)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "data.json").read_text())
    assert tuple(document["cases"]) == cases, document["absent"]
    for case, found in document["cases"].items():
        assert next(iter(found)).startswith("oxytorch") and len(found) >= 3
        assert len({row["samples"] for row in found.values()}) == 1, f"{case}: not the same samples"
        assert all(np.min(row["wall"]) > 0 for row in found.values())
    assert "by hand, 2 workers" in done.stdout and "tokenizers alone" in done.stdout
