"""Every table of figures in README.md and docs/ is what its JSON says, and none is written by hand."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.cpu_only("reads documents")

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# What only a measurement gives: an interval, a time, a ratio with decimals that stands alone in its cell.
FIGURE = re.compile(
    r"\d \[[\d.,]+, [\d.,]+\]|\(one start\)|^[\d.,]+ ?(?:ns|us|ms|s|x|%)$|^\d+\.\d+$|^\d+\.\d+ times", re.IGNORECASE
)
FACTS = "<!-- facts:"
"""Stands before a table of numbers that nobody measured, with what they are."""


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("tables", ROOT / "bench/results/tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


def handwritten(content: str, marked: re.Pattern[str]) -> list[str]:
    """The first row of every table with figures that stands outside of the marks."""
    outside = FENCE.sub("", marked.sub("", content))
    found = []
    for block in BLOCK.finditer(outside):
        before = outside[: block.start()].rstrip().rpartition("\n")[2]
        rows = [row.strip("| \n").split("|") for row in block[0].splitlines()]
        if not before.startswith(FACTS) and any(FIGURE.search(cell.strip()) for row in rows[2:] for cell in row):
            found.append(block[0].partition("\n")[0])
    return found


def test_pages_are_as_their_json_has_them(tables: ModuleType) -> None:
    for page in tables.pages():
        content = page.read_text(encoding="utf-8")
        assert tables.filled(page, content) == content, f"{page}: run python bench/results/tables.py"


def test_no_table_of_figures_is_written_by_hand(tables: ModuleType) -> None:
    found = {
        page.relative_to(ROOT).as_posix(): handwritten(page.read_text(encoding="utf-8"), tables.MARKED)
        for page in tables.pages()
    }
    assert not {page: rows for page, rows in found.items() if rows}


def test_every_table_is_shown_somewhere_and_names_its_command(tables: ModuleType) -> None:
    shown = {name for page in tables.pages() for _, name, _ in tables.MARKED.findall(page.read_text(encoding="utf-8"))}
    assert shown == set(tables.TABLES)
    for _, command in tables.TABLES.values():
        assert "bench/results/" in command or command.startswith("make gpu ")


def test_handwritten_tables_are_found(tables: ModuleType) -> None:
    by_hand = "| | step |\n|---|---|\n| cnn | 1.82 [1.77, 1.91] |\n"
    assert handwritten(by_hand, tables.MARKED) == ["| | step |"]
    assert handwritten("| | step |\n|---|---|\n| cnn | 12.4 ms |\n", tables.MARKED)
    assert handwritten("| | step |\n|---|---|\n| cnn | 1.48 |\n", tables.MARKED)
    assert not handwritten(f"<!-- table: demo -->\n{by_hand}<!-- end -->\n", tables.MARKED)
    assert not handwritten(f"<!-- facts: the makers' -->\n\n{by_hand}", tables.MARKED)
    assert not handwritten("| key | default |\n|---|---|\n| `x` | `90%` of memory, 4 starts |\n", tables.MARKED)


def test_a_changed_figure_is_noticed(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads((ROOT / "bench/results/convergence.json").read_text())
    page = ROOT / "docs/guide/benchmarks.md"
    content = page.read_text(encoding="utf-8")
    monkeypatch.setattr("_tables.documents.FOLDER", tmp_path)
    assert "Not measured yet: `python bench/race/convergence.py" in tables.filled(page, content)
    document["rows"][0]["mean"] += 0.5
    (tmp_path / "convergence.json").write_text(json.dumps(document))
    changed = tables.filled(page, content)
    assert f"{document['rows'][0]['mean']:.4f}" in changed and changed != content


def test_unfair_rivals_are_not_shown(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synthetic race: figures stand as computed, and a race without a screening shows no rival."""

    def entry(seconds: list[float], settings: str = "", **prepared: object) -> dict[str, object]:
        one = {"page_faults": None, "peak_bytes": None, "loss": None, "prepared": prepared}
        return {
            "settings": settings,
            "starts": {str(1000 + i): {"seconds": [s] * 3, **one} for i, s in enumerate(seconds)},
        }

    cold = {"tuning_seconds": 30.0, "compile_seconds": 20.0}
    found = {
        "name": "cnn",
        "title": "CNN",
        "entries": {
            "eager": entry([0.4, 0.4]),
            "eager + mallopt": entry([0.3, 0.3]),
            "stock 1": entry([0.12, 0.12], "fused AdamW, bf16"),
            "stock compiled": entry([0.11, 0.11], "compile default"),
            "oxytorch basic": entry([0.2, 0.2], cold=cold),
            "oxytorch advanced": entry([0.1, 0.1], cold=cold),
        },
        "absent": {},
        "screened": False,
    }
    machine = {"cpu": "made up", "threads": "2", "instructions": "avx2", "torch": "2.13.0+cpu"}
    path = tmp_path / "orchestrator.json"
    monkeypatch.setattr("_tables.documents.FOLDER", tmp_path)
    for screened in (False, True):
        found["screened"] = screened
        path.write_text(json.dumps({"machine": machine, "workloads": {"cnn": found}}))
        speed, against = tables.loops.orchestrator(), tables.loops.rivals()
        row = speed.splitlines()[2]
        assert row == "| CNN, 4 stages | 400 ms | 2 | 1.5 | 4 | 30 s (20 s) | 150 | 100 |"
        assert (against is None) == (not screened)
    assert against.splitlines()[2] == (
        "| CNN, 4 stages | stock 1: fused AdamW, bf16 | 1.2 | stock compiled: compile default | 1.1 "
        "| not measured | not measured |"
    )


