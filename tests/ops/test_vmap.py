"""Operators under torch.func.vmap, alone and around derivatives: what a loop gives, without torch's warning of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import oxytorch as ox
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

pytestmark = pytest.mark.cpu_only("the kernels are the CPU's")

SAMPLES = 3
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    """torch warns where an operator has no rule for vmap."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def noise(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size).to(dtype)


@dataclass
class Case:
    function: Callable[..., Any]
    sizes: list[tuple[int, ...]]
    """Of the tensors that are floats."""
    rest: Callable[[], list[Tensor]] = list
    """Others, which are the same for all."""
    dtype: torch.dtype = torch.float32
    types: tuple[torch.dtype | None, ...] = ()
    exact: bool = True
    """A sample has the bits that it has alone."""

    def tensors(self) -> list[Tensor]:
        types = self.types or (self.dtype,) * len(self.sizes)
        return [noise(*size, dtype=kind or self.dtype) for size, kind in zip(self.sizes, types, strict=True)]


QUERY, KEY = (2, 4, 5, 8), (2, 2, 7, 8)
TOKENS = (9, 2, 8)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ox.ops.attention(q, k, v, mask=mask)


def packed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    return ox.ops.packed_attention(q, k, v, offsets, causal=True)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return ox.ops.rotary(x, cos, sin, interleaved=True)


CASES = {
    "attention": Case(lambda q, k, v: ox.ops.attention(q, k, v, causal=True), [QUERY, KEY, KEY]),
    "attention in bf16": Case(ox.ops.attention, [QUERY, KEY, KEY], dtype=BF16),
    "a mask for all": Case(masked, [QUERY, KEY, KEY], lambda: [torch.arange(7) < 4]),
    "a mask for each": Case(masked, [QUERY, KEY, KEY], lambda: [torch.rand(2, 1, 5, 7) < 0.7]),
    "packed attention": Case(packed, [TOKENS] * 3, lambda: [torch.tensor([0, 4, 9])]),
    "rotary": Case(turned, [(2, 3, 5, 8)], lambda: [noise(5, 4), noise(5, 4)]),
    "rotary of positions": Case(turned, [(2, 3, 5, 8)], lambda: [noise(2, 5, 4), noise(2, 5, 4)]),
    # Elsewhere a linear layer is torch's own, whose sums over samples round in bfloat16.
    **(
        {"linear": Case(ox.ops.linear, [(6, 16), (8, 16), (8,)], dtype=BF16)}
        if torch.cpu._is_avx512_bf16_supported()
        else {}
    ),
    "linear of float32 weights": Case(
        lambda x, w: ox.ops.linear(x, w).float(), [(6, 16), (8, 16)], types=(BF16, torch.float32)
    ),
    "cross entropy": Case(ox.ops.linear_cross_entropy, [(6, 16), (40, 16)], lambda: [torch.arange(6)]),
    "embedding": Case(lambda w, i: ox.ops.embedding(i, w), [(9, 5)], lambda: [torch.tensor([[0, 3], [3, 8]])]),
    "layer norm": Case(ox.ops.layer_norm, [(4, 6), (6,), (6,)]),
    "sum and RMS norm": Case(lambda x, r, w: torch.cat(ox.ops.add_rms_norm(x, r, w)), [(4, 6), (4, 6), (6,)]),
    "a row": Case(ox.ops.rms_norm, [(6,)]),
    "swiglu": Case(ox.ops.swiglu, [(4, 6), (4, 6)], exact=False),
    "geglu of halves": Case(ox.ops.geglu, [(4, 6)], exact=False),
    "gelu": Case(lambda x: ox.ops.gelu(x, "tanh"), [(4, 6)], exact=False),
    # vmap knows no channels_last, so of images it has torch's own operators.
    "batch norm": Case(lambda x, w, b: ox.ops.batch_norm(x, w, b, relu=True), [(8, 3), (3,), (3,)], exact=False),
}


def close(ours: Tensor, right: Tensor, case: Case) -> None:
    assert (ours.shape, ours.dtype) == (right.shape, right.dtype)
    if case.exact:
        assert ours.equal(right)
    else:
        torch.testing.assert_close(ours, right)


def loss_of(case: Case) -> Callable[..., Tensor]:
    return lambda *given: case.function(*given).float().sin().square().sum()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dim", [0, -1])
