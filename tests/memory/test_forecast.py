"""A batch that will fit or not, told from small ones, against the step that is then taken."""

from __future__ import annotations

import pytest
import torch
from oxytorch.memory import Meter, will_it_fit
from torch import nn

pytestmark = pytest.mark.cpu_only("counts tensors of the host")


class Training:
    """A step of a model whose peak moves from the optimizer's update to the activations as the batch grows."""

    def __init__(self, model: nn.Module, inputs: int) -> None:
        torch.manual_seed(0)
        self.model, self.inputs = model, inputs
        self.optimizer = torch.optim.AdamW(model.parameters())

    def batch(self, samples: int) -> torch.Tensor:
        return torch.ones(samples, self.inputs)

    def __call__(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def measured(self, samples: int) -> int:
        with Meter() as meter:
            for _ in range(2):
                self(self.batch(samples))
        return meter.peak_bytes


def network() -> Training:
    layers = [nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Dropout(0.1), nn.Linear(256, 256), nn.Tanh()]
    return Training(nn.Sequential(*layers), 64)


@pytest.mark.parametrize("size", [1, 2, 3, 31, 64, 500, 1024, 3001])
def test_predicted_peak_is_that_of_the_step(size, one_thread):
    told = will_it_fit(training := network(), training.batch, size)
    assert told.is_regular
    assert told.bytes == pytest.approx(training.measured(size), rel=0.01)


@pytest.mark.parametrize("size", [2, 64, 1024])
def test_a_run_under_way_has_gradients_and_state_already(size, one_thread):
    training = network()
    with Meter() as meter:  # which sees the gradients that the step drops
        training(training.batch(4))
        told = will_it_fit(training, training.batch, size)
        before = meter.live_bytes
        meter.reset_peak()
        training(training.batch(size))
    assert told.bytes == pytest.approx(meter.peak_bytes - before, rel=0.01)


def test_leaves_nothing_behind(one_thread):
    training = network()
    before = [p.detach().clone() for p in training.model.parameters()]
    random = torch.get_rng_state()
    will_it_fit(training, training.batch, 64)
    assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))
    assert not training.optimizer.state
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize(("size", "most"), [(1, 1), (2, 2), (3, 3), (8, 4), (10_000_000_000, 64)])
def test_runs_small_batches_alone(size, most, one_thread):
    training, seen = network(), []

    def make(samples):
        seen.append(samples)
        return training.batch(samples)

    assert bool(will_it_fit(training, make, size)) is (size < 64)
    assert max(seen) == most


def test_says_what_does_not_fit(one_thread):
    training = network()
    told = will_it_fit(training, training.batch, 64, "1")
    assert not told
    assert told.available == 0
    assert "does not fit" in str(told)
    assert will_it_fit(training, training.batch, 64)


def test_a_step_of_other_tensors_at_another_size_is_told_by_its_peaks(one_thread):
    training = network()

    def step(batch):
        parts = batch.split(4)
        for part in parts:
            training(part)

    told = will_it_fit(step, training.batch, 256, state=[training.model, training.optimizer])
    assert not told.is_regular
    assert "may be low" in str(told)


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [(0, {}, "at least 1"), (-4, {}, "at least 1"), (8, {"headroom": 1.0}, "headroom"), (8, {"limit": "much"}, "much")],
)
def test_bad_arguments(size, options, message):
    training = network()
    with pytest.raises(ValueError, match=message):
        will_it_fit(training, training.batch, size, **options)
