"""The meter against sequences computed by hand, torch's profiler and torch's reader of memory snapshots."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import oxytorch as ox
import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz


def test_exact_on_a_known_sequence() -> None:
    with ox.memory.Meter() as meter:
        a = torch.empty(1000)
        b = torch.empty(3, dtype=torch.uint8)
        assert meter.live_bytes == 4003
        del a
        c = torch.empty(100, dtype=torch.float64)
        view, none = c[10:20], torch.empty(0)
        assert (meter.live_bytes, meter.peak_bytes, meter.allocations) == (803, 4003, 3)
        c.resize_(1000)
        assert meter.live_bytes == 8003
        del b, c, view, none
    assert (meter.live_bytes, meter.peak_bytes) == (0, 8803), "a resize holds both blocks for the copy"


def test_the_peak_is_that_of_torchs_profiler() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    x = torch.randn(4, 3, 8, 8)
    model(x).sum().backward()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile, ox.memory.Meter() as meter:
        model(x).sum().backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    live = peak = 0
    for event in events:
        live += event.nbytes()
        peak = max(peak, live)
    assert (live, peak) == (meter.live_bytes, meter.peak_bytes)


def test_memory_of_others_is_not_seen() -> None:
    array = np.ones(1 << 16)
    with ox.memory.Meter() as meter:
        torch.from_numpy(array)
        torch.frombuffer(bytearray(1000), dtype=torch.uint8)
        assert meter.peak_bytes == 0


def test_threads_and_nesting() -> None:
    with ox.memory.Meter() as outer:
        kept: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: kept.append(torch.empty(50)))
        thread.start()
        thread.join()
        with ox.memory.Meter() as inner:
            kept.clear()
            assert inner.live_bytes == -200
        assert outer.peak_bytes == 200
    with pytest.raises(RuntimeError, match="has not begun"):
        _ = ox.memory.Meter().peak_bytes


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def test_a_timeline_names_modules_phases_and_lines() -> None:
    model = nn.Sequential(block(16), block(16))
    x = torch.randn(8, 16)
    with ox.memory.Meter(model, timeline=True, sites=True) as meter:
        with meter.phase("forward"):
            loss = model(x).sum()
        with meter.phase("backward"):
            loss.backward()
    left = {part.region: 0 for part in meter.live_parts()}
    for part in meter.live_parts():
        left[part.region] += part.bytes
    assert left["0.0"] == left["1.0"] == (64 * 16 + 64) * 4, (
        "gradients belong to the layer whose forward made their node"
    )
    assert sum(part.bytes for part in meter.peak_parts()) == meter.peak_bytes
    timeline = meter.timeline()
    gelu = timeline.names.index("1.1")
    sites = [timeline.sites[e.site] for e in timeline.events if e.region == gelu and e.bytes > 0 and not e.in_backward]
    assert sites and all("activation.py" in site for site in sites)
    assert all(Path(__file__).name in part.site for part in meter.peak_parts())
    assert [phase.name for phase in meter.phases] == ["forward", "backward"]
    assert not model._forward_hooks and not model[0]._forward_pre_hooks, "its hooks are gone"
    table = meter.table()
    assert "1.0" in table and "backward" in table


def test_regions_of_a_module_that_raises_are_closed() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    model = nn.Sequential(Fails())
    with ox.memory.Meter(model, timeline=True) as meter:
        with pytest.raises(ValueError, match="no"):
            model(torch.ones(1))
        kept = torch.empty(10)
    assert [part.region for part in meter.live_parts()] == [""]
    del kept


def test_torchs_own_reader_takes_the_snapshot(tmp_path: Path) -> None:
    model = block(16)
    with ox.memory.Meter(model, timeline=True, sites=True) as meter:
        model(torch.randn(8, 16)).sum().backward()
    path = tmp_path / "snapshot.pickle"
    meter.to_memory_viz(path)
    snapshot = pickle.loads(path.read_bytes())
    text = _memory_viz.trace(snapshot)
    assert text.count("= MEM[") == meter.allocations
    assert "test_meter.py" in str(snapshot["device_traces"])
    assert "<script" in _memory_viz.trace_plot(snapshot)
    live = 0
    peak = 0
    for event in snapshot["device_traces"][0]:
        live += (
            event["size"]
            if event["action"] == "alloc"
            else -event["size"]
            if event["action"] == "free_completed"
            else 0
        )
        peak = max(peak, live)
    assert (live, peak) == (meter.live_bytes, meter.peak_bytes)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="timeline=True too"):
        ox.memory.Meter(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="part of a timeline"):
        ox.memory.Meter(sites=True).start()
    with ox.memory.Meter() as meter, pytest.raises(RuntimeError, match="records no timeline"):
        meter.timeline()
    with ox.memory.Meter(timeline=True), pytest.raises(RuntimeError, match="another meter records"):
        ox.memory.Meter(timeline=True).start()


def test_a_leak_is_named() -> None:
    leak = []

    def step() -> None:
        leak.append(torch.zeros(100))
        torch.zeros(1000)

    step()
    with ox.memory.Meter(timeline=True, sites=True) as meter:
        for _ in range(3):
            step()
    (part,) = meter.live_parts()
    assert (part.bytes, part.blocks) == (1200, 3)
    assert part.site.splitlines()[0].endswith("step") and "test_meter.py" in part.site


def test_the_limit_is_an_exception_and_nothing_is_lost() -> None:
    with pytest.raises(ValueError, match="below what this process has in memory"):
        ox.memory.set_limit(1)
    with pytest.raises(ValueError, match="110%"):
        ox.memory.set_limit("110%")
    setting = ox.memory.set_limit(ox.memory.resident_bytes() + (200 << 20))
    assert setting.is_applied and ox.memory.limit() is not None
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    x = torch.randn(1024, 512)
    held = []
    with pytest.raises(torch.OutOfMemoryError, match="passes the memory limit"):
        while True:
            held.append(model(x))
    held.clear()
    model(x).sum().backward()
    setting.revert()
    assert ox.memory.limit() is None


def test_out_of_memory_at_any_place_leaves_no_byte() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    x = torch.randn(2048, 256)
    model(x).sum().backward()
    gc.collect()
    raised = 0
    with ox.memory.Meter() as meter:
        for megabytes in range(0, 24, 2):
            before = meter.live_bytes
            ox.memory.release_cache("cpu")
            setting = ox.memory.set_limit(ox.memory.resident_bytes() + (megabytes << 20) + (1 << 16))
            try:
                model(x).sum().backward()
            except torch.OutOfMemoryError:
                raised += 1
            finally:
                setting.revert()
            assert meter.live_bytes == before, megabytes
    assert raised > 2


def test_resident_memory_agrees() -> None:
    """In a process of its own: what is counted is what the process grows by."""
    program = """
