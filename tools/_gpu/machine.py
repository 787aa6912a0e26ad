"""The machine that the slices run on: its device, the torch of its Python, where the build goes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "build" / "gpu-pack"
SOURCES = ("CMakeLists.txt", "CMakePresets.json", "cmake", "src", "include", "backends", "bindings", "bench",
           "conformance", "examples", "tests", "python")  # fmt: skip
ASIDE = ("bench/results/", "bench/report/", "python/oxytorch/lib/", "python/oxytorch/bin/",
         "python/oxytorch/_build_info.py")  # fmt: skip
"""Below those, but not read by the build: results, and what builds write beside the sources."""
ASK_TORCH = """
import json, platform, sys, torch
said = {"torch": torch.__version__, "CUDA": torch.version.cuda}
said |= {"python": platform.python_version(), "prefix": sys.prefix}
if torch.cuda.is_available():
    card = torch.cuda.get_device_properties(0)
    said |= {"GPU": card.name, "capability": f"{card.major}.{card.minor}"}
    said["memory"] = f"{card.total_memory / 2**30:.0f} GiB"
print(json.dumps(said))
"""


class Unusable(RuntimeError):
    """What was asked for cannot run on this machine; the message says why and what to do."""


@dataclass(frozen=True)
class Machine:
    """What the parts need to know of it."""

    device: str
    """``cuda``, ``cpu``, or ``fake``: the CUDA backend on the fake driver of tests/cuda."""
    quick: bool
    python: str
    preset: str
    build: Path
    cores: int
    results: Path
    work: Path
    """Logs, caches and reports of programs; kept from slice to slice."""
    environment: dict[str, str] = field(repr=False)
    facts: dict[str, str]

    def step(self, *command: str | Path) -> list[str]:
        """Return the command with this build's environment and sources first."""
        return [str(ROOT / "tools/run.sh"), *(str(part) for part in command)]


