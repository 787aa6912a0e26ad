"""Nothing that fails after the search loses the plan: it is said and left out, or everything is taken back."""

from __future__ import annotations

import importlib
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch.tune import Plan, Strategy
from oxytorch.tune.remember import stored
from planted import Clock, Net, batches, clock, drifting, fingerprint, made, only, same
from torch import nn

pytestmark = pytest.mark.cpu_only("plants times and faults")
__all__ = ["clock"]

CRITERION = nn.CrossEntropyLoss()
PLAN = importlib.import_module("oxytorch.tune.plan")
ACCELERATE = importlib.import_module("oxytorch.tune.accelerate")


class Case:
    """A run that pays with one strategy, and what was logged meanwhile."""

    def __init__(self, clock: Clock, *classes: type[Strategy]) -> None:
        self.clock = clock
        self.model = Net(clock)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.before = fingerprint(self.model, self.optimizer)
        self.classes = classes or (made(clock, "slow", 0.002),)
        self.said: list[str] = []

    def accelerate(self, **options: Any) -> Plan:
        ox.base.set_log_sink(lambda _level, text: self.said.append(text))
        try:
            with only(*self.classes):
                return ox.accelerate(self.model, self.optimizer, CRITERION, batches(), **options)
        finally:
            ox.base.set_log_sink(None)

    def given_back(self) -> bool:
        """Whether nothing is active and nothing is left on the user's objects."""
        own = self.optimizer
        hooks = [own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks, self.model._forward_hooks]
        untouched = "step" not in vars(own) and "_compiled_call_impl" not in vars(self.model)
        same_state = same(self.before, fingerprint(self.model, own))
        return self.clock.cost == {"slow": 0.01, "rest": 0.01} and not any(hooks) and untouched and same_state


# -- the folder ------------------------------------------------------------------------------------------------------


def a_file_in_its_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.write_text("not a folder")
    return str(folder)


def below_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.write_text("not a folder")
    return str(folder / "below")


def read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return "/proc/oxytorch"  # not even root may make it


