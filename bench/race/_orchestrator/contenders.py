"""The contenders: each makes what it needs of the user's model, and trains with the loop that its users write.

Nothing here imports oxytorch outside `Ours`, `HostPool` and `Exhaustive`. A loop takes batches from an iterable that
hands them out, times what happens between two, and keeps the losses, so a trainer that owns its loop is timed like the
others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from oxytorch_demo.workloads import Batch
from torch import Tensor, nn

from .models import Workload
from .switches import Switches, step

STEPS_PLANNED = {"cpu": 10_000, "cuda": 100_000}
"""Of a training of half an hour to an hour: steps of 0.1 to 0.5 s on two cores, of 15 to 30 ms on a card."""
SEARCH_WORTH = 1.015  # a gain below it is not waited for, as in the trials of `accelerate`


class Turns(Protocol):
    """Batches, without end, and the losses that a loop found."""

    losses: list[Tensor]

    def __iter__(self) -> Iterator[Batch]: ...
    def __len__(self) -> int: ...


@dataclass
class Prepared:
    """The user's part: model, optimizer, data; the same first weights for every contender.

    `folder` is the contender's own, kept from start to start.
    """

    folder: Path
    switches: Switches
    workload: Workload
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Batch]


class Contender(Protocol):
    """One way to train."""

    def prepare(self, given: Prepared) -> dict[str, Any]:
        """Compile, tune and so on, leaving weights and random state as they were; what it took, for the report."""
        ...

    def train(self, turns: Turns) -> None:
        """Train until there are no more batches."""
        ...


@contextlib.contextmanager
def restored(given: Prepared, keep_state: bool = False) -> Iterator[None]:
    """Weights, buffers, gradients, torch's random state as they were before; the optimizer as if never stepped.

    With `keep_state` gradients and the optimizer's state are left, for who holds on to the tensors themselves.
    """
    state = {name: tensor.clone() for name, tensor in given.model.state_dict().items()}
    random = torch.get_rng_state()
    on_card = torch.cuda.get_rng_state() if given.switches.device == "cuda" else None
    yield
    given.model.load_state_dict(state)
    torch.set_rng_state(random)
    if on_card is not None:
        torch.cuda.set_rng_state(on_card)
    if not keep_state:
        given.optimizer.zero_grad(set_to_none=True)
        given.optimizer.state.clear()


@dataclass
class Stock:
    """Eager or compiled PyTorch with its switches."""

    given: Prepared = field(init=False, repr=False)
    forward: nn.Module = field(init=False, repr=False)

    def prepare(self, given: Prepared) -> dict[str, Any]:
        self.given, self.forward = given, given.switches.compiled(given.model)
        return self.compile_now(lambda batch: self.loss(batch).backward())

    def compile_now(self, train: Callable[[Batch], object]) -> dict[str, Any]:
        """Compile by one forward and backward whose traces are removed; seconds it took."""
        if not self.given.switches.compile:
            return {}
        began = time.perf_counter()
        with restored(self.given):
            train(self.given.batches[0])
            seconds = time.perf_counter() - began
        return {"compile_seconds": seconds}

    def loss(self, batch: Batch) -> Tensor:
        with self.given.switches.autocast():
            return self.given.workload.loss(self.forward, self.given.switches.place_batch(batch))

    def train(self, turns: Turns) -> None:
        given = self.given
        for batch in turns:
            turns.losses.append(step(given.switches, self.forward, given.optimizer, given.workload.loss, batch))


@dataclass
class Graphed(Stock):
    """Forward, backward and optimizer step captured once in a CUDA graph, as PyTorch's notes on CUDA graphs have it."""

    WARM_UP = 3

    def prepare(self, given: Prepared) -> dict[str, Any]:
        compiled = super().prepare(given)
        began = time.perf_counter()
        inputs, targets = given.switches.place_batch(given.batches[0])
        self.inputs: Batch = (inputs.clone(), targets.clone())
        with restored(given, keep_state=True):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(self.WARM_UP):
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
            # The graph's backward makes the gradients anew, in the graph's own memory.
            given.optimizer.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.found = self.step(zero=False)
        for state in given.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        torch.cuda.synchronize()
        return {"compile_seconds": time.perf_counter() - began + compiled.get("compile_seconds", 0.0)}

    def step(self, zero: bool = True) -> Tensor:
        if zero:
            self.given.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        self.given.optimizer.step()
        return loss.detach()

    def train(self, turns: Turns) -> None:
        for batch in turns:
            for own, given in zip(self.inputs, batch, strict=True):
                own.copy_(given)
            self.graph.replay()
            turns.losses.append(self.found.clone())