def output(*command: str) -> str:
    """Return what a program prints, "" where there is no such program or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def cpu_name() -> str:
    """Return the processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def nvcc() -> str:
    """Return the CUDA compiler that the build will find, "" where there is none."""
    named = [f"{os.environ[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found = (shutil.which(each) for each in [*named, "nvcc", "/usr/local/cuda/bin/nvcc"])
    return next((each for each in found if each), "")


def default_python() -> str:
    """Return the .venv of `make setup` where there is one, else the machine's own Python."""
    ours = ROOT / ".venv/bin/python3"
    return str(ours) if ours.exists() else shutil.which("python3") or sys.executable


def ask_torch(python: str) -> dict[str, Any]:
    """Return what its torch says of itself and of the card."""
    done = subprocess.run([python, "-c", ASK_TORCH], capture_output=True, text=True)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise Unusable(f"{python} has no torch that works ({why}). Name one that has with --python, or run make setup.")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def steps_of(torch: str, prefix: str, environment: dict[str, str]) -> dict[str, str]:
    """Add what tools/environment.sh needs to build with this torch; the variables that it then chooses."""
    environment["OXYTORCH_TORCH_SPEC"] = f"torch=={torch.partition('+')[0]}"
    if Path(prefix) != ROOT / ".venv":
        environment["OXYTORCH_VENV"] = prefix
    script = f"source {ROOT}/tools/environment.sh; echo $PRESET; echo $BUILD"
    said = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    return dict(zip(("preset", "build"), said.stdout.split("\n"), strict=False))


def with_pack(environment: dict[str, str]) -> None:
    """Let CMake, the loader and Python look into build/gpu-pack too."""
    if not PACK.is_dir():
        return
    libraries = [str(path) for path in (PACK / "usr/lib").glob("*-linux-gnu")]

    def add(name: str, *folders: str) -> None:
        environment[name] = os.pathsep.join(filter(None, [environment.get(name, ""), *folders]))

    if not shutil.which("pkg-config"):
        environment.setdefault("PKG_CONFIG", str(PACK / "usr/bin/pkgconf"))
    add("CMAKE_PREFIX_PATH", str(PACK / "usr"))
    add("LD_LIBRARY_PATH", *libraries)
    add("PYTHONPATH", str(PACK / "python"))


def packed_revision() -> str:
    """Return the revision that the pack was made at, for a copy of the tree without its history."""
    path = PACK / "revision"
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def find(device: str, quick: bool, python: str | None, results: Path | None) -> Machine:
    """Look at this machine; raise `Unusable` where it cannot run what was asked for."""
    python = python or default_python()
    said = ask_torch(python)
    if device == "cuda" and "GPU" not in said:
        built = f"torch {said['torch']} is built without CUDA" if not said["CUDA"] else "torch finds no CUDA device"
        raise Unusable(
            f"there is no CUDA device to run on: {built}. Rehearse with --device cpu or --device fake; --pack collects "
            "what a GPU machine without a network needs."
        )
    if device == "cuda" and not nvcc():
        raise Unusable("there is no nvcc, so the CUDA kernels cannot be built: put it on PATH or set CUDA_HOME")
    environment = {key: value for key, value in os.environ.items() if key not in ("OXYTORCH_ISA", "MAKEFLAGS")}
    environment["PYTHONUNBUFFERED"] = "1"
    with_pack(environment)
    steps = steps_of(said["torch"], said["prefix"], environment)
    facts = {key: str(value) for key, value in said.items() if key != "prefix" and value}
    if "GPU" in said:
        facts["driver"] = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    facts["nvcc"] = next((line for line in output(nvcc(), "--version").splitlines() if "release" in line), "")
    facts |= {"cpu": cpu_name(), "cores": str(len(os.sched_getaffinity(0))), "system": platform.platform(terse=True)}
    facts["compiler"] = output("c++", "--version").partition("\n")[0]
    facts["revision"] = output("git", "-C", str(ROOT), "describe", "--always", "--dirty") or packed_revision()
    small = quick or device != "cuda"
    # A rehearsal must not be taken for a result.
    rehearsal = ROOT / "build/gpu" / (device + ("-quick" if device == "cuda" else ""))
    return Machine(
        device=device,
        quick=small,
        python=python,
        preset=steps["preset"],
        build=Path(steps["build"]),
        cores=len(os.sched_getaffinity(0)),
        results=results or (rehearsal if small else ROOT / "bench/results/gpu"),
        work=ROOT / "build/gpu" / device / "work",
        environment=environment,
        facts={key: value for key, value in facts.items() if value},
    )


def source_files() -> list[Path]:
    """Return all that the build reads of this tree."""
    found: list[Path] = []
    for path in [*(ROOT / name for name in SOURCES), PACK]:
        if path.is_file():
            found.append(path)
        for file in path.rglob("*") if path.is_dir() else ():
            name = file.relative_to(ROOT).as_posix()
            aside = name.startswith(ASIDE) or "__pycache__" in name or ".so" in file.suffixes
            if file.is_file() and (not aside or path == PACK):
                found.append(file)
    return sorted(found)


def keep_times(build: Path) -> None:
    """Give files that did not change the times they had in the last build, so that ninja goes on from there.

    A tree that is copied to the machine before each command has new times and the same contents.
    """
    record = build / ".source-times.json"
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    now = {}
    for path in source_files():
        name = path.relative_to(ROOT).as_posix()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        known = before.get(name)
        if known and known[0] == digest and known[1] != path.stat().st_mtime_ns:
            os.utime(path, ns=(known[1], known[1]))
        now[name] = [digest, path.stat().st_mtime_ns]
    build.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(now), encoding="utf-8")


def sources_digest() -> str:
    """Return one hash of all that the build reads."""
    whole = hashlib.sha256()
    for path in source_files():
        whole.update(path.relative_to(ROOT).as_posix().encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()
