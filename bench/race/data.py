"""Races the data pipeline against the ways in which people feed a training loop on a CPU.

Each contender delivers the same samples in batches; what is counted is the processor's time of the process and of its
workers, and wall time. Rounds are interleaved, in a random order.

    python bench/race/data.py [--images 512] [--rounds 7] [--case NAME]... [--quick] [--json PATH]

`images`: JPEGs of 500 x 375, a random crop of 224 x 224, flipped, normalised, in batches of 64. A first epoch decodes
the files; later epochs of a loader with a cache decode from coefficients that the first one kept. `tokens`: windows of
2,049 uint16 tokens as int64, in batches of 32, in a random order. `first batch`: the time until the first batch of a
set of 1,280,000 samples. Peers that are not installed are named. PIL and simplejpeg: `tools/peers.sh`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oxytorch as ox
import torch
from oxytorch.base import starts_interval
from oxytorch.demo import machine
from torch import Tensor

SCHEMA = "oxytorch-data/1"
BATCH, CROP, WINDOW = 64, 224, 2049
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Contenders = dict[str, Callable[[], Iterator[Any]]]


def spent() -> float:
    """Seconds of the processor, of this process and of the workers that have ended."""
    return sum(
        use.ru_utime + use.ru_stime for use in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


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

    def __init__(self, folder: Path, decode: Callable[[bytes], Any]) -> None:
        self.files = sorted(folder.glob("*/*.jpg"))
        self.labels = [int(path.parent.name[-1]) for path in self.files]
        self.decode = decode
        self.mean, self.std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image  # noqa: PLC0415

        image = self.decode(self.files[index].read_bytes())
        box = random_box(*image.size)
        image = image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=box)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        if random.random() < 0.5:
            pixels = pixels.flip(2)
        return (pixels.float().div_(255) - self.mean) / self.std, self.labels[index]


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


def images_race(folder: Path) -> tuple[Contenders, dict[str, str]]:
    absent: dict[str, str] = {}
    stages = [ox.data.RandomResizedCrop(CROP), ox.data.HorizontalFlip(), ox.data.Normalize(MEAN, STD)]
    dataset = ox.data.open(folder)
    kept = ox.data.Loader(dataset, BATCH, stages, shuffle=True, cache="4GB")
    for _ in kept:  # the epoch that fills the cache
        pass

    def fresh(**options: Any) -> Iterator[Any]:
        return iter(ox.data.Loader(dataset, BATCH, stages, shuffle=True, **options))

    contenders: Contenders = {
        "oxytorch, first epoch": fresh,
        "oxytorch, first epoch, keeping coefficients": lambda: fresh(cache="4GB"),
        "oxytorch, later epochs": lambda: iter(kept),
    }
    decoders: dict[str, Callable[[bytes], Any]] = {}
    try:
        import io  # noqa: PLC0415

        from PIL import Image  # noqa: PLC0415

        decoders["PIL"] = lambda encoded: Image.open(io.BytesIO(encoded)).convert("RGB")
        import simplejpeg  # noqa: PLC0415

        decoders["simplejpeg"] = lambda encoded: Image.fromarray(simplejpeg.decode_jpeg(encoded))
    except ImportError as error:
        absent[str(error.name)] = str(error)
    for name, decode in decoders.items():
        files = Files(folder, decode)
        for workers in (0, 2):
            contenders[f"DataLoader + {name}, {workers} workers"] = loader_of(files, BATCH, workers)
    return contenders, absent


def loader_of(dataset: Any, batch: int, workers: int) -> Callable[[], Iterator[Any]]:
    return lambda: iter(torch.utils.data.DataLoader(dataset, batch, shuffle=True, num_workers=workers))


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
        ratios = [theirs / mine for theirs, mine in zip(row["busy"], found[ours]["busy"], strict=True)]
        interval = starts_interval(ratios)
        lines.append(
            f"  {name:42} {row['samples'] / statistics.median(row['busy']):14,.0f} "
            f"{row['samples'] / statistics.median(row['wall']):12,.0f}   "
            f"{interval.mid:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--case", action="append", choices=("images", "tokens", "first batch"))
    parser.add_argument("--quick", action="store_true", help="few samples and rounds")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    images, rounds = (64, 2) if asked.quick else (asked.images, asked.rounds)
    document: dict[str, Any] = {"schema": SCHEMA, "machine": machine(), "rounds": rounds, "cases": {}, "absent": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in asked.case or ("images", "tokens", "first batch"):
            if case == "images":
                document["image_bytes"] = write_images(folder / "images", images)
                contenders, absent = images_race(folder / "images")
            elif case == "tokens":
                contenders, absent = tokens_race(folder, 2_000 if asked.quick else 20_000)
            else:
                contenders, absent = first_race(folder, 12_800 if asked.quick else 1_280_000)
            document["cases"][case] = found = raced(contenders, rounds)
            document["absent"] |= absent
            print("\n".join(shown(case, found)), flush=True)
    for peer, why in document["absent"].items():
        print(f"absent: {peer}: {why}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
