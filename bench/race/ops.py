"""Races the operators of oxytorch.ops against torch's own, forward and backward apart.

Attention: `torch flash` and `torch math` are the kernels of scaled_dot_product_attention; math may keep bfloat16
throughout, as its fastest setting has it, which rounds scores and weights to 8 bits. Every contender has the same
inputs, in the layout that a projection of queries, keys and values together leaves, takes its turns in a random order
each round, and has the same number of threads.

Packed: documents one after the other, of many lengths or of one, causal. `padded` is torch's attention of a batch in
which all are as long as the longest, and `one by one` a loop over the documents.

With dropout of attention weights (`dropout` cases), torch has its math path alone.

Written: attention that a model writes out of products, a mask or a bias, softmax and dropout, forward and backward
together, as strategy `native_attention` takes it. `torch` is what was written, `compiled` the same under torch.compile,
and `scaled_dot_product_attention` the call that the model could have made instead.

Linear and cross entropy, forward and backward together: `torch` is linear and cross_entropy of fp32 logits, `compiled`
the same under torch.compile, and `chunks` the usual way to save memory, as Liger's kernel has it: 512 tokens at a time,
gradients made in forward, by torch's operators. In `masked` cases 15 % of the tokens count, as in BERT's training.
`head` is of a float32 weight under autocast to bfloat16, with `bf16 weights` for what a layer of bfloat16 takes; its
gradient is a new one, or `added` to that of an earlier batch. `few classes` is the same of at most 1,024.

Linear: one layer with a float32 weight under autocast to bfloat16, as an MLP or a transformer has it. `torch` is its
own; `bf16 weights` has no weight to cast and none to keep in float32: what a layer of bfloat16 takes.

Norm: batch normalization of a bfloat16 image in channels_last with ReLU, and an addition before it or max pooling after
it. `torch` is its own operators one after the other, `compiled` the same under torch.compile.

Convolution: the gradient of the weight of a bfloat16 convolution in channels_last, by this library and by oneDNN.

Sum: layer or RMS normalization of the sum of a layer's output and a float32 residual, with and without dropout before,
forward and backward together; activation: GELU and SwiGLU, the same. `torch` is its own operators one after the other,
`compiled` the same under torch.compile.

Rotary: rotary embedding of one tensor, halves or interleaved pairs, forward and backward together. `torch` is the usual
composition in the dtype of the tensor, `compiled` the same under torch.compile.

Transformer: from C++, forward and backward of four layers, by oxytorch::nn and by torch's modules and operators as
they are usually written, with flash and with math attention; for BERT's also torch::nn::TransformerEncoder. A program
of its own, `bench/race/transformer.cpp`, which `make build` compiles; left out where it is not there.

Embedding: the gradient of a table, from that of its rows; of numbers that fall evenly, or half of them on one row.

Accumulated: forward and backward of one batch more, whose gradients are added to those of an earlier one: of eight
linear layers under autocast with packed weights (`bf16 weights` as above, in bfloat16 sums), and of a float32 table.

LSTM: one layer of torch.nn.LSTM, served by this library and by oneDNN, with all threads and with one. GRU: the same of
torch.nn.GRU, which torch composes of operators for each step.

A processor that does not multiply bfloat16 races no products of it, unless --case names one.

    python bench/race/ops.py [--threads 2] [--starts 4] [--seconds 3] [--quick] [--case NAME]... [--keep PATH]
        [--json PATH]

Ratios are paired by round, a start counts by its median, and intervals hold 95%. Prints the ratios, and writes
bench/report/ops.{json,html}.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import oxytorch as ox
import torch
from _operators import BF16_WEIGHTS, COMPILED, DTYPES, EAGER, OURS, Case, attention, layers, losses, recurrent
from _operators.attention import FLASH, MATH, ONE_BY_ONE, PADDED, REWRITTEN
from _operators.losses import CHOSEN, CHUNKS
from _operators.recurrent import RECURRENT
from _race import (
    BUILD,
    MOST_ROUNDS,
    Measured,
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
    text,
    write,
)
from oxytorch.bench.turns.machine import has_bf16

SCHEMA = "oxytorch-ops/1"
USUAL_MATH, ENCODER = "torch, math attention", "TransformerEncoder"
TRANSFORMERS = [
    f"transformer {dtype}, {family} of 4 x 256, 16 x 128 tokens"
    for dtype in DTYPES
    for family in ("GPT", "LLaMA", "BERT")
]
TRANSFORMER_PROGRAM = BUILD / "bench/race/transformer_race"


def all_cases(quick: bool, threads: int) -> Iterator[Case]:
    yield from attention.cases(quick)
    yield from losses.cases(quick)
    yield from layers.cases(quick)
    yield from recurrent.cases(quick, threads)


def measure(arguments: argparse.Namespace) -> Measured:
    """One start: every case that was asked for, in this process."""
    torch.set_num_threads(arguments.threads)
    found = Measured()
    fitting = [case for case in TRANSFORMERS if " bf16" not in case or has_bf16() or arguments.case]
    wanted = [case for case in fitting[: 1 if arguments.quick else None] if is_wanted(arguments, case)]
    if wanted and TRANSFORMER_PROGRAM.exists():
        progress("racing transformers in C++ ...")
        found.cases |= run_cpp(TRANSFORMER_PROGRAM, arguments.threads, 0.2 if arguments.quick else 4.0, wanted)
    ox._C.trainer.tune_allocator(None)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    seconds, rounds = (0.2, 5) if arguments.quick else (arguments.seconds, MOST_ROUNDS)
    for case in all_cases(arguments.quick, arguments.threads):
        if not is_wanted(arguments, case.name):
            continue
        if case.products is torch.bfloat16 and not has_bf16() and arguments.case is None:
            continue
        progress(f"racing {case.name} ...")
        with case.scope():
            found.cases[case.name] = race(case.make(), seconds, rounds)
    torch.set_num_threads(arguments.threads)
    return found


def against(times: dict[str, Any], slower: str, faster: str) -> str:
    return text(ratio(times, slower, faster)) if slower in times else "left out"


def rows_by_phase(found: Measured, kind: str, rivals: tuple[str, ...]) -> list[list[str]]:
    return [
        [f"{case}, {phase}", text(over_starts(times[f"{OURS}: {phase}"]), 1e3)]
        + [against(times, f"{name}: {phase}", f"{OURS}: {phase}") for name in rivals]
        for case, times in found.cases.items()
        if case.startswith(kind)
        for phase in ("forward", "backward")
    ]


def loss_rows(found: Measured, kind: str, rivals: tuple[str, ...]) -> list[list[str]]:
    return [
        [case, text(over_starts(times[OURS]), 1e3)] + [against(times, name, OURS) for name in rivals]
        for case, times in found.cases.items()
        if case.startswith(kind)
    ]


def tables(found: Measured) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Headings and rows of what was measured, by kind."""
    attended = ["attention", "oxytorch, ms", "flash, times as long", "math, times as long"]
    lost = ["linear and cross entropy", "oxytorch, ms", "torch, times as long", "compiled", "chunks"]
    layered = ["linear layer under autocast", "oxytorch, ms", "torch, times as long", BF16_WEIGHTS]
    normalized = ["batch normalization and ReLU", "oxytorch, ms", "torch, times as long", "compiled"]
    repeated = ["LSTM layer", "oxytorch, ms", "oneDNN, times as long", "oneDNN on one thread"]
    gated = ["GRU layer", "oxytorch, ms", "torch, times as long", "torch on one thread"]
    made = {
        "attention": (attended, rows_by_phase(found, "attention", (FLASH, MATH))),
        "dropout": (
            ["attention with dropout", "oxytorch, ms", "math, times as long"],
            rows_by_phase(found, "dropout", (MATH,)),
        ),
        "written": (
            ["attention written out, forward and backward", *lost[1:4], REWRITTEN],
            loss_rows(found, "written", (EAGER, COMPILED, REWRITTEN)),
        ),
        "packed": (
            ["packed documents", "oxytorch, ms", "padded, times as long", "one by one"],
            rows_by_phase(found, "packed", (PADDED, ONE_BY_ONE)),
        ),
        "loss": (lost, loss_rows(found, "loss", (EAGER, COMPILED, CHUNKS))),
        "masked": (
            ["15 % of the tokens count", *lost[1:], CHOSEN],
            loss_rows(found, "masked", (EAGER, COMPILED, CHUNKS, CHOSEN)),
        ),
        "head": (
            ["linear and cross entropy under autocast", *lost[1:], BF16_WEIGHTS],
            loss_rows(found, "head", (EAGER, COMPILED, CHUNKS, BF16_WEIGHTS)),
        ),
        "few": (
            ["few classes under autocast", *lost[1:], BF16_WEIGHTS],
            loss_rows(found, "few", (EAGER, COMPILED, CHUNKS, BF16_WEIGHTS)),
        ),
        "linear": (layered, rows_by_phase(found, "linear", (EAGER, BF16_WEIGHTS))),
        "convolution": (
            ["gradient of a convolution's weight", *lost[1:3]],
            loss_rows(found, "convolution", (EAGER,)),
        ),
        "norm": (normalized, rows_by_phase(found, "norm", (EAGER, COMPILED))),
        "sum": (["norm of a sum, forward and backward", *lost[1:4]], loss_rows(found, "sum", (EAGER, COMPILED))),
        "activation": (
            ["activation, forward and backward", *lost[1:4]],
            loss_rows(found, "activation", (EAGER, COMPILED)),
        ),
        "rotary": (
            ["rotary embedding, forward and backward", *lost[1:4]],
            loss_rows(found, "rotary", (EAGER, COMPILED)),
        ),
        "transformer": (
            [
                "transformer in C++, forward and backward",
                "oxytorch, ms",
                "torch, times as long",
                "math attention",
                ENCODER,
            ],
            loss_rows(found, "transformer", (EAGER, USUAL_MATH, ENCODER)),
        ),
        "embedding": (["gradient of an embedding", *lost[1:3]], loss_rows(found, "embedding", (EAGER,))),
        "accumulated": (
            ["one batch more, its gradients added", *layered[1:]],
            loss_rows(found, "accumulated", (EAGER, BF16_WEIGHTS)),
        ),
        "lstm": (repeated, rows_by_phase(found, "lstm", RECURRENT["lstm"][1:])),
        "gru": (gated, rows_by_phase(found, "gru", RECURRENT["gru"][1:])),
    }
    return {kind: (headings, rows) for kind, (headings, rows) in made.items() if rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    arguments = parser.parse_args()
    machine_facts = facts(arguments.threads)
    found = all_starts(arguments, machine_facts, SCHEMA, measure)
    for headings, rows in tables(found).values():
        for row in (headings, *rows):
            print(f"{row[0]:<60}" + "".join(f"{cell:<24}" for cell in row[1:]).rstrip())
    print("\nMeasured on: " + ", ".join(f"{key} {value}" for key, value in machine_facts.items() if value))
    report = new_report("Race: operators", __doc__, machine_facts)
    for headings, rows in tables(found).values():
        report.table(headings, rows, headings[0].capitalize())
    document = {"schema": SCHEMA, "machine": machine_facts, **found.to_json()}
    write(report, document, arguments.out, "ops", arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
