"""Whether a batch will fit, told from steps with small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._C import memory as _native
from ..model.snapshot import snapshot_of_step
from .meter import Meter

__all__ = ["BatchForecast", "will_it_fit"]


BatchForecast = _native.BatchForecast


def will_it_fit(
    step: Callable[[Any], Any],
    make_batch: Callable[[int], Any],
    size: int,
    limit: int | str | None = None,
    *,
    headroom: float = 0.1,
    state: Sequence[Any] | None = None,
    device: torch.device | str = "cpu",
) -> BatchForecast:
    """Tell whether a training step with a batch of `size` samples will fit, by running small ones.

    Steps with a 16th and an 8th of the samples are recorded, of at most 32 and 64. Each tensor that a step makes grows
    with the batch by a straight line, so the recorded step is replayed at `size`: what was live after each tensor was
    made or freed is continued by its line, and the highest counts. A line through the two peaks would be too low
    wherever another part of the step is the highest at the larger size. What the steps changed is put back. A size
    of at most 4 may be run itself.

    Parameters
    ----------
    step : callable
        Takes a batch and does a whole training step with it: forward, backward, optimizer.
    make_batch : callable
        Takes a number of samples and returns such a batch.
    size : int
        Samples, at least 1.
    limit : int or str, optional
        The most that the whole process may take (``"8GB"``, ``"50%"``), or its tensors on another device than the CPU.
        Default: what `available_bytes` says. With a limit the lower of the two counts.
    headroom : float
        Share of what is available that is to stay free, for what tensors do not show: scratch of libraries and
        fragmentation.
    state : sequence, optional
        What the steps change. Default: all that `step` reaches.
    device : torch.device or str
        Whose memory is told: where the step runs.

    Returns
    -------
    BatchForecast
        True where it fits; printed, a sentence. `largest_batch` finds the largest by running it.

    Raises
    ------
    ValueError
        For a size under 1, a headroom outside [0, 1), and a limit that is no size.
    torch.OutOfMemoryError
        Where not even a small batch fits in a limit that is set (`set_limit`).
    NotImplementedError
        Where the device's tensors cannot be recorded (see `Meter`), and where nobody says what is available.

    Examples
    --------
    >>> if not (told := will_it_fit(train, lambda n: torch.randn(n, 3, 64, 64), 512)):
    ...     print(told)
    """
    on = torch.device(device)
    allowed = None if limit is None else _native.budget_bytes(str(limit), on)
    replay = _native.BatchReplay(size, _native.available_bytes(on, allowed), headroom)

    def recorded(samples: int) -> Any:
        with Meter(device=on, timeline=True) as meter:
            step(make_batch(samples))
        return meter.timeline()

    snapshot = snapshot_of_step(step, state)
    gradients = [p.grad for p in snapshot.params]
    try:
        with Meter(device=on) as whole:
            step(make_batch(replay.sizes[0]))  # makes gradients and the optimizer's state
            pairs = zip(snapshot.params, gradients, strict=True)
            # Those that the step replaced are alive for the snapshot alone.
            idle = sum(g.nbytes for p, g in pairs if g is not None and g is not p.grad)
            return replay.forecast(whole.live_bytes - idle, *(recorded(samples) for samples in replay.sizes))
    finally:
        snapshot.restore()
