"""Whether a strategy's numbers are what its kind promises: the same bits, or as near to float64 as is usual."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .batches import stop_drawing, visit
from .call import widened
from .chance import Draws, backward_error, draws, judge_draws, still
from .escrow import Escrow
from .record import (
    State,
    Step,
    copied,
    digest,
    digest_of_rng,
    digests,
    extras,
    names,
    rng_digest,
    settings,
    take,
    value_digest,
)
from .referee import FLOAT32, REDUCED, Errors, Excess, Truth, judge, measure, truth
from .strategy import Kind
from .update import UpdateJudge, rms

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Ruling", "Verifier"]

_LATER = 5  # steps beyond those asked for, since faults may act late
_SEEDS = 3
_BAND_LEAST = 0.01  # of the loss: the band of seeds reaches so far at least beyond the losses seen
_SMALL = 0.02  # relative: a rounding that crosses a kink of the model may do so once
_QUOTIENT, _QUOTIENT_REDUCED = 0.01, 0.06  # of a gradient, by a difference quotient of the loss
_DATA = 64  # batches of a changed loader that are compared


@dataclass(frozen=True)
class Ruling:
    """What the referee found.

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
    extras: dict[int, dict[str, tuple[Tensor, float]]] = field(default_factory=dict)
    errors: dict[int, Errors] = field(default_factory=dict)
    kept: list[tuple[Step, dict[str, Tensor]]] = field(default_factory=list)  # for the referee: steps, buffers after

    @property
    def values(self) -> list[float]:
        return [float(loss) for loss in self.losses]


