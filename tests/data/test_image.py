"""Decoded images beside Pillow's, which bundles libjpeg-turbo, libpng and libwebp of its own versions."""

from __future__ import annotations

import io
import random

import oxytorch as ox
import pytest
import torch

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

WIDTH, HEIGHT = 131, 75


def photo(mode: str = "RGB", width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Noise of several octaves: about as smooth as a photo."""
    rng = np.random.default_rng(0)
    total = np.full((height, width, 3), 128.0)
    for octave in range(1, 6):
        small = rng.normal(0, 30, (2**octave, 2**octave, 3))
        for channel in range(3):
            layer = Image.fromarray(small[..., channel].astype(np.float32))
            total[..., channel] += np.asarray(layer.resize((width, height), Image.BILINEAR))
    return Image.fromarray(total.clip(0, 255).astype(np.uint8)).convert(mode)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def expected(encoded: bytes) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(encoded)).convert("RGB")))


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> int:
    assert a.dtype == torch.uint8
    assert a.shape == b.shape
    return int((a.int() - b.int()).abs().max())


@pytest.mark.parametrize("quality", [30, 75, 95])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg(quality: int, subsampling: int, progressive: bool) -> None:
    encoded = encode(photo(), "JPEG", quality=quality, subsampling=subsampling, progressive=progressive)
    assert largest_difference(ox.data.decode_image(encoded), expected(encoded)) <= 2


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_jpeg_of_other_colours(mode: str) -> None:
    encoded = encode(photo(mode), "JPEG", quality=90)
    assert largest_difference(ox.data.decode_image(encoded), expected(encoded)) <= 2


def test_jpeg_as_gray() -> None:
    encoded = encode(photo(), "JPEG", quality=90)
    image = Image.open(io.BytesIO(encoded))
    image.draft("L", image.size)  # the luma that is stored
    luma = torch.from_numpy(np.array(image))[..., None]
    assert largest_difference(ox.data.decode_image(encoded, channels=1), luma) <= 1


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_png(mode: str) -> None:
    encoded = encode(photo(mode), "PNG")
    # Pillow blends no alpha into RGB either.
    assert torch.equal(ox.data.decode_image(encoded), expected(encoded))
    gray = Image.open(io.BytesIO(encoded)).convert("RGB").convert("L")
    assert torch.equal(ox.data.decode_image(encoded, channels=1)[..., 0], torch.from_numpy(np.array(gray)))


def test_webp() -> None:
    lossless = encode(photo("RGBA"), "WEBP", lossless=True, exact=True)
    assert torch.equal(ox.data.decode_image(lossless), expected(lossless))
    lossy = encode(photo(), "WEBP", quality=80)
    assert largest_difference(ox.data.decode_image(lossy), expected(lossy)) <= 2


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_crops_are_cuts_of_the_whole(kind: str) -> None:
    encoded = encode(photo(), kind)
    whole = ox.data.decode_image(encoded)
    rng = random.Random(1)
    for _ in range(50):
        x, y = rng.randrange(WIDTH), rng.randrange(HEIGHT)
        width, height = rng.randint(1, WIDTH - x), rng.randint(1, HEIGHT - y)
        crop = ox.data.decode_image(encoded, crop=(x, y, width, height))
        assert torch.equal(crop, whole[y : y + height, x : x + width])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damaged_images_raise(kind: str) -> None:
    encoded = encode(photo(), kind)
    with pytest.raises(OSError, match=r"\w"):
        ox.data.decode_image(encoded[: len(encoded) // 2])
    with pytest.raises(ValueError, match="crop"):
        ox.data.decode_image(encoded, crop=(WIDTH, 0, 1, 1))
