"""Races the step tail (clip, AdamW, moving average) of Oxytorch against PyTorch's and 8-bit optimizers'.

Every contender works on its own tensors of the same sizes and contents. All run in one process, in turn and in a random
order each round, with the same number of threads. All of it runs in several process starts. Ratios are paired by
round, a start counts by its median, and intervals hold 95%: Student's t on the logarithms of the starts' figures. The
C++ contenders run the same way in a program of their own (bench/race/step_tail.cpp).

    python bench/race/step_tail.py [--threads 2] [--starts 4] [--seconds 3] [--quick] [--case NAME]... [--no-cpp]
        [--keep PATH] [--json PATH]

Prints the ratios and whether each promise is met, and writes bench/report/step_tail.{json,html}. The exit status is 0
whether or not promises are met: a busy machine must not fail a build.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import _peers
import numpy as np
import oxytorch.optim
import torch
from _race import (
    BUILD,
    MOST_ROUNDS,
    Absent,
    Contender,
    Figure,
    Measured,
    Times,
    add_figures,
    add_options,
    all_starts,
    facts,
    is_wanted,
    new_report,
    over_starts,
    progress,
    race,
    ratio,
    run_cpp,
    show_figures,
    text,
    write,
)
from oxytorch.base import Interval, system_info
from oxytorch.bench.turns.times import ends
from oxytorch_demo import workloads
from torch import Tensor

LR, WEIGHT_DECAY, MAX_NORM, EMA_DECAY = 1e-4, 0.01, 1.0, 0.999
HYPERPARAMETERS: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY}
TAIL_BYTES, TORCH_STEP_BYTES = 40, 28
FUSED, EXPERT, ALONE, OURS = "torch fused", "torch fused, grad_scale by hand", "torch fused, step alone", "oxytorch"
HOOKED, BACKWARD_ALONE = "oxytorch, norm in backward", "backward alone"
STATISTICS = "oxytorch, statistics"
INT8, INT8_ALONE, SEVEN = "oxytorch, int8 state", "oxytorch, int8 state, step alone", "oxytorch, 7 bytes, no average"
BACKWARD, TAIL, STEP = "backward", "tail", "step"
CPP = "torch::optim"
STEPS_TO_DECAY = 1_000  # 0.9 to that power is below all that float32 holds
SCHEMA = "oxytorch-race/3"


def small_sizes() -> list[int]:
    """A thousand small tensors, as a model full of norms and biases has."""
    return [int(size) for size in np.random.default_rng(7).integers(1, 513, 1000)]


LARGE = [4 << 20] * 16
SIZES: dict[str, list[int]] = {
    "16 x 4M": LARGE,
    "200 x 1,000": [1000] * 200,
    "200 x 64": [64] * 200,
    "1,000 x up to 512": small_sizes(),
}


# --- contenders ------------------------------------------------------------------------------------------------------


@functools.cache
def contents(sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Values and gradients of every contender's parameters."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, generator=generator) * 0.02, torch.randn(size, generator=generator) * 0.01) for size in sizes
    ]


def make_params(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters with gradients, the same for every contender."""
    params = []
    for value, grad in contents(tuple(sizes)):
        param = value.to(dtype, copy=True).requires_grad_()
        param.grad = grad.to(dtype, copy=True)
        params.append(param)
    return params


def make_scaler(kind: Any) -> Any:
    """A scaler with scale 1 that never grows: same bytes and arithmetic, and the gradients stay what they are."""
    scaler = kind("cpu", init_scale=1.0, growth_interval=1 << 30)
    scaler.scale(torch.ones(()))  # Makes the scale's tensor.
    return scaler


def averager(params: list[Tensor]) -> Callable[[], None]:
    """A moving average of `params` with torch's own operator."""
    ema = [param.detach().clone() for param in params]

    def average() -> None:
        with torch.no_grad():
            torch._foreach_lerp_(ema, params, 1.0 - EMA_DECAY)

    return average


def clip(params: list[Tensor]) -> None:
    """Clip by the global norm, torch's fastest way."""
    torch.nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)


