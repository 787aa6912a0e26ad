"""Every setting does in `accelerate` what it says."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import _C
from oxytorch._C import base as native
from oxytorch.tune import Run
from planted import Clock, Net, batches, clock, hoarding, made, only
from torch import nn

from .setting_values import (
    CRITERION,
    GIVEN,
    HIDDEN,
    interop_asked,
    limit_asked,
    net,
    planted,
    rows,
    tuned,
)

pytestmark = pytest.mark.cpu_only("plants times")
__all__ = ["clock"]


def forced(clock: Clock, key: str, value: Any, name: str, group: str, kind: Any, level: str = "advanced") -> bool:
    """Active where asked for, beside nothing else of its group; not active otherwise; gone after revert()."""
    other = made(clock, "rest", 0.001)
    other.name, other.group, other.kind = f"other_{group}", group, "exact"
    with only(planted(clock, name, group, kind), other):
        free = tuned(clock, {"level": level})
        # Of updates, which are timed by themselves first, neither is faster here.
        kept = name not in free.accepted and (other.name in free.accepted) == (group != "optimizer")
        free.revert()
        asked = tuned(clock, {"level": level, key: value})
        assert f"{key} = {value!r}" in asked.report()[name].reason
        kept = kept and asked.accepted == (name,) and clock.cost["slow"] == 0.02
        asked.step(batches(1)[0])
        asked.revert()
    return kept and clock.cost == {"slow": 0.01, "rest": 0.01}


def accelerated_level(clock: Clock) -> bool:
    rounding = planted(clock, "rounds", kind="tolerance", seconds=0.001)
    with only(rounding):
        return tuned(clock, {"level": "basic"}).accepted == () and tuned(clock).accepted == ("rounds",)


def accelerated_process(clock: Clock) -> bool:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    flushing = _C.trainer.flush_state()[0]
    try:
        with only():
            asked = {"threads": 1, "flush_denormals": "on", "deterministic": True, "allocator": "retain"}
            plan = tuned(clock, {**asked, "memory_limit": "90%", "gradient_checkpointing": "1GiB"})
            on = (
                torch.get_num_threads(), _C.trainer.flush_state()[0], torch.are_deterministic_algorithms_enabled(),
                ox.memory.limit() is not None,
            )  # fmt: skip
            said = plan.explain()
            plan.revert()
        off = (
            torch.get_num_threads(), _C.trainer.flush_state()[0], torch.are_deterministic_algorithms_enabled(),
            ox.memory.limit() is not None,
        )  # fmt: skip
        told = all(
            f"Asked for: {n}: on" in said
            for n in ("threads", "flush_denormals", "deterministic", "memory_limit", "gradient_checkpointing")
        )
        return (
            on == (1, 1, True, True) and off == (2, flushing, False, False) and told and "Asked for: allocator" in said
        )
    finally:
        torch.set_num_threads(before)


def accelerated_limit(monkeypatch: pytest.MonkeyPatch) -> bool:
    run: Any = Run(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters()), CRITERION, batches(1))
    kept = ox.tune.STRATEGIES["allocator"]()
    run.asked = {"retain_limit": 64 << 20}
    asked = limit_asked(monkeypatch, lambda: kept._make(run).revert())
    config = {"allocator": "retain", "allocator_retain_limit": "65MiB"}
    model = nn.Linear(6, 3)
    plan: Any = None

    def make() -> None:
        nonlocal plan
        plan = ox.accelerate(
            model, torch.optim.SGD(model.parameters()), CRITERION, batches(), config=config, strategies=[],
            remember=False,
        )  # fmt: skip

    asked += limit_asked(monkeypatch, make)
    plan.revert()
    return asked[:1] == [64 << 20] and asked[-1] == 65 << 20


def accelerated_clip(clock: Clock) -> bool:
    with only():
        model = Net(clock)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        plan = ox.accelerate(
            model, optimizer, CRITERION, batches(), config={"clip_norm": 0.01}, loop="plan", remember=False
        )
        before = [p.detach().clone() for p in model.parameters()]
        plan.step(batches(1)[0])
        change = [(b - a).detach().flatten() for a, b in zip(before, model.parameters(), strict=True)]
        return abs(float(torch.cat(change).norm()) - 0.01) < 1e-5


def order(clock: Clock, **options: Any) -> list[int]:
    """Which steps of a search are taken with the strategy."""
    seen: list[int] = []
    cheaper = made(clock, "slow", 0.002)
    own = clock.pass_step

    def noted() -> None:
        seen.append(int(clock.cost["slow"] == 0.002))
        own()

    clock.pass_step = noted  # type: ignore[method-assign]
    try:
        with only(cheaper):
            tuned(clock, **options).revert()
    finally:
        clock.pass_step = own  # type: ignore[method-assign]
    return seen


def accelerated_seed(clock: Clock) -> bool:
    one = order(clock, config={"seed": 1})
    others = [order(clock, config={"seed": seed}) for seed in (2, 3, 4)]
    return one == order(clock, config={"seed": 1}) == order(clock, seed=1) and any(o != one for o in others)


def shows_progress(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> bool:
    module = importlib.import_module("oxytorch.tune.accelerate")
    seen: list[Any] = []
    own = module._line
    monkeypatch.setattr(module, "_line", lambda progress: (seen.append(progress), own(False))[1])
    with only():
        for config in ({"progress": "on"}, {"progress": "off"}, {}):
            tuned(clock, config)
    return seen == [True, False, None]


def planned(clock: Clock, **config: Any) -> int:
    with only():
        return int(tuned(clock, config).certificate.steps_planned)


def kept(clock: Clock, config: dict[str, Any] | None = None, **options: Any) -> tuple[str, ...]:
    """What a search keeps; everything is taken back."""
    plan = tuned(clock, config, **options)
    plan.revert()
    return tuple(plan.accepted)


def tunes_for(clock: Clock) -> bool:
    with only(made(clock, "slow", 0.002), made(clock, "rest", 0.002)):
        little, enough = (kept(clock, {"tune_seconds": seconds}, tune_seconds=None) for seconds in (1e-4, 5.0))
    return (len(little), len(enough)) == (1, 2)


def stores(clock: Clock, tmp_path: Path) -> bool:
    folder = tmp_path / "own"
    with only(made(clock, "slow", 0.002)):
        for remember in (False, True):
            assert kept(clock, {"remember": remember}, remember=str(folder)) == ("cheaper_slow",)
            assert folder.exists() == remember
    return True


def grows(clock: Clock) -> bool:
    with only(hoarding(clock)):
        return (kept(clock), kept(clock, {"max_growth": 1e6}), kept(clock, max_growth=1e6)) == (
            (),
            ("hoards",),
            ("hoards",),
        )


def explained_for_memory(clock: Clock) -> str:
    plan = tuned(clock, {"goal": "memory"}, strategies=[])
    said = plan.explain()
    plan.revert()
    return said


def drawn_from(key: str, native: bool = False) -> tuple[Any, str]:
    """`plan.data` with a setting of a loader, and the setting's state; everything is taken back."""
    given, model = rows(native), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = ox.accelerate(model, optimizer, CRITERION, given, config={key: GIVEN[key]}, strategies=[], remember=False)
    data, (line,) = plan.data, (line for line in plan.report().settings if line.name == key)
    assert f"Asked for: {key}: {line.state}" in plan.explain()
    assert all(torch.equal(a, b) for old, new in zip(rows(), data, strict=True) for a, b in zip(old, new, strict=True))
    plan.revert()
    assert plan.data is given
    return data, line.state


