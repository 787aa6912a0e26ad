"""Gradients that are added up over batches: where they are made, with torch's bits, and with weights packed once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import oxytorch as ox
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .rounding import threads

pytestmark = pytest.mark.cpu_only("the kernels are the CPU's")

BF16 = torch.bfloat16
NARROW = torch.cpu._is_avx512_bf16_supported()
bfloat16_products = pytest.mark.skipif(not NARROW, reason="torch's operators serve this processor")


def added_up(
    call: Callable[[Tensor, int], Tensor], weight: Tensor, *, hooked: bool = False, batches: int = 3
) -> Tensor:
    """The gradient of `weight` after backward of some batches; `hooked`: AccumulateGrad has to see each of them."""
    leaf = weight.detach().clone().requires_grad_()
    if hooked:
        leaf.register_post_accumulate_grad_hook(lambda _: None)
    for number in range(batches):
        call(leaf, number).backward()
    assert leaf.grad is not None
    return leaf.grad


def linear_of(rows: int, features: int, outputs: int) -> tuple[Callable[[Tensor, int], Tensor], Tensor]:
    torch.manual_seed(rows)
    inputs, grads = torch.randn(3, rows, features).to(BF16), torch.randn(3, rows, outputs)

    def call(weight: Tensor, number: int) -> Tensor:
        return (ox.ops.linear(inputs[number], weight).float() * grads[number]).sum()

    return call, torch.randn(outputs, features)


def embedding_of(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Tensor]:
    torch.manual_seed(rows)
    indices, grads = torch.randint(rows, (3, 40)), torch.randn(3, 40, columns).to(dtype)

    def call(weight: Tensor, number: int) -> Tensor:
        return (ox.ops.embedding(indices[number], weight, 0) * grads[number]).sum()

    return call, torch.randn(rows, columns).to(dtype)


def loss_of(rows: int, classes: int, width: int) -> tuple[Callable[[Tensor, int], Tensor], Tensor]:
    torch.manual_seed(rows)
    inputs, targets = torch.randn(3, rows, width), torch.randint(classes, (3, rows))

    def call(weight: Tensor, number: int) -> Tensor:
        with torch.autocast("cpu", BF16, enabled=NARROW):
            return ox.ops.linear_cross_entropy(inputs[number], weight, targets[number]) / 3

    return call, torch.randn(classes, width)


@bfloat16_products
@pytest.mark.parametrize("rows", [1, 17, 128, 129, 300, 1024, 1025, 2100])
@pytest.mark.parametrize(("features", "outputs"), [(16, 64), (70, 33), (129, 200)])
def test_gradients_of_a_linear_layer_have_the_bits_of_torchs_sum(rows: int, features: int, outputs: int) -> None:
    call, weight = linear_of(rows, features, outputs)
    expected = added_up(call, weight, hooked=True)
    for count in (1, 2, 5):
        with threads(count):
            assert added_up(call, weight).equal(expected)


@pytest.mark.parametrize(("rows", "classes", "width"), [(1, 7, 16), (40, 129, 33), (300, 1000, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(BF16, marks=bfloat16_products)])
def test_gradients_of_a_head_have_the_bits_of_torchs_sum(
    rows: int, classes: int, width: int, dtype: torch.dtype
) -> None:
    call, weight = loss_of(rows, classes, width)
    weight = weight.to(dtype)
    assert added_up(call, weight).equal(added_up(call, weight, hooked=True))


@bfloat16_products
def test_gradients_of_a_bfloat16_weight_are_rounded_once_a_batch() -> None:
    call, weight = linear_of(60, 48, 40)
    weight = weight.to(BF16)
    exact = added_up(call, weight.float())
    ours, torchs = added_up(call, weight), added_up(call, weight, hooked=True)
    assert ours.dtype == BF16
    assert float((ours.float() - exact).norm()) <= float((torchs.float() - exact).norm())


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (7, 64), (3000, 67)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_gradients_of_a_table_are_added_to_its_rows(rows: int, columns: int, dtype: torch.dtype) -> None:
    call, weight = embedding_of(rows, columns, dtype)
    ours, torchs = added_up(call, weight), added_up(call, weight, hooked=True)
    exact = added_up(call, weight.double())
    assert ours.dtype == dtype
    if dtype == torch.float32:
        assert ours.equal(torchs)
    assert float((ours.double() - exact).norm()) <= 1.01 * float((torchs.double() - exact).norm()) + 1e-12


def memory_of_second(call: Callable[[Tensor, int], Tensor], weight: Tensor, *, hooked: bool) -> int:
    leaf = weight.detach().clone().requires_grad_()
    if hooked:
        leaf.register_post_accumulate_grad_hook(lambda _: None)
    call(leaf, 0).backward()
    loss = call(leaf, 1)
    with ox.memory.Meter() as meter:
        loss.backward()
    return int(meter.peak_bytes)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("what", ["linear", "embedding", "loss"])
def test_no_second_tensor_of_the_weights_size_is_made(what: str) -> None:
    if what == "linear" and not NARROW:
        pytest.skip("torch's operators serve this processor")
    call, weight = {
        "linear": lambda: linear_of(4, 1000, 1000), "embedding": lambda: embedding_of(20_000, 50),
        "loss": lambda: loss_of(4, 5000, 256),
    }[what]()  # fmt: skip
    if what == "loss":  # it made the gradient in forward, and hands that over
        assert memory_of_second(call, weight, hooked=False) < weight.nbytes / 2
        return
    assert memory_of_second(call, weight, hooked=True) >= weight.nbytes
    assert memory_of_second(call, weight, hooked=False) < weight.nbytes / 2
    with torch.autograd.set_detect_anomaly(True, check_nan=False):  # which looks at what nodes give
        assert memory_of_second(call, weight, hooked=False) >= weight.nbytes


CALLS = {
    "embedding": embedding_of(50, 8),
    "loss": loss_of(20, 70, 32),
    **({"linear": linear_of(20, 30, 10)} if NARROW else {}),
}


@pytest.mark.parametrize("what", CALLS)
def test_whoever_waits_for_a_gradient_gets_it(what: str) -> None:
    call, weight = CALLS[what]
    leaf = weight.clone().requires_grad_()
    call(leaf, 0).backward()
    first = leaf.grad.clone()
    (of_second,) = torch.autograd.grad(call(leaf, 1), leaf)
    assert leaf.grad.equal(first), "torch.autograd.grad adds to nothing"
    alone = weight.clone().requires_grad_()
    call(alone, 1).backward()
    assert of_second.equal(alone.grad)

    call(leaf, 1).backward(inputs=[leaf])
    assert leaf.grad.equal(first + of_second)

    seen: list[Tensor] = []
    handle = leaf.register_hook(lambda g: seen.append(g.clone()))
    call(leaf, 1).backward()
    handle.remove()
    assert len(seen) == 1 and seen[0].equal(of_second)
    assert leaf.grad.equal(first + of_second + of_second)

    node = call(leaf, 1).grad_fn
    while "Oxytorch" not in node.name():  # called by hand, whose result somebody keeps
        node = node.next_functions[0][0]
    before = leaf.grad.clone()
    given = {"embedding": torch.ones(40, weight.shape[1]), "loss": torch.ones(())}.get(
        what, torch.ones(20, weight.shape[0]).to(BF16)
    )
    made = node(given)
    made = made if isinstance(made, Tensor) else made[1]
    assert made is not None and made.shape == weight.shape and leaf.grad.equal(before)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("what", CALLS)
def test_what_torch_lets_a_gradient_be(what: str) -> None:
    call, weight = CALLS[what]
    one = weight.clone().requires_grad_()
    call(one, 1).backward()
    for given in (
        torch.ones(weight.shape[::-1]).t(),  # another layout
        torch.ones(1, 1).expand(weight.shape).clone()[:, :],
        torch.zeros(weight.shape[0], 2 * weight.shape[1])[:, ::2],
    ):
        leaf = weight.clone().requires_grad_()
        leaf.grad = given.clone(memory_format=torch.preserve_format)
        expected, kept, version = leaf.grad + one.grad, leaf.grad, leaf.grad._version
        call(leaf, 1).backward()
        assert leaf.grad is kept and kept.equal(expected) and kept._version > version
    frozen = weight.clone().requires_grad_()
    call(frozen, 0).backward()
    loss = call(frozen, 1)
    before = frozen.grad.clone()
    frozen.requires_grad_(False)
    loss.backward()
    assert frozen.grad.equal(before)


def test_a_table_with_another_part_in_the_loss_has_torchs_bits() -> None:
    torch.manual_seed(0)
    indices, weight = torch.randint(30, (3, 50)), torch.randn(30, 16)

    def tied(embed: Callable[..., Tensor]) -> Tensor:
        leaf = weight.clone().requires_grad_()
        for number in range(3):
            hidden = embed(indices[number], leaf)
            (F.linear(hidden, leaf).tanh().sum() + embed(indices[-number], leaf).square().sum()).backward()
        assert leaf.grad is not None
        return leaf.grad

    assert tied(ox.ops.embedding).equal(tied(F.embedding))


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("what", CALLS)
def test_second_derivatives_and_checkpoints_add_up_too(what: str) -> None:
    call, weight = CALLS[what]
    expected = added_up(lambda w, n: call(w, n).square(), weight, hooked=True)
    assert added_up(lambda w, n: checkpoint(lambda v: call(v, n).square(), w, use_reentrant=False), weight).equal(
        expected
    )
    leaf = weight.clone().requires_grad_()
    for number in range(3):
        call(leaf, number).square().backward(create_graph=True)
        leaf.grad = leaf.grad.detach()
    torch.testing.assert_close(leaf.grad, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def test_threads_that_share_a_table_lose_nothing() -> None:
    weight = torch.zeros(4, 3, requires_grad=True)
    ox.ops.embedding(torch.tensor([0]), weight).sum().backward()

    def run() -> None:
        for _ in range(300):
            ox.ops.embedding(torch.tensor([0, 1, 1]), weight).sum().backward()

    running = [threading.Thread(target=run) for _ in range(4)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert weight.grad.equal(torch.tensor([1201.0, 2400.0, 0.0, 0.0])[:, None].expand(4, 3))


# -- packed weights ---------------------------------------------------------------------------------------------------


class Layer:
    """A linear layer of one batch."""

    def __init__(
        self, rows: int = 20, features: int = 70, outputs: int = 100, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(rows)
        self.x = torch.randn(rows, features).to(BF16).requires_grad_()
        self.weight = torch.randn(outputs, features).to(dtype).requires_grad_()
        self.grad = torch.randn(rows, outputs).to(BF16)

    def __call__(self) -> list[Tensor]:
        output = ox.ops.linear(self.x, self.weight)
        return [output.detach(), *torch.autograd.grad(output, (self.x, self.weight), self.grad)]

    def plain(self) -> list[Tensor]:
        """Without what is kept of this weight."""
        one = Layer()
        one.x, one.weight, one.grad = self.x, self.weight.detach().clone().requires_grad_(), self.grad
        return one()


def equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(these, those, strict=True))


@bfloat16_products
@pytest.mark.parametrize("rows", [1, 20, 128, 129, 1100])
@pytest.mark.parametrize(("features", "outputs"), [(70, 100), (16, 1), (1, 64), (130, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_packed_weights_change_no_bit(rows: int, features: int, outputs: int, dtype: torch.dtype) -> None:
    layer = Layer(rows, features, outputs, dtype)
    expected = layer()
    with ox.ops.PackedWeights():
        for count in (1, 2, 5):
            with threads(count):
                assert equal(layer(), expected)
        padded = [-(-n // 16) * 16 for n in (features, outputs)]
        columns = [-(-n // 64) * 64 for n in (outputs, features)]
        assert ox.ops.PackedWeights.bytes() >= 2 * sum(a * b for a, b in zip(padded, columns, strict=True))
    assert ox.ops.PackedWeights.bytes() == 0
    assert equal(layer(), expected)


@bfloat16_products
def test_a_weight_that_changed_is_packed_anew() -> None:
    layer = Layer()
    optimizer = torch.optim.SGD([layer.weight], lr=0.1)
    tail = ox.optim.AdamW([layer.weight], lr=0.1)
    with ox.ops.PackedWeights():

        def check(what: str) -> None:
            assert equal(layer(), layer.plain()), what
            assert equal(layer(), layer.plain()), what

        check("as it is")
        for one in (optimizer, tail):
            layer.weight.grad = torch.ones_like(layer.weight)
            one.step()
            check("a step")
        with torch.no_grad():
            layer.weight[3, 5] = 7
        check("an element, by an operator")
        layer.weight.data.mul_(2)
        check("all of it, past the version")
        layer.weight.data = torch.randn_like(layer.weight)
        check("other memory")
        layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
        check("another layout")
        layer.weight = torch.nn.Parameter(layer.weight.detach().to(BF16))
        check("another dtype")


@bfloat16_products
def test_what_is_written_to_few_elements_past_the_version_needs_clear() -> None:
    layer = Layer()
    with ox.ops.PackedWeights():
        before = layer()
        layer.weight.data[1, 1] += 100  # not among those that are compared
        assert layer()[0].equal(before[0]), "packed weights were not used"
        ox.ops.PackedWeights.clear()
        assert ox.ops.PackedWeights.bytes() == 0
        assert equal(layer(), layer.plain())


@bfloat16_products
def test_another_weight_may_come_to_lie_where_one_was() -> None:
    x = torch.randn(20, 64).to(BF16)
    memory = torch.empty(64 * 64)
    with ox.ops.PackedWeights():
        for _ in range(3):
            # As an allocator would: the same address and version, other values in the elements that are not compared.
            values = torch.zeros(64, 64)
            values[1, 1] = float(torch.rand(()))
            memory.copy_(values.flatten())
            weight = torch.from_numpy(memory.numpy()).view(64, 64)
            assert ox.ops.linear(x, weight).equal(ox.ops.linear(x, values.clone()))
            del weight


@bfloat16_products
def test_packed_weights_of_two_scopes_last_until_both_end() -> None:
    layer, first, second = Layer(), ox.ops.PackedWeights(), ox.ops.PackedWeights()
    first.__enter__()
    with second:
        layer()
        first.__exit__(None, None, None)
        assert ox.ops.PackedWeights.bytes() > 0
    assert ox.ops.PackedWeights.bytes() == 0


@bfloat16_products
def test_packed_weights_of_several_threads() -> None:
    layers = [Layer(rows) for rows in (3, 40, 200, 300)]
    expected = [layer() for layer in layers]
    wrong: list[int] = []

    def run(number: int) -> None:
        for _ in range(50):
            if not equal(layers[number](), expected[number]):
                wrong.append(number)
            ox.ops.PackedWeights.clear()

    with ox.ops.PackedWeights():
        running = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for one in running:
            one.start()
        for one in running:
            one.join()
    assert not wrong


@bfloat16_products
@pytest.mark.parametrize("keeps", [False, True])
def test_what_has_no_version_is_packed_each_time(keeps: bool) -> None:
    with torch.inference_mode():
        x, weight = torch.randn(20, 64).to(BF16), torch.randn(30, 64)
        with ox.ops.PackedWeights() if keeps else nullcontext():
            expected = F.linear(x.float(), weight.to(BF16).float())
            torch.testing.assert_close(ox.ops.linear(x, weight).float(), expected, rtol=2e-2, atol=2e-2)
            assert ox.ops.PackedWeights.bytes() == 0


# -- the strategy -----------------------------------------------------------------------------------------------------


def run_of(accumulation: int, **trainer: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8))
    batch = (torch.randn(16, 64), torch.randint(8, (16,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ox.tune.run.Run(model, optimizer, nn.CrossEntropyLoss(), [batch], owns_loop=True, **trainer)
    run.accumulation = accumulation
    return run


@bfloat16_products
def test_the_strategy_packs_once_a_window() -> None:
    assert "one batch" in run_of(1).strategy("packed_weights").applies(run_of(1))
    run = run_of(3)
    assert run.strategy("packed_weights").applies(run) is True
    losses = {}
    for names in (["bf16_autocast", "native_linear"], ["bf16_autocast", "native_linear", "packed_weights"]):
        run = run_of(3)
        run.set_active(names)
        losses[len(names)] = [float(run.take(run.batches[0])) for _ in range(9)]
        assert (ox.ops.PackedWeights.bytes() > 0) == ("packed_weights" in names)
        run.set_active([])
        assert ox.ops.PackedWeights.bytes() == 0
    assert losses[2] == losses[3] and losses[2][0] != losses[2][-1]


def test_a_trial_step_is_a_window_of_at_most_four() -> None:
    for accumulation, batches in ((1, 1), (3, 3), (16, 4)):
        run = run_of(accumulation)
        calls: list[int] = []
        steps: list[int] = []
        run.model.register_forward_hook(lambda *_, seen=calls: seen.append(1))
        run.original.register_step_post_hook(lambda *_, seen=steps: seen.append(1))
        before = [p.detach().clone() for p in run.params]
        run.step_of_window(run.batches[0])
        assert (len(calls), len(steps)) == (batches, 1)
        once = run_of(1)
        once.step(once.batches[0])
        for p, q, old in zip(run.params, once.params, before, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            assert not p.equal(old)


def test_accelerate_tries_windows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(16, 8), torch.randint(4, (16,)))
    calls: list[int] = []
    steps: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    plan = ox.accelerate(
        model, optimizer, nn.CrossEntropyLoss(), [batch], config={"accumulation_steps": 3}, loop="plan", strategies=[],
        tune_seconds=0.1, remember=False,
    )  # fmt: skip
    assert len(calls) >= 3 * len(steps) > 0
    calls.clear()
    steps.clear()
    for _ in range(6):
        plan.step(batch)
    assert (len(calls), len(steps)) == (6, 2)
    plan.revert()
    for beside in ({"step": lambda _: torch.zeros(())}, {}):
        given = optimizer if beside else [optimizer, torch.optim.SGD([nn.Parameter(torch.zeros(1))])]
        with pytest.raises(ValueError, match="accumulation_steps = 3 was given beside"):
            ox.accelerate(
                model, given, None if beside else nn.CrossEntropyLoss(), [batch], config={"accumulation_steps": 3},
                remember=False, **beside,
            )  # fmt: skip
