"""The setting `gradient_checkpointing`: a trainer's step, a plan's and the user's own stay within their budget."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import deep_model
import oxytorch as ox
import pytest
import torch
import torch_device
from oxytorch.memory import Meter
from oxytorch.memory.fit import blocks_of
from oxytorch.tune import Run
from oxytorch.tune.checkpointing import Checkpointing
from planted import only
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = torch_device.chosen()
CRITERION = nn.CrossEntropyLoss()
KEY = "gradient_checkpointing"


def deep() -> deep_model.Deep:
    return deep_model.Deep().to(DEVICE)


def batch() -> tuple[Tensor, Tensor]:
    inputs, targets = deep_model.batch()
    return inputs.to(DEVICE), targets.to(DEVICE)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def peak(step: Any) -> int:
    """The most that a step takes beyond what was there."""
    step()
    with Meter(device=DEVICE) as meter:
        step()
    return meter.peak_bytes


def held(model: nn.Module) -> int:
    """Parameters, and AdamW's two averages of them; buffers."""
    return 3 * sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())


@contextmanager
def trainer(**settings: Any) -> Iterator[ox.Trainer]:
    model = deep()
    named = {"calibrate": False, "step_tail": "off", **settings}
    made = ox.Trainer(model, adamw(model), CRITERION, "basic", **named)
    try:
        yield made
    finally:
        made.revert()


def line_of(report: ox.report.TrainingReport) -> Any:
    (found,) = (line for line in report.settings if line.name == KEY)
    return found


def limit_above(more: int) -> int:
    """Return a limit that leaves so many bytes; what earlier tests have left free does not count."""
    ox.memory.MemoryManager().clean()
    return ox.memory.resident_bytes() + more


def plain_peak() -> int:
    with trainer() as one:
        return peak(lambda: one.step(batch()))


def budget() -> int:
    """A budget that half of the activations fit in."""
    model = deep()
    return held(model) + plain_peak() // 2


@pytest.mark.parametrize("options", [{}, {"calibrate": True}, {"step_tail": "on", "level": "advanced"}])
def test_a_trainer_stays_within_its_budget(options: dict[str, Any]) -> None:
    most, within = plain_peak() // 2 + 4096, budget()  # and a batch of its own
    with trainer(**{KEY: within}, **options) as one, trainer(**options) as other:
        torch.manual_seed(5)
        assert peak(lambda: one.step(batch())) <= most
        line = line_of(one.report())
        assert line.state == "on" and " blocks are " in line.reason
        assert "times as long" in line.cost
        torch.manual_seed(5)
        peak(lambda: other.step(batch()))
        if not options:
            assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
        assert any("forward" in vars(block) for block in one.model.blocks)
        one.revert()
        assert not any("forward" in vars(block) for block in one.model.blocks)


def test_what_is_garbage_already_makes_no_step_smaller() -> None:
    def collect(*_: Any) -> None:
        gc.collect()

    def fitted(garbage: bool) -> int:
        gc.collect()
        gc.disable()
        try:
            if garbage:
                cycle: list[Any] = [torch.ones(1 << 21, device=DEVICE)]
                cycle.append(cycle)
                del cycle
            with trainer(**{KEY: budget()}) as one:
                first = one.model.blocks[0].register_forward_pre_hook(collect)
                one.step(batch())
                first.remove()
                return int(one._decisions.asked.host[-1].plan.plain_peak)
        finally:
            gc.enable()

    assert fitted(garbage=True) == fitted(garbage=False)


def test_gradients_of_earlier_batches_count() -> None:
    with trainer(**{KEY: budget()}) as one:
        one.step(batch())
        alone = one._decisions.asked.host[-1].plan.plain_peak
    with trainer(**{KEY: budget()}, accumulation_steps=3) as one:
        one.step(batch())
        gradients = sum(p.nbytes for p in one.model.parameters())
        assert one._decisions.asked.host[-1].plan.plain_peak > alone + gradients // 2
        for _ in range(2):
            one.step(batch())
        with Meter(device=DEVICE) as meter:
            for _ in range(3):
                one.step(batch())
        assert meter.peak_bytes <= plain_peak() // 2 + 8192
        assert one.global_step == 2


