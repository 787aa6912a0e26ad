"""Whether a strategy's numbers are what its kind promises: the same bits, or as near to float64 as is usual."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._C import tune as _native
from .._C.memory import give_back_host_memory
from ..model.graph import digest, digest_of_rng, value_digest
from ..model.parking import parkable_bytes, rest
from ..model.snapshot import Snapshot
from ..optim.slot import OptimizerSlot
from .chance import Draws, backward_error, draws, judge_draws, still
from .compare import Comparison, ComparisonOptions, Kept
from .ends import Ends
from .record import (
    OptimizerCall,
    State,
    copied,
    counters,
    digests,
    extras,
    names,
    rng_digest,
    settings,
    states,
    take,
)
from .same_batches import batches_fault
from .strategy import Kind
from .update import UpdateJudge, rms

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Ruling", "Verifier"]

_LATER = 9  # steps beyond those asked for that are compared one after the other
_SPAN = 12  # steps after them, of which the last and some that are drawn are compared
_KEPT_BYTES = 1 << 29  # of gradients and parameters that are kept in memory at once, two steps at least
_EXTRAS = 1 << 22  # elements of other tensors, up to which they are compared after each step


@dataclass(frozen=True)
class Ruling:
    """What the verifier found.

    Attributes
    ----------
    held : bool
        Whether the numbers are what the kind promises.
    reason : str
        One sentence: what was checked, or what is wrong.
    evidence : dict of str to float
        Figures: ``steps``, ``seconds``, ``gradient_error``, ``update_error`` ...
    """

    held: bool
    reason: str
    evidence: dict[str, float] = field(default_factory=dict)


class _Wrong(Exception):
    """A fault that was found."""


@dataclass
class _Taken:
    """What a run's steps were, as far as later ones are compared with it."""

    losses: list[Tensor] = field(default_factory=list)
    rng: list[str] = field(default_factory=list)
    settings: list[list[list[dict[str, Any]]]] = field(default_factory=list)
    which: list[list[int]] = field(default_factory=list)  # of the optimizers, in the order in which they stepped
    first: list[OptimizerCall] = field(
        default_factory=list
    )  # of several optimizers, in the first step, without gradients
    extras: dict[int, dict[str, tuple[Tensor, float]]] = field(default_factory=dict)
    counters: list[dict[tuple[str, Any], Any]] = field(default_factory=list)  # before each step, of the run as given
    kept: list[Kept] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        return [float(loss) for loss in self.losses]


@dataclass(frozen=True)
class _Steps:
    """How many steps are taken, which of them are compared, and which of those in float64 in any case."""

    count: int
    compared: list[int]
    wide: set[int]


