"""Planted faults, each named by module and operator; and what only looks like a fault, which is left in peace."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import oxytorch as ox
import pytest
import torch
from oxytorch.optim import Origin, nan_origin
from torch import Tensor, nn


class Wrap(nn.Module):
    """A module around a function, with a weight so that gradients flow through it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight * x)


def find(model: nn.Module, *inputs: Tensor, dtype: torch.dtype | None = None) -> Origin | None:
    with nan_origin(model) as finder, torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        model(*inputs).float().mean().backward()
    return finder.origin


def middle(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Wrap(function), nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("function", "op", "kind"),
    [
        (lambda x: (-x.abs() - 1).log(), "aten.log.default", "nan"),
        (lambda x: (x - x.detach()) / (x - x.detach()), "aten.div.Tensor", "nan"),
        (lambda x: 1 / (x * 0), "aten.reciprocal.default", "inf"),
        (lambda x: (x * 0).log(), "aten.log.default", "inf"),
        (lambda x: (x * 0 + 100).exp(), "aten.exp.default", "inf"),
        (lambda x: (x.abs() + 2).acos(), "aten.acos.default", "nan"),
        (lambda x: (-x.abs() - 1).log_(), "aten.log_.default", "nan"),
        (lambda x: x.clone().clamp_(max=-2).pow(0.5), "aten.pow.Tensor_Scalar", "nan"),
    ],
)
def test_a_fault_in_forward_is_named_by_module_and_operator(function, op: str, kind: str) -> None:
    origin = find(middle(function), torch.randn(3, 4))
    assert origin is not None
    assert (origin.phase, origin.module, origin.module_type, origin.op, origin.kind) == (
        "forward",
        "1",
        "Wrap",
        op,
        kind,
    )
    assert all(facts.finite for facts in origin.inputs)
    assert not origin.outputs[0].finite and origin.outputs[0].shape == (3, 4)
    assert origin.reached == "the loss"
    assert __file__ in origin.source
    assert op in str(origin) and "'1'" in str(origin)
    assert origin.to_dict()["inputs"][0]["shape"] == (3, 4)


def test_inputs_of_an_operator_in_place_are_told_as_they_were() -> None:
    origin = find(middle(lambda x: (x * 0 - 3).log_()), torch.randn(3, 4))
    assert origin is not None
    assert (origin.inputs[0].min, origin.inputs[0].max, origin.inputs[0].nan) == (-3.0, -3.0, 0)
    assert origin.outputs[0].nan == 12


def test_inf_that_becomes_nan_later_is_blamed_and_both_places_are_told() -> None:
    model = nn.Sequential(Wrap(lambda x: (x * 0 + 100).exp()), Wrap(lambda x: x - x))
    origin = find(model, torch.randn(3, 4))
    assert origin is not None
    assert (origin.module, origin.op, origin.kind) == ("0", "aten.exp.default", "inf")
    assert "aten.sub.Tensor" in origin.became_nan and "'1'" in origin.became_nan


