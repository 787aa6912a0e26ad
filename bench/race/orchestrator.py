"""Races training loops made faster by Oxytorch's orchestrator against those that others make faster.

Six workloads from plain PyTorch code. Every contender runs in a process of its own, several times; the processes of one
start are alive together and take turns, so that only one computes at any time. A step is timed from batch to batch, so
a trainer's own work counts. Ratios are paired by start and turn; intervals hold 95% and resample starts, then turns.

    python bench/race/orchestrator.py [--workloads cnn,gpt] [--contenders eager,compile] [--starts 2] [--quick]
        [--exhaustive] [--cache DIR] [--keep FILE] [--threads 2] [--json FILE]

Prints what was measured and whether each promise is met, and writes bench/report/orchestrator.{json,html}. The exit
status is 0 whether or not promises are met: a busy machine must not fail a build.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _orchestrator.figures import OURS, REFERENCE, SEARCHED, TOLERANCE, Race, entries, judge, judge_cpp, repaid_after
from _race import ROOT, Figure, add_figures, facts, new_report, progress, show_figures, text, write
from oxytorch.demo.driver import Start, WorkerFailed, python_command, race
from oxytorch.demo.machine import has_bf16
from oxytorch.demo.plan import FIRST_SEED, environment

TURNS, QUICK_TURNS = 4, 2
WORKLOADS = {
    "cnn": "CNN of 4 stages, 64 x 3 x 64 x 64",
    "resnet": "ResNet of 3 blocks, 64 x 3 x 32 x 32",
    "gpt": "GPT, 4 layers of width 256, 16 x 128 tokens",
    "bert": "BERT-style encoder, 4 layers of width 256, 16 x 128 tokens of 4,096, dropout 0.1",
    "mlp": "MLP 784-512-512-10, batch 128",
    "lstm": "LSTM, 2 layers of width 256, 32 x 64 bytes",
}
# Steps of a turn: about a second of the plain loop.
TURN_STEPS = {"cnn": 3, "resnet": 3, "gpt": 4, "bert": 3, "mlp": 60, "lstm": 10}
# The same from C++: LibTorch's own loop takes the place of eager PyTorch.
CPP = "cpp-"
WORKLOADS |= {f"{CPP}{name}": f"{WORKLOADS[name]}, in C++" for name in ("cnn", "mlp", "lstm")}
CPP_CONTENDERS = {"eager": "torch", "oxytorch basic": "basic", "oxytorch advanced": "advanced"}
RIVALS = (
    "eager",
    "eager + allocator",
    "compile",
    "compile max-autotune",
    "compile + bf16 + allocator",
    "max-autotune + bf16 + allocator",
    "lightning 32",
    "lightning bf16",
    "accelerate 32",
    "accelerate bf16",
)


def cpp_command(workload: str, contender: str, seed: int, arguments: argparse.Namespace) -> list[str]:
    """One contender's process without Python."""
    folder = arguments.cache / workload / contender.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    said = {
        "workload": workload.removeprefix(CPP),
        "contender": CPP_CONTENDERS[contender],
        "seed": seed,
        "threads": arguments.threads,
        "folder": folder,
    }
    return [str(arguments.program), *(str(part) for key, value in said.items() for part in (f"--{key}", value))]


def command(workload: str, contender: str, seed: int, arguments: argparse.Namespace) -> list[str]:
    """One contender's process."""
    if workload.startswith(CPP):
        return cpp_command(workload, contender, seed, arguments)
    task: dict[str, Any] = {
        "workload": workload,
        "contender": contender,
        "seed": seed,
        "threads": arguments.threads,
        "cache": str(arguments.cache),
    }
    if contender in RIVALS:
        task["forbid"] = "oxytorch"
    return python_command(task, "_orchestrator.worker", str(Path(__file__).resolve().parent))


