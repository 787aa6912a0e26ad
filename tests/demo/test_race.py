"""The race of the step tail runs, tells wins from losses, and writes its report."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "race" / "step_tail.py"


@pytest.fixture(scope="module")
def race() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_tail_race", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_quick_race_reports_every_contender(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--quick", "--out", tmp_path]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "step_tail.json").read_text())
    assert {"torch fused", "torch foreach", "torch for-loop", "oxytorch"} <= document["python"]["200 x 1,000"].keys()
    assert {"torch fused", "oxytorch"} == document["python"]["200 x 1,000, scaler"].keys()
    for times in document["python"].values():
        assert len({len(values) for values in times.values()}) == 1  # as many rounds for each
        assert all(value > 0 for values in times.values() for value in values)
    assert "<svg" in (tmp_path / "step_tail.html").read_text()
    assert "met" in done.stdout.lower()


@pytest.mark.parametrize("scaled", [False, True])
def test_contenders_compute_the_same(race: ModuleType, scaled: bool) -> None:
    contenders = race.make_contenders([700, 3], scaled, large=False)
    for contender in contenders:
        for _ in range(3):
            contender.step()
    assert {contender.name for contender in contenders} >= {"torch fused", "oxytorch"}
    before = race.make_params([700, 3])
    for contender in contenders:
        for got, expected, start in zip(contender.params, contenders[0].params, before, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7, msg=contender.name)
            assert not torch.equal(got, start)


def test_a_bar_is_judged_by_its_estimate(race: ModuleType) -> None:
    ours = np.full(20, 1.0)
    times = {"torch fused": np.full(20, 9.0), "oxytorch": ours}
    (bar,) = race.bars({"200 x 1,000": times}, {})
    assert bar.got.mid == pytest.approx(9.0) and not bar.met
    (bar,) = race.bars({"200 x 1,000": {**times, "torch fused": np.full(20, 11.0)}}, {})
    assert bar.met
    (bar,) = race.bars({}, {"200 x 1,000": {"torch::optim": np.full(20, 21.0), "oxytorch": ours}})
    assert bar.met and bar.at_least == 20