@pytest.mark.parametrize(
    ("function", "node", "forward_op", "op"),
    [
        (lambda x: (x * 0).sqrt(), "SqrtBackward0", "aten.sqrt.default", "aten.div.Tensor"),
        # The branch that `where` drops sends 0 * inf back.
        (
            lambda x: torch.where(x < math.inf, x, (x * 0).log()),
            "LogBackward0",
            "aten.log.default",
            "aten.div.Tensor",
        ),
    ],
)
def test_a_fault_in_backward_names_the_node_and_the_module_of_its_forward(function, node, forward_op, op) -> None:
    origin = find(middle(function), torch.randn(3, 4))
    assert origin is not None
    assert (origin.phase, origin.module, origin.op) == ("backward", "1", op)
    assert (origin.node, origin.forward_op) == (node, forward_op)
    assert "gradient of" in origin.reached
    assert __file__ in origin.source
    assert node in str(origin)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_overflow_in_half_precision(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[1].weight.fill_(torch.finfo(dtype).max / 16)
        model[0].weight.fill_(40)
    origin = find(model, torch.ones(3, 4), dtype=dtype)
    assert origin is not None
    assert (origin.phase, origin.module, origin.op, origin.kind) == ("forward", "1", "aten.addmm.default", "inf")
    name = str(dtype).removeprefix("torch.")
    assert {facts.dtype for facts in origin.inputs} == {name}
    assert any(f"largest {name}" in note for note in origin.notes)


def test_a_cast_that_overflows_and_a_number_near_the_largest() -> None:
    origin = find(nn.Sequential(Wrap(lambda x: x.half().float())), torch.full((2, 2), 7e4))
    assert origin is not None
    assert (origin.module, origin.op) == ("0", "aten._to_copy.default")
    origin = find(nn.Sequential(Wrap(lambda x: (x.half() * 2).float())), torch.full((2, 2), 6e4))
    assert origin is not None
    assert origin.inputs[0].of_largest > 0.9
    assert "of the largest float16" in str(origin)


def test_a_bad_embedding_row_is_blamed_on_the_parameter_and_only_when_it_is_read() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight[7, 2] = math.nan
    origin = find(model, torch.tensor([1, 7]))
    assert origin is not None
    assert (origin.phase, origin.what, origin.name, origin.kind) == ("given", "parameter", "0.weight", "nan")
    assert (origin.module, origin.op) == ("0", "aten.embedding.default")
    assert origin.inputs[0].first == (7, 2)
    model.zero_grad()
    assert find(model, torch.tensor([1, 2])) is None


def test_a_bad_batch_buffer_or_old_gradient_is_blamed_itself() -> None:
    model = middle(lambda x: x)
    origin = find(model, torch.tensor([[1.0, math.nan, 0, 0]]))
    assert origin is not None
    assert (origin.phase, origin.what, origin.name) == ("given", "batch", "args[0]")

    origin = find(model, torch.ones(1, 4))
    assert origin is not None
    assert (origin.phase, origin.what, origin.name) == ("given", "gradient", "2.weight")

    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    model[0].running_mean[1] = math.nan
    origin = find(model, torch.ones(1, 4))
    assert origin is not None
    assert (origin.what, origin.name, origin.module) == ("buffer", "0.running_mean", "0")


def test_an_inf_in_a_parameter_is_a_fault() -> None:
    model = middle(lambda x: x)
    with torch.no_grad():
        model[2].weight[0, 1] = math.inf
    origin = find(model, torch.ones(1, 4))
    assert origin is not None
    assert (origin.what, origin.name, origin.kind) == ("parameter", "2.weight", "inf")


def test_exploding_weights_are_seen_where_they_overflow() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e12)
    found = None
    for _ in range(10):
        optimizer.zero_grad()
        with nan_origin(model) as finder:
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
        found = finder.origin
        if found is not None:
            break
    assert found is not None and found.phase in ("forward", "backward") and found.kind == "inf"
    assert max(facts.max or 0 for facts in found.inputs) > 1e15 and all(facts.finite for facts in found.inputs)


def test_a_module_called_twice_tells_which_call() -> None:
    shared = Wrap(lambda x: (x - 1).log())

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = shared

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x))

    origin = find(Twice(), torch.full((2, 2), 3.0))  # log 2, then log of a negative number
    assert origin is not None
    assert (origin.module, origin.call) == ("inner", 2)
    assert "call 2" in str(origin)


def test_a_loss_of_its_own_class_and_one_by_hand_are_named() -> None:
    model = nn.Linear(4, 3)
    targets = torch.full((2, 3), math.nan)
    with nan_origin(model) as finder:
        nn.MSELoss()(model(torch.ones(2, 4)), targets).backward()
    assert finder.origin is not None
    assert finder.origin.module == "MSELoss, no part of the model"
    assert (finder.origin.phase, finder.origin.what, finder.origin.name) == ("given", "batch", "args[1] of MSELoss")
    with nan_origin(model) as finder:
        (model(torch.ones(2, 4)) * 0).log().mean().backward()
    assert finder.origin is not None
    assert finder.origin.module is None and finder.origin.op == "aten.log.default"


def test_a_fault_under_activation_checkpointing_and_in_a_function_of_ones_own() -> None:
    from torch.utils.checkpoint import checkpoint

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            return grad / (ctx.saved_tensors[0] * 0)

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Wrap(Bad.apply)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    origin = find(nn.Sequential(nn.Linear(4, 4), Stage()), torch.ones(2, 4))
    assert origin is not None
    assert (origin.phase, origin.module, origin.op) == ("backward", "1.inner", "aten.div.Tensor")
    assert origin.node == "BadBackward"


