"""GRU layers against torch's in fp64: no further off than twice torch's own operators of the same dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import _C
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from .recurrent import DTYPES, Case, Reads, assert_no_further_off, installed
from .rounding import threads

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")
NARROWER = {"avx2": "twice_torchs or threads or rows or autocast", "scalar": "(twice_torchs and 1) or saturate"}


def handed_on() -> int:
    return _C.tune.NativeOperators.handed_on()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(25))
def test_no_further_off_than_twice_torchs(seed: int, dtype: torch.dtype) -> None:
    case = Case(nn.GRU, seed, dtype)
    exact, torchs = case.results(torch.float64), case.results(dtype)
    with installed("gru"):
        before = handed_on()
        ours = case.results(dtype)
        assert handed_on() == before
    assert_no_further_off(exact, torchs, ours, dtype)


@pytest.mark.parametrize("seed", range(12))
def test_nor_under_autocast(seed: int) -> None:
    case = Case(nn.GRU, seed, torch.float32)
    exact, torchs = case.results(torch.float64), case.results(torch.float32, autocast=True)
    with installed("gru"):
        before = handed_on()
        ours = case.results(torch.float32, autocast=True)
        assert handed_on() == before
    assert_no_further_off(exact, torchs, ours, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_input", DTYPES)
def test_dtypes_under_autocast_are_torchs(dtype: torch.dtype, of_input: torch.dtype) -> None:
    torch.manual_seed(0)
    module, state = nn.GRU(4, 5, bidirectional=True), torch.randn(2, 3, 5, dtype=dtype, requires_grad=True)
    x = torch.randn(6, 3, 4, dtype=of_input, requires_grad=True)

    def dtypes() -> list[torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16):
            results = module(x, state)
        grads = torch.autograd.grad(results[0].float().sum(), [x, state, *module.parameters()])
        return [one.dtype for one in (*results, *grads)]

    expected = dtypes()
    with installed("gru"):
        before = handed_on()
        assert dtypes() == expected
        assert handed_on() == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, x = nn.GRU(20, 40).to(dtype), torch.randn(9, 70, 20).to(dtype)

    def run(count: int) -> list[Tensor]:
        with threads(count):
            output, _ = module(x)
            return [output.detach(), *torch.autograd.grad(output.float().square().sum(), module.parameters())]

    with installed("gru"):
        one, *others = [run(count) for count in (1, 2, 3, 5)]
    for other in others:
        assert all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    module, x = nn.GRU(8, 12), torch.randn(4, 40, 8)
    with installed("gru"), torch.no_grad():
        plain, _ = module(x)
        x[2, 7] = torch.nan
        spoiled, _ = module(x)
        alone, _ = module(x[:, 3:4])
    others = [i for i in range(40) if i != 7]
    assert spoiled[:, others].equal(plain[:, others])
    assert spoiled[:2, 7].equal(plain[:2, 7]) and spoiled[2:, 7].isnan().all()
    assert alone[:, 0].equal(plain[:, 3])


def test_large_numbers_saturate() -> None:
    module, x = nn.GRU(3, 4), torch.full((5, 2, 3), 1e30)
    x[:, 1] = -1e30
    with torch.no_grad():
        module.bias_ih_l0.fill_(0)
        torchs, _ = module(x)
        with installed("gru"):
            ours, _ = module(x)
    torch.testing.assert_close(ours, torchs)
    assert ours.isfinite().all()


def test_without_gradients_it_computes_the_same() -> None:
    torch.manual_seed(0)
    module, x = nn.GRU(8, 12, 2, dropout=0.0), torch.randn(4, 6, 8)
    with installed("gru"):
        before = handed_on()
        trained, _ = module(x)
        with torch.no_grad():
            evaluated, _ = module.eval()(x)
        assert handed_on() == before
        with torch.inference_mode():
            inferred, _ = module(x)
    assert evaluated.equal(trained.detach()) and not evaluated.requires_grad
    torch.testing.assert_close(inferred, evaluated)


def test_dropout_between_layers_draws_as_torchs() -> None:
    torch.manual_seed(0)
    module, x = nn.GRU(8, 12, 3, dropout=0.4, bidirectional=True), torch.randn(4, 6, 8)

    def run() -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        return module(x)[0], torch.rand(())

    (expected, following), (evaluated, _) = run(), module.eval()(x)
    with installed("gru"):
        before = handed_on()
        torch.testing.assert_close(module(x)[0], evaluated)
        module.train()
        output, next_number = run()
        assert handed_on() == before
    torch.testing.assert_close(output, expected)
    assert next_number.equal(following)


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "all", "input"])
def test_gradients_that_nobody_wants_are_left_out(frozen: str) -> None:
    torch.manual_seed(0)
    module, x, state = nn.GRU(8, 12), torch.randn(4, 6, 8), torch.randn(1, 6, 12)
    x.requires_grad_(frozen != "input")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(frozen not in (name, "all"))

    def grads() -> list[Tensor]:
        wanted = [one for one in (x, *module.parameters()) if one.requires_grad]
        return list(torch.autograd.grad(module(x, state)[0].square().sum(), wanted))

    expected = grads()
    with installed("gru"):
        for mine, right in zip(grads(), expected, strict=True):
            torch.testing.assert_close(mine, right)


def test_graphs_from_before_and_after_go_on() -> None:
    torch.manual_seed(0)
    module, x = nn.GRU(8, 12), torch.randn(4, 6, 8)
    grads = lambda output: torch.autograd.grad(output.square().sum(), list(module.parameters()))  # noqa: E731
    expected = grads(module(x)[0])
    before = module(x)[0]
    with installed("gru"):
        for mine, right in zip(grads(before), expected, strict=True):
            assert mine.equal(right)
        inside = module(x)[0]
    for mine, right in zip(grads(inside), expected, strict=True):
        torch.testing.assert_close(mine, right)
    assert all(mine.equal(right) for mine, right in zip(grads(module(x)[0]), expected, strict=True))
    with installed("gru"):
        assert not module(x)[0].equal(before)


def test_what_it_gives_may_be_changed_in_place() -> None:
    torch.manual_seed(0)
    module, x = nn.GRU(8, 12, batch_first=True), torch.randn(4, 6, 8)

    def grads() -> Iterable[Tensor]:
        output, last = module(x)
        output.relu_()
        last.mul_(2)
        return torch.autograd.grad(output.sum() + last.sum(), list(module.parameters()))

    expected = grads()
    with installed("gru"):
        for mine, right in zip(grads(), expected, strict=True):
            torch.testing.assert_close(mine, right)


def test_a_second_derivative_is_refused_and_a_second_backward_is_torchs() -> None:
    torch.manual_seed(0)
    module, x = nn.GRU(8, 12), torch.randn(4, 6, 8, requires_grad=True)
    with installed("gru"):
        output, _ = module(x)
        (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        assert first.requires_grad
        with pytest.raises(RuntimeError, match="GRU has no second derivative"):
            first.square().sum().backward()
        output, _ = module(x)
        output.sum().backward(retain_graph=True)
        output.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            output.sum().backward()
        output, _ = module(x)
        with torch.no_grad():
            module.weight_hh_l0.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_it_does_not_serve_stays_with_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8)
    packed = pack_padded_sequence(x, [4, 4, 3, 2, 1, 1])
    plain, double, cell = nn.GRU(8, 12), nn.GRU(8, 12).double(), nn.GRUCell(8, 12)
    tangent = torch.randn_like(x)
    params = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    of_params = torch.func.grad(lambda p: torch.func.functional_call(plain, p, (x,))[0].square().sum())

    def dual() -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            output, _ = plain(torch.autograd.forward_ad.make_dual(x, tangent))
            return torch.autograd.forward_ad.unpack_dual(output).tangent

    def in_mode() -> Tensor:
        with Seen():
            return plain(x)[0]

    def in_float16() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return plain(x)[0]

    negative = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negative.is_neg()
    calls = [
        lambda: double(x.double())[0], lambda: plain(packed)[0].data, lambda: cell(x[0]), in_mode, dual,
        lambda: of_params(params)["weight_hh_l0"], lambda: torch.func.jvp(lambda v: plain(v)[0], (x,), (tangent,))[1],
        lambda: plain(negative)[0], in_float16,
    ]  # fmt: skip
    expected = [call() for call in calls]
    with installed("gru"):
        for call, right in zip(calls, expected, strict=True):
            assert call().equal(right)
        assert not plain(x)[0].equal(expected[3])
        assert plain(torch.randn(3, 8))[0].shape == (3, 12)  # without a batch
        with pytest.raises(RuntimeError, match=r"input\.size"):
            plain(torch.randn(4, 6, 9))
        with pytest.raises((RuntimeError, ValueError)):
            plain(x.double())


def test_checkpointing_autocast_and_compiling_take_it() -> None:
    torch.manual_seed(0)
    model, x = Reads(nn.GRU, dropout=0.2), torch.randn(5, 7, 16, requires_grad=True)

    def grads(call: Any) -> list[Tensor]:
        torch.manual_seed(3)
        return list(torch.autograd.grad(call(x).float().sum(), [x, *model.parameters()]))

    expected = grads(model)
    with installed("gru"):
        before = handed_on()
        plain = grads(model)
        again = grads(lambda x: checkpoint(model, x, use_reentrant=False))
        compiled = grads(torch.compile(model, backend="aot_eager"))
        with torch.autocast("cpu", torch.bfloat16):
            narrow = grads(model)
        assert handed_on() == before
    for mine, right in zip(plain, expected, strict=True):
        torch.testing.assert_close(mine, right)
    assert all(mine.equal(right) for mine, right in zip(again, plain, strict=True))
    for one, right in zip(compiled, plain, strict=True):
        torch.testing.assert_close(one, right)
    for one, right in zip(narrow, expected, strict=True):
        torch.testing.assert_close(one.float(), right, rtol=0.05, atol=0.05)


def test_what_the_compiler_takes_apart_is_torchs() -> None:
    torch.manual_seed(0)
    module, x = nn.GRU(8, 12), torch.randn(4, 6, 8)
    expected, _ = module(x)
    with installed("gru"), torch._dynamo.config.patch(allow_rnn=True):
        whole = torch.compile(module, backend="aot_eager", fullgraph=True)
        output, _ = whole(x)
        grads = torch.autograd.grad(output.sum(), list(module.parameters()))
    torch.testing.assert_close(output, expected)
    for mine, right in zip(grads, torch.autograd.grad(expected.sum(), list(module.parameters())), strict=True):
        torch.testing.assert_close(mine, right)


def test_the_edit_is_applied_and_taken_back() -> None:
    torch.manual_seed(0)
    model, x = Reads(nn.GRU), torch.randn(4, 20, 16)
    given = model(x)
    tuner = ox.model.ModelOptimizer()
    (outcome,) = tuner.apply(model, "gru:native", (x, torch.randint(4, (4,))), F.cross_entropy)
    assert outcome.applied, outcome
    assert not model(x).equal(given)
    torch.testing.assert_close(model(x), given)
    tuner.revert()
    assert model(x).equal(given)


def test_a_model_without_one_is_left_alone() -> None:
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    (outcome,) = ox.model.ModelOptimizer().apply(model, "gru:native", (x, torch.randint(3, (5,))), F.cross_entropy)
    assert not outcome.applied and "no GRU" in outcome.reason


def test_accelerate_tries_it() -> None:
    torch.manual_seed(0)
    model = Reads(nn.GRU)
    batches = [(torch.randn(16, 20, 16), torch.randint(4, (16,)))]
    plan = ox.accelerate(
        model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches, level="advanced",
        strategies=["native_gru"], tune_seconds=1, remember=False,
    )  # fmt: skip
    (entry,) = (e for e in plan.certificate.entries if e.strategy == "native_gru")
    plan.revert()
    assert entry.status in ("accepted", "rejected"), entry
    assert "numer" not in entry.reason, entry.reason
