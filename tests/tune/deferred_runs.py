"""A forward and backward pass with layers that wait for what follows them, and without."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def gradients(model: nn.Module, scope: Any = None, bf16: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(5, 7, 12).requires_grad_()
    with scope or nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = model(x)
    output.float().square().mean().backward()
    found = {"output": output.detach().float(), "input": x.grad}
    found |= {name: p.grad for name, p in model.named_parameters()}
    return {name: t for name, t in found.items() if t is not None}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert float((found[key] - value).norm()) <= tolerance * float(value.norm()) + 1e-6, key
