"""The torch half of the hpu backend compiles against the torch of a Gaudi machine, which is not the newest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("compiles the sources")

STEP = Path(__file__).resolve().parents[2] / "tools" / "headers.py"


def test_the_backend_compiles_against_older_headers() -> None:
    done = subprocess.run([sys.executable, STEP, "--quick"], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode == 75:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backends/hpu/torch_device.cpp compiles against torch 2.11.0" in done.stdout
