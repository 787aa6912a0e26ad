"""Linear layers with products of bfloat16 against fp64: no further off than twice torch's own."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import oxytorch as ox
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.library import opcheck
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .rounding import ROUNDING, native, threads

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")
NARROWER = {
    "avx2": "twice_torchs or finite or relu_has",
    "scalar": "(twice_torchs and 1) or finite or (relu_has and 9)",
}

BF16 = torch.bfloat16
NAMES = ("output", "input", "weight", "bias")


#: Linear layers under autocast by the kernel.
installed = partial(native, "linear")


def autocast() -> torch.autocast:
    return torch.autocast("cpu", BF16)


class Case:
    """Random sizes, layouts and dtypes, by a seed."""

    def __init__(self, seed: int) -> None:
        draw, noise = random.Random(seed), torch.Generator().manual_seed(seed)
        rows = draw.choice([1, 2, 17, 63, 64, 65, 127, 129, 255, 511, 513, 2100])
        features = draw.choice([1, 2, 7, 15, 16, 48, 65, 129, 255, 272, 784])
        outputs = draw.choice([1, 3, 10, 16, 64, 65, 129, 200, 513, 1040])
        wide = draw.random() < 0.3

        def matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            made = torch.randn(rows, columns + (3 if wide else 0), generator=noise).to(dtype)
            return made[:, 1 : columns + 1] if wide else made

        self.dtype = draw.choice([torch.float32, torch.float32, BF16])
        self.x = matrix(rows, features, BF16)
        self.w = matrix(outputs, features, self.dtype)
        self.b = torch.randn(outputs, generator=noise).to(self.dtype) if draw.random() < 0.6 else None
        self.g = matrix(rows, outputs, BF16)
        if draw.random() < 0.2:
            self.g = self.g.t().contiguous().t()
        self.ours: dict[str, bool] = {"relu": True} if draw.random() < 0.4 else {}

    def linear(self, *given: Any) -> Tensor:
        """The operator here."""
        return ox.ops.linear(*given, **self.ours)

    def torchs(self, *given: Any) -> Tensor:
        """Torch's own."""
        return F.relu(F.linear(*given)) if self.ours else F.linear(*given)

    def run(self, call: Callable[..., Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Output and gradients; everything in `dtype`, or as given."""
        given = [
            None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in (self.x, self.w, self.b)
        ]
        output = call(*given)
        inputs = [t for t in given if t is not None]
        return [output.detach(), *torch.autograd.grad(output, inputs, self.g.to(output.dtype))]


@pytest.mark.parametrize("seed", range(60))
def test_no_further_off_than_twice_torchs(seed: int) -> None:
    case = Case(seed)
    ours, theirs, right = case.run(case.linear), case.run(case.torchs, BF16), case.run(case.torchs, torch.float64)
    for name, a, t, e in zip(NAMES, ours, theirs, right, strict=False):
        assert a.shape == t.shape
        assert a.dtype == (case.dtype if name in ("weight", "bias") else BF16), name
        error, allowed = (float((one.double() - e).norm()) for one in (a, t))
        assert error <= 2 * allowed + ROUNDING[BF16] * float(e.norm()), (name, error, allowed, float(e.norm()))


def test_gradients_of_a_float32_weight_are_not_rounded_to_bfloat16() -> None:
    case = next(c for c in map(Case, range(99)) if c.dtype == torch.float32 and c.b is not None and len(c.x) > 100)
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("torch's operators serve this processor")
    ours, right = case.run(ox.ops.linear), case.run(F.linear, torch.float64)
    rounded = [case.x, case.w.to(BF16), case.g]
    exact = rounded[2].double().t() @ rounded[0].double()
    assert float((ours[2].double() - exact).norm() / exact.norm()) < 1e-5
    assert float((ours[3].double() - right[3]).norm() / right[3].norm()) < 1e-5


@pytest.mark.parametrize("sizes", [(300, 1700, 40), (70, 3201, 65), (2100, 2000, 130)])
def test_sums_of_long_rows(sizes: tuple[int, int, int]) -> None:
    rows, features, outputs = sizes
    noise = torch.Generator().manual_seed(rows)
    x = torch.randint(-3, 4, (rows, features), generator=noise).to(BF16)
    w = torch.randint(-3, 4, (outputs, features), generator=noise).to(torch.float32)
    right = (x.double() @ w.double().t()).to(BF16)  # small whole numbers: sums are exact, and rounded once
    assert ox.ops.linear(x, w).equal(right)


@pytest.mark.parametrize("sizes", [(2100, 600, 1040), (2100, 1040, 600), (300, 40, 2000)])
@pytest.mark.parametrize("adds", [False, True])
def test_gradients_of_large_weights(sizes: tuple[int, int, int], adds: bool) -> None:
    rows, features, outputs = sizes
    noise = torch.Generator().manual_seed(rows)
    x, w, g = (
        torch.randint(-3, 4, size, generator=noise).to(kind)
        for size, kind in (((rows, features), BF16), ((outputs, features), torch.float32), ((rows, outputs), BF16))
    )
    b = torch.zeros(outputs)
    right = [g @ w.to(BF16), g.double().t() @ x.double(), g.double().sum(0)]  # small whole numbers: sums are exact
    for count in (1, 2, 3, 7):
        given = [t.clone().requires_grad_() for t in (x, w, b)]
        with threads(count):
            for _ in range(1 + adds):
                ox.ops.linear(*given).backward(g)
        for name, one, expected in zip(NAMES[1:], given, right, strict=True):
            assert one.grad is not None
            if name != "input":
                assert one.grad.double().equal(expected * (1 + adds)), (name, count)
            elif not adds:
                torch.testing.assert_close(one.grad, expected)


@pytest.mark.parametrize("size", [(5, 20, 9), (300, 272, 513), (3, 70, 784, 65), (2100, 130, 200)])
@pytest.mark.parametrize("wanted", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_relu_has_the_bits_of_one_that_follows(size: tuple[int, ...], wanted: tuple[int, int, int]) -> None:
    *rows, features, outputs = size
    noise = torch.Generator().manual_seed(outputs)
    x = torch.randn(*rows, features, generator=noise).to(BF16)
    w, b = torch.randn(outputs, features, generator=noise), torch.randn(outputs, generator=noise)
    b[0], w[1], b[1] = float("nan"), 0, 0  # and zeros, whose gradient is 0
    g = torch.randn(*rows, outputs, generator=noise).to(BF16)
    given = [t.requires_grad_(bool(want)) for t, want in zip((x, w, b), wanted, strict=True)]
    inputs = [t for t in given if t.requires_grad]
    made, expected = ox.ops.linear(*given, relu=True), F.relu(ox.ops.linear(*given))
    assert torch.equal(made.nan_to_num(7), expected.nan_to_num(7))
    for ours, right in zip(*(torch.autograd.grad(y, inputs, g) for y in (made, expected)), strict=True):
        assert ours.dtype == right.dtype and torch.equal(ours.nan_to_num(7), right.nan_to_num(7))


def test_relu_changed_in_place_is_refused_by_backward() -> None:
    x, w = torch.randn(9, 20).to(BF16).requires_grad_(), torch.randn(30, 20).requires_grad_()
    made = ox.ops.linear(x, w, relu=True)
    made.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.float().sum().backward()


@pytest.mark.parametrize("seed", [1, 5, 8, 21, 33])
def test_bits_do_not_depend_on_the_number_of_threads(seed: int) -> None:
    case = Case(seed)
    runs = []
    for count in (1, 2, 5):
        with threads(count):
            runs.append(case.run(case.linear))
    for other in runs[1:]:
        assert all(a.equal(b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("size", [(), (7,), (3, 5), (2, 3, 4), (0,), (2, 0, 3)])
def test_any_leading_sizes(size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(*size, 20).to(BF16).requires_grad_(), torch.randn(9, 20), torch.randn(9)
    w.requires_grad_()
    ours, expected = ox.ops.linear(x, w, b), F.linear(x, w.to(BF16), b.to(BF16))
    assert ours.shape == expected.shape
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)
    got = torch.autograd.grad(ours.float().sum(), (x, w))
    for a, e in zip(got, torch.autograd.grad(expected.float().sum(), (x, w)), strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_rows_that_overlap_in_memory(rows: int) -> None:
    torch.manual_seed(0)
    long, w = torch.randn(rows + 40).to(BF16), torch.randn(32, 32) / 5
    once, grad = torch.randn(1, 32).to(BF16), torch.randn(1, 32).to(BF16)
    for x in (long.unfold(0, 32, 1)[:rows], once.expand(rows, 32), once.as_strided((rows, 32), (0, 1))):
        given = x.detach().requires_grad_()
        ours, expected = ox.ops.linear(given, w), F.linear(x, w.to(BF16))
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)
        (of_x,) = torch.autograd.grad(ours, given, grad.expand(rows, 32))
        torch.testing.assert_close(of_x, (grad @ w.to(BF16)).expand(rows, 32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 0)])
def test_what_is_frozen_gets_no_gradient(wanted: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    given = [torch.randn(70, 20).to(BF16), torch.randn(30, 20), torch.randn(30)]
    every = [t.clone().requires_grad_() for t in given]
    some = [t.clone().requires_grad_(bool(w)) for t, w in zip(given, wanted, strict=True)]
    assert ox.ops.linear(*some).requires_grad == any(wanted)
    if not any(wanted):
        return
    ox.ops.linear(*every).float().square().sum().backward()
    ox.ops.linear(*some).float().square().sum().backward()
    for one, all_of, w in zip(some, every, wanted, strict=True):
        assert (one.grad is not None) == bool(w)
        assert one.grad is None or one.grad.equal(all_of.grad)


def test_values_that_are_not_finite_stay_where_torch_has_them() -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(70, 40).to(BF16), torch.randn(50, 40), torch.randn(50)
    x[3, 4], x[5, 6] = float("nan"), float("inf")
    w[7, 8], b[9] = float("nan"), float("-inf")
    w[10, 11] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)  # a NaN that rounding must not end
    w[12, 13] = 3.4e38  # above the largest of bfloat16
    ours, theirs = ox.ops.linear(x, w, b), F.linear(x, w.to(BF16), b.to(BF16))
    assert ours.isnan().equal(theirs.isnan())
    assert ours.isinf().equal(theirs.isinf())


def test_a_second_derivative_is_no_further_off_than_twice_torchs() -> None:
    torch.manual_seed(0)
    given = torch.randn(9, 20).to(BF16), torch.randn(30, 20) / 5, torch.randn(30)

    def penalty(linear: Callable[..., Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        x, w, b = (t.to(dtype or t.dtype).requires_grad_() for t in given)
        (first,) = torch.autograd.grad(linear(x, w, b).tanh().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, w))

    def torchs_relu(*given: Tensor) -> Tensor:
        return F.relu(F.linear(*given))

    for own, torchs in ((ox.ops.linear, F.linear), (partial(ox.ops.linear, relu=True), torchs_relu)):
        all_of = penalty(own), penalty(torchs, BF16), penalty(torchs, torch.float64)
        for ours, theirs, right in zip(*all_of, strict=True):
            error, allowed = (float((one.double() - right).norm()) for one in (ours, theirs))
            assert error <= 2 * allowed + ROUNDING[BF16] * float(right.norm())


def test_it_is_an_operator_that_torch_checks() -> None:
    x, w, b = torch.randn(9, 20).to(BF16).requires_grad_(), torch.randn(30, 20).requires_grad_(), torch.randn(30)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(torch.ops.oxytorch.linear, (x, w, b.requires_grad_()), test_utils=tests)
    opcheck(torch.ops.oxytorch.linear, (x, w), test_utils=tests)
    opcheck(torch.ops.oxytorch.linear, (x, w), {"relu": True}, test_utils=tests)


@pytest.mark.parametrize("relu", [False, True])
def test_compiled_and_transformed_it_agrees_with_eager(relu: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(9, 20).to(BF16).requires_grad_(), torch.randn(30, 20).requires_grad_()

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return ox.ops.linear(x.sin(), w, relu=relu).float().square().mean()

    expected = loss(x, w)
    grads = torch.autograd.grad(expected, (x, w))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, w)
    assert compiled.equal(expected)
    assert all(a.equal(b) for a, b in zip(torch.autograd.grad(compiled, (x, w)), grads, strict=True))
    # torch.func differentiates what backward does, which torch's operators do then.
    torch.testing.assert_close(grad(loss, 1)(x.detach(), w.detach()), grads[1], rtol=1e-2, atol=1e-3)
    many = vmap(lambda row: ox.ops.linear(row, w.detach(), relu=relu))(x.detach().unsqueeze(1))
    torch.testing.assert_close(many.squeeze(1), ox.ops.linear(x.detach(), w.detach(), relu=relu))
    of_each = vmap(grad(loss), (0, None))(x.detach().unsqueeze(1), w.detach())
    torch.testing.assert_close(of_each.squeeze(1) / len(x), grads[0], rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_other_dtypes_are_torchs_own(dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(size).to(dtype) for size in ((4, 6), (5, 6), (5,)))
    assert ox.ops.linear(x, w, b).equal(F.linear(x, w, b))
    assert ox.ops.linear(x, w, b, relu=True).equal(F.relu(F.linear(x, w, b)))


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda x, w, b: ox.ops.linear(x, w[:, :3], b), ValueError, "outputs x features"),
        (lambda x, w, b: ox.ops.linear(x, w[0], b), ValueError, "outputs x features"),
        (lambda x, w, b: ox.ops.linear(x, w.double(), b), TypeError, "weight Double"),
        (lambda x, w, b: ox.ops.linear(x.float(), w.to(BF16), b), TypeError, "weight BFloat16"),
        (lambda x, w, b: ox.ops.linear(x, w, b.to(BF16)), TypeError, "bias of the dtype of its weight, Float"),
        (lambda x, w, b: ox.ops.linear(x, w, b[:7]), ValueError, "each of the 30 outputs"),
    ],
)
def test_bad_input_is_refused_in_words(call: Callable[..., Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call(torch.randn(9, 20).to(BF16), torch.randn(30, 20), torch.randn(30))


# -- in the place of torch's, under autocast --------------------------------------------------------------------------


class Block(nn.Module):
    """Linear layers as people call them: a module, a function, a product with a transposed weight, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24, bias=False)
        self.own = nn.Parameter(torch.randn(24, 24) / 5)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        x = x + F.linear(x, self.own) + x @ self.own.t()
        result: Tensor = F.linear(self.up(x), self.down.weight).float()
        return result


def gradients(model: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor] | None = None) -> list[Tensor]:
    with autocast():
        output = run(model, x) if run else model(x)
    return [output.detach(), *torch.autograd.grad(output.square().mean(), [x, *model.parameters()])]


