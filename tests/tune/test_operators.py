"""Native operators against the kernels of torch that they replace: the same bits, and gone without a trace."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import _C
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.cpu_only("the operators are the CPU's")

NAMES = ["max_pool2d", "batch_norm", "bernoulli", "embedding", "embedding_sum"]


@contextmanager
def native(*names: str) -> Iterator[Any]:
    operators = _C.tune.NativeOperators()
    try:
        for report in operators.install(list(names)):
            assert report.installed, f"{report.name}: {report.reason}"
        yield operators
    finally:
        operators.uninstall()


def same(a: Any, b: Any) -> bool:
    """Same bits, or NaN in both."""
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if not isinstance(a, Tensor):
        return bool(a == b)
    if (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
        return False
    if a.is_floating_point():
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
        a, b = (torch.where(x.isnan(), float("nan"), x).contiguous().view(bits) for x in (a, b))
    return bool(a.equal(b))


def odd(*size: int, seed: int = 0) -> Tensor:
    """Ties, zeros of both signs, infinities, NaN and denormals among small whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator).mul_(2).round_()
    rare = torch.tensor([-0.0, float("inf"), -float("inf"), float("nan"), 1e-40])
    where = torch.rand(size, generator=generator) < 0.08
    return torch.where(where, rare[torch.randint(5, size, generator=generator)], values)


def twice(call: Callable[[], Any], *names: str, served: bool | None = True) -> None:
    """`call` gives the same with torch's kernels and with ours, for one and two threads.

    `served`: none of its calls is handed to torch's kernels. False: some are. None: that is not looked at.
    """
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            expected = call()
            with native(*names):
                before = _C.tune.NativeOperators.handed_on()
                assert same(call(), expected)
                assert served is None or (_C.tune.NativeOperators.handed_on() == before) == served
    finally:
        torch.set_num_threads(threads)


POOLS = [
    # size, kernel, stride, padding, dilation, ceil_mode
    ((2, 3, 32, 64), 2, 2, 0, 1, False),
    ((2, 3, 33, 67), 2, 2, 0, 1, True),
    ((1, 5, 17, 35), 3, 2, 1, 1, False),
    ((1, 5, 16, 38), 3, 2, 1, 1, True),
    ((3, 2, 9, 50), 3, 1, 1, 1, False),
    ((2, 2, 9, 21), (2, 3), (3, 2), (0, 1), (2, 3), True),
    ((2, 2, 31, 70), (3, 2), (1, 4), (1, 0), (1, 2), False),
    ((2, 1, 5, 5), 5, 5, 2, 1, False),
    ((1, 1, 2, 2), 2, 1, 1, 3, False),  # dilation leaves windows empty
    ((4, 7, 21), 2, 2, 0, 1, False),  # no batch
    ((1, 1, 1, 1), 1, 1, 0, 1, False),
    ((0, 3, 8, 8), 2, 2, 0, 1, False),
]


@pytest.mark.parametrize("case", POOLS, ids=str)
def test_pooling_gives_the_values_indices_and_gradients_of_torch(case: Any) -> None:
    size, kernel, stride, padding, dilation, ceil_mode = case
    x = odd(*size)

    def call() -> Any:
        leaf = x.clone().requires_grad_()
        out, index = F.max_pool2d(leaf, kernel, stride, padding, dilation, ceil_mode, return_indices=True)
        # An empty window has an index outside of the image, and there torch's own backward writes.
        if index.numel() == 0 or int(index.max()) < x.shape[-1] * x.shape[-2]:
            out.backward(odd(*out.shape, seed=1))
        return out.detach(), index, leaf.grad

    twice(call, "max_pool2d", served=x.numel() > 0)


def test_what_pooling_does_not_serve_goes_to_torch() -> None:
    x = odd(2, 3, 12, 14)
    others = [x.double(), x.bfloat16(), x.to(memory_format=torch.channels_last), x[:, :, ::2], x.transpose(2, 3)]
    for other in others:
        twice(lambda other=other: F.max_pool2d(other, 2, return_indices=True), "max_pool2d", served=False)  # type: ignore[misc]
    with native("max_pool2d"):
        for bad in ({"kernel_size": 0}, {"kernel_size": 2, "padding": 2}, {"kernel_size": 2, "stride": 0}):
            with pytest.raises(RuntimeError):
                F.max_pool2d(x, **bad)  # type: ignore[arg-type]


