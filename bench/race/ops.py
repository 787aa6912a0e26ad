"""Races the operators of oxytorch.ops against torch's own, forward and backward apart.

Attention: `torch flash` and `torch math` are the kernels of scaled_dot_product_attention; math may keep bfloat16
throughout, as its fastest setting has it, which rounds scores and weights to 8 bits. Every contender has the same
inputs, in the layout that a projection of queries, keys and values together leaves, takes its turns in a random order
each round, and has the same number of threads.

Packed: documents one after the other, of many lengths or of one, causal. `padded` is torch's attention of a batch in
which all are as long as the longest, and `one by one` a loop over the documents.

With dropout of attention weights (`dropout` cases), torch has its math path alone.

Linear and cross entropy, forward and backward together: `torch` is linear and cross_entropy of fp32 logits, `compiled`
the same under torch.compile, and `chunks` the usual way to save memory, as Liger's kernel has it: 512 tokens at a time,
gradients made in forward, by torch's operators. In `masked` cases 15 % of the tokens count, as in BERT's training.

Linear: one layer with a float32 weight under autocast to bfloat16, as an MLP or a transformer has it. `torch` is its
own; `bf16 weights` has no weight to cast and none to keep in float32: what a layer of bfloat16 takes.

Norm: batch normalization of a bfloat16 image in channels_last with ReLU, and an addition before it or max pooling after
it. `torch` is its own operators one after the other, `compiled` the same under torch.compile.

Sum: layer or RMS normalization of the sum of a layer's output and a float32 residual, with and without dropout before,
forward and backward together; activation: GELU and SwiGLU, the same. `torch` is its own operators one after the other,
`compiled` the same under torch.compile.

Rotary: rotary embedding of one tensor, halves or interleaved pairs, forward and backward together. `torch` is the usual
composition in the dtype of the tensor, `compiled` the same under torch.compile.

Transformer: from C++, forward and backward of four layers, by oxytorch::nn and by torch's modules and operators as
they are usually written, with flash and with math attention; for BERT's also torch::nn::TransformerEncoder. A program
of its own, `bench/race/transformer.cpp`, which `make build` compiles; left out where it is not there.

Embedding: the gradient of a table, from that of its rows; of numbers that fall evenly, or half of them on one row.

Accumulated: forward and backward of one batch more, whose gradients are added to those of an earlier one: of eight
linear layers under autocast with packed weights (`bf16 weights` as above, in bfloat16 sums), and of a float32 table.

LSTM: one layer of torch.nn.LSTM, served by this library and by oneDNN, with all threads and with one. GRU: the same of
torch.nn.GRU, which torch composes of operators for each step.

    python bench/race/ops.py [--threads 2] [--starts 4] [--seconds 3] [--quick] [--case NAME]... [--keep PATH]
        [--json PATH]

Ratios are paired by round, a start counts by its median, and intervals hold 95%. Prints the ratios, and writes
bench/report/ops.{json,html}.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import oxytorch as ox
import torch
from _race import (
    MOST_ROUNDS,
    ROOT,
    Contender,
    Measured,
    add_options,
    all_starts,
    facts,
    is_wanted,
    new_report,
    over_starts,
    progress,
    race,
    ratio,
    run_cpp,
    text,
    write,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SCHEMA = "oxytorch-ops/1"
OURS, FLASH, MATH = "oxytorch", "torch flash", "torch math"
EAGER, COMPILED, CHUNKS, CHOSEN = "torch", "compiled", "chunks", "chosen rows"
BF16_WEIGHTS = "bf16 weights"
PADDED, ONE_BY_ONE = "padded", "one by one"
ONEDNN, ONE_THREAD, EAGER_ONE_THREAD = "oneDNN", "oneDNN, 1 thread", "torch, 1 thread"
USUAL_MATH, ENCODER = "torch, math attention", "TransformerEncoder"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
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
# Tokens, classes, width.
LOSSES = [(2048, 32_000, 256), (2048, 32_000, 768), (2048, 50_257, 512)]
QUICK_LOSSES = [(512, 8000, 128)]
COUNTED = 0.15  # of the tokens of a masked loss
DROPOUT = 0.1
DROPOUTS = [SHAPES[2], SHAPES[4], SHAPES[7]]
# Tokens of the documents, heads, width.
LENGTHS = [32, 48, 64, 96, 100, 128, 150, 180, 220, 260, 300, 350, 400, 468, 600, 700]
PACKED = [(sorted(LENGTHS, key=lambda n: n * 7 % 11), 8, 64), ([1024, 1024, 1024, 1024], 8, 64), ([64] * 64, 4, 64)]
# Steps, batch, features, hidden.
SEQUENCES = [(64, 32, 256, 256), (35, 20, 200, 200), (50, 128, 128, 512), (32, 64, 512, 1024)]
# The layer of each kind, and its rivals: torch's with all threads and with the one that it often is faster with.
RECURRENT = {"lstm": (nn.LSTM, ONEDNN, ONE_THREAD), "gru": (nn.GRU, EAGER, EAGER_ONE_THREAD)}
# Batch, channels and side of an image; what is joined beside ReLU.
NORMS = [
    ((64, 64, 64), "pool"), ((64, 64, 32), ""), ((64, 64, 32), "sum"), ((64, 128, 16), "sum"), ((64, 256, 8), "sum"),
    ((32, 64, 56), ""), ((32, 256, 56), "sum"),
]  # fmt: skip
# Rows, columns.
SUMS, ACTIVATIONS = (4096, 768), (4096, 3072)
NORMALIZED = {"layer norm": 0.0, "layer norm, dropout": 0.1, "RMS norm": 0.0}
ACTIVATED = ("gelu", "gelu by tanh", "swiglu")
# Batch, heads, tokens, width.
ROTARIES = [(4, 8, 1024, 64), (16, 12, 128, 64), (1, 32, 2048, 128)]
# Numbers, rows of the table, columns, the share that falls on one row.
EMBEDDINGS = [
    (2048, 256, 256, 0.0), (8192, 32_000, 1024, 0.0), (65_536, 100_000, 32, 0.0), (65_536, 1000, 64, 0.5),
]  # fmt: skip
TRANSFORMERS = [
    f"transformer {dtype}, {family} of 4 x 256, 16 x 128 tokens"
    for dtype in DTYPES
    for family in ("GPT", "LLaMA", "BERT")
]
TRANSFORMER_PROGRAM = ROOT / "build/dev/bench/race/transformer_race"
# Rows, features, outputs.
LINEARS = [
    (128, 784, 512),
    (128, 512, 512),
    (2048, 256, 768),
    (2048, 256, 1024),
    (2048, 1024, 256),
    (2048, 768, 3072),
    (4096, 1024, 1024),
]
# Rows of a batch through linear layers; tables, as indices, rows and columns.
BATCHES = (32, 128, 512)
STACK = (8, 768, 3072)
TABLES = [(128, 50_257, 768), (2048, 50_257, 768), (8192, 32_000, 256)]
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


def recurrent(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, count: int) -> list[Contender]:
    """One layer, forward and backward."""
    layer, *rivals = RECURRENT[kind]
    steps, batch, features, hidden = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, batch, features, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(steps, batch, hidden, generator=generator).to(dtype)
    torch.manual_seed(1)
    module = layer(features, hidden).to(dtype)
    native = ox._C.tune.NativeOperators()
    output = {}

    def before(name: str) -> None:
        native.uninstall()
        torch.set_num_threads(1 if name == rivals[1] else count)
        if name == OURS:
            (report,) = native.install([kind])
            assert report.installed, report.reason

    def forward(name: str) -> None:
        output[name] = module(x)[0]

    def backward(name: str) -> None:
        torch.autograd.grad(output[name], [x, *module.parameters()], grad)

    return [
        Contender(name, {"forward": partial(forward, name), "backward": partial(backward, name)},
                  before=partial(before, name))
        for name in (OURS, *rivals)
    ]  # fmt: skip


def linear(shape: tuple[int, int, int]) -> list[Contender]:
    """A layer under autocast, forward and backward."""
    rows, features, outputs = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, features, generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(rows, outputs, generator=generator).bfloat16()
    torch.manual_seed(1)
    wide = nn.Linear(features, outputs)
    narrow = nn.Linear(features, outputs).bfloat16()
    calls: dict[str, tuple[nn.Linear, Callable[..., Tensor]]] = {
        OURS: (wide, ox.ops.linear),
        EAGER: (wide, F.linear),
        BF16_WEIGHTS: (narrow, F.linear),
    }
    output = {}

    def forward(name: str) -> None:
        layer, call = calls[name]
        with torch.autocast("cpu", torch.bfloat16):
            output[name] = call(x, layer.weight, layer.bias)

    def backward(name: str) -> None:
        layer = calls[name][0]
        torch.autograd.grad(output[name], [x, layer.weight, layer.bias], grad)

    return [Contender(name, {"forward": partial(forward, name), "backward": partial(backward, name)}) for name in calls]


def accumulated_layers(rows: int, count: int, width: int, wide: int) -> list[Contender]:
    """Layers that widen and narrow in turn, whose gradients there are already."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, generator=generator)

    def contender(name: str, call: Callable[..., Tensor], dtype: torch.dtype) -> Contender:
        torch.manual_seed(1)
        layers = [nn.Linear(*((width, wide) if i % 2 == 0 else (wide, width))).to(dtype) for i in range(count)]

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = x
                for layer in layers:
                    hidden = call(hidden, layer.weight, layer.bias)
            hidden.float().sum().backward()

        step()
        return Contender(name, {"step": step})

    return [
        contender(OURS, ox.ops.linear, torch.float32),
        contender(EAGER, F.linear, torch.float32),
        contender(BF16_WEIGHTS, F.linear, torch.bfloat16),
    ]


