"""What only the user's functions reach is held like the model, what cannot be held is named, batches are copied."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import oxytorch as ox
import pytest
import torch
from oxytorch.model.snapshot import Snapshot
from oxytorch.tune import Plan
from planted import Clock, Net, batches, clock, fingerprint, made, only, same
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

pytestmark = pytest.mark.cpu_only("plants times and faults")
__all__ = ["clock"]

CRITERION = nn.CrossEntropyLoss()


class Second:
    """The other half of a GAN: a model, its optimizer and all that may come with them."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.generators = torch.Generator().manual_seed(2), np.random.default_rng(3), random.Random(4)
        self.average = torch.zeros(3)
        self.counts = {"steps": 0}
        self.losses: list[float] = []

    def train(self, out: Tensor) -> None:
        torch_draws, numpy_draws, own_draws = self.generators
        noise = torch.rand(3, generator=torch_draws) * numpy_draws.random() * own_draws.random()
        self.optimizer.zero_grad()
        loss = self.model(out.detach() + noise).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average.mul_(0.9).add_(out.detach().mean(0))
        self.counts["steps"] += 1
        self.losses.append(float(loss))

    def state(self) -> list[Any]:
        draws = [self.generators[0].get_state(), str(self.generators[1].bit_generator.state)]
        return [
            fingerprint(self.model, self.optimizer),
            [*draws, self.generators[2].getstate(), self.average.clone(), dict(self.counts), list(self.losses)],
            str(self.scheduler.state_dict()),
        ]


Step = Callable[[Any], Tensor]
State = Callable[[], Any]


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> tuple[Tensor, Tensor]:
    optimizer.zero_grad()
    out = model(batch[0])
    loss = CRITERION(out, batch[1])
    loss.backward()
    optimizer.step()
    return loss, out


# Each way for a step to reach something beside the model that was given.


def by_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, State]:
    second = Second()
    its_model, its_optimizer = second.model, second.optimizer
    count = 0

    def step(batch: Any) -> Tensor:
        nonlocal count
        loss, out = one_step(model, optimizer, batch)
        its_optimizer.zero_grad()
        its_model(out.detach()).square().mean().backward()
        its_optimizer.step()
        count += 1
        return loss

    return step, lambda: [fingerprint(its_model, its_optimizer), count]


def by_nested_function(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, State]:
    second = Second()

    def other(out: Tensor) -> None:
        second.train(out)

    def step(batch: Any) -> Tensor:
        loss, out = one_step(model, optimizer, batch)
        for helper in [lambda: other(out)]:
            helper()
        return loss

    return step, second.state


def by_bound_method(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, State]:
    class Loop:
        total = 0.0
        seen: list[float] = []  # noqa: RUF012  (shared by design)

        def __init__(self) -> None:
            self.second = Second()

        def step(self, batch: Any) -> Tensor:
            loss, out = one_step(model, optimizer, batch)
            self.second.train(out)
            type(self).total += float(loss)
            self.seen.append(float(loss))
            return loss

    loop = Loop()
    return loop.step, lambda: [loop.second.state(), Loop.total, list(Loop.seen)]


def by_callable_object(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, State]:
    class Loop:
        __slots__ = ("count", "second")

        def __init__(self) -> None:
            self.second = Second()
            self.count = 0

        def __call__(self, batch: Any) -> Tensor:
            loss, out = one_step(model, optimizer, batch)
            self.second.train(out)
            self.count += 1
            return loss

    loop = Loop()
    return loop, lambda: [loop.second.state(), loop.count]


def by_partial(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, State]:
    second = Second()

    def step(other: Second, batch: Any, *, extra: Any) -> Tensor:
        loss, out = one_step(model, optimizer, batch)
        other.train(out)
        extra["calls"].append(1)
        return loss

    extra: dict[str, list[int]] = {"calls": []}
    return functools.partial(step, second, extra=extra), lambda: [second.state(), list(extra["calls"])]


def by_default(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, State]:
    def step(batch: Any, second: Second = Second(), *, more: list[int] = [0]) -> Tensor:  # noqa: B006, B008
        loss, out = one_step(model, optimizer, batch)
        second.train(out)
        more[0] += 1
        step.calls = getattr(step, "calls", 0) + 1  # type: ignore[attr-defined]
        return loss

    (second,) = step.__defaults__ or ()
    more = (step.__kwdefaults__ or {})["more"]
    return step, lambda: [second.state(), list(more), getattr(step, "calls", 0)]