def torch_tail(params: list[Tensor], scaler: Any = None, **how: Any) -> Callable[[], None]:
    """`torch.optim.AdamW` with `clip_grad_norm_` and `torch._foreach_lerp_`, under `scaler` if there is one."""
    optimizer = torch.optim.AdamW(params, **{**HYPERPARAMETERS, **how})
    average = averager(params)

    def tail() -> None:
        clip(params)
        optimizer.step()
        average()

    def scaled_tail() -> None:
        scaler.unscale_(optimizer)
        clip(params)
        scaler.step(optimizer)
        scaler.update()
        average()

    return tail if scaler is None else scaled_tail


def our_tail(params: list[Tensor], scaler: Any = None, **options: Any) -> Callable[[], None]:
    """`oxytorch.optim.AdamW`, whose step is the whole tail."""
    settings = {**HYPERPARAMETERS, "clip_norm": MAX_NORM, "ema_decay": EMA_DECAY, **options}
    optimizer = oxytorch.optim.AdamW(params, **settings)

    def scaled_tail() -> None:
        scaler.step(optimizer)
        scaler.update()

    return optimizer.step if scaler is None else scaled_tail


def torch_contender(name: str, sizes: list[int], scaled: bool = False, **how: bool) -> Contender:
    """The whole tail from torch's parts."""
    params = make_params(sizes)
    return Contender(
        name, {TAIL: torch_tail(params, make_scaler(torch.amp.GradScaler) if scaled else None, **how)}, params
    )


def our_contender(
    sizes: list[int], scaled: bool = False, name: str = OURS, dtype: torch.dtype = torch.float32, **options: Any
) -> Contender:
    """The whole tail as one call."""
    params = make_params(sizes, dtype)
    scaler = make_scaler(oxytorch.amp.GradScaler) if scaled else None
    return Contender(name, {TAIL: our_tail(params, scaler, **options)}, params)


def expert_contender(sizes: list[int]) -> Contender:
    """What an expert does: hand the clip coefficient to the fused kernel as its `grad_scale`, saving a pass."""
    params = make_params(sizes)
    optimizer: Any = torch.optim.AdamW(params, fused=True, **HYPERPARAMETERS)
    average = averager(params)
    grads = [param.grad for param in params if param.grad is not None]
    optimizer.found_inf = torch.zeros(())

    def tail() -> None:
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        optimizer.grad_scale = ((norm + 1e-6) / MAX_NORM).clamp(min=1.0)
        optimizer.step()
        average()

    return Contender(EXPERT, {TAIL: tail}, params)


def alone_contender(sizes: list[int]) -> Contender:
    """torch's fused AdamW kernel by itself: the yardstick of the byte rate."""
    params = make_params(sizes)
    optimizer = torch.optim.AdamW(params, fused=True, **HYPERPARAMETERS)
    return Contender(ALONE, {STEP: optimizer.step}, params)


def peer_contender(name: str, sizes: list[int]) -> Contender | Absent:
    """The tail of another package's 8-bit AdamW, or why there is none."""
    params = make_params(sizes)
    optimizer = _peers.make(name, params, **HYPERPARAMETERS)
    if isinstance(optimizer, str):
        return Absent(name, optimizer)
    phases: dict[str, Callable[[], object]] = {
        "clip": lambda: clip(params),
        STEP: optimizer.step,
        "average": averager(params),
    }
    return Contender(name, phases, params)


def make_contenders(sizes: list[int], scaled: bool, large: bool) -> list[Contender]:
    """Every contender of a plain case."""
    result = [torch_contender(FUSED, sizes, scaled, fused=True)]
    if not scaled:
        result.append(expert_contender(sizes))
        result.append(torch_contender("torch foreach", sizes, foreach=True))
        result.append(torch_contender("torch for-loop", sizes, foreach=False, fused=False))
        if large:
            result.append(alone_contender(sizes))
    result.append(our_contender(sizes, scaled))
    return result


