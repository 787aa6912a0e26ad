"""The mutation runner itself: which faults it knows, and that it tells a caught one from one that is not."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.cpu_only("works on text")

ROOT = Path(__file__).resolve().parents[2]


def loaded(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "tests" / "mutation"))
    spec = importlib.util.spec_from_file_location(f"mutation_{name}", ROOT / "tests" / "mutation" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run, mutants, suites = loaded("run"), loaded("mutants"), loaded("suites")

PYTHON = '''"""A docstring with 1 < 2."""
from typing import Literal
__all__ = ["f"]

def f(a: Literal[3], b=True):
    """Not 1."""
    while a < 2 and not b:
        a += (1 +
              2.0)
    if a is not None:
        raise ValueError(f"{a + 1} is wrong")
    return min(a, zip(b, strict=True))
'''
PYTHON_MUTANTS = {
    ("True", "False"), ("<", "<="), ("<", ">"), ("2", "3"), ("2", "1"), ("and", "or"), ("not", ""),
    ("a < 2 and not b", "(not (a < 2 and not b))"), ("1", "2"), ("+", "-"), ("2.0", "4.0"), ("2.0", "1.0"),
    ("a += (1 +\n              2.0)", "pass"), ("is not", "is"), ("a is not None", "(not (a is not None))"),
    ('raise ValueError(f"{a + 1} is wrong")', "pass"), ("min", "max"),
    ("return min(a, zip(b, strict=True))", "return None"),
}  # fmt: skip

CPP = """// 1 < 2
#include <vector>
#define LIMIT 3
template <int N = 4>
float f(const std::vector<float>& v, bool b) {
  static_assert(sizeof(float) == 4);
  const char* text = "a < b, 7";
  float sum = 0.5F;
  for (size_t i = 0; i < v.size(); ++i) {
    if (b && v[i] >= 0x10) sum += v[i] * 2;
  }
  note(sum, text);
  return std::max(sum, 1e3F);
}
"""
CPP_MUTANTS = {
    ("0.5F", "(0.5F * 2)"), ("0.5F", "(0.5F / 2)"), ("0", "1"), ("<", "<="), ("<", ">"), ("++", "--"),
    ("b && v[i] >= 0x10", "!(b && v[i] >= 0x10)"), ("&&", "||"), (">=", ">"), (">=", "<="), ("0x10", "(0x10 + 1)"),
    ("+=", "-="), ("*", "/"), ("2", "3"), ("2", "1"), ("note(sum, text);", ";"), ("std::max", "std::min"),
    ("1e3F", "(1e3F * 2)"), ("1e3F", "(1e3F / 2)"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), [("f.py", PYTHON, PYTHON_MUTANTS), ("f.cpp", CPP, CPP_MUTANTS)])
def test_these_faults_are_found_and_no_others(name: str, text: str, expected: set[Any], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    found = mutants.mutants_of(tmp_path, name)
    assert {(m.before, m.after) for m in found} == expected
    assert len({m.id for m in found}) == len(found)
    for m in found:
        changed = m.applied(text.encode()).decode()
        assert changed != text and text.count("\n", 0, m.start) + 1 == m.line
        if name == "f.py":
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


def test_a_mutant_keeps_its_name_where_other_lines_change(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(PYTHON)
    before = {m.id for m in mutants.mutants_of(tmp_path, "f.py")}
    (tmp_path / "f.py").write_text("import os\n\nx = 5\n" + PYTHON)
    after = mutants.mutants_of(tmp_path, "f.py")
    assert before < {m.id for m in after}
    with pytest.raises(ValueError, match="list the mutants anew"):
        after[-1].applied(PYTHON.encode() + b" " * 100)


def test_the_sources_have_mutants_that_parse_and_tests_that_exist() -> None:
    built = {name for file in (ROOT / "tests").glob("*/CMakeLists.txt")
             for name in re.findall(r"oxytorch_test\((\w+)", file.read_text())}  # fmt: skip
    order = run.chosen(ROOT, list(suites.PATHS), 0)
    assert len(order) > 5000
    for path in sorted({m.path for m in order}):
        stages = suites.stages_of(ROOT, path)
        assert stages, path
        for stage in stages:
            for test in stage.tests:
                name = re.split("[@:]", test)[0] if stage.programs else test
                assert name in built if stage.programs else (ROOT / name).exists(), (path, test)
    for m in order[:300]:
        if m.path.endswith(".py"):
            ast.parse(m.applied((ROOT / m.path).read_bytes()))
    assert [m.id for m in order[:50]] == [m.id for m in run.chosen(ROOT, list(suites.PATHS), 0)[:50]]
    assert [m.id for m in order[:50]] != [m.id for m in run.chosen(ROOT, list(suites.PATHS), 1)[:50]]


def test_every_explanation_names_its_mutant_and_says_why() -> None:
    for entry in json.loads(run.EQUIVALENT.read_text()):
        assert set(entry) == {"id", "path", "change", "reason"}
        assert re.fullmatch(r"[0-9a-f]{12}", entry["id"]) and (ROOT / entry["path"]).exists()
        assert len(entry["reason"].split()) > 4, "say why no test can tell it from the source"


SOURCE = """def grown(n):
    total = 0
    while n > 0:
        total += n
        n -= 1
    spare = 5
    return total
