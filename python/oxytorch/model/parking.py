"""Copies of large tensors in unlinked files: they read like any other tensor, and take no memory while nobody reads."""

from __future__ import annotations

import os
import shutil

import torch
from torch import Tensor

from .._C import memory as _native

__all__ = [
    "is_parked", "move_to_file", "move_to_memory", "park", "parkable_bytes", "parked_parts", "populate", "read_ahead",
    "rest",
]  # fmt: skip

_SHARE = 8  # copies may take one part of so many of the free disk space
_FOLDERS = tuple(_native.parking_folders())  # the first is on a disk where one is

is_parked = _native.is_parked
move_to_file = _native.move_to_file
move_to_memory = _native.move_to_memory
parked_parts = _native.parked_parts
populate = _native.populate
read_ahead = _native.read_ahead


def park(tensor: Tensor) -> Tensor:
    """Clone a tensor, on a host that can, into a file that goes with the clone; its pages are not resident then.

    Reading it makes them resident until `rest`. A small tensor, one of a device, and one for which there is no room on
    the disk is cloned in memory.
    """
    tensor = tensor.detach()
    return _native.park(tensor, _FOLDERS) if type(tensor) is Tensor else tensor.clone()


def rest(*tensors: Tensor) -> None:
    """Let go of the pages of these, or of all parked tensors, that were read; their values stay in the files."""
    for tensor in tensors:
        _native.rest(tensor)
    if not tensors:
        _native.rest_all()


def parkable_bytes(device: torch.device) -> int:
    """Return how many bytes of that device's tensors may be parked at once; 0 where parking copies them in memory."""
    if device.type != "cpu" or not os.access(_FOLDERS[0], os.W_OK):
        return 0
    return shutil.disk_usage(_FOLDERS[0]).free // _SHARE