def backward_contender(
    name: str, sizes: list[int], scaler: Any, tail: Callable[..., Any] | None, **how: Any
) -> Contender:
    """A backward that writes each gradient anew, one after the other, and then the tail.

    The loss is the sum of ``dot(p, c)`` over the parameters, whose backward writes the gradient ``1 * c`` for each:
    the least that any real backward does. The forward is not timed.
    """
    params = make_params(sizes)
    slopes = [slope for _, slope in contents(tuple(sizes))]
    losses: list[Tensor] = []

    def forward() -> None:
        for param in params:
            param.grad = None
        loss = torch.stack([torch.dot(param, slope) for param, slope in zip(params, slopes, strict=True)]).sum()
        losses.append(loss if scaler is None else scaler.scale(loss))

    def backward() -> None:
        losses.pop().backward()  # type: ignore[no-untyped-call]

    phases: dict[str, Callable[[], object]] = {BACKWARD: backward}
    if tail is not None:
        phases[TAIL] = tail(params, scaler, **how)
    return Contender(name, phases, params, before=forward)


def backward_contenders(sizes: list[int], scaled: bool) -> list[Contender]:
    """torch's tail, ours in two passes and with the norm taken in backward, and no tail at all."""
    torch_scaler = make_scaler(torch.amp.GradScaler) if scaled else None
    our_scaler = [make_scaler(oxytorch.amp.GradScaler) if scaled else None for _ in range(2)]
    return [
        backward_contender(FUSED, sizes, torch_scaler, torch_tail, fused=True),
        backward_contender(OURS, sizes, our_scaler[0], our_tail),
        backward_contender(HOOKED, sizes, our_scaler[1], our_tail, norm_in_backward=True),
        backward_contender(BACKWARD_ALONE, sizes, torch_scaler, None),
    ]


def decayed(contender: Contender) -> Contender:
    """The same after steps in which every fifth element had no gradient any more."""
    contender.run()
    for param in contender.params:
        assert param.grad is not None
        param.grad[::5] = 0
    for _ in range(STEPS_TO_DECAY):
        contender.run()
    return contender


def decayed_contenders(sizes: list[int]) -> list[Contender]:
    """Averages that were left alone, as of units that are dead and rows of a table that no batch names."""
    return [decayed(torch_contender(FUSED, sizes, fused=True)), decayed(our_contender(sizes))]


def statistics_contenders(sizes: list[int]) -> list[Contender]:
    """Without statistics and with them."""
    return [our_contender(sizes), our_contender(sizes, name=STATISTICS, collect_stats=True)]


def narrow_contenders(sizes: list[int]) -> list[Contender | Absent]:
    """8-bit states, ours and the peers', beside torch's fp32 tail."""
    return [
        torch_contender(FUSED, sizes, fused=True),
        our_contender(sizes, name=INT8, state_dtype="int8"),
        our_contender(sizes, name=INT8_ALONE, state_dtype="int8", clip_norm=None, ema_decay=None),
        our_contender(
            sizes, name=SEVEN, dtype=torch.bfloat16, state_dtype="int8", master_weights="int8", ema_decay=None
        ),
        *(peer_contender(name, sizes) for name in _peers.NAMES),
    ]


def training_contenders(name: str, autocast: bool) -> list[Contender]:
    """A real training step of one of the demo's models on one batch, with torch's best tail and with ours."""
    workload = workloads.load(name)
    batch = workload.make_batches(0, 1)[0]
    recipe = workload.recipe
    options: dict[str, Any] = {"lr": recipe.lr, "betas": recipe.betas, "weight_decay": recipe.weight_decay}

    def contender(name: str, tail: Callable[..., Any], **how: Any) -> Contender:
        torch.manual_seed(0)
        model = workload.make_model()
        params: list[Tensor] = list(model.parameters())

        def forward_and_backward() -> None:
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = workload.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]

        return Contender(
            name, {"forward and backward": forward_and_backward, TAIL: tail(params, **options, **how)}, params
        )

    return [contender(FUSED, torch_tail, fused=True), contender(OURS, our_tail)]


# --- memory ----------------------------------------------------------------------------------------------------------


