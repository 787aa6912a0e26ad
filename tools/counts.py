"""One line of counts from the JUnit files in a folder: `ctest 120 passed, pytest 80 passed 1 skipped`.

A test that is a suite of a program counts as the tests that its own report lists: ctest.xml's are in ctest-suites/.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def outcome(case: ElementTree.Element) -> str:
    """What became of one test case."""
    if case.get("status") in ("notrun", "disabled"):
        return "skipped"
    return next((OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES), "passed")


def cases(report: Path, suites: Path) -> Iterator[ElementTree.Element]:
    """Test cases of a report; a suite's own, from the folder `suites`, in the place of the one that ran it.

    A suite that ended before it wrote any stays one case.
    """
    for case in ElementTree.parse(report).iter("testcase"):
        own = suites / f"{case.get('name', '').replace('/', '-')}.xml"
        if own.is_file():
            yield from ElementTree.parse(own).iter("testcase")
        else:
            yield case


def main() -> None:
    """Print the line."""
    parts = []
    for report in sorted(Path(sys.argv[1]).glob("*.xml")):
        counted = Counter(outcome(case) for case in cases(report, report.with_name(f"{report.stem}-suites")))
        said = [f"{counted[word]} {word}" for word in ("passed", "failed", "skipped") if counted[word]]
        parts.append(" ".join([report.stem, *(said or ["none"])]))
    print(", ".join(parts))


if __name__ == "__main__":
    main()
