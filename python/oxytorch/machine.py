"""The host's settings: what slows training down, and the command that changes it."""

from __future__ import annotations

import os
from typing import Literal, TypedDict, cast

from . import _C

__all__ = ["HostRow", "host_report", "host_report_text"]

_native = _C.machine


class HostRow(TypedDict):
    """One setting of the host.

    ``where`` is the path it was read from, ``why`` one sentence with its evidence. With the verdict ``"change"``
    there are a ``suggestion`` and the exact ``command``, which needs root where `needs_root`; ``"fine"`` was judged
    and is good; ``"reported"`` is a fact that is not judged, because what is right depends on more than this machine.
    """

    area: Literal["processor", "memory", "limits", "network", "storage", "accelerator"]
    what: str
    where: str
    value: str
    verdict: Literal["fine", "change", "reported"]
    suggestion: str
    why: str
    command: str
    needs_root: bool


def host_report(data_directory: str | os.PathLike[str] = "", *, root: str | os.PathLike[str] = "/") -> list[HostRow]:
    """Read the host's settings that a training run feels; nothing is changed.

    Parameters
    ----------
    data_directory
        Where the data are: the mount options there are judged. The working directory by default.
    root
        Another machine's tree of /proc, /sys and /run, for tests.

    Returns
    -------
    list of HostRow
        A row for each setting that is there; what cannot be read is left out.
    """
    return cast("list[HostRow]", _native.host_report(os.fspath(data_directory), os.fspath(root)))


def host_report_text(data_directory: str | os.PathLike[str] = "", *, root: str | os.PathLike[str] = "/") -> str:
    """Return `host_report` for a reader: first what to change, with the commands, then the rest."""
    return _native.host_report_text(os.fspath(data_directory), os.fspath(root))
