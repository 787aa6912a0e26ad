"""What autograd keeps of a forward for its backward, in less memory."""

from __future__ import annotations

import os
from typing import Literal

from .. import _C

__all__ = ["PackSavedTensors", "PackedReport"]

PackedReport = _C.memory.PackedReport
Format = Literal["lossless", "bf16", "int8", "file"]


class PackSavedTensors(_C.memory.PackSavedTensors):
    """While entered, pack what operators save for backward, which unpacks it as it comes to it.

    Each format packs masks and other tensors of zero and one more value as bits, and int64 as narrow as it fits.
    Parameters, their copies by autocast, floating point that no operator of the graph made (as inputs), tensors of
    fewer bytes than `least` and on other devices are left as they are. Memory that somebody holds until backward is
    taken as it is there.

    "lossless" and "file" keep every bit of the gradients. Those of the others are of the rounded values; results of
    forward keep every bit.

    Parameters
    ----------
    format : {"lossless", "bf16", "int8", "file"}
        "bf16": float32 and float64 that an operator made are rounded to bfloat16. "int8": floating point that an
        operator made, as whole numbers of the largest magnitude of 256 neighbours / 127. "file": all that an operator
        made lies in a file without a name, whose space is given back whenever nothing of it is left.
    folder : str or path, optional
        Of the file; ``TMPDIR`` where that is on a disk, else ``/var/tmp``, unless given. One in memory (tmpfs) saves
        none.
    least : int
        16 KiB unless given: what is smaller is not worth the time.

    Raises
    ------
    ValueError
        For another format, and for a folder beside one that writes no file.
    OSError
        Where no file can be made there, and out of forward, where it cannot be written.
    RuntimeError
        From backward, where a tensor that was left as it is was changed in place after it was saved.

    Examples
    --------
    >>> with ox.memory.PackSavedTensors("bf16") as packed:
    ...     loss = loss_of(model, batch)
    >>> loss.backward()
    >>> packed.report().text()
    '6 saved tensors of 11.7 MiB in 5.86 MiB, rounded by 0.0016 of their size'
    """

    def __init__(
        self,
        format: Format = "lossless",
        folder: str | os.PathLike[str] | None = None,
        *,
        least: int = _C.memory.packed_bytes,
    ) -> None:
        if folder is not None and format != "file":
            raise ValueError(f"folder is {os.fspath(folder)!r} and the format {format!r}, which writes no file.")
        if least < 0:
            raise ValueError(f"least is {least}, expected a number of bytes, 0 or more.")
        super().__init__(format, "" if folder is None else os.fspath(folder), least)