class Verifier:
    """Checks what is in force on a run against the run as given, and leaves both as they were.

    Exact: loss, gradients, parameters, buffers, optimizer state, random states, counters after each step, bit for bit.

    Tolerance: loss, gradients and buffers of steps early and late against the same model in float64, started where the
    candidate stood, accepted where the error is at most three times that of the step as given, plus rounding in another
    order; the update of every step against the user's own optimizer in float64, given the gradients that the candidate
    had; then the losses against the band that other random seeds and orders of batches span.

    Precision and trade: the same, where the yardstick of loss, gradients and buffers is stock PyTorch at that
    precision, ``torch.autocast`` around the same forward. The update is judged as tightly as ever.

    Random numbers: where the candidate draws what the step as given draws, masks are the same and nothing is special.
    Where it draws others, gradients are judged with every dropout at zero, and the spread of losses apart.

    Parameters
    ----------
    run : Run
        With nothing in force.
    escrow : Escrow
        Of the state that every check starts from and ends with.
    steps : int
        Five more are taken, since some faults act late; 1 is a short look at one step, which lets small errors pass.
    seed : int
        Of the seeds that span the band.

    Attributes
    ----------
    charged : float
        Seconds spent so far.
    notes : list of str
        What could not be judged, and why.
    """

    def __init__(self, run: Run, escrow: Escrow, *, steps: int = 3, seed: int = 0) -> None:
        if steps < 1:
            raise ValueError(f"steps is {steps}, expected at least 1.")
        self.run = run
        self.escrow = escrow
        self.charged = 0.0
        self.notes: list[str] = []
        self._asked = steps
        self._count = 1 if steps == 1 else steps + _LATER
        self._refereed = sorted({0, max(0, self._count - 2), self._count - 1})
        self._seed = seed
        self._clip = run.clip_norm
        self._data = run.data
        self._roots = escrow.roots
        self._start: State | None = None
        self._settings = settings(run.original)
        self._bits: list[dict[str, str]] = []
        self._unstable: set[str] | None = None  # names of values, where the step as given was seen not to repeat itself
        self._given: dict[bool, _Taken] = {}  # by whether dropout is at zero
        self._updates: UpdateJudge | None = None  # of the step as given
        self._stock: dict[tuple[bool, torch.dtype], _Taken] = {}
        self._truths: dict[bool, Truth] = {}
        self._no_truth = ""
        self._band: tuple[float, float] | None = None
        self._usual_draws: Draws | None = None
        self._usual_backward = 0.0

    # -- what is asked ---------------------------------------------------------------------------------------------

    def reference(self, kinds: Iterable[Kind]) -> None:
        """Make what the kinds are compared with, once each; nothing is in force then, and the state is as held."""
        with self._charging(), self._ending(()):
            for kind in kinds:
                if kind == "exact":
                    self._reference_bits(self._count)
                else:
                    self._reference_steps(False, self._count)
                    self._yardstick(kind, (), False, self._count)
                    self._reference_band()

    def check(self, kind: Kind, steps: int | None = None) -> Ruling:
        """Judge what is in force now as a change of that kind; it is left in force, and the state as held.

        Parameters
        ----------
        kind : {"exact", "tolerance", "precision", "trade"}
        steps : int, optional
            1 for a short look, as of a verifier made with it, by the references of this one.
        """
        wanted = self.run.in_force
        count = self._count if steps is None else min(steps, self._count)
        evidence: dict[str, float] = {"steps": float(count)}
        began = time.perf_counter()
        with self._charging(), self._ending(wanted):
            try:
                self._check_data(kind)
                if kind == "exact":
                    reason = self._exact(wanted, count)
                else:
                    reason = self._compared(kind, wanted, count, evidence)
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
        """At the end, whatever was thrown: the state as held, with these in force."""
        try:
            yield
        finally:
            self._begin(wanted)

    def _begin(self, wanted: Sequence[str]) -> None:
        """Start anew: the state as held, in whatever layout the strategies in force want it."""
        try:
            self.run.bring(())
        finally:
            self.escrow.restore()
        self.run.bring(wanted)

    # -- bits ------------------------------------------------------------------------------------------------------

    def _digests(self, count: int) -> Iterator[dict[str, str]]:
        for step in take(self.run, self._roots, count):
            yield digests(self.run, self._roots, step)

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
            for again, first in zip(self._digests(self._asked), self._bits, strict=False):
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
        for index, (first, now) in enumerate(zip(self._bits, taken, strict=False)):
            if any(now.get(name) != first[name] for name in first.keys() - unstable):
                unstable = self._find_unstable()
            for name in first:
                if name not in unstable and now.get(name) != first[name]:
                    raise _Wrong(f"step {index + 1}: {name} {'differs' if name in now else 'is missing'}, bit for bit")
        values = len(self._bits[0]) - len(unstable)
        if values <= len(unstable):
            raise _Wrong("the step as given does not repeat itself, so that bits prove nothing")
        left_out = f", {len(unstable)} that never repeat left out" if unstable else ""
        return f"the same bits over {count} {'step' if count == 1 else 'steps'} in {values} values{left_out}"

    # -- references in float64 -------------------------------------------------------------------------------------

    def _reference_steps(self, quiet: bool, count: int) -> _Taken:
        """The first steps as given, the first of them judged by the referee: how far off float32 itself is."""
        known = self._given.get(quiet)
        if known is None or len(known.losses) < count:
            self._begin(())
            if self._start is None:
                self._start = State.of(self.run, self._roots)
            with self._quiet(quiet):
                known = self._record(None, None, count)
                if not all(math.isfinite(value) for value in known.values):
                    raise _Wrong(f"the loss of the step as given is not finite: {known.values}")
            self._referee(known, quiet, 1)
            self._given[quiet] = known
        return known

    def _reference_updates(self) -> UpdateJudge:
        """How far off the updates of the steps as given are themselves: dear, so only where it decides."""
        if self._updates is None:
            self._updates = UpdateJudge(self.run)
            self._begin(())
            self._record(self._updates, None, self._count)
        return self._updates

    def _reference_stock(self, quiet: bool, dtype: torch.dtype, count: int) -> _Taken:
        """Stock PyTorch at a lower precision: steps under autocast, in eager mode, all else as given."""
        known = self._stock.get((quiet, dtype))
        if known is None or len(known.losses) < count:
            given = self._reference_steps(quiet, count)
            self._begin(())
            device = self.run.device.type
            self.run.call.scope("stock", lambda: torch.autocast(device, dtype=dtype))
            self.run.call.outputs("stock", widened)
            try:
                with self._quiet(quiet):
                    known = self._record(None, given, count)
            finally:
                self.run.call.scope("stock", None)
                self.run.call.outputs("stock", None)
            self._stock[quiet, dtype] = known
        return known

    def _yardstick(self, kind: Kind, wanted: Sequence[str], quiet: bool, count: int) -> _Taken:
        """How far off from float64 as many steps are with stock PyTorch at the precision of the kind."""
        if kind == "tolerance":
            usual = self._reference_steps(quiet, count)
        else:
            usual = self._reference_stock(quiet, self._dtype(wanted), count)
        self._referee(usual, quiet, count)
        return usual

    def _quiet(self, quiet: bool) -> AbstractContextManager[None]:
        return still(self.run) if quiet else nullcontext()

    def _record(self, updates: UpdateJudge | None, given: _Taken | None, count: int) -> _Taken:
        """Take the steps; return what is known of all, and the whole of those to be refereed."""
        taken = _Taken()
        for step in take(self.run, self._roots, count):
            taken.losses.append(step.loss)
            taken.rng.append(step.rng)
            taken.settings.append([call.settings for call in step.calls])
            if updates is not None:
                usual = given.settings[step.index] if given is not None else taken.settings[-1]
                if len(usual) == len(step.calls):
                    updates.judge(step.index, step.before, step.calls, usual)
            if step.index in self._refereed:
                buffers = {name: b.detach().clone() for name, b in self.run.model.named_buffers()}
                taken.kept.append((step, buffers))
                taken.extras[step.index] = self._extras(step)
        return taken

    def _extras(self, step: Step) -> dict[str, tuple[Tensor, float]]:
        found = {}
        for name, t in extras(self.run, self._roots):
            before = step.before.extras.get(name)
            same = before is not None and before.shape == t.shape
            change = rms(t.detach().double() - before.double()) if same and before is not None else 0.0
            found[name] = (t.detach().clone(), change)
        return found

    def _referee(self, taken: _Taken, quiet: bool, count: int) -> None:
        """Judge kept steps, up to a count, in float64 and let go of them; nothing is in force for that."""
        waiting = [kept for kept in taken.kept if kept[0].index < count]
        taken.kept = [kept for kept in taken.kept if kept[0].index >= count]
        if not waiting:
            return
        self._begin(())
        with self._quiet(quiet):
            for step, buffers in waiting:
                right = self._truth(step, quiet) if step.calls and not self._no_truth else None
                if right is not None:
                    taken.errors[step.index] = measure(self.run, step, right, buffers, self._clip)

    def _truth(self, step: Step, quiet: bool) -> Truth | None:
        first = step.index == 0 and quiet in self._truths and self._at_start(step.before)
        if first:
            return self._truths[quiet]
        batch = self.run.batches[step.index % len(self.run.batches)]
        try:
            right = truth(self.run, self._roots, step.before, batch)
        except Exception as error:  # whatever the model throws in float64
            words = str(error).strip().splitlines()
            self._no_truth = f"the model does not run in float64 ({words[0] if words else type(error).__name__})"
            self._note(f"{self._no_truth}: gradients are compared with the step as given")
            return None
        if step.index == 0 and self._at_start(step.before):
            self._truths[quiet] = right
        return right

    def _at_start(self, state: State) -> bool:
        return self._start is not None and _same_values(state, self._start)

    def _reference_band(self) -> tuple[float, float]:
        """What the mean loss of the last steps is as given, with other orders of batches and other random numbers."""
        if self._band is None:
            ends = [self._end(self._reference_steps(False, self._count).values)]
            generator = torch.Generator().manual_seed(self._seed)
            for number in range(_SEEDS):
                self._begin(())
                torch.manual_seed(self._seed + number + 1)
                ends.append(self._end(self._shuffled(generator)))
            spread = max(ends) - min(ends)
            middle = statistics.fmean(ends)
            margin = spread + _BAND_LEAST * abs(middle)
            self._band = (min(ends) - margin, max(ends) + margin)
        return self._band

    def _shuffled(self, generator: torch.Generator) -> list[float]:
        losses: list[float] = []
        while len(losses) < self._count:
            order = torch.randperm(len(self.run.batches), generator=generator).tolist()[: self._count - len(losses)]
            losses += [float(self.run.step(copied(self.run.batches[i]))) for i in order]
        return losses

    def _end(self, losses: list[float]) -> float:
        return statistics.fmean(losses[-min(len(self.run.batches), len(losses)) :])

    # -- a candidate -----------------------------------------------------------------------------------------------

    def _compared(self, kind: Kind, wanted: Sequence[str], count: int, evidence: dict[str, float]) -> str:
        given = self._reference_steps(False, count)
        self._begin(wanted)
        self._check_applied(kind)
        as_if_right = UpdateJudge(self.run)  # as if the step as given made no error: who holds then holds anyway
        updates = UpdateJudge(self.run, as_if_right, self._clip, loose_state=kind == "trade")
        taken = self._record(updates, given, count)
        self._check_losses(taken, given)
        if updates.faults:
            updates.hold_against(self._reference_updates())
        self._check_steps(taken, given, updates)
        evidence["update_error"] = updates.worst
        self._check_extras(taken, given, kind)
        differs = self._check_random(taken, given)
        # Pieces of a batch draw as many numbers, for other rows.
        quiet = differs or not self._same_draws(taken) or (self.run.micro_batches > 1 and self._draws_any(given))
        if quiet:
            self._begin(wanted)
            with self._quiet(True):
                self._reference_steps(True, count)
                self._begin(wanted)
                taken = self._record(None, self._given[True], count)
            self._check_random_numbers(kind, wanted)
        self._judge(kind, wanted, taken, count, quiet, evidence)
        self._check_band(None if quiet or count == 1 else taken, evidence)
        return self._summary(kind, count, quiet, evidence)

    def _summary(self, kind: Kind, count: int, quiet: bool, evidence: Mapping[str, float]) -> str:
        words = [f"{count} step" if count == 1 else f"{count} steps"]
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
        """Putting a strategy in force changes no value."""
        now, held = State.of(self.run, self._roots), self._start
        assert held is not None
        for name, left, right in zip(names(self.run), now.params, held.params, strict=True):
            if not _same(left, right):
                raise _Wrong(f"putting it in force changes the parameter {name}")
        for name, buffer in held.buffers.items():
            if name not in now.buffers or not _same(now.buffers[name], buffer):
                raise _Wrong(f"putting it in force changes the buffer {name}")
        if rng_digest(self.run) != digest_of_rng(held.rng):
            raise _Wrong("putting it in force changes the state of the random generators")
        if settings(self.run.original) != self._settings:
            change = _first_change(settings(self.run.original), self._settings)
            raise _Wrong(f"putting it in force changes the optimizer's settings: {change}")
        if kind != "trade":
            for name, left_state, right_state in zip(names(self.run), now.states, held.states, strict=True):
                for key, value in right_state.items():
                    if key not in left_state or not _same(left_state[key], value):
                        raise _Wrong(f"putting it in force changes the optimizer state {key} of {name}")

    def _check_losses(self, taken: _Taken, given: _Taken) -> None:
        count = len(taken.losses)
        for index, (mine, usual) in enumerate(zip(taken.losses, given.losses[:count], strict=True)):
            if not bool(mine.isfinite().all()):
                raise _Wrong(f"step {index + 1}: the loss is {float(mine)}, {float(usual)} as given")
            if mine.dtype.itemsize < usual.dtype.itemsize:
                raise _Wrong(f"the loss is {mine.dtype}, {usual.dtype} as given")
        for dtype in (torch.bfloat16, torch.float16):
            coarse = [
                all(bool((loss.to(dtype).to(loss.dtype) == loss).all()) for loss in t.losses) for t in (taken, given)
            ]
            if count > 2 and coarse == [True, False]:
                raise _Wrong(f"the loss is computed in {dtype}: every one is a number of that dtype")

    def _check_steps(self, taken: _Taken, given: _Taken, updates: UpdateJudge) -> None:
        for index, (mine, usual) in enumerate(zip(taken.settings, given.settings, strict=False)):
            if len(mine) != len(usual):
                raise _Wrong(f"step {index + 1}: the optimizer steps {len(mine)} times, {len(usual)} as given")
            if mine != usual:
                found = next(_first_change(a, b) for a, b in zip(mine, usual, strict=True) if a != b)
                raise _Wrong(f"step {index + 1}: the optimizer steps with other settings: {found}")
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
        mine = usual = digest_of_rng(self._start.rng)
        for index, (now, as_given) in enumerate(zip(taken.rng, given.rng, strict=False)):
            if as_given != usual and now == mine:
                raise _Wrong(
                    f"step {index + 1}: the random generators stand still, so random numbers repeat or are not drawn"
                )
            if as_given == usual and now != mine:
                raise _Wrong(f"step {index + 1}: random numbers are drawn where the step as given draws none")
            mine, usual = now, as_given
        return taken.rng != given.rng[: len(taken.rng)]

    def _draws_any(self, given: _Taken) -> bool:
        assert self._start is not None
        return given.rng[0] != digest_of_rng(self._start.rng)

    def _same_draws(self, taken: _Taken) -> bool:
        """Whether the model in float64 draws what it draws in its own dtype."""
        right = self._truths.get(False)
        return right is None or right.rng == taken.rng[0]

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
        if not error <= 3 * self._usual_backward + (_QUOTIENT if kind == "tolerance" else _QUOTIENT_REDUCED):
            raise _Wrong(
                f"with random numbers the gradient is off by {error:.2g} from the difference quotient of the loss: "
                "backward may see other ones than forward did"
            )

    # -- gradients -------------------------------------------------------------------------------------------------

    def _dtype(self, wanted: Sequence[str]) -> torch.dtype:
        """Of the stock run that a lower precision is measured with: TF32 keeps as many bits as float16."""
        fine = any(word in name for name in wanted for word in ("tf32", "fp16", "float16") if "bfloat16" not in name)
        return torch.float16 if fine else torch.bfloat16

    def _judge(
        self,
        kind: Kind,
        wanted: Sequence[str],
        taken: _Taken,
        count: int,
        quiet: bool,
        evidence: dict[str, float],
    ) -> None:
        usual = self._yardstick(kind, wanted, quiet, 1)
        self._referee(taken, quiet, count)
        if self._no_truth:
            self._judge_by_given(kind, taken)
            return
        excess = self._excess(kind, taken, usual)
        if any(found for index, found in excess.items() if index not in usual.errors):
            usual = self._yardstick(kind, wanted, quiet, count)  # dear, so only where it decides
            excess = self._excess(kind, taken, usual)
        evidence["gradient_error"] = max((e.worst for e in taken.errors.values()), default=0.0)
        evidence["usual_error"] = max((e.worst for e in usual.errors.values()), default=0.0)
        evidence["loss_error"] = max((e.loss / max(e.loss_size, 1e-12) for e in taken.errors.values()), default=0.0)
        for index, found in excess.items():
            for fault in found:
                if not (count == 1 and fault.relative < _SMALL) and not _once(fault, excess):
                    raise _Wrong(f"step {index + 1}: {fault.words}")

    def _excess(self, kind: Kind, taken: _Taken, usual: _Taken) -> dict[int, list[Excess]]:
        """What is further off than the yardstick at the same step, or at its first where that is not known."""
        allowance = FLOAT32 if kind == "tolerance" else REDUCED
        if 0 not in usual.errors:
            return {}
        return {i: judge(e, usual.errors.get(i, usual.errors[0]), allowance) for i, e in taken.errors.items()}

    def _judge_by_given(self, kind: Kind, taken: _Taken) -> None:
        """Without a referee: losses near those of the step as given."""
        usual = self._given[False].values[: len(taken.losses)]
        share = 1e-4 if kind == "tolerance" else 2e-2
        for index, (mine, other) in enumerate(zip(taken.values, usual, strict=True)):
            if abs(mine - other) > share * (index + 1) * max(abs(other), 1e-6):
                raise _Wrong(f"step {index + 1}: the loss is {mine:.6g}, {other:.6g} as given")

    def _check_band(self, taken: _Taken | None, evidence: dict[str, float]) -> None:
        if taken is None:
            return
        end, usual = self._end(taken.values), self._end(self._reference_steps(False, self._count).values)
        evidence |= {"end_loss": end, "given_loss": usual}
        if abs(end - usual) <= 0.5 * _BAND_LEAST * abs(usual):
            return  # inside whatever other seeds give
        low, high = self._reference_band()
        evidence |= {"band_low": low, "band_high": high}
        if not low <= end <= high:
            raise _Wrong(
                f"after {self._count} steps the loss is {end:.4g}, outside of {low:.4g} to {high:.4g} that seeds span"
            )

    # -- data ------------------------------------------------------------------------------------------------------

    def _check_data(self, kind: Kind) -> None:
        """A changed source of batches gives the same ones in the same order."""
        mine, usual = self.run.data, self._data
        if mine is usual or mine is None or usual is None:
            return
        if _length(mine) != _length(usual):
            raise _Wrong(f"an epoch has {_length(mine)} batches, {_length(usual)} as given")
        found, after = [], []
        for source in (usual, mine):
            with visit(usual, self.run.params):
                batches = iter(source)
                found.append([_batch_digest(batch) for batch in islice(batches, _DATA)])
                after.append(rng_digest(self.run))
                stop_drawing(batches)
        if found[0] != found[1]:
            at = next((i for i, (a, b) in enumerate(zip(*found, strict=False)) if a != b), min(map(len, found)))
            raise _Wrong(f"batch {at + 1} of an epoch is another one")
        if kind == "exact" and after[0] != after[1] and self._step_draws():
            raise _Wrong("drawing batches leaves the random generators, of which a step draws, in another state")

    def _step_draws(self) -> bool:
        """Whether a step as given draws random numbers. The checks that follow begin anew."""
        self._begin(())
        before = rng_digest(self.run)
        self.run.step(copied(self.run.batches[0]))
        return rng_digest(self.run) != before

    def _note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)


def _once(fault: Excess, excess: Mapping[int, Sequence[Excess]]) -> bool:
    """Whether a small error is found in one refereed step alone: a rounding across a kink, such as of ReLU."""
    if not fault.relative < _SMALL or len(excess) < 3:
        return False
    return sum(bool(found) for found in excess.values()) == 1


def _same(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return bool(left == right)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())


def _same_values(left: State, right: State) -> bool:
    return (
        all(_same(a, b) for a, b in zip(left.params, right.params, strict=True))
        and left.buffers.keys() == right.buffers.keys()
        and all(_same(left.buffers[name], b) for name, b in right.buffers.items())
        and digest_of_rng(left.rng) == digest_of_rng(right.rng)
    )


def _first_change(now: Sequence[Mapping[str, Any]], usual: Sequence[Mapping[str, Any]]) -> str:
    for group, (mine, theirs) in enumerate(zip(now, usual, strict=False)):
        for key in theirs:
            if mine.get(key) != theirs[key]:
                return f"{key} of group {group} is {mine.get(key)}, {theirs[key]} as given"
    return "groups or settings were added"


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:
        return None


def _batch_digest(batch: Any) -> str:
    return digest(value_digest(leaf).encode() for leaf in tree_leaves(batch))
