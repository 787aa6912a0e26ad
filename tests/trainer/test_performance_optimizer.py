"""`PerformanceOptimizer.prepare`: the plan of `accelerate`, and a trainer on it that decides nothing again."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import oxytorch as ox
import pytest
import torch
from planted import Clock, Net, batches, clock, fingerprint, made, only, same
from torch import nn

from . import setting_values

pytestmark = pytest.mark.cpu_only("plants times")
__all__ = ["clock"]

CRITERION = nn.CrossEntropyLoss()


def net(clock: Clock) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(clock)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def trained(clock: Clock, data: list[Any], clip: float | None = None) -> list[Any]:
    model, optimizer = net(clock)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch.manual_seed(4)
    for x, y in data:
        optimizer.zero_grad()
        CRITERION(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return fingerprint(model, optimizer)[:1]


@pytest.mark.parametrize("loop", ["yours", "plan"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_trainer_trains_the_plain_loops_weights(clock: Clock, loop: str, clip: float | None) -> None:
    model, optimizer = net(clock)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    cheaper = made(clock, "slow", 0.002)
    cheaper.needs_loop = loop == "plan"
    config = {"level": "basic"} | ({} if clip is None else {"clip_norm": clip})
    with only(cheaper):
        run = ox.PerformanceOptimizer(config).prepare(
            model, optimizer, batches(), CRITERION, scheduler=scheduler, loop=loop
        )
    assert isinstance(run, type(ox.accelerate(*net(clock), CRITERION, batches(), strategies=[])))
    assert run.accepted == ("cheaper_slow",) and run.model is model and run.data is not None
    torch.manual_seed(4)
    run.trainer.fit(batches(6), progress=False)
    assert run.trainer.global_step == 6
    assert same(trained(clock, batches(6), clip), fingerprint(model, optimizer)[:1])
    assert run.trainer.monitor is run.monitor and run.monitor.summary().steps == 6
    assert clock.cost["slow"] == 0.002
    run.revert()


def test_the_trainer_decides_nothing_again(clock: Clock) -> None:
    model, optimizer = net(clock)
    threads, weights = torch.get_num_threads(), [p.data_ptr() for p in model.parameters()]
    with only():
        run = ox.PerformanceOptimizer("advanced").prepare(model, optimizer, batches(), CRITERION)
        run.trainer.step(batches(1)[0])
    assert torch.get_num_threads() == threads and run.trainer.optimizer is optimizer
    assert weights == [p.data_ptr() for p in model.parameters()]
    assert {line.state for line in run.trainer.report().settings} <= {"off", "on"}
    assert run.trainer.report()["step_tail"].state == "off"


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.inner(x)
        return {"loss": CRITERION(out, labels), "logits": out}


def test_a_model_with_a_loss_of_its_own_needs_no_loss_function(clock: Clock) -> None:
    model = WithLoss()
    data = [{"x": x, "labels": y} for x, y in batches()]
    with only():
        run = ox.PerformanceOptimizer().prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    assert torch.isfinite(run.trainer.step(data[0]))
    plain, optimizer = net(clock)
    with only(), pytest.raises(TypeError, match="Pass loss_fn"):
        ox.PerformanceOptimizer().prepare(plain, optimizer, [batches(1)[0][0]])


def test_settings_of_the_accelerator_are_applied_and_taken_back(clock: Clock) -> None:
    before = torch.backends.cuda.flash_sdp_enabled()
    gpu = ox.GPUConfig(attention=["math"])
    model, optimizer = net(clock)
    with only():
        run = ox.PerformanceOptimizer(gpu=gpu).prepare(model, optimizer, batches(), CRITERION)
    assert not torch.backends.cuda.flash_sdp_enabled()
    run.revert()
    assert torch.backends.cuda.flash_sdp_enabled() == before
    with only(), pytest.raises(TypeError):
        ox.PerformanceOptimizer(gpu=gpu).prepare(model, optimizer, [], 3)  # type: ignore[arg-type]
    assert torch.backends.cuda.flash_sdp_enabled() == before


def test_the_configuration_is_copied(clock: Clock) -> None:
    config = ox.PerformanceConfig("advanced", clip_norm=1.0)
    held = copy.copy(config)
    model, optimizer = net(clock)
    with only():
        run = ox.PerformanceOptimizer(config).prepare(model, optimizer, batches(), CRITERION)
    assert config == held and run.settings == held and run.trainer.settings.clip_norm == 1.0


def test_the_options_of_the_performance_optimizer() -> None:
    made_with = [
        p.name for p in inspect.signature(ox.PerformanceOptimizer).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    assert set(made_with) == {"gpu", "monitor", "memory"}
    prepare = inspect.signature(ox.PerformanceOptimizer.prepare).parameters.values()
    assert {p.name for p in prepare if p.kind is p.KEYWORD_ONLY} == {"scheduler", "checkpointer", "callbacks", "state"}
    model = setting_values.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    saved, losses = [], []
    monitor = ox.PerformanceMonitor()
    gpu = ox.GPUConfig(attention=["math"])
    with only():
        run = ox.PerformanceOptimizer("basic", monitor=monitor, gpu=gpu, memory={"limit": "90%"}).prepare(
            model, optimizer, batches(), CRITERION, scheduler=scheduler, checkpointer=saved.append,
            callbacks=[lambda _t, loss: losses.append(float(loss))], remember=False,
        )  # fmt: skip
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert ox.memory.limit() is not None
        run.trainer.fit(batches(3), progress=False)
        assert run.memory.steps == 3
        run.revert()
        assert ox.memory.limit() is None
        with pytest.raises(TypeError, match="memory is a int"):
            ox.PerformanceOptimizer("basic", memory=1).prepare(model, optimizer, batches(), CRITERION)  # type: ignore[arg-type]
        assert torch.backends.cuda.flash_sdp_enabled()
        assert optimizer.param_groups[0]["lr"] == 0.125 and monitor.summary().steps == 3 and saved and len(losses) == 3
        settings = {"schedule": "cosine", "max_steps": 9}
        for options, error in (({"scheduler": scheduler}, ValueError), ({"callbacks": [3]}, TypeError)):
            with pytest.raises(error):
                ox.PerformanceOptimizer(settings).prepare(model, optimizer, batches(), CRITERION, **options)
