"""Datasets written by the projects whose formats they are: every sample must be the one that was written."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import random
import re
import struct
import sys
import tarfile
import types
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import oxytorch as ox
import pytest
import torch

Sample = dict[str, Any]
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "äöü", "你好"]


class _StandIn:
    """What a module that is not installed gives a peer that imports it and does not use it here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> _StandIn:
        return self

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn()


class _Requirement(_StandIn):
    """lightning_utilities.core.imports.RequirementCache: true where the module is there."""

    def __init__(self, requirement: str, module: str | None = None) -> None:
        self.name = module or re.split(r"[^\w.-]", requirement)[0]

    def __bool__(self) -> bool:
        return (
            self.name.partition(".")[0] not in _StandInFinder.roots
            and find_spec(self.name.replace("-", "_")) is not None
        )


class _StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Requirement if name == "RequirementCache" else type(name, (_StandIn,), {})


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    roots = ("boto3", "botocore", "braceexpand", "brotli", "lightning_utilities", "snappy", "tqdm")

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.roots:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def stand_ins() -> Iterator[None]:
    """The peers are installed without what they depend on: their imports of it find stand-ins, in this module alone."""
    before = set(sys.modules)
    finder = _StandInFinder()
    sys.meta_path.append(finder)
    yield
    sys.meta_path.remove(finder)
    peers = (*finder.roots, "litdata", "streaming", "webdataset")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in peers:
            del sys.modules[name]


def peer(name: str) -> Any:
    """A peer's module, or a skipped test."""
    root = name.partition(".")[0]
    spec = find_spec(root) if root not in sys.modules else None
    if root == "streaming" and spec is not None and spec.submodule_search_locations:
        # Its own __init__ imports torchvision and transformers; the format's modules need neither.
        for package, folder in (("streaming", Path()), ("streaming.base", Path("base"))):
            module = types.ModuleType(package)
            module.__path__ = [str(Path(next(iter(spec.submodule_search_locations))) / folder)]
            sys.modules[package] = module
    return pytest.importorskip(name, exc_type=ImportError)


def encoded(image_format: str, number: int) -> bytes:
    image = peer("PIL.Image")
    generator = np.random.default_rng(number)
    pixels = generator.integers(0, 255, (9 + number % 5, 11 + number % 3, 3), np.uint8)
    stream = io.BytesIO()
    image.fromarray(pixels).save(stream, format=image_format)
    return stream.getvalue()


def text(number: int) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=number % 7))


def same(read: Any, written: Any) -> None:
    """A value as it was read, beside the one that was written."""
    if isinstance(written, (bytes, str)):
        assert read == written
        return
    expected = written if isinstance(written, torch.Tensor) else torch.from_numpy(np.array(written))
    assert isinstance(read, torch.Tensor)
    assert read.dtype == expected.dtype
    assert read.shape == expected.shape
    assert read.contiguous().view(-1).view(torch.uint8).equal(expected.contiguous().view(-1).view(torch.uint8))


def all_same(dataset: Any, samples: list[Sample]) -> None:
    assert len(dataset) == len(samples)
    order = list(range(len(samples)))
    random.Random(0).shuffle(order)  # any order, so that shards are entered in the middle
    for i in order:
        read = dataset[i]
        assert set(read) == set(samples[i])
        for name, value in samples[i].items():
            same(read[name], value)


# WebDataset


def web_samples(count: int) -> list[Sample]:
    return [
        {
            "__key__": f"folder/{'long' * 40 if i == 3 else 'name'}{i:04d}",
            "jpg": encoded("JPEG", i),
            "cls": i * 7 % 11,
            "txt": text(i),
            "json": {"number": i, "words": text(i).split()},
            "seg.png": encoded("PNG", i),
            "bin": random.Random(i).randbytes(i * 97 % 1500),
        }
        for i in range(count)
    ]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the peer leaves its files to the garbage collector