def accumulates(clock: Clock) -> bool:
    plan = tuned(clock, {"accumulation_steps": 2}, strategies=[], loop="plan")
    before = [p.detach().clone() for p in plan._run.params]
    moved_by = []
    for batch in batches(2):
        plan.step(batch)
        moved_by.append(any(not p.equal(old) for p, old in zip(plan._run.params, before, strict=True)))
    plan.revert()
    return moved_by == [False, True]


ACCELERATE: dict[str, Callable[..., Any]] = {
    "level": accelerated_level,
    "precision": lambda clock: forced(clock, "precision", "bf16", "bf16_autocast", "precision", "precision"),
    "channels_last": lambda clock: forced(clock, "channels_last", "on", "channels_last", "layout", "tolerance"),
    "threads": accelerated_process,
    "interop_threads": lambda clock, monkeypatch: interop_asked(
        monkeypatch, lambda: tuned(clock, {"interop_threads": 3}, strategies=[]).revert()
    ),
    "flush_denormals": accelerated_process,
    "allocator": accelerated_process,
    "allocator_retain_limit": accelerated_limit,
    "step_tail": lambda clock: forced(clock, "step_tail", "on", "step_tail", "optimizer", "tolerance"),
    "optimizer_state": lambda clock: (
        forced(clock, "optimizer_state", "int8", "int8_state", "optimizer", "trade", level="ultra")
        and forced(clock, "optimizer_state", "file", "state_in_file", "optimizer", "exact")
    ),
    "attention": lambda clock: (
        forced(clock, "attention", "math", "math_attention", "attention", "tolerance")
        and forced(clock, "attention", "native", "native_attention", "attention", "tolerance")
    ),
    "compile": lambda clock: (
        forced(clock, "compile", "default", "compile", "compile", "tolerance")
        and forced(clock, "compile", "max-autotune", "compile_max_autotune", "compile", "tolerance")
    ),
    "accumulation_steps": accumulates,
    "clip_norm": accelerated_clip,
    "max_steps": lambda clock: (planned(clock, max_steps=7), planned(clock)) == (7, 10_000),
    "steps_planned": lambda clock: planned(clock, steps_planned=77, max_steps=7) == 77,
    "tune_seconds": tunes_for,
    "remember": stores,
    "seed": accelerated_seed,
    "memory_limit": accelerated_process,
    "goal": lambda clock: "gradient_checkpointing" in explained_for_memory(clock),
    "max_slowdown": lambda clock: (
        tuned(clock, {"goal": "memory", "max_slowdown": 1.75}, strategies=[]).asked.max_slowdown == pytest.approx(1.75)
    ),
    "max_growth": grows,
    "gradient_checkpointing": accelerated_process,
    "saved_tensors": lambda clock: (
        tuned(clock, {"goal": "memory", "saved_tensors": "bf16"}, strategies=[]).asked.saved_tensors == "bf16"
    ),
    "num_workers": lambda: drawn_from("num_workers")[0].num_workers == 2 and drawn_from("num_workers", True)[1] == "on",
    "prefetch": lambda: drawn_from("prefetch")[0].ahead == 3 and drawn_from("prefetch", native=True)[1] == "on",
    "pin_memory": lambda: drawn_from("pin_memory")[1] == ("on" if torch.accelerator.is_available() else "refused"),
    "cache": lambda: (drawn_from("cache")[1], drawn_from("cache", native=True)[1]) == ("refused", "on"),
    "deterministic": accelerated_process,
    "progress": shows_progress,
}


