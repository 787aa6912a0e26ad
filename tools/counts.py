"""One line of counts from the JUnit files in a folder: `ctest 120 passed, pytest 80 passed 1 skipped`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def outcome(case: ElementTree.Element) -> str:
    """What became of one test case."""
    return next((OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES), "passed")


parts = []
for report in sorted(Path(sys.argv[1]).glob("*.xml")):
    counted = Counter(outcome(case) for case in ElementTree.parse(report).iter("testcase"))
    said = [f"{counted[word]} {word}" for word in ("passed", "failed", "skipped") if counted[word]]
    parts.append(" ".join([report.stem, *(said or ["none"])]))
print(", ".join(parts))
