"""Every rule finds the fault that was planted, clean models raise no alarm, and nothing is changed by looking."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch_demo import workloads
from torch import Tensor, nn
from torch.nn import functional as F

_spec = importlib.util.spec_from_file_location("model_planted", Path(__file__).with_name("planted.py"))
assert _spec is not None and _spec.loader is not None
planted = importlib.util.module_from_spec(_spec)
__import__("sys").modules["model_planted"] = planted
_spec.loader.exec_module(planted)

ALL = ox.model.RULES
advise = ox.model.ModelOptimizer().advise


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("plant", planted.PLANTS, ids=lambda p: f"{p.rule}-{p.text or p.where}")
def test_a_planted_fault_is_found(plant: Any) -> None:
    model, example = plant.make()
    found = [f for f in advise(model, example).of(plant.rule) if plant.where in f.where and plant.text in f.what]
    assert found, [str(f) for f in advise(model, example)]
    finding = found[0]
    assert finding.evidence and finding.why and finding.do
    assert finding.share is None or 0.0 <= finding.share <= 1.0
    if "line" in finding.evidence:
        caller = "test_advise.py:" if isinstance(model, nn.Sequential) else "planted.py:"
        assert caller in finding.evidence["line"]


def test_every_rule_has_a_plant() -> None:
    assert {plant.rule for plant in planted.PLANTS} == set(ALL)


@pytest.mark.parametrize("make", planted.CLEAN, ids=lambda m: m.__name__)
def test_a_clean_model_raises_no_alarm(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, example = make()
    assert [str(f) for f in advise(model, example)] == []


@pytest.mark.parametrize("name", workloads.NAMES)
def test_the_models_of_the_demo_raise_no_alarm(name: str) -> None:
    if name != "gpt":
        pytest.importorskip("sklearn")
    work = workloads.load(name)
    batch = tuple(part[:4] for part in work.make_batches(0, 1)[0])
    assert [str(f) for f in advise(work.make_model(), batch, work.loss)] == []


def state(model: nn.Module) -> str:
    """Everything that can be seen of a model and of the random generators."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        digest.update(f"{name} {id(tensor)} {tensor.requires_grad} {tensor.data_ptr()} {tensor.stride()}".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    for name, p in model.named_parameters():
        digest.update(f"{name} {id(p.grad)} {p.grad.tolist() if p.grad is not None else ''}".encode())
    for name, module in model.named_modules():
        hooks = {k: list(v) for k, v in vars(module).items() if k.endswith("hooks")}
        rest = {k: v for k, v in vars(module).items() if not k.startswith("_") and not isinstance(v, Tensor)}
        digest.update(f"{name} {id(module)} {module.training} {hooks} {rest}".encode())
    digest.update(torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode())
    return digest.hexdigest()


class Stateful(nn.Module):
    """Changes all that a forward can change."""

    def __init__(self, throws: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(1))
        self.count, self.log, self.table, self.throws = 0, [], {"a": torch.zeros(2)}, throws
        self.calls = iter(range(9))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.log.append(self.count)
        self.seen += 1
        self.table["a"].add_(random.random())
        self.table[str(self.count)] = x
        with torch.no_grad():
            self.out.weight.mul_(1.5)
        self.extra = x
        self.train(self.count % 2 == 0)
        self.register_buffer(f"new{self.count}", x)
        self.out.register_forward_hook(lambda *_: None)
        if next(self.calls) == 2 and self.throws:
            raise RuntimeError("planted")
        return self.out(self.drop(self.norm(x)))


@pytest.mark.parametrize("throws", [False, True])
def test_nothing_is_changed_by_looking(throws: bool) -> None:
    model = Stateful(throws)
    model.drop.eval()
    model.out.register_full_backward_hook(lambda *_: None)
    for p in model.out.parameters():
        p.grad = torch.randn_like(p)
    model.norm.weight.requires_grad_(False)
    example = torch.randn(4, 8)
    before = state(model)
    if throws:
        with pytest.raises(RuntimeError, match="planted"):
            advise(model, example)
    else:
        advise(model, example)
    assert state(model) == before
    assert model.log == [] and list(model.table) == ["a"] and not model.table["a"].any()
    assert not nn.modules.module._global_forward_pre_hooks and not nn.modules.module._global_forward_hooks


def test_a_step_after_advice_is_the_step_without_it() -> None:
    def train(look: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model, example = planted.conv_bn()
        model.append(nn.Dropout(0.3))
        if look:
            advise(model, example)
        model(example).sum().backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_findings_are_sorted_by_share_and_read_as_table_and_json() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Dropout(0.1), nn.Dropout(0.1))
    model.add_module("unused", nn.Identity())
    model.unused.weight = nn.Parameter(torch.zeros(3))
    advice = advise(model, torch.randn(4, 3, 8, 8))
    shares = [f.share or 0.0 for f in advice]
    assert shares == sorted(shares, reverse=True) and {"dropout", "bias_before_norm"} <= {f.rule for f in advice}
    data = json.loads(advice.to_json())
    assert data["findings"][0]["rule"] == advice[0].rule and data["step_seconds"] > 0
    most = [share for _, share in advice.operators]  # of the operators that took most
    assert most == sorted(most, reverse=True) and min(most) > 0 and 1 / 3 < sum(most) <= 1 + 1e-9
    assert len(advice.table().splitlines()) == len(advice) + 1 and advice[0].do[:10] in str(advice)


def test_criterion_and_loss_function_and_inference() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    batch = (torch.randn(4, 8), torch.arange(4))
    for loss in (nn.CrossEntropyLoss(), F.cross_entropy, lambda m, b: F.cross_entropy(m(b[0]), b[1])):
        assert advise(model, batch, loss) == []
    with pytest.raises(TypeError, match="a criterion, so an example is"):
        advise(model, torch.randn(4, 8), nn.CrossEntropyLoss())
    advice = advise(model.requires_grad_(False), batch[0])
    assert "backward was not run" in advice.notes[0] and not advice.of("no_gradient")


def test_frozen_and_shared_weights_are_no_faults() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[1].weight
    model[0].requires_grad_(False)
    assert advise(model, torch.randn(4, 8)) == []


def test_rules_can_be_chosen_and_unknown_ones_are_refused() -> None:
    chosen = ox.model.ModelOptimizer(["float64_leak"])
    assert chosen.advise(*planted.conv_bn()) == []
    with pytest.raises(ValueError, match="no rule is called 'speed'"):
        ox.model.ModelOptimizer(["speed"])
    with pytest.raises(ValueError, match="lazy parameters"):
        advise(nn.LazyLinear(3), torch.randn(2, 3))
