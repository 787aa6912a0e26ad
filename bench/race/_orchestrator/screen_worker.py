"""A process that times many combinations of switches in a row, for the screening; nothing here imports oxytorch.

Each command on standard input is a line of JSON: a combination, how many steps to time, and the seconds above which its
first step rules it out. The answer holds the seconds of each step, none where the combination was ruled out.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import torch
from oxytorch_turns import serve

from .models import MAKERS
from .switches import Switches, step

BATCHES = 4


def main() -> None:
    """Serve one allocator."""
    task, answer = serve.begin()
    allocator = Switches(**task["switches"])
    allocator.enter_process()
    serve.prepare_torch(task["threads"])
    workload = MAKERS[task["workload"]]()
    batches = workload.make_batches(task["seed"], BATCHES)
    answer({"ready": True})
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        switches = Switches(**command["switches"])
        switches.enter(task["threads"])
        torch.manual_seed(task["seed"])
        model = switches.place(workload.make_model())
        optimizer = switches.make_optimizer(model, workload.lr)
        seconds: list[float] = []
        for index in range(command["steps"] + 1):
            began = time.perf_counter()
            step(switches, model, optimizer, workload.loss, batches[index % BATCHES])
            took = time.perf_counter() - began
            if index:
                seconds.append(took)
            elif took > command["limit"]:  # Its first step prepares much, so the limit is wide.
                break
        answer({"seconds": seconds})
        del model, optimizer
        gc.collect()
    serve.check_forbidden(task)
    serve.leave()
