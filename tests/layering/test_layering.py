"""Reads the #includes and the Python imports: no module may reach up, and no name may be without its module."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("reads the sources")

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include"

# What a contributor reads is what is held to: the layers, the lowest 0, and whether their modules know torch.
LAYER_ROW = re.compile(r"^\| (\d+) \| (.*?) \| (yes|no) \|$", re.MULTILINE)
GUIDE = (ROOT / "docs/guide/contributing.md").read_text()
TABLE = LAYER_ROW.findall(GUIDE)
LAYERS = {name.partition("/")[0]: int(layer) for layer, names, _ in TABLE for name in re.findall(r"`([\w/*]+)`", names)}
TOP = LAYERS.pop("bindings")
LAYERS.pop("python")
TORCH_LAYER = min(int(layer) for layer, _, knows_torch in TABLE if knows_torch == "yes")
# Python modules that are of no module there, or stand in another layer than their C++ part.
PYTHON_ROW = re.compile(r"^\| (`.*?`) \| (\d+) \| .+ \|$", re.MULTILINE)
PYTHON_LAYERS = {
    name: int(layer) for names, layer in PYTHON_ROW.findall(GUIDE) for name in re.findall(r"`(\w+)`", names)
}
# Folders that are no modules, by the tree they stand in.
BESIDE_MODULES = {
    "src": set(),
    "tests": {
        "cuda",
        "device",
        "demo",
        "bench",
        "hpu",
        "consumer",
        "plugin",
        "layering",
        "fuzz",
        "mutation",
        "packaging",
        "pages",
        "examples",
    },
    "bench": {"race", "results", "report"},
}
PAGES_BESIDE_MODULES = {"index", "results-gpu", "systems", "demo", "bench", "hpu"}
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2)/")
# A Gaudi card is reached through torch alone: docs/decisions/0007-hpu-through-torch.md.
TORCH_BELOW = {"backends/hpu/torch_device.cpp"}


@cache
def text(path: Path) -> str:
    return path.read_text()


@cache
def includes(path: Path) -> tuple[str, ...]:
    return tuple(re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', text(path), re.MULTILINE))


def own_header(name: str, user: Path) -> Path | None:
    """The file of this project that an #include names, if it is one."""
    for folder in (user.parent, INCLUDE, ROOT / "src"):
        found = (folder / name).resolve()
        if found.is_file() and found.is_relative_to(ROOT) and "build" not in found.relative_to(ROOT).parts:
            return found
    return None


def module_of(path: Path) -> str | None:
    """The module a C++ file belongs to; None for files above every layer."""
    parts = path.relative_to(ROOT).parts
    if parts[:2] == ("include", "oxytorch"):
        name = parts[2].removesuffix(".h")
        if name == "oxytorch":
            return None  # the umbrella
        return next((module for module in (name, name.split("_")[0]) if module in LAYERS), "base")
    if parts[0] == "src":
        return parts[1]
    if parts[0] == "backends":
        return "backends"
    return None


def layer_of(path: Path) -> int:
    module = module_of(path)
    return TOP if module is None else LAYERS[module]


def cpp(*trees: str) -> list[Path]:
    return sorted(
        path
        for tree in trees
        for end in ("*.h", "*.cpp", "*.cu", "*.cuh", "*.inc")
        for path in (ROOT / tree).rglob(end)
    )


def reached(path: Path) -> set[str]:
    """Every foreign header that a unit includes, through its own headers too."""
    foreign: set[str] = set()
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in includes(current):
            header = own_header(name, current)
            if header is None:
                foreign.add(name)
            else:
                waiting.append(header)
    return foreign


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_a_module_includes_only_the_layers_under_it() -> None:
    ups = []
    for path in cpp("include", "src", "backends"):
        for name in includes(path):
            header = own_header(name, path)
            if header is None or module_of(header) == module_of(path):
                continue
            if layer_of(header) >= layer_of(path):
                ups.append(f"{relative(path)} (layer {layer_of(path)}) includes {name} (layer {layer_of(header)})")
    assert not ups, "\n".join(ups)


def test_layers_under_those_of_torch_know_none() -> None:
    found = [
        f"{relative(path)} reaches {name}"
        for path in cpp("include", "src", "backends")
        if layer_of(path) < TORCH_LAYER and relative(path) not in TORCH_BELOW
        for name in reached(path)
        if TORCH_HEADER.match(name)
    ]
    assert not found, "\n".join(found)


def test_nothing_calls_a_function_that_old_torch_replaces() -> None:
    """libtorch.so 2.9 exports a copy of std::filesystem::remove_all that crashes, for every library of the process."""
    assert not [relative(path) for path in cpp("include", "src", "backends", "bindings") if "remove_all(" in text(path)]


