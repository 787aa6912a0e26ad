"""Write python/oxytorch/_C/*.pyi from the compiled module; with `--check`, say whether they are up to date."""

from __future__ import annotations

import filecmp
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "python" / "oxytorch" / "_C"


def generate(folder: Path) -> Path:
    """Generate the stubs under `folder`; returns where they are."""
    command = [sys.executable, "-m", "pybind11_stubgen", "oxytorch._C", "--output-dir", str(folder),
               "--numpy-array-use-type-var", "--exit-code"]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    made = folder / "oxytorch" / "_C"
    if made.with_suffix(".pyi").is_file():
        made.mkdir()
        made.with_suffix(".pyi").rename(made / "__init__.pyi")
    for stub in made.rglob("*.pyi"):
        # Values such as torch's version differ from build to build.
        stub.write_text(re.sub(r"^(\w+: \w+) = .*$", r"\1", stub.read_text(), flags=re.MULTILINE))
    subprocess.run(
        ["ruff", "format", "--quiet", "--config", str(ROOT / "pyproject.toml"), "--no-cache", str(made)], check=True
    )
    return made


def differences(made: Path) -> list[str]:
    """Names whose text is not the committed one."""
    names = sorted({path.relative_to(tree).as_posix() for tree in (made, COMMITTED) for path in tree.rglob("*.pyi")})
    _, changed, missing = filecmp.cmpfiles(made, COMMITTED, names, shallow=False)
    return sorted(changed + missing)


def main() -> int:
    """Write or check."""
    with tempfile.TemporaryDirectory() as folder:
        made = generate(Path(folder))
        stale = differences(made)
        if "--check" in sys.argv[1:]:
            if stale:
                print(f"stale stubs: {', '.join(stale)}; run: make lint ARGS=--fix")
            return 1 if stale else 0
        shutil.rmtree(COMMITTED, ignore_errors=True)
        shutil.copytree(made, COMMITTED)
        print(f"stubs: {len(stale)} changed")
    return 0


sys.exit(main())
