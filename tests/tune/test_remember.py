"""Certificates from one run to the next: reused after a canary, measured anew where they do not hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import cli
from oxytorch.tune import Plan, Run, Strategy
from oxytorch.tune.remember import key, stored
from oxytorch.tune.watch import Watch
from planted import Clock, Net, batches, clock, fingerprint, made, only, same
from torch import nn

pytestmark = pytest.mark.cpu_only("plants times and faults")
__all__ = ["clock"]

CRITERION = nn.CrossEntropyLoss()


def run_once(clock: Clock, *classes: type[Strategy], rows: int = 5, **options: Any) -> tuple[Plan, int]:
    """Accelerate a new model; the plan, taken back, and how many steps were run for it."""
    model = Net(clock)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.pop("lr", 1e-2))
    before = fingerprint(model, optimizer)
    steps = [0]
    inner = clock.pass_step

    def pass_step() -> None:
        steps[0] += 1
        inner()

    object.__setattr__(model, "pass_step", pass_step)
    with only(*classes):
        plan = ox.accelerate(model, optimizer, CRITERION, batches(rows=rows), **options)
    assert same(before, fingerprint(model, optimizer))
    plan._run.set_active(())
    return plan, steps[0]


def events(plan: Plan) -> str:
    return " ".join(plan.certificate.events)


def test_the_next_run_reuses_what_the_first_found_after_a_canary(clock: Clock) -> None:
    classes = (made(clock, "slow", 0.002), made(clock, "rest", 0.02))
    first, steps = run_once(clock, *classes)
    second, fewer = run_once(clock, *classes, lr=1e-3)
    assert first.accepted == second.accepted == ("cheaper_slow",)
    assert "reused" in events(second) and "reused" not in events(first)
    assert fewer < steps
    assert second.speedup == first.speedup and second.rejected == first.rejected


def test_nothing_that_pays_is_remembered_too(clock: Clock) -> None:
    run_once(clock, made(clock, "slow", 0.02))
    plan, steps = run_once(clock, made(clock, "slow", 0.02))
    assert plan.accepted == () and "reused" in events(plan) and steps < 15


@pytest.mark.parametrize("options", [{"rows": 7}, {"level": "basic"}, {"steps_planned": 77}, {"loop": "plan"}])
def test_another_run_is_measured_by_itself(clock: Clock, options: dict[str, Any]) -> None:
    run_once(clock, made(clock, "slow", 0.002))
    plan, _ = run_once(clock, made(clock, "slow", 0.002), **options)
    assert "reused" not in events(plan)


def test_what_pays_no_longer_is_measured_anew_and_that_is_said(clock: Clock) -> None:
    run_once(clock, made(clock, "slow", 0.002))
    plan, _ = run_once(clock, made(clock, "slow", 0.03))
    assert plan.accepted == () and "measured anew" in events(plan)
    plan, _ = run_once(clock, made(clock, "slow", 0.03))
    assert "reused" in events(plan)  # the new finding


def test_what_changes_numbers_now_is_found_by_the_canary(clock: Clock) -> None:
    cls = made(clock, "slow", 0.002)
    run_once(clock, cls)
    apply, revert = cls.apply, cls.revert

    def drifts(self: Any, run: Run) -> None:
        apply(self, run)
        self.handle = run.model.register_forward_hook(lambda _m, _i, out: out * 1.01)

    def back(self: Any, run: Run) -> None:
        self.handle.remove()
        revert(self, run)

    cls.apply, cls.revert = drifts, back  # type: ignore[method-assign]
    plan, _ = run_once(clock, cls)
    assert plan.accepted == () and "measured anew" in events(plan)
    assert plan.rejected["cheaper_slow"].startswith("refused")


def test_what_does_not_apply_any_more_is_stale(clock: Clock) -> None:
    cls = made(clock, "slow", 0.002)
    run_once(clock, cls)
    cls.applies = lambda self, run: "not on this machine"  # type: ignore[method-assign]
    plan, _ = run_once(clock, cls)
    assert plan.accepted == () and "not on this machine" in events(plan)


def test_remembering_can_be_left_out_or_done_elsewhere(clock: Clock, tmp_path: Path) -> None:
    run_once(clock, made(clock, "slow", 0.002), remember=False)
    assert not stored()
    run_once(clock, made(clock, "slow", 0.002), remember=str(tmp_path / "here"))
    assert len(stored(str(tmp_path / "here"))) == 1 and not stored()


def test_a_file_that_is_no_certificate_is_measured_anew(clock: Clock) -> None:
    run_once(clock, made(clock, "slow", 0.002))
    path, _ = stored()[0]
    path.write_text("{")
    plan, _ = run_once(clock, made(clock, "slow", 0.002))
    assert plan.accepted == ("cheaper_slow",) and "reused" not in events(plan)


def test_one_that_was_taken_back_is_forgotten(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = run_once(clock, made(clock, "slow", 0.002))
    assert stored()
    monkeypatch.setattr(Watch, "compare", lambda *_: (1.0, 2.0, 0.0, 0.0, 0.0))
    plan._watch.doubt()
    plan._watch._decide()
    assert plan.accepted == () and "cheaper_slow taken back: The losses" in events(plan)
    assert not stored()


# -- a busy machine ----------------------------------------------------------------------------------------------------


def test_nothing_that_was_measured_beside_other_programs_is_stored(clock: Clock) -> None:
    clock.others = 1.0
    said: list[str] = []
    ox.base.set_log_sink(lambda _level, text: said.append(text))
    try:
        plan, _ = run_once(clock, made(clock, "slow", 0.002))
    finally:
        ox.base.set_log_sink(None)
    assert not stored() and "other programs used 1.0 of its 2 cores" in plan.certificate.disturbance
    assert any("not stored" in text and "busy" in text for text in said) and any(
        "machine is busy" in text and "taskset -c" in text
        for text in said  # what it is, and what to set
    )
    clock.others = 0.0
    plan, _ = run_once(clock, made(clock, "slow", 0.002))
    assert "reused" not in events(plan) and len(stored()) == 1


def test_what_was_found_on_a_quiet_machine_is_reused_on_a_busy_one(clock: Clock) -> None:
    run_once(clock, made(clock, "slow", 0.002))
    clock.others = 1.0
    clock.cost["rest"] = 0.05  # its time tells nothing now
    plan, _ = run_once(clock, made(clock, "slow", 0.002))
    assert plan.accepted == ("cheaper_slow",) and "reused" in events(plan)
    assert len(stored()) == 1


def test_a_certificate_of_another_baseline_is_not_trusted(clock: Clock) -> None:
    # As one that was made beside another program: nothing pays, of a step that was 75 times as long.
    clock.cost["rest"] = 2.47
    first, _ = run_once(clock, made(clock, "slow", 0.002))
    assert first.accepted == () and len(stored()) == 1
    clock.cost["rest"] = 0.01
    plan, _ = run_once(clock, made(clock, "slow", 0.002))
    assert plan.accepted == ("cheaper_slow",)
    assert "as given takes 20 ms" in events(plan) and "reused" not in events(plan)


def test_that_nothing_pays_expires(clock: Clock) -> None:
    run_once(clock, made(clock, "slow", 0.02))
    path, certificate = stored()[0]
    certificate.created = "2020-01-01T00:00:00Z"
    certificate.save(path)
    plan, _ = run_once(clock, made(clock, "slow", 0.02))
    assert "that nothing pays was found" in events(plan) and "reused" not in events(plan)


def test_where_nothing_paid_the_nearest_is_tried_again(clock: Clock) -> None:
    run_once(clock, made(clock, "slow", 0.00995))  # 1.0025 times as fast
    assert not stored()[0][1].accepted()
    clock.cost = {"slow": 0.01, "rest": 0.01}
    plan, _ = run_once(clock, made(clock, "slow", 0.006))
    assert "cheaper_slow pays now" in events(plan) and plan.accepted == ("cheaper_slow",)


def test_one_that_hinders_the_others_is_found_on_reuse(clock: Clock) -> None:
    # Together they still pay, and without the second the step is faster.
    first, _ = run_once(clock, made(clock, "slow", 0.001), made(clock, "rest", 0.005))
    assert len(first.accepted) == 2
    plan, _ = run_once(clock, made(clock, "slow", 0.001), made(clock, "rest", 0.013))
    assert plan.accepted == ("cheaper_slow",) and "faster without cheaper_rest" in events(plan)


# -- the key -----------------------------------------------------------------------------------------------------------


def model_key(change: Callable[[nn.Module, torch.optim.Optimizer], Any] = lambda m, o: None, rows: int = 5) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    change(model, optimizer)
    return str(key(Run(model, optimizer, CRITERION, batches(rows=rows)), "basic", []).model)


def tie(model: nn.Module, _optimizer: Any) -> None:
    model[3].weight = model[2].weight  # type: ignore[index]


def test_the_key_knows_which_weights_are_tied() -> None:
    def tied(to: int) -> Any:
        def change(model: nn.Module, _optimizer: Any) -> None:
            model.append(nn.Linear(4, 4))  # type: ignore[operator]
            model[4].weight = model[to].weight  # type: ignore[index]

        return change

    assert model_key(tied(2)) != model_key(tied(3))


def test_the_key_knows_which_optimizer_it_is() -> None:
    class Other(torch.optim.SGD):
        """With the same settings."""

    def of(cls: type[torch.optim.Optimizer]) -> str:
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        return str(key(Run(model, cls(model.parameters(), lr=0.1), CRITERION, batches()), "basic", []).model)  # type: ignore[call-arg]

    assert of(Other) != of(torch.optim.SGD)


@pytest.mark.parametrize(
    "change",
    [
        lambda m, o: nn.init.zeros_(m[0].weight),
        lambda m, o: o.param_groups[0].update(lr=0.3),
        lambda m, o: torch.manual_seed(3),
    ],
)
def test_the_key_knows_no_weight_and_no_learning_rate(change: Any) -> None:
    assert model_key(change) == model_key()


@pytest.mark.parametrize(
    "change",
    [
        tie,
        lambda m, o: m.double(),
        lambda m, o: m.eval(),
        lambda m, o: m[0].requires_grad_(False),
        lambda m, o: m.append(nn.Identity()),
        lambda m, o: o.param_groups[0].update(momentum=0.9),
        lambda m, o: o.param_groups[0].update(foreach=True),
    ],
)
def test_the_key_knows_what_decides_the_time_of_a_step(change: Any) -> None:
    assert model_key(change) != model_key()
    assert model_key(rows=6) != model_key()


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_lists_shows_and_forgets(clock: Clock, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["certificates"]) == 0
    assert "no certificate" in capsys.readouterr().out
    plan, _ = run_once(clock, made(clock, "slow", 0.002))
    plan.save(tmp_path / "one.json")
    digest = plan.certificate.key.digest()
    assert cli.main(["certificates"]) == 0
    assert digest in (out := capsys.readouterr().out) and "cheaper_slow" in out
    assert cli.main(["certificates", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["level"] == "advanced"
    for which in (digest[:6], str(tmp_path / "one.json")):
        assert cli.main(["certificates", "show", which]) == 0
        assert "cheaper_slow" in capsys.readouterr().out
    assert cli.main(["certificates", "show", "zz"]) == 1
    assert cli.main(["certificates", "forget"]) == 2
    assert cli.main(["certificates", "forget", digest[:6]]) == 0
    assert not stored()
