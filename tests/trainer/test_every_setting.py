"""Every setting of a configuration and every keyword has an effect, or is refused with a sentence: no row, no merge."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import _C
from oxytorch._C import base as native
from planted import Clock, Net, batches, clock, hoarding, made, only, useless
from torch import nn

from .setting_values import (
    CRITERION,
    EXACT,
    GIVEN,
    LOOP,
    NOT_YET,
    WITH,
    closed,
    interop_asked,
    limit_asked,
    moved,
    net,
    own_step,
    planted,
    poisoned,
    rows,
    trainer,
)

pytestmark = pytest.mark.cpu_only("plants times")
__all__ = ["clock"]

KEYS = list(ox.PerformanceConfig().to_dict())
LOADER = {"num_workers", "prefetch", "pin_memory", "cache"}
REFUSED = {
    "trainer": NOT_YET,
    "accelerate": NOT_YET | LOOP,
    "performance_optimizer": NOT_YET,
    "own_step": NOT_YET | {"accumulation_steps", "clip_value", "nonfinite", "grad_scaler"},
    "cpp_trainer": NOT_YET | {"compile", "interop_threads"},
    "cpp_accelerate": NOT_YET | LOOP | {"interop_threads"} | LOADER,
}


def test_every_setting_has_a_value_here_and_a_row_in_the_native_table() -> None:
    assert list(GIVEN) == KEYS
    assert set(TRAINER) | REFUSED["trainer"] == set(KEYS)
    for user, refused in REFUSED.items():
        assert {key for key in KEYS if native.setting_refusal(key, user)} == refused, user
    for key, value in GIVEN.items():
        config = ox.PerformanceConfig(**{key: value})
        assert config.is_given(key) == (key != "level") and not ox.PerformanceConfig().is_given(key)


def calls(user: str, config: Any) -> Any:
    """What takes the configuration."""
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if user == "trainer":
        return ox.Trainer(model, optimizer, CRITERION, config)
    if user == "accelerate":
        return ox.accelerate(model, optimizer, CRITERION, batches(), config=config, strategies=[], remember=False)
    prepare = ox.PerformanceOptimizer(config).prepare
    if user == "own_step":
        return prepare(model, optimizer, batches(), step=own_step(model, optimizer), strategies=[], remember=False)
    return prepare(model, optimizer, batches(), CRITERION, strategies=[], remember=False)


@pytest.mark.parametrize(
    ("user", "key"), [(user, key) for user in REFUSED if not user.startswith("cpp_") for key in sorted(REFUSED[user])]
)
def test_what_cannot_be_honoured_is_refused(user: str, key: str) -> None:
    with pytest.raises(NotImplementedError) as refused:
        calls(user, {**WITH.get(key, {}), key: GIVEN[key]} if user != "accelerate" else {key: GIVEN[key]})
    said = str(refused.value)
    assert said.startswith(f"{key} = ") and "caller" in said, said
    assert said.count(". ") + said.count("; ") >= 1 and said.endswith("."), said  # why, and what to do
    default = ox.PerformanceConfig().to_dict()[key]
    user_again = "trainer" if user == "trainer" else "performance_optimizer"
    ox.PerformanceConfig(**{key: default}).check(user_again)  # a default asks for nothing


# -- the trainer -----------------------------------------------------------------------------------------------------


def rates(**settings: Any) -> list[float]:
    chosen = trainer(lr=0.1, **settings)
    found = []
    for batch in batches(6):
        found.append(chosen.optimizer.param_groups[0]["lr"])
        chosen.step(batch)
    return found


def seen_inside(look: Callable[[torch.Tensor], Any], **settings: Any) -> Any:
    """What is found in the model's forward in a step."""
    seen: list[Any] = []
    model = net()
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(look(out)))
    with closed(trainer(model=model, **settings)) as one:
        one.step(batches(1)[0])
    return seen[-1]


