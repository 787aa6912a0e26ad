"""Healthy strategies on runs whose numbers are hard: tiny, huge, cancelling, clipped over millions, beside kinks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from oxytorch.tune.run import Run
from oxytorch.tune.strategy import Kind
from torch import Tensor, nn

from .healthy import bfloat16_autocast, channels_last, nothing, optimizer_flag, rows_in_another_order, step_tail
from .planting import HEALTHY, LARGE, Fault, Plant
from .workloads import WORKLOADS

foreach, fused = optimizer_flag("foreach"), optimizer_flag("fused")
CLAIMS: dict[Plant, Kind] = {
    nothing: "tolerance", foreach: "tolerance", fused: "tolerance", step_tail: "tolerance",
    rows_in_another_order: "tolerance", channels_last: "tolerance", bfloat16_autocast: "precision",
}  # fmt: skip

Loss = Callable[[nn.Module, Any], Tensor]
Make = Callable[[torch.device], Run]


def hard(name: str, make: Make, *plants: Plant, large: bool = False) -> None:
    """Register a workload and what must pass on it."""
    WORKLOADS[name] = make
    for plant in plants:
        title = f"{plant.__name__}_on_{name}"
        HEALTHY[title] = Fault(title, name, CLAIMS[plant], 0, plant)
        if large:
            LARGE.add(title)


# -- models ----------------------------------------------------------------------------------------------------------


class Language(nn.Module):
    """Tokens to log-probabilities; `inner` works on (length, batch, width)."""

    def __init__(self, vocabulary: int, width: int, inner: nn.Module | None = None, tied: bool = False) -> None:
        super().__init__()
        self.e = nn.Embedding(vocabulary, width)
        self.inner = inner
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.e.weight
        self.scale = math.sqrt(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.e(tokens) * self.scale
        if self.inner is not None:
            x = self.inner(x)
            x = x[0] if isinstance(x, tuple) else x
        return F.log_softmax(self.head(x), dim=-1)


def encoder(width: int, heads: int, hidden: int, layers: int, dropout: float = 0.2) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, heads, hidden, dropout), layers)


def likelihood(m: nn.Module, b: Any) -> Tensor:
    return F.nll_loss(m(b[0]).flatten(0, 1), b[1].flatten())


def language(
    make: Callable[[], Language], vocabulary: int, shape: tuple[int, int], clip: float | None, **options: Any
) -> Make:
    def built(device: torch.device) -> Run:
        model = make().to(device)
        for weight in (model.e.weight, model.head.weight):  # of whose gradients many are tiny beside some
            nn.init.uniform_(weight, -0.1, 0.1)
        often = 1 / torch.arange(1, vocabulary + 1, device=device)  # as words of a language
        count = shape[0] * shape[1]
        draw = [torch.multinomial(often, count, replacement=True).view(shape) for _ in range(8)]
        optimizer = torch.optim.AdamW(model.parameters(), options.get("lr", 1e-3))
        return Run(model, optimizer, likelihood, list(zip(draw[::2], draw[1::2], strict=True)), clip_norm=clip)

    return built


def perceptron(act: Callable[[], nn.Module] = nn.Tanh, width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), act(), nn.Linear(width, width), act(), nn.Linear(width, 5))


def small(
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    *,
    factor: float = 1.0,
    clip: float | None = None,
    model: Callable[[], nn.Module] = perceptron,
    loss: Loss | None = None,
    warm: int = 0,
    dtype: torch.dtype = torch.float32,
    inputs: Sequence[int] = (16,),
    rows: int = 24,
    batches: int = 4,
) -> Make:
    """A small classifier; `factor` scales the loss, `warm` steps were taken before."""

    def scaled(m: nn.Module, b: Any) -> Tensor:
        return factor * (F.cross_entropy(m(b[0]).float(), b[1]) if loss is None else loss(m, b))

    def built(device: torch.device) -> Run:
        made = model().to(device, dtype)
        given = list(made.parameters())
        own = torch.optim.AdamW(given, 1e-3) if optimizer is None else optimizer(given)
        draw = [
            (torch.randn(rows, *inputs, device=device, dtype=dtype), torch.randint(5, (rows,), device=device))
            for _ in range(batches)
        ]
        run = Run(made, own, scaled, draw, clip_norm=clip)
        for i in range(warm):
            run.step(run.batches[i % batches])
        return run

    return built


class Many(nn.Module):
    """Ten million gradients, most of them tiny beside some: the sum of their squares is off in float32."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(count) * 1e-3)
        self.register_buffer("sizes", torch.rand(count).pow(8) * torch.randn(count).sign())

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * self.sizes).sum() * x.mean() + 1.0


def many(count: int, clip: float, sgd: bool = False) -> Make:
    def built(device: torch.device) -> Run:
        model = Many(count).to(device)
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            if sgd
            else torch.optim.AdamW(model.parameters(), 1e-3)
        )
        batches = [(torch.rand(4, device=device) + 1,) for _ in range(4)]
        return Run(model, optimizer, lambda m, b: m(b[0]).square(), batches, clip_norm=clip)

    return built


def images(width: int, size: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(),
        nn.Linear(4 * width, 5),
    )  # fmt: skip


