"""The native step against torch's own loop over tensors: every bit of parameters and state."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oxytorch import _C
from oxytorch.tune.native_step import differs, native_step
from torch import Tensor, nn

pytestmark = pytest.mark.cpu_only("the step is the CPU's")

ADAM = [
    {},
    {"weight_decay": 0.1, "amsgrad": True},
    {"maximize": True, "betas": (0.3, 0.6), "eps": 1e-3},
    {"betas": (0.0, 0.99999), "weight_decay": 0.01, "lr": 0.5},
]
SGD = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9},
    {"momentum": 0.5, "dampening": 0.3, "weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    *itertools.product((torch.optim.Adam, torch.optim.AdamW), ADAM),
    *itertools.product((torch.optim.SGD,), SGD),
]


def normal(*size: int) -> Tensor:
    return torch.randn(size, generator=GENERATOR)


GENERATOR = torch.Generator()
TENSORS: dict[str, Callable[[], Tensor]] = {
    "scalar": normal,
    "empty": lambda: normal(0, 3),
    "odd": lambda: normal(17, 3),
    "several blocks": lambda: normal(50_021),
    "channels last": lambda: normal(4, 3, 5, 5).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: normal(9, 5).t(),
    "strided": lambda: normal(20, 6)[:, ::2],
    "double": lambda: normal(40).double(),
    "bfloat16": lambda: normal(40).bfloat16(),
    "half": lambda: normal(40).half(),
}


def same(a: Tensor, b: Tensor) -> bool:
    """Same bits and strides, or NaN in both."""
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def assert_same(mine: Any, wanted: Any) -> None:
    """Compare two optimizers: parameters and all of their state."""
    for group, expected in zip(mine.param_groups, wanted.param_groups, strict=True):
        for p, q in zip(group["params"], expected["params"], strict=True):
            assert same(p.detach(), q.detach()), (p, q)
            assert mine.state[p].keys() == wanted.state[q].keys()
            for key, value in wanted.state[q].items():
                assert mine.state[p][key] is value or same(mine.state[p][key], value), key


def pair(make: Callable[[list[Tensor]], Any], tensors: list[Tensor]) -> tuple[Any, Any]:
    """Return the same optimizer twice, each over its own parameters."""
    both = []
    for _ in range(2):
        params = [nn.Parameter(torch.empty_like(t, memory_format=torch.preserve_format).copy_(t)) for t in tensors]
        for p, t in zip(params, tensors, strict=True):
            if p.stride() != t.stride():
                p.data = torch.empty_strided(t.shape, [2 * s for s in t.contiguous().stride()]).copy_(t)
        both.append(make(params))
    return both[0], both[1]


def set_gradients(optimizers: tuple[Any, Any], make: Callable[[Tensor], Tensor | None]) -> None:
    for mine, wanted in zip(*[[p for g in o.param_groups for p in g["params"]] for o in optimizers], strict=True):
        grad = make(mine)
        mine.grad = grad
        wanted.grad = None if grad is None else grad.clone()


def grad_like(p: Tensor) -> Tensor:
    return torch.empty_like(p).copy_(0.1 * normal(*p.shape))


@pytest.fixture(autouse=True)
def seeded() -> None:
    GENERATOR.manual_seed(0)


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_tensor_has_the_bits_of_torch(cls: Any, options: dict[str, Any], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        both = pair(lambda params: cls(params, **options), [make() for make in TENSORS.values()])
        for _ in range(5):
            set_gradients(both, grad_like)
            native_step(both[0])
            both[1].step()
            assert_same(*both)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
def test_hyperparameters_may_change_and_gradients_be_missing(cls: Any, options: dict[str, Any]) -> None:
    both = pair(
        lambda params: cls([{"params": params[:1], "lr": 0.3}, {"params": params[1:]}], **options),
        [normal(5, 7), normal(11), normal(40_000)],
    )
    for step in range(6):
        missing = step % 3
        order = iter(range(3))
        set_gradients(both, lambda p, m=missing, o=order: None if next(o) == m else grad_like(p))  # type: ignore[misc]
        for optimizer in both:
            optimizer.param_groups[1]["lr"] = 0.01 * (step + 1)
        native_step(both[0])
        both[1].step()
        assert_same(*both)


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, 1e-40, 0.0])
def test_odd_numbers_go_the_way_of_torch(cls: Any, options: dict[str, Any], value: float) -> None:
    both = pair(lambda params: cls(params, **options), [normal(40)])
    for step in range(4):
        set_gradients(
            both, lambda p, s=step: grad_like(p).index_fill_(0, torch.tensor([3, 39]), value if s == 1 else 1.0)
        )  # type: ignore[misc]
        native_step(both[0])
        both[1].step()
        assert_same(*both)


def test_gradients_of_another_layout_are_taken() -> None:
    both = pair(torch.optim.AdamW, [normal(6, 4), normal(6, 4)])
    for _ in range(3):
        set_gradients(both, lambda p: normal(*reversed(p.shape)).t())
        native_step(both[0])
        both[1].step()
        assert_same(*both)


def test_parameters_that_share_memory_are_stepped_one_after_another() -> None:
    def make(params: list[Tensor]) -> Any:
        whole = params[0].detach()
        return torch.optim.SGD([nn.Parameter(whole[:30_000]), nn.Parameter(whole[10_000:])], lr=0.1, weight_decay=0.5)

    both = pair(make, [normal(40_000)])
    for _ in range(3):
        set_gradients(both, grad_like)
        native_step(both[0])
        both[1].step()
        assert_same(*both)


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
@pytest.mark.parametrize("reads", [(1, 2, 0), (2, 0, 1), (0, 0, 2)], ids=["after", "before", "own"])
def test_gradients_that_are_parameters_are_read_when_their_turn_comes(
    cls: Any, options: dict[str, Any], reads: tuple[int, ...]
) -> None:
    both = pair(lambda params: cls(params, **options), [normal(300, 300) for _ in reads])
    for _ in range(3):
        for optimizer in both:
            params = optimizer.param_groups[0]["params"]
            for p, other in zip(params, reads, strict=True):
                p.grad = params[other].detach()
        native_step(both[0])
        both[1].step()
        assert_same(*both)


def test_complex_numbers_sparse_gradients_and_tensors_as_rates_are_torchs() -> None:
    both = pair(torch.optim.AdamW, [torch.complex(normal(7), normal(7)), normal(3)])
    for _ in range(3):
        set_gradients(both, lambda p: 0.1 * p.detach().clone())
        native_step(both[0])
        both[1].step()
        assert_same(*both)

    both = pair(lambda params: torch.optim.SGD(params, lr=0.1), [normal(6, 4)])
    set_gradients(both, lambda p: grad_like(p).to_sparse())
    native_step(both[0])
    both[1].step()
    assert_same(*both)

    both = pair(lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1)), [normal(6, 4)])
    for _ in range(3):
        set_gradients(both, grad_like)
        native_step(both[0])
        both[1].step()
    assert_same(*both)


def test_closures_are_called_once_with_gradients() -> None:
    both = pair(lambda params: torch.optim.Adam(params, lr=0.1), [normal(6, 4)])
    for _ in range(3):
        set_gradients(both, lambda _: None)

        def closure(optimizer: Any) -> Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = optimizer.param_groups[0]["params"][0].square().sum()
            loss.backward()
            return loss  # type: ignore[no-any-return]

        losses = native_step(both[0], lambda: closure(both[0])), both[1].step(lambda: closure(both[1]))
        assert torch.equal(*losses)
    assert_same(*both)


def test_autograd_sees_that_parameters_were_written() -> None:
    p = nn.Parameter(normal(8))
    optimizer = torch.optim.AdamW([p])
    for _ in range(2):
        loss = (p * p).sum()
        p.grad = torch.ones(8)
        native_step(optimizer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_step_that_is_not_torchs_is_told_apart() -> None:
    class Other(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["lr"] *= 0.5
            return super().step(closure)

    plain = torch.optim.AdamW([nn.Parameter(normal(3))], lr=0.1)
    state = copy.deepcopy(plain.state_dict())
    assert differs(plain) == ""
    assert plain.state_dict() == state
    assert "differs from that of Other" in differs(Other([nn.Parameter(normal(3))], lr=0.1))


def test_lists_of_different_lengths_are_refused_before_anything_is_written() -> None:
    p, grad = normal(4), normal(4)
    before = p.clone()
    numbers = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
    with pytest.raises(ValueError, match="there are 2 gradients for 1 parameters"):
        _C.tune.sgd_step([p], [grad, grad], [], **numbers)
    assert torch.equal(p, before)
