"""Strategies of scaled dot-product attention: which of torch's kernels computes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..strategy import Strategy, strategy
from .observe import observe

if TYPE_CHECKING:
    from ..run import Run

__all__: list[str] = []

# Operators into which torch takes attention apart, by the kernel that computes it.
_KERNELS = {
    SDPBackend.FLASH_ATTENTION: "scaled_dot_product_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "scaled_dot_product_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "scaled_dot_product_cudnn_attention",
}
_INTERACTS = ("bf16_autocast", "compile", "allocator", "host_pool")


class _Attention(Strategy):
    """One kernel in forward; its backward follows."""

    _backend = SDPBackend.MATH
    _devices: tuple[str, ...] = ("cpu", "cuda")

    def applies(self, run: Run) -> bool | str:
        if run.device.type not in self._devices:
            return f"there is no such kernel on {run.device.type}"
        seen = observe(run)
        if not any(seen.uses(name) for name in _KERNELS.values()):
            return "the model calls no attention kernel of torch's"
        if self._backend in _KERNELS and seen.uses(_KERNELS[self._backend]):
            return "it is torch's own choice here"
        return True

    @contextmanager
    def _scope(self) -> Iterator[None]:
        with sdpa_kernel([self._backend]):
            yield

    def apply(self, run: Run) -> None:
        run.call.scope("attention", self._scope)

    def revert(self, run: Run) -> None:
        run.call.scope("attention", None)


@strategy(
    "math_attention",
    kind="tolerance",
    expected_speedup=1.1,
    group="attention",
    interacts=_INTERACTS,
    cost="memory grows with the square of the sequence length.",
)
class MathAttention(_Attention):
    """Attention as two matrix products and a softmax."""


@strategy(
    "math_attention_bf16",
    kind="precision",
    expected_speedup=1.35,
    group="attention",
    requires=("bf16_autocast",),
    interacts=_INTERACTS,
    cost="scores are rounded to bfloat16; memory grows with the square of the sequence length.",
)
class MathAttentionBFloat16(_Attention):
    """Attention as two matrix products and a softmax that stay in bfloat16 all the way."""

    @contextmanager
    def _scope(self) -> Iterator[None]:
        before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        try:
            with sdpa_kernel([self._backend]):
                yield
        finally:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@strategy("flash_attention", kind="tolerance", group="attention", interacts=_INTERACTS)
class FlashAttention(_Attention):
    """The flash kernel, which never holds all scores."""

    _backend = SDPBackend.FLASH_ATTENTION


@strategy("efficient_attention", kind="tolerance", group="attention", interacts=_INTERACTS)
class EfficientAttention(_Attention):
    """The memory-efficient kernel, for dtypes and masks that flash attention does not take."""

    _backend = SDPBackend.EFFICIENT_ATTENTION
    _devices = ("cuda",)


@strategy("cudnn_attention", kind="tolerance", group="attention", interacts=_INTERACTS)
class CudnnAttention(_Attention):
    """cuDNN's fused kernel."""

    _backend = SDPBackend.CUDNN_ATTENTION
    _devices = ("cuda",)
