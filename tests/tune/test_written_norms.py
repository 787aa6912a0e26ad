"""RMS normalization that a model writes out, computed as one: every way to write it, and whatever else may ask."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import oxytorch as ox
import pytest
import torch
from deferred_runs import assert_near, gradients
from oxytorch import _C
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")

WIDTH, EPS = 24, 1e-3
Part = Callable[["Block", Tensor, Tensor], Tensor]


@pytest.fixture
def sums() -> Iterator[Any]:
    yield _C.tune.DeferredSums()


class Block(nn.Module):
    """Two linear layers, and what is made of the output of one and of the residual."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.head(self.part(self, self.second(x), x.float()))
        return out


def llama(b: Block, x: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return b.weight * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)


def first_llama(b: Block, x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x) * b.weight


def gemma(b: Block, x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1 + b.weight.float())).type_as(x)


def t5(b: Block, x: Tensor) -> Tensor:
    return b.weight * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + EPS))


def by_power(b: Block, x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.pow(torch.mean(wide * wide, 2, True) + EPS, -0.5)).to(x.dtype) * b.weight


def by_root(b: Block, x: Tensor) -> Tensor:
    return b.weight * (x / torch.sqrt(EPS + torch.mean(torch.square(x), dim=-1, keepdim=True)))


def no_weight(_: Block, x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * x


FORMS = {"llama": llama, "first llama": first_llama, "gemma": gemma, "t5": t5, "by power": by_power,
         "by root": by_root, "no weight": no_weight}  # fmt: skip
GIVEN: dict[str, Part] = {  # what is normalized
    "output": lambda b, y, x: x,
    "sum": lambda b, y, x: x + y,
    "dropout": lambda b, y, x: x + F.dropout(y, 0.3),
}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("form", FORMS)
def test_it_is_one_norm(form: str, given: str, bf16: bool, sums: Any) -> None:
    model = Block(lambda b, y, x: FORMS[form](b, GIVEN[given](b, y, x)))
    expected = gradients(copy.deepcopy(model), bf16=bf16)
    before = sums.written(), sums.joined()
    found = gradients(model, sums.scope(), bf16=bf16)
    assert sums.written() == before[0] + 1
    assert sums.joined() == before[1] + (given != "output")
    assert_near(found, expected, 0.03 if bf16 else 1e-4)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("form", ["llama", "first llama", "gemma", "t5", "by power"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_16_bits(dtype: torch.dtype, form: str, given: str, sums: Any) -> None:
    def run(scope: Any, kind: torch.dtype) -> list[Tensor]:
        torch.manual_seed(2)
        model = Block(lambda b, y, x: FORMS[form](b, GIVEN[given](b, y, x))).to(dtype).to(kind)
        x, y = ((3 * torch.randn(5, 7, WIDTH)).to(dtype).to(kind).requires_grad_() for _ in range(2))
        torch.manual_seed(3)
        with scope:
            out = model.part(model, y, x)
        out.float().sin().sum().backward()
        found = [out.detach(), x.grad, model.weight.grad]
        return [one for one in found if one is not None]

    before = sums.written()
    ours, theirs, exact = run(sums.scope(), dtype), run(nullcontext(), dtype), run(nullcontext(), torch.float64)
    assert sums.written() == before + 1
    for one, torchs, true in zip(ours, theirs, exact, strict=True):
        assert one.dtype == torchs.dtype
        off, torchs_off = (float((t.double() - true).norm()) for t in (one, torchs))
        assert off <= 2 * torchs_off + 1e-3 * float(true.norm())


@pytest.mark.parametrize("shape", [(3, WIDTH), (1, WIDTH), (2, 3, 5, WIDTH), (7, 1, WIDTH)])
def test_it_is_as_near_to_float64_as_torchs(shape: tuple[int, ...], sums: Any) -> None:
    given = torch.randn(shape) * 3 + 1
    given[0] = 1e-3

    def run(dtype: torch.dtype, scope: Any) -> list[Tensor]:
        block = Block(lambda b, y, x: x).to(dtype)
        x = given.to(dtype, copy=True).requires_grad_()
        with scope:
            wide = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
            out = block.weight * wide
        out.sin().sum().backward()
        assert x.grad is not None and block.weight.grad is not None
        return [out.detach().double(), x.grad.double(), block.weight.grad.double()]

    before = sums.written()
    exact, torchs = run(torch.float64, nullcontext()), run(torch.float32, nullcontext())
    ours = run(torch.float32, sums.scope())
    assert sums.written() == before + 1
    for one, theirs, true in zip(ours, torchs, exact, strict=True):
        assert float((one - true).norm()) <= 2 * float((theirs - true).norm()) + 1e-6 * float(true.norm())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def custom(after: int) -> Part:
    """With a function of the user's own after so many operators."""

    def part(b: Block, y: Tensor, x: Tensor) -> Tensor:
        def at(count: int, value: Tensor) -> Tensor:
            out: Tensor = Doubled.apply(value) if count == after else value
            return out

        x = x + y
        variance = at(2, at(1, x.pow(2)).mean(-1, keepdim=True))
        inverse = at(4, torch.rsqrt(at(3, variance + EPS)))
        return b.weight * at(5, x * inverse)

    return part


def seen_inside(b: Block, y: Tensor, x: Tensor) -> Tensor:
    variance = x.pow(2).mean(-1, keepdim=True)
    variance.retain_grad()
    out = b.weight * (x * torch.rsqrt(variance + EPS))
    return out + variance


LEFT: dict[str, Part] = {
    "cube": lambda b, y, x: b.weight * (x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + EPS)),
    "square alone": lambda b, y, x: (x + y).pow(2),
    "product with itself": lambda b, y, x: x * x,
    "mean of tokens": lambda b, y, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS),
    "mean of all": lambda b, y, x: x * torch.rsqrt(x.pow(2).mean() + EPS),
    "mean without keepdim": lambda b, y, x: x * torch.rsqrt(x.pow(2).mean(-1) + EPS)[..., None],
    "of another": lambda b, y, x: y * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS),
    "of another, no less wide": lambda b, y, x: (y + x) * torch.rsqrt((x + x).pow(2).mean(-1, keepdim=True) + EPS),
    "root that multiplies": lambda b, y, x: x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS),
    "inverse of the norm": lambda b, y, x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) / (1 + x * x),
    "root over x": lambda b, y, x: torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) / (1 + x * x),
    "sum of squares": lambda b, y, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS),
    "two means added": lambda b, y, x: x * torch.rsqrt(x.pow(2).mean(-1, True) + y.pow(2).mean(-1, True)),
    "alpha": lambda b, y, x: x * torch.rsqrt(torch.add(x.pow(2).mean(-1, True), EPS, alpha=3)),
    "kept inside": seen_inside,
} | {f"custom function after {after}": custom(after) for after in range(1, 5)}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", LEFT)
def test_anything_else_is_what_torch_gives(name: str, bf16: bool, sums: Any) -> None:
    model = Block(LEFT[name])
    expected = gradients(copy.deepcopy(model), bf16=bf16)
    before = sums.written()
    found = gradients(model, sums.scope(), bf16=bf16)
    assert sums.written() == before
    assert_near(found, expected, 0.03 if bf16 else 1e-5)


