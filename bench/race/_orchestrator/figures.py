"""From what the workers answered to figures: nothing here starts or times anything."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from _race import Figure
from oxytorch.base import Interval, geometric_mean_interval, starts_interval
from oxytorch.bench.turns.driver import Run
from oxytorch.bench.turns.times import block_seconds

REFERENCE, ALLOCATOR = "eager", "eager + mallopt"
EXACT, TOLERANCE = "oxytorch basic", "oxytorch advanced"
OURS = (EXACT, TOLERANCE)
PLANNED = "oxytorch plan.step"
ON_CARD = (*OURS, PLANNED)
SEARCHED = "exhaustive"
HOST_POOL = "host pool"
REPAID_WITHIN, REGRET, SEARCH_SHARE, SLOWEST = 300, 0.97, 0.1, 0.99


@dataclass(frozen=True)
class Started:
    """One contender in one start."""

    seconds: list[float]
    """Seconds a step of each turn, the first turn left out."""
    page_faults: float | None
    """A step, in the last turn."""
    peak_bytes: float | None
    loss: float | None
    """Mean training loss of the last steps."""
    prepared: dict[str, Any]
    """What preparing took; ``cold`` in it is the first time ever."""

    @classmethod
    def of(cls, run: Run) -> Started:
        """What a finished run gave."""
        last = run.blocks[-1]
        return cls(
            seconds=[block_seconds(block) for block in run.blocks[1:] or run.blocks],
            page_faults=last.page_faults / len(last.seconds),
            peak_bytes=float(run.peak_bytes),
            loss=run.held_out_loss,
            prepared=run.ready,
        )


@dataclass
class Entry:
    """One contender on one workload: its settings and its starts by seed."""

    settings: str = ""
    starts: dict[str, Started] = field(default_factory=dict)

    @property
    def step(self) -> Interval:
        """Seconds a step."""
        return starts_interval([float(np.median(start.seconds)) for start in self.starts.values()])

    def median(self, what: str) -> float:
        """Of a figure that each start has one of; NaN where none has."""
        known = [float(value) for start in self.starts.values() if (value := getattr(start, what)) is not None]
        return float(np.median(known)) if known else float("nan")

    def cold(self, what: str) -> float:
        """Seconds that `what` took with nothing to go by, 0 where there is no such thing."""
        return float(self.first.get("cold", {}).get(what, 0.0))

    def warm(self, what: str) -> float:
        """The same once the compiler's cache, or the certificate, is there."""
        return min(float(start.prepared.get(what, 0.0)) for start in self.starts.values())

    @property
    def first(self) -> dict[str, Any]:
        """What the first start said of its preparing."""
        return next(iter(self.starts.values())).prepared


@dataclass
class Race:
    """One workload's entries, and who could not take part."""

    name: str
    title: str
    entries: dict[str, Entry] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    screened: bool = False
    """Whether the rivals' settings were found by a screening of this class of machine, or all that could be race."""

    @property
    def seeds(self) -> set[str]:
        """All starts so far."""
        return {seed for entry in self.entries.values() for seed in entry.starts}

    def add(self, contender: str, settings: str, run: Run) -> None:
        """One more start of a contender."""
        self.entries.setdefault(contender, Entry(settings)).starts[str(run.seed)] = Started.of(run)

    def has(self, *contenders: str) -> bool:
        """Whether they ran together."""
        return bool(
            set.intersection(
                *(set(self.entries[name].starts) if name in self.entries else set() for name in contenders)
            )
        )

    def ratios(self, slower: str, faster: str) -> list[float]:
        """How many times as long `slower` takes, by start: the median of the ratios turn by turn."""
        first, second = self.entries[slower].starts, self.entries[faster].starts
        return [
            float(np.median(np.array(first[seed].seconds) / np.array(second[seed].seconds)))
            for seed in first
            if seed in second
        ]

    def ratio(self, slower: str, faster: str) -> Interval:
        """The same over all starts that both were in."""
        return starts_interval(self.ratios(slower, faster))

    def rivals(self) -> list[str]:
        """Everyone else's entries."""
        return [name for name in self.entries if name not in (*ON_CARD, SEARCHED)]

    def best_rival(self) -> str | None:
        """The fastest of them as raced, which favours the rivals a little: it is the luckiest of several good ones."""
        rivals = self.rivals()
        return min(rivals, key=lambda name: self.entries[name].step.mid) if rivals else None

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Race:
        """What `to_json` wrote."""
        entries = {
            name: Entry(entry["settings"], {seed: Started(**start) for seed, start in entry["starts"].items()})
            for name, entry in data["entries"].items()
        }
        return cls(**{**data, "entries": entries})


def exactly(value: float) -> Interval:
    """A figure without an interval."""
    return Interval(value, value, value, 1.0)


def geometric_mean(races: list[Race], slower: str, faster: str) -> Interval:
    """Geometric mean over workloads of how many times as long `slower` takes."""
    return geometric_mean_interval([race.ratios(slower, faster) for race in races])


