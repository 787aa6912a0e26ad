"""`tune` of a native Loader, as Python has it; tune_loader_test.cpp has the search itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import oxytorch as ox
import pytest
import torch

pytestmark = pytest.mark.cpu_only("batches are made on the host")

ROWS = np.random.default_rng(0).random((240, 16), np.float32)


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    np.save(tmp_path / "rows.npy", ROWS)
    return ox.data.open(tmp_path / "rows.npy")


def slowly(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.0005)
    return sample


class Slow(torch.utils.data.Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, int]:
        time.sleep(0.001)
        return {"x": index}


def left(loader: Any) -> list[Any]:
    return [batch["array"].clone() for batch in loader]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_the_same_batches_follow(rows: Any) -> None:
    loader, plain = (ox.data.Loader(rows, 8, [slowly], shuffle=True, threads=1) for _ in range(2))
    for each in (loader, plain):
        batches = iter(each)
        next(batches), next(batches)
        each.load_state_dict(each.state_dict())
    before, generator = loader.state_dict(), torch.get_rng_state()
    tuned = ox.data.tune(loader, seconds=0.6, memory="0")
    assert loader.state_dict() == before
    assert torch.get_rng_state().equal(generator)
    assert tuned.loader is loader
    assert len(tuned) == len(plain)
    assert tuned.bottleneck == "slowly"
    assert str(tuned).endswith("goes to slowly")
    assert tuned.report[0].setting.startswith("as given: 1 thread")
    assert same(left(tuned), left(plain))
    assert same(left(tuned), left(plain))


def test_a_cache_is_found_and_taken_back() -> None:
    given = ox.data.Cache("0")  # what it was given stays
    loader = ox.data.Loader(Slow(), 8, cache=given)
    tuned = ox.data.tune(loader, seconds=0.3)
    assert not any("cache" in trial.setting for trial in tuned.report)
    assert loader._given_options["cache"] is given


def test_data_of_python_gets_no_cache() -> None:
    loader = ox.data.Loader(Slow(), 8)
    tuned = ox.data.tune(loader, seconds=0.3)
    assert not any("cache" in trial.setting for trial in tuned.report)


def test_reverting_gives_the_settings_back(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"threads": 3, "prefetch": 7, "cache": ox.data.Cache("1MB"), "bottleneck": "read"}
    trials = [ox.data.LoaderTrial("as given"), ox.data.LoaderTrial("other", 100.0, 2.5, "taken")]
    tuning = type("Tuning", (), {**found, "trials": trials})
    monkeypatch.setattr(ox._C.data, "tune", lambda *_: tuning)
    loader = ox.data.Loader(rows, 8, threads=1)
    tuned = ox.data.tune(loader)
    assert (loader._native.threads, loader._native.prefetch) == (3, 7)
    assert loader._given_options["cache"] is found["cache"]
    assert str(trials[1]) == f"{'other':<44} {'100':>10} {'2.50x':>8}  taken"
    tuned.revert()
    assert loader._native.threads == 1
    assert loader._given_options == {"threads": 1, "prefetch": "auto", "cache": None}
    tuned.revert()  # once


def test_a_step_gets_what_the_loop_would(rows: Any) -> None:
    seen: list[Any] = []
    loader = ox.data.Loader(rows, 8, collate=lambda batch: batch["array"].sum())
    ox.data.tune(loader, seconds=0.3, memory="0", step=seen.append)
    assert len(seen) > 10
    assert all(total.dim() == 0 for total in seen)


class Broken(Exception):
    pass


def test_what_a_step_raises_is_raised(rows: Any) -> None:
    def step(_: Any) -> None:
        raise Broken

    loader = ox.data.Loader(rows, 8, threads=1)
    before = loader.state_dict()
    with pytest.raises(Broken):
        ox.data.tune(loader, seconds=1, step=step)
    assert loader.state_dict() == before
    assert loader._native.threads == 1


def test_what_cannot_be_is_refused(rows: Any) -> None:
    with pytest.raises(ValueError, match="seconds is 0"):
        ox.data.tune(ox.data.Loader(rows, 8), seconds=0)
    with pytest.raises(ValueError, match="much"):
        ox.data.tune(ox.data.Loader(rows, 8), seconds=0.3, memory="much")


def test_a_dataloader_has_no_cache() -> None:
    with pytest.raises(ValueError, match="which a DataLoader does not have"):
        ox.data.tune(torch.utils.data.DataLoader([1, 2]), memory="1GB")  # type: ignore[arg-type]


def test_a_stream_is_left_alone() -> None:
    class Lines(torch.utils.data.IterableDataset[dict[str, int]]):
        def __iter__(self) -> Any:
            return iter([{"x": i} for i in range(20)])

    loader = ox.data.Loader(Lines(), 4)
    tuned = ox.data.tune(loader)
    assert "cannot be drawn from again" in tuned.report[0].note
    assert [batch["x"].tolist() for batch in tuned] == [[i, i + 1, i + 2, i + 3] for i in range(0, 20, 4)]
