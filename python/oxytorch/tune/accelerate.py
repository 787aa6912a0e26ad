"""`accelerate`: tries strategies on the user's own step, keeps what pays and is proven, and leaves no other trace.

`tuned` does so to a run; `accelerate` and `oxytorch.Trainer` both call it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import nn

from .._C import tune as _native
from ..base import format_duration, log
from ..config import PerformanceConfig
from ..data.batches import take
from ..generators import unmoved_generators
from ..model.loss import is_criterion
from ..model.several import listed, numbered
from ..model.snapshot import Snapshot
from ..optim.slot import params_of
from ..step import Losses, Models, Optimizers, StepFunction
from .asked import Asked
from .gradients import gradients_away
from .plan import Plan
from .remember import key
from .run import Run
from .strategy import STRATEGIES, Strategy
from .workload import PeakBytes, RunWorkload

__all__ = ["accelerate", "earlier_plan", "tuned", "untuned"]

_EXAMPLES = 4  # batches that trials run on


StrategyName = str | type
_PLANS: WeakValueDictionary[int, Plan] = WeakValueDictionary()  # active, by id of the model


def accelerate(
    model: Models,
    optimizer: Optimizers,
    loss_fn: Losses,
    batches: Iterable[Any],
    *,
    level: str | None = None,
    steps_planned: int | None = None,
    config: PerformanceConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    strategies: Iterable[StrategyName] | None = None,
    exclude: Iterable[str] = (),
    step: StepFunction | None = None,
    clip_norm: float | None = None,
    loop: Literal["yours", "data", "plan"] = "yours",
    goal: Literal["speed", "memory"] | None = None,
    max_slowdown: float | None = None,
    max_growth: float | None = None,
    memory: int | str | None = None,
    state: Iterable[Any] = (),
    remember: bool | str = True,
    tune_seconds: float | None = None,
    seed: int | None = None,
    progress: bool | None = None,
) -> Plan:
    """Make a training step faster: try, measure, verify, keep what pays, and say so in a certificate.

    Whole steps are taken on example batches with and without each strategy, in turn. Then model, optimizer and random
    generators are put back and proven to be bit for bit what they were, and what was accepted is made active on them:
    the same loop trains on, faster. A strategy that throws, does not pay or changes numbers beyond what it claims is
    left out, and its reason is in the plan.

    Parameters
    ----------
    model, optimizer
        Stay yours; `plan.revert()` takes everything back. An earlier plan of this model is taken back first. Either may
        be a list: each strategy acts on all models, or on all optimizers that it fits, and all of them are verified.
    loss_fn : callable or list of callable
        ``loss_fn(model, batch)``; or a criterion, and then a batch is (inputs, targets). None where `step` is given.
        Where `model` is a list, so is the first argument. With several optimizers one loss is stepped by all of them; a
        list has a loss for each, and a step does for one after the other: its ``zero_grad``, loss, backward, clip and
        step. The loss of the step is their sum then, so that one that is not finite shows.
    batches : sequence, loader or iterator
        A few are taken. A loader is left at its position; of an iterator, the taken ones come again from `plan.data`.
    level : {"advanced", "basic", "ultra"}
        Which kinds of strategy may be tried: "basic" only those that change no bit.
    steps_planned : int
        Length of the run, over which what turning a strategy on costs must be repaid; 10,000 unless given.
    config : PerformanceConfig, mapping, level or file, optional
        A key set to "off" (threads: "keep", attention: "default", allocator: "system", precision: "fp32") takes that
        strategy out. Another value than "auto" is made active whatever it gains: ``threads``, ``flush_denormals``,
        ``allocator`` and ``deterministic`` before anything is measured; ``precision``, ``channels_last``,
        ``attention``, ``compile``, ``step_tail`` and ``optimizer_state`` by their strategies once these are verified.
        ``allocator_retain_limit`` bounds what the allocator keeps. ``num_workers``, ``prefetch``, ``pin_memory`` and
        ``cache`` are of the loader, which is `plan.data` then, whatever `loop` is. ``clip_norm``, ``seed``,
        ``progress``, ``tune_seconds`` and ``steps_planned``, else ``max_steps``, are used where not given here. With
        ``accumulation_steps`` a step that is tried adds up the gradients of up to four batches, and `plan.step` takes
        one batch and lets the optimizer step once so many are in. Another key that belongs to a training loop, which is
        yours, is refused.
    strategies : iterable of str or class, optional
        To be tried, in this order; all that are registered unless given.
    exclude : iterable of str
        Names not to be tried.
    step : callable, optional
        The loop's own step for loops of another shape: takes a batch, does zero_grad, forward, backward and
        optimizer step, returns the loss.
    clip_norm : float, optional
        Of the step that is tried: the loop's own clipping belongs to it. Not beside `step`, which clips itself. Each
        optimizer's gradients are clipped by themselves.
    loop : {"yours", "data", "plan"}
        "data": your loop draws its batches from `plan.data`, so that how they are drawn may change, never which.
        "plan": it does, and takes its steps by `plan.step(batch)`, which allows strategies that change the loop.
    goal : {"speed", "memory"}, optional
        "memory": beside what makes a step faster without taking more memory, what makes it smaller is made active too,
        and each block of the model is put under `selective_checkpoint` or `checkpoint`, as far as a step takes at most
        `max_slowdown` times as long as given. That of `config`, else "speed".
    max_slowdown : float, optional
        With the goal "memory"; that of `config`, else 1.25.
    max_growth : float, optional
        With the goal "speed", how many times the memory as given the tensors of a step may take, model and optimizer
        included, for what makes it faster; a MiB is always allowed. That of `config`, else 1.05.
    memory : int or str, optional
        Bytes, or a size such as ``"900MiB"``, that the tensors of a step may take at the most, model and optimizer
        included: the key ``gradient_checkpointing``.
    state : iterable
        What else a step changes and is to be held: a scheduler, a scaler, generators. What `step` and `loss_fn` reach
        by themselves (closures, bound objects, globals that they name) is found and held without being named here.
    remember : bool or str
        Reuse the certificate of an earlier run after a short check, and store this one; a text is the folder. Not where
        `config` has remember=False.
    tune_seconds : float, optional
        Seconds for all trials, compiling apart. Unless given: what 60 steps take, at least 3 s, or
        what the saving so far repays within 240 steps with what verifying it all takes; of a short run 2 %.
    seed : int, optional
        Of the order of measuring and of the verifier; that of `config`, else 0.
    progress : bool, optional
        A line on stderr that says what is being tried; by default where stderr is a terminal.

    Returns
    -------
    Plan

    Raises
    ------
    TypeError, ValueError
        For arguments that cannot be meant or contradict each other; nothing was run then.
    NotImplementedError
        For a setting of `config` that cannot be honoured; nothing was run then.
    Exception
        What the step as given throws, and KeyboardInterrupt, after everything is restored.

    Examples
    --------
    A GAN: two models, two optimizers, and a loss for each of them.

    >>> def loss_of_d(models, batch):
    ...     g, d = models
    ...     return d(g(batch[1]).detach()).mean() - d(batch[0]).mean()
    >>> def loss_of_g(models, batch):
    ...     g, d = models
    ...     return -d(g(batch[1])).mean()
    >>> plan = ox.accelerate([g, d], [optimizer_d, optimizer_g], [loss_of_d, loss_of_g], batches)
    """
    settings = _settings(config, level)
    given = {"goal": goal, "max_slowdown": max_slowdown, "max_growth": max_growth, "gradient_checkpointing": memory}
    for name, value in given.items():
        if value is not None:
            settings.set(name, value)
    settings.check("accelerate")
    _check(model, optimizer, loss_fn, step, loop)
    window = settings.accumulation_steps
    if window > 1 and (step is not None or len(listed(optimizer)) > 1):
        what = "step=, which does all of a step" if step is not None else "several optimizers, whose step is one batch"
        raise ValueError(
            f"accumulation_steps = {window} was given beside {what}. Leave it out, and give step=, one call of which "
            "takes a whole window, where batches are accumulated."
        )
    clip_norm = clip_norm if clip_norm is not None else settings.clip_norm or None
    if step is not None and clip_norm is not None:
        raise ValueError(
            f"clip_norm = {clip_norm:g} was given beside step=, which does all of a step, so nothing would clip by it. "
            "Clip in step, and leave clip_norm out."
        )
    seed = seed if seed is not None else settings.seed if isinstance(settings.seed, int) else 0
    if progress is None and settings.progress != "auto":
        progress = settings.progress == "on"
    models, optimizers = listed(model), listed(optimizer)
    params = [p for one in optimizers for p in params_of(one)]
    examples, data = take(batches, _EXAMPLES, params)
    classes = _named(strategies)
    exclude = tuple(exclude)
    asked = Asked(settings, classes, exclude)
    for one in models:
        if (earlier := earlier_plan(one)) is not None:
            earlier.revert()  # its strategies and its watch would run inside of the trials
    run = Run(
        model,
        optimizer,
        loss_fn,
        examples,
        step=step,
        clip_norm=clip_norm,
        data=data,
        owns_loop=loop == "plan",
        draws_data=loop == "data",
        state=state,
        strategies=classes,
    )
    if step is None:
        run.check(examples[0])
    run.accumulation = window
    run.asked = {**asked.named, "retain_limit": asked.retain_limit}
    run_steps = steps_planned if steps_planned is not None else _native.planned_steps(settings._native)
    offered = [name for name in classes if name not in set(exclude)]
    decided_by = [f"loop {loop}", _native.decided_by(settings._native, offered, run_steps)]
    remember = remember if settings.remember else False
    with asked.applied(), _line(progress) as say:
        run.data = run.given_data = asked.feed(data)
        return tuned(
            run,
            settings,
            asked,
            _native.TunerOptions(
                level=settings.level,
                steps_planned=run_steps,
                tune_seconds=tune_seconds or settings.tune_seconds,
                seed=seed,
                exclude=exclude,
                required=asked.required,
                config=settings._native,
            ),
            decided_by=decided_by,
            store=_native.CertificateStore(remember if isinstance(remember, str) else "") if remember else None,
            say=say,
        )


def tuned(
    run: Run,
    settings: PerformanceConfig,
    asked: Asked,
    options: _native.TunerOptions,
    *,
    decided_by: Sequence[str] = (),
    store: Any = None,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Try, measure, verify; the plan of a run on which what pays is active.

    Parameters
    ----------
    run : Run
        With its example batches, and active what is the step as given.
    settings : PerformanceConfig
        Those of the plan, of which the level counts here.
    asked : Asked
        What the settings take out; its settings of the process are applied.
    options : TunerOptions
    decided_by : sequence of str
        What else decides which strategies are kept, for the certificate's key.
    store : CertificateStore, optional
        Reused from and stored to.
    say : callable
        Shows what is being done.

    Raises
    ------
    Exception
        What the step as given throws, and KeyboardInterrupt, after everything is restored.
    """
    given = run.required
    average, run.average = run.average, None  # trials move none
    run.falls_back = False
    try:
        if asked.checkpointing != "least":
            asked.fit_memory(run)  # what trials take is to be within the budget too
        made_for = key(run, settings.level, decided_by)
        with (
            PeakBytes(run) as peak,
            gradients_away(run),
            Snapshot.of(run.given_models, run.given_optimizers, *run.state, reach=run.functions) as snapshot,
        ):
            workload = RunWorkload(run, snapshot, asked, options.seed, say, peak)
            tuner = _native.Tuner(workload, made_for, options)
            certificate = tuner.tune(store)
    finally:
        run.average, run.falls_back = average, True
    plan = Plan(run, certificate, settings, asked, store=store, seed=options.seed)
    try:
        with unmoved_generators(run.params):
            tuner.activate(certificate)
        spent = format_duration(tuner.seconds())
        log("info", f"accelerate: {', '.join(run.active) or 'nothing'} active after {spent}", "tune")
        plan.begin(tuner, moved=snapshot.moved())
        del tuner, workload, snapshot  # references and snapshots, which the steps that follow do not need
        plan.settle()
        if asked.checkpointing == "least":
            asked.max_slowdown = _native.slowdown_left(certificate, options.max_slowdown)
            asked.fit_memory(run)
        elif run.active:
            asked.fit_memory(run)  # they may have made the step another one
        plan.give_back()
    except BaseException:  # such as Ctrl-C: without a plan, nothing may stay active
        run.required = given
        plan.withdraw()
        raise
    return _noted(plan)


