"""Edits that keep the function a model computes, each with its way back.

Which of them are strategies for speed, tried by `oxytorch.accelerate` too, is decided in ``oxytorch.tune.strategies``.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from .. import _C
from .change import Change, Subject
from .recorder import OperatorRecorder
from .rules import Step, norms_after
from .snapshot import untouched

__all__ = ["EDITS", "make"]


class ChannelsLast(Change):
    """Images and the weights of 2-D convolutions with channels innermost.

    Gradients and what an optimizer keeps lie as their weights do.
    """

    kind = "tolerance"
    cost = "a second copy of the convolutions' weights and their optimizer state is kept while it may be taken back."
    dims: ClassVar[int] = 4
    layout: ClassVar[torch.memory_format] = torch.channels_last

    def __init__(self) -> None:
        self._spare: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()  # trials make new optimizer state each
        self._strides: list[tuple[Tensor, tuple[int, ...]]] = []

    def applies(self, run: Subject) -> bool | str:
        """See `Change.applies`."""
        if _own_weights(run.model, self.dims) and run.uses("convolution"):
            return True
        return f"the model has no {self.dims - 2}-D convolution"

    def apply(self, run: Subject) -> None:
        """See `Change.apply`."""
        weights = _own_weights(run.model, self.dims)
        self._strides = [(p, p.stride()) for p in weights]
        for p in weights:
            last = torch.empty(p.shape, dtype=p.dtype, device="meta").to(memory_format=self.layout).stride()
            self._lay_out(run, p, last)
        run.call.inputs(self, self._convert)

    def revert(self, run: Subject) -> None:
        """See `Change.revert`."""
        run.call.inputs(self, None)
        for p, strides in self._strides:
            self._lay_out(run, p, strides)

    def _convert(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def last(leaf: Any) -> Any:
            image = isinstance(leaf, Tensor) and leaf.dim() == self.dims and leaf.is_floating_point()
            return leaf.contiguous(memory_format=self.layout) if image else leaf

        if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
            return (last(args[0]),), kwargs
        return tree_map(last, (args, kwargs))  # type: ignore[no-any-return]

    def _lay_out(self, run: Subject, param: Tensor, strides: tuple[int, ...]) -> None:
        kept = [v for v in run.state_of(param).values() if isinstance(v, Tensor) and v.shape == param.shape]
        for tensor in (param, *kept):
            self._swap(tensor, strides)
        if param.grad is not None and param.grad.stride() != strides:
            param.grad.data = _strided(param.grad, strides).copy_(param.grad)

    def _swap(self, tensor: Tensor, strides: tuple[int, ...]) -> None:
        """Give a tensor other strides in a memory of its own, which waits while the tensor is in the other one."""
        if tensor.stride() == strides:
            return
        data = self._spare.pop(tensor, None)
        if data is None or data.stride() != strides or data.dtype != tensor.dtype:
            data = _strided(tensor, strides)
        data.copy_(tensor.data)
        self._spare[tensor] = tensor.data
        tensor.data = data


def _strided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def _own_weights(model: nn.Module, dims: int) -> list[Tensor]:
    """Parameters of so many dimensions that share their memory with no other tensor."""
    return [
        p
        for p in model.parameters()
        if p.dim() == dims
        and p.layout is torch.strided
        and p.is_floating_point()
        and not hasattr(p, "__tensor_flatten__")
        and p.untyped_storage().nbytes() == p.numel() * p.element_size()
    ]


class ChannelsLast3d(ChannelsLast):
    """Volumes and the weights of 3-D convolutions with channels innermost."""

    dims = 5
    layout = torch.channels_last_3d


class Attention(Change):
    """Chooses the kernel of scaled_dot_product_attention for the whole model; the backward follows."""

    kind = "tolerance"
    backend: ClassVar[SDPBackend | None] = None
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def applies(self, run: Subject) -> bool | str:
        """See `Change.applies`."""
        if self.backend is None:
            return f"there are {', '.join(name for name in EDITS if name.startswith('sdpa:'))}"
        if run.device.type not in self.devices:
            return f"there is no such kernel on {run.device.type}"
        if run.uses("scaled_dot_product") or run.uses("_safe_softmax"):
            return True
        return "the model does not call scaled_dot_product_attention"

    def scope(self) -> AbstractContextManager[Any]:
        """Return what is entered around forward."""
        assert self.backend is not None
        return sdpa_kernel([self.backend])

    def apply(self, run: Subject) -> None:
        """See `Change.apply`."""
        run.call.scope(self, self.scope)

    def revert(self, run: Subject) -> None:
        """See `Change.revert`."""
        run.call.scope(self, None)


class MathAttention(Attention):
    """Attention as two matrix products and a softmax."""

    backend = SDPBackend.MATH
    cost = "memory grows with the square of the sequence length."


class NativeKernel(Change):
    """Operators of torch served by kernels of this library: `kernels` in the place of `operators`."""

    kernels: tuple[str, ...]
    operators: tuple[str, ...]
    missing: str

    def applies(self, run: Subject) -> bool | str:
        """See `Change.applies`."""
        if run.device.type != "cpu":
            return f"there is no such kernel on {run.device.type}"
        return self.serves(run) or self.missing

    def serves(self, run: Subject) -> bool:
        """Whether the model has what the kernels are for."""
        return any(run.uses(name) for name in self.operators)

    def apply(self, run: Subject) -> None:  # noqa: ARG002
        """See `Change.apply`."""
        self._operators = _C.tune.NativeOperators()
        reports = self._operators.install(list(self.kernels))
        if not any(report.installed for report in reports):
            raise RuntimeError("; ".join(report.reason for report in reports))

    def revert(self, run: Subject) -> None:  # noqa: ARG002
        """See `Change.revert`."""
        self._operators.uninstall()


class NativeAttention(NativeKernel):
    """The kernel of this library for attention that a model calls or writes out."""

    kind = "tolerance"
    cost = (
        "attention of other models in this process takes this kernel too; the memory of scores cannot be read directly "
        "in the model (numpy, data_ptr)."
    )
    kernels, operators = ("flash_attention", "composed_attention"), ("scaled_dot_product_flash_attention",)
    missing = "the model neither calls nor writes out attention that the kernel takes"

    def applies(self, run: Subject) -> bool | str:
        """See `Change.applies`."""
        if not _C.tune.DeferredScores.serves(run.device):
            return f"there is no such kernel on {run.device.type}"
        return self.serves(run) or self.missing

    def serves(self, run: Subject) -> bool:
        """See `NativeKernel.serves`."""
        if run.device.type == "cpu" and super().serves(run):
            return True
        # No operator is noted for attention that is composed of others.
        return run.uses("softmax") and run.uses("bmm")

    def apply(self, run: Subject) -> None:
        """See `Change.apply`."""
        if run.device.type == "cpu":
            super().apply(run)
        self._scores = _C.tune.DeferredScores()
        run.call.scope(self, self._scores.scope)

    def revert(self, run: Subject) -> None:
        """See `Change.revert`."""
        run.call.scope(self, None)
        if run.device.type == "cpu":
            super().revert(run)
        del self._scores


class NativeActivation(NativeKernel):
    """GELU and SiLU by the kernels of this library."""

    kind = "tolerance"
    cost = "activations of other models in this process take these kernels too."
    kernels, operators = ("gelu", "silu"), ("gelu", "silu", "silu_")
    missing = "the model calls neither GELU nor SiLU"


class NativeLstm(NativeKernel):
    """LSTM layers by the kernel of this library, in place of oneDNN's."""

    kind = "tolerance"
    cost = "LSTM layers of other models in this process take this kernel too."
    kernels, operators = ("lstm",), ("mkldnn_rnn_layer",)
    missing = "the model calls no LSTM of oneDNN's, which float64, projections and packed sequences keep torch from"


