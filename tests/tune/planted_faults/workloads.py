"""The runs that faults are planted in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from oxytorch.model.snapshot import Snapshot
from oxytorch.tune.run import Run
from oxytorch.tune.strategy import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Attention(nn.Module):
    """A block of a language model, with dropout."""

    def __init__(self, width: int = 32, p: float = 0.1) -> None:
        super().__init__()
        self.table = nn.Embedding(31, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(width, 31, bias=False)
        self.head.weight = self.table.weight
        self.causal = True

    def body(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(x))))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.table(tokens)))


def mlp(device: torch.device) -> Run:
    """Batch norm, two parameter groups, clipping."""
    model = nn.Sequential(
        nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5)
    )
    model.to(device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 3e-3)
    batches = [(torch.randn(31, 16, device=device), torch.randint(5, (31,), device=device)) for _ in range(4)]
    loader = DataLoader(TensorDataset(torch.randn(50, 16), torch.arange(50)), batch_size=16)
    return Run(model, optimizer, nn.CrossEntropyLoss(), batches, clip_norm=0.5, data=loader, owns_loop=True)


def conv(device: torch.device) -> Run:
    """Convolutions and momentum."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 4),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    batches = [(torch.randn(16, 3, 12, 12, device=device), torch.randint(4, (16,), device=device)) for _ in range(4)]
    return Run(model, optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches, owns_loop=True)


def gpt(device: torch.device) -> Run:
    """Attention, tied weights, dropout."""
    model = Attention().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.8, 0.95))
    batches = [(torch.randint(31, (8, 12), device=device), torch.randint(31, (8, 12), device=device)) for _ in range(4)]

    def loss(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())

    loader = DataLoader(TensorDataset(torch.randint(31, (40, 12)), torch.randint(31, (40, 12))), batch_size=8)
    return Run(model, optimizer, loss, batches, data=loader, owns_loop=True)


class Loop:
    """A user's own step: scaler, accumulation over two pieces, clipping, schedule, moving average."""

    def __init__(self, device: torch.device, overflow: bool = False) -> None:
        self.model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3)).to(
            device
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), 2e-3)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.2, total_iters=6)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=3e38 if overflow else 1024.0)
        self.weight = 64.0 if overflow else 1.0
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.steps: dict[str, Callable[..., Any]] = {
            "unscale": self.scaler.unscale_, "schedule": self.schedule.step, "average": self.update_average,
            "optimizer": self.scaler.step,
        }  # fmt: skip

    def update_average(self) -> None:
        with torch.no_grad():
            for mean, p in zip(self.average, self.model.parameters(), strict=True):
                mean.lerp_(p.to(mean.dtype), 0.1)

    def __call__(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros((), device=batch[0].device)
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            loss = F.cross_entropy(self.model(x), y) * self.weight / 2
            self.scaler.scale(loss).backward()
            total = total + loss.detach()
        self.steps["unscale"](self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.steps["optimizer"](self.optimizer)
        self.scaler.update()
        self.steps["schedule"]()
        self.steps["average"]()
        return total


def scaled(device: torch.device, overflow: bool = False) -> Run:
    """The user's own loop."""
    loop = Loop(device, overflow)
    batches = [(torch.randn(16, 12, device=device), torch.randint(3, (16,), device=device)) for _ in range(4)]
    run = Run(loop.model, loop.optimizer, None, batches, step=loop)
    run.loop = loop  # type: ignore[attr-defined]
    return run


def overflowing(device: torch.device) -> Run:
    """The same, with the first steps skipped by the scaler."""
    return scaled(device, True)


WORKLOADS: dict[str, Callable[[torch.device], Run]] = {
    "mlp": mlp, "conv": conv, "gpt": gpt, "scaled": scaled, "overflowing": overflowing,
}  # fmt: skip


def workload(name: str, device: torch.device, strategies: dict[str, type[Strategy]]) -> tuple[Run, Snapshot]:
    """Make a run that has trained a few steps, and its snapshot."""
    torch.manual_seed(1)
    run = WORKLOADS[name](device)
    run.strategies = dict(strategies)
    if name != "overflowing":
        for batch in run.batches:
            run.step(batch)
    loop = getattr(run, "loop", None)
    others = (loop.scaler, loop.schedule, _Holder(loop.average)) if loop is not None else ()
    return run, Snapshot.of(run.model, run.original, *others)


class _Holder:
    def __init__(self, average: list[Tensor]) -> None:
        self.average = average
