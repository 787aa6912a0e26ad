"""Print what pyproject.toml's dependencies and the named extras ask for, one per line, torch left out.

`--only`: what the extras ask for, without the dependencies.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "pyproject.toml").read_text()


def listed(name: str) -> list[str]:
    """Strings of the one-line TOML array `name`; Python 3.10 has no TOML reader of its own."""
    match = re.search(rf"^{name} = \[(.*)\]$", TEXT, re.MULTILINE)
    if match is None:
        sys.exit(f"pyproject.toml has no list named '{name}'")
    return re.findall(r'"([^"]+)"', match.group(1))


names = sys.argv[2:] if sys.argv[1:2] == ["--only"] else ["dependencies", *sys.argv[1:]]
for requirement in [r for name in names for r in listed(name)]:
    if re.match(r"[\w.-]+", requirement).group() != "torch":  # type: ignore[union-attr]
        print(requirement)
