"""The demo's C++ half: built against the installed package, raced for a few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("races on the CPU")


@pytest.mark.slow
def test_quick_cpp_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "oxytorch", "demo", "--cpp", "--quick", "--json", "demo.json", "--out", "report"]
    # Tuning for a run as short ends soon; two threads would spin beside other tests.
    command += ["--steps-planned", "100", "--threads", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads((tmp_path / "demo.json").read_text())["workloads"]
    rows = {row["contender"]: row for row in result["rows"]}
    assert set(rows) == {"torch", "oxytorch optim", "oxytorch trainer"}
    losses = result["losses"]
    # The same weights, bytes and recipe: the optimizers differ by rounding only.
    assert losses["oxytorch optim"][0] == pytest.approx(losses["torch"][0], rel=1e-4)
    assert losses["oxytorch trainer"][0] == pytest.approx(losses["torch"][0], rel=0.02)
    assert losses["torch"][0][-1] < losses["torch"][0][0]
    assert all(0 < row["outside_share"] < 1 and row["peak_bytes"] > 1 << 20 for row in rows.values())
    assert {note["name"] for note in rows["oxytorch trainer"]["notes"]} >= {"precision", "allocator"}
    assert "<svg" in (tmp_path / "report" / "demo.html").read_text()


def test_the_cpp_demo_says_what_it_needs(tmp_path: Path) -> None:
    package = str(tmp_path / "python" / "oxytorch" / "__init__.py")
    code = (
        "import sys, oxytorch; from oxytorch.demo import examples; sys.path.append(str(examples())); "
        f"from oxytorch_demo import cpp; oxytorch.__file__ = {package!r}; cpp.build_program()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "examples/cpp of the source tree" in done.stderr