@dataclass
class Lightning(Stock):
    """`lightning.Trainer` with what slows it down switched off: logger, checkpoints, progress bar."""

    def prepare(self, given: Prepared) -> dict[str, Any]:
        import lightning  # noqa: F401, PLC0415  (its import is not training)

        return super().prepare(given)

    def train(self, turns: Turns) -> None:
        from lightning import LightningModule, Trainer  # noqa: PLC0415

        given, forward = self.given, self.forward

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = given.model

            def training_step(self, batch: Batch, _index: int) -> Tensor:
                loss = given.workload.loss(forward, given.switches.place_batch(batch))
                turns.losses.append(loss.detach())
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return given.optimizer

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=1, precision="bf16-mixed" if given.switches.precision == "bf16" else "32-true",
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), train_dataloaders=turns)


@dataclass
class Accelerate(Stock):
    """Hugging Face's `Accelerator`."""

    def prepare(self, given: Prepared) -> dict[str, Any]:
        from accelerate import Accelerator  # noqa: PLC0415
        from accelerate.utils import TorchDynamoPlugin  # noqa: PLC0415

        self.given, switches = given, given.switches
        self.accelerator = Accelerator(
            cpu=True, mixed_precision="bf16" if switches.precision == "bf16" else "no",
            dynamo_plugin=TorchDynamoPlugin(backend="inductor", mode=switches.compile) if switches.compile else None,
        )  # fmt: skip
        self.forward, self.optimizer = self.accelerator.prepare(given.model, given.optimizer)
        return self.compile_now(lambda batch: self.accelerator.backward(self.loss(batch)))

    def loss(self, batch: Batch) -> Tensor:
        return self.given.workload.loss(self.forward, self.given.switches.place_batch(batch))

    def train(self, turns: Turns) -> None:
        for batch in turns:
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            self.accelerator.backward(loss)
            self.optimizer.step()
            turns.losses.append(loss.detach())


@dataclass
class Ours(Stock):
    """`oxytorch.accelerate`, and the plain loop goes on with the same model and optimizer."""

    level: str = "basic"
    loop: str = "yours"

    def prepare(self, given: Prepared) -> dict[str, Any]:
        import oxytorch  # noqa: PLC0415  (the rivals' processes must not)

        super().prepare(given)
        began = time.perf_counter()
        self.plan = oxytorch.accelerate(
            given.model, given.optimizer, given.workload.loss, given.batches, level=self.level,
            steps_planned=STEPS_PLANNED[given.switches.device], remember=str(given.folder), loop=self.loop,
        )  # fmt: skip
        return {
            "tuning_seconds": time.perf_counter() - began,
            "compile_seconds": self.plan.certificate.compile_seconds,
            "accepted": list(self.plan.accepted),
            "rejected": self.plan.rejected,
        }


@dataclass
class Planned(Ours):
    """The same, and the loop takes its steps by `plan.step`, which lets a step be captured whole."""

    level: str = "advanced"
    loop: str = "plan"

    def train(self, turns: Turns) -> None:
        for batch in turns:
            turns.losses.append(self.plan.step(batch).detach())


