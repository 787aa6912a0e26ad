"""An oxytorch built for another torch says so in one sentence, before the native module is touched."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from oxytorch._torch_check import minor, require_same_torch

pytestmark = pytest.mark.cpu_only("starts processes that compute nothing")

FAKE_BUILD = """
import sys, types
info = types.ModuleType("oxytorch._build_info")
info.TORCH_VERSION = "2.7.1"
sys.modules["oxytorch._build_info"] = info
import oxytorch
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_another_minor_is_refused_in_one_sentence() -> None:
    done = run(FAKE_BUILD)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: this oxytorch was built for torch 2.7, but torch ")
    assert torch.__version__ in last
    assert "pip install . --no-build-isolation" in last


def test_the_native_module_is_not_loaded_before_the_check() -> None:
    program = FAKE_BUILD.replace("import oxytorch\n", "") + (
        "try:\n    import oxytorch\nexcept ImportError:\n    sys.exit('oxytorch._C' in sys.modules)\nsys.exit(2)\n"
    )
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_a_tree_that_was_not_built_says_what_to_run() -> None:
    done = run("import sys\nsys.modules['oxytorch._build_info'] = None\nimport oxytorch\n")
    assert done.returncode != 0
    assert "make build" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("running", ["2.13.0", "2.13.1+cpu", "2.13.0a0+git123"])
def test_the_same_minor_is_accepted(running: str) -> None:
    require_same_torch("2.13.0", running)


@pytest.mark.parametrize("running", ["2.12.9", "3.13.0", "2.1.3"])
def test_any_other_is_refused(running: str) -> None:
    with pytest.raises(ImportError, match=r"built for torch 2\.13"):
        require_same_torch("2.13.0", running)


def test_minor_of_a_local_version() -> None:
    assert minor("2.13.0+cu130") == "2.13"
