"""
The host, the cluster and the hardware table.
"""

from __future__ import annotations
import typing

__all__: list[str] = ["host_report", "host_report_text"]

def host_report(data_directory: str = "", root: str = "/") -> list[dict[str, typing.Any]]: ...
def host_report_text(data_directory: str = "", root: str = "/") -> str: ...
