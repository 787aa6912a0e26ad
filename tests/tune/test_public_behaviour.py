"""What `basic` allows shows in nothing that a user of the model may read: each exact strategy, by every reader."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from oxytorch.tune import STRATEGIES, Run, Strategy
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.cpu_only("the strategies are those of a CPU")

EXACT = [name for name, cls in STRATEGIES.items() if cls.kind == "exact" and not cls.feeds]


class Taps(nn.Module):
    """Layers in a row; `taps` returns every activation, as feature extraction does."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, taps: bool = False) -> Any:
        if not taps:
            return self.layers(x)
        found = [x]
        for layer in self.layers:
            found.append(layer(found[-1]))
        return found


class Twice(nn.Module):
    """Each activation is used twice, before and after its nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.act, self.pool, self.drop = nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, taps: bool = False) -> Any:
        a = self.norm(self.first(x))
        b = self.act(a) + a
        c = self.drop(self.pool(b)) + F.avg_pool2d(b, 2)
        out = self.head(c.mean((2, 3)))
        return [x, a, b, c, out] if taps else out


class Attention(nn.Module):
    """Torch's encoder layer between an embedding and an output that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor, taps: bool = False) -> Any:
        a = self.embed(x)
        b = self.body(a)
        out = F.linear(b, self.embed.weight).mean(1)
        return [a, b, out] if taps else out


def images() -> Tensor:
    return torch.randn(6, 3, 8, 8)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: Taps(
            nn.Linear(6, 16),
            nn.ReLU(),
            nn.Linear(16, 16),
            nn.LeakyReLU(0.1),
            nn.LayerNorm(16),
            nn.ReLU6(),
            nn.Linear(16, 8),
            nn.BatchNorm1d(8),
            nn.Hardtanh(),
            nn.Dropout(0.2),
            nn.Linear(8, 4),
        ),
        lambda: torch.randn(6, 6),
    ),
    "cnn": (
        lambda: Taps(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.2),
            nn.Conv2d(4, 4, 3),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 4),
        ),
        images,
    ),
    "twice": (Twice, images),
    "attention": (Attention, lambda: torch.randint(12, (6, 5))),
}
OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
]


class Readings:
    """Takes two steps of a run in every way that a user may read it, and keeps the very tensors that it was given."""

    def __init__(self, model: str, optimizer: int) -> None:
        torch.manual_seed(1)
        build, batch = MODELS[model]
        self.model = build()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.batches = [(batch(), torch.randint(4, (6,))) for _ in range(2)]
        self.run = Run(self.model, self.optimizer, F.cross_entropy, self.batches)
        self.run.step(self.batches[0])  # state is there, as in the middle of a run
        self.kept: list[tuple[str, Any]] = []
        self.handles: list[Any] = []

    def keep(self, name: str, value: Any) -> None:
        self.kept.append((name, value))

    def hooks(self, when: str) -> None:
        """Add hooks of every kind to every module."""

        def retained(name: str, out: Any) -> None:
            self.keep(name, out)
            if isinstance(out, Tensor) and out.requires_grad:
                out.retain_grad()

        for name, module in self.model.named_modules():
            where = f"{when}, {name or 'model'}"
            self.handles += [
                module.register_forward_pre_hook(lambda _m, args, w=where: self.keep(f"input of {w}", args)),
                module.register_forward_hook(lambda _m, _a, out, w=where: retained(f"output of {w}", out)),
                module.register_full_backward_pre_hook(lambda _m, g, w=where: self.keep(f"gradient into {w}", g)),
                module.register_full_backward_hook(lambda _m, g, h, w=where: self.keep(f"gradients of {w}", [g, h])),
            ]
        self.handles.append(
            self.optimizer.register_step_post_hook(
                lambda own, _a, _k: self.keep(f"optimizer, {when}", copy.deepcopy(own.state_dict()))
            )
        )

    def step(self, name: str, batch: Any, **options: Any) -> None:
        self.optimizer.zero_grad()
        out = self.model(batch[0], **options)
        self.keep(f"outputs, {name}", out)
        last = out[-1] if isinstance(out, list) else out
        for i, tap in enumerate(out if isinstance(out, list) else []):
            if tap.requires_grad:
                tap.retain_grad()
                self.keep(f"tap {i}, {name}", tap)
        loss = F.cross_entropy(last, batch[1])
        if isinstance(out, list):  # what is read of an activation is trained, too
            loss = loss + sum(tap.float().square().mean() for tap in out[:-1])
        loss.backward()
        self.keep(f"loss, {name}", loss)
        self.optimizer.step()

    def saved(self, batch: Any) -> None:
        def pack(tensor: Tensor) -> Tensor:
            self.keep("saved for backward", tensor.detach())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.step("saved tensors", batch)

    def penalty(self, batch: Any) -> None:
        """Gradients of gradients, as a gradient penalty takes them."""
        out = self.model(batch[0])
        grads = torch.autograd.grad(F.cross_entropy(out, batch[1]), list(self.model.parameters()), create_graph=True)
        self.optimizer.zero_grad()
        sum(g.square().sum() for g in grads).backward()  # type: ignore[union-attr]
        self.keep("gradient penalty", [p.grad for p in self.model.parameters()])

    def modes(self, batch: Any) -> None:
        self.model.eval()
        self.keep("evaluation", self.model(batch[0]))
        with torch.no_grad():
            self.keep("evaluation without gradients", self.model(batch[0], taps=True))
        with torch.inference_mode():
            self.keep("inference", self.model(batch[0]).clone())
        params = dict(self.model.named_parameters())
        self.keep("functional call", torch.func.functional_call(self.model, params, (batch[0],)))
        self.model.train()
        self.step("back in training", batch)

    def copies(self, batch: Any) -> None:
        file = io.BytesIO()
        torch.save(self.model, file)
        file.seek(0)
        twins = {
            "deep copy": copy.deepcopy(self.model),
            "pickle": pickle.loads(pickle.dumps(self.model)),
            "file": torch.load(file, weights_only=False),
        }
        for name, twin in twins.items():
            for module in twin.modules():
                for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                    getattr(module, hooks).clear()
            torch.manual_seed(8)
            self.keep(name, [twin(batch[0]), {key: set(vars(module)) for key, module in twin.named_modules()}])
        self.keep("copy of the optimizer", copy.deepcopy(self.optimizer).state_dict())
        self.keep("attributes", [sorted(vars(module)) for module in self.model.modules()])
        self.keep("state", self.model.state_dict())

    def everything(self) -> list[tuple[str, Any]]:
        """All readings; what was given out is read at the end, so that later overwriting shows."""
        first, second = self.batches
        torch.manual_seed(5)
        self.step("first", first)
        self.step("taps", second, taps=True)
        self.hooks("added later")
        self.step("second", second)
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.saved(first)
        self.penalty(second)
        self.modes(first)
        self.step("taps again", first, taps=True)
        self.copies(second)
        self.keep("random state", torch.get_rng_state())
        return [(name, frozen(value)) for name, value in self.kept]