def test_public_headers_hold_no_third_party_header() -> None:
    found = []
    for path in cpp("include"):
        for name in includes(path):
            standard = re.fullmatch(r"[a-z_0-9]+(\.h)?", name) is not None
            ours = own_header(name, path) is not None or name == "oxytorch/version.h"
            torch = TORCH_HEADER.match(name) is not None and layer_of(path) >= TORCH_LAYER
            if not (standard or ours or torch):
                found.append(f"{relative(path)} includes {name}")
    assert not found, "\n".join(found)


def test_public_headers_include_what_they_use_of_torch() -> None:
    """The build compiles each of them alone, but with torch's precompiled (cmake/OxytorchInstall.cmake)."""
    found = []
    for path in cpp("include"):
        code = re.sub(r"//.*", "", text(path))
        known = {name for name in reached(path) if TORCH_HEADER.match(name)}
        if re.search(r"\b(at|c10)::", code) and not known and not re.search(r"namespace (at|c10)\b", code):
            found.append(f"{relative(path)} needs ATen/core/Tensor.h, or to declare what it names")
        if "torch::optim::" in code.replace("namespace torch::optim", "") and not (
            "torch/optim/optimizer.h" in known or "namespace torch::optim" in code
        ):
            found.append(f"{relative(path)} needs torch/optim/optimizer.h, or to declare what it names")
    assert not found, "\n".join(found)


def test_no_unit_sees_both_spdlog_and_torch() -> None:
    # torch's own fmt is newer than the one spdlog was built with: together they do not compile, or worse.
    found = []
    for path in cpp("src", "backends", "bindings", "tests", "bench", "examples"):
        names = reached(path)
        if any(name.startswith(("spdlog/", "fmt/")) for name in names) and any(
            TORCH_HEADER.match(name) for name in names
        ):
            found.append(relative(path))
    assert not found, "\n".join(found)


def type_checking_only(tree: ast.AST) -> set[ast.AST]:
    """All that stands under `if TYPE_CHECKING:`."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }


def imports(path: Path, *, at_once: bool = False) -> set[str]:
    """What `imported` finds in a file of the Python package."""
    package = ("oxytorch", *path.relative_to(ROOT / "python" / "oxytorch").parent.parts)
    return imported(text(path), package, at_once=at_once)


def imported(source: str, package: tuple[str, ...], *, at_once: bool = False) -> set[str]:
    """Modules of oxytorch that Python source in `package` imports, as `oxytorch.optim.tail`.

    Those for type checking only are left out; `at_once`: those in functions too.
    """
    tree = ast.parse(source)
    left_out = type_checking_only(tree)
    if at_once:
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        left_out |= {inner for node in ast.walk(tree) if isinstance(node, functions) for inner in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.split(".")[0] == "oxytorch")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            if module.split(".")[0] != "oxytorch":
                continue
            # What is imported may be a module of a package, or a name in it.
            inner = {alias.name: file_of(f"{module}.{alias.name}") for alias in node.names}
            found.update(f"{module}.{name}" for name, file in inner.items() if file is not None or module == "oxytorch")
            if any(file is None and (module, name) != ("oxytorch", "_C") for name, file in inner.items()):
                found.add(module)
    return found


def file_of(module: str) -> Path | None:
    """The file of a Python module of this package."""
    stem = ROOT / "python" / Path(*module.split("."))
    return next((file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()), None)


def imported_modules(path: Path) -> set[str]:
    """Modules of the first level that a Python file imports, as `optim`, `_C`."""
    return {name.split(".")[1] for name in imports(path) if "." in name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for other in graph.get(waiting.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return seen

    reached_from = {node: reach(node) for node in graph}
    groups = {
        tuple(sorted(other for other in reached_from[node] if node in reached_from.get(other, ())))
        for node in graph
        if node in reached_from[node]
    }
    return [list(group) for group in sorted(groups)]


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [["b", "c"], ["d"]]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_imports_are_found_by_the_dots_before_them() -> None:
    package = ("oxytorch", "tune", "strategies")
    source = """
from typing import TYPE_CHECKING
import os, oxytorch.amp
from ... import clock
from ...base import log
from ..._C import tune as _native
from ...model.rules import pointwise, unknown
from ..run import Run
from .. import plan
from . import layout

if TYPE_CHECKING:
    from ...trainer import Trainer

def late():
    from ...data import convert
