"""Races a decoder under memory budgets on a device against torch.utils.checkpoint of every layer.

A GPT of 1.3 billion parameters in bfloat16 (24 layers, width 2,048, 32,000 words; 4 sequences of 2,048 tokens), trained
by torch's fused AdamW. Contenders: every tensor kept; every layer under torch.utils.checkpoint (use_reentrant=False);
oxytorch.memory.fit with budgets that leave 70, 50 and 35 % of what activations take, and with the peak of the
checkpointed step as its budget. All have the same parameters and optimizer, and take turns in a random order each
round; a step is timed by the device's own events. Peaks are those of torch's allocator, by oxytorch.memory.Meter.

    python bench/race/cuda/budgets.py [--device cuda] [--seconds 60] [--quick] [--json PATH] [--out FOLDER]

`--device cpu --quick` runs the same code on a small model, to see that it works. Prints the figures and whether each
promise is met, and writes bench/report/budgets.{json,html}. The exit status is 0 whether or not promises are met, and 2
where there is no such device.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import oxytorch as ox
import torch
from _device_race import run
from _memory_models import Chain, Embedded, Layer, Task, next_tokens, words_of
from _race import LEAST_ROUNDS, MOST_ROUNDS, Figure, ratio
from device_tail import Clock, Times, exactly
from torch.utils.checkpoint import checkpoint

SCHEMA = "oxytorch-budgets/1"
PLAIN, LAYERS, AS_LAYERS = "kept", "every layer checkpointed", "fit, the peak of every layer checkpointed"
SHARES = (0.7, 0.5, 0.35)
"""Of what activations take."""
GIB = 2**30


def decoder(quick: bool) -> Task:
    """The model and its batches, on the default device."""
    layers, width, heads, words, batch, tokens = (4, 32, 4, 128, 2, 64) if quick else (24, 2048, 16, 32_000, 4, 2048)
    blocks = [Layer(width, heads, causal=True) for _ in range(layers)]
    net = Chain(Embedded(words, width, tokens), blocks, words_of(width, words))
    return Task(net, partial(next_tokens, words, batch, tokens))


class Step:
    """A training step of a model of its own with the parameters of `first`."""

    def __init__(self, task: Task, first: Step | None = None) -> None:
        self.task = task
        if first is None:
            parameters = list(task.net.parameters())
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=parameters[0].device.type != "hpu")
            self.batch = task.draw()
        else:
            task.net.load_state_dict(first.task.net.state_dict(keep_vars=True), assign=True)
            self.optimizer, self.batch = first.optimizer, first.batch
        self.device = next(task.net.parameters()).device

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.task.loss(self.batch).backward()
        self.optimizer.step()

    def peak(self) -> int:
        """Bytes that a step takes beyond what lives between steps."""
        self()
        with ox.memory.Meter(device=self.device) as meter:
            self()
        return meter.peak_bytes


def race(steps: dict[str, Step], clock: Clock, seconds: float) -> Times:
    """Seconds of a step by contender and round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = np.random.default_rng(5)
    for step in steps.values():
        step()
    spent = 0.0
    for index in range(MOST_ROUNDS):
        if index >= LEAST_ROUNDS and spent > seconds:
            break
        for name in order.permutation(list(steps)):
            took = clock.seconds(steps[name])
            times[name].append(took)
            spent += took
    return {name: np.array(values) for name, values in times.items()}


def measure(device: torch.device, quick: bool, seconds: float) -> tuple[list[Figure], Times]:
    """All figures."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if quick else torch.bfloat16)
    with torch.device(device):
        first = Step(decoder(quick))

    def another() -> Step:
        with torch.device("meta"):
            task = decoder(quick)
        return Step(task, first)

    peaks = {PLAIN: first.peak()}
    steps = {PLAIN: first, LAYERS: another()}
    steps[LAYERS].task.net.call = partial(checkpoint, use_reentrant=False)
    peaks[LAYERS] = steps[LAYERS].peak()
    probe = another()
    blocks = probe.task.net.blocks_by_name()
    with ox.memory.fit(probe.task.net, probe, 1 << 60, blocks=blocks) as loose:
        between = loose.plain_peak - peaks[PLAIN]
    budgets = {f"fit, {share:.0%} of activations": between + int(share * peaks[PLAIN]) for share in SHARES}
    budgets[AS_LAYERS] = between + peaks[LAYERS]
    figures, absent = [], {}
    for name, budget in budgets.items():
        step = another()
        try:
            plan = ox.memory.fit(step.task.net, step, budget, blocks=blocks)
        except torch.OutOfMemoryError as error:
            absent[name] = str(error)
            figures.append(Figure(f"{name}: peak over its budget", None, 1.0, at_most=True, absent=str(error)))
            continue
        steps[name], peaks[name] = step, step.peak()
        over = (peaks[name] + between) / budget
        figures.append(Figure(f"{name}: peak over its budget", exactly(over), 1.0, at_most=True))
        figures.append(Figure(f"{name}: layers run again", exactly(len(plan.recomputed))))
    times = race(steps, Clock(device), seconds)
    figures += [Figure(f"{name}: peak, GiB", exactly((peak + between) / GIB)) for name, peak in peaks.items()]
    figures += [Figure(f"{name}: step over kept", ratio(times, name, PLAIN)) for name in steps if name != PLAIN]
    faster = ratio(times, LAYERS, AS_LAYERS) if AS_LAYERS in times else None
    figures.append(
        Figure("every layer checkpointed, over fit at its peak", faster, 1.05, absent=absent.get(AS_LAYERS, ""))
    )
    return figures, times


if __name__ == "__main__":
    sys.exit(run(__doc__, "budgets", SCHEMA, measure, seconds=60.0))
