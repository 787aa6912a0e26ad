"""Which test runs which line of the package: a plugin of pytest that notes it, and the reader of its record.

python tests/mutation/run.py --reach
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = "build/mutation/reached"


def tests_of_line(root: Path, path: str, line: int) -> dict[str, float] | None:
    """Return the tests that run the statement at a line, with their seconds.

    None where no record knows: the file is not in one, or the statement is run by an import. Empty: no test of the
    recorded modules runs it.
    """
    records = [read(file) for file in sorted((root / FOLDER).glob("*/reached.json"))]
    known = [record for record in records if path in record["lines"]]
    if not known:
        return None
    around = [
        node
        for node in ast.walk(ast.parse((root / path).read_text()))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno < line for node in around):
        return None
    first = max(node.lineno for node in around)
    found: dict[str, float] = {}
    for record in known:
        for number in range(first, line + 1):
            tests = record["lines"][path].get(str(number), [])
            found |= {test: record["seconds"].get(test, 0.0) for test in tests}
    return found


def is_recorded(root: Path, path: str) -> bool:
    """Whether there is a record of the tests of a file's own module."""
    return (root / FOLDER / Path(path).parts[2].removesuffix(".py") / "reached.json").exists()


@functools.cache
def read(file: Path) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Read a record of `Reached`."""
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the folder that the record is written to."""
    parser.addoption("--reached", required=True, type=Path)


def pytest_configure(config: pytest.Config) -> None:
    """Begin before the package is imported."""
    config.pluginmanager.register(Reached(config.getoption("--reached"), config.rootpath))


class Reached:
    """Lines by test, over one run of pytest."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        import coverage

        self.coverage = coverage.Coverage(
            data_file=str(folder / "coverage.db"), include=[str(root / "python" / "oxytorch" / "*")], config_file=False
        )
        self.coverage.erase()
        self.coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Lines that run from here to the test's end are its own."""
        self.coverage.switch_context(item.nodeid)
        yield
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what it took; a test that fails without a fault shows nothing."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        self.coverage.stop()
        self.coverage.save()
        data = self.coverage.get_data()
        lines: dict[str, dict[int, list[str]]] = {}
        for file in data.measured_files():
            path = Path(file).relative_to(self.root).as_posix()
            lines[path] = {
                line: sorted(test for test in tests if test and test not in self.failed)
                for line, tests in data.contexts_by_lineno(file).items()
            }
        record = {"seconds": self.seconds, "failed": sorted(self.failed), "lines": lines}
        (self.folder / "reached.json").write_text(json.dumps(record))
