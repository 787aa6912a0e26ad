"""Attention over documents that lie one after the other: each is what attention computes of it alone."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import oxytorch as ox
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.library import opcheck
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .exact import exact
from .rounding import ROUNDING, compiled_for_any_size, threads

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")
NARROWER = {"avx2": "twice_torchs or alone or nothing", "scalar": "(alone and 10) or nothing"}

NAMES = ["output", "query", "key", "value"]


def offsets_of(lengths: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=dtype)


def documents(tensor: Tensor, offsets: Tensor) -> list[Tensor]:
    """Each as a batch of one: 1 x heads x tokens x width."""
    return [tensor[a:b].transpose(0, 1)[None] for a, b in itertools.pairwise(offsets.tolist())]


def joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([part[0].transpose(0, 1) for part in parts])


class Case:
    """Random documents, layouts and options, by a seed. Plain ones are those that torch's attention has too."""

    def __init__(self, seed: int, plain: bool = False) -> None:
        draw = random.Random(seed)
        noise = torch.Generator().manual_seed(seed)
        self.dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        key_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 1, 2])
        width = draw.choice([1, 3, 8, 16, 33, 64, 80])
        sizes = [0, 1, 1, 2, 7, 16, 31, 63, 64, 65, 100, 129, 257]
        lengths = [draw.choice(sizes) for _ in range(draw.choice([1, 2, 5, 9]))]
        lengths[draw.randrange(len(lengths))] = draw.choice([1, 64, 130])
        self.query_offsets = offsets_of(lengths, draw.choice([torch.int32, torch.int64]))
        self.key_offsets: Tensor | None = None
        if not plain and draw.random() < 0.4:
            self.key_offsets = offsets_of(
                [draw.choice(sizes) for _ in lengths], draw.choice([torch.int32, torch.int64])
            )

        def rows(tokens: int, heads: int) -> Tensor:
            layout = draw.choice(["tokens", "heads", "wide", "spread"])
            if layout == "heads":
                made = torch.randn(heads, tokens, width, generator=noise).to(self.dtype).transpose(0, 1)
            elif layout == "wide":
                made = torch.randn(tokens, heads, width + 5, generator=noise).to(self.dtype)[..., 3 : width + 3]
            elif layout == "spread":
                made = torch.randn(tokens, heads, 2 * width, generator=noise).to(self.dtype)[..., ::2]
            else:
                made = torch.randn(tokens, heads, width, generator=noise).to(self.dtype)
            return made

        tokens, keys = sum(lengths), int(self.offsets_of_keys[-1])
        self.inputs = [rows(tokens, key_heads * group), rows(keys, key_heads), rows(keys, key_heads)]
        self.grad = rows(tokens, key_heads * group)
        self.options: dict[str, Any] = {"causal": draw.random() < 0.6}
        if not plain:
            self.options["scale"] = draw.choice([None, 0.3, -0.5])
            self.options["soft_cap"] = draw.choice([0.0, 0.0, 5.0])
            if draw.random() < 0.5:
                self.options |= {"causal": False, "window_before": draw.choice([-1, 0, 5, 70]),
                                 "window_after": draw.choice([-1, 0, 3, 64])}  # fmt: skip

    @property
    def offsets_of_keys(self) -> Tensor:
        return self.query_offsets if self.key_offsets is None else self.key_offsets

    def run(self, attend: Callable[..., Tensor]) -> list[Tensor]:
        """Output and gradients."""
        given = [t.detach().requires_grad_() for t in self.inputs]
        output = attend(*given)
        return [output.detach(), *torch.autograd.grad(output, given, self.grad)]

    def ours(self, **more: Any) -> list[Tensor]:
        return self.run(
            lambda *given: ox.ops.packed_attention(
                *given, self.query_offsets, self.key_offsets, **self.options, **more
            )
        )  # fmt: skip

    def alone(self, attend: Callable[..., Tensor]) -> list[Tensor]:
        """Of each document by a function of batch x heads x tokens x width."""

        def all_of(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cut = zip(
                documents(query, self.query_offsets),
                documents(key, self.offsets_of_keys),
                documents(value, self.offsets_of_keys),
                strict=True,
            )
            return joined([attend(*parts) for parts in cut])

        return self.run(all_of)

    def exactly(self) -> list[Tensor]:
        width = self.inputs[0].size(2)
        scale = self.options.get("scale")
        window = (
            (-1, 0)
            if self.options["causal"]
            else (self.options.get("window_before", -1), self.options.get("window_after", -1))
        )
        cut = zip(
            documents(self.inputs[0], self.query_offsets),
            documents(self.inputs[1], self.offsets_of_keys),
            documents(self.inputs[2], self.offsets_of_keys),
            documents(self.grad, self.query_offsets),
            strict=True,
        )
        made = [
            exact(
                *parts,
                None,
                1 / math.sqrt(width) if scale is None else scale,
                window,
                self.options.get("soft_cap", 0.0),
            )
            for parts in cut
        ]
        return [joined(list(parts)) for parts in zip(*made, strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_no_further_off_than_twice_torchs_attention_of_each_document(seed: int) -> None:
    case = Case(seed, plain=True)
    causal = case.options["causal"]
    torchs = case.alone(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    )  # fmt: skip
    # The gradient of a weight and what its softmax takes off it are a sum of such terms each, and may be one number.
    terms = 2 * float(case.grad.double().norm() * case.inputs[2].double().abs().amax())
    more = [0.0, *(terms * float(t.double().abs().amax()) for t in (case.inputs[1], case.inputs[0])), 0.0]
    rows = zip(NAMES, case.ours(), torchs, case.exactly(), more, strict=True)
    for name, ours, theirs, right, rounded in rows:
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        error, allowed = (float((t.double() - right).norm()) for t in (ours, theirs))
        assert error <= 2 * allowed + ROUNDING[case.dtype] * (float(right.norm()) + rounded), (name, error, allowed)


@pytest.mark.parametrize("seed", range(100, 140))
def test_a_document_has_the_bits_that_it_has_alone(seed: int) -> None:
    case = Case(seed)
    alone = case.alone(lambda q, k, v: ox.ops.attention(q, k, v, **case.options))
    for name, ours, expected in zip(NAMES, case.ours(), alone, strict=True):
        assert ours.equal(expected), name


@pytest.mark.parametrize("seed", range(200, 215))
def test_float64_by_torchs_operators(seed: int) -> None:
    case = Case(seed)
    case.inputs, case.grad = [t.double() for t in case.inputs], case.grad.double()
    for name, ours, right in zip(NAMES, case.ours(), case.exactly(), strict=True):
        torch.testing.assert_close(ours, right, atol=1e-10, rtol=1e-10, msg=name)


@pytest.mark.parametrize("seed", [3, 101, 104, 111, 120])
def test_bits_do_not_depend_on_the_number_of_threads(seed: int) -> None:
    case = Case(seed)
    with threads(1):
        one = case.ours()
    for count in (2, 3, 5):
        with threads(count):
            assert all(a.equal(b) for a, b in zip(one, case.ours(), strict=True))


def test_one_long_document_among_short_ones_is_shared_out() -> None:
    lengths = [700, *[3] * 40]
    q, k, v = (torch.randn(sum(lengths), 2, 16, requires_grad=True) for _ in range(3))

    def run() -> list[Tensor]:
        output = ox.ops.packed_attention(q, k, v, offsets_of(lengths), causal=True)
        return [output, *torch.autograd.grad(output.square().sum(), (q, k, v))]

    with threads(1):
        one = run()
    with threads(3):
        assert all(a.equal(b) for a, b in zip(one, run(), strict=True))


@pytest.mark.parametrize("seed", range(300, 310))
def test_dropout_of_a_document_is_that_of_a_sample(seed: int) -> None:
    case = Case(seed)
    torch.manual_seed(seed)
    ours = case.ours(dropout=0.3)
    number = itertools.count()

    def sample(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = next(number)
        batch = [torch.cat([torch.zeros(at, *t.shape[1:], dtype=t.dtype), t]) for t in (q, k, v)]
        torch.manual_seed(seed)
        return ox.ops.attention(*batch, **case.options, dropout=0.3)[at:]

    for name, got, expected in zip(NAMES, ours, case.alone(sample), strict=True):
        assert got.equal(expected), name
    torch.manual_seed(seed + 1)
    assert not case.ours(dropout=0.3)[0].equal(ours[0]) or ours[0].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("lengths", "keys"),
    [([], None), ([0], None), ([0, 0, 0], None), ([3, 0, 2], [0, 4, 1]), ([0, 0], [3, 2]), ([2, 3], [0, 0])],
)
def test_nothing_to_attend_to(lengths: list[int], keys: list[int] | None, dtype: torch.dtype) -> None:
    count = sum(lengths if keys is None else keys)
    q = torch.randn(sum(lengths), 4, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(count, 2, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    of_keys = None if keys is None else offsets_of(keys)
    output = ox.ops.packed_attention(q, k, v, offsets_of(lengths), of_keys)
    assert output.shape == q.shape
    grads = torch.autograd.grad(output.sum(), (q, k, v))
    assert all(g.shape == t.shape and g.isfinite().all() for g, t in zip(grads, (q, k, v), strict=True))
    for at, end, seen in zip(offsets_of(lengths)[:-1], offsets_of(lengths)[1:], keys or lengths, strict=True):
        assert output[at:end].isfinite().all()
        assert seen > 0 or (output[at:end].count_nonzero() == 0 and grads[0][at:end].count_nonzero() == 0)


def test_float64_is_differentiable_as_torchs() -> None:
    q, k, v = (torch.randn(7, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attend(*given: Tensor) -> Tensor:
        return ox.ops.packed_attention(*given, offsets_of([4, 0, 1, 2]), causal=True, soft_cap=1.5)

    assert torch.autograd.gradcheck(attend, (q, k, v))
    assert torch.autograd.gradgradcheck(attend, (q, k, v))


def test_a_jagged_nested_tensor_has_such_offsets() -> None:
    parts = [torch.randn(n, 2, 8) for n in (5, 1, 9)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    values, offsets = nested.values(), nested.offsets()
    output = ox.ops.packed_attention(values, values, values, offsets, causal=True)
    for part, one in zip(parts, documents(output, offsets), strict=True):
        assert one.equal(ox.ops.attention(*[part.transpose(0, 1)[None]] * 3, causal=True))


# -- as an operator of torch ------------------------------------------------------------------------------------------


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    q = torch.randn(30, 4, 8, generator=noise).to(dtype).requires_grad_()
    k, v = (torch.randn(30, 2, 8, generator=noise).to(dtype).requires_grad_() for _ in range(2))
    return q, k, v, offsets_of([7, 0, 1, 22])


def test_it_is_an_operator_that_torch_checks() -> None:
    q, k, v, offsets = batch()
    opcheck(torch.ops.oxytorch.packed_attention, (q, k, v, offsets, None, True))
    opcheck(torch.ops.oxytorch.packed_attention, (q, k, v, offsets.int(), offsets, False, 0.2, 3, -1, 2.0))
    heads_first = [t.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in (q, k, v)]
    opcheck(torch.ops.oxytorch.packed_attention, (*heads_first, offsets))
    spread = [t.detach().repeat(1, 1, 2)[..., ::2].requires_grad_() for t in (q, k, v)]
    opcheck(torch.ops.oxytorch.packed_attention, (*spread, offsets))
    as_batch = [t.detach().transpose(0, 1)[None].requires_grad_() for t in (q, k, v)]
    opcheck(
        torch.ops.oxytorch.attention_forward,
        (*as_batch, None, 0.3, -1, 0, 0.0, 0.0, None, offsets, offsets),
    )


def test_compiled_exported_and_checkpointed_agree_with_eager() -> None:
    q, k, v, offsets = batch()

    def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        return ox.ops.packed_attention(q * 2, k, v, offsets, causal=True).sin()

    expected = attend(q, k, v, offsets)
    of_q = torch.autograd.grad(expected.sum(), q)[0]
    torch._dynamo.reset()
    for name, run in {
        "compile": torch.compile(attend, fullgraph=True, backend="aot_eager"),
        "checkpoint": lambda *given: checkpoint(attend, *given, use_reentrant=False),
    }.items():
        output = run(q, k, v, offsets)
        assert output.equal(expected), name
        assert torch.autograd.grad(output.sum(), q)[0].equal(of_q), name

    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
            return attend(q, k, v, offsets)

    given = (*(t.detach() for t in (q, k, v)), offsets)
    assert torch.export.export(Attend(), given).module()(*given).equal(expected)


def test_one_compiled_graph_serves_other_numbers_of_tokens_and_documents() -> None:
    attend, graphs = compiled_for_any_size(ox.ops.packed_attention)
    for lengths in ([5, 6], [70, 2, 9], [3, 4, 5, 6, 129]):
        q = torch.randn(sum(lengths), 2, 8)
        offsets = offsets_of(lengths)
        assert attend(q, q, q, offsets, causal=True).equal(ox.ops.packed_attention(q, q, q, offsets, causal=True))
    assert len(graphs) == 1


def test_compiled_float64_breaks_the_graph_to_read_the_offsets() -> None:
    torch._dynamo.reset()
    q, k, v, offsets = batch(torch.float64)
    attend = torch.compile(lambda *given: ox.ops.packed_attention(*given).sin(), backend="aot_eager")
    assert attend(q, k, v, offsets).equal(ox.ops.packed_attention(q, k, v, offsets).sin())


def test_torch_func_transforms_it() -> None:
    q, k, v, offsets = batch()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ox.ops.packed_attention(q, k, v, offsets, causal=True).square().sum()

    given = [t.detach() for t in (q, k, v)]
    expected = torch.autograd.grad(loss(q, k, v), q)[0]
    assert grad(loss)(*given).equal(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of loops
        each = vmap(grad(loss))(*[torch.stack([t, 2 * t]) for t in given])
    assert each[0].equal(expected) and each[1].equal(grad(loss)(*[2 * t for t in given]))
    wide = [t.double() for t in given]
    assert grad(loss)(*wide).equal(torch.autograd.grad(loss(*(one := [t.requires_grad_() for t in wide])), one)[0])


def test_autocast_casts_as_for_attention() -> None:
    q, k, v, offsets = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ox.ops.packed_attention(q, k, v, offsets)
    assert output.dtype == torch.bfloat16
    assert output.equal(ox.ops.packed_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), offsets))


def test_a_frozen_input_gets_no_gradient_and_offsets_may_not_change() -> None:
    q, k, v, offsets = batch()
    ox.ops.packed_attention(q, k.detach(), v.detach(), offsets).sum().backward()
    assert q.grad is not None and k.grad is None
    output = ox.ops.packed_attention(q, k, v, offsets)
    offsets[1] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_second_derivative_is_refused_in_words() -> None:
    q, k, v, offsets = batch()
    output = ox.ops.packed_attention(q, k, v, offsets)
    (first,) = torch.autograd.grad(output.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention has no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("offsets", "kind", "text"),
    [
        ([1, 30], ValueError, "query_offsets begin with 1; the first document begins at 0"),
        ([0, 20, 10, 30], ValueError, "query_offsets fall from 20 to 10 at entry 2"),
        ([0, 20], ValueError, "query_offsets end with 20 for 30 tokens"),
        ([0, 20, 31], ValueError, "query_offsets end with 31 for 30 tokens"),
        ([[0, 30]], ValueError, r"query_offsets have sizes \[1, 2\]; give one dimension"),
        ([], ValueError, r"query_offsets have sizes \[0\]"),
        ([0.0, 30.0], TypeError, "query_offsets are Float; give int64 or int32"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_offsets_that_say_nothing_are_refused_in_words(
    offsets: list[Any], kind: type[Exception], text: str, dtype: torch.dtype
) -> None:
    q, k, v, _ = batch(dtype)
    made = torch.tensor(offsets) if offsets else torch.empty(0, dtype=torch.int64)
    with pytest.raises(kind, match=text):
        ox.ops.packed_attention(q, k, v, made)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda q, k, v, o: ox.ops.packed_attention(q[None], k, v, o), ValueError, "query has 4 dimensions"),
        (lambda q, k, v, o: ox.ops.packed_attention(q, k[:, :1], v, o), ValueError, "key and value of one size"),
        (lambda q, k, v, o: ox.ops.packed_attention(q[:, :3], k, v, o), ValueError, "3 heads and 2 key heads"),
        (lambda q, k, v, o: ox.ops.packed_attention(q, k[:20], v[:20], o), ValueError,
         "query has 30 tokens and key 20; give key_offsets"),
        (lambda q, k, v, o: ox.ops.packed_attention(q, k, v, o, o[1:]), ValueError,
         "query_offsets have 5 entries and key_offsets 4"),
        (lambda q, k, v, o: ox.ops.packed_attention(q, k, v, o, o + 1), ValueError, "key_offsets begin with 1"),
        (lambda q, k, v, o: ox.ops.packed_attention(q, k, v, o.to("meta")), ValueError, "query_offsets are on meta"),
        (lambda q, k, v, o: ox.ops.packed_attention(q, k.double(), v, o), TypeError, "query is Float, key Double"),
        (lambda q, k, v, o: ox.ops.packed_attention(q, k, v, o, dropout=1.0), ValueError, "dropout is 1"),
        (lambda q, k, v, o: ox.ops.packed_attention(q, k, v, o, soft_cap=-1), ValueError, "soft_cap is -1"),
        (lambda q, k, v, o: torch.ops.oxytorch.attention_forward(
            *(t.transpose(0, 1)[None] for t in (q, k, v)), None, 1.0, -1, -1, 0.0, 0.0, None, o), ValueError,
         "offsets of queries and of keys"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_words(call: Callable[..., Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call(*batch())


def test_memory_grows_with_the_tokens() -> None:
    code = """
import torch, oxytorch as ox
def most():  # of this program alone: what getrusage tells begins with its parent's
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
torch.set_num_threads(2)
def peak(n):
    q, k, v = (torch.randn(n, 2, 16, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, n // 2, n // 2 + 1, n])
    ox.ops.packed_attention(q, k, v, offsets, causal=True).sum().backward()
    return most()
small = peak(1024)
print((peak(8192) - small) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The scores alone would be 256 MiB.
    assert int(done.stdout) < 64, done.stdout
