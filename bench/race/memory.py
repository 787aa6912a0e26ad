"""Races a step under a memory budget against the ways to checkpoint that torch has, at the same measured peak.

Each model trains by AdamW. Rivals: `plain` keeps everything; `per layer` puts every block under
torch.utils.checkpoint (use_reentrant=False); `selective` does so and keeps the results of matrix products, convolutions
and attention; `sequential` is torch.utils.checkpoint.checkpoint_sequential over the blocks at the number of segments
that has the lowest peak. Ours is oxytorch.memory.fit, once with the peak of each rival
as its budget, and once with budgets of 60 and 40 % of what activations take, and the least.

Every contender has a model of its own with the same weights, takes its turns in a random order each round, and has the
same number of threads. Peaks are those of tensors, exact, by oxytorch.memory.Meter.

    python bench/race/memory.py [--threads 2] [--starts 4] [--seconds 3] [--quick] [--case NAME]... [--keep PATH]
        [--json PATH]

Ratios are paired by round, a start counts by its median, and intervals hold 95%. Prints the ratios, and writes
bench/report/memory.{json,html}.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import oxytorch as ox
import torch
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
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

SCHEMA = "oxytorch-memory/1"
PLAIN, LAYERS, SELECTIVE, SEQUENTIAL = "plain", "per layer", "selective", "sequential"
RIVALS = (LAYERS, SELECTIVE, SEQUENTIAL)
SHARES = {"60 %": 0.6, "40 %": 0.4, "least": 0.0}


PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def kept_products() -> Any:
    """The contexts of torch's selective checkpointing that keep what takes long to compute."""

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A pre-norm transformer layer with dropout."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Bottleneck(nn.Module):
    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.convs = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.pass_by: nn.Module = nn.Identity()
        if stride != 1 or width != out:
            self.pass_by = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convs(x) + self.pass_by(x))


