"""Strategies of precision: products of 16 bits, or of float32 rounded on the way into the multiplier."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from ..._C.accelerator import set_float32_precision
from ..._C.amp import Autocast
from ...amp import hardware_support
from ...model.call import widened
from ..observe import on_device
from ..strategy import Strategy, strategy

if TYPE_CHECKING:
    from ..run import Run

__all__: list[str] = []


@strategy(
    "bf16_autocast",
    kind="precision",
    group="precision",
    interacts=("channels_last", "compile", "allocator", "host_pool"),
    cost="products are rounded to bfloat16; weights, their gradients and the loss stay float32.",
    max_speedup=8.0,
    expected_speedup=2.0,
)
class BFloat16Autocast(Strategy):
    """Forward under `torch.autocast` with bfloat16; what the model returns is float32 again."""

    def applies(self, run: Run) -> bool | str:
        if torch.is_autocast_enabled(run.device.type):
            return "autocast is on already"
        if not any(p.dtype is torch.float32 for p in run.params):
            return "no parameter is float32"
        native, why = hardware_support(run.device, torch.bfloat16)
        return True if native or run.asked.get("precision") == "bf16" else why

    def apply(self, run: Run) -> None:
        device = run.device.type

        def scope() -> AbstractContextManager[Any]:
            # Whoever traces the step knows torch's class alone.
            traced = torch.compiler.is_compiling() or torch._C._is_torch_function_mode_enabled()
            return (torch.autocast if traced else Autocast)(device, dtype=torch.bfloat16)

        run.call.scope("autocast", scope)
        run.call.outputs("autocast", widened)

    def revert(self, run: Run) -> None:
        run.call.scope("autocast", None)
        run.call.outputs("autocast", None)


class _Float32Precision(Strategy):
    """How a backend may round the inputs of float32 products."""

    _backend = ""
    _operations: tuple[str, ...] = ()
    _value = ""

    def apply(self, run: Run) -> None:  # noqa: ARG002
        self._setting = set_float32_precision(self._backend, self._operations, self._value)

    def revert(self, run: Run) -> None:  # noqa: ARG002
        self._setting.revert()


@strategy(
    "onednn_bf16",
    kind="precision",
    group="precision",
    interacts=("channels_last", "compile"),
    cost="oneDNN rounds the inputs of float32 products to bfloat16.",
    expected_speedup=1.1,
)
class OneDnnBFloat16(_Float32Precision):
    """Tensors stay float32; oneDNN multiplies them as bfloat16."""

    _backend = "mkldnn"
    _operations = ("matmul", "conv", "rnn")
    _value = "bf16"

    def applies(self, run: Run) -> bool | str:
        if run.device.type != "cpu" or not torch._C._has_mkldnn:
            return "oneDNN does not compute this model"
        native, why = hardware_support(run.device, torch.bfloat16)
        return True if native else why


@strategy(
    "tf32",
    kind="precision",
    interacts=("bf16_autocast",),
    cost="the inputs of float32 products keep 10 bits of their mantissa.",
    expected_speedup=1.5,
)
class TensorFloat32(_Float32Precision):
    """TF32 in matrix products and convolutions on CUDA devices of capability 8.0 and above."""

    _backend = "cuda"
    _operations = ("matmul", "conv", "rnn")
    _value = "tf32"

    def applies(self, run: Run) -> bool | str:
        if (where := on_device(run, "cuda")) is not True:
            return where
        return True if torch.cuda.get_device_capability(run.device)[0] >= 8 else "the device has no TF32"


@strategy("cudnn_benchmark", kind="tolerance", interacts=("channels_last", "bf16_autocast"), settle=3)
class CudnnBenchmark(Strategy):
    """cuDNN times its algorithms for each shape and takes the fastest."""

    def applies(self, run: Run) -> bool | str:
        if (where := on_device(run, "cuda")) is not True:
            return where
        return "it is on already" if torch.backends.cudnn.benchmark else True

    def apply(self, run: Run) -> None:  # noqa: ARG002
        torch.backends.cudnn.benchmark = True

    def revert(self, run: Run) -> None:  # noqa: ARG002
        torch.backends.cudnn.benchmark = False