def spent(entry: Entry) -> dict[str, float]:
    """Seconds that the first run spends before it trains: all of it, and the compiler's part in it."""
    compiling = entry.cold("compile_seconds")
    return {"all": entry.cold("tuning_seconds") or compiling, "compiling": compiling}


def repaid_after(race: Race, contender: str) -> float:
    """Steps after which all that the first run spent is earned back against the reference; infinite where never."""
    ratio = race.ratio(REFERENCE, contender).mid
    gain = race.entries[REFERENCE].step.mid * (1.0 - 1.0 / ratio)
    return spent(race.entries[contender])["all"] / gain if gain > 0 else float("inf")


def judge(races: list[Race], has_bf16: bool) -> list[Figure]:
    """Everything that was promised."""
    return [
        *class_figures(races, EXACT, 1.3, 1.9),
        *class_figures(races, TOLERANCE, *((2.2, 4.5) if has_bf16 else (1.5, None))),
        *(figure for race in races for figure in rival_figures(race)),
        *(figure for race in races for figure in repaid_figures(race)),
        *(figure for race in races for figure in regret_figures(race)),
    ]


def judge_cuda(races: list[Race]) -> list[Figure]:
    """On a card, where nothing but the best rival is promised to be reached."""
    loops = [
        Figure(f"{race.name}: {ours} over the plain loop", race.ratio(REFERENCE, ours))
        for race in races
        for ours in ON_CARD
        if race.has(ours, REFERENCE)
    ]
    return loops + [figure for race in races for ours in (TOLERANCE, PLANNED) for figure in rival_figures(race, ours)]


def judge_cpp(races: list[Race]) -> list[Figure]:
    """The same workloads from C++, over LibTorch's plain loop."""
    return [
        Figure(f"{race.name}: {ours} over the plain loop", race.ratio(REFERENCE, ours), SLOWEST)
        for race in races
        for ours in OURS
        if race.has(ours, REFERENCE)
    ] + [figure for race in races for figure in rival_figures(race)]


def class_figures(races: list[Race], ours: str, mean: float, cnn: float | None) -> list[Figure]:
    """Means over eager and over eager with one `mallopt`, the CNN and the slowest of one class of changes."""
    taking_part = [race for race in races if race.has(ours, REFERENCE)]
    absent = next((race.absent[ours] for race in races if ours in race.absent), "did not run")
    if not taking_part:
        return [Figure(f"{ours}: geometric mean over eager", None, mean, absent=absent)]
    what = f"{ours}: geometric mean of {len(taking_part)} workloads over"
    slowest = min(taking_part, key=lambda race: race.ratio(REFERENCE, ours).mid)
    result = [Figure(f"{what} {REFERENCE}", geometric_mean(taking_part, REFERENCE, ours), mean)]
    if all(race.has(ours, ALLOCATOR) for race in taking_part):
        result.append(Figure(f"{what} {ALLOCATOR}", geometric_mean(taking_part, ALLOCATOR, ours)))
    result += [
        Figure(f"{ours}: cnn over eager", race.ratio(REFERENCE, ours), cnn)
        for race in taking_part
        if race.name == "cnn"
    ]
    least = f"{ours}: the slowest workload ({slowest.name}) over eager"
    return [*result, Figure(least, slowest.ratio(REFERENCE, ours), SLOWEST)]


def rival_figures(race: Race, ours: str = TOLERANCE) -> list[Figure]:
    """Against whoever of the rivals was fastest; bits may move for both."""
    best = race.best_rival()
    if best is None or best == REFERENCE or not race.has(best, ours):
        return []
    tuned = "" if race.screened else ", rivals not screened"
    what = f"{race.name}: {ours} over the best rival ({best}: {race.entries[best].settings}{tuned})"
    return [Figure(what, race.ratio(best, ours), 1.0)]


def repaid_figures(race: Race) -> list[Figure]:
    """After how many steps all that the first run spent is earned back."""
    result = []
    for ours in OURS:
        if race.has(ours, REFERENCE) and np.isfinite(steps := repaid_after(race, ours)):
            what = f"{race.name}: {ours} repaid after steps, compiling included"
            result.append(Figure(what, exactly(round(steps)), REPAID_WITHIN, at_most=True))
    return result


def regret_figures(race: Race) -> list[Figure]:
    """Speed and cost against an exhaustive search, which compiles nothing."""
    if not race.has(SEARCHED, TOLERANCE):
        return []
    found, took = race.entries[SEARCHED].first, spent(race.entries[TOLERANCE])
    share = (took["all"] - took["compiling"]) / found["search_seconds"]
    what = f"{race.name}: speed of {TOLERANCE} over the best of {found['tried']} combinations"
    return [
        Figure(f"{what} ({', '.join(found['accepted']) or 'none'})", race.ratio(SEARCHED, TOLERANCE), REGRET),
        Figure(
            f"{race.name}: cost of tuning without compiling over that of the search",
            exactly(share),
            SEARCH_SHARE,
            at_most=True,
        ),
    ]