def seven_byte_layout(sizes: list[int]) -> list[tuple[str, float, float | None]]:
    """Bytes of a parameter in the 7-byte layout, gradient included, after steps with all that usually forbids it.

    bf16 weights and gradients, 8 low bits, 8-bit moments; clipping, a scaler, two micro-batches a step. The
    tensors are those a user can reach; what the process grew by holds the rest.
    """
    our_contender([32], dtype=torch.bfloat16).run()  # What the first optimizer imports is not the layout's.
    slopes = [slope.bfloat16() for _, slope in contents(tuple(sizes))]
    count = sum(sizes)
    before = resident()
    params = [value.to(torch.bfloat16).requires_grad_() for value, _ in contents(tuple(sizes))]
    optimizer = oxytorch.optim.AdamW(
        params, **HYPERPARAMETERS, clip_norm=MAX_NORM, state_dtype="int8", master_weights="int8"
    )
    optimizer.grad_divisor = 2.0
    scaler = make_scaler(oxytorch.amp.GradScaler)

    def backward() -> None:
        scaler.scale(torch.stack([torch.dot(p, c) for p, c in zip(params, slopes, strict=True)]).sum()).backward()

    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        with optimizer.accumulate():
            backward()
        backward()
        scaler.step(optimizer)
        scaler.update()
    states = [tensor for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, Tensor)]
    tensors = [*params, *(param.grad for param in params if param.grad is not None), *states]
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    grown = (resident() - before) / count
    each = sum(held.values()) / count
    return [
        ("7-byte layout, bytes a parameter, gradient included", each, 7.3),
        ("7-byte layout, growth of the process, bytes a parameter", grown, None),
    ]


def resident() -> int:
    """Bytes of this process in memory, without those that are free but kept."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(system_info()["memory"]["resident"])


def exactly(value: float) -> Interval:
    """A count."""
    return Interval(value, value, value, 1.0)


# --- cases and what they promise -------------------------------------------------------------------------------------


@dataclass
class Result:
    """What one case gave."""

    times: Times
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Contenders, made when their turn comes, and the figures to take from their times."""

    name: str
    make: Callable[[], Sequence[Contender | Absent]]
    judge: Callable[[Result], list[Figure]]
    quick: bool = False
    reference: str = OURS
    pause: float = 0.0


def over_torch(bound: float | None) -> Callable[[Result], list[Figure]]:
    """How many times as long torch's fused tail takes."""
    return lambda result: [Figure("over torch fused + clip + foreach average", ratio(result.times, FUSED, OURS), bound)]


def judge_large(result: Result) -> list[Figure]:
    """Time and byte rate of the large case."""
    times = result.times
    rate = over_starts(TAIL_BYTES / TORCH_STEP_BYTES * times[ALONE] / times[OURS])
    return [*over_torch(1.6)(result), Figure("byte rate over that of torch's fused AdamW", rate, 0.95)]


def judge_backward(bound: float | None) -> Callable[[Result], list[Figure]]:
    """The whole of backward and step, and what is left of it after a backward without hooks in the same round."""

    def judge(result: Result) -> list[Figure]:
        times = result.times
        bare = times[BACKWARD_ALONE]
        tails = over_starts((times[FUSED] - bare) / (times[HOOKED] - bare))
        return [
            Figure("norm in backward: backward + step, over torch's", ratio(times, FUSED, HOOKED)),
            Figure("norm in backward: the same, less a backward without hooks", tails, bound),
        ]

    return judge


def judge_narrow(result: Result) -> list[Figure]:
    """8-bit states."""
    times = result.times
    figures = []
    for name in _peers.NAMES:
        if name in result.absent:
            figures.append(Figure(f"over {name} + clip + average", None, 8.0, absent=result.absent[name]))
            continue
        figures.append(Figure(f"over {name} + clip + average", ratio(times, name, INT8), 8.0))
        figures.append(Figure(f"step alone over {name}'s", ratio(times, f"{name}: {STEP}", INT8_ALONE)))
    figures.append(Figure("over torch's fp32 tail", ratio(times, FUSED, INT8), 1.0))
    figures.append(Figure("7-byte layout, no average, over torch's fp32 tail", ratio(times, FUSED, SEVEN)))
    return figures


def judge_statistics(result: Result) -> list[Figure]:
    """The cost of statistics."""
    return [Figure("with statistics, over without", ratio(result.times, STATISTICS, OURS), 1.02, at_most=True)]