def no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("OXYTORCH_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    return "HOME"


def a_folder_in_place_of_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    inner = ACCELERATE.key

    def key(*arguments: Any) -> Any:
        found = inner(*arguments)
        (folder / f"{found.digest()}.json" / "full").mkdir(parents=True)
        return found

    monkeypatch.setattr(ACCELERATE, "key", key)
    return ".json"


FOLDERS = [a_file_in_its_place, below_a_file, read_only, no_home, a_folder_in_place_of_the_file]


@pytest.mark.parametrize("broken", FOLDERS, ids=lambda f: f.__name__)
def test_a_folder_that_cannot_be_written_costs_no_plan(
    broken: Callable[[Path, pytest.MonkeyPatch], str],
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OXYTORCH_CACHE", str(folder))
    named = broken(folder, monkeypatch)
    if named.startswith("/"):
        monkeypatch.setenv("OXYTORCH_CACHE", named)
    case = Case(clock)
    plan = case.accelerate()
    assert plan.accepted == ("cheaper_slow",) and clock.cost["slow"] == 0.002
    told = [text for text in case.said if "not stored" in text]
    assert len(told) == 1 and named[-16:] in told[0]  # a long path is shortened in its middle
    for said in (" ".join(plan.certificate.events), plan.report().verdict, plan.explain()):
        assert said.count("not stored") == 1 and named[-16:] in said
    case.optimizer.zero_grad()
    plan.step(batches(1)[0])
    plan.revert()
    assert clock.cost["slow"] == 0.01


@contextmanager
def no_space() -> Iterator[None]:
    """No file of this process may grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_no_plan_and_leaves_no_half_file(clock: Clock, tmp_path: Path) -> None:
    case = Case(clock)
    with no_space():
        plan = case.accelerate()
    assert plan.accepted == ("cheaper_slow",) and "not stored" in plan.certificate.events[0]
    assert not list((tmp_path / "cache").iterdir())
    plan.revert()


def test_without_any_folder_nothing_is_remembered_and_nothing_of_the_current_one_is_touched(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Case(clock).accelerate(remember=False)
    plan.save(tmp_path / "mine.json")
    plan.revert()
    monkeypatch.chdir(tmp_path)
    no_home(tmp_path, monkeypatch)
    assert stored() == []


@pytest.mark.parametrize("own_loop", [True, False])
def test_a_stored_plan_that_cannot_be_deleted_does_not_end_the_run(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_loop: bool
) -> None:
    Drifts = drifting(clock)
    case = Case(clock, Drifts)
    plan = case.accelerate(loop="yours" if own_loop else "plan")
    path, _ = stored()[0]
    path.unlink()
    (path / "full").mkdir(parents=True)
    Drifts.scale = 1.01
    for x, y in batches(60):
        if own_loop:
            case.optimizer.zero_grad()
            CRITERION(case.model(x), y).backward()
            case.optimizer.step()
        else:
            plan.step((x, y))
    assert plan.accepted == () and clock.cost["slow"] == 0.01
    assert [event for event in plan.certificate.events if "could not be deleted" in event]


# -- everything else that follows the search ---------------------------------------------------------------------------


def throws(error: type[BaseException]) -> Callable[..., Any]:
    def planted(*_: Any, **__: Any) -> Any:
        raise error("planted")

    return planted


def patched(point: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant an exception at a point after the search."""
    if point == "watch":
        monkeypatch.setattr(PLAN, "Watch", throws(error))
    elif point == "second hook":
        monkeypatch.setattr(torch.optim.Adam, "register_step_post_hook", throws(error))
    elif point == "giving back":
        monkeypatch.setattr(PLAN._C.memory, "give_back_host_memory", throws(error))


@pytest.mark.parametrize("point", ["watch", "second hook", "giving back"])
def test_what_fails_after_the_search_is_said_and_left_out(
    point: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(clock)
    if point == "second hook":  # the timing of updates uses hooks too, before the search
        inner = Plan.begin

        def begin(self: Plan, tuner: Any, **options: Any) -> None:
            patched(point, RuntimeError, monkeypatch)
            inner(self, tuner, **options)

        monkeypatch.setattr(Plan, "begin", begin)
    else:
        patched(point, RuntimeError, monkeypatch)
    plan = case.accelerate()
    assert plan.accepted == ("cheaper_slow",) and clock.cost["slow"] == 0.002
    assert len([text for text in case.said if "planted" in text]) == 1
    assert "planted" in " ".join(plan.certificate.events)
    plan.revert()
    assert case.given_back()


@pytest.mark.parametrize("point", ["watch", "giving back", "apply", "log"])
def test_an_interrupt_after_the_search_takes_everything_back(
    point: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = made(clock, "slow", 0.002), made(clock, "rest", 0.002)
    case = Case(clock, first, second)
    if point == "log":
        monkeypatch.setattr(Plan, "_note", throws(KeyboardInterrupt))
        monkeypatch.setattr(PLAN, "Watch", throws(RuntimeError))
    elif point == "apply":
        inner = Plan.__init__

        def made_plan(self: Plan, *args: Any, **named: Any) -> None:
            monkeypatch.setattr(second, "apply", throws(KeyboardInterrupt))
            inner(self, *args, **named)

        monkeypatch.setattr(Plan, "__init__", made_plan)
    else:
        patched(point, KeyboardInterrupt, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        case.accelerate()
    assert case.given_back()


def test_a_log_that_throws_costs_no_plan(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXYTORCH_CACHE", "/proc/oxytorch")
    case = Case(clock)
    ox.base.set_log_sink(throws(RuntimeError))
    try:
        with only(*case.classes):
            plan = ox.accelerate(case.model, case.optimizer, CRITERION, batches())
    finally:
        ox.base.set_log_sink(None)
    assert plan.accepted == ("cheaper_slow",)
    plan.revert()


def test_a_terminal_that_closes_costs_no_plan(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = importlib.import_module("rich.progress").Progress
    for name in ("start", "update", "stop"):
        monkeypatch.setattr(progress, name, throws(OSError))
    plan = Case(clock).accelerate(progress=True)
    assert plan.accepted == ("cheaper_slow",)
    plan.revert()
