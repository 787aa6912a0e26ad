"""Six training workloads written in plain PyTorch, each with data that can be learnt; nothing here imports oxytorch.

Three of them have sizes for a card too, those that are common there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from oxytorch_demo import workloads
from oxytorch_demo.workloads import Batch, library_text
from torch import Tensor, nn
from torch.nn import functional as F

MASK, IGNORED = 0, -100


@dataclass(frozen=True)
class Workload:
    """A model, its data and its learning rate."""

    lr: float
    make_model: Callable[[], nn.Module]
    make_batches: Callable[[int, int], list[Batch]]
    """`(seed, count)` to that many batches."""
    loss: Callable[[nn.Module, Batch], Tensor]


def classified(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of a class for each row."""
    return F.cross_entropy(model(batch[0]), batch[1])


def predicted(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of a token for each position."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED)


def cnn() -> Workload:
    drawn = workloads.load("cnn", batch=64)
    return Workload(1e-3, drawn.make_model, drawn.make_batches, classified)


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.shortcut = nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet(blocks: tuple[int, ...] = (1, 1, 1), size: int = 32, batch: int = 64) -> Workload:
    """`blocks` of each stage; large images get the wide stem."""

    def make_model() -> nn.Module:
        wide = size > 64
        stem = [nn.Conv2d(3, 64, 7 if wide else 3, 2 if wide else 1, 3 if wide else 1, bias=False)]
        stem += [nn.BatchNorm2d(64), nn.ReLU(), *([nn.MaxPool2d(3, 2, 1)] if wide else [])]
        stages: list[nn.Module] = []
        inner = outer = 64
        for stage, count in enumerate(blocks):
            outer = 64 << stage
            for index in range(count):
                stages.append(Residual(inner, outer, 2 if stage and not index else 1))
                inner = outer
        return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(outer, 10))

    drawn = workloads.load("cnn", size=size, batch=batch)
    return Workload(1e-3, make_model, drawn.make_batches, classified)


def gpt(rows: int = 16, **sizes: int) -> Workload:
    """`sizes` of the demo's model."""
    context = sizes.get("context", 128)
    text = workloads.load("gpt", batch=rows, context=context)
    return Workload(1e-3, lambda: workloads.Gpt(**sizes), text.make_batches, predicted)


class Encoder(nn.Module):
    """Post-norm layers with dropout over tokens, as in BERT, and a head over the vocabulary."""

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.token(tokens) + self.position.weight[: tokens.shape[1]]))
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


class EncoderLayer(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = self.norm1(x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width))))
        result: Tensor = self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return result


def bert(
    vocabulary: int = 4096, rows: int = 16, context: int = 128, layers: int = 4, width: int = 256, heads: int = 4
) -> Workload:
    """Pairs of bytes as tokens, the commonest with a number of their own, 15 % masked."""
    train = torch.frombuffer(bytearray(library_text()[0]), dtype=torch.uint8).long()
    pairs = train[0:-1:2] * 256 + train[1::2]
    known, counts = pairs.unique(return_counts=True)
    kept = known[counts.argsort(descending=True, stable=True)[: vocabulary - 2]]
    number = torch.ones(1 << 16, dtype=torch.long)  # All others are 1.
    number[kept] = torch.arange(2, 2 + len(kept))
    tokens = number[pairs]

    def make_batches(seed: int, count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        result = []
        for _ in range(count):
            starts = torch.randint(0, len(tokens) - context, (rows, 1), generator=generator)
            whole = tokens[starts + torch.arange(context)]
            hidden = torch.rand(whole.shape, generator=generator) < 0.15
            result.append((whole.masked_fill(hidden, MASK), whole.masked_fill(~hidden, IGNORED)))
        return result

    return Workload(
        5e-4,
        lambda: Encoder(vocabulary, layers, width, heads, context, 0.1),
        make_batches,
        predicted,
    )


def mlp(rows: int = 128) -> Workload:
    from sklearn.datasets import load_digits  # noqa: PLC0415

    data = load_digits()
    images = F.interpolate(torch.from_numpy(data.images).float().unsqueeze(1) / 16.0, size=(28, 28), mode="bilinear")
    images, labels = images.flatten(1), torch.from_numpy(data.target).long()

    def make_batches(seed: int, count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        taken = (torch.randint(0, len(labels), (rows,), generator=generator) for _ in range(count))
        return [(images[each] + 0.3 * torch.randn(rows, 784, generator=generator), labels[each]) for each in taken]

    def make_model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )  # fmt: skip

    return Workload(1e-3, make_model, make_batches, classified)


class Recurrent(nn.Module):
    """An LSTM over bytes."""

    def __init__(self, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 128)
        self.lstm = nn.LSTM(128, width, layers, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(self.token(tokens))[0])
        return result


def lstm() -> Workload:
    text = workloads.load("gpt", batch=32, context=64)
    return Workload(2e-3, Recurrent, text.make_batches, predicted)


MAKERS: dict[str, Callable[..., Workload]] = {
    "cnn": cnn,
    "resnet": resnet,
    "gpt": gpt,
    "bert": bert,
    "mlp": mlp,
    "lstm": lstm,
}
# As large as they are trained on one card: GPT-2 small, ResNet-34 on 224x224, BERT base.
ON_CUDA: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 12, "width": 768, "heads": 12, "context": 1024, "rows": 8},
    "resnet": {"blocks": (3, 4, 6, 3), "size": 224, "batch": 128},
    "bert": {"layers": 12, "width": 768, "heads": 12, "context": 512, "rows": 16},
}


def make_workload(name: str, device: str = "cpu") -> Workload:
    """The workload in the sizes for that device."""
    return MAKERS[name](**(ON_CUDA[name] if device == "cuda" else {}))
