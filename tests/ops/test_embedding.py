"""Embedding against torch's own, and sums in fp64."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import oxytorch as ox
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.library import opcheck
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .rounding import ROUNDING, compiled_for_any_size, threads

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")


class Case:
    """Random sizes, numbers and layouts, by a seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        noise = torch.Generator().manual_seed(seed)
        self.dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        self.rows, self.columns = draw.choice([1, 2, 7, 64, 3000]), draw.choice([0, 1, 5, 16, 64, 67, 260])
        size = draw.choice([(), (0,), (1,), (3, 0), (5, 7), (2, 3, 41), (1500,)])
        drawn = torch.randint(self.rows, size, generator=noise)
        self.input = draw.choice([drawn, drawn.int(), torch.where(drawn % 3 == 0, 0, drawn)])
        if len(size) == 2 and draw.random() < 0.5:
            self.input = self.input.t().contiguous().t()
        self.padding = draw.choice([None, None, 0, -1, self.rows // 2])
        self.weight = torch.randn(self.rows, self.columns, generator=noise).to(self.dtype)
        made = torch.randn(*size, 2 * self.columns, generator=noise).to(self.dtype)
        self.grad = draw.choice([made[..., : self.columns], made[..., ::2], made[..., : self.columns].contiguous()])

    def run(self, embed: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        weight = self.weight.to(dtype).requires_grad_()
        output = embed(self.input, weight, self.padding)
        return [output.detach(), *torch.autograd.grad(output, weight, self.grad.to(dtype))]


@pytest.mark.parametrize("seed", range(120))
def test_sums_are_of_fp32_and_rounded_once(seed: int) -> None:
    case = Case(seed)
    output, ours = case.run(ox.ops.embedding, case.dtype)
    right, exact = case.run(F.embedding, torch.float64)
    assert output.equal(right.to(case.dtype)) and ours.dtype == case.dtype
    most = case.grad.double().abs().amax() * 2 if case.grad.numel() else 0.0
    allowed = ROUNDING[case.dtype] * exact.abs() + 2.0**-24 * max(case.input.numel(), 1) * most + 2.0**-25
    assert ((ours.double() - exact).abs() <= allowed).all()
    if case.dtype == torch.float32:
        assert ours.equal(case.run(F.embedding, torch.float32)[1])
    else:
        torchs = case.run(F.embedding, case.dtype)[1]
        error, theirs = (float((t.double() - exact).norm()) for t in (ours, torchs))
        assert error <= theirs + ROUNDING[case.dtype] * float(exact.norm())


def test_many_small_gradients_in_16_bits_are_not_lost() -> None:
    weight = torch.zeros(2, 8, dtype=torch.bfloat16).requires_grad_()
    given = torch.zeros(4096, dtype=torch.long)
    (torchs,) = torch.autograd.grad(F.embedding(given, weight).sum(), weight)
    (ours,) = torch.autograd.grad(ox.ops.embedding(given, weight).sum(), weight)
    assert (ours[0] == 4096).all() and (ours[1] == 0).all()
    assert (torchs[0] == 256).all()  # 256 + 1 is 256 there


def bits() -> list[Tensor]:
    noise = torch.Generator().manual_seed(1)
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grads = torch.randn(700, 83, generator=noise).to(dtype)
        given = torch.randint(29, (700,), generator=noise)
        made.append(torch.ops.oxytorch.embedding_gradient(grads, given, 31, 4))
    return made


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    noise = torch.Generator().manual_seed(2)
    grads = torch.randn(20_000, 300, generator=noise)
    skewed = torch.where(torch.rand(20_000, generator=noise) < 0.9, 3, torch.randint(2000, (20_000,), generator=noise))

    def run() -> list[Tensor]:
        return [*bits(), torch.ops.oxytorch.embedding_gradient(grads, skewed, 2000, -1)]

    with threads(1):
        one = run()
    for count in (2, 3, 7):
        with threads(count):
            assert all(a.equal(b) for a, b in zip(one, run(), strict=True))


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    return torch.tensor([[0, 5, 2], [2, 2, 1]]), weight


def test_derivatives_of_any_order() -> None:
    given, weight = batch(torch.float64)
    assert torch.autograd.gradcheck(lambda w: ox.ops.embedding(given, w), weight)
    assert torch.autograd.gradgradcheck(lambda w: ox.ops.embedding(given, w), weight)
    grads = []
    for embed, of in ((ox.ops.embedding, weight.detach().float()), (F.embedding, weight.detach())):
        w = of.requires_grad_()
        output = embed(given, w, 2).square().mul(w.sum())
        (first,) = torch.autograd.grad(output.sum(), w, create_graph=True)
        grads.append(torch.autograd.grad(first.square().sum(), w)[0].double())
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_it_is_an_operator_that_torch_checks() -> None:
    given, weight = batch()
    opcheck(torch.ops.oxytorch.embedding, (given, weight))
    opcheck(torch.ops.oxytorch.embedding, (given.int(), weight, -2))
    opcheck(torch.ops.oxytorch.embedding, batch(torch.float64))
    opcheck(torch.ops.oxytorch.embedding_forward, (weight, given, 2))
    opcheck(torch.ops.oxytorch.embedding_gradient, (torch.randn(2, 3, 5, requires_grad=True), given, 6, 2))


def test_compiled_exported_and_checkpointed_agree_with_eager() -> None:
    given, weight = batch()

    def embed(given: Tensor, weight: Tensor) -> Tensor:
        return ox.ops.embedding(given, weight * 2, 1).sin()

    expected = embed(given, weight)
    (of_weight,) = torch.autograd.grad(expected.sum(), weight)
    torch._dynamo.reset()
    for name, run in {
        "compile": torch.compile(embed, fullgraph=True, backend="aot_eager"),
        "checkpoint": lambda *args: checkpoint(embed, *args, use_reentrant=False),
    }.items():
        output = run(given, weight)
        assert output.equal(expected), name
        assert torch.autograd.grad(output.sum(), weight)[0].equal(of_weight), name

    class Embed(nn.Module):
        def forward(self, given: Tensor, weight: Tensor) -> Tensor:
            return embed(given, weight)

    args = (given, weight.detach())
    assert torch.export.export(Embed(), args).module()(*args).equal(expected)


def test_one_compiled_graph_serves_other_numbers_of_tokens() -> None:
    embed, graphs = compiled_for_any_size(ox.ops.embedding)
    weight = torch.randn(50, 8)
    for tokens in (5, 40, 97):
        given = torch.arange(tokens) % 50
        assert embed(given, weight).equal(F.embedding(given, weight))
    assert len(graphs) == 1


def test_torch_func_transforms_it() -> None:
    given, weight = batch()
    table = weight.detach()

    def loss(weight: Tensor, given: Tensor = given) -> Tensor:
        return (ox.ops.embedding(given, weight) ** 3).sum()

    assert grad(loss)(table).equal(torch.autograd.grad(loss(weight), weight)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of loops
        each = vmap(grad(loss), (None, 0))(table, given)
        tables = vmap(lambda w: ox.ops.embedding(given, w))(torch.stack([table, 2 * table]))
    assert all(one.equal(grad(loss)(table, row)) for one, row in zip(each, given, strict=True))
    assert tables[1].equal(F.embedding(given, 2 * table))


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda i, w: ox.ops.embedding(i, w[0]), ValueError, "a weight of rows x columns"),
        (lambda i, w: ox.ops.embedding(i.float(), w), TypeError, "input is Float"),
        (lambda i, w: ox.ops.embedding(i, w, 6), ValueError, "padding_idx is 6 and the weight has 6 rows"),
        (lambda i, w: ox.ops.embedding(i, w, -7), ValueError, "padding_idx is -7"),
        (lambda i, w: ox.ops.embedding(i + 1, w), IndexError, "out of range"),
        (lambda i, w: torch.ops.oxytorch.embedding_gradient(torch.ones(2, 3, 5), i, 5, -1), ValueError,
         "an index outside of the 5 rows"),
        (lambda i, w: torch.ops.oxytorch.embedding_gradient(torch.ones(2, 5), i, 6, -1), ValueError,
         "call oxytorch::embedding"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_words(call: Callable[..., Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call(*batch())
