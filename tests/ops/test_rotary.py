"""Rotary embedding against the formula in fp64, and the usual composition of torch's operators."""

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
from torch.utils.checkpoint import checkpoint

from .rounding import ROUNDING, compiled_for_any_size, threads

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")


def angles_of(positions: Tensor, pairs: int) -> Tensor:
    """Of each position and pair, as RoFormer has them."""
    rates = 10_000.0 ** (-torch.arange(pairs, dtype=torch.float64) / max(pairs, 1))
    return positions.double()[..., None] * rates


def exact(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rotary_dim: int) -> Tensor:
    """In fp64, of tables with each angle once that broadcast to x."""
    wide, c, s = x.double(), cos.double(), sin.double()
    turned, rest = wide[..., :rotary_dim], wide[..., rotary_dim:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    first, second = a * c - b * s, b * c + a * s
    made = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    return torch.cat([made, rest], -1)


def swapped(x: Tensor, interleaved: bool) -> Tensor:
    """Hugging Face's rotate_half, and rotate_every_two of GPT-J."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def twice(table: Tensor, interleaved: bool) -> Tensor:
    return table.repeat_interleave(2, -1) if interleaved else torch.cat([table, table], -1)


def composed(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rotary_dim: int) -> Tensor:
    """As models have it: tables and all that comes between in the dtype of x."""
    c, s = (twice(t, interleaved).to(x.dtype) for t in (cos, sin))
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat([turned * c + swapped(turned, interleaved) * s, rest], -1)


class Case:
    """Random sizes, layouts and tables, by a seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        noise = torch.Generator().manual_seed(seed)
        self.dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        batch, heads = draw.choice([0, 1, 1, 2, 3]), draw.choice([0, 1, 2, 5])
        tokens, width = draw.choice([0, 1, 7, 31, 32, 33, 97]), draw.choice([2, 4, 6, 22, 32, 34, 64, 80, 128])
        self.rotary_dim = draw.choice([width, width, 2, 2 * draw.randint(1, width // 2)])
        self.interleaved = draw.random() < 0.5
        size = (batch, heads, tokens, width)

        def rows() -> Tensor:
            layout = draw.choice(["heads", "tokens", "wide", "spread", "expanded"])
            if layout == "tokens":
                made = torch.randn(batch, tokens, heads, width, generator=noise).to(self.dtype).transpose(1, 2)
            elif layout == "wide":
                made = torch.randn(*size[:3], width + 5, generator=noise).to(self.dtype)[..., 3 : width + 3]
            elif layout == "spread":
                made = torch.randn(*size[:3], 2 * width, generator=noise).to(self.dtype)[..., ::2]
            elif layout == "expanded":
                made = torch.randn(batch, 1, tokens, width, generator=noise).to(self.dtype).expand(size)
            else:
                made = torch.randn(size, generator=noise).to(self.dtype)
            return made

        self.x, self.grad = rows(), rows()
        # Of all samples, of each, and of each head.
        shapes = [(tokens,), (tokens,), (1, tokens), (batch, tokens), (batch, 1, tokens), (*size[:3],), (1, 1, 1)]
        shape = draw.choice(shapes)
        angles = angles_of(torch.randint(0, 4096, shape, generator=noise), self.rotary_dim // 2)
        kind = draw.choice([torch.float32, torch.float32, torch.float64, self.dtype])
        self.cos, self.sin = angles.cos().to(kind), angles.sin().to(kind)
        self.doubled = draw.random() < 0.5

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """As the function is given them."""
        if not self.doubled:
            return self.cos, self.sin
        return twice(self.cos, self.interleaved), twice(self.sin, self.interleaved)

    def broadcast(self) -> tuple[Tensor, Tensor]:
        """To x, and as fp32 has them."""
        return tuple(t[:, None].float() if t.dim() == 3 else t.float() for t in (self.cos, self.sin))  # type: ignore[return-value]

    def run(self, rotate: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        x = self.x.detach().to(dtype).requires_grad_()
        output = rotate(x)
        return [output.detach(), *torch.autograd.grad(output, x, self.grad.to(dtype))]

    def ours(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        def rotate(x: Tensor) -> Tensor:
            return ox.ops.rotary(x, *self.tables, interleaved=self.interleaved, rotary_dim=self.rotary_dim)

        return self.run(rotate, dtype or self.dtype)

    def exactly(self) -> list[Tensor]:
        return self.run(lambda x: exact(x, *self.broadcast(), self.interleaved, self.rotary_dim), torch.float64)

    def torchs(self) -> list[Tensor]:
        return self.run(lambda x: composed(x, *self.broadcast(), self.interleaved, self.rotary_dim), self.dtype)


@pytest.mark.parametrize("seed", range(80))
def test_no_further_off_than_twice_the_composition(seed: int) -> None:
    case = Case(seed)
    for name, ours, torchs, right in zip(
        ["output", "gradient"], case.ours(), case.torchs(), case.exactly(), strict=True
    ):
        assert (ours.shape, ours.dtype) == (case.x.shape, case.dtype)
        error, allowed = (float((t.double() - right).norm()) for t in (ours, torchs))
        assert error <= 2 * allowed + ROUNDING[case.dtype] * float(right.norm()), (name, error, allowed)


@pytest.mark.parametrize("seed", range(80))
def test_results_are_rounded_once(seed: int) -> None:
    case = Case(seed)
    for ours, right in zip(case.ours(), case.exactly(), strict=True):
        most = case.x.double().abs().amax() if case.x.numel() else 0.0
        most = max(most, case.grad.double().abs().amax() if case.grad.numel() else 0.0)
        # fp32's own error is of the terms, which may cancel.
        allowed = ROUNDING[case.dtype] * right.abs() + 4 * 2.0**-24 * most + 2.0**-25
        assert ((ours.double() - right).abs() <= allowed).all()


@pytest.mark.parametrize("seed", range(100, 120))
def test_float64_by_torchs_operators(seed: int) -> None:
    case = Case(seed)
    case.cos, case.sin = case.cos.float(), case.sin.float()
    for ours, right in zip(case.ours(torch.float64), case.exactly(), strict=True):
        torch.testing.assert_close(ours, right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 5, 9, 17])
def test_bits_do_not_depend_on_the_number_of_threads(seed: int) -> None:
    case = Case(seed)
    x = torch.randn(3, 5, 97, 64).to(case.dtype)
    tables = [t.float() for t in (angles_of(torch.arange(97), 32).cos(), angles_of(torch.arange(97), 32).sin())]

    def run() -> list[Tensor]:
        return [*case.ours(), ox.ops.rotary(x, *tables, interleaved=case.interleaved)]

    with threads(1):
        one = run()
    for count in (2, 3):
        with threads(count):
            assert all(a.equal(b) for a, b in zip(one, run(), strict=True))


def bits() -> list[Tensor]:
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for interleaved in (False, True):
            generator = torch.Generator().manual_seed(1)
            angles = torch.randn(37, 11, generator=generator, dtype=torch.float64)  # rounded alike by every set
            x = torch.randn(2, 3, 37, 30, generator=generator).to(dtype)
            tables = angles.cos().float(), angles.sin().float()
            made.append(ox.ops.rotary(x, *tables, interleaved=interleaved, rotary_dim=22))
    return made


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_rotation_back_undoes_it(interleaved: bool) -> None:
    x = torch.randn(2, 3, 20, 16)
    angles = angles_of(torch.arange(20), 8).float()
    turned = ox.ops.rotary(x, angles.cos(), angles.sin(), interleaved=interleaved)
    back = ox.ops.rotary(turned, angles.cos(), -angles.sin(), interleaved=interleaved)
    torch.testing.assert_close(back, x)
    assert not torch.allclose(turned, x, atol=0.1)


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)

    def score(at_q: int, at_k: int) -> Tensor:
        def turn(x: Tensor, position: int) -> Tensor:
            angles = angles_of(torch.tensor([position]), 8)
            return ox.ops.rotary(x, angles.cos(), angles.sin())

        return (turn(q, at_q) * turn(k, at_k)).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100))


# -- as an operator of torch ------------------------------------------------------------------------------------------


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 10, 8, generator=noise).to(dtype).requires_grad_()
    angles = angles_of(torch.arange(10), 4).to(dtype)
    return x, angles.cos(), angles.sin()


def test_derivatives_of_any_order() -> None:
    x, cos, sin = batch(torch.float64)
    for interleaved in (False, True):

        def rotate(x: Tensor, interleaved: bool = interleaved) -> Tensor:
            return ox.ops.rotary(x, cos[:, :3], sin[:, :3], interleaved=interleaved, rotary_dim=6)

        assert torch.autograd.gradcheck(rotate, x)
        assert torch.autograd.gradgradcheck(rotate, x)
    narrow, cos, sin = batch()
    grads = []
    for y in (narrow, narrow.detach().double().requires_grad_()):
        output = ox.ops.rotary(y, cos, sin).square().mul(y)
        (first,) = torch.autograd.grad(output.sum(), y, create_graph=True)
        grads.append(torch.autograd.grad(first.square().sum(), y)[0].double())
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_it_is_an_operator_that_torch_checks() -> None:
    x, cos, sin = batch()
    opcheck(torch.ops.oxytorch.rotary, (x, cos, sin))
    opcheck(torch.ops.oxytorch.rotary, (x, cos[:, :2], sin[:, :2], True, 4))
    tokens_first = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    opcheck(torch.ops.oxytorch.rotary, (tokens_first, twice(cos, False), twice(sin, False)))
    opcheck(torch.ops.oxytorch.rotary, (batch(torch.float64)[0], cos, sin))
    opcheck(torch.ops.oxytorch.rotary_apply, (x, cos[None, None], sin[None, None], True, True))


def test_compiled_exported_and_checkpointed_agree_with_eager() -> None:
    x, cos, sin = batch()

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ox.ops.rotary(x * 2, cos, sin, interleaved=True).sin()

    expected = rotate(x, cos, sin)
    of_x = torch.autograd.grad(expected.sum(), x)[0]
    torch._dynamo.reset()
    for name, run in {
        "compile": torch.compile(rotate, fullgraph=True, backend="aot_eager"),
        "checkpoint": lambda *given: checkpoint(rotate, *given, use_reentrant=False),
    }.items():
        output = run(x, cos, sin)
        assert output.equal(expected), name
        assert torch.autograd.grad(output.sum(), x)[0].equal(of_x), name

    class Rotate(nn.Module):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return rotate(x, cos, sin)

    given = (x.detach(), cos, sin)
    assert torch.export.export(Rotate(), given).module()(*given).equal(expected)


def test_one_compiled_graph_serves_other_numbers_of_tokens() -> None:
    rotate, graphs = compiled_for_any_size(ox.ops.rotary)
    for tokens in (5, 40, 97):
        x, angles = torch.randn(2, 3, tokens, 8), angles_of(torch.arange(tokens), 4).float()
        assert rotate(x, angles.cos(), angles.sin()).equal(ox.ops.rotary(x, angles.cos(), angles.sin()))
    assert len(graphs) == 1


def test_torch_func_transforms_it() -> None:
    x, cos, sin = batch()

    def loss(x: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
        return (ox.ops.rotary(x, cos, sin) ** 3).sum()

    given = x.detach()
    expected = torch.autograd.grad(loss(x), x)[0]
    assert grad(loss)(given).equal(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of loops
        each = vmap(grad(lambda x: loss(x[None])))(given)
        tables = vmap(lambda c, s: ox.ops.rotary(given, c, s))(torch.stack([cos, sin]), torch.stack([sin, cos]))
    assert each.equal(expected)
    assert tables[0].equal(ox.ops.rotary(given, cos, sin)) and tables[1].equal(ox.ops.rotary(given, sin, cos))


def test_autocast_leaves_it_the_dtype_of_its_input() -> None:
    x, cos, sin = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ox.ops.rotary(x, cos, sin).dtype == torch.float32
        assert ox.ops.rotary(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_tables_get_no_gradient() -> None:
    x, cos, sin = batch()
    for name, tables in (("cos", (cos.clone().requires_grad_(), sin)), ("sin", (cos, sin.clone().requires_grad_()))):
        for given in (x, x.double()):
            with pytest.raises(
                NotImplementedError, match=f"rotary has no gradient for cos and sin, and {name} requires"
            ):
                ox.ops.rotary(given, *tables)
        with pytest.raises(NotImplementedError, match="rotary has no gradient"):
            grad(lambda c: ox.ops.rotary(x.detach(), c, sin).sum())(cos)
        with torch.no_grad():
            assert ox.ops.rotary(x, *tables).equal(ox.ops.rotary(x, cos, sin))


def test_tables_of_complex_numbers_and_lazy_negation() -> None:
    x, cos, sin = batch()
    backwards = torch.polar(torch.ones(10, 4), angles_of(torch.arange(10), 4).float()).conj()
    assert backwards.imag.is_neg()
    turned = ox.ops.rotary(x, backwards.real, backwards.imag)
    torch.testing.assert_close(turned, ox.ops.rotary(x, cos, -sin))
    flipped = torch.complex(torch.zeros(x.shape), x.detach()).conj().imag
    assert flipped.is_neg() and ox.ops.rotary(flipped, cos, sin).equal(ox.ops.rotary(-x, cos, sin))
    (ours,) = torch.autograd.grad(ox.ops.rotary(x, cos, sin), x, flipped)
    assert ours.equal(torch.autograd.grad(ox.ops.rotary(x, cos, sin), x, -x.detach())[0])


def test_the_layout_of_the_input_stays() -> None:
    angles = angles_of(torch.arange(6), 4).float()
    for x in (torch.randn(2, 3, 6, 8), torch.randn(2, 6, 3, 8).transpose(1, 2)):
        assert ox.ops.rotary(x, angles.cos(), angles.sin()).stride() == x.stride()


def test_packed_documents_have_positions_of_their_own() -> None:
    angles = angles_of(torch.cat([torch.arange(5), torch.arange(9)]), 4).float()
    packed = torch.randn(14, 2, 8)  # tokens x heads x width

    def turn(tokens: Tensor, angles: Tensor) -> Tensor:
        return ox.ops.rotary(tokens.transpose(0, 1)[None], angles.cos(), angles.sin())[0].transpose(0, 1)

    turned = turn(packed, angles)
    torch.testing.assert_close(turned[5:], turn(packed[5:], angles_of(torch.arange(9), 4).float()))
    assert turned.is_contiguous()


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda x, c, s: ox.ops.rotary(x[0], c, s), ValueError, "it has 3 dimensions"),
        (lambda x, c, s: ox.ops.rotary(x, c, s[:, :2]), ValueError, "cos and sin of one size"),
        (lambda x, c, s: ox.ops.rotary(x, c[0], s[0]), ValueError, "cos and sin of one size"),
        (lambda x, c, s: ox.ops.rotary(x, c[:, :2], s[:, :2]), ValueError,
         "cos has 2 angles for 8 rotated features; give half as many, or each twice, or rotary_dim"),
        (lambda x, c, s: ox.ops.rotary(x, c, s, rotary_dim=6), ValueError, "cos has 4 angles for 6 rotated features"),
        (lambda x, c, s: ox.ops.rotary(x, c, s, rotary_dim=3), ValueError, "rotary_dim is 3; give an even number"),
        (lambda x, c, s: ox.ops.rotary(x, c, s, rotary_dim=10), ValueError, "of the 8 that x has"),
        (lambda x, c, s: ox.ops.rotary(x[..., :7], c, s), ValueError, "the width of x is 7"),
        (lambda x, c, s: ox.ops.rotary(x, c[:7], s[:7]), ValueError, "cos has 7 tokens and x 10"),
        (lambda x, c, s: ox.ops.rotary(x, c.expand(3, 10, 4), s.expand(3, 10, 4)), ValueError,
         "cos has 3 samples and x 2"),
        (lambda x, c, s: ox.ops.rotary(x, c.long(), s), TypeError, "cos Long"),
        (lambda x, c, s: ox.ops.rotary(x, c.to("meta"), s), ValueError, "cos on meta"),
        (lambda x, c, s: torch.ops.oxytorch.rotary_apply(x, c, s, False, False), ValueError, "call oxytorch::rotary"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_words(call: Callable[..., Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call(*batch())