def test_gradients_of_pooling_follow_any_indices() -> None:
    """max_pool2d_with_indices_backward takes indices that no max pooling made."""
    x = torch.zeros(1, 2, 8, 32)
    grad = odd(1, 2, 4, 16)
    index = torch.randint(256, grad.shape, generator=torch.Generator().manual_seed(3))
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    twice(lambda: backward(grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, index), "max_pool2d")


NORMS = [
    (4, 16, 8, 8),
    (3, 13, 7, 5),
    (2, 1, 9, 9),
    (9, 5, 1, 1),
    (32, 24),
    (4, 6, 31),
    (2, 3, 2, 3, 4),
    (5, 8, 16, 16),
]


@pytest.mark.parametrize("size", NORMS, ids=str)
@pytest.mark.parametrize("special", [False, True])
def test_batch_norm_gives_the_bits_of_torch(size: tuple[int, ...], special: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    x = odd(*size) if special else torch.randn(size, generator=generator) * 3 + 1
    weight, bias, grad = (torch.randn(s, generator=generator) for s in (size[1], size[1], size))

    def call() -> Any:
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        mean, var = torch.zeros(size[1]), torch.ones(size[1])
        out = F.batch_norm(leaves[0], mean, var, *leaves[1:], training=True, momentum=0.3, eps=1e-3)
        out.backward(grad)
        return [out.detach(), mean, var, *(leaf.grad for leaf in leaves)]

    twice(call, "batch_norm", served=math.prod(size[2:]) > 1)


def test_gradients_of_batch_norm_in_any_layout() -> None:
    generator = torch.Generator().manual_seed(9)
    x, grad = (torch.randn(4, 6, 8, 8, generator=generator) for _ in range(2))
    weight = torch.ones(6)
    for other in (grad[:1].expand_as(x), grad.transpose(2, 3), grad.to(memory_format=torch.channels_last)):

        def call(other: Tensor = other) -> Any:
            leaf = x.clone().requires_grad_()
            F.batch_norm(leaf, None, None, weight, weight, training=True).backward(other)
            return leaf.grad

        twice(call, "batch_norm", served=False)


@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 1e-12}, {"momentum": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_modules(options: dict[str, Any], training: bool) -> None:
    torch.manual_seed(5)
    x = torch.randn(6, 10, 9, 7)
    start = nn.BatchNorm2d(10, **options)

    def call() -> Any:
        module = copy.deepcopy(start).train(training)
        leaf = x.clone().requires_grad_()
        for _ in range(3):
            module(leaf).square().sum().backward()
        return [leaf.grad, *(p.grad for p in module.parameters()), *module.buffers()]

    twice(call, "batch_norm", served=training or not options.get("track_running_stats", True))


def test_what_batch_norm_does_not_serve_goes_to_torch() -> None:
    x = torch.randn(4, 6, 8, 8, generator=torch.Generator().manual_seed(6))
    weight = torch.ones(6)
    for other in (x.double(), x.bfloat16(), x.to(memory_format=torch.channels_last), x[..., ::2]):
        w = weight.to(other.dtype)
        twice(lambda other=other, w=w: F.batch_norm(other, None, None, w, w, training=True), "batch_norm", served=False)  # type: ignore[misc]
    with native("batch_norm"), pytest.raises(RuntimeError):
        F.batch_norm(x, torch.zeros(5), torch.ones(5), training=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1 - 2**-53, 1.0])
