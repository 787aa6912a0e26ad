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


def program(page: Path, number: int) -> str:
    return f"{re.sub(r'[^a-z0-9]', '_', name(page).lower())}_{number}"


@pytest.fixture(scope="module")
def built(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of all programs, built as a user's project without optimization, and what the build said."""
    folder = tmp_path_factory.mktemp("pages")
    lines = ["cmake_minimum_required(VERSION 3.25)", "project(pages LANGUAGES CXX)", "find_package(Oxytorch REQUIRED)"]
    first = None
    for page, number, body in PROGRAMS:
        target = program(page, number)
        (folder / f"{target}.cpp").write_text(body)
        core = "torch" not in "".join(re.findall(r"#include.*", body)).replace("oxytorch/", "")
        torch_side = re.search(r"oxytorch/(accelerator|optim|amp|memory|trainer|oxytorch)", body)
        wanted = "core" if core and not torch_side else "oxytorch"
        lines += [f"add_executable({target} {target}.cpp)", f"target_link_libraries({target} Oxytorch::{wanted})"]
        if "#include <torch/torch.h>" in body:  # so the precompiled header gives it nothing that it does not include
            shared = f"REUSE_FROM {first}" if first else "PRIVATE <torch/torch.h>"
            lines += [f"target_precompile_headers({target} {shared})"]
            first = first or target
    (folder / "CMakeLists.txt").write_text("\n".join(lines) + "\n")
    flags = [f"-DCMAKE_PREFIX_PATH={installed}", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O0"]
    said = ""
    for command in (["cmake", "-S", ".", "-B", "build", "-G", "Ninja", *flags], ["ninja", "-C", "build", "-k", "0"]):
        said += subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    return folder / "build", said


@pytest.mark.parametrize(
    ("page", "number"), [(page, number) for page, number, _ in PROGRAMS], ids=[f"{name(p)}:{n}" for p, n, _ in PROGRAMS]
)
def test_whole_cpp_programs_build_and_run(page: Path, number: int, built: tuple[Path, str], tmp_path: Path) -> None:
    folder, said = built
    binary = folder / program(page, number)
    assert binary.is_file(), f"{name(page)}, C++ block {number}: not built\n{said}"
    done = subprocess.run([binary], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name(page)}, C++ block {number}\n{done.stdout}{done.stderr}"
