"""Stages by the names and with the arguments of torchvision's v2 transforms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._C import data as _native

__all__ = [
    "CenterCrop", "ColorJitter", "CutMix", "HorizontalFlip", "MixUp", "Normalize", "RandAugment", "RandomResizedCrop",
    "Resize",
]  # fmt: skip


def _pair(size: int | Sequence[int], name: str) -> tuple[int, int]:
    """(height, width), in torchvision's order."""
    if isinstance(size, int):
        return size, size
    if len(size) != 2:
        raise ValueError(f"{name} takes a number or (height, width), not {size!r}.")
    return int(size[0]), int(size[1])


def RandomResizedCrop(
    size: int | Sequence[int],
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> _native.Stage:
    """Crop a random part and resize it; only the part is decoded.

    Parameters
    ----------
    size : int or (height, width)
    scale : (float, float)
        Least and largest share of the image's area.
    ratio : (float, float)
        Least and largest width by height.
    """
    height, width = _pair(size, "RandomResizedCrop")
    return _native.random_resized_crop(width, height, scale, ratio)


def Resize(size: int | Sequence[int]) -> _native.Stage:
    """Resize, bilinear with antialiasing: an int is the shorter side, two are (height, width)."""
    if isinstance(size, int):
        return _native.resize_shorter(size)
    height, width = _pair(size, "Resize")
    return _native.resize_to(width, height)


def CenterCrop(size: int | Sequence[int]) -> _native.Stage:
    """Cut the middle; where the image is smaller, zeros stand around it."""
    height, width = _pair(size, "CenterCrop")
    return _native.center_crop(width, height)


def HorizontalFlip(p: float = 0.5) -> _native.Stage:
    """Flip left and right with a probability."""
    return _native.horizontal_flip(p)


def ColorJitter(
    brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0, hue: float = 0.0
) -> _native.Stage:
    """Change colours: each factor is drawn from [max(0, 1 - x), 1 + x], the hue's shift from [-hue, hue]."""
    return _native.color_jitter(brightness, contrast, saturation, hue)


def RandAugment(num_ops: int = 2, magnitude: int = 9) -> _native.Stage:
    """Apply operations drawn from torchvision's list, at one magnitude of 31."""
    return _native.rand_augment(num_ops, magnitude)


def MixUp(num_classes: int, alpha: float = 1.0, image: str = "image", label: str = "label") -> _native.BatchStage:
    """Mix each image of a batch with the one before it, and their labels, which become shares of each class."""
    return _native.mix_up(alpha, num_classes, image, label)


def CutMix(num_classes: int, alpha: float = 1.0, image: str = "image", label: str = "label") -> _native.BatchStage:
    """Put a box of the image before over each image of a batch; labels become shares of each class."""
    return _native.cut_mix(alpha, num_classes, image, label)


@dataclass(frozen=True)
class Normalize:
    """Gives images as (value / 255 - mean) / std; without it they stay uint8, four times less to move to a device.

    Parameters
    ----------
    mean, std : three floats
        Of red, green and blue, for values in [0, 1].
    dtype : str
        "float32", "bfloat16" or "float16".
    """

    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    dtype: str = "float32"
