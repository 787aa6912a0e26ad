"""The memory manager from Python: its settings, callbacks, clean-up, and the trainer that calls it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch.memory import MemoryConfig, MemoryManager
from torch import nn

pytestmark = pytest.mark.cpu_only("memory of the process")
MIB = 1 << 20


def quiet(**settings: Any) -> MemoryManager:
    return MemoryManager(**{"warn_at": 10.0, "critical_at": 10.0, "clean_at": 10.0, "check_every": 1, **settings})


def test_figures() -> None:
    manager = MemoryManager()
    before = manager.use()
    held = torch.ones(64 * MIB // 4)
    after = manager.use()
    assert abs(after.resident - before.resident - held.nbytes) < 8 * MIB
    assert after.allowed >= after.resident and 0 < after.share < 1 and after.peak >= after.resident
    assert "resident of" in str(after) and manager.level in repr(manager)


def test_a_limit_is_one_until_it_is_reverted() -> None:
    manager = quiet(limit="95%")
    assert ox.memory.limit() == ox.base.parse_size("95%", ox.base.system_info()["memory"]["limit"])
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 45)
    manager.revert()
    assert ox.memory.limit() is None


def test_a_clean_up_collects_garbage_first() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self
            self.data = torch.ones(64 * MIB // 4)

    manager = quiet()
    released = []
    manager.on_clean(lambda: released.append(True))
    gc.disable()  # or it may run by itself before
    try:
        gone = weakref.ref(Cycle())
        assert gone() is not None
        assert manager.clean() > 50 * MIB
        assert gone() is None and released == [True] and manager.clean_ups == 1
    finally:
        gc.enable()
    assert manager.bytes_cleaned > 50 * MIB and "given back" in manager.report()


def test_callbacks_and_levels() -> None:
    manager = quiet(warn_at=1e-6, critical_at=2.0)
    seen: list[Any] = []
    manager.on("warning", lambda use: seen.append(use.share))
    manager.step()
    manager.step()
    assert len(seen) == 1 and manager.level == "warning" == manager.check() and len(manager.events) == 1

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    manager.on("warning", stop)
    with pytest.raises(KeyboardInterrupt):
        manager.step()
    with pytest.raises(ValueError, match="there is no level 'loud'"):
        manager.on("loud", seen.append)


def test_steps_between_checks_and_clean_ups() -> None:
    manager = quiet(clean_every=3, check_every=2, warn_at=1e-6)
    manager.step()
    assert manager.level == "normal"
    for _ in range(6):
        manager.step()
    assert manager.level == "warning" and manager.clean_ups == 2 and manager.steps == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warn_at": 0.0}, "warn_at is 0"),
        ({"warn_at": 0.99, "critical_at": 0.9}, "above critical_at"),
        ({"check_every": 0}, "check_every is 0"),
        ({"limit": 1000}, "below what this process has in memory"),
        ({"cache_limit": "some"}, "some"),
    ],
)
def test_nonsense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryManager(**settings)
    with pytest.raises(ValueError, match=message):
        MemoryManager(MemoryConfig(**settings))
    with pytest.raises(TypeError, match="beside warn_at"):
        MemoryManager(MemoryConfig(), warn_at=0.5)


def test_the_trainer_takes_its_steps() -> None:
    model = nn.Linear(4, 2)
    manager = quiet()
    trainer = ox.Trainer(
        model, torch.optim.SGD(model.parameters()), nn.CrossEntropyLoss(), "basic", calibrate=False,
        accumulation_steps=2, memory=manager,
    )  # fmt: skip
    batch = torch.randn(3, 4), torch.randint(2, (3,))
    for _ in range(5):
        trainer.step(batch)
    assert manager.steps == trainer.global_step == 2
    (line,) = (line for line in trainer.report().settings if line.name == "memory")
    assert "resident of" in line.reason
    trainer.revert()


def test_of_a_plan() -> None:
    model = nn.Linear(4, 2)
    batch = torch.randn(3, 4), torch.randint(2, (3,))
    run = ox.PerformanceOptimizer("basic", memory=MemoryConfig(check_every=1)).prepare(
        model, torch.optim.SGD(model.parameters()), [batch], nn.CrossEntropyLoss(), remember=False, tune_seconds=0.5
    )
    run.trainer.step(batch)
    assert run.memory.steps == 1 and run.memory.config.check_every == 1
    assert "Memory: " in run.explain()
    run.revert()
