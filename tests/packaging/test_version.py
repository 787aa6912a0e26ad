"""The version is written once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import oxytorch
import pytest

pytestmark = pytest.mark.cpu_only("reads the sources")

ROOT = Path(__file__).resolve().parents[2]


def test_the_module_carries_the_version_of_cmakelists() -> None:
    written = re.search(r"project\(Oxytorch VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert written is not None
    assert oxytorch.__version__ == written[1]


def test_the_wheel_would_carry_it_too() -> None:
    program = (
        "from scikit_build_core.build import prepare_metadata_for_build_wheel as prepare\n"
        "import sys, pathlib, tempfile\n"
        "folder = tempfile.mkdtemp()\n"
        "print((pathlib.Path(folder) / prepare(folder) / 'METADATA').read_text())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"\nVersion: {oxytorch.__version__}\n" in done.stdout
    assert "\nRequires-Dist: torch" in done.stdout


def test_oxytorch_works_without_numpy() -> None:
    program = "import sys\nsys.modules['numpy'] = None\nimport oxytorch, torch\nprint(oxytorch.__version__)\n"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
