"""
The meter, checkpoints, and the pool of host memory.
"""

from __future__ import annotations
import collections.abc
import oxytorch._C.monitor
import oxytorch._C.trainer
import torch
import typing

__all__: list[str] = [
    "BatchForecast",
    "BatchPlan",
    "BatchReplay",
    "BatchSearch",
    "BatchTrial",
    "BlockChoice",
    "BlockEvent",
    "BudgetSearch",
    "CountingPaused",
    "HostPoolStats",
    "LimitPaused",
    "MemoryManager",
    "MemoryUse",
    "Meter",
    "OpenPhase",
    "OpenRegion",
    "PackSavedTensors",
    "PackedReport",
    "PeakPart",
    "PhaseUse",
    "StepTape",
    "Timeline",
    "available_bytes",
    "block_actions",
    "budget_bytes",
    "can_count",
    "cap_host_memory",
    "checkpoint",
    "give_back_host_memory",
    "host_pool_huge_page_bytes",
    "host_pool_stats",
    "is_parked",
    "leaks",
    "limit",
    "most_resident",
    "move_to_file",
    "move_to_memory",
    "packed_bytes",
    "park",
    "parked_bytes",
    "parked_parts",
    "parking_folders",
    "pooled_bytes",
    "populate",
    "read_ahead",
    "records_gradients",
    "reset_host_peak",
    "resident_bytes",
    "rest",
    "rest_all",
    "says_out_of_memory",
    "selective_checkpoint",
    "set_limit",
    "timeline_refusal",
    "use_host_pool",
]

class BatchTrial:
    """
    One batch size, as it ran.
    """
    def __init__(
        self,
        size: typing.SupportsInt | typing.SupportsIndex,
        fits: bool,
        peak_bytes: typing.SupportsInt | typing.SupportsIndex | None,
        step_seconds: typing.SupportsFloat | typing.SupportsIndex | None,
        reason: str,
    ) -> None: ...
    @property
    def fits(self) -> bool:
        """
        Whether its steps ran within the limit, headroom left.
        """
    @property
    def peak_bytes(self) -> int | None:
        """
        Most memory in use during the steps; None where they ran out of it.
        """
    @property
    def reason(self) -> str:
        """
        Why it does not fit; empty where it does.
        """
    @property
    def samples_per_second(self) -> float:
        """
        0 where it did not run.
        """
    @property
    def size(self) -> int:
        """
        Samples in the batch.
        """
    @property
    def step_seconds(self) -> float | None:
        """
        Median of the steps after the first; None where they ran out of memory.
        """

class BatchPlan:
    """
    What batch sizes take and give. Every size in it has been run.
    """
    def __init__(
        self,
        largest: typing.SupportsInt | typing.SupportsIndex,
        fastest: typing.SupportsInt | typing.SupportsIndex,
        trials: collections.abc.Sequence[BatchTrial],
        limit_bytes: typing.SupportsInt | typing.SupportsIndex,
        headroom: typing.SupportsFloat | typing.SupportsIndex,
        samples: typing.SupportsInt | typing.SupportsIndex | None = None,
        current: typing.SupportsInt | typing.SupportsIndex | None = None,
    ) -> None: ...
    def split(self, batch: typing.SupportsInt | typing.SupportsIndex) -> tuple[int, int]:
        """
        Return (samples a piece, pieces) that make up exactly `batch` with the fewest pieces that fit.

        Accumulating gradients over the pieces keeps the batch, and so the updates, as they are. ValueError for a batch under 1.
        """
    def table(self) -> str:
        """
        Return the sizes as a table, and what another batch size does to convergence.
        """
    @property
    def current(self) -> int | None:
        """
        The batch size of today, where given.
        """
    @property
    def fastest(self) -> int:
        """
        The smallest size within 2 % of the most samples a second.
        """
    @property
    def headroom(self) -> float:
        """
        Share of the limit that is left free.
        """
    @property
    def largest(self) -> int:
        """
        The largest size that ran within the limit with headroom left.
        """
    @property
    def limit_bytes(self) -> int: ...
    @property
    def samples(self) -> int | None:
        """
        In an epoch, where given.
        """
    @property
    def trials(self) -> list[BatchTrial]:
        """
        By size.
        """

