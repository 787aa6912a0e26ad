"""Writes the figures of README.md and docs/ from the JSON documents beside this file.

    python bench/results/tables.py [--check]

A page marks where they go: a table between `<!-- table: NAME -->` and `<!-- end -->`, a figure in a sentence between
`<!-- figure: NAME -->` and `<!-- end -->`. `--check` changes nothing, names the pages that differ and exits with 1;
tests/bench/test_tables.py does the same. A table whose JSON is not there yet says which command writes it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT / "bench" / "race"))

from _orchestrator.figures import (  # noqa: E402
    ALLOCATOR,
    EXACT,
    OURS,
    REFERENCE,
    SEARCHED,
    TOLERANCE,
    Race,
    geometric_mean,
    repaid_after,
    spent,
)
from _race import Figure, Measured, over_starts, ratio, text  # noqa: E402
from oxytorch.base import Interval, geometric_mean_interval, starts_interval  # noqa: E402

import memory as memory_race  # noqa: E402
import ops as ops_race  # noqa: E402

MARKED = re.compile(r"<!-- (table|figure): ([\w-]+) -->(.*?)<!-- end -->", re.DOTALL)
NO_INTERVAL = "One start gives no interval."

Document = dict[str, Any]
TAIL_CASES = ("16 x 4M", "200 x 1,000", "200 x 64", "1,000 x up to 512")
NAMES = {
    "cnn": "CNN, 4 stages",
    "resnet": "ResNet, 3 blocks",
    "gpt": "GPT, 4 layers",
    "bert": "BERT-style, dropout",
    "mlp": "MLP",
    "lstm": "LSTM, 2 layers",
}


def read(name: str) -> Document | None:
    """A document of this folder, None where it was not measured yet."""
    path = FOLDER / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """In Markdown."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def measured(command: str, name: str, document: Document, starts: Iterable[int] = ()) -> str:
    """The line under a table: which command wrote its figures, where, and in how many starts."""
    machine = document["machine"]
    counts = sorted(set(starts))
    said = [f"`{command}`", f"{machine['threads']} threads", machine["cpu"], machine["instructions"].split(", ")[-1]]
    said.append(f"torch {machine['torch'].partition('+')[0]}")
    if counts:
        several = f"{counts[0]} to {counts[-1]}" if counts[0] != counts[-1] else str(counts[0])
        said.append(f"{several} start{'s' if counts[-1] > 1 else ''}")
    sentence = f"{', '.join(said)}; 95% intervals over starts (<{name}>)."
    return sentence + (f" {NO_INTERVAL}" if counts and counts[0] == 1 else "")


def milliseconds(got: Interval) -> str:
    """Of a step, without its interval."""
    return f"{text(Interval(got.mid, got.mid, got.mid, 1.0), 1e3)} ms"


# --- the demo --------------------------------------------------------------------------------------------------------


def demo() -> str | None:
    """Contenders of the demo, from the times of their turns."""
    document = read("demo.json")
    if document is None:
        return None
    named = {"gpt": "byte-level GPT", "cnn": "CNN on digits", "mlp": "MLP on a table"}
    rows, starts = [], []
    for found in document["workloads"]:
        seconds = {name: np.array(turns) for name, turns in found["block_seconds"].items()}
        held = {row["contender"]: row["held_out_loss"] for row in found["rows"]}
        starts.append(len(seconds["plain"]))

        def over(slower: str, faster: str, seconds: dict[str, np.ndarray] = seconds) -> str:
            known = slower in seconds and faster in seconds
            return text(over_starts(seconds[slower] / seconds[faster])) if known else "not measured"

        # The allocator was no switch of the stock loop in documents without this contender, so it was no fair rival.
        fair = "plain + mallopt" in seconds
        rows.append(
            [
                named[found["name"]],
                milliseconds(over_starts(seconds["plain"])),
                over("plain", "basic"),
                over("plain + mallopt", "basic"),
                over("plain", "advanced"),
                over("stock", "advanced") + f": {found['choice']}" if fair else "not measured",
                f"{held['advanced']:.4f} ({held['plain']:.4f})",
            ]
        )
    head = ["", "plain", "basic, over plain", "basic, over plain + mallopt", "advanced, over plain"]
    head += ["advanced, over the best stock eager loop", "held-out loss, advanced (plain)"]
    return table(head, rows) + "\n\n" + measured('make demo ARGS="--json FILE"', "demo.json", document, starts)


