"""The loader from Python: structure, resume, errors, and as a part of a training run."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oxytorch as ox
import pytest
import torch
from torch import Tensor, nn

N = 48


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """(features, label), as torch's datasets give them."""

    def __init__(self, size: int = N) -> None:
        torch.manual_seed(0)
        self.x, self.y = torch.randn(size, 5), torch.randint(3, (size,))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


@pytest.fixture
def numbers(tmp_path: Path) -> Any:
    np.save(tmp_path / "x.npy", np.arange(N * 4, dtype=np.float32).reshape(N, 4))
    return ox.data.open(tmp_path / "x.npy")


def test_a_dataset_of_pythons_keeps_its_structure() -> None:
    data = Pairs()
    loader = ox.data.Loader(data, 10)
    batches = list(loader)
    assert len(batches) == len(loader) == 5
    assert all(isinstance(batch, tuple) for batch in batches)
    assert torch.equal(torch.cat([x for x, _ in batches]), data.x)
    assert torch.equal(torch.cat([y for _, y in batches]), data.y)


class Records:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "text": f"text {index}", "raw": bytes([index]), "ids": np.full(index + 1, index), "score": index / 4,
            "flag": index > 2,
        }  # fmt: skip


def test_fields_of_every_kind() -> None:
    (batch,) = ox.data.Loader(Records(), 5, pad={"ids": None})
    assert [ids.tolist() for ids in batch["ids"]] == [[i] * (i + 1) for i in range(5)]
    (padded,) = ox.data.Loader(Records(), 5, pad={"ids": -1})
    assert padded["ids"][1].tolist() == [1, 1, -1, -1, -1]
    with pytest.raises(ValueError, match="name the field in pad"):
        list(ox.data.Loader(Records(), 5))
    assert batch["text"] == [f"text {i}" for i in range(5)]
    assert batch["raw"] == [bytes([i]) for i in range(5)]
    assert batch["score"].tolist() == [0, 0.25, 0.5, 0.75, 1.0]
    assert batch["flag"].tolist() == [False, False, False, True, True]


def test_the_same_order_on_any_threads(numbers: Any) -> None:
    streams = [
        [
            batch["array"].clone()
            for _ in range(3)
            for batch in ox.data.Loader(numbers, 7, shuffle=True, seed=5, threads=t)
        ]
        for t in (1, 3)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*streams, strict=True))
    whole = torch.cat(streams[0][:7])
    assert not torch.equal(whole, torch.cat([b["array"] for b in ox.data.Loader(numbers, 7)]))
    assert sorted(whole[:, 0].tolist()) == list(range(0, N * 4, 4))


def test_it_goes_on_where_it_was(numbers: Any) -> None:
    def loader(**options: Any) -> Any:
        return ox.data.Loader(numbers, 5, shuffle=True, seed=1, **options)

    whole = [batch["array"].clone() for _, batch in zip(range(25), epochs(loader()), strict=False)]
    first = loader()
    stream = epochs(first)
    for _ in range(13):
        next(stream)
    state = first.state_dict()
    assert len(str(state["loader"])) <= 256
    second = loader(threads=1, prefetch=1)
    second.load_state_dict(state)
    for expected, batch in zip(whole[13:], epochs(second), strict=False):
        assert torch.equal(batch["array"], expected)
    with pytest.raises(RuntimeError, match="batches of 5 over all processes"):
        ox.data.Loader(numbers, 6, shuffle=True).load_state_dict(state)
    with pytest.raises(ValueError, match="no state of a loader"):
        first.load_state_dict({"else": "1"})


