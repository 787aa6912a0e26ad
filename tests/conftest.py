"""What tests of several rooms share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

if os.environ.get("OXYTORCH_DEVICE") == "sim":  # torch must know it before the tests name it
    sys.path.append(str(ROOT / "tests" / "device"))
    import torch_device

    torch_device.load()


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """A trainer flushes them for the whole process; the next test has them back."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with the package that build/dev installs."""
    prefix = tmp_path_factory.mktemp("prefix")
    command = ["cmake", "--install", str(ROOT / "build" / "dev"), "--prefix", str(prefix)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return prefix
