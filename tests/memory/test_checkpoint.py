"""Checkpointing against the plain model, bit for bit, and beside torch's own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch.memory import Meter, checkpoint, checkpoint_sequential
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torchs


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.norm(x)
        return x + self.mix(y + self.attention(y, y, y, need_weights=False)[0])


class Images(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Net(nn.Module):
    def __init__(self, how: Callable[..., Any] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(16), Images(16), Block(16), Images(16)])
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.how(block, x) if self.how else block(x)
        return x


def three_steps(how: Callable[..., Any] | None, autocast: bool) -> list[Tensor]:
    model = Net(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 10, 16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return [*found, *(b.clone() for b in model.buffers()), torch.rand(4)]


@pytest.mark.parametrize("autocast", [False, True])
def test_every_bit_is_that_of_the_plain_model(autocast: bool) -> None:
    plain, kept = three_steps(None, autocast), three_steps(checkpoint, autocast)
    assert len(plain) == len(kept)
    assert all(a.equal(b) for a, b in zip(plain, kept, strict=True)), "losses, gradients, buffers and random numbers"


def test_torchs_own_moves_running_statistics_twice() -> None:
    """What the comparison above would show of an implementation that does not put buffers back."""

    def own(function: Callable[..., Any], *args: Any) -> Any:
        return torchs(function, *args, use_reentrant=False)

    plain, twice = three_steps(None, False), three_steps(own, False)
    assert not all(a.equal(b) for a, b in zip(plain, twice, strict=True))


def peak(how: Callable[..., Any] | None) -> int:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]

    def step() -> None:
        x = torch.randn(256, 64)
        for block in blocks:
            x = how(block, x) if how else block(x)
        x.sum().backward()

    step()
    with Meter() as meter:
        step()
    return meter.peak_bytes


def test_it_keeps_no_more_than_torchs() -> None:
    ours, torch_s, plain = peak(checkpoint), peak(lambda f, x: torchs(f, x, use_reentrant=False)), peak(None)
    assert ours <= torch_s < 0.45 * plain


def test_arguments_and_results_of_any_form() -> None:
    def function(a: Tensor, pair: tuple[Tensor, int], *, scale: float, options: dict[str, Tensor]) -> dict[str, Any]:
        out = (a * pair[0]).exp() * scale + options["shift"].sin() ** pair[1]
        return {"out": out, "others": [a.cos(), pair[1]], "none": None}

    found = []
    for how in (None, checkpoint):
        torch.manual_seed(0)
        a, b, c = (torch.randn(5, requires_grad=True) for _ in range(3))
        args, kwargs = (a, (b, 3)), {"scale": 0.5, "options": {"shift": c}}
        out: Any = how(function, *args, **kwargs) if how else function(*args, **kwargs)
        assert out["none"] is None and out["others"][1] == 3
        (out["out"].sum() + out["others"][0].prod()).backward()
        found.append([out["out"].detach(), a.grad, b.grad, c.grad])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_functions_may_nest_and_be_differentiated_again() -> None:
    def nested(x: Tensor, depth: int) -> Tensor:
        return x.sin() * x if depth == 0 else checkpoint(lambda y: nested(y.cos() + y, depth - 1), x)

    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: nested(t, 4), x)
    assert torch.autograd.gradgradcheck(lambda t: nested(t, 4), x)


def test_what_the_function_raises_the_second_time_is_raised() -> None:
    calls = []

    def fails(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("second")
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(KeyError, match="second"):
        checkpoint(fails, x).sum().backward()
    state = torch.get_rng_state()
    checkpoint(lambda t: t.sin(), x).sum().backward()
    assert torch.get_rng_state().equal(state)


def test_a_function_that_catches_everything_ends_all_the_same() -> None:
    def stubborn(x: Tensor) -> Tensor:
        try:
            y = x.sin()
        except Exception:
            y = x
        return y.exp()

    x = torch.ones(3, requires_grad=True)
    checkpoint(stubborn, x).sum().backward()
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    assert x.grad is not None and x.grad.equal(expected)


def test_what_is_not_the_same_again_is_refused() -> None:
    calls = []

    def other(x: Tensor) -> Tensor:
        calls.append(1)
        return x.repeat(len(calls)).sin()

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="did not do the same when it was run again"):
        checkpoint(other, x).sum().backward()
    y = x * 1
    out = checkpoint(torch.sin, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_of_others_keep_their_place() -> None:
    packed: list[int] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t.numel())
        return t

    def function(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    checkpoint(function, x).sum().backward()
    assert packed == [3, 3], "the innermost hooks keep both, and nothing is left to compute again"
    packed.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = checkpoint(lambda t: t.sin().exp(), x)
    assert packed == [3], "the input alone"
    out.sum().backward()


def test_an_offloading_of_inputs_works_around_it() -> None:
    model = Net(checkpoint)
    x = torch.randn(4, 10, 16)
    with torch.autograd.graph.save_on_cpu():
        loss = model(x).sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_compiled_code_calls_it() -> None:
    layer = nn.Linear(8, 8)

    def step(x: Tensor) -> Tensor:
        return checkpoint(lambda t: layer(t).sin(), x).sum()

    x = torch.randn(4, 8, requires_grad=True)
    step(x).backward()
    assert x.grad is not None
    plain = x.grad.clone()
    x.grad = None
    torch.compile(step, backend="aot_eager")(x).backward()
    assert torch.allclose(x.grad, plain)


def test_transforms_of_torch_func_are_refused_in_words() -> None:
    with pytest.raises(NotImplementedError, match="torch refuses hooks of saved tensors here"):
        torch.func.grad(lambda t: checkpoint(torch.sin, t).sum())(torch.ones(3))


def test_segments_of_a_sequence() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(8, 8), nn.Tanh())))
    x = torch.randn(4, 8)
    net(x).sum().backward()
    plain = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    for segments in (1, 3, 10):
        net.zero_grad()
        checkpoint_sequential(net, segments, x).sum().backward()
        assert all(p.grad is not None and p.grad.equal(g) for p, g in zip(net.parameters(), plain, strict=True))
    assert checkpoint_sequential([torch.sin, torch.cos], 2, x).equal(x.sin().cos())
    for segments in (0, 11):
        with pytest.raises(ValueError, match="give 1 to 10"):
            checkpoint_sequential(net, segments, x)


def test_without_gradients_it_only_calls() -> None:
    with torch.no_grad():
        assert checkpoint(lambda x: (x, 1), torch.ones(2))[1] == 1
    with torch.inference_mode():
        assert checkpoint(torch.sin, torch.ones(2)).shape == (2,)


def test_a_graph_that_is_dropped_leaves_nothing() -> None:
    model = Net(checkpoint)
    x = torch.randn(4, 10, 16)
    model(x).sum().backward()
    model.zero_grad()
    with Meter() as meter:
        out = model(x)
        del out
        assert meter.live_bytes <= 0
        model(x).sum().backward()
        model.zero_grad()
        assert meter.live_bytes <= 0


def test_a_forked_child_computes_again() -> None:
    x = torch.ones(4, requires_grad=True)
    checkpoint(torch.sin, x).sum().backward()
    with Meter():
        child = os.fork()
        if child == 0:
            y = torch.ones(4, requires_grad=True)
            checkpoint(lambda t: t.sin().exp(), y).sum().backward()
            os._exit(0 if y.grad is not None else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_do_not_meet() -> None:
    def train(how: Callable[..., Any] | None) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        layer = nn.Linear(32, 32, bias=False)
        layer.weight.data = torch.randn(32, 32, generator=generator)
        x = torch.randn(8, 32, generator=generator)
        for _ in range(20):
            (how(lambda t: layer(t).sin(), x) if how else layer(x).sin()).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(train(checkpoint))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(grad.equal(train(None)) for grad in found)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
        return grad * (first + second)


def test_a_function_of_python_may_ask_for_what_it_saved_twice() -> None:
    x = torch.arange(3.0, requires_grad=True)
    checkpoint(Twice.apply, x).sum().backward()
    assert x.grad is not None and x.grad.equal(2 * x.detach())


@pytest.mark.parametrize("kind", ["lstm", "embedding", "compiled", "weight norm", "spectral norm"])
def test_modules_of_other_kinds(kind: str) -> None:
    def made() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        if kind == "lstm":
            return nn.LSTM(8, 16, 2, dropout=0.3, batch_first=True), torch.randn(3, 5, 8)
        if kind == "embedding":
            return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten()), torch.randint(9, (5, 2))
        layer = nn.Linear(8, 8)
        if kind == "compiled":
            return torch.compile(nn.Sequential(layer, nn.GELU()), backend="aot_eager"), torch.randn(3, 8)  # type: ignore[return-value]
        wrap = (
            nn.utils.parametrizations.weight_norm if kind == "weight norm" else nn.utils.parametrizations.spectral_norm
        )
        return wrap(layer), torch.randn(3, 8)

    ends = []
    for how in (None, checkpoint):
        model, x = made()
        for _ in range(3):
            out = how(model, x) if how else model(x)
            (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        grads = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
        ends.append([*grads, *model.state_dict().values(), torch.rand(3)])
    assert all(a.equal(b) for a, b in zip(*ends, strict=True))


def test_a_long_chain_is_torn_down() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x
    for _ in range(20_000):
        y = checkpoint(torch.sin, y)
    y.sum().backward()
    assert x.grad is not None
    for _ in range(20_000):
        y = checkpoint(torch.sin, y)
    del y


def test_it_is_public() -> None:
    assert ox.memory.checkpoint is checkpoint
