"""Steps recorded and replayed: the same bits as eagerly, and a way back wherever that fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import oxytorch as ox
import pytest
import torch
import torch_device
from torch import Tensor, nn

from .recorder import Recorder

DEVICE = torch_device.chosen()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 2))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 8, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)]


def stepper(model: nn.Module, opt: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return {"loss": loss.detach()}

    return step


def train(make: Callable[[nn.Module], Any], data: Any, graphed: bool, change: Any = None, **options: Any) -> Any:
    model = net()
    opt = make(model)
    step: Any = stepper(model, opt)
    graph = ox.StepGraph(step, model, opt, recorder=Recorder, **options) if graphed else None
    losses = []
    for i, (x, y) in enumerate(data):
        if change is not None:
            change(i, opt)
        losses.append((graph or step)(x, y)["loss"].clone())
    return torch.stack(losses), list(model.parameters()), graph


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_thousand_replays_are_the_eager_steps_bit_for_bit(name: str) -> None:
    data = batches(1000)
    losses, params, _ = train(OPTIMIZERS[name], data, graphed=False)
    again, others, graph = train(OPTIMIZERS[name], data, graphed=True)
    assert graph.replays == 997 and graph.recordings == 1  # 3 to warm up, and one of the replays is the proof
    assert graph.replayed
    assert torch.equal(losses, again)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_a_learning_rate_set_on_the_host_is_recorded_anew_and_never_ignored() -> None:
    def drop(i: int, opt: Any) -> None:
        if i in (10, 20):
            opt.param_groups[0]["lr"] *= 0.1

    data = batches(30)
    losses, _, _ = train(OPTIMIZERS["sgd"], data, graphed=False, change=drop)
    again, _, graph = train(OPTIMIZERS["sgd"], data, graphed=True, change=drop)
    assert torch.equal(losses, again)
    assert graph.recordings == 3


def test_a_rate_that_changes_at_every_step_ends_the_graph_with_advice() -> None:
    def drop(i: int, opt: Any) -> None:
        opt.param_groups[0]["lr"] *= 0.99

    data = batches(20)
    losses, _, _ = train(OPTIMIZERS["sgd"], data, graphed=False, change=drop)
    again, _, graph = train(OPTIMIZERS["sgd"], data, graphed=True, change=drop, max_recordings=4)
    assert torch.equal(losses, again)
    assert graph.recordings == 4 and not graph.replayed
    assert "changed 4 times; keep the learning rate on the device" in graph.reason


def test_a_step_that_reads_the_device_is_stepped_eagerly() -> None:
    model = net()
    opt = OPTIMIZERS["sgd"](model)
    plain = stepper(model, opt)

    def step(x: Tensor, y: Tensor) -> float | Tensor:
        loss = plain(x, y)["loss"]
        return loss if loss.item() < 0 else loss * 2

    graph = ox.StepGraph(step, model, opt, warmup=1, recorder=Recorder)
    for x, y in batches(5):
        graph(x, y)
    assert not graph.replayed and graph.replays == 0
    assert "read by the host while recording" in graph.reason


def test_a_step_whose_way_depends_on_the_host_is_found_out_by_the_proof() -> None:
    model = net()
    opt = OPTIMIZERS["sgd"](model)
    plain = stepper(model, opt)
    calls = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return plain(x, y)["loss"] * calls

    graph = ox.StepGraph(step, model, opt, warmup=1, recorder=Recorder)
    results = [float(graph(x, y)) for x, y in batches(4)]
    assert not graph.replayed
    assert "output 0 of the replay differs" in graph.reason
    assert len(results) == 4


def test_state_that_the_recording_forgets_is_found_out() -> None:
    model = net()
    opt = OPTIMIZERS["sgd"](model)
    plain = stepper(model, opt)
    mean = torch.zeros(())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = plain(x, y)["loss"]
        mean.numpy()[...] += float(x.sum() * 0) + 1  # no operator of torch's
        return loss

    graph = ox.StepGraph(step, model, opt, mean, warmup=1, verify=True, recorder=Quiet)
    for x, y in batches(3):
        graph(x, y)
    assert not graph.replayed and "of the state differs" in graph.reason
    assert float(mean) == 3 + 1  # each step once, and the recording's own


class Quiet(Recorder):
    """A recorder that does not notice reads by the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_random_numbers_are_those_of_the_eager_step() -> None:
    def run(graphed: bool) -> Tensor:
        model = nn.Sequential(net(), nn.Dropout(0.5))
        opt = OPTIMIZERS["sgd"](model)
        step: Any = stepper(model, opt)
        graph = ox.StepGraph(step, model, opt, recorder=Recorder) if graphed else None
        torch.manual_seed(5)
        return torch.stack([(graph or step)(x, y)["loss"].clone() for x, y in batches(20)])

    assert torch.equal(run(True), run(False))


