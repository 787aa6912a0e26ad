"""Sparse gradients of embeddings, which torch's SGD and Adagrad take."""

from __future__ import annotations

import copy
from typing import Any

import oxytorch as ox
import oxytorch.optim
import pytest
import torch
from oxytorch.tune.run import Run
from torch import nn

pytestmark = pytest.mark.cpu_only("sparse tensors of the fake devices are torch's")

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.5}),
    ("SGD", {"lr": 0.5, "maximize": True}),
    ("SGD", {"lr": 0.5, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.5, "momentum": 0.5, "dampening": 0.3}),
    ("Adagrad", {"lr": 0.5, "lr_decay": 0.1}),
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 6, sparse=True)
        self.head = nn.Linear(6, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words).mean(1))


def make_model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, 30, (5, 4), generator=generator)  # with repetitions; the last rows never
    return words, torch.randint(0, 3, (5,), generator=generator)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def backward(model: nn.Module, opt: Any, step: int) -> None:
    opt.zero_grad()
    loss_of(model, batch_of(step)).backward()
    assert model.table.weight.grad.is_sparse


def of_torch(name: str, options: dict[str, Any], clip: float | None = None, steps: int = 5) -> Model:
    """What torch makes of it in fp64."""
    model = make_model(torch.float64)
    opt = getattr(torch.optim, name)(model.parameters(), **options)
    for step in range(steps):
        backward(model, opt, step)
        if clip is not None:
            grads = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()]
            norm = torch.stack([g.norm() for g in grads]).norm()
            for p in model.parameters():
                p.grad = p.grad * min(1.0, clip / (float(norm) + 1e-6))
        opt.step()
    return model


def assert_as_exact(model: nn.Module, exact: nn.Module) -> None:
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.detach().double(), q.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("composite", [False, True], ids=["native", "composite"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_sparse_gradients_step_as_in_torch(
    name: str, options: dict[str, Any], clip: float | None, composite: bool
) -> None:
    model = make_model()
    never = model.table.weight.detach()[30:].clone()
    opt = getattr(oxytorch.optim, name)(model.parameters(), clip_norm=clip, force_composite=composite, **options)
    for step in range(5):
        backward(model, opt, step)
        opt.step()
    assert_as_exact(model, of_torch(name, options, clip))
    assert torch.equal(model.table.weight.detach()[30:], never)


@pytest.mark.parametrize("tail", [{"ema_decay": 0.5}, {"zero_grads": True}, {"collect_stats": True}, {"agc": 10.0}])
def test_what_the_tail_does_besides_goes_on(tail: dict[str, Any]) -> None:
    model, dense = make_model(), make_model()
    dense.table.sparse = False
    opts = [oxytorch.optim.SGD(m.parameters(), lr=0.5, **tail) for m in (model, dense)]
    for step in range(4):
        for m, opt in zip((model, dense), opts, strict=True):
            opt.zero_grad()
            loss_of(m, batch_of(step)).backward()
            opt.step()
            if "zero_grads" in tail:
                assert all(float(p.grad.to_dense().abs().sum()) == 0 for p in m.parameters())
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    if "ema_decay" in tail:
        for i, average in opts[0].ema_state_dict()["ema"].items():
            torch.testing.assert_close(average, opts[1].ema_state_dict()["ema"][i], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(opts[0].tail_stats().grad_norms, opts[1].tail_stats().grad_norms)


def test_a_sparse_gradient_that_is_not_finite_skips_the_step() -> None:
    model = make_model()
    opt = oxytorch.optim.SGD(model.parameters(), lr=0.5)
    backward(model, opt, 0)
    opt.step()
    kept = copy.deepcopy(model.state_dict())
    backward(model, opt, 1)
    model.table.weight.grad._values()[0, 0] = float("nan")
    opt.step()
    assert int(opt.tail_stats().skipped) == 1
    torch.testing.assert_close(model.state_dict(), kept, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_of_other_dtypes_are_rounded_once(dtype: torch.dtype) -> None:
    table = nn.Parameter(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).to(dtype))
    grad = torch.sparse_coo_tensor(torch.tensor([[1, 3, 1]]), torch.randn(3, 4).to(dtype), (8, 4))
    want = table.detach().double() - 0.1 * grad.to_dense().double()
    table.grad = grad
    oxytorch.optim.SGD([table], lr=0.1).step()
    torch.testing.assert_close(
        table.detach().double(), want, rtol=torch.finfo(dtype).eps / 2, atol=1e-3 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("level", ["basic", "advanced"])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_the_trainer_takes_them(name: str, options: dict[str, Any], level: str) -> None:
    model = make_model()
    opt = getattr(torch.optim, name)(model.parameters(), **options)
    tail = "off" if level == "basic" else "on"
    trainer = ox.Trainer(model, opt, loss_of, level, calibrate=False, precision="fp32", step_tail=tail)
    for step in range(5):
        trainer.step(batch_of(step))
    assert_as_exact(model, of_torch(name, options))


@pytest.mark.parametrize("strategy", ["step_tail", "native_step"])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_strategies_of_the_step_take_them_also_in_mid_run(name: str, options: dict[str, Any], strategy: str) -> None:
    if strategy == "native_step" and name == "Adagrad":
        return
    model = make_model()
    opt = getattr(torch.optim, name)(model.parameters(), **options)
    run = Run(model, opt, loss_of, [])
    for step in range(5):
        if step in (2, 4):
            run.set_active([strategy] if step == 2 else [])
        backward(model, opt, step)
        opt.step()
    assert_as_exact(model, of_torch(name, options))


class Rows(nn.Module):
    """A table that no module says has sparse gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).to(dtype))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(rows, self.table, sparse=True)


@pytest.mark.parametrize("after", ["zero_grad", "another group"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_is_handed_back_as_torch_keeps_it(nesterov: bool, after: str) -> None:
    """Also where no gradient is there any more to tell by."""
    sgd: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}

    def stepped(model: Rows, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad()
        generator = torch.Generator().manual_seed(step)
        rows, values = torch.randint(0, 6, (5,), generator=generator), torch.randn(5, 3, generator=generator)
        (model(rows) * values.to(model.table)).sum().backward()
        opt.step()

    model, exact = Rows(torch.float32), Rows(torch.float64)
    opt, wanted = (torch.optim.SGD(m.parameters(), **sgd) for m in (model, exact))
    run = Run(model, opt, loss_of, [])
    run.set_active(["step_tail"])
    for step in range(2):
        stepped(model, opt, step)
    opt.zero_grad(set_to_none=True)
    if after == "another group":  # the native step is built anew before it is taken back
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        run.slots[0].optimizer.tail_stats()  # type: ignore[attr-defined]
    run.set_active([])
    stepped(model, opt, 2)
    for step in range(3):
        stepped(exact, wanted, step)
    assert_as_exact(model, exact)
