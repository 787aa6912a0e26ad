"""Races the step tail (clip, AdamW, moving average) on a device against PyTorch's fused, foreach and compiled ones.

All contenders work on the same weights and gradients with states of their own, in turn and in a random order each
round, timed by the device's own events. The byte rate is held against the rate of the device's own copies. Beside the
race: a step that is captured in a CUDA graph against the same step run eagerly, bit by bit; waits for the device in
steps, counted; and what a call through the backend's table costs the host.

    python bench/race/cuda/device_tail.py [--device cuda] [--seconds 20] [--quick] [--compile] [--case NAME]...

`--device cpu --quick` runs the same code where it exists there, to see that it works. Prints the figures and whether
each promise is met, and writes bench/report/device_tail.{json,html}. The exit status is 0 whether or not promises are
met, and 2 where there is no such device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import oxytorch.amp
import oxytorch.optim
import torch
from _race import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    ROOT,
    Figure,
    add_figures,
    facts,
    new_report,
    over_starts,
    progress,
    ratio,
    show_figures,
    text,
    write,
)
from oxytorch.base import Interval
from torch import Tensor, nn

LR, WEIGHT_DECAY, MAX_NORM, EMA_DECAY = 1e-4, 0.01, 1.0, 0.999
TAIL_BYTES = 40  # a parameter in fp32: gradient twice; weight, two moments and average read and written
SHARED_BYTES, OWN_BYTES = 8, 12  # a parameter: weight and gradient; two moments and average
OURS, FUSED, FOREACH, COMPILED = "oxytorch", "torch fused", "torch foreach", "torch compiled"
Tail = Callable[[], None]
Times = dict[str, np.ndarray]


# --- the device and its clock ----------------------------------------------------------------------------------------


class Clock:
    """Seconds of work on a device: its own events on CUDA, the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, work: Callable[[], object], repeats: int = 1) -> float:
        """Mean over `repeats` of what `work` takes, from an idle device to an idle device."""
        if self.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            for _ in range(repeats):
                work()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / repeats
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - began) / repeats


def copy_rate(device: torch.device, count: int) -> float:
    """Bytes a second that the device's own copy reads and writes."""
    source, target = torch.empty(count, device=device), torch.empty(count, device=device)
    clock = Clock(device)
    target.copy_(source)
    best = min(clock.seconds(lambda: target.copy_(source)) for _ in range(10))
    return 2 * source.nbytes / best


# --- contenders ------------------------------------------------------------------------------------------------------


def make_params(sizes: list[int], device: torch.device) -> list[Tensor]:
    """Parameters with gradients."""
    generator = torch.Generator(device).manual_seed(1)
    params = []
    for size in sizes:
        param = (torch.randn(size, generator=generator, device=device) * 0.02).requires_grad_()
        param.grad = torch.randn(size, generator=generator, device=device) * 0.01
        params.append(param)
    return params


def our_tail(params: list[Tensor]) -> Tail:
    """One call."""
    optimizer = oxytorch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, clip_norm=MAX_NORM, ema_decay=EMA_DECAY)
    return optimizer.step


def torch_tail(params: list[Tensor], **how: bool) -> Tail:
    """`clip_grad_norm_`, `torch.optim.AdamW` and `torch._foreach_lerp_`."""
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, **how)
    average = [param.detach().clone() for param in params]

    def tail() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, params, 1.0 - EMA_DECAY)

    return tail


def compiled_tail(params: list[Tensor]) -> Tail:
    """The same from foreach operators that `torch.compile` fuses; lr in a tensor, as it wants it."""
    lr = torch.tensor(LR, device=params[0].device)
    capturable = params[0].is_cuda
    optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=WEIGHT_DECAY, foreach=True, capturable=capturable)
    average = [param.detach().clone() for param in params]

    @torch.compile(fullgraph=False)
    def tail() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, params, 1.0 - EMA_DECAY)

    return tail


