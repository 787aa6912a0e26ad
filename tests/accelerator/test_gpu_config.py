from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import accelerator
from torch.nn.functional import scaled_dot_product_attention

KEYS = [
    "fp32_precision",
    *(f"{part}.fp32_precision" for part in ("cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn")),
    *(f"{part}.fp32_precision" for part in ("mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")),
]


def read(path: str) -> Any:
    found: Any = torch.backends
    for part in path.split("."):
        found = getattr(found, part)
    return found


def state() -> dict[str, Any]:
    """All that GPUConfig touches, by torch's own readers, also under another generic precision."""
    cuda = torch.backends.cuda
    facts: dict[str, Any] = {key: read(key) for key in KEYS}
    torch.backends.fp32_precision = "ieee"
    facts |= {f"{key} below ieee": read(key) for key in KEYS}
    torch.backends.fp32_precision = facts["fp32_precision"]
    return facts | {
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "attention": (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            cuda.math_sdp_enabled(),
        ),
        "autocast": [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")],
        "threads": torch.get_num_threads(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "legacy": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
    }


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


def test_with_applies_and_takes_back() -> None:
    config = ox.GPUConfig(
        matmul_precision="tf32",
        conv_precision="ieee",
        cudnn_benchmark=True,
        attention=["math"],
        threads=1,
    )
    before = state()
    with config.applied() as report:
        assert report.complete
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cudnn.conv.fp32_precision == torch.backends.cudnn.rnn.fp32_precision == "ieee"
        assert torch.backends.cudnn.benchmark
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.get_num_threads() == 1
        assert report["attention"].now == "math"
        assert "attention: flash,efficient,cudnn,math -> math" in str(report)
    assert state() == before
    with pytest.raises(KeyError), config.applied():
        raise KeyError("the step failed")
    assert state() == before


def test_attention_is_what_torch_then_runs() -> None:
    query = torch.randn(1, 2, 8, 16)

    def ran() -> set[str]:
        with torch.profiler.profile() as profile:
            scaled_dot_product_attention(query, query, query)
        return {event.key for event in profile.key_averages()}

    with ox.GPUConfig(attention=["math"]).applied():
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" not in ran()
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ran()


def test_deterministic_makes_such_operations_raise() -> None:
    values, index = torch.zeros(4), torch.tensor([0, 0])

    def unordered() -> None:
        torch.zeros(4, 4).put_(index, values[:2], accumulate=False)

    unordered()
    with ox.GPUConfig(deterministic=True).applied():
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError, match="deterministic"):
            unordered()
    unordered()


def test_autocast_dtype_asks_the_hardware() -> None:
    native, why = ox.amp.hardware_support("cpu", torch.float16)
    before = torch.get_autocast_dtype("cpu")
    with ox.GPUConfig(device="cpu", autocast_dtype="fp16").applied() as report:
        assert report["autocast_dtype"].applied == native
        assert why in report["autocast_dtype"].reason
        assert torch.get_autocast_dtype("cpu") == (torch.float16 if native else before)
        with torch.autocast("cpu"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (torch.float16 if native else before)


def test_cpu_precision_where_the_processor_has_it() -> None:
    native, why = ox.amp.hardware_support("cpu", torch.bfloat16)
    a = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    exact = a @ a
    with ox.GPUConfig(cpu_precision="bf16").applied() as report:
        row = report["cpu_precision"]
        assert row.applied == native
        if native:
            assert read("mkldnn.matmul.fp32_precision") == "bf16"
        else:
            assert row.reason == why
            assert torch.equal(a @ a, exact)
    assert torch.equal(a @ a, exact)


def test_apply_stays_until_revert() -> None:
    config = ox.GPUConfig(cudnn_benchmark=True)
    config.apply()
    with pytest.raises(RuntimeError, match="active already"):
        config.apply()
    config.revert()
    assert not torch.backends.cudnn.benchmark
    config.revert()
    ox.GPUConfig(cudnn_benchmark=True).apply()  # nobody holds it: as torch's own setters, it stays
    assert torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False


def test_strict_changes_nothing_where_something_is_missing() -> None:
    before = state()
    config = ox.GPUConfig(device="cuda", cudnn_benchmark=True, memory_fraction="90%")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(RuntimeError, match="memory_fraction: no CUDA device is usable here"):
        config.apply(strict=True)
    assert state() == before
    with config.applied() as report:
        assert not report.complete
        assert report["cudnn_benchmark"].applied


class FakeCuda:
    """Stands in for torch.cuda: four devices that keep their memory fraction."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.initialized = False
        self.fractions = [1.0] * 4
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: self.fractions[index])
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set_fraction)

    def set_fraction(self, share: float, index: int) -> None:
        if not 0 <= share <= 1:
            raise ValueError(share)
        self.initialized = True
        self.fractions[index] = share


def test_devices_and_memory_fraction_of_a_made_up_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cuda = FakeCuda(monkeypatch)
    with ox.GPUConfig(devices=[3, 1], memory_fraction="50%").applied() as report:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,1"
        assert cuda.fractions == [0.5, 0.5, 1.0, 1.0]
        assert report.complete
    assert cuda.fractions == [1.0] * 4
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    with ox.GPUConfig(devices=[0]).applied() as report:  # initialised by now
        assert "before the first CUDA call" in report["devices"].reason
    with pytest.raises(ValueError, match="4 devices are visible"):
        ox.GPUConfig(devices=[4]).apply()
    with ox.GPUConfig.preset("H100").applied() as report:
        assert report["preset"].before == "NVIDIA H200"
    with ox.GPUConfig.preset("H200").applied() as report:
        assert "preset" not in report

    def refuse(share: float, index: int) -> None:
        if index == 2 and share < 1:
            raise RuntimeError("the driver refused")
        cuda.fractions[index] = share

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", refuse)
    before = state()
    with pytest.raises(RuntimeError, match="the driver refused"):
        ox.GPUConfig(memory_fraction=0.5, cudnn_benchmark=True).apply()
    assert cuda.fractions == [1.0] * 4
    assert state() == before


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"matmul_precision": "tf23"}, ValueError, "did you mean 'tf32'"),
        ({"attention": ["flesh"]}, ValueError, "did you mean 'flash'"),
        ({"attention": "flash"}, TypeError, "must be a sequence"),
        ({"attention": []}, ValueError, "at least one"),
        ({"devices": [0, 0]}, ValueError, "twice"),
        ({"devices": ["a"]}, TypeError, "devices cannot be"),
        ({"memory_fraction": "120%"}, ValueError, "over 100%"),
        ({"memory_fraction": 0}, ValueError, "above 0"),
        ({"memory_fraction": "lots"}, ValueError, "is no share"),
        ({"threads": 0}, ValueError, "from 1 to 4096"),
        ({"threads": "two"}, TypeError, "threads cannot be"),
        ({"deterministic": "yes"}, TypeError, "must be True, False or None"),
        ({"deterministic": True, "cudnn_benchmark": True}, ValueError, "contradict"),
        ({"device": "gpu"}, ValueError, "device must be"),
        ({"precision": "tf32"}, TypeError, "precision"),
    ],
)
def test_what_cannot_be_meant_is_refused(values: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        ox.GPUConfig(**values)


def test_presets() -> None:
    names = ox.GPUConfig.presets()
    assert names == ["A100", "H100", "H200", "Gaudi2", "Gaudi3", "cpu-avx512", "cpu-amx"]
    for name in names:
        config = ox.GPUConfig.preset(name)
        assert config.preset_name == name
        assert all(reason in config.explain() for reason in config.reasons.values())
        with config.applied() as report:
            assert isinstance(report, accelerator.GPUConfigReport)
    assert ox.GPUConfig.preset("Gaudi3").matmul_precision is None
    with pytest.raises(ValueError, match="did you mean 'H100'"):
        ox.GPUConfig.preset("H1000")
