"""
Settings of the accelerator.
"""

from __future__ import annotations
import collections.abc
import oxytorch._C.trainer
import typing

__all__: list[str] = ["Applied", "DeviceRuntime", "FieldReport", "GPUConfig", "set_float32_precision", "to_text"]

class FieldReport:
    """
    What became of one field.
    """
    @property
    def applied(self) -> bool: ...
    @property
    def before(self) -> str: ...
    @property
    def field(self) -> str: ...
    @property
    def now(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def wanted(self) -> str: ...

class DeviceRuntime:
    """
    Functions of the device's runtime.
    """

    device_count: collections.abc.Callable[[], int]
    device_name: collections.abc.Callable[[typing.SupportsInt | typing.SupportsIndex], str]
    is_initialized: collections.abc.Callable[[], bool]
    memory_fraction: collections.abc.Callable[[typing.SupportsInt | typing.SupportsIndex], float]
    set_memory_fraction: collections.abc.Callable[
        [typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex], None
    ]
    set_variable: collections.abc.Callable[[str, str | None], None]
    def __init__(self) -> None: ...

class Applied:
    """
    Active settings.
    """
    def active(self) -> bool: ...
    def report(self) -> list[FieldReport]: ...
    def revert(self) -> None: ...

class GPUConfig:
    """
    The native configuration; see oxytorch.GPUConfig.
    """

    autocast_dtype: str | None
    conv_precision: str | None
    cpu_precision: str | None
    cudnn_benchmark: bool | None
    deterministic: bool | None
    device: str
    matmul_precision: str | None
    preset_name: str
    @staticmethod
    def parse_fraction(text: str) -> float: ...
    @staticmethod
    def preset(name: str) -> GPUConfig: ...
    @staticmethod
    def presets() -> list[str]: ...
    def __init__(self) -> None: ...
    def apply(self, runtime: DeviceRuntime) -> Applied: ...
    def check(self) -> None: ...
    def explain(self) -> str: ...
    @property
    def attention(self) -> list[str] | None: ...
    @attention.setter
    def attention(self, arg0: collections.abc.Sequence[str] | None) -> None: ...
    @property
    def devices(self) -> list[int] | None: ...
    @devices.setter
    def devices(self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] | None) -> None: ...
    @property
    def memory_fraction(self) -> float | None: ...
    @memory_fraction.setter
    def memory_fraction(self, arg0: typing.SupportsFloat | typing.SupportsIndex | None) -> None: ...
    @property
    def reasons(self) -> dict[str, str]: ...
    @reasons.setter
    def reasons(self, arg0: collections.abc.Mapping[str, str]) -> None: ...
    @property
    def threads(self) -> int | None: ...
    @threads.setter
    def threads(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None: ...

def set_float32_precision(
    backend: str, operations: collections.abc.Sequence[str], value: str
) -> oxytorch._C.trainer.HostSetting:
    """
    Sets torch's fp32_precision of operations ("matmul", "conv", "rnn") of "cuda" or "mkldnn", exactly undone.
    """

def to_text(report: collections.abc.Sequence[FieldReport]) -> str: ...
