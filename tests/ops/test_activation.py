"""GELU, SwiGLU and GEGLU against fp64: no further off than twice torch's own; and an unchanged model's GELU, SiLU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import _C
from torch import Tensor, nn
from torch.library import opcheck
from torch.nn import functional as F

from .rounding import ROUNDING, threads

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")

Call = Callable[..., Tensor]
OURS: dict[str, Call] = {
    "gelu": ox.ops.gelu,
    "gelu tanh": lambda x: ox.ops.gelu(x, "tanh"),
    "swiglu": ox.ops.swiglu,
    "geglu": ox.ops.geglu,
    "geglu tanh": lambda x, u: ox.ops.geglu(x, u, "tanh"),
    "swiglu of halves": ox.ops.swiglu,
    "geglu of halves": ox.ops.geglu,
}


def of_halves(call: Call) -> Call:
    return lambda x: call(*x.chunk(2, -1))


def geglu(x: Tensor, u: Tensor) -> Tensor:
    return F.gelu(x) * u


def swiglu(x: Tensor, u: Tensor) -> Tensor:
    return F.silu(x) * u


THEIRS: dict[str, Call] = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu tanh": lambda x, u: F.gelu(x, approximate="tanh") * u,
    "swiglu of halves": of_halves(swiglu),
    "geglu of halves": of_halves(geglu),
}


class Case:
    """Random sizes, strides and dtypes, by a seed."""

    def __init__(self, seed: int) -> None:
        draw, noise = random.Random(seed), torch.Generator().manual_seed(seed)
        self.name = draw.choice(list(OURS))
        self.dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        sizes = draw.choice([(), (1,), (2, 7), (3, 5, 64), (2, 65), (5000,), (3, 4099), (4, 2, 3, 17), (70, 130)])
        if "halves" in self.name:
            sizes = (*sizes[:-1], 2 * (sizes[-1:] or (3,))[0])
        how = draw.choice(["dense", "dense", "columns", "transposed", "expanded"])

        def made(scale: float) -> Tensor:
            values = (torch.randn((2, *sizes, 2), generator=noise) * scale).to(self.dtype)
            if how == "columns":
                return values[0, ..., 0]
            if how == "transposed" and len(sizes) > 1 and "halves" not in self.name:
                return values[0, ..., 0].clone().transpose(0, -1).contiguous().transpose(0, -1)
            if how == "expanded" and len(sizes) > 1:
                return values[0, :1, ..., 0].expand(sizes)
            return values[0, ..., 0].clone()

        self.given = [made(4.0)] if "glu" not in self.name or "halves" in self.name else [made(4.0), made(1.0)]
        self.grad = torch.randn(THEIRS[self.name](*self.given).shape, generator=noise).to(self.dtype)

    def run(self, calls: dict[str, Call], wide: bool = False) -> list[Tensor]:
        given = [(t.double() if wide else t).detach().requires_grad_() for t in self.given]
        output = calls[self.name](*given)
        return [output.detach(), *torch.autograd.grad(output, given, self.grad.to(output.dtype))]


@pytest.mark.parametrize("seed", range(120))
def test_no_further_off_than_twice_torchs(seed: int) -> None:
    case = Case(seed)
    for ours, theirs, exact in zip(case.run(OURS), case.run(THEIRS), case.run(THEIRS, wide=True), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        error, allowed = (float((one.double() - exact).norm()) for one in (ours, theirs))
        # A single element may be right by chance; an exponential goes by an argument that is rounded.
        rounding = ROUNDING[case.dtype] * (4 if case.dtype == torch.float32 else 1)
        assert error <= 2 * (allowed + rounding * float(exact.norm())), (case.name, error, allowed)


def test_the_tail_keeps_its_digits() -> None:
    x = torch.linspace(-12, -3, 1000)
    exact = x.double() * 0.5 * torch.special.erfc(-x.double() / 2**0.5)
    assert float(((ox.ops.gelu(x).double() - exact) / exact).abs().max()) < 1e-5  # torch's is zero below -5.5


@pytest.mark.parametrize("name", ["gelu", "gelu tanh"])
def test_values_that_are_not_finite(name: str) -> None:
    x = torch.tensor([float("inf"), float("nan"), 0.0, 90.0, -90.0, 1e30, 3e38, -200.0])
    got = OURS[name](x)
    torch.testing.assert_close(got, torch.tensor([float("inf"), float("nan"), 0, 90, 0, 1e30, 3e38, 0]), equal_nan=True)


@pytest.mark.parametrize("seed", [0, 3, 5, 11, 27])
def test_bits_do_not_depend_on_the_number_of_threads(seed: int) -> None:
    case, runs = Case(seed), []
    for count in (1, 2, 5):
        with threads(count):
            runs.append(case.run(OURS))
    assert all(a.equal(b) for other in runs[1:] for a, b in zip(other, runs[0], strict=True))


def bits() -> list[Tensor]:
    return [t for seed in range(14) for t in Case(seed).run(OURS)]


@pytest.mark.parametrize("name", list(OURS))
def test_float64_and_second_derivatives(name: str) -> None:
    torch.manual_seed(0)
    count = 2 if "glu" in name and "halves" not in name else 1
    given = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    assert torch.autograd.gradcheck(OURS[name], given) and torch.autograd.gradgradcheck(OURS[name], given)

    def penalty(calls: dict[str, Call]) -> tuple[Tensor, ...]:
        single = [t.float().detach().requires_grad_() for t in given]
        first = torch.autograd.grad(calls[name](*single).tanh().sum(), single, create_graph=True)
        return torch.autograd.grad(sum(f.square().sum() for f in first), single)

    for ours, theirs in zip(penalty(OURS), penalty(THEIRS), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gelu", "swiglu", "geglu of halves"])
def test_it_is_an_operator_that_torch_checks(name: str) -> None:
    operator = getattr(torch.ops.oxytorch, name.split(maxsplit=1)[0])
    given = [torch.randn(3, 8).bfloat16().requires_grad_() for _ in range(2 if name == "swiglu" else 1)]
    opcheck(operator, tuple(given))
    for packed, times in ((False, None), (True, None), (False, given[0])):
        opcheck(torch.ops.oxytorch.activated_forward, (given[0], times, "silu", packed))


def test_compiled_and_mapped_it_agrees_with_eager() -> None:
    x, u = torch.randn(4, 6).requires_grad_(), torch.randn(4, 6).requires_grad_()

    def loss(x: Tensor, u: Tensor) -> Tensor:
        return (ox.ops.swiglu(x * 2, u) + ox.ops.gelu(u, "tanh") + ox.ops.geglu(torch.cat([x, u], -1))).square().mean()

    expected = loss(x, u)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, u)
    for a, e in zip(*(torch.autograd.grad(one, (x, u)) for one in (compiled, expected)), strict=True):
        torch.testing.assert_close(a, e)
    of_rows = torch.func.vmap(torch.func.grad(loss, (0, 1)))(x[:, None], u[:, None])
    one = torch.func.grad(loss, (0, 1))(x[2:3], u[2:3])
    for rows, alone in zip(of_rows, one, strict=True):
        torch.testing.assert_close(rows[2], alone)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_what_is_frozen_gets_no_gradient(wanted: tuple[bool, bool]) -> None:
    given = [torch.randn(5, 7).requires_grad_(one) for one in wanted]
    ox.ops.swiglu(*given).sum().backward()
    assert [t.grad is not None for t in given] == list(wanted)


def test_nothing_but_the_inputs_is_kept() -> None:
    x, u, kept = torch.randn(5, 7).requires_grad_(), torch.randn(5, 7).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        ox.ops.swiglu(x, u)
    assert set(kept) == {x.data_ptr(), u.data_ptr()}


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: ox.ops.gelu(x, "fast"), ValueError, "give 'none' or 'tanh'"),
        (lambda x: ox.ops.swiglu(x[:, :3]), ValueError, "side by side"),
        (lambda x: ox.ops.swiglu(x, x[:1]), ValueError, "of the same sizes"),
        (lambda x: ox.ops.geglu(x, x.double()), TypeError, "of one dtype"),
        (lambda x: torch.ops.oxytorch.activated_forward(x, None, "relu", False), ValueError, "no activation 'relu'"),
        (lambda x: torch.ops.oxytorch.activated_forward(x[:0], None, "silu", False), ValueError, "does not take"),
    ],
)
def test_bad_input_is_refused_in_words(call: Callable[..., Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(torch.randn(2, 4))


@pytest.mark.parametrize("sizes", [(0,), (0, 4), (3, 0)])
def test_empty_tensors(sizes: tuple[int, ...]) -> None:
    x, u = torch.randn(sizes).requires_grad_(), torch.randn(sizes).requires_grad_()
    (ox.ops.swiglu(x, u).sum() + ox.ops.gelu(x).sum()).backward()
    assert x.grad is not None and x.grad.shape == sizes


# -- of an unchanged model ------------------------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(48, 3)
        self.first = nn.Sequential(nn.Linear(16, 16), nn.GELU("tanh"), nn.Linear(16, 16), nn.SiLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.down(F.silu(self.gate(x)) * F.gelu(self.up(x)))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_serves_gelu_and_silu_of_a_model_and_goes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Gated().to(dtype), torch.randn(33, 16).to(dtype)

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(x).float().square().sum(), list(model.parameters())))

    plain = gradients()
    operators = _C.tune.NativeOperators()
    assert all(report.installed for report in operators.install(["gelu", "silu"]))
    try:
        before = operators.handed_on()
        served = gradients()
        assert operators.handed_on() == before + 1  # GELU without tanh, forward
    finally:
        operators.uninstall()
    bound = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for a, b in zip(served, plain, strict=True):
        torch.testing.assert_close(a, b, **bound)  # type: ignore[arg-type]
    if dtype == torch.float32:  # bfloat16 hides the difference
        assert any(not a.equal(b) for a, b in zip(served, plain, strict=True))
    assert all(a.equal(b) for a, b in zip(gradients(), plain, strict=True))


def test_the_strategy_and_the_edit() -> None:
    torch.manual_seed(0)
    model, x, target = Gated(), torch.randn(8, 16), torch.randint(3, (8,))
    given = model(x)
    optimizer = ox.model.ModelOptimizer()
    (outcome,) = optimizer.apply(model, "activation:native", (x, target), F.cross_entropy)
    assert outcome.applied, outcome.reason
    assert not model(x).equal(given)
    optimizer.revert()
    assert model(x).equal(given)
    plan = ox.accelerate(
        model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, [(x, target)],
        strategies=["native_activation"], tune_seconds=1, remember=False,
    )  # fmt: skip
    (entry,) = (e for e in plan.certificate.entries if e.strategy == "native_activation")
    assert "neither GELU" not in entry.reason
    plan.revert()
    plain = nn.Linear(16, 3)
    (missing,) = ox.model.ModelOptimizer().apply(plain, "activation:native", (x, target), F.cross_entropy)
    assert "neither GELU nor SiLU" in missing.reason
