"""The training step: accumulate, autocast, backward, step tail, schedule; and the account of what was on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import getitem, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _C
from ..amp import GradScaler
from ..config import PerformanceConfig
from ..model.escrow import is_criterion, scalar_loss
from ..optim.generators import rng_state, set_rng_state
from ..report import Report, SettingLine
from ..step import TrainingStep, no_phase
from .early_stopping import EarlyStopping
from .fit import Callback, FitResult, run_fit
from .settings import Settings, beside, check_arguments, resolve
from .setup import Preparation

if TYPE_CHECKING:
    from ..tune.plan import Plan

__all__ = ["Trainer"]

LossFunction = Callable[..., torch.Tensor]
_FORMAT = 1
_DIV_FACTOR = 25.0  # of a cycle: its peak over its first rate, as in torch


class _ForwardScope:
    """Autocast and the attention path of one forward; reused for each step."""

    __slots__ = ("_flash", "_reduced", "attention", "autocast")

    def __init__(self) -> None:
        self.autocast: torch.autocast | None = None
        self.attention = "default"  # or "math", or "math_bf16": the math path without its detour through float32
        self._flash = True
        self._reduced = False

    def __enter__(self) -> None:
        if self.autocast is not None:
            self.autocast.__enter__()  # type: ignore[no-untyped-call]
        if self.attention != "default":
            flags = torch.backends.cuda
            self._flash = flags.flash_sdp_enabled()  # type: ignore[no-untyped-call]
            self._reduced = flags.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
            flags.enable_flash_sdp(False)
            flags.allow_fp16_bf16_reduction_math_sdp(self.attention == "math_bf16")

    def __exit__(self, *exc: Any) -> None:
        if self.attention != "default":
            torch.backends.cuda.enable_flash_sdp(self._flash)
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(self._reduced)
        if self.autocast is not None:
            self.autocast.__exit__(*exc)


class Trainer:
    """Runs training steps under a performance configuration.

    Parameters
    ----------
    model
        The module to train. It is changed in place only in ways that the report names (memory layout).
    optimizer
        Any ``torch.optim.Optimizer`` over the model's parameters. From level ``advanced`` on, ``torch.optim.AdamW`` and
        ``SGD`` are replaced by those of ``oxytorch.optim``: hyperparameters, groups and state are carried over and
        stay shared, so a scheduler made for the old one works on. ``trainer.optimizer`` is the one in use.
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
    callbacks
        ``Callback`` objects, or callables of ``(trainer, loss)`` called after each step of ``fit``.
    calibrate
        True: settings that are "auto" and may not pay are timed on the first batch (forward and backward only, without
        a trace in weights, buffers, gradients or random generators) and kept where they pay. False: by the hardware.
    plan : Plan, optional
        Of `oxytorch.accelerate`, on the same model and optimizer: its steps are taken, and ``plan.step`` does what
        this trainer's settings say as well. What the plan has decided is not decided again.
    **overrides
        Keys of the configuration, such as ``accumulation_steps=4`` or ``clip_norm=1.0``.

    Raises
    ------
    TypeError
        For a model, optimizer, loss, monitor, checkpointer or callback of a wrong kind.
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
        self._plan = plan
        user = "trainer"
        if plan is not None:
            user = "performance_optimizer" if plan.run.own_step is None else "own_step"
            config = beside(plan, config)
        self.config, self.settings = resolve(config, overrides, user)
        self.callbacks = list(callbacks)
        check_arguments(
            self.config, optimizer, scheduler=scheduler, monitor=monitor, checkpointer=checkpointer,
            callbacks=self.callbacks,
        )  # fmt: skip
        self.model = model
        self.calibrate = calibrate and plan is None
        self.monitor = monitor
        self.checkpointer = checkpointer
        self.loss_fn = loss_fn
        self._module: Callable[..., Any] = model
        if self.settings.compile != "off":
            mode = None if self.settings.compile == "default" else self.settings.compile
            self._module = torch.compile(model, mode=mode)
        self._criterion = loss_fn is not None and is_criterion(loss_fn)
        self.batches = 0  #: batches seen, those of failed steps excluded
        self._scope = _ForwardScope()
        self._channels_last = False
        self._phase: Callable[[str], AbstractContextManager[Any]] = monitor.phase if monitor else no_phase
        self._seconds = [0.0, 0.0, 0.0, 0.0]  # data, forward, backward, tail
        self._timed = 0
        self._faults: tuple[int, int] | None = None
        self.epoch = 0
        self.batch_in_epoch = 0
        self.resume_rng: dict[str, Any] | None = None
        self._stop_reason: str | None = None
        self._stopping: EarlyStopping | None = None
        self._stopping_loaded = False

        self._preparation = Preparation(self, optimizer)
        try:
            self._assemble(scheduler)
        except BaseException:
            self._preparation.revert()
            raise

    def _assemble(self, scheduler: Any) -> None:
        """Take what was prepared into use."""
        self.optimizer: torch.optim.Optimizer = self._preparation.optimizer
        self.has_tail: bool = hasattr(self.optimizer, "tail_stats")
        self._params = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._watch()
        self.scheduler = scheduler if scheduler is not None else self._make_schedule()
        self._engine = self._make_engine()
        self._ready = False

    def _make_engine(self) -> TrainingStep:
        """What takes the steps, under these settings."""
        prepared, s = self._preparation, self.settings
        if self._plan is None:
            engine = TrainingStep(self.model, self.optimizer, self.loss_fn, clip_norm=prepared.separate_clip)
            engine.given, engine.keeps_gradients = prepared.original, False
        else:
            engine = self._plan.run
        engine.compute, engine.scope, engine.phase = self.compute_loss, self._scope, self._phase
        engine.accumulation, engine.clip_value, engine.guard = (
            s.accumulate,
            prepared.separate_clip_value,
            prepared.guard,
        )
        if s.ema_decay is not None and not prepared.tail_ema:
            engine.ema_decay, engine.average = s.ema_decay, [p.detach().clone() for p in self._params]
        plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        engine.scheduler = None if plateau else self.scheduler
        return engine

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self._engine.taken

    @property
    def scaler(self) -> GradScaler | None:
        """Of the loss, where there is one."""
        scaler: GradScaler | None = self._engine.scaler
        return scaler

    @scaler.setter
    def scaler(self, scaler: GradScaler | None) -> None:
        self._engine.scaler = scaler

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> torch.Tensor:
        """Take one batch through forward and backward, and the optimizer once a window of batches is full.

        Parameters
        ----------
        batch
            What ``loss_fn`` takes; or a closure without arguments that returns the loss.

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
        if not self._ready:
            self._preparation.first_step(batch)
            self._ready = True
        if self.monitor is None:
            return self._take(batch)
        with self.monitor.step(samples=_samples(batch)):
            return self._take(batch)

    def _take(self, batch: Any) -> torch.Tensor:
        if not all(map(is_, map(getitem, self._owners, self._keys), self._watched)):
            self._name_the_stranger()
        loss = self._engine.take(batch) if self._plan is None else self._plan.step(batch)
        if self.monitor is not None:
            self.monitor.scalar("loss", loss)
        self.batches += 1
        if self.batches == 3:
            self._faults = (int(_C.trainer.page_faults()), self.batches)
        if self.batches > 1:
            for phase, seconds in enumerate(self._engine.seconds, 1):
                self._seconds[phase] += seconds
            self._timed += 1
        return loss

    def flush(self) -> bool:
        """Step the optimizer with the batches of an unfinished window, averaged over their actual number.

        Returns
        -------
        bool
            False where no batch was waiting.
        """
        return self._engine.flush()

    def compute_loss(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, or of a closure, under the settings in force outside (no autocast here)."""
        if callable(batch) and not isinstance(batch, torch.Tensor):
            if self._module is not self.model:
                raise NotImplementedError(
                    f"compile = {self.settings.compile!r} compiles the model that loss_fn is given, and a closure "
                    "calls the model itself. Give loss_fn, or call model.compile() and leave compile at 'off'."
                )
            result: torch.Tensor = batch()
            return result
        if self.loss_fn is None:
            raise TypeError("this trainer has no loss_fn: pass step() a closure that returns the loss.")
        if self._channels_last:
            batch = _to_channels_last(batch)
        if not self._criterion:
            return self.loss_fn(self._module, batch)
        if not isinstance(batch, Sequence) or len(batch) != 2:
            raise TypeError(
                f"the loss is a criterion, so a batch is (inputs, targets); this one is a {type(batch).__name__}. "
                "Pass loss_fn(model, batch) for another shape."
            )
        return self.loss_fn(self._module(batch[0]), batch[1])

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

    def _name_the_stranger(self) -> None:
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
                    with self._scope:
                        loss = scalar_loss(self.compute_loss(batch)).detach().float()
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
        average = self._engine.average
        if average is None:
            if not self._preparation.tail_ema:
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

    def state_dict(self) -> dict[str, Any]:
        """Return all that a bit-for-bit continuation needs; tensors are shared, so save before the next step."""
        optimizer: Any = self.optimizer
        ema: Any = self._engine.average
        if ema is None and self._preparation.tail_ema:
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
                "micro": self._engine.micro,
                "epoch": self.epoch,
                "batch_in_epoch": self.batch_in_epoch,
            },
            "gradients": [p.grad for p in self._params] if self._engine.micro else None,
            "rng": rng_state(self._params),
            "epoch_rng": self.resume_rng,
            "decisions": self._preparation.decisions(),
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
        self.model.load_state_dict(state["model"])
        self._preparation.restore(state["decisions"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._preparation.after_load()
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if state["ema"] is not None:
            if self._engine.average is not None:
                torch._foreach_copy_(self._engine.average, state["ema"])
            elif self._preparation.tail_ema:
                optimizer: Any = self.optimizer
                optimizer.load_ema_state_dict(state["ema"])
        counters = state["counters"]
        self._engine.taken = counters["global_step"]
        self.batches = counters["batches"]
        self._engine.micro = counters["micro"]
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
        set_rng_state(state["rng"])
        self._ready = True

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

    def report(self) -> Report:
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
                verdict = f"the loader holds the step back: {means[0] / timings['step']:.0%} of it is waiting for data."
        if self._faults is not None and self.batches > self._faults[1]:
            faults = int(_C.trainer.page_faults()) - self._faults[0]
            counters["page_faults_per_batch"] = round(faults / (self.batches - self._faults[1]), 1)
        if skipped := self._skipped():
            counters["skipped"] = skipped
        lines: list[SettingLine] = self._preparation.lines
        return Report(self.settings.level, list(lines), timings, counters, verdict)

    def _skipped(self) -> int:
        """Steps left out because a gradient was not finite, those of an optimizer of oxytorch.optim all told."""
        if self._preparation.guard is not None:
            return int(self._preparation.guard.skipped)
        optimizer: Any = self.optimizer
        return int(optimizer.tail_stats().skipped) if self.has_tail and self.global_step else 0

    def revert(self) -> None:
        """Take back the settings of the process: allocator, threads, denormals, deterministic algorithms."""
        self._preparation.revert()


def _samples(batch: Any) -> int:
    """Return the length of the first tensor of a batch; 0 where there is none."""
    while isinstance(batch, (Mapping, Sequence)) and not isinstance(batch, str) and len(batch) > 0:
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch) if isinstance(batch, torch.Tensor) and batch.dim() > 0 else 0


def _to_channels_last(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        wanted = batch.dim() == 4 and batch.is_floating_point()
        return batch.contiguous(memory_format=torch.channels_last) if wanted else batch
    if type(batch) in (tuple, list):
        return type(batch)(_to_channels_last(item) for item in batch)
    if type(batch) is dict:
        return {key: _to_channels_last(item) for key, item in batch.items()}
    return batch
