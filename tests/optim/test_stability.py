"""Spikes: found where planted and nowhere else, left out without a host read, and rolled back to the last bit."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch._C import optim as native
from oxytorch.optim import NumericalStabilityManager
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.usefixtures("one_thread")

DEFAULTS: dict[str, Any] = {"window": 128, "threshold": 6.0, "floor": 0.02, "warmup": 32, "patience": 16}
FIELDS = ("step", "loss", "grad_norm", "loss_value", "loss_limit", "grad_norm_value", "grad_norm_limit")


def spikes(losses: Tensor, norms: Tensor, composite: bool = False, **options: Any) -> list[tuple]:
    detector = native.SpikeDetector("cpu", force_composite=composite, **{**DEFAULTS, **options})
    found = []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        detector.judge(loss)
        detector.record(step, norm, False)
        found += detector.arrived(True)
    return [tuple(getattr(spike, name) for name in FIELDS) for spike in found]


def noise(seed: int, steps: int = 1000, spread: float = 1.0) -> Tensor:
    return torch.randn(steps, generator=torch.Generator().manual_seed(seed)) * spread


def decaying(seed: int, spread: float) -> Tensor:
    return (2 + 8 * torch.exp(-torch.arange(1000) / 80)) * noise(seed, spread=spread).exp()


def inverse_gamma(seed: int) -> Tensor:
    draws = torch.stack([noise(1000 * seed + i) for i in range(8)])
    return draws.square().mean(0).rsqrt()


CLEAN = {
    "smooth loss": lambda seed: decaying(seed, 0.01),
    "noisy loss": lambda seed: decaying(seed, 0.2),
    "loss of single samples": lambda seed: decaying(seed, 0.6),
    "norms of heavy tail": lambda seed: (1 + 3 * torch.exp(-torch.arange(1000) / 50)) * noise(seed, spread=0.8).exp(),
    "norms of a gamma's inverse": inverse_gamma,
    "norms that grow in warm-up": lambda seed: torch.arange(1, 1001).clamp(max=200) * noise(seed, spread=0.2).exp(),
    "flat": lambda seed: torch.full((1000,), 2.5) + noise(seed, spread=1e-3),
    "nothing but zeros": lambda seed: torch.zeros(1000),
    "mostly zero, as hinge losses": lambda seed: noise(seed).sub(1).clamp_min(0),
    "around zero": noise,
    "negative, as log likelihoods": lambda seed: -5 - decaying(seed, 0.1).flip(0),
}


@pytest.mark.parametrize("kind", CLEAN)
def test_a_clean_run_of_a_thousand_steps_has_no_alarm(kind: str) -> None:
    alarms = [spikes(CLEAN[kind](seed), torch.ones(1000)) for seed in range(5)]
    assert [len(found) for found in alarms] == [0] * 5
    alarms = [spikes(torch.ones(1000), CLEAN[kind](seed)) for seed in range(5)]
    assert [len(found) for found in alarms] == [0] * 5


@pytest.mark.parametrize(
    ("place", "spread", "factor"),
    [(500, 0.01, 1.5), (999, 0.05, 2), (60, 0.2, 10), (500, 0.2, 10), (999, 0.2, 10)],
)
def test_a_planted_spike_is_caught_in_either_series(place: int, spread: float, factor: float) -> None:
    for seed in range(5):
        values = decaying(seed, spread)
        values[place] = values[max(0, place - 30) : place].median() * factor
        found = spikes(values, torch.ones(1000))
        assert [(spike[0], spike[1], spike[2]) for spike in found] == [(place, True, False)]
        assert found[0][3] == values[place] > found[0][4]
        found = spikes(torch.ones(1000), values)
        assert [(spike[0], spike[1], spike[2]) for spike in found] == [(place, False, True)]


def test_inf_and_nan_are_spikes_from_the_first_step_and_teach_nothing() -> None:
    values = decaying(0, 0.05)
    for place, bad in ((0, math.nan), (5, math.inf), (6, -math.inf), (300, math.nan), (301, math.inf)):
        values[place] = bad
    assert [spike[0] for spike in spikes(values, torch.ones(1000))] == [0, 5, 6, 300, 301]
    limits = []
    for middle in (math.nan, 2.0):
        detector = native.SpikeDetector("cpu", **DEFAULTS)
        for step in range(100):
            detector.judge(torch.tensor(middle if step == 50 else 2.0))
            detector.record(step, torch.ones(()), False)
        limits.append(float(detector.loss_limit))
    assert limits[0] == limits[1]


def test_under_a_scaler_an_overflowing_gradient_is_no_spike() -> None:
    detector = native.SpikeDetector("cpu", **DEFAULTS)
    for step, norm in enumerate([1.0] * 40 + [math.inf, math.nan, 50.0]):
        detector.judge(torch.ones(()))
        detector.record(step, torch.tensor(norm), True)
    assert [spike.step for spike in detector.drain()] == [42]


def test_spikes_stay_out_of_the_window_until_they_are_the_new_normal() -> None:
    values = torch.cat([noise(0, 300, 0.05).exp(), 8 * noise(1, 300, 0.05).exp()])
    values[310] = math.inf  # neither ends the row nor counts in it
    found = [spike[0] for spike in spikes(values, torch.ones(600), patience=10)]
    assert found == list(range(300, 311))
    values[450] = 80  # what became normal is watched again
    assert [spike[0] for spike in spikes(values, torch.ones(600), patience=10)] == [*range(300, 311), 450]
    # Spikes that come now and then do not wear the detector down.
    values = noise(0, 1000, 0.05).exp()
    values[100::7] *= 10
    assert [spike[0] for spike in spikes(values, torch.ones(1000))] == list(range(100, 1000, 7))


@pytest.mark.parametrize("kind", CLEAN)
def test_operators_and_the_hosts_code_judge_alike(kind: str) -> None:
    losses, norms = CLEAN[kind](1)[:300], decaying(2, 0.3)[:300]
    losses[[40, 100, 250]] = torch.tensor([1e4, math.nan, 1e5])
    norms[200:230] *= 40
    ours, theirs = spikes(losses, norms), spikes(losses, norms, composite=True)
    assert [spike[:3] for spike in ours] == [spike[:3] for spike in theirs]
    assert len(ours) > 10
    for a, b in zip(ours, theirs, strict=True):
        assert a[3:] == pytest.approx(b[3:], rel=1e-4, nan_ok=True)


def test_a_log_of_many_spikes_is_read_whole_on_the_way() -> None:
    losses = torch.full((900,), math.nan)
    assert [spike[0] for spike in spikes(losses, torch.ones(900), composite=True)] == list(range(900))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 4}, "window is 4"),
        ({"threshold": 0}, "threshold is 0"),
        ({"floor": -1}, "floor is -1"),
        ({"warmup": 500}, "warmup is 500"),
        ({"patience": 0}, "patience is 0"),
        ({"policy": "stop"}, "'skip', 'backoff', 'rollback', 'warn'"),
        ({"backoff_factor": 1.5}, "backoff_factor is 1.5"),
        ({"keep": 0}, "keep is 0"),
        ({"every": 0}, "every is 0"),
        ({"extra": {"loader": [1]}}, r"extra\['loader'\] has no state_dict"),
    ],
)
def test_bad_options_are_refused_with_the_value(options: dict[str, Any], said: str) -> None:
    optimizer = ox.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match=said):
        NumericalStabilityManager(optimizer, **options)


def test_optimizers_that_cannot_leave_out_a_step_are_refused() -> None:
    optimizer = ox.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, nonfinite="propagate")
    with pytest.raises(ValueError, match="propagate"):
        NumericalStabilityManager(optimizer)
    NumericalStabilityManager(optimizer, "warn")
    early = ox.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, nonfinite="propagate", step_in_backward=True)
    with pytest.raises(ValueError, match="steps in backward"):
        NumericalStabilityManager(early)


# -- training


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1, bias=False))


def batches(count: int, bad: dict[int, float] | None = None) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for i in range(count):
        x = torch.randn(32, 8, generator=generator)
        y = x.sum(1, keepdim=True) + 0.1 * torch.randn(32, 1, generator=generator)
        made.append((x, y * (bad or {}).get(i, 1.0)))
    return made


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: ox.optim.AdamW(model.parameters(), lr=1e-2, ema_decay=0.9, clip_norm=10.0),
    "SGD": lambda model: ox.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "torch AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "torch SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


def tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[Tensor]:
    yield from model.state_dict().values()
    for p in model.parameters():
        yield from (value for _, value in sorted(optimizer.state[p].items()) if isinstance(value, Tensor))
    if hasattr(optimizer, "ema_state_dict"):
        yield from optimizer.ema_state_dict()["ema"].values()


def digest(optimizer: torch.optim.Optimizer, model: nn.Module, *more: Tensor) -> str:
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in [*tensors(optimizer, model), *more]:
        found.update(tensor.detach().contiguous().view(torch.uint8 if tensor.dim() else tensor.dtype).numpy().tobytes())
    found.update(repr([group["lr"] for group in optimizer.param_groups]).encode())
    return found.hexdigest()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(guard: NumericalStabilityManager, model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        guard.step(loss)
        guard.optimizer.zero_grad()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("bad", [50.0, math.nan, math.inf])
def test_skip_leaves_every_byte_of_a_spiking_step_out(name: str, bad: float) -> None:
    model = make_model()
    guard = NumericalStabilityManager(MAKERS[name](model), "skip", model=model)
    data = batches(80, {60: bad})
    train(guard, model, data[:60])
    before = [t.clone() for t in tensors(guard.optimizer, model.eval())]
    train(guard, model, data[60:61])
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(guard.optimizer, model), strict=True))
    train(guard, model.train(), data[61:])
    assert not torch.equal(before[0], next(tensors(guard.optimizer, model)))
    kinds = {"loss", "grad_norm"} if math.isfinite(bad) else {"nonfinite_loss", "nonfinite_grad"}
    assert {event.step for event in guard.events} == {61}
    assert {event.kind for event in guard.events} <= kinds and guard.events[0].action == "skipped"
    assert "1 with a spike" in guard.report()


def test_a_norm_alone_is_judged_and_a_step_without_a_loss_too() -> None:
    p = nn.Parameter(torch.zeros(4))
    guard = NumericalStabilityManager(ox.optim.SGD([p], lr=1.0), "skip")
    for i in range(50):
        before = p.detach().clone()
        p.grad = torch.full((4,), 100.0 if i == 45 else 1.0)
        guard.step(None if i % 2 else 1.0)
        assert torch.equal(before, p) == (i == 45)
    assert [(event.step, event.kind, event.value) for event in guard.events] == [(46, "grad_norm", 200.0)]


@pytest.mark.parametrize(("loss", "steps"), [(1.12, []), (1.14, [51])])
def test_of_a_flat_history_an_eighth_more_is_a_spike(loss: float, steps: list[int]) -> None:
    p = nn.Parameter(torch.zeros(4))
    guard = NumericalStabilityManager(ox.optim.SGD([p], lr=1.0), "warn")
    for i in range(60):
        p.grad = torch.ones(4)
        guard.step(loss if i == 50 else 1.0)
    assert [event.step for event in guard.events] == steps


def test_warn_notes_and_does_nothing() -> None:
    models = [make_model() for _ in range(2)]
    optimizers = [MAKERS["AdamW"](model) for model in models]
    data = batches(60, {50: 30.0})
    guard = NumericalStabilityManager(optimizers[0], "warn")
    torch.manual_seed(1)
    train(guard, models[0], data)
    torch.manual_seed(1)
    for batch in data:
        loss_of(models[1], batch).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert digest(optimizers[0], models[0]) == digest(optimizers[1], models[1])
    assert {(event.step, event.action) for event in guard.events} == {(51, "noted")}


@pytest.mark.parametrize("tensor_rate", [False, True])
@pytest.mark.parametrize("name", ["SGD", "torch SGD"])
def test_backoff_reduces_the_rate_and_lets_it_return(name: str, tensor_rate: bool) -> None:
    p = nn.Parameter(torch.zeros(2))
    cls = ox.optim.SGD if name == "SGD" else torch.optim.SGD
    rate = torch.tensor(1.0) if tensor_rate else 1.0
    guard = NumericalStabilityManager(cls([p], lr=rate), "backoff", backoff_factor=0.2, backoff_steps=4)
    moved = []
    for i in range(46):
        before = p.detach().clone()
        p.grad = torch.full((2,), 80.0 if i == 39 else 1.0)
        guard.step(1.0)
        moved.append(float((before - p.detach())[0]))
    assert moved[:39] == [1.0] * 39
    assert moved[39] == 0
    assert moved[40:] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0], rel=1e-5)
    assert guard.optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("policy", ["skip", "warn", "backoff", "rollback"])
def test_the_step_path_reads_nothing_on_the_host(policy: str) -> None:
    model = make_model()
    guard = NumericalStabilityManager(MAKERS["AdamW"](model), policy, model=model, every=1000)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    loss = torch.tensor(1.0)
    guard.step(loss)

    def steps() -> None:
        for _ in range(10):
            guard.step(loss)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            steps()
    names = [event.name for event in prof.events()]
    assert [name for name in names if name in ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero")] == []


class Loader:
    """Batches in order, with a place that can be gone back to."""

    def __init__(self, data: list[tuple[Tensor, Tensor]]) -> None:
        self.data = data
        self.next = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.next < len(self.data):
            self.next += 1
            yield self.data[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def run(name: str, data: list, policy: str, scaled: bool, skip: frozenset[int] = frozenset()) -> tuple:
    """A loop with all a rollback must bring back: dropout, batch norm, averages, schedule, scaler and loader."""
    model = make_model()
    optimizer = MAKERS[name](model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    scaler = ox.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=7) if scaled else None
    loader = Loader([batch for i, batch in enumerate(data) if i not in skip])
    guard = NumericalStabilityManager(
        optimizer,
        policy,
        model=model,
        scaler=scaler,
        extra={"schedule": schedule, "loader": loader},
        every=20,
        keep=2,
    )
    torch.manual_seed(3)
    for batch in loader:
        if guard.skip_batch():
            continue
        loss = loss_of(model, batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        guard.step(loss)
        if scaler is not None:
            scaler.update()
        schedule.step()
        optimizer.zero_grad()
    more = [] if scaler is None else [scaler._scale, scaler._growth_tracker]
    return digest(optimizer, model, *more, torch.tensor(schedule.last_epoch)), guard


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_after_a_rollback_training_is_bitwise_that_without_the_bad_batches(name: str, scaled: bool) -> None:
    bad = {67: 60.0, 90: math.nan}
    data = batches(120, bad)
    rolled, guard = run(name, data, "rollback", scaled)
    clean, other = run(name, data, "rollback", scaled, skip=frozenset(bad))
    assert not other.events
    assert rolled == clean
    assert {(event.step, event.action) for event in guard.events} == {
        (68, "rolled back to step 60"),
        (91, "rolled back to step 80"),
    }
    assert "2 rollbacks" in guard.report()


def test_a_rollback_without_a_loader_restores_the_snapshot_to_the_byte() -> None:
    model = make_model()
    optimizer = MAKERS["AdamW"](model)
    guard = NumericalStabilityManager(optimizer, "rollback", model=model, every=10)
    data = batches(70, {66: 100.0})
    for i, batch in enumerate(data[:67]):
        loss = loss_of(model, batch)
        loss.backward()
        guard.step(loss)
        optimizer.zero_grad()
        if i + 1 == 60:
            then = digest(optimizer, model)
        assert guard.rolled_back == (i == 66)
    assert digest(optimizer, model) == then
    assert {event.action for event in guard.events} == {"rolled back to step 60"}


def test_the_same_place_again_takes_older_snapshots_and_then_gives_up() -> None:
    model = make_model()
    guard = NumericalStabilityManager(
        MAKERS["AdamW"](model), "rollback", model=model, every=10, keep=3, max_rollbacks=3, patience=100
    )
    train(guard, model, batches(65))
    bad = batches(1, {0: 200.0})
    train(guard, model, bad)
    train(guard, model, bad)
    train(guard, model, bad)
    assert list(dict.fromkeys(event.action for event in guard.events)) == [
        "rolled back to step 60",
        "rolled back to step 50",
        "rolled back to step 40",
    ]
    with pytest.raises(RuntimeError, match="3 rollbacks did not get training past step 66"):
        train(guard, model, bad)


def test_progress_past_the_place_forgives() -> None:
    model = make_model()
    guard = NumericalStabilityManager(MAKERS["AdamW"](model), "rollback", model=model, every=10, max_rollbacks=1)
    good, bad = batches(40), batches(1, {0: 200.0})
    for _ in range(4):
        train(guard, model, good)
        train(guard, model, bad)
    assert guard._rollbacks == 4


def test_a_spike_before_the_first_snapshot_is_left_out_and_said() -> None:
    model = make_model()
    guard = NumericalStabilityManager(MAKERS["AdamW"](model), "rollback", model=model)
    train(guard, model, batches(1, {0: math.nan}))
    assert {event.action for event in guard.events} == {"skipped, no snapshot before it"}
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", MAKERS)
def test_state_that_a_parameter_got_after_the_snapshot_goes_again(name: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = MAKERS[name](model)
    guard = NumericalStabilityManager(optimizer, "rollback", model=model, every=40)

    def step(late: bool, scale: float = 1.0) -> None:
        for p in model[0].parameters():
            p.grad = torch.full_like(p, 0.1 * scale)
        for p in model[1].parameters() if late else ():
            p.grad = torch.full_like(p, 1e-3)  # too little to be seen in the norm
        guard.step(scale)
        optimizer.zero_grad()

    for _ in range(40):
        step(late=False)
    then = digest(optimizer, model)
    for i in range(5):
        step(late=True, scale=1.0 if i < 4 else math.nan)
    assert guard.rolled_back
    assert digest(optimizer, model) == then
    for i in range(6):
        step(late=i > 2)
    after = digest(optimizer, model)

    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = MAKERS[name](model)
    guard = NumericalStabilityManager(optimizer, "rollback", model=model, every=40)
    for i in range(46):
        step(late=i > 42)
    assert digest(optimizer, model) == after


def test_snapshots_are_written_into_the_memory_they_have() -> None:
    model = make_model()
    guard = NumericalStabilityManager(MAKERS["AdamW"](model), "rollback", model=model, every=5, keep=2)
    train(guard, model, batches(20))

    def addresses() -> set[int]:
        return {tensor.data_ptr() for snapshot in guard._snapshots for tensor in snapshot.tensors.values()}

    before = addresses()
    train(guard, model, batches(20))
    assert addresses() == before


def test_a_rollback_is_said_in_the_log() -> None:
    said: list[tuple[str, str]] = []
    ox.base.set_log_sink(lambda level, message: said.append((level, message)))
    try:
        model = make_model()
        guard = NumericalStabilityManager(MAKERS["AdamW"](model), "rollback", model=model, every=10)
        train(guard, model, batches(60, {55: math.nan}))
    finally:
        ox.base.set_log_sink(None)
    assert len(said) == len({event.kind for event in guard.events}) > 0
    assert all(level == "warn" and "step 56" in text and "rolled back to step 50" in text for level, text in said)


def test_explain_names_the_origin_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4), nn.Dropout(), nn.Linear(4, 1))
    optimizer = MAKERS["AdamW"](model)
    guard = NumericalStabilityManager(optimizer, model=model)
    train(guard, model, batches(3))
    batch = batches(1)[0]
    loss_of(model, batch).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    before = digest(optimizer, model)
    origin = guard.explain(lambda: torch.log(loss_of(model, batch) * 0))
    assert origin is not None and origin.op == "aten.log.default"
    assert guard.explain(lambda: loss_of(model, batch)) is None
    assert digest(optimizer, model) == before
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    with pytest.raises(ValueError, match="without model="):
        NumericalStabilityManager(optimizer).explain(lambda: torch.zeros(()))


def test_a_checkpointed_manager_goes_on_where_it_was() -> None:
    losses = decaying(0, 0.1)
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    optimizer = ox.optim.SGD([p], lr=0.0)
    first = NumericalStabilityManager(optimizer)
    for loss in losses[:200]:
        first.step(loss)
    second = NumericalStabilityManager(optimizer)
    second.load_state_dict(first.state_dict())
    for loss in [*losses[200:250], torch.tensor(50.0)]:
        first.step(loss)
        second.step(loss)
    assert [event.step for event in second.events] == [251] == [event.step for event in first.events]
    assert second.events[0] == first.events[0]
    with pytest.raises(ValueError, match="window of 128"):
        NumericalStabilityManager(optimizer, window=64).load_state_dict(first.state_dict())


FORMATS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "7 bytes": ("AdamW", torch.bfloat16, {"state_dtype": "int8", "master_weights": "int8", "ema_decay": 0.9}),
    "masters": ("AdamW", torch.bfloat16, {"master_weights": "fp32", "copy_dtype": "fp16", "amsgrad": True}),
    "stochastic": ("Lion", torch.bfloat16, {"state_dtype": "bf16", "stochastic_rounding": True, "seed": 5}),
    "int8": ("SGD", torch.float32, {"state_dtype": "int8", "momentum": 0.9, "copy_dtype": "bf16"}),
    "composite": ("Adam", torch.float64, {"force_composite": True, "ema_decay": 0.9}),
    "matrices": ("Muon", torch.float32, {"ema_decay": 0.9}),
    "two averages": ("RMSprop", torch.float32, {"centered": True, "momentum": 0.9}),
    "sums": ("Adagrad", torch.float32, {"clip_norm": 1.0}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_storage_format_goes_back_to_the_bit(name: str) -> None:
    kind, dtype, options = FORMATS[name]

    def trained(bad: int) -> tuple[list[Tensor], Any]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(64, 48), (33, 65)]]
        optimizer = getattr(ox.optim, kind)(params, lr=1e-2, **options)
        guard = NumericalStabilityManager(optimizer, "rollback", every=10)
        step = 0
        while step < 30:
            step += 1
            generator = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype) * (math.nan if step == bad else 1)
            guard.step()
            if guard.rolled_back:
                step, bad = guard._step, -1
        kept = [copy for copy in optimizer.copies() if copy is not None]
        return [*params, *tensors(optimizer, nn.ParameterList(params)), *kept], guard

    rolled, guard = trained(bad=27)
    straight, _ = trained(bad=-1)
    assert [event.action for event in guard.events] == ["rolled back to step 20"]
    assert len(rolled) == len(straight) >= 6
    for a, b in zip(rolled, straight, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_an_optimizer_with_rollback_goes_back_on_its_own() -> None:
    model = make_model()
    optimizer = ox.optim.AdamW(model.parameters(), lr=1e-2, nonfinite="rollback")
    states = {}
    for i, (x, y) in enumerate(batches(131, {130: math.inf})):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y * (1000 if i == 60 else 1)).backward()
        optimizer.step()
        states[i + 1] = [p.detach().clone() for p in model.parameters()]
    assert [event.action for event in optimizer.recovery.events] == ["rolled back to step 100"]
    assert all(torch.equal(a, b) for a, b in zip(states[131], states[100], strict=True))
    assert not torch.equal(states[130][0], states[100][0])
    with pytest.raises(ValueError, match="on its own"):
        NumericalStabilityManager(optimizer)
    with pytest.raises(AttributeError, match="nonfinite"):
        _ = ox.optim.SGD(model.parameters(), lr=0.1).recovery


def test_an_optimizer_with_rollback_leaves_overflows_to_the_scaler() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = ox.optim.SGD([p], lr=0.1, nonfinite="rollback")
    scaler = ox.amp.GradScaler("cpu", init_scale=1e38)
    for _ in range(10):
        optimizer.zero_grad()
        scaler.scale((p * 100).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 1e38
    assert optimizer.recovery.events == []


ON_TWO = """
import os, pathlib, sys, time, torch, torch.distributed as dist
import oxytorch as ox

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
p = torch.nn.Parameter(torch.zeros(3))
guard = ox.optim.NumericalStabilityManager(ox.optim.SGD([p], lr=1.0), "rollback", every=10)
for i in range(60):
    p.grad = torch.ones(3)
    # A spike of one process alone, and a loss that is NaN on one alone.
    loss = 30.0 if i == 45 and rank == 1 else float("nan") if i == 55 and rank == 0 else 1.0
    guard.step(torch.tensor(loss))
print([(event.step, event.kind, event.action) for event in guard.events], p.tolist(), flush=True)
# The threads of gloo now and then terminate a process that tears them down. Nobody may leave before the other is done.
pathlib.Path(store + str(rank)).touch()
while not pathlib.Path(store + str(1 - rank)).exists():
    time.sleep(0.01)
os._exit(0)
"""


def test_processes_of_a_group_decide_alike(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ON_TWO]
    running = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert said[0].splitlines()[-1] == said[1].splitlines()[-1]  # some torch's gloo says that it is connected
    assert "(46, 'loss', 'rolled back to step 40')" in said[0] and "nonfinite_loss" in said[0]
