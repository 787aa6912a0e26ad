"""Reads a model: runs its step a few times, records its operators, asks every rule, and leaves no trace."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .finding import Advice
from .loss import Loss, outputs_and_loss
from .recorder import OperatorRecorder, key_of, saved_bytes
from .rules import RULES, Step
from .snapshot import Snapshot, untouched


def read(model: nn.Module, example: Any, loss_fn: Loss | None, rules: Iterable[str] | None = None) -> Advice:
    """Return the advice; see `ModelOptimizer.advise`."""
    wanted = _chosen(rules)
    notes: list[str] = []
    if any(nn.parameter.is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise ValueError("the model has lazy parameters: run it once on an example, so that they have shapes")
    with untouched(model) as snapshot, torch.enable_grad():
        step = _observe(model, example, loss_fn, snapshot, notes)
        findings = [finding for name in wanted for finding in RULES[name](step)]
    spent: Counter[str] = Counter()
    for op in step.recorder.ops:
        spent[op.name] += op.seconds  # type: ignore[assignment]
    total = step.recorder.seconds or 1.0
    return Advice(findings, step.seconds, [(name, s / total) for name, s in spent.most_common(8)], notes)


def _chosen(rules: Iterable[str] | None) -> list[str]:
    chosen = list(RULES) if rules is None else list(rules)
    for name in chosen:
        if name not in RULES:
            raise ValueError(f"no rule is called {name!r}; there are {', '.join(RULES)}")
    return chosen


def _run(model: nn.Module, example: Any, loss_fn: Loss | None) -> bool:
    _, loss = outputs_and_loss(model, example, loss_fn)
    if loss is None or not loss.requires_grad:
        return False
    loss.backward()  # type: ignore[no-untyped-call]
    return True


def _observe(model: nn.Module, example: Any, loss_fn: Loss | None, snapshot: Snapshot, notes: list[str]) -> Step:
    def fresh() -> None:
        snapshot.restore()
        for parameter in model.parameters():
            parameter.grad = None

    _run(model, example, loss_fn)
    fresh()
    start = time.perf_counter()
    _run(model, example, loss_fn)
    if any(p.device.type != "cpu" for p in model.parameters()):
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - start
    fresh()
    recorder = OperatorRecorder(model)
    with recorder:
        backward = _run(model, example, loss_fn)
    step = Step(model, recorder, seconds, backward)
    if not backward:
        notes.append("no output needs a gradient: backward was not run, and rules about gradients were left out.")
    _gradients(step)
    fresh()
    with saved_bytes(model, step.saved):
        outputs_and_loss(model, example, loss_fn)
    fresh()
    if model.training:
        model.eval()
        inference = OperatorRecorder(model)
        try:
            with torch.no_grad(), warnings.catch_warnings(), inference:
                warnings.simplefilter("ignore")
                outputs_and_loss(model, example, loss_fn)
            step.inference = inference
        except Exception as error:  # what does not run in evaluation mode was not asked to
            notes.append(f"evaluation mode was not looked at: {type(error).__name__}: {error}")
    else:
        step.inference = recorder
    fresh()
    return step


def _gradients(step: Step) -> None:
    read = {fact.key for op in step.recorder.forward for fact in op.inputs}
    for name, parameter in step.model.named_parameters():
        if key_of(parameter) in read:
            step.used.add(name)
        gradient = parameter.grad
        if gradient is None:
            if parameter.requires_grad:
                step.without_grad.add(name)
        elif gradient.is_sparse:
            step.sparse.add(name)
        elif gradient.dim() == 2:
            step.rows[name] = (int(gradient.any(1).sum()), gradient.shape[0])
    for name, module in step.model.named_modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if isinstance(weight, nn.Parameter) and isinstance(bias, nn.Parameter) and None not in (weight.grad, bias.grad):
            assert weight.grad is not None and bias.grad is not None
            if not weight.grad.is_sparse:
                largest = float(weight.grad.abs().max()) if weight.numel() else 0.0
                step.bias_ratio[name] = float(bias.grad.abs().max()) / largest if largest else 0.0
