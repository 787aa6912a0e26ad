"""A wheel in an environment of its own: the command, a C++ program and a benchmark work, and nothing is left behind.

The wheel is put together from what the build folder holds, so that nothing is compiled twice. `OXYTORCH_WHEEL` names
another one, which is installed with all that it asks for: `make nightly` builds it from the source distribution, in an
environment of torch and the build requirements alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import oxytorch
import pytest
import torch
from oxytorch._build_info import BUILD_FOLDER

pytestmark = [pytest.mark.cpu_only("installs and runs programs"), pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
GIVEN = os.environ.get("OXYTORCH_WHEEL")
PURE = (
    "import sys\nfrom scikit_build_core.build import build_wheel\n"
    "print(build_wheel(sys.argv[1], {'wheel.cmake': 'false'}))\n"
)


def completed(*command: str | Path, cwd: Path, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """A command that succeeded, in an environment that knows nothing of this checkout."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OXYTORCH", "CMAKE"))}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=kept, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done


def run(*command: str | Path, cwd: Path, timeout: float = 280) -> str:
    """What such a command says."""
    return completed(*command, cwd=cwd, timeout=timeout).stdout


def packed(folder: Path, wheel: Path) -> None:
    """Zip an unpacked wheel, with its list of files anew."""
    (record,) = folder.glob("*.dist-info/RECORD")
    record.unlink()
    lines = []
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name, body = path.relative_to(folder).as_posix(), path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
            lines.append(f'"{name}",sha256={digest},{len(body)}\n')
            archive.write(path, name)
        name = record.relative_to(folder).as_posix()
        archive.writestr(name, "".join([*lines, f'"{name}",,\n']))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if GIVEN:
        return Path(GIVEN).resolve()
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-c", PURE, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pure = folder / done.stdout.splitlines()[-1]
    with zipfile.ZipFile(pure) as archive:
        archive.extractall(folder / "unpacked")
    for component in ("wheel", "python"):
        run("cmake", "--install", BUILD_FOLDER, "--prefix", folder / "unpacked/oxytorch", "--component", component,
            cwd=folder)  # fmt: skip
    packed(folder / "unpacked", pure)
    return pure


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """An environment with the wheel, and the files that were there before."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    if GIVEN:
        run(*pip, "install", f"torch=={torch.__version__}", "rich", "numpy", "scikit-learn", cwd=folder, timeout=900)
        before = files(folder)
    else:
        # torch, rich and the like are this environment's own: installing them takes minutes.
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "outside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        before = files(folder)
    run(*pip, "install", *([] if GIVEN else ["--no-deps"]), wheel, cwd=folder)
    return folder, before


@pytest.fixture(scope="module")
def command(environment: tuple[Path, set[str]]) -> Path:
    return environment[0] / "bin" / "oxytorch"


def package(environment: tuple[Path, set[str]]) -> Path:
    (site,) = environment[0].glob("lib/python*/site-packages")
    return site / "oxytorch"


def test_it_is_this_package_and_says_what_it_found(command: Path, tmp_path: Path) -> None:
    facts = json.loads(run(command, "info", "--json", cwd=tmp_path))
    assert (facts["version"], facts["torch"]) == (oxytorch.__version__, str(torch.__version__))
    cuda = next(one for one in facts["backends"] if one["name"] == "cuda")
    assert Path(cuda["origin"]).is_relative_to(command.parents[1])
    if not torch.cuda.is_available():
        assert cuda["score"] == 0 and cuda["reason"]  # idle, and it says why


def test_the_demo_runs_and_writes_table_report_and_json(command: Path, tmp_path: Path) -> None:
    only = () if GIVEN else ("--only", "mlp")
    files = ("--json", "demo.json", "--out", "report")
    few = ("--quick", "--threads", "1", "--steps-planned", "500")  # two would spin beside other tests
    done = completed(command, "demo", *few, *only, *files, cwd=tmp_path)
    assert str(tmp_path / "report" / "demo.html") in done.stdout
    for word in ("plain", "stock", "basic", "advanced", "held-out", "Measured on", "Tuning, once"):
        assert word in done.stdout
    assert "%]" in done.stderr and "left" in done.stderr
    (mlp,) = (w for w in json.loads((tmp_path / "demo.json").read_text())["workloads"] if w["name"] == "mlp")
    rows = {row["contender"]: row for row in mlp["rows"]}
    assert set(rows) == {"plain", "plain + mallopt", "stock", "basic", "advanced"}
    assert all((row["tuning_seconds"] > 0) == (name in ("basic", "advanced")) for name, row in rows.items())
    assert rows["basic"]["speedup_mallopt"]["low"] is None  # One start has no interval.
    # Level basic changes no bit of the result.
    assert mlp["losses"]["basic"] == mlp["losses"]["plain"]
    assert rows["basic"]["held_out_loss"] == rows["plain"]["held_out_loss"]
    assert {note["name"] for note in rows["advanced"]["notes"]} >= {"allocator", "precision"}
    page = (tmp_path / "report" / "demo.html").read_text()
    assert "<svg" in page and "What the trainer did" in page and "http-equiv" not in page


def test_a_bundled_benchmark_runs_and_leaves_its_report_here(command: Path, tmp_path: Path) -> None:
    few = ("--quick", "--starts", "1", "--threads", "1", "--case", "200 x 64")
    said = run(command, "bench", "step-tail", *few, cwd=tmp_path)
    assert "oxytorch" in said
    assert json.loads((tmp_path / "oxytorch-report" / "step_tail.json").read_text())["cases"]


def test_a_cpp_program_builds_against_it(environment: tuple[Path, set[str]], tmp_path: Path) -> None:
    source = ROOT / "tests" / "consumer" / "torch"
    python = f"-DPython3_EXECUTABLE={environment[0] / 'bin' / 'python'}"
    prefix = f"-DCMAKE_PREFIX_PATH={package(environment)}"
    run("cmake", "-S", source, "-B", "build", "-G", "Ninja", prefix, python, cwd=tmp_path)
    run("cmake", "--build", "build", cwd=tmp_path)
    assert "loss" in run("build/torch_consumer", cwd=tmp_path)


def test_uninstalling_leaves_nothing(environment: tuple[Path, set[str]], tmp_path: Path) -> None:
    folder, before = environment
    assert (package(environment) / "__init__.py").exists()
    run(folder / "bin" / "python", "-m", "pip", "uninstall", "--yes", "--quiet", "oxytorch", cwd=tmp_path)
    assert {name for name in files(folder) - before if "oxytorch" in name} == set()
    assert not package(environment).exists()
