"""The fake torch devices themselves: each in a process of its own, since a process has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch_device

pytestmark = pytest.mark.cpu_only("starts processes with devices of their own")
ROOT = Path(__file__).resolve().parents[2]

START = """
import copy, gc, io, torch, torch_device

device = torch_device.load()
calls = torch.ops.oxytorch_device

def refused(run, words, kind=RuntimeError):
    try:
        run()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError("nothing was raised")
"""

FACTS = """
before = calls.allocated_bytes()
here = torch.randn(3, 4, device=device)
assert calls.allocated_bytes() >= before + 48, "memory comes from the backend"
assert here.device == device and here.is_contiguous()

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)
model(here).sum().backward()
assert all(p.grad.device == device for p in model.parameters())

# Operators agree with the CPU, views, strides and outputs that grow included.
there = here.cpu()
for run in (
    lambda t: t.t().contiguous(),
    lambda t: t[:, 1:3].mul(2).sum(0),
    lambda t: t.clone().view(2, 6).add_(1),
    lambda t: torch.stack([t, t.neg()]).amax((0, 2)),
    lambda t: t.clone().t().copy_(torch.arange(12.0, device=t.device).view(4, 3)),
    lambda t: t.clone().index_copy_(0, torch.tensor([2], device=t.device), torch.ones(1, 4, device=t.device)),
    lambda t: torch.view_as_real(torch.complex(t, t).conj().resolve_conj()),
    lambda t: torch.cumsum(t, 0, out=torch.empty(0, device=t.device)),
    lambda t: t[t > 0],
    lambda t: t.sort(1)[0],
    lambda t: torch.nn.functional.conv1d(t.view(1, 3, 4), torch.ones(2, 3, 2, device=t.device)),
    lambda t: (t.unsqueeze(0).expand(3, 3, 4) + 1).half(),
    lambda t: torch.load(io.BytesIO(saved(t)), weights_only=True),
    lambda t: copy.deepcopy(t),
):
    saved = lambda t: (lambda f: (torch.save(t, f), f.getvalue())[1])(io.BytesIO())
    result = run(here)
    assert result.device == device and torch.equal(result.cpu(), run(there))
part = here.clone()
part[1:, ::2] = 0  # a view that is not dense: its neighbours stay
assert torch.equal(part.cpu()[:, 1::2], there[:, 1::2]) and not part.cpu()[1:, ::2].any()
refused(lambda: here.clone().expand(2, 3, 4)[0].t()[:, :1].expand(4, 3).add_(1), "single memory location")

# What the host reads is counted; what operators do is not.
reads = torch_device.host_reads()
here.matmul(here.t()).relu_()
assert torch_device.host_reads() == reads
here[0, 0].item()
here.cpu()
torch.equal(here, here)
assert torch_device.host_reads() == reads + 3

# Devices do not mix, scalars and indices apart.
assert torch.equal((here + torch.tensor(1.0)).cpu(), there + 1)
assert torch.equal(here[torch.tensor([1])].cpu(), there[[1]])
for run in (
    lambda: here + there, lambda: here @ there.t(), lambda: there.add_(here),
    lambda: torch.tensor(1.0).add_(here[0, 0]),
    lambda: torch.cat([here, there]), lambda: torch.where(here > 0, here, there),
    lambda: torch._foreach_add_([here], [there]), lambda: torch.nn.functional.linear(here, torch.ones(2, 4)),
):
    refused(run, "at least two devices")

# Random numbers: the device's own, repeatable, and saved with its generator.
torch.manual_seed(3)
first, state = torch.randn(4, device=device), torch.get_rng_state()
assert torch.equal(state, torch.get_rng_state())
torch.manual_seed(3)
assert torch.equal(first, torch.randn(4, device=device))
generator = torch.Generator(device).manual_seed(3)
drawn = torch.randn(4, device=device, generator=generator)
assert torch.equal(drawn, torch.randn(4, device=device, generator=generator.manual_seed(3)))
assert torch.equal(drawn.cpu(), torch.randn(4, generator=torch.Generator().manual_seed(3)))

# Streams, events, pinned memory, torch.accelerator.
begun, done = torch.Event(device.type, enable_timing=True), torch.Event(device.type, enable_timing=True)
begun.record()
stream = torch.Stream(device)
stream.wait_event(begun)
stream.record_event(done)
stream.synchronize()
done.synchronize()
assert done.query() and begun.elapsed_time(done) >= 0
assert torch.ones(3).pin_memory().is_pinned() and not torch.ones(3).is_pinned()
assert torch.accelerator.current_accelerator().type == device.type
assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] > 0

# Autocast has torch's lists.
with torch.autocast(device.type, dtype=torch.bfloat16):
    product = here @ here.t()
    assert product.dtype == torch.bfloat16 and product.exp().dtype == torch.float32

# A full device is torch's error, and goes on.
calls.set_memory_limit(1 << 20)
refused(lambda: torch.empty(1 << 20, device=device), "out of memory", torch.OutOfMemoryError)
calls.set_memory_limit(0)
refused(lambda: torch.empty(1 << 40, device=device), "cannot allocate", torch.OutOfMemoryError)
assert torch.empty(1 << 20, device=device).numel() == 1 << 20

