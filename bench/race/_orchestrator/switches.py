"""What a competent engineer switches in stock PyTorch in a line each; nothing here imports oxytorch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from oxytorch_demo.workloads import Batch

OPTIMIZERS: dict[str, dict[str, bool]] = {
    "": {},  # as torch chooses
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
PRECISIONS = ("fp32", "oneDNN bf16", "bf16")
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of `torch.compile` that capture CUDA graphs."""
MODES = ("", "default", "max-autotune-no-cudagraphs")
"""Of `torch.compile`. On the CPU "reduce-overhead" is "default" and "max-autotune" is the last one."""
DEFAULT, MALLOPT, HUGE = "default", "mallopt", "mallopt + huge pages"
PRELOADED: dict[str, tuple[str, dict[str, str]]] = {
    # The settings of PyTorch's performance tuning guide: freed memory stays with the process.
    "jemalloc": (
        "libjemalloc.so.2",
        {
            "MALLOC_CONF": "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
            "dirty_decay_ms:-1,muzzy_decay_ms:-1"
        },
    ),
    "tcmalloc": ("libtcmalloc_minimal.so.4", {"TCMALLOC_RELEASE_RATE": "0"}),
    "mimalloc": (
        "libmimalloc.so.2",
        {"MIMALLOC_PAGE_RESET": "0", "MIMALLOC_PURGE_DELAY": "-1", "MIMALLOC_LARGE_OS_PAGES": "1"},
    ),
}
ALLOCATORS = (DEFAULT, MALLOPT, HUGE, *PRELOADED)
IMAGES, ATTENTION = frozenset({"cnn", "resnet"}), frozenset({"gpt", "bert"})


def library(allocator: str) -> Path | None:
    """Where the library of a preloaded allocator is, None where it is not installed."""
    name = PRELOADED[allocator][0]
    folders = [*Path("/usr/lib").glob("*-linux-gnu*"), Path("/usr/lib64"), Path("/usr/lib"), Path("/usr/local/lib")]
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def installed(allocator: str) -> bool:
    """Whether this machine has it."""
    return allocator not in PRELOADED or library(allocator) is not None


@dataclass(frozen=True)
class Switches:
    """One combination. As it stands: the plain loop."""

    optimizer: str = ""
    precision: str = "fp32"
    channels_last: bool = False
    math_attention: bool = False
    allocator: str = DEFAULT
    threads: int = 0
    """0 for as many as the race has."""
    compile: str = ""
    flush_denormals: bool = False
    device: str = "cpu"
    graph: bool = False
    """The whole step captured by hand in one CUDA graph."""

    def __str__(self) -> str:
        said = [f"{self.optimizer} AdamW" if self.optimizer else "", self.precision]
        said += ["channels_last" if self.channels_last else "", "math attention" if self.math_attention else ""]
        said += ["" if self.allocator == DEFAULT else self.allocator, f"compile {self.compile}" if self.compile else ""]
        said += ["whole step in a CUDA graph"] if self.graph else []
        said += [f"{self.threads} thread{'s' if self.threads > 1 else ''}" if self.threads else ""]
        return ", ".join(filter(None, said))

    def to_json(self) -> dict[str, Any]:
        """What differs from the plain loop."""
        plain = asdict(Switches())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}

    def environment(self) -> dict[str, str]:
        """Variables that must be there before the process starts."""
        if self.allocator == HUGE:
            return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        if self.allocator not in PRELOADED:
            return {}
        found = library(self.allocator)
        if found is None:
            raise FileNotFoundError(f"{PRELOADED[self.allocator][0]} is not installed; see bench/race/apt-packages.txt")
        return {"LD_PRELOAD": str(found), **PRELOADED[self.allocator][1]}

    def command(self, command: list[str]) -> list[str]:
        """`command` with that environment."""
        said = [f"{name}={value}" for name, value in self.environment().items()]
        return ["env", *said, *command] if said else command

    def enter_process(self) -> None:
        """The allocator's part inside of the process; the first thing it does."""
        if self.allocator in (MALLOPT, HUGE):
            from oxytorch_turns.serve import keep_freed_memory  # noqa: PLC0415  (a package of the workers alone)

            keep_freed_memory()
        elif self.allocator in PRELOADED:
            name = PRELOADED[self.allocator][0]
            if name not in Path("/proc/self/maps").read_text(encoding="utf-8"):
                raise RuntimeError(f"{name} was not preloaded")

    def enter(self, threads: int) -> None:
        """All that torch can change while it runs, before the model is made."""
        torch.set_flush_denormal(self.flush_denormals)
        torch.set_num_threads(self.threads or threads)
        fp32 = "bf16" if self.precision == "oneDNN bf16" else "none"
        for operation in ("matmul", "conv", "rnn"):
            torch._C._set_fp32_precision_setter("mkldnn", operation, fp32)
        torch.backends.cuda.enable_flash_sdp(not self.math_attention)  # On the CPU too.
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(self.math_attention)

    def place(self, model: nn.Module) -> nn.Module:
        """The model on its device, in its memory format."""
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload,no-any-return]

    def place_batch(self, batch: Batch) -> Batch:
        """The batch in the model's memory format."""
        if not self.channels_last:
            return batch
        return batch[0].to(memory_format=torch.channels_last), batch[1]

    def make_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """AdamW in the implementation that is wanted."""
        return torch.optim.AdamW(model.parameters(), lr=lr, capturable=self.graph, **OPTIMIZERS[self.optimizer])

    def compiled(self, model: nn.Module) -> nn.Module:
        """The model, compiled where that is wanted."""
        return torch.compile(model, mode=self.compile) if self.compile else model  # type: ignore[return-value]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """For the forward and the loss."""
        return torch.autocast(self.device, torch.bfloat16) if self.precision == "bf16" else contextlib.nullcontext()


def step(switches: Switches, forward: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, batch: Batch) -> Tensor:
    """One training step as users of stock PyTorch write it; the detached loss."""
    if switches.compile in CUDA_GRAPHS:
        torch.compiler.cudagraph_mark_step_begin()
    optimizer.zero_grad(set_to_none=True)
    with switches.autocast():
        found: Tensor = loss(forward, switches.place_batch(batch))
    found.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return found.detach()


def eager_combinations(workload: str, threads: int, quick: bool = False) -> list[Switches]:
    """The full factorial of what can be switched in a running process, allocators and compiling apart."""
    optimizers = ("for-loop", "fused") if quick else ("for-loop", "foreach", "fused")
    precisions = ("fp32", "bf16") if quick else PRECISIONS
    layouts = (False, True) if workload in IMAGES else (False,)
    attentions = (False, True) if workload in ATTENTION else (False,)
    counts = (threads,) if quick else sorted({1, threads})
    return [
        Switches(optimizer, precision, layout, attention, DEFAULT, count, "", True)
        for optimizer, precision, layout, attention, count in itertools.product(
            optimizers, precisions, layouts, attentions, counts
        )
    ]


def compiled_combinations(workload: str, best: Switches) -> Iterator[Switches]:
    """What is compiled in the default mode: each precision, format and attention, as compiling changes their gain."""
    for each in eager_combinations(workload, best.threads):
        if each.optimizer == "fused" and each.threads == best.threads and each.precision != "oneDNN bf16":
            yield replace(each, optimizer=best.optimizer, allocator=best.allocator, compile="default")
