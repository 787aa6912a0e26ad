"""A loss that is no scalar tensor is refused with a sentence, wherever a loss is taken, and leaves nothing behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import oxytorch as ox
import pytest
import torch
from planted import batches, only
from torch import nn

pytestmark = pytest.mark.cpu_only("one device is enough for a message")

CRITERION = nn.CrossEntropyLoss()


class Wrong(nn.Module):
    """A model whose step gives what is asked for in place of a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


KINDS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], type[Exception], str]] = {
    "tuple": (
        lambda loss, out: (loss, out),
        TypeError,
        "a tuple of 2, expected a scalar torch.Tensor: return the loss",
    ),
    "list": (lambda loss, _: [loss], TypeError, "a list of 1, expected"),
    "dict": (lambda loss, _: {"loss": loss}, TypeError, "a dict of 1, expected"),
    "float": (lambda loss, _: float(loss.detach()), TypeError, "a float, expected a scalar torch.Tensor"),
    "None": (lambda _loss, _out: None, TypeError, "a NoneType, expected"),
    "vector": (lambda _loss, out: out.sum(1), ValueError, r"shape \(5,\), expected a scalar: reduce it"),
}


def steps(kind: str) -> tuple[Wrong, torch.optim.Optimizer, Callable[..., Any]]:
    model = Wrong()
    wrong = KINDS[kind][0]

    def loss_fn(net: nn.Module, batch: Any) -> Any:
        out = net(batch[0])
        return wrong(CRITERION(out, batch[1]), out)

    return model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn


def by_step(model: Wrong, optimizer: Any, loss_fn: Any) -> None:
    ox.Trainer(model, optimizer, loss_fn, "basic").step(batches(1)[0])


def by_closure(model: Wrong, optimizer: Any, loss_fn: Any) -> None:
    ox.Trainer(model, optimizer, config="basic").step(lambda: loss_fn(model, batches(1)[0]))


def by_fit(model: Wrong, optimizer: Any, loss_fn: Any) -> None:
    ox.Trainer(model, optimizer, loss_fn, calibrate=True, allocator="system").fit(batches(), progress=False)


def by_evaluate(model: Wrong, optimizer: Any, loss_fn: Any) -> None:
    ox.Trainer(model, optimizer, loss_fn, "basic").evaluate(batches())


def by_accelerate(model: Wrong, optimizer: Any, loss_fn: Any) -> None:
    with only():
        ox.accelerate(model, optimizer, loss_fn, batches(), remember=False)


def by_own_step(model: Wrong, optimizer: Any, loss_fn: Any) -> None:
    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        given = loss_fn(model, batch)
        CRITERION(model(batch[0]), batch[1]).backward()
        optimizer.step()
        return given

    with only():
        ox.accelerate(model, optimizer, None, batches(), step=step, remember=False)


def by_prepare(model: Wrong, optimizer: Any, loss_fn: Any) -> None:
    with only():
        ox.PerformanceOptimizer("basic").prepare(model, optimizer, batches(), loss_fn, remember=False)


def by_advise(model: Wrong, _optimizer: Any, loss_fn: Any) -> None:
    ox.model.ModelOptimizer().advise(model, batches(1)[0], loss_fn)


TAKERS = [by_step, by_closure, by_fit, by_evaluate, by_accelerate, by_own_step, by_prepare, by_advise]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("taker", TAKERS, ids=lambda taker: taker.__name__)
def test_a_loss_of_another_kind_gets_a_sentence(taker: Callable[..., None], kind: str) -> None:
    model, optimizer, loss_fn = steps(kind)
    before = [p.detach().clone() for p in model.parameters()]
    _, error, said = KINDS[kind]
    with pytest.raises(error, match=said):
        taker(model, optimizer, loss_fn)
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert b.grad is None


class Pair(Wrong):
    """A model that returns what many do, and no loss of its own."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x), x


def test_a_model_without_a_loss_of_its_own_is_told_what_to_pass() -> None:
    model = Pair()
    with only(), pytest.raises(TypeError, match=r"a tuple without a loss\. Pass loss_fn"):
        ox.PerformanceOptimizer("basic").prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), [b[0] for b in batches()], remember=False
        )


def test_what_a_step_of_the_batch_search_returns_is_not_looked_at() -> None:
    model = Wrong()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Any:
        loss = CRITERION(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss, batch

    def make(size: int) -> Any:
        return torch.randn(size, 6), torch.zeros(size, dtype=torch.long)

    plan = ox.memory.largest_batch(step, make, most=2)
    assert plan.largest >= 1


def test_a_closure_of_the_step_tail_may_return_what_torchs_may() -> None:
    model = Wrong()
    for optimizer in (ox.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)):

        def closure() -> Any:
            loss = CRITERION(model(batches(1)[0][0]), batches(1)[0][1])
            loss.backward()
            return loss, "more"

        assert optimizer.step(closure)[1] == "more"  # type: ignore[index]


F = nn.functional
SMOOTH = functools.partial(F.cross_entropy, label_smoothing=0.1)
TWO_TENSORS: dict[str, Callable[..., Any]] = {
    "lambda": lambda outputs, targets: F.cross_entropy(outputs, targets, label_smoothing=0.1),
    "operators": lambda outputs, targets: ((outputs - F.one_hot(targets, 3)) ** 2).mean(),
    "method": lambda outputs, targets: outputs.log_softmax(1).gather(1, targets[:, None]).neg().mean(),
    "partial": functools.partial(lambda scale, outputs, targets: scale * F.cross_entropy(outputs, targets), 2.0),
}


@pytest.mark.parametrize(
    "taker", [t for t in TAKERS if t not in (by_closure, by_own_step)], ids=lambda taker: taker.__name__
)
def test_a_function_of_torch_with_arguments_is_a_criterion(taker: Callable[..., None]) -> None:
    model = Wrong()
    taker(model, torch.optim.SGD(model.parameters(), lr=0.1), SMOOTH)


def test_such_a_function_trains_as_in_the_loop_written_by_hand() -> None:
    model, plain = Wrong(), Wrong()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trainer = ox.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), SMOOTH, config="basic", calibrate=False)
    for x, y in batches(3):
        optimizer.zero_grad()
        SMOOTH(plain(x), y).backward()
        optimizer.step()
        trainer.step((x, y))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("kind", list(TWO_TENSORS))
@pytest.mark.parametrize("taker", [by_step, by_accelerate, by_advise], ids=lambda taker: taker.__name__)
def test_a_function_of_outputs_and_targets_is_told_what_to_pass(taker: Callable[..., None], kind: str) -> None:
    model = Wrong()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TypeError, match=r"lambda model, batch: loss_fn\(model\(batch\[0\]\), batch\[1\]\)"):
        taker(model, torch.optim.SGD(model.parameters(), lr=0.1), TWO_TENSORS[kind])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_error_of_the_model_itself_is_passed_through() -> None:
    model = Wrong()
    model.forward = lambda x: model.absent(2 * x)  # type: ignore[method-assign,operator]
    with pytest.raises(AttributeError, match="absent") as caught:
        by_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, batch: m(batch[0]).mean())
    assert "outputs, targets" not in str(caught.value)