class Net(nn.Module):
    """What goes in, blocks one after another, and what comes out."""

    def __init__(self, first: nn.Module, blocks: Sequence[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last
        self.run: Callable[[Tensor], Tensor] = self.each

    def each(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def per_layer(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def selective(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=kept_products)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self.first(x)))


class Pooled(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean((2, 3)) if x.dim() == 4 else x.mean(1))


class Patches(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).transpose(1, 2)


def gpt(quick: bool) -> tuple[Net, Tensor, Tensor]:
    layers, width, batch, tokens = (4, 32, 2, 32) if quick else (12, 256, 4, 128)
    net = Net(nn.Embedding(512, width), [Layer(width, 4, True) for _ in range(layers)], nn.Linear(width, 512))
    data = torch.randint(512, (batch, tokens + 1))
    return net, data[:, :-1], data[:, 1:]


def vit(quick: bool) -> tuple[Net, Tensor, Tensor]:
    layers, width, batch = (4, 32, 2) if quick else (12, 192, 8)
    net = Net(Patches(width, 8), [Layer(width, 3 if not quick else 4, False) for _ in range(layers)], Pooled(width, 10))
    return net, torch.randn(batch, 3, 64, 64), torch.randint(10, (batch,))


def resnet(quick: bool) -> tuple[Net, Tensor, Tensor]:
    stages = [(16, 2, 1), (32, 2, 2)] if quick else [(16, 3, 1), (32, 4, 2), (64, 6, 2), (128, 3, 2)]
    blocks: list[nn.Module] = []
    width = 16
    for inner, count, stride in stages:
        for i in range(count):
            blocks.append(Bottleneck(width, inner, stride if i == 0 else 1))
            width = 4 * inner
    first = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return (
        Net(first, blocks, Pooled(width, 10)),
        torch.randn(4 if quick else 16, 3, 32, 32),
        torch.randint(10, (4 if quick else 16,)),
    )


MODELS = {"GPT, 12 layers": gpt, "ViT, 12 layers": vit, "ResNet-50, narrow": resnet}


class Step:
    """A training step of one contender, with a model of its own."""

    def __init__(self, model: str, quick: bool) -> None:
        torch.manual_seed(0)
        self.net, self.x, self.y = MODELS[model](quick)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        self.plan: ox.memory.MemoryPlan | None = None

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.net(self.x).flatten(0, -2), self.y.flatten()).backward()
        self.optimizer.step()

    def peak(self) -> int:
        """Bytes that a step takes beyond what lives between steps."""
        self()
        with ox.memory.Meter() as meter:
            self()
        return meter.peak_bytes

    def fit(self, budget: int) -> None:
        self.plan = ox.memory.fit(self.net, self, budget, blocks=[f"blocks.{i}" for i in range(len(self.net.blocks))])


def best_segments(model: str, quick: bool) -> Step:
    """checkpoint_sequential at the number of segments that has the lowest peak."""
    step = Step(model, quick)
    found = []
    for segments in range(2, len(step.net.blocks) + 1):
        step.net.run = lambda x, n=segments: checkpoint_sequential(step.net.blocks, n, x, use_reentrant=False)
        found.append((step.peak(), segments))
    segments = min(found)[1]
    step.net.run = lambda x: checkpoint_sequential(step.net.blocks, segments, x, use_reentrant=False)
    return step


def contenders(model: str, quick: bool) -> tuple[dict[str, Step], dict[str, int]]:
    """Steps by contender, and the peaks that they were made for."""
    steps = {PLAIN: Step(model, quick), LAYERS: Step(model, quick), SEQUENTIAL: best_segments(model, quick)}
    steps[SELECTIVE] = Step(model, quick)
    steps[LAYERS].net.run, steps[SELECTIVE].net.run = steps[LAYERS].net.per_layer, steps[SELECTIVE].net.selective
    peaks = {name: step.peak() for name, step in steps.items()}
    probe = Step(model, quick)
    probe.fit(1 << 40)
    assert probe.plan is not None
    # A plan counts what lives between steps too.
    between = probe.plan.plain_peak - peaks[PLAIN]
    budgets = {f"fit to {name}": peaks[name] + between for name in RIVALS}
    floor = probe.plan.floor
    for name, share in SHARES.items():
        budgets[f"fit {name}"] = max(between + int(share * peaks[PLAIN]), floor + floor // 500)
    for name, budget in budgets.items():
        step = Step(model, quick)
        for slack in (1.0, 1.01, 1.05):  # the floor is a prediction
            try:
                step.fit(int(slack * budget))
            except torch.OutOfMemoryError as error:
                progress(f"{model}, {name}: {error}")
                continue
            steps[name], peaks[name] = step, step.peak()
            assert peaks[name] + between <= slack * budget, (name, peaks[name] + between, budget)
            break
    return steps, peaks


def measure(arguments: argparse.Namespace) -> Measured:
    """One start: every case that was asked for, in this process."""
    torch.set_num_threads(arguments.threads)
    ox._C.trainer.tune_allocator(None)
    seconds, rounds = (0.2, 5) if arguments.quick else (arguments.seconds, MOST_ROUNDS)
    found = Measured()
    for model in MODELS:
        if not is_wanted(arguments, model):
            continue
        progress(f"planning {model} ...")
        steps, peaks = contenders(model, arguments.quick)
        progress(f"racing {model} ...")
        found.cases[model] = race([Contender(name, {"step": step}) for name, step in steps.items()], seconds, rounds)
        found.layout += [(f"{model}: {name}", peak, None) for name, peak in peaks.items()]
    return found


def tables(found: Measured) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Headings and rows of what was measured, by kind."""
    peaks = {what: int(bytes_) for what, bytes_, _ in found.layout}
    rows = []
    beside = []
    for model, times in found.cases.items():
        plain = peaks[f"{model}: {PLAIN}"]
        for name in times:
            share = f"{100 * peaks[f'{model}: {name}'] / plain:.0f} %"
            rows.append([model, name, share, text(over_starts(times[name]), 1e3), text(ratio(times, name, PLAIN))])
        for rival in RIVALS:
            ours = f"fit to {rival}"
            if ours in times:
                of = [f"{100 * peaks[f'{model}: {name}'] / plain:.0f} %" for name in (rival, ours)]
                beside.append([model, rival, *of, text(ratio(times, rival, ours))])
    return {
        "budgets": (["model", "step", "peak, of plain", "ms", "times as long as plain"], rows),
        "rivals": (["model", "torch's", "its peak", "ours", "torch's step, times as long as ours"], beside),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    arguments = parser.parse_args()
    machine_facts = facts(arguments.threads)
    found = all_starts(arguments, machine_facts, SCHEMA, measure)
    for headings, rows in tables(found).values():
        for row in (headings, *rows):
            print("".join(f"{cell:<24}" for cell in row).rstrip())
        print()
    print("Measured on: " + ", ".join(f"{key} {value}" for key, value in machine_facts.items() if value))
    report = new_report("Race: memory", __doc__, machine_facts)
    for kind, (headings, rows) in tables(found).items():
        report.table(headings, rows, kind.capitalize())
    document: dict[str, Any] = {"schema": SCHEMA, "machine": machine_facts, **found.to_json()}
    write(report, document, arguments.out, "memory", arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
