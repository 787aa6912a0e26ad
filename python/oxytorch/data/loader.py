"""The loader: batches of a dataset, made ahead by threads, resumable anywhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._C import data as _native
from .batch_sizer import BatchSizer
from .sampling import Sampling, sampler_of, window_of
from .sources import PythonSource, PythonStream, part_sizes
from .transforms import Normalize

__all__ = ["Loader"]


class Loader:
    """Iterates a dataset in batches.

    An epoch is one ``for`` loop; after one that ends early the next loop begins the next epoch. The stream of batches
    depends on the dataset, the order, `seed` and the global batch size alone: not on threads, prefetching, caching, and
    not on how many processes share a global batch.

    Parameters
    ----------
    dataset : Dataset or object
        What `open` gives, or a map-style dataset of Python's: that one is called by threads that share the interpreter,
        and batches have the structure of its samples. Also an iterable without a length, such as a
        `torch.utils.data.IterableDataset`: one thread draws its samples, in order. Every process draws all of them and
        keeps its part; give ``rank=0, world_size=1`` where the iterable gives each process its own.
    batch_size : int or BatchSizer
        Of this process. A `BatchSizer` of the samples, or of their sizes, makes batches of as many samples as fit under
        its limit; processes take such batches in turn, and where an epoch ends before each has one more, the last ones
        repeat the last batch.
    transform : sequence
        Stages for each sample, such as ``[RandomResizedCrop(224), HorizontalFlip(), Normalize()]``. A function of your
        own takes and returns a dict of the sample's fields (an image is uint8 of height x width x channels); it runs
        under the interpreter's lock, and `stats` shows what it takes. `MixUp` and `CutMix` work on whole batches,
        behind all others.
    shuffle : bool, Weighted, Mixed, Bucketed or ShuffledBlocks
        An iterable without a length takes True, which mixes each 4,096 of its samples, or ``ShuffledBlocks``, which
        mixes each ``block * window``; it holds so many.
    seed : int
        Of the order and of all randomness of stages.
    rank, world_size : int, optional
        Of this process; those of torch.distributed where it is initialized, else 0 and 1.
    drop_last : bool
        Whether an epoch ends before a batch that is not full.
    threads : int or "auto"
        "auto": as many as the process has cores.
    prefetch : int or "auto"
        Batches made ahead.
    cache : Cache, str or None
        For samples as they are read: a `Cache`, or its memory ("2GB", "30%", "auto"). JPEGs are kept without their
        Huffman coding, so that later epochs decode faster, to the same pixels. None: nothing is kept.
    on_error : {"raise", "skip", "replace"}
        What happens at a sample that cannot be read or decoded: an error with its file and offset, the batch is
        smaller, or the next sample that can be read is taken.
    boxes, masks, per_box : str, sequence of str, sequence of str
        Fields that move with the image: float32 boxes of [n, 4] (x0, y0, x1, y1), encoded masks, and fields with a row
        for each box, which lose the rows of boxes that leave the image.
    pad : mapping of str to float or None
        Fields whose samples differ in length, and what they are filled up with to the longest of a batch. Others of
        them, and those with None, are lists of tensors. Of a dataset of Python's each such field is to be named here.
    channels_last : bool
        Images as batch x height x width x channels.
    collate : callable, optional
        Takes the batch as a dict and returns what the loop is to get.
    device : torch.device, optional
        Where batches are put. They are made in pinned memory, and each is copied on a stream of its own while the step
        on the one before it is taken. It can be set later, too, and the same batches follow.

    Raises
    ------
    ValueError
        For an option that cannot be, with the value.

    Examples
    --------
    >>> stages = [RandomResizedCrop(224), HorizontalFlip(), Normalize()]
    >>> for batch in Loader(open("imagenet/train"), 256, stages, shuffle=True):
    ...     train(batch["image"], batch["label"])
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | BatchSizer = 1,
        transform: Sequence[Any] = (),
        *,
        shuffle: bool | Sampling = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        threads: int | str = "auto",
        prefetch: int | str = "auto",
        cache: _native.Cache | str | None = None,
        on_error: str = "raise",
        boxes: str = "",
        masks: Sequence[str] = (),
        per_box: Sequence[str] = (),
        pad: Mapping[str, float | None] | None = None,
        channels_last: bool = False,
        collate: Callable[[dict[str, Any]], Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._source = None if isinstance(dataset, _native.Dataset) else _source_of(dataset, pad or ())
        self.dataset = dataset
        native = dataset if self._source is None else self._source.native
        self._collate = collate
        self._left_off = False
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        options = _native.LoaderOptions()
        options.seed = seed
        options.rank = rank if rank is not None else torch.distributed.get_rank() if distributed else 0
        options.world_size = (
            world_size if world_size is not None else torch.distributed.get_world_size() if distributed else 1
        )
        options.drop_last = drop_last
        options.threads = _number(threads, "threads")
        options.prefetch = _number(prefetch, "prefetch")
        options.set_on_error(on_error)
        options.boxes, options.masks, options.per_box = boxes, list(masks), list(per_box)
        options.pad = [(field, value) for field, value in (pad or {}).items() if value is not None]
        options.set_channels_last(channels_last)
        stream = isinstance(self._source, PythonStream)
        if isinstance(batch_size, BatchSizer):
            if stream:
                raise ValueError(
                    "a stream has no sizes that are known before; go through "
                    "BatchSizer(stream, max_tokens=...) itself, which gives lists of its samples."
                )
            samples = batch_size.set_into(options)
        else:
            samples = options.batch_size = batch_size
        if stream:
            options.shuffle = shuffle is not False
            options.shuffle_window = window_of(shuffle, options.shuffle_window)
        elif samples > 0:  # else the native loader says so
            options.set_sampler(sampler_of(shuffle, part_sizes(dataset), samples))
        _set_cache(options, cache)
        stages: list[_native.Stage] = []
        batch_stages: list[_native.BatchStage] = []
        for one in transform:
            if isinstance(one, Normalize):
                options.normalize(one.mean, one.std, one.dtype)
            elif isinstance(one, _native.Stage):
                stages.append(one)
            elif isinstance(one, _native.BatchStage):
                batch_stages.append(one)
            elif callable(one):
                stages.append(_native.function_stage(getattr(one, "__name__", type(one).__name__), one))
            else:
                raise TypeError(
                    f"a transform is a {type(one).__qualname__}, expected a stage or a function of a sample."
                )
        options.set_stages(stages)
        options.set_batch_stages(batch_stages)
        self._options = options
        self._given_options: dict[str, Any] = {"threads": threads, "prefetch": prefetch, "cache": cache}
        place = None if device is None else torch.device(device)
        self._native: _native.Loader = _native.Loader(native, options, place)

    def __iter__(self) -> Iterator[Any]:
        if self._left_off:  # by a loop that ended early
            self._native.set_epoch(self.epoch + 1)
        self._left_off = True
        yield from map(self._given, iter(self._native.next, None))  # holds no batch while the next one is made
        self._left_off = False

    def __len__(self) -> int:
        """Batches of this epoch.

        Raises
        ------
        TypeError
            For a stream, which ends when it ends.
        """
        if self._native.size < 0:
            raise TypeError(f"how many batches a {type(self.dataset).__name__} gives is not known before its end.")
        return self._native.size

    def _given(self, columns: dict[str, Any]) -> Any:
        batch = columns if self._source is None else self._source.batch(columns)
        return batch if self._collate is None else self._collate(batch)

    def change(self, **options: Any) -> Any:
        """Change `threads`, `prefetch` or `cache`, also in the middle of an epoch: the same batches follow.

        Parameters
        ----------
        **options
            One or more of the three, as for the constructor.

        Returns
        -------
        object or tuple
            What they were, to be put back.
        """
        if unknown := sorted(options.keys() - self._given_options.keys()):
            raise TypeError(f"a loader has no {unknown[0]!r} to change, only {', '.join(self._given_options)}.")
        changed = {**self._given_options, **options}
        self._options.threads = _number(changed["threads"], "threads")
        self._options.prefetch = _number(changed["prefetch"], "prefetch")
        if "cache" in options:
            _set_cache(self._options, changed["cache"])
        self._native.change(self._options)
        before = tuple(self._given_options[name] for name in options)
        self._given_options = changed
        return before if len(before) > 1 else before[0]

    @property
    def device(self) -> torch.device | None:
        """Where batches are put; None: they stay in the host's memory."""
        return self._native.device

    @device.setter
    def device(self, device: torch.device | str | None) -> None:
        self._native.set_device(None if device is None else torch.device(device))

    @property
    def is_pinned(self) -> bool:
        """Whether batches are made in memory that the device copies from at full speed."""
        return self._native.is_pinned

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of."""
        return self._native.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch anew; `Trainer.fit` does it. Nothing changes where the loader stands there already."""
        self._native.set_epoch(epoch)
        self._left_off = False

    def state_dict(self) -> dict[str, str]:
        """Return where the loader is: text of at most 256 bytes."""
        return {"loader": self._native.state()}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on where a loader with this state was.

        Threads, rank and world size may differ, the global batch size must not.

        Raises
        ------
        RuntimeError
            Where the dataset's files, the order or the global batch size are others.
        """
        if "loader" not in state:
            raise ValueError(f"this is no state of a loader: it has {sorted(state)}.")
        self._native.load_state(state["loader"])
        self._left_off = False

    def stats(self) -> dict[str, Any]:
        """Return where time goes: seconds of all threads by stage, what the loop waited, hits of the cache.

        Of a loader with a device also ``copied_bytes`` and ``copy_seconds``, by the device's clock.
        """
        return self._native.stats()


def _source_of(dataset: Any, varying: Collection[str]) -> PythonSource | PythonStream:
    streams = isinstance(dataset, torch.utils.data.IterableDataset)  # which has a __getitem__ that only raises
    if not streams and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return PythonSource(dataset, varying)
    if hasattr(dataset, "__iter__"):
        return PythonStream(dataset, varying)
    raise TypeError(
        f"a {type(dataset).__qualname__} has neither len() and indices nor an iterator. Open files with "
        "oxytorch.data.open()."
    )


def _set_cache(options: _native.LoaderOptions, cache: _native.Cache | str | None) -> None:
    made: Any = _native.Cache(cache) if isinstance(cache, str) else cache  # None too, which the stub does not know
    options.cache = made
    options.strip_jpegs = cache is not None


def _number(value: int | str, name: str) -> int:
    if value == "auto":
        return 0
    if not isinstance(value, int) or value < 1:
        raise ValueError(f'{name} is {value!r}, expected a number of at least 1 or "auto".')
    return value
