"""Arrow's stream interface: tables of pyarrow, Parquet files, datasets of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oxytorch as ox
import pytest
import torch

pa = pytest.importorskip("pyarrow")


def table() -> Any:
    return pa.table({
        "number": pa.array(range(20), pa.int32()),
        "share": pa.array([i / 8 for i in range(20)], pa.float64()),
        "flag": pa.array([i % 3 == 0 for i in range(20)]),
        "text": pa.array([f"text {i}" for i in range(20)]),
        "large": pa.array([f"large {i}" for i in range(20)], pa.large_string()),
        "raw": pa.array([bytes([i]) * i for i in range(20)], pa.binary()),
        "some": pa.array([list(range(i % 4)) for i in range(20)], pa.list_(pa.int64())),
        "pair": pa.array([[i, i + 1] for i in range(20)], pa.list_(pa.float32(), 2)),
    })  # fmt: skip


def check(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for i, row in enumerate(expected.to_pylist()):
        for name, value in found[i].items():
            value = value.tolist() if isinstance(value, torch.Tensor) else value
            assert value == row[name], (i, name)


def test_every_kind_of_column() -> None:
    found = ox.data.open(table())
    assert [(f.name, f.kind, f.dtype, f.shape) for f in found.schema] == [
        ("number", "array", "int32", []), ("share", "array", "float64", []), ("flag", "array", "bool", []),
        ("text", "text", "uint8", []), ("large", "text", "uint8", []), ("raw", "bytes", "uint8", []),
        ("some", "array", "int64", [-1]), ("pair", "array", "float32", [2]),
    ]  # fmt: skip
    check(found, table())


def test_slices_and_chunks_keep_their_offsets() -> None:
    whole = table()
    cut = pa.concat_tables([whole.slice(3, 5), whole.slice(0, 0), whole.slice(11, 7)])
    check(ox.data.open(cut), cut)


def test_files(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(table(), tmp_path / "x.parquet", row_group_size=6)
    check(ox.data.open(tmp_path / "x.parquet"), table())
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table().schema) as writer:
        writer.write_table(table(), max_chunksize=7)
    check(ox.data.open(tmp_path / "x.arrow"), table())


def test_a_loader_over_it() -> None:
    batches = list(ox.data.Loader(ox.data.open(table()), 8, pad={"some": -1}))
    assert torch.cat([b["number"] for b in batches]).tolist() == list(range(20))
    assert batches[0]["some"].tolist()[2:4] == [[0, 1, -1], [0, 1, 2]]


def test_what_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="'deep'"):
        ox.data.open(pa.table({"deep": pa.array([[[1]]])}))
    with pytest.raises(ValueError, match="'x' is null"):
        _ = ox.data.open(pa.table({"x": pa.array([1, None])}))[1]
    with pytest.raises(TypeError, match="no Arrow stream"):
        ox.data.open(object())


def test_a_dataset_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset(table()).shuffle(seed=3).select(range(11))
    rows = ox.data.open(found)
    assert [rows[i]["text"] for i in range(len(rows))] == found["text"][:]
