"""What a trainer has on "auto" is decided by the tuner: verified, within its seconds, without a trace, and told."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import _C
from oxytorch.data.ahead import Prefetched
from oxytorch.trainer import decisions
from oxytorch.tune import Run, Strategy
from planted import Clock, Net, batches, clock, drifting, fingerprint, made, only, same, useless
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

pytestmark = pytest.mark.cpu_only("plants times")
__all__ = ["clock"]

CRITERION = nn.CrossEntropyLoss()


def trainer(clock: Clock, level: str = "basic", **settings: Any) -> ox.Trainer:
    model = settings.pop("model", None) or Net(clock)
    optimizer = settings.pop("optimizer", None) or torch.optim.Adam(model.parameters(), lr=1e-2)
    return ox.Trainer(model, optimizer, settings.pop("loss_fn", CRITERION), level, **settings)


def trained(one: ox.Trainer, data: list[Any]) -> list[Any]:
    torch.manual_seed(4)
    for batch in data:
        one.step(batch)
    return fingerprint(one.model, one.optimizer)[:1]


def plain(clock: Clock, data: list[Any]) -> list[Any]:
    model = Net(clock)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(4)
    for x, y in data:
        optimizer.zero_grad()
        CRITERION(model(x), y).backward()
        optimizer.step()
    return fingerprint(model, optimizer)[:1]


def on(one: ox.Trainer) -> set[str]:
    return {line.name for line in one.report().settings if line.state == "on"}


class Lie(Strategy):
    """Twice as fast, and outputs are off by a little: the first loss moves by less than 5 %."""

    name, kind, group = "lie", "tolerance", "layout"
    clock: Any = None

    def apply(self, run: Run) -> None:
        self.before, self.clock.cost["slow"] = self.clock.cost["slow"], 0.001
        run.call.outputs("lie", lambda out: out * 1.02)

    def revert(self, run: Run) -> None:
        self.clock.cost["slow"] = self.before
        run.call.outputs("lie", None)


# What may keep trials from a first batch, and what is said of it.
HINDRANCES = {
    "calibrate": "calibrate is off",
    "is_closure": "closure, which trials may not call",
    "is_iterator": "iterator, which trials may not draw from",
    "has_hooks": "a hook that acts in backward",
    "is_distributed": "might decide otherwise",
    "has_lazy": "lazy",
}


def test_each_hindrance_is_said_in_one_place_for_both_languages() -> None:
    none = {name: name == "calibrate" for name in HINDRANCES}
    assert _C.tune.hindrance(**none) == ""
    for name, said in HINDRANCES.items():
        assert said in _C.tune.hindrance(**{**none, name: not none[name]})


@pytest.mark.parametrize("kind", ["is_closure", "is_iterator", "has_hooks"])
def test_nothing_is_tried_on_a_first_batch_that_trials_may_not_touch(kind: str, clock: Clock) -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = next(batch) if kind == "is_iterator" else batch
        return CRITERION(model(x), y)

    with only(made(clock, "slow", 0.002)):
        one = trainer(clock, "advanced", loss_fn=loss_of)
        (batch,) = batches(1)
        if kind == "has_hooks":
            next(one.model.parameters()).register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
        given: dict[str, Any] = {"is_iterator": iter([batch]), "is_closure": lambda: loss_of(one.model, batch)}
        one.step(given.get(kind, batch))
    assert clock.cost["slow"] == 0.01
    assert HINDRANCES[kind] in one.report()["channels_last"].reason


def test_what_pays_is_active_from_the_first_step_and_told(clock: Clock) -> None:
    dearer = made(clock, "rest", 0.02)
    dearer.group, dearer.kind = "layout", "tolerance"
    with only(made(clock, "slow", 0.002), dearer):
        one = trainer(clock, "advanced")
        assert clock.cost["slow"] == 0.01 and "first batch" in one.report()["channels_last"].reason
        one.step(batches(1)[0])
    line = one.report()["cheaper_slow"]
    assert clock.cost == {"slow": 0.002, "rest": 0.01}
    assert line.state == "on" and line.gain == pytest.approx(20 / 12, rel=0.02)
    refused = one.report()["channels_last"]
    assert refused.state == "refused" and refused.reason.startswith("cheaper_rest: ")
    one.revert()
    assert clock.cost == {"slow": 0.01, "rest": 0.01} and "cheaper_slow" not in on(one)


def test_what_is_wrong_is_refused_though_the_first_loss_hardly_moves(clock: Clock) -> None:
    Lie.clock = clock
    with only(Lie):
        one = trainer(clock, "advanced")
        one.step(batches(1)[0])
    assert clock.cost["slow"] == 0.01 and "lie" not in on(one)
    assert "lie: " in one.report()["channels_last"].reason


def test_trials_change_no_bit_and_what_is_exact_none_either(clock: Clock) -> None:
    with only(made(clock, "slow", 0.002)):
        found = trained(trainer(clock), batches(8))
    assert clock.cost["slow"] == 0.002
    clock.cost["slow"] = 0.01
    assert same(found, plain(clock, batches(8)))


def test_without_calibration_nothing_is_tried(clock: Clock) -> None:
    with only(made(clock, "slow", 0.002)):
        one = trainer(clock, calibrate=False)
        for count, batch in enumerate(batches(3), 1):
            one.step(batch)
            assert one.model.calls == count
    assert clock.cost["slow"] == 0.01 and "calibrate is off" in one.report()["allocator"].reason


def closure(one: ox.Trainer) -> Any:
    x, y = batches(1)[0]
    return lambda: CRITERION(one.model(x), y)


class Drawn:
    """A batch that can be drawn once."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return batches(1)[0]


