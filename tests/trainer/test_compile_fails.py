"""A compiler that fails costs no step: the run goes on without it, as it would have gone, and says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch.tune import STRATEGIES
from planted import only
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import InternalTorchDynamoError

pytestmark = pytest.mark.cpu_only("hands the model to stand-ins of the compiler")

Function = Callable[..., Any]
LOSS = nn.CrossEntropyLoss()
SETTINGS: dict[str, Any] = {"level": "basic", "allocator": "system"}
COMPILE = torch.compile


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 3))


def batches(count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [(torch.randn(5, 6, generator=g), torch.randint(3, (5,), generator=g)) for _ in range(count)]


def trainer(compile: str = "default", *, calibrate: bool = False, **settings: Any) -> ox.Trainer:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return ox.Trainer(model, optimizer, LOSS, {**SETTINGS, **settings, "compile": compile}, calibrate=calibrate)


def outcome(one: ox.Trainer) -> list[torch.Tensor]:
    """Losses, weights, buffers, what the optimizer keeps, and the generator's next numbers."""
    torch.manual_seed(7)
    losses = [one.step(batch) for batch in batches()]
    state = [v for values in one.optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    return [*losses, *one.model.state_dict().values(), *state, torch.rand(3)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def fails_at(call: int) -> Function:
    """A compiled function that throws at this call, behind its graph break: the model has run by then."""

    def compile(function: Function, **_: Any) -> Function:
        calls = 0

        def compiled(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            result = function(*args)
            if calls >= call:
                raise InternalTorchDynamoError("the second graph\ncannot be compiled")
            return result

        return compiled

    return compile


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no C++ compiler")


@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_step_that_failed_is_taken_once(
    call: int, accumulation: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = outcome(trainer("off", accumulation_steps=accumulation))
    monkeypatch.setattr(torch, "compile", fails_at(call))
    one = trainer(accumulation_steps=accumulation)
    with caplog.at_level(logging.WARNING, "oxytorch"):
        assert same(outcome(one), plain)
    line = one.report()["compile"]
    step = (call - 1) // accumulation + 1
    assert line.state == "refused"
    assert line.reason == f"step {step}: InternalTorchDynamoError: the second graph"
    said = [record.message for record in caplog.records if record.name == "oxytorch.tune"]
    assert said == [f"compile failed, and the run goes on without it: {line.reason}"]


@pytest.mark.parametrize("calibrate", [False, True])
@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_a_machine_without_a_compiler(mode: str, calibrate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = outcome(trainer("off"))
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    names = [name for name in STRATEGIES if name.startswith("compile")]
    with only(*(STRATEGIES[name] for name in names)):
        one = trainer(mode, calibrate=calibrate)
        assert same(outcome(one), plain)
    line = one.report()["compile"]
    assert line.state == "refused" and "no C++ compiler" in line.reason and "\n" not in line.reason
    assert one.evaluate(batches()) > 0  # in eval mode another function would be compiled


@pytest.mark.skipif(
    not hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"),
    reason="this torch compiles backward when it first runs",
)
def test_a_backward_that_cannot_be_compiled_fails_before_forward_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = outcome(trainer("off", accumulation_steps=2))
    backend = aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=broken)
    monkeypatch.setattr(torch, "compile", lambda function, **_: COMPILE(function, backend=backend))
    one = trainer(accumulation_steps=2)
    assert same(outcome(one), plain)
    assert one.report()["compile"].state == "refused"


def test_a_later_shape_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        if any(isinstance(x, torch.Tensor) and x.shape[:1] == (2,) for x in inputs):
            broken()
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f, **_: COMPILE(f, backend=backend, dynamic=False))
    losses = []
    for compile in ("off", "default"):
        one = trainer(compile)
        torch.manual_seed(7)
        pieces = [(x[:rows], y[:rows]) for (x, y), rows in zip(batches(3), (5, 2, 5), strict=True)]
        losses.append([float(one.step(piece)) for piece in pieces])
    assert losses[0] == losses[1]
    assert one.report()["compile"].reason.startswith("step 2: BackendCompilerFailed: ")


class _Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 2


def test_a_graph_break_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **_: COMPILE(f, backend="eager"))
    one = trainer()
    one.model.append(_Breaks())  # type: ignore[operator]
    one.step(batches(1)[0])
    assert one.report()["compile"].state == "on"


def test_what_the_model_itself_throws_is_not_the_compilers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **_: COMPILE(f, backend="eager"))
    one = trainer()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        one.step((torch.randn(5, 4), torch.zeros(5, dtype=torch.long)))
    assert one.report()["compile"].state == "on" and one.global_step == 0
    assert not [record for record in caplog.records if record.name.startswith("oxytorch")]
    one.step(batches(1)[0])

    monkeypatch.setattr(torch, "compile", lambda _, **__: broken_model)
    with pytest.raises(ValueError, match="of the user"):
        trainer().step(batches(1)[0])


def broken_model(*_: Any) -> Any:
    raise ValueError("of the user's own code")


def test_the_steps_of_a_plan_go_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = False

    def compile(function: Function, **_: Any) -> Function:
        def compiled(*args: Any) -> Any:
            if fails:
                raise InternalTorchDynamoError("gone")
            return function(*args)

        return compiled

    monkeypatch.setattr(torch, "compile", compile)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"compile": "default", "tune_seconds": 1.0}
    plan = ox.accelerate(
        model, optimizer, LOSS, batches(), config=config, strategies=["compile"], remember=False, loop="plan"
    )
    try:
        plan.step(batches(1)[0])
        assert "compile" in plan.run.active and plan.run.fallbacks == {}
        fails = True
        before = model[0].weight.detach().clone()
        plan.step(batches(1)[0])
        assert not torch.equal(before, model[0].weight)
        assert "compile" not in plan.accepted
        assert "InternalTorchDynamoError: gone" in plan.report()["compile"].reason
        assert "InternalTorchDynamoError: gone" in plan.explain()
    finally:
        plan.revert()
