"""Writes the figures of README.md and docs/ from the JSON documents beside this file.

    python bench/results/tables.py [--check]

A page marks where they go: a table between `<!-- table: NAME -->` and `<!-- end -->`, a figure in a sentence between
`<!-- figure: NAME -->` and `<!-- end -->`. `--check` changes nothing, names the pages that differ and exits with 1;
tests/bench/test_tables.py does the same. A table whose JSON is not there yet says which command writes it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "race")]

import goals as goals_race  # noqa: E402
import memory_plan as memory_plan_race  # noqa: E402
import state as state_race  # noqa: E402
import unprepared as unprepared_race  # noqa: E402
from _race import Measured, over_starts, text  # noqa: E402
from _tables import goals, gpu, tail  # noqa: E402
from _tables import orchestrator as loops  # noqa: E402
from _tables.documents import ROOT, measured, milliseconds, read, table  # noqa: E402
from oxytorch.base import Interval, starts_interval  # noqa: E402

import memory as memory_race  # noqa: E402
import ops as ops_race  # noqa: E402

MARKED = re.compile(r"<!-- (table|figure): ([\w-]+) -->(.*?)<!-- end -->", re.DOTALL)


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


# --- memory ----------------------------------------------------------------------------------------------------------

MEMORY_COMMAND = "python bench/race/memory.py --starts 3 --seconds 0.8"
MEMORY_PLAN_COMMAND = "python bench/race/memory_plan.py"
STATE_COMMAND = "python bench/race/state.py --starts 3"
GOALS_COMMAND = "python bench/race/goals.py --starts 1"


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
ATTENTION_AMX_COMMAND = 'python bench/race/ops.py --case "attention bf16" --starts 3 --seconds 0.4'
FEW_COMMAND = 'python bench/race/ops.py --case "few classes" --starts 3 --seconds 1'
LEFT_OUT_COMMAND = "python bench/race/ops.py --case dropout --case masked --starts 3 --seconds 0.6"
PACKED_COMMAND = "python bench/race/ops.py --case packed --starts 3 --seconds 0.6"
LINEAR_COMMAND = "python bench/race/ops.py --case linear --starts 4 --seconds 0.6"
NORM_COMMAND = "python bench/race/ops.py --case norm --starts 4 --seconds 0.6"
CONVOLUTION_COMMAND = "python bench/race/ops.py --case convolution --starts 3 --seconds 0.6"
BLOCK_COMMAND = "python bench/race/ops.py --case sum --case activation --starts 3 --seconds 0.6"
GRU_COMMAND = "python bench/race/ops.py --case gru --starts 3 --seconds 0.6"
ROTARY_COMMAND = "python bench/race/ops.py --case rotary --starts 3 --seconds 0.6"
WRITTEN_COMMAND = "python bench/race/ops.py --case 'written fp32' --starts 3 --seconds 0.6"
TRANSFORMER_COMMAND = "python bench/race/ops.py --case transformer --starts 3"
EMBEDDING_COMMAND = "python bench/race/ops.py --case embedding --starts 3 --seconds 0.6"
ACCUMULATED_COMMAND = "python bench/race/ops.py --case accumulated --starts 4 --seconds 2"
HEAD_COMMAND = "python bench/race/ops.py --case head --starts 3 --seconds 2"
UNPREPARED_COMMAND = "python bench/race/unprepared.py --starts 3"
LSTM_COMMAND = "python bench/race/ops.py --case lstm --starts 3 --seconds 0.7"


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


def memory_plan() -> str | None:
    """What plans add to a step beside the exact optimum."""
    document = read("memory_plan.json")
    if document is None:
        return None
    rows = memory_plan_race.summary(document)
    return table(memory_plan_race.HEAD, rows) + "\n\n" + measured(MEMORY_PLAN_COMMAND, "memory_plan.json", document)


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


TABLES: dict[str, tuple[Callable[[], str | None], str]] = {
    "demo": (demo, 'make demo ARGS="--json bench/results/demo.json"'),
    "orchestrator": (loops.orchestrator, "python bench/race/orchestrator.py --json bench/results/orchestrator.json"),
    "avx2": (
        loops.without_avx512,
        "python bench/race/orchestrator.py --workloads mlp,lstm,gpt,cnn --starts 4 "
        "--json bench/results/orchestrator_avx2.json",
    ),
    "amx": (
        loops.with_amx,
        "python bench/race/orchestrator.py --workloads cnn,resnet,gpt,bert,mlp,lstm --starts 3 "
        "--json bench/results/orchestrator_amx.json",
    ),
    "rivals": (
        loops.rivals,
        "python bench/race/orchestrator.py --screen, then python bench/race/orchestrator.py --starts 8 --json "
        "bench/results/orchestrator.json",
    ),
    "over-all-rivals": (
        loops.over_all_rivals,
        "python bench/race/orchestrator.py --starts 8 --json bench/results/orchestrator.json",
    ),
    "summary": (loops.summary, "python bench/race/orchestrator.py --json bench/results/orchestrator.json"),
    "allocators": (loops.allocators, "python bench/race/allocators.py --json bench/results/allocators.json"),
    "roofline": (loops.roofline, "python bench/race/roofline.py --json bench/results/roofline.json"),
    "roofline-amx": (loops.roofline_with_amx, f"{loops.PARTS_COMMAND} --json bench/results/roofline_amx.json"),
    "regret": (
        loops.regret,
        "python bench/race/orchestrator.py --exhaustive --json bench/results/orchestrator_regret.json",
    ),
    "cpp": (
        loops.cpp,
        "python bench/race/orchestrator.py --workloads cpp-cnn,cpp-mlp,cpp-lstm "
        "--json bench/results/orchestrator_cpp.json",
    ),
    "step-tail": (tail.step_tail, "python bench/race/step_tail.py --json bench/results/step_tail.json"),
    "narrow-state": (tail.narrow, "python bench/race/step_tail.py --json bench/results/step_tail.json"),
    "training-tail": (tail.training, "python bench/race/step_tail.py --json bench/results/step_tail.json"),
    "ops-attention": (
        raced(ops_race, "ops.json", OPS_COMMAND, "attention"),
        f"{OPS_COMMAND} --json bench/results/ops.json",
    ),
    "ops-attention-amx": (
        raced(ops_race, "attention_amx.json", ATTENTION_AMX_COMMAND, "attention"),
        f"{ATTENTION_AMX_COMMAND} --json bench/results/attention_amx.json",
    ),
    "ops-packed": (
        raced(ops_race, "packed.json", PACKED_COMMAND, "packed"),
        f"{PACKED_COMMAND} --json bench/results/packed.json",
    ),
    "ops-linear": (
        raced(ops_race, "linear.json", LINEAR_COMMAND, "linear"),
        f"{LINEAR_COMMAND} --json bench/results/linear.json",
    ),
    "ops-norm": (
        raced(ops_race, "norm.json", NORM_COMMAND, "norm"),
        f"{NORM_COMMAND} --json bench/results/norm.json",
    ),
    "ops-sum": (
        raced(ops_race, "block.json", BLOCK_COMMAND, "sum"),
        f"{BLOCK_COMMAND} --json bench/results/block.json",
    ),
    "ops-activation": (
        raced(ops_race, "block.json", BLOCK_COMMAND, "activation"),
        f"{BLOCK_COMMAND} --json bench/results/block.json",
    ),
    "unprepared": (
        raced(unprepared_race, "unprepared.json", UNPREPARED_COMMAND, "unprepared"),
        f"{UNPREPARED_COMMAND} --json bench/results/unprepared.json",
    ),
    "ops-gru": (
        raced(ops_race, "gru.json", GRU_COMMAND, "gru"),
        f"{GRU_COMMAND} --json bench/results/gru.json",
    ),
    "ops-rotary": (
        raced(ops_race, "rotary.json", ROTARY_COMMAND, "rotary"),
        f"{ROTARY_COMMAND} --json bench/results/rotary.json",
    ),
    "ops-written": (
        raced(ops_race, "written.json", WRITTEN_COMMAND, "written"),
        f"{WRITTEN_COMMAND} --json bench/results/written.json",
    ),
    "nn-transformer": (
        raced(ops_race, "transformer.json", TRANSFORMER_COMMAND, "transformer"),
        f"{TRANSFORMER_COMMAND} --json bench/results/transformer.json",
    ),
    "ops-convolution": (
        raced(ops_race, "convolution.json", CONVOLUTION_COMMAND, "convolution"),
        f"{CONVOLUTION_COMMAND} --json bench/results/convolution.json",
    ),
    "ops-embedding": (
        raced(ops_race, "embedding.json", EMBEDDING_COMMAND, "embedding"),
        f"{EMBEDDING_COMMAND} --json bench/results/embedding.json",
    ),
    "ops-accumulated": (
        raced(ops_race, "accumulated.json", ACCUMULATED_COMMAND, "accumulated"),
        f"{ACCUMULATED_COMMAND} --json bench/results/accumulated.json",
    ),
    "ops-few": (
        raced(ops_race, "few_classes.json", FEW_COMMAND, "few"),
        f"{FEW_COMMAND} --json bench/results/few_classes.json",
    ),
    "ops-head": (
        raced(ops_race, "head.json", HEAD_COMMAND, "head"),
        f"{HEAD_COMMAND} --json bench/results/head.json",
    ),
    "ops-lstm": (
        raced(ops_race, "lstm.json", LSTM_COMMAND, "lstm"),
        f"{LSTM_COMMAND} --json bench/results/lstm.json",
    ),
    "ops-dropout": (
        raced(ops_race, "left_out.json", LEFT_OUT_COMMAND, "dropout"),
        f"{LEFT_OUT_COMMAND} --json bench/results/left_out.json",
    ),
    "ops-masked": (
        raced(ops_race, "left_out.json", LEFT_OUT_COMMAND, "masked"),
        f"{LEFT_OUT_COMMAND} --json bench/results/left_out.json",
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
    "memory-plan": (memory_plan, f"{MEMORY_PLAN_COMMAND} --json bench/results/memory_plan.json"),
    "state": (
        raced(state_race, "state.json", STATE_COMMAND, "state"),
        f"{STATE_COMMAND} --json bench/results/state.json",
    ),
    "goals": (
        raced(goals_race, "goals.json", GOALS_COMMAND, "goals"),
        f"{GOALS_COMMAND} --json bench/results/goals.json",
    ),
    "goals-summary": (goals.summary, f"{GOALS_COMMAND} --json bench/results/goals.json"),
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
            ("build", gpu.build),
            ("conformance", gpu.conformance),
            ("tests", gpu.tests),
            ("step-tail", gpu.step_tail),
            ("loader", gpu.loader),
            ("memory", gpu.memory),
            ("accelerate", gpu.accelerate),
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
