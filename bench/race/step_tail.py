"""Races the step tail (clip, AdamW, moving average) of Oxytorch against PyTorch's, from Python and from C++.

Every contender works on its own tensors of the same sizes and contents. All run in one process, in turn and in a random
order each round, with the same number of threads. Ratios are paired by round; figures are medians with 95% bootstrap
intervals. The C++ contenders run the same way in a program of their own (bench/race/step_tail.cpp).

    python bench/race/step_tail.py [--threads 2] [--seconds 8] [--quick] [--no-cpp]

Prints the ratios and whether each bar is met, and writes bench/report/step_tail.{json,html}. The exit status is 0
whether or not bars are met: a busy machine must not fail a build.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import oxytorch.optim
import torch
from oxytorch.demo import machine
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
LR, WEIGHT_DECAY, MAX_NORM, EMA_DECAY = 1e-4, 0.01, 1.0, 0.999
TAIL_BYTES, TORCH_STEP_BYTES = 40, 28
FUSED, EXPERT, ALONE, OURS = "torch fused", "torch fused, grad_scale by hand", "torch fused, step alone", "oxytorch"


def small_sizes() -> list[int]:
    """A thousand small tensors, as a model full of norms and biases has."""
    return [int(size) for size in np.random.default_rng(7).integers(1, 513, 1000)]


CASES: dict[str, list[int]] = {
    "16 x 4M": [4 << 20] * 16,
    "200 x 1,000": [1000] * 200,
    "200 x 64": [64] * 200,
    "1,000 x up to 512": small_sizes(),
}
SCALED = ("16 x 4M", "200 x 1,000")
"""Cases that run under a GradScaler too."""


@dataclass
class Contender:
    """A step of one contender, and what it took in each round."""

    name: str
    step: Callable[[], object]
    params: list[Tensor]
    seconds: list[float] = field(default_factory=list)
    repeats: int = 1


def make_params(sizes: list[int]) -> list[Tensor]:
    """Parameters with gradients, the same for every contender."""
    generator = torch.Generator().manual_seed(1)
    params = []
    for size in sizes:
        param = (torch.randn(size, generator=generator) * 0.02).requires_grad_()
        param.grad = torch.randn(size, generator=generator) * 0.01
        params.append(param)
    return params


def torch_contender(name: str, sizes: list[int], scaled: bool, **how: bool) -> Contender:
    """`torch.optim.AdamW` with `clip_grad_norm_` and `torch._foreach_lerp_`."""
    params = make_params(sizes)
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, **how)
    ema = [param.detach().clone() for param in params]

    def average() -> None:
        with torch.no_grad():
            torch._foreach_lerp_(ema, params, 1.0 - EMA_DECAY)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
        optimizer.step()
        average()

    scaler = make_scaler(torch.amp.GradScaler)

    def scaled_step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        average()

    return Contender(name, scaled_step if scaled else step, params)


def expert_contender(sizes: list[int]) -> Contender:
    """What an expert does: hand the clip coefficient to the fused kernel as its `grad_scale`, saving a pass."""
    params = make_params(sizes)
    optimizer: Any = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    ema = [param.detach().clone() for param in params]
    grads = [param.grad for param in params if param.grad is not None]
    optimizer.found_inf = torch.zeros(())

    def step() -> None:
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        optimizer.grad_scale = ((norm + 1e-6) / MAX_NORM).clamp(min=1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(ema, params, 1.0 - EMA_DECAY)

    return Contender(EXPERT, step, params)


def alone_contender(sizes: list[int]) -> Contender:
    """torch's fused AdamW kernel by itself: the yardstick of the byte rate."""
    params = make_params(sizes)
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    return Contender(ALONE, optimizer.step, params)


def our_contender(sizes: list[int], scaled: bool) -> Contender:
    """`oxytorch.optim.AdamW`, whose step is the whole tail."""
    params = make_params(sizes)
    optimizer = oxytorch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, clip_norm=MAX_NORM, ema_decay=EMA_DECAY)
    if not scaled:
        return Contender(OURS, optimizer.step, params)
    scaler = make_scaler(oxytorch.amp.GradScaler)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return Contender(OURS, step, params)


def make_scaler(kind: Any) -> Any:
    """A scaler with scale 1 that never grows: same bytes and arithmetic, and the gradients stay what they are."""
    scaler = kind("cpu", init_scale=1.0, growth_interval=1 << 30)
    scaler.scale(torch.ones(()))  # Makes the scale's tensor.
    return scaler


