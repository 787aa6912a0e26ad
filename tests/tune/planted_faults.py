"""Faults that real accelerators have had, each a strategy under a claim that is believable, and healthy ones beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from oxytorch.tune.escrow import Escrow
from oxytorch.tune.run import Run, plain_step, rows, split
from oxytorch.tune.strategy import Kind, Strategy
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

DROPOUT = F.dropout

# -- workloads -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A block of a language model, with dropout."""

    def __init__(self, width: int = 32, p: float = 0.1) -> None:
        super().__init__()
        self.table = nn.Embedding(31, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(width, 31, bias=False)
        self.head.weight = self.table.weight
        self.causal = True

    def body(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(x))))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.table(tokens)))


def mlp(device: torch.device) -> Run:
    """Batch norm, two parameter groups, clipping."""
    model = nn.Sequential(
        nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5)
    )
    model.to(device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 3e-3)
    batches = [(torch.randn(31, 16, device=device), torch.randint(5, (31,), device=device)) for _ in range(4)]
    loader = DataLoader(TensorDataset(torch.randn(50, 16), torch.arange(50)), batch_size=16)
    return Run(model, optimizer, nn.CrossEntropyLoss(), batches, clip_norm=0.5, data=loader, owns_loop=True)


def conv(device: torch.device) -> Run:
    """Convolutions and momentum."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 4),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    batches = [(torch.randn(16, 3, 12, 12, device=device), torch.randint(4, (16,), device=device)) for _ in range(4)]
    return Run(model, optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches, owns_loop=True)


def gpt(device: torch.device) -> Run:
    """Attention, tied weights, dropout."""
    model = Attention().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.8, 0.95))
    batches = [(torch.randint(31, (8, 12), device=device), torch.randint(31, (8, 12), device=device)) for _ in range(4)]

    def loss(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())

    return Run(model, optimizer, loss, batches, owns_loop=True)


class Loop:
    """A user's own step: scaler, accumulation over two pieces, clipping, schedule, moving average."""

    def __init__(self, device: torch.device, overflow: bool = False) -> None:
        self.model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3)).to(
            device
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), 2e-3)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.2, total_iters=6)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=3e38 if overflow else 1024.0)
        self.weight = 64.0 if overflow else 1.0
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.steps: dict[str, Callable[..., Any]] = {
            "unscale": self.scaler.unscale_, "schedule": self.schedule.step, "average": self.update_average,
            "optimizer": self.scaler.step,
        }  # fmt: skip

    def update_average(self) -> None:
        with torch.no_grad():
            for mean, p in zip(self.average, self.model.parameters(), strict=True):
                mean.lerp_(p.to(mean.dtype), 0.1)

    def __call__(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros((), device=batch[0].device)
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            loss = F.cross_entropy(self.model(x), y) * self.weight / 2
            self.scaler.scale(loss).backward()
            total = total + loss.detach()
        self.steps["unscale"](self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.steps["optimizer"](self.optimizer)
        self.scaler.update()
        self.steps["schedule"]()
        self.steps["average"]()
        return total


def scaled(device: torch.device, overflow: bool = False) -> Run:
    """The user's own loop."""
    loop = Loop(device, overflow)
    batches = [(torch.randn(16, 12, device=device), torch.randint(3, (16,), device=device)) for _ in range(4)]
    run = Run(loop.model, loop.optimizer, None, batches, step=loop)
    run.loop = loop  # type: ignore[attr-defined]
    return run


def overflowing(device: torch.device) -> Run:
    """The same, with the first steps skipped by the scaler."""
    return scaled(device, True)


WORKLOADS: dict[str, Callable[[torch.device], Run]] = {
    "mlp": mlp, "conv": conv, "gpt": gpt, "scaled": scaled, "overflowing": overflowing,
}  # fmt: skip


def workload(name: str, device: torch.device, strategies: dict[str, type[Strategy]]) -> tuple[Run, Escrow]:
    """Make a run that has trained a few steps, and its escrow."""
    torch.manual_seed(1)
    run = WORKLOADS[name](device)
    run.strategies = dict(strategies)
    if name != "overflowing":
        for batch in run.batches:
            run.step(batch)
    loop = getattr(run, "loop", None)
    others = (loop.scaler, loop.schedule, _Holder(loop.average)) if loop is not None else ()
    return run, Escrow(run.model, run.original, *others)


class _Holder:
    def __init__(self, average: list[Tensor]) -> None:
        self.average = average


# -- how a fault is planted ----------------------------------------------------------------------------------------


@dataclass
class Fault:
    """A fault: what it does to a run while it is in force, as a context; `now()` says whether it acts yet."""

    name: str
    workload: str
    kind: Kind
    since: int
    plant: Callable[[Run, Callable[[], bool]], Iterator[None]]

    def strategy(self) -> type[Strategy]:
        """Return it as a class of strategy."""
        fault = self

        class Planted(Strategy):
            name, kind, needs_loop = fault.name, fault.kind, True

            def apply(self, run: Run) -> None:
                taken = 0
                plain = run.step

                def step(batch: Any) -> Tensor:
                    nonlocal taken
                    result = run_step(batch)
                    taken += 1
                    return result

                self.context = contextmanager(fault.plant)(run, lambda: taken >= fault.since)
                self.context.__enter__()
                run_step = run.step
                run.step = step  # type: ignore[method-assign]
                assert plain is not None

            def revert(self, run: Run) -> None:
                run.__dict__.pop("step", None)
                self.context.__exit__(None, None, None)

        return Planted


FAULTS: dict[str, Fault] = {}
HEALTHY: dict[str, Fault] = {}
Plant = Callable[[Run, Callable[[], bool]], Iterator[None]]


def fault(on: str, kind: Kind, since: int = 0, book: dict[str, Fault] = FAULTS) -> Callable[[Plant], Plant]:
    """Register a fault for a workload, under a claim, acting from a step on."""

    def register(plant: Plant) -> Plant:
        name = plant.__name__ if plant.__name__ not in book else f"{plant.__name__}_{on}"
        book[name] = Fault(name, on, kind, since, plant)
        return plant

    return register


def healthy(on: str, kind: Kind) -> Callable[[Plant], Plant]:
    """Register what must pass."""
    return fault(on, kind, book=HEALTHY)


@contextmanager
def before_optimizer(run: Run, tamper: Callable[[list[Tensor]], None]) -> Iterator[None]:
    """Change gradients between backward and the optimizer."""

    def change(*_: Any) -> None:
        tamper(run.params)

    hook = run.original.register_step_pre_hook(change)
    yield
    hook.remove()


@contextmanager
def instead_of_step(run: Run, step: Callable[[Any], None]) -> Iterator[None]:
    """Let the optimizer do something else."""
    run.replace_step(lambda _: step(run.original))
    yield
    run.replace_step(None)


@contextmanager
def forward(run: Run, function: Callable[..., Any]) -> Iterator[None]:
    """Call something else for the model."""
    run.call.function(function)
    yield
    run.call.function(None)


@contextmanager
def set_for(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    yield
    for name, value in before.items():
        setattr(target, name, value)


@contextmanager
def step_of(run: Run, step: Callable[[Any, Callable[[Any], Tensor]], Tensor]) -> Iterator[None]:
    """Wrap the whole step."""
    plain = Run.step.__get__(run)
    run.step = lambda batch: step(batch, plain)  # type: ignore[method-assign]
    yield
    run.__dict__.pop("step", None)


@contextmanager
def part_of_loop(run: Run, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a part of the user's own loop."""
    loop = run.loop  # type: ignore[attr-defined]
    before = loop.steps[name]
    loop.steps[name] = replacement
    yield
    loop.steps[name] = before


def settings_while(optimizer: Any, **values: Any) -> None:
    """Take the plain step with other settings, which are put back."""
    before = [{key: group[key] for key in values} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update({key: value(group[key]) if callable(value) else value for key, value in values.items()})
    plain_step(optimizer)
    for group, old in zip(optimizer.param_groups, before, strict=True):
        group.update(old)


# -- gradients -----------------------------------------------------------------------------------------------------


@fault("mlp", "tolerance", since=2)
def stale_gradient(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    last: list[Tensor] = []

    def swap(params: list[Tensor]) -> None:
        held = [p.grad.clone() for p in params]
        if now() and last:
            for p, g in zip(params, last, strict=True):
                p.grad.copy_(g)
        last[:] = held

    with before_optimizer(run, swap):
        yield


@fault("gpt", "precision", since=1)
def stale_gradient_of_one_layer(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    last: list[Tensor] = []

    def swap(_: list[Tensor]) -> None:
        weight = run.model.up.weight
        held = weight.grad.clone()
        if now() and last:
            weight.grad.copy_(last[0])
        last[:] = [held]

    with autocast(run), before_optimizer(run, swap):
        yield


@contextmanager
def autocast(run: Run) -> Iterator[None]:
    """bfloat16 products, outputs in float32: what a fault hides behind."""
    run.call.scope("planted", lambda: torch.autocast(run.device.type, dtype=torch.bfloat16))
    run.call.outputs("planted", lambda out: out.float())
    yield
    run.call.scope("planted", None)
    run.call.outputs("planted", None)


def accumulate(run: Run, batch: Any, pieces: int, weight: Callable[[Any], float], drop: int = 0) -> Tensor:
    run.original.zero_grad()
    parts = split(batch, pieces)
    total = torch.zeros((), device=run.device)
    for part in parts[: len(parts) - drop]:
        loss = run.loss(part)
        (loss * weight(part)).backward()
        total = total + loss.detach() * rows(part) / rows(batch)
    if run.clip_norm is not None:
        nn.utils.clip_grad_norm_(run.params, run.clip_norm)
    run.original.step()
    return total


@fault("gpt", "tolerance")
def wrong_accumulation_divisor(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with step_of(run, lambda batch, _: accumulate(run, batch, 2, lambda _: 1.0)):
        yield


@fault("conv", "precision")
def accumulation_divides_by_one_more(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), step_of(run, lambda batch, _: accumulate(run, batch, 1, lambda _: 16 / 17)):
        yield


@fault("gpt", "tolerance")
def micro_batches_weighted_equally(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with step_of(run, lambda batch, _: accumulate(run, batch, 3, lambda _: 1 / 3)):
        yield


@fault("gpt", "tolerance", since=2)
def last_micro_batch_dropped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        return accumulate(run, batch, 4, lambda part: rows(part) / rows(batch), drop=1) if now() else plain(batch)

    with step_of(run, step):
        yield


@fault("mlp", "tolerance")
def remainder_dropped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with step_of(run, lambda batch, plain: plain((batch[0][:28], batch[1][:28]))):
        yield


@fault("conv", "precision", since=3)
def last_row_dropped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        return plain((batch[0][:-1], batch[1][:-1]) if now() else batch)

    with autocast(run), step_of(run, step):
        yield


@fault("mlp", "tolerance")
def labels_shifted_by_one_row(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with step_of(run, lambda batch, plain: plain((batch[0], batch[1].roll(1)))):
        yield


@fault("gpt", "tolerance")
def one_layer_transposed(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with before_optimizer(run, lambda _: run.model.out.weight.grad.copy_(run.model.out.weight.grad.t().clone())):
        yield


@fault("gpt", "precision", since=2)
def one_layer_gradient_zeroed(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), before_optimizer(run, lambda _: run.model.norm.bias.grad.zero_() if now() else None):
        yield


@fault("mlp", "tolerance", since=1)
def frozen_layer(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        run.model[0].weight.requires_grad_(not now())
        return plain(batch)

    with step_of(run, step):
        yield
    run.model[0].weight.requires_grad_(True)


@fault("conv", "tolerance", since=3)
def sign_of_one_bias(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with before_optimizer(run, lambda _: run.model[9].bias.grad.neg_() if now() else None):
        yield


@fault("mlp", "tolerance", since=2)
def gradients_not_zeroed(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    zero = run.original.zero_grad
    run.original.zero_grad = lambda *_, **__: None if now() else zero()
    yield
    del run.original.__dict__["zero_grad"]


@fault("conv", "tolerance")
def gradients_through_bfloat16(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def narrow(params: list[Tensor]) -> None:
        for p in params:
            p.grad.copy_(p.grad.bfloat16())

    with before_optimizer(run, narrow):
        yield


@fault("mlp", "tolerance")
def clip_threshold_doubled(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run, clip_norm=1.0):
        yield


@fault("mlp", "tolerance")
def clipped_after_the_step(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        plain_step(optimizer)
        nn.utils.clip_grad_norm_(run.params, 0.5)

    with set_for(run, clip_norm=None), instead_of_step(run, step):
        yield


@fault("mlp", "tolerance")
def clipped_each_by_itself(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def each(params: list[Tensor]) -> None:
        for p in params:
            nn.utils.clip_grad_norm_(p, 0.5)

    with set_for(run, clip_norm=None), before_optimizer(run, each):
        yield


# -- the update ----------------------------------------------------------------------------------------------------


@fault("mlp", "tolerance")
def learning_rate_one_percent_high(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with instead_of_step(run, lambda o: settings_while(o, lr=lambda lr: 1.01 * lr)):
        yield


@fault("gpt", "precision", since=3)
def learning_rate_one_percent_high_later(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), instead_of_step(run, lambda o: settings_while(o, lr=lambda lr: 1.01 * lr if now() else lr)):
        yield


@fault("conv", "trade")
def learning_rate_written_to_the_groups(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    before = run.original.param_groups[0]["lr"]
    run.original.param_groups[0]["lr"] = 1.01 * before
    yield
    run.original.param_groups[0]["lr"] = before


@fault("gpt", "tolerance")
def betas_swapped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with instead_of_step(run, lambda o: settings_while(o, betas=lambda b: (b[1], b[0]))):
        yield


@fault("mlp", "tolerance")
def epsilon_1e_6(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with instead_of_step(run, lambda o: settings_while(o, eps=1e-6)):
        yield


@fault("mlp", "tolerance")
def weight_decay_skipped_for_one_group(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with instead_of_step(run, lambda o: settings_while(o, weight_decay=0.0)):
        yield


@fault("mlp", "precision")
def weight_decay_for_all_groups(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), instead_of_step(run, lambda o: settings_while(o, weight_decay=0.1)):
        yield


@fault("gpt", "tolerance")
def bias_correction_missing(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        steps = [state["step"] for state in optimizer.state.values()]
        held = [s.clone() for s in steps]
        for s in steps:
            s.fill_(1e6)
        plain_step(optimizer)
        for s, old in zip(steps, held, strict=True):
            s.copy_(old + 1)

    with instead_of_step(run, step):
        yield


@fault("conv", "tolerance")
def nesterov_forgotten(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with instead_of_step(run, lambda o: settings_while(o, nesterov=False)):
        yield


@fault("conv", "tolerance")
def momentum_in_bfloat16(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        plain_step(optimizer)
        for state in optimizer.state.values():
            state["momentum_buffer"].copy_(state["momentum_buffer"].bfloat16())

    with instead_of_step(run, step):
        yield


def towards_zero(value: Tensor) -> Tensor:
    near = value.float()
    over = near.double().abs() > value.abs()
    return torch.where(over, torch.nextafter(near, torch.zeros_like(near)), near)


@fault("mlp", "tolerance")
def rounding_towards_zero(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    from oxytorch.tune.record import Call, State
    from oxytorch.tune.update import in_float64

    def step(optimizer: Any) -> None:
        call = Call.of(run)
        params, _ = in_float64(run, State.of(run, []), [call], [call.settings])
        plain_step(optimizer)
        with torch.no_grad():
            for p, value in zip(run.params, params, strict=True):
                p.copy_(towards_zero(value))

    with instead_of_step(run, step):
        yield


@fault("gpt", "precision")
def master_weights_lost(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        plain_step(optimizer)
        with torch.no_grad():
            for p in run.params:
                p.copy_(p.bfloat16())

    with autocast(run), instead_of_step(run, step):
        yield


@fault("conv", "tolerance")
def every_fifth_step_twice(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    count = 0

    def step(optimizer: Any) -> None:
        nonlocal count
        count += 1
        for _ in range(2 if count % 5 == 0 else 1):
            plain_step(optimizer)

    with instead_of_step(run, step):
        yield


@fault("mlp", "precision", since=4)
def a_step_skipped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), instead_of_step(run, lambda o: None if now() else plain_step(o)):
        yield


@fault("gpt", "tolerance", since=3)
def state_of_one_parameter_reset(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        if now():
            optimizer.state[run.model.up.bias]["exp_avg"].zero_()
        plain_step(optimizer)

    with instead_of_step(run, step):
        yield


@fault("gpt", "trade")
def state_lost_on_the_way_in(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    for state in run.original.state.values():
        state["exp_avg"].zero_()
    yield


# -- the model -----------------------------------------------------------------------------------------------------


@fault("mlp", "tolerance")
def batch_norm_momentum(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run.model[1], momentum=0.11):
        yield


@fault("conv", "precision", since=2)
def buffers_not_updated(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def call(x: Tensor) -> Tensor:
        held = [b.clone() for b in run.model.buffers()]
        out = run.model._call_impl(x)
        if now():
            for b, old in zip(run.model.buffers(), held, strict=True):
                b.data.copy_(old)
        return out

    with autocast(run), forward(run, call):
        yield


@fault("conv", "tolerance")
def batch_norm_in_eval_mode(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run.model[1], training=False):
        yield


@fault("mlp", "tolerance")
def last_layer_in_bfloat16(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    last = run.model[5]
    plain = last.forward
    last.forward = lambda x: F.linear(x.bfloat16(), last.weight.bfloat16(), last.bias.bfloat16()).float()
    yield
    del last.forward
    assert plain is not None


@fault("gpt", "precision")
def loss_in_bfloat16(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    plain = run.loss_fn
    with (
        autocast(run),
        set_for(run, loss_fn=lambda m, b: F.cross_entropy(m(b[0]).bfloat16().flatten(0, 1), b[1].flatten()).float()),
    ):
        yield
    assert plain is not None


@fault("gpt", "tolerance")
def causal_mask_forgotten(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run.model, causal=False):
        yield


@fault("gpt", "precision")
def causal_mask_forgotten_in_bfloat16(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), set_for(run.model, causal=False):
        yield


@fault("gpt", "tolerance")
def tied_weights_untied(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    copy = run.model.table.weight.detach().clone().requires_grad_()
    model = run.model

    def call(tokens: Tensor) -> Tensor:
        return F.linear(model.body(model.table(tokens)), copy)

    with forward(run, call):
        yield


@fault("gpt", "tolerance")
def stale_weights_in_a_compiled_function(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    model = run.model
    frozen = {"up.weight": model.up.weight.detach().clone()}

    def call(tokens: Tensor) -> Tensor:
        up = frozen["up.weight"] + 0.0 * model.up.weight
        return functional_call(model, {"up.weight": up + (model.up.weight - model.up.weight.detach())}, (tokens,))

    with forward(run, run_once(model, call)):
        yield


def run_once(model: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Let `functional_call` reach the module itself, and not this function again."""

    def inner(*args: Any) -> Any:
        held = model._compiled_call_impl
        model._compiled_call_impl = None
        try:
            return call(*args)
        finally:
            model._compiled_call_impl = held

    return inner


@fault("conv", "tolerance")
def layout_that_scrambles_channels(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    run.call.inputs("planted", lambda args, kwargs: ((args[0].permute(0, 2, 3, 1).reshape(args[0].shape),), kwargs))
    yield
    run.call.inputs("planted", None)


@fault("gpt", "tolerance")
def gradient_stopped_in_a_branch(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    down = run.model.down
    with set_for(run.model, down=nn.Identity()):
        run.model.down = Detached(down)
        yield


class Detached(nn.Module):
    """A fused block whose backward forgot its input."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.detach(), self.weight, self.bias)


# -- random numbers ------------------------------------------------------------------------------------------------


@fault("gpt", "tolerance")
def the_same_mask_each_step(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def call(tokens: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return run.model._call_impl(tokens)

    with forward(run, call):
        yield


@fault("gpt", "precision", since=1)
def the_same_mask_each_step_behind_a_moving_generator(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def call(tokens: Tensor) -> Tensor:
        out = run.model._call_impl(tokens)
        if not now():
            return out
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return run.model._call_impl(tokens)

    with autocast(run), forward(run, call):
        yield


@fault("gpt", "tolerance")
def seeded_when_switched_on(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    torch.manual_seed(123)
    yield


@fault("gpt", "tolerance")
def mask_of_another_rate(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run.model.drop, p=0.15):
        yield


@fault("gpt", "tolerance")
def own_masks_of_another_rate(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with drawing(run, 0.15):
        yield


@contextmanager
def drawing(run: Run, rate: float) -> Iterator[None]:
    """Draw masks in another way, as a compiled function does; switched off with dropout."""

    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if F.dropout is not DROPOUT:
                return x
            return x * (torch.rand(x.shape, device=x.device, dtype=torch.float32) >= rate) / (1 - rate)

    with set_for(run.model, drop=Other()):
        yield


@fault("gpt", "precision")
def dropout_in_eval_mode(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run), set_for(run.model.drop, training=False):
        yield


@fault("gpt", "tolerance")
def another_mask_in_backward(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    model = run.model

    def call(tokens: Tensor) -> Tensor:
        body = checkpoint(model.body, model.table(tokens), use_reentrant=False, preserve_rng_state=False)
        return model.head(body)

    with forward(run, call):
        yield


# -- the user's own loop -------------------------------------------------------------------------------------------


@fault("scaled", "tolerance")
def unscale_missing(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    loop = run.loop  # type: ignore[attr-defined]
    with (
        part_of_loop(run, "unscale", lambda _: None),
        part_of_loop(run, "optimizer", lambda o: o.step()),
        set_for(loop.scaler, update=lambda: None),
    ):
        yield
    del loop.scaler.update


@fault("scaled", "tolerance", since=2)
def moving_average_skipped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    plain = run.loop.steps["average"]  # type: ignore[attr-defined]
    with part_of_loop(run, "average", lambda: None if now() else plain()):
        yield


@fault("scaled", "tolerance")
def schedule_forgotten(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with part_of_loop(run, "schedule", lambda: None):
        yield


@fault("overflowing", "tolerance")
def overflow_ignored(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        for p in run.params:
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()

    with part_of_loop(run, "optimizer", step):
        yield


@fault("mlp", "exact")
def last_batch_of_the_epoch_dropped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run, data=DataLoader(run.data.dataset, batch_size=16, drop_last=True)):
        yield


@fault("mlp", "exact")
def batches_in_another_order(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        batches = list(run.data)[::-1]
    with set_for(run, data=batches):
        yield


# -- claims of bits ------------------------------------------------------------------------------------------------


@fault("conv", "exact", since=3)
def one_bit_of_one_weight(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(optimizer: Any) -> None:
        plain_step(optimizer)
        if now():
            flat = run.model[4].weight.data.view(-1)
            flat[0] = torch.nextafter(flat[0], flat[0].new_tensor(9.0))

    with instead_of_step(run, step):
        yield


@fault("gpt", "exact")
def a_random_number_too_many(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        loss = plain(batch)
        torch.rand(1)
        return loss

    with step_of(run, step):
        yield


@fault("conv", "exact")
def sums_in_another_order(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with step_of(run, lambda batch, plain: plain((batch[0].flip(0), batch[1].flip(0)))):
        yield


@fault("mlp", "tolerance", since=2)
def nan_from_a_late_step(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    run.call.outputs("planted", lambda out: out * float("nan") if now() else out)
    yield
    run.call.outputs("planted", None)


@fault("mlp", "tolerance", since=1)
def throws_at_a_late_step(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def call(x: Tensor) -> Tensor:
        if now():
            raise torch.OutOfMemoryError("planted")
        return run.model._call_impl(x)

    with forward(run, call):
        yield


# -- what must pass ------------------------------------------------------------------------------------------------


@healthy("mlp", "exact")
def nothing(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    yield


@healthy("gpt", "exact")
def nothing_at_all(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    yield


@healthy("scaled", "exact")
def nothing_in_a_loop(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    yield


@healthy("overflowing", "tolerance")
def nothing_in_a_loop_that_skips(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    yield


@healthy("scaled", "tolerance")
def nothing_in_a_loop_claimed_as_tolerance(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    yield


def bfloat16_autocast(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with autocast(run):
        yield


for _on in ("mlp", "conv", "gpt"):
    healthy(_on, "precision")(bfloat16_autocast)


@healthy("conv", "tolerance")
def rows_in_another_order(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with step_of(run, lambda batch, plain: plain((batch[0].flip(0), batch[1].flip(0)))):
        yield


@healthy("conv", "tolerance")
def channels_last(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    run.call.inputs("planted", lambda a, k: ((a[0].contiguous(memory_format=torch.channels_last),), k))
    yield
    run.call.inputs("planted", None)


def optimizer_flag(flag: str) -> Plant:
    def plant(run: Run, now: Callable[[], bool]) -> Iterator[None]:
        with instead_of_step(run, lambda o: settings_while(o, **{flag: True})):
            yield

    plant.__name__ = flag
    return plant


for _on in ("mlp", "conv", "gpt"):
    healthy(_on, "exact")(optimizer_flag("foreach"))
    healthy(_on, "tolerance")(optimizer_flag("fused"))


def step_tail(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    from oxytorch import optim

    clip = run.clip_norm
    run.replace_optimizer(optim.replace(run.original, nonfinite="propagate", clip_norm=clip))
    run.clip_norm = None
    yield
    run.replace_optimizer(None)
    run.clip_norm = clip


for _on in ("mlp", "conv", "gpt"):
    healthy(_on, "tolerance")(step_tail)


@healthy("gpt", "tolerance")
def math_attention(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    run.call.scope("planted", lambda: sdpa_kernel([SDPBackend.MATH]))
    yield
    run.call.scope("planted", None)


@healthy("gpt", "tolerance")
def masks_drawn_in_another_way(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with drawing(run, 0.1):
        yield


@healthy("gpt", "tolerance")
def two_micro_batches(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with set_for(run, micro_batches=2):
        yield


@healthy("mlp", "exact")
def data_in_memory(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        batches = list(run.data)
    with set_for(run, data=batches):
        yield
