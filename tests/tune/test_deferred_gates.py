"""Activations that wait for the product that follows them: every way to it, and everything else that may ask."""

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

Part = Callable[["Mlp", Tensor], Tensor]


@pytest.fixture
def gates() -> Iterator[Any]:
    yield _C.tune.DeferredGates()


class Mlp(nn.Module):
    """What `part` makes of two linear layers of one input, and a head."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.both = nn.Linear(12, 24), nn.Linear(12, 24), nn.Linear(12, 48)
        self.silu, self.head = nn.SiLU(), nn.Linear(24, 4)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.part(self, x).to(x.dtype))
        return out


def of_halves(mlp: Mlp, x: Tensor) -> Tensor:
    value, gate = mlp.both(x).chunk(2, -1)
    out: Tensor = value * F.gelu(gate)
    return out


def shown(mlp: Mlp, x: Tensor) -> Tensor:
    gate = mlp.gate(x)
    active = F.silu(gate)
    assert active.shape == gate.shape and active.requires_grad and active.stride() == gate.stride()
    assert active.dtype == gate.dtype and active.grad_fn is not None
    out: Tensor = active * mlp.up(x)
    return out


def used_twice(mlp: Mlp, x: Tensor) -> Tensor:
    active = F.silu(mlp.gate(x))
    return active * mlp.up(x) + active


def asked_before(mlp: Mlp, x: Tensor) -> Tensor:
    active = F.silu(mlp.gate(x))
    return active.sin() + active * mlp.up(x)


def of_another(mlp: Mlp, x: Tensor) -> Tensor:
    return F.silu(mlp.gate(x)) * F.gelu(mlp.up(x))


# By how many products join, and how many activations are taken: what is made.
JOINED: dict[str, tuple[int, int, Part]] = {
    "swiglu": (1, 1, lambda m, x: F.silu(m.gate(x)) * m.up(x)),
    "on the right": (1, 1, lambda m, x: m.up(x) * F.silu(m.gate(x))),
    "module": (1, 1, lambda m, x: m.silu(m.gate(x)) * m.up(x)),
    "geglu": (1, 1, lambda m, x: F.gelu(m.gate(x)) * m.up(x)),
    "geglu tanh": (1, 1, lambda m, x: F.gelu(m.gate(x), approximate="tanh") * m.up(x)),
    "halves": (1, 1, of_halves),
    "transposed": (1, 1, lambda m, x: (F.silu(m.gate(x).transpose(0, 1)) * m.up(x).transpose(0, 1)).transpose(0, 1)),
    "looked at": (1, 1, shown),
    "used twice": (1, 1, used_twice),
    "product of two": (1, 2, of_another),
    "torch.mul": (1, 1, lambda m, x: torch.mul(F.silu(m.gate(x)), m.up(x))),
}
LEFT: dict[str, tuple[int, int, Part]] = {
    "no product": (0, 1, lambda m, x: F.silu(m.gate(x))),
    "sum": (0, 1, lambda m, x: F.gelu(m.gate(x)) + m.up(x)),
    "number": (0, 1, lambda m, x: F.silu(m.gate(x)) * 2),
    "broadcast": (0, 1, lambda m, x: F.silu(m.gate(x)) * m.up(x)[:1]),
    "in place": (0, 0, lambda m, x: F.silu(m.gate(x), inplace=True) * m.up(x)),
    "multiplied in place": (0, 1, lambda m, x: F.silu(m.gate(x)).mul_(m.up(x))),
    "clone": (0, 1, lambda m, x: F.gelu(m.gate(x)).clone()),
    "asked before the product": (0, 1, asked_before),
    "checkpoint": (0, 1, lambda m, x: checkpoint(torch.sigmoid, F.silu(m.gate(x)), use_reentrant=False)),
}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", [*JOINED, *LEFT])
def test_it_is_what_torch_gives(name: str, bf16: bool, gates: Any) -> None:
    joined, taken, part = (JOINED | LEFT)[name]
    model = Mlp(part)
    expected = gradients(copy.deepcopy(model), bf16=bf16)
    before = gates.joined(), gates.activations()
    found = gradients(model, gates.scope(), bf16=bf16)
    assert (gates.joined() - before[0], gates.activations() - before[1]) == (joined, taken)
    assert_near(found, expected, 0.03 if bf16 else 1e-4)


@pytest.mark.parametrize("name", LEFT)
def test_what_no_product_asks_for_has_torchs_bits(name: str, gates: Any) -> None:
    model = Mlp(LEFT[name][2])
    expected = gradients(copy.deepcopy(model))
    found = gradients(model, gates.scope())
    assert all(found[key].equal(value) for key, value in expected.items())


def test_backward_keeps_a_tensor_less(gates: Any) -> None:
    layers = nn.Linear(64, 256), nn.Linear(64, 256)
    x = torch.randn(128, 64)

    def kept(scope: Any) -> int:
        meter = ox.memory.Meter()
        with scope, meter:
            product = F.silu(layers[0](x)) * layers[1](x)
            held = int(meter.live_bytes)
        product.sum().backward()
        return held

    assert kept(nullcontext()) - kept(gates.scope()) == 128 * 256 * 4


@pytest.mark.parametrize("what", ["no grad", "inference", "no scope", "no gradient", "float64"])
def test_nothing_waits_where_it_must_not(what: str, gates: Any) -> None:
    x = torch.randn(4, 6, dtype=torch.float64 if what == "float64" else torch.float32)
    x.requires_grad_(what != "no gradient")
    modes = {"no grad": torch.no_grad, "inference": torch.inference_mode}
    before = gates.activations()
    with nullcontext() if what == "no scope" else gates.scope(), modes.get(what, nullcontext)():
        F.silu(x)
        F.gelu(x)
    assert gates.activations() == before


def test_what_changed_before_it_was_asked_for_is_refused(gates: Any) -> None:
    x = torch.randn(3, 5).requires_grad_() * 1
    with gates.scope():
        active = F.silu(x)
    x.zero_()
    with pytest.raises(RuntimeError, match=r"changed in place.*native_gate"):
        active.sum()


def test_hooks_and_retained_gradients_of_the_tensor_itself(gates: Any) -> None:
    seen: list[Tensor] = []

    def part(mlp: Mlp, x: Tensor) -> Tensor:
        active = F.silu(mlp.gate(x))
        active.register_hook(seen.append)
        active.retain_grad()
        out: Tensor = active * mlp.up(x)
        return out

    expected = gradients(Mlp(part))
    torchs = seen[:]
    seen.clear()
    found = gradients(Mlp(part), gates.scope())
    assert len(seen) == len(torchs) == 1
    torch.testing.assert_close(seen[0], torchs[0])
    assert_near(found, expected)


@pytest.mark.parametrize("activation", [F.silu, F.gelu])
def test_a_custom_function_that_is_given_it(activation: Callable[[Tensor], Tensor], gates: Any) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    def part(mlp: Mlp, x: Tensor) -> Tensor:
        out: Tensor = Double.apply(activation(mlp.gate(x)))
        return out

    assert_near(gradients(Mlp(part), gates.scope()), gradients(Mlp(part)))


def test_in_a_checkpoint_activations_are_left_alone(gates: Any) -> None:
    def part(mlp: Mlp, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda x: F.silu(mlp.gate(x)) * mlp.up(x), x, use_reentrant=False)
        return out

    before = gates.activations()
    found = gradients(Mlp(part), gates.scope())
    assert gates.activations() == before
    assert_near(found, gradients(Mlp(part)))


def test_transforms_and_compiled_code_are_left_alone(gates: Any) -> None:
    mlp, before = Mlp(JOINED["swiglu"][2]), gates.activations()
    parameters = {name: p.detach() for name, p in mlp.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(mlp, parameters, (x,))
        return out.square().mean()

    with gates.scope():
        found = torch.func.grad(loss)(parameters, torch.ones(2, 3, 12))
        compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)(torch.ones(2, 3, 12))
    assert gates.activations() == before
    torch.testing.assert_close(compiled, mlp(torch.ones(2, 3, 12)))
    for name, value in torch.func.grad(loss)(parameters, torch.ones(2, 3, 12)).items():
        torch.testing.assert_close(found[name], value)


def test_it_stands_beside_sums_that_wait(gates: Any) -> None:
    def part(mlp: Mlp, x: Tensor) -> Tensor:
        y = mlp.gate(x)
        y = F.layer_norm(y + F.silu(y) * F.dropout(mlp.up(x), 0.2), (24,))
        return F.silu(F.dropout(y, 0.2)) * y

    sums = _C.tune.DeferredSums()
    expected = gradients(Mlp(part))
    joined = gates.joined(), sums.joined()
    with sums.scope():
        found = gradients(Mlp(part), gates.scope())
    assert (gates.joined() - joined[0], sums.joined() - joined[1]) == (2, 1)
    assert_near(found, expected)


def tried(model: nn.Module) -> Any:
    """What the certificate says of it."""
    batch = torch.randn(32, 12), torch.randint(4, (32,))
    plan = ox.accelerate(
        model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, [batch], level="advanced",
        strategies=["native_gate"], tune_seconds=1, remember=False,
    )  # fmt: skip
    (entry,) = (e for e in plan.certificate.entries if e.strategy == "native_gate")
    plan.revert()
    return entry


def test_accelerate_tries_it() -> None:
    entry = tried(Mlp(JOINED["swiglu"][2]))
    assert entry.status in ("accepted", "rejected"), entry
    assert "numer" not in entry.reason, entry.reason


def test_a_model_without_it_is_left_alone() -> None:
    entry = tried(Mlp(LEFT["sum"][2]))
    assert entry.status == "skipped" and "multiplies nothing by a SiLU or GELU" in entry.reason
