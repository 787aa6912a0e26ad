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
import torch

pytest.importorskip("sklearn")

import oxytorch.bench.turns
from oxytorch.bench.turns.driver import Block

pytestmark = pytest.mark.cpu_only("races on the CPU")


@pytest.fixture(scope="module")
def figures(import_race: Callable[[str], ModuleType]) -> ModuleType:
    return import_race("_orchestrator.figures")


@pytest.fixture(scope="module")
def switches(import_race: Callable[[str], ModuleType]) -> ModuleType:
    return import_race("_orchestrator.switches")


@pytest.fixture
def import_worker(
    import_race: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], ModuleType]:
    """For modules of the workers, which have these under another name so that they never import oxytorch."""
    monkeypatch.setitem(sys.modules, "oxytorch_turns", oxytorch.bench.turns)
    return import_race


@pytest.fixture(scope="module")
def screen(import_race: Callable[[str], ModuleType]) -> ModuleType:
    return import_race("_orchestrator.screen")


def made_up(
    figures: ModuleType, name: str, absent: dict[str, str] | None = None, starts: int = 2, **seconds: float
) -> Any:
    """A race in which every turn of a contender took the same."""
    entries = {}
    for each, value in seconds.items():
        started = {str(1000 + i): figures.Started([value] * 3, 0.0, 0.0, 1.0, {}) for i in range(starts)}
        entries[each.replace("_plus_", " + ").replace("_", " ")] = figures.Entry("", started)
    return figures.Race(name, name, entries, absent or {}, True)


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
    race = made_up(figures, "gpt", eager=3.0, stock_compiled=1.0, eager_plus_mallopt=2.0, oxytorch_advanced=1.5)
    (figure,) = figures.rival_figures(race)
    assert "best rival (stock compiled" in figure.what and figure.got.mid == pytest.approx(1 / 1.5) and not figure.met
    assert figures.rival_figures(made_up(figures, "gpt", eager=3.0, oxytorch_advanced=1.0)) == []


def test_basic_stands_beside_eager_with_one_mallopt(figures: ModuleType) -> None:
    races = [made_up(figures, "cnn", eager=2.0, eager_plus_mallopt=1.2, oxytorch_basic=1.0)]
    made = by_name(figures.judge(races, has_bf16=True))
    assert made["oxytorch basic: geometric mean of 1 workloads over eager"].got.mid == pytest.approx(2.0)
    assert made["oxytorch basic: geometric mean of 1 workloads over eager + mallopt"].got.mid == pytest.approx(1.2)


def test_repaying_counts_compiling(figures: ModuleType) -> None:
    race = made_up(figures, "lstm", eager=0.3, oxytorch_advanced=0.1)
    ready = {"tuning_seconds": 1.0, "cold": {"tuning_seconds": 60.0, "compile_seconds": 40.0}}
    for started in race.entries["oxytorch advanced"].starts.values():
        started.prepared.update(ready)
    (figure,) = figures.repaid_figures(race)
    assert figure.what == "lstm: oxytorch advanced repaid after steps, compiling included"
    assert figure.got.mid == 300 and figure.met
    assert figures.spent(race.entries["oxytorch advanced"]) == {"all": 60.0, "compiling": 40.0}
    assert figures.repaid_after(race, "eager") == float("inf")


def test_ratios_pair_starts_by_seed_and_one_start_has_no_interval(figures: ModuleType) -> None:
    race = made_up(figures, "mlp", eager=0.3, oxytorch_advanced=0.1)
    del race.entries["eager"].starts["1000"]
    assert race.ratios("eager", "oxytorch advanced") == pytest.approx([3.0])
    (figure,) = figures.rival_figures(made_up(figures, "mlp", starts=1, eager=3.0, stock_1=2.0, oxytorch_advanced=1.0))
    assert figure.value == "2 (one start)" and figure.to_json()["got"] == [None, pytest.approx(2.0), None]


