"""The torch device of torch_device.cpp, which OXYTORCH_DEVICE names, for Python tests."""

from __future__ import annotations

import atexit
import os
import time
import types
from pathlib import Path

import torch

LIBRARY = Path(__file__).resolve().parents[2] / "build" / "dev" / "tests" / "device" / "liboxytorch_torch_device.so"


def load() -> torch.device:
    """Register the device with torch, once per process."""
    name = os.environ["OXYTORCH_DEVICE"]
    if not hasattr(torch, name):
        os.environ["OXYTORCH_TORCH_DEVICE"] = name
        torch.ops.load_library(LIBRARY)
        torch.utils.rename_privateuse1_backend(name)
        module = types.ModuleType(f"torch.{name}")
        module.is_available = lambda: True
        module.is_initialized = lambda: True
        module.current_device = lambda: 0
        module.device_count = torch.ops.oxytorch_device.device_count
        module._is_in_bad_fork = lambda: False
        module.manual_seed_all = lambda seed: None
        module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
        torch._register_device_module(name, module)
        torch.utils.generate_methods_for_privateuse1_backend()
        # torch's worker thread for the device may still wait for the interpreter to drop the last graph; let it, since
        # it cannot once the interpreter ends.
        atexit.register(time.sleep, 0.1)
    return torch.device(name, 0)


def host_reads() -> int:
    """Values read by the host so far."""
    return torch.ops.oxytorch_device.host_reads()
