"""Sums and dropout that wait for the norm that follows them: every way to it, and everything else that may ask."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import oxytorch as ox
import pytest
import torch
from deferred_runs import assert_near, gradients
from oxytorch import _C
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")

Part = Callable[["Block", Tensor, Tensor], Tensor]


@pytest.fixture
def sums() -> Iterator[Any]:
    yield _C.tune.DeferredSums()


class Block(nn.Module):
    """Two linear layers, and what is made of the output of one and of the residual."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 24)
        self.norm, self.rms, self.head = nn.LayerNorm(24), nn.RMSNorm(24), nn.Linear(24, 4)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.head(self.part(self, self.second(x), x.float()))
        return out


def pre_norm(block: Block, y: Tensor, x: Tensor) -> Tensor:
    x = x + F.dropout(y, 0.2)
    x = x + F.dropout(block.second(block.norm(x)), 0.2)
    return block.norm(x)


def shown(block: Block, y: Tensor, x: Tensor) -> Tensor:
    total = x + y
    assert total.shape == x.shape and total.requires_grad and total.stride() == x.stride() and total.dtype == x.dtype
    return block.norm(total)


def returned(block: Block, y: Tensor, x: Tensor) -> Tensor:
    total = x + y
    return block.norm(total) + total


def used_before(block: Block, y: Tensor, x: Tensor) -> Tensor:
    total = x + y
    return total.sin() + block.norm(total)


# By how many norms join, and how many sums and dropouts are taken: what is made.
JOINED: dict[str, tuple[int, int, Part]] = {
    "post-norm": (1, 1, lambda b, y, x: b.norm(x + y)),
    "post-norm, on the left": (1, 1, lambda b, y, x: b.norm(y + x)),
    "post-norm with dropout": (1, 2, lambda b, y, x: b.norm(x + F.dropout(y, 0.3))),
    "dropout on the left": (1, 2, lambda b, y, x: b.norm(F.dropout(y, 0.3) + x)),
    "dropout of both": (1, 3, lambda b, y, x: b.norm(F.dropout(x, 0.1) + F.dropout(y, 0.3))),
    "dropout alone": (1, 1, lambda b, y, x: b.norm(F.dropout(x, 0.3))),
    "module of dropout": (1, 2, lambda b, y, x: b.norm(x + nn.Dropout(0.5)(y))),
    "pre-norm": (2, 4, pre_norm),
    "pre-norm, sum returned": (1, 2, returned),
    "rms": (1, 1, lambda b, y, x: b.rms(x + y)),
    "rms with dropout": (1, 2, lambda b, y, x: b.rms(x + F.dropout(y, 0.3))),
    "no weights": (1, 1, lambda b, y, x: F.layer_norm(x + y, (24,))),
    "looked at": (1, 1, shown),
}
LEFT: dict[str, tuple[int, int, Part]] = {
    "no norm": (0, 1, lambda b, y, x: x + y),
    "gelu": (0, 1, lambda b, y, x: F.gelu(x + y)),
    "dropout and no sum": (0, 1, lambda b, y, x: F.dropout(x, 0.5).relu()),
    "scaled": (0, 0, lambda b, y, x: torch.add(x, y, alpha=2)),
    "broadcast": (0, 0, lambda b, y, x: x + y[:1]),
    "number": (0, 0, lambda b, y, x: b.norm(x + 1)),
    "in place": (0, 1, lambda b, y, x: (x + y).relu_()),
    "added to in place": (0, 1, lambda b, y, x: (x + y).add_(y)),
    "sum of three": (1, 2, lambda b, y, x: b.norm(x + y + y)),
    "used before the norm": (0, 1, used_before),
    "norm of two dimensions": (0, 1, lambda b, y, x: F.layer_norm(x + y, tuple(x.shape[1:]))),
    "clone": (0, 1, lambda b, y, x: (x + y).clone()),
    "cat": (0, 1, lambda b, y, x: torch.cat([x + y, x], -1)[..., :24]),
    "view": (0, 1, lambda b, y, x: b.norm((x + y).flatten(0, 1)).view(x.shape)),
    "checkpoint": (0, 1, lambda b, y, x: checkpoint(torch.sigmoid, x + y, use_reentrant=False)),
}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", [*JOINED, *LEFT])
def test_it_is_what_torch_gives(name: str, bf16: bool, sums: Any) -> None:
    joined, taken, part = (JOINED | LEFT)[name]
    model = Block(part)
    expected = gradients(copy.deepcopy(model), bf16=bf16)
    before = sums.joined(), sums.sums()
    found = gradients(model, sums.scope(), bf16=bf16)
    assert (sums.joined() - before[0], sums.sums() - before[1]) >= (joined, taken)
    assert sums.joined() - before[0] == joined
    assert_near(found, expected, 0.03 if bf16 else 1e-4)


