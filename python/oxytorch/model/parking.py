"""Copies of large tensors in unlinked files: they read like any other tensor, and take no memory while nobody reads."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref

import torch
from torch import Tensor

__all__ = ["park", "parkable_bytes", "rest"]

_LEAST = 1 << 20  # bytes; smaller copies stay in memory
_WRITTEN = 1 << 22  # bytes that are written at once
_SHARE = 8  # copies may take one part of so many of the free disk space
_FOLDERS = ("/var/tmp", None)  # the second is Python's choice, which is often a file system in memory

_parked: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by address


def park(tensor: Tensor) -> Tensor:
    """Clone a tensor, on a host that can, into a file that goes with the clone; its pages are not resident then.

    Reading it makes them resident until `rest`. A small tensor, one of a device, and one for which there is no room on
    the disk is cloned in memory.
    """
    tensor = tensor.detach()
    size = tensor.numel() * tensor.element_size()
    if size < _LEAST or tensor.device.type != "cpu" or type(tensor) is not Tensor or not _can_park(tensor):
        return tensor.clone()
    mapped = _mapped(size)
    if mapped is None:
        return tensor.clone()
    like = torch.empty_like(tensor, device="meta")  # the layout that a clone has
    flat = torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel())
    held = flat.as_strided(like.size(), like.stride())
    _parked[held.data_ptr()] = mapped
    if tensor.is_contiguous():  # a piece at a time, so that the rest is not resident twice
        source, count = tensor.reshape(-1), _WRITTEN // tensor.element_size()
        for at in range(0, tensor.numel(), count):
            flat[at : at + count].copy_(source[at : at + count])
            start = at * tensor.element_size()
            mapped.madvise(mmap.MADV_DONTNEED, start, min(_WRITTEN, size - start))
    else:
        held.copy_(tensor)
        mapped.madvise(mmap.MADV_DONTNEED)
    return held


def rest(*tensors: Tensor) -> None:
    """Let go of the pages of these, or of all parked tensors, that were read; their values stay in the files."""
    found = [_parked.get(t.data_ptr()) for t in tensors] if tensors else list(_parked.values())
    for mapped in found:
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)


def parkable_bytes(device: torch.device) -> int:
    """Return how many bytes of that device's tensors may be parked at once; 0 where parking copies them in memory."""
    folder = _FOLDERS[0]
    if device.type != "cpu" or folder is None or not os.access(folder, os.W_OK) or not hasattr(mmap, "MADV_DONTNEED"):
        return 0
    return shutil.disk_usage(folder).free // _SHARE


def _can_park(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    return plain and not tensor.is_conj() and not tensor.is_neg() and hasattr(mmap, "MADV_DONTNEED")


def _mapped(size: int) -> mmap.mmap | None:
    for folder in _FOLDERS:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # writing to a mapping cannot fail for want of room then
                return mmap.mmap(file.fileno(), size)
        except OSError:  # noqa: PERF203  (two folders)
            continue
    return None
