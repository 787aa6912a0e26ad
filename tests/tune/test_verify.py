"""The verifier's rulings: what it says, what it leaves, what it does where it cannot judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import oxytorch as ox
import pytest
import torch
import torch.nn.functional as F
from oxytorch.model.snapshot import Snapshot
from oxytorch.tune import update, verify
from oxytorch.tune.record import OptimizerCall, names, states, take
from oxytorch.tune.run import Run
from oxytorch.tune.strategy import Kind, Strategy
from oxytorch.tune.update import Change, UpdateJudge, _compare_by_torch, compare
from oxytorch.tune.verify import Ruling, Verifier
from planted_faults import ruling
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("one_thread")


def make(device: torch.device, model: nn.Module | None = None, loss: Callable[..., Tensor] | None = None) -> Run:
    torch.manual_seed(0)
    model = (model or nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))).to(device)
    batches = [(torch.randn(12, 8, device=device), torch.randint(3, (12,), device=device)) for _ in range(3)]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return Run(model, optimizer, loss or (lambda m, b: F.cross_entropy(m(b[0]), b[1])), batches)


def strategy(plant: Callable[[Run], Iterator[None]]) -> type[Strategy]:
    class Planted(Strategy):
        def apply(self, run: Run) -> None:
            self.context = contextmanager(plant)(run)
            self.context.__enter__()

        def revert(self, run: Run) -> None:
            self.context.__exit__(None, None, None)

    return Planted


def check(run: Run, plant: Callable[[Run], Iterator[None]], kind: Kind, steps: int = 3) -> Ruling:
    return ruling(Verifier(run, Snapshot.of(run.model, run.original), steps=steps), strategy(plant), kind)


def nothing(_: Run) -> Iterator[None]:
    yield


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["exact", "tolerance", "precision", "trade"])
def test_nothing_passes_as_every_kind(kind: Kind, steps: int, device: torch.device) -> None:
    found = check(make(device), nothing, kind, steps)
    assert found.held, found.reason
    assert found.evidence["steps"] == (1 if steps == 1 else steps + 9 + 12)
    assert found.evidence["seconds"] > 0
    if kind == "tolerance":
        assert 0 < found.evidence["gradient_error"] < 1e-3


def counted(run: Run) -> Callable[[], int]:
    """Count the steps that a run takes; the answer is how many since it was last asked."""
    taken = 0
    plain = run.step

    def step(batch: Any) -> Tensor:
        nonlocal taken
        taken += 1
        return plain(batch)

    def since() -> int:
        nonlocal taken
        found, taken = taken, 0
        return found

    run.step = step  # type: ignore[method-assign]
    return since


def test_references_are_made_once(device: torch.device) -> None:
    run = make(device)
    snapshot = Snapshot.of(run.model, run.original)
    verifier = Verifier(run, snapshot)
    taken = counted(run)
    verifier.reference(["tolerance", "exact"])
    snapshot.prove()
    assert verifier.charged > 0
    assert taken() < 90
    assert verifier.check("tolerance").held
    first = taken()
    assert verifier.check("tolerance").held
    assert taken() == first <= 24 + 16 + 2, "a check is its own steps, those compared once more, and two in float64"


@pytest.mark.cpu_only("copies of a device's tensors stay in its memory")
def test_what_is_kept_on_disk_spares_steps(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_KEPT_BYTES", 0)
    run = make(device)
    verifier = Verifier(run, Snapshot.of(run.model, run.original))
    verifier.reference(["tolerance"])
    taken = counted(run)
    assert verifier.check("tolerance").held
    once = taken()
    monkeypatch.setattr(verify, "parkable_bytes", lambda _: 0)
    assert verifier.check("tolerance").held
    assert once <= 24 + 16 + 2 < taken() - 40, "two steps at a time, each time from the start"


def test_the_yardstick_is_of_the_step_as_given_whatever_is_active(device: torch.device) -> None:
    def large(run: Run) -> Iterator[None]:
        run.call.outputs("x", lambda out: 1.05 * out)
        yield
        run.call.outputs("x", None)

    run = make(device)
    verifier = Verifier(run, Snapshot.of(run.model, run.original))
    assert ruling(verifier, strategy(nothing), "tolerance").held
    found = ruling(verifier, strategy(large), "precision")  # no yardstick of this kind was made before
    assert not found.held and "gradient" in found.reason, found.reason


def test_what_a_candidate_throws_is_a_ruling(device: torch.device) -> None:
    def plant(run: Run) -> Iterator[None]:
        def fail(*_: Any) -> Any:
            raise torch.OutOfMemoryError("no memory")

        run.call.function(fail)
        yield
        run.call.function(None)

    found = check(make(device), plant, "tolerance")
    assert not found.held
    assert "no memory" in found.reason


def test_an_interrupt_passes_and_everything_is_back(device: torch.device) -> None:
    run = make(device)
    count = 0

    def interrupt(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == 11:  # of the candidate's, after 8 of the reference and before the verifier
            raise KeyboardInterrupt

    run.original.register_step_pre_hook(interrupt)
    with Snapshot.of(run.model, run.original) as snapshot:
        verifier = Verifier(run, snapshot)
        with pytest.raises(KeyboardInterrupt):
            verifier.check("tolerance")
        snapshot.prove()


def test_a_model_that_float64_cannot_run_is_judged_by_its_losses_and_says_so(device: torch.device) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            copy = torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)  # of a kernel's own dtype
            return F.linear(copy, self.inner.weight, self.inner.bias)

    found = check(make(device, Narrow()), nothing, "tolerance")
    assert found.held
    assert "float64" in found.reason

    def wrong(run: Run) -> Iterator[None]:
        run.call.outputs("x", lambda out: 1.05 * out)
        yield
        run.call.outputs("x", None)

    assert not check(make(device, Narrow()), wrong, "tolerance").held


def test_a_cast_before_the_loss_leaves_float64_the_judge(device: torch.device) -> None:
    class Cast(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out.float()  # as for autocast

    found = check(make(device, Cast(nn.Linear(8, 3))), nothing, "tolerance")
    assert found.held and "float64" not in found.reason and found.evidence["float64_steps"] > 0


def test_a_step_that_does_not_repeat_itself_is_named(device: torch.device) -> None:
    calls = 0

    def loss(m: nn.Module, b: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(m(b[0]), b[1]) * (1 + 1e-6 * calls)

    found = check(make(device, loss=loss), nothing, "exact")
    assert not found.held
    assert "does not repeat" in found.reason or "differs" in found.reason


@pytest.mark.parametrize(("factor", "shows"), [(1.0, False), (1.01, True), (0.99, True), (1.001, True)])
def test_an_update_is_measured_against_the_size_of_the_change(factor: float, shows: bool) -> None:
    torch.manual_seed(0)
    before = torch.randn(4096)
    change = 1e-4 * torch.randn(4096, dtype=torch.float64)
    found = compare(before, (before.double() + factor * change).float(), before.double() + change)
    assert isinstance(found, Change)
    assert found.slope == pytest.approx(factor - 1, abs=1e-4)
    assert (found.error > found.unit + 5e-5 * found.size) is shows


def test_rounding_to_nearest_has_no_bias_and_truncation_has_half_a_place() -> None:
    torch.manual_seed(0)
    wanted = torch.randn(20000, dtype=torch.float64)
    near = wanted.float()
    found = compare(torch.zeros(20000), near, wanted)
    assert abs(found.bias[1]) < 5 * found.bias_error
    over = near.double().abs() > wanted.abs()
    cut = torch.where(over, torch.nextafter(near, torch.zeros_like(near)), near)
    found = compare((wanted + 1e-3 * torch.randn_like(wanted)).float(), cut, wanted)
    assert found.bias[1] == pytest.approx(-0.5, abs=0.05)


def test_one_wrong_element_of_many_shows() -> None:
    torch.manual_seed(0)
    before = torch.randn(200_001)
    wanted = before.double() + 1e-3 * torch.randn(200_001, dtype=torch.float64)
    after = wanted.float()
    assert compare(before, after, wanted).worst < 1
    after[100_003] += 1e-2
    assert compare(before, after, wanted).worst > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_element_may_be_off_by_what_its_dtype_rounds_away(dtype: torch.dtype) -> None:
    """An optimizer whose state is of the dtype rounds the update, also where a weight ends next to zero."""
    torch.manual_seed(3)
    moved = 1e-3 * torch.randn(5000, dtype=torch.float64)
    before = (-0.999 * moved).to(dtype)
    after = (before.double() + moved * (1 + torch.finfo(dtype).eps)).to(dtype)
    assert compare(before, after, before.double() + moved).worst < 1
    largest = moved.abs().argmax()
    after[largest] = before[largest]
    assert compare(before, after, before.double() + moved).worst > 1


@pytest.mark.parametrize("stands_out", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_pass_measures_what_torch_does(dtype: torch.dtype, layout: torch.memory_format, stands_out: bool) -> None:
    torch.manual_seed(0)
    before = torch.randn(7, 8, 5, 3, dtype=dtype).to(memory_format=layout)
    wanted = before.double() + 1e-3 * torch.randn(7, 8, 5, 3, dtype=torch.float64)
    after = wanted.to(dtype) + torch.full((), 1e-7, dtype=dtype)
    after[3, 2, 1, 0] += 1e-2 * stands_out
    for start in (before, None):
        mine, theirs = compare(start, after, wanted), _compare_by_torch(start, after, wanted)
        for name, value in vars(theirs).items():
            assert getattr(mine, name) == pytest.approx(value, rel=1e-6, abs=1e-12), name
    mine = compare(before.transpose(2, 3), after.contiguous().transpose(2, 3), wanted.transpose(2, 3))
    assert mine.error == pytest.approx(compare(before, after, wanted).error)


def judged(make_optimizer: Any, piece: int, wrong: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What is found of three steps of one large parameter, and what a norm that is off would move."""
    monkeypatch.setattr(update, "piece_of", lambda _: piece)
    torch.manual_seed(0)
    model = nn.Linear(120, 700)
    batches = [(torch.randn(8, 120), torch.randint(700, (8,)))]
    run = Run(model, make_optimizer(model.parameters()), nn.CrossEntropyLoss(), batches)
    judge = UpdateJudge(run)
    moved = {}
    for step in take(run, [("model", model), ("optimizer", run.original)], 3):
        assert step.before is not None
        with torch.no_grad():
            model.weight[500, 7] += wrong
        given = [call.settings for call in step.calls]
        judge.judge(step.index, step.before, step.calls, given)
        moved = judge._moved_by(0.01, step.before, states(run, copy=False), step.calls, given)
    assert not judge.notes
    return judge.found, moved