# --- the race of the orchestrator ------------------------------------------------------------------------------------


def races(name: str) -> tuple[Document, list[Race]] | None:
    """A document of the orchestrator's race."""
    document = read(name)
    if document is None:
        return None
    return document, [Race.from_json(data) for data in document["workloads"].values()]


def starts_of(found: Iterable[Race]) -> list[int]:
    """How many each entry has."""
    return [len(entry.starts) for race in found for entry in race.entries.values()]


def over(race: Race, slower: str, faster: str) -> str:
    """A ratio, or that there is none."""
    return text(race.ratio(slower, faster)) if race.has(slower, faster) else "not measured"


def repaid(race: Race, ours: str) -> str:
    """Steps, or never."""
    if not race.has(ours, REFERENCE):
        return "not measured"
    steps = repaid_after(race, ours)
    return f"{steps:,.0f}" if math.isfinite(steps) else "never"


def cost(race: Race, ours: str) -> str:
    """What the first run spends."""
    if ours not in race.entries:
        return "not measured"
    took = spent(race.entries[ours])
    return f"{took['all']:.3g} s" + (f" ({took['compiling']:.2g} s)" if took["compiling"] else "")


def orchestrator() -> str | None:
    """Speed over the plain loop and over the plain loop with one `mallopt`, and what finding it costs."""
    found = races("orchestrator.json")
    if found is None:
        return None
    document, raced = found
    rows = [
        [
            NAMES[race.name],
            milliseconds(race.entries[REFERENCE].step),
            over(race, REFERENCE, EXACT),
            over(race, ALLOCATOR, EXACT),
            over(race, REFERENCE, TOLERANCE),
            cost(race, TOLERANCE),
            repaid(race, EXACT),
            repaid(race, TOLERANCE),
        ]
        for race in raced
    ]
    means = [
        text(geometric_mean(raced, slower, faster)) if all(race.has(slower, faster) for race in raced) else ""
        for slower, faster in ((REFERENCE, EXACT), (ALLOCATOR, EXACT), (REFERENCE, TOLERANCE))
    ]
    rows.append(["geometric mean", "", *means, "", "", ""])
    head = ["", "eager", "basic, over eager", "basic, over eager + mallopt", "advanced, over eager"]
    head += ["first run, advanced (compiling)", "basic repaid after steps", "advanced repaid after steps"]
    command = "python bench/race/orchestrator.py --starts 8"
    return table(head, rows) + "\n\n" + measured(command, "orchestrator.json", document, starts_of(raced))


def rivals() -> str | None:
    """Against the fastest of all that stock PyTorch, Lightning and Accelerate can do."""
    found = races("orchestrator.json")
    if found is None:
        return None
    document, raced = found
    fair = [race for race in raced if race.screened and race.has(REFERENCE, TOLERANCE)]
    if not fair:
        return None
    eager = {race.name: eager_best(race) for race in fair}
    rows, ratios = [], []
    for race in fair:
        best = race.best_rival() or REFERENCE
        ratios.append(race.ratios(best, TOLERANCE))
        plain = eager[race.name]
        rows.append(
            [
                NAMES[race.name],
                f"{plain}: {race.entries[plain].settings}",
                over(race, plain, TOLERANCE),
                f"{best}: {race.entries[best].settings}",
                over(race, best, TOLERANCE),
                *(over(race, name, TOLERANCE) for name in ("lightning", "accelerate")),
            ]
        )
    rows.append(["geometric mean", "", "", "", text(geometric_mean_interval(ratios)), "", ""])
    head = ["", "best stock eager loop", "advanced, over it", "best rival of all", "advanced, over it"]
    head += ["over Lightning", "over Accelerate"]
    command = "python bench/race/orchestrator.py --starts 8"
    return table(head, rows) + "\n\n" + measured(command, "orchestrator.json", document, starts_of(fair))


