"""The epoch loop: progress, validation, early stopping, signals, resume."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import length_hint
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ..data.batches import drawn_by, generators
from ..generators import rng_state, set_rng_state

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["Callback", "FitResult", "position_of", "run_fit"]

_REFRESH = 0.5  # seconds between two reads of the loss for the progress bar


class Callback:
    """Called by ``fit``; override what is needed. An exception ends ``fit`` and leaves the trainer consistent."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Before the first batch."""

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        """After each batch; ``loss`` is detached and on its device."""

    def on_epoch(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """After each epoch and its validation; ``metrics`` has ``epoch``, ``loss`` and maybe ``validation``."""

    def on_fit_end(self, trainer: Trainer, result: FitResult) -> None:
        """At the end, also after a signal; not after an exception."""


@dataclass
class FitResult:
    """How a call of ``fit`` ended.

    Parameters
    ----------
    stop_reason
        ``"epochs"``, ``"max_steps"``, ``"early_stopping"``, ``"SIGTERM"``, ``"SIGINT"`` or what ``stop()`` was given.
    steps
        Optimizer steps of this call.
    history
        Metrics of each finished epoch: ``epoch``, ``loss`` (mean), ``validation`` where there was one, ``seconds``.
    """

    stop_reason: str = "epochs"
    steps: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


class _Signals:
    """Turns SIGTERM and SIGINT into a wish to stop; the handlers of before are back at the end."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._restore()  # a second signal acts at once
        self.received = signal.Signals(number).name

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None is a handler that was not set from Python; it cannot be put back, so the default is.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def __exit__(self, *exc: object) -> None:
        self._restore()


class _Bar:
    """A rich progress bar, or nothing."""

    def __init__(self, on: bool, total: int | None) -> None:
        self._progress: Any = None
        self._next = 0.0
        if not on:
            return
        from rich.console import Console  # noqa: PLC0415  (slow to import, and only for the bar)
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("training", total=total)

    def __enter__(self) -> _Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, trainer: Trainer, loss: torch.Tensor, done: int) -> None:
        if self._progress is None:
            return
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REFRESH
            text = f"epoch {trainer.epoch + 1}  loss {float(loss):.4g}"
            self._progress.update(self._task, completed=done, description=text)


def _epoch_rng(trainer: Trainer, loader: Any) -> dict[str, Any]:
    state = rng_state(trainer._params)
    state["loader"] = [g.get_state() for g in generators(loader)]
    return state


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell samplers that shuffle by the epoch, such as DistributedSampler, which one begins."""
    for one in drawn_by(loader):
        if callable(tell := getattr(one, "set_epoch", None)):
            tell(epoch)


def position_of(loader: Any) -> Any:
    """Return where a loader is that can say so, such as `oxytorch.data.Loader`; None of another."""
    resumable = callable(getattr(loader, "load_state_dict", None)) and callable(getattr(loader, "state_dict", None))
    return loader.state_dict() if resumable else None


def _start_epoch(trainer: Trainer, loader: Iterable[Any]) -> Iterator[Any]:
    """Return the epoch's iterator; after a resume, the one of the epoch broken off, moved to where it was."""
    if trainer.batch_in_epoch == 0 or trainer.resume_rng is None:
        trainer.batch_in_epoch = 0
        trainer.resume_rng = _epoch_rng(trainer, loader)
        _set_epoch(loader, trainer.epoch)
        return iter(loader)
    if trainer.loader_position is not None and position_of(loader) is not None:
        resumable: Any = loader
        resumable.load_state_dict(trainer.loader_position)
        return iter(loader)
    _set_epoch(loader, trainer.epoch)
    here = rng_state(trainer._params)
    set_rng_state(trainer.resume_rng)
    for generator, state in zip(generators(loader), trainer.resume_rng.get("loader", []), strict=False):
        generator.set_state(state)
    iterator = iter(loader)
    for seen in range(trainer.batch_in_epoch):
        if next(iterator, None) is None:
            raise ValueError(
                f"the run stopped after batch {trainer.batch_in_epoch} of an epoch, but this loader has {seen}. "
                "Resume with the loader of before."
            )
    set_rng_state(here)
    return iterator


def _validate(trainer: Trainer, validate: Any) -> float | None:
    if validate is None:
        return None
    return float(validate(trainer)) if callable(validate) else trainer.evaluate(validate)


def _save(trainer: Trainer) -> None:
    checkpointer = trainer.checkpointer
    if checkpointer is None:
        return
    if not hasattr(checkpointer, "save"):
        checkpointer(trainer)
        return
    state = trainer.state_dict()
    extra = {
        key: state[key]
        for key in ("counters", "rng", "epoch_rng", "loader", "decisions", "ema", "gradients", "early_stopping")
    }
    checkpointer.save(
        trainer.global_step,
        model=trainer.model,
        optimizer=trainer.optimizer,
        scaler=trainer.scaler,
        scheduler=trainer.scheduler,
        extra=extra,
    )


def _planned(loader: Any, epochs: int | None, max_steps: int | None, accumulate: int) -> int | None:
    """Return the optimizer steps of the whole run, where they can be known."""
    known = [max_steps] if max_steps is not None else []
    batches = length_hint(loader, -1)  # a loader of a stream has a __len__ that raises
    if epochs is not None and batches >= 0:
        known.append(epochs * -(-batches // accumulate))
    return min(known) if known else None


def _shows_bar(trainer: Trainer, progress: bool | None) -> bool:
    if progress is not None:
        return progress
    setting = trainer.settings.progress
    return setting == "on" or (setting == "auto" and sys.stderr.isatty())


def run_fit(
    trainer: Trainer,
    loader: Iterable[Any],
    *,
    epochs: int | None,
    max_steps: int | None,
    callbacks: list[Callback | Callable[[Trainer, torch.Tensor], object]],
    validate: Any,
    progress: bool | None,
) -> FitResult:
    """Train; see ``Trainer.fit``."""
    if max_steps is None:
        max_steps = trainer.settings.max_steps
    for name, value in (("epochs", epochs), ("max_steps", max_steps)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1.")
    if epochs is None and max_steps is None:
        epochs = 1
    listeners = [c for c in callbacks if isinstance(c, Callback)]
    functions = [c for c in callbacks if not isinstance(c, Callback)]
    on_step = [c.on_step for c in listeners if type(c).on_step is not Callback.on_step] + functions
    stopping = trainer._start_early_stopping()
    result = FitResult()
    first_step = trainer.global_step
    trainer._stop_reason = None
    trainer.model.train()
    loader = trainer._decisions.feed(loader)
    planned = _planned(loader, epochs, max_steps, trainer.settings.accumulate)
    trainer._decisions.steps = planned
    loader = trainer._decisions.tune_loader(loader, trainer._begin)
    for listener in listeners:
        listener.on_fit_start(trainer)
    with trainer._drawing_from(loader), _Signals() as signals, _Bar(_shows_bar(trainer, progress), planned) as bar:
        while (epochs is None or trainer.epoch < epochs) and (max_steps is None or trainer.global_step < max_steps):
            began = time.monotonic()
            total: torch.Tensor | None = None
            seen = 0
            iterator = _start_epoch(trainer, loader)
            ended = True
            while True:
                batch: Any = None  # the memory of the last one may serve the next
                waiting = time.perf_counter()
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                trainer._waited = time.perf_counter() - waiting
                if trainer.batches > 0:
                    trainer._seconds[0] += trainer._waited
                loss = trainer.step(batch)
                trainer.batch_in_epoch += 1
                seen += 1
                total = loss.float() if total is None else total + loss
                for function in on_step:
                    function(trainer, loss)
                bar.show(trainer, loss, trainer.global_step)
                reached = max_steps is not None and trainer.global_step >= max_steps
                if reached or signals.received is not None or trainer._stop_reason is not None:
                    ended = False
                    result.stop_reason = signals.received or trainer._stop_reason or "max_steps"
                    break
            if seen == 0 and ended and trainer.batch_in_epoch == 0:
                raise ValueError("the loader is empty: it yielded no batch.")
            if not ended:
                break
            trainer.flush()
            metrics = {"epoch": float(trainer.epoch), "seconds": time.monotonic() - began}
            if total is not None:
                metrics["loss"] = float(total) / seen
            validation = _validate(trainer, validate)
            if validation is not None:
                metrics["validation"] = validation
                if isinstance(trainer.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    trainer.scheduler.step(validation)
            trainer.epoch += 1
            trainer.batch_in_epoch = 0
            trainer.resume_rng = None
            result.history.append(metrics)
            for listener in listeners:
                listener.on_epoch(trainer, metrics)
            watched = metrics.get("validation", metrics.get("loss"))
            if signals.received or trainer._stop_reason:
                result.stop_reason = signals.received or trainer._stop_reason or ""
                break
            if stopping is not None and watched is not None and stopping.step(watched, trainer.model):
                result.stop_reason = "early_stopping"
                break
            _save(trainer)
        else:
            if epochs is None or trainer.epoch < epochs:
                result.stop_reason = "max_steps"
        result.steps = trainer.global_step - first_step
        if stopping is not None and signals.received is None:
            stopping.restore(trainer.model)
        if result.stop_reason != "epochs":
            _save(trainer)
    for listener in listeners:
        listener.on_fit_end(trainer, result)
    if result.stop_reason == "SIGINT":
        raise KeyboardInterrupt
    return result