# New shapes are new programs; operators left to the CPU are counted.
here.mul(3)
programs = calls.compilations()
here.mul(3)
assert calls.compilations() == programs
here[:2].mul(3)
assert calls.compilations() == programs + 1
calls.leave_to_cpu(["aten::topk"])
here.topk(2)
here.mul(2)
assert dict(calls.cpu_fallbacks()) == {"aten::topk": 1}

del here, part, model, first, drawn, result, product, state
gc.collect()  # torch 2.9 leaves a tensor in a circle
assert calls.allocated_bytes() == before, "memory goes back to the backend"
"""

HPU = """
torch.accelerator.is_available()
x = torch.ones(100, device="hpu")
assert torch.hpu.is_available() and torch.hpu.device_count() == 1
stats = torch.hpu.memory_stats()
assert stats["InUse"] == torch.hpu.memory_allocated() == 400 and stats["NumAllocs"] - stats["NumFrees"] == 1
assert set(stats) == {"Limit", "InUse", "MaxInUse", "NumAllocs", "NumFrees", "ActiveAllocs", "MaxAllocSize",
                      "TotalSystemAllocs", "TotalSystemFrees", "TotalActiveAllocs"}
free, total = torch.hpu.mem_get_info()
assert total == stats["Limit"] and free == total - 400
del x
assert torch.hpu.max_memory_allocated() == 400 and torch.hpu.memory_allocated() == 0
torch.hpu.reset_peak_memory_stats()
assert torch.hpu.max_memory_allocated() == 0
stream, event = torch.hpu.Stream(), torch.hpu.Event(enable_timing=True)
with torch.hpu.stream(stream):
    event.record()
    assert torch.hpu.current_stream() == stream
torch.hpu.synchronize()
assert event.query() and torch.hpu.get_device_name() == "GAUDI3" and torch.hpu.is_bf16_supported()
for name in ("empty_cache", "amp", "memory", "utilization", "get_performance_counters", "data"):
    refused(lambda: getattr(torch.hpu, name), name, AttributeError)
"""

QUIRKS = {
    "plain_allocator": """
refused(lambda: torch.accelerator.memory_stats(), "DeviceAllocator")
assert torch.ones(3, device=device).sum().item() == 3
""",
    "no_hooks": """
assert not torch.accelerator.is_available()
assert torch.ones(3, device=device, requires_grad=True).sum().item() == 3
""",
    "no_streams": """
refused(lambda: torch.Stream(device), "doesn't support")
refused(lambda: torch.Event(device.type).record(), "doesn't support events")
torch.ones(3, device=device).sum().item()
""",
    "no_events": """
torch.Stream(device).synchronize()
refused(lambda: torch.Event(device.type).record(), "doesn't support events")
""",
    "one_device": """
assert torch.accelerator.device_count() == 1
assert torch.ones(3, device=device).device.index == 0
""",
    "asynchronous": """
here = torch.full((1 << 10,), 2.0, device=device)
late = torch.zeros(1 << 10).pin_memory()
late.copy_(here, non_blocking=True)
assert not late.any(), "nothing waits"
event = torch.Event(device.type)
event.record()
assert not event.query()
event.synchronize()
assert bool((late == 2).all())
here.copy_(torch.full((1 << 10,), 5.0), non_blocking=True)
assert here.sum().item() == 5 << 10, "operators come after copies"
""",
}


def run(script: str, **environment: str) -> None:
    path = os.pathsep.join([str(ROOT / "tests" / "device"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", START + script],
        env={**os.environ, "OXYTORCH_FAKE": "", "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    torch_device.check(done)


@pytest.mark.parametrize("kind", torch_device.FAKES)
def test_the_device_is_one_of_torch(kind: str) -> None:
    run(FACTS, OXYTORCH_DEVICE=kind)


def test_torch_hpu_has_the_names_of_the_bridge_alone() -> None:
    run(HPU, OXYTORCH_DEVICE="hpu")


@pytest.mark.parametrize("quirk", QUIRKS)
def test_quirks_of_bridges(quirk: str) -> None:
    settings = {"one_device": "devices=2,latency_us=0", "asynchronous": "latency_us=50000"}
    extra = {"OXYTORCH_SIM": settings[quirk]} if quirk in settings else {}
    run(QUIRKS[quirk], OXYTORCH_DEVICE="hpu", OXYTORCH_FAKE=quirk, **extra)


def test_two_devices_do_not_mix() -> None:
    script = """
one, two = torch.ones(3, device=f"{device.type}:0"), torch.ones(3, device=f"{device.type}:1")
refused(lambda: one + two, "at least two devices")
assert (one + two.to(one.device)).sum().item() == 6 and two.device.index == 1
assert torch.accelerator.device_count() == 2
"""
    run(script, OXYTORCH_DEVICE="hpu", OXYTORCH_SIM="devices=2,latency_us=0")


def test_an_unknown_quirk_is_refused() -> None:
    with pytest.raises(AssertionError, match="there is no quirk 'late'"):
        run("", OXYTORCH_DEVICE="hpu", OXYTORCH_FAKE="late")