def iterator(_: ox.Trainer) -> Any:
    return Drawn()


def hooked(one: ox.Trainer) -> Any:
    next(one.model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    return batches(1)[0]


def uncopyable(_: ox.Trainer) -> Any:
    return [*batches(1)[0], (i for i in range(3))]


@pytest.mark.parametrize(
    ("kind", "said"),
    [(closure, "closure"), (iterator, "iterator"), (hooked, "hook"), (uncopyable, "cannot be copied")],
)
def test_nothing_is_tried_where_it_could_leave_a_trace(clock: Clock, kind: Any, said: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, *_ = next(batch) if isinstance(batch, Drawn) else batch
        return CRITERION(model(x), y)

    with only(made(clock, "slow", 0.002)):
        one = trainer(clock, loss_fn=loss_fn)
        one.step(kind(one))
    assert one.model.calls == 1 and clock.cost["slow"] == 0.01
    assert said in one.report()["allocator"].reason


def test_what_is_named_is_brought_where_nothing_is_tried(clock: Clock) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(5, 1, 2, 3), batches(1)[0][1]
    one = ox.Trainer(model, optimizer, config={"channels_last": "on", "step_tail": "on", "attention": "math"})
    one.step(lambda: CRITERION(model(x), y))
    assert {"channels_last", "step_tail", "attention"} <= on(one) and one.has_tail
    assert "optimizer_state" not in {line.name for line in one.report().settings}
    assert "asked for" in one.report()["channels_last"].reason
    one.revert()
    assert one.optimizer is optimizer


def test_a_small_model_takes_no_longer_than_its_second(clock: Clock) -> None:
    clock.cost.update(slow=4e-4, rest=4e-4)
    for settings, most in (({"steps_planned": 100}, 1.0), ({"tune_seconds": 3.0}, 3.0)):
        began = clock.now
        with only(made(clock, "rest", 2e-4), *(useless(clock, number, 4e-4) for number in range(60))):
            one = trainer(clock, **settings)
            one.step(batches(1)[0])
        assert clock.now - began < 1.1 * most
        assert "cheaper_rest" in on(one)
        one.revert()


def test_a_long_run_allows_a_share_of_itself(clock: Clock) -> None:
    took = []
    for steps in (100, 20_000):
        began = clock.now
        with only(*(useless(clock, number) for number in range(20))):
            one = trainer(clock, steps_planned=steps)
            one.step(batches(1)[0])
            one.revert()
        took.append(clock.now - began)
    assert took[0] < 2.0 < took[1] < 0.15 * 20_000 * 0.02 * 1.1


def test_fit_tells_how_long_the_run_is(clock: Clock) -> None:
    with only(made(clock, "slow", 0.002)):
        one = trainer(clock)
        one.fit(batches(3), epochs=2, progress=False)
        assert one._decisions.plan.certificate.steps_planned == 6


LONG: dict[str, Any] = {"tune_seconds": 60.0, "steps_planned": 10_000}


def feeding(clock: Clock, name: str) -> type[Strategy]:
    """A strategy that draws the same batches in another way, which makes a step cheaper."""
    cheaper = made(clock, "slow", 0.002)

    class Feed(cheaper):  # type: ignore[valid-type,misc]
        feeds, group = True, "feed"

        def apply(self, run: Run) -> None:
            super().apply(run)
            run.data = Prefetched(run.given_data)

        def revert(self, run: Run) -> None:
            super().revert(run)
            run.data = run.given_data

    Feed.name = name
    return Feed


def rows(**options: Any) -> DataLoader[Any]:
    x, y = (torch.cat(parts) for parts in zip(*batches(8), strict=True))
    return DataLoader(TensorDataset(x, y), 5, generator=torch.Generator().manual_seed(1), **options)


def fitted(one: ox.Trainer, data: Any, **bounds: Any) -> list[Any]:
    torch.manual_seed(4)
    one.fit(data, progress=False, **bounds)
    return fingerprint(one.model, one.optimizer)[:1]


@pytest.mark.parametrize("name", ["prefetch", "loader_workers"])
def test_fit_finds_how_to_draw_from_its_loader(name: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = {"prefetch": "prefetch", "loader_workers": "num_workers"}[name]
    with only(feeding(clock, name)):
        few = trainer(clock)
        whole = fitted(few, rows(shuffle=True), epochs=2)
        assert few._run.data is None, "a run of 16 steps does not repay trials of its loader"
        monkeypatch.setattr(decisions, "_LEAST_STEPS_OF_LOADER", 16)
        data = rows(shuffle=True)
        one = trainer(clock, **LONG)
        assert same(fitted(one, data, epochs=2), whole)
        assert isinstance(one._run.data, Prefetched)
        assert clock.cost["slow"] == 0.002
        assert one.report()[setting].state == "on"
        assert one.state_dict()["decisions"] == {"active": [name]}
        one.revert()
        assert one._run.data is data


@pytest.mark.parametrize("stop", [3, 8, 11])
def test_a_continued_run_draws_as_before_without_a_trial(
    stop: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "_LEAST_STEPS_OF_LOADER", 1)
    with only(feeding(clock, "prefetch")):
        whole = fitted(trainer(clock, **LONG), rows(shuffle=True), epochs=2)
        clock.cost["slow"] = 0.01
        first = trainer(clock, **LONG)
        fitted(first, rows(shuffle=True), epochs=2, max_steps=stop)
        state = copy.deepcopy(first.state_dict())
        first.revert()
        second = trainer(clock, **LONG)
        second.load_state_dict(state)
        assert second.state_dict()["decisions"] == {"active": ["prefetch"]}, "also before it has its loader again"
        calls = second.model.calls
        second.fit(rows(shuffle=True), epochs=2, progress=False)
        assert same(fingerprint(second.model, second.optimizer)[:1], whole)
        assert second.model.calls == calls + 16 - stop
        assert isinstance(second._run.data, Prefetched)


@pytest.mark.parametrize(
    "data",
    [lambda: rows(num_workers=1), lambda: batches(8), lambda: DataLoader(Counted(), None)],
    ids=["workers", "list", "stream"],
)
def test_other_loaders_are_not_drawn_from_before_their_time(
    data: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "_LEAST_STEPS_OF_LOADER", 1)
    Counted.starts = 0
    with only(feeding(clock, "prefetch")):
        one = trainer(clock)
        one.fit(data(), max_steps=2, progress=False)
        assert one._run.data is None
    assert Counted.starts <= 1


class Counted(IterableDataset[Any]):
    """A stream that cannot be begun anew."""

    starts = 0

    def __iter__(self) -> Iterator[Any]:
        Counted.starts += 1
        return iter(batches(8))


def test_what_the_users_loss_throws_comes_through_and_the_next_step_decides(clock: Clock) -> None:
    calls = itertools.count()

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        if next(calls) == 5:
            raise LookupError("once")
        return CRITERION(model(batch[0]), batch[1])

    with only(made(clock, "slow", 0.002)):
        one = trainer(clock, "advanced", loss_fn=loss_fn, ema_decay=0.5, step_tail="off", channels_last="off")
        before = fingerprint(one.model, one.optimizer)
        with pytest.raises(LookupError, match="once"):
            one.step(batches(1)[0])
        assert same(before, fingerprint(one.model, one.optimizer)) and clock.cost["slow"] == 0.01
        one.step(batches(1)[0])
    assert clock.cost["slow"] == 0.002 and one.global_step == 1


def test_a_continued_run_decides_as_before_without_a_trial(clock: Clock) -> None:
    data = batches(8)
    with only(made(clock, "slow", 0.002)):
        whole = trained(trainer(clock), data)
        clock.cost["slow"] = 0.01
        first = trainer(clock)
        trained(first, data[:4])
        state = copy.deepcopy(first.state_dict())
        first.revert()
        assert state["decisions"] == {"active": ["cheaper_slow"]}
        second = trainer(clock)
        second.load_state_dict(state)
        assert clock.cost["slow"] == 0.002
        calls = second.model.calls
        for batch in data[4:]:
            second.step(batch)
        assert second.model.calls == calls + 4
    assert same(whole, fingerprint(second.model, second.optimizer)[:1])
    assert "continued" in second.report()["cheaper_slow"].reason


def test_a_state_saved_between_compared_steps_has_what_was_found(clock: Clock) -> None:
    seen = set()
    with only(made(clock, "slow", 0.002)):
        one = trainer(clock)
        for batch in batches(4) * 30:
            one.step(batch)
            seen.add(clock.cost["slow"])
            assert one.state_dict()["decisions"] == {"active": ["cheaper_slow"]}
            assert "cheaper_slow" in on(one)
        one.revert()
    assert seen == {0.002, 0.01}


def test_decisions_of_earlier_versions_are_understood(clock: Clock) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(12, 3))
    batch = (torch.randn(5, 1, 2, 3), batches(1)[0][1])
    one = trainer(clock, "advanced", model=model, calibrate=False)
    one.step(batch)
    earlier = {"precision": "bf16", "channels_last": True, "attention": "default"}
    one.load_state_dict({**one.state_dict(), "decisions": earlier})
    assert set(one.state_dict()["decisions"]["active"]) == {"bf16_autocast", "channels_last", "step_tail"}
    one.step(batch)
    unknown = {"active": ["step_tail", "of_another_version"]}
    one.load_state_dict({**one.state_dict(), "decisions": unknown})
    assert one.has_tail and "of_another_version" in one.report()["decisions"].reason


def test_the_step_tail_takes_the_average_and_the_guard_and_hands_them_back(clock: Clock) -> None:
    """While it comes and goes, average and weights are those of a run without it."""
    ends = []
    poisoned = (batches(1)[0][0] * float("nan"), batches(1)[0][1])
    for moves in (True, False):
        model = Net(clock)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        one = trainer(
            clock, "advanced", model=model, optimizer=optimizer, ema_decay=0.9, clip_norm=0.5, calibrate=False
        )
        run = one._run
        torch.manual_seed(4)
        for index, batch in enumerate([*batches(3), poisoned, *batches(3), poisoned, *batches(2)]):
            if moves:
                run.set_active(["step_tail"] if index % 4 else [])
                kept = (run.guard is not None, run.average is not None, run.clip_norm)
                assert kept == ((False, False, None) if run.active else (True, True, 0.5))
            one.step(batch)
        assert one.report().counters["skipped"] == 2 and one.report()["nonfinite"].state == "on"
        with one.ema_weights():
            ends.append([p.detach().clone() for p in one.model.parameters()])
        ends[-1] += [p.detach().clone() for p in one.model.parameters()]
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tail_then", [True, False])
@pytest.mark.parametrize("tail_now", [True, False])
def test_averages_of_a_state_are_taken_over_whoever_keeps_them(clock: Clock, tail_then: bool, tail_now: bool) -> None:
    def make(tail: bool) -> ox.Trainer:
        return trainer(
            clock, "advanced", ema_decay=0.9, calibrate=False, step_tail="on" if tail else "off", precision="fp32"
        )

    first, second = make(tail_then), make(tail_now)
    trained(first, batches(3))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    averages = []
    for one in (first, second):
        with one.ema_weights():
            averages.append([p.detach().clone() for p in one.model.parameters()])
    for a, b in zip(*averages, strict=True):
        assert torch.equal(a, b)


def test_what_stops_paying_is_taken_back(clock: Clock) -> None:
    cheaper = made(clock, "slow", 0.002)
    with only(cheaper):
        one = trainer(clock, ema_decay=0.9)
        one.step(batches(1)[0])
        clock.cost["slow"] = 0.05
        cheaper.apply = lambda self, run: (setattr(self, "before", 0.01), clock.cost.update(slow=0.05))  # type: ignore[method-assign,assignment]
        for batch in batches(4) * 100:
            one.step(batch)
            if "cheaper_slow" not in on(one):
                break
    assert clock.cost["slow"] == 0.01 and "cheaper_slow" not in on(one)


def test_what_drifts_is_taken_back(clock: Clock) -> None:
    drifts = drifting(clock)
    with only(drifts):
        one = trainer(clock)
        one.step(batches(1)[0])
        assert one._run.active == ("drifts",)
        drifts.scale = 1.5
        for batch in batches(4) * 200:
            one.step(batch)
            if "drifts" not in on(one):
                break
    assert one._run.active == () and "drifts" not in on(one)


def test_the_moving_average_is_not_moved_by_trials_or_checks(clock: Clock) -> None:
    """Found by the tuner, the step tail keeps the average, also while the watch compares steps with it and without."""

    class Cheaper(ox.tune.STRATEGIES["step_tail"]):  # type: ignore[misc]
        group = "layout"  # of the optimizer, updates alone would be timed

        def apply(self, run: Run) -> None:
            super().apply(run)
            clock.cost["slow"] = 0.002

        def revert(self, run: Run) -> None:
            super().revert(run)
            clock.cost["slow"] = 0.01

    with only(Cheaper):
        model = Net(clock)
        one = trainer(
            clock, "advanced", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), ema_decay=0.9
        )
        reference = [p.detach().clone() for p in model.parameters()]
        for batch in batches(4) * 30:  # the watch compares one of the first 50 steps, and takes some without
            one.step(batch)
            torch._foreach_lerp_(reference, [p.detach() for p in model.parameters()], 0.1)
        assert one._run.active == ("step_tail",) and one._run.average is None and clock.cost["slow"] == 0.002
        with one.ema_weights():
            for a, b in zip(reference, model.parameters(), strict=True):
                torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"precision": "bf16"}, {"optimizer_state": "int8"}])
