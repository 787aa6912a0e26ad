"""Batch normalization with what follows it against fp64: no further off than twice torch's own."""

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

NAMES = ("output", "running mean", "running variance", "input", "weight", "bias", "added")


def by_torch(
    x: Tensor, w: Any, b: Any, mean: Any, var: Any, *, added: Any = None, relu: bool = False, pool: Any = ()
) -> Tensor:
    y = F.batch_norm(x, mean, var, w, b, True, 0.2, 1e-5)
    y = y if added is None else y + added
    y = F.relu(y) if relu else y
    return F.max_pool2d(y, pool) if pool else y


def by_us(x: Tensor, w: Any, b: Any, mean: Any, var: Any, **what: Any) -> Tensor:
    return ox.ops.batch_norm(x, w, b, mean, var, momentum=0.2, **what)


class Case:
    """Random sizes, dtypes and followers, by a seed."""

    def __init__(self, seed: int, dtype: torch.dtype | None = None) -> None:
        draw, noise = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype = dtype or draw.choice([torch.float32, torch.bfloat16, torch.bfloat16, torch.float16])
        self.pool = draw.choice([(), (), (2, 2), (1, 2), (3, 2), (2, 4)])
        channels = draw.choice([1, 3, 8, 16, 17, 33, 64, 65, 130])
        tall, wide = draw.choice([1, 2, 5]), draw.choice([1, 3, 4])
        size = (draw.choice([2, 3, 9, 30]), channels, tall * (self.pool or (1, 1))[0], wide * (self.pool or (1, 1))[1])
        if not self.pool and draw.random() < 0.3:
            size = (draw.choice([2, 300, 1025]), channels)

        def made(size: tuple[int, ...], scale: float = 1, offset: float = 0) -> Tensor:
            values = (torch.randn(size, generator=noise) * scale + offset).to(self.dtype)
            return values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 else values

        self.x = made(size, 3, draw.choice([0, 2, -40]))
        has_weights = draw.random() < 0.8
        self.w = torch.rand(channels, generator=noise) + 0.5 if has_weights else None
        self.b = torch.randn(channels, generator=noise) if has_weights else None
        self.added = made(size) if not self.pool and draw.random() < 0.5 else None
        self.relu = draw.random() < 0.7
        self.g = made(tuple(by_torch(self.x.float(), None, None, None, None, pool=self.pool).shape))

    def run(self, call: Callable[..., Tensor], wide: bool = False) -> dict[str, Tensor]:
        """Output, running moments and gradients; everything in fp64, or as given."""
        given = [
            None if t is None else (t.double() if wide else t).detach().requires_grad_()
            for t in (self.x, self.w, self.b, self.added)
        ]
        x, w, b, added = given
        channels = self.x.shape[1]
        kept = [t.double() if wide else t for t in (torch.zeros(channels), torch.ones(channels))]
        output = call(x, w, b, *kept, added=added, relu=self.relu, pool=self.pool)
        inputs = [t for t in given if t is not None]
        gradients = torch.autograd.grad(output, inputs, self.g.to(output.dtype))
        named = [name for name, t in zip(NAMES[3:], given, strict=True) if t is not None]
        return dict(zip((*NAMES[:3], *named), (output.detach(), *kept, *gradients), strict=True))


@pytest.mark.parametrize("seed", range(80))
def test_no_further_off_than_twice_torchs(seed: int) -> None:
    case = Case(seed)
    ours, theirs, right = case.run(by_us), case.run(by_torch), case.run(by_torch, wide=True)
    for name, exact in right.items():
        a, t = ours[name], theirs[name]
        assert a.shape == t.shape and a.dtype == t.dtype, name
        error, allowed = (float((one.double() - exact).norm()) for one in (a, t))
        # Sums over rows that cancel are rounding of their terms.
        size = max(float(exact.norm()), 1e-3 * float(case.g.double().norm()))
        # A running value is rounded twice.
        assert error <= 2 * (allowed + ROUNDING[case.dtype] * size), (name, error, allowed, size)


