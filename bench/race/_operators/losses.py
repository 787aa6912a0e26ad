"""The last linear layer of a classifier and its cross entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import oxytorch as ox
import torch
from _race import Contender
from torch import Tensor
from torch.nn import functional as F

from . import BF16_WEIGHTS, COMPILED, DTYPES, EAGER, OURS, Case

CHUNKS, CHOSEN = "chunks", "chosen rows"
# Tokens, classes, width.
LOSSES = [(2048, 32_000, 256), (2048, 32_000, 768), (2048, 50_257, 512)]
QUICK_LOSSES = [(512, 8000, 128)]
COUNTED = 0.15  # of the tokens of a masked loss
# Of a float32 weight under autocast, and whether its gradient is added to one that is there.
HEADS = [(tokens, 50_257, 768, adds) for tokens in (128, 1024) for adds in (False, True)]
QUICK_HEADS = [(128, 1000, 64, True)]
FEW = [(2048, 256, 256, False), (2048, 1000, 256, False), (8192, 1000, 768, False), (128, 10, 512, False)]
QUICK_FEW = [(128, 10, 64, False)]


class Chunks(torch.autograd.Function):
    """Loss and gradients of 512 tokens at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        of_x, of_w = torch.empty_like(x), torch.zeros(w.shape)
        loss, counted = torch.zeros(()), (y >= 0).sum()
        for begin in range(0, x.size(0), 512):
            part, target = x[begin : begin + 512], y[begin : begin + 512]
            with torch.enable_grad():
                logits = F.linear(part, w).float().requires_grad_()
                one = F.cross_entropy(logits, target, reduction="sum")
            (of_logits,) = torch.autograd.grad(one, logits)
            of_logits = of_logits.div_(counted).to(x.dtype)
            torch.mm(of_logits, w, out=of_x[begin : begin + 512])
            of_w.add_(torch.mm(of_logits.t(), part))
            loss += one.detach()
        ctx.save_for_backward(of_x, of_w.to(w.dtype))
        return loss / counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        of_x, of_w = ctx.saved_tensors
        return of_x * grad.to(of_x.dtype), of_w * grad.to(of_w.dtype), None


def plain_loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y)


def chosen_loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Written by somebody who knows which tokens count."""
    return plain_loss(x[y >= 0], w, y[y >= 0])


def cross_entropy(
    shape: tuple[int, int, int], dtype: torch.dtype, quick: bool, counted: float = 1.0
) -> list[Contender]:
    tokens, classes, width = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(classes, width, generator=generator) * 0.02).to(dtype).requires_grad_()
    y = torch.randint(classes, (tokens,), generator=generator)
    y[torch.rand(tokens, generator=generator) >= counted] = -100
    losses: dict[str, Callable[..., Tensor]] = {
        OURS: ox.ops.linear_cross_entropy,
        EAGER: plain_loss,
        CHUNKS: Chunks.apply,
    }
    if counted < 1:
        losses[CHOSEN] = chosen_loss
    if not quick:
        losses[COMPILED] = torch.compile(plain_loss)

    def whole(loss: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(x, w, y), (x, w))

    return [Contender(name, {"step": whole(loss)}) for name, loss in losses.items()]


def head(shape: tuple[int, int, int, bool], quick: bool) -> list[Contender]:
    """A float32 weight under autocast, whose gradient is a new one or is added to that of an earlier batch."""
    tokens, classes, width, adds = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, width, generator=generator).bfloat16().requires_grad_()
    y = torch.randint(classes, (tokens,), generator=generator)
    weight = torch.randn(classes, width, generator=generator) * 0.02

    def contender(name: str, loss: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> Contender:
        w = weight.to(dtype, copy=True).requires_grad_()

        def step() -> None:
            if not adds:
                x.grad = w.grad = None
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(x, w, y)
            value.backward()

        step()
        return Contender(name, {"step": step})

    made = [
        contender(OURS, ox.ops.linear_cross_entropy),
        contender(EAGER, plain_loss),
        contender(CHUNKS, lambda x, w, y: Chunks.apply(x, w.bfloat16(), y)),
        contender(BF16_WEIGHTS, plain_loss, torch.bfloat16),
    ]
    return made if quick else [*made, contender(COMPILED, torch.compile(plain_loss))]


def cases(quick: bool) -> Iterator[Case]:
    for name, dtype in DTYPES.items():
        losses = QUICK_LOSSES if quick else LOSSES[:1] if dtype is torch.float32 else LOSSES
        for kind, counted, shapes in (("loss", 1.0, losses), ("masked", COUNTED, losses[:1])):
            for shape in shapes:
                tokens, classes, width = shape
                case = f"{kind} {name}, {tokens:,} x {width} to {classes:,}"
                yield Case(case, partial(cross_entropy, shape, dtype, quick, counted), products=dtype)
    for kind, heads in (("head", QUICK_HEADS if quick else HEADS), ("few classes", QUICK_FEW if quick else FEW)):
        for of_head in heads:
            tokens, classes, width, adds = of_head
            case = f"{kind} under autocast, {tokens:,} x {width} to {classes:,}{', added' if adds else ''}"
            yield Case(case, partial(head, of_head, quick), products=torch.bfloat16)