def test_the_geometric_mean_is_as_unsure_as_its_least_sure_workload(figures: ModuleType) -> None:
    sure = made_up(figures, "cnn", starts=4, eager=2.0, oxytorch_basic=1.0)
    unsure = made_up(figures, "mlp", starts=4, eager=2.0, oxytorch_basic=1.0)
    for index, started in enumerate(unsure.entries["eager"].starts.values()):
        started.seconds[:] = [2.0 * 1.1**index] * 3
    mean = figures.geometric_mean([sure, unsure], "eager", "oxytorch basic")
    alone = unsure.ratio("eager", "oxytorch basic")
    assert alone.low < 2.0 * 1.1**1.5 < alone.high
    assert mean.high / mean.mid == pytest.approx((alone.high / alone.mid) ** 0.5)


def test_regret_compares_speed_and_cost(figures: ModuleType) -> None:
    race = made_up(figures, "cnn", oxytorch_advanced=1.0, exhaustive=0.96)
    race.entries["oxytorch advanced"].first["cold"] = {"tuning_seconds": 40.0, "compile_seconds": 10.0}
    race.entries["exhaustive"].first.update(accepted=["bf16"], tried=16, search_seconds=200.0)
    speed, cost = figures.regret_figures(race)
    assert "16 combinations (bf16)" in speed.what and speed.got.mid == pytest.approx(0.96) and not speed.met
    assert cost.got.mid == pytest.approx(0.15) and not cost.met
    assert figures.rival_figures(race) == []  # A search is no rival.


def test_a_race_survives_its_document(figures: ModuleType) -> None:
    race = made_up(figures, "cnn", {"stock compiled": "no compiler"}, eager=2.0)
    again = figures.Race.from_json(json.loads(json.dumps(race.to_json())))
    assert again == race


# --- rivals -----------------------------------------------------------------------------------------------------------


def test_every_combination_of_stock_switches_is_screened(switches: ModuleType) -> None:
    found = switches.eager_combinations("cnn", 2)
    assert len(found) == len(set(found)) == 3 * 3 * 2 * 2
    assert {each.optimizer for each in found} == {"for-loop", "foreach", "fused"}
    assert {each.precision for each in found} == {"fp32", "oneDNN bf16", "bf16"}
    assert {(each.channels_last, each.threads) for each in found} == {(a, b) for a in (False, True) for b in (1, 2)}
    assert {each.math_attention for each in switches.eager_combinations("gpt", 2)} == {False, True}
    assert len({str(each) for each in found}) == len(found)
    best = switches.Switches("fused", "bf16", True, allocator="tcmalloc", threads=2)
    compiled = list(switches.compiled_combinations("cnn", best))
    assert len(compiled) == 4 and all(each.compile == "default" and each.allocator == "tcmalloc" for each in compiled)


def test_switches_survive_json_and_say_what_differs(switches: ModuleType) -> None:
    assert switches.Switches().to_json() == {} and str(switches.Switches()) == "fp32"
    each = switches.Switches("fused", "bf16", True, False, "mallopt", 1, "default", True)
    assert switches.Switches(**json.loads(json.dumps(each.to_json()))) == each
    assert str(each) == "fused AdamW, bf16, channels_last, mallopt, compile default, 1 thread"


