"""`accelerate`: keeps what pays, says why the rest is not there, and leaves the run bit for bit as it was."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oxytorch as ox
import pytest
import torch
from oxytorch.tune import Run, Strategy
from planted import Clock, Net, batches, clock, fingerprint, made, only, same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.cpu_only("plants times and faults")
__all__ = ["clock"]

CRITERION = nn.CrossEntropyLoss()
Options = dict[str, Any]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any = None, **options: Any) -> ox.tune.Plan:
    options.setdefault("remember", False)
    return ox.accelerate(model, optimizer, CRITERION, batches() if data is None else data, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 6) -> list[float]:
    losses = []
    torch.manual_seed(5)
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss = CRITERION(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


class Slower(Strategy):
    """Costs time."""

    name = "slower"


def slower(clock: Clock) -> type[Strategy]:
    cls = made(clock, "rest", 0.02)
    cls.name = "slower"
    return cls


def no_use(clock: Clock) -> type[Strategy]:
    class NoUse(Strategy):
        name = "no_use"

        def apply(self, run: Run) -> None:
            pass

        revert = apply

    return NoUse


class Liar(Strategy):
    """Says that it changes no bit, and scales the gradients."""

    name = "liar"
    kind = "exact"

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock

    def apply(self, run: Run) -> None:
        self.handles = [p.register_hook(lambda grad: grad * 1.01) for p in run.params]
        if self.clock is not None:
            self.held = self.clock.cost["slow"]
            self.clock.cost["slow"] = 0.001

    def revert(self, run: Run) -> None:
        for handle in self.handles:
            handle.remove()
        if self.clock is not None:
            self.clock.cost["slow"] = self.held


def liar(clock: Clock) -> type[Strategy]:
    return type("PlantedLiar", (Liar,), {"__init__": lambda self: Liar.__init__(self, clock), "name": "liar"})


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_keeps_what_pays_and_says_why_the_rest_is_not_there(clock: Clock) -> None:
    model = Net(clock)
    with only(slower(clock), made(clock, "slow", 0.002), no_use(clock)):
        plan = accelerate(model, adam(model))
    assert plan.accepted == ("cheaper_slow",)
    assert set(plan.rejected) == {"slower", "no_use"}
    low, mid, high = plan.speedup
    assert low <= mid <= high and mid == pytest.approx(20 / 12, rel=0.01)
    assert clock.cost["slow"] == 0.002  # active
    assert "cheaper_slow" in str(plan) and "no_use" in plan.explain()
    plan.revert()
    assert clock.cost == {"slow": 0.01, "rest": 0.01}


def test_two_that_pay_are_both_kept_and_measured_together(clock: Clock) -> None:
    model = Net(clock)
    with only(made(clock, "slow", 0.005), made(clock, "rest", 0.005)):
        plan = accelerate(model, adam(model))
    assert set(plan.accepted) == {"cheaper_slow", "cheaper_rest"}
    assert plan.speedup[1] == pytest.approx(2.0, rel=0.01)


def update_of(name: str, update: dict[str, float], seconds: float) -> type[Strategy]:
    """A strategy under which the optimizer's step takes so long."""

    def apply(self: Any, run: Run) -> None:
        self.before, update["seconds"] = update["seconds"], seconds

    def revert(self: Any, run: Run) -> None:
        update["seconds"] = self.before

    return type(name, (Strategy,), {"name": name, "group": "optimizer", "apply": apply, "revert": revert})


@pytest.mark.parametrize(("fastest_throws", "kept"), [(False, "fastest"), (True, "fast")])
def test_of_several_updates_the_fastest_by_itself_is_tried(clock: Clock, fastest_throws: bool, kept: str) -> None:
    update = {"seconds": 0.008}

    def pass_update(*_: Any) -> None:
        clock.now += update["seconds"]

    model = Net(clock)
    optimizer = adam(model)
    optimizer.register_step_post_hook(pass_update)
    names = {"fast": 0.004, "fastest": 0.001, "slow": 0.009}
    classes = [update_of(name, update, seconds) for name, seconds in names.items()]
    if fastest_throws:

        def throw(self: Any, run: Run) -> None:
            raise RuntimeError("not on this machine")

        classes[1].apply = throw  # type: ignore[method-assign]
    with only(*classes):
        plan = accelerate(model, optimizer)
    assert plan.accepted == (kept,)
    assert "by itself" in plan.rejected["slow"]
    # Of what a paired test of updates has shown, the step need only agree.
    assert {entry.strategy: entry.pairs for entry in plan.certificate.entries}[kept] == 5
    if fastest_throws:
        assert plan.rejected["fastest"].startswith("failed")
    else:
        assert "'fastest' 8.0" in plan.rejected["fast"]
    plan.revert()


