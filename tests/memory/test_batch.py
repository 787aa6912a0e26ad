"""Planted memory behaviour found to the sample, nothing left behind, and real steps under a real cap."""

from __future__ import annotations

import random
import resource
from contextlib import nullcontext

import oxytorch.memory.batch as batches
import pytest
import torch
from oxytorch.memory import BatchPlan, BatchTrial, batch_curve, largest_batch, set_memory_fraction
from torch import nn

pytestmark = pytest.mark.cpu_only("measures resident memory of the host; devices go by torch's own accounts")


class PlantedMemory:
    """Memory of a step that takes `fixed` bytes and `each` a sample."""

    def __init__(self, total: int) -> None:
        self.bytes = total
        self.now = 0
        self.released = 0

    def total(self) -> int:
        return self.bytes

    def release(self) -> None:
        self.released += 1

    def begin(self) -> None:
        self.now = 100

    def peak(self) -> int:
        return self.now

    def capped(self, limit):
        self.limit = limit
        return nullcontext()

    def synchronize(self) -> None:
        pass


@pytest.fixture
def planted(monkeypatch):
    memory = PlantedMemory(10_000)
    monkeypatch.setattr(batches, "_memory_of", lambda device: memory)
    return memory


def step_taking(memory, peak_of, raises=None):
    def step(n):
        memory.now = max(memory.now, peak_of(n))
        if memory.now > memory.limit:
            raise (raises or MemoryError("planted"))

    return step


@pytest.mark.parametrize(
    "peak_of",
    [lambda n: 100 + 7 * n, lambda n: 100 + n * n // 10, lambda n: 100 + 500 * (n // 32), lambda n: 100 + 40 * n],
    ids=["line", "square", "stairs", "steep"],
)
def test_the_largest_size_that_fits_is_found_and_was_run(planted, peak_of):
    plan = largest_batch(step_taking(planted, peak_of), lambda n: n, resolution=0)
    truth = max(n for n in range(1, 20_000) if peak_of(n) <= 9_000)
    assert plan.largest == truth
    assert plan.largest in {trial.size for trial in plan.trials if trial.fits}
    assert len(plan.trials) <= 25


def test_the_resolution_bounds_what_is_left_on_the_table(planted):
    plan = largest_batch(step_taking(planted, lambda n: 100 + 3 * n), lambda n: n, resolution=0.05)
    assert 0.95 * 2966 <= plan.largest <= 2966


def test_sizes_are_multiples_and_stay_under_the_most(planted):
    plan = largest_batch(step_taking(planted, lambda n: 100 + 7 * n), lambda n: n, start=8, multiple=8, resolution=0)
    assert plan.largest == (9_000 - 100) // 7 // 8 * 8
    assert all(trial.size % 8 == 0 for trial in plan.trials)
    plan = largest_batch(step_taking(planted, lambda n: 100), lambda n: n, most=1000, resolution=0)
    assert plan.largest == 1000


def test_memory_that_jumps_is_met_as_out_of_memory(planted):
    errors = (MemoryError("x"), torch.OutOfMemoryError("x"), RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    for error in errors:
        step = step_taking(planted, lambda n: 100 + n if n <= 700 else 10**6, error)
        plan = largest_batch(step, lambda n: n, resolution=0)
        assert plan.largest == 700
        assert any(not trial.fits and trial.peak_bytes is None for trial in plan.trials)


def test_the_first_size_that_does_not_fit_is_an_error(planted):
    with pytest.raises(torch.OutOfMemoryError, match=r"a batch of 4 .*raise limit="):
        largest_batch(step_taking(planted, lambda n: 9_500), lambda n: n, start=4)


def test_other_errors_pass_through(planted):
    def step(n):
        planted.now = 100
        if n > 4:
            raise RuntimeError("a bug of the user's")

    with pytest.raises(RuntimeError, match="a bug of the user's"):
        largest_batch(step, lambda n: n)


@pytest.mark.parametrize(
    "arguments", [{"headroom": 1}, {"steps": 0}, {"start": 3, "multiple": 2}, {"start": 8, "most": 4}, {"multiple": 0}]
)
def test_arguments_that_do_not_fit_are_refused(planted, arguments):
    with pytest.raises(ValueError):
        largest_batch(lambda n: None, lambda n: n, **arguments)


def test_the_curve_ends_where_larger_batches_do_not_pay(planted, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(batches.time, "perf_counter", lambda: clock[0])

    def step(n):
        planted.now = 100 + n
        clock[0] += 0.010 + 0.001 * max(n, 32)  # flat up to 32 samples, then linear

    plan = batch_curve(step, lambda n: n)
    by_size = {trial.size: trial.samples_per_second for trial in plan.trials}
    assert by_size[64] > by_size[32] > by_size[16]
    assert plan.largest < 4096
    assert by_size[plan.fastest] >= max(by_size.values()) / 1.02


def plan_of(largest=32, **fields):
    trial = BatchTrial(largest, True, 1000, 0.5, "")
    return BatchPlan(largest, largest, (trial,), 2000, 0.1, fields.get("samples"), fields.get("current"))


def test_a_batch_is_split_exactly():
    assert plan_of(32).split(128) == (32, 4)
    assert plan_of(32).split(100) == (25, 4)
    assert plan_of(32).split(7) == (7, 1)
    assert plan_of(32).split(37) == (1, 37)
    with pytest.raises(ValueError):
        plan_of().split(0)


def test_the_table_says_what_convergence_does():
    text = plan_of(64, samples=1000, current=16).table()
    assert "updates/epoch" in text and "16" in text.splitlines()[2]
    assert "0.25 times as many updates" in text
    assert "nothing was changed here" in text


def make_run():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 2048), nn.ReLU(), nn.BatchNorm1d(2048), nn.Dropout(0.1), nn.Linear(2048, 10))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def make_batch(n):
    return torch.randn(n, 32), torch.randint(10, (n,))


def state_of(model, optimizer):
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.clone() for tensor in tensors]


