"""docs/systems.md has a row for each id, and what a row names is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("reads the pages")

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "systems.md"
COUNTS = {"G": 12, "H": 8, "T": 12, "L": 12, "P": 12}
IDS = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and (cells := [cell.strip() for cell in line.strip("| ").split(" | ")])
}


def test_every_id_has_one_row_and_no_other_has() -> None:
    listed = re.findall(r"^\| ([A-Z]\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert listed == IDS


@pytest.mark.parametrize("row", IDS)
def test_what_a_row_names_is_there(row: str) -> None:
    _, call, *rest = [*ROWS[row], "", ""]
    if call.rstrip(" |") == "*planned*":
        return
    test, page = rest[0], rest[1]
    files = re.findall(r"`(tests/[^`]+)`", test)
    pages = re.findall(r"\]\(([^)#]+)", page)
    names = re.findall(r"`oxytorch((?:\.\w+)+)", call)
    assert files and pages and (names or "`" in call), f"{row}: a built row names what to call, a test and a page"
    assert all((ROOT / name).exists() for name in files), f"{row}: {files}"
    assert all((PAGE.parent / name).is_file() for name in pages), f"{row}: {pages}"
    for name in names:
        found: object = importlib.import_module("oxytorch")
        for part in name.strip(".").split("."):
            found = getattr(found, part)
