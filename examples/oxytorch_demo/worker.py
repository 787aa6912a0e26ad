"""One contender in a process of its own, driven over pipes.

The process gets its task as JSON in its first argument. It answers one JSON object per line: one when it is ready, then
one per command. Commands are lines on standard input: ``run N`` trains N steps, ``finish`` evaluates, ``exit`` ends;
the end of the input ends it too.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from oxytorch_turns import serve
from torch import Tensor, nn

from . import workloads
from .contenders import Contender, PhaseClock, Plain, Stock, StockChoice
from .workloads import Batch, Workload

__all__ = ["main"]


def _fault(task: dict[str, Any], step: int) -> None:
    """Faults that the tests plant."""
    if task.get("die_at") == step:
        print("planted fault: this worker dies here", file=sys.stderr, flush=True)
        os._exit(3)
    if task.get("hang_at") == step:
        print("planted fault: this worker hangs here", file=sys.stderr, flush=True)
        time.sleep(3600)


def _compile(model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor], forward: nn.Module, batch: Batch) -> float:
    """Compile by one forward and backward whose traces are removed; seconds it took."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    began = time.perf_counter()
    loss(forward, batch).backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - began
    model.load_state_dict(before)
    for parameter in model.parameters():
        parameter.grad = None
    return seconds


def _build(task: dict[str, Any], workload: Workload, clock: PhaseClock, batch: Batch) -> tuple[Contender, float]:
    name, steps = task["contender"], task["steps"]
    loss = clock.timed_loss(workload.loss)
    if name.startswith(("plain", "stock")):
        compiled = name.endswith("compiled")
        loop: Plain | Stock
        if name.startswith("plain"):
            loop = Plain(workload, steps, loss, compiled)
            choice = StockChoice()
        else:
            choice = StockChoice(**task.get("choice", {}))
            loop = Stock(workload, steps, loss, choice, compiled)
        if not compiled:
            return loop, 0.0
        if choice.channels_last:
            batch = (batch[0].to(memory_format=torch.channels_last), batch[1])

        def once(model: nn.Module, data: Batch) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=choice.bf16):
                return workload.loss(model, data)

        return loop, _compile(loop.model, once, loop.forward_model, batch)
    from .ours import Ours  # noqa: PLC0415  (the rivals' processes must not import oxytorch)

    level, _, suffix = name.partition(" ")
    planned = task["steps_planned"]
    return Ours(workload, steps, loss, level, compiled=suffix == "compiled", steps_planned=planned), 0.0


def _held_out_loss(workload: Workload, state: dict[str, Tensor]) -> float:
    """Mean loss over the held-out data in fp32, of a fresh model with the averaged weights."""
    model = workload.make_model()
    model.load_state_dict(state)
    model.eval()
    total = rows = 0.0
    with torch.no_grad():
        for batch in workload.held_out():
            total += workload.loss(model, batch).item() * len(batch[0])
            rows += len(batch[0])
    return total / rows


class Worker:
    """The process's state between commands."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        if task["contender"] == "plain + mallopt" or task.get("choice", {}).get("mallopt"):
            serve.keep_freed_memory()
        serve.prepare_torch(task["threads"])
        self.workload = workloads.load(task["workload"])
        self.batches = self.workload.make_batches(task["seed"], task["steps"])
        self.clock = PhaseClock()
        gc.collect()
        serve.reset_peak()
        self.resident_before = serve.status_kib("VmRSS")
        torch.manual_seed(task["seed"])
        self.contender, self.compile_seconds = _build(task, self.workload, self.clock, self.batches[0])
        self.done = 0

    def run(self, count: int) -> dict[str, Any]:
        seconds, inner, losses = [], [], []
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for batch in self.batches[self.done : self.done + count]:
            _fault(self.task, self.done)
            self.clock.inner = 0.0
            began = time.perf_counter()
            loss = self.contender.step(batch)
            seconds.append(time.perf_counter() - began)
            inner.append(self.clock.inner)
            losses.append(loss)
            self.done += 1
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        return {
            "seconds": seconds,
            "inner": inner if self.clock.saw_backward else [],
            "losses": [float(loss) for loss in losses],
            "page_faults": faults,
        }

    def finish(self) -> dict[str, Any]:
        peak = serve.status_kib("VmHWM") - self.resident_before
        serve.check_forbidden(self.task)
        return {
            "peak_bytes": peak * 1024,
            "held_out_loss": _held_out_loss(self.workload, self.contender.averaged()),
            "report": self.contender.report(),
        }


def main() -> None:
    """Serve until the coordinator says ``exit`` or closes the pipe."""
    task, answer = serve.begin()
    worker = Worker(task)
    answer({"ready": True, "pid": os.getpid(), "compile_seconds": worker.compile_seconds})
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "run":
            answer(worker.run(int(arguments[0])))
        elif command == "finish":
            answer(worker.finish())
        elif command == "exit":
            break
        else:
            raise ValueError(f"unknown command {line!r}")
    serve.leave()
