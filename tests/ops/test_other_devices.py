"""The operators where the device has no kernel of this library: OXYTORCH_DEVICE=sim, hpu, privateuse1 or cuda."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oxytorch as ox
import pytest
import torch
import torch_device
from torch import Tensor

Case = tuple[Callable[..., Any], list[Tensor]]


def numbers(*size: int) -> Tensor:
    return torch.randn(*size)


def documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ox.ops.packed_attention(q, k, v, torch.tensor([0, 5, 5, 17]), causal=True)


def normalized(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean, var = (torch.full((3,), fill, device=x.device, dtype=x.dtype) for fill in (0.0, 1.0))
    return ox.ops.batch_norm(x, w, b, mean, var, added=x, relu=True, pool=[2, 2])


def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = torch.arange(len(x), device=x.device) % len(w)
    y[3] = -100
    return ox.ops.linear_cross_entropy(x, w, y, b, label_smoothing=0.1)


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    heads, tokens = [numbers(2, 4, 9, 8) for _ in range(3)], [numbers(17, 4, 8) for _ in range(3)]
    rows, weight = numbers(12, 16), numbers(16)
    return {
        "attention": (lambda q, k, v: ox.ops.attention(q, k, v, causal=True), heads),
        "window and cap": (lambda q, k, v: ox.ops.attention(q, k, v, window_before=2, soft_cap=5.0), heads),
        "packed attention": (documents, tokens),
        "rotary": (lambda x, a: ox.ops.rotary(x, a.detach().cos(), a.detach().sin()), [heads[0], numbers(9, 4)]),
        "embedding": (lambda w: ox.ops.embedding(torch.tensor([[1, 0], [1, 2]], device=w.device), w), [rows]),
        "linear": (ox.ops.linear, [rows, numbers(5, 16), numbers(5)]),
        "linear and cross entropy": (loss, [rows, numbers(5, 16), numbers(5)]),
        "in chunks": (loss, [numbers(700, 16), numbers(50, 16), numbers(50)]),
        "batch norm": (normalized, [numbers(2, 3, 4, 4), numbers(3), numbers(3)]),
        "layer norm": (lambda x, r, w: ox.ops.add_layer_norm(x, r, w)[0], [rows, rows + 1, weight]),
        "rms norm": (ox.ops.rms_norm, [rows, weight]),
        "gelu": (lambda x: ox.ops.gelu(x, "tanh"), [rows]),
        "swiglu": (ox.ops.swiglu, [rows]),
    }


def results(call: Callable[..., Tensor], given: list[Tensor], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    inputs = [t.to(device, dtype, copy=True).requires_grad_() for t in given]
    out = call(*inputs)
    (out.float() * torch.linspace(0.5, 1.5, out.numel(), device=device).view(out.shape)).sum().backward()
    return [t.detach().cpu().double() for t in (out, *(t.grad for t in inputs)) if t is not None]


@pytest.mark.parametrize("name", list(cases()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_fp64(name: str, dtype: torch.dtype, device: torch.device) -> None:
    call, given = cases()[name]
    given = [t.to(dtype) for t in given]
    close = 1e-4 if dtype == torch.float32 else 6e-2
    found, right = results(call, given, device, dtype), results(call, given, torch.device("cpu"), torch.float64)
    for one, exact in zip(found, right, strict=True):
        torch.testing.assert_close(one, exact, rtol=close, atol=close * float(exact.abs().max()))


@pytest.mark.parametrize("name", ["attention", "packed attention", "linear", "linear and cross entropy"])
def test_autocast_of_the_device_is_followed(name: str, device: torch.device) -> None:
    call, given = cases()[name]
    with torch.autocast(device.type, torch.bfloat16):
        out = call(*(t.to(device, copy=True).requires_grad_() for t in given))
    assert out.dtype == (torch.float32 if "cross entropy" in name else torch.bfloat16)
    out.sum().backward()
    torch.testing.assert_close(out.detach().cpu().float(), call(*given), rtol=5e-2, atol=5e-2)


@pytest.mark.skipif(torch_device.chosen().type in ("cpu", "cuda"), reason="fake devices count reads")
def test_a_loss_reads_nothing_on_the_host(device: torch.device) -> None:
    x, w, b = (t.to(device, copy=True).requires_grad_() for t in cases()["in chunks"][1])
    y = (torch.arange(len(x)) % len(w)).to(device)
    before = torch_device.host_reads()
    ox.ops.linear_cross_entropy(x, w, y, b).backward()
    assert torch_device.host_reads() == before
