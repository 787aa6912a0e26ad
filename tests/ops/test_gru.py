"""GRU layers: what test_recurrent.py does not ask of both kinds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from .recurrent import DTYPES, Case, assert_no_further_off, handed_on, installed

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")
NARROWER = {"avx2": "autocast"}


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