def over_all_rivals() -> str | None:
    """In the mean of the workloads, over the best rival of each."""
    found = races("orchestrator.json")
    fair = [] if found is None else [race for race in found[1] if race.screened and race.has(REFERENCE, TOLERANCE)]
    if not fair:
        return None
    return text(geometric_mean_interval([race.ratios(race.best_rival() or REFERENCE, TOLERANCE) for race in fair]))


def summary() -> str | None:
    """The best and the worst result of each kind of race, and how many starts stand behind them."""
    python, cpp_races = races("orchestrator.json"), races("orchestrator_cpp.json")
    tail = read("step_tail.json")
    if python is None or cpp_races is None or tail is None:
        return None
    of_loops = python[1]
    best_stock = {race.name: eager_best(race) for race in of_loops if race.screened}
    compared: list[tuple[str, list[tuple[Interval, str]]]] = [
        (f'{len(of_loops)} training loops, "advanced" over the plain loop', _ratios(of_loops, TOLERANCE)),
        ('the same, "basic" (no bit changes)', _ratios(of_loops, EXACT)),
        (
            'the same, "advanced" over the best stock loop that was found by trying all switches',
            [
                (race.ratio(best_stock[race.name], TOLERANCE), NAMES[race.name])
                for race in of_loops
                if race.name in best_stock and race.has(TOLERANCE, best_stock[race.name])
            ],
        ),
        (f'{len(cpp_races[1])} C++ loops, "advanced" over LibTorch\'s plain loop', _ratios(cpp_races[1], TOLERANCE)),
        (
            "clip + AdamW + moving average, over torch's fastest",
            [
                (ratio(known, "torch fused", "oxytorch"), f"{case} parameters")
                for case in TAIL_CASES
                if {"torch fused", "oxytorch"} <= (known := times(tail, case)).keys()
            ],
        ),
    ]
    rows = []
    for name, found in compared:
        ends = [end(found, key=lambda each: each[0].mid) for end in (max, min)]
        rows.append([name, *(f"{text(got)}, {which}" for got, which in ends)])
    return table(["time of the rival over ours", "best", "worst"], rows)


def _ratios(found: Iterable[Race], ours: str) -> list[tuple[Interval, str]]:
    """Of the workloads that have it, over the plain loop, with their names."""
    ready = [race for race in found if race.has(REFERENCE, ours)]
    return [(race.ratio(REFERENCE, ours), NAMES[race.name.removeprefix("cpp-")]) for race in ready]


def eager_best(race: Race) -> str:
    """The fastest stock loop that compiles nothing."""
    names = [name for name in race.rivals() if name.startswith(("eager", "stock")) and name != "stock compiled"]
    return min(names, key=lambda name: race.entries[name].step.mid)


def over_best(race: Race) -> str:
    """Over the fastest loop with stock switches, where such took part."""
    best = race.best_rival()
    if best is None or "stock 1" not in race.entries:
        return "not measured"
    return f"{over(race, best, TOLERANCE)}: {race.entries[best].settings}"


def regret() -> str | None:
    """Against the best of all combinations of the same strategies."""
    found = races("orchestrator_regret.json")
    if found is None:
        return None
    document, raced = found
    rows = []
    for race in raced:
        searched = race.entries[SEARCHED].first
        took = spent(race.entries[TOLERANCE])
        share = (took["all"] - took["compiling"]) / searched["search_seconds"]
        rows.append([NAMES[race.name], f"{searched['tried']}", over(race, SEARCHED, TOLERANCE), f"{share:.2f}"])
    head = ["", "combinations", "advanced, over the best of them", "tuning without compiling, over the search's time"]
    command = 'python bench/race/orchestrator.py --exhaustive --contenders "eager,oxytorch advanced"'
    return table(head, rows) + "\n\n" + measured(command, "orchestrator_regret.json", document, starts_of(raced))


