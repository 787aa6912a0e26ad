from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import oxytorch as ox
import pytest
import torch


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_phases_and_scalars_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    mon = ox.PerformanceMonitor([ox.monitor.Jsonl(path)])
    for i in range(50):
        with mon.step(samples=8):
            with mon.phase("forward"), mon.phase("attention"):
                pass
            with mon.phase("backward"):
                pass
            mon.scalar("loss", 1.0 / (i + 1))
    mon.close()
    records = lines(path)
    assert [record["step"] for record in records] == list(range(1, 51))
    for i, record in enumerate(records):
        assert record["samples"] == 8
        assert record["scalars"] == {"loss": 1.0 / (i + 1)}
        assert list(record["phases"]) == ["forward", "attention", "backward"]
        assert record["parents"] == {"attention": "forward"}
        assert record["phases"]["attention"] <= record["phases"]["forward"]
        assert record["phases"]["forward"] + record["phases"]["backward"] <= record["duration"]
    summary = mon.summary()
    assert summary.steps == 50
    assert summary.samples == 400
    assert [phase.name for phase in summary.phases] == ["forward", "attention", "backward"]
    assert [phase.depth for phase in summary.phases] == [0, 1, 0]
    assert math.isclose(sum(phase.self_share for phase in summary.phases) + summary.other_share, 1.0)
    assert math.isclose(sum(record["duration"] for record in records), summary.step.sum, rel_tol=1e-9)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_a_cpu_tensor_is_read_at_once_and_without_an_operator(dtype: torch.dtype) -> None:
    mon = ox.PerformanceMonitor()
    value = torch.ones((), dtype=dtype)
    with mon.step(), torch.autograd.profiler.profile() as profile:
        mon.scalar("value", value)
        mon.scalar("view", torch.arange(3)[1])
    assert not [event.name for event in profile.function_events if "_local_scalar_dense" in event.name]
    value.zero_()  # what happens later does not show
    scalars = {scalar.name: scalar.last for scalar in mon.summary().scalars}
    assert scalars == {"value": 1.0, "view": 1.0}


def test_a_tensor_that_needs_grad_keeps_no_graph() -> None:
    mon = ox.PerformanceMonitor()
    weight = torch.ones(3, requires_grad=True)
    activation = weight * 2
    loss = activation.square().sum()
    gone = weakref.ref(activation)
    with mon.step():
        mon.scalar("loss", loss)
    del activation, loss
    gc.collect()
    assert gone() is None
    assert mon.summary().scalars[0].last == 12.0


class Wrapped(torch.Tensor):
    """A tensor whose reading only its own `item` knows: stands for one on a device."""

    reads = 0

    @staticmethod
    def __new__(cls, value: float) -> Wrapped:
        tensor = torch.Tensor._make_wrapper_subclass(cls, (), dtype=torch.float32)
        tensor.value = value
        return tensor

    def __init__(self, value: float) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._local_scalar_dense.default:
            cls.reads += 1
            return args[0].value
        if func in (torch.ops.aten.clone.default, torch.ops.aten.detach.default):
            return Wrapped(args[0].value)
        raise NotImplementedError(func)


def test_a_device_tensor_is_read_at_the_drain_and_joins_its_step() -> None:
    Wrapped.reads = 0
    batches: list[list[dict]] = []
    mon = ox.PerformanceMonitor([ox.monitor.Callback(batches.append)], drain_seconds=0)
    for i in range(3):
        value = Wrapped(float(i))
        with mon.step():
            mon.scalar("loss", value)
        value.value = -1.0  # changed in place after the step
    assert Wrapped.reads == 0
    mon.flush()
    assert Wrapped.reads == 3
    records = [record for batch in batches for record in batch]
    assert [record["scalars"] for record in records] == [{"loss": 0.0}, {"loss": 1.0}, {"loss": 2.0}]
    assert mon.summary().scalars[0].mean == 1.0


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (torch.ones(2), ValueError),
        (torch.ones((), dtype=torch.complex64), TypeError),
        ("text", TypeError),
        (None, TypeError),
    ],
)
def test_a_bad_value_is_refused(value: object, error: type[Exception]) -> None:
    mon = ox.PerformanceMonitor()
    with mon.step(), pytest.raises(error):
        mon.scalar("value", value)  # type: ignore[arg-type]
    assert mon.summary().steps == 1


