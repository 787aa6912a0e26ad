"""Models, optimizers and the trainer on the device of the run: the same losses as on the CPU, and no host read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import oxytorch as ox
import pytest
import torch
import torch_device
from oxytorch import amp, optim
from oxytorch.trainer import Trainer
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1},
    "Adam": {"lr": 1e-3, "eps": 1e-4, "amsgrad": True},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
    "Lion": {"lr": 1e-4, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2, "eps": 1e-4},
    "RMSprop": {"lr": 1e-3, "eps": 1e-4, "momentum": 0.9},
    "Muon": {"lr": 1e-3},
}
PROCESS = "starts processes with devices of their own"
FAKE = torch_device.chosen().type not in ("cpu", "cuda")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(40, 32), nn.Embedding(12, 32)
        self.blocks = nn.Sequential(Block(32, 4), Block(32, 4))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        y: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))
        return y.flatten(0, 1)


def make(kind: str, device: torch.device | str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)
    if kind == "cnn":
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
        ).to(device)  # fmt: skip
    return GPT().to(device)


def batches(kind: str, device: torch.device | str, count: int = 8) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    if kind == "gpt":
        text = torch.randint(0, 40, (count, 4, 13), generator=g)
        return [(t[:, :-1].to(device), t[:, 1:].flatten().to(device)) for t in text]
    shape = (8, 12) if kind == "mlp" else (8, 3, 12, 12)
    return [
        (torch.randn(shape, generator=g).to(device), torch.randint(0, 5, (8,), generator=g).to(device))
        for _ in range(count)
    ]


def weights(model: nn.Module, kind: str, name: str) -> list[nn.Parameter]:
    """Muon takes matrices alone."""
    return [p for p in model.parameters() if name != "Muon" or p.dim() == 2]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["mlp", "cnn", "gpt"])
def test_every_optimizer_follows_the_cpu(kind: str, name: str, device: torch.device) -> None:
    losses: dict[str, list[float]] = {}
    averages: dict[str, list[Tensor]] = {}
    for where in ("cpu", device):
        model = make(kind, where)
        opt = getattr(optim, name)(weights(model, kind, name), clip_norm=1.0, ema_decay=0.9, **OPTIMIZERS[name])
        seen = []
        for x, y in batches(kind, where):
            opt.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            seen.append(loss.detach())
        assert {t.device.type for s in opt.state.values() for t in s.values()} == {torch.device(where).type}
        losses[str(where)] = torch.stack(seen).tolist()
        averages[str(where)] = [t.cpu() for t in opt.ema_state_dict()["ema"].values()]
    # A card sums in another order; Newton-Schulz runs in bf16, where that shows.
    exact = 1e-6 if device.type != "cuda" else 1e-4
    exact *= 10 if name == "Muon" else 1
    assert losses[str(device)] == pytest.approx(losses["cpu"], rel=exact)
    if name in ("Lion", "Muon"):
        return  # they move whole steps by gradients that are rounding alone, as those of the keys' bias
    for a, b in zip(averages[str(device)], averages["cpu"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=10 * exact)


@pytest.mark.parametrize("kind", ["mlp", "cnn", "gpt"])
def test_the_trainer_follows_the_cpu_and_reads_nothing(kind: str, device: torch.device) -> None:
    losses: dict[str, list[float]] = {}
    for where in ("cpu", device):
        model = make(kind, where)
        trainer = Trainer(
            model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4), nn.CrossEntropyLoss(), precision="fp32",
            channels_last="off", accumulation_steps=2, clip_norm=1.0, ema_decay=0.9, schedule="cosine", max_steps=9,
            step_tail="on", calibrate=False,
        )  # fmt: skip
        data = batches(kind, where)
        seen = [trainer.step(batch) for batch in data[:2]]
        before = torch_device.host_reads() if FAKE else 0
        seen += [trainer.step(batch) for batch in data[2:]]
        assert not FAKE or torch_device.host_reads() == before
        assert trainer.global_step == 4
        losses[str(where)] = torch.stack(seen).tolist()
        with trainer.ema_weights():
            assert next(model.parameters()).device.type == torch.device(where).type
    assert losses[str(device)] == pytest.approx(losses["cpu"], rel=1e-4 if device.type == "cuda" else 1e-6)


class Movable:
    """A batch of another class, which moves by itself as Hugging Face's do."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: torch.device) -> Movable:
        return Movable(self.x.to(device), self.y.to(device))


NESTS: dict[str, tuple[Any, Any]] = {
    "pair": (lambda x, y: (x, y), lambda batch: batch),
    "dict": (lambda x, y: {"in": {"x": x, "name": "a"}, "out": [y, 3]}, lambda b: (b["in"]["x"], b["out"][0])),
    "object": (Movable, lambda batch: (batch.x, batch.y)),
    "nested object": (lambda x, y: [Movable(x, y), None], lambda batch: (batch[0].x, batch[0].y)),
}


