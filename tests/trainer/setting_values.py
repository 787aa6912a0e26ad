"""A value for every setting, and trainers and plans that are given some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import _C
from oxytorch.tune import Strategy
from planted import Clock, Net, batches, made
from torch import nn

EXACT: dict[str, Any] = {"precision": "fp32", "channels_last": "off", "attention": "default"}
CRITERION = nn.CrossEntropyLoss()
HIDDEN = torch.Generator()

# A value other than any level's default, for each setting.
GIVEN: dict[str, Any] = {
    "level": "basic", "precision": "bf16", "channels_last": "on", "threads": 1, "interop_threads": 3,
    "flush_denormals": "on", "allocator": "retain", "allocator_retain_limit": "64MiB", "step_tail": "on",
    "optimizer_state": "int8", "attention": "math", "compile": "default", "accumulation_steps": 2,
    "clip_norm": 0.01, "clip_value": 0.001,
    "ema_decay": 0.5, "nonfinite": "raise", "grad_scaler": "on", "schedule": "cosine", "warmup_steps": 2,
    "min_lr_ratio": 0.5, "max_steps": 7, "steps_planned": 77, "tune_seconds": 1.5, "remember": False,
    "early_stopping_patience": 1, "early_stopping_min_delta": 100.0, "early_stopping_mode": "max",
    "early_stopping_restore_best": True, "memory_limit": "90%",
    "goal": "memory", "max_slowdown": 1.5, "max_growth": 2.0,
    "gradient_checkpointing": "1GiB", "saved_tensors": "file",
    "num_workers": 2, "prefetch": 3, "pin_memory": "on", "cache": "16MiB",
    "seed": 5, "deterministic": True, "progress": "on", "log_every": 3, "monitor": False,
}  # fmt: skip
# What has to stand beside a setting for it to mean anything.
WITH: dict[str, dict[str, Any]] = {
    "schedule": {"max_steps": 7},
    "warmup_steps": {"schedule": "cosine", "max_steps": 7},
    "min_lr_ratio": {"schedule": "cosine", "max_steps": 7},
    "early_stopping_min_delta": {"early_stopping_patience": 1},
    "early_stopping_mode": {"early_stopping_patience": 1},
    "early_stopping_restore_best": {"early_stopping_patience": 1},
    "max_slowdown": {"goal": "memory"},
    "saved_tensors": {"gradient_checkpointing": "least"},
}
NOT_YET = {"log_every", "monitor"}
LOOP = {
    "clip_value", "ema_decay", "nonfinite", "grad_scaler", "schedule", "warmup_steps",
    "min_lr_ratio", "early_stopping_patience", "early_stopping_min_delta", "early_stopping_mode",
    "early_stopping_restore_best",
}  # fmt: skip


def own_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """A step of the user's own."""

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = CRITERION(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return step


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def trainer(**settings: Any) -> ox.Trainer:
    model = settings.pop("model", None) or net()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.pop("lr", 1.0))
    level = settings.pop("level", "basic")
    settings = {**EXACT, "calibrate": False, **settings}  # what is named, and nothing else
    return ox.Trainer(model, optimizer, settings.pop("loss_fn", CRITERION), level, **settings)


def moved(made_trainer: ox.Trainer, batch: Any = None) -> torch.Tensor:
    """What one step adds to the weights."""
    before = [p.detach().clone() for p in made_trainer.model.parameters()]
    made_trainer.step(batches(1)[0] if batch is None else batch)
    after = made_trainer.model.parameters()
    return torch.cat([(b.detach() - a).flatten() for a, b in zip(before, after, strict=True)])


def poisoned() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batches(1)[0]
    return x * float("nan"), y


@contextmanager
def closed(made_trainer: ox.Trainer) -> Iterator[ox.Trainer]:
    try:
        yield made_trainer
    finally:
        made_trainer.revert()


def planted(clock: Clock, name: str, group: str = "", kind: Any = "exact", seconds: float = 0.02) -> type[Strategy]:
    """A strategy of that name that makes the step slower, so that nothing but a setting makes it active."""
    one = made(clock, "slow", seconds)
    one.name, one.group, one.kind = name, group or name, kind
    return one


def tuned(clock: Clock, config: dict[str, Any] | None = None, **options: Any) -> Any:
    model = Net(clock)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    arguments = {"remember": False, "tune_seconds": 2.0, **options}
    return ox.accelerate(model, optimizer, CRITERION, batches(), config=config, **arguments)


def limit_asked(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> list[int | None]:
    asked: list[int | None] = []
    own = _C.trainer.tune_allocator
    monkeypatch.setattr(_C.trainer, "tune_allocator", lambda limit=None: (asked.append(limit), own(limit))[1])
    make()
    return asked


def interop_asked(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> bool:
    """What torch takes once in a process is shown by what is asked of it; tests/trainer/test_interop.py does it."""
    asked: list[int] = []
    same = _C.trainer.size_interop_threads(torch.get_num_interop_threads())
    monkeypatch.setattr(_C.trainer, "size_interop_threads", lambda threads: (asked.append(threads), same)[1])
    run()
    return asked == [3]


def rows(native: bool = False) -> Any:
    """A loader of ten batches."""
    x, y = torch.arange(60.0).reshape(10, 6) / 60, torch.arange(10) % 3
    if not native:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
    data = [(x[i], y[i]) for i in range(10)]
    return ox.data.Loader(data, 2)