class BatchSearch:
    """
    Which batch sizes to run; see oxytorch/memory/batch_search.h.
    """
    def __init__(
        self,
        limit: typing.SupportsInt | typing.SupportsIndex,
        base: typing.SupportsInt | typing.SupportsIndex,
        *,
        start: typing.SupportsInt | typing.SupportsIndex = 1,
        most: typing.SupportsInt | typing.SupportsIndex = 1048576,
        multiple: typing.SupportsInt | typing.SupportsIndex = 1,
        headroom: typing.SupportsFloat | typing.SupportsIndex = 0.1,
        resolution: typing.SupportsFloat | typing.SupportsIndex = 0.02,
        curve: bool = False,
    ) -> None: ...
    def next(self) -> int | None:
        """
        The size to run next; None where the search is over.
        """
    def plan(
        self,
        samples: typing.SupportsInt | typing.SupportsIndex | None,
        current: typing.SupportsInt | typing.SupportsIndex | None,
    ) -> BatchPlan: ...
    def ran(
        self,
        peak_bytes: typing.SupportsInt | typing.SupportsIndex,
        step_seconds: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    ) -> None: ...
    def ran_out(self, why: str) -> None: ...

class PackedReport:
    """
    What was packed since the object was made, each memory once.
    """
    def text(self) -> str:
        """
        Return it in a sentence.
        """
    @property
    def bytes(self) -> int:
        """
        As torch keeps them.
        """
    @property
    def file_bytes(self) -> int: ...
    @property
    def packed_bytes(self) -> int:
        """
        In memory.
        """
    @property
    def relative_error(self) -> float:
        """
        Root of the sum of squared errors over that of squared values, of all that was rounded.
        """
    @property
    def tensors(self) -> int: ...

class PackSavedTensors:
    """
    Packs what operators save while it is entered.
    """
    @staticmethod
    def others_keep() -> bool:
        """
        Whether hooks or a checkpoint keep what is saved on this thread.
        """
    def __enter__(self) -> typing.Any: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self, format: str, folder: str, least: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def report(self) -> PackedReport: ...

