"""Attention that a model writes out, computed as one: the ways to write it, and whatever else may ask."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import _C
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")

BATCH, HEADS, TOKENS, WIDTH = 3, 4, 19, 8
Form = Callable[["Attention", Tensor, Tensor, Tensor], Tensor]


@pytest.fixture
def scores() -> Iterator[Any]:
    yield _C.tune.DeferredScores()


class Attention(nn.Module):
    """Heads of queries, keys and values of linear layers, and what is made of them."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.out = nn.Linear(12, 3 * HEADS * WIDTH), nn.Linear(HEADS * WIDTH, 5)
        self.bias = nn.Parameter(torch.randn(1, HEADS, TOKENS, TOKENS))
        self.form, self.kept = form, torch.tensor(0.0)
        generator = torch.Generator().manual_seed(4)
        shown = torch.rand(BATCH, 1, 1, TOKENS, generator=generator) > 0.3
        shown[..., 0] = True
        self.register_buffer("shown", shown)
        self.register_buffer("causal", torch.ones(TOKENS, TOKENS).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(BATCH, TOKENS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        y = self.form(self, q, k, v)
        out: Tensor = self.out(y.transpose(1, 2).contiguous().view(BATCH, TOKENS, HEADS * WIDTH))
        return out


def flat(t: Tensor) -> Tensor:
    return t.reshape(BATCH * HEADS, *t.shape[2:])


def unflat(t: Tensor) -> Tensor:
    return t.view(BATCH, HEADS, *t.shape[1:])


def plain(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # timm
    q = q * WIDTH**-0.5
    return (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v


def mingpt(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(a.causal[:, :, :TOKENS, :TOKENS] == 0, float("-inf"))
    return F.dropout(F.softmax(att, dim=-1), 0.2, a.training) @ v


def annotated(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(WIDTH)
    weights = scores.masked_fill(a.shown == 0, -1e4 if q.dtype is torch.float16 else -1e9).softmax(dim=-1)
    a.kept = F.dropout(weights, 0.2)  # as that code keeps it
    return torch.matmul(a.kept, v)


def hugging_face(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    added = torch.zeros(BATCH, 1, TOKENS, TOKENS, dtype=q.dtype).masked_fill(~a.shown, torch.finfo(q.dtype).min)
    weights = torch.matmul(q, k.transpose(2, 3)) * WIDTH**-0.5 + added
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(F.dropout(weights, p=0.2, training=a.training), v)


def t5(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += a.bias.to(q.dtype)
    weights = F.softmax(scores.float(), dim=-1).type_as(v)
    return torch.matmul(F.dropout(weights, p=0.2), v)


def gemma(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(2, 3)) * WIDTH**-0.5
    weights = torch.tanh(weights / 2.0) * 2.0
    weights = weights + torch.zeros_like(a.causal, dtype=q.dtype).masked_fill(a.causal == 0, float("-inf"))
    return torch.matmul(F.softmax(weights, dim=-1, dtype=torch.float32).to(v.dtype), v)


def gptj(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(-1, -2))
    weights = torch.where(a.causal.bool(), weights, torch.tensor(torch.finfo(weights.dtype).min, dtype=weights.dtype))
    weights = weights / torch.sqrt(torch.tensor(float(WIDTH)))
    return torch.matmul(torch.softmax(weights, -1).to(v.dtype), v)


def where(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(q, k.mT) / WIDTH**0.5
    weights = torch.where(a.causal > 0, weights, float("-inf")) + a.bias.to(q.dtype)
    return torch.matmul(torch.softmax(weights, 3), v)


def in_place(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(-1, -2))
    same = weights
    weights.div_(WIDTH**0.5).masked_fill_(~a.shown, -1e4)
    return torch.softmax(same, -1) @ v


def bmm(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.bmm(flat(q), flat(k).transpose(1, 2)).softmax(2)
    return unflat(torch.bmm(F.dropout(weights, 0.2), flat(v)))


def baddbmm(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # torch's multi-head attention
    bias = a.bias.to(q.dtype).expand(BATCH, -1, -1, -1).reshape(BATCH * HEADS, TOKENS, TOKENS)
    weights = torch.baddbmm(bias, flat(q) * WIDTH**-0.5, flat(k).transpose(-2, -1))
    return unflat(torch.bmm(F.dropout(torch.softmax(weights, -1), 0.2), flat(v)))


def diffusers(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    empty = torch.empty(BATCH * HEADS, TOKENS, TOKENS, dtype=q.dtype)
    weights = torch.baddbmm(empty, flat(q), flat(k).transpose(-1, -2), beta=0, alpha=WIDTH**-0.5)
    return unflat(torch.bmm(weights.softmax(-1).to(v.dtype), flat(v)))


def bloom(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    slopes = a.bias.to(q.dtype)[:, :, :1].expand(BATCH, HEADS, 1, TOKENS).reshape(BATCH * HEADS, 1, TOKENS)
    scores = slopes.baddbmm(flat(q), flat(k).mT, beta=1.0, alpha=WIDTH**-0.5)
    scores = unflat(scores) + torch.zeros_like(a.causal, dtype=q.dtype).masked_fill(a.causal == 0, -1e4)
    weights = F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), 0.2)
    return unflat(torch.bmm(weights.view(BATCH * HEADS, TOKENS, TOKENS), flat(v)))


def swin(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q * WIDTH**-0.5) @ k.transpose(-2, -1) + a.bias.to(q.dtype)
    mask = torch.zeros(BATCH, TOKENS, TOKENS, dtype=q.dtype).masked_fill(a.shown[:, 0] == 0, -100.0)
    weights = weights.view(1, BATCH, HEADS, TOKENS, TOKENS) + mask.unsqueeze(1).unsqueeze(0)
    weights = weights.view(-1, HEADS, TOKENS, TOKENS)
    return F.dropout(weights.softmax(dim=-1), 0.2) @ v


def einsum(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = (torch.einsum("bthd,bshd->bhts", q, k) * WIDTH**-0.5).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", F.dropout(weights, 0.2), v).transpose(1, 2)


def ellipsis(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sim = torch.einsum("... i d, ... j d -> ... i j", q, k) / WIDTH**0.5
    sim = sim.masked_fill(~a.shown, -torch.finfo(sim.dtype).max)
    return torch.einsum("... i j, ... j d -> ... i d", sim.softmax(dim=-1), v)


FORMS = {form.__name__: form for form in (plain, mingpt, annotated, hugging_face, t5, gemma, gptj, where, in_place,
                                          bmm, baddbmm, diffusers, bloom, swin, einsum, ellipsis)}  # fmt: skip
WITH_BIAS = {"t5", "where", "baddbmm", "bloom", "swin"}


def trained(
    model: Attention, scope: Any = None, dtype: torch.dtype = torch.float32, exact: bool = False, bf16: bool = False
) -> tuple[list[Tensor], Tensor]:
    """Output and gradients, and what torch draws next; with `exact`, the same numbers in float64."""
    torch.manual_seed(1)
    x = torch.randn(BATCH, TOKENS, 12).to(dtype)
    model = copy.deepcopy(model).to(dtype)
    if exact:
        model, x = model.double(), x.double()
    x.requires_grad_()
    torch.manual_seed(2)
    with scope or nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        out = model(x)
    next_draw = torch.rand(2)
    out.float().sin().sum().backward()
    assert x.grad is not None
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [out.detach(), x.grad, *grads], next_draw


def assert_near(ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor], rounding: float) -> None:
    assert len(ours) == len(theirs) == len(exact)
    for one, torchs, true in zip(ours, theirs, exact, strict=True):
        assert one.dtype == torchs.dtype and one.shape == torchs.shape
        off, torchs_off = (float((t.double() - true.double()).norm()) for t in (one, torchs))
        assert off <= 2 * torchs_off + rounding * float(true.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_it_is_one_call(name: str, dtype: torch.dtype, scores: Any) -> None:
    model = Attention(FORMS[name])
    before = scores.joined()
    ours, our_draw = trained(model, scores.scope(), dtype)
    assert scores.joined() == before + 1
    theirs, draw = trained(model, None, dtype)
    exact, _ = trained(model, None, dtype, exact=True)
    assert torch.equal(our_draw, draw)
    assert len(ours) == 6 + (name in WITH_BIAS)
    assert_near(ours, theirs, exact, 1e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("name", FORMS)
def test_under_autocast(name: str, scores: Any) -> None:
    model = Attention(FORMS[name])
    before = scores.joined()
    ours, our_draw = trained(model, scores.scope(), bf16=True)
    assert scores.joined() == before + 1
    theirs, draw = trained(model, None, bf16=True)
    exact, _ = trained(model, None)
    assert torch.equal(our_draw, draw)
    assert_near(ours, theirs, exact, 5e-3)


def of(form: Form, scope: Any = None) -> list[Tensor]:
    return trained(Attention(form), scope)[0]


def assert_same(form: Form, scores: Any, joined: int) -> None:
    """What is made of it is what torch makes of it, with so many computed as one."""
    before = scores.joined()
    ours = of(form, scores.scope())
    assert scores.joined() == before + joined
    for one, torchs in zip(ours, of(form), strict=True):
        torch.testing.assert_close(one, torchs, rtol=1e-4, atol=1e-5)


def weights_of(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / 3).softmax(-1)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def read_weights(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = weights_of(q, k)
    return weights @ v + weights.square().sum(-1, keepdim=True)


def read_scores_first(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    assert scores.shape == (BATCH, HEADS, TOKENS, TOKENS) and scores.requires_grad and scores.is_contiguous()
    largest = scores.amax()
    return (scores / 3).softmax(-1) @ v + largest


def custom(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = Doubled.apply(weights_of(q, k)) @ v  # type: ignore[no-untyped-call]
    return out


def custom_beside(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.dropout(weights_of(q, k), 0.3)
    out: Tensor = weights @ v + Doubled.apply(weights).mean()  # type: ignore[no-untyped-call]
    return out


def of_two_masks(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1) + a.bias).masked_fill(a.causal == 0, -1e30) + a.bias[:, :1]
    return scores.softmax(-1) @ v


def small_fill(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).masked_fill(a.causal == 0, -3.0).softmax(-1) @ v


# By how many are computed as one.
ASKED: dict[str, tuple[int, Form]] = {
    "weights read too": (1, read_weights),
    "scores read before": (0, read_scores_first),
    "custom function": (0, custom),
    "custom function beside": (1, custom_beside),
    "two masks that learn": (1, of_two_masks),
    "a fill that hides nothing": (0, small_fill),
    "softmax over queries": (0, lambda a, q, k, v: (q @ k.mT).softmax(-2) @ v),
    "no softmax": (0, lambda a, q, k, v: (q @ k.mT) @ v),
    "softmax twice": (0, lambda a, q, k, v: (q @ k.mT).softmax(-1).softmax(-1) @ v),
    "head mask": (0, lambda a, q, k, v: (weights_of(q, k) * a.bias[:, :, :1, :1]) @ v),
    "values on the left": (0, lambda a, q, k, v: (v.mT @ weights_of(q, k)).mT),
    "narrower values": (0, lambda a, q, k, v: F.pad(weights_of(q, k) @ v[..., :5], (0, 3))),
    "dropout twice": (0, lambda a, q, k, v: F.dropout(F.dropout(weights_of(q, k), 0.1), 0.1) @ v),
    "number added": (1, lambda a, q, k, v: (q @ k.mT + 1.0).softmax(-1) @ v),
    "negative scale": (1, lambda a, q, k, v: (q @ k.mT * -0.3).softmax(-1) @ v),
    "contiguous": (1, lambda a, q, k, v: weights_of(q, k).contiguous() @ v),
    "no dropout": (1, lambda a, q, k, v: F.dropout(weights_of(q, k), 0.0) @ v),
    "other sizes": (0, lambda a, q, k, v: weights_of(q, k).view(BATCH, HEADS, -1).view((*q.shape[:3], -1)) @ v),
    "heads apart again": (
        1,
        lambda a, q, k, v: weights_of(q, k).view(-1, TOKENS, TOKENS).view(BATCH, HEADS, TOKENS, TOKENS) @ v,
    ),
    "heads apart otherwise": (
        0,
        lambda a, q, k, v: unflat(
            (weights_of(flat(q), flat(k)).view(BATCH, HEADS, TOKENS, -1).view(1, -1, TOKENS, TOKENS) @ flat(v)[None])[0]
        ),
    ),
    "evaluated": (1, lambda a, q, k, v: F.dropout(weights_of(q, k), 0.5, training=False) @ v),
    "detached keys": (1, lambda a, q, k, v: weights_of(q, k.detach()) @ v.detach()),
    "clone": (0, lambda a, q, k, v: weights_of(q, k).clone() @ v),
    "checkpoint": (0, lambda a, q, k, v: checkpoint(plain, a, q, k, v, use_reentrant=False)),
    "reentrant": (0, lambda a, q, k, v: checkpoint(plain, a, q, k, v, use_reentrant=True)),
}


@pytest.mark.parametrize("name", ASKED)
def test_it_is_what_torch_gives(name: str, scores: Any) -> None:
    joined, form = ASKED[name]
    assert_same(form, scores, joined)


@pytest.mark.parametrize("hidden", [float("-inf"), -1e9, torch.finfo(torch.float32).min])
def test_a_query_that_sees_nothing(hidden: float, scores: Any) -> None:
    def form(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hides = torch.zeros(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)
        hides[1, 0, 4] = True
        return (q @ k.mT).masked_fill(hides, hidden).softmax(-1) @ v

    ours, theirs = of(form, scores.scope()), of(form)
    assert ours[0].isnan().any() == (hidden == float("-inf"))
    for one, torchs in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, torchs, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_hooks_and_retained_gradients_of_scores_and_weights(scores: Any) -> None:
    seen: list[Tensor] = []

    def form(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        weights = s.softmax(-1)
        s.register_hook(seen.append)  # when what follows waits already
        weights.register_hook(seen.append)
        return weights @ v

    theirs = of(form)
    torchs = seen[:]
    seen.clear()
    for one, other in zip(of(form, scores.scope()), theirs, strict=True):
        torch.testing.assert_close(one, other)
    assert len(seen) == len(torchs) == 2
    for one, other in zip(seen, torchs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("inside", [False, True])
def test_parts_are_what_they_were_where_they_were_made(inside: bool, scores: Any) -> None:
    q = torch.randn(2, 2, 5, 4).requires_grad_()

    def read(scope: Any) -> list[Tensor]:
        with scope:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                made = q @ q.mT
                weights = made.softmax(-1)
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
                return [made + 0, weights + 0]

    for one, torchs in zip(read(scores.scope()), read(nullcontext()), strict=True):
        assert one.dtype == torchs.dtype
        assert torch.equal(one, torchs)


@pytest.mark.parametrize("what", ["query", "mask", "weights"])
def test_what_changed_before_it_was_asked_for(what: str, scores: Any) -> None:
    q, k, v = (torch.randn(2, 2, 5, 4).requires_grad_() * 1 for _ in range(3))
    mask = torch.zeros(5, 5)
    with scores.scope():
        weights = (q @ k.mT + mask).softmax(-1)
        if what == "weights":  # as torch does it: the product takes what is there
            weights.mul_(2)
            torch.testing.assert_close(weights @ v, 2 * ((q @ k.mT).softmax(-1) @ v))
            return
        (q if what == "query" else mask).zero_()
        with pytest.raises(RuntimeError, match=r"changed in place.*native_attention"):
            weights @ v


@pytest.mark.parametrize("what", ["no grad", "inference", "no scope", "no gradient", "float64", "two dimensions",
                                  "no keys", "broadcast"])  # fmt: skip
def test_nothing_waits_where_it_must_not(what: str, scores: Any) -> None:
    x = torch.randn(2, 3, 6, 4, dtype=torch.float64 if what == "float64" else torch.float32)
    x.requires_grad_(what != "no gradient")
    left, right = x, x.mT
    if what == "two dimensions":
        left, right = x[0, 0], x[0, 0].mT
    elif what == "no keys":
        right = x.mT.contiguous()
    elif what == "broadcast":
        right = x.mT[:1]
    modes = {"no grad": torch.no_grad, "inference": torch.inference_mode}
    before = scores.scores()
    with nullcontext() if what == "no scope" else scores.scope(), modes.get(what, nullcontext)():
        assert (left @ right).shape[-1] == 6
    assert scores.scores() == before


@pytest.mark.parametrize("need", ["mean", "each head", "none"])
def test_torchs_multihead_attention(need: str, scores: Any) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)
    x = torch.randn(3, 9, 16)
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[0, 6:] = True

    def run(scope: Any) -> list[Tensor]:
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        with scope:
            out, weights = layer(given, given, given, key_padding_mask=padding, average_attn_weights=need == "mean")
            loss = out.sin().sum()
            if need != "none":
                loss = loss + weights.square().sum()
        (grad,) = torch.autograd.grad(loss, given)
        return [out.detach(), weights.detach(), grad]

    before = scores.joined()
    ours = run(scores.scope())
    assert scores.joined() == before + 1
    for one, torchs in zip(ours, run(nullcontext()), strict=True):
        torch.testing.assert_close(one, torchs, rtol=1e-4, atol=1e-5)


def test_it_holds_no_scores(scores: Any) -> None:
    def held(scope: Any) -> int:
        q, k, v = (torch.randn(2, 4, 256, 16).requires_grad_() * 1 for _ in range(3))
        meter = ox.memory.Meter()
        with meter, scope:
            out = F.dropout(weights_of(q, k), 0.1) @ v
            live = int(meter.live_bytes)
        del out
        return live

    weights = 2 * 4 * 256 * 256
    assert held(nullcontext()) >= 12 * weights
    assert held(scores.scope()) <= 1.5 * weights


def test_any_number_of_threads_gives_the_same_bits(scores: Any) -> None:
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            q, k, v = (t.requires_grad_() for t in torch.randn(3, 2, 4, 130, 8, generator=torch.manual_seed(0)))
            bias = torch.ones(4, 130, 130).requires_grad_()
            with scores.scope():
                out = (q @ k.mT + bias).softmax(-1) @ v
            found.append([out.detach(), *torch.autograd.grad(out.sin().sum(), (q, k, v, bias))])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_transforms_and_compiled_code_are_left_alone(scores: Any) -> None:
    q = torch.randn(2, 3, 6, 4)
    before = scores.scores()

    def loss(q: Tensor) -> Tensor:
        return (weights_of(q, q) @ q).square().sum()

    with scores.scope():
        found = torch.func.grad(loss)(q)
        each = torch.func.vmap(torch.func.grad(loss))(q)
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(q.requires_grad_())
    assert scores.scores() == before
    torch.testing.assert_close(found, torch.func.grad(loss)(q.detach()))
    torch.testing.assert_close(each, found)
    torch.testing.assert_close(compiled, loss(q))


def test_a_second_backward_and_a_second_derivative(scores: Any) -> None:
    q = torch.randn(2, 2, 5, 4).requires_grad_()
    with scores.scope():
        out = (weights_of(q, q) @ q).sum()
    first = torch.autograd.grad(out, q, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out, q, retain_graph=True)[0])
    (once,) = torch.autograd.grad(out, q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention has no second derivative"):
        once.sum().backward()


def test_it_stands_beside_sums_and_gates_that_wait(scores: Any) -> None:
    def form(a: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = F.dropout(mingpt(a, q, k, v), 0.2)
        y = F.layer_norm(v + y, (WIDTH,))
        return F.silu(y) * v

    sums, gates = _C.tune.DeferredSums(), _C.tune.DeferredGates()
    with sums.scope(), gates.scope():
        assert_same(form, scores, 1)


def entry_of(form: Form) -> Any:
    """What the certificate says of it."""
    model = Attention(form)
    batch = torch.randn(BATCH, TOKENS, 12), torch.randint(5, (BATCH * TOKENS,))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1])

    plan = ox.accelerate(
        model, torch.optim.SGD(model.parameters(), 0.1), loss, [batch], level="advanced",
        strategies=["native_attention"], tune_seconds=1, remember=False,
    )  # fmt: skip
    (entry,) = (e for e in plan.certificate.entries if e.strategy == "native_attention")
    plan.revert()
    return entry


@pytest.mark.parametrize("name", ["mingpt", "t5", "baddbmm"])
def test_accelerate_tries_it(name: str) -> None:
    entry = entry_of(FORMS[name])
    assert entry.status in ("accepted", "rejected") or "budget" in entry.reason, entry
    assert "numer" not in entry.reason, entry.reason


def test_a_model_without_it_is_left_alone() -> None:
    entry = entry_of(lambda a, q, k, v: (q @ k.mT).softmax(-2) @ v)
    assert entry.status == "skipped" and "neither calls nor writes out" in entry.reason


def test_the_edit_serves_it(scores: Any) -> None:
    model, x = Attention(mingpt), torch.randn(BATCH, TOKENS, 12)
    tuner = ox.model.ModelOptimizer()
    (outcome,) = tuner.apply(model, "sdpa:native", (x, torch.randn(BATCH, TOKENS, 5)), F.mse_loss)
    assert outcome.applied, outcome
    before = scores.joined()
    model(x)
    assert scores.joined() == before + 1
    tuner.revert()
    model(x)
    assert scores.joined() == before + 1


@pytest.mark.parametrize(
    "equation", ["bhid,bhjd->bhij", "bihd,bjhd->bhij", "...id,...jd->...ij", " b h i d , b h j d -> b h i j"]
)
def test_einsums_that_are_scores(equation: str, scores: Any) -> None:
    q, k = (torch.randn(4, 4, 4, 5).requires_grad_() for _ in range(2))
    before = scores.joined()
    with scores.scope():
        weights = torch.einsum(equation, q, k).softmax(-1)
        found = torch.einsum("bhij,bhjd->bhid", weights, torch.ones(4, 4, 4, 5))
    assert scores.joined() == before + 1
    torch.testing.assert_close(found, torch.ones_like(found))


@pytest.mark.parametrize(
    "equation", ["bhdi,bhdj->bhij", "bhid,bhjd->bhji", "bhid,bhjd->bij", "bhid,bhjd->ijbh", "bhid,hjd->bhij",
                 "bhii,bhjd->bhij", "bhid,bhjd", "bhid,bhjk->bhij", "ihbd,jhbd->bhij"],
)  # fmt: skip
def test_other_einsums_are_torchs(equation: str, scores: Any) -> None:
    q = torch.randn(5, 5, 5, 5).requires_grad_()
    k = torch.randn(5, 5, 5) if ",hjd" in equation else torch.randn(5, 5, 5, 5)
    with scores.scope():
        found = torch.einsum(equation, q, k)
    torch.testing.assert_close(found + 0, torch.einsum(equation, q, k))