class Masked(nn.Module):
    """Attention with a causal mask of -inf, as a buffer, and rows that are masked whole and then mended."""

    def __init__(self, whole_rows: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.whole_rows = whole_rows
        self.register_buffer("mask", torch.full((6, 6), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) + self.mask
        scores = scores.masked_fill(torch.eye(6, dtype=torch.bool).roll(1, 0) & (self.mask == 0), -math.inf)
        if self.whole_rows:
            scores = scores.masked_fill(torch.arange(6)[:, None] > 3, -math.inf)
        weights = scores.softmax(-1)
        if self.whole_rows:
            weights = weights.detach().nan_to_num(0.0)
        return weights @ v


@pytest.mark.parametrize("whole_rows", [False, True])
def test_masks_of_inf_and_rows_that_are_mended_raise_no_alarm(whole_rows: bool) -> None:
    torch.manual_seed(0)
    assert find(Masked(whole_rows), torch.randn(2, 6, 8)) is None


def test_a_row_masked_whole_is_blamed_on_the_softmax_not_on_the_mask() -> None:
    class Rows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x > -100, -math.inf).softmax(-1)

    origin = find(nn.Sequential(nn.Linear(4, 4), Rows()), torch.ones(2, 4))
    assert origin is not None
    assert (origin.module, origin.op, origin.kind) == ("1", "aten._softmax.default", "nan")
    assert origin.inputs[0].inf == 8


def test_torch_transformers_with_masks_and_dropout_raise_no_alarm() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with nan_origin(model) as finder:
        model(torch.randn(3, 5, 16), mask=mask).square().mean().backward()
    assert finder.origin is None


def test_masked_logits_with_a_finite_loss_raise_no_alarm_but_an_output_of_nan_alone_does() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor, bad: bool = False) -> Tensor:
            logits = self.fc(x).masked_fill(torch.tensor([False, True, False]), -math.inf)
            return logits * (math.nan if bad else 1)

    model = Logits()
    with nan_origin(model) as finder:
        nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 2])).backward()
    assert finder.origin is None
    with nan_origin(model) as finder, torch.no_grad():
        model(torch.ones(2, 4))
    assert finder.origin is None
    with nan_origin(model) as finder, torch.no_grad():
        model(torch.ones(2, 4), bad=True)
    assert finder.origin is not None
    assert (finder.origin.op, finder.origin.reached) == ("aten.mul.Tensor", "the model's output")


def test_a_loss_that_leaves_out_what_is_nan_raises_no_alarm_where_only_the_input_has_a_gradient() -> None:
    model = Wrap(lambda x: torch.cat([x, (-x.detach().abs() - 1).log()])).requires_grad_(False)
    x = torch.ones(2, 4, requires_grad=True)
    with nan_origin(model) as finder:
        model(x)[:2].mean().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())
    assert finder.origin is None


def test_missing_values_that_the_model_mends_raise_no_alarm() -> None:
    model = nn.Sequential(Wrap(lambda x: x), nn.Linear(4, 1))
    model[0].forward = torch.nan_to_num  # type: ignore[method-assign]
    assert find(model, torch.tensor([[1.0, math.nan, 0, 0]])) is None


def test_raising_and_an_error_of_the_block_itself() -> None:
    model = middle(lambda x: (-x.abs() - 1).log())
    said = r"nan first appeared in forward: aten\.log\.default in Wrap '1'"
    with pytest.raises(FloatingPointError, match=said), nan_origin(model, raises=True):
        model(torch.ones(2, 4)).mean().backward()
    with pytest.raises(ValueError, match="mine"), nan_origin(model) as finder:
        model[:2](torch.ones(2, 4))
        raise ValueError("mine")
    assert finder.origin is not None and finder.origin.op == "aten.log.default"


def test_nothing_is_left_behind_and_the_results_are_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    hooks = copy.copy(nn.modules.module._global_forward_hooks), copy.copy(nn.modules.module._global_forward_pre_hooks)
    x = torch.randn(6, 4)
    for net, watched in ((model, True), (twin, False)):
        torch.manual_seed(1)
        if watched:
            with nan_origin(net) as finder:
                net(x).square().mean().backward()
            assert finder.origin is None
        else:
            net(x).square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    now = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    assert now == hooks
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_compiled_model_runs_eagerly_inside_and_says_so() -> None:
    inner = middle(lambda x: (-x.abs() - 1).log())
    model = torch.compile(inner, backend="eager")
    model(torch.ones(2, 4)).mean()  # compiled before, as in a running training
    origin = find(model, torch.ones(2, 4))
    assert origin is not None
    assert (origin.op, origin.module) == ("aten.log.default", "1")
    assert any("torch.compile" in note for note in origin.notes)


def test_that_compiled_code_is_switched_off_is_said_only_where_there_is_some() -> None:
    model = middle(lambda x: (-x.abs() - 1).log())
    plain = find(model, torch.ones(2, 4))
    assert plain is not None
    assert not any("torch.compile" in note for note in plain.notes)
    model[1].compile(backend="eager")  # in place, so that no module around it tells
    origin = find(model, torch.ones(2, 4))
    assert origin is not None
    assert (origin.op, origin.module) == ("aten.log.default", "1")
    assert any("torch.compile" in note for note in origin.notes)


def test_a_scaled_loss_and_oxytorchs_optimizer_inside_the_block() -> None:
    model = middle(lambda x: (x * 0).sqrt())
    opt = ox.optim.AdamW(model.parameters())
    scaler = ox.amp.GradScaler("cpu")
    with nan_origin(model) as finder:
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert finder.origin is not None
    assert finder.origin.node == "SqrtBackward0"
