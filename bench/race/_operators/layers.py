"""Linear layers, convolutions, tables, normalization and activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import oxytorch as ox
import torch
from _race import Contender
from torch import Tensor, nn
from torch.nn import functional as F

from . import BF16_WEIGHTS, COMPILED, DTYPES, EAGER, OURS, Case, passes_of, step_of

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
# Batch, channels and side of an image; what is joined beside ReLU.
NORMS = [
    ((64, 64, 64), "pool"), ((64, 64, 32), ""), ((64, 64, 32), "sum"), ((64, 128, 16), "sum"), ((64, 256, 8), "sum"),
    ((32, 64, 56), ""), ((32, 256, 56), "sum"),
]  # fmt: skip
# Batch, inputs, side of an image; outputs, side of the kernel, stride.
CONVOLUTIONS = [
    ((64, 64, 32), (64, 3, 1)), ((64, 64, 32), (128, 3, 2)), ((64, 64, 32), (128, 1, 2)),
    ((64, 128, 16), (128, 3, 1)), ((64, 128, 16), (256, 3, 2)), ((64, 256, 8), (256, 3, 1)),
    ((32, 64, 56), (64, 3, 1)), ((32, 256, 56), (64, 1, 1)), ((32, 64, 56), (256, 1, 1)),
    ((32, 128, 28), (128, 3, 1)), ((32, 256, 14), (256, 3, 1)), ((32, 512, 7), (512, 3, 1)),
]  # fmt: skip
# Rows, columns.
SUMS, ACTIVATIONS = (4096, 768), (4096, 3072)
NORMALIZED = {"layer norm": 0.0, "layer norm, dropout": 0.1, "RMS norm": 0.0}
ACTIVATED = ("gelu", "gelu by tanh", "swiglu")
# Numbers, rows of the table, columns, the share that falls on one row.
EMBEDDINGS = [
    (2048, 256, 256, 0.0), (8192, 32_000, 1024, 0.0), (65_536, 100_000, 32, 0.0), (65_536, 1000, 64, 0.5),
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

    return passes_of(forward, backward, list(calls))


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

    return passes_of(forward, backward, list(calls))


def convolution(images: tuple[int, int, int], layer: tuple[int, int, int]) -> list[Contender]:
    """The gradient of the weight alone: torch's kernels make the others for both."""
    (batch, inputs, side), (outputs, kernel, stride) = images, layer
    generator, padding = torch.Generator().manual_seed(1), kernel // 2

    def image(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).bfloat16().contiguous(memory_format=torch.channels_last)

    to = (side + 2 * padding - kernel) // stride + 1
    given = image(batch, outputs, to, to), image(batch, inputs, side, side), image(outputs, inputs, kernel, kernel)
    apart = [stride, stride], [padding, padding], [1, 1], False, [0, 0], 1, [False, True, False]
    native = ox._C.tune.NativeOperators()

    def before(name: str) -> None:
        native.uninstall()
        if name == OURS:
            (report,) = native.install(["convolution"])
            assert report.installed, report.reason

    step = partial(torch.ops.aten.convolution_backward, *given, None, *apart)
    return [Contender(name, {"step": step}, before=partial(before, name)) for name in (OURS, EAGER)]


def embedding(count: int, rows: int, columns: int, share: float, dtype: torch.dtype) -> list[Contender]:
    """The gradient alone: the rows themselves are torch's for both."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(rows, (count,), generator=generator)
    numbers[torch.rand(count, generator=generator) < share] = rows // 3
    grad = torch.randn(count, columns, generator=generator).to(dtype)
    gradients = {OURS: torch.ops.oxytorch.embedding_gradient, EAGER: torch.ops.aten.embedding_dense_backward}
    given = {OURS: (rows, -1), EAGER: (rows, -1, False)}
    return [Contender(name, {"step": partial(call, grad, numbers, *given[name])}) for name, call in gradients.items()]


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


def cases(quick: bool) -> Iterator[Case]:
    for sizes in LINEARS[:1] if quick else LINEARS:
        yield Case("linear {:,} x {:,} to {:,}".format(*sizes), partial(linear, sizes), products=torch.bfloat16)
    count, width, wide = (2, 64, 128) if quick else STACK
    for rows in BATCHES[:1] if quick else BATCHES:
        case = f"accumulated layers, {count} of {width:,} x {wide:,}, {rows:,} rows"
        make = partial(accumulated_layers, rows, count, width, wide)
        yield Case(case, make, ox.ops.PackedWeights, torch.bfloat16)
    for count, rows, columns in [(16, 300, 20)] if quick else TABLES:
        case = f"accumulated table of {rows:,} x {columns:,}, {count:,} indices"
        yield Case(case, partial(accumulated_table, count, rows, columns))
    for image, follower in NORMS[:1] if quick else NORMS:
        batch, channels, side = image
        case = f"norm {batch} x {channels} x {side} x {side}{f', {follower}' if follower else ''}"
        yield Case(case, partial(norm, image, follower, quick))
    for image, layer in CONVOLUTIONS[:1] if quick else CONVOLUTIONS:
        case = "convolution {} x {} x {} x {} to {}, {} x {}, stride {}".format(
            *image, image[2], layer[0], layer[1], layer[1], layer[2]
        )
        yield Case(case, partial(convolution, image, layer), products=torch.bfloat16)
    for name, dtype in DTYPES.items():
        for kind in NORMALIZED:
            yield Case(f"sum {name}, {kind}, {SUMS[0]:,} x {SUMS[1]:,}", partial(summed, kind, dtype, quick))
        for kind in ACTIVATED:
            case = f"activation {name}, {kind}, {ACTIVATIONS[0]:,} x {ACTIVATIONS[1]:,}"
            yield Case(case, partial(activated, kind, dtype, quick))
        for count, rows, columns, share in EMBEDDINGS[:1] if quick else EMBEDDINGS:
            spread = f"{share:.0%} on one row" if share else "even"
            case = f"embedding {name}, {count:,} of {rows:,} x {columns:,}, {spread}"
            yield Case(case, partial(embedding, count, rows, columns, share, dtype))