def judge_training(result: Result) -> list[Figure]:
    """The share of torch's tail in a step, and what ours gains on the whole."""
    times = result.times
    share = over_starts(times[f"{FUSED}: {TAIL}"] / times[FUSED])
    return [
        Figure("share of torch's best tail in the step", share),
        Figure("the tail, over ours", ratio(times, f"{FUSED}: {TAIL}", f"{OURS}: {TAIL}")),
        Figure("the whole step, over ours", ratio(times, FUSED, OURS)),
    ]


def cases() -> Iterator[Case]:
    """All of them, in the order they run."""
    promised = {"200 x 1,000": 15.0, "1,000 x up to 512": 10.0}
    for name, sizes in SIZES.items():
        large = sizes is LARGE
        judge = judge_large if large else over_torch(promised.get(name))
        yield Case(name, partial(make_contenders, sizes, False, large), judge, quick=not large)
        if large or name == "200 x 1,000":
            judge = over_torch(1.8 if large else None)
            yield Case(f"{name}, scaler", partial(make_contenders, sizes, True, False), judge, quick=not large)
    for scaled, bound in ((False, 1.8), (True, 2.0)):
        name = f"16 x 4M, backward{', scaler' * scaled}"
        yield Case(name, partial(backward_contenders, LARGE, scaled), judge_backward(bound), reference=HOOKED)
    # A gradient of 1 MiB is still in the second level of the cache when its hook runs; one of 16 MiB is not.
    judge = judge_backward(None)
    yield Case("256 x 256K, backward", partial(backward_contenders, [256 << 10] * 256, False), judge, reference=HOOKED)
    judge = over_torch(None)
    yield Case("16 x 64K, a fifth decayed", partial(decayed_contenders, [64 << 10] * 16), judge, quick=True)
    yield Case("16 x 4M, statistics", partial(statistics_contenders, LARGE), judge_statistics)
    # The peers bring thread pools of their own.
    yield Case("16 x 4M, int8 state", partial(narrow_contenders, LARGE), judge_narrow, reference=INT8, pause=5e-3)
    for name in workloads.NAMES:
        for autocast in (False, True):
            yield Case(
                f"training {name}{', bf16' * autocast}",
                partial(training_contenders, name, autocast),
                judge_training,
                quick=name == "mlp" and not autocast,
            )


def cpp_figures(cpp: dict[str, Times]) -> list[Figure]:
    """What is promised over the C++ optimizers."""
    return [
        Figure(f"{case}, C++: over {CPP} + clip + lerp_", ratio(cpp[case], CPP, OURS), bound)
        for case, bound in (("200 x 64", 100.0), ("16 x 4M", 9.0))
        if case in cpp
    ]


# --- showing ---------------------------------------------------------------------------------------------------------


@dataclass
class Table:
    """The times of one case and the contender that the others are compared with."""

    case: str
    times: Times
    reference: str

    def rows(self) -> list[list[str]]:
        """Contender, microseconds, times the reference's."""
        return [
            [self.case, name, text(over_starts(values), 1e6), text(ratio(self.times, name, self.reference))]
            if name in self.rivals()
            else [self.case, name, text(over_starts(values), 1e6), ""]
            for name, values in self.times.items()
        ]

    def rivals(self) -> list[str]:
        """Contenders that do the same work as the reference."""
        return [name for name in self.times if ": " not in name and "alone" not in name and name != self.reference]


def show(tables: list[Table], figures: list[Figure], machine_facts: dict[str, str]) -> None:
    """Print everything."""
    print("Step tail: clip by global norm, AdamW, moving average; fp32 where nothing else is said")
    print(f"{'case':<28}{'contender':<46}{'us a step':<36}times the reference's")
    for table in tables:
        for row in table.rows():
            print(f"{row[0]:<28}{row[1]:<46}{row[2]:<36}{row[3]}".rstrip())
    print()
    show_figures(figures)
    print("\nMeasured on: " + ", ".join(f"{key} {value}" for key, value in machine_facts.items() if value))
    print(
        "Small cases run with warm caches. The large ones hold 1.25 GiB a contender, and the next one's turn evicts it."
    )
    print(
        "The reference is oxytorch, in the case's own setting. 'Less a backward without hooks': in each round the time"
    )
    print(
        "of a backward alone, with no optimizer attached, is taken off both; a backward slowed by ours counts as ours."
    )


