"""Sphinx settings. The API pages, one per Python module and per public header, are written here first."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import breathe.directives.file
import breathe.renderer

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "python"))

project = "Oxytorch"
author = "The Oxytorch authors"
version = release = re.search(r"project\(Oxytorch VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]  # type: ignore[index]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "breathe"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Oxytorch {release}"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
toc_object_entries = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports: list[str] = []
napoleon_google_docstring = False
breathe_projects = {"oxytorch": str(ROOT / "build" / "doxygen" / "xml")}
breathe_default_project = "oxytorch"
# Macros of ours that stand in C++ declarations.
cpp_id_attributes = ["OXY_API"]
# breathe shows the namespace itself on every header's page.
suppress_warnings = ["duplicate_declaration.cpp"]


def find_file_by_path(filename, parser, project_info, index, matches) -> None:  # type: ignore[no-untyped-def]
    """Find a file of Doxygen's by its path; breathe's own search knows bare names only, and modules share some."""
    for compound in index.file_compounds:
        if compound.name == filename.rsplit("/", 1)[-1]:
            for found in parser.parse_compound(compound.refid, project_info).root.compounddef:
                if breathe.directives.file.location_matches(found.location, filename):
                    matches.append([breathe.renderer.TaggedNode(None, found)])


breathe.directives.file.file_finder_filter = find_file_by_path


def python_modules() -> list[str]:
    """Public modules of the package, `oxytorch` first."""
    package = ROOT / "python" / "oxytorch"
    files = [path.stem for path in package.glob("*.py")]
    folders = [path.parent.name for path in package.glob("*/__init__.py")]
    return ["oxytorch", *(f"oxytorch.{name}" for name in sorted(files + folders) if not name.startswith("_"))]


def headers() -> list[str]:
    """Public headers, as an #include names them, without the folder all share."""
    include = ROOT / "include" / "oxytorch"
    return sorted(path.relative_to(include).as_posix() for path in include.rglob("*.h"))


def write(name: str, text: str) -> str:
    """Write one generated page, whose file is touched only when its text changes; return the name."""
    page = DOCS / "api" / "generated" / f"{name}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    if not page.is_file() or page.read_text() != text:
        page.write_text(text)
    return name


def write_pages(index: str, title: str, pages: dict[str, tuple[str, str]]) -> set[str]:
    """Write pages, by name their title and directive, and one that lists them.

    They are not in the table of contents, which the theme copies whole for each page.
    """
    for name, (heading, directive) in pages.items():
        write(name, f"---\norphan: true\n---\n\n# {heading}\n\n```{{eval-rst}}\n{directive}\n```\n")
    links = "".join(f"- [{heading}]({name}.md)\n" for name, (heading, _) in pages.items())
    return {write(index, f"# {title}\n\n{links}"), *pages}


def write_settings() -> str:
    """Write the table of environment variables from the registry."""
    from oxytorch import environment  # noqa: PLC0415  needs the built module, as autodoc does

    def versions(row: environment.Setting) -> str:
        said = {"since": row.since, "deprecated": row.deprecated, "gone": row.until}
        return ", ".join(f"{word} {version}" for word, version in said.items() if version)

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("<", "&lt;") or " "

    rows = environment.settings()
    text = f"# Environment variables\n\nThe {len(rows)} settings of the registry.\n"
    for family in dict.fromkeys(row.family for row in rows):
        mine = [row for row in rows if row.family == family]
        text += f"\n## {family}\n"
        for evidence in dict.fromkeys(row.evidence for row in mine):
            text += f"\nSource: {evidence}.\n\n"
            text += "| name | takes | default | what it does | versions | instead |\n|---|---|---|---|---|---|\n"
            for row in mine:
                if row.evidence == evidence:
                    cells = [f"`{row.name}`", row.allowed, row.default, row.what, versions(row), row.replacement]
                    text += "| " + " | ".join(map(cell, cells)) + " |\n"
    return write("environment-settings", text)


written = {write_settings()}
written |= write_pages(
    "python",
    "Python modules",
    {
        f"python-{name}": (f"`{name}`", f".. automodule:: {name}\n   :members:\n   :show-inheritance:")
        for name in python_modules()
    },
)
written |= write_pages(
    "cpp",
    "C++ headers",
    {
        f"cpp-{name.removesuffix('.h').replace('/', '-')}": (
            f"`oxytorch/{name}`",
            f".. doxygenfile:: include/oxytorch/{name}",
        )
        for name in headers()
    },
)
for stale in (DOCS / "api" / "generated").glob("*.md"):
    if stale.stem not in written:
        stale.unlink()


def as_literal(found: re.Match[str]) -> str:
    """RST's spelling of Markdown's code, with an end that a letter may follow."""
    return f"``{found[1]}``" + (rf"\ {found[2]}" if found[2] else "")


def backticks_as_code(app, what, name, object_, options, lines) -> None:  # type: ignore[no-untyped-def]
    """Docstrings mark code as Markdown does, with one backtick; RST wants two."""
    lines[:] = [re.sub(r"(?<![`:\\])`([^`]+)`(?!`)(\w?)", as_literal, line) for line in lines]


def setup(app) -> None:  # type: ignore[no-untyped-def]
    """Join Sphinx's events."""
    app.connect("autodoc-process-docstring", backticks_as_code)
