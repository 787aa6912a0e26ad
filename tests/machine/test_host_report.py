from __future__ import annotations

import json
from pathlib import Path

import oxytorch as ox
import pytest
from oxytorch import cli, machine


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


def test_this_host_by_info_and_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    rows = ox.info(host=True)["host"]
    assert "host" not in ox.info()
    assert {"cgroup memory limit", "open files"} <= {row["what"] for row in rows}
    found = int(any(row["verdict"] == "change" for row in rows))
    assert cli.main(["info", "--host", "--json"]) == found
    assert [row["what"] for row in json.loads(capsys.readouterr().out)] == [row["what"] for row in rows]
    assert cli.main(["info", "--host", "/"]) == found
    assert "cgroup memory limit" in capsys.readouterr().out
