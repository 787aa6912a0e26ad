"""One contender of the race in a process of its own: ready, prepare, turns, finish."""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from oxytorch_demo.workloads import Batch
from oxytorch_turns import serve
from torch import Tensor

from .contenders import Contender, Prepared, make
from .models import make_workload
from .switches import Switches

BATCHES = {"cpu": 16, "cuda": 8}
LAST_LOSSES = 8


class DrivenTurns:
    """The batches again and again, as many as the driver's turns ask for; times each step from batch to batch.

    A card runs behind the host, so there a turn is timed from idle to idle: its first step, then the others' mean.
    """

    def __init__(self, batches: list[Batch], answer: serve.Answer, device: str) -> None:
        self._batches, self._answer, self._on_card = batches, answer, device == "cuda"
        self.losses: list[Tensor] = []

    def __len__(self) -> int:
        return 1 << 40  # Lightning fetches ahead where it does not know.

    def __iter__(self) -> Iterator[Batch]:
        batches = itertools.cycle(self._batches)
        for line in sys.stdin:
            command, *arguments = line.split()
            if command != "run":
                return
            seconds: list[float] = []
            first_loss, faults = len(self.losses), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            count = int(arguments[0])
            began = self._now()
            for index in range(count):
                yield next(batches)
                if self._on_card and 0 < index < count - 1:
                    continue
                now = self._now()
                steps = count - 1 if self._on_card and index else 1
                seconds += [(now - began) / steps] * steps
                began = now
            self._answer(
                {
                    "seconds": seconds,
                    "inner": [],
                    "losses": [float(loss) for loss in self.losses[first_loss:]],
                    "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
                }
            )
        raise SystemExit("the coordinator is gone")

    def _now(self) -> float:
        """The time when the device has done what it was given."""
        if self._on_card:
            torch.cuda.synchronize()
        return time.perf_counter()


def compiler_cache(task: dict[str, Any]) -> Path:
    """Give the compiler the cache of this contender, so that nobody finds what another compiled."""
    folder = Path(task["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return folder


def prepared(contender: Contender, given: Prepared) -> dict[str, Any]:
    """What preparing took now, and what it took when the cache was empty."""
    said = contender.prepare(given)
    cold = given.folder / "cold.json"
    if not cold.exists():
        cold.write_text(json.dumps(said), encoding="utf-8")
    return {**said, "cold": json.loads(cold.read_text(encoding="utf-8"))}


def main() -> None:
    """Serve one start."""
    task, answer = serve.begin()
    sys.path.append(task["peers"])  # Last: what the environment has comes first.
    switches = Switches(**task["switches"])
    switches.enter_process()
    switches.enter(task["threads"])
    serve.prepare_torch(switches.threads or task["threads"])
    on_card = switches.device == "cuda"
    workload = make_workload(task["workload"], switches.device)
    batches = workload.make_batches(task["seed"], BATCHES[switches.device])
    # All have their batches on the card: how they get there is not raced.
    batches = [(inputs.to(switches.device), targets.to(switches.device)) for inputs, targets in batches]
    gc.collect()
    serve.reset_peak()
    resident = serve.status_kib("VmRSS")
    torch.manual_seed(task["seed"])
    model = switches.place(workload.make_model())
    optimizer = switches.make_optimizer(model, workload.lr)
    given = Prepared(compiler_cache(task), switches, workload, model, optimizer, batches)
    contender = make(task["contender"])
    answer({"ready": True})
    if sys.stdin.readline().strip() != "prepare":
        raise SystemExit("the coordinator is gone")
    answer(prepared(contender, given))
    turns = DrivenTurns(batches, answer, switches.device)
    contender.train(turns)
    peak = torch.cuda.max_memory_reserved() if on_card else (serve.status_kib("VmHWM") - resident) * 1024
    serve.check_forbidden(task)
    last = torch.stack([loss.float() for loss in turns.losses[-LAST_LOSSES:]])
    answer({"held_out_loss": float(last.mean()), "peak_bytes": peak, "report": None})
    serve.leave()
