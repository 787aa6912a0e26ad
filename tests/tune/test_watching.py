"""Faults that cannot act while a candidate is verified are found during the run, at steps that are drawn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oxytorch._C.tune import Certificate
from oxytorch.memory import Meter, host_pool_stats, use_host_pool
from oxytorch.model import parking
from oxytorch.tune import watch as watch_module
from oxytorch.tune.run import Run
from oxytorch.tune.strategy import STRATEGIES, Kind
from oxytorch.tune.watch import Watch
from planted_faults import HEALTHY, workload
from planted_faults.intermittent import (
    flip,
    gradients,
    larger,
    last_layer_narrow,
    of,
    of_all,
    one_bit,
    under_autocast,
    update,
    zero,
)
from planted_faults.planting import Acts, Fault, Plant
from torch import nn

pytestmark = [
    pytest.mark.cpu_only("watches runs on the CPU"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(autouse=True)
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps are drawn in each run, and every step takes the same time."""
    ticks = 0.0

    def seconds() -> float:
        nonlocal ticks
        ticks += 1.0
        return ticks

    monkeypatch.setattr(watch_module.os, "urandom", bytes)
    monkeypatch.setattr(watch_module.clock, "seconds", seconds)


def watched(name: str, fault: Fault, steps: int) -> tuple[Run, list[str]]:
    """Train under watch; return the run, and the event where the fault was taken back."""
    run, _ = workload(name, torch.device("cpu"), {"planted": fault.strategy()})
    run.set_active(["planted"])
    certificate = Certificate()
    watch = Watch(run, certificate, seed=3)
    for i in range(steps):
        run.step(run.batches[i % 4])
        if certificate.events:
            break
    watch.stop()
    return run, certificate.events


def since(first: int, last: int = 10**9, period: int = 1) -> Acts:
    return lambda taken, _: first <= taken <= last and taken % period == 0


CASES: list[tuple[str, str, Kind, Acts, Plant]] = [
    ("zeroed from step 60 on", "mlp", "tolerance", since(60), gradients(of(2, zero))),
    ("flipped from step 100 on", "conv", "precision", since(100), under_autocast(gradients(of_all(flip)))),
    ("2 percent large from step 80 on", "conv", "tolerance", since(80), gradients(of_all(larger(0.02)))),
    ("a window of 600 steps", "mlp", "tolerance", since(300, 900), gradients(of(0, flip))),
    ("each third step from step 70 on", "conv", "tolerance", since(70, period=3), gradients(of(4, zero))),
    ("a bit each fifth step from step 50 on", "mlp", "exact", since(50, period=5), update(one_bit)),
    ("a layer in bfloat16 from step 90 on", "mlp", "exact", since(90), last_layer_narrow),
]  # fmt: skip


@pytest.mark.parametrize(("name", "on", "kind", "acts", "plant"), CASES, ids=[case[0] for case in CASES])
def test_what_acts_later_is_taken_back(name: str, on: str, kind: Kind, acts: Acts, plant: Plant) -> None:
    run, found = watched(on, Fault(name, on, kind, 0, plant, acts), 6000)
    assert len(found) == 1, name
    assert "one batch" in found[0], found
    assert run.active == ()


@pytest.mark.parametrize(
    ("title", "kind"), [("foreach", "exact"), ("step_tail", "tolerance"), ("bfloat16_autocast_conv", "precision")]
)
def test_healthy_strategies_stay(title: str, kind: Kind) -> None:
    fault = HEALTHY[title]
    assert fault.kind == kind
    run, found = watched(fault.workload, fault, 2000)
    assert not found
    assert run.active == ("planted",)
    run.set_active(())


