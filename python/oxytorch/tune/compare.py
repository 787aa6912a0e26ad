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
from .record import Call, State, Step, load, take_one
from .reference import Truth, compared, measure, moved, taken_again, truth
from .update import clip

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Comparison", "Kept", "Look"]


Counters = Mapping[tuple[str, Any], Any]


@dataclass(frozen=True)
class Kept:
    """A step of a candidate with where it began, and the buffers that it left."""

    step: Step
    before: State
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Look:
    """How steps are compared.

    Attributes
    ----------
    dtype : torch.dtype, optional
        Of the autocast that is the yardstick; None: the step as given is.
    quiet : bool
        With every dropout at zero.
    wide : container of int
        Steps that are taken in float64 whatever the cheap comparison says.
    small : float
        Errors below it, relative, are let pass.
    active : sequence of str
        The candidate: what was active in those steps.
    """

    dtype: torch.dtype | None
    quiet: bool
    wide: Container[int] = ()
    small: float = 0.0
    active: Sequence[str] = ()


@dataclass
class Comparison:
    """Takes each step once more, as given, from where the candidate stood; what stands out is taken in float64 too.

    The step as given in float32 is a reference good to 1e-6, at the price of one step; one in float64 costs three to
    four. So all steps are compared with the first, by bounds that float64 gave at the start, and the second decides
    where those are exceeded, and is asked at some steps whatever the first says.

    Attributes
    ----------
    begin : callable
        Brings the state as held, with these active.
    clip_norm : float, optional
        Of the run as given.
    no_truth : str
        Why the model does not run in float64; empty where it does.
    errors : dict of int to ValueErrors
        From float64, by step, of the candidate last compared.
    kinks : KnownKinks
        Of its steps.
    """

    run: Run
    roots: Sequence[tuple[str, Any]]
    begin: Callable[[Sequence[str]], None]
    clip_norm: float | None
    no_truth: str = ""
    errors: dict[int, _native.ValueErrors] = field(default_factory=dict)
    kinks: _native.KnownKinks = field(default_factory=_native.KnownKinks)
    _start: State | None = None
    _first: dict[bool, Sequence[Call]] = field(default_factory=dict)  # calls of the first step as given
    _counters: dict[bool, Sequence[Counters]] = field(default_factory=dict)
    _truths: dict[bool, Truth | None] = field(default_factory=dict)
    _usual: dict[tuple[bool, torch.dtype | None], _native.ValueErrors] = field(default_factory=dict)

    def start_from(self, start: State, quiet: bool, counters: Sequence[Counters], first: Sequence[Call]) -> None:
        """Say where every check begins, what the counters of the run as given are before each step, its first calls."""
        self._start = start
        self._counters[quiet] = counters
        self._first[quiet] = first

    def forget_candidate(self) -> None:
        """Begin with another one, or with this one again."""
        self.errors.clear()
        self.kinks = _native.KnownKinks()

    def rng_after_first(self) -> str | None:
        """Hash of the random states after the first step in float64, where there is one."""
        right = self._first_truth(False)
        return None if right is None else right.rng

    def usual(self, look: Look) -> _native.ValueErrors:
        """How far off the yardstick is itself at the start."""
        key = (look.quiet, look.dtype)
        if key not in self._usual:
            right = self._first_truth(look.quiet)
            self.begin(())
            with self._scope(look.quiet, None):
                if right is None and look.dtype is not None:
                    right = self._again(self._started, 0, look.quiet, self._first[look.quiet])
            if right is None:
                self._usual[key] = _native.ValueErrors()
            else:
                self._usual[key] = self._errors_of_yardstick(self._started, 0, right, look, self._first[look.quiet])
        return self._usual[key]

    def fault(self, kept: Sequence[Kept], look: Look) -> tuple[int, str] | None:
        """Return the first of these steps that is further off than it may be, and how; None where none is."""
        usual = self.usual(look)
        allowance = "reduced" if look.dtype is not None else "unknown" if self.no_truth else "float32"
        self.begin(())
        for one in kept:
            index = one.step.index
            excess = self._by_the_step(one, look, usual, allowance)
            known = not self.no_truth and bool(one.step.calls)
            if known and (excess or index in look.wide):
                excess = self._by_float64(one, look, usual, allowance)
            if excess:
                return index, excess[0].words
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

    def _again(self, before: State, index: int, quiet: bool, taken: Sequence[Call]) -> Truth:
        batch = self.run.batches[index % len(self.run.batches)]
        return taken_again(self.run, self.roots, before, batch, self._counters[quiet][index], taken)

    def _wide(self, before: State, index: int, quiet: bool, taken: Sequence[Call]) -> Truth:
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
        self, before: State, index: int, right: Truth, look: Look, taken: Sequence[Call]
    ) -> _native.ValueErrors:
        with self.stock(look.dtype, quiet=look.quiet):
            again = self._again(before, index, look.quiet, taken)
        loss = torch.tensor(again.loss, dtype=torch.float64)
        step = Step(index, before, loss, again.calls)
        return measure(self.run, step, right, again.buffers, None)

    def _by_the_step(self, one: Kept, look: Look, usual: _native.ValueErrors, allowance: str) -> list[_native.Excess]:
        """Hold it against the step as given; what the kinks of steps before excuse is none of the excess."""
        index = one.step.index
        with self._scope(look.quiet, None):
            again = self._again(one.before, index, look.quiet, one.step.calls)
            found = measure(self.run, one.step, again, one.buffers, self.clip_norm)
            excess = _above(_native.values_beyond(found, usual, allowance), look.small)
            stepped = bool(one.step.calls) and not found.wrong
            if excess and stepped and index not in look.wide and self.kinks.speak():
                smooth = self.kinks.unexplained(self._gradients(one.step.calls), again.grads)
                excess = _above(
                    _native.values_beyond(self._errors_of(one, again, smooth), usual, allowance), look.small
                )
            return excess

    # -- in float64 ------------------------------------------------------------------------------------------------

    def _by_float64(self, one: Kept, look: Look, usual: _native.ValueErrors, allowance: str) -> list[_native.Excess]:
        index = one.step.index
        self.begin(())
        alone = index == 0 and len(self.run.slots) == 1  # every check begins with the same values
        known = self._truths.get(look.quiet) if alone else None
        right = known or self._wide(one.before, index, look.quiet, one.step.calls)
        found = self.errors[index] = measure(self.run, one.step, right, one.buffers, self.clip_norm)
        excess = _above(_native.values_beyond(found, usual, allowance), look.small)
        if not excess:
            return []
        here = self._errors_of_yardstick(one.before, index, right, look, one.step.calls)
        excess = _above(_native.values_beyond(found, here, allowance), look.small)
        if not excess or found.wrong:
            return excess
        return _native.values_beyond(self._without_kinks(one, right, look), here, allowance)

    def _without_kinks(self, one: Kept, right: Truth, look: Look) -> _native.ValueErrors:
        """Errors of the step less what of them is a rounding across a kink; see oxytorch/tune/kinks.h."""
        index = one.step.index
        kinks = _native.Kinks(self._gradients(one.step.calls), right.grads)
        for state in range(_native.kink_states):
            nudge = _native.Nudge(list(self.run.params), look.dtype is not None, index, state)
            before = moved(one.before, nudge)
            self.begin(look.active)
            with still(self.run) if look.quiet else nullcontext():
                load(self.run, self.roots, before, self._counters[look.quiet][index])
                calls = take_one(self.run, self.roots, index, before=before).calls
            self.begin(())
            with self._scope(look.quiet, None):
                kinks.add(self._gradients(calls), self._again(before, index, look.quiet, calls).grads)
        self.begin(())
        self.kinks.learn(kinks)
        return self._errors_of(one, right, kinks.unexplained())

    def _errors_of(self, one: Kept, right: Truth, grads: list[Tensor | None]) -> _native.ValueErrors:
        """Errors of the step with these gradients, as its optimizers use them."""
        left = Step(one.step.index, one.step.before, one.step.loss, replace(right, grads=grads).calls)
        return measure(self.run, left, right, one.buffers, None)

    def _gradients(self, calls: list[Call]) -> list[Tensor | None]:
        """Those that the optimizers use."""
        norm = self.clip_norm
        each = (call.grads if norm is None else clip(call.grads, norm) for call in compared(self.run, calls))
        return [grad for grads in each for grad in grads]


def _above(excess: list[_native.Excess], small: float) -> list[_native.Excess]:
    return [one for one in excess if not one.relative < small]
