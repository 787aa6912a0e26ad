"""
The registry of environment variables and its judge.
"""

from __future__ import annotations
import collections.abc
import typing

__all__: list[str] = ["Context", "lint", "lint_script", "preset", "read_script", "settings"]

class Context:
    backend: str
    compile: bool | None
    determinism: bool | None
    efa: bool | None
    fine: bool
    neighbours: str
    openmp: str
    def __init__(self) -> None: ...
    @property
    def cores(self) -> int | None: ...
    @cores.setter
    def cores(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...
    @property
    def versions(self) -> dict[str, str]: ...
    @versions.setter
    def versions(self, arg0: collections.abc.Mapping[str, str]) -> None: ...

def lint(variables: dict[str, str], context: Context) -> list[dict[str, typing.Any]]: ...
def lint_script(script: str, file: str, context: Context) -> list[dict[str, typing.Any]]: ...
def preset(
    goal: str,
    device: str,
    cores: typing.SupportsInt | typing.SupportsIndex,
    processes: typing.SupportsInt | typing.SupportsIndex,
    efa: bool,
    jemalloc: bool,
    recipe_cache: str,
) -> dict[str, typing.Any]: ...
def read_script(script: str) -> list[dict[str, typing.Any]]: ...
def settings() -> list[dict[str, typing.Any]]: ...
