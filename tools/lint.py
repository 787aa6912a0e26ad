"""Formats, types and static analysis. `--fix` lets the formatters write and renews the stubs of oxytorch._C.

clang-tidy reads the torch-free units only: a unit that includes LibTorch takes it over half a minute. A unit found
clean is remembered by the hash of all it read, so a second run costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "dev"
CACHE = ROOT / "build" / "clang-tidy-clean"
FIX = "--fix" in sys.argv[1:]
PYTHON_TREES = ["python", "tests", "bench", "examples", "tools", "docs"]


def tracked(*patterns: str) -> list[str]:
    """Files of the repository that match, new ones included."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "--", *patterns],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def passes(name: str, command: list[str]) -> bool:
    """Run one checker; its output is shown when it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        said = re.sub(r"^\d+ warnings.*\n", "", done.stdout + done.stderr, flags=re.MULTILINE)
        print(f"lint: {name} failed\n{said}", flush=True)
    return done.returncode == 0


def own_includes(path: Path, folders: list[Path], seen: dict[Path, bytes]) -> None:
    """Collect `path` and the project's headers it reaches."""
    if path in seen:
        return
    seen[path] = path.read_bytes()
    for name in re.findall(rb'^\s*#\s*include\s*"([^"]+)"', seen[path], re.MULTILINE):
        for folder in (path.parent, *folders):
            header = (folder / name.decode()).resolve()
            if header.is_file():
                own_includes(header, folders, seen)
                break


def tidy_units() -> list[tuple[str, str]]:
    """Each torch-free unit with the hash of what decides its verdict."""
    folders = [ROOT / "include", BUILD / "include", ROOT / "src"]
    settings = (ROOT / ".clang-tidy").read_bytes()
    units = {}
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        source = Path(entry["file"])
        command = entry.get("command") or shlex.join(entry["arguments"])
        inside = any(source.is_relative_to(at / tree) for at in (ROOT, BUILD) for tree in ("src", "backends"))
        if not inside or "/torch/" in command or (source.is_relative_to(BUILD) and source.parent.name != "Unity"):
            continue
        seen: dict[Path, bytes] = {}
        own_includes(source, folders, seen)
        flags = " ".join(part for part in shlex.split(command) if part.startswith(("-D", "-m", "-std")))
        digest = hashlib.sha256(settings + flags.encode() + b"".join(seen[path] for path in sorted(seen)))
        units[str(source)] = digest.hexdigest()
    return sorted(units.items())


def tidy(unit: tuple[str, str]) -> bool:
    """Run clang-tidy on one unit, unless it is known to be clean."""
    source, digest = unit
    mark = CACHE / digest
    if mark.exists():
        return True
    # The build is g++'s; clang does not know all of its flags.
    unknown = ("unknown-warning-option", "ignored-optimization-argument", "unused-command-line-argument")
    extra = [f"--extra-arg=-Wno-{name}" for name in unknown]
    command = ["clang-tidy", "--quiet", "-p", str(BUILD), *extra, source]
    clean = passes(f"clang-tidy {Path(source).relative_to(ROOT)}", command)
    if clean:
        mark.touch()
    return clean


def main() -> int:
    """Run every checker; 0 if all of them pass."""
    results = []
    if FIX:
        results.append(passes("stubs", [sys.executable, "tools/stubs.py"]))
    cpp = tracked("*.cpp", "*.h", "*.cu", "*.cuh")
    results.append(passes("clang-format", ["clang-format", *(["-i"] if FIX else ["--dry-run", "--Werror"]), *cpp]))
    trees = [tree for tree in PYTHON_TREES if (ROOT / tree).is_dir()]
    results.append(passes("ruff format", ["ruff", "format", *([] if FIX else ["--diff"]), "--quiet", *trees]))
    results.append(passes("ruff check", ["ruff", "check", *(["--fix"] if FIX else []), "--quiet", *trees]))
    results.append(passes("mypy", ["mypy", "--no-error-summary"]))
    CACHE.mkdir(parents=True, exist_ok=True)
    units = tidy_units()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results.extend(pool.map(tidy, units))
    failures = results.count(False)
    print(
        f"lint: {len(cpp)} C++ files formatted, {len(units)} units analysed, "
        + (f"{failures} checks failed" if failures else "all clean")
    )
    return 1 if failures else 0


sys.exit(main())
