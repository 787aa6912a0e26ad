"""Linear layer and cross entropy as one against torch's two in fp64: no further off than twice torch's own."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import oxytorch as ox
import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad
from torch.library import opcheck
from torch.nn import functional as F

from .rounding import ROUNDING, threads

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")

NAMES = ("loss", "input", "weight", "bias")


def torchs(x: Tensor, w: Tensor, y: Tensor, b: Tensor | None = None, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(x, w, b).flatten(0, -2), y.flatten(), **options)


class Case:
    """Random sizes, layouts and options, by a seed."""

    def __init__(self, seed: int) -> None:
        draw, noise = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        tokens = draw.choice([1, 2, 17, 63, 64, 65, 255, 257, 600])
        classes = draw.choice([1, 2, 10, 64, 100, 129, 1000, 5003])
        width = draw.choice([1, 7, 16, 48, 65, 128])
        wide = draw.random() < 0.3

        def matrix(rows: int) -> Tensor:
            made = torch.randn(rows, width + (3 if wide else 0), generator=noise).to(self.dtype)
            return made[:, 1 : width + 1] if wide else made

        self.x, self.w = matrix(tokens), matrix(classes)
        self.b = torch.randn(classes, generator=noise).to(self.dtype) if draw.random() < 0.5 else None
        self.y = torch.randint(classes, (tokens,), generator=noise)
        if draw.random() < 0.4:
            self.y[torch.rand(tokens, generator=noise) < 0.3] = -100
        self.options = {
            "label_smoothing": draw.choice([0.0, 0.0, 0.1, 1.0]),
            "reduction": draw.choice(["mean", "sum"]),
        }

    def run(
        self, call: Callable[..., Tensor], dtype: torch.dtype, of_weight: torch.dtype | None = None
    ) -> list[Tensor | None]:
        """Loss and gradients; `of_weight`: the dtype of weight and bias, where it is another."""
        types = (dtype, of_weight or dtype, of_weight or dtype)
        given = [
            None if t is None else t.detach().to(to).requires_grad_()
            for t, to in zip((self.x, self.w, self.b), types, strict=True)
        ]
        loss = call(given[0], given[1], self.y, given[2], **self.options)
        inputs = [t for t in given if t is not None]
        grads = list(torch.autograd.grad(loss, inputs))
        return [loss.detach(), *grads, *([None] if self.b is None else [])]


def check_results(
    ours: list[Tensor | None],
    theirs: list[Tensor | None],
    right: list[Tensor | None],
    of_input: torch.dtype,
    of_weight: torch.dtype,
) -> None:
    """Dtypes, and that ours are no further from `right` than twice torch's."""
    types = (torch.float32, of_input, of_weight, of_weight)
    for name, dtype, a, t, e in zip(NAMES, types, ours, theirs, right, strict=True):
        if e is None or t is None or a is None:
            continue
        assert a.shape == t.shape
        assert a.dtype == dtype
        if e.isnan().any():
            assert a.isnan().equal(e.isnan())
            continue
        error, allowed = (float((one.double() - e).norm()) for one in (a, t))
        # Each gradient of a logit is rounded once before it is multiplied.
        more = 2 * ROUNDING[of_input] * float(e.norm()) + 1e-6
        assert error <= 2 * allowed + more, (name, error, allowed, float(e.norm()))


@pytest.mark.parametrize("seed", range(60))
def test_no_further_off_than_twice_torchs(seed: int) -> None:
    case = Case(seed)
    right = case.run(torchs, torch.float64)
    ours, theirs = case.run(ox.ops.linear_cross_entropy, case.dtype), case.run(torchs, case.dtype)
    check_results(ours, theirs, right, case.dtype, case.dtype)


