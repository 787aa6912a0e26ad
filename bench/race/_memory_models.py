"""The models of the memory race, from plain modules, and batches for each. A model's depth is its blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

Batch = tuple[tuple[Tensor, ...], Tensor]
"""What goes into a model, and the classes that are right."""


def called(block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return block(*inputs)


class Net(nn.Module):
    """A model that runs each of its blocks by ``call(block, *inputs)``, which a race replaces."""

    call: Callable[..., Tensor] = staticmethod(called)

    def blocks_by_name(self) -> list[str]:
        return [
            f"{name}.{i}"
            for name, part in self.named_children()
            if isinstance(part, nn.ModuleList)
            for i in range(len(part))
        ]


class Chain(Net):
    """Blocks one after another; each takes what went in beside the first input, such as a mask, too."""

    def __init__(self, first: nn.Module, blocks: Sequence[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last
        self.segments = 0  # of checkpoint_sequential; 0: each block by `call`

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        x = self.first(x)
        if self.segments:
            each = [lambda x, block=block: block(x, *beside) for block in self.blocks]
            return self.last(checkpoint_sequential(each, self.segments, x, use_reentrant=False))
        for block in self.blocks:
            x = self.call(block, x, *beside)
        return self.last(x)


@dataclass
class Task:
    """A model and what it learns."""

    net: Net
    draw: Callable[[], Batch]

    def loss(self, batch: Batch, forward: Callable[..., Tensor] | None = None) -> Tensor:
        """Cross entropy of the model, or of another way to run it."""
        inputs, right = batch
        return F.cross_entropy((self.net if forward is None else forward)(*inputs), right)


# --- transformers ----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        parts = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            *parts, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal
        )
        return self.out(y.transpose(1, 2).flatten(2))


def feed_forward(width: int, *last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), *last)


class Experts(nn.Module):
    """A feed-forward layer in which the two experts that a token takes depend on the token."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(feed_forward(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        shares, chosen = self.gate(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            y = expert(tokens.index_select(0, rows)) * shares[rows, place].unsqueeze(1)
            out = out.index_add(0, rows, y)
        return out.view_as(x)


class Layer(nn.Module):
    """A transformer layer with dropout: norms before attention and feed-forward (GPT-2), or after them (BERT)."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = False,
        post_norm: bool = False,
        attention_dropout: float = 0.0,
        wide: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.post_norm = post_norm
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal, dropout=attention_dropout)
        self.wide = feed_forward(width, nn.Dropout(0.1)) if wide is None else wide

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.post_norm:
            x = self.norm1(x + self.attention(x, mask))
            return self.norm2(x + self.wide(x))
        x = x + self.attention(self.norm1(x), mask)
        return x + self.wide(self.norm2(x))


class Embedded(nn.Module):
    """Tokens with their positions."""

    def __init__(self, words: int, width: int, tokens: int, *last: nn.Module) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.last = nn.Sequential(*last, nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x) + self.places.weight)


class Patches(nn.Module):
    """Squares of an image with their positions."""

    def __init__(self, width: int, size: int, count: int) -> None:
        super().__init__()
        self.conv, self.places = nn.Conv2d(3, width, size, size), nn.Parameter(torch.zeros(count, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).transpose(1, 2) + self.places


class Pooled(nn.Module):
    """Classes of what is left, in the mean over places."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean((2, 3)) if x.dim() == 4 else x.mean(1))


def words_of(width: int, words: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, words), nn.Flatten(0, 1))


def next_tokens(words: int, batch: int, tokens: int) -> Batch:
    data = torch.randint(words, (batch, tokens + 1))
    return (data[:, :-1],), data[:, 1:].flatten()


def gpt(quick: bool) -> Task:
    layers, width, batch, tokens = (4, 32, 4, 32) if quick else (12, 192, 4, 96)
    blocks = [Layer(width, 4, causal=True) for _ in range(layers)]
    net = Chain(Embedded(512, width, tokens), blocks, words_of(width, 512))
    return Task(net, partial(next_tokens, 512, batch, tokens))


