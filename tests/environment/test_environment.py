"""The registry, the judge and the presets from Python, and the commands on them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import oxytorch as ox
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oxytorch import cli, environment
from oxytorch._C import base as native

ROOT = Path(__file__).resolve().parents[2]
SEVERITIES = {"note", "warning", "error"}
VERDICTS = {"unknown", "obsolete", "harmful", "contradicting", "bad value"}


def verdicts(issues: list[environment.EnvironmentIssue]) -> dict[str, str]:
    return {one.name: one.verdict for one in issues}


def test_the_registry_is_a_table() -> None:
    rows = environment.settings()
    assert len({row.name for row in rows}) == len(rows) > 900
    assert all(row.what and row.evidence and row.allowed for row in rows)
    families = {row.family for row in rows}
    assert families == {
        "cuda", "nccl", "fabric", "gaudi", "openmp", "allocator", "pytorch", "onednn", "mkl", "gloo", "launcher",
    }  # fmt: skip
    pool = next(row for row in rows if row.name == "PT_HPU_POOL_STRATEGY")
    assert (pool.kind, pool.choices, pool.default) == ("choice", ["0", "4"], "4")


def test_it_holds_what_the_data_files_name() -> None:
    files = (ROOT / "src" / "environment" / "settings").glob("*.yaml")
    names = [name for file in files for name in re.findall(r"^  (\w+):$", file.read_text(), re.MULTILINE)]
    assert sorted(names) == sorted(row.name for row in environment.settings())


def test_torchs_own_names_are_in_it() -> None:
    """What the installed torch reads, by its own headers and sources: no name of ours may have gone."""
    package = Path(ox.environment.torch.__file__).parent
    header = (package / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp").read_text()
    known = {row.name for row in environment.settings()}
    assert set(re.findall(r'"(TORCH_NCCL_\w+)"', header)) <= known
    config = (package / "_inductor" / "config.py").read_text() + (package / "_dynamo" / "config.py").read_text()
    config += (package / "_inductor/runtime/runtime_utils.py").read_text()
    everywhere = subprocess.run(
        ["grep", "-rhoE", "TORCH(INDUCTOR|DYNAMO)_[A-Z0-9_]+", "--include=*.py", str(package)],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    ours = {name for name in known if name.startswith(("TORCHINDUCTOR_", "TORCHDYNAMO_"))}
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):  # an older one has not all of them yet
        assert ours <= set(everywhere)


def test_issues_say_what_where_and_why() -> None:
    (one,) = environment.lint_env({"NCCL_MIN_NRINGS": "8", "PATH": "/bin"})
    assert (one.verdict, one.severity, one.replacement, one.line) == ("obsolete", "warning", "NCCL_MIN_CTAS", 0)
    assert str(one).startswith("warning: NCCL_MIN_NRINGS=8 ")
    assert "NCCL" in one.evidence


def test_context_decides() -> None:
    rdma = {"FI_EFA_USE_DEVICE_RDMA": "1", "RDMAV_FORK_SAFE": "1"}
    assert environment.lint_env(rdma, backend="hpu") == []
    assert verdicts(environment.lint_env(rdma, backend="cuda")) == dict.fromkeys(rdma, "harmful")
    assert environment.lint_env({"NCCL_PROTO": "simple"}, versions={"aws-ofi-nccl": "1.5.0"}) == []
    lazy = {"PT_HPU_LAZY_MODE": "1"}
    assert environment.lint_env(lazy) == []
    assert verdicts(environment.lint_env(lazy, compile=True)) == {"PT_HPU_LAZY_MODE": "contradicting"}
    (fine,) = environment.lint_env(lazy, fine=True)
    assert fine.verdict == "fine" and "lazy mode" in fine.message
    with pytest.raises(ValueError, match="no backend 'tpu'"):
        environment.lint_env({}, backend="tpu")
    with pytest.raises(ValueError, match="versions of ncl"):
        environment.lint_env({}, versions={"ncl": "2"})


def test_this_process_is_judged_by_what_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4000")
    monkeypatch.setenv("KMP_BLOCKTIME", "1")
    found = {one.name: one for one in environment.lint_env()}
    assert found["OMP_NUM_THREADS"].verdict == "harmful"
    assert found["KMP_BLOCKTIME"].severity == "warning"  # torch's wheel has loaded libgomp


def test_programs_on_the_same_cores_are_an_issue(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def found() -> list[environment.EnvironmentIssue]:
        return [one for one in environment.lint_env() if one.name == "OMP_WAIT_POLICY"]

    try:
        native.set_neighbours(0.2)
        assert found() == []
        native.set_neighbours(1.9)
        (one,) = found()
        assert (one.severity, one.verdict, one.replacement) == ("warning", "harmful", "passive")
        assert "1.9 of 2 cores: python3 (pid 77, 4 threads) 1.9" in one.message and "taskset" in one.message
        monkeypatch.setenv("OMP_WAIT_POLICY", "active")
        (one,) = found()
        assert one.value == "active" and "OMP_WAIT_POLICY=active" in one.message
        for name, value in (("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "0")):
            monkeypatch.setenv(name, value)
            assert found() == []
            monkeypatch.delenv(name)
        assert environment.lint_env({}) == []  # another environment, maybe another machine
    finally:
        native.set_neighbours(None)


def test_a_plain_environment_gets_no_issue() -> None:
    clean = subprocess.run(["env", "-i", "bash", "-lc", "env -0"], capture_output=True, text=True, check=True).stdout
    plain = dict(entry.split("=", 1) for entry in clean.split("\0") if "=" in entry)
    for backend in (None, "cuda", "hpu", "cpu"):
        assert environment.lint_env(plain, backend=backend, cores=1) == []


def test_scripts_are_judged_by_line(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("export NCCL_DEBUG=WARN\nexport NCCL_P2P_DISABLE=1 # why?\nNCCL_MIN_NRING=2 srun python x\n")
    found = environment.lint_file(script)
    assert [(one.line, one.name, one.verdict) for one in found] == [
        (2, "NCCL_P2P_DISABLE", "harmful"),
        (3, "NCCL_MIN_NRING", "unknown"),
    ]
    assert str(found[0]).startswith(f"{script}:2: warning: ")
    environ = tmp_path / "environ"
    environ.write_bytes(b"PATH=/bin\0NCCL_P2P_DISABLE=1\0ODD=\xff\0")
    assert verdicts(environment.lint_file(environ)) == {"NCCL_P2P_DISABLE": "harmful"}
    with pytest.raises(FileNotFoundError):
        environment.lint_file(tmp_path / "none.sh")


def test_lint_env_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.sh"
    bad.write_text("export PT_HPU_POOL_STRATEGY=OPTIMIZE\n")
    assert cli.main(["lint-env", str(bad)]) == 1
    shown = capsys.readouterr().out
    assert f"{bad}:1: error: PT_HPU_POOL_STRATEGY=OPTIMIZE" in shown and "1 error in" in shown
    assert cli.main(["lint-env", "--json", str(bad)]) == 1
    (one,) = json.loads(capsys.readouterr().out)["issues"]
    assert (one["verdict"], one["file"], one["line"]) == ("bad value", str(bad), 1)

    note = tmp_path / "note.sh"
    note.write_text("export NCCL_DEBUG=INFO\n")
    assert cli.main(["lint-env", str(note)]) == 0
    assert "1 note" in capsys.readouterr().out
    rdma = tmp_path / "rdma.sh"
    rdma.write_text("export FI_EFA_USE_DEVICE_RDMA=1 RDMAV_FORK_SAFE=1\n")
    assert [cli.main(["lint-env", str(rdma), "--backend", name]) for name in ("cuda", "hpu", "cpu")] == [1, 0, 0]
    assert cli.main(["lint-env", str(rdma), "--backend", "cuda", "--version-of", "aws-ofi-nccl=1.6.0"]) == 1
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert cli.main(["lint-env"]) == 1
    capsys.readouterr()

    assert cli.main(["lint-env", str(tmp_path / "none.sh")]) == 2
    assert "none.sh" in capsys.readouterr().err
    assert cli.main(["lint-env", str(bad), "--version-of", "what=1"]) == 2
    with pytest.raises(SystemExit) as exit_:
        cli.main(["lint-env", "--version-of", "2.27"])
    assert exit_.value.code == 2


@pytest.mark.parametrize("goal", ["throughput", "latency"])
@pytest.mark.parametrize("device", ["cuda", "hpu", "cpu"])
def test_presets_hold_before_the_judge(
    goal: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = environment.preset(goal, device, cores=32, processes=4, efa=True, jemalloc=True, recipe_cache=tmp_path)
    assert made.settings and all(one.reason and one.evidence for one in made.settings)
    assert environment.lint_env(made.as_dict(), backend=device, cores=32, compile=True, openmp="libgomp") == []
    argv = ["preset", goal, "--device", device, "--cores", "32", "--processes", "4"]
    assert cli.main(argv) == 0
    script = tmp_path / "preset.sh"
    script.write_text(capsys.readouterr().out)
    assert environment.lint_file(script, backend=device) == []
    # A real shell reads the text to the same values.
    names = environment.preset(goal, device, cores=32, processes=4).as_dict()
    show = subprocess.run(
        ["bash", "-c", f". {script}; env -0"], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=True
    ).stdout
    read = dict(entry.split("=", 1) for entry in show.split("\0") if "=" in entry)
    assert {name: read.get(name) for name in names} == names
    assert cli.main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["goal"] == goal


def test_presets_refuse() -> None:
    for wrong in ({"goal": "speed"}, {"device": "tpu"}, {"cores": 0}, {"processes": 0}, {"recipe_cache": "a,b"}):
        with pytest.raises(ValueError):
            environment.preset(**{"goal": "latency", "device": "cpu", **wrong})  # type: ignore[arg-type]
    assert cli.main(["preset", "latency", "--device", "cpu", "--cores", "0"]) == 2


def test_the_documentation_writes_the_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("breathe") is None:
        pytest.skip("the site's own packages are not installed")
    source = (ROOT / "docs" / "conf.py").read_text()
    made: dict[str, object] = {"__file__": str(tmp_path / "docs" / "conf.py"), "DOCS": tmp_path}
    body = source[source.index("def write(") : source.index("\nwritten = ")]
    exec("from __future__ import annotations\n" + body, made)
    made["write_settings"]()  # type: ignore[operator]
    page = (tmp_path / "api" / "generated" / "environment-settings.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(row.name for row in environment.settings())


NAMES = [row.name for row in environment.settings()]
VALUES = st.one_of(
    st.text(max_size=30),
    st.text("0123456789,:-{}[]()>!.kMG =", max_size=20),
    st.sampled_from(["0", "1", "true", "TRACE", "close", "cores", "expandable_segments:True", ":4096:8", "efa"]),
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=20)), VALUES, max_size=8))
def test_any_environment_is_judged(mapping: dict[str, str]) -> None:
    for one in environment.lint_env(mapping, cores=4):
        assert one.name in mapping and one.value == mapping[one.name]
        assert one.verdict in VERDICTS and one.severity in SEVERITIES
        assert one.message


SHELL = st.lists(
    st.one_of(
        st.sampled_from(["export ", "A=", "$", "${", "}", "(", ")", "'", '"', "`", "\\", "\n", " ", "#", "<<E", "E\n",
                         ";", "#SBATCH --export=", "env ", "unset ", ":-", "NCCL_DEBUG=TRACE", "\x00", "&&", "|", ">"]),
        st.text(max_size=4),
    ),
    max_size=30,
).map("".join)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(SHELL)
def test_any_text_is_read(text: str) -> None:
    for one in environment.lint_script(text, "x"):
        assert 1 <= one.line <= text.count("\n") + 1


PLAIN = st.text("abcXYZ019_./,:=- #'\"$`\\;&|<>()", max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["A", "B_1", "NCCL_DEBUG"]), PLAIN, min_size=1))
def test_what_is_quoted_for_a_shell_is_read_back(mapping: dict[str, str]) -> None:
    """`shlex.quote` is the referee: bash reads its text as we must."""
    import shlex

    text = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in mapping.items())
    read = ox._C.environment.read_script(text)
    assert {one["name"]: one["value"] for one in read} == mapping


@settings(max_examples=40, deadline=None)
@given(st.text("AB=$' \"\\\n;x{}:-#1", max_size=24))
def test_bash_agrees_with_the_reader(tail: str) -> None:
    """Whatever assignments of A we call certain, bash makes too, where it accepts the script."""
    script = f"A=1\n{tail}\n"
    ran = subprocess.run(
        ["bash", "--norc", "-c", script + '\nprintf "\\1%s" "$A"'], capture_output=True, env={}, check=False, timeout=10
    )
    if ran.returncode != 0 or ran.stderr or b"\1" not in ran.stdout:
        return
    value: str | None = None
    for one in ox._C.environment.read_script(script):
        if one["name"] == "A" and one["scope"] == 0:
            value = one["value"] if one["exact"] and not one["removed"] else None
    if value is not None:
        assert ran.stdout.rpartition(b"\1")[2].decode() == value