def test_a_closure_cannot_be_planned() -> None:
    with trainer(**{KEY: "1GiB"}) as one:
        one.step(lambda: CRITERION(one.model(batch()[0]), batch()[1]))
        assert line_of(one.report()).state == "refused"


def test_a_continued_run_is_planned_too() -> None:
    with trainer() as one:
        one.step(batch())
        state = copy.deepcopy(one.state_dict())
    with trainer(**{KEY: budget()}) as one:
        one.load_state_dict(state)
        one.step(batch())
        assert line_of(one.report()).state == "on" and one.global_step == 2


def test_the_page_of_a_report_shows_what_less_memory_costs() -> None:
    with trainer() as one:
        one.step(batch())
        assert not one.report().pages and "What less memory costs" not in one.report().to_html()
    with trainer(**{KEY: budget()}) as one:
        one.step(batch())
        report = one.report()
        assert "What less memory costs" in report.to_html() and "pages" not in report.to_dict()


@pytest.mark.cpu_only("a limit of the process is of the host's memory")
def test_auto_is_what_the_limit_leaves() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 4096), nn.GELU(), nn.Linear(4096, 8)) for _ in range(8)
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    model = Large()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(1024, 8)  # 32 MiB a block
    limit = limit_above(200 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        short = ox.Trainer(model, optimizer, nn.MSELoss(), "basic", calibrate=False, memory_limit=limit)
        try:
            short.step((x, x))
        finally:
            short.revert()
    optimizer.zero_grad()
    one = ox.Trainer(
        model, optimizer, nn.MSELoss(), "basic", calibrate=False, memory_limit=limit, gradient_checkpointing="auto"
    )
    try:
        for _ in range(3):
            one.step((x, x))
        assert " blocks are " in line_of(one.report()).reason
    finally:
        one.revert()


def large_batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs, targets = torch.randn(rows, 32, generator=generator), torch.randint(5, (rows,), generator=generator)
    return inputs.to(DEVICE), targets.to(DEVICE)


@contextmanager
def short_of_memory(more: int) -> Iterator[dict[str, int]]:
    """Within, steps may take so many bytes more than is taken now; the settings of a trainer that bring it about."""
    if DEVICE.type == "cpu":
        yield {"memory_limit": limit_above(more)}
        return
    limit = torch.ops.oxytorch_device.set_memory_limit
    limit(torch.accelerator.memory_allocated(DEVICE) + more)
    try:
        yield {}
    finally:
        limit(0)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a card's memory is what it is")
def test_a_step_that_runs_out_of_memory_is_taken_again() -> None:
    """A batch 32 times as large comes after some that fit: the step ends as if there had been memory."""
    # It takes twice what is left, which what the rest of the process gives back meanwhile does not make up for.
    small, large = large_batch(128), large_batch(4096)
    ends = []
    for limited in (False, True):
        short = short_of_memory(112 << 20) if limited else nullcontext({})
        with short as settings, trainer(**{KEY: "auto"}, **settings) as one:
            torch.manual_seed(5)
            resident = [ox.memory.resident_bytes()]
            for each in (small, small, large, small):
                one.step(each)
                resident.append(ox.memory.resident_bytes())
            assert one.global_step == one.batches == 4
            line = line_of(one.report())
            ran_out = "step 3 ran out of memory and was fitted anew: " in line.reason
            assert ran_out == limited, (line.reason, settings, resident)
            ends.append([*one.model.parameters(), *one.model.buffers(), torch.rand(3, device=DEVICE)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class RunsOut:
    """A loss that raises in steps on `batch`, not on the copy that they are fitted by, where more than `most` lives."""

    def __init__(self, rows: int, most: Callable[[list[int]], float]) -> None:
        self.batch = large_batch(rows)
        self.most = most
        self.meter = Meter(device=DEVICE)
        self.lives: list[int] = []

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = CRITERION(model(batch[0]), batch[1])
        if batch[0].data_ptr() == self.batch[0].data_ptr():
            self.lives.append(self.meter.live_bytes)
            if self.lives[-1] > self.most(self.lives):
                raise torch.OutOfMemoryError("the rest of the process takes more than before")
        return loss


def trainer_of(model: nn.Module, criterion: Any) -> ox.Trainer:
    settings: dict[str, Any] = {"calibrate": False, "step_tail": "off", KEY: "auto"}
    return ox.Trainer(model, adamw(model), criterion, "basic", **settings)


def test_a_plan_that_is_not_enough_is_followed_by_tighter_ones() -> None:
    """What the rest of the process takes grows between a fit and the step: here by saying so in the step itself."""
    runs_out = RunsOut(512, lambda lives: 0.75 * lives[0])
    ends = []
    for criterion in (CRITERION, runs_out):
        model = deep()
        with runs_out.meter:
            one = trainer_of(model, criterion)
            torch.manual_seed(5)
            one.step(runs_out.batch)
        assert one.global_step == 1
        ends.append([*model.parameters(), *model.buffers(), torch.rand(3, device=DEVICE)])
        one.revert()
    lives = runs_out.lives
    assert len(lives) > 2 and lives == sorted(lives, reverse=True)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_step_that_no_plan_helps_ends_with_an_error_and_leaves_no_trace() -> None:
    runs_out = RunsOut(256, lambda _: 0)
    model = deep()
    with runs_out.meter:
        one = trainer_of(model, runs_out)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(torch.OutOfMemoryError, match=r"no choice of actions|the rest of the process"):
            one.step(runs_out.batch)
    assert 2 < len(runs_out.lives) <= 6
    assert one.global_step == 0 and all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    one.revert()
    gc.collect()  # what the error held would go while the next test measures


def test_what_cannot_be_taken_again_is_not() -> None:
    model = deep()

    class Failing(torch.optim.AdamW):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise torch.OutOfMemoryError("in the update")
            return super().step(closure)

    optimizer = Failing(model.parameters())
    one = ox.Trainer(
        model, optimizer, CRITERION, "basic", calibrate=False, step_tail="off", gradient_checkpointing="1GiB"
    )
    one.step(batch())
    optimizer.fails = True
    with pytest.raises(torch.OutOfMemoryError, match="in the update"):
        one.step(batch())
    assert one.global_step == 1
    one.revert()


def test_auto_of_what_fits_runs_nothing_again() -> None:
    with trainer(**{KEY: "auto"}) as one:
        one.step(batch())
        line = line_of(one.report())
        assert line.state == "on" and line.reason.endswith("as it is.")
    model = nn.Linear(32, 5).to(DEVICE)
    one = ox.Trainer(model, adamw(model), CRITERION, "basic", calibrate=False, gradient_checkpointing=True)
    one.step(batch())
    assert line_of(one.report()).state == "refused"
    one.revert()


def test_the_log_names_what_was_asked_for_and_is_left_out_and_nothing_else() -> None:
    said: list[str] = []
    ox.base.set_log_sink(lambda _level, text: said.append(text))
    try:
        for model in (deep(), nn.Linear(32, 5).to(DEVICE)):
            one = ox.Trainer(model, adamw(model), CRITERION, "basic", calibrate=False, gradient_checkpointing=True)
            one.step(batch())
            is_on = line_of(one.report()).state == "on"
            assert is_on is isinstance(model, deep_model.Deep)
            left_out = [text for text in said if f"{KEY} was asked for and is left out" in text]
            assert len(left_out) == (not is_on)
            one.revert()
    finally:
        ox.base.set_log_sink(None)


def test_what_no_choice_keeps_is_refused_and_nothing_is_lost() -> None:
    with trainer(**{KEY: held(deep()) + 4096}) as one:
        before = [p.detach().clone() for p in one.model.parameters()]
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="lowest peak"):
                one.step(batch())
            assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))
        assert one.global_step == 0
        assert not any("forward" in vars(block) for block in one.model.blocks)


