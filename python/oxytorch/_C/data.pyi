"""
Datasets, stages and the loader.
"""

from __future__ import annotations
import collections.abc
import oxytorch._C.base
import torch
import typing
import typing_extensions

__all__: list[str] = [
    "BatchFill",
    "BatchStage",
    "Cache",
    "CacheStats",
    "Converted",
    "Dataset",
    "Field",
    "Loader",
    "LoaderOptions",
    "LoaderSettings",
    "LoaderSettingsLine",
    "LoaderTrial",
    "LoaderTuning",
    "MegatronWriter",
    "Sampler",
    "Stage",
    "Stream",
    "TierStats",
    "bucketed",
    "center_crop",
    "color_jitter",
    "concatenate",
    "convert",
    "cut_mix",
    "decode_image",
    "encode_jpeg",
    "from_arrow",
    "function_stage",
    "horizontal_flip",
    "mix_up",
    "mixed",
    "open",
    "open_raw",
    "python_dataset",
    "python_stream",
    "rand_augment",
    "random_resized_crop",
    "resize",
    "resize_shorter",
    "resize_to",
    "sequential",
    "shuffled",
    "shuffled_blocks",
    "token_windows",
    "tune",
    "weighted",
]

class Field:
    """
    One named field of each sample.
    """
    def __init__(
        self,
        name: str,
        kind: str = "array",
        dtype: str = "uint8",
        shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
    ) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def dtype(self) -> str:
        """
        As numpy names it.
        """
    @property
    def kind(self) -> str:
        """
        array, image, text or bytes.
        """
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> list[int]:
        """
        Of an array; -1 where a dimension differs between samples.
        """

