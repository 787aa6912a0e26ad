"""Races training loops made faster by Oxytorch's orchestrator against those that others make faster.

Six workloads from plain PyTorch code. Every contender runs in a process of its own, several times; the processes of one
start are alive together and take turns, so that only one computes at any time. A step is timed from batch to batch, so
a trainer's own work counts. Ratios are paired by start and turn; a start counts by its median, and intervals hold 95%:
Student's t on the logarithms of the starts' figures. The stock rivals have the switches that a screening of all
combinations found on this class of machine, on other starts (bench/race/rivals.json). On a card three workloads in the
sizes that are common there meet bf16 autocast with a fused optimizer, eager, in three modes of torch.compile, and with
the whole step in one CUDA graph.

    python bench/race/orchestrator.py --screen [--workloads cnn,gpt] [--minutes 9]
    python bench/race/orchestrator.py [--workloads cnn,gpt] [--contenders eager,lightning] [--starts 8] [--minutes 9]
        [--quick] [--exhaustive] [--cache DIR] [--keep FILE] [--threads 2] [--device cuda] [--json FILE]

Prints what was measured and whether each promise is met, and writes bench/report/orchestrator.{json,html} after each
start. The exit status is 0 whether or not promises are met: a busy machine must not fail a build.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _orchestrator import rivals
from _orchestrator.figures import (
    ALLOCATOR,
    HOST_POOL,
    ON_CARD,
    OURS,
    REFERENCE,
    SEARCHED,
    TOLERANCE,
    Race,
    judge,
    judge_cpp,
    judge_cuda,
    repaid_after,
    spent,
)
from _orchestrator.screen import screen
from _orchestrator.switches import Switches
from _peers import PEERS
from _race import BUILD, ROOT, Figure, add_figures, facts, new_report, progress, same_machine, show_figures, text, write
from oxytorch.bench.turns.driver import Start, WorkerFailed, python_command, race
from oxytorch.bench.turns.environment import FIRST_SEED, environment
from oxytorch.bench.turns.machine import has_bf16
from oxytorch.bench.turns.times import ends
from oxytorch.demo import examples

TURNS, QUICK_TURNS = 4, 2
WORKLOADS = {
    "cnn": "CNN of 4 stages, 64 x 3 x 64 x 64",
    "resnet": "ResNet of 3 blocks, 64 x 3 x 32 x 32",
    "gpt": "GPT, 4 layers of width 256, 16 x 128 tokens",
    "bert": "BERT-style encoder, 4 layers of width 256, 16 x 128 tokens of 4,096, dropout 0.1",
    "mlp": "MLP 784-512-512-10, batch 128",
    "lstm": "LSTM, 2 layers of width 256, 32 x 64 bytes",
}
CUDA_WORKLOADS = {
    "gpt": "GPT-2 small, 12 layers of width 768, 8 x 1,024 tokens",
    "resnet": "ResNet-34, 128 x 3 x 224 x 224",
    "bert": "BERT base, 12 layers of width 768, 16 x 512 tokens of 4,096, dropout 0.1",
}
CUDA_TURN_STEPS = 40  # more than the watch of `accelerate` waits for the card in its first checks
# Steps of a turn: about a second of the plain loop.
TURN_STEPS = {"cnn": 3, "resnet": 3, "gpt": 4, "bert": 3, "mlp": 60, "lstm": 10}
# The same from C++: LibTorch's own loop takes the place of eager PyTorch.
CPP = "cpp-"
WORKLOADS |= {f"{CPP}{name}": f"{WORKLOADS[name]}, in C++" for name in ("cnn", "mlp", "lstm")}
CPP_OURS = {"oxytorch basic": "basic", "oxytorch advanced": "advanced"}
# What `mallopt` does, from outside.
CPP_MALLOPT = ["MALLOC_MMAP_THRESHOLD_=1073741824", "MALLOC_TRIM_THRESHOLD_=2147483647", "MALLOC_TOP_PAD_=67108864"]
RIVALS = (REFERENCE, ALLOCATOR, *rivals.STOCK)
SCHEMA = "oxytorch-race/3"


def cpp_command(
    workload: str, contender: str, switches: Switches, seed: int, arguments: argparse.Namespace
) -> list[str]:
    """One contender's process without Python."""
    folder = folder_of(workload, contender, switches, arguments.cache)
    folder.mkdir(parents=True, exist_ok=True)
    said = {
        "workload": workload.removeprefix(CPP),
        "contender": CPP_OURS.get(contender, "torch"),
        "seed": seed,
        "threads": switches.threads or arguments.threads,
        "folder": folder,
        "bf16": int(switches.precision == "bf16"),
        "channels-last": int(switches.channels_last),
    }
    before = ["env", *CPP_MALLOPT] if switches.allocator == rivals.MALLOPT else []
    options = [str(part) for key, value in said.items() for part in (f"--{key}", value)]
    return switches.command([*before, str(arguments.program), *options])


