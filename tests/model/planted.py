"""One model for each rule, with the fault that the rule is for, and models without faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any) -> Tensor:
        return self.function(self, *args)


@dataclass
class Plant:
    rule: str
    where: str
    make: Callable[[], tuple[nn.Module, Any]]
    text: str = ""


def hand_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, -1)
    weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(m.mask, -1e9).softmax(-1)
    return F.dropout(weights, 0.1, m.training) @ v


def with_mask(model: nn.Module) -> nn.Module:
    model.register_buffer("mask", torch.ones(16, 16).triu(1).bool())
    return model


def sdpa(m: Any, x: Tensor, **options: Any) -> Tensor:
    q, k, v = m.qkv(x).unflatten(-1, (3, m.heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


def heads(model: Any, count: int) -> nn.Module:
    model.heads = count
    return model


def hand_gelu(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(0.5 * h * (1.0 + torch.erf(h / math.sqrt(2.0))))


def hand_tanh_gelu(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * h.pow(3)))))


def hand_norm(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    mean = h.mean(-1, keepdim=True)
    var = h.var(-1, unbiased=False, keepdim=True)
    return m.down((h - mean) / torch.sqrt(var + 1e-5))


def steps(m: Any, x: Tensor) -> Tensor:
    state = x.new_zeros(x.shape[0], 8)
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
    return state


def line_loop(m: Any, x: Tensor) -> Tensor:
    h, total = m.up(x), 0.0
    for row in h:
        total = total + row.exp()
    return total


def numpy_table(m: Any, x: Tensor) -> Tensor:
    return m.down((m.up(x) * torch.from_numpy(np.linspace(0.0, 1.0, 64))).float())


def double_cast(m: Any, x: Tensor) -> Tensor:
    return m.down(m.up(x).double().softmax(-1).float())


def layout(m: Any, x: Tensor) -> Tensor:
    h = m.first(x).permute(0, 2, 3, 1).contiguous()
    return m.second(m.mix(h).permute(0, 3, 1, 2).contiguous())


def two_dropouts() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Dropout(0.2), nn.Linear(64, 64)), torch.randn(8, 64)


def pair() -> dict[str, nn.Module]:
    return {"up": nn.Linear(64, 64), "down": nn.Linear(64, 64)}


def tiny() -> tuple[nn.Module, Any]:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(1500)])

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.stack(list(self.scales)).sum(0)

    return Many(), torch.randn(4, 8)


def conv_bn(batch: int = 4, bias: bool = True) -> tuple[nn.Module, Any]:
    return (
        nn.Sequential(nn.Conv2d(3, 16, 3, bias=bias), nn.BatchNorm2d(16), nn.ReLU()),
        torch.randn(batch, 3, 12, 12),
    )


X = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(0))

PLANTS = [
    Plant("off_grid_shape", "1", lambda: (nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 1027)), X), "1027"),
    Plant("off_grid_shape", "", lambda: (heads(Lambda(sdpa, qkv=nn.Linear(60, 180)), 5), X[..., :60]), "12 elements"),
    Plant("bias_before_norm", "0", conv_bn),
    Plant("bias_before_norm", "up", lambda: (
        Lambda(lambda m, x: m.norm(m.up(x).transpose(1, 2)), up=nn.Linear(64, 32), norm=nn.BatchNorm1d(32)), X)),
    Plant("batch_norm_of_one", "1", lambda: conv_bn(1, bias=False)),
    Plant("unfused_attention", "", lambda: (with_mask(Lambda(hand_attention, qkv=nn.Linear(64, 192))), X), "softmax"),
    Plant("unfused_attention", "", lambda: (
        heads(Lambda(lambda m, x: sdpa(m, x, dropout_p=0.1), qkv=nn.Linear(64, 192)), 4), X), "dropout_p"),
    Plant("unfused_attention", "mha", lambda: (
        Lambda(lambda m, x: m.mha(x, x, x)[0], mha=nn.MultiheadAttention(64, 4, batch_first=True)), X), "weights"),
    Plant("float64_leak", "", lambda: (Lambda(numpy_table, **pair()), X), "mul"),
    Plant("float64_leak", "", lambda: (Lambda(double_cast, **pair()), X), "_to_copy"),
    Plant("python_loop", "cell", lambda: (
        Lambda(steps, cell=nn.GRUCell(64, 8)), torch.randn(4, 32, 64)), "32 times"),
    Plant("python_loop", "", lambda: (Lambda(line_loop, up=nn.Linear(64, 64)), torch.randn(40, 64)), "40 times"),
    Plant("hidden_sync", "", lambda: (
        Lambda(lambda m, x: m.up(x) * (2.0 if x.sum() > 0 else 1.0), **pair()), X), "one value"),
    Plant("hidden_sync", "", lambda: (Lambda(lambda m, x: (h := m.up(x))[h > 0], **pair()), X), "only the device"),
    Plant("hidden_sync", "", lambda: (
        Lambda(lambda m, x: m.up(x) * sum(x[0, 0].tolist()), **pair()), X), "values to Python"),
    Plant("tiny_parameters", "scales.0", tiny),
    Plant("unused_parameters", "down.weight", lambda: (Lambda(lambda m, x: m.up(x), **pair()), X)),
    Plant("no_gradient", "up.weight", lambda: (Lambda(lambda m, x: m.down(m.up(x).detach()), **pair()), X)),
    Plant("embedding_gradient", "0", lambda: (
        nn.Sequential(nn.Embedding(80_000, 64), nn.Linear(64, 8)), torch.arange(32)), "32 of them"),
    Plant("embedding_gradient", "0", lambda: (
        nn.Sequential(nn.Embedding(100, 8, sparse=True), nn.Linear(8, 8)), torch.arange(32)), "sparse gradients"),
    Plant("activation_memory", "0", lambda: (
        nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))), torch.randn(40_000, 64))),
    Plant("layout_flips", "", lambda: (
        Lambda(layout, first=nn.Conv2d(3, 16, 3), mix=nn.Linear(16, 16), second=nn.Conv2d(16, 8, 3)),
        torch.randn(4, 3, 16, 16)), "2 copies"),
    Plant("dropout", "2", two_dropouts, "straight from another"),
    Plant("dropout", "", lambda: (Lambda(lambda m, x: m.down(F.dropout(m.up(x), 0.2)), **pair()), X), "evaluation"),
    Plant("unfused_pointwise", "", lambda: (Lambda(hand_gelu, **pair()), X), "gelu"),
    Plant("unfused_pointwise", "", lambda: (Lambda(hand_tanh_gelu, **pair()), X), "gelu"),
    Plant("unfused_pointwise", "", lambda: (Lambda(hand_norm, **pair()), X), "layer_norm"),
]  # fmt: skip


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def resnet() -> tuple[nn.Module, Any]:
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(*stem, Residual(16), Residual(16), *tail), torch.randn(8, 3, 16, 16)


def encoder() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), X


def deep_stack() -> tuple[nn.Module, Any]:
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(24))

    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = F.relu(layer(x))
        return x

    return Lambda(forward, layers=layers), torch.randn(8, 16)


def lstm() -> tuple[nn.Module, Any]:
    return Lambda(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(64, 32, 2, batch_first=True)), X


def convolutions_and_layer_norm() -> tuple[nn.Module, Any]:
    """A bias before LayerNorm is not subtracted again, and dropout after dropout's activation is no pair."""
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.ReLU(), nn.Dropout(0.1)), X


def double_model() -> tuple[nn.Module, Any]:
    return nn.Linear(64, 64).double(), X.double()


def rms_norm() -> tuple[nn.Module, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.down(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    return Lambda(forward, down=nn.Linear(64, 64)), X


CLEAN = [resnet, encoder, deep_stack, lstm, convolutions_and_layer_norm, double_model, rms_norm]
