"""Tables of what `make gpu` found on a card."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable

from _orchestrator.figures import ON_CARD, PLANNED, REFERENCE, TOLERANCE, Race
from _race import Figure
from oxytorch.base import Interval

from .documents import Document, milliseconds, read, table
from .orchestrator import over

SHOWN = 20
"""Failures that a page lists; the document has them all."""
RIVALS = {
    "stock 1": "bf16, fused AdamW",
    "stock compiled": "torch.compile",
    "stock reduce-overhead": "reduce-overhead",
    "stock max-autotune": "max-autotune",
    "stock graph": "whole step in a CUDA graph",
    "stock compiled graph": "compiled, whole step in a CUDA graph",
}
NOT_RUN = "not run yet"
LONGEST_REASON = 160
"""Characters of why something failed; the document has the rest."""


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
    found = [f"- {what}: {textwrap.shorten(why, LONGEST_REASON)}" for what, why in rows]
    more = [f"- and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return "\n\nFailed:\n\n" + "\n".join([*found[:SHOWN], *more]) if found else ""


def parts_failed(document: Document) -> list[tuple[str, str]]:
    """Parts that ended without a result."""
    return [(name, part["problem"]) for name, part in document["parts"].items() if "problem" in part]


def build() -> str | None:
    """What was built with what."""
    found = of_gpu("build")
    if found is None:
        return None
    line, document = found
    facts = [(name, value) for name, value in document["machine"].items() if name != "revision"]
    took = document["parts"].get("build", {}).get("seconds")
    rows = [*([name, value] for name, value in facts), *([["time to build", f"{took:.0f} s"]] if took else [])]
    return table(["what", "here"], rows) + failures(parts_failed(document)) + f"\n\n{line}"


def conformance() -> str | None:
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


def tests() -> str | None:
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


def step_tail() -> str | None:
    """Figures and promises of the race of the step tail on the card."""
    return figures_of("step_tail")


def loader() -> str | None:
    """Figures and promises of the loader's copies to the card."""
    return figures_of("loader")


def memory() -> str | None:
    """Figures and promises of a decoder under memory budgets on the card."""
    return figures_of("memory")


def figures_of(which: str) -> str | None:
    """What a slice measured, and whether it keeps what is promised."""
    found = of_gpu(which)
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


def accelerate() -> str | None:
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
                *(over(race, REFERENCE, rival) for rival in RIVALS),
                *(over(race, REFERENCE, ours) for ours in ON_CARD),
                *(over(race, best, ours) if best else "not measured" for ours in (TOLERANCE, PLANNED)),
                RIVALS.get(best, best) if best else "",
            ]
        )
    head = ["", "eager fp32", *RIVALS.values(), "basic", "advanced", "advanced, by plan.step"]
    head += ["advanced, over the best of the others", "by plan.step, over it", "which is"]
    absent = [
        (f"{name}, {who}", why)
        for name, part in document["parts"].items()
        for who, why in part.get("document", {}).get("workloads", {}).get(name, {}).get("absent", {}).items()
    ]
    said = table(head, rows) + failures([*parts_failed(document), *absent])
    return f"{said}\n\nTimes of the eager loop over each. {line}"