def bert(quick: bool) -> Task:
    layers, width, batch, tokens = (4, 32, 4, 32) if quick else (12, 128, 8, 64)
    blocks = [Layer(width, 4, post_norm=True, attention_dropout=0.1) for _ in range(layers)]
    net = Chain(Embedded(512, width, tokens, nn.LayerNorm(width)), blocks, words_of(width, 512))

    def draw() -> Batch:
        data = torch.randint(1, 512, (batch, tokens))
        lengths = torch.randint(tokens // 2, tokens + 1, (batch, 1))
        there = torch.arange(tokens) < lengths
        hidden = there & (torch.rand(batch, tokens) < 0.15)
        right = data.masked_fill(~hidden, -100)  # cross_entropy leaves these out
        return (data.masked_fill(hidden, 0), there[:, None, None, :]), right.flatten()

    return Task(net, draw)


def images(batch: int, size: int, classes: int) -> Batch:
    return (torch.randn(batch, 3, size, size),), torch.randint(classes, (batch,))


def vit(quick: bool) -> Task:
    layers, width, heads, batch = (4, 32, 4, 4) if quick else (12, 192, 3, 6)
    blocks = [Layer(width, heads) for _ in range(layers)]
    net = Chain(Patches(width, 8, 64), blocks, nn.Sequential(nn.LayerNorm(width), Pooled(width, 10)))
    return Task(net, partial(images, batch, 64, 10))


def experts(quick: bool) -> Task:
    layers, width, batch, tokens, count = (3, 32, 4, 32, 4) if quick else (6, 160, 4, 96, 4)
    blocks = [Layer(width, 4, causal=True, wide=Experts(width, count)) for _ in range(layers)]
    net = Chain(Embedded(512, width, tokens), blocks, words_of(width, 512))
    return Task(net, partial(next_tokens, 512, batch, tokens))


# --- convolutions ----------------------------------------------------------------------------------------------------


def conv_norm(
    inside: int, outside: int, size: int, *last: nn.Module, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    conv = nn.Conv2d(inside, outside, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outside), *last]


class Bottleneck(nn.Module):
    """A block of a ResNet-50."""

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.convs = nn.Sequential(
            *conv_norm(width, inner, 1, nn.ReLU()),
            *conv_norm(inner, inner, 3, nn.ReLU(), stride=stride),
            *conv_norm(inner, out, 1),
        )
        same = stride == 1 and width == out
        self.pass_by = nn.Identity() if same else nn.Sequential(*conv_norm(width, out, 1, stride=stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convs(x) + self.pass_by(x))


def resnet(quick: bool) -> Task:
    stages = [(8, 2, 1), (16, 2, 2)] if quick else [(16, 3, 1), (32, 4, 2), (64, 6, 2), (128, 3, 2)]
    blocks: list[nn.Module] = []
    width = 16
    for inner, count, stride in stages:
        for i in range(count):
            blocks.append(Bottleneck(width, inner, stride if i == 0 else 1))
            width = 4 * inner
    net = Chain(nn.Sequential(*conv_norm(3, 16, 3, nn.ReLU())), blocks, Pooled(width, 10))
    return Task(net, partial(images, 4 if quick else 12, 16 if quick else 32, 10))


class Inverted(nn.Module):
    """A block of MobileNetV2: wide inside, a convolution of each channel alone, narrow outside."""

    def __init__(self, width: int, out: int, stride: int, times: int) -> None:
        super().__init__()
        inner = times * width
        self.is_residual = stride == 1 and width == out
        self.convs = nn.Sequential(
            *(conv_norm(width, inner, 1, nn.ReLU6()) if times > 1 else []),
            *conv_norm(inner, inner, 3, nn.ReLU6(), stride=stride, groups=inner),
            *conv_norm(inner, out, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convs(x) if self.is_residual else self.convs(x)


def mobilenet(quick: bool) -> Task:
    # Times wider inside, width, blocks, stride: the table of the paper, at a half of its widths.
    stages = [(1, 8, 1, 1), (6, 12, 2, 2), (6, 16, 3, 2), (6, 32, 4, 2), (6, 48, 3, 1), (6, 80, 3, 2), (6, 160, 1, 1)]
    blocks: list[nn.Module] = []
    width = 16
    for times, out, count, stride in stages[:3] if quick else stages:
        for i in range(count):
            blocks.append(Inverted(width, out, stride if i == 0 else 1, times))
            width = out
    net = Chain(nn.Sequential(*conv_norm(3, 16, 3, nn.ReLU6())), blocks, Pooled(width, 10))
    return Task(net, partial(images, 4 if quick else 8, 16 if quick else 64, 10))


class Down(nn.Sequential):
    """A stage of a U-Net's first half."""

    def __init__(self, inside: int, out: int, *first: nn.Module) -> None:
        super().__init__(*first, *conv_norm(inside, out, 3, nn.ReLU()), *conv_norm(out, out, 3, nn.ReLU()))


class Up(nn.Module):
    """A stage of its second half, with what the stage of the same size in the first half made."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.larger = nn.ConvTranspose2d(inside, out, 2, 2)
        self.convs = Down(2 * out, out)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.convs(torch.cat([skip, self.larger(x)], 1))


class UNet(Net):
    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList([Down(3, widths[0]), *(Down(a, b, nn.MaxPool2d(2)) for a, b in pairs)])
        self.up = nn.ModuleList(Up(b, a) for a, b in reversed(pairs))
        self.last = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for i, down in enumerate(self.down):
            if i:
                skips.append(x)
            x = self.call(down, x)
        for up in self.up:
            x = self.call(up, x, skips.pop())
        return self.last(x)


def unet(quick: bool) -> Task:
    widths, batch, size = ((8, 16, 32), 2, 32) if quick else ((12, 24, 48, 96, 192), 8, 64)

    def draw() -> Batch:
        return (torch.randn(batch, 3, size, size),), torch.randint(4, (batch, size, size))

    return Task(UNet(widths, 4), draw)


# --- recurrent -------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A layer of an LSTM, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.dropout = nn.LSTM(width, width, batch_first=True), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.lstm(x)[0])


def lstm(quick: bool) -> Task:
    layers, width, batch, tokens = (3, 32, 8, 16) if quick else (4, 128, 32, 64)
    last = nn.Sequential(nn.Linear(width, 128), nn.Flatten(0, 1))
    net = Chain(nn.Embedding(128, width), [Recurrent(width) for _ in range(layers)], last)
    return Task(net, partial(next_tokens, 128, batch, tokens))


TASKS: dict[str, Callable[[bool], Task]] = {
    "GPT-2, 12 layers": gpt,
    "BERT, 12 layers": bert,
    "ViT, 12 layers": vit,
    "ResNet-50, narrow": resnet,
    "U-Net, 5 stages": unet,
    "MobileNetV2, narrow": mobilenet,
    "LSTM, 4 layers": lstm,
    "mixture of experts, 6 layers": experts,
}


def made(name: str, *, quick: bool) -> Task:
    """The model of that name, with the same weights each time."""
    torch.manual_seed(0)
    return TASKS[name](quick)
