"""Parked copies are clones whose pages are not resident."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import oxytorch as ox  # noqa: F401
import pytest
import torch
from oxytorch.model import parking
from torch import Tensor

pytestmark = pytest.mark.cpu_only("parks tensors of the host")


def resident() -> int:
    """MiB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) >> 10


def layouts() -> dict[str, Tensor]:
    torch.manual_seed(0)
    image = torch.randn(8, 16, 64, 64)
    return {
        "contiguous": torch.randn(1024, 1024),
        "channels last": image.to(memory_format=torch.channels_last),
        "transposed": torch.randn(512, 1024).t(),
        "strided": torch.randn(1024, 2048)[:, ::2],
        "expanded": torch.randn(1, 1024).expand(1024, 1024),
        "bfloat16": torch.randn(1024, 1024).bfloat16(),
        "complex, conjugated": torch.randn(512, 512, dtype=torch.complex64).conj(),
        "integers": torch.randint(-9, 9, (1024, 1024)),
        "bytes": torch.randint(256, (1 << 21,), dtype=torch.uint8),
        "nan": torch.full((1024, 1024), float("nan")),
        "small": torch.randn(3),
        "nothing": torch.empty(0),
    }


@pytest.mark.parametrize("name", list(layouts()))
def test_a_parked_tensor_is_a_clone(name: str) -> None:
    given = layouts()[name]
    held, clone = parking.park(given), given.clone()
    assert held.dtype == clone.dtype and held.stride() == clone.stride() and held.shape == clone.shape
    parking.rest()
    assert torch.equal(held.resolve_conj().nan_to_num(7), clone.resolve_conj().nan_to_num(7))
    given.zero_() if name not in ("expanded", "nothing") else None
    assert torch.equal(held.resolve_conj().nan_to_num(7), clone.resolve_conj().nan_to_num(7))
    held.fill_(1)  # writing is kept as well
    parking.rest()
    assert bool((held == 1).all())


def test_parked_tensors_are_not_resident_until_they_are_read() -> None:
    given = torch.ones(8 << 20)
    before = resident()
    held = [parking.park(given) for _ in range(8)]  # 256 MiB
    assert resident() < before + 40
    assert float(held[3].sum()) == given.numel()
    assert resident() > before + 20
    parking.rest(held[3])
    assert resident() < before + 40


def test_files_go_with_the_tensors() -> None:
    maps = Path("/proc/self/maps")
    before = maps.read_text().count("(deleted)")
    held = parking.park(torch.ones(1 << 20))
    view = held[5:]
    assert maps.read_text().count("(deleted)") == before + 1
    del held
    gc.collect()
    assert float(view.sum()) == (1 << 20) - 5
    del view
    gc.collect()
    assert maps.read_text().count("(deleted)") == before


@contextmanager
def no_folder() -> Iterator[None]:
    folders = parking._FOLDERS
    parking._FOLDERS = ("/proc/oxytorch", "/nowhere")
    try:
        yield
    finally:
        parking._FOLDERS = folders


def test_without_a_folder_it_is_a_clone_in_memory() -> None:
    given = torch.randn(1 << 20)
    with no_folder():
        held = parking.park(given)
        assert parking.parkable_bytes(given.device) == 0
    assert torch.equal(held, given) and held.data_ptr() != given.data_ptr()
    assert parking.parkable_bytes(torch.device("meta")) == 0 < parking.parkable_bytes(given.device)