def test_bernoulli_draws_what_torch_draws_and_leaves_the_generator_alike(p: float, dtype: torch.dtype) -> None:
    def call() -> Any:
        torch.manual_seed(7)
        seen: list[Any] = []
        for count in (1, 2, 311, 312, 313, 5000):
            seen += [
                torch.empty(count, dtype=dtype).bernoulli_(p),
                torch.rand(1),
                torch.randint(2**31, (3,)),
                torch.randn(3),
            ]
        own = torch.Generator().manual_seed(8)
        image = torch.empty(2, 3, 5, 4, dtype=dtype).to(memory_format=torch.channels_last)
        seen += [image.bernoulli_(p, generator=own)]
        return [*seen, torch.get_rng_state(), own.get_state()]

    def strided() -> Any:
        own = torch.Generator().manual_seed(8)
        cut = torch.empty(6, 4, dtype=dtype)[:, ::2].bernoulli_(p, generator=own)
        return [
            cut,
            torch.empty(0).bernoulli_(p),
            torch.empty(5).double().bernoulli_(p, generator=own),
            own.get_state(),
        ]

    twice(call, "bernoulli")
    twice(strided, "bernoulli", served=False)
    with native("bernoulli"), pytest.raises(RuntimeError):
        torch.empty(3).bernoulli_(1.5)