@pytest.mark.parametrize("seed", range(100, 130))
def test_a_float32_weight_beside_bfloat16(seed: int) -> None:
    case = Case(seed)
    noise = torch.Generator().manual_seed(seed)
    case.x = case.x.bfloat16()
    case.w, case.b = (None if t is None else torch.randn(t.shape, generator=noise) for t in (case.w, case.b))
    ours = case.run(ox.ops.linear_cross_entropy, torch.bfloat16, torch.float32)
    right = case.run(torchs, torch.float64)

    def cast(x: Tensor, w: Tensor, y: Tensor, b: Tensor | None, **options: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torchs(x, w, y, b, **options)

    check_results(ours, case.run(cast, torch.bfloat16, torch.float32), right, torch.bfloat16, torch.float32)

    def by_autocast(x: Tensor, w: Tensor, y: Tensor, b: Tensor | None, **options: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return ox.ops.linear_cross_entropy(x, w, y, b, **options)

    for a, b in zip(ours, case.run(by_autocast, torch.bfloat16, torch.float32), strict=True):
        assert (a is None and b is None) or (a is not None and b is not None and a.equal(b)) or a.isnan().any()


@pytest.mark.parametrize("seed", [1, 5, 8, 21])
def test_bits_do_not_depend_on_the_number_of_threads(seed: int) -> None:
    case = Case(seed)
    runs = []
    for count in (1, 2, 5):
        with threads(count):
            runs.append(case.run(ox.ops.linear_cross_entropy, case.dtype))
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert (a is None and b is None) or (a is not None and b is not None and a.equal(b))


@pytest.mark.parametrize(("tokens", "classes"), [(2500, 700), (4200, 256), (129, 1024), (129, 1025)])
def test_few_classes_of_many_tokens(tokens: int, classes: int) -> None:
    """Above and below what is held at a time, and on both sides of the number of classes that are few."""
    case = Case(1)
    noise = torch.Generator().manual_seed(tokens)
    case.x, case.w = torch.randn(tokens, 40, generator=noise).bfloat16(), torch.randn(classes, 40, generator=noise)
    case.b, case.y = torch.randn(classes, generator=noise), torch.randint(classes, (tokens,), generator=noise)
    case.y[:9] = -100
    case.options = {"label_smoothing": 0.1, "reduction": "mean"}
    right = case.run(torchs, torch.float64)
    for of_weight in (torch.float32, torch.bfloat16):
        runs = []
        for count in (1, 2, 5):
            with threads(count):
                runs.append(case.run(ox.ops.linear_cross_entropy, torch.bfloat16, of_weight))
        for other in runs[1:]:
            assert all(a.equal(b) for a, b in zip(runs[0], other, strict=True) if a is not None and b is not None)
        theirs = case.run(torchs, torch.bfloat16)
        check_results(runs[0], theirs, right, torch.bfloat16, of_weight)


def by_torch(x: Tensor, w: Tensor, y: Tensor, b: Tensor | None, **options: Any) -> tuple[Tensor | None, ...]:
    """Loss and gradients by the kernel for devices that have none of their own, on whichever device they are."""
    forward = torch.ops.oxytorch.linear_cross_entropy_forward.default
    reduction, smoothing = options["reduction"], options["label_smoothing"]
    wanted = [True, True, b is not None]
    return forward._op_dk(
        torch._C.DispatchKey.CompositeExplicitAutograd, x, w, y, b, -100, smoothing, reduction == "mean", wanted
    )


@pytest.mark.parametrize("seed", range(200, 240))
def test_by_torchs_operators_no_further_off_than_twice_torchs(seed: int) -> None:
    case = Case(seed)
    found = by_torch(case.x, case.w, case.y, case.b, **case.options)
    right, theirs = case.run(torchs, torch.float64), case.run(torchs, case.dtype)
    if not right[0].isfinite():  # no token counts: what is not NaN is zero, as in torch
        assert all(not g.any() for g in found[1:] if g is not None)
        return
    of = torch.float32 if case.dtype == torch.float16 else case.dtype  # until the loss scale has come
    check_results([None if e is None else t for e, t in zip(right, found, strict=True)], theirs, right, of, of)


@pytest.mark.parametrize(("tokens", "width", "classes"), [(2048, 64, 3000), (600, 700, 800), (300, 8, 1000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_by_torchs_operators_no_logits_of_all_tokens_are_held(
    tokens: int, width: int, classes: int, dtype: torch.dtype
) -> None:
    x, w = torch.randn(tokens, width).to(dtype).requires_grad_(), torch.randn(classes, width).to(dtype).requires_grad_()
    y = torch.randint(classes, (tokens,))
    options = {"label_smoothing": 0.1, "reduction": "mean"}
    with ox.memory.Meter() as ours:
        by_torch(x.detach(), w.detach(), y, None, **options)
    with ox.memory.Meter() as theirs:
        F.cross_entropy(F.linear(x, w).float(), y, **options).backward()
    before = x.nbytes + w.nbytes
    assert ours.peak_bytes < 1.01 * theirs.peak_bytes, (ours.peak_bytes, theirs.peak_bytes)
    if tokens == 2048:  # 256 of them at a time
        assert ours.peak_bytes < 0.25 * theirs.peak_bytes + before


def test_by_torchs_operators_nothing_is_read_on_the_host() -> None:
    x, w, y = (torch.empty_like(t, device="meta") for t in batch(600))
    found = by_torch(x, w, y, None, label_smoothing=0.1, reduction="mean")
    assert [tuple(t.shape) for t in found] == [(), (600, 16), (50, 16), (0,)]


def batch(*size: int, classes: int = 50, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*size, width, generator=generator, requires_grad=True)
    w = torch.randn(classes, width, generator=generator, requires_grad=True)
    return x, w, torch.randint(classes, size, generator=generator)


@pytest.mark.parametrize("size", [(), (7,), (3, 5), (2, 3, 4)])
def test_any_leading_sizes(size: tuple[int, ...]) -> None:
    x, w, y = batch(*size)
    ours = ox.ops.linear_cross_entropy(x, w, y)
    expected = F.cross_entropy(F.linear(x, w).reshape(-1, 50), y.flatten())
    torch.testing.assert_close(ours, expected)
    got = torch.autograd.grad(ours, (x, w))
    for a, b in zip(got, torch.autograd.grad(expected, (x, w)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_frozen_layer_and_a_tied_one() -> None:
    x, w, y = batch(9)
    loss = ox.ops.linear_cross_entropy(x, w.detach(), y)
    (of_x,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(of_x, torch.autograd.grad(torchs(x, w.detach(), y), x)[0])
    assert not ox.ops.linear_cross_entropy(x.detach(), w.detach(), y).requires_grad
    embedded = F.embedding(y, w)
    tied = torch.autograd.grad(ox.ops.linear_cross_entropy(embedded, w, y), w)[0]
    torch.testing.assert_close(tied, torch.autograd.grad(torchs(F.embedding(y, w), w, y), w)[0])


def test_the_gradient_of_the_loss_counts() -> None:
    x, w, y = batch(9)
    plain = torch.autograd.grad(ox.ops.linear_cross_entropy(x, w, y), (x, w))
    scaled = torch.autograd.grad(ox.ops.linear_cross_entropy(x, w, y) * 1024, (x, w))
    assert all((a * 1024).equal(b) for a, b in zip(plain, scaled, strict=True))


def test_backward_twice_and_gradients_that_somebody_keeps() -> None:
    x, w, y = batch(9)
    plain = torch.autograd.grad(ox.ops.linear_cross_entropy(x, w, y), (x, w))
    loss = ox.ops.linear_cross_entropy(x, w, y) * 2
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    kept = [g.clone() for g in first]
    first[1].zero_()
    again = torch.autograd.grad(loss, (x, w))
    assert all(a.equal(b) and a.equal(2 * c) for a, b, c in zip(kept, again, plain, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (x, w))
    # What the operator gives of its own is not written to.
    wanted = [True, True, False]
    loss, of_x, of_w, _ = torch.ops.oxytorch.linear_cross_entropy_forward(x, w, y, None, -100, 0.0, True, wanted)
    (loss * 3).backward()
    assert of_x.equal(plain[0]) and of_w.equal(plain[1]) and w.grad.equal(3 * plain[1])


def test_a_loss_scale_is_not_rounded_to_the_dtype_of_the_gradients() -> None:
    x, w, y = batch(9)
    x, w = (t.detach().bfloat16().requires_grad_() for t in (x, w))
    (plain,) = torch.autograd.grad(ox.ops.linear_cross_entropy(x, w, y), x)
    (third,) = torch.autograd.grad(ox.ops.linear_cross_entropy(x, w, y) * 0.33333, x)
    assert third.equal((plain.float() * 0.33333).bfloat16())


def test_a_loss_scale_saves_the_small_gradients_of_float16() -> None:
    x, w, y = (t.detach() for t in batch(64, classes=300))
    x, w = (x * 0.01).half().requires_grad_(), (w * 1e-4).half().requires_grad_()
    (of_x,) = torch.autograd.grad(ox.ops.linear_cross_entropy(x, w, y) * 2.0**14, x)
    exact = torch.autograd.grad(torchs(x.double(), w.double(), y) * 2.0**14, x)[0]
    torch.testing.assert_close(of_x.double(), exact.double(), rtol=4e-3, atol=1e-4)


def test_no_token_counts() -> None:
    x, w, y = batch(5)
    loss = ox.ops.linear_cross_entropy(x, w, torch.full_like(y, -100))
    assert loss.isnan()
    assert ox.ops.linear_cross_entropy(x, w, torch.full_like(y, -100), reduction="sum") == 0
    assert torch.autograd.grad(loss, w)[0].count_nonzero() == 0


def test_large_logits_and_values_that_are_not_finite() -> None:
    x, w, y = batch(5)
    with torch.no_grad():
        x[0] *= 1e4
        x[1, 2], x[2, 3] = float("nan"), float("inf")
    kept = torch.tensor([True, False, False, True, True])
    ours = ox.ops.linear_cross_entropy(x[kept], w, y[kept])
    torch.testing.assert_close(ours, torchs(x[kept], w, y[kept]), rtol=1e-4, atol=1e-4)
    assert ox.ops.linear_cross_entropy(x, w, y).isnan()
    # A row that does not count may hold anything.
    y[1] = y[2] = -100
    torch.testing.assert_close(ox.ops.linear_cross_entropy(x, w, y), ours)


def test_it_is_an_operator_that_torch_checks() -> None:
    x, w, y = batch(9)
    b = torch.randn(50, requires_grad=True)
    opcheck(torch.ops.oxytorch.linear_cross_entropy, (x, w, y, b, -100, 0.1, True))
    opcheck(torch.ops.oxytorch.linear_cross_entropy, (x, w, y))
    narrow = x.detach().bfloat16().requires_grad_()
    opcheck(torch.ops.oxytorch.linear_cross_entropy, (narrow, w, y, b))


def test_compiled_and_transformed_it_agrees_with_eager() -> None:
    x, w, y = batch(9)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return ox.ops.linear_cross_entropy(x.sin(), w, y) * 3

    expected = loss(x, w)
    grads = torch.autograd.grad(expected, (x, w))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, w)
    assert compiled.equal(expected)
    assert all(a.equal(b) for a, b in zip(torch.autograd.grad(compiled, (x, w)), grads, strict=True))
    assert grad(loss)(x.detach(), w.detach()).equal(grads[0])


def test_compiled_under_autocast_it_agrees_with_eager() -> None:
    x, w, y = batch(9)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return ox.ops.linear_cross_entropy(x * 2, w, y)

    expected = loss(x, w)
    grads = torch.autograd.grad(expected, (x, w))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, w)
    assert compiled.equal(expected)
    found = torch.autograd.grad(compiled, (x, w))
    assert all(a.dtype == torch.float32 and a.equal(b) for a, b in zip(found, grads, strict=True))


def test_autocast_and_a_whole_model() -> None:
    torch.manual_seed(0)
    body, head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 50)
    x, _, y = batch(40)
    losses = []
    for fused in (True, False):
        body.zero_grad()
        head.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = functional_call(body, dict(body.named_parameters()), (x,))
            if fused:
                loss = ox.ops.linear_cross_entropy(hidden, head.weight, y, head.bias)
            else:
                loss = F.cross_entropy(head(hidden).float(), y)
        loss.backward()
        assert head.weight.grad is not None and body.weight.grad is not None
        losses.append((loss.detach(), head.weight.grad.clone(), body.weight.grad.clone()))
    for a, b in zip(*losses, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=3e-2, atol=2e-3)


def test_autocast_takes_a_bias_of_another_dtype() -> None:
    x, w, y = batch(9)
    bias = torch.zeros(50, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = ox.ops.linear_cross_entropy(x, w, y, bias), F.cross_entropy(F.linear(x, w, bias), y)
        assert ox.ops.linear(x, w, bias).dtype == torch.bfloat16
    ours.backward()
    assert bias.grad is not None and bias.grad.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_float64_is_torchs_own() -> None:
    x, w, y = (t.detach().double().requires_grad_() if t.is_floating_point() else t for t in batch(4))
    assert torch.autograd.gradcheck(lambda x, w: ox.ops.linear_cross_entropy(x, w, y, label_smoothing=0.2), (x, w))


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda x, w, y: ox.ops.linear_cross_entropy(x, w[:, :3], y), ValueError, "rows? x width|x width"),
        (lambda x, w, y: ox.ops.linear_cross_entropy(x, w, y[:3]), ValueError, "a target for each row"),
        (lambda x, w, y: ox.ops.linear_cross_entropy(x, w, y.int()), TypeError, "targets of int64"),
        (lambda x, w, y: ox.ops.linear_cross_entropy(x, w.double(), y), TypeError, "weight Double"),
        (lambda x, w, y: ox.ops.linear_cross_entropy(x, w.bfloat16(), y), TypeError, "float32 where that is bfloat16"),
        (lambda x, w, y: ox.ops.linear_cross_entropy(x, w, y, w[:, 0].bfloat16()), TypeError, "a bias of the dtype"),
        (lambda x, w, y: ox.ops.linear_cross_entropy(x, w, y, label_smoothing=2), ValueError, "label_smoothing is 2"),
        (lambda x, w, y: ox.ops.linear_cross_entropy(x, w, y, w[:, 0][:7]), ValueError, "each of the 50 classes"),
        (lambda x, w, y: ox.ops.linear_cross_entropy(x, w, y + 50), ValueError, "of token 0 is no class: there are 50"),
        (lambda x, w, y: ox.ops.linear_cross_entropy(x, w, y, reduction="none"), ValueError, "'mean' or 'sum'"),
    ],
)
def test_bad_input_is_refused_in_words(call: Callable[..., Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call(*batch(9))


def test_a_second_derivative_is_refused_in_words() -> None:
    x, w, y = batch(9)
    (first,) = torch.autograd.grad(ox.ops.linear_cross_entropy(x, w, y), x, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        first.sum().backward()


def test_memory_is_that_of_256_tokens() -> None:
    code = """
import sys, torch, oxytorch as ox
from torch.nn import functional as F
def most():  # of this program alone: what getrusage tells begins with its parent's
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
torch.set_num_threads(2)
def run(n, fused):
    x = torch.randn(n, 16).bfloat16().requires_grad_()
    w = torch.randn(30000, 16).bfloat16().requires_grad_()
    y = torch.randint(30000, (n,))
    loss = ox.ops.linear_cross_entropy(x, w, y) if fused else F.cross_entropy(F.linear(x, w).float(), y)
    loss.backward()
fused = sys.argv[1] == "ours"
run(64, fused)
before = most()
run(2048, fused)
print((most() - before) // 1024)
"""
    grown = {}
    for which in ("ours", "torch"):
        done = subprocess.run([sys.executable, "-c", code, which], capture_output=True, text=True, check=True)
        grown[which] = int(done.stdout)
    assert grown["ours"] < 0.4 * grown["torch"], grown
