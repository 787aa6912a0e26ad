"""Sizes, statistics, machine facts and the log: what every other part stands on."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from . import _C

__all__ = [
    "Interval",
    "bootstrap_interval",
    "format_duration",
    "format_size",
    "geometric_mean_interval",
    "log",
    "log_level",
    "mean",
    "median",
    "median_absolute_deviation",
    "median_interval",
    "neighbours",
    "paired_ratio_interval",
    "parse_size",
    "quantile",
    "set_log_level",
    "set_log_sink",
    "starts_interval",
    "stddev",
    "student_t_quantile",
    "system_info",
]

_native = _C.base


def parse_size(text: str | int, total: int | None = None) -> int:
    """Bytes of a size as a user writes it.

    Parameters
    ----------
    text : str or int
        ``"10GB"`` (10^9), ``"1.5GiB"`` (2^30), ``"512 MiB"``, ``"4096"``, ``"90%"``, ``"auto"``, or bytes.
    total : int, optional
        Bytes of which ``"90%"`` is a share, and which ``"auto"`` stands for.

    Returns
    -------
    int
        Bytes, rounded down.

    Raises
    ------
    ValueError
        For a negative size, an unknown unit, over 100% or over 2^64 - 1 bytes, and for a share without `total`.
    """
    return _native.parse_size(str(text), total)


def format_size(size: int, exact: bool = False) -> str:
    """Bytes as text: ``"1.50 GiB"``, or where `exact` the shortest text that `parse_size` reads back to the same."""
    return _native.format_size(size, exact)


def format_duration(seconds: float) -> str:
    """Seconds as text: ``"3.42 us"``, ``"12.0 ms"``, ``"2 min 05 s"``, ``"3 h 07 min"``."""
    return _native.format_duration(seconds)


class Interval(NamedTuple):
    """An estimate with the interval that holds the true value in `confidence` of repeated experiments."""

    low: float
    mid: float
    high: float
    confidence: float


def _floats(values: Iterable[float]) -> list[float]:
    # Arrays and tensors copy themselves out in one go.
    copied: list[float] = values.tolist() if hasattr(values, "tolist") else list(values)
    return copied


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean, summed with compensation; `ValueError` for no values or a NaN, as all that follow."""
    return _native.mean(_floats(values))


def stddev(values: Iterable[float]) -> float:
    """Sample standard deviation (``ddof=1``); 0 for one value."""
    return _native.stddev(_floats(values))


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    return _native.median(_floats(values))


def quantile(values: Iterable[float], q: float) -> float:
    """The value below which a share `q` in [0, 1] lies, with numpy's default interpolation."""
    return _native.quantile(_floats(values), q)


def median_absolute_deviation(values: Iterable[float]) -> float:
    """Median absolute deviation from the median, not scaled."""
    return _native.median_absolute_deviation(_floats(values))