class Partly(nn.Module):
    """A branch whose gradient is zero, one that is frozen, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()
        self.zero = nn.Linear(16, 5)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.frozen(x)) + 0.0 * self.zero(x)


def regression(kind: Callable[..., Tensor], size: float) -> Loss:
    def loss(m: nn.Module, b: Any) -> Tensor:
        out = m(b[0]).float()[:, 0]
        return kind(out, size * b[1].to(out.dtype) / 5)

    return loss


def adamw(**options: Any) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, **{"lr": 1e-3, **options})


# -- what must pass --------------------------------------------------------------------------------------------------

hard("transformer_of_13000",
     language(lambda: Language(13_000, 200, encoder(200, 2, 200, 2)), 13_000, (35, 20), 0.25),
     bfloat16_autocast, step_tail, large=True)  # fmt: skip
hard("lstm_of_13000",
     language(lambda: Language(13_000, 200, nn.LSTM(200, 200, 2, dropout=0.2)), 13_000, (35, 20), 0.25),
     step_tail, large=True)  # fmt: skip
hard("ten_million_clipped", many(10_000_000, 0.25), step_tail, nothing, large=True)
hard("three_million_clipped_by_sgd", many(3_000_000, 0.25, sgd=True), step_tail, nothing)
hard("vocabulary_of_13000", language(lambda: Language(13_000, 24), 13_000, (10, 4), 0.25), step_tail, fused,
     bfloat16_autocast)  # fmt: skip
hard("transformer_of_500", language(lambda: Language(500, 32, encoder(32, 2, 32, 2)), 500, (9, 6), 0.25), step_tail,
     bfloat16_autocast)  # fmt: skip
hard("tied_vocabulary", language(lambda: Language(2_000, 16, tied=True), 2_000, (10, 4), 0.1), step_tail,
     bfloat16_autocast)  # fmt: skip
hard("few_rows_touched", language(lambda: Language(4_000, 8), 4_000, (3, 2), None, lr=1e-2), step_tail, fused)
hard("lstm_clipped", language(lambda: Language(300, 24, nn.LSTM(24, 24)), 300, (12, 5), 0.25), step_tail,
     bfloat16_autocast)  # fmt: skip
hard("tiny_gradients", small(factor=1e-9), step_tail, fused, bfloat16_autocast)
hard("gradients_whose_squares_vanish", small(factor=1e-24), step_tail, foreach)
hard("tiny_gradients_clipped", small(factor=1e-6, clip=1e-7), step_tail, bfloat16_autocast)
hard("huge_gradients", small(factor=1e12), step_tail, fused, bfloat16_autocast)
hard("huge_gradients_clipped", small(factor=1e15, clip=0.25), step_tail, nothing, bfloat16_autocast)
hard("norm_near_the_threshold", small(clip=0.6), step_tail, rows_in_another_order)
hard("zero_frozen_and_unused", small(model=Partly, clip=1.0), step_tail, fused, bfloat16_autocast)
hard("very_small_eps", small(adamw(eps=1e-16)), step_tail, fused)
hard("large_eps", small(adamw(eps=1e-2)), step_tail)
hard("large_learning_rate", small(adamw(lr=0.5)), step_tail, rows_in_another_order)
hard("amsgrad", small(adamw(amsgrad=True, weight_decay=0.3), clip=0.3), step_tail, fused)
hard("after_a_warm_up", small(adamw(), warm=200), step_tail, bfloat16_autocast)
hard("learned_by_heart", small(adamw(lr=1e-2), warm=400), step_tail, rows_in_another_order)
hard("bfloat16_parameters", small(adamw(), dtype=torch.bfloat16), nothing, fused)
hard("nesterov", small(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1)), step_tail)
hard("rmsprop", small(lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9, centered=True)), foreach)
hard("adagrad", small(lambda p: torch.optim.Adagrad(p, 1e-2)), foreach)
hard("adamax", small(lambda p: torch.optim.Adamax(p, 1e-2)), foreach)
hard("far_targets", small(loss=regression(F.mse_loss, 1e6), clip=1.0), step_tail, rows_in_another_order)
hard("absolute_errors", small(loss=regression(F.l1_loss, 1.0)), rows_in_another_order, bfloat16_autocast)
hard("huber_errors", small(loss=regression(F.huber_loss, 2.0)), rows_in_another_order)
hard("relu", small(model=lambda: perceptron(nn.ReLU, 256), rows=256), rows_in_another_order, bfloat16_autocast)
hard("relu6", small(adamw(lr=1e-2), model=lambda: perceptron(nn.ReLU6, 128), rows=64), rows_in_another_order)
hard("hard_tanh", small(adamw(lr=1e-2), model=lambda: perceptron(nn.Hardtanh, 128), rows=64), rows_in_another_order)
hard("images", small(model=images(16, 16), inputs=(3, 16, 16), rows=32), rows_in_another_order, bfloat16_autocast)
hard("images_of_one_batch", small(adamw(lr=1e-2), model=images(16, 16), inputs=(3, 16, 16), rows=32, batches=1),
     channels_last, bfloat16_autocast)  # fmt: skip
hard("wide_images", small(model=images(32, 24), inputs=(3, 24, 24), rows=48), rows_in_another_order, large=True)
# torch's batch normalisation of channels_last sums one after the other: more units cross a kink than eight jumps span.
hard("images_with_many_kinks", small(model=images(64, 64), inputs=(3, 64, 64), rows=16), channels_last, large=True)