def accumulated_table(count: int, rows: int, columns: int) -> list[Contender]:
    """A lookup in a table whose gradient there is already."""
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(rows, (count,), generator=generator)
    grad = torch.randn(count, columns, generator=generator)

    def contender(name: str, call: Callable[..., Tensor]) -> Contender:
        table = torch.zeros(rows, columns, requires_grad=True)

        def step() -> None:
            call(indices, table).backward(grad)

        step()
        return Contender(name, {"step": step})

    return [contender(OURS, ox.ops.embedding), contender(EAGER, F.embedding)]


def norm(sizes: tuple[int, int, int], follower: str, quick: bool) -> list[Contender]:
    """Batch normalization with ReLU and `follower`, forward and backward."""
    batch, channels, side = sizes
    generator = torch.Generator().manual_seed(1)

    def image(side: int) -> Tensor:
        made = torch.randn(batch, channels, side, side, generator=generator).bfloat16()
        return made.contiguous(memory_format=torch.channels_last)

    x = image(side).requires_grad_()
    added = image(side).requires_grad_() if follower == "sum" else None
    pool = (2, 2) if follower == "pool" else ()
    grad = image(side // 2 if pool else side)
    weight, bias = torch.rand(channels).requires_grad_(), torch.rand(channels).requires_grad_()
    kept = torch.zeros(channels), torch.ones(channels)

    def ours(x: Tensor) -> Tensor:
        return ox.ops.batch_norm(x, weight, bias, *kept, added=added, relu=True, pool=pool)

    def theirs(x: Tensor) -> Tensor:
        y = F.batch_norm(x, *kept, weight, bias, training=True)
        y = F.relu(y if added is None else y + added)
        return F.max_pool2d(y, pool) if pool else y

    calls = {OURS: ours, EAGER: theirs}
    if not quick:
        calls[COMPILED] = torch.compile(theirs)
    inputs = [x, weight, bias, *([added] if added is not None else [])]
    output = {}

    def forward(name: str) -> None:
        output[name] = calls[name](x)

    def backward(name: str) -> None:
        torch.autograd.grad(output[name], inputs, grad)

    return [Contender(name, {"forward": partial(forward, name), "backward": partial(backward, name)}) for name in calls]


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


def embedding(count: int, rows: int, columns: int, share: float, dtype: torch.dtype) -> list[Contender]:
    """The gradient alone: the rows themselves are torch's for both."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(rows, (count,), generator=generator)
    numbers[torch.rand(count, generator=generator) < share] = rows // 3
    grad = torch.randn(count, columns, generator=generator).to(dtype)
    gradients = {OURS: torch.ops.oxytorch.embedding_gradient, EAGER: torch.ops.aten.embedding_dense_backward}
    given = {OURS: (rows, -1), EAGER: (rows, -1, False)}
    return [Contender(name, {"step": partial(call, grad, numbers, *given[name])}) for name, call in gradients.items()]


def step_of(calls: dict[str, Callable[..., Any]], inputs: list[Tensor], grads: list[Tensor]) -> list[Contender]:
    """Forward and backward of each."""

    def whole(call: Callable[..., Any]) -> Callable[[], object]:
        def step() -> object:
            made = call(*inputs)
            return torch.autograd.grad(made if isinstance(made, tuple) else (made,), inputs, grads)

        return step

    return [Contender(name, {"step": whole(call)}) for name, call in calls.items()]


def summed(kind: str, dtype: torch.dtype, quick: bool) -> list[Contender]:
    """A residual and the norm of the sum, which both go on."""
    generator, p = torch.Generator().manual_seed(1), NORMALIZED[kind]
    x, residual, *grads = (torch.randn(SUMS, generator=generator) for _ in range(4))
    weight, bias = torch.rand(SUMS[1], generator=generator), torch.randn(SUMS[1], generator=generator)
    if kind == "RMS norm":
        inputs = [x.to(dtype), residual, weight]
        ours: Callable[..., Any] = ox.ops.add_rms_norm

        def composed(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return F.rms_norm(r + x, SUMS[1:], w), r + x

    else:
        inputs = [x.to(dtype), residual, weight, bias]
        ours = partial(ox.ops.add_layer_norm, dropout=p)

        def composed(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[misc]
            total = r + F.dropout(x, p)
            return F.layer_norm(total, SUMS[1:], w, b), total

    calls: dict[str, Callable[..., Any]] = {OURS: ours, EAGER: composed}
    if not quick:
        calls[COMPILED] = torch.compile(composed)
    return step_of(calls, [t.requires_grad_() for t in inputs], grads)


def activated(kind: str, dtype: torch.dtype, quick: bool) -> list[Contender]:
    """An activation of a transformer's wide layer."""
    generator = torch.Generator().manual_seed(1)
    x, up, grad = (torch.randn(ACTIVATIONS, generator=generator).to(dtype) for _ in range(3))
    form = "tanh" if "tanh" in kind else "none"
    ours = ox.ops.swiglu if kind == "swiglu" else partial(ox.ops.gelu, approximate=form)
    composed = (lambda x, u: F.silu(x) * u) if kind == "swiglu" else partial(F.gelu, approximate=form)
    calls: dict[str, Callable[..., Any]] = {OURS: ours, EAGER: composed}
    if not quick:
        calls[COMPILED] = torch.compile(composed)
    return step_of(calls, [t.requires_grad_() for t in ([x, up] if kind == "swiglu" else [x])], [grad])


class Chunks(torch.autograd.Function):
    """Loss and gradients of 512 tokens at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        of_x, of_w = torch.empty_like(x), torch.zeros(w.shape)
        loss, counted = torch.zeros(()), (y >= 0).sum()
        for begin in range(0, x.size(0), 512):
            part, target = x[begin : begin + 512], y[begin : begin + 512]
            with torch.enable_grad():
                logits = F.linear(part, w).float().requires_grad_()
                one = F.cross_entropy(logits, target, reduction="sum")
            (of_logits,) = torch.autograd.grad(one, logits)
            of_logits = of_logits.div_(counted).to(x.dtype)
            torch.mm(of_logits, w, out=of_x[begin : begin + 512])
            of_w.add_(torch.mm(of_logits.t(), part))
            loss += one.detach()
        ctx.save_for_backward(of_x, of_w.to(w.dtype))
        return loss / counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        of_x, of_w = ctx.saved_tensors
        return of_x * grad.to(of_x.dtype), of_w * grad.to(of_w.dtype), None


def plain_loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y)


def chosen_loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Written by somebody who knows which tokens count."""
    return plain_loss(x[y >= 0], w, y[y >= 0])


def cross_entropy(
    shape: tuple[int, int, int], dtype: torch.dtype, quick: bool, counted: float = 1.0
) -> list[Contender]:
    tokens, classes, width = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(classes, width, generator=generator) * 0.02).to(dtype).requires_grad_()
    y = torch.randint(classes, (tokens,), generator=generator)
    y[torch.rand(tokens, generator=generator) >= counted] = -100
    losses: dict[str, Callable[..., Tensor]] = {
        OURS: ox.ops.linear_cross_entropy,
        EAGER: plain_loss,
        CHUNKS: Chunks.apply,
    }
    if counted < 1:
        losses[CHOSEN] = chosen_loss
    if not quick:
        losses[COMPILED] = torch.compile(plain_loss)

    def whole(loss: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(x, w, y), (x, w))

    return [Contender(name, {"step": whole(loss)}) for name, loss in losses.items()]