@pytest.mark.parametrize("seed", [0, 3, 11, 27])
def test_bits_do_not_depend_on_the_number_of_threads(seed: int) -> None:
    case = Case(seed)
    runs = []
    for count in (1, 2, 5):
        with threads(count):
            runs.append(case.run(by_us))
    assert all(other[name].equal(runs[0][name]) for other in runs[1:] for name in runs[0])


def image(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(size).to(dtype).contiguous(memory_format=torch.channels_last)


def test_large_offsets_do_not_cost_the_variance() -> None:
    x = image(16, 5, 32, 32, dtype=torch.float32) + 1000.0
    x = x.contiguous(memory_format=torch.channels_last)
    exact = F.batch_norm(x.double(), None, None, None, None, True)
    assert float((ox.ops.batch_norm(x).double() - exact).abs().max()) < 1e-3


@pytest.mark.parametrize("pool", [(), (2, 2)])
def test_values_that_are_not_finite_stay_where_torch_has_them(pool: Any) -> None:
    x = image(4, 6, 4, 4, dtype=torch.float32)
    x[0, 1, 0, 0], x[1, 2, 3, 3] = float("nan"), float("inf")
    for relu in (False, True):
        ours = ox.ops.batch_norm(x, relu=relu, pool=pool)
        theirs = by_torch(x, None, None, None, None, relu=relu, pool=pool)
        assert ours.isnan().equal(theirs.isnan()) and ours.isnan().any()
    weight = torch.tensor([1.0, float("nan"), 1, 2, 1, 1])
    ours, theirs = ox.ops.batch_norm(x, weight, pool=pool), by_torch(x, weight, None, None, None, pool=pool)
    assert ours.isnan().equal(theirs.isnan()) and ours.isinf().equal(theirs.isinf())


def test_of_equal_elements_the_first_of_a_window_gets_the_gradient() -> None:
    x = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    x[0, 0] = 0  # so that there is a variance
    grads = []
    for call in (by_us, by_torch):
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        call(given, None, torch.ones(3), None, None, relu=True, pool=(2, 2)).square().sum().backward()
        assert given.grad is not None
        grads.append(given.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 4, 4),
        torch.randn(2, 3, 4, 4, dtype=torch.float64),
        torch.randn(5, 3, 7),
        torch.randn(2, 3, 2, 2, 2),
        torch.randn(6, 8)[:, ::2],
    ],
    ids=["contiguous", "float64", "3d", "5d", "strided"],
)
def test_what_it_does_not_serve_is_torchs_own(x: Tensor) -> None:
    channels = x.shape[1]
    kept = [torch.zeros(channels, dtype=x.dtype), torch.ones(channels, dtype=x.dtype)]
    others = [t.clone() for t in kept]
    assert by_us(x, None, None, *kept, relu=True).equal(by_torch(x, None, None, *others, relu=True))
    assert all(a.equal(b) for a, b in zip(kept, others, strict=True))


def test_windows_that_do_not_fill_the_image() -> None:
    x = image(3, 8, 5, 7)
    expected = by_torch(x, None, None, None, None, relu=True, pool=(2, 2))
    torch.testing.assert_close(ox.ops.batch_norm(x, relu=True, pool=[2]), expected)


@pytest.mark.parametrize("wanted", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 1, 1, 0), (0, 0, 0, 0)])
def test_what_is_frozen_gets_no_gradient(wanted: tuple[int, ...]) -> None:
    given = [image(4, 9, 3, 3), torch.rand(9), torch.randn(9), image(4, 9, 3, 3) * 2]
    every = [t.clone().requires_grad_() for t in given]
    some = [t.clone().requires_grad_(bool(w)) for t, w in zip(given, wanted, strict=True)]

    def loss(x: Tensor, w: Tensor, b: Tensor, added: Tensor) -> Tensor:
        return ox.ops.batch_norm(x, w, b, added=added, relu=True).float().square().sum()

    assert loss(*some).requires_grad == any(wanted)
    if not any(wanted):
        return
    loss(*every).backward()
    loss(*some).backward()
    for one, all_of, w in zip(some, every, wanted, strict=True):
        assert (one.grad is not None) == bool(w)
        assert one.grad is None or one.grad.equal(all_of.grad)


