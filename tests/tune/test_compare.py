"""Which steps of a candidate are compared, what is a kink and what is not, and what torch's own norm may be off by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import oxytorch.tune.verify as verify_module
import pytest
import torch
import torch.nn.functional as F
from oxytorch.memory import Meter
from oxytorch.model.snapshot import Snapshot
from oxytorch.tune.record import State, counters
from oxytorch.tune.reference import truth
from oxytorch.tune.run import Run
from oxytorch.tune.strategy import Kind
from oxytorch.tune.update import clip, norm_error
from oxytorch.tune.verify import Ruling, Verifier
from planted_faults import ruling
from test_verify import make, nothing, strategy
from torch import Tensor, nn

pytestmark = [
    pytest.mark.cpu_only("the reference of these is the CPU's float64"),
    pytest.mark.usefixtures("one_thread"),
]


def check(run: Run, plant: Callable[[Run], Iterator[None]], kind: Kind = "tolerance", **options: Any) -> Ruling:
    return ruling(Verifier(run, Snapshot.of(run.model, run.original), **options), strategy(plant), kind)


def in_step(number: int, change: Callable[[Run], None]) -> Callable[[Run], Iterator[None]]:
    """Plant a change of the gradients of one step alone, counted from 1."""

    def plant(run: Run) -> Iterator[None]:
        taken = 0

        def tamper(*_: Any) -> None:
            nonlocal taken
            taken += 1
            if taken == number:
                change(run)

        hook = run.original.register_step_pre_hook(tamper)
        yield
        hook.remove()

    return plant


def zero_one(run: Run) -> None:
    run.params[2].grad.zero_()  # type: ignore[union-attr]


def percent(part: float) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        for p in run.params:
            p.grad.mul_(1 + part / 100)  # type: ignore[union-attr]

    return change


@pytest.mark.parametrize("number", [*range(1, 13), 24])
def test_a_fault_in_one_step_alone_is_found_in_that_step(number: int) -> None:
    device = torch.device("cpu")
    assert f"step {number}: " in check(make(device), in_step(number, zero_one)).reason
    found = check(make(device), in_step(number, percent(1.9)))
    assert not found.held
    assert f"step {number}: " in found.reason


def test_steps_in_between_are_drawn_anew_for_each_check_and_can_be_drawn_again() -> None:
    run = make(torch.device("cpu"))
    verifier = Verifier(run, Snapshot.of(run.model, run.original))
    found = [ruling(verifier, strategy(in_step(17, zero_one)), "tolerance") for _ in range(30)]
    drawn = {int(one.evidence["drawn_by"]) for one in found}
    assert len(drawn) == 30
    caught = [one for one in found if not one.held]
    assert 0 < len(caught) < 30, "three of eleven are drawn"
    for one in (caught[0], next(one for one in found if one.held)):
        again = check(make(torch.device("cpu")), in_step(17, zero_one), drawn_by=int(one.evidence["drawn_by"]))
        assert again.held is one.held


def test_a_ruling_knows_nothing_of_the_candidate_before() -> None:
    def judged(*plants: Callable[[Run], Iterator[None]]) -> dict[str, float]:
        run = make(torch.device("cpu"))
        verifier = Verifier(run, Snapshot.of(run.model, run.original), drawn_by=0)
        found = [ruling(verifier, strategy(plant), "tolerance") for plant in plants]
        assert [one.held for one in found] == [plant is nothing for plant in plants]
        return {name: value for name, value in found[-1].evidence.items() if name != "seconds"}

    assert judged(in_step(6, percent(1.9)), nothing) == judged(nothing)


def test_an_exact_claim_is_held_to_the_bits_of_every_step() -> None:
    for number in (1, 9, 13, 20, 24):
        found = check(make(torch.device("cpu")), in_step(number, percent(1e-3)), "exact")
        assert not found.held, number


def test_what_memory_does_not_hold_at_once_is_taken_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_KEPT_BYTES", 0)
    for kind in ("tolerance", "precision"):
        found = check(make(torch.device("cpu")), nothing, kind)
        assert found.held, found.reason
        assert not check(make(torch.device("cpu")), in_step(11, zero_one), kind).held


class Near(nn.Module):
    """One row of each batch brings a unit within rounding of the kink of ReLU: either side is right."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 3)
        self.edge = nn.Parameter(torch.randn(8), requires_grad=False)
        row = torch.randn(8)
        self.register_buffer(
            "row", row - self.edge.detach() * (row @ self.edge.detach() / self.edge.detach().square().sum())
        )
        self.way = nn.Parameter(torch.randn(8))
        self.shift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        at = self.row @ self.edge  # nothing but a rounding
        near = at + self.shift + self.row @ (self.way - self.way.detach())
        z = torch.cat([z[:, :3], torch.cat([near.view(1, 1), z[1:, 3:4]]), z[:, 4:]], 1)
        return self.last(F.relu(z))