def test_a_liar_about_its_kind_is_refused(clock: Clock) -> None:
    model = Net(clock)
    with only(liar(clock)):
        plan = accelerate(model, adam(model))
    assert plan.accepted == ()
    assert plan.rejected["liar"].startswith("refused")
    assert clock.cost["slow"] == 0.01


def test_a_liar_found_at_the_end_does_not_cost_the_honest_one(clock: Clock) -> None:
    class Late(Liar):
        name = "late"
        expected_speedup = 2.0  # tried first, so that the honest one gains nothing beside it

        def __init__(self) -> None:
            super().__init__(clock)

        def apply(self, run: Run) -> None:
            super().apply(run)
            for handle in self.handles:
                handle.remove()
            calls = dict.fromkeys(range(len(run.params)), 0)

            def scaled(grad: torch.Tensor, index: int) -> torch.Tensor:
                calls[index] += 1
                return grad if calls[index] < 4 else grad * 1.01

            self.handles = [p.register_hook(lambda g, i=i: scaled(g, i)) for i, p in enumerate(run.params)]

    model = Net(clock)
    with only(Late, made(clock, "slow", 0.002)):
        plan = accelerate(model, adam(model))
    assert plan.accepted == ("cheaper_slow",)
    assert plan.rejected["late"].startswith("refused") and "step 4" in plan.rejected["late"]
    assert clock.cost["slow"] == 0.002


def test_what_costs_more_than_the_run_saves_is_not_kept(clock: Clock) -> None:
    cls = made(clock, "slow", 0.002)
    first: list[bool] = []
    apply = cls.apply

    def compiles(self: Strategy, run: Run) -> None:
        if not first:
            clock.now += 50.0
            first.append(True)
        apply(self, run)

    cls.apply = compiles  # type: ignore[method-assign]
    cls.expected_cost = lambda self, run: 1.0  # type: ignore[method-assign]
    model = Net(clock)
    with only(cls):
        plan = accelerate(model, adam(model), steps_planned=1_000)
        assert plan.accepted == ()
        first.clear()
        plan = accelerate(model, adam(model), steps_planned=1_000_000)
        assert plan.accepted == ("cheaper_slow",)
    assert plan.certificate.compile_seconds == pytest.approx(50, rel=0.05)
    plan.revert()


# -- what may be tried -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"level": "basic"}, "level basic"),
        ({"exclude": ["cheaper_slow"]}, "excluded"),
        ({"config": {"channels_last": "off"}}, "channels_last"),
    ],
)
def test_level_caller_and_configuration_take_strategies_out(clock: Clock, options: Options, reason: str) -> None:
    cls = made(clock, "slow", 0.002)
    cls.kind, cls.group = "tolerance", "layout"
    model = Net(clock)
    with only(cls):
        plan = accelerate(model, adam(model), **options)
    assert plan.accepted == () and reason in plan.rejected["cheaper_slow"]


def test_strategies_that_change_the_loop_need_the_plan_to_step(clock: Clock) -> None:
    cls = made(clock, "slow", 0.002)
    cls.needs_loop = True
    model = Net(clock)
    with only(cls):
        assert accelerate(model, adam(model)).accepted == ()
        plan = accelerate(model, adam(model), loop="plan")
    assert plan.accepted == ("cheaper_slow",)
    plan.revert()


def test_strategies_are_named_or_given_as_classes(clock: Clock) -> None:
    slow, rest = made(clock, "slow", 0.002), made(clock, "rest", 0.002)
    model = Net(clock)
    with only(slow):
        plan = accelerate(model, adam(model), strategies=["cheaper_slow"])
        assert plan.accepted == ("cheaper_slow",)
        plan = accelerate(model, adam(model), strategies=[rest])  # never registered
        assert plan.accepted == ("cheaper_rest",)
        with pytest.raises(ValueError, match="no strategy 'faster'"):
            accelerate(model, adam(model), strategies=["faster"])


