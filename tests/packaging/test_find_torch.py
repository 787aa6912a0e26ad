"""Which torch CMake takes, where it looks for it, and that a CUDA build of it needs no CUDA toolkit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("configures projects that compute nothing")

ROOT = Path(__file__).resolve().parents[2]
FILES = ("include/torch/csrc/api/include/torch/torch.h", "lib/libtorch.so", "lib/libtorch_cpu.so", "lib/libc10.so")
TARGETS = 'set_target_properties(torch_cpu PROPERTIES\n  INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_RPC"\n'
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(x LANGUAGES {languages})
list(APPEND CMAKE_MODULE_PATH "{root}/cmake")
{body}
"""
FIND = """include(OxytorchTorch)
oxytorch_find_torch({hints})
message(STATUS "found=${{Oxytorch_TORCH_FOUND}} version=${{Oxytorch_TORCH_FOUND_VERSION}} \
at=${{Oxytorch_TORCH_LIBRARY_DIR}}")
if(NOT Oxytorch_TORCH_FOUND)
  message(FATAL_ERROR "${{Oxytorch_TORCH_PROBLEM}}")
endif()
foreach(kind INCLUDE_DIRECTORIES COMPILE_DEFINITIONS LINK_LIBRARIES)
  get_target_property(value Oxytorch::torch INTERFACE_${{kind}})
  message(STATUS "${{kind}}=${{value}}")
endforeach()
oxytorch_find_torch()  # a second call, as of a second find_package(Oxytorch)
"""


