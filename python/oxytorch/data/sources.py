"""What a loader reads: files in known formats, and datasets of Python's."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .._C import data as _native

__all__ = ["PythonSource", "PythonStream", "TokenWindows", "concatenate", "open", "open_raw", "part_sizes"]


def open(location: Any) -> _native.Dataset:
    """Open a dataset; its format is found by content.

    Known are folders of class folders of images, WebDataset (``.tar``, one, ``shard-{000..042}.tar`` or a folder), MDS,
    ``.npy``, Megatron (``.idx`` and ``.bin``), JSONL, safetensors, ``.beton``, TFRecord and LitData.

    Parameters
    ----------
    location : str, path or object
        A file, a folder, or an http(s) or s3 URL, which is read by ranges. A ``.parquet`` or ``.arrow`` file, or rows
        of text and numbers in a local folder of LitData's, which take pyarrow. An object with ``__arrow_c_stream__``
        (tables of pyarrow and polars) or a ``datasets.Dataset``, whose columns are not copied.

    Returns
    -------
    Dataset
        ``len(ds)``, ``ds[i]`` (a dict of tensors, text and bytes), ``ds.schema``, ``ds.classes``.

    Raises
    ------
    FileNotFoundError
    ValueError
        For what is none of these formats.
    OSError
        For what is damaged, with file and offset.
    """
    if not isinstance(location, (str, os.PathLike)):
        return _native.from_arrow(_table(location).__arrow_c_stream__())
    path = os.fspath(location)
    if path.endswith((".parquet", ".arrow", ".feather")):
        return _native.from_arrow(_read_table(path).__arrow_c_stream__())
    dataset = _native.open(path)
    chunks = _litdata_tables(Path(path.removeprefix("file://"))) if dataset.format == "litdata" else []
    return _native.from_arrow(_read_litdata(chunks).__arrow_c_stream__()) if chunks else dataset


def concatenate(*datasets: _native.Dataset) -> _native.Dataset:
    """Make several datasets one; `Mixed` draws from them by weight.

    Parameters
    ----------
    *datasets : Dataset
        With the same fields and classes. Datasets of Python's are joined by `torch.utils.data.ConcatDataset`.

    Returns
    -------
    Dataset
        The samples of the first before those of the second; ``part_sizes`` has how many are of each.

    Raises
    ------
    ValueError
        Where there are none, or where fields or classes are not those of the first.
    """
    return _native.concatenate(list(datasets))


def part_sizes(dataset: Any) -> list[int]:
    """Return the samples of each dataset that this one was made of; its own alone where it was not."""
    if isinstance(dataset, _native.Dataset):
        return list(dataset.part_sizes)
    parts: Any = dataset.datasets if isinstance(dataset, torch.utils.data.ConcatDataset) else [dataset]
    return [len(part) for part in parts]


def _table(source: Any) -> Any:
    """What gives an Arrow stream."""
    if type(source).__module__.partition(".")[0] == "datasets" and hasattr(source, "with_format"):
        return source.with_format("arrow")[:]  # in the order of its rows, where it was shuffled or filtered
    if not hasattr(source, "__arrow_c_stream__"):
        raise TypeError(
            f"a {type(source).__qualname__} is no location and gives no Arrow stream. Give a path, a URL, a pyarrow "
            "table or a datasets.Dataset; a map-style dataset goes to oxytorch.data.Loader as it is."
        )
    return source


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow  # noqa: PLC0415  (only where such a file is opened)
        import pyarrow.parquet  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"{path} takes pyarrow to be read: pip install pyarrow.") from None
    return pyarrow


def _read_table(path: str) -> Any:
    pa = _pyarrow(path)
    if path.endswith(".parquet"):
        return pa.parquet.read_table(path, memory_map=True)
    with pa.memory_map(path) as source:
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()


# LitData keeps rows of text and numbers as a table in Arrow's file format behind the offsets of samples that are empty:
# the table, u32 its bytes, then these. https://github.com/Lightning-AI/litData, streaming/item_loader.py
_LITDATA_TABLE = b"LDARW01\0"
_LITDATA_LEAST = 24  # bytes of a chunk: of one sample, without rows


def _litdata_tables(folder: Path) -> list[Path]:
    """Chunks of a local folder that hold their samples as such tables; none where the first one does not."""
    if not folder.is_dir():
        return []
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    chunks = [folder / chunk["filename"] for chunk in index["chunks"]]
    if not chunks or chunks[0].stat().st_size < _LITDATA_LEAST:
        return []
    with chunks[0].open("rb") as file:
        samples, first = struct.unpack("<II", file.read(8))
        file.seek(4 + 4 * samples)
        last = file.read(4)
        file.seek(-8, os.SEEK_END)
        empty = samples > 0 and last == struct.pack("<I", first)
        return chunks if empty and file.read(8) == _LITDATA_TABLE else []


def _read_litdata(chunks: list[Path]) -> Any:
    pa = _pyarrow(str(chunks[0]))
    tables: list[Any] = []
    for chunk in chunks:
        with pa.memory_map(str(chunk)) as source:
            whole = source.read_buffer()
        size = int.from_bytes(whole[-12:-8].to_pybytes(), "little") if len(whole) > 12 else 0
        if whole[-8:].to_pybytes() != _LITDATA_TABLE or not 0 < size <= len(whole) - 12:
            raise OSError(f"{chunk} is truncated or damaged: it does not end with the table of its rows.")
        try:
            table = _without_structs(pa, pa.ipc.open_file(whole[-12 - size : -12]).read_all())
            tables.append(table.cast(tables[0].schema) if tables else table)
        except (pa.ArrowInvalid, ValueError) as error:
            raise OSError(f"{chunk} is damaged, or its rows are not those of {chunks[0]}: {error}") from error
    return pa.concat_tables(tables)


def _without_structs(pa: Any, table: Any) -> Any:
    """Make fields of a dict columns of their own, by LitData's names; an image stays a pair of bytes and path."""
    nested = [field.name for field in table.schema if pa.types.is_struct(field.type)]
    nested = [name for name in nested if table.schema.field(name).type.get_field_index("bytes") < 0]
    for name in nested:
        at = table.schema.get_field_index(name)
        columns = table.column(at).flatten()
        names = [f"{name}.{field.name}" for field in table.schema.field(at).type]
        table = table.remove_column(at)
        for offset, (column, inner) in enumerate(zip(columns, names, strict=True)):
            table = table.add_column(at + offset, inner, column)
    return _without_structs(pa, table) if nested else table


