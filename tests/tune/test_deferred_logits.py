"""Logits that are left to their loss: every way to it, and everything else that may ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import _C
from oxytorch.tune.run import Run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

CLASSES, WIDTH = 300, 24
Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture
def logits() -> Iterator[Any]:
    yield _C.tune.DeferredLogits()


class Model(nn.Module):
    """Tokens through an embedding, a block and a head; the block is as large as a head that would be deferred."""

    def __init__(self, bias: bool = True, call: Callable[[nn.Linear, Tensor], Tensor] = nn.Linear.__call__) -> None:
        super().__init__()
        self.call = call
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * CLASSES)
        self.back = nn.Linear(2 * CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.call(self.head, x + self.back(F.gelu(self.wide(x))))


def product(head: nn.Linear, x: Tensor) -> Tensor:
    """As torch::nn::Linear of C++ has it."""
    y = x @ head.weight.t()
    if head.bias is not None:
        y += head.bias
    return y


def sum_and_product(head: nn.Linear, x: Tensor) -> Tensor:
    return torch.addmm(head.bias, x.flatten(0, 1), head.weight.t()).unflatten(0, x.shape[:2])


def batch(masked: bool = False) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    tokens, target = torch.randint(CLASSES, (2, 4, 17)).unbind(0)
    return tokens, torch.where(torch.rand(target.shape) < 0.7, -100, target) if masked else target


def shifted(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x[:, :-1].contiguous().view(-1, x.size(-1)).float(), y[:, 1:].reshape(-1))


def chosen(x: Tensor, y: Tensor) -> Tensor:
    mask = y % 3 > 0
    return F.cross_entropy(x[mask], y[mask])


LEFT: dict[str, Loss] = {
    "flatten": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "view": lambda x, y: F.cross_entropy(x.view(-1, CLASSES), y.view(-1)),
    "reshape and float": lambda x, y: F.cross_entropy(x.reshape(-1, x.shape[-1]).float(), y.reshape(-1)),
    "shifted": shifted,
    "chosen rows": chosen,
    "a row": lambda x, y: F.cross_entropy(x[0, 1], y[0, 1]),
    "a column": lambda x, y: F.cross_entropy(x[:, 0], y[:, 0]),
    "index_select": lambda x, y: F.cross_entropy(x.index_select(1, y[0, :2] % 17)[0], y[0, y[0, :2] % 17]),
    "transpose": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "permute": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y),
    "other order": lambda x, y: F.cross_entropy(x.transpose(0, 1).reshape(-1, CLASSES), y.t().reshape(-1)),
    "smoothed": lambda x, y: nn.CrossEntropyLoss(label_smoothing=0.1)(x.flatten(0, 1), y.flatten()),
    "sum": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
    "another index": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=7),
    "squeezed": lambda x, y: F.cross_entropy(x[:1].squeeze(0), y[0]),
    "unsqueezed": lambda x, y: F.cross_entropy(x.unsqueeze(0).flatten(0, 2), y.flatten()),
    "unflattened": lambda x, y: F.cross_entropy(x.unflatten(0, (2, 2)).flatten(0, 2), y.flatten()),
}  # fmt: skip


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return F.cross_entropy(x.flatten(0, 1), y.flatten()) / 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        part = F.softmax(x, -1) - F.one_hot(y, x.size(-1))
        return part * (grads[0] / (2 * y.numel())), None


def in_place(x: Tensor, y: Tensor) -> Tensor:
    part = x.view(-1, CLASSES)
    part.mul_(0.5)
    return F.cross_entropy(x.flatten(0, 1), y.flatten()) + part.square().mean()


def read_first(x: Tensor, y: Tensor) -> Tensor:
    right = (x.argmax(-1) == y).float().mean()
    return F.cross_entropy(x.flatten(0, 1), y.flatten()) + right


def read_without_gradients(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax()
    return F.cross_entropy(x.flatten(0, 1), y.flatten()) * scale


def retained(x: Tensor, y: Tensor) -> Tensor:
    x.retain_grad()
    x.register_hook(lambda grad: grad * 2)
    return F.cross_entropy(x.flatten(0, 1), y.flatten())


def of_a_hooked_view(x: Tensor, y: Tensor) -> Tensor:
    part = x.flatten(0, 1)
    part.register_hook(lambda grad: grad * 3)
    return F.cross_entropy(part, y.flatten())


WANTED: dict[str, Loss] = {
    "weights": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), torch.linspace(0.5, 1, CLASSES)),
    "each": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none").square().sum(),
    "probabilities": lambda x, y: F.cross_entropy(x.flatten(0, 1), F.one_hot(y.flatten(), CLASSES).to(x.dtype)),
    "nll": lambda x, y: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), y.flatten()),
    "scaled": lambda x, y: F.cross_entropy((x / 0.7).flatten(0, 1), y.flatten()),
    "a function": Halved.apply,
    "in place": in_place,
    "read first": read_first,
    "read without gradients": read_without_gradients,
    "hooks": retained,
    "a hooked view": of_a_hooked_view,
    "joined": lambda x, y: F.cross_entropy(torch.cat([x, x], 0).flatten(0, 1), torch.cat([y, y]).flatten()),
    "indexed": lambda x, y: (x[:, [0, 2]] * x[torch.arange(4), 0, y[:, 0]][:, None, None]).square().mean(),
    "other sizes": lambda x, y: (x.view(4, -1).logsumexp(-1).sum() + x.transpose(1, 2)[0].square().sum()) / 99,
    "listed": lambda x, y: torch.stack([row.square().mean() for row in x]).sum(),
}  # fmt: skip


def results(
    model: nn.Module, loss: Loss, data: tuple[Tensor, Tensor], context: Any, bf16: bool = False
) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        with context:
            out = model(data[0])
        value = loss(out, data[1])
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LEFT)
def test_a_loss_is_taken_without_logits(name: str, bias: bool, bf16: bool, logits: Any) -> None:
    model, data = Model(bias), batch(masked=name == "flatten")
    expected = results(model, LEFT[name], data, nullcontext(), bf16)
    results(model, LEFT[name], data, logits.scope(), bf16)  # learns that the block is no head
    losses, computed = logits.losses(), logits.computed()
    found = results(model, LEFT[name], data, logits.scope(), bf16)
    assert (logits.losses(), logits.computed()) == (losses + 1, computed), "something asked for the values"
    tolerance = {"rtol": 0.05, "atol": 0.02 * float(expected[0])} if bf16 else {}
    for mine, right in zip(found, expected, strict=True):
        assert mine.dtype == right.dtype
        torch.testing.assert_close(mine, right, **tolerance)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("call", "bias"), [(product, True), (product, False), (sum_and_product, True)])
def test_layers_that_are_written_out(call: Any, bias: bool, bf16: bool, logits: Any) -> None:
    model, data = Model(bias, call), batch(masked=True)
    expected = results(model, LEFT["flatten"], data, nullcontext(), bf16)
    results(model, LEFT["flatten"], data, logits.scope(), bf16)
    losses, computed = logits.losses(), logits.computed()
    found = results(model, LEFT["flatten"], data, logits.scope(), bf16)
    assert (logits.losses(), logits.computed()) == (losses + 1, computed)
    tolerance = {"rtol": 0.05, "atol": 0.02 * float(expected[0])} if bf16 else {}
    for mine, right in zip(found, expected, strict=True):
        assert mine.dtype == right.dtype
        torch.testing.assert_close(mine, right, **tolerance)
    wanted = results(model, WANTED["scaled"], data, nullcontext(), bf16)
    for mine, right in zip(results(model, WANTED["scaled"], data, logits.scope(), bf16), wanted, strict=True):
        assert mine.equal(right)


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="layers are torch's on this processor")
@pytest.mark.parametrize(
    ("call", "bias"),
    [(nn.Linear.__call__, True), (nn.Linear.__call__, False), (product, True), (product, False),
     (sum_and_product, True)],
)  # fmt: skip
def test_beside_native_layers_the_weight_of_the_head_is_not_cast(
    call: Any, bias: bool, logits: Any, request: pytest.FixtureRequest
) -> None:
    model, data = Model(bias, call), batch(masked=True)
    expected = results(model, LEFT["flatten"], data, nullcontext(), bf16=True)
    wanted = results(model, WANTED["scaled"], data, nullcontext(), bf16=True)
    native = _C.tune.NativeOperators()
    native.install(["linear"])
    request.addfinalizer(native.uninstall)
    results(model, LEFT["flatten"], data, logits.scope(), bf16=True)
    losses, computed = logits.losses(), logits.computed()
    found = results(model, LEFT["flatten"], data, logits.scope(), bf16=True)
    assert (logits.losses(), logits.computed()) == (losses + 1, computed)
    # The gradient of its weight has more digits than one that went through bfloat16.
    of_head = dict(zip([name for name, _ in model.named_parameters()], found[1:], strict=True))["head.weight"]
    assert not of_head.equal(of_head.bfloat16().float())
    asked = results(model, WANTED["scaled"], data, logits.scope(), bf16=True)
    for mine, right in [*zip(found, expected, strict=True), *zip(asked, wanted, strict=True)]:
        assert mine.dtype == right.dtype
        torch.testing.assert_close(mine, right, rtol=0.05, atol=0.02 * float(expected[0]))


@pytest.mark.parametrize("what", ["twice", "scaled", "of rows", "seen"])
def test_a_sum_in_place_that_is_no_bias(what: str, logits: Any) -> None:
    def call(head: nn.Linear, x: Tensor) -> Tensor:
        y = x @ head.weight.t()
        part = y.flatten(0, 1) if what == "seen" else y
        y.add_(head.bias, alpha=0.5 if what == "scaled" else 1)
        if what == "twice":
            y += head.bias
        return y + x[..., :1] if what == "of rows" else y + part.view_as(y)

    model, data = Model(call=call), batch()
    expected = results(model, LEFT["flatten"], data, nullcontext())
    for mine, right in zip(results(model, LEFT["flatten"], data, logits.scope()), expected, strict=True):
        assert mine.equal(right)


@pytest.mark.parametrize("name", WANTED)
def test_what_asks_for_values_gets_torchs(name: str, logits: Any) -> None:
    model, data = Model(), batch()
    expected = results(model, WANTED[name], data, nullcontext())
    losses, computed = logits.losses(), logits.computed()
    found = results(model, WANTED[name], data, logits.scope())
    assert logits.losses() == losses and logits.computed() == computed + 2, "the block's and the head's"
    for mine, right in zip(found, expected, strict=True):
        if name == "a function":  # its gradient is multiplied by another node
            torch.testing.assert_close(mine, right)
        else:
            assert mine.equal(right)
    results(model, WANTED[name], data, logits.scope())
    assert logits.computed() == computed + 2, "it is left alone from then on"


def test_what_is_seen_of_it_without_values(logits: Any) -> None:
    model, (tokens, _) = Model(), batch()
    plain = model(tokens)
    with logits.scope():
        out = model(tokens)
    assert (out.shape, out.stride(), out.dtype, out.device, out.dim(), len(out)) == (
        plain.shape, plain.stride(), plain.dtype, plain.device, plain.dim(), len(plain)
    )  # fmt: skip
    assert out.requires_grad and not out.is_leaf and out.is_contiguous() and out.layout is torch.strided
    with pytest.raises(RuntimeError):
        out.data_ptr()
    assert out.detach().equal(plain) and out.data.equal(plain) and str(out.detach()) == str(plain.detach())


def test_nothing_is_deferred_where_it_must_not_be(logits: Any) -> None:
    model, (tokens, target) = Model(), batch()
    computed = logits.computed()
    assert model(tokens).data_ptr() != 0, "outside of a scope"
    with logits.scope():
        with torch.no_grad():
            assert model(tokens).data_ptr() != 0
        with torch.inference_mode():
            assert model(tokens).data_ptr() != 0
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        call = lambda p: F.cross_entropy(torch.func.functional_call(model, p, tokens).flatten(0, 1), target.flatten())  # noqa: E731
        under = torch.func.grad(call)(parameters)
        double = model.double()(tokens)
        assert double.data_ptr() != 0
    assert logits.computed() == computed
    model.float()
    results(model, LEFT["flatten"], (tokens, target), nullcontext())
    for name, p in model.named_parameters():
        torch.testing.assert_close(under[name], p.grad)
    del logits


def test_a_checkpointed_head_is_left_alone(logits: Any) -> None:
    head, x, y = nn.Linear(WIDTH, CLASSES), torch.randn(9, WIDTH, requires_grad=True), torch.randint(CLASSES, (9,))
    grads = []
    for scope in (nullcontext(), logits.scope()):
        with scope:
            F.cross_entropy(checkpoint(head, x, use_reentrant=False), y).backward()
        grads.append(head.weight.grad)
        head.zero_grad()
    assert grads[0].equal(grads[1])


@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_are_traced_by_a_compiler(logits: Any, dynamic: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 300), nn.Linear(300, 8))
    x = torch.randn(4, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with logits.scope():
        found = compiled(x)
    assert found.equal(model(x))


def test_values_of_other_weights_are_refused(logits: Any) -> None:
    model, (tokens, target) = Model(), batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with logits.scope():
        out = model(tokens)
    loss = LEFT["flatten"](out, target)
    loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"changed in place.*native_cross_entropy.*before optimizer.step"):
        out.argmax(-1)
    with logits.scope():
        out = model(tokens)
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed in place"):
        LEFT["flatten"](out, target)
    logits.before_weights_change()  # nobody asks for those


def test_it_outlives_its_owner_and_comes_again() -> None:
    model, (tokens, target) = Model(), batch()
    owner, second = _C.tune.DeferredLogits(), _C.tune.DeferredLogits()
    with owner.scope():
        out = model(tokens)
    del owner
    with second.scope():
        assert model(tokens).requires_grad
    losses = second.losses()
    del second
    expected = LEFT["flatten"](model(tokens), target)
    torch.testing.assert_close(LEFT["flatten"](out, target), expected)
    assert _C.tune.DeferredLogits.losses() == losses + 1
    with _C.tune.DeferredLogits().scope():
        assert model(tokens).shape == (4, 17, CLASSES)


def test_shared_weights_get_both_gradients(logits: Any) -> None:
    model, data = Model(bias=False), batch()
    model.head.weight = model.embed.weight
    expected = results(model, LEFT["flatten"], data, nullcontext())
    results(model, LEFT["flatten"], data, logits.scope())
    for mine, right in zip(results(model, LEFT["flatten"], data, logits.scope()), expected, strict=True):
        torch.testing.assert_close(mine, right)


def test_targets_that_are_no_class_are_an_error(logits: Any) -> None:
    model, (tokens, target) = Model(), batch()
    target[1, 2] = CLASSES
    with logits.scope():
        out = model(tokens)
    with pytest.raises(ValueError, match=f"target {CLASSES} of token"):
        LEFT["flatten"](out, target)


def tried(loss: Loss) -> Any:
    model = Model()
    plan = ox.accelerate(
        model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: loss(m(b[0]), b[1]), [batch(masked=True)],
        level="advanced", strategies=["native_cross_entropy"], tune_seconds=2, remember=False,
    )  # fmt: skip
    (entry,) = (e for e in plan.certificate.entries if e.strategy == "native_cross_entropy")
    plan.revert()
    return entry


def test_accelerate_tries_it() -> None:
    entry = tried(LEFT["flatten"])
    assert entry.status in ("accepted", "rejected") and "numer" not in entry.reason, entry


def test_it_is_left_out_with_a_reason() -> None:
    entry = tried(WANTED["weights"])
    assert entry.status == "skipped" and "no cross entropy of class indices" in entry.reason, entry


def test_a_loop_that_keeps_its_logits_finds_what_they_were(logits: Any) -> None:
    model, (tokens, target) = Model(), batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    hook = register_optimizer_step_pre_hook(lambda *_: logits.before_weights_change())
    for _ in range(4):
        right = model(tokens).detach()
        computed = logits.computed()
        with logits.scope():
            out = model(tokens)
        loss = LEFT["flatten"](out, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert out.detach().equal(right)
    assert logits.computed() == computed, "what was kept so long is left alone"
    hook.remove()


def test_a_loop_of_ones_own_may_read_logits_late() -> None:
    model, (tokens, target) = Model(), batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    run = Run(model, optimizer, lambda m, b: LEFT["flatten"](m(b[0]), b[1]), [(tokens, target)])
    assert run.strategy("native_cross_entropy").applies(run) is True
    losses = _C.tune.DeferredLogits.losses()
    run.set_active(["native_cross_entropy"])
    for _ in range(3):
        with torch.no_grad():
            right = model(tokens)
        out = model(tokens)
        loss = LEFT["flatten"](out, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert out.detach().equal(right)
    assert _C.tune.DeferredLogits.losses() > losses
    run.set_active([])
    assert model(tokens).data_ptr() != 0
