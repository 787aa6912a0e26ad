"""Logits that are left to their loss (`native_cross_entropy`) on the device of the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch_device
from oxytorch import _C
from oxytorch.tune import Run
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, WIDTH = 300, 24
FAKE = torch_device.chosen().type not in ("cpu", "cuda")

LAYERS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "linear": nn.Linear.__call__,
    "matmul": lambda head, x: (x @ head.weight.t()).add_(head.bias),
    "addmm": lambda head, x: torch.addmm(head.bias, x, head.weight.t()),
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "alone": F.cross_entropy,
    "smoothed, wide": lambda x, y: F.cross_entropy(x.float(), y, label_smoothing=0.1),
    "transposed": lambda x, y: F.cross_entropy(x.view(4, -1, CLASSES).transpose(1, 2), y.view(4, -1)),
    "chosen rows": lambda x, y: F.cross_entropy(x[3:], y[3:], reduction="sum"),
}
READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "arithmetic": lambda x, y: F.cross_entropy(x * 2, y),
    "another loss": lambda x, y: F.multi_margin_loss(x.float(), y),
    "its device and sizes, and it is read": lambda x, y: (x + (x.device == y.device)).logsumexp(-1).sum() / len(x),
}


class Model(nn.Module):
    """A block as large as a head that would be deferred, and a head."""

    def __init__(self, call: Callable[[nn.Linear, Tensor], Tensor] = nn.Linear.__call__) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.back = nn.Linear(WIDTH, 2 * CLASSES), nn.Linear(2 * CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.head, x + self.back(F.gelu(self.wide(x))))


def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(32, WIDTH).to(device), torch.randint(CLASSES, (32,)).to(device)


def trained(
    model: Model, loss_of: Callable[[Tensor, Tensor], Tensor], device: torch.device, logits: Any = None, times: int = 3
) -> list[Tensor]:
    """The loss and the gradients; what is asked for is learned in the first two of `times`."""
    model.to(device)
    x, y = batch(device)
    for _ in range(times):
        model.zero_grad()
        with logits.scope() if logits is not None else nullcontext():
            loss = loss_of(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
    return [t.detach().cpu().double() for t in (loss, *(p.grad for p in model.parameters()))]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_taken_without_logits(layer: str, loss: str, device: torch.device) -> None:
    right = trained(Model(LAYERS[layer]), LOSSES[loss], torch.device("cpu"))
    logits = _C.tune.DeferredLogits(device)
    before = _C.tune.DeferredLogits.losses()
    found = trained(Model(LAYERS[layer]), LOSSES[loss], device, logits)
    assert _C.tune.DeferredLogits.losses() == before + 3
    for one, exact in zip(found, right, strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("loss", READ)
def test_whatever_else_asks_gets_torchs_values(layer: str, loss: str, device: torch.device) -> None:
    right = trained(Model(LAYERS[layer]), READ[loss], device)
    logits = _C.tune.DeferredLogits(device)
    before = _C.tune.DeferredLogits.losses()
    found = trained(Model(LAYERS[layer]), READ[loss], device, logits)
    assert _C.tune.DeferredLogits.losses() == before
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


def test_a_head_under_autocast(device: torch.device) -> None:
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(x, y)

    def call(head: nn.Linear, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return head(x)

    logits = _C.tune.DeferredLogits(device)
    before = _C.tune.DeferredLogits.losses()
    found, right = trained(Model(call), loss_of, device, logits), trained(Model(call), loss_of, device)
    assert _C.tune.DeferredLogits.losses() == before + 3
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=2e-2 * float(other.abs().max()))


@pytest.mark.skipif(not FAKE, reason="fake devices count reads")
def test_nothing_is_read_on_the_host(device: torch.device) -> None:
    model, logits = Model().to(device), _C.tune.DeferredLogits(device)
    x, y = batch(device)
    before = torch_device.host_reads()
    with logits.scope():
        loss = F.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch_device.host_reads() == before


def test_the_strategy_is_for_the_device(device: torch.device) -> None:
    model = Model().to(device)
    run = Run(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, [batch(device)], owns_loop=True)
    assert run.strategy("native_cross_entropy").applies(run) is True
    before = _C.tune.DeferredLogits.losses()
    run.set_active(["native_cross_entropy"])
    first = float(run.step(run.batches[0]))
    assert _C.tune.DeferredLogits.losses() == before + 1
    assert float(run.step(run.batches[0])) < first
    run.set_active([])
    run.step(run.batches[0])
    assert _C.tune.DeferredLogits.losses() == before + 2


def test_devices_that_are_not_served() -> None:
    assert not _C.tune.DeferredLogits.serves(torch.device("meta"))
    with pytest.raises(Exception, match="the device is xpu"):
        _C.tune.DeferredLogits(torch.device("xpu:0"))
