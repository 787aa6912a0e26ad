"""What a loader reads: files in known formats, and datasets of Python's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .._C import data as _native

__all__ = ["PythonSource", "TokenWindows", "concatenate", "open", "open_raw", "part_sizes"]


def open(location: Any) -> _native.Dataset:
    """Open a dataset; its format is found by content.

    Known are folders of class folders of images, WebDataset (``.tar``, one, ``shard-{000..042}.tar`` or a folder), MDS,
    ``.npy``, Megatron (``.idx`` and ``.bin``), JSONL, safetensors, ``.beton``, TFRecord and LitData.

    Parameters
    ----------
    location : str, path or object
        A file, a folder, or an http(s) or s3 URL, which is read by ranges. A ``.parquet`` or ``.arrow`` file, which
        takes pyarrow. An object with ``__arrow_c_stream__`` (tables of pyarrow and polars) or a ``datasets.Dataset``,
        whose columns are not copied.

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
    return _native.open(path)


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


def _read_table(path: str) -> Any:
    try:
        import pyarrow as pa  # noqa: PLC0415  (only where such a file is opened)
        from pyarrow import parquet  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"{path} takes pyarrow to be read: pip install pyarrow.") from None
    if path.endswith(".parquet"):
        return parquet.read_table(path, memory_map=True)
    with pa.memory_map(path) as source:
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()


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
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__qualname__} has no len() and indices. Open files with oxytorch.data.open(); a "
                "stream is read by torch's DataLoader."
            )
        self._dataset = dataset
        size = len(dataset)
        if size == 0:
            raise ValueError("the dataset is empty.")
        leaves, self._spec = tree_flatten(dataset[0])
        first = [_plain(leaf) for leaf in leaves]
        named = self._spec.type is dict
        self._names = [str(key) for key in self._spec.context] if named else [str(i) for i in range(len(first))]
        if len(self._names) != len(first):  # a nested structure
            self._names = [str(i) for i in range(len(first))]
        fields = [_field(name, value, name in varying) for name, value in zip(self._names, first, strict=True)]
        identity = f"{type(dataset).__module__}.{type(dataset).__qualname__} {size} {self._names}"
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.native = _native.python_dataset(fields, size, self._read, fingerprint)

    def _read(self, index: int) -> list[Tensor | str | bytes]:
        leaves, spec = tree_flatten(self._dataset[index])
        if spec != self._spec:
            raise ValueError(f"dataset[{index}] is of another structure than dataset[0]: {spec} and {self._spec}.")
        return [_plain(leaf) for leaf in leaves]

    def batch(self, columns: dict[str, Any]) -> Any:
        """Put a batch's columns into the structure of a sample."""
        return tree_unflatten([columns[name] for name in self._names], self._spec)


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