@pytest.mark.parametrize("budget", [False, True])
@pytest.mark.parametrize("title", ["foreach", "step_tail"])
def test_a_comparison_leaves_the_run_as_it_is(title: str, budget: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(compared: bool) -> list[torch.Tensor]:
        fault = HEALTHY[title]
        run, _ = workload(fault.workload, torch.device("cpu"), {"planted": fault.strategy()})
        run.set_active(["planted"])
        seen = 0
        compare = Watch.compare

        def counting(watch: Watch, first: Any) -> Any:
            nonlocal seen
            seen += 1
            return compare(watch, first)

        with monkeypatch.context() as patch:
            patch.setattr(Watch, "compare", counting if compared else lambda *_: (1.0, 1.0, 0.0, 0.0, 0.0))
            watch = Watch(run, Certificate(), seed=3, has_budget=lambda: budget)
            for i in range(150):
                run.step(run.batches[i % 4])
            watch.stop()
        assert (seen > 1) is compared
        run.set_active(())
        return copy.deepcopy([*run.params, *run.model.buffers(), torch.get_rng_state()])

    for left, right in zip(trained(True), trained(False), strict=True):
        assert torch.equal(left, right)


def test_strategies_can_be_compared_by_themselves() -> None:
    offered = {"bf16_autocast": STRATEGIES["bf16_autocast"], "planted": HEALTHY["foreach"].strategy()}
    run, _ = workload("mlp", torch.device("cpu"), offered)
    run.set_active(["bf16_autocast", "planted"])
    before = copy.deepcopy([*run.params, torch.get_rng_state()])
    watch = Watch(run, Certificate(), seed=3)
    both, usual = watch.compare(), watch.compare(["bf16_autocast"])
    assert both[:4] == usual[:4]
    assert 1e-4 < usual[2] < 0.1
    assert watch.compare(["planted"])[2] < 1e-6
    watch.stop()
    assert set(run.active) >= {"bf16_autocast", "planted"}
    for left, right in zip(before, [*run.params, torch.get_rng_state()], strict=True):
        assert torch.equal(left, right)
    run.set_active(())


@pytest.mark.parametrize("is_doubted", [False, True])
def test_a_comparison_within_a_budget_copies_no_parameters(is_doubted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "_FOLDERS", ("/nowhere",))  # copies are in memory, where they are counted
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = (torch.randn(4, 256), torch.randint(5, (4,)))
    strategies = {"planted": HEALTHY["foreach"].strategy()}
    run = Run(model, optimizer, nn.CrossEntropyLoss(), [batch], strategies=strategies)
    run.set_active(["planted"])
    run.step(batch)
    size = sum(p.nbytes for p in run.params)

    def taken(budget: bool) -> int:
        certificate = Certificate()
        watch = Watch(run, certificate, has_budget=lambda: budget)
        watch._doubted = is_doubted
        with Meter() as meter:
            together, without, *apart, _ = watch.compare()
        watch.stop()
        assert together == without
        assert apart == [0.0, 0.0]
        assert any("compare losses" in event for event in certificate.events) is budget
        return meter.peak_bytes

    assert taken(budget=True) < size / 10 < 3 * size < taken(budget=False)  # the optimizer's state too
    run.set_active(())


def test_the_pool_keeps_nothing_of_a_comparison() -> None:
    setting = use_host_pool()
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 5))
        batch = (torch.randn(4, 1024), torch.randint(5, (4,)))
        strategies = {"planted": HEALTHY["foreach"].strategy()}
        run = Run(model, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss(), [batch], strategies=strategies)
        run.set_active(["planted"])
        run.step(batch)
        watch = Watch(run, Certificate())
        watch.compare()
        assert host_pool_stats().retained_bytes < sum(p.nbytes for p in run.params)  # copies take several times that
        watch.stop()
        run.set_active(())
    finally:
        setting.revert()


def test_a_comparison_within_a_budget_finds_a_loss_that_is_off() -> None:
    fault = Fault("narrow", "mlp", "exact", 0, last_layer_narrow, since(0))
    run, _ = workload("mlp", torch.device("cpu"), {"planted": fault.strategy()})
    run.set_active(["planted"])
    certificate = Certificate()
    watch = Watch(run, certificate, has_budget=lambda: True)
    watch.doubt()
    watch._decide()
    assert run.active == ()
    assert any("The losses of one batch" in event for event in certificate.events)


def test_which_steps_are_compared_depends_on_what_no_one_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = set()
    for i in range(5):
        monkeypatch.setattr(watch_module.os, "urandom", lambda count, i=i: bytes([i] * count))
        run, _ = workload("mlp", torch.device("cpu"), {"foreach": HEALTHY["foreach"].strategy()})
        run.set_active(["foreach"])
        watch = Watch(run, Certificate())
        drawn.add(watch.drawn_by)
        watch.stop()
        run.set_active(())
    assert len(drawn) == 5