def numbers(kind: str, count: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(rows, (count,), generator=generator)
    if kind == "skewed":
        return torch.where(torch.rand(count, generator=generator) < 0.8, rows // 2, drawn)
    return drawn.sort().values if kind == "sorted" else drawn


@pytest.mark.parametrize("kind", ["even", "skewed", "sorted"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (7, 257), (130, 64), (5000, 33), (70_000, 2)])
def test_gradients_of_embeddings(kind: str, rows: int, columns: int) -> None:
    for count, padding in ((0, None), (1, 0), (900, None), (900, rows // 2), (4100, -1)):
        given = numbers(kind, count, rows)
        grad = odd(count, columns)

        def call(given: Tensor = given, padding: int | None = padding, grad: Tensor = grad) -> Any:
            weight = torch.zeros(rows, columns).requires_grad_()
            F.embedding(given.view(1, -1), weight, padding).backward(grad[None])
            F.embedding(given.int(), weight, padding).backward(grad.t().contiguous().t())
            return weight.grad

        twice(call, "embedding")
        twice(call, "embedding", "embedding_sum", served=True if count else None)  # of nothing torch's does


def test_added_gradients_of_a_table_take_no_memory_of_its_size() -> None:
    weight, given = torch.zeros(20_000, 30, requires_grad=True), torch.arange(9)

    def peak() -> int:
        loss = F.embedding(given, weight).sum()
        with ox.memory.Meter() as meter:
            loss.backward()
        return int(meter.peak_bytes)

    peak()  # makes the gradient
    assert peak() >= weight.nbytes
    with native("embedding_sum"):
        assert peak() < weight.nbytes / 2
        weight.requires_grad_(False)
        before = _C.tune.NativeOperators.handed_on()
        F.embedding(given, weight)  # nobody asks for its gradient
        assert _C.tune.NativeOperators.handed_on() == before + 1
        compiled = torch.compile(lambda w: F.embedding(given, w).sum(), backend="aot_eager")
        leaf = weight.clone().requires_grad_()
        compiled(leaf).backward()
        assert leaf.grad.sum() == 9 * 30
    weight.requires_grad_(True)
    assert peak() >= weight.nbytes


def test_what_gradients_of_embeddings_are_not_served_go_to_torch() -> None:
    weight, given = torch.randn(6, 5), torch.tensor([[0, 5, 2], [2, 2, 1]])

    def grad_of(weight: Tensor, **options: Any) -> Tensor:
        leaf = weight.clone().requires_grad_()
        F.embedding(given, leaf, **options).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    for call in (
        lambda: grad_of(weight.double()),
        lambda: grad_of(weight.bfloat16()),
        lambda: grad_of(weight, scale_grad_by_freq=True),
        # torch passes numbers outside of the table by
        lambda: torch.ops.aten.embedding_dense_backward(torch.ones(3, 2), torch.tensor([0, 9, -2]), 4, -1, False),
    ):
        twice(call, "embedding", "embedding_sum", served=False)
    twice(lambda: grad_of(weight, sparse=True).to_dense(), "embedding", "embedding_sum", served=None)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(8 * 4 * 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(x + self.body(x)))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_five_steps_end_at_the_same_weights(autocast: bool, compiled: bool) -> None:
    torch.manual_seed(9)
    start = Residual()
    batches = [(torch.randn(6, 3, 16, 16), torch.randint(5, (6,))) for _ in range(5)]

    def call() -> Any:
        torch.manual_seed(10)
        model = copy.deepcopy(start)
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for x, y in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(forward(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [*model.state_dict().values()]

    twice(call, served=None)


def kernel_of(name: str) -> str:
    """Where the dispatcher says that the CPU kernel of `name` comes from."""
    dump = torch._C._dispatch_dump_table(name)
    return next(line for line in dump.splitlines() if line.startswith("CPU:"))


def test_uninstalling_gives_torchs_kernels_back_while_graphs_live() -> None:
    watched = ["aten::max_pool2d_with_indices", "aten::native_batch_norm_backward", "aten::bernoulli_.float"]
    before = [kernel_of(name) for name in watched]
    x = odd(2, 3, 8, 8).requires_grad_()
    with native() as operators:
        assert operators.installed() == NAMES
        assert all(kernel_of(name) != kernel for name, kernel in zip(watched, before, strict=True))
        out = F.max_pool2d(x, 2)
    assert operators.installed() == []
    assert [kernel_of(name) for name in watched] == before
    out.sum().backward()  # the graph outlives the operators
    other = x.detach().clone().requires_grad_()
    F.max_pool2d(other, 2).sum().backward()
    assert same(x.grad, other.grad)


def test_an_object_that_is_dropped_takes_its_operators_along() -> None:
    before = kernel_of("aten::native_batch_norm")
    operators = _C.tune.NativeOperators()
    operators.install(["batch_norm"])
    del operators
    assert kernel_of("aten::native_batch_norm") == before


def test_an_operator_is_installed_once_and_unknown_names_install_none() -> None:
    with native("batch_norm"):
        second = _C.tune.NativeOperators()
        reports = second.install(["batch_norm", "bernoulli"])
        assert [(r.name, r.installed) for r in reports] == [("batch_norm", False), ("bernoulli", True)]
        assert "installed already" in reports[0].reason
        second.uninstall()
    third = _C.tune.NativeOperators()
    with pytest.raises(ValueError, match="no native operator 'layer_norm'; give"):
        third.install(["batch_norm", "layer_norm"])
    assert third.installed() == []


@pytest.mark.parametrize("isa", _C.base.supported_isas())
def test_installing_proves_each_instruction_set_without_a_warning_or_a_draw(isa: str) -> None:
    code = """
import warnings, torch
from oxytorch import _C
torch.manual_seed(1)
state = torch.get_rng_state()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    operators = _C.tune.NativeOperators()
    assert all(report.installed for report in operators.install())
assert torch.get_rng_state().equal(state)
"""
    piped: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"OXYTORCH_ISA": isa}, **piped)
    assert done.returncode == 0, done.stderr
    assert "verrid" not in done.stderr


def test_an_operator_that_differs_is_refused() -> None:
    """A kernel that rounds otherwise than torch's stands where torch's was: what is proved is what is there."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("bernoulli_.float", lambda self, p=0.5, *, generator=None: self.fill_(1), "CPU")
    try:
        operators = _C.tune.NativeOperators()
        (report,) = operators.install(["bernoulli"])
        assert not report.installed
        assert "bernoulli_" in report.reason
        assert operators.installed() == []
    finally:
        library._destroy()


@pytest.mark.parametrize(
    ("rows", "accumulation", "tried"), [(4096, 1, True), (16, 1, False), (8, 1, False), (8, 2, True), (1, 2, False)]
)
def test_they_are_tried_for_a_model_with_many_embeddings(rows: int, accumulation: int, tried: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(rows, 8), nn.Flatten(), nn.Linear(32, 4), nn.ReLU(), nn.Linear(4, 4))
    batches = [(torch.randint(rows, (16, 4)), torch.randint(4, (16,))) for _ in range(2)]
    plan = ox.accelerate(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), batches,
        strategies=["native_operators"], tune_seconds=1, remember=False, config={"accumulation_steps": accumulation},
    )  # fmt: skip
    (entry,) = (e for e in plan.certificate.entries if e.strategy == "native_operators")
    assert (entry.status != "skipped") == tried, entry.reason
    assert tried or "too few embeddings" in entry.reason
    plan.revert()
