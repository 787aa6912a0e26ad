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
from oxytorch_demo import serve
from oxytorch_demo.workloads import Batch
from torch import Tensor

from .contenders import Contender, Prepared, make
from .models import MAKERS
from .switches import Switches

BATCHES = 16
LAST_LOSSES = 8


class DrivenTurns:
    """The batches again and again, as many as the driver's turns ask for; times each step from batch to batch."""

    def __init__(self, batches: list[Batch], answer: serve.Answer) -> None:
        self._batches, self._answer = batches, answer
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
            began = time.perf_counter()
            for _ in range(int(arguments[0])):
                yield next(batches)
                now = time.perf_counter()
                seconds.append(now - began)
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
    workload = MAKERS[task["workload"]]()
    batches = workload.make_batches(task["seed"], BATCHES)
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
    turns = DrivenTurns(batches, answer)
    contender.train(turns)
    peak = serve.status_kib("VmHWM") - resident
    serve.check_forbidden(task)
    last = torch.stack([loss.float() for loss in turns.losses[-LAST_LOSSES:]])
    answer({"held_out_loss": float(last.mean()), "peak_bytes": peak * 1024, "report": None})
    serve.leave()
