"""Edits that keep the function a model computes, each with its way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.utils.checkpoint import checkpoint

from .rules import Step, norms_after
from .snapshot import untouched
from .watch import Watch

__all__ = ["EDITS", "Edit", "Refusal", "make"]

Run = Callable[[], Any]


class Refusal(ValueError):
    """An edit does not fit this model; the message says why."""


class Edit:
    """One edit: `apply` changes the model or raises `Refusal` with nothing changed, `revert` undoes it bit for bit.

    Attributes
    ----------
    name : str
    exact : bool
        Whether outputs and gradients stay the same bit for bit.
    inference : bool
        Whether the edit is for evaluation only, without gradients.
    note : str
        What the user should know once it is applied.
    moved : set of str
        Results that the edit moves on purpose, such as ``"buffer norm.running_mean"``.
    """

    exact: ClassVar[bool] = False
    inference: ClassVar[bool] = False
    note = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self.moved: set[str] = set()

    def apply(self, model: nn.Module, run: Run) -> None:
        """Change the model; `run` runs its step forward once."""
        raise NotImplementedError

    def revert(self) -> None:
        """Undo it."""
        raise NotImplementedError


class ChannelsLast(Edit):
    """Holds the weights of 2-D convolutions, and the images that go in, in channels_last."""

    note = "the model's image inputs are taken to channels_last on entry."

    def apply(self, model: nn.Module, run: Run) -> None:  # noqa: ARG002
        """See `Edit.apply`."""
        if not any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in model.modules()):
            raise Refusal("the model has no 2-D convolution.")
        self._own = [(t, t.data) for t in (*model.parameters(), *model.buffers()) if t.dim() == 4]
        for tensor, data in self._own:
            tensor.data = data.contiguous(memory_format=torch.channels_last)
        self._hook = model.register_forward_pre_hook(self._enter, with_kwargs=True)

    @staticmethod
    def _enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return torch.utils._pytree.tree_map(_last, (args, kwargs))

    def revert(self) -> None:
        """See `Edit.revert`."""
        self._hook.remove()
        for tensor, data in self._own:
            data.copy_(tensor.data)  # training may have gone on
            tensor.data = data


def _last(value: Any) -> Any:
    images = isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()
    return value.contiguous(memory_format=torch.channels_last) if images else value


class _Forward:
    """Replaces `forward` of one module object and puts the former back."""

    def __init__(self, module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._module = module
        self._own = module.__dict__.get("forward")
        module.forward = make(module.forward)

    def undo(self) -> None:
        """Put the former back."""
        if self._own is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self._own


class Attention(Edit):
    """Chooses the kernel of scaled_dot_product_attention for the whole model: ``sdpa:math``, ``sdpa:flash`` ..."""

    _KERNELS: ClassVar[dict[str, SDPBackend]] = {
        "math": SDPBackend.MATH,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }

    def apply(self, model: nn.Module, run: Run) -> None:
        """See `Edit.apply`."""
        kernel = self._KERNELS.get(self.name.partition(":")[2])
        if kernel is None:
            raise Refusal(f"there are sdpa:{', sdpa:'.join(self._KERNELS)}.")
        with Watch(model) as watch, torch.no_grad(), untouched(model):
            run()
        if not any("scaled_dot_product" in op.name or op.name == "_safe_softmax" for op in watch.ops):
            raise Refusal("the model does not call scaled_dot_product_attention.")

        def under(forward: Callable[..., Any]) -> Callable[..., Any]:
            def with_kernel(*args: Any, **kwargs: Any) -> Any:
                with sdpa_kernel(kernel):
                    return forward(*args, **kwargs)

            return with_kernel

        self._forward = _Forward(model, under)

    def revert(self) -> None:
        """See `Edit.revert`."""
        self._forward.undo()


class Checkpoint(Edit):
    """``checkpoint:NAME``: the block keeps its inputs alone and runs forward again in backward."""

    exact = True
    note = "forward of the block runs twice in training."

    def apply(self, model: nn.Module, run: Run) -> None:  # noqa: ARG002
        """See `Edit.apply`."""
        name = self.name.partition(":")[2]
        block = dict(model.named_modules()).get(name)
        if block is None or not name:
            raise Refusal(f"the model has no module {name!r}; named_modules() lists them.")
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise Refusal(f"{name!r} is a {type(block).__name__}, which has no forward; name its children.")
        counting = [n for n, m in block.named_modules(prefix=name) if getattr(m, "track_running_stats", False) is True]
        if counting:
            raise Refusal(f"{counting[0]!r} keeps running statistics, which a second forward would update twice.")

        def under(forward: Callable[..., Any]) -> Callable[..., Any]:
            def twice(*args: Any, **kwargs: Any) -> Any:
                if not torch.is_grad_enabled():
                    return forward(*args, **kwargs)
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)

            return twice

        self._forward = _Forward(block, under)

    def revert(self) -> None:
        """See `Edit.revert`."""
        self._forward.undo()


def _pairs(model: nn.Module, run: Run) -> list[tuple[str, nn.Module, str, nn.Module]]:
    """(name, layer, name, normalisation) in traced order, where each of the two runs once."""
    watch = Watch(model)
    with untouched(model), torch.no_grad(), watch:
        run()
    step = Step(model, watch, 0.0, has_backward=False)
    found = []
    for source, norm in norms_after(step):
        layer, behind = step.module(source.module), step.module(norm.module)
        assert source.module is not None and norm.module is not None and layer is not None and behind is not None
        if watch.calls[source.module] == watch.calls[norm.module] == 1:
            found.append((source.module, layer, norm.module, behind))
    return found


class FuseConvBn(Edit):
    """Folds batch normalisation into the convolution or linear layer before it; evaluation only."""

    inference = True
    note = "for inference: training needs revert() first."

    def apply(self, model: nn.Module, run: Run) -> None:
        """See `Edit.apply`."""
        if model.training:
            raise Refusal("the model is in training mode; folding is for inference: call model.eval() first.")
        pairs = [p for p in _pairs(model, run) if isinstance(p[3], nn.modules.batchnorm._BatchNorm)]
        pairs = [p for p in pairs if p[3].track_running_stats and isinstance(p[1], nn.Linear | nn.modules.conv._ConvNd)]
        if not pairs:
            raise Refusal("no batch normalisation with running statistics follows a convolution or linear layer alone.")
        self._own: list[tuple[nn.Module, str, nn.Module]] = []
        for name, layer, behind, norm in pairs:
            fuse: Any = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
            self._put(model, name, fuse(layer, norm))
            self._put(model, behind, nn.Identity().eval())

    def _put(self, model: nn.Module, name: str, module: nn.Module) -> None:
        owner, _, last = name.rpartition(".")
        parent = model.get_submodule(owner)
        self._own.append((parent, last, parent._modules[last]))  # type: ignore[arg-type]
        parent._modules[last] = module

    def revert(self) -> None:
        """See `Edit.revert`."""
        for parent, name, module in reversed(self._own):
            parent._modules[name] = module


class DropBias(Edit):
    """Takes away biases right before batch normalisation, and takes them out of the running mean."""

    note = "an optimizer made before still holds the biases, which get no gradient any more."

    def apply(self, model: nn.Module, run: Run) -> None:
        """See `Edit.apply`."""
        self._own: list[tuple[nn.Module, nn.Parameter, Tensor, Tensor, Tensor]] = []
        for name, layer, behind, norm in _pairs(model, run):
            bias = getattr(layer, "bias", None)
            if bias is None or not isinstance(norm, nn.modules.batchnorm._BatchNorm):
                continue
            if not norm.track_running_stats or norm.running_mean is None:
                raise Refusal(f"the normalisation behind {name!r} keeps no running mean to move the bias into.")
            self.moved.add(f"buffer {behind}.running_mean")
            self._own.append((layer, bias, norm.running_mean, norm.running_mean.clone(), norm.running_mean))
        if not self._own:
            raise Refusal("no layer with a bias feeds a batch normalisation alone.")
        for index, (layer, bias, mean, before, _) in enumerate(self._own):
            mean.sub_(bias.detach())
            layer._parameters["bias"] = None
            self._own[index] = (layer, bias, mean, before, mean.clone())

    def revert(self) -> None:
        """See `Edit.revert`."""
        for layer, bias, mean, before, after in self._own:
            layer._parameters["bias"] = bias
            # The running mean of before where no training came between, else the present one with the bias.
            mean.copy_(before if torch.equal(mean, after) else mean + bias.detach())


EDITS: dict[str, type[Edit]] = {
    "channels_last": ChannelsLast,
    "sdpa": Attention,
    "checkpoint": Checkpoint,
    "fuse_conv_bn": FuseConvBn,
    "drop_bias_before_norm": DropBias,
}


def make(name: str) -> Edit:
    """The edit of a name, which may have an argument behind a colon."""
    kind = EDITS.get(name.partition(":")[0])
    if kind is None:
        raise ValueError(
            f"no edit is called {name!r}; there are channels_last, sdpa:KERNEL, checkpoint:MODULE, fuse_conv_bn and "
            "drop_bias_before_norm"
        )
    return kind(name)