@pytest.mark.parametrize("nest", NESTS)
def test_the_trainer_takes_batches_to_the_model(nest: str, device: torch.device) -> None:
    pack, unpack = NESTS[nest]
    losses = []
    for where in ("cpu", device):
        model = make("mlp", where)

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            x, y = unpack(batch)
            return functional.cross_entropy(model(x), y)

        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, calibrate=False)
        data = [pack(*batch) for batch in batches("mlp", "cpu")]
        seen = [trainer.step(batch) for batch in data]
        assert {loss.device.type for loss in seen} == {torch.device(where).type}
        assert all(tensor.device.type == "cpu" for tensor in unpack(data[0]))
        losses.append([*torch.stack(seen).tolist(), trainer.evaluate(data)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4 if device.type == "cuda" else 1e-6)


def test_bf16_needs_no_scaler(device: torch.device) -> None:
    model = make("gpt", device)
    trainer = Trainer(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), nn.CrossEntropyLoss(), precision="bf16", calibrate=False
    )
    seen = []
    model.head.register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))
    data = batches("gpt", device)
    first = [float(trainer.step(data[0])) for _ in range(20)]
    assert set(seen) == {torch.bfloat16}
    assert trainer.scaler is None
    assert first[-1] < 0.8 * first[0]


@pytest.mark.skipif(not FAKE, reason="asks what a device is for which no rule is written")
def test_a_device_without_a_rule_of_its_own_multiplies_bf16(device: torch.device) -> None:
    assert amp.recommend_dtype(device)[0] is torch.bfloat16
    assert amp.hardware_support(device, torch.float16)[0]


def test_the_monitor_takes_scalars_of_the_device_without_reading_them(device: torch.device, tmp_path: Path) -> None:
    monitor = ox.PerformanceMonitor([ox.monitor.Jsonl(tmp_path / "run.jsonl")])
    values = [torch.full((), float(i), device=device) for i in range(4)]
    before = torch_device.host_reads() if FAKE else 0
    for value in values:
        with monitor.step():
            monitor.scalar("loss", value)
    assert not FAKE or device.type == "cpu" or torch_device.host_reads() == before
    monitor.close()
    text = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [f'"loss":{i}' in line.replace(" ", "") for i, line in enumerate(text)] == [True] * 4


QUIRKS = ["no_streams", "no_events,plain_allocator", "one_device", "asynchronous"]
LOOP = """
import torch, torch_device
from oxytorch import optim
from oxytorch.trainer import Trainer

def losses(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5)).to(device)
    trainer = Trainer(model, optim.AdamW(model.parameters(), lr=1e-2, clip_norm=1.0, ema_decay=0.9),
                      torch.nn.CrossEntropyLoss(), precision="fp32", calibrate=False)
    torch.manual_seed(1)
    data = [(torch.randn(8, 12), torch.randint(0, 5, (8,))) for _ in range(6)]
    found = [trainer.step((x.to(device, non_blocking=True), y.to(device, non_blocking=True))) for x, y in data]
    trainer.load_state_dict(trainer.state_dict())
    return torch.stack(found).cpu()

device = torch_device.load()
torch.testing.assert_close(losses(device), losses("cpu"), rtol=1e-6, atol=0)
"""


# Without hooks torch itself runs no backward pass; what is ours needs none.
STEPS = """
import torch, torch_device
from oxytorch import amp, optim

def run(device):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(40, 30).to(device))
    opt = optim.AdamW([weight], lr=1e-2, clip_norm=1.0, ema_decay=0.9, state_dtype="int8", collect_stats=True)
    scaler = amp.GradScaler(torch.device(device).type, 8.0)
    for i in range(6):
        scaler.scale(torch.ones((), device=device))
        weight.grad = torch.randn(40, 30).to(device) * 8
        scaler.step(opt)
        scaler.update()
    assert opt.tail_stats().grad_norm.device.type == torch.device(device).type
    return weight.detach().cpu()

device = torch_device.load()
assert not torch.accelerator.is_available()
torch.testing.assert_close(run(device), run("cpu"), rtol=1e-5, atol=1e-6)
"""


@pytest.mark.cpu_only(PROCESS)
def test_steps_ask_nothing_of_a_device_without_hooks() -> None:
    run(STEPS, "no_hooks,no_streams,plain_allocator")


@pytest.mark.cpu_only(PROCESS)
@pytest.mark.parametrize("quirks", QUIRKS)
def test_training_asks_nothing_of_a_device_that_bridges_lack(quirks: str) -> None:
    run(LOOP, quirks)


def run(script: str, quirks: str) -> None:
    path = os.pathsep.join([str(ROOT / "tests" / "device"), *filter(None, sys.path)])
    environment = {**os.environ, "OXYTORCH_DEVICE": "hpu", "OXYTORCH_FAKE": quirks, "PYTHONPATH": path}
    if "asynchronous" in quirks:
        environment["OXYTORCH_SIM"] = "latency_us=2000"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    torch_device.check(done)
