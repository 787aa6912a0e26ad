"""Collects in build/gpu-pack what a GPU machine without a network may lack: Debian's libraries, and Python packages.

The libraries are those that `make setup` installed here, which run under any glibc that is not older. The folder has to
travel with the tree; `make gpu` uses it where it is there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from .machine import PACK, ROOT, Unusable, output

LIMIT = 48 << 20
"""Bytes; more would not travel with a tree of a few MiB within 64."""
TOOLS = {"build-essential", "ccache", "doxygen", "googletest", "python3-dev", "python3-venv"}
"""What a machine with nvcc has, or does without."""
SYSTEM = ("libc6", "libc-dev", "libgcc", "libstdc++")
"""A compiler brings them."""
KEPT = ("usr/bin/pkg", "usr/include/", "usr/lib/", "usr/share/cmake/")
WHEELS = ("pytest-xdist", "expecttest", "lion-pytorch", "pytorch-optimizer", "bitsandbytes", "torchao")
"""Of pyproject.toml's extras, what images with torch rarely have."""
PYTHON, PLATFORMS = "3.12", ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")
DROPPED = ("*_rocm*.so", "*_xpu*.so", "*_cuda11*.so", "*_cuda12*.so", "_C_cutlass*.so", "_C_mxfp8*.so")
"""Libraries of other cards and of CUDA before 13, and kernels that no test uses."""


def listed(path: Path) -> list[str]:
    """Lines that are no comments."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def with_libraries(packages: Iterable[str]) -> list[str]:
    """The packages and those of their needs that are libraries beside the system's own."""
    found: dict[str, None] = {}
    todo = list(packages)
    while todo:
        name = todo.pop(0)
        if name in found or name in TOOLS:
            continue
        found[name] = None
        for need in output("dpkg-query", "-W", "-f", "${Depends}", name).split(","):
            word = need.split("|")[0].split("(")[0].strip().partition(":")[0]
            if word.startswith(("lib", "zlib", "pkgconf")) and not word.startswith(SYSTEM):
                todo.append(word)
    return list(found)


def copy_package(name: str) -> int:
    """Copy a package's headers and libraries into the pack; how many files."""
    files = output("dpkg-query", "-L", name).splitlines()
    if not files:
        raise Unusable(f"the Debian package {name} is not installed here: run make setup")
    count = 0
    for line in files:
        source, inside = Path(line), line.lstrip("/")
        twice = source.suffix == ".a" and source.with_suffix(".so").exists()
        if inside.startswith(KEPT) and not twice and (source.is_symlink() or source.is_file()):
            target = PACK / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
            count += 1
    return count


def make_relocatable() -> None:
    """Let pkg-config find headers and libraries in the pack, wherever it lies."""
    for path in (PACK / "usr/lib").rglob("pkgconfig/*.pc"):
        text = path.read_text(encoding="utf-8", errors="replace")
        top = "${pcfiledir}/" + os.path.relpath(PACK / "usr", path.parent)
        path.write_text(re.sub(r"(?<![\w}])/usr(?=/|$)", top, text, flags=re.MULTILINE), encoding="utf-8")


def fetch_wheels(python: str) -> None:
    """Unpack the Python packages into the pack."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    extras = subprocess.run(
        [python, str(ROOT / "tools/extras.py"), "test", "peers"], capture_output=True, text=True, check=True
    )
    wanted = [line for line in extras.stdout.splitlines() if line.split(">")[0].split("=")[0] in WHEELS]
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]
    done = subprocess.run([*command, "--target", str(PACK / "python"), *wanted])
    if done.returncode != 0:
        print("pip could not fetch all of them: tests that compare with other libraries will fail there")
    for pattern in DROPPED:
        for path in (PACK / "python").rglob(pattern):
            path.unlink()
    shutil.rmtree(PACK / "python/test", ignore_errors=True)  # torchao's own


def size(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


def main(python: str) -> int:
    """Make the pack anew."""
    shutil.rmtree(PACK, ignore_errors=True)
    (PACK / "python").mkdir(parents=True)
    wanted = [name for name in listed(ROOT / "cmake/apt-packages.txt") if name not in TOOLS]
    packages = with_libraries(wanted)
    files = sum(copy_package(name) for name in packages)
    make_relocatable()
    print(f"{files} files of {', '.join(packages)}")
    fetch_wheels(python)
    (PACK / "revision").write_text(output("git", "-C", str(ROOT), "describe", "--always", "--dirty"), encoding="utf-8")
    taken = size(PACK)
    if taken > LIMIT:
        raise Unusable(f"{PACK.relative_to(ROOT)} has {taken / 2**20:.0f} MiB, and at most {LIMIT >> 20} can travel")
    print(f"{PACK.relative_to(ROOT)}: {taken / 2**20:.0f} MiB; take it along with the tree, then run make gpu there")
    return 0
