"""What tensors of the device take: counted to the byte, recorded, fitted to a budget, and told for larger batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import oxytorch as ox
import pytest
import torch
import torch_device
from oxytorch.memory import MemoryPlan, Meter, fit
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch_device.chosen()
WIDTH, LENGTH, BATCH = 32, 12, 16
PROCESS = "starts processes with devices of their own"
#: A card's allocator rounds each block up.
EXACT = pytest.mark.skipif(DEVICE.type == "cuda", reason="a card's allocator rounds each block up")


class Block(nn.Module):
    """Keeps several times what it hands on, with masks that backward needs again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.softmax(q @ k.transpose(1, 2), dim=-1) @ v
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Training:
    def __init__(self) -> None:
        self.model = Model().to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = self.draw(BATCH)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(count, LENGTH, WIDTH, generator=generator)
        return inputs.to(DEVICE), torch.randint(5, (count,), generator=generator).to(DEVICE)

    def step(self, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
        inputs, targets = batch or self.batch
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def held(self) -> int:
        """Bytes that live between steps: parameters, gradients, AdamW's two averages, the batch."""
        return 4 * sum(p.nbytes for p in self.model.parameters()) + sum(t.nbytes for t in self.batch)

    def fit(self, budget: int | str) -> MemoryPlan:
        return fit(self.model, self.step, budget)

    def left(self) -> list[Tensor]:
        """Losses, gradients, parameters and random state of three steps."""
        torch.manual_seed(7)
        losses = [self.step() for _ in range(3)]
        grads = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        return [*losses, *grads, *(p.detach().clone() for p in self.model.parameters()), torch.rand(4, device=DEVICE)]


@EXACT
def test_exact_on_a_known_sequence() -> None:
    with Meter(device=DEVICE) as meter:
        a = torch.empty(1000, device=DEVICE)
        b = torch.empty(3, dtype=torch.uint8, device=DEVICE)
        assert meter.live_bytes == 4003
        del a
        c = torch.empty(100, dtype=torch.float64, device=DEVICE)
        with meter.phase("inner"), Meter(device=DEVICE) as inner:
            torch.empty(500, device=DEVICE)
        assert (inner.live_bytes, inner.peak_bytes) == (0, 2000)
        assert (meter.live_bytes, meter.peak_bytes) == (803, 4003), "the peak of before is not forgotten"
        meter.reset_peak()
        assert meter.peak_bytes == 803
        del b, c
    assert (meter.live_bytes, meter.peak_bytes) == (0, 803)
    assert [(p.name, p.begin_bytes, p.peak_bytes, p.end_bytes) for p in meter.phases] == [("inner", 803, 2803, 803)]


def test_a_timeline_names_what_made_each_block() -> None:
    training = Training()
    training.step()
    training.optimizer.zero_grad()  # what goes later was then made within
    with Meter(training.model, device=DEVICE, timeline=True, sites=True) as meter:
        training.step()
    timeline = meter.timeline()
    assert timeline.events and timeline.events[-1].live_bytes == meter.live_bytes
    assert max(event.live_bytes for event in timeline.events) == meter.peak_bytes, "no block is missed"
    assert sum(event.bytes for event in timeline.events) == meter.live_bytes
    parts = meter.peak_parts()
    assert sum(part.bytes for part in parts) == meter.peak_bytes
    assert any(part.region == "blocks.0.up" and "forward" in part.site for part in parts)
    backward = {timeline.names[e.region] for e in timeline.events if e.in_backward and e.bytes > 0 and e.region >= 0}
    assert {"blocks.0.qkv", "blocks.3.down", "head"} <= backward
    assert str(DEVICE) in meter.table()


@pytest.mark.skipif(DEVICE.type == "cpu", reason="on the CPU both are told")
def test_a_profiler_and_a_timeline_exclude_each_other() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(RuntimeError, match="a profiler of torch runs on this thread"):
            Meter(device=DEVICE, timeline=True).start()
        with Meter(device=DEVICE) as meter:
            kept = torch.ones(1000, device=DEVICE)
        assert meter.live_bytes >= kept.nbytes, "without a timeline there is nothing to share"
    with Meter(device=DEVICE, timeline=True) as meter:
        assert not torch.autograd._profiler_enabled()
        torch.ones(10, device=DEVICE)
        with pytest.raises(RuntimeError, match="another meter records a timeline"):
            Meter(timeline=True).start()
    assert meter.timeline().events
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(10, device=DEVICE)
    assert any("ones" in event.key for event in profile.key_averages()), "a profiler runs after it"


def test_a_leak_is_named() -> None:
    kept: list[Tensor] = []
    training = Training()

    def step() -> None:
        training.step()
        kept.append(torch.ones(1 << 14, device=DEVICE))

    (leak,) = ox.memory.leaks(step, device=DEVICE)
    assert leak.bytes == 1 << 16 and leak.site.split("\n")[0].endswith(" step")


def test_every_budget_is_kept_and_no_bit_changes() -> None:
    plain = Training()
    left = plain.left()
    loose = Training().fit("1TiB")
    assert not loose.planned
    within = loose.plain_peak - loose.floor
    assert loose.floor < 0.8 * loose.plain_peak
    last = loose.plain_peak
    for percent in (90, 50, 10):
        training = Training()
        budget = loose.floor + within * percent // 100
        with training.fit(budget) as plan:
            assert plan.planned and plan.same_bits is True
            assert plan.measured_peak <= min(budget, last)
            assert abs(plan.predicted_peak - plan.measured_peak) <= 0.01 * plan.measured_peak
            last = plan.measured_peak
            assert all(a.equal(b) for a, b in zip(left, training.left(), strict=True))
            if DEVICE.type != "cpu":  # by torch's own figures
                others = torch.accelerator.memory_allocated(DEVICE) - training.held()
                torch.accelerator.reset_peak_memory_stats(DEVICE)
                training.step()
                peak = torch.accelerator.max_memory_allocated(DEVICE) - others
                assert 0.97 * plan.measured_peak <= peak <= budget
    with pytest.raises(torch.OutOfMemoryError, match="lowest peak"):
        Training().fit(loose.floor // 2)


@pytest.mark.skipif(DEVICE.type in ("cpu", "cuda"), reason="the memory of a fake device can be set")
def test_a_step_that_does_not_fit_is_fitted() -> None:
    plain, training = Training(), Training()
    plain.batch = training.batch = plain.draw(256)
    left = plain.left()
    with Meter(device=DEVICE) as meter:
        plain.step()
    activations = meter.peak_bytes
    set_limit = torch.ops.oxytorch_device.set_memory_limit
    state = 4 * sum(p.nbytes for p in training.model.parameters())  # and its copy while the step is fitted
    set_limit(torch.accelerator.memory_allocated(DEVICE) + state + activations * 6 // 10)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            training.step()
        training.optimizer.zero_grad()
        torch.manual_seed(7)
        with training.fit("100%") as plan:
            assert 0 < len(plan.full) < 4 + 1, plan
            assert "does not fit without" in plan.summary() and plan.plain_peak == 0 and plan.same_bits is None
            assert plan.table() and not plan.curve()
            losses = training.left()[:3]
            assert all(a.equal(b) for a, b in zip(left, losses, strict=False))
        with pytest.raises(torch.OutOfMemoryError, match="with every block run again it takes"):
            training.fit(plan.floor // 2)
    finally:
        set_limit(0)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="of the host's memory it is tested elsewhere")
def test_a_share_is_of_the_devices_memory() -> None:
    total = torch.accelerator.get_memory_info(DEVICE)[1]
    plan = Training().fit("50%")
    assert plan.budget == total // 2
    assert 0 < ox.memory.available_bytes(DEVICE) < total


def test_a_larger_batch_is_told() -> None:
    training = Training()
    told = ox.memory.will_it_fit(training.step, training.draw, 256, device=DEVICE)
    assert told
    with Meter(device=DEVICE) as meter:
        training.step(training.draw(256))  # with gradients and state that it makes, as told
        meter.reset_peak()
        training.step(training.draw(256))
    assert abs(told.bytes - meter.peak_bytes) <= 0.02 * meter.peak_bytes
    assert not ox.memory.will_it_fit(training.step, training.draw, 256, limit=told.bytes // 2, device=DEVICE)


SILENT = """
import sys
sys.path.insert(0, "tests/device")
import torch_device
device = torch_device.load()
import oxytorch as ox, torch
from torch import nn
{counts}
try:
    ox.memory.Meter(device=device, timeline=True).start()
except NotImplementedError as error:
    assert "{why}" in str(error), error
else:
    raise AssertionError("a timeline of nothing")
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 2)).to(device)
x, y = torch.randn(32, 8).to(device), torch.randint(2, (32,)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plan = ox.accelerate(model, optimizer, nn.CrossEntropyLoss(), [(x, y)], goal="memory", level="basic", remember=False,
                     tune_seconds=0.5, progress=False)
assert "{why}" in plan.explain(), plan.explain()
assert (plan.peak_bytes is None) == {unknown}
"""


@pytest.mark.cpu_only(PROCESS)
@pytest.mark.parametrize(
    ("quirk", "why", "counts"),
    [
        ("silent_allocator", "reports no blocks", "assert ox.memory.available_bytes(device) > 0"),
        ("plain_allocator", "has no statistics", ""),
    ],
)
def test_an_allocator_that_does_not_tell(quirk: str, why: str, counts: str) -> None:
    script = SILENT.format(why=why, counts=counts, unknown=quirk == "plain_allocator")
    environment = {**os.environ, "OXYTORCH_DEVICE": "hpu", "OXYTORCH_FAKE": quirk, "OXYTORCH_SIM": "latency_us=0"}
    command = [sys.executable, "-c", script]
    torch_device.check(subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False))
