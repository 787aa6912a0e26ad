"""Small models on which the built-in strategies are tried, and where each of them applies.

A strategy for another device runs on a stand-in for it: a recorder of operators for a device's graphs, flags of torch's
that are set though no card reads them, attention that says which kernels it was allowed. A strategy without a workload
is either in `LEFT_OUT` with its reason or a failure of `test_strategies.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from oxytorch import _C
from oxytorch.amp import hardware_support
from oxytorch.tune import STRATEGIES, Run, observe
from oxytorch.tune import run as run_module
from oxytorch.tune.strategies import precision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ..trainer.recorder import Recorder

#: Strategies that no test on a machine without the hardware can run, each with the reason.
LEFT_OUT: dict[str, str] = {}
#: Those that take seconds each time: they have workloads of their own.
COMPILING = ("compile", "compile_dynamic", "compile_max_autotune", "compile_reduce_overhead")


class Conv(nn.Module):
    """Convolutions, batch normalisation, pooling, an activation that may be in place and one that may not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.head((F.relu(y) + y).mean((2, 3)))


class Transformer(nn.Module):
    """Attention by torch's kernel, dropout, and an output that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.qkv = nn.Linear(16, 48, bias=False)  # keys with a bias get gradients that are all rounding
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.out = nn.Linear(16, 16, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        q, k, v = self.qkv(h).view(*h.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        h = h + F.dropout(self.down(F.gelu(self.up(h))), 0.1, self.training)
        return self.out(h).flatten(0, 1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0]).flatten(0, 1)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.gru = nn.GRU(8, 8, 2, dropout=0.1, bidirectional=True)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(x))[0]).flatten(0, 1)


class Normed(nn.Module):
    """A residual and dropout before each norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.out = nn.Embedding(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.rms = nn.LayerNorm(16), nn.RMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + F.dropout(self.inner(self.norm(h)), 0.1, self.training)
        out: Tensor = self.out(self.rms(h + torch.tanh(self.inner(self.norm(h))))).flatten(0, 1)
        return out


class Swiglu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.up = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 24)
        self.down, self.act = nn.Linear(24, 16), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        out: Tensor = self.down(self.act(self.gate(h)) * self.up(h)).flatten(0, 1)
        return out


@cache
def bfloat16_lstm() -> bool:
    """Whether torch computes an LSTM under bfloat16 autocast here: oneDNN refuses where there is no AVX-512."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(8, 8)(torch.zeros(2, 1, 8))
    except RuntimeError as error:
        assert "could not create a primitive" in str(error)
        return False
    return True


class Stateful(nn.Module):
    """Counts and averages in forward, in a buffer, in a plain tensor and in a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.1), nn.Linear(12, 4))
        self.register_buffer("mean", torch.zeros(6))
        self.last = torch.zeros(6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.last.copy_(x[0])
        return self.fc(x - self.mean)


class Volume(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8, 4))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3, 12, 12), torch.randint(4, (6,))


def many_images() -> tuple[Tensor, Tensor]:
    return torch.randn(24, 3, 6, 6), torch.randint(4, (24,))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(16, (4, 10)), torch.randint(16, (40,))


def rows(count: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 6), torch.randint(4, (count,))


def volumes() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 2, 4, 4, 4), torch.randint(4, (3,))


Batch = tuple[Tensor, Tensor]
Patch = Callable[[pytest.MonkeyPatch], None]


def as_it_is(_: pytest.MonkeyPatch) -> None:
    """Nothing but the machine."""