def save(
    arguments: argparse.Namespace,
    found: Measured,
    tables: list[Table],
    figures: list[Figure],
    machine_facts: dict[str, str],
) -> None:
    """`step_tail.json` and `step_tail.html`."""
    from oxytorch.monitor import Bar, Column  # noqa: PLC0415

    document = {
        "schema": SCHEMA,
        "machine": machine_facts,
        **found.to_json(),
        "figures": [figure.to_json() for figure in figures],
    }
    report = new_report("Race: the step tail", __doc__, machine_facts)
    add_figures(report, figures)
    columns: list[Column | str] = ["contender", Column("us a step", "right"), Column("times the reference's", "right")]
    bars = []
    for table in tables:
        report.table(columns, [row[1:] for row in table.rows()], f"{table.case}, against {table.reference}")
        for name in table.rivals():
            got = ratio(table.times, name, table.reference)
            bars.append(Bar(name, got.mid, *ends(got), table.case))
    report.bar_chart(bars, "How many times as long as oxytorch", "times", "x", 1.0, "oxytorch")
    write(report, document, arguments.out, "step_tail", arguments.json)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--no-cpp", action="store_true", help="leave the C++ half out")
    parser.add_argument("--program", type=Path, default=BUILD / "bench/race/step_tail_race")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> Measured:
    """One start: every case that was asked for, in this process."""
    torch.set_num_threads(arguments.threads)
    # Freed memory is kept, for all alike: page faults in a backward or in temporaries would drown the tails.
    oxytorch._C.trainer.tune_allocator(None)
    seconds, rounds = (0.2, 8) if arguments.quick else (arguments.seconds, MOST_ROUNDS)
    found = Measured()
    wanted = [case for case in cases() if is_wanted(arguments, case.name) and (case.quick or not arguments.quick)]
    for index, case in enumerate(wanted):
        progress(f"racing {case.name} ({index + 1} of {len(wanted)}) ...")
        entries = case.make()
        contenders = [entry for entry in entries if isinstance(entry, Contender)]
        found.absent[case.name] = {entry.name: entry.why for entry in entries if isinstance(entry, Absent)}
        found.cases[case.name] = race(contenders, seconds, rounds, case.pause)
        del entries, contenders
    if is_wanted(arguments, "7-byte layout"):
        found.layout = seven_byte_layout([1000] * 200 if arguments.quick else LARGE)
    sizes = [
        name
        for name, each in SIZES.items()
        if is_wanted(arguments, f"{name}, C++") and not (arguments.quick and each is LARGE)
    ]
    if sizes and not arguments.no_cpp:
        if arguments.program.exists():
            progress("racing from C++ ...")
            times = run_cpp(arguments.program, arguments.threads, seconds, sizes)
            found.cases |= {f"{name}, C++": each for name, each in times.items()}
        else:
            progress(f"no {arguments.program}: the C++ half is left out; make build makes it")
    return found


def figures_of(found: Measured) -> tuple[list[Table], list[Figure]]:
    """Tables of times and what was promised of them."""
    tables, figures = [], []
    for case in cases():
        if case.name in found.cases:
            result = Result(found.cases[case.name], found.absent.get(case.name, {}))
            made = case.judge(result)
            figures += [Figure(f"{case.name}: {f.what}", f.got, f.bound, f.at_most, f.absent) for f in made]
            tables.append(Table(case.name, result.times, case.reference))
    figures += [Figure(what, exactly(value), bound, at_most=True) for what, value, bound in found.layout]
    cpp = {name.removesuffix(", C++"): times for name, times in found.cases.items() if name.endswith(", C++")}
    tables += [Table(f"{name}, C++", times, OURS) for name, times in cpp.items()]
    return tables, [*figures, *cpp_figures(cpp)]


def main() -> int:
    arguments = parse()
    machine_facts = facts(arguments.threads)
    found = all_starts(arguments, machine_facts, SCHEMA, measure)
    tables, figures = figures_of(found)
    show(tables, figures, machine_facts)
    save(arguments, found, tables, figures, machine_facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