def test_every_setting_that_accelerate_takes_is_here() -> None:
    assert set(ACCELERATE) == {key for key in GIVEN if not native.setting_refusal(key, "accelerate")}


@pytest.mark.parametrize("key", list(ACCELERATE))
def test_accelerate_honours(key: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shows = ACCELERATE[key]
    fixtures = {"clock": clock, "tmp_path": tmp_path, "monkeypatch": monkeypatch}
    assert shows(**{name: fixtures[name] for name in inspect.signature(shows).parameters})


def test_the_options_of_accelerate(clock: Clock, tmp_path: Any) -> None:
    keywords = [p.name for p in inspect.signature(ox.accelerate).parameters.values() if p.kind is p.KEYWORD_ONLY]
    shown = {
        "level", "steps_planned", "config", "strategies", "exclude", "step", "clip_norm", "loop", "state", "remember",
        "tune_seconds", "seed", "progress", "goal", "max_slowdown", "max_growth", "memory",
    }  # fmt: skip
    # config, level, seed and progress: above; goal, max_slowdown and memory: tests/tune/test_goal.py; max_growth: above
    assert set(keywords) == shown
    one, other = made(clock, "slow", 0.002), made(clock, "rest", 0.002)
    loop = made(clock, "slow", 0.001)
    loop.name, loop.needs_loop = "in_the_loop", True

    def own(batch: Any) -> torch.Tensor:
        torch.rand(1, generator=globals()["HIDDEN"])  # so that nothing but state= leads there
        loss = CRITERION(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = Net(clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with only(one, other, loop):
        assert kept(clock, strategies=["cheaper_rest"]) == ("cheaper_rest",)
        assert kept(clock, exclude=["cheaper_rest"]) == ("cheaper_slow",)
        assert kept(clock, loop="plan", strategies=["in_the_loop"]) == ("in_the_loop",)
        assert "loop='plan'" in tuned(clock, strategies=["in_the_loop"]).rejected["in_the_loop"]
        assert tuned(clock, steps_planned=123, strategies=[]).certificate.steps_planned == 123
        assert len(kept(clock, tune_seconds=1e-4, strategies=["cheaper_slow", "cheaper_rest"])) == 1
        events = []
        for _ in range(2):
            plan = tuned(clock, remember=str(tmp_path), strategies=["cheaper_rest"])
            events.append(list(plan.certificate.events))
            plan.revert()
        assert not events[0] and "reused" in events[1][0]
        for held in (True, False):
            before = HIDDEN.get_state()
            options: dict[str, Any] = {"state": [HIDDEN]} if held else {}
            ox.accelerate(model, optimizer, None, batches(), step=own, strategies=[], remember=False, **options)
            assert torch.equal(before, HIDDEN.get_state()) == held
        with pytest.raises(ValueError, match=r"clip_norm = 1 was given beside step="):
            ox.accelerate(model, optimizer, None, batches(), step=own, clip_norm=1.0)


def test_the_watch_leaves_alone_what_was_asked_for(clock: Clock) -> None:
    """It is slower, and stays; what the search found is still taken back where it stops paying."""
    cheaper = made(clock, "rest", 0.002)
    with only(planted(clock, "channels_last", "layout", "exact"), cheaper):
        plan = tuned(clock, {"channels_last": "on"}, steps_planned=100_000)
        assert set(plan.accepted) == {"channels_last", "cheaper_rest"}
        cheaper.apply = lambda self, run: clock.cost.update(rest=0.05)  # type: ignore[method-assign]
        plan._run.set_active(())
        assert plan._run.active == ("channels_last",)
        plan._run.set_active(["cheaper_rest"])
        for batch in batches(4) * 100:
            plan.step(batch)
            if plan.certificate.events:
                break
        assert "cheaper_rest" in plan.certificate.events[-1] and "channels_last" not in plan.certificate.events[-1]
        assert plan._run.active == ("channels_last",) and plan.accepted == ("channels_last",)
        plan.revert()
    assert plan._run.active == () and clock.cost["slow"] == 0.01


def test_settings_of_the_process_are_taken_back_where_accelerate_fails(clock: Clock) -> None:
    def fails(_model: nn.Module, _batch: Any) -> torch.Tensor:
        raise KeyError("the user's own")

    model = Net(clock)
    before = _C.trainer.flush_state()
    with only(), pytest.raises(KeyError, match="the user's own"):
        ox.accelerate(
            model, torch.optim.SGD(model.parameters(), lr=0.1), fails, batches(),
            config={"deterministic": True, "flush_denormals": "on"}, remember=False,
        )  # fmt: skip
    assert not torch.are_deterministic_algorithms_enabled() and _C.trainer.flush_state() == before
