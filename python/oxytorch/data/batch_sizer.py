"""Batches of as many samples as fit under a limit of tokens or bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Sampler

from .._C import data as _native
from ..base import format_size, parse_size, system_info
from ..memory import available_bytes

__all__ = ["BatchSizer"]

_SHARE_OF_MEMORY = 8  # one batch takes this part of what is available: some wait ahead, and a step makes more of them


class BatchSizer(Sampler[Any]):
    """Batches whose samples together stay under a limit, in the order of the samples.

    Of a sequence (samples, or their sizes as numbers) batches are lists of indices: a ``batch_sampler`` of a
    DataLoader. Each sample is read once for its size. Of any other iterable they are lists of its samples. An
    `oxytorch.data.Loader` takes one of a sequence as its `batch_size`, and orders samples itself.

    Parameters
    ----------
    source : sequence or iterable
        Samples, or integers that are their sizes.
    max_tokens : int, optional
        The most that a batch may hold, in whatever `length` counts. Either this or `max_bytes`.
    max_bytes : int or str, optional
        The same in bytes; also ``"64MB"``, ``"5%"`` of the memory that this process may take, or ``"auto"``: an
        eighth of what `oxytorch.memory.available_bytes` finds when the first batch is made. `limit` says what it came
        to; give that number to have the same batches in another process.
    length : callable or field, optional
        The size of a sample: a function of it, or the key or index of a field, which is a number or has a length. By
        default the sample itself: a number, its length for tokens, or the bytes of its tensors and arrays.
    max_samples : int, optional
        The most samples of a batch.
    padded : bool
        Whether samples of a batch are padded to the longest of it, and count as that.
    shuffle : bool
        Whether a sequence comes in random order, another one each epoch; see `set_epoch`.
    seed : int
        Of that order.

    Raises
    ------
    ValueError
        For no limit or two, one that is not positive, and an iterable that is to be shuffled. While batches are made,
        for a sample that is larger than the limit, with its index and size, and for one of a negative size.

    Examples
    --------
    >>> batches = BatchSizer(dataset, max_tokens=4096, length="input_ids", padded=True, shuffle=True)
    >>> loader = DataLoader(dataset, batch_sampler=batches, collate_fn=pad)
    >>> for epoch in range(3):
    ...     batches.set_epoch(epoch)
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        max_tokens: int | None = None,
        max_bytes: int | str | None = None,
        length: Callable[[Any], int] | Hashable | None = None,
        max_samples: int | None = None,
        padded: bool = False,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if (max_tokens is None) == (max_bytes is None):
            raise ValueError("a batch needs one limit: give either max_tokens or max_bytes.")
        for name, value in (("max_tokens", max_tokens), ("max_bytes", max_bytes), ("max_samples", max_samples)):
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} is {value}; give 1 or more.")
        self.data_source = source
        self._is_sequence = hasattr(source, "__len__") and hasattr(source, "__getitem__")
        if shuffle and not self._is_sequence:
            raise ValueError(
                f"a {type(source).__name__} has no length and cannot be shuffled; shuffle its samples before."
            )
        self._max_tokens, self._max_bytes = max_tokens, max_bytes
        self._length = length
        self._max_samples = max_samples if max_samples is not None else sys.maxsize
        self._padded = padded
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._limit: int | None = max_tokens
        self._sizes: list[int] | None = None
        self._batches: list[list[int]] | None = None  # of this epoch

    @property
    def limit(self) -> int:
        """The most that a batch may hold, tokens or bytes."""
        if self._limit is None:
            self._limit = self._bytes()
        return self._limit

    def _bytes(self) -> int:
        if self._max_bytes == "auto":
            found = available_bytes() // _SHARE_OF_MEMORY
        else:
            found = parse_size(self._max_bytes or 0, int(system_info()["memory"]["limit"]))
        if found < 1:
            raise ValueError(f"max_bytes is {self._max_bytes!r}, which is {found} bytes here; give 1 or more.")
        return found

    def set_epoch(self, epoch: int) -> None:
        """Take the order of another epoch from now on."""
        if self._shuffle and epoch != self._epoch:
            self._batches = None
        self._epoch = epoch

    def __len__(self) -> int:
        """Batches of this epoch.

        Raises
        ------
        TypeError
            Where samples come from an iterable without a length.
        """
        if not self._is_sequence:
            raise TypeError(f"how many batches a {type(self.data_source).__name__} makes is not known before its end.")
        return len(self._of_epoch())

    def __iter__(self) -> Iterator[list[Any]]:
        if self._is_sequence:
            yield from map(list, self._of_epoch())  # copies: a consumer may change its own
        else:
            sized = ((sample, self._size(i, sample)) for i, sample in enumerate(self.data_source))
            yield from self._cut(sized)

    def set_into(self, options: _native.LoaderOptions) -> int:
        """Have a loader make these batches; returns about how many samples one has.

        Raises
        ------
        ValueError
            For an iterable without a length, and one that shuffles by itself.
        """
        if not self._is_sequence:
            raise ValueError(
                f"a loader needs the size of each sample before it draws, and a {type(self.data_source).__name__} has "
                "no length; give a sequence of samples, or of their sizes."
            )
        if self._shuffle:
            raise ValueError("the loader decides the order; give shuffle to it, not to its BatchSizer.")
        sizes = self._all_sizes()
        options.set_batch_sizer(sizes, self.limit, self._padded, self._max_samples)
        return max(1, min(self._max_samples, self.limit * len(sizes) // max(sum(sizes), 1)))

    def _of_epoch(self) -> list[list[int]]:
        if self._batches is None:
            sizes = self._all_sizes()
            self._batches = list(self._cut((i, sizes[i]) for i in self._order(len(sizes))))
        return self._batches

    def _order(self, count: int) -> Iterable[int]:
        if not self._shuffle:
            return range(count)
        # Not the sum of both: epoch 1 of seed 0 would be epoch 0 of seed 1.
        first = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(self._seed)))
        generator = torch.Generator().manual_seed(first + self._epoch)
        return torch.randperm(count, generator=generator).tolist()

    def _all_sizes(self) -> list[int]:
        """Sizes of a sequence, each read once."""
        if self._sizes is None:
            source: Any = self.data_source
            self._sizes = [self._size(i, source[i]) for i in range(len(source))]
        return self._sizes

    def _size(self, index: int, sample: Any) -> int:
        size = self._measured(sample)
        if size < 0:
            raise ValueError(f"sample {index} has a size of {size}; sizes are not negative.")
        if size > self.limit:
            if self._max_tokens is not None:
                raise ValueError(
                    f"sample {index} has {size} tokens, more than max_tokens={self.limit}; raise it, or cut the sample."
                )
            raise ValueError(
                f"sample {index} has {size} bytes ({format_size(size)}), more than max_bytes={self._max_bytes!r} "
                f"({self.limit} bytes); raise it, or cut the sample."
            )
        return size

    def _measured(self, sample: Any) -> int:
        if callable(self._length):
            return int(self._length(sample))
        value = sample if self._length is None else sample[self._length]
        is_number = isinstance(value, int) or (hasattr(value, "__int__") and getattr(value, "ndim", 1) == 0)
        if is_number:
            return int(value)
        return len(value) if self._max_tokens is not None else _bytes_of(value)

    def _cut(self, sized: Iterable[tuple[Any, int]]) -> Iterator[list[Any]]:
        """Begin a new batch where a sample would not fit anymore."""
        batch: list[Any] = []
        fill = _native.BatchFill(self.limit, self._padded, self._max_samples)
        for sample, size in sized:
            if fill.add(size):
                yield batch
                batch = []
            batch.append(sample)
        if batch:
            yield batch


def _bytes_of(sample: Any) -> int:
    """Bytes of the tensors, arrays, strings and bytes of a sample; a number counts as eight."""
    total = 0
    for leaf in tree_leaves(sample):
        if hasattr(leaf, "nbytes"):
            total += int(leaf.nbytes)
        elif isinstance(leaf, str):
            total += len(leaf.encode())
        elif isinstance(leaf, bytes | bytearray):
            total += len(leaf)
        else:
            total += 8
    return total
