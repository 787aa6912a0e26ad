"""Edits keep the function, are undone bit for bit, and are refused where they do not fit."""

from __future__ import annotations

import copy
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch.model import edits
from oxytorch.model.change import Change
from torch import Tensor, nn
from torch.nn import functional as F


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Sequential(nn.Conv2d(8, 8, 3), nn.Tanh()),
        nn.Flatten(), nn.Linear(8 * 16, 4), nn.BatchNorm1d(4),
    )  # fmt: skip


def cnn_3d() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 27, 3))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(32, 96), nn.Dropout(0.3))
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.block(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
LABELLED = IMAGES, torch.tensor([0, 1, 2, 3, 0, 1])
VOLUMES = torch.randn(3, 2, 4, 4, 4, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))


def bits(model: nn.Module) -> list[Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(n, t.data_ptr(), t.stride(), t.detach().flatten().tolist()) for n, t in tensors] + [
        (name, id(module), sorted(vars(module)), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]


CASES = [
    ("channels_last", cnn, LABELLED, True),
    ("channels_last_3d", cnn_3d, VOLUMES, True),
    ("drop_bias_before_norm", cnn, LABELLED, True),
    ("drop_bias_before_norm", cnn, IMAGES, True),  # the loss that stands in for one is not constant behind a norm
    ("fuse_conv_bn", cnn, IMAGES, False),
    ("checkpoint:3", cnn, LABELLED, True),
    ("checkpoint:block", Attention, TOKENS, True),
    ("sdpa:math", Attention, TOKENS, False),
]


@pytest.mark.parametrize(("name", "make", "example", "training"), CASES)
def test_an_edit_is_applied_keeps_the_function_and_is_undone(
    name: str, make: Any, example: Any, training: bool
) -> None:
    criterion = nn.CrossEntropyLoss() if example is LABELLED else None
    inputs = IMAGES if example is LABELLED else example
    model = make()
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
    model.train(training)
    before, rng = bits(model), torch.get_rng_state()
    expected = model.eval()(inputs)
    model.train(training)
    tuner = ox.model.ModelOptimizer()
    (outcome,) = tuner.apply(model, name, example, criterion)
    assert outcome.applied, outcome
    assert torch.equal(rng, torch.get_rng_state()) and tuner.applied == [name]
    assert bits(model) != before
    torch.testing.assert_close(model.eval()(inputs), expected, rtol=1e-4, atol=1e-5)
    model.train(training)
    assert tuner.revert() == [name] and bits(model) == before and tuner.applied == []


def test_what_an_edit_does_is_seen() -> None:
    model, tuner = cnn(), ox.model.ModelOptimizer()
    names = ["drop_bias_before_norm", "channels_last"]
    assert all(o.applied for o in tuner.apply(model, names, LABELLED, nn.CrossEntropyLoss()))
    assert (
        model[0].bias is None
        and model[5].bias is None
        and model[0].weight.is_contiguous(memory_format=torch.channels_last)
    )
    model.eval()
    (outcome,) = tuner.apply(model, "fuse_conv_bn", IMAGES)
    assert outcome.applied and isinstance(model[1], nn.Identity) and isinstance(model[6], nn.Identity)
    assert tuner.revert(nn.Linear(1, 1)) == []
    assert tuner.revert(model) == ["fuse_conv_bn", "channels_last", "drop_bias_before_norm"]
    assert isinstance(model[1], nn.BatchNorm2d) and model[0].bias is not None and model[0].weight.is_contiguous()


def test_training_between_apply_and_revert_is_kept() -> None:
    def train(edits: list[str]) -> nn.Module:
        torch.manual_seed(0)
        model, tuner = cnn(), ox.model.ModelOptimizer()
        assert all(o.applied for o in tuner.apply(model, edits, LABELLED, nn.CrossEntropyLoss()))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(IMAGES), LABELLED[1]).backward()
            optimizer.step()
        tuner.revert()
        return model

    plain, edited = train([]).state_dict(), train(["channels_last", "drop_bias_before_norm"]).state_dict()
    assert plain.keys() == edited.keys()
    for name, value in plain.items():
        torch.testing.assert_close(edited[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_a_copy_of_an_edited_model_computes_with_its_own_weights() -> None:
    model, tuner = Attention(), ox.model.ModelOptimizer()
    (outcome,) = tuner.apply(model, "sdpa:math", TOKENS)
    assert outcome.applied, outcome
    model.eval()
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(TOKENS), model(TOKENS))
    with torch.no_grad():
        copied.out.weight.zero_()
    assert torch.equal(copied(TOKENS), copied.out.bias.expand(2, 16, 32))


def test_checkpointing_keeps_less_for_backward() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)))
    example, kept = torch.randn(64, 64), []

    def count() -> int:
        total: list[int] = []
        pack = lambda t: (total.append(t.numel()), t.detach())[1]  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(example)
        return sum(total)

    kept.append(count())
    outcomes = ox.model.ModelOptimizer().apply(model, ["checkpoint:0", "checkpoint:1"], example)
    assert all("the same bit for bit" in o.reason for o in outcomes)
    assert count() < 0.6 * kept[0]