def contenders(compiled: bool) -> dict[str, Callable[[list[Tensor]], Tail]]:
    """Who takes part."""
    made: dict[str, Callable[[list[Tensor]], Tail]] = {
        OURS: our_tail,
        FUSED: partial(torch_tail, fused=True),
        FOREACH: partial(torch_tail, foreach=True),
    }
    if compiled:
        made[COMPILED] = compiled_tail
    return made


def race(
    device: torch.device,
    sizes: list[int],
    names: dict[str, Callable[[list[Tensor]], Tail]],
    seconds: float,
    most_rounds: int,
) -> Times:
    """Seconds of each round by contender."""
    clock = Clock(device)
    params = make_params(sizes, device)
    tails = {name: make(params) for name, make in names.items()}
    repeats: dict[str, int] = {}
    for name, tail in tails.items():
        for _ in range(3):
            took = clock.seconds(tail)
        repeats[name] = max(1, min(100, int(2e-3 / took)))
    order = np.random.default_rng(11)
    times: dict[str, list[float]] = {name: [] for name in tails}
    spent = 0.0
    for index in range(most_rounds):
        if index >= LEAST_ROUNDS and spent > seconds:
            break
        for name in order.permutation(list(tails)):
            took = clock.seconds(tails[name], repeats[name])
            times[name].append(took)
            spent += took * repeats[name]
    return {name: np.array(values) for name, values in times.items()}


