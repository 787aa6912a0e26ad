"""Compile the files that touch Gaudi, and those of src/optim/torch_versions.h, against other torch versions' headers.

The headers come out of a wheel of another system, since that is the smallest; nothing is installed and nothing linked.
They are kept in build/torch-headers. Exit status: 0 all compile, 1 one does not, 75 the headers cannot be had here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build" / "torch-headers"
BACKEND = "backends/hpu/torch_device.cpp"
FAKE = ("tests/device/torch_device.cpp", "tests/device/torch_operators.cpp", "tests/device/torch_autocast.cpp")
# Gaudi's software 1.23 brings torch 2.9.
# What src/optim/torch_versions.h makes good is in these.
DIFFERING = (
    "src/optim/device_tail.cpp",
    "src/trainer/step_graph.cpp",
    "src/accelerator/float32_precision.cpp",
    "src/tune/training_step.cpp",
    "src/tune/operators.cpp",
)
FILES = dict.fromkeys(("2.11.0", "2.9.1"), (BACKEND, *FAKE, *DIFFERING))
CANNOT = 75


def headers(version: str) -> Path:
    """Return the include folder of a torch version, downloaded once."""
    found = KEPT / version / "torch" / "include"
    if (KEPT / version / "whole").exists():
        return found
    platforms = [word for name in ("macosx_11_0_arm64", "macosx_14_0_arm64") for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", *platforms, "--python-version", "311", "--dest", str(KEPT), f"torch=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    wheels = list(KEPT.glob(f"torch-{version}-*.whl"))
    if done.returncode != 0 or not wheels:
        raise OSError((done.stderr.strip().splitlines() or ["pip gives no reason"])[-1])
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(KEPT / version, [name for name in wheel.namelist() if name.startswith("torch/include/")])
    wheels[0].unlink()
    (KEPT / version / "whole").touch()
    return found


def compiles(file: str, include: Path) -> bool:
    """Whether a file compiles against the headers; the compiler's words go to the screen."""
    own = [f"-I{ROOT / folder}" for folder in ("", "include", "src", "tests")]
    foreign = ["-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
    if file in DIFFERING:
        flags += ["-include", "torch/torch.h"]  # the library's precompiled header
    return subprocess.run(["c++", *flags, *own, *foreign, str(ROOT / file)], check=False).returncode == 0


def main() -> int:
    """Compile what was asked for."""
    parser = argparse.ArgumentParser(description="compile files against the headers of other torch versions")
    parser.add_argument("--quick", action="store_true", help="the backend against the newest of them alone")
    quick = parser.parse_args().quick
    KEPT.mkdir(parents=True, exist_ok=True)
    good = True
    for version, files in list(FILES.items())[: 1 if quick else None]:
        try:
            include = headers(version)
        except (OSError, subprocess.TimeoutExpired) as why:
            print(f"headers: torch {version} cannot be had here: {why}")
            return CANNOT
        for file in files[: 1 if quick else None]:
            fits = compiles(file, include)
            print(f"headers: {file} {'compiles' if fits else 'DOES NOT COMPILE'} against torch {version}", flush=True)
            good = good and fits
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
