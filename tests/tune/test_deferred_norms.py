"""Batch normalization that waits for what follows it: every way to it, and everything else that may ask."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import _C
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")

Follow = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture
def norms() -> Iterator[Any]:
    yield _C.tune.DeferredNorms()


class Block(nn.Module):
    """A convolution, its normalization, and what follows."""

    def __init__(self, follow: Follow) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 20, 3, padding=1, bias=False), nn.BatchNorm2d(20)
        self.side = nn.Conv2d(3, 20, 1)
        self.head = nn.Linear(20, 4)
        self.follow = follow
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = self.follow(self.norm(self.conv(x)), self.side(x))
        return self.head(y.float().mean((2, 3)))


def relu_in_place(y: Tensor, side: Tensor) -> Tensor:
    y += side
    return F.relu(y, inplace=True)


def shown(y: Tensor, side: Tensor) -> Tensor:
    assert y.shape == side.shape and y.requires_grad and y.stride() == side.stride()
    return F.relu(y)


# By how many operators join: what follows.
JOINED: dict[str, tuple[int, Follow]] = {
    "relu": (1, lambda y, side: F.relu(y)),
    "module": (1, lambda y, side: nn.ReLU()(y)),
    "method": (1, lambda y, side: y.relu()),
    "in place": (1, lambda y, side: F.relu(y, inplace=True)),
    "sum": (1, lambda y, side: y + side),
    "sum on the right": (1, lambda y, side: side + y),
    "sum and relu": (2, lambda y, side: F.relu(y + side)),
    "sum and relu in place": (2, relu_in_place),
    "relu and pool": (2, lambda y, side: F.max_pool2d(F.relu(y), 2)),
    "pool": (1, lambda y, side: nn.MaxPool2d((1, 2))(y)),
    "relu, pool of 3": (2, lambda y, side: F.max_pool2d(y.relu(), 3, 3)),
    "looked at": (1, shown),
}
LEFT: dict[str, tuple[int, Follow]] = {
    "gelu": (0, lambda y, side: F.gelu(y)),
    "sum of two": (0, lambda y, side: torch.add(y, side, alpha=2)),
    "scaled": (0, lambda y, side: y * 2 + side),
    "number": (0, lambda y, side: y + 1),
    "broadcast": (0, lambda y, side: y + side[:1]),
    "in place on another": (0, lambda y, side: side.add_(y)),
    "pool that overlaps": (1, lambda y, side: F.max_pool2d(F.relu(y), 3, 2, 1)),
    "pool of a sum": (2, lambda y, side: F.max_pool2d(F.relu(y + side), 2)),
    "relu twice": (1, lambda y, side: F.relu(F.relu(y))),
    "used twice": (1, lambda y, side: F.relu(y) + y),
    "clone": (0, lambda y, side: y.clone()),
    "cat": (0, lambda y, side: torch.cat([y, side], 1)[:, :20]),
    "checkpoint": (0, lambda y, side: checkpoint(torch.sigmoid, y, use_reentrant=False)),
}


def gradients(model: nn.Module, scope: Any = None, bf16: bool = False, size: int = 12) -> dict[str, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(5, 3, size, size).contiguous(memory_format=torch.channels_last).requires_grad_()
    with scope or nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = model(x)
    output.square().mean().backward()
    found = {"output": output.detach(), "input": x.grad}
    found |= {name: p.grad for name, p in model.named_parameters()}
    found |= {name: b.clone().float() for name, b in model.named_buffers()}
    return {name: t for name, t in found.items() if t is not None}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", [*JOINED, *LEFT])
def test_it_is_what_torch_gives(name: str, bf16: bool, norms: Any) -> None:
    count, follow = (JOINED | LEFT)[name]
    model = Block(follow)
    other = copy.deepcopy(model)
    expected = gradients(other, bf16=bf16)
    layers, joined = norms.layers(), norms.joined()
    found = gradients(model, norms.scope(), bf16=bf16)
    assert norms.layers() == layers + 1
    assert norms.joined() == joined + count
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        tolerance = 0.03 if bf16 else 1e-4
        assert float((found[key] - value).norm()) <= tolerance * float(value.norm()) + 1e-6, key


def test_a_basic_block_as_torchvision_has_it(norms: Any) -> None:
    class Basic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
            self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
            self.down = nn.Sequential(nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16))
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            out += self.down(x)
            return self.relu(out).mean((2, 3))

    model = Basic().to(memory_format=torch.channels_last)
    expected = gradients(copy.deepcopy(model))
    joined = norms.joined()
    found = gradients(model, norms.scope())
    assert norms.joined() == joined + 3
    for key, value in expected.items():
        assert float((found[key] - value).norm()) <= 1e-4 * float(value.norm()) + 1e-6, key


@pytest.mark.parametrize("what", ["eval", "no grad", "contiguous", "no scope", "inference"])
def test_nothing_waits_where_it_must_not(what: str, norms: Any) -> None:
    model = Block(lambda y, side: F.relu(y))
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    layers = norms.layers()
    if what == "eval":
        model.eval()
    if what == "contiguous":
        model.to(memory_format=torch.contiguous_format)
        x = x.contiguous()
    modes = {"no grad": torch.no_grad, "inference": torch.inference_mode}
    with nullcontext() if what == "no scope" else norms.scope(), modes.get(what, nullcontext)():
        model(x)
    assert norms.layers() == layers
    with torch.no_grad():
        assert norms.layers() == layers


def test_values_are_of_the_weights_at_the_time_of_the_call(norms: Any) -> None:
    norm, x = nn.BatchNorm2d(5), torch.randn(3, 5, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    expected = copy.deepcopy(norm)(x)
    with norms.scope():
        y, z = norm(x), F.relu(norm(x))
    with torch.no_grad():
        norm.weight.mul_(3)
        norm.bias.add_(1)
    torch.testing.assert_close(y.detach() + 0, expected.detach())
    (grad,) = torch.autograd.grad(z.square().sum(), x)
    (right,) = torch.autograd.grad(F.relu(expected).square().sum(), x)
    torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-5)


def test_an_input_that_changed_is_refused(norms: Any) -> None:
    norm, x = nn.BatchNorm2d(5), torch.randn(3, 5, 4, 4).contiguous(memory_format=torch.channels_last)
    with norms.scope():
        y = norm(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place.*native_batch_norm"):
        y.sum()


def test_hooks_and_retained_gradients_of_the_tensor_itself(norms: Any) -> None:
    seen: list[Tensor] = []

    def follow(y: Tensor, side: Tensor) -> Tensor:
        y.register_hook(seen.append)
        y.retain_grad()
        seen.append(y)
        return F.relu(y)

    expected = gradients(Block(follow))
    torchs = seen[:]
    seen.clear()
    found = gradients(Block(follow), norms.scope())
    assert len(seen) == len(torchs) == 2
    torch.testing.assert_close(seen[1], torchs[1])
    torch.testing.assert_close(found["input"], expected["input"], rtol=1e-3, atol=1e-6)


def test_a_custom_function_that_is_given_it(norms: Any) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    expected = gradients(Block(lambda y, side: Double.apply(y)))
    found = gradients(Block(lambda y, side: Double.apply(y)), norms.scope())
    for key, value in expected.items():
        assert float((found[key] - value).norm()) <= 1e-4 * float(value.norm()) + 1e-6, key


def test_in_a_checkpoint_layers_are_left_alone(norms: Any) -> None:
    """It counts what operators keep, now and when it runs again."""

    def follow(y: Tensor, side: Tensor) -> Tensor:
        norm = nn.BatchNorm2d(20).to(memory_format=torch.channels_last)
        return checkpoint(lambda y, side: F.relu(norm(F.relu(y + side))), y, side, use_reentrant=False)

    expected, layers = gradients(Block(follow)), norms.layers()
    found = gradients(Block(follow), norms.scope())
    assert norms.layers() == layers + 1
    for key, value in expected.items():
        assert float((found[key] - value).norm()) <= 1e-4 * float(value.norm()) + 1e-6, key


def test_it_outlives_its_owner() -> None:
    owner = _C.tune.DeferredNorms()
    norm, x = nn.BatchNorm2d(5), torch.randn(3, 5, 4, 4).contiguous(memory_format=torch.channels_last)
    with owner.scope():
        y = norm(x)
    del owner
    torch.testing.assert_close(F.relu(y), F.relu(copy.deepcopy(norm)(x)))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(x[:1, :, :1, :1])


def tried(model: nn.Module, x: Tensor) -> Any:
    """What the certificate says of it."""
    batch = x, torch.randint(4, (len(x),))
    plan = ox.accelerate(
        model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, [batch], level="advanced",
        strategies=["channels_last", "native_batch_norm"], tune_seconds=1, max_growth=2.0, remember=False,
    )  # fmt: skip
    (entry,) = (e for e in plan.certificate.entries if e.strategy == "native_batch_norm")
    plan.revert()
    return entry


def test_accelerate_tries_it() -> None:
    entry = tried(Block(lambda y, side: F.relu(y + side)), torch.randn(32, 3, 24, 24))
    assert entry.status in ("accepted", "rejected", "skipped"), entry
    assert "numer" not in entry.reason, entry.reason


def test_a_model_without_it_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    entry = tried(model, torch.randn(4, 3, 8, 8))
    assert entry.status == "skipped" and "no batch normalization" in entry.reason
