"""The step path reads no device value on the host and allocates nothing once it runs."""

from __future__ import annotations

import warnings

import oxytorch.optim
import pytest
import torch
import torch_device
from torch.profiler import ProfilerActivity, profile

DEVICE = torch_device.chosen()

CASES = [
    ("AdamW", {"clip_norm": 1.0, "ema_decay": 0.99, "collect_stats": True}),
    ("AdamW", {"amsgrad": True, "zero_grads": True}),
    ("AdamW", {"force_composite": True, "clip_norm": 1.0, "ema_decay": 0.99}),
    ("SGD", {"momentum": 0.9, "clip_norm": 1.0}),
]


def prepared(name: str, options: dict, dtype: torch.dtype):
    params = [torch.nn.Parameter(torch.randn(n, dtype=dtype, device=DEVICE)) for n in (5, 300, 40000)]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = getattr(oxytorch.optim, name)(params, lr=1e-3, **options)
    opt.step()
    return opt


def events_of(work, memory: bool = False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=memory) as prof:
            work()
    return prof.events()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_no_host_read_on_the_step_path(name: str, options: dict, dtype: torch.dtype) -> None:
    opt = prepared(name, options, dtype)
    scale, found = torch.tensor(2.0, device=DEVICE), torch.tensor(0.0, device=DEVICE)

    def steps() -> None:
        for i in range(5):
            opt.param_groups[0]["lr"] = 1e-3 / (i + 1)
            opt.grad_scale, opt.found_inf = scale, found
            opt.step()

    names = [event.name for event in events_of(steps)]
    assert any("step" in name for name in names)
    assert [name for name in names if name in ("aten::_local_scalar_dense", "aten::item")] == []


@pytest.mark.cpu_only("torch's operators allocate where a device has no kernels of its own")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), [case for case in CASES if "force_composite" not in case[1]])
def test_no_tensor_is_allocated_after_the_first_step(name: str, options: dict, dtype: torch.dtype) -> None:
    opt = prepared(name, options, dtype)
    addresses = [t.data_ptr() for state in opt.state.values() for t in state.values()]

    def steps() -> None:
        for _ in range(5):
            opt.step()

    events = events_of(steps, memory=True)
    assert [e.name for e in events if e.name.startswith("aten::")] == []
    assert [e.name for e in events if e.name == "[memory]"] == []
    assert addresses == [t.data_ptr() for state in opt.state.values() for t in state.values()]