def test_inputs_of_another_shape_are_stepped_eagerly_in_between() -> None:
    data = batches(8)
    data[5] = (data[5][0][:2], data[5][1][:2])
    losses, _, _ = train(OPTIMIZERS["sgd"], data, graphed=False)
    model = net()
    opt = OPTIMIZERS["sgd"](model)
    graph = ox.StepGraph(stepper(model, opt), model, opt, warmup=1, recorder=Recorder)
    replayed, found = [], []
    for x, y in data:
        found.append(graph(x, y)["loss"].clone())
        replayed.append(graph.replayed)
    assert replayed == [False, False, True, True, True, False, True, True]
    assert torch.equal(torch.stack(found), losses)


def test_an_error_of_the_step_is_the_users() -> None:
    model = net()
    opt = OPTIMIZERS["sgd"](model)
    graph = ox.StepGraph(stepper(model, opt), model, opt, warmup=1, recorder=Recorder)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        graph(torch.ones(4, 9), torch.ones(4, 2))


def test_without_graphs_steps_run_eagerly_and_say_so() -> None:
    model = net()
    opt = ox.optim.AdamW(model.parameters(), lr=1e-2, clip_norm=1.0, ema_decay=0.9)
    graph = ox.StepGraph(stepper(model, opt), model, opt, warmup=1)
    losses = [float(graph(x, y)["loss"]) for x, y in batches(4)]
    assert len(losses) == 4 and graph.recordings == 0
    assert graph.reason.startswith("the step could not be recorded: the CPU has no graphs")


@pytest.mark.skipif(DEVICE.type == "cpu", reason="on the CPU verdict and coefficient are numbers of the host")
@pytest.mark.parametrize("composite", [True, False])
def test_tail_with_scaler_and_a_changing_rate_on_a_device(composite: bool) -> None:
    def run(graphed: bool) -> tuple[Tensor, list[Tensor], list[float], Any]:
        model = net().to(DEVICE)
        rate = torch.tensor(1e-2, device=DEVICE)
        opt = ox.optim.AdamW(model.parameters(), lr=rate, clip_norm=0.5, ema_decay=0.9, force_composite=composite)
        scaler = ox.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=20)

        def step(x: Tensor, y: Tensor) -> Tensor:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            return loss.detach()

        recorder = None if DEVICE.type == "cuda" else Recorder
        graph = ox.StepGraph(step, model, opt, scaler, recorder=recorder) if graphed else None
        losses, scales = [], []
        for i, (x, y) in enumerate(batches(120)):
            rate.fill_(1e-2 / (1 + i))
            bad = x * float("inf") if i in (30, 61) else x
            losses.append((graph or step)(bad.to(DEVICE), y.to(DEVICE)).cpu())
            scales.append(float(scaler._scale))
        return torch.stack(losses), [p.detach().cpu() for p in model.parameters()], scales, graph

    losses, params, scales, _ = run(False)
    again, others, scales_again, graph = run(True)
    if DEVICE.type == "sim" and not composite:
        # Its kernels are no operators: this recorder neither plays them again nor takes back what they wrote.
        assert graph.replays == 1 and "of the state differs" in graph.reason
        return
    assert graph.replays == 117 and graph.recordings == 1, graph.reason
    assert scales == scales_again and any(b < a for a, b in itertools.pairwise(scales))
    assert torch.equal(losses.nan_to_num(), again.nan_to_num())
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    assert all(p.isfinite().all() for p in params)


def test_bad_input() -> None:
    model = net()
    with pytest.raises(ValueError, match="warmup is 0"):
        ox.StepGraph(lambda x: x, model, warmup=0)
    with pytest.raises(ValueError, match="max_recordings is 0"):
        ox.StepGraph(lambda x: x, model, max_recordings=0)
    with pytest.raises(TypeError, match="state of a StepGraph is a str"):
        ox.StepGraph(lambda x: x, "model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without inputs"):
        ox.StepGraph(lambda: torch.ones(()), model)()
