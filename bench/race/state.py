"""Races ways to hold an optimizer's state and gradients in less memory: a decoder of 46 million parameters under AdamW.

`plain` is torch's loop over parameters, `fused` its fused step. Torch's own way to have no gradients is a hook on each
parameter that steps an optimizer of its own, here a fused one (`fused in hooks`). The others are strategies of
oxytorch.accelerate with the goal memory: `step_tail`, `int8_state`, `state_in_file`, in /var/tmp where that can be, and
each with `update_in_backward`.

Every contender has a model of its own with the same weights, takes its turns in a random order each round, and has the
same number of threads. What is resident is measured in a process for each contender: the most in its third step, less
what the process held before the model was there; the allocator is glibc's as it comes, and gives free memory back
before that step.

    python bench/race/state.py [--threads 2] [--starts 4] [--seconds 3] [--quick] [--case NAME]... [--keep PATH]
        [--json PATH]

Ratios are paired by round, a start counts by its median, and intervals hold 95%. Prints the ratios, and writes
bench/report/state.{json,html}.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from _memory_models import Chain, Embedded, Layer, next_tokens, words_of
from _race import (
    MOST_ROUNDS,
    Contender,
    Measured,
    add_options,
    all_starts,
    facts,
    is_wanted,
    most_resident,
    new_report,
    over_starts,
    progress,
    race,
    ratio,
    resident,
    text,
    write,
)
from oxytorch.tune import Run
from torch import Tensor, nn
from torch.nn import functional as F

SCHEMA = "oxytorch-state/1"
PLAIN, FUSED, HOOKS = "plain", "fused", "fused in hooks"
OURS = {
    "step_tail": ["step_tail"],
    "int8_state": ["int8_state"],
    "state_in_file": ["state_in_file"],
    "step_tail, in backward": ["step_tail", "update_in_backward"],
    "int8_state, in backward": ["int8_state", "update_in_backward"],
    "state_in_file, in backward": ["state_in_file", "update_in_backward"],
}
CONTENDERS = (PLAIN, FUSED, HOOKS, *OURS)
QUICK = (PLAIN, FUSED, HOOKS, "int8_state, in backward", "state_in_file, in backward")
CASES = {"decoder, 46 M": (12, 512, 8192), "decoder, 0.4 M": (2, 96, 512)}
TOKENS = 128


class Step:
    """A training step of one contender, with a model of its own."""

    def __init__(self, case: str, contender: str) -> None:
        layers, width, words = CASES[case]
        torch.manual_seed(0)
        blocks: list[nn.Module] = [Layer(width, 8, causal=True) for _ in range(layers)]
        self.net = Chain(Embedded(words, width, TOKENS), blocks, words_of(width, words))
        (self.inputs,), self.right = next_tokens(words, 2, TOKENS)
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=contender == FUSED or None)
        self.take = self.in_hooks() if contender == HOOKS else self.of(optimizer, OURS.get(contender, []))

    def loss(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    def of(self, optimizer: torch.optim.Optimizer, names: list[str]) -> Callable[[], object]:
        batch = (self.inputs, self.right)
        run = Run(self.net, optimizer, self.loss, [batch], owns_loop=True)
        run.step(batch)
        run.set_active(names)
        run.settle()
        return lambda: run.step(batch)

    def in_hooks(self) -> Callable[[], object]:
        """As torch's tutorial on optimizer steps in backward has it."""
        own = {p: torch.optim.AdamW([p], lr=1e-4, fused=True) for p in self.net.parameters()}

        def arrived(param: Tensor) -> None:
            own[param].step()
            own[param].zero_grad()

        for param in own:
            param.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        return lambda: self.loss(self.net, (self.inputs, self.right)).backward()  # type: ignore[no-untyped-call]


def peak_of(case: str, contender: str) -> int:
    """In this process, of which nothing else is asked: what a step takes at the most, beyond what was there."""
    Step("decoder, 0.4 M", contender).take()  # loads libraries
    before = resident()
    step = Step(case, contender)
    for _ in range(2):
        step.take()
    return most_resident(step.take) - before


def peak_elsewhere(case: str, contender: str, threads: int) -> int:
    command = [sys.executable, __file__, "--threads", str(threads), "--peak", case, contender]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(arguments: argparse.Namespace) -> Measured:
    """One start: every case that was asked for, in this process."""
    torch.set_num_threads(arguments.threads)
    seconds, rounds = (0.2, 5) if arguments.quick else (arguments.seconds, MOST_ROUNDS)
    contenders = QUICK if arguments.quick else CONTENDERS
    found = Measured()
    for case in CASES:
        if not is_wanted(arguments, case) or (arguments.quick and case != "decoder, 0.4 M"):
            continue
        for name in contenders:
            progress(f"memory of {case}, {name} ...")
            found.layout.append((f"{case}: {name}", peak_elsewhere(case, name, arguments.threads), None))
        progress(f"racing {case} ...")
        steps = [Contender(name, {"step": Step(case, name).take}) for name in contenders]
        found.cases[case] = race(steps, seconds, rounds)
    return found


def tables(found: Measured) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Headings and rows of what was measured, by kind."""
    peaks = {what: int(bytes_) for what, bytes_, _ in found.layout}
    rows = []
    for case, times in found.cases.items():
        for name in (name for name in CONTENDERS if name in times):
            peak, plain = peaks[f"{case}: {name}"], peaks[f"{case}: {PLAIN}"]
            of_fused = text(ratio(times, name, FUSED))
            memory = [f"{peak / 2**20:.0f} MiB", f"{100 * peak / plain:.0f} %"]
            rows.append([case, name, *memory, text(over_starts(times[name]), 1e3), of_fused])
    return {"state": (["model", "step", "resident", "of plain", "ms", "times as long as fused"], rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--peak", nargs=2, metavar=("CASE", "CONTENDER"), help="the bytes of one contender alone")
    arguments = parser.parse_args()
    if arguments.peak:
        torch.set_num_threads(arguments.threads)
        print(peak_of(*arguments.peak))
        return 0
    machine_facts = facts(arguments.threads)
    found = all_starts(arguments, machine_facts, SCHEMA, measure)
    report = new_report("Race: optimizer state", __doc__, machine_facts)
    for kind, (headings, rows) in tables(found).items():
        for row in (headings, *rows):
            print("  ".join(f"{cell:<26}" for cell in row).rstrip())
        report.table(headings, rows, kind.capitalize())
    print("Measured on: " + ", ".join(f"{key} {value}" for key, value in machine_facts.items() if value))
    document: dict[str, Any] = {"schema": SCHEMA, "machine": machine_facts, **found.to_json()}
    write(report, document, arguments.out, "state", arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
