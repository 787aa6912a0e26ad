"""Pruned and quantised copies: what was taken, what it changed, the table, and refusals."""

from __future__ import annotations

import copy
import importlib
import json
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch.model import compare
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


def cnn() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip
    for norm in (model[1], model[8]):
        norm.running_mean.normal_()
        norm.bias.data.normal_()
    return model.eval()


def zeros(tensor: Tensor) -> float:
    return float((tensor == 0).float().mean())


@pytest.mark.parametrize("method", ["magnitude", "global", "random"])
def test_unstructured_pruning_zeroes_the_share(method: str) -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    result = ox.model.prune(model, 0.6, method=method, example=X)
    weights = [m.weight for m in result.model if isinstance(m, nn.Linear)]
    assert zeros(torch.cat([w.flatten() for w in weights])) == pytest.approx(0.6, abs=0.01)
    assert result.changed == ("0", "2", "4") and result.comparison.zeros_after > 0.5 > result.comparison.zeros_before
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert result.model.state_dict().keys() == before.keys()
    if method == "magnitude":
        w, cut = model[2].weight, result.model[2].weight
        assert torch.equal(cut, torch.where(w.abs() >= w.abs().flatten().kthvalue(round(0.6 * w.numel()) + 1)[0], w, 0))


def test_masks_can_be_kept_so_that_training_keeps_the_zeros() -> None:
    model = ox.model.prune(mlp(), 0.5, example=X, permanent=False).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).square().mean().backward()
    optimizer.step()
    model(X)
    assert zeros(model[0].weight) == 0.5 and "0.weight_mask" in model.state_dict()


def test_two_of_four() -> None:
    model = mlp()
    model.insert(0, nn.Linear(30, 32))
    result = ox.model.prune(model, 0.5, "2:4", example=torch.randn(4, 30))
    groups = result.model[1].weight.reshape(-1, 4)
    kept = model[1].weight.reshape(-1, 4)
    assert ((groups != 0).sum(1) == 2).all() and "multiple of 4" in result.skipped["0"]
    assert torch.equal(groups.abs().amax(1), kept.abs().amax(1))
    assert (groups.abs().sum(1) == kept.abs().sort(1).values[:, 2:].sum(1)).all()


