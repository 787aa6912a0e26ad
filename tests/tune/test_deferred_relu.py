"""Linear layers that wait for the ReLU that follows them: every way to it, and everything else that may ask."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import oxytorch as ox
import pytest
import torch
from deferred_runs import assert_near
from oxytorch import _C
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")

Operators = _C.tune.NativeOperators
BF16 = torch.bfloat16
OUTPUTS = iter(range(300, 10_000))  # what was learnt of a layer is learnt of its number of outputs


@pytest.fixture
def installed() -> Iterator[None]:
    operators = Operators()
    (report,) = operators.install(["linear"])
    if not report.installed:
        pytest.skip(report.reason)
    yield
    operators.uninstall()


class Mlp(nn.Module):
    """What `part` makes of a layer's output, and a head."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        outputs = next(OUTPUTS)
        self.up, self.head, self.part = nn.Linear(12, outputs), nn.Linear(outputs, 4), part

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            out: Tensor = self.head(self.part(self.up(x)))
        return out.float()


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    given = x.clone().requires_grad_()
    model.zero_grad()
    output = model(given)
    output.square().mean().backward()
    found = {"output": output.detach(), "input": given.grad}
    found |= {name: p.grad for name, p in model.named_parameters()}
    return {name: t for name, t in found.items() if t is not None}


def learnt(model: Mlp) -> Mlp:
    """The same model, once ReLU has followed its layer."""
    with torch.autocast("cpu", BF16):
        F.relu(model.up(torch.randn(3, 12)))
    return model


def joined(run: Callable[[], Any]) -> int:
    before = Operators.joined_relus()
    run()
    return Operators.joined_relus() - before


def shown(y: Tensor) -> Tensor:
    assert y.dtype == BF16 and y.requires_grad and y.grad_fn is not None and y.device.type == "cpu"
    assert y.shape[:-1] == (5, 7) and y.is_contiguous()
    return F.relu(y)


