"""Whatever is done to a training run inside a snapshot, afterwards every bit is as before, and the hash says so."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import oxytorch as ox
import pytest
import torch
import torch_device
from oxytorch.model.snapshot import Snapshot
from oxytorch.tune.gradients import gradients_away
from oxytorch.tune.run import Run
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Stateful(nn.Module):
    """Changes everything that a forward can change: counters, lists, buffers in place and by another, plain objects."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("positions", torch.arange(6).expand(2, 6))
        self.calls = 0
        self.history: list[float] = []
        self.recent: deque[int] = deque(maxlen=3)
        self.seen: Counter[str] = Counter()
        self.table = {"a": [1, 2], "t": torch.ones(2)}
        self.counts = np.zeros(3)
        self.own = random.Random(3)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(float(x.detach().sum()))
        self.recent.append(self.calls)
        self.seen["x"] += 1
        self.table["a"].append(self.calls)
        self.table["t"].mul_(2)
        self.counts[self.calls % 3] += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        noise = torch.rand(6, generator=self.generator).to(x.device) * self.own.random() * random.random()
        return self.body(x) * (1 + 0.01 * noise) + self.mean


class Tied(nn.Module):
    """One table at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.embed(x)))


def strided() -> nn.Module:
    """Parameters that are not contiguous, two of one memory, and NaN among the weights."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.5))
    flat = torch.randn(12, 12)
    with torch.no_grad():
        model[0].weight = nn.Parameter(flat[:6, :6])
        model[1].weight = nn.Parameter(flat.t()[6:, 6:])
        model[0].bias[0] = math.nan
    return model


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stateful": Stateful, "tied": Tied, "strided": strided, "convolutional": convolutional,
    "recurrent": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)),
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "tail": lambda p: ox.optim.AdamW(p, ema_decay=0.9, clip_norm=1.0),
    "tail bf16": lambda p: ox.optim.AdamW(p, state_dtype="bf16", stochastic_rounding=True),
    "tail int8": lambda p: ox.optim.Adam(p, state_dtype="int8", copy_dtype=torch.bfloat16),
    "tail lion": ox.optim.Lion,
    "Muon": lambda p: ox.optim.Muon([q for q in p if q.dim() == 2]),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    device = next(model.parameters()).device
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(left: list[float], right: list[float]) -> bool:
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(left, right, strict=True))


def trainable(name: str, kind: str) -> bool:
    """Muon needs a matrix; the tail off the CPU, weights whose elements do not overlap in memory."""
    overlapping = name == "strided" and kind.startswith("tail") and torch_device.chosen().type != "cpu"
    return not overlapping and (name, kind) != ("convolutional", "Muon")


CELLS = [(name, kind) for name in MODELS for kind in OPTIMIZERS if trainable(name, kind)]


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize(("name", "kind"), CELLS)
def test_training_leaves_no_trace(name: str, kind: str, trained: int, device: torch.device) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    params = list(model.parameters())
    optimizer = OPTIMIZERS[kind](params)
    train(model, optimizer, trained)
    fresh = len(optimizer.state) == 0
    snapshot = Snapshot.of(model, optimizer)
    assert snapshot.digest() == snapshot.held
    first = train(model, optimizer)
    changed = snapshot.digest()
    assert changed != snapshot.held
    with pytest.raises(RuntimeError, match="is not as it was"):
        snapshot.prove()
    snapshot.restore()
    snapshot.prove()
    assert (len(optimizer.state) == 0) == fresh
    assert same(train(model, optimizer), first)
    assert snapshot.digest() == changed, "the same steps lead to the same state"
    snapshot.restore()
    snapshot.prove()


def test_the_proof_notices_each_kind_of_change(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Stateful(), Tied(), nn.Dropout(0.5)).to(device)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.1}])
    scaler = torch.amp.GradScaler(device.type, enabled=True) if device.type == "cpu" else None
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=2, shuffle=True, generator=generator)
    train(model, optimizer)
    model[0].body.weight.grad[0, 0] = math.nan
    first = model[0]

    def swap_data() -> None:
        first.body.weight.data = first.body.weight.data.t().contiguous().t()  # same values, another layout

    changes: list[Callable[[], Any]] = [
        lambda: first.body.weight.data[0, 0].add_(1e-7),
        first.body.weight.grad.zero_,
        lambda: setattr(first.body.weight, "grad", None),
        lambda: first.body.weight.requires_grad_(False),
        lambda: first.body.bias.data.fill_(math.nan),
        swap_data,
        lambda: first.history.append(1.0),
        lambda: first.recent.append(9),
        lambda: first.seen.update("y"),
        first.table["a"].pop,
        first.table["t"].neg_,
        first.own.random,
        lambda: torch.rand(1, generator=first.generator),
        lambda: setattr(first, "calls", 77),
        lambda: setattr(first, "novel", 1),
        lambda: delattr(first, "calls"),
        lambda: first.counts.__setitem__(0, 5.0),
        lambda: setattr(first, "mean", torch.ones(6, device=device)),
        model.eval,
        lambda: setattr(model[2], "p", 0.1),
        lambda: setattr(model[1].head, "weight", nn.Parameter(model[1].head.weight.detach().clone())),
        lambda: model.register_forward_hook(lambda *_: None),
        lambda: model.add_module("extra", nn.Linear(2, 2)),
        lambda: first.body.weight.register_hook(lambda g: g),
        lambda: first.body.weight.register_post_accumulate_grad_hook(lambda p: None),
        lambda: optimizer.param_groups[1].update(lr=0.2),
        optimizer.param_groups.pop,
        optimizer.state.clear,
        lambda: optimizer.state[first.body.weight]["exp_avg"].add_(1e-9),
        lambda: optimizer.state[first.body.weight].pop("step"),
        lambda: setattr(optimizer, "step", lambda: None),
        lambda: optimizer.register_step_pre_hook(lambda *_: None),
        scheduler.step,
        lambda: list(loader),
        lambda: torch.rand(1),
        random.random,
        np.random.rand,
    ]
    if scaler is not None:
        changes += [lambda: scaler.scale(torch.ones(1)), lambda: scaler._per_optimizer_states[1]]
    snapshot = Snapshot.of(model, optimizer, scaler, scheduler, loader)
    for number, change in enumerate(changes):
        change()
        with pytest.raises(RuntimeError, match="is not as it was"):
            snapshot.prove()
        snapshot.restore()
        snapshot.prove()
        assert snapshot.digest() == snapshot.held, f"change {number}"