REFUSED = [
    ("channels_last", Attention, TOKENS, "no 2-D convolution"),
    ("channels_last_3d", cnn, IMAGES, "no 3-D convolution"),
    ("sdpa:cudnn", Attention, TOKENS, "no such kernel on cpu"),
    ("fuse_conv_bn", cnn, IMAGES, "in training mode"),
    ("drop_bias_before_norm", Attention, TOKENS, "no layer with a bias"),
    ("checkpoint:7", cnn, IMAGES, "no module '7'"),
    ("checkpoint:1", cnn, IMAGES, "keeps running statistics"),
    ("sdpa:fast", Attention, TOKENS, "sdpa:math"),
    ("sdpa:math", cnn, IMAGES, "does not call"),
]


@pytest.mark.parametrize(("name", "make", "example", "reason"), REFUSED)
def test_an_edit_that_does_not_fit_is_refused_with_its_reason(
    name: str, make: Any, example: Tensor, reason: str
) -> None:
    model = make()
    before = bits(model)
    (outcome,) = ox.model.ModelOptimizer().apply(model, [name], example)
    assert not outcome.applied and reason in outcome.reason and reason in str(outcome)
    assert bits(model) == before


class Wrong(Change):
    """Changes the function a little, or breaks the model."""

    def apply(self, run: Any) -> None:
        self.own = run.model[5].weight.data
        run.model[5].weight.data = self.own * 1.001 if "little" in self.name else self.own[:, 1:]

    def revert(self, run: Any) -> None:
        run.model[5].weight.data = self.own


@pytest.mark.parametrize(("exact", "name"), [(True, "wrong:little"), (False, "wrong:little"), (False, "wrong:shape")])
def test_an_edit_that_changes_the_function_is_undone(monkeypatch: Any, exact: bool, name: str) -> None:
    monkeypatch.setattr(Wrong, "kind", "exact" if exact else "tolerance")
    monkeypatch.setitem(edits.EDITS, "wrong", Wrong)
    model = cnn()
    before = bits(model)
    (outcome,) = ox.model.ModelOptimizer().apply(model, [name], IMAGES, lambda m, b: m(b).square().mean())
    assert not outcome.applied and bits(model) == before
    words = "does not run with it" if "shape" in name else "same bit for bit" if exact else "against float64"
    assert words in outcome.reason


def test_an_unknown_edit_applies_nothing() -> None:
    model = cnn()
    with pytest.raises(ValueError, match="no edit is called 'faster'"):
        ox.model.ModelOptimizer().apply(model, ["channels_last", "faster"], IMAGES)
    assert model[0].weight.is_contiguous()


def test_channels_last_holds_no_state_that_is_gone() -> None:
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters())
    run = ox.tune.Run(model, optimizer, nn.CrossEntropyLoss(), [LABELLED])
    live = []
    with ox.memory.Meter() as meter:
        for _ in range(4):
            optimizer.state.clear()  # as a trial's end leaves it
            run.step(run.batches[0])
            for names in (["channels_last"], []):
                run.set_active(names)
            live.append(meter.live_bytes)
    assert max(live[1:]) <= live[0] + 64  # a random state