def cpp() -> str | None:
    """From C++, over LibTorch's plain loop."""
    found = races("orchestrator_cpp.json")
    if found is None:
        return None
    document, raced = found
    rows = [
        [
            NAMES[race.name.removeprefix("cpp-")],
            milliseconds(race.entries[REFERENCE].step),
            over(race, REFERENCE, EXACT),
            over(race, ALLOCATOR, EXACT),
            over(race, REFERENCE, TOLERANCE),
            over_best(race),
            *(repaid(race, ours) for ours in OURS),
        ]
        for race in raced
    ]
    head = ["", "plain", "basic, over plain", "basic, over plain + mallopt", "advanced, over plain"]
    head += ["advanced, over the best stock loop", "basic repaid after steps", "advanced repaid after steps"]
    command = "python bench/race/orchestrator.py --workloads cpp-cnn,cpp-mlp,cpp-lstm"
    return table(head, rows) + "\n\n" + measured(command, "orchestrator_cpp.json", document, starts_of(raced))


# --- the step tail ---------------------------------------------------------------------------------------------------


def times(document: Document, case: str) -> dict[str, np.ndarray]:
    """Seconds of a case by contender, start and round."""
    return {name: np.array(values) for name, values in document["cases"].get(case, {}).items()}


def tail_ratio(document: Document, case: str, rival: str, ours: str) -> str:
    """How many times as long the rival takes."""
    known = times(document, case)
    return text(ratio(known, rival, ours)) if {rival, ours} <= known.keys() else "not measured"


def step_tail() -> str | None:
    """Clip, AdamW and moving average over torch's."""
    document = read("step_tail.json")
    if document is None:
        return None
    rows = [
        [
            case,
            tail_ratio(document, case, "torch fused", "oxytorch"),
            tail_ratio(document, f"{case}, scaler", "torch fused", "oxytorch"),
            tail_ratio(document, f"{case}, C++", "torch::optim", "oxytorch"),
        ]
        for case in TAIL_CASES
    ]
    head = ["tensors", "torch fused + clip + foreach average", "the same under a loss scale"]
    head += ["C++ `torch::optim` + clip + `lerp_`"]
    return table(head, rows) + "\n\n" + tail_source(document)


def tail_source(document: Document) -> str:
    """Where the figures of the step tail come from."""
    starts = [len(np.atleast_2d(turns)) for times in document["cases"].values() for turns in times.values()]
    return measured("python bench/race/step_tail.py", "step_tail.json", document, starts)


# --- memory ----------------------------------------------------------------------------------------------------------

MEMORY_COMMAND = "python bench/race/memory.py --starts 3 --seconds 1.5"


def raced(race: Any, name: str, command: str, kind: str) -> Callable[[], str | None]:
    """A table of a race that makes its own."""

    def make() -> str | None:
        document = read(name)
        if document is None:
            return None
        head, rows = race.tables(Measured.from_json(document))[kind]
        starts = [len(np.atleast_2d(turns)) for times in document["cases"].values() for turns in times.values()]
        return table(head, rows) + "\n\n" + measured(command, name, document, starts)

    return make


# --- the operators ---------------------------------------------------------------------------------------------------

DATA_COMMAND = "python bench/race/data.py"
OPS_COMMAND = "python bench/race/ops.py --starts 4 --seconds 0.6"


def narrow() -> str | None:
    """8-bit state over torch's fp32 tail and over the other packages' 8-bit optimizers."""
    document = read("step_tail.json")
    if document is None:
        return None
    case, ours = "16 x 4M, int8 state", "oxytorch, int8 state"
    rivals = {
        "torch fused, fp32 state": "torch fused",
        "bitsandbytes": "bitsandbytes AdamW8bit",
        "torchao, compiled": "torchao AdamW8bit, compiled",
    }
    rows = [[said, tail_ratio(document, case, name, ours)] for said, name in rivals.items()]
    return (
        table(["64M parameters, clip and average included", "time over int8 state's"], rows)
        + "\n\n"
        + tail_source(document)
    )


