"""The one check that comes before the native module is loaded: was it built for the torch that is running?"""

from __future__ import annotations


def minor(version: str) -> str:
    """`2.13` of `2.13.0+cpu`."""
    return ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])


def require_same_torch(built: str, running: str) -> None:
    """Refuse a torch of another minor version: its C++ interface differs, and loading would fail with missing symbols.

    Parameters
    ----------
    built, running : str
        Versions of torch, as in `torch.__version__`.

    Raises
    ------
    ImportError
        If major or minor differ; the message names both versions and the command that mends it.
    """
    if minor(built) != minor(running):
        raise ImportError(
            f"this oxytorch was built for torch {minor(built)}, but torch {running} is running: rebuild it with "
            f"`pip install . --no-build-isolation` in its source tree (or `make build`), "
            f"or install torch {minor(built)}."
        )
