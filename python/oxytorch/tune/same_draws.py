"""Two passes that draw the same random numbers, while other threads may draw from the default generators."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .._C import tune as _native
from ..generators import rng_state, set_generator_states, set_rng_state

__all__ = ["SameDraws"]


class SameDraws:
    """Context of a check that runs a model twice: both passes see the same random numbers.

    A generator that another thread may draw from is never set back, since that thread would then meet numbers that it,
    or the run, has had already. Torch's numbers on the CPU come from a generator of this thread's own. Python's and
    numpy's generators, and torch's own one where `own` is False, are set back only where no other thread is alive; else
    a pass that moved them makes the two incomparable, which `disturbed` says.

    Parameters
    ----------
    params : sequence of Tensor
        Their devices' generators are set back: only the training draws from these.
    own : bool
        False where a function of torch.compile runs inside, which a generator of this thread's own would have compiled
        anew.

    Attributes
    ----------
    disturbed : str
        Why the two passes cannot be compared; empty where they can.
    """

    def __init__(self, params: Sequence[Tensor], *, own: bool) -> None:
        self.disturbed = ""
        self._params = list(params)
        self._wants_own = own
        self._own: Any = None

    def __enter__(self) -> SameDraws:
        self._alone = threading.active_count() == 1
        self._devices, self._host = self._states()
        if self._wants_own:
            self._own = _native.OwnRandom()
        return self

    def again(self) -> None:
        """Let the second pass draw what the first one drew."""
        self._set_back()
        if self._own is not None:
            self._own.rewind()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own is not None:
            self._own.close()
        self._set_back()

    def _states(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """States of the devices' generators, and of those that any thread may draw from."""
        state = rng_state(self._params)
        devices: dict[str, Tensor] = state["torch"]
        state["torch"] = {"cpu": devices.pop("cpu")}
        return devices, state

    def _set_back(self) -> None:
        set_generator_states(self._devices)
        if self._alone:
            set_rng_state(self._host)
            return
        _, now = self._states()
        moved = [name for name in now if name != "torch" and not _same(now[name], self._host[name])]
        if self._own is None and not torch.equal(now["torch"]["cpu"], self._host["torch"]["cpu"]):
            moved.append("torch")
        if moved:
            self.disturbed = f"{' and '.join(moved)} random numbers were drawn, and other threads may have drawn them"


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    return bool((left == right).all()) if hasattr(left, "all") else bool(left == right)
