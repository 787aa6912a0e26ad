"""Steps of a candidate against the same steps as given: each cheaply, in float64 where that decides or by lot."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._C import tune as _native
from .._C.memory import give_back_host_memory
from ..model.call import widened
from ..model.parking import rest
from .chance import still
from .record import OptimizerCall, State, Step, load, take_one
from .reference import Truth, compared, measure, moved, taken_again, truth
from .update import clip

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Comparison", "ComparisonOptions", "Kept"]


Counters = Mapping[tuple[str, Any], Any]


@dataclass(frozen=True)
class Kept:
    """A step of a candidate with where it began, and the buffers that it left."""

    step: Step
    before: State
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class ComparisonOptions:
    """How steps are compared.

    Attributes
    ----------
    dtype : torch.dtype, optional
        Of the autocast that is the yardstick; None: the step as given is.
    quiet : bool
        With every dropout at zero.
    wide : container of int
        Steps that are taken in float64 whatever the cheap comparison says.
    short : bool
        A comparison of one step, which lets small errors pass.
    active : sequence of str
        The candidate: what was active in those steps.
    """

    dtype: torch.dtype | None
    quiet: bool
    wide: Container[int] = ()
    short: bool = False
    active: Sequence[str] = ()


@dataclass
class Comparison:
    """Takes the steps of candidates once more, as given and in float64; the native judge asks for what it needs.

    Attributes
    ----------
    begin : callable
        Brings the state as held, with these active.
    clip_norm : float, optional
        Of the run as given.
    no_truth : str
        Why the model does not run in float64; empty where it does.
    """

    run: Run
    roots: Sequence[tuple[str, Any]]
    begin: Callable[[Sequence[str]], None]
    clip_norm: float | None
    no_truth: str = ""
    _start: State | None = None
    _first: dict[bool, Sequence[OptimizerCall]] = field(default_factory=dict)  # calls of the first step as given
    _counters: dict[bool, Sequence[Counters]] = field(default_factory=dict)
    _truths: dict[bool, Truth | None] = field(default_factory=dict)
    _usual: dict[tuple[bool, torch.dtype | None], _native.ValueErrors] = field(default_factory=dict)

    def start_from(
        self, start: State, quiet: bool, counters: Sequence[Counters], first: Sequence[OptimizerCall]
    ) -> None:
        """Say where every check begins, what the counters of the run as given are before each step, its first calls."""
        self._start = start
        self._counters[quiet] = counters
        self._first[quiet] = first

    def rng_after_first(self) -> str | None:
        """Hash of the random states after the first step in float64, where there is one."""
        right = self._first_truth(False)
        return None if right is None else right.rng

    def usual(self, options: ComparisonOptions) -> _native.ValueErrors:
        """How far off the yardstick is itself at the start."""
        key = (options.quiet, options.dtype)
        if key not in self._usual:
            right = self._first_truth(options.quiet)
            self.begin(())
            with self._scope(options.quiet, None):
                if right is None and options.dtype is not None:
                    right = self._again(self._started, 0, options.quiet, self._first[options.quiet])
            if right is None:
                self._usual[key] = _native.ValueErrors()
            else:
                self._usual[key] = self._errors_of_yardstick(
                    self._started, 0, right, options, self._first[options.quiet]
                )
        return self._usual[key]

    def judge(self, options: ComparisonOptions) -> _native.StepJudge:
        """Return a judge of one candidate's steps."""
        usual = self.usual(options)
        return _native.StepJudge(
            usual,
            reduced_precision=options.dtype is not None,
            has_float64=not self.no_truth,
            short_look=options.short,
        )

    def fault(
        self, kept: Sequence[Kept], options: ComparisonOptions, judge: _native.StepJudge
    ) -> tuple[int, str] | None:
        """Return the first of these steps that is further off than it may be, and how; None where none is."""
        self.begin(())
        for one in kept:
            if words := judge.fault(_Again(self, one, options), one.step.index in options.wide):
                return one.step.index, words
            rest()
            give_back_host_memory()
        return None

    # -- a step once more ------------------------------------------------------------------------------------------

    @property
    def _started(self) -> State:
        assert self._start is not None
        return self._start

    def _scope(self, quiet: bool, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        """Nothing of a strategy, or stock PyTorch at a lower precision."""
        call, device = self.run.call, self.run.device.type
        call.scope("stock", None if dtype is None else lambda: torch.autocast(device, dtype=dtype))
        call.outputs("stock", None if dtype is None else widened)
        return still(self.run) if quiet else nullcontext()

    @contextmanager
    def stock(self, dtype: torch.dtype | None, *, quiet: bool = False) -> Iterator[None]:
        """Have steps under stock autocast."""
        try:
            with self._scope(quiet, dtype):
                yield
        finally:
            self._scope(False, None)

    def _again(self, before: State, index: int, quiet: bool, taken: Sequence[OptimizerCall]) -> Truth:
        batch = self.run.batches[index % len(self.run.batches)]
        return taken_again(self.run, self.roots, before, batch, self._counters[quiet][index], taken)

    def _wide(self, before: State, index: int, quiet: bool, taken: Sequence[OptimizerCall]) -> Truth:
        batch = self.run.batches[index % len(self.run.batches)]
        with self._scope(quiet, None):
            return truth(self.run, self.roots, before, batch, self._counters[quiet][index], taken)

    def _first_truth(self, quiet: bool) -> Truth | None:
        if quiet not in self._truths and not self.no_truth:
            self._truths[quiet] = None
            self.begin(())
            try:
                self._truths[quiet] = self._wide(self._started, 0, quiet, self._first[quiet])
            except Exception as error:  # whatever the model throws in float64
                words = str(error).strip().splitlines()
                if "was not stepped" not in str(error):
                    self.no_truth = f"the model does not run in float64 ({words[0] if words else type(error).__name__})"
        return self._truths.get(quiet)

    def _errors_of_yardstick(
        self, before: State, index: int, right: Truth, options: ComparisonOptions, taken: Sequence[OptimizerCall]
    ) -> _native.ValueErrors:
        with self.stock(options.dtype, quiet=options.quiet):
            again = self._again(before, index, options.quiet, taken)
        loss = torch.tensor(again.loss, dtype=torch.float64)
        step = Step(index, before, loss, again.calls)
        return measure(self.run, step, right, again.buffers, None)

    def _gradients(self, calls: Sequence[OptimizerCall]) -> list[Tensor | None]:
        """Those that the optimizers use."""
        norm = self.clip_norm
        each = (call.grads if norm is None else clip(call.grads, norm) for call in compared(self.run, calls))
        return [grad for grads in each for grad in grads]


class _Again(_native.ComparedStep):
    """A step of a candidate, as the native judge asks for it; see oxytorch/tune/step_judge.h."""

    def __init__(self, comparison: Comparison, one: Kept, options: ComparisonOptions) -> None:
        super().__init__()
        self._comparison = comparison
        self._one = one
        self._options = options
        self._right: Truth | None = None

    @property
    def _reference(self) -> Truth:
        assert self._right is not None
        return self._right

    def gradients(self) -> list[Tensor | None]:
        return self._comparison._gradients(self._one.step.calls)

    def take_as_given(self) -> list[Tensor | None]:
        one, quiet = self._one, self._options.quiet
        with self._comparison._scope(quiet, None):
            self._right = self._comparison._again(one.before, one.step.index, quiet, one.step.calls)
        return self._right.grads

    def take_in_float64(self) -> list[Tensor | None]:
        one, quiet, comparison = self._one, self._options.quiet, self._comparison
        comparison.begin(())
        alone = one.step.index == 0 and len(comparison.run.slots) == 1  # every check begins with the same values
        known = comparison._truths.get(quiet) if alone else None
        self._right = known or comparison._wide(one.before, one.step.index, quiet, one.step.calls)
        return self._right.grads

    def errors(self) -> _native.ValueErrors:
        comparison = self._comparison
        return measure(comparison.run, self._one.step, self._reference, self._one.buffers, comparison.clip_norm)

    def errors_with(self, gradients: list[Tensor | None]) -> _native.ValueErrors:
        step = self._one.step
        calls = replace(self._reference, grads=gradients).calls
        left = Step(step.index, step.before, step.loss, calls)
        return measure(self._comparison.run, left, self._reference, self._one.buffers, None)

    def yardstick_errors(self) -> _native.ValueErrors:
        step = self._one.step
        return self._comparison._errors_of_yardstick(
            self._one.before, step.index, self._reference, self._options, step.calls
        )

    def take_apart(self, state: int) -> tuple[list[Tensor | None], list[Tensor | None]]:
        comparison, options, index = self._comparison, self._options, self._one.step.index
        run, counted = comparison.run, comparison._counters[options.quiet][index]
        nudge = _native.Nudge(list(run.params), options.dtype is not None, index, state)
        before = moved(self._one.before, nudge)
        comparison.begin(options.active)
        with still(run) if options.quiet else nullcontext():
            load(run, comparison.roots, before, counted)
            calls = take_one(run, comparison.roots, index, before=before).calls
        comparison.begin(())
        with comparison._scope(options.quiet, None):
            again = comparison._again(before, index, options.quiet, calls)
        return comparison._gradients(calls), again.grads
