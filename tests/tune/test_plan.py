"""The plan: what it says, how it watches a run, and the way back."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch.tune import Plan, Run, Strategy
from planted import Clock, Net, batches, clock, fingerprint, only, same
from torch import nn

pytestmark = pytest.mark.cpu_only("plants times and faults")
__all__ = ["clock"]

CRITERION = nn.CrossEntropyLoss()


class Turncoat(Strategy):
    """Pays and is exact, until told to be otherwise."""

    name = "turncoat"
    clock: Clock
    seconds = 0.002
    scale: float | None = None

    def apply(self, run: Run) -> None:
        self.before = self.clock.cost["slow"]
        self.clock.cost["slow"] = type(self).seconds
        self.handle = run.model.register_forward_hook(self.change)

    def revert(self, run: Run) -> None:
        self.clock.cost["slow"] = self.before
        self.handle.remove()

    def change(self, _module: nn.Module, _inputs: Any, out: torch.Tensor) -> torch.Tensor | None:
        scale = type(self).scale
        return None if scale is None else out * scale


class Case:
    """A run with a turncoat active."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        self.turncoat = type("Turncoat", (Turncoat,), {"clock": clock})
        self.model = Net(clock)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.said: list[str] = []
        with only(self.turncoat):
            self.plan: Plan = ox.accelerate(self.model, self.optimizer, CRITERION, batches(), **options)
        assert self.plan.accepted == ("turncoat",)

    def train(self, steps: int, own_loop: bool = True) -> None:
        ox.base.set_log_sink(lambda _level, text: self.said.append(text))
        try:
            for x, y in batches(steps):
                if own_loop:
                    self.optimizer.zero_grad()
                    CRITERION(self.model(x), y).backward()
                    self.optimizer.step()
                else:
                    self.plan.step((x, y))
        finally:
            ox.base.set_log_sink(None)

    def taken_back(self, clock: Clock, why: str) -> None:
        """Everything is as it was given, and that was said once in each place."""
        assert clock.cost["slow"] == 0.01
        assert self.plan.accepted == () and self.plan.rejected["turncoat"].startswith("rolled back")
        assert self.plan.speedup == (1.0, 1.0, 1.0)
        assert len(self.said) == 1 and why in self.said[0]
        assert len(self.plan.certificate.events) == 1 and why in self.plan.certificate.events[0]
        assert why in self.plan.report().verdict and why in self.plan.explain()
        assert not self.optimizer._optimizer_step_post_hooks and not self.model._forward_hooks


@pytest.mark.parametrize("own_loop", [True, False])
def test_what_stops_paying_is_taken_back_at_a_step_boundary(clock: Clock, own_loop: bool) -> None:
    case = Case(clock, loop="yours" if own_loop else "plan")
    case.train(40, own_loop)
    assert case.plan.accepted == ("turncoat",) and not case.said
    case.turncoat.seconds = 0.05
    case.plan._run.set_active(())
    case.plan._run.set_active(["turncoat"])
    case.train(120, own_loop)
    case.taken_back(clock, "stopped paying")


def test_what_still_pays_stays_through_a_check(clock: Clock) -> None:
    case = Case(clock)
    case.train(130)
    assert case.plan.accepted == ("turncoat",) and not case.said and clock.cost["slow"] == 0.002
    assert "pay" in case.plan._watch.reason  # a check was made
    case.plan.revert()


@pytest.mark.parametrize("own_loop", [True, False])
def test_numbers_that_drift_are_found_at_the_next_check(clock: Clock, own_loop: bool) -> None:
    case = Case(clock)
    case.turncoat.scale = 1.001
    case.train(60, own_loop)
    case.taken_back(clock, "losses of one batch")


@pytest.mark.parametrize("own_loop", [True, False])
def test_a_loss_that_is_not_finite_is_not_applied(clock: Clock, own_loop: bool) -> None:
    case = Case(clock)
    case.train(3, own_loop)
    before = [p.detach().clone() for p in case.model.parameters()]
    case.turncoat.scale = float("nan")
    case.train(1, own_loop)
    case.taken_back(clock, "losses of one batch")
    assert same(before, [p.detach() for p in case.model.parameters()])


def test_a_loss_that_is_not_finite_by_itself_is_the_runs_own(clock: Clock) -> None:
    case = Case(clock)
    with torch.no_grad():
        next(case.model.parameters()).fill_(float("nan"))
    case.train(5)
    assert case.plan.accepted == ("turncoat",) and not case.said
    case.plan.revert()


def test_watching_changes_no_bit_of_the_run(clock: Clock) -> None:
    case = Case(clock)
    plain = copy.deepcopy(case.model)
    object.__setattr__(plain, "pass_step", clock.pass_step)
    plain._forward_hooks.clear()
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    torch.manual_seed(1)
    for x, y in batches(120):
        optimizer.zero_grad()
        CRITERION(plain(x), y).backward()
        optimizer.step()
    expected = fingerprint(plain, optimizer)[0]
    torch.manual_seed(1)
    case.train(120)
    assert same(expected, fingerprint(case.model, case.optimizer)[0])
    case.plan.revert()


def test_revert_takes_everything_back_and_keeps_what_was_trained(clock: Clock) -> None:
    model = Net(clock)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    CRITERION(model(batches(1)[0][0]), batches(1)[0][1]).backward()
    optimizer.step()  # torch's own first step adds attributes
    attributes = set(vars(optimizer)) | set(vars(model))
    with only(type("Turncoat", (Turncoat,), {"clock": clock})):
        plan = ox.accelerate(model, optimizer, CRITERION, batches())
    plan.step(batches(1)[0])
    trained = fingerprint(model, optimizer)
    plan.revert()
    plan.revert()
    assert same(trained, fingerprint(model, optimizer))
    assert set(vars(optimizer)) | set(vars(model)) == attributes
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not model._forward_hooks and clock.cost["slow"] == 0.01


def test_a_busy_machine_is_said_everywhere(clock: Clock) -> None:
    clock.others = 1.0
    case = Case(clock)
    said = "other programs used 1.0 of its 2 cores"
    assert said in str(case.plan) and said in case.plan.explain() and said in str(case.plan.report())
    assert f"The machine was busy while this was measured: {said}" in case.plan.explain()
    assert said in case.plan.certificate.to_html()
    case.plan.revert()
    clock.others = 0.0
    quiet = Case(clock)
    assert "busy" not in str(quiet.plan) + quiet.plan.explain() + str(quiet.plan.report())
    quiet.plan.revert()


def test_pages_and_files(clock: Clock, tmp_path: Path) -> None:
    case = Case(clock)
    plan = case.plan
    plan.save(tmp_path / "certificate.json")
    held = json.loads((tmp_path / "certificate.json").read_text())
    assert held["entries"][0]["strategy"] == "turncoat"
    page = plan.to_html(tmp_path / "certificate.html")
    assert (tmp_path / "certificate.html").read_text() == page and "turncoat" in page
    assert plan.report()["turncoat"].state == "on" and "turncoat" in str(plan)
    assert plan.memory.use().resident > 0 and "turncoat" in repr(plan)
    assert plan.model is case.model and plan.optimizer is case.optimizer
    plan.revert()


def test_a_scheduler_made_before_or_after_steps_the_users_optimizer(clock: Clock) -> None:
    case = Case(clock)
    scheduler = torch.optim.lr_scheduler.StepLR(case.optimizer, step_size=1, gamma=0.5)
    case.train(1)
    scheduler.step()
    assert case.plan.optimizer.param_groups[0]["lr"] == 5e-3
    case.plan.revert()
