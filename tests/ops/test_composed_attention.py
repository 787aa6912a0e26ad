"""Attention that torch composes (`composed_attention`), with dropout: torch's own draws, the kernel's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import _C
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")

BATCH, HEADS, WIDTH = 3, 4, 20
DROPOUT = 0.3


@contextmanager
def native(on: bool = True) -> Iterator[None]:
    operators = _C.tune.NativeOperators()
    try:
        if on:
            for report in operators.install(["composed_attention"]):
                assert report.installed, report.reason
        yield
    finally:
        operators.uninstall()


def served() -> int:
    return _C.tune.NativeOperators.composed_attentions()


def mask_of(kind: str, queries: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    generator = torch.Generator().manual_seed(1)
    visible = torch.rand(BATCH, 1, queries, keys, generator=generator) > 0.3
    if kind == "of samples":
        return visible[..., :1, :]
    if kind == "whole rows hidden":
        visible[0, 0, min(3, queries - 1)] = False
    if kind in ("bool", "whole rows hidden"):
        return visible
    if kind == "added":
        return torch.randn(queries, keys, generator=generator).to(dtype)
    if kind == "minus infinity":
        return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))
    if kind == "least number":  # as Hugging Face adds it
        return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    return None


def attended(
    on: bool,
    kind: str,
    dtype: torch.dtype,
    exact: bool = False,
    tokens: tuple[int, int] = (37, 37),
    key_heads: int = HEADS,
) -> tuple[list[Tensor], Tensor]:
    """Output, gradients, and what torch draws next; with `exact`, the same numbers in float64."""
    generator = torch.Generator().manual_seed(0)

    def given(heads: int, count: int) -> Tensor:
        value = torch.randn(BATCH, count, heads, WIDTH, generator=generator).to(dtype)
        return value.double() if exact else value

    query, key, value = given(HEADS, tokens[0]), given(key_heads, tokens[1]), given(key_heads, tokens[1])
    inputs = [t.transpose(1, 2).requires_grad_() for t in (query, key, value)]
    mask = mask_of(kind, *tokens, dtype)
    if exact and mask is not None and mask.is_floating_point():
        mask = mask.double()
    with native(on):
        torch.manual_seed(5)
        out = F.scaled_dot_product_attention(
            *inputs, mask, DROPOUT, is_causal=kind == "causal", enable_gqa=key_heads != HEADS
        )
        after = torch.rand(1)
        grads = torch.autograd.grad(out.float().sin().sum() if not exact else out.sin().sum(), inputs)
    return [out.detach(), *grads], after


MASKS = ["none", "causal", "bool", "of samples", "whole rows hidden", "added", "minus infinity", "least number"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("tokens", "key_heads"), [((37, 37), HEADS), ((5, 130), 2), ((65, 3), 1), ((1, 1), HEADS)])
def test_it_drops_what_torch_drops(kind: str, tokens: tuple[int, int], key_heads: int, dtype: torch.dtype) -> None:
    before = served()
    ours, after = attended(True, kind, dtype, tokens=tokens, key_heads=key_heads)
    assert served() == before + 1
    theirs, torchs_after = attended(False, kind, dtype, tokens=tokens, key_heads=key_heads)
    exact, _ = attended(False, kind, dtype, exact=True, tokens=tokens, key_heads=key_heads)
    assert torch.equal(after, torchs_after), "another number is drawn next"
    for one, torchs, true in zip(ours, theirs, exact, strict=True):
        assert (one.dtype, one.shape) == (torchs.dtype, torchs.shape)
        assert torch.equal(one.isnan(), torchs.isnan())
        off, torchs_off = (float((t.double() - true).nan_to_num().norm()) for t in (one, torchs))
        rounding = 2.0**-20 if dtype == torch.float32 else torch.finfo(dtype).eps
        size = max(float(true.nan_to_num().norm()), float(exact[0].nan_to_num().norm()))  # gradients may cancel out
        assert off <= 2 * torchs_off + rounding * size


@pytest.mark.parametrize(
    "what", ["float64", "no dropout", "all dropped", "three dimensions", "mask and causal",
             "vmap", "another width of values", "empty"],
)  # fmt: skip
def test_everything_else_goes_to_torch(what: str) -> None:
    def run(on: bool) -> Any:
        torch.manual_seed(3)
        q, k, v = (torch.randn(2, 2, 7, 8).requires_grad_() for _ in range(3))
        mask: Tensor | None = None
        dropout, causal = DROPOUT, False
        if what == "float64":
            q, k, v = q.double(), k.double(), v.double()
        elif what == "no dropout":
            dropout = 0.0
        elif what == "all dropped":
            dropout = 1.0
        elif what == "three dimensions":
            q, k, v = q[0], k[0], v[0]
        elif what == "mask and causal":
            mask, causal = torch.zeros(7, 7), True
        elif what == "another width of values":
            v = torch.randn(2, 2, 7, 5).requires_grad_()
        elif what == "empty":
            q = q[:, :, :0]
        with native(on):
            try:
                if what == "vmap":
                    attend = torch.vmap(
                        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, DROPOUT), randomness="different"
                    )
                    return attend(q[:, None], k[:, None], v[:, None]).shape
                return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
            except RuntimeError as error:
                return str(error)

    before = served()
    found = run(True)
    assert served() == before
    expected = run(False)
    assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected


@pytest.mark.parametrize("dropout", [0.0, DROPOUT])
@pytest.mark.parametrize("size", [(37, 41), (1, HEADS, 37, 41), (BATCH, 1, 1, 41)])
def test_a_mask_that_learns(size: tuple[int, ...], dropout: float) -> None:
    def run(on: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = ((BATCH, HEADS, 37, WIDTH), (BATCH, HEADS, 41, WIDTH), (BATCH, HEADS, 41, WIDTH), size)
        given = [torch.randn(one, generator=generator).to(dtype).requires_grad_() for one in sizes]
        with native(on):
            torch.manual_seed(5)
            out = F.scaled_dot_product_attention(*given, dropout)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), given)]

    before = served()
    ours = run(True)
    assert served() == before + 1
    for one, torchs, true in zip(ours, run(False), run(False, torch.float64), strict=True):
        assert one.shape == torchs.shape
        off, torchs_off = (float((t.double() - true).norm()) for t in (one, torchs))
        assert off <= 2 * torchs_off + 2.0**-20 * float(true.norm())


def test_without_gradients_it_is_the_same() -> None:
    q = torch.randn(2, 2, 40, 8)

    def run(on: bool) -> Tensor:
        with native(on), torch.no_grad():
            torch.manual_seed(0)
            return F.scaled_dot_product_attention(q, q, q, None, DROPOUT)

    before = served()
    torch.testing.assert_close(run(True), run(False))
    assert served() == before + 1


def test_a_second_derivative_is_refused() -> None:
    q = torch.randn(2, 2, 5, 8).requires_grad_()
    with native():
        out = F.scaled_dot_product_attention(q, q, q, None, DROPOUT)
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="attention"):
            grad.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint_the_same_weights_are_dropped_again(reentrant: bool) -> None:
    q = torch.randn(2, 2, 33, 8).requires_grad_()

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, None, DROPOUT)

    def gradient(again: bool) -> Tensor:
        torch.manual_seed(0)
        out = checkpoint(attend, q, use_reentrant=reentrant) if again else attend(q)
        (grad,) = torch.autograd.grad(out.sin().sum(), q) if not reentrant else (None,)
        if grad is None:
            q.grad = None
            out.sin().sum().backward()
            grad = q.grad
        assert grad is not None
        return grad

    with native():
        assert torch.equal(gradient(True), gradient(False))


def test_any_number_of_threads_gives_the_same_bits() -> None:
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(attended(True, "bool", torch.float32, tokens=(130, 70))[0])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_under_autocast() -> None:
    q = torch.randn(2, 2, 40, 8).requires_grad_()

    def run(on: bool) -> Tensor:
        with native(on), torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(0)
            out = F.scaled_dot_product_attention(q, q, q, None, DROPOUT)
        assert out.dtype == torch.bfloat16
        return out.float()

    before = served()
    torch.testing.assert_close(run(True), run(False), rtol=0.02, atol=0.02)
    assert served() == before + 1


def test_compiled_code_is_torchs() -> None:
    q = torch.randn(2, 2, 12, 8).requires_grad_()
    before = served()
    with native():
        compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x, None, DROPOUT), backend="aot_eager")
        torch.manual_seed(0)
        found = compiled(q)
    assert served() == before
    torch.manual_seed(0)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, q, q, None, DROPOUT))


def test_one_byte_of_each_weight_is_kept() -> None:
    def kept(on: bool) -> int:
        q = torch.randn(2, 2, 256, 16).requires_grad_() * 1
        meter = ox.memory.Meter()
        with meter, native(on):
            out = F.scaled_dot_product_attention(q, q, q, None, DROPOUT)
            live = meter.live_bytes
        del out
        return int(live)

    weights = 2 * 2 * 256 * 256
    assert kept(False) >= 12 * weights
    assert kept(True) <= 1.3 * weights


class Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 2, dropout, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x, need_weights=False)
        out: Tensor = self.head(attended.mean(1))
        return out


def entry_of(model: nn.Module) -> Any:
    batch = torch.randn(8, 40, 16), torch.randint(3, (8,))
    plan = ox.accelerate(
        model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, [batch], level="advanced",
        strategies=["native_attention"], tune_seconds=1, remember=False,
    )  # fmt: skip
    (entry,) = (e for e in plan.certificate.entries if e.strategy == "native_attention")
    plan.revert()
    return entry


def test_accelerate_finds_it() -> None:
    entry = entry_of(Attending(0.2))
    assert entry.status in ("accepted", "rejected") or "budget" in entry.reason, entry


def test_dropout_and_softmax_that_are_no_such_attention_are_not_tried() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(F.dropout(x.softmax(-1), 0.1).mean(1))
            return out

    entry = entry_of(Other())
    assert entry.status == "skipped" and "neither calls nor writes out attention" in entry.reason, entry


def test_the_edit_serves_it() -> None:
    model, x = Attending(0.2), torch.randn(4, 40, 16)
    tuner = ox.model.ModelOptimizer()
    (outcome,) = tuner.apply(model, "sdpa:native", (x, torch.randint(3, (4,))), F.cross_entropy)
    assert outcome.applied, outcome
    before = served()
    model(x)
    assert served() == before + 1
    tuner.revert()
    model(x)
    assert served() == before + 1