def test_the_fastest_survive_the_screening(screen: ModuleType, switches: ModuleType) -> None:
    """Made-up times: every switch has its factor, the best of all is known, and the finals see a little noise."""

    def cost(each: Any) -> float:
        factor = {"for-loop": 1.2, "foreach": 1.1, "fused": 1.0}[each.optimizer]
        factor *= {"fp32": 2.0, "oneDNN bf16": 1.3, "bf16": 1.0}[each.precision] * (1.0 if each.channels_last else 1.4)
        factor *= {"default": 1.3, "mallopt": 1.1}.get(each.allocator, 1.0) * (1.5 if each.threads == 1 else 1.0)
        return factor * (0.8 if each.compile else 1.0) * (0.9 if each.compile.startswith("max") else 1.0)

    timings = screen.Timings()
    for each in switches.eager_combinations("cnn", 2):
        for allocator in ("default", "mallopt", "tcmalloc"):
            combination = screen.replace(each, allocator=allocator)
            timings.add(combination, [9.0, cost(combination), 0.1])  # a visit counts by its median
    raced = []

    def race(named: dict[str, Any], seed: int) -> dict[str, Any]:
        raced.append((len(named), seed))
        runs = {}
        for name, each in named.items():
            run = screen.Run(name, seed, 0.0)
            run.blocks = [Block([9.0, 9.0], None, [], 0), Block([9.0, cost(each), cost(each)], None, [], 0)]
            runs[name] = run
        return runs

    said = screen.chosen(screen.finals("cnn", timings, race, 2, quick=False)[-1])
    best = {"optimizer": "fused", "precision": "bf16", "channels_last": True, "allocator": "tcmalloc", "threads": 2}
    assert said["stock 1"] == {**best, "flush_denormals": True}
    assert said["stock compiled"] == {**said["stock 1"], "compile": "max-autotune-no-cudagraphs"}
    assert said["lightning"] == said["accelerate"] == said["stock compiled"]
    assert len(raced) == 2 and raced[0][1] != raced[1][1] and max(seed for _, seed in raced) < 1000


def test_visits_that_were_ruled_out_do_not_count(screen: ModuleType, switches: ModuleType) -> None:
    timings = screen.Timings()
    slow, fast, unsure = (switches.Switches(threads=threads) for threads in (1, 2, 3))
    for seconds in ([1.0], [1.1]):
        timings.add(fast, seconds)
        timings.add(slow, [2.0])
    timings.add(unsure, [0.5])
    timings.add(unsure, [])
    assert timings.best(3) == [fast, slow]  # one visit is not as sure as two


def test_rivals_come_from_the_screening_of_this_class_of_machine(
    import_race: Callable[[str], ModuleType], switches: ModuleType, tmp_path: Path
) -> None:
    rivals = import_race("_orchestrator.rivals")
    path = tmp_path / "rivals.json"
    found, screened = rivals.rivals(path, "2 threads, avx2", "cnn", True)
    assert not screened and found["stock 1"].precision == "bf16" and found["stock 1"].channels_last
    assert found["eager"] == switches.Switches() and found["eager + mallopt"] == switches.Switches(allocator="mallopt")
    rivals.store(path, "2 threads, avx2", "cnn", {"rivals": {"stock 1": {"optimizer": "foreach"}}})
    found, screened = rivals.rivals(path, "2 threads, avx2", "cnn", True)
    assert screened and found["stock 1"] == switches.Switches("foreach") and "lightning" not in found
    assert not rivals.rivals(path, "8 threads, avx2", "cnn", True)[1]


# --- on a card, as far as one can tell without one --------------------------------------------------------------------


def test_on_a_card_every_mode_of_the_compiler_is_a_rival(import_worker: Callable[[str], ModuleType]) -> None:
    found = import_worker("_orchestrator.rivals").cuda_rivals("resnet")
    assert {each.compile for each in found.values()} == {"", "default", "reduce-overhead", "max-autotune"}
    assert all(each.device == "cuda" for each in found.values()) and found["eager"].precision == "fp32"
    stock = [each for name, each in found.items() if name != "eager"]
    assert all((each.optimizer, each.precision, each.channels_last) == ("fused", "bf16", True) for each in stock)
    assert [name for name, each in found.items() if each.graph] == ["stock graph", "stock compiled graph"]
    assert str(found["stock graph"]) == "fused AdamW, bf16, channels_last, whole step in a CUDA graph"
    contenders = import_worker("_orchestrator.contenders")
    assert isinstance(contenders.make("stock graph"), contenders.Graphed)
    assert found.keys() - {"eager"} == set(import_worker("_orchestrator.rivals").ON_CUDA)


