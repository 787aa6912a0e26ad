"""Holds what a plan states against what the user's own loop shows, on small programs of many kinds.

    python bench/tune/honest.py                              # all programs, 5 starts each
    python bench/tune/honest.py --programs lm_13000,cnn --starts 3
    python bench/tune/honest.py --minutes 9 --keep           # some of them, then with the same command the next
    python bench/tune/honest.py --quick --programs mlp       # a smoke test: few steps, two starts

Each start is a process of its own: one runs the plain loop, one calls `oxytorch.accelerate` first and then runs the
same loop; plain and accelerated starts take turns. The loop's speedup is the ratio of their median steps, with an
interval by t over the starts; the plan's is the mean of what the plans stated, with the width of their own intervals
and of their spread over the starts. Exit status 1 where the two intervals do not meet, or a program is slower than
0.98 of plain.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RESULTS = Path(__file__).resolve().parents[1] / "results" / "honest.json"
SLOWEST = 0.98
Program = tuple[nn.Module, torch.optim.Optimizer, Any, list[Any], dict[str, Any]]
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    """Register a program by its name."""
    PROGRAMS[make.__name__] = make
    return make


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def labelled(shape: tuple[int, ...], classes: int, count: int = 6, target: tuple[int, ...] = ()) -> list[Any]:
    return [(torch.randn(*shape), torch.randint(classes, (shape[0], *target))) for _ in range(count)]


def classifier(model: nn.Module, batches: list[Any], optimizer: torch.optim.Optimizer | None = None) -> Program:
    return model, optimizer or adamw(model), nn.CrossEntropyLoss(), batches, {}


def tokens(rows: int, length: int, words: int, count: int = 6) -> list[Any]:
    return [(torch.randint(words, (rows, length)), torch.randint(words, (rows, length))) for _ in range(count)]


# -- perceptrons -------------------------------------------------------------------------------------------------------


@program
def mlp() -> Program:
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return classifier(model, labelled((128, 784), 10))


@program
def mlp_wide() -> Program:
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 10))
    return classifier(model, labelled((512, 512), 10))


@program
def mlp_tiny_sgd() -> Program:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
    return classifier(model, labelled((32, 16), 2), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@program
def mlp_norms() -> Program:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()]
    return classifier(nn.Sequential(*layers, nn.Linear(256, 10)), labelled((256, 256), 10))


@program
def autoencoder() -> Program:
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 784))
    loss = lambda model, batch: nn.functional.mse_loss(model(batch), batch)  # noqa: E731
    return model, adamw(model), loss, [torch.randn(256, 784) for _ in range(6)], {}


# -- convolutions ------------------------------------------------------------------------------------------------------


def block(inside: int, outside: int) -> list[nn.Module]:
    return [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)]


@program
def cnn() -> Program:
    model = nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), nn.Flatten(), nn.Linear(128 * 64, 10))
    return classifier(model, labelled((32, 3, 64, 64), 10))


@program
def cnn_small_sgd() -> Program:
    model = nn.Sequential(*block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(32 * 49, 10))
    return classifier(model, labelled((64, 1, 28, 28), 10), torch.optim.SGD(model.parameters(), lr=0.05))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


@program
def residual() -> Program:
    body = [Residual(32) for _ in range(4)]
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )
    return classifier(model, labelled((16, 3, 32, 32), 10))


@program
def segmentation() -> Program:
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(48, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 5, 1),
    )  # fmt: skip
    return classifier(model, labelled((8, 3, 64, 64), 5, target=(64, 64)))


@program
def depthwise() -> Program:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 1)]
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 32, 1), nn.Hardswish()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return classifier(model, labelled((32, 3, 32, 32), 10))


@program
def conv1d() -> Program:
    model = nn.Sequential(
        nn.Conv1d(4, 32, 7, padding=3), nn.ReLU(), nn.Conv1d(32, 32, 7, padding=3), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip
    return classifier(model, labelled((64, 4, 512), 5))


# -- sequences ---------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.rnn = kind(width, width, layers, batch_first=True)
        self.out = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(x))[0]).log_softmax(-1)


def word_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.nll_loss(model(batch[0]).flatten(0, 1), batch[1].flatten())


@program
def lstm_13000() -> Program:
    model = Recurrent(nn.LSTM, 13_000, 200, 2)
    return model, adamw(model), word_loss, tokens(20, 35, 13_000), {"clip_norm": 0.25}


@program
def gru() -> Program:
    model = Recurrent(nn.GRU, 1_000, 128, 1)
    return model, adamw(model), word_loss, tokens(32, 32, 1_000), {"clip_norm": 1.0}


@program
def rnn_sgd() -> Program:
    model = Recurrent(nn.RNN, 200, 64, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), word_loss, tokens(32, 32, 200), {}


class Words(nn.Module):
    def __init__(self, words: int, width: int, heads: int, layers: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.e = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, heads, width, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.out(self.encoder(self.e(x) * self.e.embedding_dim**0.5, mask)).log_softmax(-1)


@program
def lm_13000() -> Program:
    model = Words(13_000, 200, 2, 2)
    return model, adamw(model), word_loss, tokens(20, 35, 13_000), {"clip_norm": 0.25}


@program
def lm_2000() -> Program:
    model = Words(2_000, 128, 4, 2, dropout=0.0)
    return model, adamw(model), word_loss, tokens(16, 64, 2_000), {}


@program
def encoder_classifier() -> Program:
    layer = nn.TransformerEncoderLayer(96, 4, 192, batch_first=True, norm_first=True, activation="gelu")
    model = nn.Sequential(
        nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Flatten(), nn.Linear(96 * 24, 8)
    )
    return classifier(model, labelled((32, 24, 96), 8))


# -- other shapes ------------------------------------------------------------------------------------------------------


@program
def embedding_bag() -> Program:
    model = nn.Sequential(nn.EmbeddingBag(20_000, 64), nn.Linear(64, 20))
    return classifier(model, [(torch.randint(20_000, (256, 40)), torch.randint(20, (256,))) for _ in range(6)])


class Graph(nn.Module):
    """Sums over neighbours by `index_add`."""

    def __init__(self, nodes: int, edges: int, width: int) -> None:
        super().__init__()
        self.register_buffer("source", torch.randint(nodes, (edges,)))
        self.register_buffer("target", torch.randint(nodes, (edges,)))
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.out = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(torch.zeros_like(x).index_add(0, self.target, layer(x)[self.source]))
        return self.out(x)


@program
def graph() -> Program:
    return classifier(Graph(2_000, 12_000, 64), labelled((2_000, 64), 7))


@program
def adversarial() -> Program:
    """Two models and their optimizers in a step of the user's own."""
    maker = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256))
    judge = nn.Sequential(nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
    both = nn.ModuleList([maker, judge])
    optimizer = adamw(both, 2e-4)
    fool = nn.functional.binary_cross_entropy_with_logits

    def step(real: Tensor) -> Tensor:
        optimizer.zero_grad()
        fake = maker(torch.randn(len(real), 32))
        ones = torch.ones(len(real), 1)
        loss = fool(judge(real), ones) + fool(judge(fake.detach()), 0 * ones) + fool(judge(fake), ones)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return both, optimizer, None, [torch.randn(128, 256) for _ in range(6)], {"step": step}


# -- one start ---------------------------------------------------------------------------------------------------------


def loop(made: Program, steps: int) -> list[float]:
    """Train as a user would; seconds of each step of the second half."""
    model, optimizer, loss_fn, batches, options = made
    times = []
    for i in range(steps):
        batch = batches[i % len(batches)]
        began = time.perf_counter()
        if own := options.get("step"):
            own(batch)
        else:
            optimizer.zero_grad()
            is_criterion = isinstance(loss_fn, nn.Module)
            loss = loss_fn(model(batch[0]), batch[1]) if is_criterion else loss_fn(model, batch)
            loss.backward()
            if clip := options.get("clip_norm"):
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        times.append(time.perf_counter() - began)
    return times[steps // 2 :]


def start(name: str, seed: int, steps: int, accelerated: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Run one start in this process; what it showed."""
    torch.manual_seed(seed)
    made = PROGRAMS[name]()
    found: dict[str, Any] = {}
    plan = None
    if accelerated:
        import oxytorch as ox  # noqa: PLC0415  (a plain start is without it)

        model, optimizer, loss_fn, batches, own = made
        plan = ox.accelerate(model, optimizer, loss_fn, batches, remember=False, seed=seed, **own, **options)
        found = {
            "stated": plan.speedup,
            "accepted": plan.accepted,
            "as_given": plan.certificate.baseline_seconds,
            "now": plan.certificate.tuned_seconds,
            "tuning": plan.certificate.tuning_seconds + plan.certificate.compile_seconds,
            "busy": plan.certificate.disturbance,
        }
    found["step"] = statistics.median(loop(made, steps))
    if plan is not None and plan.certificate.events:
        found["events"] = plan.certificate.events
    return found


def child(name: str, seed: int, steps: int, accelerated: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Run one start in a process of its own."""
    task = json.dumps([name, seed, steps, accelerated, options])
    environment = {**os.environ, "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    done = subprocess.run(
        [sys.executable, __file__, "--start", task], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode != 0:
        raise RuntimeError(f"a start of {name} failed:\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


# -- all of them -------------------------------------------------------------------------------------------------------


def over_starts(values: list[float]) -> tuple[float, float, float]:
    """Low, mid and high of the mean ratio, by t on the starts' logarithms; one start bounds nothing."""
    from oxytorch.base import starts_interval  # noqa: PLC0415  (a plain start is without it)

    found = starts_interval(values)
    return (0.0, found.mid, math.inf) if len(values) == 1 else (found.low, found.mid, found.high)


def judge(name: str, starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a program's row of the table."""
    low, mid, high = over_starts([one["plain"]["step"] / one["accelerated"]["step"] for one in starts])
    stated = [one["accelerated"]["stated"] for one in starts]
    wide = over_starts([interval[1] for interval in stated])
    states = (
        min(wide[0], *(interval[0] for interval in stated)),
        wide[1],
        max(wide[2], *(interval[2] for interval in stated)),
    )
    return {
        "program": name,
        "stated": states,
        "loop": (low, mid, high),
        "agree": states[0] <= high and low <= states[2],
        "fast_enough": mid >= SLOWEST,
        "tuning_seconds": statistics.median(one["accelerated"]["tuning"] for one in starts),
        "busy": sum(bool(one["accelerated"]["busy"]) for one in starts),
        "starts": starts,
    }


def write(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """The document, of what is done so far."""
    from oxytorch.bench.turns import machine  # noqa: PLC0415

    result = {
        "machine": machine.describe(torch.get_num_threads()),
        "starts": arguments.starts,
        "level": arguments.level,
        "quick": arguments.quick,
        "rows": sorted(rows, key=lambda row: list(PROGRAMS).index(row["program"])),
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result) + "\n")


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", help=f"some of {','.join(PROGRAMS)}")
    parser.add_argument("--starts", type=int, default=5, help="processes of each kind and program")
    parser.add_argument("--seconds", type=float, default=10.0, help="that each loop runs, about")
    parser.add_argument("--level", default="advanced")
    parser.add_argument(
        "--quick", action="store_true", help="two starts of few steps, with a budget of 2 s: no finding"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no program after this time")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--keep", action="store_true", help="go on from the document: its programs count")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        print(json.dumps(start(*json.loads(arguments.start))))
        return 0
    names = arguments.programs.split(",") if arguments.programs else list(PROGRAMS)
    if unknown := [name for name in names if name not in PROGRAMS]:
        parser.error(f"there is no program {unknown[0]!r}; there are {', '.join(PROGRAMS)}")
    options: dict[str, Any] = {"level": arguments.level}
    starts = arguments.starts
    if arguments.quick:
        starts, options["tune_seconds"] = 2, 2.0
    rows = json.loads(arguments.json.read_text())["rows"] if arguments.keep and arguments.json.exists() else []
    have, began = {row["program"] for row in rows}, time.monotonic()
    print(f"{'program':20} {'plan states':>24} {'loop shows':>24}  agree  tuning")
    for name in (name for name in names if name not in have):
        if time.monotonic() - began > 60 * arguments.minutes:
            print("the time is up; --keep goes on from here")
            break
        steps = 20
        if not arguments.quick:
            steps = min(2000, max(40, round(arguments.seconds / child(name, 0, 20, False, options)["step"])))
        found = []
        for seed in range(starts):
            kinds = [("plain", False), ("accelerated", True)]
            found.append({kind: child(name, seed, steps, on, options) for kind, on in kinds[:: (-1) ** seed]})
        row = judge(name, found)
        rows.append(row)
        text = ["{1:.3f} ({0:.3f} to {2:.3f})".format(*row[key]) for key in ("stated", "loop")]
        verdict = "yes" if row["agree"] else "NO"
        slow = "" if row["fast_enough"] else "  SLOWER THAN PLAIN"
        print(f"{name:20} {text[0]:>24} {text[1]:>24}  {verdict:5}  {row['tuning_seconds']:.1f} s{slow}", flush=True)
        write(arguments, rows)
    agree, fast = (sum(row[key] for row in rows) for key in ("agree", "fast_enough"))
    print(f"{agree} of {len(rows)} agree, {fast} are at least {SLOWEST} of plain")
    return int(min(agree, fast) < len(rows))


if __name__ == "__main__":
    sys.exit(main())