def case_name(shape: tuple[int, int, int, int, bool], dtype: str, kind: str = "attention") -> str:
    batch, heads, tokens, width, causal = shape
    return f"{kind} {dtype}, {batch} x {heads} x {tokens:,} x {width}{', causal' if causal else ''}"


def measure(arguments: argparse.Namespace) -> Measured:
    """One start: every case that was asked for, in this process."""
    torch.set_num_threads(arguments.threads)
    found = Measured()
    wanted = [case for case in TRANSFORMERS[: 1 if arguments.quick else None] if is_wanted(arguments, case)]
    if wanted and TRANSFORMER_PROGRAM.exists():
        progress("racing transformers in C++ ...")
        found.cases |= run_cpp(TRANSFORMER_PROGRAM, arguments.threads, 0.2 if arguments.quick else 4.0, wanted)
    ox._C.trainer.tune_allocator(None)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    seconds, rounds = (0.2, 5) if arguments.quick else (arguments.seconds, MOST_ROUNDS)
    for dtype_name, dtype in DTYPES.items():
        for shape in QUICK if arguments.quick else FP32 if dtype is torch.float32 else SHAPES:
            case = case_name(shape, dtype_name)
            if not is_wanted(arguments, case):
                continue
            progress(f"racing {case} ...")
            found.cases[case] = race(attention(shape, dtype), seconds, rounds)
        for shape in QUICK[:1] if arguments.quick else DROPOUTS:
            case = case_name(shape, dtype_name, "dropout")
            if not is_wanted(arguments, case):
                continue
            progress(f"racing {case} ...")
            found.cases[case] = race(attention(shape, dtype, DROPOUT), seconds, rounds)
        for lengths, heads, width in PACKED[:1] if arguments.quick else PACKED:
            case = f"packed {dtype_name}, {len(lengths)} documents, {sum(lengths):,} x {heads} x {width}"
            if not is_wanted(arguments, case):
                continue
            progress(f"racing {case} ...")
            found.cases[case] = race(packed_attention(lengths, heads, width, dtype), seconds, rounds)
        losses = QUICK_LOSSES if arguments.quick else LOSSES[:1] if dtype is torch.float32 else LOSSES
        for kind, counted, sizes in (("loss", 1.0, losses), ("masked", COUNTED, losses[:1])):
            for tokens, classes, width in sizes:
                case = f"{kind} {dtype_name}, {tokens:,} x {width} to {classes:,}"
                if not is_wanted(arguments, case):
                    continue
                progress(f"racing {case} ...")
                contenders = cross_entropy((tokens, classes, width), dtype, arguments.quick, counted)
                found.cases[case] = race(contenders, seconds, rounds)
        for sizes in (LINEARS[:1] if arguments.quick else LINEARS) if dtype is torch.bfloat16 else []:
            rows, features, outputs = sizes
            case = f"linear {rows:,} x {features:,} to {outputs:,}"
            if not is_wanted(arguments, case):
                continue
            progress(f"racing {case} ...")
            found.cases[case] = race(linear(sizes), seconds, rounds)
        for rows in (BATCHES[:1] if arguments.quick else BATCHES) if dtype is torch.bfloat16 else []:
            count, width, wide = (2, 64, 128) if arguments.quick else STACK
            case = f"accumulated layers, {count} of {width:,} x {wide:,}, {rows:,} rows"
            if not is_wanted(arguments, case):
                continue
            progress(f"racing {case} ...")
            with ox.ops.PackedWeights():
                found.cases[case] = race(accumulated_layers(rows, count, width, wide), seconds, rounds)
        tables_of = [(16, 300, 20)] if arguments.quick else TABLES
        for count, rows, columns in tables_of if dtype is torch.float32 else []:
            case = f"accumulated table of {rows:,} x {columns:,}, {count:,} indices"
            if not is_wanted(arguments, case):
                continue
            progress(f"racing {case} ...")
            found.cases[case] = race(accumulated_table(count, rows, columns), seconds, rounds)
        for sizes, follower in (NORMS[:1] if arguments.quick else NORMS) if dtype is torch.bfloat16 else []:
            batch, channels, side = sizes
            case = f"norm {batch} x {channels} x {side} x {side}{f', {follower}' if follower else ''}"
            if not is_wanted(arguments, case):
                continue
            progress(f"racing {case} ...")
            found.cases[case] = race(norm(sizes, follower, arguments.quick), seconds, rounds)
        for kind in NORMALIZED:
            case = f"sum {dtype_name}, {kind}, {SUMS[0]:,} x {SUMS[1]:,}"
            if is_wanted(arguments, case):
                progress(f"racing {case} ...")
                found.cases[case] = race(summed(kind, dtype, arguments.quick), seconds, rounds)
        for kind in ACTIVATED:
            case = f"activation {dtype_name}, {kind}, {ACTIVATIONS[0]:,} x {ACTIVATIONS[1]:,}"
            if is_wanted(arguments, case):
                progress(f"racing {case} ...")
                found.cases[case] = race(activated(kind, dtype, arguments.quick), seconds, rounds)
        for sizes in ROTARIES[:1] if arguments.quick else ROTARIES:
            for interleaved in (False, True):
                batch, heads, tokens, width = sizes
                kind = "pairs" if interleaved else "halves"
                case = f"rotary {dtype_name}, {batch} x {heads} x {tokens:,} x {width}, {kind}"
                if not is_wanted(arguments, case):
                    continue
                progress(f"racing {case} ...")
                found.cases[case] = race(rotary(sizes, dtype, interleaved, arguments.quick), seconds, rounds)
        for count, rows, columns, share in EMBEDDINGS[:1] if arguments.quick else EMBEDDINGS:
            spread = f"{share:.0%} on one row" if share else "even"
            case = f"embedding {dtype_name}, {count:,} of {rows:,} x {columns:,}, {spread}"
            if not is_wanted(arguments, case):
                continue
            progress(f"racing {case} ...")
            found.cases[case] = race(embedding(count, rows, columns, share, dtype), seconds, rounds)
        for kind in RECURRENT:
            for shape in SEQUENCES[:1] if arguments.quick else SEQUENCES:
                steps, batch, features, hidden = shape
                case = f"{kind} {dtype_name}, {steps} x {batch} x {features} to {hidden:,}"
                if not is_wanted(arguments, case):
                    continue
                progress(f"racing {case} ...")
                found.cases[case] = race(recurrent(kind, shape, dtype, arguments.threads), seconds, rounds)
        torch.set_num_threads(arguments.threads)
    return found