def test_the_proof_names_what_differs() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    snapshot = Snapshot.of(model, torch.optim.SGD(model.parameters(), 0.1))
    model[1].running_mean[0] = 1
    with pytest.raises(RuntimeError, match=r"model\._modules\['1'\]\._buffers\['running_mean'\]"):
        snapshot.prove()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_step_that_breaks_off_is_undone(error: type[BaseException]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Stateful(), nn.Dropout(0.5))
    optimizer = ox.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    before = Snapshot.of(model, optimizer).held

    def fail(_: Tensor) -> None:
        raise error("in backward")

    with pytest.raises(error), Snapshot.of(model, optimizer):
        train(model, optimizer)
        model[0].weight.register_hook(fail)
        train(model, optimizer)
    assert Snapshot.of(model, optimizer).held == before


def test_others_are_held_by_what_they_give_out() -> None:
    class Loader:
        __slots__ = ("at",)

        def __init__(self) -> None:
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    model, loader = nn.Linear(2, 2), Loader()
    with Snapshot.of(model, None, loader, None) as snapshot:
        loader.at = 7
        with pytest.raises(RuntimeError, match=r"others\[0\]"):
            snapshot.prove()
    assert loader.at == 0


def test_one_without_a_hash_restores_and_proves_nothing() -> None:
    model = nn.Linear(2, 2)
    bias = model.bias.detach().clone()
    with Snapshot.of(model, hashed=False) as snapshot, torch.no_grad():
        model.bias.add_(1)
        with pytest.raises(RuntimeError, match="hashed=True"):
            snapshot.prove()
    assert snapshot.held == "" and torch.equal(model.bias, bias)


def test_nothing_is_written_where_bits_are_the_same() -> None:
    model = nn.Linear(4, 4)
    snapshot = Snapshot.of(model)
    versions = [p._version for p in model.parameters()]
    snapshot.restore()
    assert [p._version for p in model.parameters()] == versions


def test_a_lazy_model_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="run the model once"):
        Snapshot.of(nn.LazyLinear(3))


def test_buffers_are_written_again_where_their_memory_was_exchanged() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    weight = model[0].weight
    held, place = weight.detach().clone(), weight.data_ptr()
    with Snapshot.of(model):
        weight.data = weight.data.to(memory_format=torch.channels_last)
        with torch.no_grad():
            weight.add_(1)
    assert weight.data_ptr() == place
    assert torch.equal(weight, held)


def with_gradients(step: Callable[[Any], Tensor] | None = None) -> tuple[nn.Linear, Run]:
    torch.manual_seed(0)
    model = nn.Linear(600, 600)
    model(torch.randn(4, 600)).square().sum().backward()
    loss = None if step else (lambda m, b: m(b).sum())
    return model, Run(model, torch.optim.SGD(model.parameters(), 1e-3), loss, [torch.randn(4, 600)], step=step)


def test_gradients_that_a_step_drops_take_no_memory_and_come_back() -> None:
    model, run = with_gradients()
    assert model.weight.grad is not None
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with pytest.raises(ZeroDivisionError), gradients_away(run):
        assert model.weight.grad is None
        assert model.bias.grad is None
        run.step(run.batches[0])
        raise ZeroDivisionError
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, before[name])


def test_gradients_that_others_refer_to_or_a_step_may_add_to_stay() -> None:
    model, run = with_gradients()
    mine, view = model.weight.grad, model.bias.grad.view(2, 300)  # type: ignore[union-attr]
    with gradients_away(run):
        assert model.weight.grad is mine
        assert model.bias.grad is not None
        assert model.bias.grad.data_ptr() == view.data_ptr()
    model, run = with_gradients(lambda b: b.sum())
    with gradients_away(run):
        assert model.weight.grad is not None
    model, run = with_gradients()
    run.original.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    with gradients_away(run):
        assert model.weight.grad is not None
