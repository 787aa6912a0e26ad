"""
Device backends and their registry.
"""

from __future__ import annotations

__all__: list[str] = ["available_backends", "best", "configure_sim", "load", "problems"]

def available_backends() -> list:
    """
    Every backend, best score first: list of dict.
    """

def best() -> str:
    """
    Name of the backend with the best score.
    """

def configure_sim(settings: str) -> None:
    """
    Sets the simulated devices, in the words of OXYTORCH_SIM.
    """

def load(path: str) -> str:
    """
    Loads one backend library and gives its name.
    """

def problems() -> list[tuple[str, str]]:
    """
    Libraries that discovery refused: list of (path, reason).
    """