def test_accelerate_and_your_own_loop() -> None:
    model = deep()
    optimizer = adamw(model)
    config = {KEY: budget()}
    with only():
        plan = ox.accelerate(model, optimizer, CRITERION, [batch()], config=config, remember=False, tune_seconds=1.0)

    def step() -> None:
        optimizer.zero_grad()
        CRITERION(model(batch()[0]), batch()[1]).backward()
        optimizer.step()

    assert peak(step) <= plain_peak() // 2 + 4096
    assert f"Asked for: {KEY}: on" in plan.explain()
    plan.revert()
    assert peak(step) > plain_peak() // 2 + 4096


def test_a_plan_says_what_its_steps_take() -> None:
    model = deep()
    optimizer = adamw(model)
    with only():
        plan = ox.accelerate(model, optimizer, CRITERION, [batch()], remember=False, tune_seconds=1.0)
    inputs, targets = batch()

    def step() -> None:
        optimizer.zero_grad()
        CRITERION(model(inputs), targets).backward()
        optimizer.step()

    peaks = plan.peak_bytes
    assert peaks is not None and peaks[0] == peaks[1]
    step()  # makes the optimizer's state
    optimizer.zero_grad()
    with Meter(device=DEVICE) as whole:
        step()
        with Meter(device=DEVICE) as meter:
            step()
        taken = whole.live_bytes - meter.live_bytes + meter.peak_bytes
    of_batch = inputs.nbytes + targets.nbytes
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.device == DEVICE)
    assert peaks[0] == sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) + state + of_batch + taken
    assert "The tensors of a step take" in plan.explain() and "its tensors take" in str(plan).lower()
    plan.revert()