@dataclass(frozen=True)
class Workload:
    """A model, its batches, and what has to be around it.

    Attributes
    ----------
    build, batch : callable
    of : tuple of str
        The strategies that it is for; empty: all that apply.
    patch : callable
        Puts the stand-ins in place.
    options : mapping
        Of the `Run`.
    loader : bool
        Whether batches come from a DataLoader, and drawing them takes half of a step.
    prepare : callable
        Does the rest to the run.
    without : tuple of str
        Requirements of the strategy that its stand-in cannot serve.
    sizes : sequence of int
        Rows of each batch, where they differ.
    """

    build: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    of: tuple[str, ...] = ()
    patch: Patch = as_it_is
    options: dict[str, Any] = field(default_factory=dict)
    loader: bool = False
    prepare: Callable[[Run], None] = lambda run: None
    without: tuple[str, ...] = ()
    sizes: Sequence[int] = ()

    @contextmanager
    def around(self) -> Iterator[None]:
        """The stand-ins, for a while."""
        threads = torch.get_num_threads()
        with pytest.MonkeyPatch.context() as patch:
            # Rounding to bfloat16 is the same where a processor has no instruction for it.
            patch.setattr(precision, "hardware_support", lambda *_: (True, ""))
            self.patch(patch)
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def run(self, dtype: torch.dtype = torch.float32) -> Run:
        """Make the run, the same each time; float64 for a reference."""
        torch.manual_seed(1)
        model = self.build()
        batches = [self.batch(n) for n in self.sizes] if self.sizes else [self.batch() for _ in range(3)]
        if dtype is not torch.float32:
            model = model.to(dtype)
            batches = [tuple(t.to(dtype) if t.is_floating_point() else t for t in batch) for batch in batches]
        # An eps as large as gradients are: else the step is their sign, and rounding one of the least to the other side
        # of zero is an error as large as a step.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        data = None
        if self.loader:
            samples = [(x, y) for batch in batches for x, y in zip(*batch, strict=True)]
            data = DataLoader(samples, batch_size=batches[0][0].shape[0])
        run = Run(model, optimizer, F.cross_entropy, batches, data=data, **self.options)
        run.fetch_share = 0.5 if self.loader else 0.0
        self.prepare(run)
        return run

    def needed(self, name: str) -> list[str]:
        """What is made active for a strategy: what it requires, and itself."""
        return [*(one for one in STRATEGIES[name].requires if one not in self.without), name]

    def applies(self, run: Run, name: str) -> bool:
        """Whether a strategy is for this run."""
        if name in LEFT_OUT or (name not in self.of and (self.of or name in COMPILING)):
            return False
        if name.startswith("split_") and isinstance(run.model, Stateful):
            return False  # an average kept in forward sees the pieces: for the verifier to find
        if STRATEGIES[name].kind == "precision" and isinstance(run.model, Recurrent) and not bfloat16_lstm():
            return False
        return all(run.strategy(one).applies(run) is True for one in self.needed(name))


def drawn(run: Run) -> Iterable[Any]:
    """What an epoch of the run takes its batches from."""
    return run.batches if run.data is None else run.data


# --- stand-ins -------------------------------------------------------------------------------------------------------


def two_caches(patch: pytest.MonkeyPatch) -> None:
    """Two intra-op threads on two cores, each with a cache of its own."""
    known = _C.base.cores()
    patch.setattr(_C.base, "cores", lambda: {**known, "last_level_caches": 2})
    torch.set_num_threads(2)


def many_threads(patch: pytest.MonkeyPatch) -> None:
    """One thread more than there are cores."""
    torch.set_num_threads(max(1, int(_C.base.cores()["usable_physical"])) + 1)


def recorded(patch: pytest.MonkeyPatch) -> None:
    """Operators noted and played again in the place of a device's graphs."""
    patch.setattr(STRATEGIES["step_graph"], "_recorder", Recorder)


def tiny_average(run: Run) -> None:
    """One step, and a number in the optimizer's state that is denormal."""
    run.step(run.batches[0])
    average = run.original.state[run.params[0]]["exp_avg"]
    if average.dtype is torch.float32:
        average.view(-1)[0] = 1e-40


def accumulating(run: Run) -> None:
    """Steps of several batches."""
    run.accumulation = 3


def on_a_card(run: Run) -> None:
    """The run says that it is on a card; its tensors stay where they are."""
    run.device = torch.device("cuda", 0)


ALLOWED: list[
    tuple[bool, ...]
] = []  # kernels that the stand-in for attention was allowed: flash, efficient, cuDNN, math


def card(patch: pytest.MonkeyPatch) -> None:
    """A card of capability 8.0, whose attention kernels are all computed by the one of the CPU."""
    plain = F.scaled_dot_product_attention
    ALLOWED.clear()

    def computed(*args: Any, **kwargs: Any) -> Tensor:
        cuda = torch.backends.cuda
        flags = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled())
        ALLOWED.append((*flags, cuda.math_sdp_enabled()))
        if flags[0] or cuda.math_sdp_enabled():
            return plain(*args, **kwargs)
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
            return plain(*args, **kwargs)

    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    patch.setattr(F, "scaled_dot_product_attention", computed)


