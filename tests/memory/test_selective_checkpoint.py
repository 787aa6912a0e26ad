"""Selective checkpointing against the plain function, bit for bit, and what it leaves out to the byte."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oxytorch.memory import Meter, checkpoint, selective_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

Function = Callable[..., Any]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.joint, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, 4), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Images(nn.Module):
    """Convolutions with normalisation, a residual, and activations in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)
        )
        self.two = nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width), nn.Hardswish())
        self.three = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=width), nn.GroupNorm(4, width), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x))
        y = F.interpolate(F.max_pool2d(F.pad(y, (1, 1, 1, 1)), 2), size=x.shape[-2:])
        return torch.relu_(self.three(y) + x)


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x[:, 0])
        out = []
        for one in x.unbind(1):
            i, f, g, o = self.gates(torch.cat([one, h], -1)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            out.append(h)
        return torch.stack(out, 1)


class Experts(nn.Module):
    """Which expert a token comes to depends on the data."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 96), nn.SiLU(), nn.Linear(96, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()
            out = out.index_add(0, rows, (expert(flat[rows]) * weight[rows, None]).to(out.dtype))
        return x + out.view_as(x)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (lambda: Layer(64), (4, 24, 64)),
    "images": (lambda: Images(16), (4, 16, 18, 18)),
    "recurrent": (lambda: Recurrent(64), (24, 8, 64)),
    "experts": (lambda: Experts(64), (4, 48, 64)),
}


def three_steps(
    kind: str, how: Function | None, *, autocast: bool = False, channels_last: bool = False
) -> list[Tensor]:
    make, shape = MODULES[kind]
    torch.manual_seed(0)
    blocks = nn.ModuleList(make() for _ in range(3))
    if channels_last:
        blocks = blocks.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(shape).requires_grad_()
        y = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for block in blocks:
                y = how(block, y) if how else block(y)
        loss = y.float().square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *(p.grad.clone() for p in blocks.parameters() if p.grad is not None)]
        optimizer.step()
    return [*found, *(b.clone() for b in blocks.buffers()), torch.rand(4)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(a.equal(b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODULES)
def test_every_bit_is_that_of_the_plain_function(kind: str, autocast: bool) -> None:
    plain = three_steps(kind, None, autocast=autocast)
    assert equal(plain, three_steps(kind, selective_checkpoint, autocast=autocast)), (
        "gradients, buffers, random numbers"
    )
    assert equal(
        plain, three_steps(kind, lambda f, x: checkpoint(lambda y: selective_checkpoint(f, y), x), autocast=autocast)
    )
    nested = three_steps(kind, lambda f, x: selective_checkpoint(lambda y: checkpoint(f, y), x), autocast=autocast)
    assert equal(plain, nested)


def test_every_bit_in_channels_last() -> None:
    assert equal(
        three_steps("images", None, channels_last=True),
        three_steps("images", selective_checkpoint, channels_last=True),
    )


def kept_bytes(function: Function, x: Tensor, how: Function | None) -> int:
    """What lives after forward beyond input and result."""
    gc.collect()
    with Meter() as meter:
        out = how(function, x) if how else function(x)
        live = meter.live_bytes
    return live - out.untyped_storage().nbytes()


def test_what_is_left_out_to_the_byte() -> None:
    rows, width = 512, 256
    x = torch.randn(rows, width, requires_grad=True)
    of_x = rows * width * 4
    norm, narrow = nn.LayerNorm(width), nn.Linear(width, width)
    # What the linear layer multiplies, and the mean and deviation of each row.
    assert kept_bytes(lambda t: narrow(norm(t)), x, None) == of_x + 2 * rows * 4
    assert kept_bytes(lambda t: narrow(norm(t)), x, selective_checkpoint) == 2 * rows * 4
    # GELU keeps what goes in; the linear layer would keep what comes out.
    gelu = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    assert kept_bytes(gelu, x, None) == 2 * of_x
    assert kept_bytes(gelu, x, selective_checkpoint) == of_x
    # A mask of dropout is a bit an element; the elements are made by the same product again.
    dropped = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.Linear(width, width))
    assert kept_bytes(dropped, x, None) == 2 * of_x
    assert kept_bytes(dropped, x, selective_checkpoint) == of_x + of_x // 32
    # Comparisons and their like.
    assert kept_bytes(lambda t: narrow(torch.where(t > 0, t, -t)), x, None) == of_x + of_x // 4
    assert kept_bytes(lambda t: narrow(torch.where(t > 0, t, -t)), x, selective_checkpoint) == 0


def test_a_transformer_layer_keeps_under_two_thirds() -> None:
    torch.manual_seed(0)
    layer, x = Layer(128), torch.randn(8, 64, 128, requires_grad=True)
    assert kept_bytes(layer, x, selective_checkpoint) < 0.64 * kept_bytes(layer, x, None)


def test_small_tensors_and_what_others_hold_are_kept() -> None:
    small = torch.randn(16, 128, requires_grad=True)
    linear = nn.Linear(128, 128)
    plain, ours = (kept_bytes(lambda t: linear(t.exp()), small, how) for how in (None, selective_checkpoint))
    assert ours == plain
    held = []

    def holds(t: Tensor) -> Tensor:
        held.append(t.exp())
        return linear(held[-1])

    x = torch.randn(512, 128, requires_grad=True)
    assert kept_bytes(holds, x, selective_checkpoint) == x.nbytes, "it lives anyway"


def test_gradients_may_be_asked_for_again() -> None:
    torch.manual_seed(0)
    layer, x = Layer(64, dropout=0.0), torch.randn(4, 32, 64, requires_grad=True)
    found = []
    for how in (None, selective_checkpoint):
        out = (how(layer, x) if how else layer(x)).square().sum()
        first = torch.autograd.grad(out, x, retain_graph=True)[0]
        again = torch.autograd.grad(out, x, retain_graph=True)[0]
        assert first.equal(again)
        found.append([first, *torch.autograd.grad(out, list(layer.parameters()))])
    assert equal(*found)


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)

    def function(t: Tensor) -> Tensor:
        return F.layer_norm(F.gelu(t).tanh() * torch.where(t > 0, t, t.sin()), (64,)) @ weight

    found = []
    for how in (None, selective_checkpoint):
        out = how(function, x) if how else function(x)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found.append(list(torch.autograd.grad(first.sin().sum(), (x, weight))))
    assert equal(*found)


def test_what_is_changed_in_place_is_refused_in_words() -> None:
    x = torch.randn(512, 64, requires_grad=True)
    linear = nn.Linear(64, 64)
    scale = torch.full((512, 64), 2.0)
    out = selective_checkpoint(lambda t: linear((t * scale).exp()), x)
    scale.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place after forward"):
        out.sum().backward()
    wide = torch.randn(512, 64)
    out = selective_checkpoint(lambda t: linear(t * wide), x)
    wide.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        out.sum().backward()


def test_in_place_operators_within_the_function() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 64)

    def function(t: Tensor) -> Tensor:
        y = linear(t)
        y.mul_(2).relu_()
        z = linear(y.exp())
        z[:, 3].add_(1)
        z.t().mul_(0.5)
        return linear(z.clone().sigmoid_())

    x = torch.randn(512, 64, requires_grad=True)
    found = []
    for how in (None, selective_checkpoint):
        (how(function, x) if how else function(x)).sum().backward()
        found.append([x.grad, linear.weight.grad.clone()])
        x.grad = None
        linear.zero_grad()
    assert equal(*found)


def test_hooks_of_others_and_modes() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 64), torch.randn(512, 64, requires_grad=True)

    def function(t: Tensor) -> Tensor:
        return linear(t.exp())

    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        out = selective_checkpoint(function, x)
    out.sum().backward()
    ours = x.grad.clone()
    x.grad = None
    function(x).sum().backward()
    assert ours.equal(x.grad)
    with torch.no_grad():
        assert not selective_checkpoint(function, x).requires_grad
    with torch.inference_mode():
        selective_checkpoint(function, x)
    with torch.profiler.profile() as profiler:
        selective_checkpoint(function, x).sum().backward()
    assert any(event.key == "aten::exp" and event.count >= 2 for event in profiler.key_averages()), "made again"
    batched = torch.vmap(torch.func.grad(lambda t: selective_checkpoint(function, t).sum()))(x.detach()[None])
    assert torch.allclose(batched[0], ours)


def test_an_exception_leaves_nothing_behind() -> None:
    x = torch.randn(512, 64, requires_grad=True)

    def fails(t: Tensor) -> Tensor:
        t.exp().sin()
        raise KeyError("no")

    with pytest.raises(KeyError):
        selective_checkpoint(fails, x)
    y = x.exp()
    with Meter() as meter:
        z = y.sin().cos()
        assert meter.live_bytes == 2 * x.nbytes, "nothing is left out any more"
    z.sum().backward()


def test_threads_have_functions_of_their_own() -> None:
    torch.manual_seed(0)
    layers = [Layer(64, dropout=0.0) for _ in range(4)]
    x = torch.randn(4, 32, 64)
    results: dict[int, list[Tensor]] = {}

    def run(i: int) -> None:
        t = x.clone().requires_grad_()
        for _ in range(5):
            t.grad = None
            selective_checkpoint(layers[i], t).sum().backward()
        results[i] = [t.grad]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, layer in enumerate(layers):
        t = x.clone().requires_grad_()
        layer(t).sum().backward()
        assert equal(results[i], [t.grad])


UNARY: list[Function] = [
    torch.exp, torch.sin, torch.tanh, torch.sigmoid, F.gelu, F.silu, F.relu, F.elu, F.softplus, F.hardtanh, torch.abs,
    lambda t: t * 0.5, lambda t: t / 3, lambda t: t + 1, lambda t: t.softmax(-1), lambda t: t.log_softmax(0),
    lambda t: F.layer_norm(t, t.shape[-1:]), lambda t: t.clamp(-1, 1), lambda t: F.dropout(t, 0.2),
    lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2), lambda t: t.to(torch.float64).to(torch.float32),
    lambda t: torch.where(t > 0, t, t.square()), lambda t: t.clone().relu_(), lambda t: t.flip(-1),
    lambda t: t.roll(1, 0),
    lambda t: torch.cat([t[::2], t[1::2]]), lambda t: F.dropout(t, 0.5).mul_(2), lambda t: t.clone().sin_().neg_(),
    lambda t: F.pad(t, (1, 0))[:, 1:], lambda t: t.masked_fill(t < -1, 0.0),
    lambda t: t.clone().index_fill_(0, torch.tensor([1]), 0),
]  # fmt: skip
BINARY: list[Function] = [
    torch.add, torch.mul, torch.sub, torch.maximum, torch.atan2, torch.mm, lambda a, b: a.addcmul(a, b, value=0.3),
    lambda a, b: torch.lerp(a, b, 0.2), F.linear, lambda a, b: a.clone().add_(b), lambda a, b: a * b[:1],
    lambda a, b: torch.stack([a, b]).sum(0), lambda a, b: torch.cat([a, b], -1)[:, : a.shape[1]],
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_random_functions(seed: int) -> None:
    choice = random.Random(seed)
    steps = [(choice.random() < 0.6, choice.randrange(1 << 16), choice.randrange(1 << 16)) for _ in range(14)]
    size = choice.choice([80, 96, 130])

    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        values = list(inputs)
        for is_unary, one, other in steps:
            a, b = values[-1 - one % min(len(values), 3)], values[other % len(values)]
            made = UNARY[one % len(UNARY)](a) if is_unary else BINARY[one % len(BINARY)](a, b)
            values.append(made.tanh() if made.abs().max() > 50 else made)
        return values[-1], values[-2]

    found = []
    for how in (None, selective_checkpoint):
        torch.manual_seed(seed)
        inputs = [torch.randn(size, size, requires_grad=True) for _ in range(3)]
        one, other = how(function, *inputs) if how else function(*inputs)
        (one.sum() + other.square().sum()).backward()
        found.append([one.detach(), other.detach(), *(t.grad for t in inputs if t.grad is not None), torch.rand(3)])
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(*found, strict=True))
