"""The races of bench/race, as modules and as scripts."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def races() -> Path:
    return Path(__file__).resolve().parents[2] / "bench" / "race"


@pytest.fixture(scope="module")
def import_race(races: Path) -> Iterator[Callable[[str], ModuleType]]:
    sys.path.insert(0, str(races))  # as for a script
    yield importlib.import_module
    sys.path.remove(str(races))


@pytest.fixture
def run_quick(races: Path, tmp_path: Path) -> Callable[..., tuple[str, dict[str, Any]]]:
    """Run a race in short; what it says, and the document that it leaves in `tmp_path`."""

    def run(name: str, *arguments: str) -> tuple[str, dict[str, Any]]:
        script = str(races / f"{name}.py")
        command = [sys.executable, script, "--quick", "--threads", "1", "--out", str(tmp_path), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, json.loads((tmp_path / f"{name}.json").read_text())

    return run
