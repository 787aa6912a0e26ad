"""`oxytorch bench NAME`: the benchmarks that come with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from oxytorch import cli

pytestmark = pytest.mark.cpu_only("benchmarks of the CPU")

RACES = Path(__file__).resolve().parents[2] / "bench" / "race"
NAMES = [path.stem.replace("_", "-") for path in sorted(RACES.glob("[!_]*.py"))]


def test_the_help_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0 and "--baseline FILE" in said
    assert "step-tail" in NAMES and f"{', '.join(NAMES)}." in said


@pytest.mark.parametrize("name", NAMES)
def test_each_has_options_of_its_own(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", name, "--help"]) == 0
    said = capfd.readouterr().out
    assert f"{name.replace('-', '_')}.py" in said and "--quick" in said and "--baseline" not in said


def test_one_runs(tmp_path: Path) -> None:
    words = ["--quick", "--starts", "1", "--threads", "1", "--case", "200 x 64", "--no-cpp", "--out", str(tmp_path)]
    assert cli.main(["bench", "step-tail", *words, "--baseline", "x"]) == 2
    assert cli.main(["bench", "step-tail", *words]) == 0
    assert "200 x 64" in json.loads((tmp_path / "step_tail.json").read_text())["cases"]