def training() -> str | None:
    """What the step tail is of a whole training step."""
    document = read("step_tail.json")
    if document is None:
        return None
    rows = []
    for case in ("training gpt", "training cnn", "training mlp"):
        known = times(document, case)
        share = over_starts(known["torch fused: tail"] / known["torch fused"])
        rows.append(
            [case.removeprefix("training "), f"{text(share, 100)}", text(ratio(known, "torch fused", "oxytorch"))]
        )
    head = ["step, fp32", "per cent of it in torch's best tail", "torch's whole step, over ours"]
    return table(head, rows) + "\n\n" + tail_source(document)


# --- others ----------------------------------------------------------------------------------------------------------


def convergence() -> str | None:
    """Held-out losses of narrow state."""
    document = read("convergence.json")
    if document is None:
        return None
    layouts = list(dict.fromkeys(row["layout"] for row in document["rows"]))
    rows = []
    for model in dict.fromkeys(row["model"] for row in document["rows"]):
        found = {row["layout"]: row for row in document["rows"] if row["model"] == model}
        means = [f"{found[layout]['mean']:.4f}" for layout in layouts]
        rows.append([model, f"{found['fp32']['fp32_seed_stdev']:.4f}", *means])
    source = f"`python bench/race/convergence.py`, means over {document['seeds']} seeds (<convergence.json>)."
    return table(["model", "deviation of fp32's seeds", *layouts], rows) + "\n\n" + source


def planted_faults() -> str | None:
    """What each way of checking catches."""
    document = read("planted_faults.json")
    if document is None:
        return None
    faults, healthy = len(document["faults"]), len(document["healthy"])
    rows = [
        [name, str(count["faults"]), str(count["healthy"])]
        for name, count in sorted(document["counts"].items(), key=lambda item: -item[1]["faults"])
    ]
    head = ["what is looked at", f"faults caught of {faults}", f"healthy strategies refused of {healthy}"]
    return table(head, rows) + "\n\n`python bench/tune/planted_faults.py --json` (<planted_faults.json>)."


def kernels() -> str | None:
    """Processor time a parameter of each layout, from Google Benchmark's document."""
    document = read("kernels.json")
    if document is None:
        return None
    moved = {"fp32": 32, "fp32+ema": 40, "fp32+ema+statistics": 40, "int8 state": 20.25, "int8 stochastic": 20.25}
    moved |= {"7-byte": 14.25, "7-byte stochastic": 14.25}
    rows = []
    for run in document["benchmarks"]:
        layout, _, isa = run["label"].partition(", ")
        match = re.search(r"isa:2/tensors:(\d+)/elements:(\d+)/threads:1/", run["name"])
        if match is not None and run.get("aggregate_name", "median") == "median":
            parameters = int(match[1]) * int(match[2])
            scale = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}[run["time_unit"]]
            rows.append([layout, isa, f"{moved[layout]:g}", f"{run['cpu_time'] * scale / parameters:.2f}"])
    source = f"`{TABLES['kernels'][1]}`, medians (<kernels.json>)."
    return table(["layout", "instructions", "bytes per parameter", "ns per parameter"], rows) + "\n\n" + source


def monitor() -> str | None:
    """What a monitored step costs."""
    document = read("monitor.json")
    if document is None:
        return None
    steps = dict.fromkeys([*document["cpp_us"], *document["python_us"]])
    rows = [
        [
            step,
            *(f"{document[side][step]:.1f} us" if step in document[side] else "" for side in ("cpp_us", "python_us")),
        ]
        for step in steps
    ]
    source = f"`{TABLES['monitor'][1]}`, processor time, medians (<monitor.json>)."
    return table(["step", "C++", "Python"], rows) + "\n\n" + source


