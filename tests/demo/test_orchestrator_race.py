"""The race of the orchestrator runs, reports who is missing, and judges what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytestmark = pytest.mark.cpu_only("races on the CPU")


@pytest.fixture(scope="module")
def figures(import_race: Callable[[str], ModuleType]) -> ModuleType:
    return import_race("_orchestrator.figures")


def made_up(figures: ModuleType, name: str, absent: dict[str, str] | None = None, **seconds: float) -> Any:
    """A race in which every turn of a contender took the same."""
    entries = {
        each.replace("_", " "): figures.Entry([[value] * 3] * 2, 0.0, 0.0, 1.0, [{}, {}])
        for each, value in seconds.items()
    }
    return figures.Race(name, name, entries, absent or {})


def by_name(made: list[Any]) -> dict[str, Any]:
    return {figure.what: figure for figure in made}


def test_means_and_the_slowest_workload_are_judged(figures: ModuleType) -> None:
    races = [
        made_up(figures, "cnn", eager=2.0, oxytorch_basic=1.0),
        made_up(figures, "mlp", eager=0.9, oxytorch_basic=1.0),
    ]
    made = by_name(figures.judge(races, has_bf16=True))
    mean = made["oxytorch basic: geometric mean of 2 workloads over eager"]
    assert mean.got.mid == pytest.approx(1.8**0.5) and mean.got.low == pytest.approx(mean.got.high) and mean.met
    assert made["oxytorch basic: cnn over eager"].met
    assert made["oxytorch basic: the slowest workload (mlp) over eager"].verdict == "NOT MET"
    assert made["oxytorch advanced: geometric mean over eager"].verdict == "absent"


def test_the_fastest_rival_is_the_one_to_beat(figures: ModuleType) -> None:
    race = made_up(figures, "gpt", eager=3.0, compile=1.0, eager_allocator=2.0, oxytorch_advanced=1.5)
    (figure,) = figures.rival_figures(race)
    assert "best rival (compile)" in figure.what and figure.got.mid == pytest.approx(1 / 1.5) and not figure.met
    assert figures.rival_figures(made_up(figures, "gpt", eager=3.0, oxytorch_advanced=1.0)) == []


def test_tuning_is_charged_without_the_compiler_and_the_compiler_apart(figures: ModuleType) -> None:
    race = made_up(figures, "lstm", eager=0.3, oxytorch_advanced=0.1)
    ready = {"tuning_seconds": 1.0, "cold": {"tuning_seconds": 60.0, "compile_seconds": 40.0}}
    race.entries["oxytorch advanced"].prepared[:] = [ready, ready]
    made = by_name(figures.repaid_figures(race))
    tuned = made["lstm: oxytorch advanced repaid after steps, compile apart"]
    assert tuned.got.mid == 100 and tuned.met
    assert made["lstm: oxytorch advanced, its compile repaid after steps"].got.mid == 200
    assert figures.repaid_after(race, "eager", 1.0) == float("inf")


def test_regret_compares_speed_and_cost(figures: ModuleType) -> None:
    race = made_up(figures, "cnn", oxytorch_advanced=1.0, exhaustive=0.96)
    race.entries["oxytorch advanced"].prepared[0]["cold"] = {"tuning_seconds": 40.0, "compile_seconds": 10.0}
    race.entries["exhaustive"].prepared[0].update(accepted=["bf16"], tried=16, search_seconds=200.0)
    speed, cost = figures.regret_figures(race)
    assert "16 combinations (bf16)" in speed.what and speed.got.mid == pytest.approx(0.96) and not speed.met
    assert cost.got.mid == pytest.approx(0.15) and not cost.met
    assert figures.rival_figures(race) == []  # A search is no rival.


def test_a_race_survives_its_document(figures: ModuleType) -> None:
    race = made_up(figures, "cnn", {"compile": "no compiler"}, eager=2.0)
    again = figures.Race.from_json(json.loads(json.dumps(race.to_json())))
    assert again == race


@pytest.mark.slow
def test_quick_race_reports_contenders_and_the_missing(run_quick: Callable[..., Any], tmp_path: Path) -> None:
    run = partial(run_quick, "orchestrator", "--starts", "1")
    names = "eager,eager + allocator,lightning 32,accelerate bf16"
    said, document = run("--workloads", "mlp,lstm", "--contenders", names)
    for found in document["workloads"].values():
        assert found["entries"].keys() | found["absent"].keys() == set(names.split(","))
        assert {"eager", "eager + allocator"} <= found["entries"].keys()
        plain, kept = (found["entries"][name] for name in ("eager", "eager + allocator"))
        assert plain["loss"] == kept["loss"]  # The same training, bit for bit.
        assert all(why for why in found["absent"].values())
    assert "<svg" in (tmp_path / "orchestrator.html").read_text()
    assert "geometric mean" in said
    _, kept = run("--workloads", "mlp", "--contenders", "eager", "--keep", str(tmp_path / "orchestrator.json"))
    assert kept["workloads"]["lstm"] == document["workloads"]["lstm"]
    assert kept["workloads"]["mlp"]["entries"].keys() == {"eager"}


@pytest.mark.slow
def test_the_quick_race_from_cpp_trains_to_the_same_bits(run_quick: Callable[..., Any]) -> None:
    said, document = run_quick("orchestrator", "--starts", "1", "--workloads", "cpp-mlp")
    if not document["workloads"]:
        pytest.skip("the program is not built")
    found = document["workloads"]["cpp-mlp"]
    assert found["entries"].keys() == {"eager", "oxytorch basic", "oxytorch advanced"} and not found["absent"]
    plain, basic = (found["entries"][name] for name in ("eager", "oxytorch basic"))
    assert plain["loss"] == basic["loss"] > 0
    verdicts = basic["prepared"][0]
    assert "bf16_autocast" in verdicts["rejected"]
    assert verdicts["rejected"].keys().isdisjoint(verdicts["accepted"])
    assert "cpp-mlp: oxytorch basic over the plain loop" in said


@pytest.mark.parametrize("flag", ["--workloads", "--contenders"])
def test_unknown_names_are_refused(races: Path, flag: str) -> None:
    command = [sys.executable, str(races / "orchestrator.py"), flag, "quantum"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no quantum; there are" in done.stderr