def test_structured_pruning_takes_out_channels_and_keeps_the_rest_of_the_function() -> None:
    """The smaller model computes what the whole does with the columns that read the channels set to zero."""
    model = cnn()
    result = ox.model.prune(model, 0.5, "structured", example=IMAGES, evaluate=lambda m: m(IMAGES).sum().item())
    assert result.changed == ("0", "4", "7") and "output" in result.skipped["10"]
    small = result.model
    assert (small[0].out_channels, small[1].num_features, small[4].in_channels) == (4, 4, 4)
    assert small[7].in_features == 8 * 16 and small[8].num_features == 16 and small[10].in_features == 16
    oracle = copy.deepcopy(model)
    with torch.no_grad():
        for index, reader, each in ((0, 4, 1), (4, 7, 16), (7, 10, 1)):
            # The second layer's norms are of what is left of its inputs, as the layers are pruned in order.
            norms = oracle[index].weight.flatten(1).norm(dim=1)
            gone = norms.topk(len(norms) // 2, largest=False).indices
            shape = oracle[reader].weight.shape
            oracle[reader].weight.view(shape[0], len(norms), each, -1)[:, gone] = 0
    torch.testing.assert_close(small(IMAGES), oracle(IMAGES), rtol=1e-4, atol=1e-5)
    table = result.comparison
    assert table.bytes_after < 0.6 * table.bytes_before and table.metric_after is not None
    assert table.error == pytest.approx(
        ((small(IMAGES) - model(IMAGES)).norm() / model(IMAGES).norm()).item(), rel=1e-4
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x + self.c(torch.relu(self.b(x)))


def test_structured_pruning_leaves_what_is_not_a_chain() -> None:
    result = ox.model.prune(Block(), 0.25, "structured", example=X)
    assert result.changed == ("b",) and result.model.b.out_features == 24 and result.model.c.in_features == 24
    assert "2 operations" in result.skipped["a"] and "left: a:" in str(result)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (mlp, {"amount": 1.5}, "share in"),
    (mlp, {"amount": 0.5, "kind": "blocks"}, "kind is 'blocks'"),
    (mlp, {"amount": 0.5, "kind": "structured", "method": "global"}, "method is 'global'"),
    (mlp, {"amount": 0.3, "kind": "2:4"}, "prunes 0.5"),
    (nn.ReLU, {"amount": 0.5}, "no Linear or convolution"),
    (lambda: nn.Sequential(nn.Linear(32, 8)), {"amount": 0.5, "kind": "structured"}, "model's output"),
    (lambda: nn.Linear(32, 8), {"amount": 0.5, "kind": "structured"}, "other than a call of the layer"),
    (lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(16), nn.Linear(32, 4)),
     {"amount": 0.5, "kind": "structured"}, "over another dimension"),
    (lambda: nn.Sequential(nn.Linear(32, 32), nn.Softmax(-1), nn.Linear(32, 4)),
     {"amount": 0.5, "kind": "structured"}, "Softmax reads its channels"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options", "words"), REFUSED)
def test_pruning_refuses_with_a_sentence(make: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ox.model.prune(make(), example=X, **options)


def test_shared_weights_and_data_dependent_ways_are_not_cut() -> None:
    model = mlp()
    model[4] = nn.Linear(64, 64)
    model[4].weight = model[2].weight
    with pytest.raises(ValueError, match="shares its weight"):
        ox.model.prune(model, 0.5, "structured", example=X)

    class Branch(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else self.b(x)

    with pytest.raises(ValueError, match="cannot be traced"):
        ox.model.prune(Branch(), 0.5, "structured", example=X)


# --- quantisation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["torch", "torchao"])
def test_int8_is_small_and_near(by: str) -> None:
    if by == "torchao":
        pytest.importorskip("torchao.quantization", exc_type=ImportError)
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    result = ox.model.quantize(model, "int8", example=X, by=by)
    assert result.changed == ("0", "2", "4") and by in result.notes[0]
    assert 0 < result.comparison.error < 0.05
    assert 0.25 * result.comparison.bytes_before < result.comparison.bytes_after < 0.4 * result.comparison.bytes_before
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_int8_is_what_torchao_makes_itself() -> None:
    """Held to torchao, which the tests' environment has, and what "auto" takes where it is installed."""
    library = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    model = mlp()
    theirs = copy.deepcopy(model).eval()
    library.quantize_(theirs, library.Int8DynamicActivationInt8WeightConfig())
    for by in ("torchao", "auto"):
        result = ox.model.quantize(model, "int8", example=X, by=by)
        assert torch.equal(result.model(X), theirs(X)) and not torch.equal(result.model(X), model(X))
        assert [type(m) for m in result.model.modules()] == [type(m) for m in theirs.modules()]
        assert type(result.model[0].weight) is type(theirs[0].weight) is not nn.Parameter
        assert "by torchao" in result.notes[0]


def test_a_torchao_for_another_torch_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = importlib.import_module

    def broken(name: str, package: str | None = None) -> Any:
        if name.startswith("torchao"):
            raise ImportError("cannot import name 'ScalingType'")
        return usual(name, package)

    monkeypatch.setattr(importlib, "import_module", broken)
    result = ox.model.quantize(mlp(), "int8", example=X, by="auto")
    assert "quantize_dynamic" in result.notes[0] and "ScalingType" in result.notes[0]
    with pytest.raises(ImportError, match=r"does not work with torch .*ScalingType.*by='torch'"):
        ox.model.quantize(mlp(), "int8", example=X, by="torchao")


@pytest.mark.parametrize("group", [32, 64])
def test_int4_is_the_rounded_weight(group: int) -> None:
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    x = torch.randn(3, 5, 128)
    result = ox.model.quantize(model, "int4", example=x, group=group)
    assert result.changed == ("0",) and "multiples" in result.skipped["2"]
    w = model[0].weight.detach().double().unflatten(1, (-1, group))
    low, step = w.amin(-1, keepdim=True), (w.amax(-1, keepdim=True) - w.amin(-1, keepdim=True)) / 15
    rounded = (((w - low) / step).round() * step + low).flatten(1)
    expected = x.double() @ rounded.T + model[0].bias.double()
    found = result.model[0](x)
    assert found.dtype == torch.float32 and found.shape == (3, 5, 64)
    assert ((found - expected).norm() / expected.norm()).item() < 0.01
    assert result.comparison.bytes_after < 0.35 * result.comparison.bytes_before


def test_a_linear_layer_alone_and_one_whose_weight_others_read() -> None:
    assert ox.model.quantize(nn.Linear(32, 16), "int4", example=X).model(X).shape == (16, 16)
    encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    with pytest.raises(ValueError, match="linear1: torch's attention or encoder layer reads its weight itself"):
        ox.model.quantize(encoder, "int8", example=X[None])


@pytest.mark.parametrize(
    ("options", "words"),
    [({"kind": "int2"}, "kind is 'int2'"), ({"by": "me"}, "by is 'me'"), ({"kind": "int4", "group": 7}, "group is 7"),
     ({"kind": "int4", "by": "torchao"}, "for int8")],
)  # fmt: skip
def test_quantisation_refuses_with_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ox.model.quantize(mlp(), example=X, **options)
    with pytest.raises(ValueError, match="no Linear layer"):
        ox.model.quantize(nn.ReLU(), example=X)


def test_the_table_says_which_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is a fake one, on which one model takes twice the time of the other."""
    quick, slow = mlp(), mlp()
    forward = compare.seconds_and_outputs

    def fake(model: nn.Module, example: Any) -> tuple[float, list[Tensor]]:
        return 2.0 if model is slow else 1.0, forward(model, example)[1]

    monkeypatch.setattr(compare, "seconds_and_outputs", fake)
    slower, faster, same = (compare.compare(*pair, X) for pair in ((quick, slow), (slow, quick), (quick, quick)))
    assert slower.slower and slower.verdict.startswith("SLOWER") and not slower.faster and slower.ratio.mid == 2.0
    assert faster.faster and not faster.slower and faster.ratio.mid == 0.5
    assert not same.faster and not same.slower and "neither" in same.verdict and same.error == 0.0
    assert json.loads(json.dumps(slower.to_dict()))["ratio"]["low"] == 2.0
    assert [line.split()[0] for line in str(slower).splitlines()] == [
        "before", "size", "zeros", "forward", "error", "SLOWER",
    ]  # fmt: skip


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["export", "torchscript"])
def test_an_exported_file_is_read_back_and_compared(kind: str, tmp_path: Any) -> None:
    model = cnn().train()
    before = copy.deepcopy(model.state_dict())
    done = ox.model.export(model, IMAGES, tmp_path / "model.pt2", kind)
    assert done.error <= 1e-6 and done.bytes == (tmp_path / "model.pt2").stat().st_size and model.training
    torch.testing.assert_close(done.run(IMAGES), model.eval()(IMAGES))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"] and "on the example" in str(done)


@pytest.mark.slow
def test_a_compiled_package_is_read_back_and_compared(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU())
    done = ox.model.export(model, X, tmp_path / "model.pt2", "aoti")
    assert done.error <= 1e-6
    torch.testing.assert_close(done.run(X), model(X))


class Drifting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(())


def test_a_file_that_computes_something_else_is_not_written(tmp_path: Any) -> None:
    (tmp_path / "model.pt").write_text("old")
    with pytest.raises(ValueError, match="more than tolerance"):
        ox.model.export(Drifting(), X, tmp_path / "model.pt", "torchscript")
    assert (tmp_path / "model.pt").read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="kind is 'onnx'"):
        ox.model.export(mlp(), X, tmp_path / "model.pt", "onnx")