def data() -> str | None:
    """The data pipeline beside the ways in which people feed a loop."""
    document = read("data.json")
    if document is None:
        return None
    rows = []
    for case, found in document["cases"].items():
        ours = next(iter(found))
        for name, row in found.items():
            each, own = row["samples"], found[ours]["samples"]
            ratios = [
                theirs / each / (mine / own) for theirs, mine in zip(row["busy"], found[ours]["busy"], strict=True)
            ]
            over = "" if name == ours else "{0.mid:.2f} [{0.low:.2f}, {0.high:.2f}]".format(starts_interval(ratios))
            speed = row["samples"] / float(np.median(row["busy"])), row["samples"] / float(np.median(row["wall"]))
            waits = f"{np.median(row['waiting']):.1%}" if "waiting" in row else ""
            rows.append([case, name, *(f"{each:,.0f}" for each in speed), over, waits])
    head = [
        "case",
        "loader",
        "samples per CPU second",
        "samples per second",
        "CPU time, times that of the case's first row",
        "waits for data",
    ]
    machine = document["machine"]
    said = f"`{DATA_COMMAND}`, {machine['cpu']}, {machine['instructions'].split(', ')[-1]}, {machine['cores']} cores"
    return (
        f"{table(head, rows)}\n\n{said}; {document['rounds']} rounds in turns, 95% intervals over them (<data.json>)."
    )


def honest() -> str | None:
    """What plans state and what loops in processes of their own show."""
    document = read("honest.json")
    if document is None:
        return None

    def mean(low: float, mid: float, high: float) -> str:
        return text(Interval(low, mid, high, 0.95))

    rows = [
        [row["program"].replace("_", " "), mean(*row["stated"]), mean(*row["loop"]), "yes" if row["agree"] else "no"]
        for row in document["rows"]
    ]
    head = ["program", "the plan states", "the loop shows", "intervals meet"]
    said = measured("python bench/tune/honest.py", "honest.json", document, [document["starts"]])
    return table(head, rows) + f"\n\n{said}"


def null_candidates() -> str | None:
    """How many candidates that do nothing were taken."""
    document = read("null_candidates.json")
    return None if document is None else f"{document['accepted']} of {document['candidates']:,}"


# --- on a GPU ---------------------------------------------------------------------------------------------------------

GPU_SHOWN = 20
"""Failures that a page lists; the document has them all."""
GPU_RIVALS = {
    "stock 1": "bf16, fused AdamW",
    "stock compiled": "torch.compile",
    "stock reduce-overhead": "reduce-overhead",
    "stock max-autotune": "max-autotune",
    "stock graph": "whole step in a CUDA graph",
}
NOT_RUN = "not run yet"


def of_gpu(which: str) -> tuple[str, Document] | None:
    """What `make gpu` found in a slice, and the line under its table; None where no part of it ran."""
    name = f"gpu/{which}.json"
    document = read(name)
    if document is None or not document["parts"]:
        return None
    machine = document["machine"]
    said = [f"`{document['command']}`", machine.get("GPU", "no GPU"), f"torch {machine['torch']}"]
    said += [f"{fact} {machine[fact]}" for fact in ("driver", "revision") if fact in machine]
    missing = "" if document["complete"] else f" Not all of it has run: the same command goes on (<{name}>)."
    return f"{', '.join(said)} (<{name}>).{missing}", document


def failures(rows: Iterable[tuple[str, str]]) -> str:
    """A list of what failed, cut where it gets long; "" where nothing did."""
    found = [f"- {what}: {' '.join(why.split())}" for what, why in rows]
    more = [f"- and {len(found) - GPU_SHOWN} more"] if len(found) > GPU_SHOWN else []
    return "\n\nFailed:\n\n" + "\n".join([*found[:GPU_SHOWN], *more]) if found else ""


def parts_failed(document: Document) -> list[tuple[str, str]]:
    """Parts that ended without a result."""
    return [(name, part["problem"]) for name, part in document["parts"].items() if "problem" in part]


def gpu_build() -> str | None:
    """What was built with what."""
    found = of_gpu("build")
    if found is None:
        return None
    line, document = found
    facts = [(name, value) for name, value in document["machine"].items() if name != "revision"]
    took = document["parts"].get("build", {}).get("seconds")
    rows = [*([name, value] for name, value in facts), *([["time to build", f"{took:.0f} s"]] if took else [])]
    return table(["what", "here"], rows) + failures(parts_failed(document)) + f"\n\n{line}"


