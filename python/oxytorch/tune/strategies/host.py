"""Strategies of the host process: memory, threads, denormal numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import _C
from ...memory import use_host_pool
from ..observe import near_denormal, observe, on_device
from ..strategy import Strategy, strategy

if TYPE_CHECKING:
    from ..run import Run

__all__: list[str] = []


class _HostSetting(Strategy):
    """A native setting of the process that is made anew each time."""

    def _make(self, run: Run) -> Any:
        raise NotImplementedError

    def applies(self, run: Run) -> bool | str:
        return on_device(run, "cpu")

    def apply(self, run: Run) -> None:
        setting = self._make(run)
        if not setting.is_applied:
            raise RuntimeError(setting.reason)
        self._setting = setting
        self.cost = setting.cost

    def revert(self, run: Run) -> None:  # noqa: ARG002
        self._setting.revert()


@strategy("allocator", kind="exact", group="host_memory", interacts=("host_pool",), settle=2, expected_speedup=1.1)
class Allocator(_HostSetting):
    """glibc keeps freed memory for the next step instead of faulting it in again, up to half of what is available."""

    def _make(self, run: Run) -> Any:
        return _C.trainer.tune_allocator(run.asked.get("retain_limit"))


@strategy(
    "keep_heap",
    kind="exact",
    group="host_memory",
    part_of=("allocator",),
    interacts=("host_pool",),
    settle=2,
    expected_speedup=1.08,
)
class KeepHeap(_HostSetting):
    """glibc does not trim its heap between steps; blocks that have mappings of their own keep them."""

    def _make(self, run: Run) -> Any:
        return _C.trainer.keep_heap(run.asked.get("retain_limit"))


@strategy("host_pool", kind="exact", interacts=("allocator",), settle=2, expected_speedup=1.3)
class HostPool(_HostSetting):
    """A pool of huge pages under torch's CPU tensors; a tuned allocator beside it serves the scratch of operators."""

    def _make(self, run: Run) -> Any:  # noqa: ARG002
        return use_host_pool()


@strategy("native_operators", kind="exact", max_speedup=2.0, expected_speedup=1.2)
class NativeOperators(Strategy):
    """Max pooling, batch normalisation, dropout's draws and gradients of embeddings by kernels with torch's bits."""

    def applies(self, run: Run) -> bool | str:
        if (where := on_device(run, "cpu")) is not True:
            return where
        if any(observe(run).uses(name) for name in ("max_pool2d", "batch_norm", "bernoulli", "dropout")):
            return True
        parameters = sum(parameter.numel() for parameter in run.params)
        accumulates = run.accumulation > 1 or run.own_step is not None
        if _C.tune.NativeOperators.is_worth_a_trial(_embedded(run.model), parameters, accumulates):
            return True
        return "the model has neither max pooling nor batch normalisation nor dropout, and too few embeddings"

    def apply(self, run: Run) -> None:  # noqa: ARG002
        self._operators = _C.tune.NativeOperators()
        reports = self._operators.install()
        if not self._operators.installed():
            raise RuntimeError("; ".join(f"{report.name}: {report.reason}" for report in reports))

    def revert(self, run: Run) -> None:  # noqa: ARG002
        self._operators.uninstall()


def _embedded(model: nn.Module) -> int:
    """Elements of the tables whose gradients `NativeOperators` makes."""
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding) and not m.sparse}
    return sum(weight.numel() for weight in tables.values() if weight.requires_grad)


class _Threads(Strategy):
    """A number of intra-op threads."""

    def _wanted(self) -> int:
        raise NotImplementedError

    def applies(self, run: Run) -> bool | str:
        if (where := on_device(run, "cpu")) is not True:
            return where
        if self._wanted() == torch.get_num_threads():
            return f"{self._wanted()} intra-op threads are what there is"
        return True

    def apply(self, run: Run) -> None:  # noqa: ARG002
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._wanted())

    def revert(self, run: Run) -> None:  # noqa: ARG002
        torch.set_num_threads(self._before)


_FASTER_STEPS = ("allocator", "host_pool", "bf16_autocast", "compile", "channels_last", "step_tail")


@strategy("physical_cores", kind="tolerance", group="threads", interacts=_FASTER_STEPS, settle=2)
class PhysicalCores(_Threads):
    """As many intra-op threads as physical cores may be used."""

    def _wanted(self) -> int:
        return max(1, int(_C.base.cores()["usable_physical"]))


@strategy("one_thread", kind="tolerance", group="threads", interacts=_FASTER_STEPS, settle=2, expected_speedup=1.01)
class OneThread(_Threads):
    """One intra-op thread: small steps spend more on handing out work than on doing it."""

    def _wanted(self) -> int:
        return 1


@strategy("pinned_threads", kind="exact", group="affinity", interacts=("one_thread", "physical_cores"), settle=2)
class PinnedThreads(_HostSetting):
    """Each intra-op worker stays on a core of its own; tried where the cores have several caches of the last level."""

    def applies(self, run: Run) -> bool | str:
        if (where := super().applies(run)) is not True:
            return where
        if torch.get_num_threads() > 1 and _C.base.cores()["last_level_caches"] > 1:
            return True
        return "the threads share one cache of the last level"

    def _make(self, run: Run) -> Any:  # noqa: ARG002
        return _C.trainer.pin_threads()


@strategy("flush_denormals", kind="tolerance", interacts=("one_thread", "physical_cores"))
class FlushDenormals(_HostSetting):
    """Denormal numbers are taken as zero on every intra-op thread.

    Tried where gradients or the optimizer's state hold such numbers, or some within 1e8 of them: elsewhere it could
    neither help nor be seen to help.
    """

    def applies(self, run: Run) -> bool | str:
        if (where := super().applies(run)) is not True:
            return where
        state = (v for slot in run.slots for entries in slot.original.state.values() for v in entries.values())
        if any(isinstance(value, Tensor) and near_denormal(value) for value in state) or observe(run).tiny:
            return True
        return "neither gradients nor the optimizer's state hold numbers near the denormal ones"

    def _make(self, run: Run) -> Any:  # noqa: ARG002
        return _C.trainer.flush_denormals()
