"""What a trainer's settings came to: what is named at once, what is on "auto" by the tuner at the first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset

from .. import _C
from .._C import tune as _native
from ..amp import hardware_support
from ..base import log
from ..config import PerformanceConfig
from ..data.batches import copied, visit
from ..optim.tail import TailOptimizer
from ..report import SettingLine
from ..step import is_closure
from ..tune.accelerate import tuned, untuned
from ..tune.asked import Asked, put
from ..tune.plan import Plan
from ..tune.run import Run
from ..tune.strategy import offer

__all__ = ["Decisions"]

# Made active once tuning is over: the verifier's references are the optimizer as given and code that is not compiled.
_LATE = ("optimizer", "compile")
# Steps of a run from which on its loader is tried: trials draw some fifty batches.
_LEAST_STEPS_OF_LOADER = 1000
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LINES = ("allocator", "threads", "flush_denormals", "precision", "channels_last", "attention")
_OF_LOADER = ("num_workers", "prefetch")
# Strategies by what states of earlier versions say of a setting.
_EARLIER = {
    ("precision", "bf16"): "bf16_autocast",
    ("channels_last", True): "channels_last",
    ("attention", "math"): "math_attention",
    ("attention", "math_bf16"): "math_attention_bf16",
}


class Decisions:
    """Brings the settings of a trainer about on its run, and says what came of each.

    Parameters
    ----------
    run : Run
    config : PerformanceConfig
    calibrate : bool
        Whether anything may be tried.
    plan : Plan, optional
        That of the run, where it has one: nothing is decided again.

    Attributes
    ----------
    plan : Plan
        What is active on the run, and why.
    are_made : bool
        Whether the first batch has been seen.
    steps : int, optional
        Of the run, where the settings do not say it and something else does.
    """

    def __init__(self, run: Run, config: PerformanceConfig, *, calibrate: bool, plan: Plan | None = None) -> None:
        self.run = run
        self._config = config if plan is None else plan.settings
        self._calibrate = calibrate
        self.steps: int | None = None
        self._is_of_plan = self.are_made = plan is not None
        self._fits_memory = plan is None and _C.base.checkpointing_of(config._native) != "off"
        self._why = 'on "auto", and nothing of it was tried.' if plan else "it is decided at the first batch."
        self._not_resumed: list[str] = []
        self._awaits_loader: list[str] = []  # what a run that is continued had found for its loader
        if plan is None:
            self.asked = Asked(config, run.strategies, by_trainer=True)
            plan = untuned(run, config, self.asked)
        else:
            self.asked = plan.asked
        self.plan = plan

    def activate_named(self) -> None:
        """Make active what is named, without a trial."""
        if self._config.optimizer_state == "bf16":
            self.run.tail_options = {"state_dtype": "bf16"}
        self.asked.activate(self.run)
        self.run.settle()

    def feed(self, loader: Any) -> Any:
        """Return what to draw a loader's batches from, as the settings and the plan have it."""
        on_one = len({p.device for p in self.run.params}) == 1  # else the model knows by itself
        made = self.asked.feed(loader, self.run.device if on_one else None)
        return self.run.data if made is self.run.given_data and made is not None else made

    def tune_loader(self, loader: Any, begin: Callable[[Any], None]) -> Any:
        """Return what to draw batches from in a run of `steps`: the same ones, in a way that the tuner found to pay.

        Where nothing is decided yet, `begin` is given a first batch, of which no trace stays. Only a torch DataLoader
        without workers over a data set with numbers is drawn from before its epoch begins.
        """
        run = self.run
        feeds = [name for name, cls in run.strategies.items() if cls.feeds and name not in self.asked.skipped]
        left = type(loader) is not DataLoader or loader.num_workers > 0 or isinstance(loader.dataset, IterableDataset)
        if left or not feeds:
            return loader
        if self._awaits_loader:
            run.data = run.given_data = loader
            self._not_resumed += [why for name in self._awaits_loader if (why := put(run, name))]
            self._awaits_loader.clear()
            return run.data
        if self.are_made or not self._calibrate or (self.steps or 0) < _LEAST_STEPS_OF_LOADER:
            return loader
        with visit(loader, run.params):
            batch = run.place(next(iter(loader), None))
        if batch is None or self._hindrance(batch):
            return loader
        run.data = run.given_data = loader
        begin(batch)
        return run.data

    @property
    def await_batch(self) -> bool:
        """Whether `begin` has something to do with the next batch."""
        return not self.are_made or self._fits_memory

    def begin(self, batch: Any) -> None:
        """Let the tuner decide what is on "auto", where trials on this batch are possible; fit the step to memory."""
        if not self.are_made:
            self._decide(batch)
        if self._fits_memory:
            self._fit_memory(batch)
        self._fits_memory = False

    def _decide(self, batch: Any) -> None:
        run, config = self.run, self._config
        self._why = self._hindrance(batch)
        if not self._why:
            try:
                run.batches = (copied(batch),)
            except TypeError as error:
                self._why = str(error)
        if self._why:
            self.are_made = True
            return
        named = run.required
        offers = [offer(name, cls) for name, cls in run.strategies.items()]
        options = _native.tuning_of_trainer(config._native, self.steps or 0, offers)
        names = list(run.strategies)
        run.required = tuple(name for name in named if run.strategies[name].group not in _LATE)
        try:
            run.set_active(())
            self.plan = tuned(
                run,
                config,
                self.asked,
                options,
                decided_by=[_native.decided_by(config._native, names, options.steps_planned, by_trainer=True)],
                store=_native.CertificateStore("") if config.remember else None,
            )
        except BaseException:
            run.required, run.batches = named, ()
            run.set_active(())
            raise
        found = run.beside_required
        run.required = named
        run.set_active(found)
        self._why = "nothing of it applies here."
        self.are_made = True
        if not any(run.strategies[name].group in _LATE for name in named):
            self._fits_memory = False  # tuning has done so

    @property
    def can_repeat(self) -> bool:
        """Whether a step that runs out of memory can be taken again: it has a budget, and a window is a batch."""
        run = self.run
        return self.asked.fits_memory and run.accumulation == 1 and run.own_step is None and len(run.slots) == 1

    def may_fit_again(self, fits: int) -> bool:
        """Whether a step that runs out of memory is fitted once more after `fits` times."""
        return _native.may_fit_again(self.asked.checkpointing, fits)

    def fit_again(self, batch: Any, why: str, fits: int) -> None:
        """Fit the step to its budget anew, by a batch that ran out of memory.

        It is fitted to less than before where `fits` plans have not been enough.

        Raises
        ------
        torch.OutOfMemoryError
            Where no choice of blocks is within the budget.
        """
        anew = _native.fitted_anew(self.run.taken + 1)
        log("warn", f"{anew}{why}", "trainer")
        self._fit_memory(batch, anew, tighter=fits > 0)

    def _fit_memory(self, batch: Any, why: str = "", *, tighter: bool = False) -> None:
        """Bring about what the setting names, where tuning has not done so for the step as it is now."""
        if is_closure(batch):
            self.asked.refuse_memory(_native.closures_unplanned())
            return
        kept = self.run.batches
        try:
            own = (copied(batch),)
        except TypeError as error:
            self.asked.refuse_memory(str(error))
            return
        self.run.batches = own
        try:
            self.asked.fit_memory(self.run, why, tighter=tighter)
        finally:
            self.run.batches = kept

    def _hindrance(self, batch: Any) -> str:
        """Why nothing may be tried on this batch; empty where nothing speaks against it."""
        return _native.hindrance(
            calibrate=self._calibrate,
            is_closure=is_closure(batch),
            is_iterator=hasattr(batch, "__next__"),
            has_hooks=any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self.run.params),
            is_distributed=torch.distributed.is_available() and torch.distributed.is_initialized(),
            has_lazy=any(is_lazy(p) for p in self.run.model.parameters()),
        )

    # -- continued runs ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was decided, for a continued run to use again."""
        return {"active": [*self.plan.found, *self._awaits_loader]}

    @contextmanager
    def loading(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Inside, model and optimizer are as given; then what was named is active, and what an earlier run had found.

        Layouts, and formats of the optimizer's state, follow what was loaded.
        """
        if self._is_of_plan:
            yield
            return
        named, self.run.required = self.run.required, ()
        try:
            self.plan.withdraw()
            yield
        finally:
            self.run.required = named
            self.run.set_active(())
        found = state.get("active")
        if found is None:
            found = [_EARLIER[setting] for setting in state.items() if setting in _EARLIER]
            if self._config.step_tail == "auto":
                found.append("step_tail")
        later = [name for name in found if name in self.run.strategies and self.run.strategies[name].feeds]
        self._awaits_loader = [name for name in later if name not in named]
        now = [name for name in found if name not in named and name not in later]
        self._not_resumed = [why for name in now if (why := put(self.run, name))]
        self._why = "the run that is continued here had none of it."
        self.are_made = True

    def revert(self) -> None:
        """Take back what was made active here."""
        if not self._is_of_plan:
            self.plan.revert()

    # -- report --------------------------------------------------------------------------------------------------

    def lines(self) -> list[SettingLine]:
        """Return a line a setting, and one for each active strategy that no setting names."""
        made_of = self._made_of()
        host = {line.name: line for line in self.asked.lines()}
        lines = [host.pop(key) if key in host else SettingLine(*made_of.of(key)) for key in _LINES]
        if self._config.compile != "off" or self.run.fallbacks:
            lines.append(SettingLine(*made_of.of("compile")))
        if self.run.given_data is not None:  # how batches are drawn was tried
            lines += [SettingLine(*made_of.of(key)) for key in _OF_LOADER if key not in host]
        lines += [*self._of_the_optimizer(made_of), *host.values()]
        lines += [SettingLine(*parts) for parts in made_of.beside_settings()]
        lines += [SettingLine("decisions", "refused", why) for why in self._not_resumed]
        return [*lines, self._nonfinite(), self._scaler()]

    def _made_of(self) -> Any:
        run, slow = self.run, ""
        if (dtype := _DTYPES.get(self._config.precision)) is not None:
            native, why = hardware_support(run.device, dtype)
            slow = "" if native else why
        # What one costs may be known once it is active.
        active = [name for name in (*run.required, *self.plan.found) if name not in run.fallbacks]
        known: Mapping[str, Any] = {**run.strategies, **{name: run.strategy(name) for name in active}}
        return _native.SettingLines(
            config=self._config._native,
            certificate=self.plan.certificate,
            offers=[offer(name, known[name]) for name in run.strategies],
            refused={**self.asked.refused, **{run.strategies[n].group: why for n, why in run.fallbacks.items()}},
            active=active,
            required=run.required,
            untried=self._why,
            slow=slow,
        )

    def _of_the_optimizer(self, made_of: Any) -> list[SettingLine]:
        run = self.run
        tail = run.optimizer if isinstance(run.optimizer, TailOptimizer) else None
        lines = made_of.of_optimizer(
            is_own=isinstance(run.original, TailOptimizer),
            replaces=tail is not None,
            state="fp32" if tail is None else tail._tail_options["state_dtype"] or "fp32",
            active=run.active,
        )
        return [SettingLine(*parts) for parts in lines]

    def _nonfinite(self) -> SettingLine:
        run = self.run
        if isinstance(run.original, TailOptimizer):
            policy, reason = run.original._tail_options["nonfinite"], "the optimizer itself looks at the gradients."
        elif run.nonfinite == "propagate":
            return SettingLine("nonfinite", "off", "a gradient that is not finite is stepped with.")
        elif run.guard is None:
            policy, reason = run.nonfinite, "the step tail looks at the gradients."
        else:
            reason = f"{run.nonfinite}: the gradients are looked at before {type(run.original).__name__} steps."
            return SettingLine("nonfinite", "on", reason, "their norms, and one host read a step.")
        return SettingLine("nonfinite", "off" if policy == "propagate" else "on", f"{policy}: {reason}")

    def _scaler(self) -> SettingLine:
        if self.run.scaler is None:
            return SettingLine("grad_scaler", "off", "only float16 needs a loss scale.")
        inside = isinstance(self.run.optimizer, TailOptimizer)
        where = "inside the step tail" if inside else "by torch, with one host read a step"
        return SettingLine("grad_scaler", "on", f"unscale, check and skip happen {where}.")
