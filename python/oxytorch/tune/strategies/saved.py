"""Strategies that keep what backward needs in less memory, for the goal memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar

from ...memory.pack import Format, PackSavedTensors
from ..observe import on_device
from ..strategy import Strategy, strategy

if TYPE_CHECKING:
    from ..run import Run

__all__: list[str] = []


class _Saved(Strategy):
    """Packs what forward saves."""

    format: ClassVar[Format]

    def applies(self, run: Run) -> bool | str:
        return on_device(run, "cpu")

    def apply(self, run: Run) -> None:
        packed = PackSavedTensors(self.format)
        # What hooks of the user's own are for is theirs.
        run.call.scope(self, lambda: nullcontext() if packed.others_keep() else packed)

    def revert(self, run: Run) -> None:
        run.call.scope(self, None)


@strategy(
    "saved_bf16",
    kind="precision",
    group="saved",
    interacts=("bf16_autocast",),
    settle=2,
    max_speedup=1.0,
    cost="activations that backward reads are rounded to bfloat16.",
)
class SavedBFloat16(_Saved):
    """What backward needs of float32 is kept as bfloat16. With the goal memory alone."""

    format = "bf16"


@strategy(
    "saved_in_file",
    kind="tolerance",  # every bit of a step is kept, but the model's way of being called shows
    group="saved",
    settle=2,
    max_speedup=1.0,
    cost="each step writes and reads a file as large as its activations, in TMPDIR or /var/tmp.",
)
class SavedInFile(_Saved):
    """What backward needs is kept in a file. With the goal memory alone."""

    format = "file"