def test_of_several_models() -> None:
    models = [deep(), deep()]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.01)

    def loss(both: Any, given: Any) -> Tensor:
        return CRITERION(both[1](both[0].blocks[0](given[0])), given[1])

    with only():
        plan = ox.accelerate(models, optimizer, loss, [batch()], config={KEY: "1GiB"}, remember=False, tune_seconds=1.0)
    assert "as it is" in plan.explain()
    plan.revert()
    names = blocks_of(plan.run.model)
    assert len(names) == 14 and all(plan.run.model.get_submodule(name) for name in names)  # not a model as a whole


def test_another_device_is_refused() -> None:
    model = deep()
    run = Run(model, adamw(model), CRITERION, [batch()])
    run.device = torch.device("xpu", 0)  # of no build that is tested: one for CUDA looks for a driver
    found = Checkpointing.of(run, "1GiB")
    assert not found.is_in_effect and "allocator for xpu:0 has no statistics" in found.reason


def test_the_trainer_of_a_plan_counts_its_windows() -> None:
    model = deep()
    with only():
        run = ox.PerformanceOptimizer({KEY: budget(), "accumulation_steps": 2, "remember": False}).prepare(
            model, adamw(model), [batch()], CRITERION, tune_seconds=1.0
        )
    for _ in range(2):
        run.trainer.step(batch())
    with Meter(device=DEVICE) as meter:
        for _ in range(2):
            run.trainer.step(batch())
    assert meter.peak_bytes <= plain_peak() // 2 + 8192
    run.revert()


@pytest.mark.cpu_only("compiles")
def test_compiling_and_this_exclude_each_other() -> None:
    model = deep()
    with pytest.raises(ValueError, match="a compiled model calls none of its blocks"):
        ox.Trainer(model, adamw(model), CRITERION, "basic", compile="default", gradient_checkpointing="1GiB")
    config = {KEY: "1GiB"}
    plan = ox.accelerate(
        model, adamw(model), CRITERION, [batch()], config=config, remember=False, strategies=["compile"]
    )
    assert "a compiled model calls no blocks" in plan.rejected["compile"]
    plan.revert()


def test_copies_and_pickles_of_the_model_are_as_without() -> None:
    model = deep()

    def step() -> None:
        CRITERION(model(batch()[0]), batch()[1]).backward()

    loose = ox.memory.fit(model, step, "8GiB")
    plan = ox.memory.fit(model, step, (loose.plain_peak + loose.floor) // 2)
    assert plan.recomputed
    model.eval()
    x = batch()[0]
    expected = model(x)
    for other in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model)), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            for p in other.parameters():
                p.add_(1.0)
        assert not torch.equal(other(x), expected)  # by its own weights
    assert torch.equal(model(x), expected)
    plan.revert()
