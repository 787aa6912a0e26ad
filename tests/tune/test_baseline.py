"""What tuning may spend, what it leaves of the process, and that its baseline is a step that was not tuned."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch import _C
from oxytorch.tune import Run, Strategy
from oxytorch.tune.observe import kernel_seconds, observe, operator_seconds
from oxytorch.tune.strategies.compiled import fused_speedup, launched_speedup
from oxytorch.tune.workload import RunWorkload
from planted import CLOCK, WORKLOAD, Clock, Net, batches, clock, made, only, same
from torch import nn

pytestmark = pytest.mark.cpu_only("plants times and faults")
__all__ = ["clock"]

CRITERION = nn.CrossEntropyLoss()


def accelerate(model: nn.Module, **options: Any) -> ox.tune.Plan:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return ox.accelerate(model, optimizer, CRITERION, batches(), remember=False, **options)


def no_use(number: int) -> type[Strategy]:
    def nothing(_self: Strategy, _run: Run) -> None:
        return

    return type("NoUse", (Strategy,), {"name": f"no_use_{number}", "apply": nothing, "revert": nothing})


# -- what is likely to pay ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gain", "compiles"), [(1.01, False), (1.5, True), (None, True)])
def test_nothing_is_compiled_that_is_not_likely_to_pay(clock: Clock, gain: float | None, compiles: bool) -> None:
    seen: list[tuple[str, ...]] = []
    cls = made(clock, "slow", 0.002)
    cls.expected_speedup = 1.5
    cls.expected_cost = lambda self, run: 4.0  # type: ignore[method-assign]
    apply = cls.apply
    applied: list[bool] = []

    def counted(self: Strategy, run: Run) -> None:
        applied.append(True)
        apply(self, run)

    def likely(self: Strategy, run: Run) -> float | None:
        seen.append(tuple(run.active))
        return gain

    cls.apply = counted  # type: ignore[method-assign]
    cls.likely_speedup = likely  # type: ignore[method-assign]
    model = Net(clock)
    with only(cls, made(clock, "rest", 0.005)):
        plan = accelerate(model)
    assert seen == [("cheaper_rest",)]  # by where the time goes once what is free is active
    assert bool(applied) is compiles and ("cheaper_slow" in plan.accepted) is compiles
    if not compiles:
        assert "likely to gain" in plan.rejected["cheaper_slow"]
    plan.revert()


def test_each_option_of_a_paired_test_is_the_one_that_is_named() -> None:
    given = {
        "threshold": 1.5, "confidence": 0.75, "false_accept": 0.25, "least_pairs": 3, "most_pairs": 7, "patience": 5,
        "worth": 1.25, "most_seconds": 2.5, "budget_seconds": 3.5, "repay_steps": 4.5, "seed": 11,
    }  # fmt: skip
    options = _C.tune.PairedTestOptions(**given)
    assert {name: getattr(options, name) for name in given} == given


def test_what_a_compiler_gains_is_outside_of_library_calls() -> None:
    convolutions = {"aten::convolution": 0.4, "aten::convolution_backward": 0.5, "aten::relu": 0.05}
    assert 1.0 < fused_speedup(1.0, convolutions) < 1.06
    assert fused_speedup(1.0, {"aten::gelu": 0.9, "aten::addmm": 0.1}) > 1.5
    assert fused_speedup(1.0, {"aten::mm": 1.1}) == 1.0  # the clock's noise
    for name in ("aten::_mkldnn_linear", "mkldnn::_linear_pointwise", "aten::_scaled_dot_product_flash_attention"):
        assert fused_speedup(1.0, {name: 1.0}) == 1.0, name


def test_what_a_compiler_gains_on_a_card_is_what_waits_for_the_host() -> None:
    waits = {"sm90_xmma_gemm_bf16": 0.4, "vectorized_elementwise_kernel": 0.2}
    assert launched_speedup(1.0, waits, graphed=True) == pytest.approx(2.0)
    assert launched_speedup(1.0, waits, graphed=False) == pytest.approx(1 / 0.85)
    busy = {"nvjet_tst_128x256": 0.8, "layer_norm_kernel": 0.2}
    for graphed in (False, True):
        assert launched_speedup(1.0, busy, graphed) == pytest.approx(1 / 0.9)
    assert launched_speedup(1.0, {"cutlass_80_tensorop": 1.1}, graphed=True) == 1.0  # the clock's noise
    assert launched_speedup(1.0, {}, graphed=True) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA card")
def test_kernels_of_a_card_are_timed() -> None:
    model = nn.Linear(512, 512, device="cuda")
    given = [(torch.randn(512, 512, device="cuda"), torch.randint(512, (512,), device="cuda"))]
    seconds, named = kernel_seconds(Run(model, torch.optim.SGD(model.parameters(), lr=0.1), CRITERION, given))
    assert 0 < sum(named.values()) < seconds and any("gemm" in name for name in named)
    assert all(p.grad is None for p in model.parameters())


def test_operators_are_timed_in_forward_and_backward_and_leave_no_trace() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(model, optimizer, CRITERION, [(torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seconds, named = operator_seconds(run)
    assert {"aten::convolution", "aten::convolution_backward", "aten::addmm"} <= set(named)
    assert seconds > 0 and all(value > 0 for value in named.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_operators_are_timed_with_the_arguments_that_they_were_given() -> None:
    class Picks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.zeros(len(x), dtype=torch.int64)  # no index without its dtype
            out: torch.Tensor = super().forward(x)[rows]
            return out

    model = Picks(6, 3)
    run = Run(model, torch.optim.SGD(model.parameters(), lr=0.1), CRITERION, batches())
    _, named = operator_seconds(run)
    assert {"aten::zeros", "aten::index"} <= set(named)


def test_a_look_at_a_step_of_the_users_own_leaves_the_optimizer_as_it_was() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def loop() -> Generator[Any, Any, None]:
        batch = yield
        while True:
            optimizer.zero_grad()
            loss = CRITERION(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            batch = yield loss.detach()

    going = loop()  # what it refers to cannot be reached
    next(going)
    run = Run(model, optimizer, None, batches(), step=going.send)
    before = copy.deepcopy([list(model.parameters()), optimizer.state_dict()])
    assert observe(run).uses("aten::addmm")
    assert same([list(model.parameters()), optimizer.state_dict()], before)


# -- what tuning may take ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.01, 2.46])
def test_tuning_ends_with_its_share_of_the_run_whatever_the_noise(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    model = Net(clock)
    clock.cost["rest"] = seconds
    clock.others = 1.0
    monkeypatch.setattr(CLOCK, "thread_seconds", lambda: 0.0)  # all of it is waiting
    with only(made(clock, "slow", 0.002), *(no_use(number) for number in range(8))):
        plan = accelerate(model, steps_planned=400)
    assert plan.certificate.tuning_seconds + plan.certificate.compile_seconds < 6 + 20 * (seconds + 0.01)
    plan.revert()


# -- the baseline ------------------------------------------------------------------------------------------------------


def test_the_baseline_comes_before_anything_that_is_tried(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    cls = made(clock, "slow", 0.002)
    cls.group = "host_memory"
    apply, hindrance = cls.apply, RunWorkload.hindrance

    def asked(self: RunWorkload) -> str:  # right after the baseline
        events.append("baseline")
        return hindrance(self)

    def applied(self: Strategy, run: Run) -> None:
        events.append("apply")
        apply(self, run)

    monkeypatch.setattr(RunWorkload, "hindrance", asked)
    monkeypatch.setattr(WORKLOAD, "page_faults", iter(range(0, 10**9, 10**5)).__next__)
    cls.apply = applied  # type: ignore[method-assign]
    with only(cls):
        plan = accelerate(Net(clock))
    assert events[:2] == ["baseline", "apply"]
    assert plan.certificate.step_seconds == pytest.approx(0.02, rel=0.01)
    assert plan.certificate.step_faults > 1000
    plan.revert()


def test_what_trials_did_to_the_heap_is_no_gain(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where trials leave the heap so that a step with nothing active faults more and takes twice as long."""
    cls = made(clock, "rest", 0.002)
    apply = cls.apply
    faults = [0, 0]  # so far, in each look

    def spoils(self: Strategy, run: Run) -> None:
        clock.cost["slow"] = 0.03  # from 10 ms, and it stays
        faults[1] = 100_000
        apply(self, run)

    def look() -> int:
        faults[0] += faults[1]
        return faults[0]

    monkeypatch.setattr(WORKLOAD, "page_faults", look)
    cls.apply = spoils  # type: ignore[method-assign]
    with only(cls):
        plan = accelerate(Net(clock))
    assert plan.accepted == ("cheaper_rest",)
    # 40 ms to 32 ms in pairs; the user's process has taken 20 ms a step.
    assert plan.certificate.baseline_seconds == pytest.approx(0.02, rel=0.01)
    assert plan.speedup[1] == pytest.approx(20 / 32, rel=0.02)
    assert "after the trials" in " ".join(plan.certificate.events)
    plan.revert()