def open_raw(location: str | os.PathLike[str], dtype: str, shape: Sequence[int] = ()) -> _native.Dataset:
    """Open a file without a header: samples of one dtype and shape, one after the other."""
    return _native.open_raw(os.fspath(location), dtype, list(shape))


def TokenWindows(tokens: _native.Dataset, length: int) -> _native.Dataset:
    """Cut tokens into windows of ``length + 1`` that overlap by one, as next-token training takes them.

    Parameters
    ----------
    tokens : Dataset
        A one-dimensional ``.npy``, a raw file, Megatron documents or MDS tokens: one long text, in order.
    length : int
        Tokens that a model sees at once.

    Returns
    -------
    Dataset
        Of one field ``tokens``, int64 of ``length + 1``.
    """
    return _native.token_windows(tokens, length)


def _plain(value: Any) -> Tensor | str | bytes:
    """A leaf of a sample as what the pipeline keeps."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (str, bytes)):
        return value
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else None)
    if hasattr(value, "__array_interface__"):  # numpy, PIL
        import numpy as np  # noqa: PLC0415  (used where a sample is of it)

        return torch.from_numpy(np.ascontiguousarray(value))
    raise TypeError(
        f"a sample holds a {type(value).__qualname__}, expected tensors, numpy arrays, PIL images, numbers, text."
    )


class _Structure:
    """How the leaves of a sample are put together, by the first one."""

    def __init__(self, sample: Any, varying: Collection[str]) -> None:
        leaves, self._spec = tree_flatten(sample)
        first = [_plain(leaf) for leaf in leaves]
        named = self._spec.type is dict
        self._names = [str(key) for key in self._spec.context] if named else [str(i) for i in range(len(first))]
        if len(self._names) != len(first):  # a nested structure
            self._names = [str(i) for i in range(len(first))]
        self.fields = [_field(name, value, name in varying) for name, value in zip(self._names, first, strict=True)]

    def fingerprint(self, source: Any, size: int | str) -> str:
        identity = f"{type(source).__module__}.{type(source).__qualname__} {size} {self._names}"
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    def leaves(self, sample: Any, name: str) -> list[Tensor | str | bytes]:
        leaves, spec = tree_flatten(sample)
        if spec != self._spec:
            raise ValueError(f"{name} is of another structure than the first sample: {spec} and {self._spec}.")
        return [_plain(leaf) for leaf in leaves]

    def batch(self, columns: dict[str, Any]) -> Any:
        """Put a batch's columns into the structure of a sample."""
        return tree_unflatten([columns[name] for name in self._names], self._spec)