@pytest.mark.parametrize("place", ["folder", "braces", "one"])
def test_webdataset(tmp_path: Path, place: str) -> None:
    webdataset = peer("webdataset")
    samples = web_samples(25)
    shards = [tmp_path / f"train-{i:03d}.tar" for i in range(1 if place == "one" else 3)]
    per_shard = -(-len(samples) // len(shards))
    for i, shard in enumerate(shards):
        with webdataset.TarWriter(str(shard), encoder=False) as writer:
            for sample in samples[i * per_shard : (i + 1) * per_shard]:
                # The writer's own encoders want libraries of their own; these are the bytes they make.
                writer.write({
                    key: value if isinstance(value, bytes) or key == "__key__"
                    else json.dumps(value).encode() if key == "json" else str(value).encode()
                    for key, value in sample.items()
                })  # fmt: skip
    location = {"folder": tmp_path, "braces": tmp_path / "train-{000..002}.tar", "one": shards[0]}[place]
    peers_own = list(webdataset.WebDataset([str(shard) for shard in shards], shardshuffle=False))
    assert len(peers_own) == len(samples)
    for _ in range(2):  # the second time by the index kept beside each shard
        dataset = ox.data.open(str(location))
        assert dataset.format == "webdataset"
        all_same(dataset, [{**s, "json": json.dumps(s["json"]), "cls": torch.tensor(s["cls"])} for s in samples])
        for i, raw in enumerate(peers_own):
            read = dataset[i]
            assert {name for name in raw if name not in ("__url__", "__local_path__")} == set(read)
            assert read["jpg"] == raw["jpg"]
            assert read["__key__"] == raw["__key__"]
            assert int(read["cls"]) == int(raw["cls"])
        assert all(shard.with_name(shard.name + ".oxidx").exists() for shard in shards)


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_formats(tmp_path: Path, tar_format: int) -> None:
    names = ["short", "d" * 90 + "/" + "n" * 90, "ä你好" * (1 if tar_format == tarfile.USTAR_FORMAT else 60)]
    with tarfile.open(tmp_path / "a.tar", "w", format=tar_format) as tar:
        folder = tarfile.TarInfo("d" * 90)
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for i, name in enumerate(names):
            content = bytes([i]) * (500 + 12 * i)
            info = tarfile.TarInfo(f"{name}.bin")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
            link = tarfile.TarInfo(f"{name}.link")
            link.type, link.linkname = tarfile.SYMTYPE, "nowhere"
            tar.addfile(link)
    dataset = ox.data.open(str(tmp_path / "a.tar"))
    all_same(dataset, [{"__key__": name, "bin": bytes([i]) * (500 + 12 * i)} for i, name in enumerate(names)])


# MDS


def mds_samples(count: int) -> list[Sample]:
    samples: list[Sample] = []
    for i in range(count):
        generator = np.random.default_rng(i)
        samples.append({
            "any_array": generator.random((1 + i % 3, 2 + i % 4), np.float32),
            "bytes": random.Random(i).randbytes(i * 31 % 400),
            "float16": np.float16(i / 3),
            "float32": np.float32(i / 3),
            "float64": np.float64(i / 3),
            "int": i - 5,
            "int16": np.int16(-i),
            "int8": np.int8(i - 10),
            "jpeg": encoded("JPEG", i),
            "json": {"a": [i, None, text(i)]},
            "one_dtype": generator.integers(-9, 9, (300 if i % 2 else 3, 2), np.int64),
            "one_shape": generator.random((2, 3), np.float64),
            "png": encoded("PNG", i),
            "str": text(i),
            "str_decimal": "1.50",
            "str_float": 0.25 * i,
            "str_int": 10**i,
            "uint16": np.uint16(i + 60000),
            "uint32": np.uint32(i + 4_000_000_000),
            "uint8": np.uint8(i),
        })  # fmt: skip
    return samples


MDS_ENCODINGS = {
    "any_array": "ndarray",
    "one_dtype": "ndarray:int64",
    "one_shape": "ndarray:float64:2,3",
}


def as_read(sample: Sample) -> Sample:
    """What is text here is a number or an object where streaming decodes it."""
    read = dict(sample)
    read["json"] = json.dumps(sample["json"])
    read["int"] = torch.tensor(sample["int"])
    read["str_int"], read["str_float"] = str(sample["str_int"]), str(sample["str_float"])
    return read


@pytest.mark.parametrize("hashes", [None, ["sha1", "xxh3_64"]])
@pytest.mark.parametrize("compression", [None, "zstd", "zstd:7"])
def test_mds(tmp_path: Path, compression: str | None, hashes: list[str] | None) -> None:
    mds = peer("streaming.base.format.mds.writer")
    decimal = importlib.import_module("decimal")
    samples = mds_samples(40)
    columns = {name: MDS_ENCODINGS.get(name, name) for name in samples[0]}
    out = tmp_path / "mds"
    with mds.MDSWriter(
        columns=columns, out=str(out), compression=compression, hashes=hashes, size_limit=20000
    ) as writer:
        for sample in samples:
            writer.write({**sample, "str_decimal": decimal.Decimal(sample["str_decimal"])})
    index = json.loads((out / "index.json").read_text())
    assert len(index["shards"]) > 2
    dataset = ox.data.open(str(out))
    assert dataset.format == "mds"
    schema = {field.name: field for field in dataset.schema}
    assert tuple(schema["one_shape"].shape) == (2, 3)
    assert tuple(schema["any_array"].shape) == (-1, -1)
    all_same(dataset, [as_read(sample) for sample in samples])


def test_mds_damage(tmp_path: Path) -> None:
    mds = peer("streaming.base.format.mds.writer")
    out = tmp_path / "mds"
    with mds.MDSWriter(columns={"text": "str"}, out=str(out), compression="zstd", hashes=["xxh3_64"]) as writer:
        for i in range(50):
            writer.write({"text": f"{text(i)} {i}"})
    shard = next(out.glob("*.zstd"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    dataset = ox.data.open(str(out))
    with pytest.raises(OSError, match="XXH3"):
        dataset[0]


def test_mds_pickle_is_refused(tmp_path: Path) -> None:
    mds = peer("streaming.base.format.mds.writer")
    out = tmp_path / "mds"
    with mds.MDSWriter(columns={"x": "pkl"}, out=str(out)) as writer:
        writer.write({"x": [1, 2]})
    with pytest.raises(NotImplementedError, match="pickled"):
        ox.data.open(str(out))


# LitData


def lit_samples(count: int) -> list[Sample]:
    samples: list[Sample] = []
    for i in range(count):
        generator = np.random.default_rng(i)
        samples.append({
            "label": i - 3,
            "weight": i / 7,
            "flag": i % 2 == 0,
            "text": text(i),
            "raw": random.Random(i).randbytes(i * 31 % 400),
            "image": encoded("JPEG", i),
            "tensor": torch.from_numpy(generator.random((1 + i % 3, 2), np.float32)),
            "tokens": torch.arange(i, i + 5 + i % 4, dtype=torch.int32),
            "array": generator.integers(0, 99, (2, 1 + i % 2), np.int16),
            "row": generator.random(3 + i % 2),
            "nested": {"inner": torch.tensor(i), "pair": (i, float(i))},
        })  # fmt: skip
    return samples


def flat(sample: Sample) -> Sample:
    out: Sample = {}
    for name, value in sample.items():
        if name == "nested":
            out |= {
                "nested.inner": value["inner"],
                "nested.pair.0": value["pair"][0],
                "nested.pair.1": value["pair"][1],
            }
        else:
            out[name] = value
    return {
        name: torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value
        for name, value in out.items()
    }


def write_litdata(folder: Path, items: list[Any], **options: Any) -> None:
    writer_module = peer("litdata.streaming.writer")
    folder.mkdir()
    writer = writer_module.BinaryWriter(str(folder), **options)
    for i, item in enumerate(items):
        writer[i] = item
    writer.done()
    writer.merge(1)


@pytest.mark.parametrize(
    ("compression", "level"), [(None, None), ("zstd", "chunk"), ("zstd:5", "batch"), ("zstd", "sample")]
)
def test_litdata(tmp_path: Path, compression: str | None, level: str | None) -> None:
    jpeg = peer("litdata.types").Jpeg
    samples = lit_samples(40)
    written = [{**sample, "image": jpeg(bytes=sample["image"])} for sample in samples]
    options: dict[str, Any] = {"chunk_size": 7}
    if compression:
        options |= {"compression": compression, "compression_level": level}
    if level == "batch":
        options["compression_batch_size"] = 3
    write_litdata(tmp_path / "lit", written, **options)
    assert len(json.loads((tmp_path / "lit" / "index.json").read_text())["chunks"]) > 2
    dataset = ox.data.open(str(tmp_path / "lit"))
    assert dataset.format == "litdata"
    all_same(dataset, [flat(sample) for sample in samples])


def test_litdata_tokens(tmp_path: Path) -> None:
    loader = peer("litdata.streaming.item_loader").TokensLoader(block_size=4)
    texts = [torch.arange(i, i + 10 + i % 5, dtype=torch.int64) for i in range(23)]
    write_litdata(tmp_path / "lit", texts, chunk_size=40, item_loader=loader)
    dataset = ox.data.open(str(tmp_path / "lit"))
    all_same(dataset, [{"field_0": one} for one in texts])


def litdata_rows(count: int) -> list[Sample]:
    return [{"text": text(i), "label": i - 2, "weight": i / 3, "flag": i % 2 == 0} for i in range(count)]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_litdata_rows(tmp_path: Path, compression: str | None) -> None:
    peer("pyarrow")
    rows = litdata_rows(23)
    write_litdata(tmp_path / "lit", [{**row, "of": {"x": 2 * i}} for i, row in enumerate(rows)], chunk_size=10,
                  **({"compression": compression} if compression else {}))  # fmt: skip
    dataset = ox.data.open(tmp_path / "lit")
    all_same(dataset, [flat({**row, "of.x": 2 * i}) for i, row in enumerate(rows)])


def write_litdata_tables(folder: Path, chunks: list[bytes], rows: int) -> None:
    """A folder as LitData writes it with pyarrow installed: samples that are empty, then a table."""
    folder.mkdir()
    index: dict[str, Any] = {"config": {"data_format": ["str"], "item_loader": "PyTreeLoader"}, "chunks": []}
    for number, table in enumerate(chunks):
        head = struct.pack("<I", rows) + struct.pack("<I", 4 + 4 * (rows + 1)) * (rows + 1)
        content = head + table + struct.pack("<I", len(table)) + b"LDARW01\0"
        (folder / f"chunk-0-{number}.bin").write_bytes(content)
        index["chunks"].append({"filename": f"chunk-0-{number}.bin", "chunk_size": rows, "chunk_bytes": len(content)})
    (folder / "index.json").write_text(json.dumps(index))


def table_bytes(rows: list[Sample], compression: str | None = None) -> bytes:
    pa = peer("pyarrow")
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for start in range(0, table.num_rows, 3):
            writer.write_table(table.slice(start, 3))
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_tables_of_litdata(tmp_path: Path, compression: str | None) -> None:
    rows = litdata_rows(16)
    nested = [{**row, "of": {"x": i, "y": {"z": text(i)}}} for i, row in enumerate(rows)]
    write_litdata_tables(tmp_path / "lit", [table_bytes(nested[i : i + 8], compression) for i in (0, 8)], rows=8)
    dataset = ox.data.open(tmp_path / "lit")
    assert len(dataset) == 16
    all_same(dataset, [flat({**row, "of.x": i, "of.y.z": text(i)}) for i, row in enumerate(rows)])
    batch = next(iter(ox.data.Loader(dataset, 4)))
    assert batch["text"] == [row["text"] for row in rows[:4]]
    # Without pyarrow nothing but the reading of such a sample fails.
    with pytest.raises(NotImplementedError, match="Arrow table behind the samples"):
        ox._C.data.open(str(tmp_path / "lit"))[0]


def test_damaged_tables_of_litdata(tmp_path: Path) -> None:
    good, other = table_bytes(litdata_rows(8)), table_bytes([{"text": text(i)} for i in range(8)])
    write_litdata_tables(tmp_path / "differ", [good, other], rows=8)
    with pytest.raises(OSError, match=r"chunk-0-1\.bin.*rows are not those of .*chunk-0-0\.bin"):
        ox.data.open(tmp_path / "differ")
    write_litdata_tables(tmp_path / "cut", [good, good], rows=8)
    second = tmp_path / "cut" / "chunk-0-1.bin"
    whole = second.read_bytes()
    for damaged in (whole[:-1], whole[:-12] + struct.pack("<I", 1 << 30) + whole[-8:], whole[:60] + whole[-30:], b""):
        second.write_bytes(damaged)
        with pytest.raises(OSError, match=r"chunk-0-1\.bin"):
            ox.data.open(tmp_path / "cut")


# Image folders


def torchvision_samples(root: Path) -> tuple[list[str], list[tuple[Path, int]]]:
    """As torchvision's ImageFolder finds them."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    found = []
    for number, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(root / name, followlinks=True)):
            for file in sorted(files):
                found += [(Path(folder) / file, number)] * file.lower().endswith((".jpg", ".jpeg", ".png", ".webp"))
    return classes, found


def test_image_folder(tmp_path: Path) -> None:
    names = [
        "b/2.jpg",
        "b/10.JPEG",
        "b/sub/1.png",
        "b/sub-2/1.webp",
        "b/sub/deep/x.JPG",
        "a/z.png",
        "a/notes.txt",
        "ä/x.png",
    ]
    for i, name in enumerate(names):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = {"j": "JPEG", "p": "PNG", "w": "WEBP", "t": "PNG"}[path.suffix[1].lower()]
        path.write_bytes(encoded(kind, i))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "linked.png").write_bytes(encoded("PNG", 99))
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "elsewhere")
    classes, found = torchvision_samples(tmp_path / "root")
    dataset = ox.data.open(str(tmp_path / "root"))
    assert dataset.format == "image_folder"
    assert list(dataset.classes) == classes
    all_same(dataset, [{"image": path.read_bytes(), "label": torch.tensor(label)} for path, label in found])


def test_flat_image_folder(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.png").write_bytes(encoded("PNG", i))
    dataset = ox.data.open(str(tmp_path))
    assert not dataset.classes
    all_same(dataset, [{"image": encoded("PNG", i)} for i in range(5)])


# .beton: FFCV does not install beside today's numpy; its files are laid out by the dtypes that its types.py describes

BETON_HEADER = np.dtype(
    [("version", "<u2"), ("fields", "<u2"), ("page", "<u4"), ("samples", "<u8"), ("table", "<u8")], align=True
)
BETON_FIELD = np.dtype([("type", "<u1"), ("name", ("<u1", 16)), ("arguments", ("<u1", (1024,)))], align=True)
BETON_IMAGE = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
BETON_BYTES = np.dtype([("ptr", "<u8"), ("size", "<u8")])


def array_arguments(dtype: str, shape: tuple[int, ...]) -> bytes:
    description = json.dumps(np.dtype(dtype).descr).encode()
    return struct.pack("<32Q", *shape, *[0] * (32 - len(shape))) + struct.pack("<Q", len(description)) + description


def write_beton(
    path: Path, count: int, fields: list[tuple[str, int, Any, bytes, Callable[[int], tuple[Any, bytes]]]]
) -> None:
    """Fields of name, type, metadata dtype, arguments, and a function to (metadata but for the pointer, content)."""
    metadata_type = np.dtype([("", kind) for _, _, kind, _, _ in fields], align=True)
    metadata = np.zeros(count, metadata_type)
    start = BETON_HEADER.itemsize + BETON_FIELD.itemsize * len(fields) + metadata.nbytes
    page = 1 << 21
    content, base, table = bytearray(), -(-start // page) * page, []
    for i in range(count):
        for number, (_, _, kind, _, make) in enumerate(fields):
            row, data = make(i)
            pointer = base + len(content)
            if kind in (BETON_IMAGE, BETON_BYTES):
                row = (*row, pointer) if kind == BETON_IMAGE else (pointer, *row)
            elif data:
                row = pointer
            metadata[i][number] = row
            if data:
                table.append((i, pointer, len(data)))
                content += data
    descriptors = np.zeros(len(fields), BETON_FIELD)
    for descriptor, (name, number, _, arguments, _) in zip(descriptors, fields, strict=True):
        descriptor["type"] = number
        descriptor["name"][: len(name)] = np.frombuffer(name.encode(), "<u1")
        descriptor["arguments"][: len(arguments)] = np.frombuffer(arguments, "<u1")
    header = np.array([(2, len(fields), page, count, base + len(content))], BETON_HEADER)
    random.Random(1).shuffle(table)  # as several writers leave it
    rows = np.array(table, np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")]))
    head = header.tobytes() + descriptors.tobytes() + metadata.tobytes()
    path.write_bytes(head.ljust(base, b"\0") + bytes(content) + rows.tobytes())


def test_beton(tmp_path: Path) -> None:
    def pixels(i: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.random.default_rng(i).integers(0, 255, (4 + i % 2, 5, 3), np.uint8)

    def array(i: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.random.default_rng(i).random((2, 3), np.float32)

    def note(i: int) -> bytes:
        return json.dumps({"text": text(i)}).encode()

    write_beton(
        tmp_path / "x.beton",
        9,
        [
            ("image", 2, BETON_IMAGE, b"", lambda i: ((0, 11, 9), encoded("JPEG", i))),
            ("label", 1, "<i8", b"", lambda i: (i - 4, b"")),
            ("raw", 2, BETON_IMAGE, b"", lambda i: ((1, 5, 4 + i % 2), pixels(i).tobytes())),
            ("weight", 0, "<f8", b"", lambda i: (i / 3, b"")),
            ("blob", 3, BETON_BYTES, b"", lambda i: ((i + 1,), bytes([i]) * (i + 1))),
            ("array", 4, "<u8", array_arguments("<f4", (2, 3)), lambda i: (None, array(i).tobytes())),
            ("note", 5, BETON_BYTES, b"", lambda i: ((len(note(i)) + 1,), note(i) + b"\0")),
            ("sixteen_letters_", 6, "<u8", array_arguments("|b1", (2,)), lambda i: (None, b"\1\0")),
        ],
    )
    dataset = ox.data.open(str(tmp_path / "x.beton"))
    assert dataset.format == "beton"
    expected = [
        {
            "image": encoded("JPEG", i),
            "label": torch.tensor(i - 4),
            "raw": pixels(i),
            "weight": torch.tensor(i / 3, dtype=torch.float64),
            "blob": bytes([i]) * (i + 1),
            "array": array(i),
            "note": note(i).decode(),
            "sixteen_letters_": torch.tensor([True, False]),
        }
        for i in range(9)
    ]
    all_same(dataset, expected)
