"""The committed stubs of oxytorch._C are what the compiled module says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("reads the sources")

ROOT = Path(__file__).resolve().parents[2]


def test_regenerating_the_stubs_gives_the_same_text() -> None:
    command = [sys.executable, "tools/stubs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
