from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oxytorch as ox
import pytest
from oxytorch import cli, machine
from oxytorch._C import base as native


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A container on a machine with swap and one NVMe device."""
    files = {
        "proc/meminfo": "MemTotal: 33554432 kB\nSwapTotal: 1048576 kB\n",
        "proc/sys/vm/swappiness": "60\n",
        "proc/self/mountinfo": "31 22 0:27 / /dev/shm rw - tmpfs shm rw,size=65536k\n",
        "sys/block/nvme0n1/queue/scheduler": "none [mq-deadline]\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_rows_of_another_machine(tree: Path) -> None:
    rows = {row["what"]: row for row in machine.host_report(root=tree)}
    change = {what for what, row in rows.items() if row["verdict"] == "change"}
    assert change == {"swappiness", "/dev/shm", "scheduler of nvme0n1"}
    assert rows["swappiness"] == {
        "area": "memory",
        "what": "swappiness",
        "where": "/proc/sys/vm/swappiness",
        "value": "60, 1.00 GiB of swap",
        "verdict": "change",
        "suggestion": "10",
        "why": rows["swappiness"]["why"],
        "command": "sysctl -w vm.swappiness=10",
        "needs_root": True,
    }
    text = machine.host_report_text(root=tree)
    assert all(rows[what]["command"] in text for what in change)
    before = {path: path.read_text() for path in tree.rglob("*") if path.is_file()}
    machine.host_report(root=tree)
    assert before == {path: path.read_text() for path in tree.rglob("*") if path.is_file()}


@pytest.fixture
def alone() -> Iterator[Callable[..., None]]:
    """No other program is seen; or those are that it is called with."""
    native.set_neighbours(0.0)
    yield native.set_neighbours
    native.set_neighbours(None)


def test_programs_on_the_same_cores_are_named(alone: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)

    def row() -> Any:
        return next(row for row in machine.host_report() if row["what"] == "other programs")

    assert (row()["verdict"], row()["value"]) == ("fine", "0.0 of 2 cores")
    alone(1.9)
    assert row()["verdict"] == "change"
    assert row()["value"] == "1.9 of 2 cores: python3 (pid 77, 4 threads) 1.9"
    assert row()["command"] == "export OMP_WAIT_POLICY=passive" and not row()["needs_root"]
    assert "spin" in row()["why"] and "taskset" in row()["why"]
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert row()["verdict"] == "reported" and "spin" not in row()["why"] and "taskset" in row()["why"]


@pytest.mark.usefixtures("alone")
def test_this_host_by_info_and_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    rows = ox.info(host=True)["host"]
    assert "host" not in ox.info()
    assert {"cgroup memory limit", "open files"} <= {row["what"] for row in rows}
    found = int(any(row["verdict"] == "change" for row in rows))
    assert cli.main(["info", "--host", "--json"]) == found
    assert [row["what"] for row in json.loads(capsys.readouterr().out)] == [row["what"] for row in rows]
    assert cli.main(["info", "--host", "/"]) == found
    assert "cgroup memory limit" in capsys.readouterr().out