def test_a_weight_of_several_dimensions_is_torchs(sums: Any) -> None:
    model = Block(lambda b, y, x: b.weight.expand(7, WIDTH) * (x * torch.rsqrt(x.pow(2).mean(-1, True) + EPS)))
    assert_near(gradients(model, sums.scope()), gradients(copy.deepcopy(Block(model.part))))


def test_the_custom_function_of_a_norm_without_its_weight(sums: Any) -> None:
    before = sums.written()
    found = gradients(Block(custom(5)), sums.scope())
    assert sums.written() == before + 1
    assert_near(found, gradients(Block(custom(5))))


@pytest.mark.parametrize("name", ["square alone", "product with itself", "mean of all"])
def test_what_is_no_norm_has_torchs_bits(name: str, sums: Any) -> None:
    model = Block(LEFT[name])
    expected = gradients(copy.deepcopy(model))
    found = gradients(model, sums.scope())
    assert all(found[key].equal(value) for key, value in expected.items())


def test_what_changed_before_it_was_asked_for_is_refused(sums: Any) -> None:
    x = torch.randn(3, WIDTH).requires_grad_() * 1
    with sums.scope():
        square = x.pow(2)
        mean = x.pow(2).mean(-1, keepdim=True)
        kept = x.pow(2)
        kept.sum()  # has its values
        x.detach().zero_()
        for one in (square, mean):
            with pytest.raises(RuntimeError, match=r"changed in place.*native_layer_norm"):
                one.sum()
        assert float(kept.detach().sum()) > 0


