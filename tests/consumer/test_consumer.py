"""Stand-alone programs against the installed package, with torch and with core alone; and what must be refused."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.cpu_only("builds and runs programs of its own")

HERE = Path(__file__).resolve().parent
TORCH_INCLUDE = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|caffe2)/')


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def configure(source: Path, build: Path, prefix: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}", *flags]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def headers_of_core(prefix: Path) -> list[Path]:
    """Headers that reach no torch, however deep."""
    include = prefix / "include"
    all_headers = {path.relative_to(include).as_posix(): path.read_text() for path in include.rglob("*.h")}
    with_torch = {name for name, body in all_headers.items() if TORCH_INCLUDE.search(body)}
    while True:
        more = {
            name
            for name, body in all_headers.items()
            if name not in with_torch and with_torch & set(re.findall(r'#include "([^"]+)"', body))
        }
        if not more:
            return [include / name for name in sorted(set(all_headers) - with_torch)]
        with_torch |= more


@pytest.mark.slow
def test_a_core_program_needs_no_torch(installed: Path, tmp_path: Path) -> None:
    # A moved prefix: the package must not remember where it was installed first.
    moved = tmp_path / "elsewhere"
    shutil.copytree(installed, moved, symlinks=True)
    names = [path.relative_to(moved / "include").as_posix() for path in headers_of_core(moved)]
    assert "oxytorch/error.h" in names
    done = configure(HERE / "core", tmp_path / "build", str(moved), f"-DCORE_HEADERS={';'.join(names)}")
    assert done.returncode == 0, done.stdout + done.stderr
    run("cmake", "--build", tmp_path / "build", cwd=tmp_path)
    assert "abacus" in run(tmp_path / "build" / "core_consumer", cwd=tmp_path)
    needed = run("ldd", tmp_path / "build" / "core_consumer", cwd=tmp_path)
    assert "liboxytorch_core" in needed
    assert "torch.so" not in needed.replace("liboxytorch", "") and "libc10" not in needed


@pytest.mark.slow
def test_a_torch_program_builds_with_the_users_commands(installed: Path, tmp_path: Path) -> None:
    prefix = f"{installed};{torch.utils.cmake_prefix_path}"
    done = configure(HERE / "torch", tmp_path / "build", prefix, "-DCMAKE_BUILD_TYPE=Release")
    assert done.returncode == 0, done.stdout + done.stderr
    run("cmake", "--build", tmp_path / "build", cwd=tmp_path)
    assert "loss" in run(tmp_path / "build" / "torch_consumer", cwd=tmp_path)


def test_a_project_that_found_torch_itself_keeps_it(installed: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "main.cpp").write_text("int main() {}\n")
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(x LANGUAGES CXX)\n"
        # Torch's package would stop here where its CUDA build meets no toolkit: this is its target, and no more.
        "add_library(torch SHARED IMPORTED)\nset_property(TARGET torch PROPERTY IMPORTED_LOCATION /its/libtorch.so)\n"
        "find_package(Oxytorch REQUIRED)\nadd_executable(x main.cpp)\ntarget_link_libraries(x Oxytorch::oxytorch)\n"
    )
    done = configure(source, tmp_path / "build", f"{installed};{torch.utils.cmake_prefix_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    rules = (tmp_path / "build" / "build.ninja").read_text()
    assert "/its/libtorch.so" in rules and "libtorch_cpu.so" not in rules


def test_a_component_that_is_not_there_is_named(installed: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(x LANGUAGES CXX)\n"
        "find_package(Oxytorch REQUIRED COMPONENTS cores)\n"
    )
    done = configure(source, tmp_path / "build", str(installed))
    assert done.returncode != 0
    assert "component 'cores' is not in this package" in " ".join(done.stderr.split())


def test_another_torch_is_refused_in_one_sentence(installed: Path, tmp_path: Path) -> None:
    fake = tmp_path / "prefix" / "share" / "cmake" / "Torch"
    fake.mkdir(parents=True)
    (fake / "TorchConfig.cmake").write_text("set(Torch_FOUND TRUE)\nadd_library(torch INTERFACE IMPORTED)\n")
    (fake / "TorchConfigVersion.cmake").write_text(
        'set(PACKAGE_VERSION "2.7.0")\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n'
    )
    done = configure(HERE / "torch", tmp_path / "build", f"{installed};{tmp_path / 'prefix'}")
    assert done.returncode != 0
    assert "but torch 2.7.0 was found" in " ".join(done.stderr.split())