def settings(contender: str, switches: Switches) -> str:
    """What a rival has switched on; ours find their own."""
    return "" if contender in (*ON_CARD, SEARCHED) else str(switches)


def folder_of(workload: str, contender: str, switches: Switches, cache: Path) -> Path:
    """Where a contender keeps what its compiler or its tuning found; other settings have another folder."""
    said = hashlib.sha256(json.dumps(switches.to_json(), sort_keys=True).encode()).hexdigest()[:8]
    return cache / workload / f"{contender.replace(' ', '_')}-{said}"


def command(
    workload: str, contender: str, switches: Switches, folder: Path, seed: int, arguments: argparse.Namespace
) -> list[str]:
    """One contender's process."""
    task: dict[str, Any] = {
        "workload": workload,
        "contender": contender,
        "seed": seed,
        "threads": arguments.threads,
        "folder": str(folder),
        "switches": switches.to_json(),
        "peers": str(PEERS),
    }
    if contender not in (*ON_CARD, SEARCHED) and not contender.startswith(HOST_POOL):
        task["forbid"] = "oxytorch"
    return switches.command(python_command(task, "_orchestrator.worker", Path(__file__).resolve().parent, examples()))


def worker_environment(threads: int) -> dict[str, str]:
    """That of the demo's workers, and the torch that the C++ program runs with."""
    libraries = [str(Path(torch.__file__).parent / "lib"), os.environ.get("LD_LIBRARY_PATH")]
    return {**environment(threads), "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries))}


class Coordinator:
    """Runs start after start, of the workload that has had fewest, until all have theirs or the time is up."""

    def __init__(self, arguments: argparse.Namespace, machine_facts: dict[str, str]) -> None:
        self.arguments = arguments
        self.machine = rivals.machine_class(machine_facts)
        self.environment = worker_environment(arguments.threads)

    def switches(self, workload: str) -> tuple[dict[str, Switches], bool]:
        """Of each contender that takes part, and whether they were screened."""
        wanted = [*self.arguments.contenders, *([SEARCHED] if self.arguments.exhaustive else [])]
        if self.arguments.device == "cuda":
            found = rivals.cuda_rivals(workload) | dict.fromkeys((*ON_CARD, SEARCHED), Switches(device="cuda"))
            return {name: each for name, each in found.items() if name in wanted}, False
        if workload.startswith(CPP):
            found = rivals.cpp_rivals(workload.removeprefix(CPP), has_bf16()) | dict.fromkeys(OURS, Switches())
            return {name: each for name, each in found.items() if name in wanted}, True
        found, screened = rivals.rivals(self.arguments.rivals, self.machine, workload, has_bf16())
        found |= dict.fromkeys((*OURS, SEARCHED), Switches())
        return {name: each for name, each in found.items() if name in wanted}, screened

    def start(self, found: Race) -> None:
        """One more start of a workload; who fails is absent from there on, with the reason."""
        seed = max((int(seed) for seed in found.seeds), default=FIRST_SEED - 1) + 1
        switches, found.screened = self.switches(found.name)
        commands = {}
        for name, each in switches.items():
            known = found.entries.get(name)
            if known is not None and known.settings != settings(name, each):
                raise SystemExit(
                    f"{found.name}: the kept starts of {name} had '{known.settings}' and it has '{each}' now; "
                    "leave --keep away or race with the rivals.json of before"
                )
            if name not in found.absent:
                try:
                    commands[name] = self.command(found.name, name, each, seed)
                except FileNotFoundError as missing:
                    found.absent[name] = str(missing)
        usual = CUDA_TURN_STEPS if self.arguments.device == "cuda" else TURN_STEPS[found.name.removeprefix(CPP)]
        steps = 2 if self.arguments.quick else usual
        turns = QUICK_TURNS if self.arguments.quick else TURNS

        def on_failure(contender: str, failed: WorkerFailed) -> None:
            progress(f"  {contender}: {failed}")
            found.absent[contender] = str(failed).strip().splitlines()[-1]

        for name, run in self.race(commands, seed, steps, turns, on_failure).items():
            found.add(name, settings(name, switches[name]), run)

    def command(self, workload: str, contender: str, switches: Switches, seed: int) -> list[str]:
        """One contender's process, in a folder of its own."""
        if workload.startswith(CPP):
            return cpp_command(workload, contender, switches, seed, self.arguments)
        folder = folder_of(workload, contender, switches, self.arguments.cache)
        return command(workload, contender, switches, folder, seed, self.arguments)

    def race(self, commands: dict[str, list[str]], seed: int, steps: int, turns: int, on_failure: Any) -> Start:
        """All of them, in turn."""

        def on_turn(contender: str, count: int) -> None:
            if self.arguments.verbose:
                progress(f"  {contender}: {f'{count} steps' if count else 'ready'}")

        return race(
            commands,
            seed=seed,
            steps=steps * turns,
            block=steps,
            environment=self.environment,
            timeout=self.arguments.timeout,
            on_turn=on_turn,
            prepare=True,
            on_failure=on_failure,
        )

    def screen(self, workload: str) -> None:
        """Find the stock rivals of a workload and write them into rivals.json."""

        def finals(named: dict[str, Switches], seed: int) -> Start:
            # Each finds what the others compiled: here no compile time is reported.
            folder = self.arguments.cache / workload / "screening"
            commands = {
                name: command(workload, name, each, folder, seed, self.arguments) for name, each in named.items()
            }
            steps = 2 if self.arguments.quick else TURN_STEPS[workload]
            turns = QUICK_TURNS if self.arguments.quick else TURNS
            return self.race(commands, seed, steps, turns, lambda name, failed: progress(f"  {name}: {failed}"))

        found = screen(workload, self.arguments, self.environment, finals)
        rivals.store(self.arguments.rivals, self.machine, workload, found)
        for name, said in found["rivals"].items():
            progress(f"  {name}: {Switches(**said)}")
        progress(f"{workload}: screened in {found['seconds']:.0f} s")


# --- showing ---------------------------------------------------------------------------------------------------------

TITLES = ("contender", "ms a step", "times eager", "faults a step", "peak MiB", "loss", "prepared in s", "repaid after")


def rows(found: Race) -> list[list[str]]:
    """One line for each contender."""
    result = []
    for name, entry in found.entries.items():
        paired = found.has(REFERENCE, name)
        kind = "tuning_seconds" if name in ON_CARD else "search_seconds" if name == SEARCHED else "compile_seconds"
        took, repaid = "", ""
        if entry.cold(kind) > 0:
            took = f"{entry.cold(kind):.1f}, then {entry.warm(kind):.1f}"
            if name in ON_CARD and spent(entry)["compiling"] > 0:
                took += f" ({spent(entry)['compiling']:.1f} compiling)"
            if paired and name != SEARCHED:
                steps = repaid_after(found, name)
                repaid = f"{steps:,.0f} steps" if steps < float("inf") else "never"
        switched = f": {entry.settings}" if name in (*rivals.STOCK, *rivals.ON_CUDA) else ""
        result.append(
            [
                f"{name}{switched}",
                text(entry.step, 1e3),
                text(found.ratio(REFERENCE, name)) if paired else "",
                f"{entry.median('page_faults'):,.0f}",
                f"{entry.median('peak_bytes') / 2**20:,.0f}",
                f"{entry.median('loss'):.4f}",
                took,
                repaid,
            ]
        )
    return result + [[name, "absent", why] for name, why in found.absent.items()]


def unsure(ratios: list[float]) -> bool:
    """Whether more starts are wanted: fewer than eight, and they differ by more than 2%."""
    return len(ratios) < 8 and max(ratios) > 1.02 * min(ratios)


def changes(found: Race) -> list[list[str]]:
    """What ours applied, and what it left alone and why, as its certificate has it."""
    result = []
    for name in (*ON_CARD, SEARCHED):
        if name in found.entries:
            said = found.entries[name].first
            result += [[name, each, "applied"] for each in said.get("accepted", [])]
            result += [[name, each, why] for each, why in said.get("rejected", {}).items()]
    return result


def show(races: list[Race], figures: list[Figure], machine_facts: dict[str, str]) -> None:
    """Print everything."""
    for found in races:
        print(f"\n{found.name}: {found.title}")
        for row in [list(TITLES), *rows(found)]:
            print(f"{row[0]:<90}" + "".join(f"{cell:<22}" for cell in row[1:3]) + "  ".join(row[3:]).rstrip())
        for contender, change, verdict in changes(found):
            if verdict == "applied":
                print(f"  {contender} applied {change}")
    print()
    show_figures(figures)
    print("\nMeasured on: " + ", ".join(f"{key} {value}" for key, value in machine_facts.items() if value))
    print("Prepared in: the first time, then with the compiler's cache or the certificate at hand; each has its own.")
    print("Repaid after: all that the first run spent before training, compiling included, over what a step gains.")
    for found in races:
        few = [name for name in found.entries if found.has(REFERENCE, name) and unsure(found.ratios(REFERENCE, name))]
        if few:
            print(f"{found.name}: starts differ by more than 2% and there are fewer than 8, for {', '.join(few)}.")
        if not found.screened and not found.name.startswith(CPP):
            print(f"{found.name}: the rivals were not screened on this machine: run with --screen first.")


def save(
    arguments: argparse.Namespace, races: list[Race], figures: list[Figure], machine_facts: dict[str, str]
) -> None:
    """`orchestrator.json` and `orchestrator.html`."""
    from oxytorch.monitor import Bar, Column  # noqa: PLC0415

    document = {
        "schema": SCHEMA,
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
        for name in found.entries:
            if found.has(REFERENCE, name):
                got = found.ratio(REFERENCE, name)
                bars.append(Bar(name, got.mid, *ends(got), found.name))
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
    everyone = tuple(dict.fromkeys((*RIVALS, *rivals.ON_CUDA, *ON_CARD)))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--workloads",
        type=names(tuple(WORKLOADS)),
        metavar="A,B",
        help="default: all; with --screen those that rivals.json lacks for this machine",
    )
    parser.add_argument("--contenders", type=names(everyone), metavar="A,B", help="default: all that the device has")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--starts", type=int, default=4, help="processes of each contender, kept ones included (default %(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="begin no start that would likely end after this time, and no screening",
    )
    parser.add_argument("--screen", action="store_true", help="find the stock rivals of the workloads; race nothing")
    parser.add_argument("--rivals", type=Path, default=rivals.PATH, help="their settings (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, to see that it works")
    parser.add_argument(
        "--exhaustive", action="store_true", help="search all combinations too, in a process of its own, for the regret"
    )
    parser.add_argument("--cache", type=Path, help="keep compilers' caches and certificates there for the next race")
    parser.add_argument(
        "--keep", type=Path, help="go on from this JSON document of the same machine: its starts count, if it is there"
    )
    parser.add_argument("--program", type=Path, default=BUILD / "bench/race/orchestrator_race")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--timeout", type=float, default=900.0, help="longest wait for one answer, in seconds")
    parser.add_argument("--verbose", action="store_true", help="say whose turn it was")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/report")
    parser.add_argument("--json", type=Path, help="write the JSON document there too")
    arguments = parser.parse_args()
    here = (REFERENCE, *rivals.ON_CUDA, *ON_CARD) if arguments.device == "cuda" else (*RIVALS, *OURS)
    arguments.contenders = arguments.contenders or list(here)
    if absent := [name for name in arguments.contenders if name not in here]:
        parser.error(f"there is no {', '.join(absent)} on {arguments.device}; there are {', '.join(here)}")
    if arguments.device == "cuda":
        arguments.workloads = arguments.workloads or list(CUDA_WORKLOADS)
        if absent := [name for name in arguments.workloads if name not in CUDA_WORKLOADS]:
            parser.error(f"there is no {', '.join(absent)} on cuda; there are {', '.join(CUDA_WORKLOADS)}")
        if arguments.screen:
            parser.error("on cuda nothing is screened: all rivals race")
        if not torch.cuda.is_available():
            parser.error("torch finds no CUDA device here")
    if arguments.screen and arguments.quick and arguments.rivals == rivals.PATH:
        parser.error("a quick screening finds nothing to race against: give it a --rivals FILE of its own")
    return arguments


def kept(path: Path | None, machine_facts: dict[str, str], schema: str = SCHEMA) -> dict[str, Race]:
    """The races of a document that this one goes on from."""
    if path is None or not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    same_machine(path, document, schema, machine_facts)
    return {name: Race.from_json(data) for name, data in document["workloads"].items()}


def report(arguments: argparse.Namespace, raced: dict[str, Race], machine_facts: dict[str, str], say: bool) -> None:
    """Write the documents, and print them where `say`."""
    races = [raced[name] for name in WORKLOADS if name in raced and raced[name].entries]
    from_cpp = [found for found in races if found.name.startswith(CPP)]
    from_python = [found for found in races if not found.name.startswith(CPP)]
    judged = judge_cuda(from_python) if arguments.device == "cuda" else judge(from_python, has_bf16())
    figures = [*(judged if from_python else []), *judge_cpp(from_cpp)]
    if say:
        show(races, figures, machine_facts)
    save(arguments, races, figures, machine_facts)


def main() -> int:
    arguments = parse()
    machine_facts = facts(arguments.threads, arguments.device)
    coordinator = Coordinator(arguments, machine_facts)
    with tempfile.TemporaryDirectory(prefix="oxytorch-race-") as folder:
        arguments.cache = arguments.cache or Path(folder)
        workloads = list(arguments.workloads or WORKLOADS)
        if not arguments.program.exists() and (missing := [name for name in workloads if name.startswith(CPP)]):
            progress(f"no {arguments.program}: {', '.join(missing)} are left out; make build makes it")
            workloads = [name for name in workloads if name not in missing]
        began = time.monotonic()
        if arguments.screen:
            known = rivals.load(arguments.rivals)["machines"].get(coordinator.machine, {})
            for name in workloads:
                if name.startswith(CPP) or (arguments.workloads is None and name in known):
                    continue
                if time.monotonic() - began > 60 * arguments.minutes:
                    progress("the time is up; the same command goes on from here")
                    break
                coordinator.screen(name)
            return 0
        raced = kept(arguments.keep, machine_facts)
        took = dict.fromkeys(workloads, 0.0)
        for name in workloads:
            raced.setdefault(name, Race(name, (CUDA_WORKLOADS if arguments.device == "cuda" else WORKLOADS)[name]))
        while left := [name for name in workloads if len(raced[name].seeds) < arguments.starts]:
            name = min(left, key=lambda each: len(raced[each].seeds))
            start = time.monotonic()
            if start - began + took[name] > 60 * arguments.minutes:
                progress("the time is up; --keep goes on from here")
                break
            progress(f"{name}: start {len(raced[name].seeds) + 1} of {arguments.starts}")
            before = len(raced[name].seeds)
            coordinator.start(raced[name])
            if len(raced[name].seeds) == before:
                progress(f"{name}: nobody finished; it is left out")
                workloads.remove(name)
            took[name] = time.monotonic() - start
            report(arguments, raced, machine_facts, say=False)
    report(arguments, raced, machine_facts, say=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        progress("stopped; starts that were finished are kept")
        sys.exit(130)
