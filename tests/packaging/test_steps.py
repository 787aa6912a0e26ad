"""What the commands of make build, and where: another torch touches nothing of the usual one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("reads the steps of make")

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("PRESET", "BUILD", "VENV", "PACKAGES", "PYTHONPATH", "PATH")
OTHER = {"OXYTORCH_TORCH_SPEC": "torch==2.15.0"}


def said(*command: str, **variables: str) -> str:
    ours = ("PYTHONPATH", "OXYTORCH_TORCH_SPEC", "OXYTORCH_VENV", "MAKEFLAGS")
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    done = subprocess.run(command, cwd=ROOT, env={**kept, **variables}, capture_output=True, text=True, check=True)
    return done.stdout


def environment(**variables: str) -> dict[str, str]:
    show = "; ".join(f'echo "{name}=${name}"' for name in SHOWN)
    lines = said("bash", "-c", f"source tools/environment.sh; {show}", **variables).splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_the_demo_builds_what_it_runs_and_no_tests() -> None:
    assert "build.sh oxytorch_python;" in said("make", "-n", "demo")
    whole = said("make", "-n", "demo", "ARGS=--quick --cpp")  # it installs the library
    assert "build.sh ;" in whole and "oxytorch_python" not in whole


def test_compiling_begins_before_the_rest_is_installed_and_fails_where_that_does(tmp_path: Path) -> None:
    """The recipe of `make build`, with steps that note when they run."""
    (tmp_path / "tools").mkdir()
    rest = '[ "$1" = --to-build ] || { sleep 0.2; echo rest >>log; exit $REST; }'
    for step, does in (("setup", rest), ("build", "exit $BUILT")):
        path = tmp_path / "tools" / f"{step}.sh"
        path.write_text(f"#!/bin/sh\necho {step} $1 >>log\n{does}\n")
        path.chmod(0o755)
    for installed, built in ((0, 0), (1, 0), (0, 1)):
        (tmp_path / "log").unlink(missing_ok=True)
        done = subprocess.run(
            ["make", "-f", ROOT / "Makefile", "build"], cwd=tmp_path, capture_output=True, check=False,
            env={**os.environ, "REST": str(installed), "BUILT": str(built)},
        )  # fmt: skip
        assert (done.returncode == 0) == (installed == built == 0)
        steps = (tmp_path / "log").read_text().splitlines()
        assert steps[0] == "setup --to-build" and {"setup", "build"} <= set(steps) and steps[-1] == "rest"


def test_another_torch_has_an_environment_and_a_build_of_its_own() -> None:
    usual, other = environment(), environment(**OTHER)
    assert usual == environment(OXYTORCH_TORCH_SPEC="torch==2.13.0")
    assert (usual["PRESET"], usual["BUILD"], usual["VENV"]) == ("dev", f"{ROOT}/build/dev", f"{ROOT}/.venv")
    assert (other["PRESET"], other["BUILD"]) == ("other-torch", f"{ROOT}/build/torch-2.15.0")
    assert other["VENV"] == f"{ROOT}/.venv-torch-2.15.0"
    assert other["PYTHONPATH"] == f"{ROOT}/build/torch-2.15.0/python"
    assert other["PATH"].startswith(f"{other['VENV']}/bin:")
    assert environment(**OTHER, OXYTORCH_VENV="/elsewhere")["VENV"] == "/elsewhere"


def test_its_preset_is_dev_with_the_module_in_the_build_folder() -> None:
    presets = {each["name"]: each for each in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]}
    other = presets["other-torch"]
    assert other["inherits"] == "dev" and other["cacheVariables"] == {"OXYTORCH_PACKAGE_IN_BUILD": "ON"}
    folder = other["binaryDir"].replace("${sourceDir}", str(ROOT))
    name = said("bash", "-c", "source tools/environment.sh; echo $OXYTORCH_TORCH_NAME", **OTHER).strip()
    assert folder.replace("$penv{OXYTORCH_TORCH_NAME}", name) == environment(**OTHER)["BUILD"]


def test_the_layers_without_torch_configure(tmp_path: Path) -> None:
    """The presets of the sanitizers and of coverage inherit it; no other test builds it."""
    said("cmake", "--preset", "core-only", "-B", str(tmp_path))
    assert "several_test" not in said("ninja", "-C", str(tmp_path), "-t", "targets", "all")


def test_the_nightly_wheel_is_built_with_the_build_requirements_alone() -> None:
    needs = {line.split(">")[0] for line in said("python3", "tools/extras.py", "--only", "build").splitlines()}
    assert needs == {"cmake", "ninja", "scikit-build-core"}
    steps = (ROOT / "tools" / "nightly.sh").read_text()
    (built,) = (line for line in steps.splitlines() if "pip" in line and " wheel " in line)
    assert built.startswith("in_empty ") and "--no-build-isolation" in built
