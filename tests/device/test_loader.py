"""Batches of `oxytorch.data.Loader` on the device of the run: those of the host, copied while a step is taken."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import oxytorch as ox
import pytest
import torch
import torch_device
from oxytorch.trainer import Trainer
from torch import nn

DEVICE = torch_device.chosen()
ROWS = np.arange(88, dtype="float32").reshape(22, 4)

#: Copies take 50 ms and are done later: what does not wait for one sees zeros.
ASYNCHRONOUS = """
import time
import numpy as np, torch, torch_device, oxytorch as ox
device = torch_device.load()
rows = np.arange(1, 1 + 4 * 4096, dtype="float32").reshape(4, 4096)
np.save(FILE, rows)
loader = ox.data.Loader(ox.data.open(FILE), 1, device=device, prefetch=3)
copied = 0
for _ in range(50):  # until copies went ahead: that hangs on the loader's threads
    for row, batch in zip(rows, loader):
        time.sleep(0.02)
        copied += loader._native.is_copying
        assert torch.equal((batch["array"] + 0).cpu()[0], torch.from_numpy(row)), "a step comes after its batch's copy"
    if copied >= 3:
        break
assert copied >= 3, copied
"""


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    np.save(tmp_path / "rows.npy", ROWS)
    return ox.data.open(str(tmp_path / "rows.npy"))


class Nested:
    """Samples of tensors of two kinds, text, and rows that differ in length."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.full((3,), float(i)), "name": f"sample {i}", "ids": torch.arange(i % 3 + 1)}


def test_batches_are_those_of_the_host() -> None:
    here = ox.data.Loader(Nested(), 4, shuffle=True, pad={"ids": None})
    there = ox.data.Loader(Nested(), 4, shuffle=True, pad={"ids": None}, device=DEVICE)
    assert there.device == DEVICE
    for _ in range(2):
        for mine, theirs in zip(there, here, strict=True):
            assert mine["x"].device == DEVICE
            assert torch.equal(mine["x"].cpu(), theirs["x"])
            assert mine["name"] == theirs["name"]
            assert all(ids.device == DEVICE for ids in mine["ids"])
            assert all(map(torch.equal, (ids.cpu() for ids in mine["ids"]), theirs["ids"]))
    assert there.state_dict() == here.state_dict()


@pytest.mark.skipif(DEVICE.type == "cpu", reason="nothing is copied")
def test_a_loader_resumes_before_the_batch_that_is_copied(rows: Any) -> None:
    loader = ox.data.Loader(rows, 2, shuffle=True, device=DEVICE, prefetch=4)
    batches = iter(loader)
    for _ in range(5):
        time.sleep(0.01)
        next(batches)
    other = ox.data.Loader(rows, 2, shuffle=True)
    other.load_state_dict(loader.state_dict())
    loader.change(threads=1)  # in the middle of an epoch, a batch on its way
    for mine, theirs in zip(batches, other, strict=True):
        assert torch.equal(mine["array"].cpu(), theirs["array"])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="nothing is copied")
def test_a_trainer_has_a_loader_put_batches_where_the_model_is(rows: Any) -> None:
    loader = ox.data.Loader(rows, 5, shuffle=True)
    model = nn.Linear(4, 1).to(DEVICE)
    seen = []

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch["array"].device)
        return model(batch["array"] / 100).square().mean()

    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 1e-4), loss_fn, config="basic", calibrate=False)
    trainer.fit(loader, epochs=2, progress=False)
    assert trainer.global_step == 10
    assert set(seen) == {DEVICE}
    assert loader.device == DEVICE
    assert loader.is_pinned
    assert f"copied to {DEVICE}" in str(trainer.report())
    trainer.revert()
    assert loader.device is None


def test_settings_stay_on_a_loader_while_another_is_drawn_from(rows: Any) -> None:
    first, second = (ox.data.Loader(rows, 5, threads=1) for _ in range(2))
    model = nn.Linear(4, 1).to(DEVICE)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), 1e-4),
        lambda model, batch: model(batch["array"] / 100).square().mean(),
        config="basic",
        calibrate=False,
        num_workers=3,
    )
    for epochs, loader in enumerate((first, second, first), 1):
        trainer.fit(loader, epochs=epochs, progress=False)
        assert loader._native.threads == 3
    assert (first._native.threads, second._native.threads) == (3, 3)
    trainer.revert()
    assert (first._native.threads, second._native.threads) == (1, 1)


@pytest.mark.skipif(DEVICE.type in ("cpu", "cuda"), reason="the memory of a fake device can be limited")
def test_where_there_is_no_memory_for_two_batches_one_waits(tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.ones((6, 1 << 16), dtype="float32"))
    loader = ox.data.Loader(ox.data.open(str(tmp_path / "wide.npy")), 1, device=DEVICE, prefetch=4)
    in_use = torch.ops.oxytorch_device.memory_statistics(0)["in_use"]
    torch.ops.oxytorch_device.set_memory_limit(in_use + (3 << 17))  # one batch and a half
    try:
        count = 0
        for batch in loader:
            time.sleep(0.01)
            assert batch["array"].cpu().sum().item() == 1 << 16
            assert not loader._native.is_copying
            del batch
            count += 1
        assert count == 6
        kept = [next(iter(loader))]
        with pytest.raises(torch.OutOfMemoryError):
            kept.append(next(iter(loader)))
        kept.clear()
        batches = iter(loader)
        assert len([next(batches)["array"].shape for _ in range(5)]) == 5, "memory that was let go of serves the next"
    finally:
        torch.ops.oxytorch_device.set_memory_limit(0)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="starts processes with devices of their own")
@pytest.mark.parametrize("kind", ["hpu", "privateuse1"])
def test_a_step_comes_after_the_copy_of_its_batch(kind: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {"OXYTORCH_DEVICE": kind, "OXYTORCH_FAKE": "asynchronous", "OXYTORCH_SIM": "latency_us=50000"}
    script = ASYNCHRONOUS.replace("FILE", repr(str(tmp_path / "rows.npy")))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    torch_device.check(done)
