"""
Paired test, search, certificate and guard.
"""

from __future__ import annotations
import collections.abc
import os
import oxytorch._C.base
import torch
import typing

__all__: list[str] = [
    "Certificate",
    "CertificateEntry",
    "CertificateKey",
    "CertificateStore",
    "ChangeMeter",
    "ComparedStep",
    "DeferredGates",
    "DeferredLogits",
    "DeferredNorms",
    "DeferredScores",
    "DeferredSums",
    "GatesScope",
    "Interval",
    "KeepDouble",
    "LoadSample",
    "LogitsScope",
    "NamedChange",
    "NativeOperators",
    "NormsScope",
    "Nudge",
    "Offer",
    "OperatorReport",
    "OwnRandom",
    "PairedTestOptions",
    "PairedTestResult",
    "Requirement",
    "ScoresScope",
    "SettingLines",
    "SideFailed",
    "StepJudge",
    "SumsScope",
    "Timing",
    "Tuner",
    "TunerOptions",
    "ValueErrors",
    "ValueMeter",
    "Watch",
    "Watched",
    "Workload",
    "activate",
    "acts_on_update",
    "adam_step",
    "allows",
    "asked_of",
    "batches_of_trial",
    "clip_factor",
    "closures_unplanned",
    "decided_by",
    "draw_steps",
    "draws_fault",
    "end_fault",
    "fitted_anew",
    "generators_fault",
    "gradients_apart",
    "hardware_key",
    "has_budget",
    "hindrance",
    "losses_fault",
    "may_fit_again",
    "native_step_differs",
    "norm_error",
    "planned_steps",
    "quotient_allowance",
    "read_load",
    "set_load_source",
    "sgd_step",
    "slowdown_left",
    "tighter_budget",
    "tuning_of_trainer",
    "update_faults",
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

class PairedTestOptions:
    """
    How sure a paired test must be, and how long it may take.
    """
    @staticmethod
    def canary(seed: typing.SupportsInt | typing.SupportsIndex) -> PairedTestOptions:
        """
        Of a remembered certificate.
        """
    @staticmethod
    def conclusion(seed: typing.SupportsInt | typing.SupportsIndex) -> PairedTestOptions:
        """
        Of everything against nothing at the end.
        """
    @staticmethod
    def member(seed: typing.SupportsInt | typing.SupportsIndex) -> PairedTestOptions:
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
        patience: typing.SupportsInt | typing.SupportsIndex = 4,
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
    def patience(self) -> int: ...
    @patience.setter
    def patience(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
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

class PairedTestResult:
    """
    What a paired test has shown; speedup is incumbent over challenger.
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

class CertificateEntry:
    """
    What became of one strategy. Containers are copied in and out.
    """

    cost: str
    kind: typing.Literal["exact", "tolerance", "precision", "trade"]
    reason: str
    speedup: Interval | None
    status: typing.Literal["accepted", "rejected", "refused", "failed", "skipped", "rolled back"]
    strategy: str
    @typing.overload
    def __init__(self) -> None: ...
    @typing.overload
    def __init__(
        self,
        strategy: str,
        kind: typing.Literal["exact", "tolerance", "precision", "trade"],
        status: typing.Literal["accepted", "rejected", "refused", "failed", "skipped", "rolled back"],
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
    def given_peak_bytes(self) -> int | None: ...
    @given_peak_bytes.setter
    def given_peak_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...
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
    def tuned_peak_bytes(self) -> int | None: ...
    @tuned_peak_bytes.setter
    def tuned_peak_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...
    @property
    def tuned_seconds(self) -> float: ...
    @tuned_seconds.setter
    def tuned_seconds(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def tuning_peak_bytes(self) -> int | None: ...
    @tuning_peak_bytes.setter
    def tuning_peak_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...
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
        max_speedup: typing.SupportsFloat | typing.SupportsIndex,
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
    @property
    def setting(self) -> str: ...
    @property
    def strategies(self) -> list[str]:
        """
        Any one of these satisfies it; the first that applies.
        """

class SettingLines:
    """
    What the lines of a trainer's report are made of.
    """
    def __init__(
        self,
        *,
        config: oxytorch._C.base.PerformanceConfig,
        certificate: Certificate,
        offers: collections.abc.Sequence[Offer],
        refused: collections.abc.Mapping[str, str],
        active: collections.abc.Sequence[str],
        required: collections.abc.Sequence[str],
        untried: str,
        slow: str = "",
    ) -> None: ...
    def active_as(
        self, name: str, strategies: collections.abc.Sequence[str]
    ) -> tuple[str, str, str, str, float | None]:
        """
        The same of what is active, whatever it is called.
        """
    def beside_settings(self) -> list[tuple[str, str, str, str, float | None]]:
        """
        The same of each that is active and belongs to no setting.
        """
    def of(self, setting: str) -> tuple[str, str, str, str, float | None]:
        """
        Name, state, reason, cost and gain of a setting that strategies bring about.
        """
    def of_optimizer(
        self, *, is_own: bool, replaces: bool, state: str, active: collections.abc.Sequence[str]
    ) -> list[tuple[str, str, str, str, float | None]]:
        """
        The same of step_tail and optimizer_state. See oxytorch/trainer/report_lines.h.
        """

class TunerOptions:
    """
    What a tuner is asked for.
    """
    def __init__(
        self,
        *,
        level: str = "advanced",
        steps_planned: typing.SupportsInt | typing.SupportsIndex = 10000,
        tune_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
        exclude: collections.abc.Sequence[str] = [],
        required: collections.abc.Sequence[Requirement] = [],
        config: oxytorch._C.base.PerformanceConfig | None = None,
    ) -> None:
        """
        `config`: of which goal, max_slowdown and max_growth count.
        """
    @property
    def max_growth(self) -> float: ...
    @property
    def max_slowdown(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def steps_planned(self) -> int: ...

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
    def baseline(self) -> None:
        """
        Time a step as given, before anything is tried.
        """
    def compare(
        self,
        incumbent: collections.abc.Sequence[str],
        challenger: collections.abc.Sequence[str],
        options: PairedTestOptions,
    ) -> tuple[PairedTestResult, float]:
        """
        The result, and the seconds that turning the challenger on took once.
        """
    def recover(self) -> None:
        """
        Revert everything and restore the state.
        """

class Watched:
    """
    The run that a watch is over: activate(names), compare(first), has_budget().
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

class ValueErrors:
    """
    How far one step was from what it should be.
    """
    def __init__(self) -> None: ...
    @property
    def loss(self) -> float: ...
    @property
    def loss_size(self) -> float: ...
    @property
    def slope(self) -> float: ...
    @property
    def whole(self) -> float: ...
    @property
    def worst(self) -> float:
        """
        Largest error of a gradient, relative.
        """
    @property
    def wrong(self) -> list[str]:
        """
        What is missing, of another shape or not finite.
        """

class ValueMeter:
    """
    Measures loss, gradients and buffers of one step, one tensor after the other.
    """
    def __init__(
        self, loss: typing.SupportsFloat | typing.SupportsIndex, right: typing.SupportsFloat | typing.SupportsIndex
    ) -> None: ...
    def buffer(
        self, name: str, given: torch.Tensor | None, right: torch.Tensor, before: torch.Tensor | None
    ) -> None: ...
    def found(self) -> ValueErrors: ...
    def gradient(
        self,
        name: str,
        given: torch.Tensor | None,
        factor: typing.SupportsFloat | typing.SupportsIndex,
        right: torch.Tensor | None,
    ) -> None: ...
    def stepped(self, given: bool, right: bool) -> None:
        """
        Whether the optimizer is stepped on one side alone.
        """

class ComparedStep:
    """
    A step of a candidate that the judge has taken again; see oxytorch/tune/step_judge.h.
    """
    def __init__(self) -> None: ...

class StepJudge:
    """
    Judges loss, gradients and buffers of a candidate's steps; see oxytorch/tune/step_judge.h.
    """
    def __init__(self, usual: ValueErrors, *, reduced_precision: bool, has_float64: bool, short_look: bool) -> None: ...
    def evidence(self) -> dict[str, float]:
        """
        Figures of the steps so far.
        """
    def fault(self, step: ComparedStep, wide: bool) -> str:
        """
        What is wrong with a step; empty where nothing is.
        """

class KeepDouble:
    """
    Inside, tensors of float64 stay so where they are cast; see oxytorch/tune/keep_double.h.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self) -> None: ...

class Nudge:
    """
    The way to a state apart; see oxytorch/tune/kinks.h.
    """
    def __init__(
        self,
        parameters: collections.abc.Sequence[torch.Tensor],
        reduced_precision: bool,
        step: typing.SupportsInt | typing.SupportsIndex,
        state: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def moved(self, parameter: torch.Tensor) -> torch.Tensor:
        """
        The next parameter, moved.
        """

class NamedChange:
    """
    The change of a parameter or of its optimizer state in one step.
    """
    def __init__(
        self,
        name: str,
        error: typing.SupportsFloat | typing.SupportsIndex,
        size: typing.SupportsFloat | typing.SupportsIndex,
        unit: typing.SupportsFloat | typing.SupportsIndex,
        slope: typing.SupportsFloat | typing.SupportsIndex,
        worst: typing.SupportsFloat | typing.SupportsIndex,
        upwards: typing.SupportsFloat | typing.SupportsIndex,
        outwards: typing.SupportsFloat | typing.SupportsIndex,
        bias_error: typing.SupportsFloat | typing.SupportsIndex,
        ratio: typing.SupportsFloat | typing.SupportsIndex,
        count: typing.SupportsInt | typing.SupportsIndex,
        state: bool,
    ) -> None: ...

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
    Faster CPU operators behind torch's dispatcher.
    """
    @staticmethod
    def composed_attentions() -> int:
        """
        Calls of composed_attention that were served so far.
        """
    @staticmethod
    def exact_names() -> list[str]:
        """
        Operators with torch's bits.
        """
    @staticmethod
    def handed_on() -> int:
        """
        Calls that went to torch's kernels so far.
        """
    @staticmethod
    def is_worth_a_trial(
        embedding_elements: typing.SupportsInt | typing.SupportsIndex,
        parameter_elements: typing.SupportsInt | typing.SupportsIndex,
        accumulates: bool,
    ) -> bool:
        """
        Whether gradients of embeddings alone are worth a trial.
        """
    @staticmethod
    def joined_relus() -> int:
        """
        Calls of relu that were computed with their linear layer so far.
        """
    @staticmethod
    def names() -> list[str]: ...
    @staticmethod
    def serves_convolution(weight: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> bool:
        """
        Whether the gradient of a convolution's weight of these sizes may be computed here.
        """
    def __init__(self) -> None: ...
    def install(self, names: collections.abc.Sequence[str] = []) -> list[OperatorReport]: ...
    def installed(self) -> list[str]: ...
    def uninstall(self) -> None: ...

class LogitsScope:
    """
    Defers on this thread while it is entered.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self) -> None: ...

class DeferredLogits:
    """
    Logits that are computed when something but their loss asks.
    """
    @staticmethod
    def before_weights_change() -> None:
        """
        Compute the values of deferred tensors that live.
        """
    @staticmethod
    def computed() -> int:
        """
        Deferred tensors whose values were computed after all.
        """
    @staticmethod
    def losses() -> int:
        """
        Losses computed without logits, so far.
        """
    @staticmethod
    def serves(device: torch.device) -> bool:
        """
        Whether layers on the device can be deferred.
        """
    def __init__(self, device: torch.device = ...) -> None: ...
    def scope(self) -> LogitsScope:
        """
        Defer on this thread: a context manager.
        """

class NormsScope:
    """
    Defers on this thread while it is entered.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self) -> None: ...

class DeferredNorms:
    """
    Batch normalization that waits for what follows it.
    """
    @staticmethod
    def joined() -> int:
        """
        Additions, ReLUs and poolings that joined one, so far.
        """
    @staticmethod
    def layers() -> int:
        """
        Layers that were taken, so far.
        """
    def __init__(self) -> None: ...
    def scope(self) -> NormsScope:
        """
        Defer on this thread: a context manager.
        """

class SumsScope:
    """
    Defers on this thread while it is entered.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self) -> None: ...

class DeferredSums:
    """
    Sums and dropout that wait for the normalization that follows them.
    """
    @staticmethod
    def joined() -> int:
        """
        Normalizations that one was computed with, so far.
        """
    @staticmethod
    def narrowed() -> int:
        """
        Normalizations that were written in the 16 bits in which a layer takes them, so far.
        """
    @staticmethod
    def serves(device: torch.device) -> bool:
        """
        Whether norms on that device are taken.
        """
    @staticmethod
    def sums() -> int:
        """
        Dropouts and additions that were taken, so far.
        """
    @staticmethod
    def written() -> int:
        """
        RMS normalizations that a model wrote out and that were computed as one, so far.
        """
    def __init__(self) -> None: ...
    def scope(self) -> SumsScope:
        """
        Defer on this thread: a context manager.
        """

class ScoresScope:
    """
    Defers on this thread while it is entered.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self) -> None: ...

class DeferredScores:
    """
    Scores of attention that wait for the product that ends it.
    """
    @staticmethod
    def joined() -> int:
        """
        Attention that was computed as one, so far.
        """
    @staticmethod
    def scores() -> int:
        """
        Products of queries and keys that were taken, so far.
        """
    @staticmethod
    def serves(device: torch.device) -> bool:
        """
        Whether attention on that device is taken.
        """
    def __init__(self) -> None: ...
    def scope(self) -> ScoresScope:
        """
        Defer on this thread: a context manager.
        """

class GatesScope:
    """
    Defers on this thread while it is entered.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self) -> None: ...

class DeferredGates:
    """
    Activations that wait for the product that follows them.
    """
    @staticmethod
    def activations() -> int:
        """
        Activations that were taken, so far.
        """
    @staticmethod
    def joined() -> int:
        """
        Products that one was computed with, so far.
        """
    def __init__(self) -> None: ...
    def scope(self) -> GatesScope:
        """
        Defer on this thread: a context manager.
        """

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

def activate(
    config: oxytorch._C.base.PerformanceConfig,
    offers: collections.abc.Sequence[Offer],
    skipped: collections.abc.Mapping[str, str],
    required: collections.abc.Sequence[Requirement],
    refused: collections.abc.Mapping[str, str],
    is_active: collections.abc.Callable[[str], bool],
    put: collections.abc.Callable[[str], str],
) -> tuple[dict[str, str], dict[str, str]]:
    """
    Makes active what a trainer's settings require, by put(), which says why it cannot; skipped and refused then.
    """

def acts_on_update(group: str) -> bool:
    """
    Whether strategies of a group change the optimizer's update alone.
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

def asked_of(
    config: oxytorch._C.base.PerformanceConfig,
    offers: collections.abc.Sequence[Offer],
    excluded: collections.abc.Sequence[str],
    *,
    by_trainer: bool,
) -> tuple[dict[str, str], list[Requirement], dict[str, str]]:
    """
    Why strategies are not tried, by name; what is to be active whatever it gains; why settings are ruled out.
    """

def batches_of_trial(accumulation: typing.SupportsInt | typing.SupportsIndex) -> int:
    """
    Batches of a step that is tried, where a step of the run is of `accumulation`.
    """

def clip_factor(
    gradients: collections.abc.Sequence[torch.Tensor | None], norm: typing.SupportsFloat | typing.SupportsIndex
) -> float:
    """
    By what gradients are multiplied where they are clipped by norm; 1 where they are not above it.
    """

def closures_unplanned() -> str:
    """
    Why gradient_checkpointing can have no effect on steps that are closures.
    """

def decided_by(
    config: oxytorch._C.base.PerformanceConfig,
    strategies: collections.abc.Sequence[str],
    steps_planned: typing.SupportsInt | typing.SupportsIndex,
    *,
    by_trainer: bool = False,
) -> str:
    """
    What decides which strategies are kept, for a certificate's key.
    """

def draw_steps(
    count: typing.SupportsInt | typing.SupportsIndex,
    dense: typing.SupportsInt | typing.SupportsIndex,
    drawn_by: typing.SupportsInt | typing.SupportsIndex,
) -> tuple[list[int], set[int]]:
    """
    Steps that are compared, and those in float64.
    """

def draws_fault(
    losses: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    spreads: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    usual_losses: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    usual_spreads: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
) -> str:
    """
    What is wrong with random numbers that were drawn, against the step as given; empty where nothing.
    """

def end_fault(
    steps: typing.SupportsInt | typing.SupportsIndex,
    end: typing.SupportsFloat | typing.SupportsIndex,
    usual: typing.SupportsFloat | typing.SupportsIndex,
    first: typing.SupportsFloat | typing.SupportsIndex,
    as_given: collections.abc.Callable[[], list[float]],
    reduced: collections.abc.Callable[[], float] | None,
) -> tuple[str, dict[str, float]]:
    """
    Why a run may not end there, empty where it may, and figures; other runs are taken only where they decide.
    """

def fitted_anew(step: typing.SupportsInt | typing.SupportsIndex) -> str:
    """
    What its line begins with once a step has run out of memory and was fitted anew.
    """

def generators_fault(start: str, found: collections.abc.Sequence[str], usual: collections.abc.Sequence[str]) -> str:
    """
    Whether generators stand still where they move as given, or the reverse; empty where neither.
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

def has_budget(config: oxytorch._C.base.PerformanceConfig, recomputes: bool | None) -> bool:
    """
    Whether steps are held to a budget of memory; recomputes: whether blocks are run again, None where not planned.
    """

def hindrance(
    *, calibrate: bool, is_closure: bool, is_iterator: bool, has_hooks: bool, is_distributed: bool, has_lazy: bool
) -> str:
    """
    Why nothing may be tried on a trainer's first batch; empty where nothing speaks against it.
    """

def losses_fault(
    losses: collections.abc.Sequence[torch.Tensor], as_given: collections.abc.Sequence[torch.Tensor]
) -> str:
    """
    What the losses of steps show by themselves, beside those as given; empty where nothing.
    """

def may_fit_again(checkpointing: str, fits: typing.SupportsInt | typing.SupportsIndex) -> bool:
    """
    Whether a step that ran out of memory is fitted again, after `fits` times.
    """

def native_step_differs() -> str:
    """
    Why the native steps do not have the bits of this torch's; empty where they do.
    """

def norm_error(
    gradients: collections.abc.Sequence[torch.Tensor | None], norm: typing.SupportsFloat | typing.SupportsIndex
) -> float:
    """
    How far torch's own norm of gradients is from that in float64, relative.
    """

def planned_steps(
    config: oxytorch._C.base.PerformanceConfig, otherwise: typing.SupportsInt | typing.SupportsIndex = 0
) -> int:
    """
    Length of the run, as far as the configuration says it; else `otherwise`, where that is above 0.
    """

def quotient_allowance(
    kind: typing.Literal["exact", "tolerance", "precision", "trade"], usual: typing.SupportsFloat | typing.SupportsIndex
) -> float:
    """
    How far a gradient may be from a difference quotient of the loss, relative.
    """

def read_load(root: str = "/") -> LoadSample: ...
def set_load_source(source: collections.abc.Callable[[], LoadSample]) -> None:
    """
    Where LoadWatch has its samples from; None: here.
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

def slowdown_left(certificate: Certificate, max_slowdown: typing.SupportsFloat | typing.SupportsIndex) -> float:
    """
    How many times as long as now a step may take, where it may take max_slowdown times as long as given.
    """

def tighter_budget(peak: typing.SupportsInt | typing.SupportsIndex) -> int:
    """
    Bytes to fit a step to which ran out of memory although its plan had been measured to peak at `peak`.
    """

def tuning_of_trainer(
    config: oxytorch._C.base.PerformanceConfig,
    length: typing.SupportsInt | typing.SupportsIndex,
    offers: collections.abc.Sequence[Offer],
) -> TunerOptions:
    """
    What a trainer asks of a tuner at its first batch. See oxytorch/tune/asked.h.
    """

def update_faults(
    found: collections.abc.Sequence[NamedChange],
    base: collections.abc.Sequence[NamedChange],
    clipping: collections.abc.Mapping[str, typing.SupportsFloat | typing.SupportsIndex],
    loose_state: bool,
) -> tuple[list[str], float]:
    """
    What of one step's update is further off than it may be, and the largest error over what is allowed.
    """
