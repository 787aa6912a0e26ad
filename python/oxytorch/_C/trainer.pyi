"""
Host settings and the training step.
"""

from __future__ import annotations
import collections.abc
import torch
import typing

__all__: list[str] = [
    "EarlyStopping",
    "HostSetting",
    "NonFiniteGuard",
    "StepGraph",
    "allocator_retained_bytes",
    "allocator_trims",
    "flush_denormals",
    "flush_state",
    "heap_mmap_threshold",
    "keep_heap",
    "map_large_blocks",
    "note_heap",
    "page_faults",
    "pin_threads",
    "resolve_vector_math",
    "set_flush_denormals",
    "size_interop_threads",
    "size_threads",
    "tune_allocator",
    "use_deterministic_algorithms",
]

class EarlyStopping:
    """
    The rule of early stopping.
    """
    def __init__(
        self,
        patience: typing.SupportsInt | typing.SupportsIndex,
        min_delta: typing.SupportsFloat | typing.SupportsIndex,
        minimize: bool,
    ) -> None: ...
    def load_state(self, state: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex]) -> None: ...
    def state(self) -> list[float]: ...
    def step(self, metric: typing.SupportsFloat | typing.SupportsIndex) -> bool: ...
    @property
    def bad_evaluations(self) -> int: ...
    @property
    def best(self) -> float: ...
    @property
    def best_evaluation(self) -> int: ...
    @property
    def improved(self) -> bool: ...

class NonFiniteGuard:
    """
    What is done with a step whose gradients hold inf or NaN.
    """
    def __init__(self, policy: str) -> None: ...
    def admits(self, gradients: collections.abc.Sequence[torch.Tensor]) -> bool:
        """
        Whether the step may be taken; RuntimeError under 'raise'.
        """
    @property
    def skipped(self) -> int:
        """
        Steps that were not.
        """

class StepGraph:
    """
    A training step recorded once and replayed.
    """
    def __call__(self, inputs: collections.abc.Sequence[torch.Tensor]) -> list[torch.Tensor]: ...
    def __init__(
        self,
        step: collections.abc.Callable[[collections.abc.Sequence[torch.Tensor]], list[torch.Tensor]],
        state: collections.abc.Callable[[], list[torch.Tensor]],
        settings: collections.abc.Callable[[], str],
        recorder: typing.Any,
        warmup: typing.SupportsInt | typing.SupportsIndex,
        max_recordings: typing.SupportsInt | typing.SupportsIndex,
        verify: bool,
    ) -> None: ...
    @property
    def reason(self) -> str: ...
    @property
    def recordings(self) -> int: ...
    @property
    def replayed(self) -> bool: ...
    @property
    def replays(self) -> int: ...

class HostSetting:
    """
    A setting of the host process: what was done or why not, and the way back.
    """
    def revert(self) -> None:
        """
        Takes the setting back.
        """
    @property
    def cost(self) -> str:
        """
        What it costs; empty where nothing was done.
        """
    @property
    def is_applied(self) -> bool:
        """
        True from a successful apply until revert().
        """
    @property
    def is_in_effect(self) -> bool:
        """
        Applied here, or found so.
        """
    @property
    def name(self) -> str: ...
    @property
    def reason(self) -> str:
        """
        What was done, or why nothing was.
        """

def allocator_retained_bytes() -> int | None:
    """
    Bytes held free for reuse.
    """

def allocator_trims() -> int:
    """
    Times that free memory was given back.
    """

def flush_denormals() -> HostSetting:
    """
    Takes denormals as zero on every intra-op thread.
    """

def flush_state() -> tuple[int, int]:
    """
    (threads that flush denormals, threads).
    """

def heap_mmap_threshold() -> int | None:
    """
    Bytes from which a block has a mapping of its own; None where malloc is not glibc's to ask.
    """

def keep_heap(retain_limit: typing.SupportsInt | typing.SupportsIndex | None = None) -> HostSetting:
    """
    Keeps glibc from trimming its heap between steps.
    """

def map_large_blocks() -> HostSetting:
    """
    Has large blocks go back to the kernel as they are freed; see oxytorch/host.h.
    """

def note_heap() -> None:
    """
    Notes glibc's thresholds as those to go back to.
    """

def page_faults() -> int:
    """
    Page faults of this process since it started.
    """

def pin_threads() -> HostSetting:
    """
    Keeps each intra-op worker on a core of its own.
    """

def resolve_vector_math() -> list[str]:
    """
    Has MKL choose its kernels of torch's vector functions from this thread; returns what it called, as 'sqrt.float32'.
    """

def set_flush_denormals(flush: bool) -> None:
    """
    torch.set_flush_denormal() of every intra-op thread, not of the calling thread alone.
    """

def size_interop_threads(threads: typing.SupportsInt | typing.SupportsIndex) -> HostSetting:
    """
    Sets the threads that run operators beside each other; torch takes their number once in a process.
    """

def size_threads(threads: typing.SupportsInt | typing.SupportsIndex | None = None) -> HostSetting:
    """
    Sets the intra-op threads to the cores this process may use.
    """

def tune_allocator(retain_limit: typing.SupportsInt | typing.SupportsIndex | None = None) -> HostSetting:
    """
    Makes glibc keep freed memory for the next step, up to retain_limit bytes.
    """

def use_deterministic_algorithms() -> HostSetting:
    """
    Turns on torch's deterministic algorithms; the last revert() restores what was before.
    """