def test_the_rest_is_decided_beside_what_is_named(clock: Clock, settings: dict[str, Any]) -> None:
    names = ("bf16_autocast", "int8_state", "step_tail")
    with only(made(clock, "slow", 0.002), *(ox.tune.STRATEGIES[name] for name in names)):
        one = trainer(clock, "advanced", **settings)
        for batch in batches(3):
            assert torch.isfinite(one.step(batch))
        assert {"cheaper_slow", *settings} <= on(one)
        assert one.report()["cheaper_slow"].gain > 1.2
        one.revert()
    assert clock.cost["slow"] == 0.01 and "_compiled_call_impl" not in vars(one.model)


def test_a_second_trainer_takes_back_what_the_first_put_on_the_model(clock: Clock) -> None:
    with only(made(clock, "slow", 0.002)):
        model = Net(clock)
        first = trainer(clock, model=model)
        first.step(batches(1)[0])
        trainer(clock, model=model, calibrate=False)
        assert clock.cost["slow"] == 0.01
        plan = ox.accelerate(model, torch.optim.SGD(model.parameters()), CRITERION, batches(), remember=False)
        assert clock.cost["slow"] == 0.002
        trainer(clock, model=model, calibrate=False)
        assert clock.cost["slow"] == 0.01
        plan.revert()


def test_a_plan_of_another_run_is_refused(clock: Clock) -> None:
    model, other = Net(clock), Net(clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with only():
        plan = ox.accelerate(model, optimizer, CRITERION, batches(), remember=False)
    for arguments, said in (
        ((other, torch.optim.SGD(other.parameters()), CRITERION), "another model"),
        ((model, torch.optim.SGD(model.parameters()), CRITERION), "another optimizer"),
        ((model, optimizer, nn.MSELoss()), "another loss_fn"),
    ):
        with pytest.raises(ValueError, match=said):
            ox.Trainer(*arguments, plan=plan)
