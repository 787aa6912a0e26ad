"""The committed stubs of oxytorch._C are what the compiled module says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.cpu_only("reads the sources")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason="written with the torch of make setup; another names types otherwise",
)
def test_regenerating_the_stubs_gives_the_same_text() -> None:
    command = [sys.executable, "tools/stubs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
