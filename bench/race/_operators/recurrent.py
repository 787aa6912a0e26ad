"""LSTM and GRU layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import oxytorch as ox
import torch
from _race import Contender
from torch import nn

from . import DTYPES, EAGER, OURS, Case

ONEDNN, ONE_THREAD, EAGER_ONE_THREAD = "oneDNN", "oneDNN, 1 thread", "torch, 1 thread"
# Steps, batch, features, hidden.
SEQUENCES = [(64, 32, 256, 256), (35, 20, 200, 200), (50, 128, 128, 512), (32, 64, 512, 1024)]
# The layer of each kind, and its rivals: torch's with all threads and with the one that it often is faster with.
RECURRENT = {"lstm": (nn.LSTM, ONEDNN, ONE_THREAD), "gru": (nn.GRU, EAGER, EAGER_ONE_THREAD)}


def recurrent(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, count: int) -> list[Contender]:
    """One layer, forward and backward."""
    layer, *rivals = RECURRENT[kind]
    steps, batch, features, hidden = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, batch, features, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(steps, batch, hidden, generator=generator).to(dtype)
    torch.manual_seed(1)
    module = layer(features, hidden).to(dtype)
    native = ox._C.tune.NativeOperators()
    output = {}

    def before(name: str) -> None:
        native.uninstall()
        torch.set_num_threads(1 if name == rivals[1] else count)
        if name == OURS:
            (report,) = native.install([kind])
            assert report.installed, report.reason

    def forward(name: str) -> None:
        output[name] = module(x)[0]

    def backward(name: str) -> None:
        torch.autograd.grad(output[name], [x, *module.parameters()], grad)

    return [
        Contender(name, {"forward": partial(forward, name), "backward": partial(backward, name)},
                  before=partial(before, name))
        for name in (OURS, *rivals)
    ]  # fmt: skip


def cases(quick: bool, threads: int) -> Iterator[Case]:
    for name, dtype in DTYPES.items():
        for kind in RECURRENT:
            for shape in SEQUENCES[:1] if quick else SEQUENCES:
                case = "{} {}, {} x {} x {} to {:,}".format(kind, name, *shape)
                yield Case(case, partial(recurrent, kind, shape, dtype, threads), products=dtype)
