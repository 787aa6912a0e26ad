"""One line of counts from JUnit files: `ctest 120 passed, pytest 80 passed 1 skipped`.

A test that is a suite of a program counts as the tests that its own report lists: ctest.xml's are in ctest-suites/.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def outcome(case: ElementTree.Element) -> str:
    """What became of one test case."""
    return next((OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES), "passed")


def cases(report: Path) -> list[ElementTree.Element]:
    """Test cases of a report, a suite's own in the place of the one that ran it, unless it ended before it wrote them."""
    suites = report.with_name(f"{report.stem}-suites")
    found: list[ElementTree.Element] = []
    for case in ElementTree.parse(report).iter("testcase"):
        own = suites / f"{case.get('name', '').replace('/', '-')}.xml"
        found += ElementTree.parse(own).iter("testcase") if own.is_file() else [case]
    return found


parts = []
for report in sorted(Path(sys.argv[1]).glob("*.xml")):
    counted = Counter(outcome(case) for case in cases(report))
    said = [f"{counted[word]} {word}" for word in ("passed", "failed", "skipped") if counted[word]]
    parts.append(" ".join([report.stem, *(said or ["none"])]))
print(", ".join(parts))