@dataclass
class HostPool(Stock):
    """The plain loop on `oxytorch.memory.use_host_pool`."""

    def prepare(self, given: Prepared) -> dict[str, Any]:
        from oxytorch import memory  # noqa: PLC0415

        setting = memory.use_host_pool()
        if not setting.is_applied:
            raise RuntimeError(f"the pool is not in: {setting.reason}")
        return super().prepare(given)


@dataclass
class Exhaustive(Stock):
    """The fastest of all combinations of the strategies that `oxytorch.accelerate` tries.

    Each meets the best so far in the paired test by which `accelerate` decides, so both are as sure; nothing is
    verified. Compiling is left out: each combination would be compiled anew. So are the numbers of threads.
    """

    kinds: tuple[str, ...] = ("exact", "tolerance", "precision")
    left_out: tuple[str, ...] = ("compile", "threads")

    def prepare(self, given: Prepared) -> dict[str, Any]:
        from oxytorch import tune  # noqa: PLC0415

        super().prepare(given)
        self.run = tune.Run(given.model, given.optimizer, given.workload.loss, given.batches)
        found = given.folder / "search.json"
        if not found.exists():
            with restored(given):
                found.write_text(json.dumps(self.search()), encoding="utf-8")
        said: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
        self.run.set_active(said["accepted"])
        return said

    def search(self) -> dict[str, Any]:
        """All combinations, one after the other."""
        from oxytorch._C.tune import PairedTestOptions, SideFailed, Timing  # noqa: PLC0415
        from oxytorch.model.snapshot import Snapshot  # noqa: PLC0415
        from oxytorch.tune.workload import RunWorkload  # noqa: PLC0415

        began = time.perf_counter()
        best: tuple[str, ...] = ()
        tried = 0
        with Snapshot.of(self.run.model, self.run.original) as snapshot:
            workload = RunWorkload(self.run, snapshot)
            timing = Timing(workload)
            timing.baseline()
            for names in filter(None, self.combinations()):
                with contextlib.suppress(SideFailed):  # One that cannot be made active is none.
                    result, _ = timing.compare(best, names, PairedTestOptions(worth=SEARCH_WORTH, seed=tried))
                    best = names if result.decision == "accept" else best
                    tried += 1
            timing.recover()
        return {"search_seconds": time.perf_counter() - began, "tried": tried, "accepted": list(best)}

    def applies(self, name: str) -> bool:
        """Whether it may make a step faster and applies to the run, where what it requires is active."""
        facts = self.run.strategies[name]
        if facts.max_speedup == 1 or not all(self.applies(required) for required in facts.requires):
            return False
        self.run.set_active(facts.requires)
        found = self.run.strategy(name).applies(self.run) is True
        self.run.set_active(())
        return found

    def combinations(self) -> Iterator[tuple[str, ...]]:
        """At most one strategy of a group, and each only beside what it requires."""
        groups: dict[str, list[str]] = {}
        for name, each in self.run.strategies.items():
            allowed = each.kind in self.kinds and each.group not in self.left_out and not each.needs_loop
            if allowed and self.applies(name):
                groups.setdefault(each.group or name, []).append(name)
        for chosen in itertools.product(*(["", *names] for names in groups.values())):
            names = tuple(filter(None, chosen))
            if all(set(self.run.strategies[name].requires) <= set(names) for name in names):
                yield names


KINDS: dict[str, Callable[[], Contender]] = {
    "stock graph": Graphed,
    "stock compiled graph": Graphed,
    "lightning": Lightning,
    "accelerate": Accelerate,
    "oxytorch basic": lambda: Ours(level="basic"),
    "oxytorch advanced": lambda: Ours(level="advanced"),
    "oxytorch plan.step": Planned,
    "exhaustive": Exhaustive,
    "host pool": HostPool,
}


def make(contender: str) -> Contender:
    """The contender of that name; those without a kind of their own are stock PyTorch with switches."""
    return KINDS.get(contender.partition(" + ")[0], Stock)()
