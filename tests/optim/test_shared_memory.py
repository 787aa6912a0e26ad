"""Parameters, state and gradients that lie in one another's memory: stepped as torch's loop does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oxytorch.optim
import pytest
import torch
from torch import nn
from ways import NATIVE_STEP, Way

pytestmark = pytest.mark.cpu_only("memory is looked at")


def _overlapping_params() -> list[nn.Parameter]:
    memory = torch.randn(300, generator=torch.Generator().manual_seed(0))
    return [nn.Parameter(memory[:200]), nn.Parameter(memory[100:]), nn.Parameter(torch.ones(5))]


def _apart() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(200, generator=generator)) for _ in range(3)]


@pytest.mark.parametrize("shared", ["parameters", "exp_avg", "step", "across", "later"])
def test_memory_in_common_is_stepped_as_torch_does(shared: str) -> None:
    """One parameter after the other, as torch's loop; kernels that take them together would race for it."""

    def trained(kind: Any, **options: Any) -> tuple[Any, list[nn.Parameter]]:
        params = _overlapping_params() if shared == "parameters" else _apart()
        opt = kind(params, lr=1e-2, **options)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            opt.step()
            if step != 1:
                continue
            first, second = opt.state[params[0]], opt.state[params[1]]
            if shared in ("exp_avg", "step"):
                second[shared] = first[shared]
            elif shared == "across":
                second["exp_avg_sq"].data = first["exp_avg_sq"].data
            elif shared == "later":
                params[1].data = params[0].data
        return opt, params

    mine, params = trained(oxytorch.optim.AdamW)
    _, wanted = trained(torch.optim.AdamW, foreach=False, fused=False)
    assert not mine._tail.native
    for p, q in zip(params, wanted, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_memory_apart_again_is_stepped_natively() -> None:
    params = _overlapping_params()
    opt = oxytorch.optim.AdamW(params, lr=1e-2)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert not opt._tail.native
    params[1].data = params[1].data.clone()
    opt.step()
    assert opt._tail.native


@pytest.mark.parametrize("lies", ["same", "overlapping", "next", "over_a_copied_one", "over_one_of_torch"])
@pytest.mark.parametrize("options", [{}, {"zero_grads": True}, {"zero_grads": True, "clip_norm": 0.5}], ids=str)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_gradients_with_memory_in_common_are_read_before_they_are_zeroed(
    kind: str, options: dict[str, Any], lies: str
) -> None:
    """As torch steps with gradients of their own, clipped once each."""
    shapes = [(24,), (24,), (4, 6)]

    def trained(opt_of: Callable[[list[nn.Parameter]], Any], apart: bool) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        if lies == "over_one_of_torch":  # which steps views with gaps
            params[1] = nn.Parameter(torch.randn(24, 2, generator=generator)[:, 0])
        opt = opt_of(params)
        memory = torch.empty(80)
        for step in range(3):
            if step != 1:  # the second step finds the gradients where they were
                memory = torch.empty(80)
            memory.copy_(torch.randn(80, generator=generator))
            second = {"overlapping": memory[16:40], "next": memory[24:48]}.get(lies, memory[:24])
            third = memory[:24].view(6, 4).t() if lies == "over_a_copied_one" else memory[48:72].view(4, 6)
            for p, g in zip(params, (memory[:24], second, third), strict=True):
                p.grad = g.clone() if apart else g
            if apart and options.get("clip_norm"):
                torch.nn.utils.clip_grad_norm_(params, options["clip_norm"])
            opt.step()
            if not apart and options.get("zero_grads"):
                assert not any(p.grad.any() for p in params if p.grad is not None)
        return params

    mine = trained(lambda params: getattr(oxytorch.optim, kind)(params, lr=0.1, **options), False)
    theirs = trained(lambda params: getattr(torch.optim, kind)(params, lr=0.1), True)
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# ---- a gradient that is a parameter


# Whose memory the gradient of each parameter lies in: those before it, after it, its own.
WAYS = ("optim", "replace", "step_tail", "native_step")  # what the gradients are is the caller's in these
READINGS = {"before": (1, 0, 1), "after": (2, 2, 0), "own": (0, 0, 2)}
RULES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.1, "maximize": True}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adagrad", {}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
]


def _reading(params: list[nn.Parameter], reading: str) -> list[Any]:
    return [params[i].detach() for i in READINGS[reading]]


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize(
    ("name", "options", "way"),
    [(*rule, way) for rule in RULES for way in WAYS if way != "native_step" or rule[0] in NATIVE_STEP],
)
def test_a_gradient_that_is_a_parameter_is_read_as_torchs_loop_reads_it(
    name: str, options: dict[str, Any], way: str, reading: str
) -> None:
    params, exact = _apart(), [nn.Parameter(p.detach().double()) for p in _apart()]
    mine = Way(way, name, params, lr=1e-2, **options)
    wanted = getattr(torch.optim, name)(exact, lr=1e-2, foreach=False, **options)
    for step in range(5):
        apart = step == 3  # in between they lie apart, and the step is native again
        generator = torch.Generator().manual_seed(step)
        given = [torch.randn(200, generator=generator) for _ in params] if apart else _reading(params, reading)
        mine.step(given)
        for p, g in zip(exact, [g.double() for g in given] if apart else _reading(exact, reading), strict=True):
            p.grad = g
        wanted.step()
        if way != "native_step":
            assert mine.stepping._tail.native == apart
        for p, q in zip(params, exact, strict=True):
            torch.testing.assert_close(p.detach().double(), q.detach(), rtol=3e-6, atol=1e-6)
            for key, value in wanted.state[q].items():
                if key != "step" and value is not None:
                    found = mine.opt.state[p][key].double()
                    torch.testing.assert_close(found, value, rtol=3e-6, atol=3e-6, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("options", [{}, {"step_in_backward": True, "nonfinite": "propagate"}], ids=["", "backward"])
def test_zeros_are_not_written_over_a_parameter(options: dict[str, Any]) -> None:
    params = _apart()
    opt = oxytorch.optim.AdamW(params, lr=1e-2, zero_grads=True, **options)
    before = [p.detach().clone() for p in params]
    for p, g in zip(params, _reading(params, "before"), strict=True):
        p.grad = g
    with pytest.raises(RuntimeError, match=r"gradient of parameter 0 .*zero_grads would write zeros"):
        opt.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


# ---- gradients with memory in common that are stepped as they arrive


@pytest.mark.parametrize("options", [{}, {"zero_grads": True}], ids=["", "zero_grads"])
@pytest.mark.parametrize("gradients", ["views of one tensor", "summed into one buffer", "set by hand"])
def test_gradients_with_memory_in_common_may_be_stepped_in_backward(gradients: str, options: dict[str, Any]) -> None:
    def trained(**given: Any) -> list[nn.Parameter]:
        params = _apart()[:2]
        opt = oxytorch.optim.AdamW(params, lr=1e-2, nonfinite="propagate", **given)
        for step in range(3):
            opt.zero_grad()
            weights = torch.linspace(1, 2 + step, 200)
            if gradients != "views of one tensor":
                memory = torch.linspace(1, 2, 300) * (step + 1)
                params[0].grad, params[1].grad = memory[:200], memory[100:]
            if gradients != "set by hand":
                ((params[0].view(20, 10) + params[1].view(20, 10)) * weights.view(20, 10)).sum().backward()
            opt.step()
        return params

    for p, q in zip(trained(step_in_backward=True, **options), trained(), strict=True):
        assert torch.equal(p, q)
