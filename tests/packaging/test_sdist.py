"""The source distribution holds what the package is built of, and configures."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("reads the sources")

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys\nfrom scikit_build_core.build import build_sdist\nprint(build_sdist(sys.argv[1]))\n"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    archive = folder / done.stdout.splitlines()[-1]
    shutil.unpack_archive(archive, folder)
    return folder / archive.name.removesuffix(".tar.gz")


def test_it_holds_every_module_of_the_package(unpacked: Path) -> None:
    def modules(root: Path) -> set[str]:
        package = root / "python" / "oxytorch"
        return {str(path.relative_to(package)) for path in package.rglob("*.py*") if path.suffix in (".py", ".pyi")}

    assert modules(ROOT) - {"_build_info.py"} <= modules(unpacked)  # that one is made by the build
    assert not (unpacked / "tests").exists() and not (unpacked / "bench" / "results").exists()
    settings = Path("src") / "environment" / "settings"
    assert sorted(path.name for path in (ROOT / settings).iterdir()) == sorted(
        path.name for path in (unpacked / settings).iterdir()
    )
    races = {path.name for path in (ROOT / "bench" / "race").glob("*.py")}
    assert races == {path.name for path in (unpacked / "bench" / "race").glob("*.py")}  # `oxytorch bench` runs these


def test_it_configures(unpacked: Path, tmp_path: Path) -> None:
    command = ["cmake", "-S", str(unpacked), "-B", str(tmp_path), "-G", "Ninja", "-DOXYTORCH_TESTS=OFF"]
    command += ["-DOXYTORCH_EXAMPLES=OFF", "-DOXYTORCH_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