def frozen(value: Any) -> Any:
    """Values, layouts and retained gradients, comparable by ==."""
    if isinstance(value, Tensor):
        grad = None if not value.requires_grad or value.is_leaf else frozen(value.grad)
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad, grad, bits
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return [frozen(item) for item in value] if isinstance(value, list | tuple) else value


def first_difference(mine: list[tuple[str, Any]], plain: list[tuple[str, Any]]) -> str:
    if [name for name, _ in mine] != [name for name, _ in plain]:
        return "other readings were taken"
    return next((name for (name, a), (_, b) in zip(mine, plain, strict=True) if a != b), "")


def difference(strategy: str | type[Strategy], model: str, optimizer: int) -> str | None:
    """The first reading in which a run with the strategy differs from one without; None where it does not apply."""
    plain, mine = Readings(model, optimizer), Readings(model, optimizer)
    name = strategy if isinstance(strategy, str) else strategy.name
    if not isinstance(strategy, str):
        mine.run.strategies[name] = strategy
    if mine.run.strategy(name).applies(mine.run) is not True:
        return None
    for readings in (plain, mine):
        readings.hooks("added before")
    mine.run.set_active([name])
    try:
        found = mine.everything()
    except RuntimeError as error:
        return f"it throws: {error}"
    finally:
        mine.run.set_active([])
    return first_difference(found, plain.everything())


def differences(strategy: str) -> dict[tuple[str, int], str | None]:
    return {(model, i): difference(strategy, model, i) for model in MODELS for i in range(len(OPTIMIZERS))}


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_strategy_shows_nowhere(name: str) -> None:
    # In a process of its own: an allocator that another test has tuned cannot be tuned again.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        found = process.submit(differences, name).result()
    applied = {where: what for where, what in found.items() if what is not None}
    assert applied or name in ("pinned_threads", "packed_weights")  # want several caches, and several batches a step
    assert not any(applied.values()), applied


class Overwrites(Strategy):
    """Activations in a Sequential write over their input: right in training without hooks, and seen by readers."""

    name = "overwrites"
    kind = "exact"

    def apply(self, run: Run) -> None:
        self.found = [m for m in run.model.modules() if isinstance(m, nn.ReLU)]
        for module in self.found:
            module.inplace = True

    def revert(self, run: Run) -> None:
        for module in self.found:
            module.inplace = False


def test_the_readers_see_what_is_written_over() -> None:
    assert all(difference(Overwrites, model, 0) for model in ("cnn", "mlp"))


def test_nothing_writes_over_the_users_activations() -> None:
    assert "inplace_activations" not in STRATEGIES