SLICED = [
    *(partial(cls, lr=1e-3) for cls in update._ELEMENTWISE),
    partial(torch.optim.SGD, lr=1e-3, momentum=0.9, nesterov=True),
    partial(torch.optim.AdamW, lr=1e-3, amsgrad=True),
    *(partial(getattr(ox.optim, name), lr=1e-3) for name in ("AdamW", "SGD", "Lion", "RMSprop", "Adagrad")),
]


@pytest.mark.cpu_only("slices are measured on the host")
@pytest.mark.parametrize("wrong", [0.0, 1e-2])
@pytest.mark.parametrize("make_optimizer", SLICED, ids=lambda made: f"{made.func.__module__}.{made.func.__name__}")
def test_a_step_is_judged_in_slices_as_at_once(
    make_optimizer: Any, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[Any] = []
    narrow = update._slice

    def counted(value: Any, at: Any) -> Any:
        cut.append(at)
        return narrow(value, at)

    whole, whole_moved = judged(make_optimizer, 1 << 30, wrong, monkeypatch)
    monkeypatch.setattr(update, "_slice", counted)
    slices, slices_moved = judged(make_optimizer, 10_000, wrong, monkeypatch)
    assert len({at for at in cut if at is not None}) == 9  # 83 rows of 120 each
    assert [set(found) for found in slices.values()] == [set(found) for found in whole.values()]
    for index, found in whole.items():
        for name, change in found.items():
            for key, value in vars(change).items():
                got = getattr(slices[index][name], key)
                assert got == pytest.approx(value, rel=1e-6, abs=1e-12), (index, name, key)
    assert slices_moved == pytest.approx(whole_moved, rel=1e-6)
    assert whole[0]["weight"].worst > 1 or not wrong


def test_one_gradient_that_is_not_finite_keeps_the_step_of_all_together() -> None:
    model = nn.Sequential(nn.Linear(600, 1000), nn.Linear(1000, 600))
    run = Run(model, ox.optim.AdamW(model.parameters()), nn.MSELoss(), [(torch.zeros(1, 600), torch.zeros(1, 600))])
    grads: list[Tensor | None] = [torch.zeros_like(p) for p in run.params]
    assert len(update._pieces(run, [OptimizerCall(grads, [])])) > 1
    grads[0] = torch.full_like(run.params[0], float("nan"))
    assert update._pieces(run, [OptimizerCall(grads, [])]) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adafactor])
