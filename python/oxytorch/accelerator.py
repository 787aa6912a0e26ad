"""`GPUConfig`: the settings of a process that belong to its accelerator, applied together and taken back exactly."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from . import _C

__all__ = ["FieldReport", "GPUConfig", "GPUConfigReport"]

_native = _C.accelerator
_Native = _C.accelerator.GPUConfig


@dataclass(frozen=True)
class FieldReport:
    """What became of one field: what was wanted, what was there, what torch says now, and one sentence."""

    field: str
    wanted: str
    before: str
    now: str
    applied: bool
    reason: str


class GPUConfigReport(dict[str, FieldReport]):
    """What became of each field, by name; `str` prints one line a field."""

    def __init__(self, rows: Sequence[Any]) -> None:
        super().__init__(
            {
                row.field: FieldReport(row.field, row.wanted, row.before, row.now, row.applied, row.reason)
                for row in rows
            }
        )
        self._text = _native.to_text(list(rows))

    @property
    def complete(self) -> bool:
        """True where every field was applied."""
        return all(row.applied for row in self.values())

    def __str__(self) -> str:
        return self._text


def _set_variable(name: str, value: str | None) -> None:
    # os.environ is a copy, from which child processes get theirs: it has to know.
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _runtime() -> Any:
    """Give torch.cuda's functions to the native side."""
    cuda = torch.cuda
    runtime: Any = _native.DeviceRuntime()
    runtime.set_variable = _set_variable
    runtime.device_count = cuda.device_count
    runtime.is_initialized = cuda.is_initialized
    runtime.device_name = cuda.get_device_name
    if hasattr(cuda, "get_per_process_memory_fraction"):
        runtime.memory_fraction = cuda.get_per_process_memory_fraction
        runtime.set_memory_fraction = lambda index, share: cuda.set_per_process_memory_fraction(share, index)
    return runtime


@dataclass
class GPUConfig:
    """Settings of one process for its accelerator; what is None is left alone.

    Apply it before the first device call, from one thread, with no step running: the settings are those of the whole
    process, but for `autocast_dtype`, which torch keeps per thread. While a precision is set, torch's older names for
    it (``allow_tf32``, ``get_float32_matmul_precision``) may raise: torch refuses to mix the two.

    Parameters
    ----------
    device
        ``"cuda"``, ``"hpu"``, ``"cpu"``, or ``"auto"``: cuda where one is, else cpu.
    devices
        Indices into the devices that are visible now, in the order to have; ``CUDA_VISIBLE_DEVICES`` is narrowed to
        them, which works only before CUDA is initialised.
    memory_fraction
        Share of each visible device's memory that torch may take: ``0.9`` or ``"90%"``.
    matmul_precision, conv_precision
        fp32 products on CUDA and in cuDNN: ``"ieee"`` or ``"tf32"``, by torch's ``fp32_precision`` settings.
    cpu_precision
        fp32 products in oneDNN on the CPU: ``"ieee"``, ``"tf32"`` or ``"bf16"``.
    cudnn_benchmark
        Whether cuDNN times its algorithms on the first batch of each shape.
    deterministic
        Whether operations without a deterministic version raise.
    attention
        What ``scaled_dot_product_attention`` may use, of ``"flash"``, ``"efficient"``, ``"cudnn"``, ``"math"``.
    autocast_dtype
        dtype of ``torch.autocast`` where none is named: ``"bf16"`` or ``"fp16"``.
    threads
        Intra-op threads.

    Raises
    ------
    ValueError
        For a value that cannot be meant; the message names the nearest right one.
    TypeError
        For a value of a wrong type.

    Examples
    --------
    >>> with GPUConfig(attention=["math"], deterministic=True).applied() as report:
    ...     print(report["attention"].now)
    math
    """

    device: str = "auto"
    devices: Sequence[int] | None = None
    memory_fraction: float | str | None = None
    matmul_precision: str | None = None
    conv_precision: str | None = None
    cpu_precision: str | None = None
    cudnn_benchmark: bool | None = None
    deterministic: bool | None = None
    attention: Sequence[str] | None = None
    autocast_dtype: str | None = None
    threads: int | None = None
    preset_name: str = ""
    reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._applied: Any = None
        self._make().check()

    def _make(self) -> _Native:
        native = _Native()
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "memory_fraction" and isinstance(value, str):
                value = _Native.parse_fraction(value)
            elif one.name in ("devices", "attention") and value is not None:
                if isinstance(value, str):
                    raise TypeError(f"{one.name} must be a sequence, such as [{value!r}], not a str.")
                value = list(value)
            elif one.name in ("cudnn_benchmark", "deterministic") and not isinstance(value, (bool, type(None))):
                raise TypeError(f"{one.name} must be True, False or None, not {value!r}.")
            try:
                setattr(native, one.name, value)
            except TypeError:
                raise TypeError(f"{one.name} cannot be {value!r}, a {type(value).__name__}.") from None
        return native

    @classmethod
    def preset(cls, name: str) -> GPUConfig:
        """Return the settings for a kind of hardware, with a reason for each.

        Parameters
        ----------
        name
            ``"A100"``, ``"H100"``, ``"H200"``, ``"Gaudi2"``, ``"Gaudi3"``, ``"cpu-avx512"`` or ``"cpu-amx"``.
        """
        native = _Native.preset(name)
        return cls(**{one.name: getattr(native, one.name) for one in fields(cls)})

    @staticmethod
    def presets() -> list[str]:
        """Names that `preset` takes."""
        return _Native.presets()

    def apply(self, strict: bool = False) -> GPUConfigReport:
        """Set each field, read it back, and say what became of it; active until `revert`.

        Parameters
        ----------
        strict
            Whether a field that cannot be applied here is an error: everything is put back then.

        Returns
        -------
        GPUConfigReport
            By field. Where a setter raises, everything is put back and the error passes.

        Raises
        ------
        RuntimeError
            Where this configuration is active already, or by `strict`.
        """
        if self._applied is not None:
            raise RuntimeError("this GPUConfig is active already; revert() it first.")
        applied = self._make().apply(_runtime())
        report = GPUConfigReport(applied.report())
        if strict and not report.complete:
            applied.revert()
            missing = "; ".join(f"{row.field}: {row.reason}" for row in report.values() if not row.applied)
            raise RuntimeError(f"not every field can be applied here, and nothing was changed. {missing}")
        self._applied = applied
        return report

    def revert(self) -> None:
        """Put back everything that `apply` changed to what it was; does nothing where it is not active."""
        applied, self._applied = self._applied, None
        if applied is not None:
            applied.revert()

    @contextmanager
    def applied(self, strict: bool = False) -> Iterator[GPUConfigReport]:
        """Apply for the end of the block, also when an exception passes; gives the report."""
        report = self.apply(strict)
        try:
            yield report
        finally:
            self.revert()

    def explain(self) -> str:
        """Each field that is set, its value and its reason; then what a preset left alone, and why."""
        return self._make().explain()
