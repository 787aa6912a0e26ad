"""What tests of several modules share."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
os.environ["OXYTORCH_CACHE"] = "off"  # no test finds what another one had measured, unless it says so

sys.path.append(str(ROOT / "examples"))  # oxytorch_demo
sys.path.append(str(ROOT / "tests" / "device"))
sys.path.append(str(ROOT / "tests" / "tune"))  # planted: strategies and a clock for more than one module
import torch_device  # noqa: E402
from oxytorch import _C  # noqa: E402
from oxytorch._build_info import BUILD_FOLDER  # noqa: E402

DEVICE = torch_device.chosen()  # torch must know it before anything runs on it

looked_through = {"modules": 0}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the CPU alone are left out elsewhere, with their reason."""
    if DEVICE.type == "cpu":
        return
    for item in items:
        for marker in item.iter_markers("cpu_only"):
            item.add_marker(pytest.mark.skip(reason=f"CPU only: {marker.args[0]}"))


def pytest_runtest_setup() -> None:
    """Keep the garbage collector from what modules hold: accelerate() runs it, which would take 0.2 s each time."""
    if len(sys.modules) > looked_through["modules"] + 100:
        gc.collect()
        gc.freeze()
        looked_through["modules"] = len(sys.modules)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say on which device the tests ran, and how many are of the CPU alone, by reason."""
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])]
    counted = Counter(reason.partition("CPU only: ")[2] for reason in reasons if "CPU only: " in reason)
    if DEVICE.type != "cpu":
        terminalreporter.write_line(f"device {DEVICE}; {sum(counted.values())} tests are of the CPU alone")
    for reason, count in counted.most_common():
        terminalreporter.write_line(f"{count:5}  {reason}")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that OXYTORCH_DEVICE names: cpu unless set, sim, hpu, privateuse1 (tests/device) or cuda."""
    return DEVICE


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """A trainer flushes them for the whole process; the next test has them back, on torch's workers too."""
    yield
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, 2))  # a worker that waits now runs again in a later test
    _C.trainer.set_flush_denormals(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models so small only wait for a second thread."""
    threads = torch.get_num_threads()
    set_threads(1)
    yield
    set_threads(threads)


def set_threads(count: int) -> None:
    """Of this thread, and of the one that takes backward passes of the device: each has a number of its own."""
    torch.set_num_threads(count)
    if DEVICE.type != "cpu":
        one = torch.ones(1, device=DEVICE, requires_grad=True)
        one.register_hook(lambda _: torch.set_num_threads(count))
        one.sum().backward()


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with the package that the build of the imported module installs."""
    prefix = tmp_path_factory.mktemp("prefix")
    command = ["cmake", "--install", BUILD_FOLDER, "--prefix", str(prefix)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return prefix
