"""`replace`: torch's optimizers carry on where they stand. Those of libraries: test_replace_libraries.py."""

from __future__ import annotations

from typing import Any

import oxytorch.optim
import pytest
import torch
import torch_device
from oxytorch.optim import replace

DEVICE = torch_device.chosen()

SHAPES = [(7, 5), (33,), ()]


def make_params(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in SHAPES]


def set_grads(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 100)
    for p in params:
        p.grad = 0.1 * torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


def run(opt: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range, schedule: Any = None) -> None:
    for i in steps:
        set_grads(params, i)
        opt.step()
        if schedule is not None:
            schedule.step()


TORCH = [
    ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("RMSprop", {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    ("Muon", {"lr": 1e-2}),
]


@pytest.mark.parametrize(("name", "options"), TORCH)
def test_torch_optimizers_carry_on_under_schedulers(name: str, options: dict) -> None:
    params, peers = make_params(), make_params()
    if name == "Muon":
        params, peers = params[:1], peers[:1]
    old, peer = (getattr(torch.optim, name)(p, **options) for p in (params, peers))
    before, peer_before = (torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (old, peer))
    run(old, params, range(3), before), run(peer, peers, range(3), peer_before)
    calls = []
    old.register_step_post_hook(lambda *_: calls.append(1))
    new = replace(old, clip_norm=1e6)
    held = [p.detach().clone() for p in peers]
    assert type(new) is getattr(oxytorch.optim, name) and new.param_groups is old.param_groups
    after, peer_after = (torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (new, peer))
    for i in range(3, 8):
        run(new, params, range(i, i + 1), before), run(peer, peers, range(i, i + 1), peer_before)
        after.step(), peer_after.step()
    assert calls == [1] * 5
    assert new.param_groups[0]["lr"] == peer.param_groups[0]["lr"]
    if name == "Muon":  # both multiply in bfloat16, by which torch's own five steps are 1.6 % off those of float64
        for p, q, before_it in zip(params, peers, held, strict=True):
            assert float((p - q).detach().norm() / (q - before_it).detach().norm()) < 0.02
    else:
        torch.testing.assert_close(params, peers, rtol=1e-5, atol=1e-6)
    order = list if DEVICE.type == "cpu" else sorted  # a step count that moves to its device is entered anew
    assert order(new.state_dict()["state"][0]) == order(peer.state_dict()["state"][0])


def test_other_classes_are_refused_by_name() -> None:
    for name, words in (
        ("transformers.optimization.AdamW", "eps before the bias correction"),
        ("my.optim.AdamW", "there is one for torch.optim.AdamW"),
    ):
        module, _, short = name.rpartition(".")
        with pytest.raises(TypeError, match=f"no replacement for {name}.*{words}"):
            replace(type(short, (torch.optim.Adam,), {"__module__": module})(make_params(), lr=1e-2))
    with pytest.raises(TypeError, match=r"no replacement for torch\.optim\.nadam\.NAdam"):
        replace(torch.optim.NAdam(make_params()))


def test_a_compiled_model_trains_on() -> None:
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(DEVICE)
        compiled = torch.compile(model, backend="eager")
        opt: torch.optim.Optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
        data = torch.randn(20, 4, 6, device=DEVICE)
        for i, batch in enumerate(data):
            if ours and i == 7:
                opt = replace(opt, norm_in_backward=True, clip_norm=1e6)
            opt.zero_grad()
            compiled(batch).square().sum().backward()
            opt.step()
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
