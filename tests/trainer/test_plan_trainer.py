"""The trainer of a plan: settings of the loop hold in the plan's steps."""

from __future__ import annotations

from typing import Any

import oxytorch as ox
import pytest
import torch
from planted import batches, only

from .setting_values import CRITERION, GIVEN, LOOP, WITH, moved, net, own_step, poisoned

pytestmark = pytest.mark.cpu_only("plants times")


@pytest.mark.parametrize("loop", ["yours", "plan"])
@pytest.mark.parametrize("key", sorted(LOOP | {"accumulation_steps"}))
def test_the_trainer_of_a_plan_honours_what_belongs_to_the_loop(key: str, loop: Any) -> None:
    """What these do in a trainer is shown above; here it is a plan's trainer that has them."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"level": "basic", **WITH.get(key, {}), key: GIVEN[key]}
    with only():
        run = ox.PerformanceOptimizer(config).prepare(model, optimizer, batches(), CRITERION, loop=loop, remember=False)
    assert run.settings.to_dict()[key] == GIVEN[key]
    assert run.trainer.config.to_dict()[key] == GIVEN[key]
    if key == "accumulation_steps":
        assert float(moved(run.trainer).abs().sum()) == 0
    if key == "clip_value":
        assert float(moved(run.trainer).abs().max()) == pytest.approx(0.1 * 0.001, rel=1e-3)
    if key == "nonfinite":
        with pytest.raises(RuntimeError, match="inf or NaN"):
            run.trainer.step(poisoned())
    if key == "ema_decay":
        trained(run.trainer, run.step if loop == "plan" else run.trainer.step)
    run.revert()


def trained(trainer: ox.Trainer, step: Any) -> None:
    """Take a step; the average is then between the weights of before and those of now."""
    before = [p.detach().clone() for p in trainer.model.parameters()]
    step(batches(1)[0])
    now = [p.detach().clone() for p in trainer.model.parameters()]
    decay = trainer.settings.ema_decay
    with trainer.ema_weights():
        for p, old, new in zip(trainer.model.parameters(), before, now, strict=True):
            assert not torch.equal(p, old)
            torch.testing.assert_close(p.detach(), decay * old + (1 - decay) * new)


def test_a_step_of_the_users_own_moves_the_average_and_the_schedule() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"level": "basic", "ema_decay": 0.5, "schedule": "cosine", "max_steps": 4}
    with only():
        run = ox.PerformanceOptimizer(config).prepare(
            model, optimizer, batches(), step=own_step(model, optimizer), remember=False
        )
    trained(run.trainer, run.trainer.step)
    assert run.trainer.global_step == 1 and optimizer.param_groups[0]["lr"] < 0.1
    run.revert()


@pytest.mark.parametrize("loop", ["yours", "plan"])
def test_windows_of_a_plan_are_those_of_a_plain_loop(loop: Any) -> None:
    reference, model = net(), net()
    data = batches(7)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for start in range(0, 7, 3):
        plain.zero_grad()
        for x, y in data[start : start + 3]:
            (CRITERION(reference(x), y) / len(data[start : start + 3])).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        plain.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"level": "basic", "accumulation_steps": 3, "clip_norm": 0.05}
    with only():
        run = ox.PerformanceOptimizer(config).prepare(model, optimizer, data, CRITERION, loop=loop, remember=False)
    for batch in data:
        (run.step if loop == "plan" else run.trainer.step)(batch)
    run.trainer.flush()
    assert run.trainer.global_step == 3
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    run.revert()


def test_a_trainer_is_made_on_a_plan_of_accelerate() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with only():
        plan = ox.accelerate(model, optimizer, CRITERION, batches(), remember=False)
    with pytest.raises(AttributeError, match="plan=plan"):
        _ = plan.trainer
    trainer = ox.Trainer(model, optimizer, CRITERION, {"accumulation_steps": 2}, plan=plan)
    before = [p.detach().clone() for p in model.parameters()]
    plan.step(batches(1)[0])
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    plan.step(batches(1)[0])
    assert trainer.global_step == 1
    plan.revert()


def test_a_seed_of_the_configuration_seeds_the_run_of_a_plan() -> None:
    def drawn(seed: int) -> float:
        model = net()
        torch.manual_seed(99)
        with only():
            ox.PerformanceOptimizer({"level": "basic", "seed": seed}).prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1), batches(), CRITERION, remember=False
            )
        return float(torch.rand(()))

    assert drawn(5) == drawn(5) != drawn(6)