_SECOND = Second()
_COUNT = 0


def _train_global(out: Tensor) -> None:
    global _COUNT  # noqa: PLW0603
    _SECOND.train(out)
    _COUNT += 1


def by_global(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, State]:
    def step(batch: Any) -> Tensor:
        loss, out = one_step(model, optimizer, batch)
        _train_global(out)
        return loss

    return step, lambda: [_SECOND.state(), _COUNT]


def by_decorator(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, State]:
    inner, state = by_nested_function(model, optimizer)

    @functools.wraps(inner)
    def step(*args: Any, **kwargs: Any) -> Tensor:
        return inner(*args, **kwargs)

    return torch.enable_grad()(step), state


WAYS = [
    by_closure,
    by_nested_function,
    by_bound_method,
    by_callable_object,
    by_partial,
    by_default,
    by_global,
    by_decorator,
]


def run(clock: Clock, way: Callable[..., tuple[Step, State]], **options: Any) -> tuple[Plan, State, Any]:
    model = Net(clock)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step, state = way(model, optimizer)
    before = copy.deepcopy(state())
    with only(made(clock, "slow", 0.002)):
        plan = ox.accelerate(model, optimizer, None, batches(), step=step, remember=False, **options)
    return plan, state, before


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_only_the_step_reaches_is_held(way: Callable[..., tuple[Step, State]], clock: Clock) -> None:
    plan, state, before = run(clock, way)
    assert plan.accepted == ("cheaper_slow",), plan.rejected
    assert same(before, state())
    covered = plan.certificate.verification["restored"]
    assert "proven by hash" in covered and "only your functions reach (step." in covered
    assert not plan.certificate.events
    plan.revert()


def test_the_watch_holds_it_too(clock: Clock) -> None:
    plan, state, before = run(clock, by_callable_object)
    plan._watch.doubt()
    plan._watch._decide()  # both sides take a step of the user's own function
    assert plan.accepted == ("cheaper_slow",) and same(before, state())
    plan.revert()


def test_what_a_loss_function_reaches_is_held(clock: Clock) -> None:
    model = Net(clock)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    second = Second()

    def loss_fn(net: nn.Module, batch: Any) -> Tensor:
        out = net(batch[0])
        second.train(out)
        return CRITERION(out, batch[1]) + second.model(out).mean()

    before = second.state()
    with only(made(clock, "slow", 0.002)):
        plan = ox.accelerate(model, optimizer, loss_fn, batches(), remember=False)
    assert plan.accepted == ("cheaper_slow",) and same(before, second.state())
    assert "loss_fn.second" in plan.certificate.verification["restored"]
    plan.revert()


def test_without_such_a_thing_the_certificate_claims_no_more(clock: Clock) -> None:
    model = Net(clock)
    with only(made(clock, "slow", 0.002)):
        plan = ox.accelerate(model, torch.optim.SGD(model.parameters(), 0.1), CRITERION, batches(), remember=False)
    assert plan.certificate.verification["restored"].startswith("model, optimizer and random generators proven by hash")
    assert not any("not held" in name for name in plan.certificate.verification)
    plan.revert()


# -- what cannot be held -----------------------------------------------------------------------------------------------


def test_what_cannot_be_held_is_named_and_said_where_it_went_on(clock: Clock, tmp_path: Any) -> None:
    rows = iter([torch.randn(3) for _ in range(500)])
    generated = (torch.randn(3) for _ in range(500))
    forever = itertools.cycle([1, 2])

    def way(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, State]:
        def step(batch: Any) -> Tensor:
            loss, out = one_step(model, optimizer, batch)
            out.detach().add_(next(rows) + next(generated) + next(forever))
            return loss

        return step, lambda: None

    said: list[str] = []
    ox.base.set_log_sink(lambda _level, text: said.append(text))
    try:
        plan, _, _ = run(clock, way)
    finally:
        ox.base.set_log_sink(None)
    named = plan.certificate.verification["not held, nor covered by the hash"]
    for name in ("step.rows (list_iterator)", "step.generated (generator)", "step.forever (cycle)"):
        assert name in named
    assert len([text for text in said if "step.rows (list_iterator)" in text]) == 1
    assert "step.rows (list_iterator) could not be held" in plan.report().verdict
    plan.revert()


