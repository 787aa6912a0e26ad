"""Settings that contradict each other, an optimizer or what can be done are refused, or one of them yields."""

from __future__ import annotations

from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import _C
from oxytorch.tune import Run, Strategy
from planted import Clock, batches, clock, only
from torch import nn

from .setting_values import CRITERION, EXACT, moved, net, poisoned, trainer, tuned

pytestmark = pytest.mark.cpu_only("plants times")
__all__ = ["clock"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"warmup_steps": 5}, "no schedule"),
        ({"min_lr_ratio": 0.1}, "no schedule"),
        ({"schedule": "cosine"}, "max_steps"),
        ({"schedule": "cosine", "max_steps": 5, "warmup_steps": 5}, "Warm up for fewer"),
        ({"schedule": "one_cycle", "max_steps": 5, "warmup_steps": 1}, "at least 2 steps"),
        ({"allocator": "system", "allocator_retain_limit": "1GB"}, "keeps nothing"),
        ({"early_stopping_mode": "max"}, "early_stopping_patience"),
        ({"early_stopping_min_delta": 1.0}, "early_stopping_patience"),
        ({"early_stopping_restore_best": True}, "early_stopping_patience"),
        ({"precision": "fp16", "nonfinite": "raise"}, "loss scale"),
        ({"grad_scaler": "on", "nonfinite": "propagate"}, "loss scale"),
    ],
)
def test_settings_that_leave_each_other_without_effect_are_refused(settings: dict[str, Any], said: str) -> None:
    if settings.get("nonfinite") == "propagate":
        settings = {**settings, "level": "advanced"}
    for user in ("trainer", "performance_optimizer", "own_step", "cpp_trainer"):
        if user == "own_step" and "nonfinite" in settings:
            continue  # refused there as it is
        with pytest.raises(ValueError, match=said):
            ox.PerformanceConfig(**settings).check(user)


@pytest.mark.parametrize(
    ("own", "settings", "said"),
    [
        (
            {"clip_norm": 1.0},
            {"clip_norm": 0.5},
            r"clip_norm = 0\.5 was given to the trainer.*clip_norm = 1\b",
        ),
        ({"clip_value": 1.0}, {"clip_value": 0.5}, "clip_value"),
        ({"ema_decay": 0.9}, {"ema_decay": 0.99}, "ema_decay"),
        ({"nonfinite": "raise"}, {"nonfinite": "skip"}, "nonfinite"),
        ({}, {"nonfinite": "raise"}, "nonfinite = skip"),
        ({"nonfinite": "rollback"}, {"nonfinite": "skip"}, "rollback"),
    ],
)
def test_what_an_optimizer_of_ours_was_told_otherwise_is_refused(own: Any, settings: Any, said: str) -> None:
    model = net()
    optimizer = ox.optim.AdamW(model.parameters(), **own)
    with pytest.raises(ValueError, match=said):
        ox.Trainer(model, optimizer, CRITERION, **settings)
    if own:
        agreed = {key: own[key] for key in settings if own[key] != "rollback"}
        chosen = ox.Trainer(model, optimizer, CRITERION, calibrate=False, **EXACT, **agreed)
        chosen.step(batches(1)[0])
        chosen.revert()


@pytest.mark.parametrize("option", ["clip_norm", "clip_value", "ema_decay"])
def test_what_the_optimizer_and_the_trainer_agree_on_is_done_once(option: str) -> None:
    value = {"clip_norm": 0.01, "clip_value": 0.001, "ema_decay": 0.5}[option]
    ends = []
    for own, given in (({option: value}, {option: value}), ({}, {option: value}), ({option: value}, {})):
        model = net()
        optimizer = ox.optim.SGD(model.parameters(), lr=1.0, **own)
        chosen = ox.Trainer(model, optimizer, CRITERION, "basic", calibrate=False, **EXACT, **given)
        for batch in batches(3):
            chosen.step(batch)
        ends.append([p.detach().clone() for p in model.parameters()])
        if option == "ema_decay":
            with chosen.ema_weights():
                ends[-1] += [p.detach().clone() for p in model.parameters()]
    for other in ends[1:]:
        for a, b in zip(ends[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_what_comes_with_the_level_yields_to_the_optimizers_own() -> None:
    model = net()
    optimizer = ox.optim.AdamW(model.parameters(), nonfinite="raise")
    chosen = ox.Trainer(model, optimizer, CRITERION, calibrate=False, **EXACT)
    assert "raise" in chosen.report()["nonfinite"].reason
    with pytest.raises(RuntimeError, match="inf or NaN"):
        chosen.step(poisoned())
    chosen.revert()


@pytest.mark.parametrize("flag", ["norm_in_backward", "step_in_backward"])
def test_clip_value_comes_too_late_for_an_optimizer_that_works_in_backward(flag: str) -> None:
    model = net()
    optimizer = ox.optim.AdamW(model.parameters(), nonfinite="propagate", **{flag: True})
    with pytest.raises(NotImplementedError, match=f"clip_value=0.5.*{flag}"):
        ox.Trainer(model, optimizer, CRITERION, clip_value=0.5)


@pytest.mark.parametrize(
    ("name", "tail"),
    [("SGD", "on"), ("AdamW", "on"), ("SGD", "off"), ("AdamW", "off"), ("Adadelta", "on"), ("RAdam", "on")],
)
def test_a_step_that_is_not_finite_is_left_out_whatever_the_optimizer(name: str, tail: str) -> None:
    """Replaced or not: weights, state and averages are as if the batch had not been there."""
    ends = []
    for data in ([batches(2)[0], poisoned(), batches(2)[1]], batches(2)):
        model = net()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        chosen = ox.Trainer(model, optimizer, CRITERION, calibrate=False, ema_decay=0.5, step_tail=tail, **EXACT)
        assert chosen.has_tail == (tail == "on" and name in ("SGD", "AdamW"))
        for batch in data:
            chosen.step(batch)
        ends.append([p.detach().clone() for p in model.parameters()])
        with chosen.ema_weights():
            ends[-1] += [p.detach().clone() for p in model.parameters()]
        assert chosen.report().counters.get("skipped", 0) == len(data) - 2
        assert chosen.report()["nonfinite"].state == "on"
        chosen.revert()
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b)


def test_finite_gradients_whose_norm_overflows_are_stepped_with() -> None:
    model = nn.Linear(2, 1, bias=False)
    chosen = ox.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=1e-30), lambda m, x: m(x).sum(), "basic", nonfinite="skip",
        calibrate=False,
    )  # fmt: skip
    assert float(moved(chosen, torch.full((1, 2), 3e38)).abs().min()) > 0