def gpu_conformance() -> str | None:
    """The backend contract on the card."""
    found = of_gpu("conformance")
    if found is None:
        return None
    line, document = found
    checks = document["parts"].get("checks", {})
    counts = [[str(checks.get(name, "")) for name in ("passed", "skipped", "failed")]]
    bad = [(f"{each['name']} ({each['clause']})", each["seen"] or each["verdict"]) for each in checks.get("bad", [])]
    head = ["checks passed", "skipped", "failed"]
    return table(head, counts) + failures([*parts_failed(document), *bad]) + f"\n\n{line}"


def gpu_tests() -> str | None:
    """Tests that ran on the card."""
    found = of_gpu("tests")
    if found is None:
        return None
    line, document = found
    rows, bad = [], parts_failed(document)
    for name, part in document["parts"].items():
        rows.append([name, *(str(part.get(count, NOT_RUN)) for count in ("passed", "failed", "skipped"))])
        if "failures" in part:
            bad += [(each["test"], each["why"]) for each in part["failures"]]
    return table(["tests", "passed", "failed", "skipped"], rows) + failures(bad) + f"\n\n{line}"


def gpu_step_tail() -> str | None:
    """Figures and promises of the race of the step tail on the card."""
    found = of_gpu("step_tail")
    if found is None:
        return None
    line, document = found
    rows = []
    for part in document["parts"].values():
        for each in part.get("figures", []):
            bound = each.get("at_most", each.get("at_least"))
            got = None if each["got"] is None else Interval(*(math.nan if v is None else v for v in each["got"]), 0.95)
            figure = Figure(each["what"], got, bound, "at_most" in each, each["absent"])
            rows.append([figure.what, figure.value, figure.promise, figure.verdict])
    head = ["what", "measured", "promised", "verdict"]
    return table(head, rows) + failures(parts_failed(document)) + f"\n\n{line}"


def gpu_accelerate() -> str | None:
    """The plain loop over everyone else's, and ours over the fastest rival."""
    found = of_gpu("accelerate")
    if found is None:
        return None
    line, document = found
    rows = []
    for name, part in document["parts"].items():
        if "document" not in part:
            continue
        race = Race.from_json(part["document"]["workloads"][name])
        best = race.best_rival()
        ran = REFERENCE in race.entries
        rows.append(
            [
                race.title,
                milliseconds(race.entries[REFERENCE].step) if ran else "not measured",
                *(over(race, REFERENCE, rival) for rival in GPU_RIVALS),
                *(over(race, REFERENCE, ours) for ours in OURS),
                f"{over(race, best, TOLERANCE)}: {GPU_RIVALS.get(best, best)}" if best else "not measured",
            ]
        )
    head = ["", "eager fp32", *GPU_RIVALS.values(), "basic", "advanced", "advanced, over the best of the others"]
    absent = [
        (f"{name}, {who}", why)
        for name, part in document["parts"].items()
        for who, why in part.get("document", {}).get("workloads", {}).get(name, {}).get("absent", {}).items()
    ]
    said = table(head, rows) + failures([*parts_failed(document), *absent])
    return f"{said}\n\nTimes of the eager loop over each. {line}"