class Dataset:
    """
    Samples that can be read in any order.
    """
    def __getitem__(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> dict: ...
    def __len__(self) -> int: ...
    def place(self, index: typing.SupportsInt | typing.SupportsIndex) -> str: ...
    @property
    def classes(self) -> list[str]: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def part_sizes(self) -> list[int]: ...
    @property
    def schema(self) -> list[Field]: ...

class Stream:
    """
    Samples that come one after the other.
    """

class Stage:
    """
    One step for one sample.
    """
    def __call__(
        self,
        image: torch.Tensor,
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
        epoch: typing.SupportsInt | typing.SupportsIndex = 0,
        sample: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> torch.Tensor: ...
    def __repr__(self) -> str: ...
    @property
    def name(self) -> str: ...

class BatchStage:
    """
    One step for one batch.
    """
    def __repr__(self) -> str: ...
    @property
    def name(self) -> str: ...

class Sampler:
    """
    Draws samples, an epoch at a time.
    """
    def __len__(self) -> int: ...
    def at(
        self,
        position: typing.SupportsInt | typing.SupportsIndex,
        epoch: typing.SupportsInt | typing.SupportsIndex = 0,
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> int: ...
    @property
    def fingerprint(self) -> str: ...

class Converted:
    """
    What was written.
    """
    def __init__(
        self,
        format: str,
        samples: typing.SupportsInt | typing.SupportsIndex,
        bytes: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def format(self) -> str: ...
    @property
    def resumed(self) -> int:
        """
        Samples that an interrupted conversion had written before.
        """
    @property
    def samples(self) -> int: ...

class MegatronWriter:
    """
    Writes documents of tokens one by one.
    """
    def __init__(self, prefix: str, dtype: str) -> None: ...
    def add(
        self,
        documents: collections.abc.Iterable,
        first: typing.SupportsInt | typing.SupportsIndex,
        end: typing.SupportsInt | typing.SupportsIndex | None,
    ) -> None:
        """
        Sequences of token numbers, the first of which has the number `first` in errors, with `end` after each.
        """
    def finish(self) -> int: ...

class TierStats:
    """
    What a tier of a cache did so far.
    """
    @property
    def bytes(self) -> int: ...
    @property
    def damaged(self) -> int: ...
    @property
    def entries(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def misses(self) -> int: ...

class CacheStats:
    @property
    def disk(self) -> TierStats: ...
    @property
    def memory(self) -> TierStats: ...
    @property
    def remote(self) -> TierStats: ...

class Cache:
    """
    Samples as they are read, in memory, on a disk and in a remote place.
    """
    def __init__(
        self,
        memory: str = "auto",
        disk: str = "0",
        folder: str = "",
        remote: str = "",
        policy: str = "next-use",
        ttl: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    ) -> None: ...
    def clear(self) -> None: ...
    def stats(self) -> CacheStats: ...

class LoaderOptions:
    boxes: str
    cache: Cache
    drop_last: bool
    shuffle: bool
    strip_jpegs: bool
    def __init__(self) -> None: ...
    def normalize(
        self,
        mean: typing.Annotated[collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], "FixedSize(3)"],
        std: typing.Annotated[collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], "FixedSize(3)"],
        dtype: str,
    ) -> None: ...
    def set_batch_sizer(
        self,
        sizes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        most: typing.SupportsInt | typing.SupportsIndex,
        padded: bool,
        max_samples: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def set_batch_stages(self, arg0: collections.abc.Sequence[BatchStage]) -> None: ...
    def set_channels_last(self, arg0: bool) -> None: ...
    def set_on_error(self, arg0: str) -> None: ...
    def set_sampler(self, arg0: Sampler) -> None: ...
    def set_stages(self, arg0: collections.abc.Sequence[Stage]) -> None: ...
    @property
    def batch_size(self) -> int: ...
    @batch_size.setter
    def batch_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def masks(self) -> list[str]: ...
    @masks.setter
    def masks(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def pad(self) -> list[tuple[str, float]]: ...
    @pad.setter
    def pad(self, arg0: collections.abc.Sequence[tuple[str, typing.SupportsFloat | typing.SupportsIndex]]) -> None: ...
    @property
    def per_box(self) -> list[str]: ...
    @per_box.setter
    def per_box(self, arg0: collections.abc.Sequence[str]) -> None: ...
    @property
    def prefetch(self) -> int: ...
    @prefetch.setter
    def prefetch(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def rank(self) -> int: ...
    @rank.setter
    def rank(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def seed(self) -> int: ...
    @seed.setter
    def seed(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def shuffle_window(self) -> int: ...
    @shuffle_window.setter
    def shuffle_window(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def threads(self) -> int: ...
    @threads.setter
    def threads(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def world_size(self) -> int: ...
    @world_size.setter
    def world_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class BatchFill:
    """
    Fills batches up to a limit, sample by sample.
    """
    def __init__(
        self,
        most: typing.SupportsInt | typing.SupportsIndex,
        padded: bool,
        max_samples: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def add(self, size: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        Take a sample; whether it begins the next batch.
        """

class Loader:
    """
    Makes batches ahead with threads.
    """
    @typing.overload
    def __init__(self, dataset: Dataset, options: LoaderOptions, device: torch.device | None) -> None: ...
    @typing.overload
    def __init__(self, stream: Stream, options: LoaderOptions, device: torch.device | None) -> None: ...
    def change(self, options: LoaderOptions) -> None:
        """
        Take threads, prefetch and cache of these options.
        """
    def load_state(self, state: str) -> None: ...
    def next(self) -> typing.Any: ...
    def set_device(self, device: torch.device | None) -> None: ...
    def set_epoch(self, epoch: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def state(self) -> str: ...
    def stats(self) -> dict: ...
    @property
    def device(self) -> torch.device | None: ...
    @property
    def epoch(self) -> int: ...
    @property
    def is_copying(self) -> bool:
        """
        Whether the next batch is on its way to the device.
        """
    @property
    def is_pinned(self) -> bool:
        """
        Whether batches are made in pinned memory.
        """
    @property
    def is_stream(self) -> bool: ...
    @property
    def prefetch(self) -> int: ...
    @property
    def size(self) -> int:
        """
        Batches in this epoch; -1 of a stream.
        """
    @property
    def threads(self) -> int: ...

class LoaderTrial:
    """
    A setting of a loader that was tried.
    """
    def __init__(
        self,
        setting: str,
        batches_per_second: typing.SupportsFloat | typing.SupportsIndex | None = None,
        ratio: typing.SupportsFloat | typing.SupportsIndex | None = None,
        note: str = "",
    ) -> None: ...
    def __str__(self) -> str: ...
    @property
    def batches_per_second(self) -> float | None:
        """
        The median; None: it was not measured.
        """
    @property
    def note(self) -> str:
        """
        Why it was left out, that it was taken, or what it costs.
        """
    @property
    def ratio(self) -> float | None:
        """
        Of its speed and that of the loader as given.
        """
    @property
    def setting(self) -> str: ...

class LoaderTuning:
    """
    What tune() found and set.
    """
    @property
    def bottleneck(self) -> str: ...
    @property
    def cache(self) -> Cache: ...
    @property
    def prefetch(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def trials(self) -> list[LoaderTrial]: ...

class LoaderSettingsLine:
    """
    What became of a setting.
    """
    @property
    def cost(self) -> str: ...
    @property
    def is_in_effect(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def reason(self) -> str: ...

class LoaderSettings:
    """
    Settings of a run, brought about on its loader.
    """
    def __init__(
        self, loader: Loader, config: oxytorch._C.base.PerformanceConfig, device: torch.device | None
    ) -> None: ...
    def revert(self) -> None: ...
    @property
    def lines(self) -> list[LoaderSettingsLine]: ...

def bucketed(
    lengths: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    batch: typing.SupportsInt | typing.SupportsIndex,
    window: typing.SupportsInt | typing.SupportsIndex,
) -> Sampler: ...
def center_crop(
    width: typing.SupportsInt | typing.SupportsIndex, height: typing.SupportsInt | typing.SupportsIndex
) -> Stage: ...
def color_jitter(
    brightness: typing.SupportsFloat | typing.SupportsIndex,
    contrast: typing.SupportsFloat | typing.SupportsIndex,
    saturation: typing.SupportsFloat | typing.SupportsIndex,
    hue: typing.SupportsFloat | typing.SupportsIndex,
) -> Stage: ...
def concatenate(parts: collections.abc.Sequence[Dataset]) -> Dataset: ...
def convert(
    dataset: Dataset,
    folder: str,
    format: str,
    shard_bytes: typing.SupportsInt | typing.SupportsIndex,
    compress: bool,
    shorter_side: typing.SupportsInt | typing.SupportsIndex,
    quality: typing.SupportsInt | typing.SupportsIndex,
    threads: typing.SupportsInt | typing.SupportsIndex,
    progress: collections.abc.Callable | None,
) -> Converted: ...
def cut_mix(
    alpha: typing.SupportsFloat | typing.SupportsIndex,
    classes: typing.SupportsInt | typing.SupportsIndex,
    image: str,
    label: str,
) -> BatchStage: ...
def decode_image(
    encoded: str,
    channels: typing.SupportsInt | typing.SupportsIndex = 3,
    crop: typing.Annotated[collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], "FixedSize(4)"]
    | None = None,
) -> torch.Tensor: ...
def encode_jpeg(image: torch.Tensor, quality: typing.SupportsInt | typing.SupportsIndex = 90) -> bytes: ...
def from_arrow(stream: typing_extensions.CapsuleType) -> Dataset: ...
def function_stage(name: str, function: typing.Any) -> Stage: ...
def horizontal_flip(probability: typing.SupportsFloat | typing.SupportsIndex) -> Stage: ...
def mix_up(
    alpha: typing.SupportsFloat | typing.SupportsIndex,
    classes: typing.SupportsInt | typing.SupportsIndex,
    image: str,
    label: str,
) -> BatchStage: ...
def mixed(
    sizes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    weights: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    draws: typing.SupportsInt | typing.SupportsIndex,
) -> Sampler: ...
def open(location: str) -> Dataset: ...
def open_raw(
    location: str, dtype: str, shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
) -> Dataset: ...
def python_dataset(
    fields: collections.abc.Sequence[Field],
    size: typing.SupportsInt | typing.SupportsIndex,
    read: typing.Any,
    fingerprint: str,
) -> Dataset: ...
def python_stream(
    fields: collections.abc.Sequence[Field], begin: typing.Any, next: typing.Any, fingerprint: str
) -> Stream: ...
def rand_augment(
    count: typing.SupportsInt | typing.SupportsIndex, magnitude: typing.SupportsInt | typing.SupportsIndex
) -> Stage: ...
def random_resized_crop(
    width: typing.SupportsInt | typing.SupportsIndex,
    height: typing.SupportsInt | typing.SupportsIndex,
    scale: tuple[typing.SupportsFloat | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex],
    ratio: tuple[typing.SupportsFloat | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex],
) -> Stage: ...
def resize(
    image: torch.Tensor,
    width: typing.SupportsInt | typing.SupportsIndex,
    height: typing.SupportsInt | typing.SupportsIndex,
) -> torch.Tensor: ...
def resize_shorter(side: typing.SupportsInt | typing.SupportsIndex) -> Stage: ...
def resize_to(
    width: typing.SupportsInt | typing.SupportsIndex, height: typing.SupportsInt | typing.SupportsIndex
) -> Stage: ...
def sequential(size: typing.SupportsInt | typing.SupportsIndex) -> Sampler: ...
def shuffled(size: typing.SupportsInt | typing.SupportsIndex) -> Sampler: ...
def shuffled_blocks(
    size: typing.SupportsInt | typing.SupportsIndex,
    block: typing.SupportsInt | typing.SupportsIndex,
    window: typing.SupportsInt | typing.SupportsIndex,
) -> Sampler: ...
def token_windows(tokens: Dataset, length: typing.SupportsInt | typing.SupportsIndex) -> Dataset: ...
def tune(
    loader: Loader,
    seconds: typing.SupportsFloat | typing.SupportsIndex,
    step: typing.Any,
    memory: str,
    disk: str,
    folder: str,
    progress: typing.Any,
) -> LoaderTuning:
    """
    Find threads, batches ahead and a cache by measuring, and set them.
    """

def weighted(
    weights: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    draws: typing.SupportsInt | typing.SupportsIndex,
) -> Sampler: ...