def test_what_is_added_is_not_kept() -> None:
    x, w = image(4, 9, 3, 3).requires_grad_(), torch.rand(9).requires_grad_()
    kept: list[int] = []
    added = image(4, 9, 3, 3) * 2
    expected = by_torch(x, w, None, None, None, added=added, relu=True)

    def pack(t: Tensor) -> Tensor:
        kept.append(t.data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = ox.ops.batch_norm(x, w, added=added, relu=True)
    assert added.data_ptr() not in kept and x.data_ptr() in kept
    added.zero_()  # as behind torch's addition
    for a, e in zip(*(torch.autograd.grad(y.float().square().sum(), (x, w)) for y in (output, expected)), strict=True):
        torch.testing.assert_close(a, e, rtol=5e-2, atol=5e-2)


def test_a_second_derivative_behind_an_addition_is_torchs() -> None:
    x, w, added = (
        image(5, 6, 4, 4, dtype=torch.float32),
        torch.rand(6) + 0.5,
        image(5, 6, 4, 4, dtype=torch.float32) * 2,
    )

    def penalty(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        given, weight, plus = (t.detach().requires_grad_() for t in (x, w, added))
        output = call(given, weight, None, None, None, added=plus, relu=True)
        of_x, of_added = torch.autograd.grad(output.tanh().sum(), (given, plus), create_graph=True)
        return torch.autograd.grad(of_x.square().sum() + of_added.square().sum(), (given, weight, plus))

    for ours, theirs in zip(penalty(by_us), penalty(by_torch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_a_second_derivative_is_torchs() -> None:
    torch.manual_seed(0)
    x, w = image(5, 6, 4, 4, dtype=torch.float32), torch.rand(6) + 0.5

    def penalty(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        given, weight = x.detach().requires_grad_(), w.detach().requires_grad_()
        output = call(given, weight, None, None, None, relu=True, pool=(2, 2))
        (first,) = torch.autograd.grad(output.tanh().sum(), given, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (given, weight))

    for ours, theirs in zip(penalty(by_us), penalty(by_torch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_it_is_an_operator_that_torch_checks() -> None:
    x, w, b = image(3, 5, 4, 4).requires_grad_(), torch.rand(5).requires_grad_(), torch.rand(5).requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    mean, invstd = torch.zeros(5), torch.ones(5)
    forward = torch.ops.oxytorch.batch_norm_forward
    opcheck(torch.ops.oxytorch.batch_norm_moments, (x,), test_utils=tests[:3])
    opcheck(forward, (x, w, b, None, mean, invstd, True, [2, 2]), test_utils=tests[:3])
    opcheck(forward, (x, w, b, x.detach(), mean, invstd, True, []), test_utils=tests[:3])


def test_compiled_it_agrees_with_eager() -> None:
    x, w, b = image(3, 5, 4, 4).requires_grad_(), torch.rand(5).requires_grad_(), torch.rand(5).requires_grad_()
    kept = [torch.zeros(5), torch.ones(5)]
    others = [t.clone() for t in kept]

    def loss(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return ox.ops.batch_norm(x * 2, w, b, mean, var, relu=True, pool=[2]).float().square().mean()

    expected = loss(x, w, b, *kept)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, w, b, *others)
    assert compiled.equal(expected)
    for a, e in zip(kept, others, strict=True):
        torch.testing.assert_close(a, e)
    for a, e in zip(*(torch.autograd.grad(one, (x, w, b)) for one in (compiled, expected)), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: ox.ops.batch_norm(x[0, 0, 0]), "batch x channels"),
        (lambda x: ox.ops.batch_norm(x, pool=[2, 2, 2]), "a height and a width"),
        (lambda x: ox.ops.batch_norm(x, pool=[0]), "a height and a width"),
        (lambda x: ox.ops.batch_norm(x[:, :, 0, 0], pool=[2]), "images of 4 dimensions"),
        (lambda x: ox.ops.batch_norm(x, added=x[:1]), "adds a tensor of the sizes of its input"),
    ],
)
def test_bad_input_is_refused_in_words(call: Callable[..., Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(image(3, 5, 4, 4))


def bits() -> list[Tensor]:
    return [t for seed in (1, 2, 4, 7, 9, 13) for t in Case(seed).run(by_us).values()]