def attention_flag(path: str) -> bool:
    return bool(seen_inside(lambda _: torch.backends.cuda.flash_sdp_enabled(), attention=path))


def output_dtype(precision: str) -> torch.dtype:
    found: torch.dtype = seen_inside(lambda out: out.dtype, precision=precision)
    return found


def compiled_with(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Each mode hands the model's forward to the compiler, with options of its own."""
    options: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **given: (options.append(given), function)[1])
    for mode in ("off", "default", "max-autotune"):
        with closed(trainer(compile=mode)) as one:
            one.step(batches(1)[0])
    return len(options) == 2 and options[0] != options[1]


def decided(clock: Clock, **settings: Any) -> ox.Trainer:
    """A trainer that has seen its first batch."""
    model = Net(clock)
    chosen = ox.Trainer(model, torch.optim.Adam(model.parameters(), lr=1e-2), CRITERION, settings)
    chosen.step(batches(1)[0])
    return chosen


def on_with(clock: Clock, name: str, **settings: Any) -> bool:
    """Whether a trainer decides for a strategy."""
    with closed(decided(clock, **settings)) as chosen:
        return any(line.name == name and line.state == "on" for line in chosen.report().settings)


def trainer_level(clock: Clock) -> bool:
    with only(planted(clock, "rounds", kind="tolerance", seconds=0.001)):
        return not on_with(clock, "rounds", level="basic") and on_with(clock, "rounds", level="advanced")


def trainer_plans(clock: Clock) -> bool:
    """What costs something once is kept where the planned run repays it."""
    costly = made(clock, "slow", 0.002)
    costly.expected_cost = lambda self, run: 0.5  # type: ignore[method-assign]
    with only(costly):
        return not on_with(clock, costly.name, steps_planned=20) and on_with(clock, costly.name, steps_planned=10_000)


def trainer_grows(clock: Clock) -> bool:
    with only(hoarding(clock)):
        return not on_with(clock, "hoards") and on_with(clock, "hoards", max_growth=1e6)


def trainer_tunes_for(clock: Clock) -> bool:
    found = []
    for seconds in (0.3, 20.0):
        with only(made(clock, "slow", 0.002), made(clock, "rest", 0.002)):
            names = ("cheaper_slow", "cheaper_rest")
            found.append(sum(on_with(clock, name, tune_seconds=seconds) for name in names))
    return found[0] < found[1] == 2


