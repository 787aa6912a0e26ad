"""Attention, packed, with dropout and written out, and rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import oxytorch as ox
import torch
from _race import Contender
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import COMPILED, DTYPES, EAGER, OURS, Case, step_of

FLASH, MATH = "torch flash", "torch math"
REWRITTEN = "scaled_dot_product_attention"
PADDED, ONE_BY_ONE = "padded", "one by one"
# Batch, heads, tokens, width, causal: 4,096 to 16,384 tokens in all at the short end, one sequence at the long one.
SHAPES = [
    (64, 4, 64, 64, True),
    (16, 4, 128, 64, True),
    (16, 12, 128, 64, False),
    (8, 8, 256, 64, True),
    (4, 8, 512, 64, True),
    (4, 8, 512, 64, False),
    (2, 8, 1024, 64, True),
    (1, 8, 2048, 64, True),
    (1, 4, 2048, 128, False),
    (1, 2, 4096, 64, True),
    (1, 1, 8192, 64, True),
]
QUICK = [SHAPES[1], SHAPES[4]]
FP32 = [SHAPES[0], SHAPES[1], SHAPES[4], SHAPES[7]]
DROPOUT = 0.1
DROPOUTS = [SHAPES[2], SHAPES[4], SHAPES[7]]
# Attention that a model writes out: batch, heads, tokens, width, and as what.
WRITTEN = [
    (4, 8, 512, 64, "causal"),
    (4, 8, 512, 64, "causal, dropout"),
    (8, 4, 128, 64, "causal, dropout"),
    (8, 8, 512, 64, "learned bias"),
    (16, 12, 197, 64, "plain"),
]
# Tokens of the documents, heads, width.
LENGTHS = [32, 48, 64, 96, 100, 128, 150, 180, 220, 260, 300, 350, 400, 468, 600, 700]
PACKED = [(sorted(LENGTHS, key=lambda n: n * 7 % 11), 8, 64), ([1024, 1024, 1024, 1024], 8, 64), ([64] * 64, 4, 64)]
# Batch, heads, tokens, width.
ROTARIES = [(4, 8, 1024, 64), (16, 12, 128, 64), (1, 32, 2048, 128)]
# Scores of torch's math kernel above which it is left out: they alone would take over 2 GiB.
MOST_SCORES = 1 << 28


def ours(dropout: float) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
    return lambda q, k, v, causal: ox.ops.attention(q, k, v, causal=causal, dropout=dropout)


def theirs(backend: SDPBackend, dropout: float) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout)

    return attend


class Pass:
    """One contender's forward, and backward through the graph of the last one."""

    def __init__(self, attend: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, causal: bool) -> None:
        self.attend, self.inputs, self.grad, self.causal = attend, inputs, grad, causal
        self.output = attend(*inputs, causal)

    def forward(self) -> None:
        self.output = self.attend(*self.inputs, self.causal)

    def backward(self) -> None:
        torch.autograd.grad(self.output, self.inputs, self.grad, retain_graph=True)


def attention(shape: tuple[int, int, int, int, bool], dtype: torch.dtype, dropout: float = 0.0) -> list[Contender]:
    batch, heads, tokens, width, causal = shape
    generator = torch.Generator().manual_seed(1)
    packed = torch.randn(batch, tokens, 3, heads, width, generator=generator).to(dtype)
    inputs = [t.transpose(1, 2).detach().requires_grad_() for t in packed.unbind(2)]
    grad = torch.randn(batch, tokens, heads, width, generator=generator).to(dtype).transpose(1, 2)
    kernels: dict[str, Callable[..., Tensor]] = {OURS: ours(dropout)}
    if dropout == 0:
        kernels[FLASH] = theirs(SDPBackend.FLASH_ATTENTION, dropout)
    if batch * heads * tokens * tokens <= MOST_SCORES:
        kernels[MATH] = theirs(SDPBackend.MATH, dropout)
    passes = {name: Pass(attend, inputs, grad, causal) for name, attend in kernels.items()}
    return [Contender(name, {"forward": one.forward, "backward": one.backward}) for name, one in passes.items()]


def written_out(shape: tuple[int, int, int, int, str], dtype: torch.dtype, quick: bool) -> list[Contender]:
    """Attention as minGPT, T5 and ViT write it, and by the call that their authors could have made."""
    batch, heads, tokens, width, kind = shape
    generator = torch.Generator().manual_seed(1)
    packed = torch.randn(batch, tokens, 3, heads, width, generator=generator).to(dtype)
    inputs = [t.transpose(1, 2).detach().requires_grad_() for t in packed.unbind(2)]
    grad = torch.randn(batch, tokens, heads, width, generator=generator).to(dtype).transpose(1, 2)
    learns, causal, dropout = "bias" in kind, "causal" in kind, DROPOUT if "dropout" in kind else 0.0
    if learns:
        inputs.append(torch.randn(1, heads, tokens, tokens, generator=generator).to(dtype).requires_grad_())
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)

    def written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        scores = q @ k.transpose(-2, -1) * width**-0.5
        if bias is not None:
            scores = scores + bias
        if causal:
            scores = scores.masked_fill(hidden, float("-inf"))
        return F.dropout(scores.softmax(-1), dropout) @ v

    def rewritten(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout, is_causal=causal)

    deferred = ox._C.tune.DeferredScores()

    def ours(*given: Tensor) -> Tensor:
        with deferred.scope():
            return written(*given)

    calls: dict[str, Callable[..., Tensor]] = {OURS: ours, EAGER: written, REWRITTEN: rewritten}
    if not quick:
        calls[COMPILED] = torch.compile(written)
    return step_of(calls, inputs, [grad])


