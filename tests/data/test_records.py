"""Files written by the libraries whose formats these are: each sample must be what was written."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import oxytorch as ox
import pytest
import torch

DTYPES = ["uint8", "int8", "bool", "int16", "int32", "int64", "float16", "float32", "float64"]


def numbers(dtype: str, *shape: int) -> Any:
    return np.random.default_rng(1).integers(0, 100, shape).astype(dtype)


def same(value: Any, array: Any) -> bool:
    return torch.equal(value, torch.from_numpy(np.array(array)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (4, 3), (3, 2, 0), (2, 3, 4)])
def test_npy(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = numbers(dtype, *shape)
    np.save(tmp_path / "x.npy", array)
    data = ox.data.open(str(tmp_path / "x.npy"))
    assert data.format == "npy"
    assert len(data) == shape[0]
    assert [field.name for field in data.schema] == ["array"]
    assert tuple(data.schema[0].shape) == shape[1:]
    assert all(same(data[i]["array"], array[i]) for i in range(shape[0]))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_versions_and_a_scalar(tmp_path: Path, version: tuple[int, int]) -> None:
    for name, array in (("row", numbers("int32", 4)), ("scalar", np.array(2.5))):
        with (tmp_path / name).open("wb") as file:
            np.lib.format.write_array(file, array, version)
        data = ox.data.open(str(tmp_path / name))
        assert all(same(data[i]["array"], np.atleast_1d(array)[i]) for i in range(len(data)))


def test_npy_that_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "x.npy")
    for array, reason in (
        (np.array([{}, []], dtype=object), "pickle"),
        (np.zeros(2, ">f4"), "big-endian"),
        (np.zeros(2, "<f4,<i2"), "structured"),
        (np.asfortranarray(np.zeros((2, 3))), "Fortran"),
        (np.zeros(2, "complex64"), "<c8"),
    ):
        np.save(path, array, allow_pickle=True)
        with pytest.raises(NotImplementedError, match=reason):
            ox.data.open(path)


def test_raw_and_token_windows(tmp_path: Path) -> None:
    tokens = np.random.default_rng(2).integers(0, 2**16, 1000).astype(np.uint16)
    tokens.tofile(tmp_path / "x.bin")
    data = ox.data.open_raw(str(tmp_path / "x.bin"), "uint16", [8])
    assert len(data) == 125
    assert data[3]["array"].tolist() == tokens[24:32].tolist()
    windows = ox.data.TokenWindows(data, 99)
    assert len(windows) == 10
    assert all(same(windows[k]["tokens"], tokens[k * 99 : k * 99 + 100].astype(np.int64)) for k in range(10))


def write_megatron(prefix: Path, documents: list[Any], code: int) -> None:
    """As Megatron-LM's _IndexWriter and IndexedDatasetBuilder write their files."""
    lengths = [len(document) for document in documents]
    pointers = np.concatenate([[0], np.cumsum([document.nbytes for document in documents])])[:-1]
    with Path(f"{prefix}.idx").open("wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1))
        index.write(np.array(lengths, dtype=np.int32).tobytes())
        index.write(np.array(pointers, dtype=np.int64).tobytes())
        index.write(np.arange(len(documents) + 1, dtype=np.int64).tobytes())
    Path(f"{prefix}.bin").write_bytes(b"".join(document.tobytes() for document in documents))


@pytest.mark.parametrize(("dtype", "code"), [("uint8", 1), ("int32", 4), ("int64", 5), ("uint16", 8)])
def test_megatron(tmp_path: Path, dtype: str, code: int) -> None:
    documents = [numbers(dtype, length) for length in (3, 0, 40, 1)]
    write_megatron(tmp_path / "text", documents, code)
    data = ox.data.open(str(tmp_path / "text"))
    assert data.format == "megatron"
    assert len(data) == 4
    assert all(data[i]["tokens"].tolist() == document.tolist() for i, document in enumerate(documents))
    windows = ox.data.TokenWindows(data, 10)
    text = np.concatenate(documents).astype(np.int64)
    assert len(windows) == 4
    assert all(same(windows[k]["tokens"], text[k * 10 : k * 10 + 11]) for k in range(4))


def test_safetensors(tmp_path: Path) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool]
    tensors = {f"t{i}": torch.arange(12).reshape(3, 4).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors["flat"] = torch.arange(3, dtype=torch.uint8)
    safetensors_torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    data = ox.data.open(str(tmp_path / "x.safetensors"))
    assert len(data) == 3
    for i in range(3):
        assert set(data[i]) == set(tensors)
        assert all(torch.equal(value, tensors[name][i]) for name, value in data[i].items())
    safetensors_torch.save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, tmp_path / "y.safetensors")
    with pytest.raises(ValueError, match="'a' and 'b' have 2 and 3 rows"):
        ox.data.open(str(tmp_path / "y.safetensors"))