def epochs(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def test_a_loop_that_ends_early_is_followed_by_the_next_epoch(numbers: Any) -> None:
    loader = ox.data.Loader(numbers, 5, shuffle=True)
    next(iter(loader))
    (again, *_), other = list(loader), ox.data.Loader(numbers, 5, shuffle=True)
    assert loader.epoch == 2
    other.set_epoch(1)
    assert torch.equal(next(iter(other))["array"], again["array"])


def test_a_stage_and_a_collate_function_of_the_users(numbers: Any) -> None:
    def doubled(sample: dict[str, Any]) -> dict[str, Any]:
        return {"array": sample["array"] * 2}

    loader = ox.data.Loader(numbers, 4, [doubled], collate=lambda batch: batch["array"].sum())
    assert float(sum(loader)) == 2 * sum(range(N * 4))
    assert loader.stats()["stage_seconds"]["doubled"] > 0

    def broken(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["array"][0] == 8:
            raise KeyError("mine")
        return sample

    with pytest.raises(RuntimeError, match=r"sample 2 \(.*x\.npy.*stage broken: KeyError: 'mine'"):
        list(ox.data.Loader(numbers, 4, [broken]))
    assert len(list(ox.data.Loader(numbers, 4, [broken], on_error="skip"))) == N // 4


def test_weights_decide_how_often(numbers: Any) -> None:
    weights = [0.0] * N
    weights[7] = weights[9] = 1.0
    drawn = [batch["array"][:, 0] for batch in ox.data.Loader(numbers, 8, shuffle=ox.data.Weighted(weights, draws=64))]
    assert set(torch.cat(drawn).tolist()) == {28.0, 36.0}
    with pytest.raises(ValueError, match="3 weights for 48 samples"):
        ox.data.Loader(numbers, 8, shuffle=ox.data.Weighted([1, 2, 3]))


def test_a_mixture_of_datasets(numbers: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", -np.ones((5, 4), dtype=np.float32))
    both = ox.data.concatenate(numbers, ox.data.open(tmp_path / "y.npy"))
    assert len(both) == N + 5 and both.part_sizes == [N, 5]
    loader = ox.data.Loader(both, 8, shuffle=ox.data.Mixed([3, 1], draws=80), seed=4)
    batches = [batch["array"].clone() for _ in range(3) for batch in loader]
    assert len(batches) == 30
    assert all(int((batch[:, 0] < 0).sum()) == 2 for batch in batches)  # a quarter of any eight
    first = torch.cat(batches)[:, 0]
    assert len(set(first[first >= 0][:N].tolist())) == N  # each once before one comes again, over epochs too

    again = ox.data.Loader(both, 8, shuffle=ox.data.Mixed([3, 1], draws=80), seed=4, threads=1)
    stopped = ox.data.Loader(both, 8, shuffle=ox.data.Mixed([3, 1], draws=80), seed=4)
    for _, _batch in zip(range(7), stopped, strict=False):
        state = stopped.state_dict()
    again.load_state_dict(state)
    assert all(a.equal(b["array"]) for a, b in zip(batches[7:10], again, strict=True))


def test_a_mixture_of_pythons_datasets() -> None:
    both = torch.utils.data.ConcatDataset([Pairs(30), Pairs(10)])
    loader = ox.data.Loader(both, 8, shuffle=ox.data.Mixed([1, 1]))
    first = {tuple(row.tolist()) for row in Pairs(30).x}
    batches = [x for x, _ in loader]
    assert sum(len(x) for x in batches) == 40
    assert all(sum(tuple(row.tolist()) in first for row in x) >= 4 for x in batches)
    with pytest.raises(ValueError, match="3 weights for 2 datasets"):
        ox.data.Loader(both, 8, shuffle=ox.data.Mixed([1, 1, 1]))
    with pytest.raises(ValueError, match="there are no datasets"):
        ox.data.concatenate()


def test_batches_outlive_the_loader(numbers: Any) -> None:
    loader = ox.data.Loader(numbers, 6)
    kept = [batch["array"] for batch in loader]
    del loader
    assert torch.equal(torch.cat(kept).flatten(), torch.arange(N * 4.0))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"threads": 0}, ValueError, "threads is 0"),
        ({"threads": "many"}, ValueError, "threads is 'many'"),
        ({"prefetch": -2}, ValueError, "prefetch is -2"),
        ({"rank": 3, "world_size": 2}, ValueError, "rank 3 of world_size 2"),
        ({"on_error": "ignore"}, ValueError, "on_error is 'ignore'"),
        ({"transform": [3]}, TypeError, "a transform is a int"),
        ({"boxes": "array"}, ValueError, "float32 of"),
        ({"masks": ["array"]}, ValueError, "no encoded image"),
        ({"cache": "many"}, ValueError, "many"),
    ],
)
def test_what_cannot_be_meant(numbers: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ox.data.Loader(numbers, **{"batch_size": 4, **options})


def test_what_is_no_dataset() -> None:
    with pytest.raises(TypeError, match="neither len"):
        ox.data.Loader(3, 4)
    with pytest.raises(ValueError, match="gives no sample"):
        ox.data.Loader(iter([]), 4)
    with pytest.raises(ValueError, match="empty"):
        ox.data.Loader([], 4)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ox.data.open("/nowhere/at/all")


class Flowing(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """The samples of Pairs one after the other, more of them each epoch."""

    def __init__(self) -> None:
        self.epoch, self.begun, self.data = 0, 0, Pairs()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        self.begun += 1
        yield from (self.data[i] for i in range(20 + 4 * self.epoch))


def test_a_stream_without_a_length() -> None:
    stream = Flowing()
    loader = ox.data.Loader(stream, 8)
    for epoch in range(3):
        batches = list(loader)
        size = 20 + 4 * epoch
        assert [len(y) for _, y in batches] == [8] * (size // 8) + [size % 8] * (size % 8 > 0)
        assert torch.equal(torch.cat([x for x, _ in batches]), stream.data.x[:size])
    assert stream.begun == 3, "the first sample is drawn once"
    with pytest.raises(TypeError, match="a Flowing gives is not known"):
        len(loader)
    assert loader.stats()["samples"] == 20 + 24 + 28


def test_a_stream_goes_on_where_it_was_and_is_mixed_in_windows() -> None:
    def make(**options: Any) -> Any:
        return ox.data.Loader(Flowing(), 4, [], shuffle=ox.data.ShuffledBlocks(2, 4), seed=3, **options)

    loader, drawn, states = make(), [], []
    for _ in range(2):
        states.append(loader.state_dict())
        for _, y in loader:
            drawn.append(y.tolist())
            states.append(loader.state_dict())
        del states[-1]
    again = [batch for state in states for batch in next_of(make(threads=1), state)]
    assert again == drawn
    windows = [sorted(drawn[0] + drawn[1]), sorted(drawn[2] + drawn[3])]
    labels = Pairs().y.tolist()
    assert windows == [sorted(labels[:8]), sorted(labels[8:16])]
    with pytest.raises(ValueError, match="cannot be drawn from by Weighted"):
        ox.data.Loader(Flowing(), 4, shuffle=ox.data.Weighted([1.0]))
    with pytest.raises(ValueError, match="no sizes that are known before"):
        ox.data.Loader(Flowing(), ox.data.BatchSizer([1], max_tokens=4))
    with pytest.raises(ValueError, match="no cache"):
        ox.data.Loader(Flowing(), 4, cache="1MB")


def next_of(loader: Any, state: dict[str, str]) -> Iterator[list[int]]:
    loader.load_state_dict(state)
    yield from (y.tolist() for _, y in [next(iter(loader))])


def test_an_iterator_is_gone_through_once() -> None:
    loader = ox.data.Loader((i for i in range(10)), 4)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.raises(RuntimeError, match="a generator is gone through once"):
        next(iter(loader))


def test_what_a_stream_raises_has_its_place() -> None:
    class Broken(Flowing):
        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            yield from (self.data[i] for i in range(5))
            raise OSError("the line is down")

    loader = ox.data.Loader(Broken(), 4)
    drawn = iter(loader)
    next(drawn)
    with pytest.raises(RuntimeError, match=r"sample 5 \(of the stream\).*the line is down"):
        next(drawn)


def test_a_trainer_fits_a_stream() -> None:
    trainer = ox.Trainer(*model_and_optimizer(), nn.CrossEntropyLoss(), config="basic")
    loader = ox.data.Loader(Flowing(), 4, shuffle=True)
    assert trainer.fit(loader, epochs=2).steps == 5 + 6
    plain = ox.Trainer(*model_and_optimizer(), nn.CrossEntropyLoss(), config="basic")
    assert plain.fit(torch.utils.data.DataLoader(Flowing(), 4), epochs=2).steps == 5 + 5  # which is told no epoch


SIZES = [int(n) for n in torch.randint(1, 20, (N,), generator=torch.Generator().manual_seed(1))]


class Texts(Pairs):
    def __getitem__(self, index: int) -> Any:
        return {"ids": torch.full((SIZES[index],), index), "label": index}


@pytest.mark.parametrize("padded", [False, True])
def test_batches_of_as_many_samples_as_fit(padded: bool) -> None:
    sizer = ox.data.BatchSizer(Texts(), max_tokens=60, length="ids", padded=padded)
    loader = ox.data.Loader(Texts(), sizer, pad={"ids": 0})
    batches = list(loader)
    assert len(batches) == len(sizer)
    assert [batch["label"].tolist() for batch in batches] == list(sizer)
    for batch in batches:
        assert batch["ids"].numel() <= 60 or not padded
    mixed = ox.data.Loader(Texts(), sizer, shuffle=ox.data.Bucketed(SIZES, window=16), pad={"ids": 0}, seed=4)
    ids = [batch["label"].tolist() for batch in mixed]
    assert sorted(i for batch in ids for i in batch) == list(range(N))
    assert all(sum(SIZES[i] for i in batch) <= 60 for batch in ids)
    assert len(mixed) != 0 and ids != list(sizer)


def test_a_batch_sizer_that_a_loader_cannot_take(numbers: Any) -> None:
    with pytest.raises(ValueError, match="3 sizes for 48 samples"):
        ox.data.Loader(numbers, ox.data.BatchSizer([1, 2, 3], max_tokens=4))
    with pytest.raises(ValueError, match="give shuffle to it"):
        ox.data.Loader(numbers, ox.data.BatchSizer(SIZES, max_tokens=40, shuffle=True))
    with pytest.raises(ValueError, match="has no length"):
        ox.data.Loader(numbers, ox.data.BatchSizer(iter(SIZES), max_tokens=40))


def test_a_trainer_resumes_between_batches_under_a_limit() -> None:
    def loader() -> Any:
        return ox.data.Loader(Pairs(), ox.data.BatchSizer(SIZES, max_tokens=60), shuffle=True, seed=2)

    def trainer() -> Any:
        return ox.Trainer(*model_and_optimizer(), nn.CrossEntropyLoss(), config="basic")

    whole = trainer()
    steps = whole.fit(loader(), epochs=2).steps
    first = trainer()
    first.fit(loader(), epochs=2, max_steps=7)
    state = copy.deepcopy(first.state_dict())
    second, drawn = trainer(), loader()
    second.load_state_dict(state)
    second.fit(drawn, epochs=2)
    assert drawn.stats()["batches"] == steps - 7
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_ctrl_c_ends_the_wait() -> None:
    held = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it

    class Gate(Pairs):
        gate = threading.Event()

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if index > 0:
                self.gate.wait(60)
            return super().__getitem__(index)

    data = Gate()
    loader = ox.data.Loader(data, 4)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    signal.signal(signal.SIGINT, held)
    data.gate.set()
    assert len(list(loader)) > 0


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loader_of(**options: Any) -> Any:
    return ox.data.Loader(Pairs(), 6, shuffle=True, seed=2, **options)


def test_a_trainer_resumes_in_the_middle_of_an_epoch() -> None:
    def trainer() -> Any:
        return ox.Trainer(*model_and_optimizer(), nn.CrossEntropyLoss(), config="basic")

    whole = trainer()
    whole.fit(loader_of(), epochs=3)
    first = trainer()
    first.fit(loader_of(), epochs=3, max_steps=11)
    state = copy.deepcopy(first.state_dict())
    assert state["loader"] is not None
    second, drawn = trainer(), loader_of(threads=1)
    second.load_state_dict(state)
    second.fit(drawn, epochs=3)
    assert drawn.stats()["batches"] == 3 * 8 - 11, "no batch is drawn only to be passed over"
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    third = trainer()  # the same run, in two calls
    again = loader_of()
    third.fit(again, epochs=3, max_steps=11)
    third.fit(again, epochs=3)
    for a, b in zip(whole.model.parameters(), third.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_accelerate_leaves_the_loader_where_it_was() -> None:
    loader = loader_of()
    expected = [y.tolist() for _, y in loader_of()]
    plan = ox.accelerate(
        *model_and_optimizer(), nn.CrossEntropyLoss(), loader, tune_seconds=1.0, remember=False, level="basic"
    )
    assert [y.tolist() for _, y in plan.data] == expected
    plan.revert()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_flat_over_epochs(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((2000, 256), np.float32))
    loader = ox.data.Loader(ox.data.open(tmp_path / "x.npy"), 50, [dict], shuffle=True, cache="1MB")

    def epochs(count: int) -> int:
        for _ in range(count):
            for _ in loader:
                pass
        return resident()

    before = epochs(4)
    # A batch kept each epoch would be half a megabyte, and what was drawn 20.
    assert epochs(10) - before < 3 << 20