def packed_attention(lengths: list[int], heads: int, width: int, dtype: torch.dtype) -> list[Contender]:
    """Documents one after the other, and what is done with them without an operator that takes them."""
    generator = torch.Generator().manual_seed(1)
    tokens, longest = sum(lengths), max(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    packed = torch.randn(tokens, 3, heads, width, generator=generator).to(dtype)
    padded = torch.zeros(len(lengths), longest, 3, heads, width, dtype=dtype)
    grad = torch.randn(tokens, heads, width, generator=generator).to(dtype)
    padded_grad = torch.zeros(len(lengths), longest, heads, width, dtype=dtype)
    for i, (begin, length) in enumerate(zip(offsets.tolist(), lengths, strict=False)):
        padded[i, :length] = packed[begin : begin + length]
        padded_grad[i, :length] = grad[begin : begin + length]

    def one_by_one(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        cut = [[part.transpose(0, 1)[None] for part in t.split(lengths)] for t in (q, k, v)]
        attended = [theirs(SDPBackend.FLASH_ATTENTION, 0.0)(*parts, causal) for parts in zip(*cut, strict=True)]
        return torch.cat([part[0].transpose(0, 1) for part in attended])

    inputs = [t.detach().requires_grad_() for t in packed.unbind(1)]
    as_batch = [t.transpose(1, 2).detach().requires_grad_() for t in padded.unbind(2)]
    passes = {
        OURS: Pass(
            lambda q, k, v, causal: ox.ops.packed_attention(q, k, v, offsets, causal=causal), inputs, grad, True
        ),
        PADDED: Pass(theirs(SDPBackend.FLASH_ATTENTION, 0.0), as_batch, padded_grad.transpose(1, 2), True),
        ONE_BY_ONE: Pass(one_by_one, inputs, grad, True),
    }
    return [Contender(name, {"forward": one.forward, "backward": one.backward}) for name, one in passes.items()]


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def rotary(shape: tuple[int, int, int, int], dtype: torch.dtype, interleaved: bool, quick: bool) -> list[Contender]:
    """Rotary embedding in the layout that a projection leaves, forward and backward."""
    batch, heads, tokens, width = shape
    generator = torch.Generator().manual_seed(1)
    x, grad = (
        torch.randn(batch, tokens, heads, width, generator=generator).to(dtype).transpose(1, 2) for _ in range(2)
    )
    x.requires_grad_()
    angles = torch.arange(tokens)[:, None] * 10_000.0 ** (-torch.arange(width // 2) / (width // 2))
    both = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    cos, sin = both.cos().to(dtype), both.sin().to(dtype)
    swap = rotate_every_two if interleaved else rotate_half

    def composed(x: Tensor) -> Tensor:
        return x * cos + swap(x) * sin

    calls: dict[str, Callable[[Tensor], Tensor]] = {
        OURS: lambda x: ox.ops.rotary(x, cos, sin, interleaved=interleaved),
        EAGER: composed,
    }
    if not quick:
        calls[COMPILED] = torch.compile(composed)

    return step_of(calls, [x], [grad])


def case_name(shape: tuple[int, int, int, int, bool], dtype: str, kind: str) -> str:
    batch, heads, tokens, width, causal = shape
    return f"{kind} {dtype}, {batch} x {heads} x {tokens:,} x {width}{', causal' if causal else ''}"


def cases(quick: bool) -> Iterator[Case]:
    for name, dtype in DTYPES.items():
        for shape in QUICK if quick else FP32 if dtype is torch.float32 else SHAPES:
            yield Case(case_name(shape, name, "attention"), partial(attention, shape, dtype), products=dtype)
        for shape in QUICK[:1] if quick else DROPOUTS:
            yield Case(case_name(shape, name, "dropout"), partial(attention, shape, dtype, DROPOUT), products=dtype)
        for written in WRITTEN[2:3] if quick else WRITTEN:
            batch, heads, tokens, width, kind = written
            case = f"written {name}, {batch} x {heads} x {tokens:,} x {width}, {kind}"
            yield Case(case, partial(written_out, written, dtype, quick), products=dtype)
        for lengths, heads, width in PACKED[:1] if quick else PACKED:
            case = f"packed {name}, {len(lengths)} documents, {sum(lengths):,} x {heads} x {width}"
            yield Case(case, partial(packed_attention, lengths, heads, width, dtype), products=dtype)
        for sizes in ROTARIES[:1] if quick else ROTARIES:
            batch, heads, tokens, width = sizes
            for kind in ("halves", "pairs"):
                case = f"rotary {name}, {batch} x {heads} x {tokens:,} x {width}, {kind}"
                yield Case(case, partial(rotary, sizes, dtype, kind == "pairs", quick))
