"""Stages beside Pillow, of which torchvision's transforms of PIL images are made: equal bytes."""

from __future__ import annotations

import math
from collections.abc import Callable

import oxytorch as ox
import pytest
import torch

PIL = pytest.importorskip("PIL")
np = pytest.importorskip("numpy")
from PIL import Image, ImageEnhance, ImageOps  # noqa: E402

# Before Pillow 13 the width always came first, and values were rounded in another order.
LEVELS = 0 if int(PIL.__version__.split(".")[0]) >= 13 else 1


def noise(height: int, width: int, seed: int = 0, low: int = 0, high: int = 256) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(low, high, (height, width, 3), dtype=np.uint8))


def tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


def difference(found: torch.Tensor, expected: Image.Image) -> int:
    """The largest, in gray levels."""
    wanted = tensor(expected)
    assert found.shape == wanted.shape
    return int((found.int() - wanted.int()).abs().max())


SIZES = [(1, 1), (7, 3), (16, 16), (64, 48), (97, 131), (224, 224), (300, 33)]


@pytest.mark.parametrize("height,width", [(1, 1), (2, 90), (33, 17), (64, 64), (150, 201)])
def test_resize_equals_pillow(height: int, width: int) -> None:
    image = noise(height, width)
    for to in SIZES:
        found = ox.data.resize(tensor(image), *to)
        assert difference(found, image.resize(to, Image.Resampling.BILINEAR)) <= LEVELS, to


@pytest.mark.parametrize("height,width", [(50, 75), (75, 50), (31, 31), (3, 200)])
def test_sizes_and_places_are_torchvisions(height: int, width: int) -> None:
    image = noise(height, width)
    for side in (1, 20, 31, 64):
        short, long = min(height, width), max(height, width)
        longer = int(side * long / short)
        to = (side, longer) if width <= height else (longer, side)
        found = ox.data.Resize(side)(tensor(image))
        assert difference(found, image.resize(to, Image.Resampling.BILINEAR)) <= LEVELS
        padded = ImageOps.expand(
            image,
            (
                max(0, side - width) // 2,
                max(0, side - height) // 2,
                (max(0, side - width) + 1) // 2,
                (max(0, side - height) + 1) // 2,
            ),
        )
        left, top = round((padded.width - side) / 2), round((padded.height - side) / 2)
        cut = padded.crop((left, top, left + side, top + side))
        assert difference(ox.data.CenterCrop(side)(tensor(image)), cut) == 0
    flipped = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert difference(ox.data.HorizontalFlip(1.0)(tensor(image)), flipped) == 0
    assert difference(ox.data.HorizontalFlip(0.0)(tensor(image)), image) == 0


def line(values: torch.Tensor, side: int) -> tuple[int, int]:
    """Begin and length of the part that a slope of one was cut and resized from to `side` values."""
    inner = values[side // 4 : -side // 4].double()
    step = float((inner[-1] - inner[0]) / (len(inner) - 1))
    begin = float(inner[0]) + 0.5 - (side // 4 + 0.5) * step
    return round(begin), round(step * side)


def test_random_resized_crop_is_a_crop_resized() -> None:
    slope = np.zeros((180, 240, 3), dtype=np.uint8)
    slope[..., 0] = np.arange(240)[None]
    slope[..., 1] = np.arange(180)[:, None]
    slope[..., 2] = np.random.default_rng(0).integers(0, 256, (180, 240))
    image = Image.fromarray(slope)
    stage = ox.data.RandomResizedCrop(64)
    seen = set()
    for sample in range(20):
        found = stage(tensor(image), seed=3, sample=sample)
        left, width = line(found[32, :, 0], 64)
        top, height = line(found[:, 32, 1], 64)
        near = [
            (x, y, x + w, y + h)
            for x in range(max(0, left - 1), left + 2)
            for y in range(max(0, top - 1), top + 2)
            for w in range(width - 2, width + 3)
            for h in range(height - 2, height + 3)
            if x + w <= 240 and y + h <= 180
        ]
        parts = {box: image.crop(box).resize((64, 64), Image.Resampling.BILINEAR) for box in near}
        boxes = [box for box, part in parts.items() if difference(found, part) <= LEVELS]
        assert boxes, f"sample {sample}: about {width} x {height} at ({left}, {top})"
        x, y, right, bottom = boxes[0]
        area = (right - x) * (bottom - y) / (240 * 180)
        assert 0.07 < area <= 1
        assert 0.72 < (right - x) / (bottom - y) < 1.38
        seen.add(boxes[0])
    assert len(seen) == 20


def turned_hue(image: Image.Image, turn: float) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    moved = np.array(hue) + np.int32(turn * 255).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(moved.astype(np.uint8)), saturation, value)).convert("RGB")