def test_layers_under_autocast_are_served() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 33, 24, requires_grad=True)
    exact = [t.float() for t in gradients(copy.deepcopy(model).double(), x.detach().double().requires_grad_())]
    expected = gradients(model, x)
    plain = model(x)
    with installed():
        handed = ox._C.tune.NativeOperators.handed_on()
        served = gradients(model, x)
        assert ox._C.tune.NativeOperators.handed_on() == handed
        assert model(x).equal(plain), "without autocast it is torch's"
        recomputed = gradients(model, x, lambda m, x: checkpoint(m, x, use_reentrant=False))
        compiled = gradients(torch.compile(model, backend="aot_eager"), x)
    assert not served[0].equal(expected[0])
    for ours, theirs, right in zip(served, expected, exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - right).norm() <= 2 * (theirs - right).norm() + ROUNDING[BF16] * right.norm()
    assert all(a.equal(b) for a, b in zip(recomputed, served, strict=True))
    for a, b in zip(compiled, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-3)
    assert all(a.equal(b) for a, b in zip(gradients(model, x), expected, strict=True)), "it has not gone"


def test_what_it_does_not_serve_stays_with_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 16)
    calls: list[Callable[[], Tensor]] = [
        lambda: F.linear(x.double(), torch.ones(3, 16).double()),
        lambda: torch.addmm(torch.ones(3), x, torch.ones(16, 3), beta=2),
        lambda: x @ torch.arange(48.0).reshape(16, 3),
        lambda: x @ torch.ones(16),
        lambda: torch.randn(0, 16) @ torch.ones(3, 16).t(),
        lambda: vmap(lambda row: F.linear(row, torch.ones(3, 16)))(x),
    ]
    with autocast():
        expected = [call() for call in calls]
        with installed():
            found = [call() for call in calls]
        with installed(), torch.autocast("cpu", torch.float16):
            assert F.linear(x, torch.ones(3, 16)).dtype == torch.float16
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


