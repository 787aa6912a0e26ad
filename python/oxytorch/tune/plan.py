"""What `accelerate` returns: the run as it is now, why, and the way back."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _C
from ..base import format_duration, format_size, log, system_info
from ..generators import unmoved_generators
from ..memory import MemoryManager
from ..report import SettingLine, TrainingReport, write_whole
from ..step import is_closure
from .asked import Asked
from .run import Run
from .watch import Watch

if TYPE_CHECKING:
    from ..accelerator import GPUConfig
    from ..config import PerformanceConfig
    from ..monitor import PerformanceMonitor
    from ..trainer import Trainer

__all__ = ["Plan"]


class Plan:
    """A training run in which what pays is active, and the certificate that says so. ``str(plan)`` is a table.

    While strategies are active the run is watched at its step boundaries: now and then a few steps are taken without
    them, and where they no longer pay, or the losses of one batch are further apart than their kind allows, they are
    taken back. That is said once, in the log, in `certificate.events` and here.

    Attributes
    ----------
    model, optimizer
        The user's own objects; lists where lists were given.
    certificate : oxytorch._C.tune.Certificate
    settings : PerformanceConfig
    asked : Asked
        What the settings ask for by name.
    """

    def __init__(
        self,
        run: Run,
        certificate: Any,
        settings: PerformanceConfig,
        asked: Asked,
        *,
        store: Any = None,
        seed: int = 0,
    ) -> None:
        self.certificate = certificate
        self.settings = settings
        self.asked = asked
        self._run = run
        self._store = store
        self._resident = _resident()
        self._trainer: Trainer | None = None
        self._monitor: PerformanceMonitor | None = None
        self._memory: MemoryManager | None = None
        self._gpu: GPUConfig | None = None
        self._watch: Watch | None = None
        self._seed = seed

    def begin(self, tuner: Any, *, moved: Sequence[str] = ()) -> None:
        """Do what follows making the strategies active: store the certificate, watch the run.

        None of these is worth the plan: what fails is said in the log and in the plan's events, and left out. So is
        what was `moved`, not put back after the trials. What the settings ask for beside what the search kept is made
        active as a part of the run: it is not stored, and the watch leaves it alone.
        """
        if moved:
            named = ", ".join(moved[:6]) + (f" and {len(moved) - 6} more" if len(moved) > 6 else "")
            self._note(
                f"step 0: {named} could not be held and went on during tuning: it has seen the steps of all trials. "
                "Name what holds it with state=, or make it anew"
            )
        if self._store is not None and (why := self._store.try_put(self.certificate)):
            self._note(f"step 0: the plan is not stored, so the next run tunes again: {why}")
        with unmoved_generators(self._run.params):
            self._run.required += tuple(tuner.activate_required(self.certificate))
        self._attempt("the run is not watched", self._begin_watch)

    def settle(self) -> None:
        """Let strategies know that trials are over."""
        self._attempt("what only trials needed is kept", self._run.settle)

    def give_back(self) -> None:
        """Let go of all that only tuning needed, once nothing else refers to it."""
        self._attempt("memory of tuning is not given back", self._release)

    def _release(self) -> None:
        self._run.forget_idle()
        gc.collect()
        _C.memory.give_back_host_memory()
        if self._run.device.type != "cpu" and torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def _begin_watch(self) -> None:
        run = self._run
        if any(not run.strategies[name].feeds for name in run.beside_required):
            self._watch = Watch(run, self.certificate, self._store, self._seed, lambda: self.asked.has_budget)

    def _attempt(self, otherwise: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._note(f"step 0: {otherwise}: {type(error).__name__}: {error}")

    def _note(self, event: str) -> None:
        self.certificate.events = [*self.certificate.events, event]
        log("warn", f"accelerate: {event}", "tune")

    # -- the run -------------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The training run, with what is active on it."""
        return self._run

    @property
    def model(self) -> Any:
        """The user's model, or the list of them."""
        return self._run.given_models

    @property
    def optimizer(self) -> Any:
        """The user's optimizer, or the list of them; where another one steps in its place, through it."""
        return self._run.given_optimizers

    @property
    def data(self) -> Iterable[Any]:
        """What to draw batches from: the user's own, or what a strategy made of it; no batch is lost."""
        return () if self._run.data is None else self._run.data

    def step(self, batch: Any) -> Tensor:
        """Take one whole training step; return the detached loss."""
        watch = self._watch
        if watch is None:
            return self._run.take(batch)
        watch.batch = None if is_closure(batch) else batch  # which may draw the next one
        try:
            loss = self._run.take(batch)
        finally:
            watch.batch = None
        if loss.device.type == "cpu" and not bool(torch.isfinite(loss).all()):
            watch.doubt()
        return loss

    @property
    def trainer(self) -> Trainer:
        """The `oxytorch.Trainer` that `PerformanceOptimizer.prepare` made on this plan."""
        if self._trainer is None:
            raise AttributeError(
                "this plan has no trainer: it is of accelerate(), which leaves the loop to you. Make one by "
                "oxytorch.Trainer(model, optimizer, loss_fn, plan=plan), or call "
                "PerformanceOptimizer(...).prepare(...)."
            )
        return self._trainer

    @property
    def monitor(self) -> PerformanceMonitor:
        """A monitor, which times the steps of `trainer`; in a loop of your own, ``with plan.monitor.step():``."""
        if self._monitor is None:
            from ..monitor import PerformanceMonitor  # noqa: PLC0415

            self._monitor = PerformanceMonitor()
        return self._monitor

    @property
    def memory(self) -> MemoryManager:
        """Live figures, thresholds and clean-up: `trainer` calls its ``step``; in a loop of your own, you do."""
        if self._memory is None:
            self._memory = MemoryManager()
        return self._memory

    # -- what came of it -----------------------------------------------------------------------------------------

    @property
    def accepted(self) -> tuple[str, ...]:
        """Names of the active strategies, in the order in which they were put there."""
        return tuple(name for name in self.certificate.accepted() if name not in self._run.fallbacks)

    @property
    def found(self) -> tuple[str, ...]:
        """What was found to pay, also while a step is taken without it; or what the run that is continued had found."""
        return (self._watch.names if self._watch is not None else ()) or self._run.beside_required

    @property
    def rejected(self) -> dict[str, str]:
        """Why each of the others is not, by name."""
        return {
            entry.strategy: f"{entry.status}: {entry.reason}"
            for entry in self.certificate.entries
            if entry.status != "accepted"
        }

    @property
    def speedup(self) -> tuple[float, float, float]:
        """Seconds of a step as given over seconds now: low, mid and high of the interval; ones where nothing pays."""
        found = self.certificate.speedup
        return (1.0, 1.0, 1.0) if found is None or not self.accepted else (found.low, found.mid, found.high)

    @property
    def peak_bytes(self) -> tuple[int, int] | None:
        """The most that tensors take in a step, model and optimizer included, as given and now; None: not measured."""
        made = self.certificate
        if made.given_peak_bytes is None or made.tuned_peak_bytes is None:
            return None
        fitted = self.asked.fitted_peak
        tuned = made.tuned_peak_bytes if self.accepted else made.given_peak_bytes
        return made.given_peak_bytes, tuned if fitted is None else fitted

    def __str__(self) -> str:
        return str(self.certificate.to_text())

    def __repr__(self) -> str:
        return f"<Plan: {', '.join(self.accepted) or 'nothing'} active, {self.speedup[1]:.2f}x>"

    def explain(self) -> str:
        """Return every choice with its reason, in sentences."""
        made = self.certificate
        low, mid, high = self.speedup
        lines = [
            f"A step took {format_duration(made.baseline_seconds)} as given and takes "
            f"{format_duration(made.tuned_seconds)} now: {mid:.2f} times as fast ({low:.2f} to {high:.2f})."
            if self.accepted
            else f"A step takes {format_duration(made.tuned_seconds)}; nothing was found that makes it faster."
        ]
        if made.disturbance:
            lines.append(f"The machine was busy while this was measured: {made.disturbance}. It is not remembered.")
        for entry in made.entries:
            lines.append(f"{entry.strategy} ({entry.kind}): {entry.status}. {entry.reason}")
            if entry.cost and entry.status == "accepted":
                lines.append(f"  It costs: {entry.cost}")
            if entry.break_even_steps is not None:
                once = format_duration(entry.cost_seconds)
                lines.append(f"  Turning it on took {once}, repaid after {entry.break_even_steps:.0f} steps.")
        lines += [f"Verified: {check}: {outcome}." for check, outcome in made.verification.items()]
        lines.append(f"Tuning took {format_duration(made.tuning_seconds)}{_repaid(made)}.")
        lines += [f"Asked for: {line.name}: {line.state}. {line.reason}" for line in self.asked.lines()]
        lines += [f"Since then: {event}." for event in made.events]
        lines += [f"{name} failed, and the run goes on without it: {why}" for name, why in self._run.fallbacks.items()]
        if (peaks := self.peak_bytes) is not None:
            given, now = map(format_size, peaks)
            lines.append(
                f"The tensors of a step take {now} at the most, model and optimizer included, and {given} as given."
            )
        lines.append(f"Memory: {self.memory.use()}; {format_size(self._resident)} before.")
        return "\n".join(lines)

    def report(self) -> TrainingReport:
        """Return a line a strategy, times, and what happened since, as `oxytorch.Trainer.report` does."""
        made = self.certificate
        states = {"accepted": "on", "skipped": "off"}
        lines = [
            SettingLine(
                entry.strategy,
                states.get(entry.status, "refused"),
                f"{entry.status}: {entry.reason}",
                entry.cost if entry.status == "accepted" else "",
                None if entry.speedup is None else entry.speedup.mid,
            )
            for entry in made.entries
        ]
        lines = [self._fallen_back(line) for line in lines] + self.asked.lines()
        timings = {"as given": made.baseline_seconds, "step": made.tuned_seconds if self.accepted else 0.0}
        counters = {"tuning_seconds": round(made.tuning_seconds, 3), "compile_seconds": round(made.compile_seconds, 3)}
        busy = [f"measured on a busy machine: {made.disturbance}"] if made.disturbance else []
        verdict = "; ".join([*busy, *made.events]) or f"{self.speedup[1]:.2f} times as fast as given."
        return TrainingReport(
            made.level, lines, {name: value for name, value in timings.items() if value}, counters, verdict,
            self.asked.pages(),
        )  # fmt: skip

    def _fallen_back(self, line: SettingLine) -> SettingLine:
        why = self._run.fallbacks.get(line.name)
        return line if why is None else SettingLine(line.name, "refused", why)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the certificate as JSON, whole or not at all."""
        self.certificate.save(os.fspath(path))

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the certificate as a page that needs no network; also write it where a path is given."""
        page = str(self.certificate.to_html())
        if path is not None:
            write_whole(path, page)
        return page

    # -- the way back --------------------------------------------------------------------------------------------

    def revert(self) -> None:
        """Take everything back: objects and settings are as before `accelerate`; what was trained since stays."""
        self._run.required = ()
        try:
            self.withdraw()
        finally:
            self._run.data = self._run.given_data = self.asked.given_of(self._run.given_data)
            self.asked.revert()
            if self._gpu is not None:
                self._gpu.revert()
            if self._memory is not None:
                self._memory.revert()

    def withdraw(self) -> None:
        """Take back what was found to pay; what settings ask for stays."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._run.set_active(())


def _repaid(certificate: Any) -> str:
    after = certificate.repaid_after()
    if after is None:
        return ""
    compiling = certificate.compile_seconds
    return f"{f' and compiling {format_duration(compiling)}' if compiling > 0 else ''}, repaid after {after:.0f} steps"


def _resident() -> int:
    return int(system_info()["memory"]["resident"] or 0)