def worker_environment(threads: int) -> dict[str, str]:
    """That of the demo's workers, and the torch that the C++ program runs with."""
    libraries = [str(Path(torch.__file__).parent / "lib"), os.environ.get("LD_LIBRARY_PATH")]
    return {**environment(threads), "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries))}


def race_workload(name: str, arguments: argparse.Namespace) -> Race:
    """Every start of one workload."""
    absent: dict[str, str] = {}

    def on_failure(contender: str, failed: WorkerFailed) -> None:
        progress(f"  {contender}: {failed}")
        absent[contender] = str(failed).strip().splitlines()[-1]

    def on_turn(contender: str, steps: int) -> None:
        if arguments.verbose:
            progress(f"  {contender}: {f'{steps} steps' if steps else 'ready'}")

    starts: list[Start] = []
    steps = 2 if arguments.quick else TURN_STEPS[name.removeprefix(CPP)]
    for seed in range(FIRST_SEED, FIRST_SEED + arguments.starts):
        progress(f"{name}: start {len(starts) + 1} of {arguments.starts}")
        wanted = [*arguments.contenders, *([SEARCHED] if arguments.exhaustive else [])]
        if name.startswith(CPP):
            wanted = [contender for contender in wanted if contender in CPP_CONTENDERS]
        taking_part = [contender for contender in wanted if contender not in absent]
        starts.append(
            race(
                {each: command(name, each, seed, arguments) for each in taking_part},
                seed=seed,
                steps=steps * (QUICK_TURNS if arguments.quick else TURNS),
                block=steps,
                environment=worker_environment(arguments.threads),
                timeout=arguments.timeout,
                on_turn=on_turn,
                prepare=True,
                on_failure=on_failure,
            )
        )
    return Race(name, WORKLOADS[name], entries(starts), absent)


# --- showing ---------------------------------------------------------------------------------------------------------

TITLES = ("contender", "ms a step", "times eager", "faults a step", "peak MiB", "loss", "prepared in s", "repaid after")


def rows(found: Race) -> list[list[str]]:
    """One line for each contender."""
    result = []
    for name, entry in found.entries.items():
        ratio = text(found.ratio(REFERENCE, name)) if REFERENCE in found.entries else ""
        kind = "tuning_seconds" if name in OURS else "search_seconds" if name == SEARCHED else "compile_seconds"
        spent, repaid = "", ""
        if entry.cold(kind) > 0:
            spent = f"{entry.cold(kind):.1f}, then {entry.warm(kind):.1f}"
            if REFERENCE in found.entries:
                steps = repaid_after(found, name, entry.cold(kind))
                repaid = f"{steps:,.0f} steps" if steps < float("inf") else "never"
        result.append(
            [
                name,
                text(entry.step, 1e3),
                ratio,
                f"{entry.page_faults:,.0f}",
                f"{entry.peak_bytes / 2**20:,.0f}",
                f"{entry.loss:.4f}",
                spent,
                repaid,
            ]
        )
    return result + [[name, "absent", why] for name, why in found.absent.items()]


def changes(found: Race) -> list[list[str]]:
    """What ours applied, and what it left alone and why, as its certificate has it."""
    result = []
    for name in (*OURS, SEARCHED):
        if name in found.entries:
            said = found.entries[name].prepared[0]
            result += [[name, each, "applied"] for each in said.get("accepted", [])]
            result += [[name, each, why] for each, why in said.get("rejected", {}).items()]
    return result


def show(races: list[Race], figures: list[Figure], machine_facts: dict[str, str]) -> None:
    """Print everything."""
    for found in races:
        print(f"\n{found.name}: {found.title}")
        for row in [list(TITLES), *rows(found)]:
            print(f"{row[0]:<34}" + "".join(f"{cell:<22}" for cell in row[1:3]) + "  ".join(row[3:]).rstrip())
        for contender, change, verdict in changes(found):
            if verdict == "applied":
                print(f"  {contender} applied {change}")
    print()
    show_figures(figures)
    print("\nMeasured on: " + ", ".join(f"{key} {value}" for key, value in machine_facts.items() if value))
    print("Prepared in: the first time, then with the compiler's cache or the certificate at hand; each has its own.")


def save(
    arguments: argparse.Namespace, races: list[Race], figures: list[Figure], machine_facts: dict[str, str]
) -> None:
    """`orchestrator.json` and `orchestrator.html`."""
    from oxytorch.monitor import Bar, Column  # noqa: PLC0415

    document = {
        "schema": "oxytorch-race/2",
        "machine": machine_facts,
        "workloads": {found.name: found.to_json() for found in races},
        "figures": [figure.to_json() for figure in figures],
    }
    report = new_report("Race: the orchestrator", __doc__, machine_facts)
    add_figures(report, figures)
    columns: list[Column | str] = [TITLES[0], *(Column(title, "right") for title in TITLES[1:])]
    bars = []
    for found in races:
        table = [row + [""] * (len(TITLES) - len(row)) for row in rows(found)]
        report.table(columns, table, f"{found.name}: {found.title}")
        if said := changes(found):
            report.table(["level", "change", "verdict"], said, f"{found.name}: what was tried")
        if REFERENCE in found.entries:
            for name in found.entries:
                got = found.ratio(REFERENCE, name)
                bars.append(Bar(name, got.mid, got.low, got.high, found.name))
    report.bar_chart(bars, "How many times as fast as eager", "times", "x", 1.0, TOLERANCE)
    write(report, document, arguments.out, "orchestrator", arguments.json)


def names(known: tuple[str, ...]) -> Any:
    """Read a comma-separated choice of `known`."""

    def parse(said: str) -> list[str]:
        chosen = [name.strip() for name in said.split(",")]
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
        return chosen

    return parse


def parse() -> argparse.Namespace:
    """The command line."""
    everyone = (*RIVALS, *OURS)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", type=names(tuple(WORKLOADS)), default=list(WORKLOADS), metavar="A,B")
    parser.add_argument("--contenders", type=names(everyone), default=list(everyone), metavar="A,B")
    parser.add_argument("--starts", type=int, default=2, help="processes of each contender (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, to see that it works")
    parser.add_argument(
        "--exhaustive", action="store_true", help="search all combinations too, in a process of its own, for the regret"
    )
    parser.add_argument("--cache", type=Path, help="keep compilers' caches and certificates there for the next race")
    parser.add_argument("--keep", type=Path, help="a JSON document whose other workloads go into this report")
    parser.add_argument("--program", type=Path, default=ROOT / "build/dev/bench/race/orchestrator_race")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--timeout", type=float, default=900.0, help="longest wait for one answer, in seconds")
    parser.add_argument("--verbose", action="store_true", help="say whose turn it was")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/report")
    parser.add_argument("--json", type=Path, help="write the JSON document there too")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    machine_facts = facts(arguments.threads)
    raced: dict[str, Race] = {}
    if arguments.keep is not None and arguments.keep.exists():
        document = json.loads(arguments.keep.read_text(encoding="utf-8"))
        raced = {name: Race.from_json(data) for name, data in document["workloads"].items()}
    with tempfile.TemporaryDirectory(prefix="oxytorch-race-") as folder:
        arguments.cache = arguments.cache or Path(folder)
        for name in arguments.workloads:
            if name.startswith(CPP) and not arguments.program.exists():
                progress(f"no {arguments.program}: {name} is left out; make build makes it")
                continue
            raced[name] = race_workload(name, arguments)
    races = [raced[name] for name in WORKLOADS if name in raced]
    from_cpp = [found for found in races if found.name.startswith(CPP)]
    from_python = [found for found in races if not found.name.startswith(CPP)]
    figures = [*(judge(from_python, has_bf16()) if from_python else []), *judge_cpp(from_cpp)]
    show(races, figures, machine_facts)
    save(arguments, races, figures, machine_facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
