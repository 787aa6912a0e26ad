"""Layer and RMS normalization of a sum against fp64: no further off than twice torch's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import oxytorch as ox
import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F

from .rounding import ROUNDING, threads

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")

NAMES = ("output", "sum", "input", "residual", "weight", "bias")
Results = dict[str, Tensor]


class Case:
    """Random sizes, strides and dtypes, with and without a residual, dropout, weight and bias, by a seed."""

    def __init__(self, seed: int) -> None:
        draw, noise = random.Random(seed), torch.Generator().manual_seed(seed)
        self.seed = seed
        self.dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        self.centered = draw.random() < 0.6
        self.eps = draw.choice([1e-5, 1e-3])
        columns = draw.choice([1, 2, 7, 16, 63, 64, 65, 256, 1000])
        sizes = (*draw.choice([(), (1,), (9,), (3, 11), (2, 3, 5), (300,)]), columns)
        strided = draw.random() < 0.3

        def made(dtype: torch.dtype, scale: float = 1, offset: float = 0) -> Tensor:
            values = (torch.randn((*sizes, 2), generator=noise) * scale + offset).to(dtype)
            return values[..., 0] if strided else values[..., 0].clone()

        self.x = made(self.dtype, 2, draw.choice([0, 3]))
        # As under autocast: what is added stays in float32.
        self.residual = None
        if draw.random() < 0.7:
            self.residual = made(draw.choice([self.dtype, torch.float32]), 3)
        self.dropout = 0.3 if self.residual is not None and draw.random() < 0.5 else 0.0
        self.w = torch.rand(columns, generator=noise) + 0.5 if draw.random() < 0.8 else None
        self.b = torch.randn(columns, generator=noise) if self.w is not None and self.centered else None
        self.g = torch.randn(sizes, generator=noise).to(self.dtype)
        self.g_sum = torch.randn(sizes, generator=noise) if draw.random() < 0.7 else None

    def by_us(self, x: Tensor, r: Any, w: Any, b: Any) -> tuple[Tensor, Tensor | None]:
        if r is None:
            is_centered = self.centered
            return (ox.ops.layer_norm(x, w, b, self.eps) if is_centered else ox.ops.rms_norm(x, w, self.eps)), None
        if self.centered:
            return ox.ops.add_layer_norm(x, r, w, b, self.eps, dropout=self.dropout)
        return ox.ops.add_rms_norm(x, r, w, self.eps, dropout=self.dropout)

    def by_torch(self, x: Tensor, r: Any, w: Any, b: Any) -> tuple[Tensor, Tensor | None]:
        x = F.dropout(x, self.dropout)
        total = x if r is None else x + r
        if not self.centered:
            w = w if w is None else w.to(total.dtype)
            return F.rms_norm(total, total.shape[-1:], w, self.eps), None if r is None else total
        w, b = (t if t is None else t.to(torch.promote_types(total.dtype, t.dtype)) for t in (w, b))
        if w is not None and w.dtype != total.dtype and total.dtype == torch.float16:
            w, b = w.half(), b if b is None else b.half()
        return F.layer_norm(total, total.shape[-1:], w, b, self.eps), None if r is None else total

    def run(self, how: str, wide: bool = False) -> Results:
        """Outputs and gradients; everything in fp64, or as given."""
        given = [
            None if t is None else (t.double() if wide else t).detach().requires_grad_()
            for t in (self.x, self.residual, self.w, self.b)
        ]
        torch.manual_seed(self.seed)
        outputs = [t for t in getattr(self, how)(*given) if t is not None]
        grads = [self.g.to(outputs[0].dtype)]
        if len(outputs) > 1:
            if self.g_sum is None:
                outputs.pop()
            else:
                grads.append(self.g_sum.to(outputs[1].dtype))
        inputs = [t for t in given if t is not None]
        gradients = torch.autograd.grad(outputs, inputs, grads)
        named = [name for name, t in zip(NAMES[2:], given, strict=True) if t is not None]
        made = [t.detach() for t in outputs]
        return dict(zip((*NAMES[: len(made)], *named), (*made, *gradients), strict=True))


@pytest.mark.parametrize("seed", range(120))
def test_no_further_off_than_twice_torchs(seed: int) -> None:
    case = Case(seed)
    ours, theirs, right = case.run("by_us"), case.run("by_torch"), case.run("by_torch", wide=True)
    for name, exact in right.items():
        a, t = ours[name], theirs[name]
        assert a.shape == t.shape and a.dtype == t.dtype, name
        error, allowed = (float((one.double() - exact).norm()) for one in (a, t))
        # Gradients that cancel are rounding of their terms.
        size = max(float(exact.norm()), 1e-2 * float(case.g.double().norm()))
        rounding = ROUNDING[case.dtype] * (4 if case.dtype == torch.float32 else 1)
        assert error <= 2 * (allowed + rounding * size), (name, error, allowed, size)


@pytest.mark.parametrize("seed", [0, 3, 5, 11, 27])
def test_bits_do_not_depend_on_the_number_of_threads(seed: int) -> None:
    case, runs = Case(seed), []
    for count in (1, 2, 5):
        with threads(count):
            runs.append(case.run("by_us"))
    assert all(other[name].equal(runs[0][name]) for other in runs[1:] for name in runs[0])


def bits() -> list[Tensor]:
    return [t for seed in range(12) for t in Case(seed).run("by_us").values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_is_the_one_of_torchs_dropout(dtype: torch.dtype) -> None:
    x, residual = torch.ones(50, 8, dtype=dtype), torch.zeros(50, 8, dtype=dtype)
    torch.manual_seed(3)
    expected, after = F.dropout(x, 0.5), torch.rand(4)
    for _ in range(2):
        torch.manual_seed(3)
        _, total = ox.ops.add_layer_norm(x, residual, dropout=0.5)
        assert total.equal(expected) and torch.rand(4).equal(after)


def test_large_offsets_do_not_cost_the_variance() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 500) + 3000
    exact = F.layer_norm(x.double(), (500,))
    assert float((ox.ops.layer_norm(x).double() - exact).abs().max()) < 2e-3


def test_a_row_with_nan_spoils_no_other() -> None:
    x = torch.randn(6, 40)
    x[2, 3] = float("nan")
    x[4, 1] = float("inf")
    for ours, theirs in ((ox.ops.layer_norm(x), F.layer_norm(x, (40,))), (ox.ops.rms_norm(x), F.rms_norm(x, (40,)))):
        assert ours.isnan().equal(theirs.isnan())


@pytest.mark.parametrize("wanted", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 1, 1, 0), (0, 0, 0, 0)])
def test_what_is_frozen_gets_no_gradient(wanted: tuple[int, ...]) -> None:
    given = [torch.randn(5, 9), torch.randn(5, 9), torch.rand(9), torch.randn(9)]
    every = [t.clone().requires_grad_() for t in given]
    some = [t.clone().requires_grad_(bool(w)) for t, w in zip(given, wanted, strict=True)]

    def loss(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
        normed, total = ox.ops.add_layer_norm(x, r, w, b)
        return normed.square().sum() + total.sin().sum()

    assert loss(*some).requires_grad == any(wanted)
    if not any(wanted):
        return
    loss(*every).backward()
    loss(*some).backward()
    for one, all_of, w in zip(some, every, wanted, strict=True):
        assert (one.grad is not None) == bool(w)
        assert one.grad is None or one.grad.equal(all_of.grad)


def test_only_the_sum_is_used() -> None:
    x, r = torch.randn(5, 9).requires_grad_(), torch.randn(5, 9).requires_grad_()
    ox.ops.add_rms_norm(x, r)[1].sum().backward()
    assert x.grad is not None and r.grad is not None
    torch.testing.assert_close(x.grad, torch.ones(5, 9))
    torch.testing.assert_close(r.grad, torch.ones(5, 9))


def test_gradients_do_not_share_their_memory_when_they_add_up() -> None:
    x, w = torch.randn(5, 9).requires_grad_(), torch.rand(9).requires_grad_()
    for _ in range(2):
        normed, total = ox.ops.add_layer_norm(x, x * 1, w)
        (normed.square().sum() + total.sum()).backward()
    assert x.grad is not None
    given = x.detach().requires_grad_()
    (F.layer_norm(given * 2, (9,), w.detach()).square().sum() * 2 + given.sum() * 4).backward()
    torch.testing.assert_close(x.grad, given.grad)


@pytest.mark.parametrize("which", ["layer_norm", "rms_norm"])
def test_second_derivatives(which: str) -> None:
    torch.manual_seed(0)
    given = [torch.randn(3, 5), torch.randn(3, 5), torch.rand(5) + 0.5]

    def by_us(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return ox.ops.add_layer_norm(x, r, w) if which == "layer_norm" else ox.ops.add_rms_norm(x, r, w, 1e-5)

    def by_torch(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + r
        normed = F.layer_norm(total, (5,), w) if which == "layer_norm" else F.rms_norm(total, (5,), w, 1e-5)
        return normed, total

    def penalty(call: Callable[..., Any]) -> tuple[Tensor, ...]:
        single = [t.detach().requires_grad_() for t in given]
        normed, total = call(*single)
        first = torch.autograd.grad(normed.tanh().sum() + total.sin().sum(), single, create_graph=True)
        return torch.autograd.grad(sum(f.square().sum() for f in first), single)

    for ours, theirs in zip(penalty(by_us), penalty(by_torch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    wide = [t.double().requires_grad_() for t in given]
    assert torch.autograd.gradcheck(by_us, wide) and torch.autograd.gradgradcheck(by_us, wide)


def test_it_is_an_operator_that_torch_checks() -> None:
    x, r = torch.randn(3, 8).bfloat16().requires_grad_(), torch.randn(3, 8).requires_grad_()
    w, b = torch.rand(8).requires_grad_(), torch.rand(8).requires_grad_()
    opcheck(torch.ops.oxytorch.layer_norm, (x, w, b))
    opcheck(torch.ops.oxytorch.rms_norm, (x, w))
    opcheck(torch.ops.oxytorch.add_layer_norm, (x, r, w, b))
    opcheck(torch.ops.oxytorch.add_rms_norm, (x, r, w))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(torch.ops.oxytorch.row_norm_forward, (x, r, None, w, b, 1e-5, 1.0, True), test_utils=tests)
    narrow = (x, r, None, w, b, 1e-5, 1.0, True, torch.bfloat16)
    opcheck(torch.ops.oxytorch.row_norm_forward, narrow, test_utils=tests)


def test_compiled_and_mapped_it_agrees_with_eager() -> None:
    x, r, w = torch.randn(4, 6).requires_grad_(), torch.randn(4, 6).requires_grad_(), torch.rand(6).requires_grad_()

    def loss(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        normed, total = ox.ops.add_layer_norm(x * 2, r, w)
        return (normed.sin() + ox.ops.rms_norm(total, w)).square().mean()

    expected = loss(x, r, w)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, r, w)
    for a, e in zip(*(torch.autograd.grad(one, (x, r, w)) for one in (compiled, expected)), strict=True):
        torch.testing.assert_close(a, e)
    rows = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), in_dims=(0, 0, None))(x[:, None], r[:, None], w)
    alone = torch.func.grad(loss, (0, 1, 2))(x[2:3], r[2:3], w)
    for row, one in zip(rows, alone, strict=True):
        torch.testing.assert_close(row[2], one)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: ox.ops.layer_norm(x, x[0, :3]), "for each of the 4 columns"),
        (lambda x: ox.ops.rms_norm(x[0, 0]), "has no dimensions"),
        (lambda x: ox.ops.add_rms_norm(x, x[:1]), "a residual of the sizes"),
        (lambda x: ox.ops.add_layer_norm(x, x, dropout=1.0), "from 0 to below 1"),
    ],
)
def test_bad_input_is_refused_in_words(call: Callable[..., Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(torch.randn(2, 4))


@pytest.mark.parametrize("sizes", [(0, 4), (3, 0)])
def test_empty_tensors(sizes: tuple[int, ...]) -> None:
    x = torch.randn(sizes).requires_grad_()
    normed, total = ox.ops.add_layer_norm(x, x)
    assert normed.shape == total.shape == sizes
    (normed.sum() + total.sum()).backward()
