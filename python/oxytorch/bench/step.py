"""A user's training step in a process of its own, driven over pipes as the demo's contenders are."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..model.loss import outputs_and_loss
from .turns import serve

__all__ = ["CALIBRATION", "load", "made_by", "main", "step_of", "training_step"]

CALIBRATION = "calibration"
Step = Callable[[], Any]


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    sys.path.insert(0, str(path.parent))  # as for a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no script {place}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[..., Any]
) -> Callable[[Any], Tensor]:
    """Return the step that everyone writes, of a batch."""

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        _, loss = outputs_and_loss(model, batch, loss_fn)
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


def _training(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[..., Any], batches: Iterable[Any]
) -> Step:
    """That step, over the batches again and again."""

    def endless() -> Iterable[Any]:
        while True:
            yield from batches

    source, step = iter(endless()), training_step(model, optimizer, loss_fn)
    return lambda: step(next(source))


def made_by(subject: str) -> Any:
    """Call the function that ``subject`` names, and return what it returns."""
    place, _, name = subject.rpartition(":")
    if not place:
        raise ValueError(f"{subject!r} names no function. Give SCRIPT_OR_MODULE:FUNCTION, such as train.py:make")
    return getattr(_module(place), name)()


def step_of(subject: str, made: Any) -> Step:
    """Return the step that is meant by what a subject's function returned.

    Raises
    ------
    TypeError
        Where that is neither a callable nor ``(model, step)`` nor ``(model, optimizer, loss_fn, batches)``.
    """
    if isinstance(made, tuple) and len(made) == 4:
        return _training(*made)
    if isinstance(made, tuple) and len(made) == 2 and callable(made[1]):
        return made[1]  # type: ignore[no-any-return]
    if callable(made):
        return made  # type: ignore[no-any-return]
    raise TypeError(
        f"{subject} returned a {type(made).__name__}; a step to call, (model, step) or (model, optimizer, loss_fn, "
        "batches) is needed"
    )


def load(subject: str) -> Step:
    """Return the step of the function that ``subject`` names."""
    return step_of(subject, made_by(subject))


def calibration() -> Step:
    """What tells how fast the machine is at the moment: products, memory and many small operators, as training has."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(768, 768, generator=generator).mul_(0.03).requires_grad_() for _ in range(3)]
    rows, large = torch.randn(128, 768, generator=generator), torch.zeros(2 << 20)

    def step() -> None:
        x = rows
        for weight in weights:
            x = torch.relu(x @ weight) + x
        x.square().mean().backward()  # type: ignore[no-untyped-call]
        for weight in weights:
            weight.grad = None
        large.add_(1.0)

    return step


def _wait_for(result: Any) -> None:
    if isinstance(result, Tensor) and result.device.type != "cpu":
        torch.accelerator.synchronize()


def _run(step: Step, count: int) -> dict[str, Any]:
    seconds: list[float] = []
    results: list[Any] = []
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        began = time.perf_counter()
        result = step()
        _wait_for(result)
        seconds.append(time.perf_counter() - began)
        results.append(result.detach() if isinstance(result, Tensor) else result)
    return {
        "seconds": seconds,
        "inner": [],
        "losses": [None if result is None else float(result) for result in results],
        "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
    }


def _seed_everything() -> None:
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def main() -> None:
    """Serve one start."""
    task, answer = serve.begin()
    torch.set_num_threads(task["threads"])
    if os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    _seed_everything()
    calibrating = task["subject"] == CALIBRATION
    step = calibration() if calibrating else load(task["subject"])
    _seed_everything()
    answer({"ready": True})
    for line in itertools.takewhile(lambda line: line != "finish\n", sys.stdin):
        answer(_run(step, task["units"] if calibrating else int(line.split()[1])))
    answer({"held_out_loss": None, "peak_bytes": serve.status_kib("VmHWM") * 1024, "report": None})
    serve.leave()


if __name__ == "__main__":
    main()