def test_optimizers_as_given_are_within_the_bounds(optimizer: Any, device: torch.device) -> None:
    run = make(device)
    own = Run(run.model, optimizer(run.model.parameters()), run.loss_fn, run.batches)
    found = check(own, nothing, "tolerance")
    assert found.held, found.reason
    assert found.evidence["update_error"] > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_within_no_bound(value: float) -> None:
    wanted = torch.randn(100, dtype=torch.float64)
    after = wanted.float()
    after[7] = value
    found = compare(torch.zeros(100), after, wanted)
    assert not found.error <= found.unit + 1e9
    assert not found.worst <= 1


@pytest.mark.parametrize(
    ("usual", "mine", "wrong"),
    [(1.0, 0.0, False), (1.0, 1.0, False), (-1.0, 0.0, False), (0.0, 1.0, True), (1.0, -1.0, True)],
)
def test_rounding_may_be_less_biased_than_as_given(
    usual: float, mine: float, wrong: bool, device: torch.device
) -> None:
    run = make(device)

    def judge(bias: float, base: UpdateJudge | None) -> UpdateJudge:
        change = Change(1e-9, 1e-3, 1e-9, 0.0, 0.0, (bias, 0.0), 1e-3, 100.0, 10_000)
        return UpdateJudge(run, base, found={0: dict.fromkeys(names(run), change)})

    judged = judge(mine, judge(usual, None))
    judged._hold_step(0, judged.found[0])
    assert bool(judged.faults) is wrong
