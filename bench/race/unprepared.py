"""Races models that nobody prepared, in float32: torch's transformer, a GPT that writes attention out, Hugging Face's.

`eager` is torch's loop with its fused AdamW, `compiled` the same with `model.compile()`. `oxytorch` is the eager loop
with those native strategies of oxytorch.accelerate that find something in the model, chosen without a measurement: of
`native_attention`, `native_operators`, `native_layer_norm`, `native_gate`, `native_activation` and
`native_cross_entropy`.

Every contender has a model of its own with the same weights and draws from the same generator, takes its turns in a
random order each round, and has the same number of threads. Memory is the most that tensors of a step take beyond
weights and optimizer state. Weights are random: nothing is downloaded.

    python bench/race/unprepared.py [--threads 2] [--starts 4] [--seconds 3] [--quick] [--case NAME]... [--keep PATH]
        [--json PATH]

Ratios are paired by round, a start counts by its median, and intervals hold 95%. Those of Hugging Face need
`transformers` (bench/race/requirements.txt). Prints the ratios, and writes bench/report/unprepared.{json,html}.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import oxytorch as ox
import torch
from _peers import PEERS
from _race import (
    MOST_ROUNDS,
    Contender,
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
    text,
    write,
)
from oxytorch.tune import Run
from torch import Tensor, nn
from torch.nn import functional as F

SCHEMA = "oxytorch-unprepared/1"
EAGER, COMPILED, OURS = "eager", "compiled", "oxytorch"
CONTENDERS = (OURS, EAGER, COMPILED)
STRATEGIES = (
    "native_attention",
    "native_operators",
    "native_layer_norm",
    "native_gate",
    "native_activation",
    "native_cross_entropy",
)
# Batch and tokens.
CASES = {
    "torch's encoder, 16 x 128": (16, 128),
    "torch's encoder, 4 x 512": (4, 512),
    "BERT, 8 x 512": (8, 512),
    "BERT, 16 x 128": (16, 128),
    "GPT-2, 4 x 512": (4, 512),
    "LLaMA, 4 x 256": (4, 256),
    "T5, 8 x 128": (8, 128),
    "Gemma 2, 4 x 256": (4, 256),
    "written-out GPT, 4 x 512": (4, 512),
}
QUICK = {"torch's encoder, 2 x 16": (2, 16), "written-out GPT, 1 x 16": (1, 16), "LLaMA, 1 x 16": (1, 16)}
OF_TORCH, WRITTEN_OUT = "torch's encoder", "written-out GPT"
WORDS = 4096


class Encoder(nn.Module):
    """torch's transformer as it comes, whose dropout is 0.1, over tokens; the first token's class is told."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, max(2, width // 64), 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.layers(self.tokens(tokens))[:, 0])
        return F.cross_entropy(scores, labels)


class WrittenOut(nn.Module):
    """A layer of a GPT whose attention is written out, with dropout of 0.1, as minGPT and courses have it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            t.view(batch, tokens, self.heads, -1).transpose(1, 2) for t in self.project(self.first(x)).split(width, 2)
        )
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(tokens, tokens).tril() == 0, float("-inf"))
        y = F.dropout(F.softmax(scores, dim=-1), 0.1) @ v
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(x.shape)), 0.1)
        made: Tensor = x + self.mlp(self.second(x))
        return made


class WrittenOutGpt(nn.Module):
    """Tokens, learned places, layers, and the loss of the next token."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Embedding(tokens, width)
        self.layers = nn.Sequential(*(WrittenOut(width, max(2, width // 64)) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.tokens(tokens) + self.places.weight[: tokens.shape[1]], 0.1)
        logits = self.head(self.norm(self.layers(x)))[:, :-1]
        return F.cross_entropy(logits.reshape(-1, WORDS), labels[:, 1:].reshape(-1))


def of_hugging_face(kind: str, is_quick: bool) -> nn.Module:
    """Four layers of width 256 to 512, with the options that the library gives its models."""
    import transformers as hf  # noqa: PLC0415  (a peer, which may be missing)

    if kind == "BERT":
        made = hf.BertForSequenceClassification(
            hf.BertConfig(
                vocab_size=WORDS, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
            )
        )
    elif kind == "GPT-2":
        made = hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=WORDS, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
        )
    elif kind == "T5":
        made = hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=WORDS, d_model=256, d_ff=1024, num_layers=4, num_heads=4, d_kv=64, decoder_start_token_id=0
            )
        )
    elif kind == "Gemma 2":
        made = hf.Gemma2ForCausalLM(
            hf.Gemma2Config(
                vocab_size=WORDS,
                hidden_size=256,
                intermediate_size=1024,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                attn_implementation="eager",  # which the library asks for: its other kernels have no cap
            )
        )
    else:
        width, layers, heads = (32, 1, 2) if is_quick else (512, 4, 8)
        made = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=WORDS,
                hidden_size=width,
                intermediate_size=width * 43 // 16,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=heads // 2,
            )
        )
    model: nn.Module = made
    return model


def model_of(case: str) -> nn.Module:
    """With weights of a fixed seed, in training."""
    kind, is_quick = case.partition(",")[0], case in QUICK
    torch.manual_seed(0)
    width, layers = (32, 1) if is_quick else (256, 4)
    if kind == OF_TORCH:
        return Encoder(width, layers).train()
    if kind == WRITTEN_OUT:
        return WrittenOutGpt(width, layers, (QUICK | CASES)[case][1]).train()
    return of_hugging_face(kind, is_quick).train()