def card_that_takes_the_efficient_kernel(patch: pytest.MonkeyPatch) -> None:
    """As `card`, and torch's own choice is the memory-efficient kernel."""
    card(patch)
    seen = observe.Observation(frozenset({"aten::_scaled_dot_product_efficient_attention"}), random=True, tiny=False)
    patch.setattr(run_module, "observe", lambda run: seen)


def quick_compiler(patch: pytest.MonkeyPatch) -> None:
    """The compiler's front, which traces and takes gradients apart, and eager operators behind it."""
    plain = torch.compile

    def traced(function: Callable[..., Any], *, dynamic: bool, options: dict[str, Any]) -> Any:
        assert "fallback_random" in options
        return plain(function, dynamic=dynamic, backend="aot_eager")

    patch.setattr(torch, "compile", traced)


def quick_compiler_on_a_card(patch: pytest.MonkeyPatch) -> None:
    """Both; a step of its graphs begins, and there is no memory to give back."""
    quick_compiler(patch)
    patch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)


#: Workloads by name. The first four are for whatever applies.
WORKLOADS: dict[str, Workload] = {
    "conv": Workload(Conv, images),
    "transformer": Workload(Transformer, tokens),
    "recurrent": Workload(Recurrent, tokens),
    "stateful": Workload(Stateful, rows),
    "gated": Workload(Gated, tokens, ("native_gru",)),
    "normed": Workload(Normed, tokens, ("native_layer_norm",)),
    "swiglu": Workload(Swiglu, tokens, ("native_gate",)),
    "channels": Workload(
        lambda: nn.Sequential(
            nn.Conv2d(3, 64, 3), nn.Tanh(), nn.Conv2d(64, 32, 2, bias=False), nn.Flatten(), nn.Linear(288, 4)
        ),
        many_images,
        ("native_convolution",),
        without=("bf16_autocast",),
    ),
    "volume": Workload(Volume, volumes, ("channels_last_3d",)),
    "threads": Workload(Conv, images, ("one_thread", "physical_cores"), many_threads),
    "caches": Workload(Conv, images, ("pinned_threads",), two_caches),
    "denormals": Workload(Stateful, rows, ("flush_denormals",), prepare=tiny_average),
    "pieces": Workload(
        lambda: Stateful().fc, lambda: rows(8), ("split_2", "split_4", "split_8"), options={"owns_loop": True}
    ),
    "graph": Workload(
        lambda: Stateful().fc, rows, ("step_graph",), recorded, {"owns_loop": True}, without=("step_tail",)
    ),
    "windows": Workload(
        lambda: Stateful().fc, rows, ("packed_weights",), prepare=accumulating, without=("native_linear",)
    ),
    "classes": Workload(
        lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 300)), rows, ("native_cross_entropy",)
    ),
    "loader": Workload(Stateful, rows, ("prefetch", "loader_workers"), options={"owns_loop": True}, loader=True),
    "card": Workload(
        Transformer,
        tokens,
        ("tf32", "cudnn_benchmark", "efficient_attention", "cudnn_attention"),
        card,
        prepare=on_a_card,
    ),
    "card without flash": Workload(
        Transformer, tokens, ("flash_attention",), card_that_takes_the_efficient_kernel, prepare=on_a_card
    ),
    "compiled": Workload(lambda: Stateful().fc, rows, ("compile", "compile_max_autotune"), quick_compiler),
    "shapes": Workload(lambda: Stateful().fc, rows, ("compile_dynamic",), quick_compiler, sizes=(6, 9, 7)),
    "compiled on a card": Workload(
        lambda: Stateful().fc, rows, ("compile_reduce_overhead",), quick_compiler_on_a_card, prepare=on_a_card
    ),
}
if int(_C.base.cores()["usable_physical"]) < 2:
    del WORKLOADS["caches"]
    LEFT_OUT["pinned_threads"] = "there are no two cores to place threads on"
if not hardware_support("cpu", torch.bfloat16)[0]:
    for name in ("native_linear", "native_convolution"):
        LEFT_OUT[name] = "its products are of bfloat16, which this processor does not multiply"


def cells() -> list[tuple[str, str]]:
    """Return the pairs of strategy and workload in which the strategy applies."""
    found = []
    for workload, its in WORKLOADS.items():
        with its.around():
            run = its.run()
            found += [(name, workload) for name in sorted(STRATEGIES) if its.applies(run, name)]
    return found
