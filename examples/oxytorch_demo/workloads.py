"""The demo's three models and their data: nothing here imports oxytorch, so that the rivals run without it."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["NAMES", "Batch", "Recipe", "Workload", "library_text", "load"]

Batch = tuple[Tensor, Tensor]

TEXT_LIMIT = 4 << 20
HELD_OUT_SEED = 20_000


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters every contender trains with.

    ``warmup`` is a share of all steps; ``steps`` and ``least_steps`` bound the length of one training run, and the
    demo takes the longest that fits its time; ``block`` is how many steps a contender runs before the next one's turn.
    ``quick_run`` is the length of the run that a quick demo tunes for: a minute's at least.
    """

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    clip_norm: float
    ema_decay: float
    warmup: float
    steps: int
    least_steps: int
    block: int
    starts: int
    share: float
    quick_run: int = 500

    def lr_factor(self, steps: int) -> Callable[[int], float]:
        """Linear warm-up, then a cosine down to a tenth, as a factor of ``lr`` for ``LambdaLR``."""
        warm = max(1, round(self.warmup * steps))

        def factor(step: int) -> float:
            if step < warm:
                return (step + 1) / warm
            return 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))

        return factor


@dataclass(frozen=True)
class Workload:
    """A model, its data and its recipe."""

    name: str
    title: str
    unit: str
    units_per_step: int
    recipe: Recipe
    is_image: bool
    make_model: Callable[[], nn.Module]
    make_batches: Callable[[int, int], list[Batch]]
    """``(seed, steps)`` to that many training batches."""
    held_out: Callable[[], list[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]


# --- a byte-level GPT on the Python standard library's own sources ---------------------------------------------------


def library_text(limit: int = TEXT_LIMIT) -> tuple[bytes, bytes]:
    """The top-level modules of the running Python's standard library as (training bytes, held-out bytes).

    Files are sorted by name and every tenth is held out, so the same Python version gives the same bytes anywhere.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py"), key=lambda path: path.name)
    if not files:
        raise FileNotFoundError(f"no .py files in {root}: the demo trains on the standard library's sources")
    train, held = bytearray(), bytearray()
    for index, path in enumerate(files):
        (held if index % 10 == 9 else train).extend(path.read_bytes())
        if len(train) >= limit:
            break
    return bytes(train[:limit]), bytes(held)


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Gpt(nn.Module):
    """A GPT over bytes."""

    def __init__(self, layers: int = 4, width: int = 256, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _windows(text: Tensor, starts: Tensor, context: int) -> Batch:
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _gpt(context: int = 128, batch: int = 16) -> Workload:
    train, held = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in library_text())

    def batches(seed: int, steps: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        last = train.numel() - context - 1
        return [_windows(train, torch.randint(0, last, (batch,), generator=generator), context) for _ in range(steps)]

    def held_out() -> list[Batch]:
        # Evenly spaced windows: the same for every contender and every seed.
        starts = torch.linspace(0, held.numel() - context - 1, 6 * batch).long()
        return [_windows(held, part, context) for part in starts.split(batch)]  # type: ignore[no-untyped-call]

    def loss(model: nn.Module, data: Batch) -> Tensor:
        tokens, targets = data
        return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())

    recipe = Recipe(
        lr=1.5e-3, betas=(0.9, 0.98), weight_decay=0.1, clip_norm=1.0, ema_decay=0.9, warmup=0.1,
        steps=48, least_steps=16, block=4, starts=4, share=0.48,
    )  # fmt: skip
    return Workload(
        name="gpt",
        title=f"byte-level GPT, 4 layers of width 256, {batch} x {context} tokens",
        unit="tokens",
        units_per_step=batch * context,
        recipe=recipe,
        is_image=False,
        make_model=Gpt,
        make_batches=batches,
        held_out=held_out,
        loss=loss,
    )


# --- a CNN on scikit-learn's digits ----------------------------------------------------------------------------------


def _cnn_model(stages: tuple[int, ...] = (64, 64, 128, 128)) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for index, width in enumerate(stages):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers.append(nn.MaxPool2d(2) if index + 1 < len(stages) else nn.AdaptiveAvgPool2d(4))
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * channels, 10))


def _scene(digits: Tensor, generator: torch.Generator, size: int) -> Tensor:
    """Draw 8x8 digits at ``size`` in a random colour on a random background, shifted, with noise."""
    count = digits.shape[0]
    ink = F.interpolate(digits, size=(size, size), mode="bilinear", align_corners=False)
    reach = size // 16
    shifts = torch.randint(-reach, reach + 1, (count, 2), generator=generator).tolist()
    ink = torch.stack([torch.roll(image, tuple(shift), (1, 2)) for image, shift in zip(ink, shifts, strict=True)])
    paint, paper = torch.rand(2, count, 3, 1, 1, generator=generator).unbind(0)
    noise = torch.randn(count, 3, size, size, generator=generator)
    return (paper - 1.0 + ink * (1.0 + paint) + 0.3 * noise).contiguous()


def _cnn(size: int = 64, batch: int = 32) -> Workload:
    from sklearn.datasets import load_digits  # noqa: PLC0415  (an extra)

    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16.0
    labels = torch.from_numpy(data.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held, train = order[:384], order[384:]

    def batches(seed: int, steps: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        result: list[Batch] = []
        rows = torch.empty(0, dtype=torch.long)
        for _ in range(steps):
            if rows.numel() < batch:
                rows = train[torch.randperm(train.numel(), generator=generator)]
            take, rows = rows[:batch], rows[batch:]
            result.append((_scene(images[take], generator, size), labels[take]))
        return result

    def held_out() -> list[Batch]:
        generator = torch.Generator().manual_seed(HELD_OUT_SEED)
        return [(_scene(images[part], generator, size), labels[part]) for part in held.split(batch)]  # type: ignore[no-untyped-call]

    def loss(model: nn.Module, data: Batch) -> Tensor:
        return F.cross_entropy(model(data[0]).float(), data[1])

    recipe = Recipe(
        lr=2e-3, betas=(0.9, 0.999), weight_decay=0.05, clip_norm=1.0, ema_decay=0.8, warmup=0.1,
        steps=64, least_steps=24, block=4, starts=4, share=0.42,
    )  # fmt: skip
    return Workload(
        name="cnn",
        title=f"CNN, 4 stages, digits drawn in colour at {size}x{size}, batch {batch}",
        unit="images",
        units_per_step=batch,
        recipe=recipe,
        is_image=True,
        make_model=_cnn_model,
        make_batches=batches,
        held_out=held_out,
        loss=loss,
    )


# --- an MLP on scikit-learn's breast-cancer table --------------------------------------------------------------------


def _mlp(width: int = 768, batch: int = 128) -> Workload:
    from sklearn.datasets import load_breast_cancer  # noqa: PLC0415  (an extra)

    data = load_breast_cancer()
    table = torch.from_numpy(data.data).float()
    labels = torch.from_numpy(data.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held, train = order[:185], order[185:]
    mean, std = table[train].mean(0), table[train].std(0)
    table = (table - mean) / std

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(table.shape[1], width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )

    def batches(seed: int, steps: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        result: list[Batch] = []
        for _ in range(steps):
            rows = train[torch.randint(0, train.numel(), (batch,), generator=generator)]
            # A little noise on the standardised columns: 384 rows are few.
            result.append((table[rows] + 0.2 * torch.randn(batch, table.shape[1], generator=generator), labels[rows]))
        return result

    def loss(model: nn.Module, data: Batch) -> Tensor:
        return F.cross_entropy(model(data[0]).float(), data[1])

    recipe = Recipe(
        lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1, clip_norm=1.0, ema_decay=0.98, warmup=0.1,
        steps=240, least_steps=160, block=40, starts=6, share=0.10, quick_run=12_000,
    )  # fmt: skip
    return Workload(
        name="mlp",
        title=f"MLP of width {width}, breast-cancer table, batch {batch}",
        unit="rows",
        units_per_step=batch,
        recipe=recipe,
        is_image=False,
        make_model=make_model,
        make_batches=batches,
        held_out=lambda: [(table[held], labels[held])],
        loss=loss,
    )


_MAKERS: dict[str, Callable[..., Workload]] = {"mlp": _mlp, "cnn": _cnn, "gpt": _gpt}
NAMES = tuple(_MAKERS)
"""The quickest first: a reader sees its figures early."""


def load(name: str, **sizes: int) -> Workload:
    """The workload called ``mlp``, ``cnn`` or ``gpt``; ``batch`` and the like may be other than the demo's.

    Raises
    ------
    ModuleNotFoundError
        When scikit-learn is missing; the message says how to install it.
    """
    try:
        return _MAKERS[name](**sizes)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"the demo's {name} trains on scikit-learn's data: pip install scikit-learn (or 'oxytorch[demo]')"
        ) from missing
