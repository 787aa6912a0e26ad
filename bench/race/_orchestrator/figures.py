"""From what the workers answered to figures: nothing here starts or times anything."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from _race import Figure
from numpy.typing import NDArray
from oxytorch.base import Interval
from oxytorch.demo.driver import Start
from oxytorch.demo.measure import block_seconds, two_level_interval, two_level_medians

REFERENCE = "eager"
EXACT, TOLERANCE = "oxytorch basic", "oxytorch advanced"
OURS = (EXACT, TOLERANCE)
SEARCHED = "exhaustive"
REPAID_WITHIN, REGRET, SEARCH_SHARE, SLOWEST = 300, 0.97, 0.1, 0.99


@dataclass(frozen=True)
class Entry:
    """One contender on one workload."""

    seconds: list[list[float]]
    """Seconds a step by start and turn, the first turn left out."""
    page_faults: float
    """A step, in the last turn."""
    peak_bytes: float
    loss: float
    """Mean training loss of the last steps, over starts."""
    prepared: list[dict[str, Any]]
    """What preparing took in each start; ``cold`` in it is the first time ever."""

    @property
    def step(self) -> Interval:
        """Seconds a step."""
        return interval(np.array(self.seconds))

    def cold(self, what: str) -> float:
        """Seconds that `what` took with nothing to go by, 0 where there is no such thing."""
        return float(self.prepared[0].get("cold", {}).get(what, 0.0))

    def warm(self, what: str) -> float:
        """The same once the compiler's cache, or the certificate, is there."""
        return min(float(each.get(what, 0.0)) for each in self.prepared)


@dataclass
class Race:
    """One workload's entries, and who could not take part."""

    name: str
    title: str
    entries: dict[str, Entry]
    absent: dict[str, str] = field(default_factory=dict)

    def ratio(self, slower: str, faster: str) -> Interval:
        """How many times as long `slower` takes, paired by start and turn."""
        return interval(self.ratios(slower, faster))

    def ratios(self, slower: str, faster: str) -> NDArray[np.float64]:
        """By start and turn."""
        return np.array(self.entries[slower].seconds) / np.array(self.entries[faster].seconds)

    def rivals(self) -> list[str]:
        """Everyone else's entries."""
        return [name for name in self.entries if name not in (*OURS, SEARCHED)]

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Race:
        """What `to_json` wrote."""
        return cls(**{**data, "entries": {name: Entry(**entry) for name, entry in data["entries"].items()}})


def interval(values: NDArray[np.float64]) -> Interval:
    """Median over starts and turns."""
    got = two_level_interval(values)
    return Interval(got.low, got.mid, got.high, 0.95)


def exactly(value: float) -> Interval:
    """A figure without an interval."""
    return Interval(value, value, value, 1.0)


def entries(starts: list[Start]) -> dict[str, Entry]:
    """Entries of those that finished every start."""
    finished = [name for name in starts[0] if all(name in start for start in starts)]
    result = {}
    for name in finished:
        runs = [start[name] for start in starts]
        last = [run.blocks[-1] for run in runs]
        result[name] = Entry(
            seconds=[[block_seconds(block) for block in run.blocks[1:] or run.blocks] for run in runs],
            page_faults=float(np.median([block.page_faults / len(block.seconds) for block in last])),
            peak_bytes=float(np.median([run.peak_bytes for run in runs])),
            loss=float(np.mean([run.held_out_loss for run in runs])),
            prepared=[run.ready for run in runs],
        )
    return result


def geometric_mean(races: list[Race], slower: str, faster: str) -> Interval:
    """Geometric mean over workloads of how many times as long `slower` takes, resampled in each."""
    ratios = [race.ratios(slower, faster) for race in races]
    means = np.exp(np.mean([np.log(two_level_medians(each, seed)) for seed, each in enumerate(ratios)], axis=0))
    low, high = np.quantile(means, [0.025, 0.975])
    mid = float(np.exp(np.mean([np.log(np.median(each)) for each in ratios])))
    return Interval(float(low), mid, float(high), 0.95)


def repaid_after(race: Race, contender: str, seconds: float) -> float:
    """Steps after which `seconds` are earned back against the reference; infinite where nothing is earned."""
    gain = race.entries[REFERENCE].step.mid - race.entries[contender].step.mid
    return seconds / gain if gain > 0 else float("inf")


