"""Strategies that choose kernels of attention, convolutions, recurrent and linear layers and activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend

from ... import _C
from ...model import edits
from ..observe import rehearsal
from ..strategy import Strategy, strategy

if TYPE_CHECKING:
    from ...model.change import Subject
    from ..run import Run

__all__: list[str] = []

# Operators into which torch takes attention apart, by the kernel that computes it.
_KERNELS = {
    SDPBackend.FLASH_ATTENTION: "scaled_dot_product_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "scaled_dot_product_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "scaled_dot_product_cudnn_attention",
}
_INTERACTS = ("bf16_autocast", "compile", "allocator", "host_pool")


class _Tried(edits.Attention, Strategy):
    """Not where it would change nothing."""

    def applies(self, run: Subject) -> bool | str:
        if not any(run.uses(name) for name in _KERNELS.values()):
            return "the model calls no attention kernel of torch's"
        if self.backend in _KERNELS and run.uses(_KERNELS[self.backend]):
            return "it is torch's own choice here"
        return super().applies(run)


@strategy(
    "native_attention",
    kind="tolerance",
    group="attention",
    interacts=_INTERACTS,
    max_speedup=6.0,
    expected_speedup=1.4,
)
class NativeAttention(edits.NativeAttention, Strategy):
    """The kernel of this library for attention that a model calls or writes out."""

    def serves(self, run: Any) -> bool:
        """See `NativeKernel.serves`."""
        is_cpu = run.device.type == "cpu"
        if is_cpu and any(run.uses(name) for name in self.operators):
            return True
        if not super().serves(run):
            return False
        operators, scores = _C.tune.NativeOperators(), _C.tune.DeferredScores()

        def found() -> int:
            return operators.composed_attentions() + scores.joined()

        before = found()
        if is_cpu:
            operators.install(["composed_attention"])
        try:
            with rehearsal(run), scores.scope():
                run.forward()
        finally:
            operators.uninstall()
        return found() > before


@strategy(
    "native_convolution",
    kind="tolerance",
    requires=("bf16_autocast",),
    interacts=("channels_last", "compile", "allocator", "host_pool"),
    settle=2,
    max_speedup=2.0,
    expected_speedup=1.1,
    cost="convolutions of other models in this process take this kernel too.",
)
class NativeConvolution(edits.NativeKernel, Strategy):
    """Gradients of convolutions' weights in bfloat16 by the kernel of this library, in place of oneDNN's."""

    kernels = ("convolution",)
    missing = "no weight of a convolution of images has enough channels"

    def serves(self, run: Subject) -> bool:
        """See `NativeKernel.serves`."""
        takes = _C.tune.NativeOperators.serves_convolution
        return any(takes(list(parameter.shape)) for parameter in run.model.parameters())


@strategy("native_lstm", kind="tolerance", interacts=_INTERACTS, max_speedup=4.0, expected_speedup=2.2)
class NativeLstm(edits.NativeLstm, Strategy):
    """LSTM layers by the kernel of this library, in place of oneDNN's."""


@strategy("native_gru", kind="tolerance", interacts=_INTERACTS, max_speedup=8.0, expected_speedup=2.5)
class NativeGru(edits.NativeGru, Strategy):
    """GRU layers by the kernel of this library, in place of torch's operators for each step."""


@strategy("native_activation", kind="tolerance", interacts=_INTERACTS, settle=2, max_speedup=1.5, expected_speedup=1.02)
class NativeActivation(edits.NativeActivation, Strategy):
    """GELU and SiLU by the kernels of this library."""


@strategy(
    "native_linear",
    kind="precision",
    requires=("bf16_autocast",),
    interacts=("compile", "allocator", "host_pool"),
    settle=2,
    max_speedup=2.0,
    expected_speedup=1.1,
    cost="linear layers of other models in this process take this kernel too.",
)
class NativeLinear(edits.NativeKernel, Strategy):
    """Linear layers under autocast, and a ReLU behind them, by the kernel of this library, of float32 weights."""

    kernels = ("linear",)
    missing = "the model has no float32 weight of a linear layer"

    def serves(self, run: Subject) -> bool:
        """See `NativeKernel.serves`."""
        return any(p.dim() == 2 and p.dtype == torch.float32 for p in run.model.parameters())


@strategy(
    "packed_weights",
    kind="exact",
    requires=("native_linear",),
    interacts=("allocator", "host_pool"),
    settle=2,
    max_speedup=3.0,
    expected_speedup=1.1,
    cost="4 bytes of memory for each element of a linear layer's weight.",
)
class PackedWeights(Strategy):
    """Weights of linear layers laid out once for all batches whose gradients are accumulated."""

    def applies(self, run: Run) -> bool | str:
        """Where a step is, or may be, of several batches."""
        if run.accumulation > 1 or run.own_step is not None:
            return True
        return "each step is of one batch: its weights are packed once in any case"

    def apply(self, run: Run) -> None:  # noqa: ARG002
        """Keep them from now on."""
        self._kept = _C.ops.PackedWeights()
        self._kept.__enter__()

    def revert(self, run: Run) -> None:  # noqa: ARG002
        """Forget them."""
        self._kept.__exit__(None, None, None)


def _offer(name: str, edit: type[edits.Attention], expected_speedup: float = Strategy.expected_speedup) -> None:
    tried = type(edit.__name__, (_Tried, edit), {"__doc__": edit.__doc__})
    strategy(name, kind="tolerance", group="attention", interacts=_INTERACTS, expected_speedup=expected_speedup)(tried)


_offer("math_attention", edits.MathAttention, 1.1)  # the order of trials


@strategy(
    "math_attention_bf16",
    kind="precision",
    expected_speedup=1.35,
    group="attention",
    requires=("bf16_autocast",),
    interacts=_INTERACTS,
    cost="scores are rounded to bfloat16; memory grows with the square of the sequence length.",
)
class MathAttentionBFloat16(_Tried, edits.MathAttention):
    """Attention as two matrix products and a softmax that stay in bfloat16 all the way."""

    @contextmanager
    def scope(self) -> Iterator[None]:
        before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        try:
            with super().scope():
                yield
        finally:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


_offer("flash_attention", edits.FlashAttention)
_offer("efficient_attention", edits.EfficientAttention)
_offer("cudnn_attention", edits.CudnnAttention)
