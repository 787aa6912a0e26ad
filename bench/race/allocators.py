"""Races the plain loop on `oxytorch.memory.use_host_pool` against the allocators that can be put under it.

The six workloads of orchestrator.py, eager and in float32, so that nothing differs but who serves memory: glibc as it
comes; glibc told by `mallopt` to keep what is freed; jemalloc, tcmalloc and mimalloc preloaded with the settings for
training; the pool; the pool beside that `mallopt`, which serves what operators take from malloc themselves. Processes
take turns, and ratios are paired, as orchestrator.py says.

    python bench/race/allocators.py [--workloads cnn,gpt] [--starts 4] [--minutes 9] [--quick] [--threads 2]
        [--keep FILE] [--json FILE]

Prints how many times as fast as glibc each is and what it holds at its peak, and writes
bench/report/allocators.{json,html}.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

from _orchestrator.figures import HOST_POOL, REFERENCE, Race
from _orchestrator.switches import MALLOPT, PRELOADED, Switches
from _race import facts, new_report, progress, text, write
from orchestrator import CPP, WORKLOADS, Coordinator, kept, names
from oxytorch.bench.turns.times import ends

SCHEMA = "oxytorch-allocators/1"
CONTENDERS = {
    REFERENCE: Switches(),
    **{name: Switches(allocator=name) for name in (MALLOPT, *PRELOADED)},
    HOST_POOL: Switches(),
    f"{HOST_POOL} + {MALLOPT}": Switches(allocator=MALLOPT),
}


class Allocators(Coordinator):
    """Every allocator takes part in each workload."""

    def switches(self, _workload: str) -> tuple[dict[str, Switches], bool]:
        return CONTENDERS, True


def rows(races: list[Race]) -> list[list[str]]:
    """By workload and contender: times as fast as glibc as it comes, page faults of a step, MiB at the peak."""
    return [
        [
            race.name,
            name,
            text(race.ratio(REFERENCE, name)),
            f"{entry.median('page_faults'):,.0f}",
            f"{entry.median('peak_bytes') / 2**20:,.0f}",
        ]
        for race in races
        for name, entry in race.entries.items()
        if race.has(REFERENCE, name)
    ] + [[race.name, name, f"absent: {why}", "", ""] for race in races for name, why in race.absent.items()]


def save(arguments: argparse.Namespace, races: list[Race], machine_facts: dict[str, str]) -> None:
    """`allocators.json` and `allocators.html`."""
    from oxytorch.monitor import Bar, Column  # noqa: PLC0415

    report = new_report("Race: allocators", __doc__, machine_facts)
    columns: list[Column | str] = ["workload", "allocator"]
    columns += [Column(title, "right") for title in ("times glibc", "faults a step", "peak MiB")]
    report.table(columns, rows(races), "Allocators under the plain loop")
    got = [(race.name, name, race.ratio(REFERENCE, name)) for race in races for name in race.entries]
    bars = [Bar(name, each.mid, *ends(each), workload) for workload, name, each in got]
    report.bar_chart(bars, "How many times as fast as glibc as it comes", "times", "x", 1.0, HOST_POOL)
    document = {
        "schema": SCHEMA,
        "machine": machine_facts,
        "workloads": {race.name: race.to_json() for race in races},
    }
    write(report, document, arguments.out, "allocators", arguments.json)


def parse() -> argparse.Namespace:
    """The command line."""
    known = tuple(name for name in WORKLOADS if not name.startswith(CPP))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", type=names(known), metavar="A,B", default=list(known), help="default: all")
    parser.add_argument("--starts", type=int, default=4, help="kept ones included (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no start after this time")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, to see that it works")
    parser.add_argument("--keep", type=Path, help="go on from this JSON document of the same machine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900.0, help="longest wait for one answer, in seconds")
    parser.add_argument("--verbose", action="store_true", help="say whose turn it was")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[2] / "bench/report")
    parser.add_argument("--json", type=Path, help="write the JSON document there too")
    return parser.parse_args(namespace=argparse.Namespace(device="cpu"))


def main() -> int:
    arguments = parse()
    machine_facts = facts(arguments.threads)
    raced = kept(arguments.keep, machine_facts, SCHEMA)
    for name in arguments.workloads:
        raced.setdefault(name, Race(name, WORKLOADS[name]))
    races = [raced[name] for name in WORKLOADS if name in raced]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="oxytorch-race-") as folder:
        arguments.cache = Path(folder)
        coordinator = Allocators(arguments, machine_facts)
        for start, name in itertools.product(range(arguments.starts), arguments.workloads):
            if len(raced[name].seeds) > start:
                continue
            if time.monotonic() - began > 60 * arguments.minutes:
                progress("the time is up; --keep goes on from here")
                break
            progress(f"{name}: start {start + 1} of {arguments.starts}")
            coordinator.start(raced[name])
            save(arguments, races, machine_facts)
    for row in rows(races):
        print(f"{row[0]:<8}{row[1]:<24}{row[2]:<22}{row[3]:>12} faults a step {row[4]:>8} MiB at the peak")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        progress("stopped; starts that were finished are kept")
        sys.exit(130)
