"""Whether a batch will fit, told from steps with small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base import format_size, parse_size, system_info
from ..model.snapshot import snapshot_of_step
from .meter import Meter, available_bytes, resident_bytes

__all__ = ["BatchForecast", "will_it_fit"]

_SMALLER, _MOST = 16, 32  # a batch that is run has a 16th of the samples, and so many at the most


@dataclass(frozen=True)
class BatchForecast:
    """What a training step with a batch will take. Converts to bool: whether that fits."""

    size: int
    """Samples of the batch that was asked about."""
    bytes: int
    """The most that tensors of the step will take beyond those that are alive now."""
    available: int
    """Bytes that tensors may still take: what `available_bytes` says, and what is left under a limit that was given."""
    headroom: float
    """Share of `available` that is to stay free."""
    measured: tuple[int, int]
    """The sizes of batch that were run."""
    is_regular: bool
    """Whether steps of both sizes took and gave back as many tensors: only then is `bytes` a replay of the step."""

    @property
    def fits(self) -> bool:
        """Whether the step leaves the headroom free."""
        return self.bytes <= (1 - self.headroom) * self.available

    def __bool__(self) -> bool:
        """See `fits`."""
        return self.fits

    def __str__(self) -> str:
        """Return the answer in a sentence."""
        text = (
            f"A step with {self.size} samples will take {format_size(self.bytes)} of the "
            f"{format_size(self.available)} that this process may still take, {self.headroom:.0%} of which stay free: "
            f"it {'fits' if self.fits else 'does not fit'}."
        )
        if not self.is_regular:
            text += (
                f" Steps with {self.measured[0]} and {self.measured[1]} samples do not take the same tensors, so that "
                "this is the line through their peaks, and may be low."
            )
        return text


def will_it_fit(
    step: Callable[[Any], Any],
    make_batch: Callable[[int], Any],
    size: int,
    limit: int | str | None = None,
    *,
    headroom: float = 0.1,
    state: Sequence[Any] | None = None,
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
        Takes a batch and does a whole training step with it: forward, backward, optimizer. On the CPU.
    make_batch : callable
        Takes a number of samples and returns such a batch.
    size : int
        Samples, at least 1.
    limit : int or str, optional
        The most that the whole process may take (``"8GB"``, ``"50%"``). Default: what `available_bytes`
        says. With a limit the lower of the two counts.
    headroom : float
        Share of what is available that is to stay free, for what tensors do not show: scratch of libraries and
        fragmentation.
    state : sequence, optional
        What the steps change. Default: all that `step` reaches.

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
        Where CPU tensors cannot be counted (see `Meter`), and where the kernel does not say what is available.

    Examples
    --------
    >>> if not (told := will_it_fit(train, lambda n: torch.randn(n, 3, 64, 64), 512)):
    ...     print(told)
    """
    if size < 1:
        raise ValueError(f"size is {size}, expected at least 1 sample.")
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom is {headroom}, expected at least 0 and under 1.")
    available = available_bytes()
    if limit is not None:
        allowed = parse_size(limit, system_info()["memory"]["limit"])
        available = max(0, min(available, allowed - resident_bytes()))
    # Operators treat a single sample apart: it is taken where there is no other choice.
    less = min(max(2 if size >= 4 else 1, size // _SMALLER), _MOST)
    more = min(2 * less, size)
    snapshot = snapshot_of_step(step, state)
    try:
        with Meter() as whole:
            step(make_batch(less))  # makes gradients and the optimizer's state
            kept = whole.live_bytes
            small, large = (_live(step, make_batch, samples) for samples in (less, more))
    finally:
        snapshot.restore()
    is_regular = len(small) == len(large)
    if not is_regular:
        small, large = [max(small)], [max(large)]
    peak = max(a + (b - a) * (size - less) // max(more - less, 1) for a, b in zip(small, large, strict=True))
    return BatchForecast(size, kept + peak, available, headroom, (less, more), is_regular)


def _live(step: Callable[[Any], Any], make_batch: Callable[[int], Any], samples: int) -> list[int]:
    """Return the bytes of tensors after each that the batch and the step made or freed."""
    with Meter(timeline=True) as meter:
        step(make_batch(samples))
    return [0, *(event.live_bytes for event in meter.timeline().events)]