def median_interval(
    values: Iterable[float], confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of the median.

    Parameters
    ----------
    values : iterable of float, array or tensor
        Measurements, from independent repetitions.
    confidence : float
        In (0, 1).
    resamples : int
        Bootstrap resamples.
    seed : int
        The same seed gives the same interval.
    """
    return Interval(*_native.median_interval(_floats(values), confidence, resamples, seed))


def paired_ratio_interval(
    numerators: Iterable[float],
    denominators: Iterable[float],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Interval of the median over rounds of ``numerators[i] / denominators[i]``.

    For two contenders measured in the same rounds: whole rounds are resampled, so what both felt (a busy machine)
    cancels. Parameters as in `median_interval`; `ValueError` for unequal lengths or a denominator of 0.
    """
    return Interval(
        *_native.paired_ratio_interval(_floats(numerators), _floats(denominators), confidence, resamples, seed)
    )


def bootstrap_interval(
    values: Iterable[float],
    statistic: Callable[[list[float]], float],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of any statistic, which is called once a resample.

    Other parameters as in `median_interval`; what `statistic` raises passes through.
    """
    return Interval(*_native.bootstrap_interval(_floats(values), statistic, confidence, resamples, seed))


def starts_interval(starts: Iterable[float], confidence: float = 0.95) -> Interval:
    """Interval of a positive figure from independent process starts: Student's t on logarithms.

    Parameters
    ----------
    starts : iterable of float
        One value a start, for example the median of its turns. ``mid`` is their geometric mean. One start says nothing
        of the spread between starts: ``low`` and ``high`` are then NaN.
    confidence : float
        In (0, 1).
    """
    return Interval(*_native.starts_interval(_floats(starts), confidence))


def geometric_mean_interval(subjects: Iterable[Iterable[float]], confidence: float = 0.95) -> Interval:
    """Interval of the geometric mean over subjects, each with its own starts as in `starts_interval`.

    Covers at least `confidence`, whichever subject the spread is in; NaN where a subject has one start.
    """
    return Interval(*_native.geometric_mean_interval([_floats(starts) for starts in subjects], confidence))


def student_t_quantile(p: float, degrees: float) -> float:
    """The value below which Student's t with `degrees` of freedom lies with probability `p`."""
    return _native.student_t_quantile(p, degrees)


def system_info() -> dict[str, Any]:
    """What this process runs on.

    Returns
    -------
    dict
        ``processor`` (str); ``isa`` (str, that native kernels use) and ``isas`` (those this processor can run);
        ``cores`` with ``logical``, ``physical``, ``affinity``, ``quota`` (processors' worth of time a cgroup allows),
        ``usable`` (threads to use: affinity capped by quota), ``usable_physical`` (the same, each core once),
        ``one_a_core`` (list of int: the first allowed thread of each core) and ``last_level_caches`` (int, of those);
        ``memory`` in bytes with ``physical``, ``cgroup_limit``, ``limit``, ``available``, ``resident`` and
        ``peak_resident``; ``features`` (bool by instruction set, and ``native_bf16`` and ``native_fp16``). Unknown
        values are None.
    """
    return {
        "processor": _native.processor_name(),
        "isa": _native.active_isa(),
        "isas": _native.supported_isas(),
        "cores": _native.cores(),
        "memory": _native.memory(),
        "features": _native.cpu_features(),
    }


def neighbours() -> dict[str, Any]:
    """Look for a quarter of a second at which other programs run on the cores that this process may use.

    Two training programs on the same cores slow each other many times over where their waiting threads spin.

    Returns
    -------
    dict
        ``cores`` that they use, ``of`` how many; ``share_cores`` (bool, from half a core on); ``processes`` (list, the
        busiest first, each with ``pid``, ``name``, ``cores`` and ``threads``); ``said``, all of that in words.
    """
    return _native.neighbours()


# -- the log -----------------------------------------------------------------------------------------------------------

_LOGGER = logging.getLogger("oxytorch")
_NUMBERS = {"trace": 5, "debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
_OFF = logging.CRITICAL + 10
_SINK: list[Callable[[str, str], None]] = []  # one or none


def _receive(level: str, module: str, text: str, created: float) -> None:
    """Hand one message of the library to the sink, to Python's logging, or to stderr where that has no handler."""
    logger = _LOGGER.getChild(module) if module else _LOGGER
    number = _NUMBERS[level]
    if not logger.isEnabledFor(number):
        return
    if _SINK:
        _SINK[0](level, text)
    elif logger.hasHandlers():
        record = logger.makeRecord(logger.name, number, "(oxytorch)", 0, text, (), None)
        record.created, record.msecs = created, int(created % 1 * 1000) + 0.0
        logger.handle(record)
    else:
        _native.log_to_stderr(level, text)


def log_level() -> str:
    """Return the level of Python's logger ``oxytorch``; ``"warn"`` unless something has set another one."""
    number = _LOGGER.getEffectiveLevel()
    return next((level for level, least in _NUMBERS.items() if number <= least), "off")


def set_log_level(level: str) -> None:
    """Drop messages below `level`: ``trace``, ``debug``, ``info``, ``warn``, ``error`` or ``off``.

    It is the level of Python's logger ``oxytorch``; trace is 5 there.
    """
    _native.check_log_level(level)
    _LOGGER.setLevel(_NUMBERS.get(level, _OFF))


def log(level: str, message: str, module: str = "") -> None:
    """Write one message to Oxytorch's log, if its level is active; it is of the logger ``oxytorch.<module>``."""
    _native.log(level, message, module)


def set_log_sink(sink: Callable[[str, str], None] | None) -> None:
    """Send messages to ``sink(level, message)`` in place of Python's logging; None is logging again.

    What `sink` raises is written to stderr and goes no further.
    """
    _native.deliver_log()
    _SINK[:] = [] if sink is None else [sink]


def _begin_log() -> None:
    given = os.environ.get("OXYTORCH_LOG", "")
    _native.log_level()  # a level in the environment that does not exist is said now
    if given in (*_NUMBERS, "off"):
        set_log_level(given)
    _native.set_log_level("trace")  # the loggers decide
    _native.send_log_to(_receive)
    atexit.register(_end_log)


def _end_log() -> None:
    """A message logged while Python ends must not look for it."""
    _native.set_log_level(log_level())
    _native.end_log()


_begin_log()
