"""The torch devices of torch_device.h for Python tests, with the Python side that each brings."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import runpy
import subprocess
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Read, not imported: the device is registered before oxytorch is loaded.
PACKAGE = importlib.util.find_spec("oxytorch")
assert PACKAGE is not None and PACKAGE.origin is not None
BUILD = Path(runpy.run_path(str(Path(PACKAGE.origin).with_name("_build_info.py")))["BUILD_FOLDER"])
LIBRARY = BUILD / "tests" / "device" / "liboxytorch_torch_device.so"
FAKES = ("sim", "hpu", "privateuse1")


def load(name: str | None = None) -> torch.device:
    """Register the device with torch, once per process, before torch runs anything; `name` is of `FAKES`."""
    name = os.environ.setdefault("OXYTORCH_DEVICE", name or "")
    if name not in FAKES:
        raise ValueError(f"OXYTORCH_DEVICE is {name!r}; the fake devices are {', '.join(FAKES)}")
    kind = "privateuseone" if name == "privateuse1" else name
    if not hasattr(torch, kind):
        torch.ops.load_library(LIBRARY)
        module = hpu() if kind == "hpu" else private(kind)
        torch._register_device_module(kind, module)
        if kind != "hpu":
            torch.utils.generate_methods_for_privateuse1_backend()
        seed_with_torch()
        # torch's worker thread for the device may still wait for the interpreter to drop the last graph; let it, since
        # it cannot once the interpreter ends.
        atexit.register(time.sleep, 0.1)
    return torch.device(kind, 0)


def chosen() -> torch.device:
    """The device that tests run on: what OXYTORCH_DEVICE says, the CPU unless set."""
    name = os.environ.get("OXYTORCH_DEVICE") or "cpu"
    return load() if name in FAKES else torch.device(name, 0) if name == "cuda" else torch.device(name)


def check(done: subprocess.CompletedProcess[str]) -> None:
    """Fail if a process with a device has; skip if its torch, built for CUDA, has no place for the device it asked for.

    Gaudi's bridge has a torch of its own, without CUDA.
    """
    if done.returncode != 0 and "Cannot have both HPU and cuda" in done.stdout + done.stderr:
        pytest.skip("this torch is built for CUDA and takes no other accelerator")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def host_reads() -> int:
    """Values read by the host so far."""
    return torch.ops.oxytorch_device.host_reads()


def index_of(device: Any = None) -> int:
    """Index of a device given as in torch; the current one's for None."""
    calls = torch.ops.oxytorch_device
    if device is None:
        return calls.current_device()
    index = device if isinstance(device, int) else torch.device(device).index or 0
    if not 0 <= index < calls.device_count():
        raise AssertionError("Invalid device id")
    return index


class Current:
    """`with torch.hpu.device(index)`: the current device for a while."""

    def __init__(self, device: Any) -> None:
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.before = torch.ops.oxytorch_device.current_device()
        torch.ops.oxytorch_device.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        torch.ops.oxytorch_device.set_device(self.before)


def seed_with_torch() -> None:
    """torch seeds the devices that it knows."""
    name = "_manual_seed_impl" if hasattr(torch.random, "_manual_seed_impl") else "manual_seed"  # before torch 2.10
    plain = getattr(torch.random, name)

    def seed(value: int) -> torch._C.Generator:
        torch.ops.oxytorch_device.manual_seed(int(value) & (2**63 - 1))
        return plain(value)

    setattr(torch.random, name, seed)
    if name == "manual_seed":
        torch.manual_seed = seed


def rng_state(device: Any = None) -> torch.Tensor:
    """The state of the device's default generator."""
    return torch.ops.oxytorch_device.rng_state(index_of(device))


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Put the state of the device's default generator back."""
    torch.ops.oxytorch_device.set_rng_state(new_state, index_of(device))


def private(kind: str) -> types.ModuleType:
    """What torch asks of a PrivateUse1 device's module."""
    module = types.ModuleType(f"torch.{kind}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.current_device = torch.ops.oxytorch_device.current_device
    module.device_count = torch.ops.oxytorch_device.device_count
    module.synchronize = lambda device=None: torch.ops.oxytorch_device.synchronize(index_of(device))
    module.device = Current
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state, module.set_rng_state = rng_state, set_rng_state
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def hpu() -> types.ModuleType:
    """`torch.hpu` with names of Gaudi's bridge alone; whatever else is asked of it is an AttributeError."""
    calls = torch.ops.oxytorch_device
    module = types.ModuleType("torch.hpu", hpu.__doc__)

    def memory_stats(device: Any = None) -> dict[str, int]:
        found = dict(calls.memory_statistics(index_of(device)))
        active = found["allocs"] - found["frees"]
        return {
            "Limit": found["total"],
            "InUse": found["in_use"],
            "MaxInUse": found["peak"],
            "NumAllocs": found["allocs"],
            "NumFrees": found["frees"],
            "ActiveAllocs": active,
            "MaxAllocSize": found["largest"],
            "TotalSystemAllocs": found["allocs"],
            "TotalSystemFrees": found["frees"],
            "TotalActiveAllocs": active,
        }

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        found = memory_stats(device)
        return found["Limit"] - found["InUse"], found["Limit"]

    def memory_summary(device: Any = None) -> str:
        return "\n".join(f"{key}: {value}" for key, value in memory_stats(device).items())

    def current_stream(device: Any = None) -> torch.Stream:
        return torch._C._accelerator_getStream(index_of(device))

    def manual_seed(seed: int) -> None:
        calls.manual_seed(int(seed) & (2**63 - 1))

    @contextlib.contextmanager
    def stream(chosen: torch.Stream) -> Iterator[None]:
        with chosen:
            yield

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
            return super().__new__(cls, torch.device("hpu", index_of(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
            return super().__new__(cls, "hpu", enable_timing=enable_timing)

    state = {"initialized": False}
    random = types.SimpleNamespace(
        get_rng_state=rng_state, set_rng_state=set_rng_state, manual_seed=manual_seed, manual_seed_all=manual_seed
    )
    names: dict[str, Any] = {
        "init": lambda: state.update(initialized=True),
        "is_initialized": lambda: state["initialized"],
        "is_available": lambda: calls.device_count() > 0,
        "device_count": calls.device_count,
        "current_device": calls.current_device,
        "set_device": lambda device: calls.set_device(index_of(device)),
        "synchronize": lambda device=None: calls.synchronize(index_of(device)),
        "get_device_name": lambda device=None: "GAUDI3",
        "is_bf16_supported": lambda: True,
        "memory_allocated": lambda device=None: memory_stats(device)["InUse"],
        "max_memory_allocated": lambda device=None: memory_stats(device)["MaxInUse"],
        "memory_reserved": lambda device=None: memory_stats(device)["Limit"],
        "max_memory_reserved": lambda device=None: memory_stats(device)["Limit"],
        "memory_stats": memory_stats,
        "memory_summary": memory_summary,
        "mem_get_info": mem_get_info,
        "reset_peak_memory_stats": lambda device=None: calls.reset_memory_statistics(index_of(device), True),
        "reset_accumulated_memory_stats": lambda device=None: calls.reset_memory_statistics(index_of(device), False),
        "random": random,
        "current_stream": current_stream,
        "stream": stream,
        "device": Current,
        "Stream": Stream,
        "Event": Event,
        # What torch's own code asks of a device's module.
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module