"""
    at_once = {
        "oxytorch.amp", "oxytorch.clock", "oxytorch.base", "oxytorch._C", "oxytorch.model.rules",
        "oxytorch.model.rules.pointwise", "oxytorch.tune.run", "oxytorch.tune.plan", "oxytorch.tune.strategies.layout",
    }  # fmt: skip
    assert imported(source, package, at_once=True) == at_once
    assert imported(source, package) == at_once | {"oxytorch.data.convert"}
    assert imported("from ..base import log", ("oxytorch", "tune")) == {"oxytorch.base"}
    assert imported("from .base import log", ("oxytorch",)) == {"oxytorch.base"}


def test_no_python_modules_import_each_other() -> None:
    files = sorted((ROOT / "python" / "oxytorch").rglob("*.py"))
    graph = {
        relative(path): {relative(file) for name in imports(path, at_once=True) if (file := file_of(name)) is not None}
        - {relative(path)}
        for path in files
    }
    assert not circles(graph)


def test_no_headers_include_each_other() -> None:
    graph = {
        relative(path): {relative(header) for name in includes(path) if (header := own_header(name, path)) is not None}
        for path in cpp("include", "src", "backends", "bindings")
    }
    assert not circles(graph)


def python_module(path: Path) -> str:
    package = ROOT / "python" / "oxytorch"
    return path.relative_to(package).parts[0].removesuffix(".py")


def python_layer(module: str) -> int | None:
    return PYTHON_LAYERS.get(module, LAYERS.get(module))


def test_python_modules_import_only_the_layers_under_them() -> None:
    ups = []
    for path in sorted((ROOT / "python" / "oxytorch").rglob("*.py")):
        module = python_module(path)
        layer = python_layer(module)
        assert layer is not None, f"{relative(path)} is of no layer"
        if layer == TOP:
            continue
        for name in imported_modules(path):
            other = python_layer(name)
            if name in ("_C", module):
                continue
            assert other is not None, f"{relative(path)} imports {name}, which is of no layer"
            if other >= layer:
                ups.append(f"{relative(path)} (layer {layer}) imports {name} (layer {other})")
    assert not ups, "\n".join(ups)


@pytest.mark.parametrize("tree", BESIDE_MODULES)
def test_every_folder_is_a_module(tree: str) -> None:
    folders = {path.name for path in (ROOT / tree).iterdir() if path.is_dir() and any(path.rglob("*.*"))}
    unknown = folders - set(LAYERS) - BESIDE_MODULES[tree] - {"__pycache__"}
    assert not unknown, f"{tree}/ has folders that are no module: {sorted(unknown)}"


def test_every_binding_python_module_and_page_is_of_a_module() -> None:
    bindings = {path.stem for path in (ROOT / "bindings").glob("*.cpp")} - {"module"}
    unknown = [f"bindings/{name}.cpp" for name in bindings if name.split("_")[0] not in LAYERS]
    modules = {python_module(path) for path in (ROOT / "python" / "oxytorch").rglob("*.py")}
    unknown += [f"python/oxytorch/{name}" for name in modules if python_layer(name) is None]
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    unknown += [f"docs/{name}.md" for name in pages if name not in LAYERS and name not in PAGES_BESIDE_MODULES]
    assert not unknown, f"these belong to no module: {sorted(unknown)}"


def test_every_module_of_the_table_is_there() -> None:
    trees = (ROOT / "src", ROOT, ROOT / "python" / "oxytorch")
    missing = [name for name in LAYERS if not any((tree / name).is_dir() for tree in trees)]
    missing += [name for name in PYTHON_LAYERS if name != "_build_info" and file_of(f"oxytorch.{name}") is None]
    assert not missing, f"docs/guide/contributing.md lists modules that do not exist: {missing}"


def test_the_index_lists_every_module_with_its_page() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \| \[(\w+)\]\((\S+)\) \|$", text(ROOT / "docs" / "index.md"), re.MULTILINE)
    assert all(name == label and page == f"{name}.md" for name, label, page in rows)
    modules = {path.name for path in (ROOT / "src").iterdir() if path.is_dir()}
    modules |= {python_module(path) for path in (ROOT / "python" / "oxytorch").rglob("*.py")}
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert sorted(name for name, _, _ in rows) == sorted(modules & pages)


def test_every_module_has_its_page_and_its_tests() -> None:
    modules = sorted(path.name for path in (ROOT / "src").iterdir() if path.is_dir() and any(path.glob("*.cpp")))
    missing = [f"docs/{module}.md" for module in modules if not (ROOT / "docs" / f"{module}.md").is_file()]
    missing += [f"tests/{module}/" for module in modules if not list((ROOT / "tests" / module).glob("*test*"))]
    assert not missing, f"missing: {missing}"


def test_the_umbrella_header_includes_every_public_header_of_a_module() -> None:
    umbrella = INCLUDE / "oxytorch" / "oxytorch.h"
    wanted = {relative(path).removeprefix("include/") for path in (INCLUDE / "oxytorch").glob("*.h")} - {
        "oxytorch/oxytorch.h"
    }
    assert wanted <= set(includes(umbrella)), f"oxytorch.h leaves out {sorted(wanted - set(includes(umbrella)))}"


def test_the_install_rules_know_every_torch_module() -> None:
    listed = re.search(r"set\(OXYTORCH_TORCH_MODULES ([^)]*)\)", text(ROOT / "cmake" / "OxytorchInstall.cmake"))
    assert listed is not None
    assert set(listed[1].split()) == {module for module, layer in LAYERS.items() if layer >= TORCH_LAYER} | {"oxytorch"}