def test_libraries_constants_and_helpers_are_not_named(clock: Clock) -> None:
    import logging
    import re
    import threading
    from pathlib import Path

    log, pattern, lock, where, sentinel = logging.getLogger("x"), re.compile("a"), threading.Lock(), Path(), object()

    def step(batch: Any) -> Any:
        with lock:
            log.debug("%s %s %s %s", pattern, where, sentinel, range(3))
        return np.float32(nn.functional.relu(batch))

    with Snapshot.of(nn.Linear(2, 2), None, reach={"step": step}) as snapshot:
        assert snapshot.unheld == [] and snapshot.covers == "model, optimizer and random generators"


def test_the_proof_of_the_model_does_not_fail_for_what_another_thread_changes(clock: Clock) -> None:
    model = Net(clock)
    beside = {"seconds": 0}

    def step(batch: Any) -> Any:
        return beside

    snapshot = Snapshot.of(model, None, reach={"step": step})
    beside["seconds"] = 5
    snapshot.prove()
    assert snapshot.moved() == ["step.beside['seconds']"]
    snapshot.restore()
    assert beside["seconds"] == 0 and snapshot.moved() == []


# -- batches -----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    note: str = "a"


@dataclass(slots=True)
class Slotted:
    x: Tensor
    y: Tensor


class Encoding(UserDict):  # type: ignore[type-arg]
    """As the outputs of Hugging Face's tokenizers."""


class Graph:
    """As of PyTorch Geometric: a store inside of an object, and views of one large tensor."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.large = torch.zeros(1000)
        self._store = {"x": x, "y": y, "view": self.large[:2]}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._store[name]


def packed(x: Tensor, y: Tensor) -> tuple[PackedSequence, Tensor]:
    return pack_padded_sequence(x.unsqueeze(0), torch.ones(len(x), dtype=torch.long)), y


KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "pair": (Pair, lambda b: (b.x, b.y)),
    "dataclass": (Sample, lambda b: (b.x, b.y)),
    "slots": (Slotted, lambda b: (b.x, b.y)),
    "encoding": (lambda x, y: Encoding(x=x, y=y), lambda b: (b["x"], b["y"])),
    "graph": (Graph, lambda b: (b.x, b.y)),
    "in a list": (lambda x, y: [Sample(x, y)], lambda b: (b[0].x, b[0].y)),
    "packed": (packed, lambda b: (b[0].data, b[1])),
    "arrays": (lambda x, y: (x.numpy(), y), lambda b: (torch.from_numpy(b[0]), b[1])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_class_is_copied(kind: str, clock: Clock) -> None:
    make, read = KINDS[kind]
    data = [make(x, y) for x, y in batches()]
    before = [[t.clone() for t in read(batch)] for batch in data]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, y = read(batch)
        loss = CRITERION(model(x.clone()), y)
        x.mul_(1.001)  # in place, as augmentation does
        return loss

    model = Net(clock)
    with only(made(clock, "slow", 0.002)):
        plan = ox.accelerate(
            model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, data, loop="plan", remember=False
        )
    assert plan.accepted == ("cheaper_slow",)
    assert same(before, [list(read(batch)) for batch in data])
    plan.revert()


def test_views_in_a_batch_are_copied_without_what_they_are_views_of() -> None:
    from oxytorch.data.batches import copied, tensors

    made_copy = copied(Graph(torch.ones(2), torch.ones(2)))
    assert made_copy.view.untyped_storage().nbytes() == 8
    assert [tuple(t.shape) for t in tensors(made_copy)] == [(1000,), (2,), (2,), (2,)]


def test_a_batch_that_cannot_be_copied_is_refused_in_words(clock: Clock) -> None:
    class Stream:
        def __init__(self, x: Tensor) -> None:
            self.x = (value for value in x)

    model = Net(clock)
    before = fingerprint(model, optimizer := torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(TypeError, match=r"a batch holds a .*Stream, which cannot be copied .*copy\.deepcopy"):
        ox.accelerate(model, optimizer, lambda m, b: m(b), [Stream(torch.ones(2))])
    assert same(before, fingerprint(model, optimizer))


# -- the batch finder walks the same way -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_batch_finder_holds_what_a_step_reaches(way: Callable[..., tuple[Step, State]], clock: Clock) -> None:
    model = Net(clock)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step, state = way(model, optimizer)
    before = copy.deepcopy([state(), fingerprint(model, optimizer)])
    ox.memory.largest_batch(step, lambda n: batches(1, n)[0], start=2, most=4, steps=1)
    assert same(before, [state(), fingerprint(model, optimizer)])
