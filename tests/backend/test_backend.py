from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import oxytorch as ox
import pytest
import torch
from oxytorch import backend, cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def crate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outsider's device of tests/plugin, as a library."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("plugin") / "liboxytorch-backend-crate.so"
    source = ROOT / "tests" / "plugin" / "crate_backend.cpp"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", f"-I{ROOT / 'include'}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def by_name(backends: list[backend.BackendInfo]) -> dict[str, backend.BackendInfo]:
    return {entry["name"]: entry for entry in backends}


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, where nothing is loaded yet."""
    merged = {**os.environ, **environment}
    paths = [environment.get("PYTHONPATH", ""), str(Path(ox.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    merged["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return subprocess.run([sys.executable, "-c", code], env=merged, capture_output=True, text=True, check=False)


def test_built_in_backends_are_listed() -> None:
    found = ox.available_backends()
    scores = [entry["score"] for entry in found]
    assert scores == sorted(scores, reverse=True)
    cpu = by_name(found)["cpu"]
    assert cpu["score"] == 10
    assert cpu["origin"] == "built in"
    assert cpu["reason"] == "the host processor is always there"
    (device,) = cpu["devices"]
    assert device["torch_device"] == "cpu"
    assert device["memory_bytes"] > 2**26
    assert by_name(found)["sim"]["devices"][0]["torch_device"] == "sim"
    # The fake hpu of tests/device passes for a card.
    card = "hpu" if os.environ.get("OXYTORCH_DEVICE") == "hpu" else "cuda" if torch.cuda.is_available() else "cpu"
    assert backend.best() == card
    json.dumps(found)


def test_sim_takes_settings() -> None:
    backend.configure_sim("devices=3,memory=64MiB")
    try:
        devices = by_name(ox.available_backends())["sim"]["devices"]
        assert [device["memory_bytes"] for device in devices] == [64 << 20] * 3
    finally:
        backend.configure_sim("")
    with pytest.raises(ValueError, match="did you mean 'devices'"):
        backend.configure_sim("device=3")


def test_load_refuses_with_the_exception_a_user_expects(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no backend library"):
        backend.load(tmp_path / "absent.so")
    text = tmp_path / "text.so"
    text.write_text("not a library\n")
    with pytest.raises(NotImplementedError, match="cannot load the backend library"):
        backend.load(text)


def test_load_by_path_joins_the_list(crate: Path) -> None:
    assert backend.load(crate) == "crate"
    assert backend.load(str(crate)) == "crate"
    listed = by_name(ox.available_backends())["crate"]
    assert listed["origin"] == str(crate.resolve())
    assert listed["devices"][0]["name"] == "Crate of memory"
    second = crate.parent / "liboxytorch-backend-again.so"
    shutil.copy(crate, second)
    with pytest.raises(RuntimeError, match="a backend named 'crate' is registered already"):
        backend.load(second)


def test_search_path_and_a_device_that_is_missing(crate: Path, tmp_path: Path) -> None:
    shutil.copy(crate, tmp_path)
    broken = tmp_path / "liboxytorch-backend-broken.so"
    broken.write_text("not a library\n")
    code = (
        "import json, oxytorch as ox; from oxytorch import backend;"
        "print(json.dumps([ox.available_backends(), backend.problems()]))"
    )
    done = run_python(code, OXYTORCH_BACKEND_PATH=str(tmp_path), CRATE_MISSING="1")
    assert done.returncode == 0, done.stderr
    listed, problems = json.loads(done.stdout)
    assert by_name(listed)["crate"]["score"] == 0
    assert by_name(listed)["crate"]["reason"] == "no crate is plugged in (CRATE_MISSING is set)"
    assert by_name(listed)["crate"]["devices"] == []
    ((path, reason),) = problems
    assert path == str(broken)
    assert "cannot load the backend library" in reason
    assert "cannot load the backend library" in done.stderr


@pytest.fixture
def distribution(crate: Path, tmp_path: Path) -> Path:
    """A folder as an installed wheel leaves it: three entry points, one of them good."""
    (tmp_path / "outsider.py").write_text(
        f"library = {str(crate)!r}\ndef find():\n    return library\ndef number():\n    return 7\n"
    )
    metadata = tmp_path / "outsider-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[oxytorch.backends]\nabsent = no_such_module:find\ngood = outsider:find\nnumber = outsider:number\n"
    )
    return tmp_path


LIST_WITH_WARNINGS = """
import json, warnings
import oxytorch as ox
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    names = [entry["name"] for entry in ox.available_backends()]
    ox.available_backends()
print(json.dumps([names, [str(warning.message) for warning in caught]]))
"""


def test_entry_points_load_and_a_broken_one_is_a_warning(distribution: Path) -> None:
    done = run_python(LIST_WITH_WARNINGS, PYTHONPATH=str(distribution))
    assert done.returncode == 0, done.stderr
    names, warned = json.loads(done.stdout)
    assert "crate" in names
    assert len(warned) == 2, warned
    assert any("'absent' (no_such_module:find) is left out: No module named" in text for text in warned)
    assert any("'number' (outsider:number) is left out: it gives 7, not the path" in text for text in warned)


def test_autoload_can_be_switched_off(distribution: Path) -> None:
    done = run_python(LIST_WITH_WARNINGS, PYTHONPATH=str(distribution), OXYTORCH_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    names, warned = json.loads(done.stdout)
    assert "crate" not in names
    assert warned == []


def test_conformance_command(crate: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["conformance", str(crate), "--json"]) == 0
    verdict = json.loads(capfd.readouterr().out)
    assert verdict["backend"] == "crate"
    assert verdict["failed"] == 0
    assert verdict["passed"] > 20
    assert cli.main(["conformance", "sim", "--only", "copy.fill,memory.zero_bytes"]) == 0
    assert "2 checks: 2 passed" in capfd.readouterr().out
    assert cli.main(["conformance", "no-such-backend"]) == 2
    assert cli.main(["conformance", "--list"]) == 0
    assert "order.cross_queue" in capfd.readouterr().out