class HostPoolStats:
    """
    Bytes and counts of the pool of host memory.
    """
    @property
    def hits(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...
    @property
    def live_bytes(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def retained_bytes(self) -> int: ...
    @property
    def returned_bytes(self) -> int: ...

class PhaseUse:
    """
    A part of a step, as a meter saw it. Bytes are those of tensors.
    """
    def __repr__(self) -> str: ...
    @property
    def begin_bytes(self) -> int:
        """
        Live when it began.
        """
    @property
    def end_bytes(self) -> int:
        """
        Live when it ended.
        """
    @property
    def name(self) -> str: ...
    @property
    def peak_bytes(self) -> int:
        """
        The most that was live in it.
        """
    @property
    def seconds(self) -> float: ...

class PeakPart:
    """
    Tensors of one origin that were live at one moment.
    """
    def __repr__(self) -> str: ...
    @property
    def blocks(self) -> int:
        """
        How many tensors' memory that is.
        """
    @property
    def bytes(self) -> int: ...
    @property
    def phase(self) -> str:
        """
        Empty where there was none, as the two below.
        """
    @property
    def region(self) -> str:
        """
        Of the model: the name of a module, or of a Region.
        """
    @property
    def site(self) -> str:
        """
        "file:line function", the innermost call first, one a line.
        """

class BlockEvent:
    """
    Memory that a tensor took or gave back.
    """
    @property
    def address(self) -> int:
        """
        Until it is given back, that of no other.
        """
    @property
    def bytes(self) -> int:
        """
        Below zero where it was given back.
        """
    @property
    def in_backward(self) -> bool:
        """
        Taken by a node of the graph.
        """
    @property
    def live_bytes(self) -> int:
        """
        After it.
        """
    @property
    def phase(self) -> int:
        """
        Index into Timeline.names; -1 for none, as the two below.
        """
    @property
    def region(self) -> int:
        """
        Index into Timeline.names.
        """
    @property
    def site(self) -> int:
        """
        Index into Timeline.sites.
        """
    @property
    def time_ns(self) -> int:
        """
        Since the meter began.
        """

class Timeline:
    """
    What a meter recorded.
    """
    @property
    def events(self) -> list[BlockEvent]:
        """
        In order.
        """
    @property
    def names(self) -> list[str]:
        """
        Of phases and regions.
        """
    @property
    def sites(self) -> list[str]:
        """
        "file:line function", the innermost call first, one a line.
        """

class BatchForecast:
    """
    What a training step with a batch will take. Converts to bool: whether that fits.
    """
    def __bool__(self) -> bool: ...
    def __str__(self) -> str: ...
    @property
    def available(self) -> int:
        """
        Bytes that tensors may still take.
        """
    @property
    def bytes(self) -> int:
        """
        The most that tensors of the step will take beyond those that are alive now.
        """
    @property
    def fits(self) -> bool:
        """
        Whether the step leaves the headroom free.
        """
    @property
    def headroom(self) -> float:
        """
        Share of `available` that is to stay free.
        """
    @property
    def is_regular(self) -> bool:
        """
        Whether steps of both sizes took and gave back memory in the same order: only then is `bytes` a replay of the step.
        """
    @property
    def measured(self) -> tuple[int, int]:
        """
        The sizes of batch that were run.
        """
    @property
    def size(self) -> int:
        """
        Samples of the batch that was asked about.
        """

class BatchReplay:
    """
    A recorded step at another size; see oxytorch/memory/batch_forecast.h.
    """
    def __init__(
        self,
        size: typing.SupportsInt | typing.SupportsIndex,
        available: typing.SupportsInt | typing.SupportsIndex,
        headroom: typing.SupportsFloat | typing.SupportsIndex,
    ) -> None: ...
    def forecast(
        self, kept: typing.SupportsInt | typing.SupportsIndex, smaller: Timeline, larger: Timeline
    ) -> BatchForecast: ...
    @property
    def sizes(self) -> tuple[int, int]:
        """
        The sizes of batch to record a step with.
        """

class StepTape:
    """
    A step as it was recorded; see oxytorch/memory/step_tape.h.
    """
    @staticmethod
    def of(timeline: Timeline, blocks: collections.abc.Sequence[str]) -> StepTape: ...
    @staticmethod
    def steady(recordings: collections.abc.Sequence[StepTape]) -> StepTape: ...
    def add(self, action: str, recording: StepTape) -> None:
        """
        Take over what calls take under an action, from a recording with every block under it.
        """
    def lowest(self) -> tuple[list[int], int, float, bool]:
        """
        The same for the lowest peak.
        """
    def plan(self, budget: typing.SupportsInt | typing.SupportsIndex) -> tuple[list[int], int, float, bool]:
        """
        (The action for each block, peak, seconds added, whether no choice is faster). See plan_blocks() in oxytorch/memory/block_plan.h.
        """
    def seconds(self) -> list[typing.Annotated[list[float], "FixedSize(7)"]]:
        """
        That each block adds, by action; infinite where that is not known, or saves nothing.
        """
    def spans(
        self,
    ) -> list[
        tuple[
            int,
            list[tuple[int, typing.Annotated[list[int], "FixedSize(7)"]]],
            tuple[int, typing.Annotated[list[bool], "FixedSize(7)"]] | None,
        ]
    ]:
        """
        Of each part of the step: the most that is live, (block, bytes that lowers by action), and (block, by action whether it counts) or None.
        """
    @property
    def names(self) -> list[str]:
        """
        Of blocks.
        """

class BlockChoice:
    """
    Names of blocks by what is done with them.
    """
    def __init__(self, action: str, names: collections.abc.Sequence[str]) -> None:
        """
        One action for all of them.
        """
    def names(self, action: str) -> list[str]: ...

class BudgetSearch:
    """
    Finds what to do with blocks; see oxytorch/memory/budget_search.h.
    """
    @staticmethod
    def least(
        tape: StepTape,
        base: typing.SupportsInt | typing.SupportsIndex,
        plain_peak: typing.SupportsInt | typing.SupportsIndex,
        plain_seconds: typing.SupportsFloat | typing.SupportsIndex,
        max_slowdown: typing.SupportsFloat | typing.SupportsIndex,
    ) -> BudgetSearch:
        """
        By time in place of a budget.
        """
    @staticmethod
    def unrecorded(
        names: collections.abc.Sequence[str], budget: typing.SupportsInt | typing.SupportsIndex
    ) -> BudgetSearch:
        """
        Where no step with everything kept fits.
        """
    def __init__(
        self,
        tape: StepTape,
        base: typing.SupportsInt | typing.SupportsIndex,
        plain_peak: typing.SupportsInt | typing.SupportsIndex,
        budget: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def compared(self, same: bool | None) -> None: ...
    def cost(self) -> str: ...
    def curve(self, points: typing.SupportsInt | typing.SupportsIndex) -> list[tuple[int, float]]: ...
    def measured(self, peak: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def next(self) -> BlockChoice | None:
        """
        What is to be done with blocks next; None: it is over.
        """
    def ran_out(self, error: str) -> None: ...
    def report(self) -> oxytorch._C.monitor.Report:
        """
        The same as a document, with the curve as a plot.
        """
    def rounded(self, relative_error: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def summary(self) -> str: ...
    def table(self) -> str: ...
    def timed(
        self,
        plain_seconds: typing.SupportsFloat | typing.SupportsIndex,
        seconds: typing.SupportsFloat | typing.SupportsIndex,
    ) -> None: ...
    def without(self, action: str, error: str) -> None: ...
    @property
    def budget(self) -> int: ...
    @property
    def choice(self) -> BlockChoice: ...
    @property
    def floor(self) -> int: ...
    @property
    def is_bound_by_time(self) -> bool: ...
    @property
    def is_optimal(self) -> bool: ...
    @property
    def is_unrecorded(self) -> bool: ...
    @property
    def measured_peak(self) -> int: ...
    @property
    def plain_peak(self) -> int: ...
    @property
    def plain_seconds(self) -> float: ...
    @property
    def predicted_peak(self) -> int: ...
    @property
    def same_bits(self) -> bool | None: ...
    @property
    def seconds(self) -> float: ...

class OpenRegion:
    """
    A region of a model that runs on this thread, until end().
    """
    def __init__(self, name: str, inputs: collections.abc.Sequence[torch.Tensor] = []) -> None: ...
    def end(self, outputs: collections.abc.Sequence[torch.Tensor] = []) -> None: ...

class Meter:
    """
    Counts what tensors take; see oxytorch/memory/meter.h.
    """
    def __init__(self, *, device: torch.device, timeline: bool = False, sites: bool = False) -> None: ...
    def allocations(self) -> int: ...
    def live_bytes(self) -> int: ...
    def live_parts(self) -> list[PeakPart]: ...
    def peak_bytes(self) -> int: ...
    def peak_parts(self) -> list[PeakPart]: ...
    def phases(self) -> list[PhaseUse]: ...
    def reset_peak(self) -> None: ...
    def stop(self) -> None: ...
    def table(self, most_parts: typing.SupportsInt | typing.SupportsIndex = 12) -> str: ...
    def timeline(self) -> Timeline: ...

class OpenPhase:
    """
    A phase of a step, until end().
    """
    def __init__(self, meter: Meter, name: str) -> None: ...
    def end(self) -> None: ...

class LimitPaused:
    """
    No limit holds back a tensor inside of `with`.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self) -> None: ...

class CountingPaused:
    """
    No tensor is counted for a lone meter inside of `with`.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, kind: typing.Any, error: typing.Any, trace: typing.Any) -> None: ...
    def __init__(self) -> None: ...

class MemoryUse:
    """
    Bytes of this process, as the kernel tells them.
    """
    def __repr__(self) -> str: ...
    def __str__(self) -> str: ...
    @property
    def allowed(self) -> int:
        """
        The lowest limit that is set, or what the process can reach: resident and available.
        """
    @property
    def available(self) -> int:
        """
        Of the machine or container, still.
        """
    @property
    def kept(self) -> int:
        """
        Free, and kept by allocators for reuse.
        """
    @property
    def peak(self) -> int:
        """
        The most that was resident.
        """
    @property
    def resident(self) -> int:
        """
        Now.
        """
    @property
    def share(self) -> float:
        """
        resident over allowed.
        """
    @property
    def tensors(self) -> int:
        """
        In CPU tensors that were made while they were counted: under a limit or a Meter.
        """

class MemoryManager:
    """
    Memory of a run; see oxytorch/memory/manager.h.
    """
    def __init__(
        self,
        *,
        limit: str = "",
        warn_at: typing.SupportsFloat | typing.SupportsIndex = 0.8,
        critical_at: typing.SupportsFloat | typing.SupportsIndex = 0.95,
        clean_at: typing.SupportsFloat | typing.SupportsIndex = 0.9,
        clean_every: typing.SupportsInt | typing.SupportsIndex = 0,
        cache_limit: str = "",
        check_every: typing.SupportsInt | typing.SupportsIndex = 10,
    ) -> None: ...
    def check(self) -> str: ...
    def clean(self) -> int: ...
    def on(self, level: str, callback: collections.abc.Callable[[MemoryUse], None]) -> None: ...
    def on_clean(self, release: collections.abc.Callable[[], None]) -> None: ...
    def report(self) -> str: ...
    def revert(self) -> None: ...
    def step(self) -> None: ...
    def use(self) -> MemoryUse: ...
    @property
    def bytes_cleaned(self) -> int: ...
    @property
    def clean_ups(self) -> int: ...
    @property
    def events(self) -> list[str]: ...
    @property
    def level(self) -> str: ...
    @property
    def steps(self) -> int: ...

def available_bytes(device: torch.device, limit: typing.SupportsInt | typing.SupportsIndex | None = None) -> int:
    """
    Bytes that tensors of a device may still take.
    """

def block_actions() -> list[str]:
    """
    What may be done with a block, in the order of StepTape.seconds().
    """

def budget_bytes(text: str, device: torch.device) -> int:
    """
    Bytes of a budget as a user writes it.
    """

def can_count(device: torch.device) -> bool:
    """
    Whether bytes of a device's tensors can be counted.
    """

def cap_host_memory(limit: typing.SupportsInt | typing.SupportsIndex) -> oxytorch._C.trainer.HostSetting:
    """
    Has allocations fail that would take this process beyond so many resident bytes, until reverted.
    """

def checkpoint(
    first: collections.abc.Callable, inputs: collections.abc.Sequence[torch.Tensor], again: collections.abc.Callable
) -> typing.Any:
    """
    Return first(), of which backward runs again(inputs) for what it needs.
    """

def give_back_host_memory() -> None:
    """
    Gives free memory of the pool and of glibc's heap back to the kernel, whatever their settings.
    """

def host_pool_huge_page_bytes() -> int:
    """
    Bytes on huge pages now.
    """

def host_pool_stats() -> HostPoolStats:
    """
    Of the process's pool; zeros where it was never in use.
    """

def is_parked(tensor: torch.Tensor) -> bool:
    """
    Whether a tensor's memory is such a file.
    """

def leaks(
    step: collections.abc.Callable, steps: typing.SupportsInt | typing.SupportsIndex, device: torch.device
) -> list[PeakPart]:
    """
    What each step leaves behind.
    """

def limit() -> int | None:
    """
    The limit that is set, if any.
    """

def most_resident(take: collections.abc.Callable[[], None]) -> int | None:
    """
    The most bytes of this process that are in memory while `take` runs; None where the kernel does not tell.
    """

def move_to_file(tensor: torch.Tensor) -> bool:
    """
    Move a tensor's own memory to a file; False where it stays.
    """

def move_to_memory(tensor: torch.Tensor) -> bool:
    """
    Move a parked tensor's own memory back; False where it stays.
    """

def park(tensor: torch.Tensor, folders: collections.abc.Sequence[str]) -> torch.Tensor:
    """
    Return a copy in a file without a name; see oxytorch/memory/parked.h.
    """

def parked_parts(bytes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> list[int]:
    """
    How many of some tensors each part takes where a part at a time is in memory.
    """

def parking_folders() -> list[str]:
    """
    Where files of parked tensors are made, the first that can be.
    """

def populate(tensor: torch.Tensor) -> None:
    """
    Map the pages of a parked tensor at once, to be written.
    """

def read_ahead(tensor: torch.Tensor) -> None:
    """
    Have the pages of a parked tensor read from the disk meanwhile.
    """

def records_gradients() -> bool:
    """
    Whether anything is recorded for backward on this thread.
    """

def reset_host_peak() -> None:
    """
    Begins the peak of resident memory anew.
    """

def resident_bytes() -> int:
    """
    Bytes of this process that are in memory now.
    """

def rest(tensor: torch.Tensor) -> None:
    """
    Let go of the pages of a parked tensor.
    """

def rest_all() -> None:
    """
    Let go of the pages of all parked tensors.
    """

def says_out_of_memory(message: str) -> bool:
    """
    Whether an error says that there was no memory.
    """

def selective_checkpoint(function: collections.abc.Callable) -> typing.Any:
    """
    Return function(), of which backward runs cheap operators again.
    """

def set_limit(bytes: typing.SupportsInt | typing.SupportsIndex) -> oxytorch._C.trainer.HostSetting:
    """
    A limit on the memory of this process.
    """

def timeline_refusal(device: torch.device) -> str:
    """
    Why no timeline can be recorded; empty: it can.
    """

def use_host_pool(
    retain_limit: typing.SupportsInt | typing.SupportsIndex | None = None,
) -> oxytorch._C.trainer.HostSetting:
    """
    Puts the pool under torch's CPU tensors.
    """

packed_bytes: int
parked_bytes: int
pooled_bytes: int