TABLES: dict[str, tuple[Callable[[], str | None], str]] = {
    "demo": (demo, 'make demo ARGS="--json bench/results/demo.json"'),
    "orchestrator": (orchestrator, "python bench/race/orchestrator.py --json bench/results/orchestrator.json"),
    "rivals": (
        rivals,
        "python bench/race/orchestrator.py --screen, then python bench/race/orchestrator.py --starts 8 --json "
        "bench/results/orchestrator.json",
    ),
    "over-all-rivals": (
        over_all_rivals,
        "python bench/race/orchestrator.py --starts 8 --json bench/results/orchestrator.json",
    ),
    "summary": (summary, "python bench/race/orchestrator.py --json bench/results/orchestrator.json"),
    "regret": (regret, "python bench/race/orchestrator.py --exhaustive --json bench/results/orchestrator_regret.json"),
    "cpp": (
        cpp,
        "python bench/race/orchestrator.py --workloads cpp-cnn,cpp-mlp,cpp-lstm "
        "--json bench/results/orchestrator_cpp.json",
    ),
    "step-tail": (step_tail, "python bench/race/step_tail.py --json bench/results/step_tail.json"),
    "narrow-state": (narrow, "python bench/race/step_tail.py --json bench/results/step_tail.json"),
    "training-tail": (training, "python bench/race/step_tail.py --json bench/results/step_tail.json"),
    "ops-attention": (
        raced(ops_race, "ops.json", OPS_COMMAND, "attention"),
        f"{OPS_COMMAND} --json bench/results/ops.json",
    ),
    "ops-loss": (raced(ops_race, "ops.json", OPS_COMMAND, "loss"), f"{OPS_COMMAND} --json bench/results/ops.json"),
    "memory-budgets": (
        raced(memory_race, "memory.json", MEMORY_COMMAND, "budgets"),
        f"{MEMORY_COMMAND} --json bench/results/memory.json",
    ),
    "memory-rivals": (
        raced(memory_race, "memory.json", MEMORY_COMMAND, "rivals"),
        f"{MEMORY_COMMAND} --json bench/results/memory.json",
    ),
    "memory-least": (
        raced(memory_race, "memory.json", MEMORY_COMMAND, "least"),
        f"{MEMORY_COMMAND} --json bench/results/memory.json",
    ),
    "convergence": (convergence, "python bench/race/convergence.py --json bench/results/convergence.json"),
    "planted-faults": (
        planted_faults,
        "python bench/tune/planted_faults.py --json > bench/results/planted_faults.json",
    ),
    "kernels": (
        kernels,
        "build/dev/bench/kernels/kernels_bench --benchmark_filter='tensors:16/.*threads:1/' --benchmark_repetitions=5 "
        "--benchmark_report_aggregates_only --benchmark_out=bench/results/kernels.json",
    ),
    "monitor": (monitor, "python bench/monitor/python_step.py --json bench/results/monitor.json"),
    "data": (data, f"{DATA_COMMAND} --json bench/results/data.json"),
    "honest": (honest, "python bench/tune/honest.py --json bench/results/honest.json"),
    "null-candidates": (
        null_candidates,
        "python bench/tune/null_candidates.py --json bench/results/null_candidates.json",
    ),
    **{
        f"gpu-{name}": (make, f'make gpu ARGS="--slice {name}"')
        for name, make in (
            ("build", gpu_build),
            ("conformance", gpu_conformance),
            ("tests", gpu_tests),
            ("step-tail", gpu_step_tail),
            ("accelerate", gpu_accelerate),
        )
    },
}


def pages() -> list[Path]:
    """All that may hold figures."""
    written = [path for path in (ROOT / "docs").rglob("*.md") if "generated" not in path.parts]
    return [ROOT / "README.md", *sorted(written)]


def filled(page: Path, content: str) -> str:
    """The page with every marked place written anew."""
    # The site holds docs/ alone, so only the README can link to the documents.
    link = r"[\1](bench/results/\1)" if page.parent == ROOT else r"`bench/results/\1`"

    def fill(found: re.Match[str]) -> str:
        kind, name = found[1], found[2]
        if name not in TABLES:
            raise SystemExit(f"{page.relative_to(ROOT)}: there is no table '{name}'; there are {', '.join(TABLES)}")
        make, command = TABLES[name]
        made = make()
        if made is None:
            what, why = ("run", "fills this in") if name.startswith("gpu-") else ("measured", "writes these figures")
            made = "not measured yet" if kind == "figure" else f"Not {what} yet: `{command}` {why}."
        made = re.sub(r"<([\w/]+\.json)>", link, made)
        inner = made if kind == "figure" else f"\n{made}\n"
        return f"<!-- {kind}: {name} -->{inner}<!-- end -->"

    return MARKED.sub(fill, content)


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 where a page differs")
    arguments = parser.parse_args()
    differing = []
    for page in pages():
        content = page.read_text(encoding="utf-8")
        wanted = filled(page, content)
        if wanted != content:
            differing.append(page.relative_to(ROOT).as_posix())
            if not arguments.check:
                page.write_text(wanted, encoding="utf-8")
    verb = "differ from their JSON; run python bench/results/tables.py" if arguments.check else "were written"
    print(f"{', '.join(differing)} {verb}" if differing else "every table is as its JSON has it")
    return int(arguments.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