@pytest.mark.parametrize(("warmup", "least"), [(0, 0.0), (4, 0.0), (0, 0.25), (6, 0.1), (2, 1.0)])
def test_one_cycle_is_torchs_with_the_shape_that_was_asked_for(warmup: int, least: float) -> None:
    shape: dict[str, float] = {}
    if warmup:
        shape["pct_start"] = warmup / 20
    if least:
        shape["final_div_factor"] = 1 / (25 * least)
    other = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9)
    expected = torch.optim.lr_scheduler.OneCycleLR(other, max_lr=0.1, total_steps=20, **shape)  # type: ignore[arg-type]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    chosen = ox.Trainer(
        model, optimizer, CRITERION, "basic", schedule="one_cycle", max_steps=20, warmup_steps=warmup,
        min_lr_ratio=least, calibrate=False,
    )  # fmt: skip
    seen = []
    for batch in batches(19):
        seen.append(optimizer.param_groups[0]["lr"])
        assert seen[-1] == other.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["momentum"] == other.param_groups[0]["momentum"]
        chosen.step(batch)
        other.step()
        expected.step()
    if warmup:
        assert max(range(19), key=seen.__getitem__) == warmup - 1
    if least:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * least)


def test_deterministic_algorithms_are_taken_back_to_what_was() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = trainer(deterministic=True), trainer(deterministic=True)
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        first.revert()
        assert not torch.is_deterministic_algorithms_warn_only_enabled(), "the second still wants them"
        second.revert()
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_constructor_that_refuses_takes_the_process_back() -> None:
    before = _C.trainer.flush_state()
    with pytest.raises(ValueError, match="parameter of the model"):
        ox.Trainer(net(), torch.optim.SGD(net().parameters()), CRITERION, deterministic=True, flush_denormals="on")
    assert not torch.are_deterministic_algorithms_enabled() and _C.trainer.flush_state() == before


def test_a_closure_under_compile_is_refused() -> None:
    model = net()
    chosen = ox.Trainer(model, torch.optim.SGD(model.parameters()), config="basic", compile="default")
    x, y = batches(1)[0]
    with pytest.raises(NotImplementedError, match=r"compile = 'default'.*closure"):
        chosen.step(lambda: CRITERION(model(x), y))


@pytest.mark.parametrize(
    ("config", "options", "error", "said"),
    [
        ({"precision": "fp16"}, {}, NotImplementedError, "precision = 'fp16'.*loss scale"),
        ({"optimizer_state": "bf16"}, {}, NotImplementedError, "state_dtype='bf16'"),
        ({"level": "basic", "precision": "bf16"}, {}, ValueError, "level 'basic' does not allow it"),
        ({"optimizer_state": "int8"}, {}, ValueError, "level 'advanced' does not allow it"),
        ({"compile": "default"}, {"exclude": ["compile", "compile_dynamic"]}, ValueError, "compile is not to be tried"),
        ({"channels_last": "on"}, {"strategies": ["allocator"]}, ValueError, "channels_last is not to be tried"),
    ],
)
def test_values_that_cannot_be_brought_about_are_refused_before_anything_runs(
    config: dict[str, Any], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    ran: list[int] = []

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        ran.append(1)
        return CRITERION(model(batch[0]), batch[1])

    model = net()
    with pytest.raises(error, match=said):
        ox.accelerate(model, torch.optim.Adam(model.parameters()), loss_fn, batches(), config=config, **options)
    assert not ran


def test_what_is_asked_for_and_wrong_is_refused_and_what_does_not_apply_is_said(clock: Clock) -> None:
    class Lie(Strategy):
        name, kind, group = "channels_last", "exact", "layout"

        def apply(self, run: Run) -> None:
            run.call.outputs("lie", lambda out: out * 1.5)

        def revert(self, run: Run) -> None:
            run.call.outputs("lie", None)

    class Elsewhere(Lie):
        def applies(self, run: Run) -> bool | str:
            return "the model has no convolution"

    for cls, said in ((Lie, "channels_last = 'on' asks for it, and it cannot be"), (Elsewhere, "no convolution")):
        with only(cls):
            lines: list[str] = []
            ox.base.set_log_sink(lambda _level, text, lines=lines: lines.append(text))
            try:
                plan = tuned(clock, {"channels_last": "on"})
            finally:
                ox.base.set_log_sink(None)
        assert plan.accepted == () and said in plan.rejected["channels_last"]
        assert any("channels_last = 'on' is refused" in line for line in lines)
        plan.revert()
