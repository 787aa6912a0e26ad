"""LSTM and GRU layers against torch's in fp64: no further off than twice torch's own of the same dtype."""

from __future__ import annotations

from typing import Any

import oxytorch as ox
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .recurrent import DTYPES, Case, Layer, Reads, assert_no_further_off, handed_on, installed
from .rounding import threads

pytestmark = [
    pytest.mark.cpu_only("the kernels are the CPU's"),
    pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__),
]
NARROWER = {"avx2": "twice_torchs or threads or rows", "scalar": "(twice_torchs and 1) or saturate"}


def name_of(kind: Layer) -> str:
    return kind.__name__.lower()


@pytest.fixture(autouse=True)
def has_torchs_bfloat16(request: pytest.FixtureRequest, kind: Layer) -> None:
    """Torch's LSTM in bfloat16 raises on processors that cannot multiply it."""
    if kind is not nn.LSTM or request.node.callspec.params.get("dtype") is not torch.bfloat16:
        return
    try:
        nn.LSTM(2, 2).bfloat16()(torch.ones(1, 1, 2, dtype=torch.bfloat16))
    except RuntimeError as error:
        pytest.skip(f"torch: {error}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(25))
def test_no_further_off_than_twice_torchs(kind: Layer, seed: int, dtype: torch.dtype) -> None:
    case = Case(kind, seed, dtype)
    exact, torchs = case.results(torch.float64), case.results(dtype)
    with installed(name_of(kind)):
        before = handed_on()
        ours = case.results(dtype)
        assert handed_on() == before
    assert_no_further_off(exact, torchs, ours, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_for_any_number_of_threads(kind: Layer, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, x = kind(20, 40).to(dtype), torch.randn(9, 70, 20).to(dtype)

    def run(count: int) -> list[Tensor]:
        with threads(count):
            output, _ = module(x)
            return [output.detach(), *torch.autograd.grad(output.float().square().sum(), module.parameters())]

    with installed(name_of(kind)):
        one, *others = [run(count) for count in (1, 2, 3, 5)]
    for other in others:
        assert all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_rows_of_a_batch_do_not_see_each_other(kind: Layer) -> None:
    torch.manual_seed(0)
    module, x = kind(8, 12), torch.randn(4, 40, 8)
    with installed(name_of(kind)), torch.no_grad():
        plain, _ = module(x)
        x[2, 7] = torch.nan
        spoiled, _ = module(x)
        alone, _ = module(x[:, 3:4])
    others = [i for i in range(40) if i != 7]
    assert spoiled[:, others].equal(plain[:, others])
    assert spoiled[:2, 7].equal(plain[:2, 7]) and spoiled[2:, 7].isnan().all()
    assert alone[:, 0].equal(plain[:, 3])


def test_large_numbers_saturate(kind: Layer) -> None:
    module, x = kind(3, 4), torch.full((5, 2, 3), 1e30)
    x[:, 1] = -1e30
    with torch.no_grad():
        module.bias_ih_l0.fill_(0)
        torchs, _ = module(x)
        with installed(name_of(kind)):
            ours, _ = module(x)
    torch.testing.assert_close(ours, torchs)
    assert ours.isfinite().all()


def test_without_gradients_it_computes_the_same(kind: Layer) -> None:
    torch.manual_seed(0)
    module, x = kind(8, 12, 2, dropout=0.0), torch.randn(4, 6, 8)
    with installed(name_of(kind)):
        before = handed_on()
        trained, _ = module(x)
        with torch.no_grad():
            evaluated, _ = module.eval()(x)
        assert handed_on() == before
        with torch.inference_mode():
            inferred, _ = module(x)
    assert evaluated.equal(trained.detach()) and not evaluated.requires_grad
    torch.testing.assert_close(inferred, evaluated)


def test_graphs_from_before_and_after_go_on(kind: Layer) -> None:
    torch.manual_seed(0)
    module, x = kind(8, 12), torch.randn(4, 6, 8)
    grads = lambda output: torch.autograd.grad(output.square().sum(), list(module.parameters()))  # noqa: E731
    expected = grads(module(x)[0])
    before = module(x)[0]
    with installed(name_of(kind)):
        for mine, right in zip(grads(before), expected, strict=True):
            assert mine.equal(right)
        inside = module(x)[0]
    for mine, right in zip(grads(inside), expected, strict=True):
        torch.testing.assert_close(mine, right)
    assert all(mine.equal(right) for mine, right in zip(grads(module(x)[0]), expected, strict=True))
    with installed(name_of(kind)):
        assert not module(x)[0].equal(before)


def test_checkpointing_autocast_and_compiling_take_it(kind: Layer) -> None:
    torch.manual_seed(0)
    model, x = Reads(kind, dropout=0.2), torch.randn(5, 7, 16, requires_grad=True)

    def grads(call: Any) -> list[Tensor]:
        torch.manual_seed(3)
        return list(torch.autograd.grad(call(x).float().sum(), [x, *model.parameters()]))

    expected = grads(model)
    with installed(name_of(kind)):
        before = handed_on()
        plain = grads(model)
        again = grads(lambda x: checkpoint(model, x, use_reentrant=False))
        compiled = grads(torch.compile(model, backend="aot_eager"))
        try:
            with torch.autocast("cpu", torch.bfloat16):
                narrow = grads(model)
        except RuntimeError as error:
            if kind is not nn.LSTM:
                raise
            pytest.skip(f"torch: {error}")
        assert handed_on() == before
    for mine, right in zip(plain, expected, strict=True):
        torch.testing.assert_close(mine, right)
    assert all(mine.equal(right) for mine, right in zip(again, plain, strict=True))
    for one, right in zip(compiled, plain, strict=True):
        torch.testing.assert_close(one, right)
    for one, right in zip(narrow, expected, strict=True):
        torch.testing.assert_close(one.float(), right, rtol=0.05, atol=0.05)


def test_the_edit_is_applied_and_taken_back(kind: Layer) -> None:
    torch.manual_seed(0)
    model, x = Reads(kind), torch.randn(4, 20, 16)
    given = model(x)
    tuner = ox.model.ModelOptimizer()
    (outcome,) = tuner.apply(model, f"{name_of(kind)}:native", (x, torch.randint(4, (4,))), F.cross_entropy)
    assert outcome.applied, outcome
    assert not model(x).equal(given)
    torch.testing.assert_close(model(x), given)
    tuner.revert()
    assert model(x).equal(given)


def test_a_model_without_one_is_left_alone(kind: Layer) -> None:
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    (outcome,) = ox.model.ModelOptimizer().apply(
        model, f"{name_of(kind)}:native", (x, torch.randint(3, (5,))), F.cross_entropy
    )
    assert not outcome.applied and f"no {kind.__name__}" in outcome.reason


def test_accelerate_tries_it(kind: Layer) -> None:
    torch.manual_seed(0)
    model = Reads(kind)
    batches = [(torch.randn(16, 20, 16), torch.randint(4, (16,)))]
    plan = ox.accelerate(
        model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches, level="advanced",
        strategies=[f"native_{name_of(kind)}"], tune_seconds=1, remember=False,
    )  # fmt: skip
    (entry,) = (e for e in plan.certificate.entries if e.strategy == f"native_{name_of(kind)}")
    plan.revert()
    assert entry.status in ("accepted", "rejected"), entry
    assert "numer" not in entry.reason, entry.reason
