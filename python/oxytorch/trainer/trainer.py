"""The training step: accumulate, autocast, backward, step tail, schedule; and the account of what was on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import getitem, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _C
from ..amp import GradScaler
from ..config import PerformanceConfig
from ..data.batches import on_device
from ..data.loader import Loader
from ..generators import rng_state, seed_generators, set_rng_state
from ..memory.batch import is_out_of_memory
from ..report import SettingLine, TrainingReport
from ..step import is_closure, no_phase
from ..tune.accelerate import earlier_plan
from ..tune.checkpointing import StepStart
from ..tune.run import Run, told
from .decisions import Decisions
from .early_stopping import EarlyStopping
from .fit import Callback, FitResult, position_of, run_fit
from .settings import Settings, beside, check_arguments, resolve

if TYPE_CHECKING:
    from ..memory import MemoryManager
    from ..tune.plan import Plan

__all__ = ["Trainer"]

LossFunction = Callable[..., torch.Tensor]
_FORMAT = 1
_DIV_FACTOR = 25.0  # of a cycle: its peak over its first rate, as in torch


class Trainer:
    """Runs training steps under a performance configuration.

    Parameters
    ----------
    model
        The module to train. It is changed in place only in ways that the report names (memory layout). What an earlier
        trainer or plan has made active on it is taken back.
    optimizer
        Any ``torch.optim.Optimizer`` over the model's parameters. From level ``advanced`` on one of ``oxytorch.optim``
        may step in its place: hyperparameters, groups and state are carried over and stay shared, so a scheduler made
        for the given one works on. ``trainer.optimizer`` is the one in use.
    loss_fn
        ``loss_fn(model, batch)`` returning a scalar tensor; or a criterion (a module or a function of
        ``torch.nn.functional``), and then a batch is ``(inputs, targets)``. ``None`` where only closures are used.
    config
        ``"basic"``, ``"advanced"``, ``"ultra"``, a ``PerformanceConfig``, a mapping of its keys or the path of a file.
    scheduler
        A ``torch.optim.lr_scheduler`` scheduler, stepped after each optimizer step; ``ReduceLROnPlateau`` is stepped by
        ``fit`` after each validation.
    monitor
        An ``oxytorch.monitor.PerformanceMonitor``; its phases are forward, backward and tail.
    checkpointer
        Saved to by ``fit`` after each epoch and when stopped by a signal: an object with
        ``save(step, model=, optimizer=, scaler=, scheduler=, extra=)``, or a callable of the trainer.
    memory
        An ``oxytorch.memory.MemoryManager``, whose ``step`` is called after each optimizer step.
    callbacks
        ``Callback`` objects, or callables of ``(trainer, loss)`` called after each step of ``fit``.
    calibrate
        True: what is on "auto" is decided on the first batch by what `oxytorch.accelerate` does, in a second or 2 % of
        the planned run: tried on whole steps, verified, kept where it pays, without a trace of the trials. False:
        nothing is tried, and what is on "auto" stays as it is.
    plan : Plan, optional
        Of `oxytorch.accelerate`, on the same model and optimizer: its steps are taken, and ``plan.step`` does what
        this trainer's settings say as well. What the plan has decided is not decided again.
    **overrides
        Keys of the configuration, such as ``accumulation_steps=4`` or ``clip_norm=1.0``.

    Raises
    ------
    TypeError
        For a model, optimizer, loss, monitor, checkpointer, memory manager or callback of a wrong kind.
    ValueError
        For a configuration key or value that does not exist, for settings that contradict each other or the options of
        an optimizer of ``oxytorch.optim``, or an optimizer without parameters of the model.
    NotImplementedError
        For a setting that a trainer cannot honour. None is dropped without a word.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction | nn.Module | None = None,
        config: PerformanceConfig | Mapping[str, Any] | str | os.PathLike[str] = "advanced",
        *,
        scheduler: Any = None,
        monitor: Any = None,
        checkpointer: Any = None,
        memory: MemoryManager | None = None,
        callbacks: Iterable[Callback | Callable[[Trainer, torch.Tensor], object]] = (),
        calibrate: bool = True,
        plan: Plan | None = None,
        **overrides: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module.")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer.")
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn is a {type(loss_fn).__name__}, expected a callable, a criterion or None.")
        self.settings: Settings
        user = "trainer"
        if plan is not None:
            _check_plan(plan, model, optimizer, loss_fn)
            user = "performance_optimizer" if plan.run.own_step is None else "own_step"
            config = beside(plan, config)
        self.config, self.settings = resolve(config, overrides, user)
        clip = 0.0 if plan is None else plan.run.given_clip or 0.0
        if plan is not None and self.config.is_given("clip_norm") and self.config.clip_norm != clip:
            raise ValueError(
                f"clip_norm = {self.config.clip_norm:g} ({self.config.origin('clip_norm')}): the step of the plan was "
                f"measured with clip_norm = {clip:g}. Give it to accelerate(), and leave it out here."
            )
        for key in () if calibrate else ("steps_planned", "tune_seconds", "remember"):
            if self.config.is_given(key):
                raise ValueError(
                    f"{key} = {getattr(self.config, key)} ({self.config.origin(key)}): calibrate=False tries nothing,"
                    " and so it would have no effect. Leave out one of them."
                )
        self.callbacks = list(callbacks)
        check_arguments(
            self.config, optimizer, scheduler=scheduler, monitor=monitor, checkpointer=checkpointer,
            memory=memory, callbacks=self.callbacks,
        )  # fmt: skip
        self.model = model
        self.calibrate = calibrate and plan is None
        self.monitor = monitor
        self.memory = memory
        self.checkpointer = checkpointer
        self.loss_fn = loss_fn
        self._compiles = self.config.compile != "off"
        self.batches = 0  #: batches seen, those of failed steps excluded
        self._seconds = [0.0, 0.0, 0.0, 0.0]  # data, forward, backward, tail
        self._timed = 0
        self._faults: tuple[int, int] | None = None
        self.epoch = 0
        self.batch_in_epoch = 0
        self.resume_rng: dict[str, Any] | None = None
        self.loader_position: Any = None  #: of a loader that can say where it is, as `fit` or a loaded state left it
        self._loader: Any = None  # what fit draws from
        self._waited: float | None = None  # for the next batch, in fit
        self._slowest = ""  # what a loader that knows says holds it up
        self._stop_reason: str | None = None
        self._stopping: EarlyStopping | None = None
        self._stopping_loaded = False

        if self.settings.seed is not None:
            seed_generators(self.settings.seed)
        self._run = plan.run if plan is not None else self._own_run(optimizer)
        self._params = self._run.params
        self._is_on_one_device = len({p.device for p in model.parameters()}) == 1
        self._watch()
        self.scheduler = scheduler if scheduler is not None else self._make_schedule()
        planned = self._run.accumulation
        self._equip()
        self._decisions = Decisions(self._run, self.config, calibrate=calibrate, plan=plan)
        if plan is not None and planned == 1 < self._run.accumulation:
            plan.asked.fit_memory(self._run)  # with the gradients of earlier batches
        if plan is None:
            self._run.keeps_gradients = False
            self._run.place = self._here
            with self._decisions.asked.applied():
                self._decisions.activate_named()

    def _own_run(self, optimizer: torch.optim.Optimizer) -> Run:
        """The run of a trainer that is given no plan."""
        if (earlier := earlier_plan(self.model)) is not None:
            earlier.run.required = ()
            earlier.withdraw()
        own = getattr(optimizer, "_tail_options", {})  # one of oxytorch.optim does what it was made to do itself
        clip_norm = self.settings.clip_norm if own.get("clip_norm") is None else None
        return Run(self.model, optimizer, self.loss_fn, (), clip_norm=clip_norm, owns_loop=True)

    def _equip(self) -> None:
        """Let the step do what these settings say beside."""
        run, s = self._run, self.settings
        own = getattr(run.original, "_tail_options", {})
        device = run.device.type
        run.phase = self.monitor.phase if self.monitor else no_phase
        run.accumulation = s.accumulate
        run.clip_value = s.clip_value if own.get("clip_value") is None else None
        if s.precision == "fp16":
            run.scope = torch.autocast(device, dtype=torch.float16)
        if s.grad_scaler == "on" or (s.grad_scaler == "auto" and s.precision == "fp16"):
            run.scaler = GradScaler(device)
        run.nonfinite = "propagate" if own else s.nonfinite
        self._guard = run.guard = None if run.nonfinite == "propagate" else _C.trainer.NonFiniteGuard(run.nonfinite)
        if s.ema_decay is not None and own.get("ema_decay") is None:
            run.ema_decay, run.average = s.ema_decay, [p.detach().clone() for p in self._params]
        plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        run.scheduler = None if plateau else self.scheduler

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer in use: the given one, or one of oxytorch.optim that steps in its place."""
        return self._run.optimizer

    @property
    def has_tail(self) -> bool:
        """Whether the optimizer in use is one of oxytorch.optim."""
        return hasattr(self.optimizer, "tail_stats")

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self._run.taken

    @property
    def scaler(self) -> GradScaler | None:
        """Of the loss, where there is one."""
        scaler: GradScaler | None = self._run.scaler
        return scaler

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> torch.Tensor:
        """Take one batch through forward and backward, and the optimizer once a window of batches is full.

        Parameters
        ----------
        batch
            What ``loss_fn`` takes, taken to the model's device where that is one; or a closure without arguments that
            returns the loss.

        Returns
        -------
        torch.Tensor
            The loss of this batch, detached, on its device; nothing is read on the host.

        Raises
        ------
        RuntimeError
            Where a parameter of the model is no longer the optimizer's. The message names it.
        TypeError, ValueError
            Where the loss is not a scalar tensor, or the batch does not fit the criterion.
        """
        if self._compiles and is_closure(batch):
            raise NotImplementedError(
                f"compile = {self.config.compile!r} compiles the model that loss_fn is given, and a closure calls the "
                "model itself. Give loss_fn, or call model.compile() and leave compile at 'off'."
            )
        batch = self._here(batch)
        if self._decisions.await_batch:
            self._begin(batch)
        if self.monitor is None:
            return self._take(batch)
        with self.monitor.step(samples=_samples(batch)):
            if self._waited is not None:
                self.monitor.scalar("data_wait_seconds", self._waited)
                self._waited = None
            return self._take(batch)

    def _begin(self, batch: Any) -> None:
        """Let the first batch decide what is on "auto"."""
        before = self._skipped_by_guard()
        self._decisions.begin(batch)
        self._run.skipped -= self._skipped_by_guard() - before  # in trials

    def _take(self, batch: Any) -> torch.Tensor:
        if not all(map(is_, map(getitem, self._owners, self._keys), self._watched)):
            self._name_the_replaced()
        loss = self._repeatable(batch) if self._decisions.can_repeat else self._decisions.plan.step(batch)
        if self.monitor is not None:
            self.monitor.scalar("loss", loss)
        self.batches += 1
        if self.memory is not None and self._run.micro == 0:
            self.memory.step()
        if self.batches == 3:
            self._faults = (int(_C.trainer.page_faults()), self.batches)
        if self.batches > 1:
            for phase, seconds in enumerate(self._run.seconds, 1):
                self._seconds[phase] += seconds
            self._timed += 1
        return loss

    def _repeatable(self, batch: Any) -> torch.Tensor:
        """Take a step; where it runs out of memory before its update, fit it anew and take it from its start."""
        start = StepStart(self._run)
        fits = 0
        while True:
            try:
                return self._decisions.plan.step(batch)
            except Exception as error:
                if self._run.update_begun or is_closure(batch) or not is_out_of_memory(error):
                    raise
                start.restore()
                if not self._decisions.may_fit_again(fits):
                    raise
                why = told(error)
            self._decisions.fit_again(batch, why, fits)
            fits += 1

    def flush(self) -> bool:
        """Step the optimizer with the batches of an unfinished window, averaged over their actual number.

        Returns
        -------
        bool
            False where no batch was waiting.
        """
        return self._run.flush()

    def compute_loss(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, or of a closure, under what is active."""
        with self._run.scope:
            return self._run.loss(self._here(batch))

    def _here(self, batch: Any) -> Any:
        """Return a batch on the model's device; as it is where the model lies on several, and knows by itself."""
        if self._is_on_one_device and not is_closure(batch):
            return on_device(batch, self._params[0].device)
        return batch

    def _watch(self) -> None:
        mine = {id(p) for p in self._params}
        self._owners: list[Any] = []
        self._keys: list[str] = []
        self._watched: list[Any] = []
        self._names: list[str] = []
        found = False
        for prefix, module in self.model.named_modules():
            for kind in (module._parameters, module._modules):
                for key, value in kind.items():
                    if value is None or (isinstance(value, torch.Tensor) and id(value) not in mine):
                        continue
                    found = found or isinstance(value, torch.Tensor)
                    self._owners.append(kind)
                    self._keys.append(key)
                    self._watched.append(value)
                    self._names.append(f"{prefix}.{key}" if prefix else key)
        if not found:
            raise ValueError("the optimizer holds no parameter of the model. Make it from model.parameters().")

    def _name_the_replaced(self) -> None:
        for owner, key, value, name in zip(self._owners, self._keys, self._watched, self._names, strict=True):
            if owner.get(key) is not value:
                what = "parameter" if isinstance(value, torch.Tensor) else "module"
                raise RuntimeError(
                    f"{what} '{name}' of the model was replaced since the trainer was made, so the optimizer would "
                    "train tensors that the model no longer uses. Load with load_state_dict(assign=False), or make "
                    "a new optimizer and trainer after changing the model."
                )

    # -- fit -----------------------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Iterable[Any],
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        callbacks: Iterable[Callback | Callable[[Trainer, torch.Tensor], object]] = (),
        validate: Callable[[Trainer], float] | Iterable[Any] | None = None,
        progress: bool | None = None,
    ) -> FitResult:
        """Train over a loader.

        Parameters
        ----------
        loader
            Of its sampler, and of itself, ``set_epoch(epoch)`` is called before each epoch, where there is one.
            Yields batches; iterated once an epoch.
        epochs
            Epochs in total, those of a resumed run included. Default 1, or no bound where ``max_steps`` is given.
        max_steps
            Optimizer steps in total.
        callbacks
            More callbacks, for this call.
        validate
            ``validate(trainer)`` returning a number, or a loader whose mean loss is taken; called after each epoch.
            ``ReduceLROnPlateau`` and early stopping go by it; the latter takes lower as better unless
            ``early_stopping_mode`` is ``"max"``. With ``early_stopping_restore_best`` the weights of its best epoch
            are back in the model at the end, unless a signal ended ``fit``.
        progress
            A progress bar on or off; by default on where stderr is a terminal. The loss is read for it twice a second.

        Returns
        -------
        FitResult
            Why it ended and the metrics of each epoch.

        Raises
        ------
        KeyboardInterrupt
            After Ctrl-C, once the step in progress is complete. SIGTERM makes ``fit`` return instead, with
            ``stop_reason`` ``"SIGTERM"``. A second signal takes the default action at once.
        ValueError
            For ``epochs`` or ``max_steps`` below 1.
        """
        return run_fit(
            self,
            loader,
            epochs=epochs,
            max_steps=max_steps,
            callbacks=[*self.callbacks, *callbacks],
            validate=validate,
            progress=progress,
        )

    def stop(self, reason: str = "callback") -> None:
        """Make ``fit`` return after the step in progress."""
        self._stop_reason = reason

    def _start_early_stopping(self) -> EarlyStopping | None:
        """Return the rule of a call of ``fit``: a new one, or the one that was loaded."""
        s = self.settings
        if s.early_stopping_patience is None:
            return None
        if self._stopping is None or not self._stopping_loaded:
            self._stopping = EarlyStopping(
                s.early_stopping_patience,
                s.early_stopping_min_delta,
                s.early_stopping_mode,
                s.early_stopping_restore_best,
            )
        self._stopping_loaded = False
        return self._stopping

    def evaluate(self, loader: Iterable[Any]) -> float:
        """Return the mean loss over a loader, in eval mode, without gradients; each batch counts the same."""
        was_training = self.model.training
        self.model.eval()
        total: torch.Tensor | None = None
        count = 0
        try:
            with torch.no_grad():
                for batch in loader:
                    loss = self.compute_loss(batch).detach().float()
                    total = loss if total is None else total + loss
                    count += 1
        finally:
            self.model.train(was_training)
        if total is None:
            raise ValueError("the loader to evaluate on is empty.")
        return float(total) / count

    # -- weights, state ------------------------------------------------------------------------------------------

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Put the averaged weights into the model for the scope, and the trained ones back after it."""
        average = self._run.average
        if average is None:
            if not self._tail_averages():
                raise RuntimeError("no average is kept: set ema_decay, for example 0.999.")
            optimizer: Any = self.optimizer
            with optimizer.ema_weights():
                yield
            return
        with torch.no_grad():
            own = [p.detach().clone() for p in self._params]
            torch._foreach_copy_(self._params, average)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._params, own)

    def _tail_averages(self) -> bool:
        """Whether the optimizer in use keeps the average."""
        return getattr(self.optimizer, "_tail_options", {}).get("ema_decay") is not None

    def state_dict(self) -> dict[str, Any]:
        """Return all that a bit-for-bit continuation needs; tensors are shared, so save before the next step."""
        optimizer: Any = self.optimizer
        ema: Any = self._run.average
        if ema is None and self._tail_averages():
            ema = optimizer.ema_state_dict()
        return {
            "format": _FORMAT,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "ema": ema,
            "counters": {
                "global_step": self.global_step,
                "batches": self.batches,
                "micro": self._run.micro,
                "epoch": self.epoch,
                "batch_in_epoch": self.batch_in_epoch,
            },
            "gradients": [p.grad for p in self._params] if self._run.micro else None,
            "rng": rng_state(self._params),
            "epoch_rng": self.resume_rng,
            "loader": self.loader_position if self._loader is None else position_of(self._loader),
            "decisions": self._decisions.state(),
            "early_stopping": None if self._stopping is None else self._stopping.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned, generators included; the settings decided then are used again.

        Raises
        ------
        ValueError
            Where the state is of another kind or version.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(f"this is no trainer state of format {_FORMAT}: format is {state.get('format')!r}.")
        with self._decisions.loading(state["decisions"]):
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self._load_averages(state["ema"])
        counters = state["counters"]
        self._run.taken = counters["global_step"]
        self.batches = counters["batches"]
        self._run.micro = counters["micro"]
        self.epoch = counters["epoch"]
        self.batch_in_epoch = counters["batch_in_epoch"]
        gradients = state["gradients"] or [None] * len(self._params)
        for p, grad in zip(self._params, gradients, strict=True):
            p.grad = None if grad is None else grad.detach().clone()
        self._stopping = None
        stopping = self._start_early_stopping()
        if stopping is not None and state.get("early_stopping") is not None:
            stopping.load_state_dict(state["early_stopping"])
            self._stopping_loaded = True
        self.resume_rng = state["epoch_rng"]
        self.loader_position = state.get("loader")
        set_rng_state(state["rng"])

    @contextmanager
    def _drawing_from(self, loader: Any) -> Iterator[None]:
        """Know the loader inside, so that a state that is saved there says where it is, and remember where it ended."""
        self._loader = loader
        try:
            yield
        finally:
            self.loader_position = position_of(loader)
            self._slowest = loader.stats()["bottleneck"] if isinstance(loader, Loader) else ""
            self._loader = self._waited = None

    def _load_averages(self, averages: Any) -> None:
        """Take over averages of a state, whoever kept them then and keeps them now."""
        if averages is None:
            return
        by_place: dict[int, torch.Tensor] = averages["ema"] if isinstance(averages, dict) else dict(enumerate(averages))
        if self._run.average is not None:
            for place, average in by_place.items():
                self._run.average[place].copy_(average)
        elif self._tail_averages():
            optimizer: Any = self.optimizer
            optimizer.load_ema_state_dict({"ema": by_place})

    def _make_schedule(self) -> Any:
        s = self.settings
        if s.schedule is None:
            return None
        assert s.max_steps is not None  # else the settings were refused
        schedules = torch.optim.lr_scheduler
        if s.schedule == "one_cycle":
            shape: dict[str, Any] = {}  # torch's own where nothing was asked for
            if s.warmup_steps:
                shape["pct_start"] = s.warmup_steps / s.max_steps
            if s.min_lr_ratio:
                shape["final_div_factor"] = 1 / (_DIV_FACTOR * s.min_lr_ratio)
            peak = [group["lr"] for group in self.optimizer.param_groups]
            return schedules.OneCycleLR(
                self.optimizer, max_lr=peak, total_steps=s.max_steps, div_factor=_DIV_FACTOR, **shape
            )
        floor = s.min_lr_ratio * max(group["lr"] for group in self.optimizer.param_groups)
        if not s.warmup_steps:
            return schedules.CosineAnnealingLR(self.optimizer, T_max=s.max_steps, eta_min=floor)
        parts = [
            schedules.LinearLR(self.optimizer, start_factor=1 / (s.warmup_steps + 1), total_iters=s.warmup_steps),
            schedules.CosineAnnealingLR(self.optimizer, T_max=s.max_steps - s.warmup_steps, eta_min=floor),
        ]
        return schedules.SequentialLR(self.optimizer, parts, milestones=[s.warmup_steps])

    # -- report --------------------------------------------------------------------------------------------------

    def report(self) -> TrainingReport:
        """Return what was on, what was refused and why, and where the time went. Off the step path."""
        timings: dict[str, float] = {}
        counters: dict[str, float] = {"steps": self.global_step, "batches": self.batches}
        verdict = ""
        if self._timed:
            means = [s / self._timed for s in self._seconds]
            names = ("data", "forward", "backward", "tail")
            timings = {name: mean for name, mean in zip(names, means, strict=True) if mean > 0}
            timings["step"] = sum(means)
            outside = (means[0] + means[3]) / timings["step"]
            verdict = f"{1 - outside:.0%} of a step is forward and backward."
            if means[0] > 0.1 * timings["step"]:
                verdict = (
                    f"the loader holds the step back: {means[0] / timings['step']:.0%} of it is waiting for data"
                    f"{f', most of all for {self._slowest}' if self._slowest else ''}."
                )
        if self._faults is not None and self.batches > self._faults[1]:
            faults = int(_C.trainer.page_faults()) - self._faults[0]
            counters["page_faults_per_batch"] = round(faults / (self.batches - self._faults[1]), 1)
        if skipped := self._skipped():
            counters["skipped"] = skipped
        lines = self._decisions.lines()
        if self.memory is not None:
            lines.append(SettingLine("memory", "on", f"{self.memory.use()}."))
        return TrainingReport(self.settings.level, lines, timings, counters, verdict, self._decisions.asked.pages())

    def _skipped(self) -> int:
        """Steps left out because a gradient was not finite, those of an optimizer of oxytorch.optim all told."""
        skipped = self._run.skipped + self._skipped_by_guard()
        optimizer: Any = self.optimizer
        return skipped + (int(optimizer.tail_stats().skipped) if self.has_tail and self.global_step else 0)

    def _skipped_by_guard(self) -> int:
        return 0 if self._guard is None else int(self._guard.skipped)

    def revert(self) -> None:
        """Take back what this trainer has made active: on the model, the optimizer and the process."""
        self._decisions.revert()


def _samples(batch: Any) -> int:
    """Return the length of the first tensor of a batch; 0 where there is none."""
    while isinstance(batch, (Mapping, Sequence)) and not isinstance(batch, str) and len(batch) > 0:
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch) if isinstance(batch, torch.Tensor) and batch.dim() > 0 else 0


def _check_plan(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any) -> None:
    """Refuse a plan that is of another run."""
    if len(plan.run.models) > 1 or len(plan.run.slots) > 1:
        raise ValueError(
            "plan is of several models or optimizers, which a Trainer does not take. Keep a loop of your own, or call "
            "plan.step(batch) in it."
        )
    pairs = (
        ("model", model, plan.model),
        ("optimizer", optimizer, plan.optimizer),
        ("loss_fn", loss_fn, plan.run.loss_fn),
    )
    for name, given, own in pairs:
        if given is not own and not (name == "loss_fn" and given is None):
            raise ValueError(f"plan is of another {name}. Give the {name} that it was made of, or leave plan out.")