def make_contenders(sizes: list[int], scaled: bool, large: bool) -> list[Contender]:
    """Every contender of one case."""
    result = [torch_contender(FUSED, sizes, scaled, fused=True)]
    if not scaled:
        result.append(expert_contender(sizes))
        result.append(torch_contender("torch foreach", sizes, scaled, foreach=True))
        result.append(torch_contender("torch for-loop", sizes, scaled, foreach=False, fused=False))
        if large:
            result.append(alone_contender(sizes))
    result.append(our_contender(sizes, scaled))
    return result


def timed(contender: Contender, repeats: int) -> float:
    """Seconds per step over `repeats` steps."""
    began = time.perf_counter()
    for _ in range(repeats):
        contender.step()
    return (time.perf_counter() - began) / repeats


def race(contenders: list[Contender], seconds: float, most_rounds: int) -> None:
    """Rounds in which every contender steps once (short steps: a group of about a millisecond), order shuffled."""
    for contender in contenders:
        for _ in range(3):
            contender.step()
        contender.repeats = max(1, min(100, int(1e-3 / timed(contender, 1))))
    order = random.Random(11)
    began = time.perf_counter()
    for index in range(most_rounds):
        if index >= 7 and time.perf_counter() - began > seconds:
            break
        for contender in order.sample(contenders, len(contenders)):
            if contender.repeats > 1:
                contender.step()  # Warm caches, as the small cases state.
            contender.seconds.append(timed(contender, contender.repeats))


@dataclass(frozen=True)
class Interval:
    """An estimate with a 95% interval."""

    low: float
    mid: float
    high: float

    def text(self, scale: float = 1.0) -> str:
        """Three significant digits each, whole numbers from a thousand on."""
        low, mid, high = (
            f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
            for value in (self.low * scale, self.mid * scale, self.high * scale)
        )
        return f"{mid} [{low}, {high}]"