def test_strategies_of_memory_are_left_out_where_a_step_faults_nothing_in(clock: Clock) -> None:
    plan = accelerate(Net(clock), strategies=["allocator", "keep_heap"])
    assert plan.accepted == ()
    assert all("as fast at best" in plan.rejected[name] for name in ("allocator", "keep_heap"))


# -- the heap and the pool ---------------------------------------------------------------------------------------------


def heap_user(fail: bool) -> str:
    """A program of its own, whose heap nothing has touched: accelerates with strategies of memory alone."""
    return f"""
import oxytorch as ox, torch
from oxytorch import _C
from torch import nn
model = nn.Sequential(nn.Linear(32, 2048), nn.GELU(), nn.Linear(2048, 4))
optimizer = torch.optim.AdamW(model.parameters())
data = [(torch.randn(1024, 32), torch.randint(4, (1024,))) for _ in range(2)]
seen = []
workload = ox.tune.workload.RunWorkload
offers, hindrance = workload.offers, workload.hindrance
def first(self):
    seen.append(("baseline", _C.trainer.heap_mmap_threshold()))
    return offers(self)
def timed(self):
    seen.append(("steps", _C.trainer.heap_mmap_threshold()))
    return hindrance(self)
workload.offers, workload.hindrance = first, timed
for name in ("tune_allocator", "keep_heap"):
    def noted(*args, _real=getattr(_C.trainer, name), _name=name):
        seen.append((_name, _C.trainer.heap_mmap_threshold()))
        return _real(*args)
    setattr(_C.trainer, name, noted)
# Where blocks happen to lie decides whether a step faults: here it does.
ox.tune.workload.page_faults = iter(range(0, 10**12, 10**5)).__next__
if {fail}:  # nothing is accepted
    steps = workload.steps
    def slow(self, *args):
        seconds, updates = steps(self, *args)
        return seconds * (10 if self.run.active else 1), updates
    workload.steps = slow
plan = ox.accelerate(model, optimizer, nn.CrossEntropyLoss(), data, level="basic", remember=False, tune_seconds=60,
                     strategies=["allocator", "keep_heap", "host_pool"])
names = [name for name, _ in seen]
assert names[:2] == ["baseline", "steps"], names
assert "tune_allocator" in names, (names, plan.rejected)
assert "keep_heap" in names or "allocator" in plan.accepted, (names, plan.rejected)
threshold = seen[1][1]
entries = {{entry.strategy: entry for entry in plan.certificate.entries}}
assert set(entries) == {{"allocator", "keep_heap", "host_pool"}}
if {fail}:
    assert plan.accepted == (), plan.accepted
    assert entries["keep_heap"].status == "rejected", entries["keep_heap"].reason
    assert entries["keep_heap"].speedup is not None, entries["keep_heap"].reason
    assert _C.trainer.heap_mmap_threshold() == threshold, (seen, _C.trainer.heap_mmap_threshold())
    assert _C.memory.host_pool_stats().limit_bytes == 0, "the pool keeps pages"
    pool = _C.memory.use_host_pool(None)
    assert pool.is_applied, pool.reason
    pool.revert()
    text = plan.explain() + str(plan.report())
    assert "trimmed" not in text, text
plan.revert()
assert _C.trainer.heap_mmap_threshold() == threshold
for make in (_C.trainer.tune_allocator, _C.trainer.keep_heap):
    again = make(None)
    assert again.is_applied, again.reason
    again.revert()
"""


@pytest.mark.parametrize("fail", [True, False])
def test_the_heap_is_as_before_but_for_what_is_accepted(fail: bool) -> None:
    done = subprocess.run([sys.executable, "-c", heap_user(fail)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