@pytest.mark.parametrize(
    "name", ["no norm", "gelu", "dropout and no sum", "scaled", "broadcast", "in place", "clone", "cat"]
)
def test_what_no_norm_asks_for_has_torchs_bits(name: str, sums: Any) -> None:
    model = Block(LEFT[name][2])
    expected = gradients(copy.deepcopy(model))
    found = gradients(model, sums.scope())
    assert all(found[key].equal(value) for key, value in expected.items())


def test_rms_norm_of_anything_takes_the_kernel(sums: Any) -> None:
    model = Block(lambda b, y, x: b.rms(y))
    expected = gradients(copy.deepcopy(model))
    found = gradients(model, sums.scope())
    assert_near(found, expected)
    with sums.scope():
        assert "RowNorm" in model.rms(torch.randn(3, 24).requires_grad_()).grad_fn.name()


def test_torchs_encoder_layer(sums: Any) -> None:
    class Encoder(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.TransformerEncoderLayer(12, 2, 24, 0.1, batch_first=True, norm_first=first)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out

    for first in (False, True):
        model = Encoder(first)
        expected = gradients(copy.deepcopy(model))
        joined = sums.joined()
        found = gradients(model, sums.scope())
        assert sums.joined() == joined + (1 if first else 2)
        assert_near(found, expected, 1e-3)


@pytest.mark.parametrize("what", ["no grad", "inference", "no scope", "eval", "no gradient", "float64"])
def test_nothing_waits_where_it_must_not(what: str, sums: Any) -> None:
    drop, x, y = nn.Dropout(0.5), torch.randn(4, 6), torch.randn(4, 6)
    x.requires_grad_(what != "no gradient")
    if what == "float64":
        x, y = x.detach().double().requires_grad_(), y.double()
    drop.train(what != "eval")
    modes = {"no grad": torch.no_grad, "inference": torch.inference_mode}
    before = sums.sums()
    with nullcontext() if what == "no scope" else sums.scope(), modes.get(what, nullcontext)():
        drop(x)
        if what != "eval":
            x + y
    assert sums.sums() == before


def test_what_changed_before_it_was_asked_for_is_refused(sums: Any) -> None:
    x, y = torch.randn(3, 5).requires_grad_(), torch.randn(3, 5)
    with sums.scope():
        total = x + y
    y.zero_()
    with pytest.raises(RuntimeError, match=r"changed in place.*native_layer_norm"):
        total.sum()


def test_hooks_and_retained_gradients_of_the_tensor_itself(sums: Any) -> None:
    seen: list[Tensor] = []

    def part(block: Block, y: Tensor, x: Tensor) -> Tensor:
        total = x + y
        total.register_hook(seen.append)
        total.retain_grad()
        return block.norm(total) + total

    expected = gradients(Block(part))
    torchs = seen[:]
    seen.clear()
    found = gradients(Block(part), sums.scope())
    assert len(seen) == len(torchs) == 1
    torch.testing.assert_close(seen[0], torchs[0])
    assert_near(found, expected)


def test_a_hook_that_comes_after_the_norm(sums: Any) -> None:
    seen: list[Tensor] = []

    def part(block: Block, y: Tensor, x: Tensor) -> Tensor:
        total = x + y
        normed = block.norm(total)
        total.register_hook(seen.append)
        return normed + total

    expected = gradients(Block(part))
    torchs = seen[:]
    seen.clear()
    found = gradients(Block(part), sums.scope())
    torch.testing.assert_close(seen, torchs)
    assert_near(found, expected)


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_a_custom_function_that_is_given_it(p: float, sums: Any) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    def part(block: Block, y: Tensor, x: Tensor) -> Tensor:
        out: Tensor = Double.apply(x + F.dropout(y, p))
        return out

    assert_near(gradients(Block(part), sums.scope()), gradients(Block(part)))


def test_in_a_checkpoint_sums_are_left_alone(sums: Any) -> None:
    def part(block: Block, y: Tensor, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda y, x: block.norm(x + y), y, x, use_reentrant=False)
        return out

    before = sums.sums()
    found = gradients(Block(part), sums.scope())
    assert sums.sums() == before
    assert_near(found, gradients(Block(part)))


def test_transforms_and_compiled_code_are_left_alone(sums: Any) -> None:
    block, before = Block(lambda b, y, x: b.norm(x + y)), sums.sums()
    parameters = {name: p.detach() for name, p in block.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(block, parameters, (x,))
        return out.square().mean()

    with sums.scope():
        found = torch.func.grad(loss)(parameters, torch.ones(2, 3, 12))
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)(torch.ones(2, 3, 12))
    assert sums.sums() == before
    torch.testing.assert_close(compiled, block(torch.ones(2, 3, 12)))
    for name, value in torch.func.grad(loss)(parameters, torch.ones(2, 3, 12)).items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("adds", [False, True], ids=["of a tensor", "of a sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [nn.LayerNorm(24), nn.RMSNorm(24)], ids=["layer", "rms"])
def test_a_linear_layer_takes_a_norm_in_16_bits(norm: nn.Module, dtype: torch.dtype, adds: bool, sums: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 3, 24, generator=generator, requires_grad=True) for _ in range(2))
    layer = nn.Linear(24, 24)
    given = [x, *([y] if adds else []), *norm.parameters(), *layer.parameters()]

    def results(sums: Any, as_it_is: bool) -> list[Tensor]:
        with torch.autocast("cpu", dtype), sums.scope():
            total = x + y if adds else x
            normed = norm(total)
            if as_it_is:
                normed = normed.view_as(normed)  # asks for float32
            out = layer(normed)
            loss = out.float().square().sum() + total.sum()
        return [out, *torch.autograd.grad(loss, given)]

    expected = results(sums, as_it_is=True)
    sums = _C.tune.DeferredSums()  # forgets that somebody asked
    before = sums.narrowed()
    found = results(sums, as_it_is=False)
    assert sums.narrowed() == before + 1
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.equal(other)


def test_norms_that_several_layers_take_wait_no_longer(sums: Any) -> None:
    norm, one, other = nn.LayerNorm(40), nn.Linear(40, 40), nn.Linear(40, 40)
    x = torch.randn(5, 40, requires_grad=True)
    before, found = sums.narrowed(), []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16), sums.scope():
            normed = norm(x)
            loss = one(normed).sum() + other(normed).sin().sum()
        found.append(torch.autograd.grad(loss, x)[0])
    assert sums.narrowed() == before + 1
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)