def batch_of(case: str) -> dict[str, Tensor]:
    """Random tokens; half of BERT's first sample is padding."""
    generator = torch.Generator().manual_seed(1)
    size = (QUICK | CASES)[case]
    tokens = torch.randint(WORDS, size, generator=generator)
    if case.startswith(OF_TORCH):
        return {"tokens": tokens, "labels": tokens[:, 0] % 2}
    if case.startswith(WRITTEN_OUT):
        return {"tokens": tokens, "labels": tokens}
    if not case.startswith("BERT"):
        return {"input_ids": tokens, "labels": tokens}
    seen = torch.ones_like(tokens)
    seen[0, size[1] // 2 :] = 0
    return {"input_ids": tokens, "attention_mask": seen, "labels": tokens[:, 0] % 2}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Both kinds of models make it themselves."""
    made = model(**batch)
    loss: Tensor = made if isinstance(made, Tensor) else made.loss
    return loss


class Step:
    """A training step of one contender, with a model of its own."""

    def __init__(self, case: str, contender: str) -> None:
        model, self.batch = model_of(case), batch_of(case)
        if contender == COMPILED:
            model.compile()  # type: ignore[no-untyped-call]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.run = Run(model, optimizer, loss_of, [self.batch], owns_loop=True)
        names = STRATEGIES if contender == OURS else ()
        self.names = [name for name in names if self.run.strategy(name).applies(self.run) is True]

    def take(self) -> Tensor:
        return self.run.step(self.batch)

    def peak_bytes(self) -> int:
        self.run.model.zero_grad()  # a meter counts from what is there
        meter = ox.memory.Meter()
        with meter:
            self.take()
        return int(meter.peak_bytes)


def turns_of(steps: dict[str, Step]) -> dict[str, Callable[[], object]]:
    """What puts a contender's strategies in, and those of the others out: kernels serve the whole process."""

    def turn(name: str) -> Callable[[], object]:
        def begin() -> None:
            for other in steps.values():
                if other is not steps[name]:
                    other.run.set_active([])
            steps[name].run.set_active(steps[name].names)

        return begin

    return {name: turn(name) for name in steps}


def measure(arguments: argparse.Namespace) -> Measured:
    """One start: every case that was asked for, in this process."""
    torch.set_num_threads(arguments.threads)
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))  # last: what the environment has comes first
    seconds, rounds = (0.2, 5) if arguments.quick else (arguments.seconds, MOST_ROUNDS)
    found = Measured()
    for case in QUICK if arguments.quick else CASES:
        if not is_wanted(arguments, case):
            continue
        if not case.startswith((OF_TORCH, WRITTEN_OUT)) and importlib.util.find_spec("transformers") is None:
            found.absent[case] = {"transformers": "not installed; see bench/race/requirements.txt"}
            progress(f"{case}: transformers is not installed")
            continue
        progress(f"racing {case} ...")
        steps = {name: Step(case, name) for name in CONTENDERS if name != COMPILED or not arguments.quick}
        progress(f"with {', '.join(steps[OURS].names)}")
        turns = turns_of(steps)
        found.cases[case] = race(
            [Contender(name, {"step": step.take}, before=turns[name]) for name, step in steps.items()], seconds, rounds
        )
        for name, step in steps.items():
            turns[name]()
            found.cases[case][f"{name}: bytes"] = np.array([float(step.peak_bytes())])
        steps[OURS].run.set_active([])
    return found


def tables(found: Measured) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Headings and rows of what was measured."""

    def share(times: dict[str, np.ndarray], name: str) -> str:
        of_eager = f"{EAGER}: bytes"
        return text(ratio(times, f"{name}: bytes", of_eager)) if name in times else "left out"

    rows = []
    for case, times in found.cases.items():
        rivals = [text(ratio(times, name, OURS)) if name in times else "left out" for name in (EAGER, COMPILED)]
        given = f"{over_starts(times[f'{EAGER}: bytes']).mid / 2**20:.0f}"
        rows.append(
            [case, text(over_starts(times[OURS]), 1e3), *rivals, given, share(times, OURS), share(times, COMPILED)]
        )
    head = ["a step of", "oxytorch, ms", "eager, times as long", "compiled", "tensors, eager, MiB",
            "oxytorch, of eager's", "compiled, of eager's"]  # fmt: skip
    return {"unprepared": (head, rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="transformers")
    machine_facts = facts(arguments.threads)
    found = all_starts(arguments, machine_facts, SCHEMA, measure)
    report = new_report("Race: models that nobody prepared", __doc__, machine_facts)
    for kind, (headings, rows) in tables(found).items():
        for row in (headings, *rows):
            print("  ".join(f"{cell:<26}" for cell in row).rstrip())
        report.table(headings, rows, kind.capitalize())
    print("Measured on: " + ", ".join(f"{key} {value}" for key, value in machine_facts.items() if value))
    document: dict[str, Any] = {"schema": SCHEMA, "machine": machine_facts, **found.to_json()}
    write(report, document, arguments.out, "unprepared", arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
