"""
Configuration, units, machine facts, statistics.
"""

from __future__ import annotations
import collections.abc
import typing

__all__: list[str] = [
    "PerformanceConfig",
    "active_isa",
    "bootstrap_interval",
    "check_log_level",
    "check_own_tail",
    "check_settings",
    "checkpointing_of",
    "cores",
    "cpu_features",
    "deliver_log",
    "end_log",
    "format_duration",
    "format_size",
    "geometric_mean_interval",
    "is_given",
    "log",
    "log_elsewhere",
    "log_level",
    "log_to_stderr",
    "mean",
    "median",
    "median_absolute_deviation",
    "median_interval",
    "memory",
    "neighbours",
    "paired_ratio_interval",
    "parse_size",
    "processor_name",
    "quantile",
    "send_log_to",
    "set_log_level",
    "set_neighbours",
    "setting_refusal",
    "starts_interval",
    "stddev",
    "student_t_quantile",
    "supported_isas",
]

class PerformanceConfig:
    """
    The native configuration; see oxytorch.PerformanceConfig.
    """
    @staticmethod
    def check_names(names: collections.abc.Sequence[str]) -> None: ...
    @staticmethod
    def describe(key: str) -> dict[str, typing.Any]: ...
    @staticmethod
    def from_file(path: str) -> PerformanceConfig: ...
    @staticmethod
    def from_json(text: str, origin: str = "JSON text") -> PerformanceConfig: ...
    @staticmethod
    def from_yaml(text: str, origin: str = "YAML text") -> PerformanceConfig: ...
    @staticmethod
    def key_of(name: str) -> str: ...
    @staticmethod
    def keys() -> list[str]: ...
    @staticmethod
    def sections() -> list[str]: ...
    @staticmethod
    def words() -> list[tuple[str, str]]: ...
    @typing.overload
    def __init__(self, level: str) -> None: ...
    @typing.overload
    def __init__(self, other: PerformanceConfig) -> None: ...
    def equals(self, other: PerformanceConfig) -> bool: ...
    def explain(self) -> str: ...
    def get(self, key: str) -> bool | int | float | str: ...
    def origin(self, key: str) -> str: ...
    def save(self, path: str) -> None: ...
    def set(self, key: str, value: typing.Any, source: str = "caller", origin: str = "") -> None: ...
    def source(self, key: str) -> str: ...
    def to_json(self) -> str: ...
    def to_yaml(self) -> str: ...
    def unset(self, key: str) -> None: ...

def active_isa() -> str: ...
def bootstrap_interval(
    values: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    statistic: collections.abc.Callable[[list[float]], float],
    confidence: typing.SupportsFloat | typing.SupportsIndex,
    resamples: typing.SupportsInt | typing.SupportsIndex,
    seed: typing.SupportsInt | typing.SupportsIndex,
) -> tuple[float, float, float, float]: ...
def check_log_level(level: str) -> None: ...
def check_own_tail(
    config: PerformanceConfig,
    *,
    clip_norm: typing.SupportsFloat | typing.SupportsIndex,
    clip_value: typing.SupportsFloat | typing.SupportsIndex,
    ema_decay: typing.SupportsFloat | typing.SupportsIndex,
    nonfinite: str,
    norm_in_backward: bool,
    step_in_backward: bool,
) -> None: ...
def check_settings(config: PerformanceConfig, user: str) -> None: ...
def checkpointing_of(config: PerformanceConfig) -> str:
    """
    What gradient_checkpointing comes to, of which goal = memory is a part.
    """

def cores(root: str = "/") -> dict[str, typing.Any]: ...
def cpu_features() -> dict[str, typing.Any]: ...
def deliver_log() -> None:
    """
    Hands over what threads without the GIL have logged.
    """

def end_log() -> None:
    """
    Sends messages to stderr from now on: the interpreter ends.
    """

def format_duration(seconds: typing.SupportsFloat | typing.SupportsIndex) -> str: ...
def format_size(bytes: typing.SupportsInt | typing.SupportsIndex, exact: bool = False) -> str: ...
def geometric_mean_interval(
    subjects: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex]],
    confidence: typing.SupportsFloat | typing.SupportsIndex,
) -> tuple[float, float, float, float]: ...
def is_given(config: PerformanceConfig, key: str) -> bool: ...
def log(level: str, message: str, module: str = "") -> None: ...
def log_elsewhere(level: str, message: str) -> None:
    """
    By a thread that this one waits for, without giving up the GIL. For tests.
    """

def log_level() -> str: ...
def log_to_stderr(level: str, message: str) -> None: ...
def mean(values: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex]) -> float: ...
def median(values: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex]) -> float: ...
def median_absolute_deviation(
    values: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
) -> float: ...
def median_interval(
    values: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    confidence: typing.SupportsFloat | typing.SupportsIndex,
    resamples: typing.SupportsInt | typing.SupportsIndex,
    seed: typing.SupportsInt | typing.SupportsIndex,
) -> tuple[float, float, float, float]: ...
def memory(root: str = "/") -> dict[str, typing.Any]: ...
def neighbours() -> dict[str, typing.Any]:
    """
    Looks for a quarter of a second.
    """

def paired_ratio_interval(
    numerators: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    denominators: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    confidence: typing.SupportsFloat | typing.SupportsIndex,
    resamples: typing.SupportsInt | typing.SupportsIndex,
    seed: typing.SupportsInt | typing.SupportsIndex,
) -> tuple[float, float, float, float]: ...
def parse_size(text: str, total: typing.SupportsInt | typing.SupportsIndex | None = None) -> int: ...
def processor_name(root: str = "/") -> str: ...
def quantile(
    values: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    q: typing.SupportsFloat | typing.SupportsIndex,
) -> float: ...
def send_log_to(receive: collections.abc.Callable[[str, str, str, float], None]) -> None:
    """
    Sends messages to receive(level, module, text, seconds since the epoch).
    """

def set_log_level(level: str) -> None: ...
def set_neighbours(
    cores: typing.SupportsFloat | typing.SupportsIndex | None, of: typing.SupportsInt | typing.SupportsIndex = 2
) -> None:
    """
    What neighbours() says from now on; None: what is so. For tests.
    """

def setting_refusal(key: str, user: str) -> str: ...
def starts_interval(
    starts: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    confidence: typing.SupportsFloat | typing.SupportsIndex,
) -> tuple[float, float, float, float]: ...
def stddev(values: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex]) -> float: ...
def student_t_quantile(
    p: typing.SupportsFloat | typing.SupportsIndex, degrees: typing.SupportsFloat | typing.SupportsIndex
) -> float: ...
def supported_isas() -> list[str]: ...