GPU_PAGE = ROOT / "docs/results-gpu.md"
CARD = {"GPU": "made-up card", "torch": "2.11.0+cu130", "driver": "580.1", "CUDA": "13.0"}


def gpu_documents() -> dict[str, dict[str, object]]:
    """What `make gpu` would write."""

    def entry(seconds: float, settings: str = "") -> dict[str, object]:
        one = {"page_faults": None, "peak_bytes": None, "loss": None, "prepared": {}, "seconds": [seconds] * 3}
        return {"settings": settings, "starts": {"1000": one, "1001": one}}

    raced = {
        "name": "gpt",
        "title": "GPT-2 small",
        "entries": {
            "eager": entry(0.4),
            "stock 1": entry(0.2, "bf16"),
            "stock graph": entry(0.1, "graph"),
            "oxytorch advanced": entry(0.05),
        },
        "absent": {"stock max-autotune": "ended before it was told to"},
        "screened": True,
    }
    check = {"name": "copy.order", "clause": "O1", "verdict": "crash", "expected": "", "seen": "signal 11"}
    figure = {
        "what": "large: torch fused, over ours",
        "got": [1.5, 1.5, 1.5],
        "at_least": None,
        "met": None,
        "absent": "",
    }
    waits = {"what": "waits", "got": None, "at_most": 0, "met": None, "absent": "no trace"}
    parts: dict[str, dict[str, object]] = {
        "build": {"build": {"seconds": 201.0, "units": 480}},
        "conformance": {"checks": {"passed": 70, "skipped": 2, "failed": 1, "bad": [check]}},
        "tests": {
            "C++": {"passed": 300, "failed": 1, "skipped": 4, "failures": [{"test": "a::b", "why": "1 !=\n2"}]},
            "Python 1 of 6": {"problem": "it did not finish in 520 s"},
        },
        "step_tail": {"large": {"figures": [figure]}, "waits": {"figures": [waits]}},
        "loader": {"copies": {"figures": [waits]}},
        "memory": {"budgets": {"figures": [figure]}},
        "accelerate": {"gpt": {"document": {"workloads": {"gpt": raced}}, "starts": 2}},
    }
    head = {"machine": CARD, "command": "make gpu", "complete": False}
    return {name: {**head, "parts": found} for name, found in parts.items()}


def test_the_page_of_the_gpu_says_what_has_not_run(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part by part: each shows its figures once its document is there, and the others still say so."""
    monkeypatch.setattr("_tables.documents.FOLDER", tmp_path)
    content = GPU_PAGE.read_text(encoding="utf-8")
    documents = gpu_documents()
    (tmp_path / "gpu").mkdir()
    for done, (name, document) in enumerate(documents.items()):
        assert tables.filled(GPU_PAGE, content).count("Not run yet") == len(documents) - done
        (tmp_path / "gpu" / f"{name}.json").write_text(json.dumps(document))
    page = tables.filled(GPU_PAGE, content)
    assert "Not run yet" not in page and page.count("made-up card") == 1 + len(documents)
    assert "`bench/results/gpu/step_tail.json`" in page
    assert tables.filled(GPU_PAGE, page) == page


def test_the_page_of_the_gpu_shows_figures_and_failures(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("_tables.documents.FOLDER", tmp_path)
    (tmp_path / "gpu").mkdir()
    for name, document in gpu_documents().items():
        (tmp_path / "gpu" / f"{name}.json").write_text(json.dumps(document))
    assert "| time to build | 201 s |" in tables.gpu.build()
    assert "| 70 | 2 | 1 |" in tables.gpu.conformance() and "- copy.order (O1): signal 11" in tables.gpu.conformance()
    tests = tables.gpu.tests()
    assert "| C++ | 300 | 1 | 4 |" in tests and "- a::b: 1 != 2" in tests and "did not finish" in tests
    tail = tables.gpu.step_tail()
    assert "| large: torch fused, over ours | 1.5 |  |  |" in tail and "| waits | no trace | <= 0 | absent |" in tail
    assert "| waits | no trace | <= 0 | absent |" in tables.gpu.loader()
    assert "| large: torch fused, over ours | 1.5 |  |  |" in tables.gpu.memory()
    race = tables.gpu.accelerate()
    missing = "not measured | "
    assert f"| GPT-2 small | 400 ms | 2 | {missing * 3}4 | {missing * 2}8 | {missing}" in race
    assert "| whole step in a CUDA graph |" in race
    assert "- gpt, stock max-autotune: ended before it was told to" in race and "Not all of it has run" in race