def against(times: dict[str, Any], slower: str, faster: str) -> str:
    return text(ratio(times, slower, faster)) if slower in times else "left out"


def rows_by_phase(found: Measured, kind: str, rivals: tuple[str, ...]) -> list[list[str]]:
    return [
        [f"{case}, {phase}", text(over_starts(times[f"{OURS}: {phase}"]), 1e3)]
        + [against(times, f"{name}: {phase}", f"{OURS}: {phase}") for name in rivals]
        for case, times in found.cases.items()
        if case.startswith(kind)
        for phase in ("forward", "backward")
    ]


def loss_rows(found: Measured, kind: str, rivals: tuple[str, ...]) -> list[list[str]]:
    return [
        [case, text(over_starts(times[OURS]), 1e3)] + [against(times, name, OURS) for name in rivals]
        for case, times in found.cases.items()
        if case.startswith(kind)
    ]


def tables(found: Measured) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Headings and rows of what was measured, by kind."""
    attended = ["attention", "oxytorch, ms", "flash, times as long", "math, times as long"]
    lost = ["linear and cross entropy", "oxytorch, ms", "torch, times as long", "compiled", "chunks"]
    layered = ["linear layer under autocast", "oxytorch, ms", "torch, times as long", BF16_WEIGHTS]
    normalized = ["batch normalization and ReLU", "oxytorch, ms", "torch, times as long", "compiled"]
    repeated = ["LSTM layer", "oxytorch, ms", "oneDNN, times as long", "oneDNN on one thread"]
    gated = ["GRU layer", "oxytorch, ms", "torch, times as long", "torch on one thread"]
    made = {
        "attention": (attended, rows_by_phase(found, "attention", (FLASH, MATH))),
        "dropout": (
            ["attention with dropout", "oxytorch, ms", "math, times as long"],
            rows_by_phase(found, "dropout", (MATH,)),
        ),
        "packed": (
            ["packed documents", "oxytorch, ms", "padded, times as long", "one by one"],
            rows_by_phase(found, "packed", (PADDED, ONE_BY_ONE)),
        ),
        "loss": (lost, loss_rows(found, "loss", (EAGER, COMPILED, CHUNKS))),
        "masked": (
            ["15 % of the tokens count", *lost[1:], CHOSEN],
            loss_rows(found, "masked", (EAGER, COMPILED, CHUNKS, CHOSEN)),
        ),
        "linear": (layered, rows_by_phase(found, "linear", (EAGER, BF16_WEIGHTS))),
        "norm": (normalized, rows_by_phase(found, "norm", (EAGER, COMPILED))),
        "sum": (["norm of a sum, forward and backward", *lost[1:4]], loss_rows(found, "sum", (EAGER, COMPILED))),
        "activation": (
            ["activation, forward and backward", *lost[1:4]],
            loss_rows(found, "activation", (EAGER, COMPILED)),
        ),
        "rotary": (
            ["rotary embedding, forward and backward", *lost[1:4]],
            loss_rows(found, "rotary", (EAGER, COMPILED)),
        ),
        "transformer": (
            [
                "transformer in C++, forward and backward",
                "oxytorch, ms",
                "torch, times as long",
                "math attention",
                ENCODER,
            ],
            loss_rows(found, "transformer", (EAGER, USUAL_MATH, ENCODER)),
        ),
        "embedding": (["gradient of an embedding", *lost[1:3]], loss_rows(found, "embedding", (EAGER,))),
        "accumulated": (
            ["one batch more, its gradients added", *layered[1:]],
            loss_rows(found, "accumulated", (EAGER, BF16_WEIGHTS)),
        ),
        "lstm": (repeated, rows_by_phase(found, "lstm", RECURRENT["lstm"][1:])),
        "gru": (gated, rows_by_phase(found, "gru", RECURRENT["gru"][1:])),
    }
    return {kind: (headings, rows) for kind, (headings, rows) in made.items() if rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    arguments = parser.parse_args()
    machine_facts = facts(arguments.threads)
    found = all_starts(arguments, machine_facts, SCHEMA, measure)
    for headings, rows in tables(found).values():
        for row in (headings, *rows):
            print(f"{row[0]:<60}" + "".join(f"{cell:<24}" for cell in row[1:]).rstrip())
    print("\nMeasured on: " + ", ".join(f"{key} {value}" for key, value in machine_facts.items() if value))
    report = new_report("Race: operators", __doc__, machine_facts)
    for headings, rows in tables(found).values():
        report.table(headings, rows, headings[0].capitalize())
    document = {"schema": SCHEMA, "machine": machine_facts, **found.to_json()}
    write(report, document, arguments.out, "ops", arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
