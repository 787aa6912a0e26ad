"""Budgets of memory on models of several kinds: kept, exact, monotone, refused with the lowest peak."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch.memory import MemoryPlan, Meter, fit
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("one_thread")
Step = Callable[[], Any]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


class Experts(nn.Module):
    """Which expert a row takes depends on the data."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return x + out


def of_images() -> tuple[nn.Module, Tensor, Tensor]:
    blocks = [Residual(8) for _ in range(6)]
    return (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.Flatten(), nn.LazyLinear(5)),
        torch.randn(8, 3, 16, 16),
        torch.randint(5, (8,)),
    )


def of_tokens() -> tuple[nn.Module, Tensor, Tensor]:
    return Decoder(6, 32), torch.randint(50, (8, 32)), torch.randint(50, (8, 32))


def of_experts() -> tuple[nn.Module, Tensor, Tensor]:
    return (
        nn.Sequential(*(Experts(16) for _ in range(5)), nn.Linear(16, 5)),
        torch.randn(256, 16),
        torch.randint(5, (256,)),
    )


KINDS = {"images": of_images, "tokens": of_tokens, "experts": of_experts}


def prepared(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    torch.manual_seed(0)
    model, x, y = KINDS[kind]()
    model(x)  # makes the lazy layer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def peak_of(step: Step) -> int:
    step()
    with Meter() as meter:
        step()
    return meter.peak_bytes


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_budget_down_to_the_floor_is_kept(kind: str) -> None:
    model, _, step = prepared(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with fit(model, step, "4GB") as loose:
        assert loose.planned == () and not loose.is_active
    assert all(value.equal(before[name]) for name, value in model.state_dict().items()), "trials left a trace"
    last = loose.plain_peak
    for share in (0.9, 0.6, 0.3, 0.05):
        budget = loose.floor + int(share * (loose.plain_peak - loose.floor))
        with fit(model, step, budget) as plan:
            assert plan.planned and plan.measured_peak <= budget
            assert plan.same_bits is True
            assert plan.measured_peak <= last * 1.001, "a smaller budget never peaks higher"
            # What the user's own loop takes then.
            assert peak_of(step) <= budget
            last = plan.measured_peak
        assert not plan.is_active
    assert all(
        value.equal(before[name]) or value.is_floating_point()
        for name, value in model.state_dict().items()
        if "num_batches" not in name
    )


@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_the_prediction_is_close(kind: str) -> None:
    model, _, step = prepared(kind)
    with fit(model, step, "4GB") as loose:
        middle = (loose.plain_peak + loose.floor) // 2
    with fit(model, step, middle) as plan:
        assert abs(plan.predicted_peak - plan.measured_peak) < 0.03 * plan.measured_peak


def test_training_under_a_plan_is_training() -> None:
    ends = []
    for share in (None, 0.4):
        model, _, step = prepared("images")
        plan: MemoryPlan | None = None
        if share is not None:
            with fit(model, step, "4GB") as loose:
                pass
            plan = fit(model, step, loose.floor + int(share * (loose.plain_peak - loose.floor)))
        torch.manual_seed(5)
        losses = [step() for _ in range(5)]
        ends.append([*losses, *model.state_dict().values(), torch.rand(3)])
        if plan is not None:
            plan.revert()
            assert "forward" not in model[1].__dict__
    assert all(a.equal(b) for a, b in zip(*ends, strict=True))


def test_what_cannot_be_is_refused_and_leaves_the_model_alone() -> None:
    model, _, step = prepared("images")
    with pytest.raises(torch.OutOfMemoryError, match="the lowest peak of tensors that was reached is"):
        fit(model, step, 1000)
    assert all("forward" not in module.__dict__ for module in model.modules())
    for budget, error in (
        ("0B", "at least 1"),
        ("-1GB", "negative|size"),
        ("much", "size|unit"),
        ("110%", "over 100%"),
    ):
        with pytest.raises(ValueError, match=error):
            fit(model, step, budget)
    with pytest.raises(ValueError, match="no module 'layer9'"):
        fit(model, step, "1GB", blocks=["layer9"])
    with pytest.raises(ValueError, match="lies in block '1'"):
        fit(model, step, "1GB", blocks=["1", "1.conv1"])
    with pytest.raises(ValueError, match="calls none of the 1 blocks"):
        fit(model, lambda: model[0](torch.randn(1, 3, 4, 4)).sum().backward(), "1GB", blocks=["1"])
    with pytest.raises(ZeroDivisionError):
        fit(model, lambda: 1 / 0, "1GB")


def test_a_step_that_does_not_repeat_is_said() -> None:
    model, _, step = prepared("tokens")
    drawn = iter(range(1000))

    def other() -> None:
        torch.manual_seed(next(drawn))
        step()

    with fit(model, step, "4GB") as loose:
        budget = (loose.plain_peak + loose.floor) // 2
    with fit(model, other, budget) as plan:
        assert plan.same_bits is None
        assert "differ from each other" in plan.table()


def test_a_block_that_is_called_twice_is_one() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 32))
    model = nn.ModuleDict({"shared": block, "other": nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(128, 32)

    def step() -> None:
        optimizer.zero_grad()
        y = model["shared"](model["other"](model["shared"](x)))
        y.square().mean().backward()
        optimizer.step()

    with fit(model, step, "4GB") as loose:
        budget = loose.floor + (loose.plain_peak - loose.floor) // 20
        assert loose.floor < loose.plain_peak
    with fit(model, step, budget) as plan:
        assert plan.measured_peak <= budget and plan.same_bits
        assert "shared" in plan.recomputed


@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_a_file_goes_below_what_running_again_reaches(kind: str) -> None:
    model, _, step = prepared(kind)
    before = copy.deepcopy(model.state_dict())
    with fit(model, step, "least", max_slowdown=100.0) as plain:
        assert plain.packed.get("file") is None
    with fit(model, step, "least", max_slowdown=100.0, formats=("lossless", "file")) as plan:
        assert plan.packed["file"] and set(plan.packed["file"]) <= set(plan.planned)
        assert plan.measured_peak < plain.measured_peak and plan.same_bits is True
        assert abs(plan.measured_peak - plan.predicted_peak) <= 0.01 * plan.plain_peak
        assert plan.table().count("written to a file\n") == len(plan.packed["file"])
        assert f"saved tensors of {len(plan.packed['file'])} of" in plan.summary()
        assert f"{sum(map(len, plan.packed.values()))} packed" in repr(plan)
    for name, value in model.state_dict().items():
        assert value.equal(before[name]), name


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_what_rounds_is_asked_for_and_says_by_how_much(format: Any) -> None:
    model, _, step = prepared("tokens")
    with fit(model, step, "4GB") as loose:
        pass
    names = [f"encoder.layers.{i}" for i in range(6)]
    packed = {}
    for share in (0.9, 0.6, 0.3):
        budget = loose.floor + int(share * (loose.plain_peak - loose.floor))
        with fit(model, step, budget, blocks=names, formats=[format]) as plan:
            packed = plan.packed
            if packed:
                assert set(packed) == {format} and plan.same_bits is False
                error = float(plan.table().partition("is rounded by ")[2].partition(" ")[0])
                assert 1e-5 < error < (0.005 if format == "bf16" else 0.05)
    assert "lossless" not in packed, "it was not asked for"


def test_what_rounds_is_said_where_bits_cannot_be_compared() -> None:
    model, x, y = of_tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = torch.Generator()

    def step() -> None:
        noise.seed()  # never twice the same
        optimizer.zero_grad()
        logits = model(x) + 0.01 * torch.randn(50, generator=noise)
        nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        optimizer.step()

    with fit(model, step, "4GB") as loose:
        budget = loose.floor + int(0.3 * (loose.plain_peak - loose.floor))
    with fit(model, step, budget, formats=["bf16"]) as plan:
        assert plan.same_bits is None
        assert ("is rounded by" in plan.table()) is bool(plan.packed)


def test_formats_that_there_are_not() -> None:
    model, _, step = prepared("experts")
    with pytest.raises(ValueError, match="formats has 'zip'; saved tensors are packed as 'lossless', 'bf16', 'int8'"):
        fit(model, step, "4GB", formats=["zip"])  # type: ignore[list-item]


def test_what_it_says() -> None:
    model, _, step = prepared("tokens")
    with fit(model, step, "4GB") as loose:
        budget = (loose.plain_peak + loose.floor) // 2
        curve = loose.curve()
    assert curve[0] == (curve[0][0], 0.0)
    peaks, seconds = zip(*curve, strict=True)
    assert list(peaks) == sorted(peaks, reverse=True) and list(seconds) == sorted(seconds)
    with fit(model, step, budget, blocks=[f"encoder.layers.{i}" for i in range(6)]) as plan:
        text = plan.table()
    assert all(f"encoder.layers.{i}" in text for i in range(6))
    assert text.count("run again\n") == len(plan.full) and text.count("selective\n") == len(plan.selective)
    assert text.count("packed\n") == sum(map(len, plan.packed.values()))
    assert plan.recomputed == plan.full + plan.selective and plan.planned != ()
    assert ox.base.format_size(plan.measured_peak) in text and "same bits" in text
    assert plan.seconds > 0 and plan.plain_seconds > 0