def test_a_real_model_is_left_as_it_was_and_its_peak_stays_under_the_limit():
    model, optimizer, step = make_run()
    step(make_batch(8))
    before, numbers, rlimit = state_of(model, optimizer), random.random, resource.getrlimit(resource.RLIMIT_DATA)
    host = batches._Host()
    host.release()
    host.begin()  # earlier tests' peak is no part of the limit
    limit = host.peak() + (200 << 20)
    plan = largest_batch(step, make_batch, limit, start=8, most=8192, steps=1, resolution=0.1)
    after = state_of(model, optimizer)
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert resource.getrlimit(resource.RLIMIT_DATA) == rlimit
    assert random.random is numbers
    chosen = next(trial for trial in plan.trials if trial.size == plan.largest)
    assert chosen.fits and chosen.peak_bytes <= 0.9 * limit


def test_a_step_that_takes_far_too_much_is_survived():
    held = []

    def step(n):
        held.append(torch.ones(n, 1 << 20))  # 4 MiB a sample
        held.clear()

    host = batches._Host()
    host.begin()
    plan = largest_batch(step, lambda n: n if n < 8 else n * 4096, host.peak() + (256 << 20), steps=1)
    assert plan.largest == 7
    refused = [trial for trial in plan.trials if not trial.fits]
    assert refused and all("memory" in trial.reason or "over" in trial.reason for trial in refused)


def test_the_state_is_put_back_when_a_step_throws():
    model, optimizer, step = make_run()
    step(make_batch(8))
    before = state_of(model, optimizer)

    def broken(batch):
        step(batch)
        raise KeyError("mid-training")

    with pytest.raises(KeyError):
        largest_batch(broken, make_batch, start=8, state=[model, optimizer])
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model, optimizer), strict=True))


def test_a_cpu_has_no_fraction():
    with pytest.raises(NotImplementedError, match="limit="):
        set_memory_fraction(0.5, "cpu")
    with pytest.raises(ValueError, match="fraction"):
        set_memory_fraction(0, "cpu")