class NativeGru(NativeKernel):
    """GRU layers by the kernel of this library, in place of torch's operators for each step."""

    kind = "tolerance"
    cost = "GRU layers of other models in this process take this kernel too."
    kernels = ("gru",)
    missing = "the model has no GRU of float32 or bfloat16"

    def serves(self, run: Subject) -> bool:
        """See `NativeKernel.serves`."""
        # No operator is noted for the layer itself: torch composes it of others.
        layers = [module for module in run.model.modules() if isinstance(module, nn.GRU)]
        return any(p.dtype in (torch.float32, torch.bfloat16) for layer in layers for p in layer.parameters())


class FlashAttention(Attention):
    """The flash kernel, which never holds all scores."""

    backend = SDPBackend.FLASH_ATTENTION


class EfficientAttention(Attention):
    """The memory-efficient kernel, for dtypes and masks that flash attention does not take."""

    backend = SDPBackend.EFFICIENT_ATTENTION
    devices = ("cuda",)


class CudnnAttention(Attention):
    """cuDNN's fused kernel."""

    backend = SDPBackend.CUDNN_ATTENTION
    devices = ("cuda",)


class Checkpoint(Change):
    """``checkpoint:NAME``: the block keeps its inputs alone and runs forward again in backward."""

    cost = "forward of the block runs twice in training."

    def applies(self, run: Subject) -> bool | str:
        """See `Change.applies`."""
        name = self.name.partition(":")[2]
        block = dict(run.model.named_modules()).get(name)
        if block is None or not name:
            return f"the model has no module {name!r}; named_modules() lists them"
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            return f"{name!r} is a {type(block).__name__}, which has no forward; name its children"
        counting = [n for n, m in block.named_modules(prefix=name) if getattr(m, "track_running_stats", False) is True]
        return (
            f"{counting[0]!r} keeps running statistics, which a second forward would update twice" if counting else True
        )

    def apply(self, run: Subject) -> None:
        """See `Change.apply`."""
        self._block = run.model.get_submodule(self.name.partition(":")[2])
        self._own = self._block.__dict__.get("forward")
        forward: Callable[..., Any] = self._block.forward

        def twice(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        self._block.forward = twice

    def revert(self, run: Subject) -> None:  # noqa: ARG002
        """See `Change.revert`."""
        if self._own is None:
            del self._block.__dict__["forward"]
        else:
            self._block.__dict__["forward"] = self._own


Pair = tuple[str, nn.Module, str, nn.Module]


def _pairs(run: Subject) -> list[Pair]:
    """(name, layer, name, normalisation) in traced order, where each of the two runs once."""
    recorder = OperatorRecorder(run.model)
    with untouched(run.model), torch.no_grad(), recorder:
        run.forward()
    step = Step(run.model, recorder, 0.0, has_backward=False)
    found = []
    for source, norm in norms_after(step):
        layer, behind = step.module(source.module), step.module(norm.module)
        assert source.module is not None and norm.module is not None and layer is not None and behind is not None
        if recorder.calls[source.module] == recorder.calls[norm.module] == 1:
            found.append((source.module, layer, norm.module, behind))
    return found


class FuseConvBn(Change):
    """Folds batch normalisation into the convolution or linear layer before it; evaluation only."""

    kind = "tolerance"
    inference = True
    cost = "for inference: training needs revert() first."

    def applies(self, run: Subject) -> bool | str:
        """See `Change.applies`."""
        if run.model.training:
            return "the model is in training mode; folding is for inference: call model.eval() first"
        if self._foldable(run):
            return True
        return "no batch normalisation with running statistics follows a convolution or linear layer alone"

    @staticmethod
    def _foldable(run: Subject) -> list[Pair]:
        pairs = [p for p in _pairs(run) if isinstance(p[3], nn.modules.batchnorm._BatchNorm)]
        return [p for p in pairs if p[3].track_running_stats and isinstance(p[1], nn.Linear | nn.modules.conv._ConvNd)]

    def apply(self, run: Subject) -> None:
        """See `Change.apply`."""
        self._own: list[tuple[nn.Module, str, nn.Module]] = []
        for name, layer, behind, norm in self._foldable(run):
            fuse: Any = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
            self._put(run.model, name, fuse(layer, norm))
            self._put(run.model, behind, nn.Identity().eval())

    def _put(self, model: nn.Module, name: str, module: nn.Module) -> None:
        owner, _, last = name.rpartition(".")
        parent = model.get_submodule(owner)
        self._own.append((parent, last, parent._modules[last]))  # type: ignore[arg-type]
        parent._modules[last] = module

    def revert(self, run: Subject) -> None:  # noqa: ARG002
        """See `Change.revert`."""
        for parent, name, module in reversed(self._own):
            parent._modules[name] = module


class DropBias(Change):
    """Takes away biases right before batch normalisation, and takes them out of the running mean.

    No strategy of a training run: its optimizer, its checkpoints and whoever compares its gradients would miss
    parameters that they know.
    """

    kind = "tolerance"
    cost = "an optimizer made before still holds the biases, which get no gradient any more."

    def applies(self, run: Subject) -> bool | str:
        """See `Change.applies`."""
        found = self._biased(run)
        for name, _, _, norm in found:
            if not norm.track_running_stats or norm.running_mean is None:
                return f"the normalisation behind {name!r} keeps no running mean to move the bias into"
        return True if found else "no layer with a bias feeds a batch normalisation alone"

    @staticmethod
    def _biased(run: Subject) -> list[Pair]:
        pairs = [p for p in _pairs(run) if isinstance(p[3], nn.modules.batchnorm._BatchNorm)]
        return [p for p in pairs if getattr(p[1], "bias", None) is not None]

    def apply(self, run: Subject) -> None:
        """See `Change.apply`."""
        found = self._biased(run)
        self.moved = {f"buffer {behind}.running_mean" for _, _, behind, _ in found}
        self._own: list[tuple[nn.Module, nn.Parameter, Tensor, Tensor, Tensor]] = []
        for _, layer, _, norm in found:
            bias: Any = layer.bias
            mean: Any = norm.running_mean
            before = mean.clone()
            mean.sub_(bias.detach())
            layer._parameters["bias"] = None
            self._own.append((layer, bias, mean, before, mean.clone()))

    def revert(self, run: Subject) -> None:  # noqa: ARG002
        """See `Change.revert`."""
        for layer, bias, mean, before, after in self._own:
            layer._parameters["bias"] = bias
            # The running mean of before where no training came between, else the present one with the bias.
            mean.copy_(before if torch.equal(mean, after) else mean + bias.detach())


#: By name; of one with an argument behind a colon, by what is before it.
EDITS: dict[str, type[Change]] = {
    "channels_last": ChannelsLast,
    "channels_last_3d": ChannelsLast3d,
    "sdpa": Attention,
    "sdpa:math": MathAttention,
    "sdpa:native": NativeAttention,
    "lstm:native": NativeLstm,
    "gru:native": NativeGru,
    "activation:native": NativeActivation,
    "sdpa:flash": FlashAttention,
    "sdpa:efficient": EfficientAttention,
    "sdpa:cudnn": CudnnAttention,
    "checkpoint": Checkpoint,
    "fuse_conv_bn": FuseConvBn,
    "drop_bias_before_norm": DropBias,
}


def make(name: str) -> Change:
    """The edit of a name, which may have an argument behind a colon."""
    kind = EDITS.get(name) or EDITS.get(name.partition(":")[0])
    if kind is None:
        raise ValueError(
            f"no edit is called {name!r}; there are channels_last, channels_last_3d, sdpa:KERNEL, lstm:native, "
            "gru:native, activation:native, checkpoint:MODULE, fuse_conv_bn and drop_bias_before_norm"
        )
    edit = kind()
    edit.name = name
    return edit