def test_all_are_mapped_over(name: str, dim: int) -> None:
    torch.manual_seed(0)
    case, rest = CASES[name], CASES[name].rest()
    samples = [case.tensors() for _ in range(SAMPLES)]
    stacked = [torch.stack(parts, dim) for parts in zip(*samples, strict=True)]
    dims = (*[dim] * len(stacked), *[None] * len(rest))
    close(
        vmap(case.function, dims)(*stacked, *rest), torch.stack([case.function(*one, *rest) for one in samples]), case
    )
    wanted = tuple(range(len(stacked)))
    made = vmap(grad(loss_of(case), wanted), dims)(*stacked, *rest)
    alone = [grad(loss_of(case), wanted)(*one, *rest) for one in samples]
    for ours, right in zip(made, zip(*alone, strict=True), strict=True):
        close(ours, torch.stack(right), case)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.sizes) > 1])
def test_one_alone_is_mapped_over(name: str) -> None:
    torch.manual_seed(1)
    case, rest = CASES[name], CASES[name].rest()
    shared = case.tensors()
    for which in range(len(shared)):
        samples = [case.tensors()[which] for _ in range(SAMPLES)]

        def with_one(one: Tensor, which: int = which) -> list[Tensor]:
            return [*shared[:which], one, *shared[which + 1 :], *rest]

        dims = tuple(0 if i == which else None for i in range(len(shared) + len(rest)))
        given = with_one(torch.stack(samples))
        close(vmap(case.function, dims)(*given), torch.stack([case.function(*with_one(s)) for s in samples]), case)
        for wanted in range(len(shared)):  # also of those that are the same for all
            made = vmap(grad(loss_of(case), wanted), dims)(*given)
            close(made, torch.stack([grad(loss_of(case), wanted)(*with_one(s)) for s in samples]), case)


@pytest.mark.parametrize("name", CASES)
def test_vmaps_in_each_other(name: str) -> None:
    torch.manual_seed(2)
    case, rest = CASES[name], CASES[name].rest()
    samples = [[case.tensors() for _ in range(2)] for _ in range(SAMPLES)]
    stacked = [
        torch.stack([torch.stack([samples[i][j][which] for j in range(2)]) for i in range(SAMPLES)])
        for which in range(len(case.sizes))
    ]
    dims = (*[0] * len(stacked), *[None] * len(rest))
    wanted = tuple(range(len(stacked)))
    made = vmap(vmap(grad(loss_of(case), wanted), dims), dims)(*stacked, *rest)
    for i in range(SAMPLES):
        for j in range(2):
            alone = grad(loss_of(case), wanted)(*samples[i][j], *rest)
            for ours, right in zip(made, alone, strict=True):
                close(ours[i, j], right, case)


def test_masks_and_tables_are_mapped_over_too() -> None:
    torch.manual_seed(3)
    q, k, v = noise(*QUERY), noise(*KEY), noise(*KEY)
    for size in ((7,), (5, 7), (1, 5, 7), (2, 4, 5, 7), (2, 1, 1, 7)):
        masks = torch.rand(SAMPLES, *size) < 0.7
        made = vmap(masked, (None, None, None, 0))(q, k, v, masks)
        assert made.equal(torch.stack([masked(q, k, v, mask) for mask in masks])), size
    x, tables = noise(2, 3, 5, 8), noise(2, SAMPLES, 5, 4)
    made = vmap(turned, (None, 0, 0))(x, *tables)
    assert made.equal(torch.stack([turned(x, c, s) for c, s in zip(*tables, strict=True)]))
    table, numbers = noise(9, 5), torch.randint(9, (SAMPLES, 4))
    assert vmap(ox.ops.embedding, (0, None))(numbers, table).equal(table[numbers])
    offsets = torch.tensor([[0, 4, 9], [0, 1, 9], [0, 9, 9]])
    q, k, v = (noise(*TOKENS) for _ in range(3))
    made = vmap(packed, (None, None, None, 0))(q, k, v, offsets)
    assert made.equal(torch.stack([packed(q, k, v, one) for one in offsets]))


def test_dropout_draws_as_vmap_is_told() -> None:
    q = torch.ones(SAMPLES, 1, 1, 6, 8)

    def drop(q: Tensor) -> Tensor:
        return ox.ops.attention(q, q, torch.ones(1, 1, 6, 8), dropout=0.5)

    torch.manual_seed(4)
    same = vmap(drop, randomness="same")(q)
    other = vmap(drop, randomness="different")(q)
    assert same[0].equal(same[1]) and same[0].equal(same[2])
    assert not other[0].equal(other[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(drop)(q)


def test_it_is_one_call() -> None:
    q, k, v = noise(SAMPLES, *QUERY), noise(SAMPLES, *KEY), noise(SAMPLES, *KEY)
    with torch.profiler.profile() as profile:
        vmap(grad(lambda *given: ox.ops.attention(*given).sum(), (0, 1, 2)))(q, k, v)
    counts = {event.key: event.count for event in profile.key_averages()}
    # Once at the level of vmap, once below it.
    assert counts["oxytorch::attention_forward"] <= 3 and counts["oxytorch::attention_backward"] <= 3
