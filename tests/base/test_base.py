from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import oxytorch as ox
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oxytorch import base

floats = st.floats(-1e6, 1e6, allow_nan=False)


def test_sizes() -> None:
    assert base.parse_size("10GB") == 10**10
    assert base.parse_size("1.5GiB") == 3 * 2**29
    assert base.parse_size(4096) == 4096
    assert base.parse_size("90%", total=1000) == 900
    assert base.parse_size("auto", total=7) == 7
    assert base.format_size(3 * 2**29) == "1.50 GiB"
    assert base.format_size(10**10, exact=True) == "10GB"
    assert base.format_duration(125) == "2 min 05 s"
    for text in ("", "-1", "5 apples", "101%", "16EiB", "90%", "auto"):
        with pytest.raises(ValueError, match="size"):
            base.parse_size(text)


@given(st.integers(0, 2**64 - 1))
def test_exact_sizes_read_back(count: int) -> None:
    assert base.parse_size(base.format_size(count, exact=True)) == count


@given(st.text(max_size=40))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        assert base.parse_size(text, total=100) >= 0
    except ValueError as error:
        assert str(error).isascii()


@settings(deadline=None)
@given(st.lists(floats, min_size=1, max_size=60), st.floats(0, 1))
def test_statistics_equal_numpy(values: list[float], q: float) -> None:
    assert base.mean(values) == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
    assert base.median(values) == pytest.approx(np.median(values), rel=1e-15)
    assert base.quantile(values, q) == pytest.approx(np.quantile(values, q), rel=1e-9, abs=1e-6)
    spread = np.median(np.abs(np.asarray(values) - np.median(values)))
    assert base.median_absolute_deviation(values) == pytest.approx(spread, rel=1e-12)
    if len(values) > 1:
        assert base.stddev(values) == pytest.approx(np.std(values, ddof=1), rel=1e-9, abs=1e-6)


def test_statistics_take_arrays_and_tensors() -> None:
    assert base.median(np.array([1.0, 5.0, 2.0], dtype=np.float32)) == 2.0
    assert base.median(torch.tensor([1.0, 5.0, 2.0])) == 2.0
    assert base.mean((1, 2, 3)) == 2.0
    for values in ([], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="median"):
            base.median(values)


def test_intervals() -> None:
    values = np.random.default_rng(0).normal(10, 2, 200)
    interval = base.median_interval(values)
    assert interval == base.median_interval(values, seed=0)
    assert interval.low < interval.mid < interval.high
    assert interval.mid == np.median(values)
    custom = base.bootstrap_interval(values, np.mean, resamples=1000)
    half = 1.96 * np.std(values, ddof=1) / np.sqrt(200)
    assert custom.high - custom.low == pytest.approx(2 * half, rel=0.15)
    ratio = base.paired_ratio_interval(values * 0.5, values)
    assert ratio == (0.5, 0.5, 0.5, 0.95)
    with pytest.raises(ValueError, match="confidence"):
        base.median_interval(values, confidence=2)
    with pytest.raises(ZeroDivisionError):
        base.bootstrap_interval(values, lambda sample: 1 / 0)


def test_intervals_over_starts() -> None:
    low, mid, high, confidence = base.starts_interval(np.array([1.1, 1.3, 0.9]))
    assert (low, mid, high, confidence) == pytest.approx((0.688478911656724, 1.08774271237426, 1.71854822027324, 0.95))
    several = base.geometric_mean_interval([[1.1, 1.3, 0.9], (2.0, 2.2)])
    assert several[:3] == pytest.approx((1.03358417495242, 1.51051923607131, 2.20753027942449))
    one = base.starts_interval([14.6])
    assert one.mid == pytest.approx(14.6) and np.isnan([one.low, one.high]).all()
    assert base.student_t_quantile(0.975, 1) == pytest.approx(12.706204736174694, rel=1e-12)
    with pytest.raises(ValueError, match="positive"):
        base.starts_interval([1.0, -1.0])


def test_system_info_agrees_with_psutil() -> None:
    facts = base.system_info()
    assert facts["cores"]["logical"] == psutil.cpu_count()
    assert facts["cores"]["affinity"] == len(os.sched_getaffinity(0))
    assert 1 <= facts["cores"]["usable_physical"] <= facts["cores"]["usable"] <= facts["cores"]["affinity"]
    assert facts["memory"]["physical"] == psutil.virtual_memory().total
    assert facts["memory"]["limit"] <= facts["memory"]["physical"]
    assert facts["memory"]["resident"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
    assert facts["features"]["avx2"] == torch.cpu._is_avx2_supported()
    assert facts["isa"] in facts["isas"]
    json.dumps(facts)


def test_info_is_whole() -> None:
    facts = ox.info()
    assert facts["version"] == ox.__version__
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert isinstance(facts["backends"], list)
    assert facts["features"]["native_bf16"] in (True, False)
    assert facts["features"]["native_fp16"] in (True, False)


def test_affinity_narrows_the_cores() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); import oxytorch.base as b; print(b.system_info()['cores']['usable'])"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "1"


@pytest.fixture
def heard() -> Iterator[list[tuple[str, str]]]:
    lines: list[tuple[str, str]] = []
    level = base.log_level()
    base.set_log_sink(lambda severity, text: lines.append((severity, text)))
    yield lines
    base.set_log_sink(None)
    base.set_log_level(level)


def test_log_levels_and_sink(heard: list[tuple[str, str]]) -> None:
    base.set_log_level("warn")
    base.log("info", "quiet")
    base.log("warn", "heard é")
    base.set_log_level("trace")
    base.log("debug", "low")
    assert heard == [("warn", "heard é"), ("debug", "low")]
    with pytest.raises(ValueError, match="did you mean 'warn'"):
        base.set_log_level("warm")


def test_a_failing_sink_does_not_stop_the_caller(
    heard: list[tuple[str, str]], capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(level: str, text: str) -> None:
        raise RuntimeError("broken sink")

    base.set_log_sink(fail)
    base.log("error", "the message")
    err = capfd.readouterr().err
    assert "broken sink" in err
    assert "the message" in err


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )


def test_variable_sets_the_level() -> None:
    code = "import oxytorch.base as b; b.log('info', 'hello'); print(b.log_level())"
    done = run(code, OXYTORCH_LOG="info")
    assert done.stdout.strip() == "info"
    assert "hello" in done.stderr
    done = run(code, OXYTORCH_LOG="loud")
    assert done.stdout.strip() == "warn"
    assert done.stderr.count("\n") == 1
    assert "OXYTORCH_LOG is ignored: unknown log level 'loud'" in done.stderr


def test_a_sink_left_behind_does_not_trouble_the_exit() -> None:
    done = run("import oxytorch.base as b; b.set_log_sink(lambda level, text: print(text)); b.log('warn', 'x')")
    assert done.stdout == "x\n"
    assert done.stderr == ""