@pytest.mark.parametrize("ascii_only", [True, False])
def test_jsonl(tmp_path: Path, ascii_only: bool) -> None:
    rows = [
        {"text": 'näive \U0001f600 "\n', "n": i, "x": i / 3, "ok": i % 2 == 0, "ids": list(range(i)), "meta": {"i": i}}
        for i in range(7)
    ]
    text = "\n\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    data = ox.data.open(str(tmp_path / "x.jsonl"))
    assert len(data) == 7
    for i, row in enumerate(rows):
        sample = data[i]
        assert sample["text"] == row["text"]
        assert sample["n"].item() == row["n"]
        assert sample["x"].item() == row["x"]
        assert sample["ok"].item() is row["ok"]
        assert sample["ids"].tolist() == row["ids"]
        assert json.loads(sample["meta"]) == row["meta"]


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    rest = value >> 7
    return bytes([value & 127 | 128]) + varint(rest) if rest else bytes([value])


def chunk(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def example(features: dict[str, Any]) -> bytes:
    """tf.train.Example by its wire format, for where there is no TensorFlow."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = chunk(1, chunk(1, value))
        elif isinstance(value[0], float):
            feature = chunk(2, chunk(1, np.array(value, np.float32).tobytes()))
        else:
            feature = chunk(3, chunk(1, b"".join(varint(number) for number in value)))
        entries += chunk(1, chunk(1, name.encode()) + chunk(2, feature))
    return chunk(1, entries)


ROWS: list[dict[str, Any]] = [
    {"image": b"\xff\xd8\xff\xe0" + bytes(range(i, i + 50)), "label": [-i], "box": [0.5, i / 3], "ids": [7] * (i + 1)}
    for i in range(5)
]


def check_examples(path: Path) -> None:
    data = ox.data.open(str(path))
    assert data.format == "tfrecord"
    assert len(data) == len(ROWS)
    for i, row in enumerate(ROWS):
        sample = data[i]
        assert sample["image"] == row["image"]
        assert sample["label"].tolist() == row["label"]
        assert same(sample["box"], np.array(row["box"], np.float32))
        assert sample["ids"].tolist() == row["ids"]


def test_records_of_tensorboards_writer(tmp_path: Path) -> None:
    record_writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    with (tmp_path / "x.tfrecord").open("wb") as file:
        writer = record_writer.RecordWriter(file)
        for row in ROWS:
            writer.write(example(row))
        writer.flush()
    check_examples(tmp_path / "x.tfrecord")


def test_records_and_examples_of_tfrecords_writer(tmp_path: Path) -> None:
    tfrecord_writer = pytest.importorskip("tfrecord.writer")
    writer = tfrecord_writer.TFRecordWriter(str(tmp_path / "x.tfrecord"))
    kinds = {"image": "byte", "label": "int", "box": "float", "ids": "int"}
    for row in ROWS:
        writer.write({name: (value, kinds[name]) for name, value in row.items()})
    writer.close()
    check_examples(tmp_path / "x.tfrecord")


def test_records_and_examples_of_tensorflow(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    lists = {
        "image": lambda value: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value])),
        "label": lambda value: tf.train.Feature(int64_list=tf.train.Int64List(value=value)),
        "box": lambda value: tf.train.Feature(float_list=tf.train.FloatList(value=value)),
    }
    lists["ids"] = lists["label"]
    with tf.io.TFRecordWriter(str(tmp_path / "x.tfrecord")) as writer:
        for row in ROWS:
            features = {name: lists[name](value) for name, value in row.items()}
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    check_examples(tmp_path / "x.tfrecord")