def fake_torch(folder: Path, version: str = "2.13.0") -> Path:
    """A torch whose own CMake package refuses, as that of a CUDA build does without the toolkit."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    config = folder / "share/cmake/Torch"
    (folder / "share/cmake/Caffe2").mkdir(parents=True)
    config.mkdir()
    (config / "TorchConfig.cmake").write_text('message(FATAL_ERROR "I cannot find the CUDA libraries")\n')
    (config / "TorchConfigVersion.cmake").write_text(f'set(PACKAGE_VERSION "{version}")\n')
    (folder / "share/cmake/Caffe2/Caffe2Targets.cmake").write_text(TARGETS)
    return folder


def configured(
    folder: Path, body: str, *flags: str, languages: str = "NONE", **variables: str
) -> subprocess.CompletedProcess[str]:
    source = folder / "source"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT, body=body, languages=languages))
    kept = {key: value for key, value in os.environ.items() if key not in ("CMAKE_PREFIX_PATH", "Torch_DIR")}
    command = ["cmake", "-S", str(source), "-B", str(folder / "build"), "-G", "Ninja", *flags]
    return subprocess.run(command, env={**kept, **variables}, capture_output=True, text=True, check=False)


def find(folder: Path, *flags: str, hints: str = "", before: str = "", **variables: str) -> str:
    done = configured(folder, before + FIND.format(hints=hints), *flags, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("where", ["", "share/cmake", "share/cmake/Torch"])
@pytest.mark.parametrize("how", ["CMAKE_PREFIX_PATH", "Torch_DIR", "Torch_ROOT"])
def test_a_torch_that_is_named_is_taken_and_its_own_package_is_not_run(tmp_path: Path, how: str, where: str) -> None:
    torch = fake_torch(tmp_path / "libtorch")
    said = find(tmp_path, f"-D{how}={torch / where}", "-DPython3_EXECUTABLE=" + sys.executable)
    assert f"found=TRUE version=2.13.0 at={torch}/lib" in said
    assert f"INCLUDE_DIRECTORIES={torch}/include;{torch}/include/torch/csrc/api/include" in said
    assert "COMPILE_DEFINITIONS=USE_DISTRIBUTED;USE_RPC" in said
    assert f"{torch}/lib/libtorch_cpu.so" in said and f"{torch}/lib/libc10.so" in said


def test_what_the_user_names_comes_before_hints_and_these_before_pythons(tmp_path: Path) -> None:
    named, hinted = fake_torch(tmp_path / "named"), fake_torch(tmp_path / "hinted")
    python = "-DPython3_EXECUTABLE=" + sys.executable
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir()
    assert f"at={named}/lib" in find(first, python, hints=str(hinted), CMAKE_PREFIX_PATH=str(named))
    assert f"at={hinted}/lib" in find(second, python, hints=str(hinted))
    assert "site-packages/torch/lib" in find(third, python, hints=str(tmp_path / "nowhere"))


def test_the_abi_of_an_older_archive_is_kept(tmp_path: Path) -> None:
    torch = fake_torch(tmp_path / "libtorch")
    (torch / "share/cmake/Torch/TorchConfig.cmake").write_text(
        'set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")\nset_target_properties(torch PROPERTIES CXX_STANDARD 17)\n'
    )
    said = find(tmp_path, f"-DCMAKE_PREFIX_PATH={torch}")
    assert "COMPILE_DEFINITIONS=USE_DISTRIBUTED;USE_RPC;_GLIBCXX_USE_CXX11_ABI=0" in said


def test_a_torch_that_the_project_has_found_is_linked(tmp_path: Path) -> None:
    torch = fake_torch(tmp_path / "libtorch")
    said = find(tmp_path, f"-DTorch_DIR={torch}/share/cmake/Torch", before="add_library(torch INTERFACE IMPORTED)\n")
    assert "LINK_LIBRARIES=torch\n" in said


def test_one_that_is_not_whole_is_named(tmp_path: Path) -> None:
    torch = fake_torch(tmp_path / "libtorch")
    (torch / "lib/libtorch_cpu.so").unlink()
    done = configured(tmp_path, FIND.format(hints=""), f"-DTorch_DIR={torch}")
    assert done.returncode != 0
    assert f"the torch in {torch} has no lib/libtorch_cpu.so" in " ".join(done.stderr.split())


def written(name: str) -> str:
    found = re.search(rf"set\({name} ([0-9.]+)\)", (ROOT / "cmake/OxytorchDependencies.cmake").read_text())
    assert found is not None
    return found[1]


def depend(folder: Path, version: str) -> subprocess.CompletedProcess[str]:
    torch = fake_torch(folder / "libtorch", version)
    body = "set(OXYTORCH_TORCH ON)\ninclude(OxytorchDependencies)\n"
    return configured(folder, body, f"-DTorch_DIR={torch}", languages="CXX")


def test_a_newer_torch_than_was_tried_is_a_warning(tmp_path: Path) -> None:
    done = depend(tmp_path, "2.99.0")
    assert done.returncode == 0, done.stderr
    assert "torch 2.99.0 is newer than" in " ".join(done.stderr.split())


@pytest.mark.parametrize("which", ["OXYTORCH_TORCH_OLDEST", "OXYTORCH_TORCH_NEWEST"])
def test_those_that_were_tried_pass_in_silence(tmp_path: Path, which: str) -> None:
    done = depend(tmp_path, f"{written(which)}.1")
    assert done.returncode == 0 and "torch" not in done.stderr, done.stderr


def test_an_older_torch_is_refused(tmp_path: Path) -> None:
    done = depend(tmp_path, "2.8.0")
    assert done.returncode != 0
    assert "is 2.8.0; Oxytorch needs 2.9 or later" in " ".join(done.stderr.split())


def test_the_range_is_the_same_everywhere() -> None:
    oldest, newest = written("OXYTORCH_TORCH_OLDEST"), written("OXYTORCH_TORCH_NEWEST")
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text()
    nightly = re.search(r"for torch in ([0-9. ]+);", (ROOT / "tools/nightly.sh").read_text())
    assert nightly is not None
    tried = nightly[1].split()
    assert tried[0].startswith(f"{oldest}.") and tried[-1].startswith(f"{newest}.") and len(tried) >= 3
    assert f"{oldest} to {newest}" in (ROOT / "docs/guide/install.md").read_text()
