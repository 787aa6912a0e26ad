"""How a fault is planted, and the books of faults and of what must pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from oxytorch.tune.run import Run, plain_step
from oxytorch.tune.strategy import Kind, Strategy
from oxytorch.tune.verify import Ruling, Verifier
from torch import Tensor

Acts = Callable[[int, Any], bool]


@dataclass
class Fault:
    """A fault: what it does to a run while it is active, as a context; `now()` says whether it acts in this step.

    That is from step `since` on, or where `acts` says so of the number of steps that were taken and the batch.
    """

    name: str
    workload: str
    kind: Kind
    since: int
    plant: Callable[[Run, Callable[[], bool]], Iterator[None]]
    acts: Acts | None = None

    def strategy(self) -> type[Strategy]:
        """Return it as a class of strategy."""
        fault = self

        class Planted(Strategy):
            name, kind, needs_loop = fault.name, fault.kind, True

            def apply(self, run: Run) -> None:
                taken = 0
                under_way: Any = None

                def step(batch: Any) -> Tensor:
                    nonlocal taken, under_way
                    under_way = batch
                    result = run_step(batch)
                    taken += 1
                    return result

                def now() -> bool:
                    return taken >= fault.since if fault.acts is None else fault.acts(taken, under_way)

                self.context = contextmanager(fault.plant)(run, now)
                self.context.__enter__()
                run_step = run.step
                run.step = step  # type: ignore[method-assign]

            def revert(self, run: Run) -> None:
                run.__dict__.pop("step", None)
                self.context.__exit__(None, None, None)

        return Planted


def ruling(verifier: Verifier, strategy: type[Strategy], kind: Kind) -> Ruling:
    """Let a verifier rule on a strategy; its run is left as it was."""
    run = verifier.run
    run.strategies, run._made = {"planted": strategy}, {}
    run.set_active(["planted"])
    try:
        found = verifier.check(kind)
        assert run.active == ("planted",), "it is left active"
    finally:
        run.set_active([])
        verifier.snapshot.restore()
        verifier.snapshot.prove()
    return found


FAULTS: dict[str, Fault] = {}
HEALTHY: dict[str, Fault] = {}
#: Of the healthy ones those that take a minute or more each: not for every run of the tests.
LARGE: set[str] = set()
Plant = Callable[[Run, Callable[[], bool]], Iterator[None]]


def fault(on: str, kind: Kind, since: int = 0, book: dict[str, Fault] = FAULTS) -> Callable[[Plant], Plant]:
    """Register a fault for a workload, under a claim, acting from a step on."""

    def register(plant: Plant) -> Plant:
        name = plant.__name__ if plant.__name__ not in book else f"{plant.__name__}_{on}"
        book[name] = Fault(name, on, kind, since, plant)
        return plant

    return register


def healthy(on: str, kind: Kind) -> Callable[[Plant], Plant]:
    """Register what must pass."""
    return fault(on, kind, book=HEALTHY)


@contextmanager
def before_optimizer(run: Run, tamper: Callable[[list[Tensor]], None]) -> Iterator[None]:
    """Change gradients between backward and the optimizer."""

    def change(*_: Any) -> None:
        tamper(run.params)

    hook = run.original.register_step_pre_hook(change)
    yield
    hook.remove()


@contextmanager
def instead_of_step(run: Run, step: Callable[[Any], None]) -> Iterator[None]:
    """Let the optimizer do something else."""
    run.replace_step(lambda _: step(run.original))
    yield
    run.replace_step(None)


@contextmanager
def forward(run: Run, function: Callable[..., Any]) -> Iterator[None]:
    """Call something else for the model."""
    run.call.function(function)
    yield
    run.call.function(None)


@contextmanager
def set_for(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    yield
    for name, value in before.items():
        setattr(target, name, value)


@contextmanager
def step_of(run: Run, step: Callable[[Any, Callable[[Any], Tensor]], Tensor]) -> Iterator[None]:
    """Wrap the whole step."""
    plain = Run.step.__get__(run)
    run.step = lambda batch: step(batch, plain)  # type: ignore[method-assign]
    yield
    run.__dict__.pop("step", None)


@contextmanager
def part_of_loop(run: Run, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a part of the user's own loop."""
    loop = run.loop  # type: ignore[attr-defined]
    before = loop.steps[name]
    loop.steps[name] = replacement
    yield
    loop.steps[name] = before


def settings_while(optimizer: Any, **values: Any) -> None:
    """Take the plain step with other settings, which are put back."""
    before = [{key: group[key] for key in values} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update({key: value(group[key]) if callable(value) else value for key, value in values.items()})
    plain_step(optimizer)
    for group, old in zip(optimizer.param_groups, before, strict=True):
        group.update(old)


@contextmanager
def autocast(run: Run) -> Iterator[None]:
    """bfloat16 products, outputs in float32: what a fault hides behind."""
    run.call.scope("planted", lambda: torch.autocast(run.device.type, dtype=torch.bfloat16))
    run.call.outputs("planted", lambda out: out.float())
    yield
    run.call.scope("planted", None)
    run.call.outputs("planted", None)
