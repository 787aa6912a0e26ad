"""Where an optimizer's state is and when parameters are updated: less memory, and the bits of the plain step."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch._C.memory import give_back_host_memory, is_parked, reset_host_peak
from oxytorch.model.snapshot import Snapshot
from oxytorch.tune import Run
from oxytorch.tune.strategies import optimizer as strategies
from oxytorch.tune.verify import Verifier
from planted import only
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.cpu_only("the strategies are those of a CPU"),
    pytest.mark.usefixtures("one_thread"),
]
Params = Sequence[Tensor]
OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-3, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "groups": lambda params: torch.optim.AdamW(
        [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "weight_decay": 0.1}], lr=1e-3
    ),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}


def model(width: int = 1024) -> nn.Sequential:
    """Its state is large enough for a file at this width."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, width), nn.GELU(), nn.Linear(width, 512), nn.GELU(), nn.Linear(512, 4))


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 24, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(count)]


def run_of(optimizer: str = "adamw", *, width: int = 1024, **options: Any) -> Run:
    net = model(width)
    made = OPTIMIZERS[optimizer](list(net.parameters()))
    return Run(net, made, nn.MSELoss(), batches(), owns_loop=True, **options)


def state_of(run: Run) -> list[Tensor]:
    return [v for p in run.params for v in run.original.state.get(p, {}).values() if isinstance(v, Tensor)]


def outcome(run: Run) -> list[Tensor]:
    return [p.detach().clone() for p in run.params] + [v.clone() for v in state_of(run)]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def train(run: Run, steps: Sequence[int] = range(6)) -> list[Tensor]:
    return [run.step(run.batches[i]) for i in steps]


def resident(what: str = "resident") -> float:
    """MiB."""
    return float(ox.base.system_info()["memory"][what]) / 2**20


# -- the same bits ----------------------------------------------------------------------------------------------------

