"""Every example of README.md and docs/ runs: a page's Python blocks in one process, each whole C++ program alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("compiles and runs what the pages show")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "generated" not in path.parts)]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for word, body in FENCE.findall(page.read_text()) if word == language]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_blocks_run_in_order(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    # A block keeps its own name in tracebacks, which then say which one failed.
    numbered = "".join(f"# block {number}\n{body}\n" for number, body in enumerate(blocks(page, "python"), 1))
    script.write_text(numbered)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{name(page)}\n{done.stdout}{done.stderr}"


PROGRAMS = [
    (page, number, body) for page in PAGES for number, body in enumerate(blocks(page, "cpp"), 1) if "int main" in body
]


@pytest.mark.parametrize(
    ("page", "number", "body"), PROGRAMS, ids=[f"{name(page)}:{number}" for page, number, _ in PROGRAMS]
)
def test_whole_cpp_programs_build_and_run(page: Path, number: int, body: str, installed: Path, tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(body)
    core = "torch" not in "".join(re.findall(r"#include.*", body)).replace("oxytorch/", "")
    torch_side = re.search(r"oxytorch/(accelerator|optim|amp|memory|trainer|oxytorch)", body)
    wanted = "core" if core and not torch_side else "oxytorch"
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(page LANGUAGES CXX)\n"
        f"find_package(Oxytorch REQUIRED COMPONENTS {wanted})\nadd_executable(page main.cpp)\n"
        f"target_link_libraries(page PRIVATE Oxytorch::{wanted})\n"
    )
    for command in (
        [
            "cmake",
            "-S",
            ".",
            "-B",
            "build",
            "-G",
            "Ninja",
            f"-DCMAKE_PREFIX_PATH={installed}",
            "-DCMAKE_BUILD_TYPE=Release",
        ],
        ["cmake", "--build", "build"],
        ["build/page"],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (
            f"{name(page)}, C++ block {number}: {' '.join(command)}\n{done.stdout}{done.stderr}"
        )
