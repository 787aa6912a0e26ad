"""Batches under a limit of tokens or bytes: never above it, the same each time, every sample once."""

from __future__ import annotations

from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch.data.batch_sizer import BatchSizer
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.cpu_only("batches are sized on the host")

SIZES = [int(n) for n in torch.randint(1, 60, (500,), generator=torch.Generator().manual_seed(0))]


class Texts(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": torch.full((SIZES[index],), index), "length": SIZES[index], "name": "é" * SIZES[index]}


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("most", [None, 1, 5])
def test_batches_are_full_and_never_above_the_limit(padded: bool, shuffle: bool, most: int | None) -> None:
    sizer = BatchSizer(SIZES, max_tokens=200, padded=padded, shuffle=shuffle, max_samples=most)
    batches = list(sizer)

    def weight(batch: list[int]) -> int:
        sizes = [SIZES[i] for i in batch]
        return max(sizes) * len(sizes) if padded else sum(sizes)

    for batch, after in zip(batches, [*batches[1:], None], strict=True):
        assert batch and weight(batch) <= 200 and (most is None or len(batch) <= most)
        if after is not None:  # the next sample would not have fitted
            assert weight([*batch, after[0]]) > 200 or len(batch) == most
    assert sorted(flat(batches)) == list(range(len(SIZES)))
    assert (flat(batches) == list(range(len(SIZES)))) is not shuffle
    assert len(sizer) == len(batches)
    assert list(sizer) == batches


def test_each_epoch_and_seed_has_its_own_order() -> None:
    def epoch(number: int, seed: int = 0) -> list[list[int]]:
        sizer = BatchSizer(SIZES, max_tokens=200, shuffle=True, seed=seed)
        sizer.set_epoch(number)
        assert len(sizer) == len(list(sizer))
        return list(sizer)

    state = torch.get_rng_state()
    found = [epoch(number, seed) for seed in range(3) for number in range(3)]
    assert all(a != b for i, a in enumerate(found) for b in found[:i])
    assert epoch(1) == found[1]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "length", ["ids", "length", lambda sample: len(sample["ids"])], ids=["tensor", "number", "function"]
)
def test_a_field_or_a_function_says_the_length(length: Any) -> None:
    assert list(BatchSizer(Texts(), max_tokens=200, length=length)) == list(BatchSizer(SIZES, max_tokens=200))


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda sizes: torch.tensor(sizes).numpy()])
def test_sizes_may_be_a_list_a_tensor_or_an_array(kind: Any) -> None:
    if kind is not list:
        pytest.importorskip("numpy")
    assert list(BatchSizer(kind(SIZES), max_tokens=99)) == list(BatchSizer(SIZES, max_tokens=99))


def test_bytes_are_those_of_tensors_texts_and_numbers() -> None:
    samples = [torch.zeros(4), "éa", b"abc", (torch.zeros(2, dtype=torch.int8), {"a": 1, "b": "x"})]
    sizes = [16, 3, 3, 2 + 8 + 1]
    assert list(BatchSizer(samples, max_bytes=19)) == [[0, 1], [2, 3]]
    for i, size in enumerate(sizes):
        with pytest.raises(ValueError, match=rf"sample 0 has {size} bytes .*max_bytes={size - 1} "):
            list(BatchSizer([samples[i]], max_bytes=size - 1))
        assert list(BatchSizer([samples[i]], max_bytes=size)) == [[0]]


def test_a_sample_above_the_limit_is_named() -> None:
    for padded in (False, True):
        sizer = BatchSizer([3, 201, 5], max_tokens=200, padded=padded)
        with pytest.raises(ValueError, match="sample 1 has 201 tokens, more than max_tokens=200"):
            len(sizer)
    stream = iter(BatchSizer(iter([3, 198, 201]), max_tokens=200))
    assert next(stream) == [3]
    with pytest.raises(ValueError, match="sample 2 has 201"):
        next(stream)
    with pytest.raises(ValueError, match="sample 1 has a size of -2"):
        list(BatchSizer([1, -2], max_tokens=5))


def test_a_stream_gives_its_samples() -> None:
    def stream() -> Any:
        yield from ("a" * n for n in SIZES)

    sizer = BatchSizer(stream(), max_tokens=200)
    with pytest.raises(TypeError, match="generator"):
        len(sizer)
    expected = list(BatchSizer(SIZES, max_tokens=200))
    assert [[len(text) for text in batch] for batch in sizer] == [[SIZES[i] for i in batch] for batch in expected]


def test_sizes_of_memory() -> None:
    assert BatchSizer(SIZES, max_bytes="1KiB").limit == 1024
    limit = ox.info()["host"]["memory"]["limit"] if "host" in ox.info() else None
    share = BatchSizer(SIZES, max_bytes="10%").limit
    assert share > 2**20 and (limit is None or share <= limit)
    found = BatchSizer(SIZES, max_bytes="auto").limit
    assert 0 < found < ox.memory.available_bytes()
    with pytest.raises(ValueError, match="0%"):
        list(BatchSizer(SIZES, max_bytes="0%"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "one limit"),
        ({"max_tokens": 1, "max_bytes": 1}, "one limit"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_bytes": -1}, "max_bytes is -1"),
        ({"max_tokens": 5, "max_samples": 0}, "max_samples is 0"),
    ],
)
def test_limits_that_are_none(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        BatchSizer(SIZES, **options)


def test_a_stream_cannot_be_shuffled() -> None:
    with pytest.raises(ValueError, match="cannot be shuffled"):
        BatchSizer(iter(SIZES), max_tokens=100, shuffle=True)


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_few_and_empty_samples(sizes: list[int]) -> None:
    assert flat(BatchSizer(sizes, max_tokens=1)) == list(range(len(sizes)))
    assert len(BatchSizer(sizes, max_tokens=1)) == bool(sizes)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_takes_it_as_batch_sampler(workers: int) -> None:
    def padded(samples: list[dict[str, Any]]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], True, -1)

    sizer = BatchSizer(Texts(), max_tokens=200, length="length", padded=True, shuffle=True, seed=3)
    loader = DataLoader(Texts(), batch_sampler=sizer, collate_fn=padded, num_workers=workers)
    seen = []
    for epoch in range(2):
        sizer.set_epoch(epoch)
        batches = list(loader)
        assert len(loader) == len(batches)
        assert all(batch.numel() <= 200 for batch in batches)
        seen.append([int(row[0]) for batch in batches for row in batch])
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(len(SIZES)))
    assert seen[0] != seen[1]