COMBINATIONS = (
    ["state_in_file"],
    ["update_in_backward"],
    ["state_in_file", "update_in_backward"],
    ["update_in_backward", "state_in_file"],
    ["native_step", "update_in_backward"],
    ["foreach", "update_in_backward"],
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_bits_are_those_of_the_plain_step(names: list[str], optimizer: str) -> None:
    run, plain = run_of(optimizer), run_of(optimizer)
    if any(run.strategy(name).applies(run) is not True for name in names):
        pytest.skip("one of them is not for this optimizer")
    for i in range(6):  # before there is state, switched on and off
        run.set_active(names if i != 3 else [])
        assert torch.equal(run.step(run.batches[i]), plain.step(plain.batches[i]))
    assert "update_in_backward" not in names or all(p.grad is None for p in run.params)
    run.set_active([])
    assert_same(outcome(run), outcome(plain))


@pytest.mark.parametrize("name", ["step_tail", "int8_state"])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_tail_updates_in_backward_as_it_does_after_it(name: str, first: bool) -> None:
    names = [name, "update_in_backward"] if first else ["update_in_backward", name]
    run, after = run_of(), run_of()
    run.set_active(names[:1])
    run.set_active(names)
    after.set_active([name])
    train(run)
    train(after)
    assert_same([p.detach() for p in run.params], [p.detach() for p in after.params])
    run.set_active(["update_in_backward"])
    assert type(run.optimizer) is torch.optim.AdamW
    train(run)
    run.set_active([])


@pytest.mark.parametrize("names", [["update_in_backward"], ["step_tail", "update_in_backward"]], ids="+".join)
def test_a_window_of_batches_is_updated_by_its_sum(names: list[str]) -> None:
    run, other = run_of(), run_of()
    for each, active in ((run, names), (other, names[:-1])):
        each.accumulation = 3
        each.set_active(active)
        for batch in batches(5):  # an unfinished window at the end
            each.take(batch)
        assert each.flush()
        assert each.taken == 2
    run.set_active([]), other.set_active([])
    assert_same(outcome(run), outcome(other))


def test_pieces_of_a_batch_are_updated_by_their_sum() -> None:
    run, other = run_of(), run_of()
    run.set_active(["split_2", "update_in_backward"])
    other.set_active(["split_2"])
    assert_same(train(run), train(other))
    assert_same([p.detach() for p in run.params], [p.detach() for p in other.params])


# -- a file -----------------------------------------------------------------------------------------------------------


def test_state_waits_in_a_file_and_comes_back() -> None:
    run, plain = run_of(), run_of()
    train(run, [0]), train(plain, [0])
    objects = state_of(run)
    run.set_active(["state_in_file"])
    large = [t for t in objects if t.nbytes >= 1 << 20]
    assert len(large) == 2 and all(is_parked(t) for t in large)
    train(run), train(plain)
    assert all(a is b for a, b in zip(state_of(run), objects, strict=True))
    buffer = io.BytesIO()
    torch.save(run.original.state_dict(), buffer)
    twin = copy.deepcopy(run.original)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    for other in (saved["state"].values(), twin.state.values()):
        kept = [t for state in other for t in state.values()]
        assert_same(kept, state_of(plain))
        assert not any(is_parked(t) for t in kept)
    run.original.load_state_dict(saved)  # in the middle of the run
    train(run), train(plain)
    assert all(is_parked(t) for t in state_of(run) if t.nbytes >= 1 << 20)
    run.set_active([])
    assert not any(is_parked(t) for t in state_of(run))
    assert_same(outcome(run), outcome(plain))


def test_a_closure_is_called_once() -> None:
    run, plain = run_of(), run_of()
    for each in (run, plain):
        each.set_active(["state_in_file"] if each is run else [])
        calls = []

        def closure(each: Run = each, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            each.original.zero_grad()
            loss = each.loss(each.batches[0])
            loss.backward()
            return loss

        each.original.step(closure)  # type: ignore[arg-type]
        assert calls == [1]
    run.set_active([])
    assert_same(outcome(run), outcome(plain))


class Wide(nn.Module):
    """Parameters of 16 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.zeros(1 << 22) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(row * x).sum() for row in self.rows]).mean(0, keepdim=True)


def wide_run() -> Run:
    net = Wide()
    run = Run(net, torch.optim.AdamW(net.parameters()), nn.MSELoss(), [(torch.ones(1), torch.ones(1))], owns_loop=True)
    run.step(run.batches[0])
    run.original.zero_grad()
    give_back_host_memory()
    return run


def test_state_in_a_file_takes_no_memory() -> None:
    run = wide_run()
    before = resident()
    run.set_active(["state_in_file"])
    give_back_host_memory()
    assert resident() < before - 180, "of 256 MiB"
    reset_host_peak()
    low = resident()
    run.step(run.batches[0])
    gradients = 128
    assert resident("peak_resident") < low + gradients + 150, "a part of it at a time"
    run.set_active(["state_in_file", "update_in_backward"])
    run.original.zero_grad()
    give_back_host_memory()
    reset_host_peak()
    low = resident()
    run.step(run.batches[0])
    assert resident("peak_resident") < low + 250, "nor do gradients, of 384 MiB together"
    run.set_active([])
    assert resident() > low + 150


def test_wide_averages_of_int8_state_wait_in_a_file() -> None:
    run = wide_run()
    objects = state_of(run)
    before = resident()
    run.set_active(["int8_state"])
    assert not any(is_parked(t) for t in objects), "trials ask for them again"
    run.settle()
    give_back_host_memory()
    assert resident() < before - 256 + 64 + 80
    run.step(run.batches[0])
    run.set_active([])
    assert all(a is b for a, b in zip(state_of(run), objects, strict=True))
    assert not any(is_parked(t) for t in objects)
    run.set_active(["int8_state"])
    assert sum(is_parked(t) for t in objects) == 16, "once it stays it waits at once"
    run.set_active([])


# -- what an update in backward may not do ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8_state", "step_tail", "state_in_file", "native_step"])
def test_what_was_taken_back_holds_no_state(name: str) -> None:
    run = run_of()
    train(run)
    run.set_active([name])
    train(run)
    run.set_active([])
    held = [weakref.ref(value) for value in state_of(run)]
    run.original.state.clear()  # as the tuner does where a run began without state
    gc.collect()
    assert held
    assert not [each for each in held if each() is not None]


def test_a_backward_of_the_users_own_updates_nothing() -> None:
    run = run_of()
    run.set_active(["update_in_backward"])
    train(run)
    before = outcome(run)
    run.loss(run.batches[0]).backward()
    assert_same(outcome(run), before)
    assert all(p.grad is not None for p in run.params)
    run.original.zero_grad()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise MemoryError("no memory")


def test_a_step_that_fails_in_backward_is_known_to_have_begun() -> None:
    net = model()
    fails = [False]

    def loss(net: nn.Module, batch: Any) -> Tensor:
        hidden = net[:2](batch[0])
        return nn.functional.mse_loss(net[2:](Failing.apply(hidden) if fails[0] else hidden), batch[1])

    run = Run(net, torch.optim.AdamW(net.parameters()), loss, batches(), owns_loop=True)
    run.set_active(["update_in_backward"])
    run.take(run.batches[0])
    before = [p.detach().clone() for p in run.params]
    fails[0] = True
    with pytest.raises(MemoryError):
        run.take(run.batches[1])
    moved = [not torch.equal(p, was) for p, was in zip(run.params, before, strict=True)]
    assert moved == [False, False, True, True, True, True] and run.update_begun
    assert all(p.grad is None for p in run.params) and not run.completes_gradients
    fails[0] = False
    run.take(run.batches[1])
    assert run.taken == 2


def test_it_says_where_it_is_not_for() -> None:
    def why(run: Run) -> str:
        return str(run.strategy("update_in_backward").applies(run))

    assert why(run_of()) == "True"
    assert "own step" in why(run_of(step=lambda batch: batch[0].sum()))
    assert "clipped" in why(run_of(clip_norm=1.0))
    scaled, guarded, hooked, clipped = run_of(), run_of(), run_of(), run_of()
    scaled.scaler, guarded.guard, clipped.clip_value = object(), object(), 1.0
    hooked.original.register_step_pre_hook(lambda *_: None)
    assert "not finite" in why(scaled) and "not finite" in why(guarded) and "clipped" in why(clipped)
    assert "hooks" in why(hooked)
    net = model()
    for optimizer, words in (
        (torch.optim.LBFGS(net.parameters()), "all parameters together"),
        (ox.optim.AdamW(net.parameters()), "oxytorch.optim already"),
        (torch.optim.Adam(net.parameters(), differentiable=True), "differentiable"),
    ):
        run = Run(net, optimizer, nn.MSELoss(), batches(), owns_loop=True)
        assert words in why(run)
        assert words in str(run.strategy("state_in_file").applies(run))
    several = Run(
        net, [torch.optim.SGD(net[:2].parameters()), torch.optim.SGD(net[2:].parameters())], nn.MSELoss(), batches()
    )
    assert "several" in why(several)
    assert several.strategy("state_in_file").applies(several) is True


class Twice(nn.Module):
    """A layer in two reentrant checkpoints, whose backwards bring its gradient in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
        return self.last(x)


@pytest.mark.parametrize("names", [["update_in_backward"], ["split_2", "update_in_backward"]], ids="+".join)
@pytest.mark.parametrize("build", [model, Twice])
def test_the_verifier_sees_the_gradients_that_were_used(build: Callable[[], nn.Module], names: list[str]) -> None:
    torch.manual_seed(0)
    net = build()
    run = Run(net, torch.optim.AdamW(net.parameters()), nn.MSELoss(), batches(), owns_loop=True)
    with Snapshot.of(net, run.original) as snapshot:
        verifier = Verifier(run, snapshot)
        run.set_active(names)
        ruling = verifier.check("trade")
        run.set_active([])
    assert ruling.held is (build is model), ruling.reason


def test_hooks_of_others_on_gradients_count() -> None:
    def tripled(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(3)

    run, plain = run_of(), run_of()
    for each in (run, plain):
        each.params[0].register_hook(lambda grad: grad * 2)
        each.params[2].register_post_accumulate_grad_hook(tripled)
    run.set_active(["update_in_backward"])
    train(run), train(plain)
    run.set_active([])
    assert_same(outcome(run), outcome(plain))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, 32), nn.Linear(32, 512)
        self.logits = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.logits = self.head(self.embed(x))
        return self.logits


def test_logits_that_are_held_are_those_of_the_step() -> None:
    """The weights have changed when backward ends, and a head without logits computes what is held before."""
    found = []
    for names in (["native_cross_entropy", "update_in_backward"], []):
        torch.manual_seed(0)
        net = Words()
        tokens = torch.randint(512, (64,), generator=torch.Generator().manual_seed(1))
        run = Run(net, torch.optim.SGD(net.parameters(), lr=1.0), nn.CrossEntropyLoss(), [(tokens, tokens)])
        run.set_active(names)
        run.step(run.batches[0])
        found.append(net.logits.detach().clone())
        run.set_active([])
    torch.testing.assert_close(*found)


# -- the goal memory --------------------------------------------------------------------------------------------------


def peak(step: Callable[[], Any]) -> int:
    """The most that a step takes beyond what was there before the first."""
    with ox.memory.Meter() as whole:
        step()
        with ox.memory.Meter() as meter:
            step()
        return whole.live_bytes - meter.live_bytes + meter.peak_bytes


def test_the_goal_memory_takes_what_they_save() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 512), *(nn.Linear(512, 512) for _ in range(6)), nn.Linear(512, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = batches()
    classes = [ox.tune.STRATEGIES[name] for name in ("state_in_file", "update_in_backward")]
    options = {"goal": "memory", "max_slowdown": 50.0, "level": "ultra", "loop": "plan", "tune_seconds": 5.0}
    with only(*classes):
        plan = ox.accelerate(net, optimizer, nn.MSELoss(), data, remember=False, progress=False, **options)
    assert set(plan.accepted) == {"state_in_file", "update_in_backward"}, plan.explain()
    large = [v for state in optimizer.state.values() for v in state.values() if v.nbytes >= 1 << 20]
    given, now = plan.peak_bytes or (0, 0)
    weights = sum(p.nbytes for p in net.parameters())
    assert given > 3.9 * weights and now < 1.5 * weights, "weights, and the largest gradient"
    for i in range(80):
        assert bool(plan.step(data[i % 6]).isfinite())
        assert all(is_parked(t) for t in large), "checks of the run leave it there"
    assert set(plan.accepted) == {"state_in_file", "update_in_backward"}
    assert peak(lambda: plan.step(data[0])) < 1.2 * max(p.nbytes for p in net.parameters())
    plan.revert()
    assert not any(is_parked(t) for t in large)


def test_a_trainer_keeps_state_in_a_file(tmp_path: Path) -> None:
    ends = []
    for asked in ("fp32", "file"):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        options = {"config": {"optimizer_state": asked, "clip_norm": 1.0, "level": "basic"}, "calibrate": False}
        trainer = ox.Trainer(net, optimizer, nn.MSELoss(), **options)
        for batch in batches(3):
            trainer.step(batch)
        if asked == "file":
            line = trainer.report()["optimizer_state"]
            assert line.state == "on" and "state_in_file" in line.reason and "in a file" in line.cost
            assert any(is_parked(v) for state in optimizer.state.values() for v in state.values())
        torch.save(trainer.state_dict(), tmp_path / f"{asked}.pt")
        for batch in batches(3):
            trainer.step(batch)
        ends.append([p.detach().clone() for p in net.parameters()])
        other = model()
        again = ox.Trainer(other, torch.optim.AdamW(other.parameters(), lr=1e-3), nn.MSELoss(), **options)
        again.load_state_dict(torch.load(tmp_path / f"{asked}.pt", weights_only=False))
        for batch in batches(3):
            again.step(batch)
        assert_same([p.detach() for p in other.parameters()], ends[-1])
        trainer.revert(), again.revert()
    assert_same(*ends)


def test_the_step_tail_and_a_file_exclude_each_other() -> None:
    net = model()
    with pytest.raises(ValueError, match="step_tail is 'on', which steps all of the state at once"):
        ox.Trainer(
            net,
            torch.optim.AdamW(net.parameters()),
            nn.MSELoss(),
            config={"optimizer_state": "file", "step_tail": "on"},
        )


def test_parts_hold_what_fits() -> None:
    net = Wide()
    optimizer = torch.optim.AdamW(net.parameters())
    for row in net.rows:
        row.grad = torch.zeros_like(row)
    net.rows[3].grad = None
    parts = strategies.StateInFile._parts(optimizer)
    assert [p for part in parts for p in part] == [row for row in net.rows if row.grad is not None]
    assert all(len(part) == 1 for part in parts), "two averages of 16 MiB each, of 224 MiB in all"