def test_a_sum_that_was_computed_and_changed(sums: Any) -> None:
    x, y = torch.randn(3, WIDTH).requires_grad_(), torch.randn(3, WIDTH)
    with sums.scope():
        total = x + y
        square = total.pow(2)
        total.sin()
        total.add_(1)
        with pytest.raises(RuntimeError, match=r"changed in place"):
            square.sum()


def test_without_gradients_nothing_waits_for_a_norm(sums: Any) -> None:
    x, y = torch.randn(3, WIDTH).requires_grad_(), torch.randn(3, WIDTH)
    with sums.scope():
        total = x + y
        square = x.pow(2)
        with torch.no_grad():
            parts = [total.pow(2), total * total, square.mean(-1, keepdim=True), x.pow(2)]
    assert not any(part.requires_grad for part in parts)
    torch.testing.assert_close(parts[0].numpy(), (x + y).detach().pow(2).numpy())


def test_parts_look_like_torchs(sums: Any) -> None:
    x = torch.randn(2, 3, WIDTH, dtype=torch.bfloat16).requires_grad_()
    with sums.scope():
        wide = x.float()
        parts = [wide, wide.pow(2)]
        parts.append(parts[-1].mean(-1, keepdim=True))
        parts.append(parts[-1] + EPS)
        parts.append(parts[-1].rsqrt())
        parts.append(wide * parts[-1])
        parts.append(parts[-1].to(x.dtype))
        for one in parts:
            assert one.requires_grad and one.grad_fn is not None and one.dim() == 3 and one.is_contiguous()
        assert [one.shape[-1] for one in parts] == [WIDTH, WIDTH, 1, 1, 1, WIDTH, WIDTH]
        assert [one.dtype for one in parts] == [torch.float32] * 6 + [torch.bfloat16]
        values = [one.clone() for one in parts]
    expected = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    torch.testing.assert_close(values[5], expected)
    torch.testing.assert_close(values[6], expected.to(x.dtype))


def test_transforms_and_compiled_code_are_left_alone(sums: Any) -> None:
    block, before = Block(lambda b, y, x: llama(b, x)), sums.written()
    parameters = {name: p.detach() for name, p in block.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(block, parameters, (x,))
        return out.square().mean()

    with sums.scope():
        found = torch.func.grad(loss)(parameters, torch.ones(2, 3, 12))
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)(torch.ones(2, 3, 12))
    assert sums.written() == before
    torch.testing.assert_close(compiled, block(torch.ones(2, 3, 12)))
    for name, value in torch.func.grad(loss)(parameters, torch.ones(2, 3, 12)).items():
        torch.testing.assert_close(found[name], value)


def test_it_holds_less_than_torchs(sums: Any) -> None:
    """Torch keeps the input and the input times the inverse root; the kernel keeps the input."""

    def most(scope: Any) -> int:
        x = torch.randn(64, 1024).requires_grad_() * 1
        weight = torch.randn(1024).requires_grad_()
        meter = ox.memory.Meter()
        with meter, scope:
            out = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))
            live = meter.live_bytes
        del out
        return int(live)

    assert most(sums.scope()) <= most(nullcontext()) - 64 * 1024 * 4


def test_accelerate_finds_it() -> None:
    def certificate(part: Part) -> Any:
        class Mean(Block):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x).mean(1)

        model = Mean(part)
        batch = torch.randn(8, 6, 12), torch.randint(4, (8,))
        plan = ox.accelerate(
            model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, [batch], level="advanced",
            strategies=["native_layer_norm"], tune_seconds=1, remember=False,
        )  # fmt: skip
        (entry,) = (e for e in plan.certificate.entries if e.strategy == "native_layer_norm")
        plan.revert()
        return entry

    entry = certificate(lambda b, y, x: llama(b, x))
    assert entry.status in ("accepted", "rejected") or "budget" in entry.reason, entry
    entry = certificate(lambda b, y, x: x)
    assert entry.status == "skipped" and "neither layer nor RMS normalization" in entry.reason