@pytest.mark.parametrize(("name", "millions"), [("gpt", 86), ("resnet", 21), ("bert", 91)])
def test_models_for_a_card_have_the_usual_sizes(
    import_worker: Callable[[str], ModuleType], name: str, millions: int
) -> None:
    models = import_worker("_orchestrator.models")
    with torch.device("meta"):
        counts = [
            sum(parameter.numel() for parameter in models.make_workload(name, device).make_model().parameters())
            for device in ("cpu", "cuda")
        ]
    assert counts[1] // 10**6 == millions and counts[0] < counts[1]


def test_a_card_is_timed_from_idle_to_idle(
    import_worker: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A made-up card: each step takes the host a second, and what it queues is done only where the host waits."""
    worker = import_worker("_orchestrator.worker")
    now, waits, answers = [0.0], [], []

    def synchronize() -> None:
        waits.append(now[0])
        now[0] += 10.0

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(worker.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sys, "stdin", iter(["run 5\n", "run 1\n", "finish\n"]))
    for _ in worker.DrivenTurns([1], answers.append, "cuda"):
        now[0] += 1.0
    assert [answer["seconds"] for answer in answers] == [[11.0, *[(4 + 10) / 4] * 4], [11.0]]
    assert len(waits) == 3 + 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--device", "cpu", "--contenders", "stock graph"), "no stock graph on cpu"),
        (("--device", "cuda", "--contenders", "lightning"), "no lightning on cuda"),
        (("--device", "cuda", "--workloads", "lstm"), "no lstm on cuda"),
        (("--device", "cuda", "--screen"), "nothing is screened"),
    ],
)
def test_what_a_device_does_not_have_is_refused(races: Path, words: tuple[str, ...], why: str) -> None:
    command = [sys.executable, str(races / "orchestrator.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and why in done.stderr


@pytest.mark.slow
def test_a_quick_screening_finds_rivals_and_the_race_takes_them(
    run_quick: Callable[..., Any], races: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rivals.json"
    command = [sys.executable, str(races / "orchestrator.py"), "--screen", "--quick", "--threads", "1"]
    done = subprocess.run(
        [*command, "--workloads", "mlp", "--rivals", str(path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ((_, found),) = json.loads(path.read_text())["machines"].items()
    assert found["mlp"]["combinations"] == 8 and {"stock 1", "stock 2"} <= found["mlp"]["rivals"].keys()
    said, document = run_quick("orchestrator", "--starts", "1", "--workloads", "mlp", "--rivals", str(path))
    raced = document["workloads"]["mlp"]
    assert raced["screened"] and {"stock 1", "stock 2", "oxytorch advanced"} <= raced["entries"].keys()
    # Which optimizer was fastest is the clock's to say.
    assert f"{found['mlp']['rivals']['stock 1']['optimizer']} AdamW" in raced["entries"]["stock 1"]["settings"]
    assert "over the best rival" in said and "not screened" not in said


@pytest.mark.slow
def test_quick_race_searches_all_combinations(run_quick: Callable[..., Any]) -> None:
    names = "eager,oxytorch advanced"
    _, document = run_quick(
        "orchestrator", "--exhaustive", "--starts", "1", "--workloads", "mlp", "--contenders", names
    )
    raced = document["workloads"]["mlp"]
    assert not raced["absent"]
    found = raced["entries"]["exhaustive"]["starts"]["1000"]["prepared"]
    assert found["tried"] >= 20 and found["search_seconds"] > 0  # 3 x 2 x 5 of heap, pool and optimizer, and more


@pytest.mark.slow
def test_quick_race_reports_contenders_and_the_missing(run_quick: Callable[..., Any], tmp_path: Path) -> None:
    run = partial(run_quick, "orchestrator", "--rivals", str(tmp_path / "none.json"))
    names = "eager,eager + mallopt,lightning,accelerate"
    _, document = run("--starts", "1", "--workloads", "mlp,lstm", "--contenders", names)
    for found in document["workloads"].values():
        assert found["entries"].keys() | found["absent"].keys() == set(names.split(","))
        assert {"eager", "eager + mallopt"} <= found["entries"].keys()
        plain, kept = (found["entries"][name]["starts"]["1000"] for name in ("eager", "eager + mallopt"))
        assert plain["loss"] == kept["loss"]  # The same training, bit for bit.
        assert all(why for why in found["absent"].values())
    assert "<svg" in (tmp_path / "orchestrator.html").read_text()
    before = tmp_path / "orchestrator.json"
    said, kept = run("--starts", "2", "--workloads", "mlp", "--contenders", "eager", "--keep", str(before))
    assert "geometric mean" in said
    assert kept["workloads"]["lstm"] == document["workloads"]["lstm"]
    starts = kept["workloads"]["mlp"]["entries"]["eager"]["starts"]
    assert starts.keys() == {"1000", "1001"}  # It goes on where the kept document ends.
    assert starts["1000"] == document["workloads"]["mlp"]["entries"]["eager"]["starts"]["1000"]
    # Nothing is left to do, and nothing is measured again.
    _, again = run("--starts", "2", "--workloads", "mlp", "--contenders", "eager", "--keep", str(before))
    assert again["workloads"] == kept["workloads"]


def test_a_race_goes_on_only_from_its_own_kind(import_race: Callable[[str], ModuleType], tmp_path: Path) -> None:
    race = import_race("orchestrator")
    here = {"cpu": "a", "instructions": "b", "threads": "2", "torch": "2.13"}
    path = tmp_path / "kept.json"
    assert race.kept(path, here) == {}
    path.write_text(json.dumps({"schema": "oxytorch-race/2", "machine": here, "workloads": {}}))
    with pytest.raises(SystemExit, match="race/2"):
        race.kept(path, here)
    path.write_text(json.dumps({"schema": race.SCHEMA, "machine": {**here, "cpu": "other"}, "workloads": {}}))
    with pytest.raises(SystemExit, match="cpu 'other'"):
        race.kept(path, here)
    path.write_text(json.dumps({"schema": race.SCHEMA, "machine": {**here, "GPU": "H100"}, "workloads": {}}))
    with pytest.raises(SystemExit, match="GPU 'H100', and this is 'none'"):
        race.kept(path, here)


@pytest.mark.slow
def test_the_quick_race_from_cpp_trains_to_the_same_bits(run_quick: Callable[..., Any]) -> None:
    said, document = run_quick("orchestrator", "--starts", "1", "--workloads", "cpp-mlp")
    if not document["workloads"]:
        pytest.skip("the program is not built")
    found = document["workloads"]["cpp-mlp"]
    assert found["entries"].keys() >= {"eager", "eager + mallopt", "stock 1", "oxytorch basic", "oxytorch advanced"}
    assert found["absent"].keys() <= {"stock 2"}  # its allocator may not be installed
    plain, basic = (found["entries"][name]["starts"]["1000"] for name in ("eager", "oxytorch basic"))
    assert plain["loss"] == basic["loss"] > 0
    verdicts = basic["prepared"]
    assert "bf16_autocast" in verdicts["rejected"]
    assert verdicts["rejected"].keys().isdisjoint(verdicts["accepted"])
    assert "cpp-mlp: oxytorch basic over the plain loop" in said


@pytest.mark.parametrize("flag", ["--workloads", "--contenders"])
def test_unknown_names_are_refused(races: Path, flag: str) -> None:
    command = [sys.executable, str(races / "orchestrator.py"), flag, "quantum"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no quantum; there are" in done.stderr


def test_a_quick_screening_does_not_touch_the_settings_of_the_race(races: Path) -> None:
    command = [sys.executable, str(races / "orchestrator.py"), "--screen", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--rivals FILE of its own" in done.stderr
