"""The pool of host memory under torch: the same bits, its limit, other processes, memory that is shared with numpy."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import oxytorch as ox
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.cpu_only("host memory")


@pytest.fixture
def pool() -> Iterator[None]:
    setting = ox.memory.use_host_pool("256MiB")
    assert setting.is_applied, setting.reason
    yield
    setting.revert()


def train(steps: int = 4) -> list[torch.Tensor]:
    """Losses and weights of a small transformer's first steps."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    trace = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = layer(torch.randn(16, 32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        trace.append(loss.detach())
    return trace + [parameter.detach().clone() for parameter in layer.parameters()]


def test_training_keeps_every_bit_each_time_the_pool_goes_in() -> None:
    plain = train()
    for _ in range(3):
        before = ox.memory.host_pool_stats().hits
        setting = ox.memory.use_host_pool()
        pooled = train()
        setting.revert()
        assert ox.memory.host_pool_stats().hits > before
        assert all(map(torch.equal, plain, pooled))
        assert all(map(torch.equal, plain, train()))


def test_a_setting_says_what_it_did_and_what_it_costs() -> None:
    setting = ox.memory.use_host_pool("1GiB")
    assert (setting.name, setting.is_applied) == ("host_pool", True)
    assert "1.00 GiB" in setting.cost
    assert "already" in ox.memory.use_host_pool().reason
    setting.revert()
    setting.revert()
    assert not setting.is_applied
    with pytest.raises(ValueError, match="gigs"):
        ox.memory.use_host_pool("10 gigs")


@pytest.mark.usefixtures("pool")
def test_the_limit_bounds_what_is_kept() -> None:
    held = [torch.ones(4 << 20) for _ in range(40)]
    assert ox.memory.host_pool_stats().live_bytes >= 40 * (16 << 20)
    held.clear()
    stats = ox.memory.host_pool_stats()
    assert stats.limit_bytes == 256 << 20
    assert stats.retained_bytes <= 256 << 20
    assert stats.returned_bytes > 0


@pytest.mark.usefixtures("pool")
def test_numpy_and_torch_share_memory_as_before() -> None:
    array = torch.arange(1 << 16).numpy()
    for _ in range(8):
        torch.full((1 << 16,), -1)
    assert np.array_equal(array, np.arange(1 << 16))
    mine = np.zeros(1 << 16, dtype=np.float32)
    torch.from_numpy(mine).add_(1)
    assert mine.sum() == 1 << 16
    shared = torch.ones(1 << 16).share_memory_()
    assert shared.is_shared()
    assert torch.frombuffer(bytearray(b"\1" * 65536), dtype=torch.uint8).sum() == 65536


class Squares(Dataset[torch.Tensor]):
    """Tensors of the parent, read in its workers."""

    def __init__(self) -> None:
        self.values = torch.arange(1 << 18, dtype=torch.float32)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values.square() + index


@pytest.mark.usefixtures("pool")
def test_loader_workers_read_the_parents_tensors_and_make_their_own() -> None:
    data = Squares()
    for _ in range(2):
        for index, batch in enumerate(DataLoader(data, batch_size=2, num_workers=2)):
            assert torch.equal(batch, torch.stack([data[2 * index], data[2 * index + 1]]))


@pytest.mark.usefixtures("pool")
def test_a_fork_goes_on_with_its_own_copy() -> None:
    kept = torch.arange(1 << 18)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # OpenMP's threads stay behind
        kept.add_(1)
        fine = bool(torch.equal(kept, torch.arange(1 << 18) + 1))
        os._exit(0 if fine else 1)
    kept.sub_(1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(kept, torch.arange(1 << 18) - 1)


@pytest.mark.usefixtures("pool")
def test_the_profiler_counts_the_pools_tensors() -> None:
    def allocated() -> int:
        with torch.profiler.profile(profile_memory=True) as profile:
            tensor = torch.empty(3 << 20, dtype=torch.uint8)
            del tensor
        return max(event.self_cpu_memory_usage for event in profile.events())

    assert allocated() == 3 << 20


@pytest.mark.usefixtures("pool")
def test_a_copy_keeps_and_a_save_reads_the_pools_tensors(tmp_path: os.PathLike[str]) -> None:
    tensor = torch.randn(1 << 16)
    torch.save(tensor, f"{tmp_path}/tensor.pt")
    assert torch.equal(torch.load(f"{tmp_path}/tensor.pt"), tensor)
    lazy = torch._lazy_clone(tensor)
    lazy.add_(1)
    assert torch.equal(lazy, tensor + 1)
