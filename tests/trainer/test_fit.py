"""The epoch loop: resume to the bit, signals, early stopping, callbacks, report."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_device
from oxytorch.trainer import Callback, EarlyStopping, FitResult, Trainer
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

DEVICE = torch_device.chosen()


def dataset() -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(50, 12, generator=g), torch.randint(0, 5, (50,), generator=g)
    return TensorDataset(x.to(DEVICE), y.to(DEVICE))


def build(level: str = "advanced", **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 5)).to(
        DEVICE
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options.setdefault("step_tail", "off" if level == "basic" else "on")
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), level, calibrate=False, **options)


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [t.detach().clone() for t in trainer.model.state_dict().values()]


class StopAt(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        if trainer.batches == self.batch:
            trainer.stop("here")


@pytest.mark.parametrize("level", ["basic", "advanced"])
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("stop", [3, 7, 9])
def test_a_resumed_run_equals_the_whole_one(level: str, own_generator: bool, stop: int) -> None:
    options: dict[str, Any] = {
        "ema_decay": 0.9, "schedule": "cosine", "max_steps": 50, "accumulation_steps": 2, "clip_norm": 1.0
    }  # fmt: skip

    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(4) if own_generator else None
        return DataLoader(dataset(), batch_size=8, shuffle=True, generator=generator)

    whole = build(level, **options)
    torch.manual_seed(11)
    whole.fit(loader(), epochs=3)

    first = build(level, **options)
    torch.manual_seed(11)
    result = first.fit(loader(), epochs=3, callbacks=[StopAt(stop)])
    assert result.stop_reason == "here"
    state = copy.deepcopy(first.state_dict())
    second = build(level, **options)
    torch.manual_seed(99)
    second.load_state_dict(state)
    result = second.fit(loader(), epochs=3)
    assert result.stop_reason == "epochs"
    assert second.global_step == whole.global_step
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(second), strict=True))
    with whole.ema_weights(), second.ema_weights():
        assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(second), strict=True))


def test_state_survives_torch_save(tmp_path: Path) -> None:
    trainer = build(ema_decay=0.9)
    trainer.fit(DataLoader(dataset(), batch_size=10), epochs=1)
    torch.save(trainer.state_dict(), tmp_path / "state.pt")
    other = build(ema_decay=0.9)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    assert all(torch.equal(a, b) for a, b in zip(weights(trainer), weights(other), strict=True))
    with pytest.raises(ValueError, match="format"):
        other.load_state_dict({})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_and_restores_the_handlers(number: int) -> None:
    before = signal.getsignal(number)
    trainer = build()
    saved: list[int] = []
    trainer.checkpointer = lambda t: saved.append(t.global_step)

    def kill(t: Trainer, _loss: torch.Tensor) -> None:
        if t.batches == 3:
            os.kill(os.getpid(), number)

    loader = DataLoader(dataset(), batch_size=8)
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(loader, epochs=5, callbacks=[kill])
    else:
        assert trainer.fit(loader, epochs=5, callbacks=[kill]).stop_reason == "SIGTERM"
    assert signal.getsignal(number) is before
    assert trainer.global_step == trainer.batches == 3
    assert saved == [3]
    assert all(p.grad is None for p in trainer.model.parameters())
    trainer.fit(loader, epochs=1)
    assert trainer.epoch == 1
    assert trainer.global_step == 7


def test_an_exception_restores_the_handlers_too() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def fail(_trainer: Trainer, _loss: torch.Tensor) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        build().fit(DataLoader(dataset(), batch_size=8), callbacks=[fail])
    assert signal.getsignal(signal.SIGTERM) is before


def test_max_steps_epochs_and_callbacks() -> None:
    calls: list[str] = []

    class Log(Callback):
        def on_fit_start(self, trainer: Trainer) -> None:
            calls.append("start")

        def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
            assert not loss.requires_grad
            calls.append("step")

        def on_epoch(self, trainer: Trainer, metrics: dict[str, float]) -> None:
            calls.append(f"epoch {metrics['epoch']:g}")

        def on_fit_end(self, trainer: Trainer, result: FitResult) -> None:
            calls.append(result.stop_reason)

    trainer = build()
    loader = DataLoader(dataset(), batch_size=25)
    result = trainer.fit(loader, max_steps=3, callbacks=[Log()])
    assert calls == ["start", "step", "step", "epoch 0", "step", "max_steps"]
    assert (result.steps, len(result.history)) == (3, 1)
    assert build().fit(loader).steps == 2, "one epoch where nothing is said"
    with pytest.raises(ValueError, match="epochs"):
        trainer.fit(loader, epochs=0)
    with pytest.raises(ValueError, match="empty"):
        build().fit([], epochs=1)


def test_counters_say_how_far_into_which_epoch_the_run_is() -> None:
    trainer = build()
    loader = DataLoader(dataset(), batch_size=25)
    seen: list[tuple[int, int]] = []

    def where(one: Trainer, _loss: torch.Tensor) -> None:
        counters = one.state_dict()["counters"]
        seen.append((counters["epoch"], counters["batch_in_epoch"]))

    trainer.fit(loader, epochs=2, callbacks=[where])
    assert seen == [(0, 1), (0, 2), (1, 1), (1, 2)]
    counters = trainer.state_dict()["counters"]
    assert (counters["epoch"], counters["batch_in_epoch"]) == (2, 0)


def test_the_last_window_of_an_epoch_is_not_dropped() -> None:
    trainer = build(accumulation_steps=4)
    trainer.fit(DataLoader(dataset(), batch_size=8), epochs=2)
    assert trainer.global_step == 4


def test_early_stopping_and_plateau_go_by_the_validation() -> None:
    torch.manual_seed(0)
    model = nn.Linear(12, 5, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    trainer = Trainer(
        model, optimizer, nn.CrossEntropyLoss(), calibrate=False, scheduler=plateau, early_stopping_patience=3
    )
    metrics = iter([3.0, 2.0, 2.5, 2.4, 2.3, 1.0])
    result = trainer.fit(DataLoader(dataset(), batch_size=25), epochs=9, validate=lambda _t: next(metrics))
    assert result.stop_reason == "early_stopping"
    assert [m["validation"] for m in result.history] == [3.0, 2.0, 2.5, 2.4, 2.3]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1 / 8


@pytest.mark.parametrize("mode", ["min", "max"])
def test_early_stopping_brings_the_best_weights_back(mode: str) -> None:
    seen: list[list[torch.Tensor]] = []
    metrics = iter([3.0, 1.0, 2.0, 2.5, 9.0])
    sign = 1 if mode == "min" else -1

    def validate(trainer: Trainer) -> float:
        seen.append(weights(trainer))
        return sign * next(metrics)

    options = {"early_stopping_patience": 2, "early_stopping_mode": mode}
    for restore in (True, False):
        metrics = iter([3.0, 1.0, 2.0, 2.5, 9.0])
        seen.clear()
        trainer = build(early_stopping_restore_best=restore, **options)
        result = trainer.fit(DataLoader(dataset(), batch_size=25), epochs=9, validate=validate, progress=False)
        assert result.stop_reason == "early_stopping"
        assert len(seen) == 4
        kept = seen[1 if restore else 3]
        assert all(torch.equal(a, b) for a, b in zip(kept, weights(trainer), strict=True))


def test_early_stopping_goes_on_after_a_resume() -> None:
    def run(trainer: Trainer, metrics: list[float], epochs: int) -> FitResult:
        values = iter(metrics)
        loader = DataLoader(dataset(), batch_size=25)
        return trainer.fit(loader, epochs=epochs, validate=lambda _t: next(values), progress=False)

    options = {"early_stopping_patience": 3, "early_stopping_restore_best": True}
    first = build(**options)
    assert run(first, [1.0, 2.0], 2).stop_reason == "epochs"
    state = copy.deepcopy(first.state_dict())
    second = build(**options)
    second.load_state_dict(state)
    result = run(second, [2.0, 2.0, 2.0], 9)
    assert result.stop_reason == "early_stopping"
    assert len(result.history) == 2
    for kept, now in zip(state["early_stopping"]["kept"].values(), second.model.parameters(), strict=False):
        assert torch.equal(kept, now)
    again = run(second, [5.0] * 9, 20)
    assert len(again.history) == 4, "a new call of fit starts anew"


def test_early_stopping_alone() -> None:
    model = nn.BatchNorm1d(3, device=DEVICE)
    stopping = EarlyStopping(patience=2, min_delta=0.5, restore_best=True)
    assert not stopping.restore(model)
    over = []
    for metric in (3.0, 2.4, 2.0, float("nan")):
        with torch.no_grad():
            model.running_mean.fill_(metric)  # type: ignore[operator, union-attr]
        over.append(stopping.step(metric, model))
    assert over == [False, False, False, True]
    assert (stopping.best, stopping.best_evaluation, stopping.bad_evaluations, stopping.improved) == (2.4, 1, 2, False)
    assert stopping.restore(model)
    assert torch.equal(model.running_mean, torch.full((3,), 2.4, device=DEVICE))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="other tensors"):
        stopping.restore(nn.BatchNorm1d(4))
    other = EarlyStopping(patience=2, min_delta=0.5)
    other.load_state_dict(stopping.state_dict())
    assert other.best == 2.4
    for bad in ({"patience": 0}, {"min_delta": -1.0}, {"mode": "least"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            EarlyStopping(**bad)  # type: ignore[arg-type]


def test_evaluate_is_the_mean_loss_in_eval_mode() -> None:
    trainer = build()
    trainer.fit(DataLoader(dataset(), batch_size=10), epochs=1)
    loader = DataLoader(dataset(), batch_size=10)
    trainer.model.train()
    value = trainer.evaluate(loader)
    assert trainer.model.training
    trainer.model.eval()
    with torch.no_grad():
        losses = [float(nn.functional.cross_entropy(trainer.model(x), y)) for x, y in loader]
    assert value == pytest.approx(sum(losses) / len(losses))


def test_the_bar_reads_nothing_where_it_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    build().fit(DataLoader(dataset(), batch_size=25), epochs=1, progress=False)
    assert capsys.readouterr().err == ""
    build().fit(DataLoader(dataset(), batch_size=25), epochs=1, progress=True)
    assert "training" in (text := capsys.readouterr().err) or "loss" in text


def test_report(tmp_path: Path) -> None:
    trainer = build(clip_norm=1.0)
    trainer.fit(DataLoader(dataset(), batch_size=5), epochs=1)
    report = trainer.report()
    names = {line.name for line in report.settings}
    assert {"allocator", "threads", "flush_denormals", "precision", "channels_last", "attention", "step_tail"} <= names
    assert all(line.reason for line in report.settings)
    assert report["step_tail"].state == "on"
    assert report["step_tail"].reason.endswith("one native call. Groups and state stay shared with torch's object.")
    assert report.timings["step"] == pytest.approx(sum(v for k, v in report.timings.items() if k != "step"))
    assert report.counters["steps"] == 10
    text = str(report)
    assert "step_tail" in text
    assert "forward" in text
    report.to_json(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["level"] == "advanced"
    report.to_html(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "step_tail" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # a name, which nothing is loaded from


def test_unknown_optimizers_are_kept_and_said_so() -> None:
    model = nn.Linear(12, 5, device=DEVICE)
    optimizer = torch.optim.Rprop(model.parameters())
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), calibrate=False, step_tail="on")
    assert trainer.optimizer is optimizer
    line = trainer.report()["step_tail"]
    assert line.state == "refused"
    assert "Rprop" in line.reason


CLOSE = """
import torch
from oxytorch.trainer import Trainer


