"""What tests of several rooms share."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with the package that build/dev installs."""
    prefix = tmp_path_factory.mktemp("prefix")
    command = ["cmake", "--install", str(ROOT / "build" / "dev"), "--prefix", str(prefix)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return prefix