class PythonSource:
    """A map-style dataset of Python's as the loader reads it: by threads that share the interpreter.

    Parameters
    ----------
    dataset : object
        With ``__len__`` and ``__getitem__``; samples are tensors, arrays, PIL images, numbers and text in tuples, lists
        and dicts of one structure.
    varying : collection of str
        Fields whose samples differ in their first dimension.
    """

    def __init__(self, dataset: Any, varying: Collection[str] = ()) -> None:
        self._dataset = dataset
        size = len(dataset)
        if size == 0:
            raise ValueError("the dataset is empty.")
        structure = self._structure = _Structure(dataset[0], varying)
        self.batch = structure.batch
        self.native = _native.python_dataset(structure.fields, size, self._read, structure.fingerprint(dataset, size))

    def _read(self, index: int) -> list[Tensor | str | bytes]:
        return self._structure.leaves(self._dataset[index], f"dataset[{index}]")


class PythonStream:
    """An iterable of Python's as the loader reads it: one thread draws its samples, in order.

    Parameters
    ----------
    source : iterable
        Begins anew with each ``iter()``, and is told the epoch before where it has ``set_epoch``. Samples as of
        `PythonSource`. The first one is drawn at once, for its structure, and not again.
    varying : collection of str
        Fields whose samples differ in their first dimension.
    """

    def __init__(self, source: Any, varying: Collection[str] = ()) -> None:
        self._source = source
        self._samples = iter(source)
        first = next(self._samples, _NONE)
        if first is _NONE:
            raise ValueError("the stream gives no sample.")
        self._drawn = [first]
        self._is_untouched = True
        structure = self._structure = _Structure(first, varying)
        self.batch = structure.batch
        self.native = _native.python_stream(
            structure.fields, self._begin, self._next, structure.fingerprint(source, "stream")
        )

    def _begin(self, epoch: int) -> None:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        if self._is_untouched and (epoch == 0 or not hasattr(self._source, "set_epoch")):
            self._is_untouched = False
            return
        samples = iter(self._source)
        if samples is self._samples:
            raise RuntimeError(
                f"a {type(self._source).__qualname__} is gone through once: it cannot begin epoch {epoch}. Give an "
                "iterable whose __iter__ begins anew, such as a torch.utils.data.IterableDataset."
            )
        self._is_untouched = False
        self._drawn = []
        self._samples = samples

    def _next(self) -> list[Tensor | str | bytes] | None:
        sample = self._drawn.pop() if self._drawn else next(self._samples, _NONE)
        return None if sample is _NONE else self._structure.leaves(sample, "a sample")


_NONE = object()


def _field(name: str, value: Tensor | str | bytes, varies: bool) -> _native.Field:
    if isinstance(value, str):
        return _native.Field(name, "text")
    if isinstance(value, bytes):
        return _native.Field(name, "bytes")
    pixels = value.dtype is torch.uint8 and value.dim() == 3 and value.shape[2] in (1, 3)
    if pixels:
        return _native.Field(name, "image")
    shape = list(value.shape)
    if varies and shape:
        shape[0] = -1
    return _native.Field(name, "array", str(value.dtype).removeprefix("torch."), shape)