import torch, oxytorch as ox
torch.ones(1 << 20).exp()
before = ox.memory.resident_bytes()
with ox.memory.Meter() as meter:
    held = [torch.ones(1 << 20) for _ in range(64)]
    grown = ox.memory.resident_bytes() - before
    print(meter.live_bytes, grown)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    counted, grown = map(int, done.stdout.split())
    assert counted == 64 << 22
    assert abs(grown - counted) < 0.03 * counted


def test_leaks_are_what_every_step_leaves() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 8)
    cache: dict[str, torch.Tensor] = {}
    kept: list[torch.Tensor] = []

    def clean() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        cache.setdefault("rows", torch.zeros(1000))
        cache["last"] = loss.detach().clone()

    assert ox.memory.leaks(clean) == []

    def leaking() -> None:
        clean()
        kept.append(torch.zeros(500))

    (leak,) = ox.memory.leaks(leaking, 4)
    assert leak.bytes == 2000 and leak.blocks == 1 and "test_meter.py" in leak.site and "leaking" in leak.site

    def with_graph() -> None:
        kept.append(model(x).sum())

    assert sum(part.bytes for part in ox.memory.leaks(with_graph)) > 32 * 16 * 4
    with pytest.raises(ValueError, match="steps is 2"):
        ox.memory.leaks(clean, 2)