def search_seconds(entry: Entry) -> float:
    """What tuning took at first, without what the compiler took."""
    return entry.cold("tuning_seconds") - entry.cold("compile_seconds")


def judge(races: list[Race], has_bf16: bool) -> list[Figure]:
    """Everything that was promised."""
    return [
        *class_figures(races, EXACT, 1.3, 1.9),
        *class_figures(races, TOLERANCE, *((2.2, 4.5) if has_bf16 else (1.5, None))),
        *(figure for race in races for figure in rival_figures(race)),
        *(figure for race in races for figure in repaid_figures(race)),
        *(figure for race in races for figure in regret_figures(race)),
    ]


def judge_cpp(races: list[Race]) -> list[Figure]:
    """The same workloads from C++, over LibTorch's plain loop."""
    return [
        Figure(f"{race.name}: {ours} over the plain loop", race.ratio(REFERENCE, ours), SLOWEST)
        for race in races
        for ours in OURS
        if {ours, REFERENCE} <= race.entries.keys()
    ]


def class_figures(races: list[Race], ours: str, mean: float, cnn: float | None) -> list[Figure]:
    """Mean, the CNN and the slowest of one class of changes."""
    taking_part = [race for race in races if ours in race.entries and REFERENCE in race.entries]
    absent = next((race.absent[ours] for race in races if ours in race.absent), "did not run")
    if not taking_part:
        return [Figure(f"{ours}: geometric mean over eager", None, mean, absent=absent)]
    what = f"{ours}: geometric mean of {len(taking_part)} workloads over eager"
    slowest = min(taking_part, key=lambda race: race.ratio(REFERENCE, ours).mid)
    result = [Figure(what, geometric_mean(taking_part, REFERENCE, ours), mean)]
    result += [
        Figure(f"{ours}: cnn over eager", race.ratio(REFERENCE, ours), cnn)
        for race in taking_part
        if race.name == "cnn"
    ]
    least = f"{ours}: the slowest workload ({slowest.name}) over eager"
    return [*result, Figure(least, slowest.ratio(REFERENCE, ours), SLOWEST)]


def rival_figures(race: Race) -> list[Figure]:
    """Against whoever of the rivals was fastest; bits may move for both."""
    rivals = [name for name in race.rivals() if name != REFERENCE]
    if TOLERANCE not in race.entries or not rivals:
        return []
    best = min(rivals, key=lambda name: race.entries[name].step.mid)
    return [Figure(f"{race.name}: {TOLERANCE} over the best rival ({best})", race.ratio(best, TOLERANCE), 1.0)]


def repaid_figures(race: Race) -> list[Figure]:
    """After how many steps the first tuning is earned back, the compiler's time apart."""
    result = []
    for ours in OURS:
        if ours not in race.entries or REFERENCE not in race.entries:
            continue
        entry = race.entries[ours]
        steps = repaid_after(race, ours, search_seconds(entry))
        if np.isfinite(steps):
            what = f"{race.name}: {ours} repaid after steps, compile apart"
            result.append(Figure(what, exactly(round(steps)), REPAID_WITHIN, at_most=True))
        if entry.cold("compile_seconds") > 0:
            steps = repaid_after(race, ours, entry.cold("compile_seconds"))
            result.append(Figure(f"{race.name}: {ours}, its compile repaid after steps", exactly(round(steps))))
    return result


def regret_figures(race: Race) -> list[Figure]:
    """Speed and cost against an exhaustive search."""
    if not {SEARCHED, TOLERANCE} <= race.entries.keys():
        return []
    found = race.entries[SEARCHED].prepared[0]
    share = search_seconds(race.entries[TOLERANCE]) / found["search_seconds"]
    what = f"{race.name}: speed of {TOLERANCE} over the best of {found['tried']} combinations"
    return [
        Figure(f"{what} ({', '.join(found['accepted']) or 'none'})", race.ratio(SEARCHED, TOLERANCE), REGRET),
        Figure(f"{race.name}: cost of tuning over that of the search", exactly(share), SEARCH_SHARE, at_most=True),
    ]
