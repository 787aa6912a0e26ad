"""The loop of `accelerate`: asks the search what to try, measures and verifies it, and writes the certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from .._C import tune as _native
from .._C.trainer import note_heap
from ..base import format_duration, log
from ..config import PerformanceConfig
from ..optim.generators import rng_state, set_rng_state
from . import measure
from .asked import Asked
from .escrow import Escrow
from .measure import Bench, SideFailed
from .run import Run
from .strategy import widest
from .verify import Ruling, Verifier

__all__ = ["Tuning"]


class Tuning:
    """One search for what pays, on one run."""

    def __init__(
        self,
        run: Run,
        escrow: Escrow,
        settings: PerformanceConfig,
        made_for: Any,
        steps_planned: int,
        budget: float,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self.run = run
        self.escrow = escrow
        self.settings = settings
        self.key = made_for
        self.steps_planned = steps_planned
        self.budget = budget
        self.seed = seed
        self.say = say
        self.bench = Bench(run, escrow)
        self.began = measure.clock()
        self.compiling = 0.0
        self.events: list[str] = []
        self.search: Any = None
        self._skipped: dict[str, str] = {}
        self._compiles: set[str] = set()  # whose turning on is charged apart
        self._final: dict[str, tuple[Any, str]] = {}  # of strategies that failed before the search
        self._rulings: dict[tuple[tuple[str, ...], int | None], Ruling] = {}  # of strategies and a number of steps
        self._likely: set[tuple[str, tuple[str, ...]]] = set()  # looked at for what a cost is likely to gain
        self._evidence: dict[str, dict[str, float]] = {}
        self._alone: tuple[list[str], Any] = ([], None)  # the last trial against nothing
        self._verifier: Verifier | None = None

    # -- what may be tried ---------------------------------------------------------------------------------------

    def skip(self, excluded: Iterable[str], asked: Asked) -> None:
        """Note what is not to be tried: by the caller's word, the configuration, the level, the loop."""
        self._asked = asked
        names = set(self.run.strategies)
        for name in excluded:
            if name not in names:
                raise ValueError(f"exclude names {name!r}, which is no strategy here: {', '.join(sorted(names))}.")
            self._skipped[name] = "excluded by the caller"
        for name, cls in self.run.strategies.items():
            if name in asked.skipped:
                self._skipped.setdefault(name, asked.skipped[name])
            elif not _native.allows(self.settings.level, cls.kind):
                self._skipped.setdefault(name, f"level {self.settings.level} does not allow the kind {cls.kind}")
            elif cls.needs_loop and not self.run.owns_loop:
                self._skipped.setdefault(name, "it changes the loop itself: loop='plan' and plan.step(batch) allow it")

    def _look(self) -> None:
        """Ask the strategies themselves, once the step is known to run."""
        everything = ""
        processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if processes > 1:
            everything = f"one of {processes} processes, which would decide differently"
        elif self.bench.loss is not None and not bool(torch.isfinite(self.bench.loss).all()):
            everything = f"the loss of the step as given is {float(self.bench.loss)}: nothing can be verified by it"
        if everything:
            log("warn", f"accelerate: nothing was tried: {everything}.")
        for name in self.run.strategies:
            if name in self._skipped:
                continue
            if everything:
                self._skipped[name] = everything
                continue
            try:
                answer = self.run.strategy(name).applies(self.run)
            except Exception as error:  # a strategy's own fault is its own failure
                self._fail(name, f"applies() threw {_told(error)}")
                continue
            if answer is not True:
                self._skipped[name] = answer or "does not apply"

    def _fail(self, name: str, reason: str) -> None:
        self._final[name] = ("failed", reason)
        self._skipped[name] = reason
        log("warn", f"accelerate: {name} failed and is left out: {reason}")

    # -- measuring -----------------------------------------------------------------------------------------------

    def measure(self) -> Any:
        """Return the certificate of a search; nothing is in force at the end."""
        self._baseline()
        self.search = self._make_search()
        result = self._conclude()
        return self._certificate(list(self.search.best()), result)

    def _explore(self) -> None:
        while (trial := self.search.ask()) is not None:
            if self._look_where_time_goes(trial):
                continue
            against = ", ".join(trial.incumbent) or "nothing"
            self.say(f"{trial.strategy}{' taken away' if trial.removal else ''} against {against}")
            self.search.tell(self._try(trial))

    def _look_where_time_goes(self, trial: Any) -> bool:
        """Before a cost is paid, tell the search once what it is likely to gain; True where it is to be asked again."""
        looked = (trial.strategy, tuple(trial.incumbent))
        if trial.strategy not in self._compiles or looked in self._likely:
            return False
        self._likely.add(looked)
        began = measure.clock()
        try:
            gain = self.bench.guarded(
                trial.incumbent, lambda: self.run.strategy(trial.strategy).likely_speedup(self.run)
            )
        except SideFailed:  # its trial will say so
            return False
        self.search.charge(measure.clock() - began)
        if gain is not None:
            self.search.expect(trial.strategy, gain)
        return gain is not None

    def _baseline(self) -> None:
        self.say("the step as it is")
        if self.bench.step_seconds == 0:
            self.bench.baseline()
            if self.bench.disturbed:
                log("warn", f"accelerate: the machine is busy: {self.bench.load.evidence}.")
            self._look()
            if any(self._keeps_memory(name) for name in self.run.strategies if name not in self._skipped):
                note_heap()

    def _keeps_memory(self, name: str) -> bool:
        return self.run.strategies[name].group == "host_memory"

    def _make_search(self) -> Any:
        facts = []
        self.say("each update of the optimizer by itself")
        offered = [name for name in self.run.strategies if name not in self._skipped]
        of_optimizer = [name for name in offered if self.run.strategies[name].group == "optimizer"]
        updates, proven = self.bench.updates(of_optimizer, self.seed)
        in_faults = _native.most_heap_speedup(self.bench.faults, self.bench.step_seconds)
        for name, cls in self.run.strategies.items():
            one = _native.StrategyFacts(
                name,
                kind=cls.kind,
                group=cls.group,
                hopeful=min(cls.hopeful, in_faults) if self._keeps_memory(name) else cls.hopeful,
                # Of what drawing takes, half may be hidden behind the step.
                expected_speedup=1 / (1 - self.run.fetch_share / 2) if cls.feeds else cls.expected_speedup,
                update_speedup=updates.get(name, 0.0),
                update_proven=name == proven,
            )
            # A strategy that is not offered cannot be required or have been accepted.
            missing = [other for other in cls.requires if other not in self.run.strategies]
            if missing and name not in self._skipped:
                self._skipped[name] = f"needs {missing[0]}, which is not offered"
            one.requires = [other for other in cls.requires if other in self.run.strategies]
            one.part_of = [other for other in cls.part_of if other in self.run.strategies]
            one.renewed_by = [other for other in cls.renewed_by if other in self.run.strategies]
            one.interacts = [other for other in cls.interacts if other in self.run.strategies]
            if name not in self._skipped:
                try:
                    one.expected_cost = self.run.strategy(name).expected_cost(self.run)
                    if one.expected_cost > 0:
                        self._compiles.add(name)
                except Exception as error:
                    self._fail(name, f"expected_cost() threw {_told(error)}")
            facts.append(one)
        options = _native.SearchOptions.for_run(self.steps_planned, self.bench.fastest, self.budget or 0.0, self.seed)
        options.used_seconds = measure.clock() - self.began
        options.optimizer_share = self.bench.optimizer_share
        search = _native.Search(facts, options)
        for name, reason in self._skipped.items():
            search.skip(name, reason)
        return search

    def _try(self, trial: Any) -> Any:
        outcome = _native.TrialOutcome()
        began = measure.clock()
        try:
            outcome.duel, outcome.cost_seconds = self.bench.duel(trial.incumbent, trial.challenger, trial.duel)
            outcome.disturbed = self.bench.disturbed
            outcome.spent_seconds = max(1e-9, measure.clock() - began - outcome.cost_seconds)
            self._alone = (list(trial.challenger), outcome.duel) if not trial.incumbent else self._alone
            if outcome.duel.decision == "accept":
                ruling = self._glance(trial.challenger)
                self._evidence[trial.strategy] = dict(ruling.evidence)
                outcome.verified, outcome.reason = ruling.held, ruling.reason
                if not ruling.held:
                    log("warn", f"accelerate: {trial.strategy} is refused and left out: {ruling.reason}")
        except SideFailed as failure:
            outcome.failed, outcome.reason = True, self._blame(failure)
            log("warn", f"accelerate: {trial.strategy} failed and is left out: {outcome.reason}")
        if trial.strategy in self._compiles:  # its trial is part of what it costs, and it says when that is repaid
            self.compiling += measure.clock() - began
        elif self._compiles.intersection(trial.challenger):
            self.compiling += outcome.cost_seconds
        return outcome

    def _blame(self, failure: SideFailed) -> str:
        """Say what a combination threw, where the step as given does not throw too; else that error passes through."""
        self.bench.plain_step()
        return _told(failure.cause)

    def _glance(self, names: Sequence[str]) -> Ruling:
        """Let the referee look at one step of a combination: what is grossly wrong is found before more is built on."""
        return self._verify(names, 1)

    def _verify(self, names: Sequence[str], steps: int | None = None) -> Ruling:
        """Let the referee judge a combination, once."""
        if not names:
            return Ruling(True, "nothing is in force", {})
        wanted = (tuple(names), steps)
        if wanted not in self._rulings:
            if self._verifier is None:
                self._verifier = Verifier(self.run, self.escrow, seed=self.seed)
            self._rulings[wanted] = self._judged(names, self._verifier, steps)
        return self._rulings[wanted]

    def _judged(self, names: Sequence[str], verifier: Verifier, steps: int | None = None) -> Ruling:
        began = measure.clock()
        self.say(f"verifying {', '.join(names)}")
        kind = widest(self.run.strategies[name].kind for name in names)
        self.bench.guarded((), self.escrow.restore)
        ruling = self.bench.guarded(names, lambda: verifier.check(kind, steps))
        self.bench.guarded((), self.escrow.restore)
        if self.search is not None:
            self.search.charge(measure.clock() - began)
        return ruling

    def _conclude(self) -> Any:
        """Search, then verify and measure everything against nothing.

        What spoils it is dropped and the search goes on. Returns the result of that last duel, None of nothing.
        """
        while True:
            self._explore()
            chosen = list(self.search.best())
            if not chosen:
                return None
            last = chosen[-1]
            try:
                ruling = self._verify(chosen)
                suspects = chosen if self.search.seconds_left() <= 0 else [last]  # no time to look into what fails
                if not ruling.held and len(suspects) == len(chosen):
                    self._drop_all(suspects, "refused", f"all together were refused: {ruling.reason}")
                    continue
                if not ruling.held:
                    self._drop_culprits(chosen, ruling)
                    continue
                result = self._against_nothing(chosen)
                if result.decision == "accept":
                    return result
                self._drop_all(suspects, "rejected", f"all together did not pay: {result.reason}")
            except SideFailed as failure:
                self._drop(last, "failed", f"all together failed: {self._blame(failure)}")

    def _against_nothing(self, chosen: list[str]) -> Any:
        if chosen == self._alone[0]:
            return self._alone[1]  # that was the trial by which it was accepted
        self.say("everything against nothing")
        return self.bench.duel((), chosen, self.search.conclusion())[0]

    def _drop_all(self, names: Sequence[str], standing: Any, reason: str) -> None:
        for name in reversed(names):
            self._drop(name, standing, reason)

    def _drop(self, name: str, standing: Any, reason: str) -> None:
        if name in self.search.best():  # it may have gone with what it requires
            log("warn", f"accelerate: {name} is taken back: {reason}")
            self.search.drop(name, standing, reason)

    def _drop_culprits(self, chosen: Sequence[str], together: Ruling) -> None:
        """Drop what is refused by itself in a combination that is refused, else its last."""
        found = False
        for name in chosen:
            alone = [other for other in chosen if other == name or other in self.run.strategies[name].requires]
            ruling = together if alone == list(chosen) else self._verify(alone)
            if not ruling.held:
                found = True
                self._drop(name, "refused", ruling.reason)
        if not found:
            self._drop(chosen[-1], "refused", f"all together were refused: {together.reason}")

    def _certificate(self, chosen: Sequence[str], result: Any) -> Any:
        made = _native.Certificate()
        made.key = self.key
        made.level = self.settings.level
        made.created = _now()
        made.steps_planned = self.steps_planned
        made.step_seconds, made.step_spread = self.bench.step_seconds, self.bench.spread
        made.step_faults = self.bench.faults
        made.disturbance = self.bench.load.evidence if self.bench.load.disturbed else ""
        made.baseline_seconds = self.bench.step_seconds if result is None else result.incumbent
        made.tuned_seconds = self.bench.step_seconds if result is None else result.challenger
        if result is not None:
            made.speedup = result.speedup
        entries = list(self.search.entries())
        for entry in entries:
            entry.cost = self.run.strategies[entry.strategy].cost
            entry.evidence = self._evidence.get(entry.strategy, {})
            if entry.strategy in self._final:
                entry.standing, entry.reason = self._final[entry.strategy]
        made.entries = entries
        made.verification = self._verification(chosen)
        made.events = self.events
        made.relate(*self.bench.untouched())
        made.compile_seconds = self.compiling
        made.tuning_seconds = max(0.0, measure.clock() - self.began - self.compiling)
        return made

    def _verification(self, chosen: Sequence[str]) -> dict[str, str]:
        if not chosen:
            return self._covered()
        kind = widest(self.run.strategies[name].kind for name in chosen)
        return {**self._covered(), f"all together, as {kind}": self._verify(chosen).reason or "held"}

    def _covered(self) -> dict[str, str]:
        """What was put back after the trials and is covered by the hash, and what is not."""
        found = {"restored": f"{self.escrow.covers} proven by hash to be what they were"}
        if self.escrow.unheld:
            named = ", ".join(f"{path} ({type(value).__qualname__})" for path, value in self.escrow.unheld[:6])
            more = f" and {len(self.escrow.unheld) - 6} more" if len(self.escrow.unheld) > 6 else ""
            found["not held, nor covered by the hash"] = f"{named}{more}"
        return found

    # -- remembering ---------------------------------------------------------------------------------------------

    def reuse(self, store: Any) -> Any:
        """Return the remembered certificate where it still holds, else None."""
        found = None if store is None else store.find(self.key)
        if found is None:
            return None
        self._baseline()
        self.say("the remembered certificate")
        fault, shown = self._canary(found)
        if fault:
            self.events.append(
                f"step 0: the certificate of {found.created} did not hold and was measured anew: {fault}"
            )
            log("warn", f"accelerate: {self.events[-1]}")
            return None
        found.events = [*found.events[-9:], f"step 0: reused, {shown}"]
        found.verification = {**found.verification, **self._covered()}
        return found

    def _canary(self, found: Any) -> tuple[str, str]:
        """Return what is wrong with a remembered certificate, and else what was seen."""
        bench = self.bench
        now = _native.StepNow(seconds=bench.step_seconds, spread=bench.spread, disturbed=bench.disturbed, time=_now())
        if fault := _native.why_not_trusted(found, now):
            return fault, ""
        names = list(found.accepted())
        if stale := next((name for name in names if name in self._skipped or name not in self.run.strategies), ""):
            return f"{stale}: {self._skipped.get(stale, 'not offered')}", ""
        options = _native.DuelOptions.canary(self.seed)
        try:
            if not names:
                again = _native.worth_another_look(found)
                if again and again in self.run.strategies and again not in self._skipped:
                    result, _ = self.bench.duel((), [again], options)
                    if result.decision == "accept":
                        return f"{again} pays now: {result.reason}", ""
                return "", "nothing pays here"
            ruling = self._judged(names, Verifier(self.run, self.escrow, steps=1, seed=self.seed))
            if not ruling.held:
                return ruling.reason, ""
            result, cost = self.bench.duel((), names, options)
            self.compiling += cost
            if not result.speedup.mid > 1.0:
                return result.reason, ""
            if hindrance := self._hindrance(names):
                return hindrance, ""
        except SideFailed as failure:
            return self._blame(failure), ""
        return "", f"canary {result.speedup.mid:.2f}x over {result.pairs} pairs, one step verified"

    # -- what was asked for --------------------------------------------------------------------------------------

    def required(self, certificate: Any) -> dict[str, str]:
        """Return, by strategy, why it is to be active although the search did not keep it: a setting asks for it.

        The verifier judges it beside what was kept. What does not apply or is wrong is refused, which the log and the
        certificate say.
        """
        found: dict[str, str] = {}
        accepted = list(certificate.accepted())
        for setting, names in self._asked.wanted.items():
            if any(name in accepted or name in found for name in names):
                continue
            value = getattr(self.settings, setting)
            name = next((name for name in names if name not in self._skipped), names[0])
            why = self._skipped.get(name, "")
            if not why:
                try:
                    ruling = self._verify([*accepted, *found, name])
                    why = "" if ruling.held else ruling.reason
                except SideFailed as failure:
                    why = self._blame(failure)
            if why:
                _restand(certificate, {name}, "refused", f"{setting} = {value!r} asks for it, and it cannot be: {why}")
                log("warn", f"accelerate: {setting} = {value!r} is refused: {why}")
            else:
                found[name] = f"asked for by {setting} = {value!r}, whatever it gains"
        return found

    def put_required(self, certificate: Any, required: dict[str, str]) -> None:
        """Put in force what was asked for, as part of the run: the watch leaves it alone, `Plan.revert` does not."""
        generators = rng_state(self.run.params)
        for name, why in required.items():
            try:
                self.run.bring([*self.run.in_force, name])
            except Exception as error:
                _restand(certificate, {name}, "failed", f"{why}; it could not be put in force: {_told(error)}")
                log("warn", f"accelerate: {name} failed and is left out: {_told(error)}")
                continue
            self.run.required = (*self.run.required, name)
            measured = next((e.reason for e in certificate.entries if e.strategy == name), "")
            _restand(certificate, {name}, "accepted", f"{why}; {measured}" if measured else why)
        set_rng_state(generators)

    def _hindrance(self, names: list[str]) -> str:
        """Return which of several makes the others slower, if one does; what would be compiled anew is left out."""
        for name in names if len(names) > 1 and not self._compiles_any(names) else ():
            rest = [other for other in names if name not in (other, *self.run.strategies[other].requires)]
            result, _ = self.bench.duel(names, rest, _native.DuelOptions.member(self.seed))
            if result.decision == "accept":
                return f"the rest is faster without {name}: {result.reason}"
        return ""

    def _compiles_any(self, names: list[str]) -> bool:
        return any(self.run.strategy(name).expected_cost(self.run) > 0 for name in names)

    # -- the end -------------------------------------------------------------------------------------------------

    def put_in_force(self, certificate: Any) -> None:
        """Apply what was accepted to the user's own objects; what cannot be is failed, and said."""
        generators = rng_state(self.run.params)
        for name in certificate.accepted():
            try:
                self.run.bring([*self.run.in_force, name])
            except Exception as error:  # noqa: PERF203  (each may fail by itself)
                _restand(certificate, {name}, "failed", f"could not be put in force: {_told(error)}")
                log("warn", f"accelerate: {name} failed and is left out: {_told(error)}")
        set_rng_state(generators)
        spent = format_duration(measure.clock() - self.began)
        log("info", f"accelerate: {', '.join(self.run.in_force) or 'nothing'} in force after {spent}")


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _restand(certificate: Any, names: Iterable[str], standing: Any, reason: str) -> None:
    wanted = set(names)
    entries = list(certificate.entries)
    for entry in entries:
        if entry.strategy in wanted:
            entry.standing, entry.reason = standing, reason
    certificate.entries = entries


def _told(error: BaseException) -> str:
    """One line of an exception: a compiler's are pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
