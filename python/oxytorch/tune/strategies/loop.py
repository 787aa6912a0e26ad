"""Strategies of the loop itself, for runs whose steps the plan takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ... import _C
from ...data.batches import is_nest
from ...step_graph import StepGraph as Graph
from ..observe import observe, rehearsal
from ..run import rows
from ..strategy import Strategy, strategy

if TYPE_CHECKING:
    from ..run import Run

__all__: list[str] = []

_INTERACTS = ("allocator", "host_pool", "compile", "bf16_autocast", "channels_last")


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


class _Split(Strategy):
    """A batch in pieces that fit the caches, gradients averaged over them: the same batch size for the optimizer."""

    _pieces = 2

    def applies(self, run: Run) -> bool | str:
        if run.own_step is not None:
            return "the user's own step is called whole"
        if len(run.losses) > 1:
            return "there are several losses, of which one may use what another made of the whole batch"
        if not all(is_nest(batch) for batch in run.batches):
            return "a batch is an object that cannot be cut into pieces"
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in run.model.modules()):
            return "batch normalisation looks at the whole batch"
        if observe(run).random:
            return "each piece would draw random numbers of its own"
        if any(rows(batch) % self._pieces for batch in run.batches):
            return f"batches of {rows(run.batches[0])} cannot be cut into {self._pieces} equal pieces"
        if any(t.shape[0] != rows(batch) for batch in run.batches for t in tree_leaves(batch) if _has_rows(t)):
            return "the tensors of a batch differ in their first dimension"
        return True

    def apply(self, run: Run) -> None:
        run.micro_batches = self._pieces

    def revert(self, run: Run) -> None:
        run.micro_batches = 1


@strategy("split_2", kind="tolerance", group="split", needs_loop=True, interacts=_INTERACTS, max_speedup=1.5)
class Split2(_Split):
    """Each batch in 2 pieces, gradients averaged: the batch size that the optimizer sees stays."""


@strategy("split_4", kind="tolerance", group="split", needs_loop=True, interacts=_INTERACTS, max_speedup=1.5)
class Split4(_Split):
    """Each batch in 4 pieces, gradients averaged."""

    _pieces = 4


@strategy("split_8", kind="tolerance", group="split", needs_loop=True, interacts=_INTERACTS, max_speedup=1.5)
class Split8(_Split):
    """Each batch in 8 pieces, gradients averaged."""

    _pieces = 8


class _Deferred(Strategy):
    """Layers that leave their results to what follows them, while the model is called."""

    _kind: Any
    """Made and entered: `_C.tune.DeferredLogits` or the like."""

    def applies(self, run: Run) -> bool | str:
        if not self._serves(run.device):
            return f"there is no such kernel on {run.device.type}"
        if run.own_step is not None:
            return "the user's own step is called whole"
        return self._finds(run)

    def _serves(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def _make(self, run: Run) -> Any:  # noqa: ARG002
        return self._kind()

    def _finds(self, run: Run) -> bool | str:
        """Whether the model has what it serves, or why not."""
        raise NotImplementedError

    def _has_any(self, run: Run, count: Callable[[], int]) -> bool:
        """Whether a loss of the run has any of what `count` counts; with no batch to tell by it may."""
        if not run.batches:
            return True
        made, before = self._make(run), count()  # kernels are registered while it lives
        with rehearsal(run), made.scope():
            run.loss(run.batches[0])
        return count() > before

    def apply(self, run: Run) -> None:
        self._made = self._make(run)
        run.call.scope(self, self._made.scope)

    def revert(self, run: Run) -> None:
        run.call.scope(self, None)
        del self._made


@strategy(
    "native_batch_norm",
    kind="tolerance",
    interacts=("channels_last", "compile", "bf16_autocast", "allocator", "host_pool"),
    settle=2,
    cost="the memory of a normalized tensor cannot be read directly in the model (numpy, data_ptr).",
    max_speedup=3.0,
    expected_speedup=1.2,
)
class NativeBatchNorm(_Deferred):
    """Batch normalization, what is added to it, ReLU and max pooling as one."""

    _kind = _C.tune.DeferredNorms

    def _finds(self, run: Run) -> bool | str:
        is_any = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in run.model.modules())
        return is_any or "the model has no batch normalization"


@strategy(
    "native_layer_norm",
    kind="tolerance",
    interacts=("compile", "bf16_autocast", "allocator", "host_pool"),
    settle=2,
    cost="the memory of a sum cannot be read directly in the model (numpy, data_ptr).",
    max_speedup=2.0,
    expected_speedup=1.06,
)
class NativeLayerNorm(_Deferred):
    """Dropout, the residual and the layer or RMS normalization of their sum as one."""

    _kind = _C.tune.DeferredSums

    def _serves(self, device: torch.device) -> bool:
        return _C.tune.DeferredSums.serves(device)

    def _finds(self, run: Run) -> bool | str:
        if run.device.type != "cpu":
            writes = self._has_any(run, _C.tune.DeferredSums.written)
            return writes or f"the model writes out no RMS normalization, and others are torch's on {run.device.type}"
        found = any(isinstance(module, nn.LayerNorm | nn.RMSNorm) for module in run.model.modules())
        found = found or any(run.uses(name) for name in ("native_layer_norm", "_fused_rms_norm"))
        found = found or self._has_any(run, _C.tune.DeferredSums.written)
        return found or "the model has neither layer nor RMS normalization"


@strategy(
    "native_gate",
    kind="tolerance",
    interacts=("compile", "bf16_autocast", "allocator", "host_pool"),
    settle=2,
    cost="the memory of an activation cannot be read directly in the model (numpy, data_ptr).",
    max_speedup=1.5,
    expected_speedup=1.01,
)
class NativeGate(_Deferred):
    """SiLU or GELU and the product with it as one (SwiGLU, GEGLU)."""

    _kind = _C.tune.DeferredGates

    def _finds(self, run: Run) -> bool | str:
        return self._has_any(run, _C.tune.DeferredGates.joined) or "the model multiplies nothing by a SiLU or GELU"


@strategy(
    "native_cross_entropy",
    kind="tolerance",
    interacts=("compile", "bf16_autocast", "allocator", "host_pool"),
    cost="logits that are kept until the optimizer's step are computed then.",
    max_speedup=3.0,
    expected_speedup=1.1,
)
class NativeCrossEntropy(_Deferred):
    """The last linear layer and its cross entropy as one, without the logits."""

    _kind = _C.tune.DeferredLogits

    def _serves(self, device: torch.device) -> bool:
        return _C.tune.DeferredLogits.serves(device)

    def _make(self, run: Run) -> Any:
        return self._kind(run.device)

    def _finds(self, run: Run) -> bool | str:
        missing = "no cross entropy of class indices takes what a linear layer of 256 or more classes gives, alone"
        return self._has_any(run, _C.tune.DeferredLogits.losses) or missing

    def apply(self, run: Run) -> None:
        super().apply(run)
        self._hook = register_optimizer_step_pre_hook(lambda *_: _C.tune.DeferredLogits.before_weights_change())

    def revert(self, run: Run) -> None:
        self._hook.remove()
        super().revert(run)


@strategy(
    "step_graph",
    kind="tolerance",
    requires=("step_tail",),
    interacts=("compile", "bf16_autocast", "channels_last"),
    needs_loop=True,
    unseen_memory=True,
    settle=6,
    cost="batches are copied to where the recording reads them; its intermediate results stay allocated.",
)
class StepGraph(Strategy):
    """The whole step recorded once, proven byte for byte, and launched as one graph of the device."""

    _recorder: Callable[[], Any] | None = None

    def applies(self, run: Run) -> bool | str:
        if run.own_step is not None:
            return "the user's own step may read the device"
        if len(run.slots) > 1:
            return "a recording is of the step of one optimizer"
        if not run.is_plain():  # a guard is taken along by the step tail
            return "a step is several batches, clips by value or has a loss scale"
        if not all(is_nest(batch) for batch in run.batches):
            return "a batch is an object whose tensors cannot be exchanged"
        if run.device.type == "cpu" and self._recorder is None:
            return "a CPU has no graphs"
        return True

    def apply(self, run: Run) -> None:
        graphs: dict[Any, Graph] = {}

        def whole_step(batch: Any) -> Tensor:
            leaves, spec = tree_flatten(batch)
            where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            rest = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
            key = (spec, tuple((leaves[i].shape, leaves[i].dtype) for i in where), rest)

            def step(*tensors: Tensor) -> Tensor:
                whole = list(leaves)
                for i, tensor in zip(where, tensors, strict=True):
                    whole[i] = tensor
                return run.eager_step(tree_unflatten(whole, spec))

            if key not in graphs:
                graphs[key] = Graph(step, run.model, run.optimizer, recorder=type(self)._recorder)
            self.graph = graphs[key]
            loss: Tensor = self.graph(*(leaves[i] for i in where))
            return loss.clone()  # the recording writes its own anew

        # Recorded anew each time: parameters and state may have moved while it was away.
        run.whole_step = whole_step

    def revert(self, run: Run) -> None:
        run.whole_step = None
        if run.device.type != "cpu":
            torch.accelerator.synchronize()