def crossing(run: Run) -> Iterator[None]:
    """Round otherwise: the unit near its kink is on the other side."""
    run.model.shift = -5e-6
    yield
    run.model.shift = 0.0


def test_a_rounding_across_a_kink_is_no_fault_and_an_error_of_its_size_elsewhere_is() -> None:
    def run() -> Run:
        return make(torch.device("cpu"), Near())

    found = check(run(), crossing)
    assert found.held, found.reason
    for part in (1.9, 0.05):
        assert not check(run(), in_step(7, percent(part))).held
    assert not check(run(), in_step(7, lambda r: r.params[0].grad[5].mul_(1.05))).held  # type: ignore[index, union-attr]


def heavy(count: int) -> list[Tensor | None]:
    g = torch.Generator().manual_seed(0)
    return [torch.rand(count, generator=g).pow(8) + 1e-4]


def test_gradients_that_torch_has_clipped_are_clipped_gradients() -> None:
    grads = heavy(4_000_000)
    p = nn.Parameter(torch.zeros(4_000_000))
    p.grad = grads[0]
    torch.nn.utils.clip_grad_norm_([p], 0.25)
    total = float(p.grad.double().norm())
    assert abs(total / 0.25 - 1) > 1e-5, "torch's own norm in float32 is off"
    assert norm_error([p.grad], 0.25) == pytest.approx(abs(total / 0.25 - 1), rel=0.5)
    (again,) = clip([p.grad], 0.25)
    assert again is p.grad
    (again,) = clip([p.grad * 1.002], 0.25)
    assert again is not None
    assert float(again.double().norm()) == pytest.approx(0.25, rel=1e-5)


def test_what_a_loop_counts_is_as_it_was_in_that_step() -> None:
    class Counting:
        """A loop that weighs its loss by how many steps it has taken."""

        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
            self.taken = 0
            self.scale = torch.ones(())

        def __call__(self, batch: Any) -> Tensor:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(batch[0]), batch[1]) * (1 + self.taken % 3) * self.scale
            loss.backward()
            self.optimizer.step()
            self.taken += 1
            self.scale *= 0.9
            return loss.detach()

    def judged(plant: Callable[[Run], Iterator[None]]) -> Ruling:
        loop = Counting()
        batches = [(torch.randn(12, 8), torch.randint(3, (12,))) for _ in range(4)]
        run = Run(loop.model, loop.optimizer, None, batches, step=loop)
        return ruling(Verifier(run, Snapshot.of(run.model, run.original, _Holder(loop))), strategy(plant), "tolerance")

    found = judged(nothing)
    assert found.held, found.reason
    assert not judged(in_step(8, percent(0.1))).held


class _Holder:
    def __init__(self, loop: Any) -> None:
        self.loop = loop


def deep(clip_norm: float | None) -> Run:
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(512, 512), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(512, 4))
    batch = (torch.randn(1024, 512), torch.randint(4, (1024,)))
    return Run(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), [batch], clip_norm=clip_norm)


def test_float64_takes_little_more_memory_than_the_step() -> None:
    """What is saved for backward waits in a file, and so do gradients where nothing needs all of them."""
    found: list[Any] = []
    peaks = []
    for clip_norm in (1e9, None):  # which clips nothing, and takes all gradients
        run = deep(clip_norm)
        roots = Snapshot.of(run.model, run.original).roots
        before, counted = State.of(run, roots), counters(run, roots)
        with Meter() as meter:
            found.append(truth(run, roots, before, run.batches[0], counted))
        peaks.append(meter.peak_bytes)
        assert all(p.dtype is torch.float32 and p.grad is None for p in run.params)
    weights, activation = sum(p.nbytes for p in run.params), 1024 * 512 * 8
    assert all(torch.equal(a, b) for a, b in zip(found[0].grads, found[1].grads, strict=True))
    assert peaks[0] - peaks[1] > 1.2 * weights
    assert peaks[1] < 2 * weights + 6 * activation, "twice the weights, and not what each of 6 layers saves"
