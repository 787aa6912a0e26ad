"""One training step: same weights as a plain loop, no host read, no trace of trials or of failure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch_device
from oxytorch import optim
from oxytorch.trainer import Trainer
from torch import nn

DEVICE = torch_device.chosen()

EXACT: dict[str, Any] = {"precision": "fp32", "channels_last": "off", "attention": "default"}
# What is named alone, and of the optimizer all that the step tail does.
TAIL: dict[str, Any] = {**EXACT, "step_tail": "on", "calibrate": False}


def named(level: str) -> dict[str, Any]:
    """No trial; the step tail but at basic."""
    return {**EXACT, "calibrate": False} if level == "basic" else TAIL


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    ).to(DEVICE)  # fmt: skip


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 5)).to(DEVICE)


def batches(kind: str, count: int, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(7)
    shape = (size, 3, 12, 12) if kind == "cnn" else (size, 12)
    drawn = [(torch.randn(shape, generator=g), torch.randint(0, 5, (size,), generator=g)) for _ in range(count)]
    return [(x.to(DEVICE), y.to(DEVICE)) for x, y in drawn]


def make(kind: str) -> nn.Module:
    return cnn() if kind == "cnn" else mlp()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for t in model.state_dict().values()]


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any], clip: float | None = None
) -> list[float]:
    losses = []
    criterion = nn.CrossEntropyLoss()
    for x, y in data:
        loss = criterion(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kind", ["cnn", "mlp"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_basic_keeps_every_bit_of_the_plain_loop(kind: str, name: str) -> None:
    data = batches(kind, 20)
    reference, model = make(kind), make(kind)
    torch.manual_seed(5)
    expected = plain(reference, getattr(torch.optim, name)(reference.parameters(), lr=1e-2), data, clip=1.0)
    torch.manual_seed(5)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), "basic", clip_norm=1.0)
    losses = [float(trainer.step(batch)) for batch in data]
    assert trainer.optimizer is optimizer
    assert losses == expected
    for a, b in zip(weights(reference), weights(model), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["cnn", "mlp"])
def test_trials_leave_no_trace(kind: str) -> None:
    """A run that decided by trials, and one that was told: the same bits."""
    data = batches(kind, 20)
    runs = []
    decided: dict[str, Any] = {}
    for calibrate in (True, False):
        model = make(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), calibrate=calibrate)
        if not calibrate:
            state = trainer.state_dict()
            trainer.load_state_dict({**state, "decisions": decided})
        torch.manual_seed(5)
        for batch in data:
            trainer.step(batch)
        decided = trainer.state_dict()["decisions"]
        runs.append(weights(model))
        trainer.revert()
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_advanced_stays_near_the_plain_loop() -> None:
    data = batches("mlp", 20)
    reference, model = make("mlp"), make("mlp")
    torch.manual_seed(5)
    plain(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), data, clip=1.0)
    torch.manual_seed(5)
    trainer = Trainer(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), nn.CrossEntropyLoss(), clip_norm=1.0, **TAIL
    )
    for batch in data:
        trainer.step(batch)
    assert type(trainer.optimizer) is optim.AdamW
    for a, b in zip(weights(reference), weights(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", ["basic", "advanced"])
def test_accumulation_divides_by_the_batches_there_were(level: str) -> None:
    data = batches("mlp", 7, size=6)
    reference, model = make("mlp"), make("mlp")
    for net in (reference, model):
        net[2].p = 0.0
    big = [(torch.cat([x for x, _ in part]), torch.cat([y for _, y in part])) for part in (data[:4], data[4:])]
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.5), big)
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.5), nn.CrossEntropyLoss(), level, accumulation_steps=4,
        **named(level),
    )  # fmt: skip
    for batch in data:
        trainer.step(batch)
    assert trainer.global_step == 1
    assert trainer.flush()
    assert not trainer.flush()
    assert trainer.global_step == 2
    for a, b in zip(weights(reference), weights(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def accumulate(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any], window: int, half: bool
) -> torch.amp.GradScaler:
    """The loop one writes by hand: each loss divided by the batches of its window, one step and update a window."""
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=half)
    criterion = nn.CrossEntropyLoss()
    for first in range(0, len(data), window):
        part = data[first : first + window]
        for x, y in part:
            with torch.autocast(DEVICE.type, torch.float16, enabled=half):
                loss = criterion(model(x), y)
            scaler.scale(loss / len(part)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler


@pytest.mark.parametrize(
    ("level", "half"), [("basic", False), ("basic", True), ("advanced", False), ("advanced", True)]
)
@pytest.mark.parametrize("count", [8, 10, 11, 3])
def test_accumulation_equals_the_loop_written_by_hand(level: str, half: bool, count: int) -> None:
    data = batches("mlp", count)
    data[-1] = (data[-1][0][:3], data[-1][1][:3])  # a batch counts as one, whatever its size
    nets = [make("mlp"), make("mlp")]
    for net in nets:
        net[2].p = 0.0
    scaler = accumulate(nets[0], torch.optim.SGD(nets[0].parameters(), lr=0.5, momentum=0.9, fused=half), data, 4, half)
    optimizer = torch.optim.SGD(nets[1].parameters(), lr=0.5, momentum=0.9, fused=half)
    settings = {**named(level), "precision": "fp16" if half else "fp32"}
    trainer = Trainer(nets[1], optimizer, nn.CrossEntropyLoss(), level, accumulation_steps=4, **settings)
    trainer.fit(data, epochs=1, progress=False)
    assert trainer.global_step == -(-count // 4)
    if half:
        assert trainer.scaler is not None
        assert trainer.scaler.state_dict() == scaler.state_dict()
        assert trainer.scaler.state_dict()["_growth_tracker"] == trainer.global_step
    for a, b in zip(weights(nets[0]), weights(nets[1]), strict=True):
        if level == "basic" and count in (8, 10):
            assert torch.equal(a, b)  # divisors that are powers of two round nowhere
        elif half and count in (11, 3):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)  # a third is rounded to float16 in each backward
        else:
            torch.testing.assert_close(a, b, rtol=2e-6, atol=3e-7)


@pytest.mark.parametrize(
    "options", [{"clip_norm": 0.1, "norm_in_backward": True}, {"step_in_backward": True, "nonfinite": "propagate"}]
)
def test_accumulation_with_an_optimizer_that_works_in_backward(options: dict[str, Any]) -> None:
    ends = []
    for working in (True, False):
        chosen = {key: value for key, value in options.items() if working or not key.endswith("_in_backward")}
        model = make("mlp")
        model[2].p = 0.0
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, **chosen)
        trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), accumulation_steps=4, calibrate=False, **EXACT)
        trainer.fit(batches("mlp", 11), epochs=1, progress=False)
        assert trainer.global_step == 3
        assert float(optimizer.state[next(model.parameters())]["step"]) == 3
        ends.append(weights(model))
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_clipping_of_an_optimizer_that_steps_in_backward_is_refused() -> None:
    model = make("mlp")
    optimizer = optim.AdamW(model.parameters(), step_in_backward=True, nonfinite="propagate")
    with pytest.raises(NotImplementedError, match=r"clip_norm=0\.5 needs all gradients"):
        Trainer(model, optimizer, nn.CrossEntropyLoss(), clip_norm=0.5)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_no_host_read_on_the_step_path(precision: str) -> None:
    data = batches("mlp", 8)
    model = make("mlp")
    trainer = Trainer(
        model, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss(), clip_norm=1.0, ema_decay=0.9,
        precision=precision, max_steps=100, schedule="cosine", accumulation_steps=2, step_tail="on", calibrate=False,
    )  # fmt: skip
    for batch in data[:3]:
        trainer.step(batch)
    trainer.flush()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for batch in data[3:]:
            trainer.step(batch)
        trainer.flush()
    assert (trainer.scaler is not None) == (precision == "fp16")
    names = {event.key for event in profile.key_averages()}
    assert "aten::linear" in names
    assert "aten::_local_scalar_dense" not in names


def test_fp16_skips_what_overflows_and_backs_off() -> None:
    model = make("mlp")
    trainer = Trainer(
        model, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss(), **{**TAIL, "precision": "fp16"}
    )
    (x, y), (x2, y2) = batches("mlp", 2)
    trainer.step((x, y))
    assert trainer.scaler is not None
    scale, before = trainer.scaler.get_scale(), weights(model)
    trainer.step((x2 * 1e30, y2))
    assert trainer.scaler.get_scale() == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_a_scheduler_of_the_replaced_optimizer_works_on(recwarn: pytest.WarningsRecorder) -> None:
    model = make("mlp")
    old = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(old, 2, 0.5)
    trainer = Trainer(model, old, nn.CrossEntropyLoss(), calibrate=False, step_tail="on")
    rates = []
    for batch in batches("mlp", 5):
        trainer.step(batch)
        scheduler.step()
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert trainer.optimizer is not old
    assert rates == [0.1, 0.05, 0.05, 0.025, 0.025]
    state = trainer.state_dict()
    trainer.load_state_dict(copy.deepcopy(state))
    for _ in range(1):
        trainer.step(batches("mlp", 1)[0])
        scheduler.step()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0125
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_state_of_the_replaced_optimizer_is_carried_over() -> None:
    data = batches("mlp", 10)
    reference, model = make("mlp"), make("mlp")
    for net in (reference, model):
        net[2].p = 0.0
    plain(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), data)
    old = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain(model, old, data[:5])
    trainer = Trainer(model, old, nn.CrossEntropyLoss(), **TAIL)
    for batch in data[5:]:
        trainer.step(batch)
    for a, b in zip(weights(reference), weights(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert old.state_dict()["state"][0]["step"] == 10


def test_ultra_keeps_the_optimizer_state_in_8_bits_and_says_so() -> None:
    model = nn.Linear(64, 8, device=DEVICE)
    trainer = Trainer(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), "ultra", progress="off", **EXACT)
    trainer.step((torch.randn(4, 64, device=DEVICE), torch.randn(4, 8, device=DEVICE)))
    state = trainer.optimizer.state[model.weight]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.int8, torch.uint8)
    assert trainer.report()["optimizer_state"].state == "on"
    own = Trainer(model, optim.AdamW(model.parameters()), nn.MSELoss(), "ultra", progress="off", **EXACT)
    assert own.report()["optimizer_state"].state == "refused"


@pytest.mark.parametrize("schedule", ["cosine", "one_cycle"])
def test_schedules_from_the_configuration_are_torchs(schedule: str) -> None:
    model, other = make("mlp"), make("mlp")
    trainer = Trainer(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), calibrate=False,
        schedule=schedule, max_steps=10,
    )  # fmt: skip
    reference = torch.optim.AdamW(other.parameters(), lr=0.1)
    schedules = torch.optim.lr_scheduler
    expected: Any = (
        schedules.CosineAnnealingLR(reference, 10)
        if schedule == "cosine"
        else schedules.OneCycleLR(reference, max_lr=0.1, total_steps=10)
    )
    for batch in batches("mlp", 9):
        assert trainer.optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        trainer.step(batch)
        reference.step()
        expected.step()
    assert trainer.optimizer.param_groups[0]["betas"] == reference.param_groups[0]["betas"]
    with pytest.raises(ValueError, match="max_steps"):
        Trainer(model, torch.optim.AdamW(model.parameters()), schedule=schedule)


@pytest.mark.parametrize("level", ["basic", "advanced"])
def test_ema_is_the_running_average(level: str) -> None:
    model = make("mlp")
    trainer = Trainer(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), nn.CrossEntropyLoss(), level, ema_decay=0.9,
        **named(level),
    )  # fmt: skip
    average = [p.detach().clone() for p in model.parameters()]
    for batch in batches("mlp", 6):
        trainer.step(batch)
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
    own = weights(model)
    with trainer.ema_weights():
        for a, b in zip(average, model.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(own, weights(model), strict=True))


def test_a_failing_loss_leaves_no_half_step() -> None:
    model = make("mlp")
    data = batches("mlp", 4)
    fail = False

    def loss_fn(net: nn.Module, batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
        if fail:
            raise ZeroDivisionError("the user's own")
        return loss

    trainer = Trainer(model, torch.optim.AdamW(model.parameters()), loss_fn, accumulation_steps=2, **EXACT)
    trainer.step(data[0])
    before = weights(model)
    fail = True
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        trainer.step(data[1])
    assert all(p.grad is None for p in model.parameters())
    assert (trainer.global_step, trainer.batches) == (0, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    fail = False
    trainer.step(data[2])
    assert trainer.global_step == 0, "the window starts anew"
    trainer.step(data[3])
    assert trainer.global_step == 1


def test_a_loss_that_fails_while_settings_are_measured_is_raised_by_the_step() -> None:
    model = make("mlp")

    def loss_fn(net: nn.Module, batch: Any) -> torch.Tensor:
        raise KeyError("no such field")

    trainer = Trainer(model, torch.optim.AdamW(model.parameters()), loss_fn)
    with pytest.raises(KeyError, match="no such field"):
        trainer.step(batches("mlp", 1)[0])
    assert not torch.is_autocast_enabled(DEVICE.type)
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_replaced_parameter_is_named() -> None:
    model = make("mlp")
    trainer = Trainer(model, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss(), calibrate=False)
    batch = batches("mlp", 1)[0]
    trainer.step(batch)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"'0\.weight'"):
        trainer.step(batch)


def test_a_replaced_module_is_named() -> None:
    model = make("mlp")
    trainer = Trainer(model, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss(), calibrate=False)
    model[3] = nn.Linear(32, 5, device=DEVICE)
    with pytest.raises(RuntimeError, match="module '3'"):
        trainer.step(batches("mlp", 1)[0])


def test_closures() -> None:
    data = batches("mlp", 3)
    reference, model = make("mlp"), make("mlp")
    torch.manual_seed(5)
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1), data)
    torch.manual_seed(5)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), config="basic")
    for x, y in data:
        trainer.step(lambda x=x, y=y: nn.functional.cross_entropy(model(x), y))
    assert all(torch.equal(a, b) for a, b in zip(weights(reference), weights(model), strict=True))
    with pytest.raises(TypeError, match="loss_fn"):
        trainer.step(data[0])


@pytest.mark.parametrize(
    ("loss_fn", "batch", "error", "text"),
    [
        (nn.CrossEntropyLoss(reduction="none"), batches("mlp", 1)[0], ValueError, "shape"),
        (lambda _m, _b: 3.0, batches("mlp", 1)[0], TypeError, "float"),
        (nn.CrossEntropyLoss(), {"x": 1}, TypeError, "dict"),
    ],
)
def test_bad_losses_and_batches(loss_fn: Any, batch: Any, error: type[Exception], text: str) -> None:
    model = make("mlp")
    trainer = Trainer(model, torch.optim.AdamW(model.parameters()), loss_fn, calibrate=False)
    with pytest.raises(error, match=text):
        trainer.step(batch)


def test_bad_arguments() -> None:
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match="model"):
        Trainer(3, optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer"):
        Trainer(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parameter of the model"):
        Trainer(model, torch.optim.AdamW(make("mlp").parameters()))
    with pytest.raises(ValueError, match="clip_nrom"):
        Trainer(model, optimizer, clip_nrom=1.0)
    with pytest.raises(TypeError, match="config"):
        Trainer(model, optimizer, config=3)


def test_attention_takes_the_math_path_on_request_only() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.proj(x).view(2, 10, 3, 2, 8).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    x = torch.randn(2, 10, 16, device=DEVICE)
    for path, flash in (("math", False), ("default", True)):
        model = Net().to(DEVICE)
        trainer = Trainer(
            model, torch.optim.AdamW(model.parameters()), lambda m, b: m(b).square().mean(), attention=path,
            precision="fp32", calibrate=False,
        )  # fmt: skip
        trainer.step(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            trainer.step(x)
        names = {event.key for event in profile.key_averages()}
        fused = any(kind in name for name in names for kind in ("flash_attention", "efficient_attention"))
        assert fused == (flash and DEVICE.type in ("cpu", "cuda", "hpu"))  # others have the math path alone
    assert torch.backends.cuda.flash_sdp_enabled()


def test_channels_last_keeps_the_parameters_and_their_optimizer() -> None:
    model = make("cnn")
    old = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = batches("cnn", 6)
    plain(model, old, data[:2])
    params = list(model.parameters())
    trainer = Trainer(model, old, nn.CrossEntropyLoss(), precision="fp32", channels_last="on")
    for batch in data[2:]:
        trainer.step(batch)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    weight = model[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert trainer.optimizer.state[weight]["exp_avg"].stride() == weight.stride()
    assert trainer.optimizer.state[weight]["step"] == 6
    assert trainer.report()["channels_last"].state == "on"
