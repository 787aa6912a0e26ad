"""Races the data pipeline against the ways in which people feed a training loop on a CPU.

Each contender delivers the same samples in batches; what is counted is the processor's time of the process and of its
workers, and wall time. Rounds are interleaved, in a random order.

    python bench/race/data.py [--images 512] [--text 64] [--rounds 7] [--case NAME]... [--quick] [--json PATH]

`images`: JPEGs of 500 x 375, a random crop of 224 x 224, flipped, normalised, in batches of 64. Without a cache each
epoch decodes the files; later epochs of a loader with one decode from coefficients that the first kept. `training`:
steps of a small CNN on them by `oxytorch.Trainer`, with the share of a step that waits for its batch. `tokens`:
windows of 2,049 uint16 tokens as int64, in batches of 32, in a random order. `first batch`: the time until the first
batch of a set of 1,280,000 samples. `first images`: the same of a folder of as many JPEGs in 1,000 classes, from
naming it to the batch; the kept listing of another process, and listed anew. `tokenise`: texts of a JSONL file as
tokens in Megatron's files, beside the tokenizers library alone, which writes nothing; a sample is a document of 4,096
characters. `tuned images` and `tuned vectors`: a torch DataLoader over a Python data set as `oxytorch.data.tune`
leaves it, beside torch's default and settings by hand. Images are resized without random crops there: what a data set
draws depends on the number of workers, and `tune` leaves that.

Peers that are not installed are named; `tools/peers.sh` installs them into build/peers, and `--peers` names another
folder. All but spdl, whose crops ffmpeg cuts and resizes, decode by simplejpeg and resize by PIL.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oxytorch as ox
import torch
from _texts import DOCUMENT, documents, read_lines, trained, write_lines
from oxytorch.base import starts_interval
from oxytorch.bench.turns import machine
from torch import Tensor

SCHEMA = "oxytorch-data/1"
BATCH, CROP, WINDOW = 64, 224, 2049
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

CASES = ("images", "training", "tokens", "first batch", "first images", "tokenise", "tuned images", "tuned vectors")
PIECE = 1024  # documents that the tokenizers library gets at a time, which is what suits it
Contenders = dict[str, Callable[[], Iterator[Any]]]


def spent() -> float:
    """Seconds of the processor, of this process and of its workers, those that stay for the next epoch included."""
    ended = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ticks = 0
    for worker in multiprocessing.active_children():
        try:
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue  # ended meanwhile
        ticks += int(fields[11]) + int(fields[12])
    return sum(use.ru_utime + use.ru_stime for use in ended) + ticks / os.sysconf("SC_CLK_TCK")


# -- images ----------------------------------------------------------------------------------------------------------


def smooth_noise(generator: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Pixels with the spectrum of photographs: amplitudes fall with the frequency."""
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    falls = 1 / np.maximum(np.hypot(fy, fx), 1 / width) ** 1.1
    planes = []
    for _ in range(3):
        phase = np.exp(2j * np.pi * generator.random((height, width // 2 + 1)))
        plane = np.fft.irfft2(phase * falls, s=(height, width))
        planes.append((plane - plane.mean()) / plane.std() * 52 + 120)
    gray = 0.8 * planes[0]
    return np.clip(np.stack([gray + 0.2 * plane for plane in planes], 2), 0, 255).astype(np.uint8)


def write_images(folder: Path, count: int) -> int:
    """Write an image folder of four classes; bytes of a file in the mean."""
    generator, total = np.random.default_rng(0), 0
    for i in range(count):
        path = folder / f"class{i % 4}" / f"{i:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        encoded = ox.data.encode_jpeg(torch.from_numpy(smooth_noise(generator, 375, 500)), 88)
        path.write_bytes(encoded)
        total += len(encoded)
    return total // count


class Files(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What a user writes without torchvision: decode, crop, resize, flip, normalise."""

    def __init__(self, folder: Path, decode: Callable[[bytes], Any], augmented: bool = True) -> None:
        self.augmented = augmented
        self.files = sorted(folder.glob("*/*.jpg"))
        self.labels = [int(path.parent.name[-1]) for path in self.files]
        self.decode = decode
        mean, deviation = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
        self.scale, self.shift = 1 / (255 * deviation), -mean / deviation

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.cropped(self.files[index].read_bytes()), self.labels[index]

    def cropped(self, encoded: bytes) -> Tensor:
        from PIL import Image  # noqa: PLC0415

        image = self.decode(encoded)
        box = random_box(*image.size) if self.augmented else None
        image = image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=box)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        if self.augmented and random.random() < 0.5:
            pixels = pixels.flip(2)
        # The fastest of five forms that were tried: one pass that transposes, two in place.
        return torch.empty(3, CROP, CROP).copy_(pixels).mul_(self.scale).add_(self.shift)


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            x, y = random.randint(0, width - w), random.randint(0, height - h)
            return x, y, x + w, y + h
    side = min(width, height)
    return 0, 0, side, side


def decoders_here(absent: dict[str, str]) -> dict[str, Callable[[bytes], Any]]:
    """Return what decodes a JPEG to an image of PIL, by name, the slowest first."""
    found: dict[str, Callable[[bytes], Any]] = {}
    try:
        from PIL import Image  # noqa: PLC0415

        found["PIL"] = lambda encoded: Image.open(io.BytesIO(encoded)).convert("RGB")
        import simplejpeg  # noqa: PLC0415

        found["simplejpeg"] = lambda encoded: Image.fromarray(simplejpeg.decode_jpeg(encoded))
    except ImportError as error:
        absent[str(error.name)] = str(error)
    return found


def images_race(folder: Path) -> tuple[Contenders, dict[str, str]]:
    absent: dict[str, str] = {}
    stages = [ox.data.RandomResizedCrop(CROP), ox.data.HorizontalFlip(), ox.data.Normalize(MEAN, STD)]
    dataset = ox.data.open(folder)
    filled = ox.data.Cache("4GB")

    def passes(epochs: int, **options: Any) -> Iterator[Any]:
        # Its threads begin the epoch that follows, which is counted too: of three epochs that is little.
        loader = ox.data.Loader(dataset, BATCH, stages, shuffle=True, **options)
        for _ in range(epochs):
            yield from loader

    for _ in passes(1, cache=filled):
        pass
    contenders: Contenders = {
        "oxytorch, no cache": lambda: passes(3),
        "oxytorch, the epoch that fills a cache": lambda: passes(1, cache="4GB"),
        "oxytorch, later epochs": lambda: passes(3, cache=filled),
    }
    decoders = decoders_here(absent)
    for name, decode in decoders.items():
        files = Files(folder, decode)
        for workers in (0, 2):
            contenders[f"DataLoader + {name}, {workers} workers"] = loader_of(files, BATCH, workers)
    if decoders:
        files = Files(folder, decoders.get("simplejpeg", decoders["PIL"]))
        for peer in (of_spdl, of_webdataset, of_grain, of_litdata):
            found, why = importable(peer, files, folder.parent)
            contenders |= found
            absent |= why
    return contenders, absent


def importable(
    peer: Callable[[Files, Path], Contenders], files: Files, folder: Path
) -> tuple[Contenders, dict[str, str]]:
    """Return a peer's contenders, or why it has none."""
    try:
        return peer(files, folder), {}
    except ImportError as error:
        return {}, {peer.__name__.removeprefix("of_"): str(error)}


def of_spdl(files: Files, _: Path) -> Contenders:
    """Threads that decode, crop and resize by ffmpeg, as its own examples of image classification do."""
    import spdl.io  # noqa: PLC0415
    from spdl.pipeline import PipelineBuilder  # noqa: PLC0415

    try:
        spdl.io.load_image(str(files.files[0]))
    except RuntimeError as error:
        raise ImportError("it finds no libraries of ffmpeg") from error

    def load(index: int) -> tuple[Tensor, int]:
        x0, y0, x1, y1 = random_box(500, 375)
        flip = ",hflip" if random.random() < 0.5 else ""
        words = f"crop={x1 - x0}:{y1 - y0}:{x0}:{y0},scale={CROP}:{CROP}:flags=bilinear{flip},format=pix_fmts=rgb24"
        pixels = spdl.io.to_torch(spdl.io.load_image(str(files.files[index]), filter_desc=words))
        return pixels.permute(2, 0, 1), files.labels[index]

    def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        images = torch.stack([image for image, _ in samples]).float().mul_(files.scale).add_(files.shift)
        return images, torch.tensor([label for _, label in samples])

    def begin(threads: int) -> Iterator[Any]:
        order = torch.randperm(len(files)).tolist()
        builder = PipelineBuilder().add_source(order).pipe(load, concurrency=threads).aggregate(BATCH)
        pipeline = builder.pipe(collate).add_sink(2).build(num_threads=threads)
        with pipeline.auto_stop():
            yield from pipeline

    return {f"spdl, {threads} threads": lambda threads=threads: begin(threads) for threads in (1, 2)}  # type: ignore[misc]


def of_webdataset(files: Files, folder: Path) -> Contenders:
    """Two shards, so that two workers have one each."""
    import webdataset  # noqa: PLC0415

    names = [str(folder / f"shard-{part}.tar") for part in range(2)]
    for part, name in enumerate(names):
        with webdataset.TarWriter(name) as tar:
            for i in range(part, len(files), 2):
                encoded = files.files[i].read_bytes()
                tar.write({"__key__": f"{i:05}", "jpg": encoded, "cls": str(files.labels[i]).encode()})

    def sample(fields: dict[str, bytes]) -> tuple[Tensor, int]:
        return files.cropped(fields["jpg"]), int(fields["cls"])

    def begin(workers: int) -> Iterator[Any]:
        samples = webdataset.WebDataset(names, shardshuffle=2, seed=1).shuffle(256).map(sample)
        return iter(torch.utils.data.DataLoader(samples, BATCH, num_workers=workers))

    return {f"webdataset, {workers} workers": lambda workers=workers: begin(workers) for workers in (0, 2)}  # type: ignore[misc]


def of_grain(files: Files, _: Path) -> Contenders:
    """Its threads read ahead and share the interpreter."""
    import grain  # noqa: PLC0415

    def sample(index: int) -> tuple[np.ndarray, int]:
        image, label = files[index]
        return image.numpy(), label

    def begin(threads: int) -> Iterator[Any]:
        samples = grain.MapDataset.range(len(files)).shuffle(seed=1).map(sample)
        batches = samples.to_iter_dataset(grain.ReadOptions(num_threads=threads)).batch(BATCH)
        return ((torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in batches)

    return {f"grain, {threads} threads": lambda threads=threads: begin(threads) for threads in (0, 2)}  # type: ignore[misc]


def of_litdata(files: Files, folder: Path) -> Contenders:
    """Chunks of encoded files."""
    import litdata  # noqa: PLC0415
    from litdata.streaming.cache import Cache  # noqa: PLC0415

    target = folder / "litdata"
    cache = Cache(str(target), chunk_bytes="64MB")
    for i, path in enumerate(files.files):
        cache[i] = {"image": path.read_bytes(), "label": files.labels[i]}
    cache.done()
    cache.merge()

    class Samples(litdata.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            fields = super().__getitem__(index)
            return files.cropped(fields["image"]), fields["label"]

    def begin(workers: int) -> Iterator[Any]:
        return iter(
            litdata.StreamingDataLoader(Samples(str(target), shuffle=True), batch_size=BATCH, num_workers=workers)
        )

    return {f"litdata, {workers} workers": lambda workers=workers: begin(workers) for workers in (0, 2)}  # type: ignore[misc]


def loader_of(dataset: Any, batch: int, workers: int) -> Callable[[], Iterator[Any]]:
    return lambda: iter(torch.utils.data.DataLoader(dataset, batch, shuffle=True, num_workers=workers))


# -- a whole training step -------------------------------------------------------------------------------------------


def training_race(folder: Path, waits: dict[str, list[float]]) -> tuple[Contenders, dict[str, str]]:
    """Steps on the images, by loader; `waits` gets the share of each pass that waited for batches."""
    dataset = ox.data.open(folder)
    stages = [ox.data.RandomResizedCrop(CROP), ox.data.HorizontalFlip(), ox.data.Normalize(MEAN, STD)]
    absent: dict[str, str] = {}
    made: dict[str, Iterable[Any]] = {
        "oxytorch": ox.data.Loader(dataset, BATCH, stages, shuffle=True, cache="4GB"),
        "oxytorch, no cache": ox.data.Loader(dataset, BATCH, stages, shuffle=True),
    }
    for name, decode in [*decoders_here(absent).items()][-1:]:
        for workers in (0, 1, 2):
            files = Files(folder, decode)
            made[f"DataLoader + {name}, {workers} workers"] = torch.utils.data.DataLoader(
                files, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
            )
    return {name: steps_on(name, loader, waits) for name, loader in made.items()}, absent


def steps_on(name: str, loader: Iterable[Any], waits: dict[str, list[float]]) -> Callable[[], Iterator[Any]]:
    """Return a pass of training steps over a loader."""
    torch.manual_seed(0)
    parts: list[torch.nn.Module] = []
    for before, after in ((3, 24), (24, 48), (48, 96), (96, 128)):
        parts += [torch.nn.Conv2d(before, after, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(after), torch.nn.ReLU()]
    model = torch.nn.Sequential(*parts, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(128, 4))

    def loss(model: torch.nn.Module, batch: Any) -> Tensor:
        images, labels = (batch["image"], batch["label"]) if isinstance(batch, dict) else batch
        return torch.nn.functional.cross_entropy(model(images), labels)

    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    trainer = ox.Trainer(model, optimizer, loss, "basic", calibrate=False)

    def taken() -> Iterator[Any]:
        began, waited, batches = time.perf_counter(), 0.0, iter(loader)
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            waited += time.perf_counter() - asked
            if batch is None:
                break
            trainer.step(batch)
            yield batch
        waits.setdefault(name, []).append(waited / (time.perf_counter() - began))

    return taken


# -- tokens ----------------------------------------------------------------------------------------------------------


class Windows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What nanoGPT does, a window at a time."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // (WINDOW - 1)

    def __getitem__(self, index: int) -> Tensor:
        start = index * (WINDOW - 1)
        return torch.from_numpy(self.tokens[start : start + WINDOW].astype(np.int64))


def gathered(path: Path) -> Iterator[Tensor]:
    """A batch as one gather of numpy's: the fastest that can be written in Python."""
    tokens = np.load(path, mmap_mode="r")
    count = (len(tokens) - 1) // (WINDOW - 1)
    order, within = np.random.permutation(count), np.arange(WINDOW)
    for first in range(0, count, 32):
        starts = order[first : first + 32] * (WINDOW - 1)
        yield torch.from_numpy(tokens[starts[:, None] + within].astype(np.int64))


def tokens_race(folder: Path, count: int) -> tuple[Contenders, dict[str, str]]:
    path = folder / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 50_000, count * (WINDOW - 1) + 1, dtype=np.uint16))
    windows = ox.data.TokenWindows(ox.data.open(path), WINDOW - 1)
    files = Windows(path)
    return {
        "oxytorch": lambda: iter(ox.data.Loader(windows, 32, shuffle=True)),
        "oxytorch, 1 thread": lambda: iter(ox.data.Loader(windows, 32, shuffle=True, threads=1)),
        "numpy gather": lambda: gathered(path),
        "DataLoader, 0 workers": loader_of(files, 32, 0),
        "DataLoader, 2 workers": loader_of(files, 32, 2),
    }, {}


# -- the first batch -------------------------------------------------------------------------------------------------


def first_race(folder: Path, count: int) -> tuple[Contenders, dict[str, str]]:
    path = folder / "rows.npy"
    np.save(path, np.zeros((count, 8), np.float32))
    dataset = ox.data.open(path)
    rows = torch.utils.data.TensorDataset(torch.from_numpy(np.load(path, mmap_mode="c")))
    return {
        "oxytorch": lambda: first_of(iter(ox.data.Loader(dataset, 256, shuffle=True))),
        "DataLoader, 0 workers": lambda: first_of(loader_of(rows, 256, 0)()),
        "DataLoader, 2 workers": lambda: first_of(loader_of(rows, 256, 2)()),
    }, {}


def first_of(batches: Iterator[Any]) -> Iterator[Any]:
    yield next(batches)


def link_images(images: Path, folder: Path, count: int) -> None:
    """Make a folder of many images, which share the content of a few, in classes of up to 1,280."""
    sources = sorted(images.glob("*/*.jpg"))
    for i in range(count):
        path = folder / f"class{i // 1280:04}" / f"{i:08}.jpg"
        if i % 1280 == 0:
            path.parent.mkdir(parents=True)
        os.link(sources[i % len(sources)], path)


class Listed(Files):
    """Files in the order in which torchvision's ImageFolder finds them; paths are text, as there."""

    def __init__(self, folder: Path, decode: Callable[[bytes], Any]) -> None:
        super().__init__(folder / "none", decode)
        self.paths: list[str] = []
        classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        for label, name in enumerate(classes):
            for parent, _, names in sorted(os.walk(folder / name, followlinks=True)):
                found = [f"{parent}/{each}" for each in sorted(names) if each.lower().endswith((".jpg", ".png"))]
                self.paths += found
                self.labels += [label] * len(found)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.cropped(Path(self.paths[index]).read_bytes()), self.labels[index]


def first_images_race(images: Path, folder: Path, count: int) -> tuple[Contenders, dict[str, str]]:
    absent: dict[str, str] = {}
    link_images(images, folder / "many", count)
    kept = str(folder / "kept")
    stages = [ox.data.RandomResizedCrop(CROP), ox.data.HorizontalFlip(), ox.data.Normalize(MEAN, STD)]

    def ours(cache: str) -> Iterator[Any]:
        os.environ["OXYTORCH_CACHE"] = cache
        return first_of(iter(ox.data.Loader(ox.data.open(folder / "many"), BATCH, stages, shuffle=True)))

    def theirs(decode: Callable[[bytes], Any], workers: int) -> Iterator[Any]:
        return first_of(loader_of(Listed(folder / "many", decode), BATCH, workers)())

    time.sleep(3)  # so that no folder has changed just now
    contenders: Contenders = {"oxytorch": lambda: ours(kept), "oxytorch, listed anew": lambda: ours("off")}
    for decode in [*decoders_here(absent).values()][-1:]:
        for workers in (0, 2):
            contenders[f"DataLoader, {workers} workers"] = lambda workers=workers, decode=decode: theirs(
                decode, workers
            )  # type: ignore[misc]
    return contenders, absent


# -- texts -----------------------------------------------------------------------------------------------------------


def texts_race(folder: Path, size: int) -> tuple[Contenders, dict[str, str]]:
    texts, path = documents(size), folder / "texts.jsonl"
    write_lines(path, texts)
    try:
        tokenizer = trained(texts[:: max(1, len(texts) * DOCUMENT // 4_000_000)])
    except ImportError as error:
        return {}, {"tokenizers": str(error)}

    def ours() -> Iterator[Any]:
        made = ox.data.tokenize(path, folder / "ours", tokenizer, end=0)
        for suffix in (".bin", ".idx"):
            (folder / "ours").with_suffix(suffix).unlink()
        yield [range(made.samples)]

    def alone() -> Iterator[Any]:
        for piece in read_lines(path, PIECE):
            yield [tokenizer.encode_batch_fast(piece, add_special_tokens=False)]

    def appended() -> Iterator[Any]:
        """What a user writes: numbers of a document as an array, at the end of a file."""
        with (folder / "theirs.bin").open("wb") as file:
            for (encodings,) in alone():
                for one in encodings:
                    np.array([*one.ids, 0], np.uint16).tofile(file)
                yield [encodings]
        (folder / "theirs.bin").unlink()

    return {
        "oxytorch": ours,
        "tokenizers alone, nothing written": alone,
        "tokenizers, numpy and a file": appended,
    }, {}


# -- the DataLoader of a user ----------------------------------------------------------------------------------------


class Vectors(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows that cost nothing to make: all that is measured is the loader."""

    def __init__(self, count: int) -> None:
        self.rows, self.labels = torch.randn(count, 64), torch.randint(10, (count,))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.labels[index]


def tuned_race(dataset: Any) -> Contenders:
    """Loaders of one data set, as they are made once and drawn from for many epochs."""

    def made(**options: Any) -> Any:
        return torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, **options)

    tuned = ox.data.tune(made())
    print(tuned)
    loaders: dict[str, Iterable[Any]] = {"oxytorch": tuned, "torch's default": made()}
    for workers in (1, 2):
        loaders[f"by hand, {workers} workers"] = made(num_workers=workers, persistent_workers=True, prefetch_factor=4)
    return {name: lambda loader=loader: iter(loader) for name, loader in loaders.items()}  # type: ignore[misc]


# -- rounds ----------------------------------------------------------------------------------------------------------


def one_round(make: Callable[[], Iterator[Any]]) -> tuple[float, float, int]:
    """Seconds of the processor and of the clock for a pass, and its samples."""
    random.seed(0)
    busy, began, samples = spent(), time.perf_counter(), 0
    for batch in make():
        first = batch if isinstance(batch, Tensor) else next(iter(batch.values() if isinstance(batch, dict) else batch))
        samples += len(first)
    return spent() - busy, time.perf_counter() - began, samples


def raced(contenders: Contenders, rounds: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {name: {"busy": [], "wall": [], "samples": 0} for name in contenders}
    order = random.Random(11)
    for name, make in contenders.items():
        found[name]["samples"] = one_round(make)[2]  # warm
    for index in range(rounds):
        print(f"\rround {index + 1} of {rounds}", end="", file=sys.stderr, flush=True)
        for name in order.sample(list(contenders), len(contenders)):
            busy, wall, _ = one_round(contenders[name])
            found[name]["busy"].append(busy)
            found[name]["wall"].append(wall)
    print(file=sys.stderr)
    return found


def shown(case: str, found: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"{case:44} {'samples/CPU s':>14} {'samples/s':>12}   times ours in CPU time [95% interval]"]
    ours = next(iter(found))
    for name, row in found.items():
        each, own = row["samples"], found[ours]["samples"]
        ratios = [theirs / each / (mine / own) for theirs, mine in zip(row["busy"], found[ours]["busy"], strict=True)]
        interval = starts_interval(ratios)
        lines.append(
            f"  {name:42} {row['samples'] / statistics.median(row['busy']):14,.0f} "
            f"{row['samples'] / statistics.median(row['wall']):12,.0f}   "
            f"{interval.mid:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
            + (f"  waits for data {statistics.median(row['waiting']):.1%}" if "waiting" in row else "")
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--text", type=int, default=64, help="MiB of text that are made tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--peers", type=Path, default=Path(__file__).resolve().parents[2] / "build/peers")
    parser.add_argument("--quick", action="store_true", help="few samples and rounds")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    sys.path.append(str(asked.peers))  # behind what is installed: torch stays the one that Oxytorch was built against
    logging.disable(logging.WARNING)  # peers name what they would have on other machines
    images, rounds = (64, 2) if asked.quick else (asked.images, asked.rounds)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine.describe(torch.get_num_threads()),
        "rounds": rounds,
        "cases": {},
        "absent": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in asked.case or CASES:
            waits: dict[str, list[float]] = {}
            if case in ("images", "training", "first images", "tuned images") and not (folder / "images").exists():
                document["image_bytes"] = write_images(folder / "images", images)
            if case == "tuned images":
                absent = {}
                decoders = decoders_here(absent)
                contenders = {}
                if decoders:
                    contenders = tuned_race(Files(folder / "images", [*decoders.values()][-1], augmented=False))
            elif case in ("images", "training"):
                makes = images_race if case == "images" else lambda folder: training_race(folder, waits)  # noqa: B023
                contenders, absent = makes(folder / "images")
            elif case == "tokenise":
                contenders, absent = texts_race(folder, 2_000_000 if asked.quick else asked.text << 20)
            elif case == "tuned vectors":
                contenders, absent = tuned_race(Vectors(6_400 if asked.quick else 64_000)), {}
            elif case == "first images":
                contenders, absent = first_images_race(folder / "images", folder, 2_560 if asked.quick else 1_280_000)
            elif case == "tokens":
                contenders, absent = tokens_race(folder, 2_000 if asked.quick else 20_000)
            else:
                contenders, absent = first_race(folder, 12_800 if asked.quick else 1_280_000)
            document["absent"] |= absent
            if not contenders:
                continue
            document["cases"][case] = found = raced(contenders, rounds)
            for contender, shares in waits.items():
                found[contender]["waiting"] = shares[1:]  # the first pass warms
            print("\n".join(shown(case, found)), flush=True)
    for peer, why in document["absent"].items():
        print(f"absent: {peer}: {why}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