def interval(values: np.ndarray) -> Interval:
    """Median with its bootstrap interval over rounds."""
    rng = np.random.default_rng(0)
    medians = np.median(values[rng.integers(len(values), size=(2000, len(values)))], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return Interval(float(low), float(np.median(values)), float(high))


@dataclass(frozen=True)
class Bar:
    """A promise and what was measured."""

    what: str
    at_least: float
    got: Interval

    @property
    def met(self) -> bool:
        """Judged by the estimate; the interval shows how sure it is."""
        return self.got.mid >= self.at_least


Times = dict[str, np.ndarray]


def ratio(times: Times, slower: str, faster: str = OURS) -> Interval:
    """How many times as long `slower` takes, paired by round."""
    return interval(times[slower] / times[faster])


def bars(python: dict[str, Times], cpp: dict[str, Times]) -> list[Bar]:
    """Each bar that this run could judge."""
    result = []
    if (times := python.get("16 x 4M")) is not None:
        result.append(Bar("16 x 4M, over torch fused + clip + foreach average", 1.4, ratio(times, FUSED)))
        rate = interval(TAIL_BYTES / TORCH_STEP_BYTES * times[ALONE] / times[OURS])
        result.append(Bar("16 x 4M, byte rate over that of torch's fused AdamW", 0.85, rate))
    if (times := python.get("200 x 1,000")) is not None:
        result.append(Bar("200 x 1,000, over torch fused + clip + foreach average", 10.0, ratio(times, FUSED)))
    for case, least in (("200 x 1,000", 20.0), ("16 x 4M", 7.0)):
        if case in cpp:
            result.append(Bar(f"{case}, C++: over torch::optim", least, ratio(cpp[case], "torch::optim")))
    return result


def run_cpp(program: Path, threads: int, seconds: float, cases: list[str]) -> dict[str, Times]:
    """The C++ half."""
    command = [str(program), "--threads", str(threads), "--seconds", str(seconds)]
    for case in cases:
        command += ["--case", case]
    libraries = os.pathsep.join(
        filter(None, [str(Path(torch.__file__).parent / "lib"), os.environ.get("LD_LIBRARY_PATH")])
    )
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "LD_LIBRARY_PATH": libraries}, timeout=600
    )
    if done.returncode != 0:
        raise SystemExit(f"{program} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    return {case: {name: np.array(values) for name, values in times.items()} for case, times in answer["cases"].items()}


def rows_of(case: str, times: Times) -> list[list[str]]:
    """Table rows: contender, microseconds, times ours."""
    result = []
    for name, values in times.items():
        against = "" if name in (OURS, ALONE) else ratio(times, name).text()
        result.append([case, name, interval(values).text(1e6), against])
    return result


def show(python: dict[str, Times], cpp: dict[str, Times], judged: list[Bar], facts: dict[str, str]) -> None:
    """Print everything."""
    print("Step tail: clip by global norm, AdamW, moving average; fp32")
    print(f"{'case':<26}{'contender':<36}{'us a step':<32}times oxytorch's")
    for label, cases in (("", python), ("C++ ", cpp)):
        for case, times in cases.items():
            for row in rows_of(label + case, times):
                print(f"{row[0]:<26}{row[1]:<36}{row[2]:<32}{row[3]}")
    print()
    for bar in judged:
        print(f"{'met    ' if bar.met else 'NOT MET'}  {bar.what}: {bar.got.text()}, bar {bar.at_least:g}")
    print("\nMeasured on: " + ", ".join(f"{key} {value}" for key, value in facts.items() if value))
    print("Small cases run with warm caches. The large case holds 1.25 GiB a contender, far more than any cache.")


def write_report(
    folder: Path, python: dict[str, Times], cpp: dict[str, Times], judged: list[Bar], facts: dict[str, str]
) -> None:
    """`step_tail.json` and `step_tail.html`."""
    from oxytorch.monitor import Bar as ReportBar  # noqa: PLC0415
    from oxytorch.monitor import Column, Report  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "schema": "oxytorch-race/1",
        "machine": facts,
        "python": {case: {name: list(values) for name, values in times.items()} for case, times in python.items()},
        "cpp": {case: {name: list(values) for name, values in times.items()} for case, times in cpp.items()},
        "bars": [
            {
                "what": bar.what,
                "at_least": bar.at_least,
                "got": [bar.got.low, bar.got.mid, bar.got.high],
                "met": bar.met,
            }
            for bar in judged
        ],
    }
    (folder / "step_tail.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    report = Report("Race: the step tail")
    for key, value in facts.items():
        report.metadata(key, value)
    for paragraph in (__doc__ or "").split("\n\n")[:2]:
        report.paragraph(" ".join(paragraph.split()))
    rows = [[bar.what, f"{bar.at_least:g}", bar.got.text(), "yes" if bar.met else "NO"] for bar in judged]
    right = "right"
    report.table(["what", Column("bar", right), Column("measured", right), "met"], rows, "Bars")
    for label, cases in (("from Python", python), ("from C++", cpp)):
        rows = [row for case, times in cases.items() for row in rows_of(case, times)]
        if not rows:
            continue
        report.table(
            ["case", "contender", Column("us a step", right), Column("times oxytorch's", right)], rows, f"Times {label}"
        )
        chart = []
        for case, times in cases.items():
            for name in times:
                if name not in (OURS, ALONE):
                    got = ratio(times, name)
                    chart.append(ReportBar(name, got.mid, got.low, got.high, case))
        report.bar_chart(chart, f"How many times as long as oxytorch, {label}", "times", "x", 1.0, "oxytorch")
    report.to_html(folder / "step_tail.html")
    print(f"Report: {folder / 'step_tail.html'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--seconds", type=float, default=8.0, help="time for each case (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few rounds of the small cases, to see that it works")
    parser.add_argument("--no-cpp", action="store_true", help="leave the C++ half out")
    parser.add_argument("--program", type=Path, default=ROOT / "build/dev/bench/race/step_tail_race")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/report")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    facts = machine.describe(arguments.threads)
    facts["isa"] = str(getattr(oxytorch._C, "isa", lambda: "")())
    cases = {name: sizes for name, sizes in CASES.items() if not (arguments.quick and sum(sizes) > 1 << 20)}
    seconds, rounds = (0.2, 8) if arguments.quick else (arguments.seconds, 200)
    python: dict[str, Times] = {}
    for name, sizes in cases.items():
        for scaled in (False, True) if name in SCALED else (False,):
            label = f"{name}, scaler" if scaled else name
            print(f"racing {label} ...", file=sys.stderr, flush=True)
            contenders = make_contenders(sizes, scaled, large=sum(sizes) > 1 << 20)
            race(contenders, seconds, rounds)
            python[label] = {contender.name: np.array(contender.seconds) for contender in contenders}
            del contenders
    cpp: dict[str, Times] = {}
    if not arguments.no_cpp:
        if arguments.program.exists():
            print("racing from C++ ...", file=sys.stderr, flush=True)
            cpp = run_cpp(arguments.program, arguments.threads, seconds, list(cases))
        else:
            print(f"no {arguments.program}: the C++ half is left out; make build makes it", file=sys.stderr)
    judged = bars(python, cpp)
    show(python, cpp, judged, facts)
    write_report(arguments.out, python, cpp, judged, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
