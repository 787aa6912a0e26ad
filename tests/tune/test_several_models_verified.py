"""A fault in one of several models or optimizers is refused; a frozen part, a shared parameter and the like are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from oxytorch.tune import Run, Strategy
from several import (
    CASES,
    LOSSES,
    Batch,
    PlantedFault,
    assert_same,
    batches,
    gan,
    no_step,
    ruling_on,
    run_of,
    trained,
    wrong_buffer,
    wrong_gradient,
    wrong_output,
    wrong_state,
    wrong_update,
)
from torch import Tensor

pytestmark = [pytest.mark.cpu_only("counts on torch's CPU bits"), pytest.mark.usefixtures("one_thread")]


FAULTS: list[Callable[[int, float], type[Strategy]]] = [
    wrong_gradient, wrong_output, wrong_update, wrong_state, no_step, wrong_buffer,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["exact", "tolerance", "precision"])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("make", FAULTS)
@pytest.mark.parametrize("way", ["losses", "step"])
def test_a_fault_in_either_is_refused(way: str, make: Any, which: int, kind: str) -> None:
    fault = make(which, 1.1 if kind != "precision" else 3.0)
    fault.kind = kind
    run = run_of(way, strategies={"fault": fault})
    ruling = ruling_on(run, ["fault"], kind)
    assert not ruling.held, ruling.reason
    assert "Error" not in ruling.reason  # it is found by comparing, not by failing


def test_a_fault_is_named_with_its_model() -> None:
    run = run_of(strategies={"fault": wrong_gradient(1, 1.1)})
    assert "model[1].0.weight" in ruling_on(run, ["fault"], "exact").reason
    run = run_of(strategies={"fault": wrong_update(1, 1.1)})
    assert "model[0].0.weight" in ruling_on(run, ["fault"], "tolerance").reason  # the second optimizer's


def test_optimizers_in_another_order_are_refused() -> None:
    models, optimizers = gan()
    order = [0, 1]

    def step(batch: Batch) -> Tensor:
        for i in order:
            optimizers[i].zero_grad()
        losses = [loss(models, batch) for loss in LOSSES]
        for i in order:
            losses[i].backward(retain_graph=True, inputs=run.slots[i].params)
        for i in order:
            optimizers[i].step()
        return (losses[0] + losses[1]).detach()

    class Reversed(PlantedFault):
        def apply(self, run: Run) -> None:
            order.reverse()

        revert = apply

    run = Run(models, optimizers, None, batches(), step=step, strategies={"fault": Reversed})
    assert "in another order: optimizer[1], optimizer[0]" in ruling_on(run, ["fault"], "tolerance").reason


@pytest.mark.parametrize("case", CASES)
def test_a_normal_case_is_verified(case: Callable[[], Run]) -> None:
    assert_same(trained(case(), ["native_step"]), trained(case(), []))
    for name, kind in (("native_step", "exact"), ("step_tail", "tolerance")):
        ruling = ruling_on(case(), [name], kind)
        assert ruling.held, ruling.reason


@pytest.mark.parametrize("make", [wrong_gradient, wrong_update])
@pytest.mark.parametrize("case", CASES)
def test_a_fault_in_a_normal_case_is_refused(case: Callable[[], Run], make: Any) -> None:
    run = case()
    which = len(run.slots) - 1
    fault = make(which, 1.1)
    if make is wrong_gradient:

        class OfLast(fault):  # type: ignore[misc, valid-type]
            def apply(self, run: Run) -> None:
                weight = next(p for p in run.slots[which].params if p.requires_grad)
                self.hook = weight.register_hook(lambda grad: grad * 1.1)

        fault = OfLast
    run.strategies["fault"] = fault
    for kind in ("exact", "tolerance"):
        ruling = ruling_on(run, ["fault"], kind)
        assert not ruling.held, ruling.reason
        assert "Error" not in ruling.reason
