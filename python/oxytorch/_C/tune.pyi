"""
Duel, search, certificate and guard.
"""

from __future__ import annotations
import collections.abc
import os
import torch
import typing

__all__: list[str] = [
    "BASELINE_BLOCKS",
    "Certificate",
    "CertificateEntry",
    "CertificateKey",
    "CertificateStore",
    "ChangeMeter",
    "Duel",
    "DuelOptions",
    "DuelResult",
    "Guard",
    "GuardOptions",
    "Interval",
    "LoadSample",
    "LoadWatch",
    "NativeOperators",
    "Offer",
    "OperatorReport",
    "OwnRandom",
    "Requirement",
    "Search",
    "SearchOptions",
    "SideFailed",
    "StepNow",
    "StrategyFacts",
    "Timing",
    "Trial",
    "TrialOutcome",
    "Tuner",
    "TunerOptions",
    "Watch",
    "Watched",
    "Workload",
    "adam_step",
    "allows",
    "block_steps",
    "gradients_apart",
    "hardware_key",
    "most_heap_speedup",
    "native_step_differs",
    "read_load",
    "set_load_source",
    "settle_steps",
    "sgd_step",
    "why_not_trusted",
    "worth_another_look",
]

class Interval:
    """
    An estimate with the interval that holds the true value in `confidence` of cases.
    """
    def __init__(
        self,
        low: typing.SupportsFloat | typing.SupportsIndex,
        mid: typing.SupportsFloat | typing.SupportsIndex,
        high: typing.SupportsFloat | typing.SupportsIndex,
        confidence: typing.SupportsFloat | typing.SupportsIndex = 0.95,
    ) -> None: ...
    @property
    def confidence(self) -> float: ...
    @confidence.setter
    def confidence(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def high(self) -> float: ...
    @high.setter
    def high(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def low(self) -> float: ...
    @low.setter
    def low(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def mid(self) -> float: ...
    @mid.setter
    def mid(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...

class DuelOptions:
    """
    How sure a duel must be, and how long it may take.
    """
    @staticmethod
    def canary(seed: typing.SupportsInt | typing.SupportsIndex) -> DuelOptions:
        """
        Of a remembered certificate.
        """
    @staticmethod
    def conclusion(seed: typing.SupportsInt | typing.SupportsIndex) -> DuelOptions:
        """
        Of everything against nothing at the end.
        """
    @staticmethod
    def member(seed: typing.SupportsInt | typing.SupportsIndex) -> DuelOptions:
        """
        Of a remembered certificate without one of it.
        """
    def __init__(
        self,
        *,
        threshold: typing.SupportsFloat | typing.SupportsIndex = 1.01,
        confidence: typing.SupportsFloat | typing.SupportsIndex = 0.95,
        false_accept: typing.SupportsFloat | typing.SupportsIndex = 0.0085,
        least_pairs: typing.SupportsInt | typing.SupportsIndex = 9,
        most_pairs: typing.SupportsInt | typing.SupportsIndex = 40,
        worth: typing.SupportsFloat | typing.SupportsIndex = 1.0,
        most_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        budget_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        repay_steps: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    @property
    def budget_seconds(self) -> float: ...
    @budget_seconds.setter
    def budget_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def confidence(self) -> float: ...
    @confidence.setter
    def confidence(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def false_accept(self) -> float: ...
    @false_accept.setter
    def false_accept(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def least_pairs(self) -> int: ...
    @least_pairs.setter
    def least_pairs(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def most_pairs(self) -> int: ...
    @most_pairs.setter
    def most_pairs(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def most_seconds(self) -> float: ...
    @most_seconds.setter
    def most_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def repay_steps(self) -> float: ...
    @repay_steps.setter
    def repay_steps(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def seed(self) -> int: ...
    @seed.setter
    def seed(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def threshold(self) -> float: ...
    @threshold.setter
    def threshold(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def worth(self) -> float: ...
    @worth.setter
    def worth(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...

class DuelResult:
    """
    What a duel has shown; speedup is incumbent over challenger.
    """

    decision: typing.Literal["open", "accept", "reject"]
    reason: str
    speedup: Interval
    def __init__(self) -> None: ...
    @property
    def challenger(self) -> float:
        """
        Median seconds a step.
        """
    @challenger.setter
    def challenger(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def incumbent(self) -> float:
        """
        Median seconds a step.
        """
    @incumbent.setter
    def incumbent(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def p_value(self) -> float: ...
    @p_value.setter
    def p_value(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def pairs(self) -> int: ...
    @pairs.setter
    def pairs(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class Duel:
    """
    A paired, randomised, sequential comparison of two ways to take the same step.
    """
    def __init__(self, options: DuelOptions = ...) -> None: ...
    def abandon(self, reason: str) -> None:
        """
        End it as rejected.
        """
    def next(self) -> typing.Literal["incumbent", "challenger"] | None:
        """
        The side to run now; None once it is decided.
        """
    def record(
        self, side: typing.Literal["incumbent", "challenger"], seconds: typing.SupportsFloat | typing.SupportsIndex
    ) -> None:
        """
        Seconds a step of the side that next() named.
        """
    def result(self) -> DuelResult: ...

class CertificateEntry:
    """
    What became of one strategy. Containers are copied in and out.
    """

    cost: str
    kind: typing.Literal["exact", "tolerance", "precision", "trade"]
    reason: str
    speedup: Interval | None
    standing: typing.Literal["accepted", "rejected", "refused", "failed", "skipped", "rolled back"]
    strategy: str
    @typing.overload
    def __init__(self) -> None: ...
    @typing.overload
    def __init__(
        self,
        strategy: str,
        kind: typing.Literal["exact", "tolerance", "precision", "trade"],
        standing: typing.Literal["accepted", "rejected", "refused", "failed", "skipped", "rolled back"],
        reason: str,
    ) -> None: ...
    @property
    def break_even_steps(self) -> float | None: ...
    @break_even_steps.setter
    def break_even_steps(self, arg0: typing.SupportsFloat | typing.SupportsIndex | None) -> None: ...
    @property
    def cost_seconds(self) -> float: ...
    @cost_seconds.setter
    def cost_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def evidence(self) -> dict[str, float]: ...
    @evidence.setter
    def evidence(self, arg0: collections.abc.Mapping[str, typing.SupportsFloat | typing.SupportsIndex]) -> None: ...
    @property
    def pairs(self) -> int: ...
    @pairs.setter
    def pairs(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class CertificateKey:
    """
    What a certificate holds for.
    """

    hardware: str
    model: str
    options: str
    torch: str
    def __init__(self, *, hardware: str = "", torch: str = "", model: str = "", options: str = "") -> None: ...
    def digest(self) -> str: ...

class Certificate:
    """
    What was tried on a training step and what pays. Containers are copied in and out: assign `entries` whole.
    """

    created: str
    disturbance: str
    key: CertificateKey
    level: str
    speedup: Interval | None
    @staticmethod
    def from_json(text: str) -> Certificate: ...
    @staticmethod
    def load(path: str | os.PathLike[str]) -> Certificate: ...
    @typing.overload
    def __init__(self) -> None: ...
    @typing.overload
    def __init__(self, other: Certificate) -> None: ...
    def accepted(self) -> list[str]: ...
    def relate(
        self, seconds: typing.SupportsFloat | typing.SupportsIndex, faults: typing.SupportsFloat | typing.SupportsIndex
    ) -> None:
        """
        Tell what a step takes after the trials with nothing active.
        """
    def repaid_after(self, with_compiling: bool = True) -> float | None: ...
    def save(self, path: str | os.PathLike[str]) -> None: ...
    def to_html(self) -> str: ...
    def to_json(self) -> str: ...
    def to_text(self) -> str: ...
    @property
    def baseline_seconds(self) -> float: ...
    @baseline_seconds.setter
    def baseline_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def compile_seconds(self) -> float: ...
    @compile_seconds.setter
    def compile_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def entries(self) -> list[CertificateEntry]: ...
    @entries.setter
    def entries(self, arg0: collections.abc.Sequence[CertificateEntry]) -> None: ...
    @property
    def events(self) -> list[str]: ...
    @events.setter
    def events(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def step_faults(self) -> float: ...
    @step_faults.setter
    def step_faults(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def step_seconds(self) -> float: ...
    @step_seconds.setter
    def step_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def step_spread(self) -> float: ...
    @step_spread.setter
    def step_spread(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def steps_planned(self) -> int: ...
    @steps_planned.setter
    def steps_planned(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def tuned_seconds(self) -> float: ...
    @tuned_seconds.setter
    def tuned_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def tuning_seconds(self) -> float: ...
    @tuning_seconds.setter
    def tuning_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def verification(self) -> dict[str, str]: ...
    @verification.setter
    def verification(self, arg0: collections.abc.Mapping[str, str]) -> None: ...

class CertificateStore:
    """
    Where certificates are remembered.
    """
    def __init__(self, folder: str | os.PathLike[str] = "") -> None: ...
    def find(self, key: CertificateKey) -> Certificate | None: ...
    def forget(self, key: CertificateKey) -> None: ...
    def put(self, certificate: Certificate) -> None: ...
    def try_forget(self, key: CertificateKey) -> str:
        """
        As forget(), but why it failed is returned; empty where it did not.
        """
    def try_put(self, certificate: Certificate) -> str:
        """
        As put(), but why it failed is returned; empty where it did not.
        """
    @property
    def folder(self) -> str: ...

class StepNow:
    """
    The step as given, measured now.
    """
    def __init__(
        self,
        *,
        seconds: typing.SupportsFloat | typing.SupportsIndex,
        spread: typing.SupportsFloat | typing.SupportsIndex,
        disturbed: bool,
        time: str,
    ) -> None: ...

class StrategyFacts:
    """
    What the search knows of a strategy.
    """

    group: str
    kind: typing.Literal["exact", "tolerance", "precision", "trade"]
    name: str
    update_proven: bool
    def __init__(
        self,
        name: str,
        *,
        kind: typing.Literal["exact", "tolerance", "precision", "trade"] = "exact",
        group: str = "",
        requires: collections.abc.Sequence[str] = [],
        interacts: collections.abc.Sequence[str] = [],
        part_of: collections.abc.Sequence[str] = [],
        renewed_by: collections.abc.Sequence[str] = [],
        expected_cost: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        hopeful: typing.SupportsFloat | typing.SupportsIndex = 3.0,
        expected_speedup: typing.SupportsFloat | typing.SupportsIndex = 1.05,
        update_speedup: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        update_proven: bool = False,
    ) -> None: ...
    @property
    def expected_cost(self) -> float: ...
    @expected_cost.setter
    def expected_cost(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def expected_speedup(self) -> float: ...
    @expected_speedup.setter
    def expected_speedup(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def hopeful(self) -> float: ...
    @hopeful.setter
    def hopeful(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def interacts(self) -> list[str]: ...
    @interacts.setter
    def interacts(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def part_of(self) -> list[str]: ...
    @part_of.setter
    def part_of(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def renewed_by(self) -> list[str]: ...
    @renewed_by.setter
    def renewed_by(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def requires(self) -> list[str]: ...
    @requires.setter
    def requires(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def update_speedup(self) -> float: ...
    @update_speedup.setter
    def update_speedup(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...

class SearchOptions:
    """
    The run that a search is for, and what it may spend.
    """

    duel: DuelOptions
    @staticmethod
    def for_run(
        steps_planned: typing.SupportsInt | typing.SupportsIndex,
        step_seconds: typing.SupportsFloat | typing.SupportsIndex,
        budget_seconds: typing.SupportsFloat | typing.SupportsIndex,
        seed: typing.SupportsInt | typing.SupportsIndex,
    ) -> SearchOptions:
        """
        What every driver of a search uses.
        """
    def __init__(
        self,
        *,
        steps_planned: typing.SupportsInt | typing.SupportsIndex = 10000,
        step_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        budget_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        repay_steps: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        conclude_steps: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        total_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        used_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        cost_share: typing.SupportsFloat | typing.SupportsIndex = 0.1,
        optimizer_share: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
        duel: DuelOptions = ...,
    ) -> None: ...
    @property
    def budget_seconds(self) -> float: ...
    @budget_seconds.setter
    def budget_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def conclude_steps(self) -> float: ...
    @conclude_steps.setter
    def conclude_steps(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def cost_share(self) -> float: ...
    @cost_share.setter
    def cost_share(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def optimizer_share(self) -> float: ...
    @optimizer_share.setter
    def optimizer_share(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def repay_steps(self) -> float: ...
    @repay_steps.setter
    def repay_steps(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def seed(self) -> int: ...
    @seed.setter
    def seed(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def step_seconds(self) -> float: ...
    @step_seconds.setter
    def step_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def steps_planned(self) -> int: ...
    @steps_planned.setter
    def steps_planned(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def total_seconds(self) -> float: ...
    @total_seconds.setter
    def total_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def used_seconds(self) -> float: ...
    @used_seconds.setter
    def used_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...

class Trial:
    """
    Two combinations of strategies to compare.
    """
    @property
    def challenger(self) -> list[str]: ...
    @property
    def duel(self) -> DuelOptions: ...
    @property
    def incumbent(self) -> list[str]: ...
    @property
    def removal(self) -> bool:
        """
        Whether it is asked if the rest is faster without it.
        """
    @property
    def strategy(self) -> str:
        """
        The one in question.
        """

class TrialOutcome:
    """
    What came of a trial.
    """

    disturbed: bool
    duel: DuelResult
    failed: bool
    reason: str
    verified: bool
    def __init__(
        self,
        duel: DuelResult = ...,
        *,
        cost_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        spent_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        disturbed: bool = False,
        failed: bool = False,
        verified: bool = True,
        reason: str = "",
    ) -> None: ...
    @property
    def cost_seconds(self) -> float: ...
    @cost_seconds.setter
    def cost_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def spent_seconds(self) -> float: ...
    @spent_seconds.setter
    def spent_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...

class Search:
    """
    Which combination of strategies to try next.
    """
    def __init__(self, strategies: collections.abc.Sequence[StrategyFacts], options: SearchOptions = ...) -> None: ...
    def ask(self) -> Trial | None:
        """
        The next trial; None where there is none left.
        """
    def best(self) -> list[str]:
        """
        Names in force, in the order of the strategies.
        """
    def charge(self, seconds: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def conclusion(self) -> DuelOptions:
        """
        How everything is measured against nothing at the end.
        """
    def drop(
        self,
        strategy: str,
        standing: typing.Literal["accepted", "rejected", "refused", "failed", "skipped", "rolled back"],
        reason: str,
    ) -> None:
        """
        Take out for good what turned out bad after it was accepted; ask() goes on.
        """
    def entries(self) -> list[CertificateEntry]: ...
    def expect(self, strategy: str, speedup: typing.SupportsFloat | typing.SupportsIndex) -> None:
        """
        What it is likely to make of the step as it is now; ask() again.
        """
    def seconds_left(self) -> float:
        """
        For everything together.
        """
    def skip(self, strategy: str, reason: str) -> None: ...
    def tell(self, outcome: TrialOutcome) -> None: ...

class ChangeMeter:
    """
    Measures a vector's change that comes in slices, in order.
    """
    def __init__(
        self,
        count: typing.SupportsInt | typing.SupportsIndex,
        wide: bool,
        element: typing.SupportsFloat | typing.SupportsIndex,
        sample: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def add(self, before: torch.Tensor | None, after: torch.Tensor, wanted: torch.Tensor) -> None: ...
    def found(self) -> tuple[float, float, float, float, float, tuple[float, float], float, float]:
        """
        Error, size, unit, slope, worst, (upwards, outwards), bias_error, ratio; see oxytorch.tune.update.Change.
        """
    @property
    def stands_out(self) -> bool:
        """
        Whether the slices are to be given once more: known after the last of them.
        """

class GuardOptions:
    """
    When a guard looks, and what it takes changes back for.
    """
    def __init__(
        self,
        *,
        first_check: typing.SupportsInt | typing.SupportsIndex = 50,
        check_every: typing.SupportsInt | typing.SupportsIndex = 2000,
        pairs: typing.SupportsInt | typing.SupportsIndex = 9,
        compare_every: typing.SupportsInt | typing.SupportsIndex = 500,
        loss_tolerance: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        gradient_tolerance: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        factor_tolerance: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        threshold: typing.SupportsFloat | typing.SupportsIndex = 0.99,
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    def allow(self, kind: typing.Literal["exact", "tolerance", "precision", "trade"]) -> None: ...
    @property
    def check_every(self) -> int: ...
    @check_every.setter
    def check_every(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def compare_every(self) -> int: ...
    @compare_every.setter
    def compare_every(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def factor_tolerance(self) -> float: ...
    @factor_tolerance.setter
    def factor_tolerance(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def first_check(self) -> int: ...
    @first_check.setter
    def first_check(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def gradient_tolerance(self) -> float: ...
    @gradient_tolerance.setter
    def gradient_tolerance(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def loss_tolerance(self) -> float: ...
    @loss_tolerance.setter
    def loss_tolerance(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def pairs(self) -> int: ...
    @pairs.setter
    def pairs(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def seed(self) -> int: ...
    @seed.setter
    def seed(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def threshold(self) -> float: ...
    @threshold.setter
    def threshold(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...

class Guard:
    """
    Says at each step boundary how to take the next step of a certified run.
    """
    def __init__(self, options: GuardOptions = ...) -> None: ...
    def after(self, seconds: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def before(self) -> typing.Literal["run", "run without", "compare losses", "roll back"]: ...
    def compared(
        self,
        loss_with: typing.SupportsFloat | typing.SupportsIndex,
        loss_without: typing.SupportsFloat | typing.SupportsIndex,
        gradient: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        factor: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    ) -> None: ...
    def suspicious(self) -> None: ...
    @property
    def reason(self) -> str: ...
    @property
    def step(self) -> int: ...

class LoadSample:
    """
    Counters of who uses the processor, in seconds.
    """
    def __init__(
        self,
        *,
        wall: typing.SupportsFloat | typing.SupportsIndex,
        own: typing.SupportsFloat | typing.SupportsIndex,
        busy: typing.SupportsFloat | typing.SupportsIndex | None = None,
        stolen: typing.SupportsFloat | typing.SupportsIndex | None = None,
        waited: typing.SupportsFloat | typing.SupportsIndex | None = None,
        throttled: typing.SupportsFloat | typing.SupportsIndex | None = None,
        cores: typing.SupportsInt | typing.SupportsIndex = 1,
    ) -> None: ...
    @property
    def busy(self) -> float | None: ...
    @property
    def cores(self) -> int: ...
    @property
    def own(self) -> float: ...
    @property
    def stolen(self) -> float | None: ...
    @property
    def throttled(self) -> float | None: ...
    @property
    def waited(self) -> float | None: ...
    @property
    def wall(self) -> float: ...

class LoadWatch:
    """
    Says of stretches of time whether other programs disturbed them.
    """
    def __init__(self) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> bool:
        """
        Whether the stretch since begin() was disturbed.
        """
    @property
    def disturbed(self) -> bool:
        """
        Whether what was measured is not to be trusted.
        """
    @property
    def evidence(self) -> str: ...
    @property
    def share(self) -> float:
        """
        Of the seconds watched, the disturbed ones.
        """

class Offer:
    """
    A strategy that a workload has.
    """
    def __init__(
        self,
        name: str,
        *,
        kind: typing.Literal["exact", "tolerance", "precision", "trade"],
        group: str,
        requires: collections.abc.Sequence[str],
        interacts: collections.abc.Sequence[str],
        part_of: collections.abc.Sequence[str],
        renewed_by: collections.abc.Sequence[str],
        settle: typing.SupportsInt | typing.SupportsIndex,
        cost: str,
        hopeful: typing.SupportsFloat | typing.SupportsIndex,
        expected_speedup: typing.SupportsFloat | typing.SupportsIndex,
        feeds: bool,
        refused: str = "",
    ) -> None: ...

class Workload:
    """
    What a tuner must be given: a training step that it can take, time, change, put back and verify. See oxytorch/tune/workload.h.
    """
    def __init__(self) -> None: ...

class Requirement:
    """
    A setting of the caller's that wants a strategy active.
    """
    def __init__(self, setting: str, strategies: collections.abc.Sequence[str]) -> None: ...

class TunerOptions:
    """
    What a tuner is asked for.
    """
    def __init__(
        self,
        *,
        level: str = "advanced",
        steps_planned: typing.SupportsInt | typing.SupportsIndex = 10000,
        budget: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
        exclude: collections.abc.Sequence[str] = [],
        required: collections.abc.Sequence[Requirement] = [],
    ) -> None: ...

class Tuner:
    """
    Finds what makes a workload's step faster, proves it, and says so in a certificate.
    """
    def __init__(self, workload: Workload, key: CertificateKey, options: TunerOptions) -> None: ...
    def activate(self, certificate: Certificate) -> None:
        """
        Make active what it accepted; what cannot be is noted in it.
        """
    def activate_required(self, certificate: Certificate) -> list[str]:
        """
        Make active what settings ask for, and note it; the names that are.
        """
    def seconds(self) -> float:
        """
        Since it was made.
        """
    def tune(self, store: CertificateStore | None) -> Certificate:
        """
        The certificate, remembered or measured; nothing is active at the end and the state is restored.
        """

class SideFailed(Exception):
    pass

class Timing:
    """
    Whole steps of a workload timed under two combinations of strategies.
    """
    def __init__(self, workload: Workload) -> None: ...
    def baseline(self) -> None: ...
    def compare(
        self, incumbent: collections.abc.Sequence[str], challenger: collections.abc.Sequence[str], options: DuelOptions
    ) -> tuple[DuelResult, float]:
        """
        The result, and the seconds that turning the challenger on took once.
        """
    def recover(self) -> None:
        """
        Revert everything and restore the state.
        """

class Watched:
    """
    The run that a watch is over: activate(names), compare().
    """
    def __init__(self) -> None: ...

class Watch:
    """
    Keeps a guard over a certified run, and takes its strategies back at its word.
    """
    def __init__(
        self,
        run: Watched,
        certificate: Certificate,
        store: CertificateStore,
        *,
        names: collections.abc.Sequence[str],
        always: collections.abc.Sequence[str],
        kind: typing.Literal["exact", "tolerance", "precision", "trade"],
        drawn_by: typing.SupportsInt | typing.SupportsIndex,
        only_when_doubted: bool,
    ) -> None: ...
    def after(self, seconds: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def before(self) -> bool:
        """
        Whether the watch goes on, with what is wanted for the next step active.
        """
    def doubt(self) -> None: ...
    @property
    def checks(self) -> bool:
        """
        Whether each step is to be timed to its end.
        """
    @property
    def over(self) -> bool: ...
    @property
    def reason(self) -> str:
        """
        What the last check showed.
        """
    @property
    def step(self) -> int: ...

class OperatorReport:
    """
    What became of one native operator.
    """
    @property
    def installed(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def reason(self) -> str: ...

class NativeOperators:
    """
    Faster CPU operators with the bits of torch's own.
    """
    @staticmethod
    def names() -> list[str]: ...
    def __init__(self) -> None: ...
    def install(self, names: collections.abc.Sequence[str] = []) -> list[OperatorReport]: ...
    def installed(self) -> list[str]: ...
    def uninstall(self) -> None: ...

class OwnRandom:
    """
    Random numbers of this thread alone, from where the default generator stands.
    """
    def __init__(self) -> None: ...
    def close(self) -> None:
        """
        Draw from the default generator again.
        """
    def rewind(self) -> None:
        """
        Let the same numbers come once more.
        """

def adam_step(
    params: collections.abc.Sequence[torch.Tensor],
    grads: collections.abc.Sequence[torch.Tensor],
    exp_avgs: collections.abc.Sequence[torch.Tensor],
    exp_avg_sqs: collections.abc.Sequence[torch.Tensor],
    max_exp_avg_sqs: collections.abc.Sequence[torch.Tensor],
    steps: collections.abc.Sequence[torch.Tensor],
    *,
    lr: typing.SupportsFloat | typing.SupportsIndex,
    beta1: typing.SupportsFloat | typing.SupportsIndex,
    beta2: typing.SupportsFloat | typing.SupportsIndex,
    eps: typing.SupportsFloat | typing.SupportsIndex,
    weight_decay: typing.SupportsFloat | typing.SupportsIndex,
    decoupled_weight_decay: bool,
    maximize: bool,
) -> None:
    """
    A step of torch.optim.Adam or AdamW with the bits of its loop over CPU tensors; `steps` go up by one.
    """

def allows(level: str, kind: typing.Literal["exact", "tolerance", "precision", "trade"]) -> bool:
    """
    Whether a level allows a kind of change.
    """

def block_steps(step_seconds: typing.SupportsFloat | typing.SupportsIndex) -> int:
    """
    Steps that are measured in a row.
    """

def gradients_apart(
    with_changes: collections.abc.Sequence[torch.Tensor | None], without: collections.abc.Sequence[torch.Tensor | None]
) -> tuple[float, float]:
    """
    How far gradients are from those without changes: of the worst tensor, and of a factor common to all.
    """

def hardware_key(root: str = "/") -> str:
    """
    The processor's part of CertificateKey.hardware.
    """

def most_heap_speedup(
    faults: typing.SupportsFloat | typing.SupportsIndex, step_seconds: typing.SupportsFloat | typing.SupportsIndex
) -> float:
    """
    Most that a step can gain where freed memory is kept for the next one.
    """

def native_step_differs() -> str:
    """
    Why the native steps do not have the bits of this torch's; empty where they do.
    """

def read_load(root: str = "/") -> LoadSample: ...
def set_load_source(source: collections.abc.Callable[[], LoadSample]) -> None:
    """
    Where LoadWatch has its samples from; None: here.
    """

def settle_steps(
    wanted: typing.SupportsInt | typing.SupportsIndex, step_seconds: typing.SupportsFloat | typing.SupportsIndex
) -> int:
    """
    Of these steps after a switch, those that are needed.
    """

def sgd_step(
    params: collections.abc.Sequence[torch.Tensor],
    grads: collections.abc.Sequence[torch.Tensor],
    momentum_buffers: collections.abc.Sequence[torch.Tensor],
    *,
    lr: typing.SupportsFloat | typing.SupportsIndex,
    momentum: typing.SupportsFloat | typing.SupportsIndex,
    dampening: typing.SupportsFloat | typing.SupportsIndex,
    weight_decay: typing.SupportsFloat | typing.SupportsIndex,
    nesterov: bool,
    maximize: bool,
) -> None:
    """
    A step of torch.optim.SGD with the bits of its loop over CPU tensors.
    """

def why_not_trusted(certificate: Certificate, now: StepNow) -> str:
    """
    Why a remembered certificate is to be measured anew; empty where it may be trusted.
    """

def worth_another_look(certificate: Certificate) -> str:
    """
    Where nothing is active by it, the strategy to try again; or empty.
    """

BASELINE_BLOCKS: int
