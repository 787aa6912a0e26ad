"""The loop of `accelerate`: asks the search what to try, measures and verifies it, and writes the certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from .._C import tune as _native
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

    @property
    def may_tune_memory(self) -> bool:
        """Whether the allocator's settings are the tuning's to choose on this run."""
        return "allocator" in self.run.strategies and "allocator" not in self._skipped

    # -- measuring -----------------------------------------------------------------------------------------------

    def measure(self) -> Any:
        """Return the certificate of a search; nothing is in force at the end."""
        self._baseline()
        self.search = self._make_search()
        result = self._conclude()
        return self._certificate(list(self.search.best()), result)

    def _explore(self) -> None:
        while (trial := self.search.ask()) is not None:
            against = ", ".join(trial.incumbent) or "nothing"
            self.say(f"{trial.strategy}{' taken away' if trial.removal else ''} against {against}")
            self.search.tell(self._try(trial))

    def _baseline(self) -> None:
        self.say("the step as it is")
        if self.bench.step_seconds == 0:
            self.bench.baseline()
            self._look()

    def _make_search(self) -> Any:
        facts = []
        self.say("each update of the optimizer by itself")
        offered = [name for name in self.run.strategies if name not in self._skipped]
        of_optimizer = [name for name in offered if self.run.strategies[name].group == "optimizer"]
        updates, proven = self.bench.updates(of_optimizer, self.seed)
        for name, cls in self.run.strategies.items():
            one = _native.StrategyFacts(
                name,
                kind=cls.kind,
                group=cls.group,
                hopeful=cls.hopeful,
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
        options = _native.SearchOptions.for_run(
            self.steps_planned, self.bench.step_seconds, self.budget or 0.0, self.seed
        )
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
                if not ruling.held:
                    self._drop_culprits(chosen, ruling)
                    continue
                result = self._against_nothing(chosen)
                if result.decision == "accept":
                    return result
                self._drop(last, "rejected", f"all together did not pay: {result.reason}")
            except SideFailed as failure:
                self._drop(last, "failed", f"all together failed: {self._blame(failure)}")

    def _against_nothing(self, chosen: list[str]) -> Any:
        if chosen == self._alone[0]:
            return self._alone[1]  # that was the trial by which it was accepted
        self.say("everything against nothing")
        return self.bench.duel((), chosen, _native.DuelOptions.conclusion(self.seed + 1))[0]

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
        made.created = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        made.steps_planned = self.steps_planned
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
        fault, shown = self._canary(list(found.accepted()))
        if fault:
            self.events.append(
                f"step 0: the certificate of {found.created} did not hold and was measured anew: {fault}"
            )
            log("warn", f"accelerate: {self.events[-1]}")
            return None
        found.events = [*found.events[-9:], f"step 0: reused, {shown}"]
        found.verification = {**found.verification, **self._covered()}
        return found

    def _canary(self, names: list[str]) -> tuple[str, str]:
        """Return what is wrong with a remembered combination, and else what was seen."""
        if stale := next((name for name in names if name in self._skipped or name not in self.run.strategies), ""):
            return f"{stale}: {self._skipped.get(stale, 'not offered')}", ""
        if not names:
            return "", "nothing pays here"
        options = _native.DuelOptions.canary(self.seed)
        try:
            ruling = self._judged(names, Verifier(self.run, self.escrow, steps=1, seed=self.seed))
            if not ruling.held:
                return ruling.reason, ""
            result, cost = self.bench.duel((), names, options)
        except SideFailed as failure:
            return self._blame(failure), ""
        self.compiling += cost
        if not result.speedup.mid > 1.0:
            return result.reason, ""
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