def denormal():
    return float((torch.full((4,), 1e-39) * 0.5)[0])


model = torch.nn.Linear(12, 5)
given = {"flush_denormals": "on", "calibrate": False}
trainer = Trainer(model, torch.optim.AdamW(model.parameters()), torch.nn.CrossEntropyLoss(), **given)
assert denormal() == 0.0
again = Trainer(model, torch.optim.AdamW(model.parameters()), torch.nn.CrossEntropyLoss(), **given)
assert again.report()["flush_denormals"].state == "on"
again.revert()
assert denormal() == 0.0, "the settings of the first trainer stay"
trainer.revert()
assert denormal() > 0.0
"""


def test_close_takes_the_process_settings_back() -> None:
    subprocess.run(
        [sys.executable, "-c", CLOSE], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


@pytest.mark.parametrize("in_batches", [False, True], ids=["sampler", "batch_sampler"])
def test_a_sampler_that_shuffles_by_epoch_is_told_each(in_batches: bool) -> None:
    data = [(torch.full((6,), float(i)), torch.tensor(0)) for i in range(24)]

    def loader() -> Any:
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=1, seed=5)  # type: ignore[arg-type,var-annotated]
        if in_batches:
            return DataLoader(data, batch_sampler=BatchSampler(sampler, 4, drop_last=False))  # type: ignore[arg-type]
        return DataLoader(data, batch_size=4, sampler=sampler)  # type: ignore[arg-type]

    by_hand, seen = loader(), []
    sampler = by_hand.batch_sampler.sampler
    wanted = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        wanted += [x[:, 0].tolist() for x, _ in by_hand]

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch[0][:, 0].tolist())
        return model(batch[0]).square().mean()  # type: ignore[no-any-return]

    model = nn.Linear(6, 2)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn, calibrate=False)
    trainer.fit(loader(), epochs=3, progress=False)
    assert seen == wanted
    assert wanted[:3] != wanted[3:6]