def test_a_users_own_strategy_in_ten_lines(clock: Clock) -> None:
    with only():

        @ox.tune.strategy("mine", kind="exact")
        class Mine:
            def apply(self, run: Run) -> None:
                clock.cost["slow"] = 0.001

            def revert(self, run: Run) -> None:
                clock.cost["slow"] = 0.01

        model = Net(clock)
        plan = accelerate(model, adam(model))
        assert plan.accepted == ("mine",)
        again = accelerate(model, adam(model), strategies=[Mine])  # the first is taken back
        assert again.accepted == ("mine",) and plan.accepted == ("mine",)


# -- nothing else is left behind ---------------------------------------------------------------------------------------


def test_weights_state_and_generators_are_what_they_were(clock: Clock) -> None:
    model = Net(clock)
    optimizer = adam(model)
    train(model, optimizer, 3)
    before, calls = fingerprint(model, optimizer), model.calls
    drawn = (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[union-attr]
    with only(made(clock, "slow", 0.002), liar(clock), slower(clock)):
        plan = accelerate(model, optimizer)
    assert same(before, fingerprint(model, optimizer)) and model.calls == calls
    assert drawn == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[union-attr]
    plan.revert()
    assert same(before, fingerprint(model, optimizer))


def test_the_same_loop_trains_the_same_weights_at_level_basic(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("OXYTORCH_CACHE", str(tmp_path))
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
    theirs = copy.deepcopy(ours)
    expected = train(theirs, plain := adam(theirs), 80)
    plan = ox.accelerate(ours, optimizer := adam(ours), CRITERION, batches(), level="basic", tune_seconds=1.0)
    try:
        assert train(ours, optimizer, 80) == expected
        assert same(fingerprint(ours, optimizer)[0], fingerprint(theirs, plain)[0])
    finally:
        plan.revert()


# -- whatever fails ----------------------------------------------------------------------------------------------------


class Raises:
    """Throws at the n-th call."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.left = error, at

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


def planted_model(clock: Clock, hook: Callable[[], None]) -> Net:
    model = Net(clock)
    inner = clock.pass_step

    def pass_step() -> None:
        inner()
        hook()

    object.__setattr__(model, "pass_step", pass_step)
    return model


def calls_of_a_whole_run(clock: Clock) -> int:
    count = [0]

    def hook() -> None:
        count[0] += 1

    model = planted_model(clock, hook)
    with only(made(clock, "slow", 0.002), no_use(clock), liar(clock)):
        accelerate(model, adam(model)).revert()
    return count[0]


def test_a_model_that_throws_at_any_call_leaves_no_trace(clock: Clock) -> None:
    whole = calls_of_a_whole_run(clock)
    assert whole > 50
    # Every call near the start, where baseline and first paired test are, and a spread over the rest.
    for at in [*range(1, 40), *range(40, whole + 1, 11)]:
        model = planted_model(clock, Raises(RuntimeError("planted"), at))
        optimizer = adam(model)
        before = fingerprint(model, optimizer)
        with only(made(clock, "slow", 0.002), no_use(clock), liar(clock)):
            try:
                plan = accelerate(model, optimizer)
            except RuntimeError as error:
                assert str(error) == "planted", at
                assert clock.cost == {"slow": 0.01, "rest": 0.01}, at
            else:
                failed = [why for why in plan.rejected.values() if "planted" in why]
                assert failed or "cheaper_slow" in plan.accepted, at
                plan.revert()
        assert same(before, fingerprint(model, optimizer)), at
        assert clock.cost == {"slow": 0.01, "rest": 0.01}, at


@pytest.mark.parametrize("at", [1, 2, 9, 30])
def test_keyboard_interrupt_passes_through_after_everything_is_restored(clock: Clock, at: int) -> None:
    model = planted_model(clock, Raises(KeyboardInterrupt(), at))
    optimizer = adam(model)
    before = fingerprint(model, optimizer)
    with only(made(clock, "slow", 0.002)), pytest.raises(KeyboardInterrupt):
        accelerate(model, optimizer)
    assert same(before, fingerprint(model, optimizer)) and clock.cost == {"slow": 0.01, "rest": 0.01}


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError, ValueError])
@pytest.mark.parametrize("where", ["apply", "revert", "applies", "step", "expected_cost"])
def test_a_strategy_that_throws_is_failed_and_said_once(clock: Clock, kind: type[Exception], where: str) -> None:
    cls = made(clock, "slow", 0.002)

    def throws(*_args: Any) -> Any:
        raise kind("none left")

    if where == "step":

        class Throws(Strategy):
            name = "cheaper_slow"

            def apply(self, run: Run) -> None:
                self.handle = run.model.register_forward_hook(throws)

            def revert(self, run: Run) -> None:
                self.handle.remove()

        cls = Throws
    else:
        setattr(cls, where, throws)
    model = Net(clock)
    optimizer = adam(model)
    before = fingerprint(model, optimizer)
    said: list[str] = []
    ox.base.set_log_sink(lambda _level, text: said.append(text))
    try:
        with only(cls, made(clock, "rest", 0.002)):
            plan = accelerate(model, optimizer)
    finally:
        ox.base.set_log_sink(None)
    assert plan.accepted == ("cheaper_rest",)
    assert plan.rejected["cheaper_slow"].startswith("failed") and "none left" in plan.rejected["cheaper_slow"]
    assert len([text for text in said if "none left" in text]) == 1
    assert "none left" in plan.certificate.to_json() and "none left" in str(plan.report())
    assert same(before, fingerprint(model, optimizer))


def test_a_loss_that_is_not_finite_lets_nothing_be_tried(clock: Clock) -> None:
    model = Net(clock)
    x, y = batches(1)[0]
    with only(made(clock, "slow", 0.002)):
        plan = accelerate(model, adam(model), [(x * float("nan"), y)])
    assert plan.accepted == () and "not" in plan.rejected["cheaper_slow"] and "nan" in plan.rejected["cheaper_slow"]


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "net"}, TypeError, "torch.nn.Module"),
        ({"optimizer": 3}, TypeError, "Optimizer"),
        ({"loss_fn": None}, TypeError, "step="),
        ({"batches": []}, ValueError, "no batch"),
        ({"batches": torch.zeros(3)}, TypeError, "list of batches"),
        ({"batches": (torch.zeros(3, 6), torch.zeros(3))}, TypeError, "inputs, targets"),
        ({"level": "fast"}, ValueError, "fast"),
        ({"loop": "mine"}, ValueError, "'yours', 'data' or 'plan'"),
        ({"steps_planned": 0}, ValueError, "at least 1"),
        ({"exclude": ["nothing_such"]}, ValueError, "nothing_such"),
    ],
)
def test_arguments_that_cannot_be_meant(clock: Clock, change: Options, error: type[Exception], message: str) -> None:
    model = Net(clock)
    options: Options = {"model": model, "optimizer": adam(model), "loss_fn": CRITERION, "batches": batches()} | change
    with pytest.raises(error, match=message):
        ox.accelerate(**options)
    assert model.calls == 0


def test_an_optimizer_that_needs_a_closure_is_refused_unless_the_step_is_given(clock: Clock) -> None:
    model = Net(clock)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    with pytest.raises(TypeError, match="closure"):
        accelerate(model, optimizer)

    def step(batch: Any) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = CRITERION(model(batch[0]), batch[1])
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return optimizer.step(closure)  # type: ignore[no-any-return]

    before = fingerprint(model, optimizer)[:2]
    with only(made(clock, "slow", 0.002)):
        plan = accelerate(model, optimizer, step=step)
    assert plan.accepted == ("cheaper_slow",)
    assert same(before, fingerprint(model, optimizer)[:2])


# -- where batches come from -------------------------------------------------------------------------------------------


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(72.0).reshape(12, 6), torch.arange(12) % 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_the_batches_that_it_would_have_given(clock: Clock, workers: int) -> None:
    def order(tuned: bool) -> list[Any]:
        torch.manual_seed(11)
        loader = DataLoader(dataset(), batch_size=4, shuffle=True, num_workers=workers)
        if tuned:
            model = Net(clock)
            torch.manual_seed(11)
            with only(made(clock, "slow", 0.002)):
                plan = accelerate(model, adam(model), loader)
            assert plan.data is loader
        return [x for x, _ in loader]

    assert same(order(False), order(True))


def test_a_loader_with_a_generator_of_its_own_is_put_back(clock: Clock) -> None:
    generator = torch.Generator().manual_seed(4)
    loader = DataLoader(dataset(), batch_size=4, shuffle=True, generator=generator)
    before = generator.get_state()
    model = Net(clock)
    with only(made(clock, "slow", 0.002)):
        accelerate(model, adam(model), loader)
    assert torch.equal(before, generator.get_state())


def test_no_batch_of_an_iterator_is_lost(clock: Clock) -> None:
    def stream() -> Iterator[Any]:
        yield from batches(7)

    model = Net(clock)
    with only(made(clock, "slow", 0.002)):
        plan = accelerate(model, adam(model), stream())
    assert same([x for x, _ in plan.data], [x for x, _ in batches(7)])


def test_a_step_that_changes_its_batch_in_place_does_not_change_the_users(clock: Clock) -> None:
    data = batches(2)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        batch[0].mul_(0.999)
        return CRITERION(model(batch[0]), batch[1])  # type: ignore[no-any-return]

    model = Net(clock)
    with only(made(clock, "slow", 0.002)):
        ox.accelerate(model, adam(model), loss, data, remember=False).revert()
    assert same(data, batches(2))


# -- models of every shape ---------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.out = nn.Linear(4, 9, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(x))  # type: ignore[no-any-return]


class Branches(nn.Module):
    """Control flow and a cache that depend on the data, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)
        self.seen: list[float] = []
        self.register_buffer("count", torch.zeros(()))
        self.a.register_forward_hook(lambda _m, _i, out: out * 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1  # type: ignore[operator]
        self.seen.append(float(x.sum()))
        return self.a(x) if x.sum() > 0 else self.b(x)  # type: ignore[no-any-return]


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    return model


def wrapped() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    model.compile(backend="eager")
    return model


TOKENS = [(torch.randint(9, (4, 3), generator=torch.Generator().manual_seed(i)),) for i in range(3)]


def token_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())


@pytest.mark.parametrize("kind", ["tied", "branches", "frozen", "compiled", "sparse", "checkpointed rng"])
def test_models_of_every_shape_train_on_as_if_nothing_had_been(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("OXYTORCH_CACHE", str(tmp_path))

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any, list[Any]]:
        torch.manual_seed(2)
        if kind == "tied":
            model: nn.Module = Tied()
            return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), token_loss, TOKENS
        if kind == "sparse":
            model = nn.Sequential(nn.Embedding(9, 9, sparse=True))
            return model, torch.optim.SparseAdam(model.parameters()), token_loss, TOKENS
        model = {"branches": Branches, "frozen": frozen, "compiled": wrapped}.get(
            kind, lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))
        )()
        loss = lambda model, batch: CRITERION(model(batch[0]), batch[1])  # noqa: E731
        return model, adam(model), loss, batches()

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, data: list[Any]) -> Any:
        torch.manual_seed(9)
        for batch in data * 2:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
        return fingerprint(model, optimizer)[0]

    plain = run(*build())
    model, optimizer, loss_fn, data = build()
    plan = ox.accelerate(model, optimizer, loss_fn, data, level="basic", tune_seconds=0.5)
    before = [id(p) for p in model.parameters()]
    try:
        assert same(plain, run(model, optimizer, loss_fn, data))
        assert before == [id(p) for p in model.parameters()]
    finally:
        plan.revert()


def test_a_model_wrapped_for_one_process_is_not_broken(clock: Clock, tmp_path: Any) -> None:
    def trained() -> None:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
        optimizer = adam(model)
        before = fingerprint(model, optimizer)
        plan = ox.accelerate(model, optimizer, CRITERION, batches(), level="basic", remember=False)
        assert same(before, fingerprint(model, optimizer))
        plan.revert()
        train(model, optimizer, 2)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        trained()
        # A thread of gloo's takes the interpreter's lock to let go of its last work; torch ends that thread with the
        # lock held, and would wait for ever.
        time.sleep(0.2)
    finally:
        torch.distributed.destroy_process_group()