class Doubled(torch.autograd.Function):
    """A custom function of the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


def then_in_place(y: Tensor) -> Tensor:
    F.relu(y, inplace=True)
    return y * 2


def custom_after_in_place(y: Tensor) -> Tensor:
    y.relu_()
    out: Tensor = Doubled.apply(y)
    return out


# By how many ReLUs are computed with their layer: what is made of the layer's output.
PARTS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "function": (1, F.relu),
    "method": (1, lambda y: y.relu()),
    "module": (1, nn.ReLU()),
    "in place": (1, nn.ReLU(inplace=True)),
    "in place, then read": (1, then_in_place),
    "in place, then a custom function": (1, custom_after_in_place),
    "looked at": (1, shown),
    "twice": (2, lambda y: F.relu(y) + F.relu(y)),
    "read afterwards": (1, lambda y: F.relu(y) + y),
    "read before": (0, lambda y: y.sin() + F.relu(y)),
    "another activation": (0, F.gelu),
    "view": (0, lambda y: F.relu(y.view(35, -1)).view(5, 7, -1)),
    "custom function": (0, Doubled.apply),
    "custom function and ReLU": (1, lambda y: F.relu(y) + Doubled.apply(y)),
    "checkpoint": (0, lambda y: checkpoint(torch.sigmoid, y, use_reentrant=False)),
}


@pytest.mark.parametrize("name", PARTS)
def test_it_is_what_torch_gives(name: str, installed: None) -> None:
    count, part = PARTS[name]
    x = torch.randn(5, 7, 12, generator=torch.Generator().manual_seed(1))
    model = Mlp(part)
    plain = copy.deepcopy(model)
    expected: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    assert joined(lambda: expected.update(gradients(plain, x))) == 0, "nothing waits that ReLU has not followed"
    learnt(model)
    assert joined(lambda: found.update(gradients(model, x))) == count
    assert_near(found, expected, 0.02)


def test_a_hook_of_the_layers_output_gets_its_gradient(installed: None) -> None:
    seen: list[Tensor] = []

    def part(y: Tensor) -> Tensor:
        y.register_hook(seen.append)
        return F.relu(y)

    x = torch.randn(5, 7, 12)
    model = Mlp(part)
    expected = gradients(model, x)
    learnt(model)
    assert joined(lambda: gradients(model, x)) == 0
    assert len(seen) == 2 and seen[0].equal(seen[1])
    assert_near(gradients(model, x), expected, 1e-6)


def test_what_is_mostly_asked_for_otherwise_waits_no_longer(installed: None) -> None:
    model = learnt(Mlp(F.gelu))
    x = torch.randn(5, 7, 12)
    first = gradients(model, x)
    with torch.autocast("cpu", BF16):
        assert model.up(x).grad_fn.name() == "ViewBackward0"  # type: ignore[union-attr]
    assert all(a.equal(b) for a, b in zip(gradients(model, x).values(), first.values(), strict=True))


def test_a_layer_that_is_read_beside_its_relu_waits_no_longer(installed: None) -> None:
    model, x = learnt(Mlp(lambda y: F.relu(y) + y)), torch.randn(5, 7, 12)
    assert sum(joined(lambda: gradients(model, x)) for _ in range(9)) <= 2
    model = learnt(Mlp(F.relu))
    assert sum(joined(lambda: gradients(model, x)) for _ in range(9)) == 9


@pytest.mark.parametrize(
    "what", ["no grad", "inference", "no autocast", "no gradient", "taken out", "compiled", "compiled for any size"]
)
def test_nothing_waits_where_it_must_not(what: str) -> None:
    operators = Operators()
    operators.install(["linear"])
    model = learnt(Mlp(F.relu))
    x = torch.randn(6, 12)
    layer: Callable[[Tensor], Tensor] = model.up
    if what == "no gradient":
        model.requires_grad_(False)
    if what == "taken out":
        operators.uninstall()
    if what.startswith("compiled"):
        layer = torch.compile(model.up, backend="aot_eager", dynamic=what != "compiled")
    mode = {"no grad": torch.no_grad, "inference": torch.inference_mode}.get(what, torch.enable_grad)

    def run() -> None:
        with torch.autocast("cpu", BF16, enabled=what != "no autocast"), mode():
            F.relu(layer(x)).float().sum()

    assert joined(run) == 0
    operators.uninstall()


def test_weights_that_changed_before_it_was_asked_for(installed: None) -> None:
    model = learnt(Mlp(F.relu))
    x = torch.randn(6, 12)
    with torch.autocast("cpu", BF16):
        waits, settled = model.up(x), model.up(x)
        expected = settled.clone()
        with torch.no_grad():
            model.up.weight.add_(1)
        assert settled.equal(expected)
        with pytest.raises(RuntimeError, match=r"changed in place.*native_linear"):
            waits.sum()
        with pytest.raises(RuntimeError, match="native_linear"):
            F.relu(waits)


def test_values_are_made_before_an_optimizer_of_a_plan_steps(installed: None) -> None:
    """As of logits: whoever defers them settles all that waits."""
    model = learnt(Mlp(F.relu))
    with torch.autocast("cpu", BF16):
        waits = model.up(torch.randn(6, 12))
    _C.tune.DeferredLogits.before_weights_change()
    with torch.no_grad():
        model.up.weight.add_(1)
    assert waits.float().isfinite().all()


def test_backward_twice_and_accumulated(installed: None) -> None:
    model = learnt(Mlp(F.relu))
    x = torch.randn(6, 12)
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    once = model.up.weight.grad.clone()  # type: ignore[union-attr]
    loss.backward()
    torch.testing.assert_close(model.up.weight.grad, once * 2)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_model_is_trained_alike() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 1237), nn.ReLU(), nn.Linear(1237, 1239), nn.ReLU(inplace=True), nn.Linear(1239, 4)
    )
    batches = [(torch.randn(40, 32), torch.randint(4, (40,))) for _ in range(8)]

    def trained(*, native: bool) -> list[float]:
        own = copy.deepcopy(model)
        optimizer = ox.optim.AdamW(own.parameters(), lr=1e-3)
        operators = Operators()
        if native:
            operators.install(["linear"])
        losses = []
        for x, y in batches * 3:
            with torch.autocast("cpu", BF16):
                loss = F.cross_entropy(own(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        operators.uninstall()
        return losses

    before = Operators.joined_relus()
    ours, torchs = trained(native=True), trained(native=False)
    assert Operators.joined_relus() - before == 2 * 23
    assert max(abs(a - b) for a, b in zip(ours, torchs, strict=True)) < 0.1
    assert ours[-1] < ours[0]
