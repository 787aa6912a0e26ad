"""Tables of the races of whole training loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from _orchestrator.figures import (
    ALLOCATOR,
    EXACT,
    HOST_POOL,
    OURS,
    REFERENCE,
    SEARCHED,
    TOLERANCE,
    Race,
    geometric_mean,
    repaid_after,
    spent,
)
from _race import ratio, text
from oxytorch.base import Interval, geometric_mean_interval

from .documents import Document, best_and_worst, measured, milliseconds, read, table
from .tail import CASES, times

PEAKS = ("jemalloc", HOST_POOL)
NAMES = {
    "cnn": "CNN, 4 stages",
    "resnet": "ResNet, 3 blocks",
    "gpt": "GPT, 4 layers",
    "bert": "BERT-style, dropout",
    "mlp": "MLP",
    "lstm": "LSTM, 2 layers",
}


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


def without_avx512() -> str | None:
    """The same on a processor without AVX-512, whose rivals were not screened."""
    return _on_another_processor("orchestrator_avx2.json", "stock, as one would write it", lambda _: "stock 1")


def with_amx() -> str | None:
    """The same on a processor with AMX, against the best rival there."""
    return _on_another_processor("orchestrator_amx.json", "best rival of all", Race.best_rival)


def _on_another_processor(name: str, kind: str, rival_of: Callable[[Race], str | None]) -> str | None:
    found = races(name)
    if found is None:
        return None
    document, raced = found
    rows, over_rival = [], []
    for race in raced:
        rival = rival_of(race) or REFERENCE
        over_rival.append(race.ratios(rival, TOLERANCE))
        rows.append(
            [
                NAMES[race.name],
                milliseconds(race.entries[REFERENCE].step),
                over(race, REFERENCE, EXACT),
                over(race, REFERENCE, TOLERANCE),
                race.entries[rival].settings,
                over(race, rival, TOLERANCE),
                cost(race, TOLERANCE),
            ]
        )
    means = [text(geometric_mean(raced, REFERENCE, ours)) for ours in (EXACT, TOLERANCE)]
    rows.append(["geometric mean", "", *means, "", text(geometric_mean_interval(over_rival)), ""])
    head = [
        "",
        "eager",
        "basic, over eager",
        "advanced, over eager",
        kind,
        "advanced, over it",
        "first run (compiling)",
    ]
    contenders = ",".join(raced[0].entries)
    names = ",".join(race.name for race in raced)
    starts = starts_of(raced)
    command = (
        f'python bench/race/orchestrator.py --workloads {names} --contenders "{contenders}" --starts {max(starts)}'
    )
    return table(head, rows) + "\n\n" + measured(command, name, document, starts)


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
    best_rival = {race.name: race.best_rival() for race in of_loops if race.screened}
    compared: list[tuple[str, list[tuple[Interval, str]]]] = [
        (f'{len(of_loops)} training loops, "advanced" over the plain loop', _ratios(of_loops, TOLERANCE)),
        ('the same, "basic" (no bit changes)', _ratios(of_loops, EXACT)),
        (
            'the same, "advanced" over the fastest of stock PyTorch with all switches tried, Lightning and Accelerate',
            [
                (race.ratio(best, TOLERANCE), NAMES[race.name])
                for race in of_loops
                if (best := best_rival.get(race.name)) is not None and race.has(TOLERANCE, best)
            ],
        ),
        (f'{len(cpp_races[1])} C++ loops, "advanced" over LibTorch\'s plain loop', _ratios(cpp_races[1], TOLERANCE)),
        (
            "clip + AdamW + moving average, over torch's fastest",
            [
                (ratio(known, "torch fused", "oxytorch"), f"{case} parameters")
                for case in CASES
                if {"torch fused", "oxytorch"} <= (known := times(tail, case)).keys()
            ],
        ),
    ]
    rows = [best_and_worst(name, found, larger=True) for name, found in compared]
    return table(["speedup (the rival's time / Oxytorch's)", "best", "worst"], rows)


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


def allocators() -> str | None:
    """What serves memory under the plain loop, over glibc as it comes, and what the process holds."""
    found = races("allocators.json")
    if found is None:
        return None
    document, raced = found
    names = list(dict.fromkeys(name for race in raced for name in race.entries if name != REFERENCE))
    rows = [
        [
            NAMES[race.name],
            *(over(race, REFERENCE, name) for name in names),
            *(peak(race, name) for name in (REFERENCE, *PEAKS)),
        ]
        for race in raced
    ]
    rows.append(["geometric mean", *(text(geometric_mean(raced, REFERENCE, name)) for name in names), "", "", ""])
    head = ["", *names, "MiB of glibc", *(f"MiB of {name}" for name in PEAKS)]
    command = "python bench/race/allocators.py"
    return table(head, rows) + "\n\n" + measured(command, "allocators.json", document, starts_of(raced))


def peak(race: Race, name: str) -> str:
    """MiB that the process held beyond what it had before the model was made."""
    return f"{race.entries[name].median('peak_bytes') / 2**20:,.0f}" if name in race.entries else "not measured"


def roofline() -> str | None:
    """What the products of a step take at the rate of one large product, and what that leaves to gain."""
    counted, found = read("roofline.json"), races("orchestrator.json")
    if counted is None or found is None:
        return None
    rate = counted["rates"]["bf16"]
    raced = {race.name: race for race in found[1]}
    rows = []
    for name, flops in counted["flops"].items():
        least, race = flops / rate, raced[name]
        rival = race.entries[race.best_rival() or REFERENCE].step.mid
        ours = race.entries[TOLERANCE].step.mid
        rows.append(
            [NAMES[name], f"{flops / 1e9:.3g}", f"{1e3 * least:.3g} ms", f"{least / ours:.0%}", f"{rival / least:.2f}"]
        )
    said = measured("python bench/race/roofline.py", "roofline.json", counted)
    head = ["", "GFLOP of products", "at the rate of one product", "of a step of advanced"]
    head += ["the most over the best rival"]
    return table(head, rows) + f"\n\nOne product: {rate / 1e12:.2f} TFLOP/s in bf16. {said}"


PARTS_COMMAND = "python bench/race/roofline.py --steps gpt,bert"


def roofline_with_amx() -> str | None:
    """The same on a processor with AMX, where steps and large products took turns: neighbours slow both."""
    counted, found = read("roofline_amx.json"), races("orchestrator_amx.json")
    if counted is None or found is None:
        return None
    raced = {race.name: race for race in found[1]}
    rows = []
    for name, parts in counted["parts"].items():
        low, part, high = (float(np.quantile(parts, q)) for q in (0.1, 0.5, 0.9))
        race = raced[name]
        gained = race.ratio(race.best_rival() or REFERENCE, TOLERANCE).mid
        rows.append([NAMES[name], f"{part:.0%} ({low:.0%} to {high:.0%})", f"{gained:.3g}", f"{gained / part:.2f}"])
    said = measured(PARTS_COMMAND, "roofline_amx.json", counted)
    head = ["", "of a step of advanced (8 of 10 rounds)", "over the best rival", "the most over the best rival"]
    return table(head, rows) + f"\n\nOne product: {counted['rates']['bf16'] / 1e12:.2f} TFLOP/s in bf16. {said}"