ENHANCERS = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]


@pytest.mark.parametrize("which", range(3))
def test_color_jitter_equals_pillow(which: int) -> None:
    """The factor is drawn; Pillow's with one of its size gives the same image up to a level."""
    image = noise(40, 50, low=60, high=160)
    extents = [0.0, 0.0, 0.0]
    extents[which] = 0.5
    enhancer = ENHANCERS[which](image)
    base = tensor(enhancer.degenerate).double()
    step = tensor(image).double() - base
    factors = []
    for sample in range(40):
        found = ox.data.ColorJitter(*extents)(tensor(image), seed=1, sample=sample)
        # Values are cut off, by half a level on average.
        factor = float(((found.double() + 0.5 - base) * step).sum() / (step * step).sum())
        factors.append(factor)
        assert difference(found, enhancer.enhance(factor)) <= 1
    assert 0.45 < min(factors) < 0.7
    assert 1.3 < max(factors) < 1.55


def test_hue_equals_pillow() -> None:
    image = noise(40, 50)
    turns = {turn: tensor(turned_hue(image, turn / 255)) for turn in range(-128, 128)}
    seen = set()
    for sample in range(20):
        found = ox.data.ColorJitter(0.0, 0.0, 0.0, 0.5)(tensor(image), seed=1, sample=sample)
        equal = [turn for turn, wanted in turns.items() if torch.equal(found, wanted)]
        assert equal
        seen.add(equal[0])
    assert len(seen) > 15


def operations(image: Image.Image, bin: int) -> dict[str, list[Image.Image]]:
    """What torchvision's RandAugment may make of an image, by operation."""
    width, height = image.size

    def affine(*matrix: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)

    def signed(most: float, make: Callable[[float], Image.Image]) -> list[Image.Image]:
        magnitude = float(torch.linspace(0.0, most, 31)[bin])
        return [make(magnitude), make(-magnitude)]

    def shear(magnitude: float) -> float:
        return math.tan(math.radians(math.degrees(math.atan(magnitude))))

    return {
        "Identity": [image],
        "ShearX": signed(0.3, lambda m: affine(1, shear(m), 0, 0, 1, 0)),
        "ShearY": signed(0.3, lambda m: affine(1, 0, 0, shear(m), 1, 0)),
        "TranslateX": signed(150 / 331 * width, lambda m: affine(1, 0, -int(m), 0, 1, 0)),
        "TranslateY": signed(150 / 331 * height, lambda m: affine(1, 0, 0, 0, 1, -int(m))),
        "Rotate": signed(30.0, lambda m: image.rotate(m, Image.Resampling.NEAREST)),
        "Brightness": signed(0.9, lambda m: ImageEnhance.Brightness(image).enhance(1 + m)),
        "Color": signed(0.9, lambda m: ImageEnhance.Color(image).enhance(1 + m)),
        "Contrast": signed(0.9, lambda m: ImageEnhance.Contrast(image).enhance(1 + m)),
        "Sharpness": signed(0.9, lambda m: ImageEnhance.Sharpness(image).enhance(1 + m)),
        "Posterize": [ImageOps.posterize(image, 8 - round(bin / 7.5))],
        "Solarize": [ImageOps.solarize(image, 255 * float(torch.linspace(1.0, 0.0, 31)[bin]))],
        "AutoContrast": [ImageOps.autocontrast(image)],
        "Equalize": [ImageOps.equalize(image)],
    }


@pytest.mark.parametrize("bin", [5, 9, 20, 30])
def test_rand_augment_equals_pillow(bin: int) -> None:
    image = noise(45, 61, low=20, high=220)
    wanted = {name: [tensor(each) for each in made] for name, made in operations(image, bin).items()}
    seen = set()
    for sample in range(200):
        found = ox.data.RandAugment(1, bin)(tensor(image), seed=2, sample=sample)
        names = [name for name, made in wanted.items() if any(torch.equal(found, each) for each in made)]
        assert names, f"sample {sample} is none of torchvision's operations"
        seen.add(names[0])
    assert seen == set(wanted)