def large_sizes(device: torch.device, competitors: int, quick: bool) -> list[int]:
    """Up to two billion parameters, as many as the device holds of every contender at once."""
    if quick:
        return [1 << 16] * 16
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 << 30
    # The foreach optimizer has temporaries of the size of weights and gradients.
    held = 2 * SHARED_BYTES + OWN_BYTES * competitors
    parameters = min(2_000_000_000, int(free * 0.9 / held))
    return [parameters // 64] * 64


def small_sizes() -> list[int]:
    """A thousand small tensors, as a model full of norms and biases has."""
    return [int(size) for size in np.random.default_rng(7).integers(1, 513, 1000)]


# --- a step in a graph -----------------------------------------------------------------------------------------------


@dataclass
class Training:
    """A small model and all that its step changes."""

    model: nn.Module
    optimizer: Any
    scaler: Any
    inputs: Tensor
    targets: Tensor

    @classmethod
    def make(cls, device: torch.device) -> Training:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10)).to(device)
        optimizer = oxytorch.optim.AdamW(
            model.parameters(),
            lr=torch.tensor(1e-3, device=device),
            clip_norm=MAX_NORM,
            ema_decay=EMA_DECAY,
            capturable=device.type == "cuda",
        )
        scaler = oxytorch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=7)
        return cls(
            model,
            optimizer,
            scaler,
            torch.zeros(32, 64, device=device),
            torch.zeros(32, dtype=torch.long, device=device),
        )

    def step(self) -> None:
        """Forward, backward and tail; nothing is read by the host."""
        self.optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(self.model(self.inputs), self.targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def feed(self, index: int) -> None:
        """The batch and the learning rate of a step, written where the step reads them."""
        generator = torch.Generator().manual_seed(1000 + index)
        self.inputs.copy_(torch.randn(32, 64, generator=generator))
        if index % 13 == 5:  # overflows, so that the scale falls
            self.inputs[0, 0] = float("inf")
        self.targets.copy_(torch.randint(0, 10, (32,), generator=generator))
        self.optimizer.param_groups[0]["lr"].fill_(1e-3 / (1 + index % 50))

    def everything(self) -> list[Tensor]:
        """What must agree bit by bit."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return [*self.model.parameters(), *(value for value in state if isinstance(value, Tensor)), self.scaler._scale]


def graph_figure(device: torch.device, steps: int) -> Figure:
    """Steps until a captured training differs from an eager one."""
    what = f"captured step, steps bitwise equal to eager of {steps}, lr and scale changing"
    eager, captured = Training.make(device), Training.make(device)
    warm_up = 3
    replay: Callable[[], None] = captured.step
    for index in range(warm_up):
        for training in (eager, captured):
            training.feed(index)
            training.step()
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        captured.feed(warm_up)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                captured.step()
        except RuntimeError as error:
            return Figure(what, None, steps, absent=f"cannot be captured: {str(error).splitlines()[0]}")
        replay = graph.replay
    equal = 0
    for index in range(warm_up, warm_up + steps):
        eager.feed(index)
        captured.feed(index)
        eager.step()
        replay()
        same = [
            torch.equal(left.view(torch.uint8), right.view(torch.uint8))
            for left, right in zip(
                [tensor.reshape(-1).contiguous() for tensor in eager.everything()],
                [tensor.reshape(-1).contiguous() for tensor in captured.everything()],
                strict=True,
            )
        ]
        if not all(same):
            break
        equal += 1
    return Figure(what + ("" if device.type == "cuda" else " (no graph on this device)"), exactly(equal), steps)


# --- waits -----------------------------------------------------------------------------------------------------------

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize",
         "cuCtxSynchronize", "cuEventSynchronize", "cudaMemcpy", "Memcpy DtoH")  # fmt: skip


def wait_figures(device: torch.device, steps: int) -> list[Figure]:
    """Waits for the device within steps: torch's own alarm, and the profiler's trace."""
    what = f"waits for the device in {steps} steps"
    if device.type != "cuda":
        return [Figure(what, None, 0, at_most=True, absent="a processor has nothing to wait for")]
    training = Training.make(device)
    for index in range(3):
        training.feed(index)
        training.step()
    torch.cuda.synchronize()
    alarm = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            training.step()
    except RuntimeError:
        alarm = 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("steps"):
            for _ in range(steps):
                training.step()
        torch.cuda.synchronize()
    events = profile.events() or []
    window = next((event.time_range for event in events if event.name == "steps"), None)
    seen = [
        event.name
        for event in events
        if window is not None
        and window.start <= event.time_range.start <= window.end
        and (event.name in WAITS or event.name.startswith("Memcpy DtoH"))
    ]
    return [
        Figure(what + ", torch's alarm", exactly(alarm), 0, at_most=True),
        Figure(what + ", in the trace", exactly(len(seen)), 0, at_most=True),
    ]


# --- the host's cost -------------------------------------------------------------------------------------------------


def table_figures(device: torch.device, program: Path) -> list[Figure]:
    """Nanoseconds of a call through the backend's table that does nothing."""
    what = "host cost of a call through the table, ns"
    if not program.exists():
        return [Figure(what, None, 50, at_most=True, absent=f"no {program}; make build makes it")]
    environment = {**os.environ, "OXYTORCH_BENCH_BACKEND": "cuda" if device.type == "cuda" else "cpu"}
    command = [str(program), "--benchmark_filter=^table_call$", "--benchmark_format=json", "--benchmark_repetitions=5"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    if done.returncode != 0:
        return [Figure(what, None, 50, at_most=True, absent=done.stderr.strip().splitlines()[-1])]
    runs = [run for run in json.loads(done.stdout)["benchmarks"] if run["run_type"] == "iteration"]
    return [Figure(what, over_starts(np.array([run["cpu_time"] for run in runs])), 50, at_most=True)]


# --- cases -----------------------------------------------------------------------------------------------------------


def exactly(value: float) -> Interval:
    """A count."""
    return Interval(value, value, value, 1.0)


@dataclass
class Results:
    """All that was found."""

    times: dict[str, Times] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)


def run_large(arguments: argparse.Namespace, results: Results) -> None:
    """One to two billion parameters, against the copy rate."""
    device = arguments.device
    names = contenders(arguments.compile)
    sizes = large_sizes(device, len(names), arguments.quick)
    rate = copy_rate(device, min(sum(sizes), 1 << 28))
    times = race(device, sizes, names, arguments.seconds, arguments.rounds)
    results.times[f"{sum(sizes) / 1e9:.3g} billion parameters"] = times
    ideal = TAIL_BYTES * sum(sizes) / rate
    results.figures += [
        Figure("large: the device's copies, GB/s", exactly(rate / 1e9)),
        Figure("large: time over that of its bytes at the copy rate", over_starts(times[OURS] / ideal), 1.08, True),
        *(Figure(f"large: {name}, over ours", ratio(times, name, OURS)) for name in times if name != OURS),
    ]


def run_small(arguments: argparse.Namespace, results: Results) -> None:
    """A thousand tensors of up to 512 elements."""
    times = race(
        arguments.device, small_sizes(), contenders(arguments.compile), arguments.seconds / 4, arguments.rounds
    )
    results.times["1,000 x up to 512"] = times
    results.figures += [
        Figure(f"1,000 small tensors: {name}, over ours", ratio(times, name, OURS), 5.0 if name == FUSED else None)
        for name in times
        if name != OURS
    ]


def run_graph(arguments: argparse.Namespace, results: Results) -> None:
    """A captured step."""
    results.figures.append(graph_figure(arguments.device, 20 if arguments.quick else 1000))


def run_waits(arguments: argparse.Namespace, results: Results) -> None:
    """Zero synchronizations."""
    results.figures += wait_figures(arguments.device, 5 if arguments.quick else 50)


def run_table(arguments: argparse.Namespace, results: Results) -> None:
    """Cost of a call."""
    results.figures += table_figures(arguments.device, arguments.program)


CASES: dict[str, Callable[[argparse.Namespace, Results], None]] = {
    "large": run_large,
    "small": run_small,
    "graph": run_graph,
    "waits": run_waits,
    "table": run_table,
}


def show(results: Results, machine_facts: dict[str, str]) -> None:
    """Print everything."""
    for case, times in results.times.items():
        print(f"Step tail, {case}: clip by global norm, AdamW, moving average, fp32")
        for name, values in times.items():
            print(f"  {name:<18}{text(over_starts(values), 1e6)} us")
    show_figures(results.figures)
    print("\nMeasured on: " + ", ".join(f"{key} {value}" for key, value in machine_facts.items() if value))


def save(arguments: argparse.Namespace, results: Results, machine_facts: dict[str, str]) -> None:
    """`device_tail.json` and `device_tail.html`."""
    document = {
        "schema": "oxytorch-race/2",
        "machine": machine_facts,
        "cases": {
            case: {name: [round(value, 9) for value in values] for name, values in times.items()}
            for case, times in results.times.items()
        },
        "figures": [figure.to_json() for figure in results.figures],
    }
    report = new_report("Race: the step tail on a device", __doc__, machine_facts)
    add_figures(report, results.figures)
    write(report, document, arguments.out, "device_tail", arguments.json)


def why_not(device: torch.device) -> str:
    """Why the device cannot be raced on; "" if it can."""
    if device.type == "cuda" and not torch.cuda.is_available():
        reason = next((b["reason"] for b in oxytorch.available_backends() if b["name"] == "cuda"), "no CUDA backend")
        built = "" if torch.version.cuda else "; this torch is built without CUDA"
        return f"there is no CUDA device to race on: {reason}{built}"
    return "" if device.type in {"cuda", "cpu"} else f"--device is cuda or cpu, not {device.type}"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--seconds", type=float, default=20.0, help="time of the large case (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to see that it works")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="race torch.compile too")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this; may be repeated")
    parser.add_argument("--program", type=Path, default=ROOT / "build/dev/bench/backend/backend_bench")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/report")
    parser.add_argument("--json", type=Path, help="write the JSON document there too")
    arguments = parser.parse_args()
    if arguments.compile is None:
        arguments.compile = not arguments.quick
    arguments.rounds = LEAST_ROUNDS if arguments.quick else MOST_ROUNDS
    return arguments


def main() -> int:
    """Race, show, save."""
    arguments = parse()
    if reason := why_not(arguments.device):
        print(reason, file=sys.stderr)
        return 2
    machine_facts = facts(torch.get_num_threads(), arguments.device.type)
    results = Results()
    for name, run in CASES.items():
        if arguments.case is None or name in arguments.case:
            progress(f"{name} ...")
            run(arguments, results)
            if arguments.device.type == "cuda":
                torch.cuda.empty_cache()
    show(results, machine_facts)
    save(arguments, results, machine_facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