def test_norms_that_are_asked_for_as_they_are_wait_no_longer(sums: Any) -> None:
    norm, layer = nn.LayerNorm(40), nn.Linear(40, 40)
    x = torch.randn(5, 40, requires_grad=True)
    before = sums.narrowed()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16), sums.scope():
            normed = norm(x)
            (layer(normed) + normed).sum().backward()
    assert sums.narrowed() == before + 1


def test_a_norm_whose_input_has_changed_is_refused(sums: Any) -> None:
    norm, layer = nn.LayerNorm(24), nn.Linear(24, 24)
    x = torch.randn(5, 24, requires_grad=True).clone()
    with torch.autocast("cpu", torch.bfloat16), sums.scope():
        normed = norm(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="changed in place"):
            layer(normed)


def test_a_hook_of_a_norm_sees_its_gradient_in_float32(sums: Any) -> None:
    norm, layer = nn.LayerNorm(24), nn.Linear(24, 24)
    x = torch.randn(5, 24, requires_grad=True)
    seen: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16), sums.scope():
        normed = norm(x)
        normed.register_hook(seen.append)
        layer(normed).sum().backward()
    assert [(t.dtype, t.shape) for t in seen] == [(torch.float32, x.shape)]


def test_scopes_lie_in_each_other(sums: Any) -> None:
    x, y = torch.randn(3, 5).requires_grad_(), torch.randn(3, 5)
    with sums.scope():
        with sums.scope():
            pass
        before = sums.sums()
        x + y
        assert sums.sums() == before + 1
    x + y
    assert sums.sums() == before + 1


def tried(model: nn.Module, x: Tensor) -> Any:
    """What the certificate says of it."""
    batch = x, torch.randint(4, (len(x),))
    plan = ox.accelerate(
        model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, [batch], level="advanced",
        strategies=["native_layer_norm"], tune_seconds=1, remember=False,
    )  # fmt: skip
    (entry,) = (e for e in plan.certificate.entries if e.strategy == "native_layer_norm")
    plan.revert()
    return entry


def test_accelerate_tries_it() -> None:
    class Mean(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean(1)

    entry = tried(Mean(pre_norm), torch.randn(32, 16, 12))
    assert entry.status in ("accepted", "rejected", "skipped"), entry
    assert "numer" not in entry.reason, entry.reason


def test_a_model_without_it_is_left_alone() -> None:
    entry = tried(nn.Sequential(nn.Linear(12, 4)), torch.randn(8, 12))
    assert entry.status == "skipped" and "neither layer nor RMS normalization" in entry.reason