def untuned(run: Run, settings: PerformanceConfig, asked: Asked) -> Plan:
    """Return the plan of a run on which nothing was tried."""
    certificate = _native.Certificate()
    certificate.level = settings.level
    return _noted(Plan(run, certificate, settings, asked))


def _noted(plan: Plan) -> Plan:
    """Note a plan as the last one of its models; from now on its steps are those of the run."""
    plan.run.falls_back = True
    for model in plan.run.models:
        _PLANS[id(model)] = plan
    return plan


def earlier_plan(model: Any) -> Plan | None:
    """Return the last plan of a model, alone or among others, where it still lives."""
    found = _PLANS.get(id(model))
    return found if found is not None and any(one is model for one in found.run.models) else None


# -- arguments -------------------------------------------------------------------------------------------------------


def _settings(config: Any, level: str | None) -> PerformanceConfig:
    settings = PerformanceConfig.of(config if config is not None else level or "advanced")
    if level is not None:
        settings.set("level", level)
    return settings


def _check(model: Any, optimizer: Any, loss_fn: Any, step: Any, loop: str) -> None:
    _check_each("model", model, nn.Module, "a torch.nn.Module")
    _check_each("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    if step is None:
        _check_losses(model, len(listed(optimizer)), loss_fn)
    if step is not None and not callable(step):
        raise TypeError(f"step is a {type(step).__name__}, expected a callable that takes a batch.")
    if loop not in ("yours", "data", "plan"):
        raise ValueError(f"loop is {loop!r}, expected 'yours', 'data' or 'plan'.")
    for one in listed(optimizer) if step is None else ():
        closure = inspect.signature(type(one).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TypeError(
                f"{type(one).__name__}.step() needs a closure. Pass step=, a function that takes a batch, "
                "calls optimizer.step(closure) and returns the loss."
            )


def _check_each(name: str, given: Any, kind: type, expected: str) -> None:
    several = isinstance(given, list | tuple)
    if several and not given:
        raise ValueError(f"{name} is an empty {type(given).__name__}, expected at least one.")
    places: dict[int, str] = {}
    for place, one in numbered(name, given):
        if not isinstance(one, kind):
            raise TypeError(f"{place} is a {type(one).__name__}, expected {expected}.")
        if id(one) in places:
            raise ValueError(f"{place} is the same object as {places[id(one)]}: give each {name} once.")
        places[id(one)] = place


def _check_losses(model: Any, optimizers: int, loss_fn: Any) -> None:
    several = isinstance(loss_fn, list | tuple)
    for place, loss in numbered("loss_fn", loss_fn):
        if not callable(loss):
            raise TypeError(f"{place} is a {type(loss).__name__}, expected a callable or a criterion; or pass step=.")
        if is_criterion(loss) and (several or isinstance(model, list | tuple)):
            raise TypeError(
                f"{place} is a criterion, {getattr(loss, '__name__', type(loss).__name__)}, which does not say whose "
                "outputs it takes. Give loss_fn(models, batch), a function that calls the models and returns the loss."
            )
    if several and len(loss_fn) != optimizers:
        raise ValueError(
            f"loss_fn is a list of {len(loss_fn)}, and optimizers are {optimizers}: give one loss for each, in the "
            "order in which they step, or one loss that all of them step by."
        )


def _named(strategies: Iterable[StrategyName] | None) -> dict[str, type[Strategy]]:
    if strategies is None:
        return dict(STRATEGIES)
    found: dict[str, type[Strategy]] = {}
    for given in strategies:
        if isinstance(given, str):
            if given not in STRATEGIES:
                raise ValueError(f"there is no strategy {given!r}; there are {', '.join(STRATEGIES) or 'none'}.")
            found[given] = STRATEGIES[given]
            continue
        registered = next((c for c in STRATEGIES.values() if isinstance(given, type) and issubclass(c, given)), None)
        if registered is None and isinstance(given, type) and issubclass(given, Strategy) and given.name:
            registered = given
        if registered is None:
            raise TypeError(f"{given!r} is no strategy: give a name, or a class registered by ox.tune.strategy(...).")
        found[registered.name] = registered
    return found


@contextlib.contextmanager
def _line(progress: bool | None) -> Iterator[Callable[[str], None]]:
    """Give a function that shows what is being done, on one line of stderr, or nothing."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda _text: None
        return
    from rich.console import Console  # noqa: PLC0415  (slow to import, and only for the line)
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("accelerate")

    def show(work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, ValueError) as error:  # a closed terminal ends the line, not the tuning
            log("info", f"accelerate: progress cannot be shown: {error}", "tune")

    show(bar.start)
    try:
        yield lambda text: show(lambda: bar.update(task, description=f"accelerate: {text}"))
    finally:
        show(bar.stop)