def tried(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    """What the certificate says of it."""
    plan = ox.accelerate(
        model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, [batch], level="advanced",
        strategies=["bf16_autocast", "native_linear"], tune_seconds=1, max_growth=10, remember=False,
    )  # fmt: skip
    (entry,) = (e for e in plan.certificate.entries if e.strategy == "native_linear")
    plan.revert()
    return entry


def test_accelerate_tries_it() -> None:
    with installed():
        pass
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    entry = tried(model, (torch.randn(256, 256), torch.randint(10, (256,))))
    assert entry.status in ("accepted", "rejected", "skipped"), entry
    assert "numer" not in entry.reason, entry.reason


def test_a_model_without_linear_layers_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 5), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    entry = tried(model, (torch.randn(4, 2, 30), torch.randint(3, (4,))))
    assert entry.status == "skipped" and "no float32 weight of a linear layer" in entry.reason


def test_it_leaves_the_head_to_the_loss() -> None:
    """A weight of many classes is deferred, as without it."""
    torch.manual_seed(0)
    head, x = nn.Linear(24, 300), torch.randn(40, 24, requires_grad=True)
    target = torch.randint(300, (40,))
    logits = ox._C.tune.DeferredLogits()
    before = ox._C.tune.DeferredLogits.losses()
    with installed(), autocast(), logits.scope():
        F.cross_entropy(head(x), target).backward()
    assert ox._C.tune.DeferredLogits.losses() == before + 1


def test_it_holds_no_more_memory_than_torchs() -> None:
    code = """
import sys, torch, oxytorch as ox
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
x = torch.randn(2048, 256)
native = ox._C.tune.NativeOperators()
if sys.argv[1] == "ours":
    print(native.install(["linear"])[0].reason, file=sys.stderr)
def step():
    with torch.autocast("cpu", torch.bfloat16):
        model(x).float().square().mean().backward()
    model.zero_grad()
step()
with ox.memory.Meter() as meter:
    step()
print(meter.peak_bytes)
"""
    peaks = {}
    for which in ("ours", "torch"):
        done = subprocess.run([sys.executable, "-c", code, which], capture_output=True, text=True, check=True)
        peaks[which] = int(done.stdout)
    assert peaks["ours"] <= peaks["torch"], peaks
