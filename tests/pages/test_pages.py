"""Every example of README.md and docs/ runs: a page's Python blocks in one process, each C++ program in its own."""

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


INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">].*\n', re.MULTILINE)


def reached(include: Path, names: list[str]) -> frozenset[str]:
    """Our headers among these, and those that they include, however deep."""
    found: set[str] = set()
    waiting = names
    while waiting:
        waiting = [each for each in waiting if each not in found and (include / each).is_file()]
        found.update(waiting)
        waiting = [each for header in waiting for each in INCLUDE.findall((include / header).read_text())]
    return frozenset(found)


PROGRAMS_A_UNIT = 7


def in_one_unit(programs: list[tuple[str, str]]) -> str:
    """Each a function of a namespace, after its own includes; the first argument says which is run."""
    text = ""
    for target, body in programs:
        includes = "".join(found.group() for found in INCLUDE.finditer(body))
        before, after = INCLUDE.sub("", body).rstrip().split("int main()")
        assert "\n}" not in after[:-2], f"{target}: main() is not the last function"
        text += f"{includes}\nnamespace {target} {{\n{before}int run(){after[:-1]}  return 0;\n}}\n}}\n\n"
    runs = "".join(f'  if (name == "{target}") return {target}::run();\n' for target, _ in programs)
    main = f"int main(int, char** argv) {{\n  const std::string name = argv[1];\n{runs}  return 2;\n}}\n"
    return f"#include <string>\n\n{text}{main}"


def units() -> list[tuple[str, str]]:
    """What to compile, by name. torch/torch.h takes the compiler 15 s, so several programs with it are one unit."""
    with_torch = [one for one in PROGRAMS if "#include <torch/torch.h>" in one[2]]
    found = [(program(page, number), body) for page, number, body in PROGRAMS if (page, number, body) not in with_torch]
    for at in range(0, len(with_torch), PROGRAMS_A_UNIT):
        these = [(program(page, number), body) for page, number, body in with_torch[at : at + PROGRAMS_A_UNIT]]
        found.append((f"programs_{at}", in_one_unit(these)))
    return found


@pytest.fixture(scope="module")
def built(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Path | str]], str]:
    """The command of each program, built as a user's project without optimization, and what the build said."""
    folder = tmp_path_factory.mktemp("pages")
    lines = ["cmake_minimum_required(VERSION 3.25)", "project(pages LANGUAGES CXX)", "find_package(Oxytorch REQUIRED)"]
    commands: dict[str, list[Path | str]] = {}
    for unit, text in units():
        (folder / f"{unit}.cpp").write_text(text)
        core = "torch" not in "".join(re.findall(r"#include.*", text)).replace("oxytorch/", "")
        torch_side = re.search(r"oxytorch/(accelerator|optim|amp|memory|trainer|oxytorch)", text)
        wanted = "core" if core and not torch_side else "oxytorch"
        lines += [f"add_executable({unit} {unit}.cpp)", f"target_link_libraries({unit} Oxytorch::{wanted})"]
        for target in re.findall(r"return (\w+)::run\(\);", text) or [unit]:
            commands[target] = [folder / "build" / unit, target]
    (folder / "CMakeLists.txt").write_text("\n".join(lines) + "\n")
    flags = [f"-DCMAKE_PREFIX_PATH={installed}", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O0"]
    said = ""
    for command in (["cmake", "-S", ".", "-B", "build", "-G", "Ninja", *flags], ["ninja", "-C", "build", "-k", "0"]):
        said += subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    return commands, said


TYPE = re.compile(r"\b(?:class|struct|enum class) (?:OXY\w* )?(\w+)")


@pytest.mark.parametrize("body", [body for _, _, body in PROGRAMS], ids=[f"{name(p)}:{n}" for p, n, _ in PROGRAMS])
def test_a_program_includes_what_it_names(body: str) -> None:
    # Others of its unit may have included it.
    include = ROOT / "include"
    known = "".join((include / header).read_text() for header in reached(include, INCLUDE.findall(body)))
    types = {each for header in include.rglob("*.h") for each in TYPE.findall(header.read_text())}
    qualified = {part for found in re.findall(r"\boxytorch::([\w:]+)", body) for part in found.split("::")}
    ours = re.sub(r"\b(?:torch|at|std)::[\w:]+", "", INCLUDE.sub("", body))
    named = qualified | (types & set(re.findall(r"\w+", ours)))
    assert not {each for each in named if each and not re.search(rf"\b{each}\b", known)}


@pytest.mark.parametrize(
    ("page", "number"), [(page, number) for page, number, _ in PROGRAMS], ids=[f"{name(p)}:{n}" for p, n, _ in PROGRAMS]
)
def test_whole_cpp_programs_build_and_run(
    page: Path, number: int, built: tuple[dict[str, list[Path | str]], str], tmp_path: Path
) -> None:
    commands, said = built
    command = commands[program(page, number)]
    assert Path(command[0]).is_file(), f"{name(page)}, C++ block {number}: not built\n{said}"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name(page)}, C++ block {number}\n{done.stdout}{done.stderr}"