def trainer_remembers(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The next run reuses what was found, where both may; another seed or bar is the same run."""
    monkeypatch.setenv("OXYTORCH_CACHE", str(tmp_path / "own"))
    took = []
    with only(made(clock, "slow", 0.002), *(useless(clock, number) for number in range(5))):
        for settings in ({"remember": False}, {"seed": 1}, {"seed": 2, "progress": "off"}, {"remember": False}):
            before = clock.now
            assert on_with(clock, "cheaper_slow", **settings)
            took.append(clock.now - before)
            assert (tmp_path / "own").exists() == (len(took) > 1)
    assert took[2] < took[1] / 2 and took[3] > took[1] / 2, took
    return True


def trainer_layout() -> bool:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    chosen = trainer(model=model, channels_last="on")
    chosen.step((torch.randn(2, 3, 6, 6), torch.zeros(2, dtype=torch.long)))
    on = model[0].weight.is_contiguous(memory_format=torch.channels_last)
    chosen.revert()
    return on and not model[0].weight.is_contiguous(memory_format=torch.channels_last)


def trainer_threads() -> bool:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with closed(trainer(threads=1)):
            one = torch.get_num_threads()
        return (one, torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(before)


def trainer_denormals() -> bool:
    before = _C.trainer.flush_state()  # a trainer of another test may have left one of torch's threads flushing
    with closed(trainer(flush_denormals="on")):
        on = _C.trainer.flush_state()
    return before[0] < on[0] == on[1] and _C.trainer.flush_state() == before


def states(name: str, *values: dict[str, Any]) -> list[str]:
    found = []
    for value in values:
        with closed(trainer(**value)) as one:
            one.step(batches(1)[0])
            found.append(one.report()[name].state)
    return found


def trainer_limit(monkeypatch: pytest.MonkeyPatch) -> bool:
    asked = limit_asked(monkeypatch, lambda: trainer(allocator="retain", allocator_retain_limit="64MiB").revert())
    return asked == [64 << 20]


def trainer_state() -> bool:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    chosen = ox.Trainer(model, optimizer, CRITERION, optimizer_state="int8", calibrate=False, **EXACT)
    chosen.step(batches(1)[0])
    inside = chosen.optimizer.state[next(model.parameters())]["exp_avg"].dtype
    chosen.revert()
    narrow = (inside, optimizer.state[next(model.parameters())]["exp_avg"].dtype) == (torch.int8, torch.float32)
    in_file = trainer(optimizer_state="file")
    return narrow and in_file.report()["optimizer_state"].state == "on" and not in_file.has_tail


def trainer_average() -> bool:
    chosen = trainer(ema_decay=0.5)
    start = next(chosen.model.parameters()).detach().clone()
    chosen.step(batches(1)[0])
    end = next(chosen.model.parameters()).detach().clone()
    with chosen.ema_weights():
        average = next(chosen.model.parameters()).detach().clone()
    return torch.allclose(average, (start + end) / 2, atol=1e-6) and not torch.equal(start, end)


def trainer_nonfinite() -> bool:
    skipped = bool(moved(trainer(nonfinite="skip"), poisoned()).abs().sum() == 0)
    propagated = bool(moved(trainer(nonfinite="propagate"), poisoned()).isnan().all())
    raising = trainer(nonfinite="raise")
    with pytest.raises(RuntimeError, match=r"inf or NaN in gradient 0 of 4.*nonfinite = 'skip'"):
        raising.step(poisoned())
    return skipped and propagated and all(p.grad is None for p in raising.model.parameters())


def stopped(values: list[float], **settings: Any) -> tuple[int, list[torch.Tensor], list[list[torch.Tensor]]]:
    """Epochs until early stopping, the weights at the end, and those of each epoch."""
    chosen = trainer(lr=0.1, **settings)
    left = iter(values)
    seen: list[list[torch.Tensor]] = []

    def validate(_: ox.Trainer) -> float:
        seen.append([p.detach().clone() for p in chosen.model.parameters()])
        return next(left)

    result = chosen.fit(batches(2), epochs=len(values), validate=validate, progress=False)
    return len(result.history), [p.detach().clone() for p in chosen.model.parameters()], seen


def restores() -> bool:
    epochs, end, seen = stopped([1.0, 2.0, 3.0], early_stopping_patience=2, early_stopping_restore_best=True)
    return epochs == 3 and all(torch.equal(a, b) for a, b in zip(end, seen[0], strict=True))


def draws(seed: int) -> list[float]:
    import random

    import numpy as np

    trainer(model=nn.Linear(6, 3), seed=seed)
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def trainer_deterministic() -> bool:
    with closed(trainer(deterministic=True)), closed(trainer(deterministic=True)):
        on = torch.are_deterministic_algorithms_enabled()
    return on and not torch.are_deterministic_algorithms_enabled()


def trainer_memory() -> bool:
    with closed(trainer(memory_limit="90%")), closed(trainer(memory_limit="80%")):
        held = ox.memory.limit()
    return held == ox.base.parse_size("80%", ox.base.system_info()["memory"]["limit"]) and ox.memory.limit() is None


def checkpointed() -> bool:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 60), nn.ReLU(), nn.Linear(60, 6)) for _ in range(4)))
    with closed(trainer(model=model, gradient_checkpointing="1GiB")) as one:
        one.step(batches(1)[0])
        (line,) = (line for line in one.report().settings if line.name == "gradient_checkpointing")
    return line.state == "on" and "of the budget of 1.00 GiB as it is" in line.reason


def least(slowdown: float, **settings: Any) -> str:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 60), nn.ReLU(), nn.Linear(60, 6)) for _ in range(4)))
    x = torch.randn(3000, 6), torch.randint(3, (3000,))
    with closed(trainer(model=model, goal="memory", max_slowdown=slowdown, **settings)) as one:
        one.step(x)
        (line,) = (line for line in one.report().settings if line.name == "gradient_checkpointing")
    return line.reason


def bar(capfd: pytest.CaptureFixture[str], setting: str) -> bool:
    capfd.readouterr()
    trainer(progress=setting).fit(batches(2))
    return "epoch 1" in capfd.readouterr().err


def fed(key: str, native: bool = False) -> tuple[Any, str, str]:
    """The loader that fit draws from with a setting of a loader (of ours its figures), and the setting's line."""
    given = rows(native)
    with closed(trainer(**{key: GIVEN[key]})) as one:
        seen: list[Any] = []
        note = [lambda of, _: seen.append(of._loader.stats() if native else of._loader)]
        one.fit(given, progress=False, callbacks=note)
        (line,) = (line for line in one.report().settings if line.name == key)
    return seen[0], line.state, line.reason


TRAINER: dict[str, Callable[..., Any]] = {
    "level": trainer_level,
    "precision": lambda: (output_dtype("bf16"), output_dtype("fp32")) == (torch.bfloat16, torch.float32),
    "channels_last": trainer_layout,
    "threads": trainer_threads,
    "interop_threads": lambda monkeypatch: interop_asked(monkeypatch, lambda: trainer(interop_threads=3).revert()),
    "flush_denormals": trainer_denormals,
    "allocator": lambda: (
        states("allocator", {"allocator": "system"}) == ["off"] != states("allocator", {"allocator": "retain"})
    ),
    "allocator_retain_limit": trainer_limit,
    "step_tail": lambda: type(trainer(step_tail="on").optimizer) is ox.optim.SGD,
    "optimizer_state": trainer_state,
    "attention": lambda: (attention_flag("math"), attention_flag("default")) == (False, True),
    "compile": compiled_with,
    "accumulation_steps": lambda: float(moved(trainer(accumulation_steps=2)).abs().sum()) == 0,
    "clip_norm": lambda: abs(float(moved(trainer(clip_norm=0.01)).norm()) - 0.01) < 1e-5,
    "clip_value": lambda: abs(float(moved(trainer(clip_value=0.001)).abs().max()) - 0.001) < 1e-6,
    "ema_decay": trainer_average,
    "nonfinite": trainer_nonfinite,
    "grad_scaler": lambda: states("grad_scaler", {"grad_scaler": "on"}, {"grad_scaler": "off"}) == ["on", "off"],
    "schedule": lambda: rates(schedule="cosine", max_steps=7) != rates() == [0.1] * 6,
    "warmup_steps": lambda: rates(schedule="cosine", max_steps=7, warmup_steps=2)[0] == pytest.approx(0.1 / 3),
    "min_lr_ratio": lambda: min(rates(schedule="cosine", max_steps=7, min_lr_ratio=0.5)) > 0.05,
    "max_steps": lambda: trainer(max_steps=3).fit(batches(5), progress=False).steps == 3,
    "steps_planned": trainer_plans,
    "tune_seconds": trainer_tunes_for,
    "remember": trainer_remembers,
    "early_stopping_patience": lambda: stopped([1.0, 2.0, 3.0], early_stopping_patience=1)[0] == 2,
    "early_stopping_min_delta": lambda: (
        stopped([3.0, 2.0, 1.0], early_stopping_patience=1)[0] == 3
        and stopped([3.0, 2.0, 1.0], early_stopping_patience=1, early_stopping_min_delta=100.0)[0] == 2
    ),
    "early_stopping_mode": lambda: (
        stopped([1.0, 2.0, 3.0], early_stopping_patience=1, early_stopping_mode="max")[0] == 3
    ),
    "early_stopping_restore_best": restores,
    "seed": lambda: draws(5) == draws(5) != draws(6),
    "memory_limit": trainer_memory,
    "goal": lambda: "That is the least where" in least(50.0),
    "max_slowdown": lambda: "as it is" in least(1.0),
    "max_growth": trainer_grows,
    "gradient_checkpointing": checkpointed,
    "saved_tensors": lambda: (
        "written to a file" in least(50.0, saved_tensors="file") and "written to a file" not in least(50.0)
    ),
    "num_workers": lambda: fed("num_workers")[0].num_workers == 2 and fed("num_workers", native=True)[1] == "on",
    "prefetch": lambda: fed("prefetch")[0].ahead == 3 and fed("prefetch", native=True)[1] == "on",
    "pin_memory": lambda: (
        fed("pin_memory")[1] == ("on" if torch.accelerator.is_available() else "refused")
        and "goes to an accelerator" in fed("pin_memory", native=True)[2]
    ),
    "cache": lambda: fed("cache")[1] == "refused" and "cache" in fed("cache", native=True)[0],
    "deterministic": trainer_deterministic,
    "progress": lambda capfd: bar(capfd, "on") and not bar(capfd, "off"),
}


@pytest.mark.parametrize("key", list(TRAINER))
def test_the_trainer_honours(key: str, request: pytest.FixtureRequest) -> None:
    shows = TRAINER[key]
    assert shows(**{name: request.getfixturevalue(name) for name in inspect.signature(shows).parameters})


def test_the_options_of_the_trainer() -> None:
    shown = {"scheduler", "monitor", "memory", "checkpointer", "callbacks", "calibrate", "plan"}  # plan: below
    keywords = [p.name for p in inspect.signature(ox.Trainer).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert set(keywords) == shown
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    monitor = ox.PerformanceMonitor()
    memory = ox.memory.MemoryManager()
    saved, losses = [], []
    chosen = ox.Trainer(
        model, optimizer, CRITERION, "basic", scheduler=scheduler, monitor=monitor, checkpointer=saved.append,
        callbacks=[lambda _t, loss: losses.append(float(loss))], calibrate=False, memory=memory,
    )  # fmt: skip
    chosen.fit(batches(3), progress=False)
    assert memory.steps == 3 and any(line.name == "memory" for line in chosen.report().settings)
    assert optimizer.param_groups[0]["lr"] == 0.125 and monitor.summary().steps == 3
    assert saved and len(losses) == 3
    for wrong in ({"monitor": True}, {"monitor": False}, {"checkpointer": 3}, {"memory": 1}, {"callbacks": [3]}):
        with pytest.raises(TypeError, match="expected"):
            ox.Trainer(model, optimizer, CRITERION, "basic", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="schedule = 'cosine' and a scheduler were given"):
        ox.Trainer(model, optimizer, CRITERION, schedule="cosine", max_steps=5, scheduler=scheduler)
    calls = itertools.count()  # which no trial can put back

    def counted(net: nn.Module, batch: Any) -> torch.Tensor:
        next(calls)
        return CRITERION(net(batch[0]), batch[1])

    for calibrate in (False, True):
        convolved = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(6, 3))
        step = torch.optim.SGD(convolved.parameters(), lr=0.1)
        before = next(calls)
        with closed(ox.Trainer(convolved, step, counted, calibrate=calibrate, precision="fp32")) as one:
            one.step((torch.randn(5, 1, 2, 3), batches(1)[0][1]))
        assert (next(calls) - before > 2) == calibrate
    for key in ("tune_seconds", "steps_planned", "remember"):
        with pytest.raises(ValueError, match=f"{key} = .*calibrate=False tries nothing"):
            ox.Trainer(model, optimizer, CRITERION, calibrate=False, **{key: GIVEN[key]})