"""
TEST = """from oxytorch.optim.small import grown

def test_grown():
    assert grown(3) == 6
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name, text in {
        "python/oxytorch/__init__.py": "",
        "python/oxytorch/optim/__init__.py": "",
        "python/oxytorch/optim/small.py": SOURCE,
        "tests/optim/test_small.py": TEST,
        "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def test_caught_survived_and_hanging_ones_are_told_apart(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "stages_of", lambda root, path: [suites.Stage(("tests/optim/test_small.py",))])
    runner = run.Runner(small, tmp_path / "work")
    path = "python/oxytorch/optim/small.py"
    every = {(m.before, m.after): m for m in mutants.mutants_of(small, path)}
    expected = {
        ("total += n", "pass"): "killed",
        (">", "<"): "killed",
        ("0", "1"): "killed",
        ("spare = 5", "pass"): "survived",
        ("n -= 1", "pass"): "timeout",
    }
    for change, status in expected.items():
        if status == "timeout":
            monkeypatch.setattr(run, "LEAST_SECONDS", 5.0)
            monkeypatch.setattr(run, "PATIENCE", 0.0)
        entry = runner.judge(every[change])
        assert entry["status"] == status, entry
        assert ("test_grown" in entry["by"]) == (status == "killed")
        runner.record.add(entry)
    assert (small / path).read_text() == SOURCE == (tmp_path / "work" / "python" / path).read_text()
    # What was found is known to the next run, until the file changes.
    again = run.Record(tmp_path / "work").results
    assert len(again) == len(expected)
    assert (every["0", "1"].id, run.file_hash(small, path)) in again
    (small / path).write_text(SOURCE + "\n")
    assert (every["0", "1"].id, run.file_hash(small, path)) not in again
    words = run.table(list(again.values()), {every["spare = 5", "pass"].id: "nothing reads it"})
    assert "100.0%" in words and "spare" not in words
    words = run.table(list(again.values()), {})
    assert "80.0%" in words and "'spare = 5' -> 'pass'" in words


def test_tests_that_fail_without_a_fault_are_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small / "tests" / "optim" / "test_small.py").write_text(TEST.replace("6", "7"))
    monkeypatch.setattr(run, "stages_of", lambda root, path: [suites.Stage(("tests/optim/test_small.py",))])
    runner = run.Runner(small, tmp_path / "work")
    mutant = mutants.mutants_of(small, "python/oxytorch/optim/small.py")[0]
    with pytest.raises(SystemExit, match="without any fault"):
        runner.judge(mutant)


def test_a_copy_follows_the_tree(small: Path, tmp_path: Path) -> None:
    tree = run.Tree(small, tmp_path / "tree", "")
    kept = (tree.folder / "pytest.ini").stat().st_mtime_ns
    (small / "python" / "oxytorch" / "optim" / "small.py").write_text("x = 1\n")
    (small / "tests" / "optim" / "test_small.py").unlink()
    with pytest.raises(SystemExit, match="another run"):
        run.Tree(small, tmp_path / "tree", "")
    tree._lock.close()
    run.Tree(small, tmp_path / "tree", "")
    assert (tree.folder / "python/oxytorch/optim/small.py").read_text() == "x = 1\n"
    assert not (tree.folder / "tests/optim/test_small.py").exists()
    assert (tree.folder / "pytest.ini").stat().st_mtime_ns == kept