def test_values_that_are_not_finite_are_counted_and_written(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with ox.PerformanceMonitor([ox.monitor.Jsonl(str(path))]) as mon:
        for value in (1.0, math.nan, math.inf, torch.tensor(-math.inf)):
            with mon.step():
                mon.scalar("loss", value)
    assert [record["scalars"]["loss"] for record in lines(path)] == [1.0, "NaN", "Infinity", "-Infinity"]
    scalar = mon.summary().scalars[0]
    assert (scalar.count, scalar.non_finite, scalar.mean) == (4, 3, 1.0)
    mon.report().to_html()


def test_a_full_ring_is_reported() -> None:
    seen: list[dict] = []
    mon = ox.PerformanceMonitor([ox.monitor.Callback(seen.extend)], ring_records=8, drain_seconds=0)
    for _ in range(20):
        with mon.step():
            pass
    mon.flush()
    assert [record["step"] for record in seen] == list(range(13, 21))
    assert seen[0]["dropped_before"] == 12
    assert mon.summary().dropped == 12
    assert "12 records reached no sink" in mon.table(unicode=False)


def test_misuse_raises_and_leaves_the_monitor_usable() -> None:
    mon = ox.PerformanceMonitor(max_phases=1)
    with mon.step():
        with pytest.raises(RuntimeError, match="still open"), mon.step():
            pass
        with mon.phase("a"):
            pass
        with pytest.raises(IndexError, match="max_phases"):
            mon.phase("b")
        errors = []

        def elsewhere() -> None:
            try:
                with mon.phase("a"):
                    pass
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "another thread" in errors[0]
    with pytest.raises(ValueError, match="-1"), mon.step(samples=-1):
        pass
    with pytest.raises(RuntimeError):
        mon.set_samples(1)
    for bad in ({"ring_records": 0}, {"drain_seconds": -1.0}, {"drain_seconds": math.nan}):
        with pytest.raises(ValueError, match=r"ring_records|drain_seconds"):
            ox.PerformanceMonitor(**bad)
    assert mon.summary().steps == 1


def test_a_step_left_by_an_exception_is_not_timed() -> None:
    mon = ox.PerformanceMonitor()
    with pytest.raises(StopIteration), mon.step(), mon.phase("data"):
        next(iter(()))
    with mon.step(), mon.phase("data"):
        pass
    summary = mon.summary()
    assert (summary.steps, summary.cancelled, summary.phases[0].entries) == (1, 1, 1)


def test_a_failing_callback_raises_its_own_error_once() -> None:
    def fail(records: list[dict]) -> None:
        raise KeyError("mine")

    mon = ox.PerformanceMonitor([ox.monitor.Callback(fail)], drain_seconds=0)
    with mon.step():
        pass
    with pytest.raises(KeyError, match="mine"):
        mon.flush()
    mon.flush()
    assert "mine" in mon.summary().failed_sinks[0]


def test_an_unwritable_path_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "run.jsonl"
    with pytest.raises(OSError, match=str(missing)):
        ox.monitor.Jsonl(missing)


def test_the_console_prints_through_python(capsys: pytest.CaptureFixture[str]) -> None:
    mon = ox.PerformanceMonitor([ox.monitor.Console(every=0)], drain_seconds=0)
    with mon.step(samples=4), mon.phase("forward"):
        mon.scalar("loss", 0.25)
    mon.flush()
    printed = capsys.readouterr().out
    assert printed.startswith("step 1 ")
    assert "loss 0.25" in printed
    mon.close()


def test_the_background_thread_and_python_callbacks_do_not_deadlock() -> None:
    seen: list[dict] = []
    mon = ox.PerformanceMonitor([ox.monitor.Callback(seen.extend)], drain_seconds=0.001)
    for i in range(3000):
        with mon.step(), mon.phase("work"):
            mon.scalar("value", Wrapped(1.0) if i % 100 == 0 else 1.0)
        if i % 500 == 0:
            mon.flush()
            mon.summary()
    mon.close()
    steps = [record["step"] for record in seen if "duration" in record]
    assert len(steps) + mon.summary().dropped == 3000
    assert steps == sorted(set(steps))


def test_what_is_left_is_written_at_exit(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    program = f"""
import oxytorch as ox
mon = ox.PerformanceMonitor([ox.monitor.Jsonl({str(path)!r})], drain_seconds=3600)
for _ in range(10):
    with mon.step():
        pass
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(lines(path)) == 10


def test_monitors_are_freed() -> None:
    for sinks in ([], [ox.monitor.Callback(lambda records: None)]):
        mon = ox.PerformanceMonitor(sinks)
        with mon.step(), mon.phase("a"):
            mon.scalar("b", 1)
        gone = weakref.ref(mon)
        del mon
        gc.collect()
        assert gone() is None