class Verifier:
    """Checks what is active on a run against the run as given, and leaves both as they were.

    Exact: loss, gradients, parameters, buffers, optimizer state, random states, counters after each step, bit for bit.

    Tolerance: loss, gradients and buffers of each step against the step as given, taken once more from where the
    candidate stood, and, where that shows more than rounding and at steps drawn by lot, against the same model in
    float64; accepted where the error is at most three times that of the step as given, plus rounding in another order;
    the update of every such step against the user's own optimizer in float64, given the gradients that the candidate
    had; then the losses against the band that other random seeds and orders of batches span.

    Precision and trade: the same, where the yardstick of loss, gradients and buffers is stock PyTorch at that
    precision, ``torch.autocast`` around the same forward. The update is judged as tightly as ever.

    Random numbers: where the candidate draws what the step as given draws, masks are the same and nothing is special.
    Where it draws others, gradients are judged with every dropout at zero, and the spread of losses apart.

    Parameters
    ----------
    run : Run
        With nothing active.
    snapshot : Snapshot
        Of the state that every check starts from and ends with.
    steps : int
        Nine more are compared, one after the other, since some faults act late or in some steps alone; then twelve are
        taken of which four are compared, the last and others drawn once the candidate is fixed. 1 is a short check of
        one step, which lets small errors pass.
    seed : int
        Of the seeds that span the band; mixed into what is drawn.
    drawn_by : int, optional
        ``evidence["drawn_by"]`` of an earlier ruling, to have the same steps compared; fresh for each check unless
        given.

    Attributes
    ----------
    charged : float
        Seconds spent so far.
    notes : list of str
        What could not be judged, and why.
    """

    def __init__(
        self, run: Run, snapshot: Snapshot, *, steps: int = 3, seed: int = 0, drawn_by: int | None = None
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps is {steps}, expected at least 1.")
        self.run = run
        self.snapshot = snapshot
        self.charged = 0.0
        self.notes: list[str] = []
        self._asked = steps
        self._dense = 1 if steps == 1 else steps + _LATER
        self._count = 1 if steps == 1 else self._dense + _SPAN
        self._seed = seed
        self._drawn_by = drawn_by
        self._data = run.data
        self._roots = snapshot.roots
        self._comparison = Comparison(run, snapshot.roots, self._begin, run.clip_norm)
        self._start: State | None = None
        self._settings = [settings(slot.original) for slot in run.slots]
        self._bits: list[tuple[int, dict[str, str]]] = []
        self._unstable: set[str] | None = None  # names of values, where the step as given was seen not to repeat itself
        self._given: dict[bool, _Taken] = {}  # by whether dropout is at zero
        self._updates: UpdateJudge | None = None  # of the step as given
        self._ends = Ends(run, self._dense, seed, lambda: self._begin(()), self._comparison.stock)
        self._usual_draws: Draws | None = None
        self._usual_backward = 0.0

    # -- what is asked ---------------------------------------------------------------------------------------------

    def reference(self, kinds: Iterable[Kind]) -> None:
        """Make what the kinds are compared with, once each; nothing is active then, and the state is as held."""
        with self._charging(), self._ending(()):
            for kind in kinds:
                if kind == "exact":
                    self._reference_bits(self._count)
                else:
                    self._reference_steps(False, self._count)
                    self._comparison.usual(self._comparison_options(kind, (), False))
                    self._ends.as_given(self._reference_steps(False, self._dense).values)

    def check(self, kind: Kind, steps: int | None = None) -> Ruling:
        """Judge what is active now as a change of that kind; it is left active, and the state as held.

        Parameters
        ----------
        kind : {"exact", "tolerance", "precision", "trade"}
        steps : int, optional
            1 for a short check, as of a verifier made with it, by the references of this one.
        """
        wanted = self.run.active
        count = self._count if steps is None else min(steps, self._count)
        drawn_by = self._lot()
        evidence: dict[str, float] = {"steps": float(count), "drawn_by": float(drawn_by)}
        began = time.perf_counter()
        with self._charging(), self._ending(wanted):
            try:
                self._check_data(kind)
                if kind == "exact":
                    reason = self._exact(wanted, count)
                else:
                    reason = self._compared(
                        kind, wanted, _Steps(count, *_native.draw_steps(count, self._dense, drawn_by)), evidence
                    )
                held = True
            except _Wrong as wrong:
                held, reason = False, str(wrong)
            except Exception as error:  # whatever a strategy may throw, the run as given goes on
                held, reason = (
                    False,
                    f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
                )
        evidence["seconds"] = time.perf_counter() - began
        return Ruling(held, reason, evidence)

    @contextmanager
    def _charging(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.charged += time.perf_counter() - began

    @contextmanager
    def _ending(self, wanted: Sequence[str]) -> Iterator[None]:
        """At the end, whatever was thrown: the state as held, with these active."""
        try:
            yield
        finally:
            self._begin(wanted)

    def _begin(self, wanted: Sequence[str]) -> None:
        """Start anew: the state as held, in whatever layout the active strategies want it."""
        try:
            self.run.set_active(())
        finally:
            self.snapshot.restore()
        give_back_host_memory()  # copies that were let go would stay resident below what comes next
        self.run.set_active(wanted)

    def _lot(self) -> int:
        """What decides which steps are compared: nothing that was made active before can know it."""
        if self._drawn_by is not None:
            return self._drawn_by
        mixed = digest([os.urandom(16), str(self._seed).encode()])
        return int(mixed, 16) % (1 << 53)  # which a float holds

    # -- bits ------------------------------------------------------------------------------------------------------

    def _digests(self, count: int) -> Iterator[tuple[int, dict[str, str]]]:
        """Hash everything after the first steps and the last one, and the loss alone after the others."""
        whole = {*range(self._dense), count - 1}
        for step in take(self.run, self._roots, count, whole, hashed=True):
            everything = step.index in whole
            found = digests(self.run, self._roots, step) if everything else {"loss": value_digest(step.loss)}
            yield step.index, found | {"random state": step.rng}

    def _reference_bits(self, count: int) -> None:
        if len(self._bits) < count:
            self._begin(())
            self._bits = list(self._digests(count))

    def _find_unstable(self) -> set[str]:
        """Names of values in which the step as given does not repeat itself."""
        if self._unstable is None:
            self._unstable = set()
            self._reference_bits(self._count)
            self._begin(())
            for (_, again), (_, first) in zip(self._digests(self._count), self._bits, strict=False):
                self._unstable |= {name for name in first if again.get(name) != first[name]}
        if self._unstable:
            self._note(
                f"the step as given does not repeat itself in {len(self._unstable)} values, such as "
                f"{sorted(self._unstable)[0]}; those are left out"
            )

        return self._unstable

    def _exact(self, wanted: Sequence[str], count: int) -> str:
        self._reference_bits(count)
        self._begin(wanted)
        taken = list(self._digests(count))
        unstable: set[str] = set()
        for (index, first), (_, now) in zip(self._bits, taken, strict=False):
            if any(now.get(name) != first[name] for name in first.keys() - unstable):
                unstable = self._find_unstable()
            for name in first:
                if name not in unstable and now.get(name) != first[name]:
                    raise _Wrong(f"step {index + 1}: {name} {'differs' if name in now else 'is missing'}, bit for bit")
        values = len(self._bits[0][1]) - len(unstable)
        if values <= len(unstable):
            raise _Wrong("the step as given does not repeat itself, so that bits prove nothing")
        left_out = f", {len(unstable)} that never repeat left out" if unstable else ""
        return f"the same bits over {count} {'step' if count == 1 else 'steps'} in {values} values{left_out}"

    # -- references ------------------------------------------------------------------------------------------------

    def _reference_steps(self, quiet: bool, count: int) -> _Taken:
        """The steps as given."""
        known = self._given.get(quiet)
        if known is None or len(known.losses) < count:
            self._begin(())
            if self._start is None:
                self._start = State.of(self.run, self._roots)
            with self._quiet(quiet):
                observed = [0] if len(self.run.slots) > 1 else []
                known = self._record(None, None, _Steps(count, observed, set()), counted=True)
            if not all(math.isfinite(value) for value in known.values):
                raise _Wrong(f"the loss of the step as given is not finite: {known.values}")
            self._given[quiet] = known
            self._comparison.start_from(self._start, quiet, known.counters, known.first)
        return known

    def _reference_updates(self) -> UpdateJudge:
        """How far off the updates of the steps as given are themselves: expensive, so only where it decides."""
        if self._updates is None:
            self._updates = UpdateJudge(self.run)
            self._begin(())
            self._record(self._updates, None, _Steps(self._dense, list(range(self._dense)), set()))
        return self._updates

    def _quiet(self, quiet: bool) -> AbstractContextManager[None]:
        return still(self.run) if quiet else nullcontext()

    def _record(
        self,
        updates: UpdateJudge | None,
        given: _Taken | None,
        steps: _Steps,
        keep: Container[int] = (),
        counted: bool = False,
    ) -> _Taken:
        """Take the steps; return what is known of all, and those to be kept."""
        taken = _Taken()
        last: dict[str, tuple[Tensor, float]] = {}
        if counted:
            taken.counters.append(counters(self.run, self._roots))
            last = self._extras({})
        for step in take(self.run, self._roots, steps.count, steps.compared):
            taken.losses.append(step.loss)
            taken.rng.append(step.rng)
            taken.settings.append([call.settings for call in step.calls])
            taken.which.append([call.which for call in step.calls])
            if step.index == 0:
                taken.first = [replace(call, grads=[]) for call in step.calls]
            if counted:
                taken.counters.append(counters(self.run, self._roots))
                last = self._extras(last)
                few = sum(t.numel() for t, _ in last.values()) <= _EXTRAS
                if few or step.index in (0, self._dense - 1, steps.count - 1):
                    taken.extras[step.index] = last
            if step.before is None:
                continue
            if updates is not None:
                usual = given.settings[step.index] if given is not None else taken.settings[-1]
                if len(usual) == len(step.calls):
                    updates.judge(step.index, step.before, step.calls, usual)
                if given is not None and step.index in given.extras:
                    taken.extras[step.index] = self._extras({})
            if step.index in keep:
                buffers = {name: b.detach().clone() for name, b in self.run.model.named_buffers()}
                step.before = replace(step.before, states=[], extras={})  # what the update was judged by goes
                taken.kept.append(Kept(step, step.before, buffers))
        return taken

    def _extras(self, before: Mapping[str, tuple[Tensor, float]]) -> dict[str, tuple[Tensor, float]]:
        """Other tensors that steps change, and by how much they did since `before`."""
        found = {}
        for name, t in extras(self.run, self._roots):
            old = before[name][0] if name in before else None
            same = old is not None and old.shape == t.shape
            change = rms(t.detach().double() - old.double()) if same and old is not None else 0.0
            found[name] = (t.detach().clone(), change)
        return found

    # -- a candidate -----------------------------------------------------------------------------------------------

    def _compared(self, kind: Kind, wanted: Sequence[str], steps: _Steps, evidence: dict[str, float]) -> str:
        given = self._reference_steps(False, steps.count)
        chunks = self._chunks(steps.compared)
        self._begin(wanted)
        self._check_applied(kind)
        as_if_right = UpdateJudge(self.run)  # passing with zero reference error implies passing
        updates = UpdateJudge(self.run, as_if_right, self._comparison.clip_norm, loose_state=kind == "trade")
        pieces = self.run.micro_batches
        taken = observed = self._record(updates, given, steps, chunks[0])
        if words := _native.losses_fault(taken.losses, given.losses):
            raise _Wrong(words)
        if updates.faults:
            updates.hold_against(self._reference_updates())
        self._check_steps(taken, given, updates)
        evidence["compared"] = len(steps.compared)
        evidence["update_error"] = updates.worst
        self._check_extras(taken, given, kind)
        differs = self._check_random(taken, given)
        # Pieces of a batch draw as many numbers, for other rows.
        quiet = differs or (pieces > 1 and self._draws_any(given)) or not self._same_draws(taken)
        if quiet:
            taken.kept.clear()
            self._reference_steps(True, steps.count)
            self._begin(wanted)
            with self._quiet(True):
                observed = self._record(None, None, steps, chunks[0])
            self._check_random_numbers(kind, wanted)
        self._judge(wanted, observed, chunks, self._comparison_options(kind, wanted, quiet, steps), evidence)
        if not quiet and steps.count > 1:
            losses = self._reference_steps(False, self._dense).values
            dtype = None if kind == "tolerance" else self._dtype(wanted)
            if words := self._ends.fault(taken.values, losses, dtype, evidence):
                raise _Wrong(words)
        return self._summary(kind, steps, quiet, evidence)

    def _chunks(self, compared: list[int]) -> list[list[int]]:
        """Cut what is compared into as much as may be kept at once; for each the steps are taken anew."""
        copies = 2 if len(self.run.slots) == 1 else 3
        each = copies * sum(p.numel() * p.element_size() for p in self.run.params)
        kept = max(2, max(_KEPT_BYTES, parkable_bytes(self.run.device)) // max(each, 1))
        return [compared[i : i + kept] for i in range(0, len(compared), kept)]

    def _summary(self, kind: Kind, steps: _Steps, quiet: bool, evidence: Mapping[str, float]) -> str:
        words = ["1 step" if steps.count == 1 else f"{steps.count} steps, {len(steps.compared)} of them compared"]
        if "gradient_error" in evidence:
            yardstick = "the step as given" if kind == "tolerance" else "stock autocast"
            words.append(
                f"gradients off by {evidence['gradient_error']:.1g}, {evidence['usual_error']:.1g} with {yardstick}"
            )
        if "band_low" in evidence:
            low, high = evidence["band_low"], evidence["band_high"]
            words.append(f"loss {evidence['end_loss']:.4g} in the band of seeds, {low:.4g} to {high:.4g}")
        elif "end_loss" in evidence:
            words.append(f"loss {evidence['end_loss']:.4g}, {evidence['given_loss']:.4g} as given")
        if quiet:
            words.append("it draws other random numbers: judged with dropout at zero, and the spread of losses apart")
        return "; ".join(words + self.notes)

    def _check_applied(self, kind: Kind) -> None:
        """Making a strategy active changes no value."""
        held, buffers, now = self._start, dict(self.run.model.named_buffers()), states(self.run, copy=False)
        assert held is not None
        for name, left, right in zip(names(self.run), self.run.params, held.params, strict=True):
            if not _same(left, right):
                raise _Wrong(f"making it active changes the parameter {name}")
        for name, buffer in held.buffers.items():
            if name not in buffers or not _same(buffers[name], buffer):
                raise _Wrong(f"making it active changes the buffer {name}")
        if rng_digest(self.run) != digest_of_rng(held.rng):
            raise _Wrong("making it active changes the state of the random generators")
        for slot, usual in zip(self.run.slots, self._settings, strict=True):
            if (found := settings(slot.original)) != usual:
                change = _first_change(found, usual)
                raise _Wrong(f"making it active changes the settings of {_called(slot)}: {change}")
        if kind != "trade":
            for name, left_state, right_state in zip(names(self.run), now, held.states, strict=True):
                for key, value in right_state.items():
                    if key not in left_state or not _same(left_state[key], value):
                        raise _Wrong(f"making it active changes the optimizer state {key} of {name}")

    def _check_steps(self, taken: _Taken, given: _Taken, updates: UpdateJudge) -> None:
        slots = self.run.slots
        for index, (mine, usual) in enumerate(zip(taken.settings, given.settings, strict=False)):
            which, wanted = taken.which[index], given.which[index]
            for place, slot in enumerate(slots):
                times, as_given = which.count(place), wanted.count(place)
                if times != as_given:
                    raise _Wrong(f"step {index + 1}: {_called(slot)} steps {times} times, {as_given} as given")
            if which != wanted:
                order = ", ".join(slots[place].name for place in which)
                raise _Wrong(f"step {index + 1}: the optimizers step in another order: {order}")
            for place, a, b in zip(which, mine, usual, strict=True):
                if a != b:
                    words = f"{_called(slots[place])} steps with other settings: {_first_change(a, b)}"
                    raise _Wrong(f"step {index + 1}: {words}")
        if updates.faults:
            raise _Wrong(updates.faults[0])
        for words in updates.notes:
            self._note(words)

    def _check_extras(self, taken: _Taken, given: _Taken, kind: Kind) -> None:
        share = 0.05 if kind == "tolerance" else 0.5
        for index, extra in taken.extras.items():
            for name, (wanted, change) in given.extras[index].items():
                if name not in extra:
                    raise _Wrong(f"step {index + 1}: {name} is missing")
                mine, _ = extra[name]
                if mine.shape == wanted.shape and change > 0:
                    off = rms(mine.double() - wanted.double())
                    if not off <= share * change * (index + 1) + 1e-6 * rms(wanted.double()):
                        raise _Wrong(f"step {index + 1}: {name} is off by {off:.2g}; it changes by {change:.2g} a step")

    # -- random numbers --------------------------------------------------------------------------------------------

    def _check_random(self, taken: _Taken, given: _Taken) -> bool:
        """Whether the candidate draws other random numbers; none, or more than none, where it should not, is wrong."""
        assert self._start is not None
        if words := _native.generators_fault(digest_of_rng(self._start.rng), taken.rng, given.rng):
            raise _Wrong(words)
        return taken.rng != given.rng[: len(taken.rng)]

    def _draws_any(self, given: _Taken) -> bool:
        assert self._start is not None
        return given.rng[0] != digest_of_rng(self._start.rng)

    def _same_draws(self, taken: _Taken) -> bool:
        """Whether the model in float64 draws what it draws in its own dtype."""
        return self._comparison.rng_after_first() in (None, taken.rng[0])

    def _check_random_numbers(self, kind: Kind, wanted: Sequence[str]) -> None:
        if self.run.own_step is not None:
            self._note("masks are judged by the losses of the steps alone")
            return
        if self._usual_draws is None:
            self._begin(())
            self._usual_draws = draws(self.run)
            self._begin(())
            self._usual_backward = backward_error(self.run)
        self._begin(wanted)
        if words := judge_draws(draws(self.run), self._usual_draws):
            raise _Wrong(words)
        self._begin(wanted)
        error = backward_error(self.run)
        if not error <= _native.quotient_allowance(kind, self._usual_backward):
            raise _Wrong(
                f"with random numbers the gradient is off by {error:.2g} from the difference quotient of the loss: "
                "backward may see other ones than forward did"
            )

    # -- gradients -------------------------------------------------------------------------------------------------

    def _dtype(self, wanted: Sequence[str]) -> torch.dtype:
        """Of the stock run that a lower precision is measured with: TF32 keeps as many bits as float16."""
        fine = any(word in name for name in wanted for word in ("tf32", "fp16", "float16") if "bfloat16" not in name)
        return torch.float16 if fine else torch.bfloat16

    def _comparison_options(
        self, kind: Kind, wanted: Sequence[str], quiet: bool, steps: _Steps | None = None
    ) -> ComparisonOptions:
        dtype = None if kind == "tolerance" else self._dtype(wanted)
        wide = set() if steps is None else steps.wide
        return ComparisonOptions(dtype, quiet, wide, steps is not None and steps.count == 1, wanted)

    def _judge(
        self,
        wanted: Sequence[str],
        taken: _Taken,
        chunks: Sequence[list[int]],
        options: ComparisonOptions,
        evidence: dict[str, float],
    ) -> None:
        comparison = self._comparison
        judge = comparison.judge(options)
        if comparison.no_truth:
            self._note(f"{comparison.no_truth}: it is compared with the step as given alone")
        for number, chunk in enumerate(chunks):
            if number:
                self._begin(wanted)
                with self._quiet(options.quiet):
                    taken = self._record(None, None, _Steps(chunk[-1] + 1, chunk, set()), chunk)
            fault = comparison.fault(taken.kept, options, judge)
            evidence.update(judge.evidence())
            taken.kept.clear()
            if fault is not None:
                raise _Wrong(f"step {fault[0] + 1}: {fault[1]}")

    # -- data ------------------------------------------------------------------------------------------------------

    def _check_data(self, kind: Kind) -> None:
        """A changed source of batches gives the same ones in the same order."""
        mine, usual = self.run.data, self._data
        if mine is usual or mine is None or usual is None:
            return
        if words := batches_fault(self.run, mine, usual, self._step_draws if kind == "exact" else None):
            raise _Wrong(words)

    def _step_draws(self) -> bool:
        """Whether a step as given draws random numbers. The checks that follow begin anew."""
        self._begin(())
        before = rng_digest(self.run)
        self.run.step(copied(self.run.batches[0]))
        return rng_digest(self.run) != before

    def _note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)


def _same(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return bool(left == right)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    same = torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())
    rest(right)
    return same


def _called(slot: OptimizerSlot) -> str:
    return slot.name or "the optimizer"


def _first_change(now: Sequence[Mapping[str, Any]], usual: Sequence[Mapping[str, Any]]) -> str:
    for group, (mine, theirs) in enumerate(zip(now, usual, strict=False)):
        for key in theirs:
            if mine.get(key) != theirs[key]:
                return f"{key} of group {group} is {mine.get(key)}, {theirs[key]} as given"
    return "groups or settings were added"
