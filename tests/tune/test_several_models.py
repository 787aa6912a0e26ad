"""Several models and several optimizers in one step: what a GAN needs of `accelerate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oxytorch as ox
import pytest
import torch
from oxytorch.tune import Run, Strategy
from several import (
    LOSSES,
    Batch,
    Models,
    PlantedFault,
    assert_same,
    batches,
    discriminator,
    gan,
    generator,
    loss_of_d,
    plain_step,
    ruling_on,
    run_of,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = [pytest.mark.cpu_only("counts on torch's CPU bits"), pytest.mark.usefixtures("one_thread")]


# -- strategies on both ----------------------------------------------------------------------------------------------

EXACT = ("native_step", "foreach")
OTHERS = ("step_tail", "fused", "channels_last", "int8_state", "bf16_autocast")


@pytest.mark.parametrize("way", ["losses", "step"])
@pytest.mark.parametrize("name", EXACT)
def test_an_exact_strategy_gives_the_bits_of_the_plain_loop(way: str, name: str) -> None:
    models, optimizers = gan()
    usual = [float(plain_step(models, optimizers, batch)) for batch in batches(6)]
    run = run_of(way)
    assert run.strategy(name).applies(run) is True
    run.set_active([name])
    assert all("step" in vars(slot.original) for slot in run.slots)
    assert [float(run.step(batch)) for batch in batches(6)] == usual
    assert_same(state(run.models, [slot.original for slot in run.slots]), state(models, optimizers))


@pytest.mark.parametrize("way", ["losses", "step"])
@pytest.mark.parametrize("name", [*EXACT, *OTHERS])
def test_a_strategy_is_verified_on_both(way: str, name: str) -> None:
    run = run_of(way)
    before = state(run.models, [slot.original for slot in run.slots])
    ruling = ruling_on(run, [name], run.strategies[name].kind)
    assert ruling.held, ruling.reason
    run.set_active(())
    assert_same(state(run.models, [slot.original for slot in run.slots]), before)
    assert not any("step" in vars(slot.original) for slot in run.slots)


def test_autocast_and_the_layout_act_on_each_model() -> None:
    run = run_of()
    run.set_active(["bf16_autocast", "channels_last"])
    for model in run.models:
        first = next(m for m in model.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d))
        seen: list[tuple[Tensor, Tensor]] = []

        def see(_module: nn.Module, inputs: Any, output: Tensor, seen: Any = seen) -> None:
            seen.append((inputs[0], output))

        hook = first.register_forward_hook(see)
        run.loss(run.batches[0])
        hook.remove()
        assert seen[0][0].is_contiguous(memory_format=torch.channels_last)
        assert seen[0][1].dtype is torch.bfloat16
    run.set_active(())
    assert not any("_compiled_call_impl" in vars(model) for model in run.models)


def test_each_model_is_compiled_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def compile(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        number = len(made)
        made.append(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(number)
            return function(*args, **kwargs)

        return call

    made: list[Any] = []
    monkeypatch.setattr(torch, "compile", compile)
    run = run_of()
    usual = float(run.loss(run.batches[0]).detach())
    run.set_active(["compile"])
    called.clear()
    assert float(run.loss(run.batches[0]).detach()) == pytest.approx(usual, rel=1e-6)
    assert len(made) == 2
    assert sorted(called) == [0, 0, 0, 1, 1]  # the discriminator thrice, the generator twice
    run.set_active(())
    run.set_active(["compile"])
    assert len(made) == 2
    run.set_active(())
    assert not any("_compiled_call_impl" in vars(model) for model in run.models)


@pytest.mark.parametrize("which", [None, 0, 1])
def test_random_numbers_are_judged_by_each_loss(which: int | None) -> None:
    """Strategies that draw other masks; a wrong one draws others again in backward, in one model alone."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Dropout(0.4), generator()), nn.Sequential(nn.Dropout(0.4), discriminator())]
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3) for m in reversed(models)]

    class Redrawn(PlantedFault):
        kind = "tolerance"

        def apply(self, run: Run) -> None:
            for number, call in enumerate(run.calls):
                call.inputs("fault", self.drawn)
                if number == which:
                    model = run.models[number]

                    def recomputed(*args: Any, model: nn.Module = model) -> Any:
                        def again(*inputs: Any) -> Any:
                            return model._call_impl(*inputs)

                        return torch.utils.checkpoint.checkpoint(
                            again, *args, use_reentrant=False, preserve_rng_state=False
                        )

                    call.function(recomputed)

        def drawn(self, args: Any, kwargs: Any) -> Any:
            torch.rand(3)
            return args, kwargs

        def revert(self, run: Run) -> None:
            for call in run.calls:
                call.inputs("fault", None)
                call.function(None)

    run = Run(models, optimizers, LOSSES, batches(), strategies={"fault": Redrawn})
    ruling = ruling_on(run, ["fault"], "tolerance")
    assert ruling.held == (which is None), ruling.reason
    if which is not None:
        assert "difference quotient" in ruling.reason


def test_a_strategy_acts_on_the_optimizers_that_it_fits() -> None:
    models, (of_d, _) = gan()
    of_g = torch.optim.Adadelta(models[0].parameters())
    run = Run(models, [of_d, of_g], LOSSES, batches())
    assert run.strategy("native_step").applies(run) is True
    run.set_active(["native_step"])
    assert "step" in vars(of_d)
    assert "step" not in vars(of_g)
    run.set_active(())
    assert "step" not in vars(of_d)
    other = Run(models, [torch.optim.Adadelta(m.parameters()) for m in models], LOSSES, batches())
    why = other.strategy("native_step").applies(other)
    assert why == "optimizer[0]: there is no native step of Adadelta; optimizer[1]: there is no native step of Adadelta"


def test_what_cannot_be_done_to_several_losses_says_so() -> None:
    run = run_of(owns_loop=True)
    assert "several losses" in str(run.strategy("split_2").applies(run))
    assert "one optimizer" in str(run.strategy("step_graph").applies(run))


# -- accelerate ------------------------------------------------------------------------------------------------------


def accelerate(models: Any, optimizers: Any, loss_fn: Any = None, data: Any = None, **options: Any) -> ox.tune.Plan:
    data = batches() if data is None else data
    return ox.accelerate(
        models, optimizers, loss_fn, data, **{"remember": False, "tune_seconds": 0.2, "seed": 1, **options}
    )


@pytest.mark.parametrize("loop", ["yours", "plan"])
@pytest.mark.parametrize("way", ["losses", "step"])
def test_a_gan_is_accelerated_and_reverted(way: str, loop: Any) -> None:
    models, optimizers = gan()
    plain, others = gan()
    before = state(models, optimizers)

    def own_step(batch: Batch) -> Tensor:
        return plain_step(models, optimizers, batch)

    given: dict[str, Any] = {"step": own_step} if way == "step" else {"loss_fn": LOSSES}
    config = {"optimizer_state": "fp32", "step_tail": "on", "channels_last": "on"}
    plan = accelerate(models, optimizers, config=config, strategies=["step_tail", "channels_last"], loop=loop, **given)
    assert_same(state(models, optimizers), before)
    assert plan.model is models
    assert plan.optimizer is optimizers
    assert set(plan.run.active) == {"step_tail", "channels_last"}, plan.explain()
    assert all("step" in vars(optimizer) for optimizer in optimizers)
    for batch in batches(6):
        usual = plain_step(plain, others, batch)
        loss = plan.step(batch) if loop == "plan" else plain_step(models, optimizers, batch)
        torch.testing.assert_close(loss, usual, rtol=1e-3, atol=1e-4)
    plan.revert()
    assert not any("step" in vars(optimizer) for optimizer in optimizers)
    assert not any("_compiled_call_impl" in vars(model) for model in models)
    assert all(p.is_contiguous() for model in models for p in model.parameters())
    for left, right in zip(state(models, optimizers), state(plain, others), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-3)


def test_an_earlier_plan_of_one_of_the_models_is_taken_back() -> None:
    models, optimizers = gan()
    first = accelerate(models, optimizers, LOSSES, config={"channels_last": "on"}, strategies=["channels_last"])
    assert first.run.active == ("channels_last",)
    accelerate(models[1], optimizers[0], lambda d, batch: F.softplus(-d(batch[0])).mean(), strategies=[])
    assert first.run.active == ()


def test_a_step_that_throws_drops_the_gradients_of_all() -> None:
    models, optimizers = gan()

    def fails(_models: Models, _batch: Batch) -> Tensor:
        raise ArithmeticError("planted")

    run = Run(models, optimizers, [loss_of_d, fails], batches())
    with pytest.raises(ArithmeticError, match="planted"):
        run.take(batches()[0])
    assert all(p.grad is None for p in run.params)


def test_clipping_is_of_each_optimizer() -> None:
    models, optimizers = gan()
    run = Run(models, optimizers, LOSSES, batches(), clip_norm=1e-3)
    norms: list[float] = []
    for slot in run.slots:

        def note(*_: Any, params: list[Tensor] = slot.params) -> None:
            norms.append(float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in params]))))

        slot.original.register_step_pre_hook(note)
    run.step(batches()[0])
    assert norms == pytest.approx([1e-3, 1e-3], rel=1e-3)
    ruling = ruling_on(Run(*gan(), LOSSES, batches(), clip_norm=1e-3, owns_loop=True), ["step_tail"], "tolerance")
    assert ruling.held, ruling.reason


def test_the_watch_sees_a_loss_of_the_second_optimizer_drift() -> None:
    models, optimizers = gan()
    factor = [1.0]

    class Drifts(Strategy):
        name = "drifts"
        kind = "tolerance"

        def apply(self, run: Run) -> None:
            weight = next(iter(models[0].parameters()))
            self.hook = weight.register_hook(lambda grad: grad * factor[0])

        def revert(self, run: Run) -> None:
            self.hook.remove()

    run = Run(models, optimizers, LOSSES, batches(), strategies={"drifts": Drifts})
    run.set_active(["drifts"])
    certificate = ox._C.tune.Certificate()
    watch = ox.tune.watch.Watch(run, certificate)
    apart = watch.compare()[:4]
    assert apart[2:] == (0.0, 0.0)
    factor[0] = 2.0
    apart = watch.compare()[:4]
    assert max(apart[2:]) > 0.3
    assert run.active == ("drifts",)
    watch.stop()


def test_a_step_is_watched_once_and_ends_with_the_last_optimizer() -> None:
    models, (of_d, of_g) = gan()
    plan = accelerate(
        models,
        [of_g, of_d],  # in another order than that in which they step
        step=lambda batch: plain_step(models, [of_d, of_g], batch),
        config={"step_tail": "on"},
        strategies=["step_tail", "foreach"],
    )
    assert plan.run.last.original is of_g
    run = plan.run
    run.required = ()
    plan._begin_watch()
    watch = plan._watch
    assert watch is not None
    for batch in batches(5):
        plain_step(models, [of_d, of_g], batch)
    assert watch.step == 5
    plan.revert()


def test_gradients_that_are_not_finite_are_those_of_one_optimizer() -> None:
    models, optimizers = gan()

    class Infinite(Strategy):
        name = "infinite"
        kind = "tolerance"
        bad = False

        def apply(self, run: Run) -> None:
            weights = [next(iter(models[0].parameters())), *models[0].parameters()]
            factor = float("inf")
            self.hooks = [w.register_hook(lambda g: g * factor if Infinite.bad else g) for w in weights]
            self.call = run.calls[0]
            self.call.outputs("infinite", lambda out: out * factor if Infinite.bad else out)

        def revert(self, run: Run) -> None:
            self.call.outputs("infinite", None)
            for hook in self.hooks:
                hook.remove()

    run = Run(models, optimizers, LOSSES, batches(), strategies={"infinite": Infinite})
    run.set_active(["infinite"])
    watch = ox.tune.watch.Watch(run, ox._C.tune.Certificate())
    run.step(batches()[0])
    before = [p.detach().clone() for p in models[0].parameters()]
    Infinite.bad = True
    run.step(batches()[1])
    assert run.active == ()
    assert all(bool(p.isfinite().all()) for m in models for p in m.parameters())
    del before, watch


def test_a_stored_plan_is_of_these_models_and_optimizers() -> None:
    def key(models: Any, optimizers: Any) -> str:
        run = Run(models, optimizers, LOSSES, batches())
        return str(ox.tune.remember.key(run, "advanced", ()).digest())

    models, optimizers = gan()
    same = key(models, optimizers)
    assert key(*gan()) == same
    other = torch.optim.Adam([*models[0].parameters()][:1], lr=2e-3, betas=(0.5, 0.999))
    assert key(models, [optimizers[0], other]) != same
    assert key(models, [optimizers[0], torch.optim.SGD(models[0].parameters(), 0.1)]) != same
    assert key([models[0], nn.Sequential(*models[1], nn.Identity())], optimizers) != same


# -- what cannot be meant --------------------------------------------------------------------------------------------


def test_what_cannot_be_meant_is_refused_by_a_sentence() -> None:
    models, optimizers = gan()
    g, d = models
    nothing: list[Any] = []
    cases: list[tuple[Any, Any, Any, type[Exception], str]] = [
        (nothing, optimizers, LOSSES, ValueError, "model is an empty list"),
        (models, nothing, LOSSES, ValueError, "optimizer is an empty list"),
        ([g, g], optimizers, LOSSES, ValueError, r"model\[1\] is the same object as model\[0\]: give each model once"),
        (models, optimizers[:1] * 2, LOSSES, ValueError, r"optimizer\[1\] is the same object as optimizer\[0\]"),
        ([g, "d"], optimizers, LOSSES, TypeError, r"model\[1\] is a str, expected a torch.nn.Module"),
        (models, [optimizers[0], d], LOSSES, TypeError, r"optimizer\[1\] is a Sequential, expected a torch.optim"),
        (models, optimizers, [loss_of_d], ValueError, "loss_fn is a list of 1, and optimizers are 2: give one loss"),
        (models, optimizers[0], LOSSES, ValueError, "loss_fn is a list of 2, and optimizers are 1"),
        (models, optimizers, [loss_of_d, None], TypeError, r"loss_fn\[1\] is a NoneType, expected a callable"),
        (models, optimizers, nn.MSELoss(), TypeError, "loss_fn is a criterion, MSELoss, .* Give loss_fn"),
        (models, optimizers, [loss_of_d, F.mse_loss], TypeError, r"loss_fn\[1\] is a criterion, mse_loss"),
        (models, [optimizers[0], torch.optim.LBFGS(g.parameters())], LOSSES, TypeError, "LBFGS.step.. needs a closure"),
    ]
    for model, optimizer, loss_fn, kind, words in cases:
        with pytest.raises(kind, match=words):
            accelerate(model, optimizer, loss_fn)
    with pytest.raises(TypeError, match="a closure returns one loss, and there are 2: pass step"):
        run_of().take(lambda: torch.zeros(()))


def test_a_trainer_refuses_several() -> None:
    models, optimizers = gan()
    plan = accelerate(models, optimizers, LOSSES, strategies=[])
    with pytest.raises(ValueError, match="plan is of several models or optimizers, which a Trainer does not take"):
        ox.Trainer(models[0], optimizers[1], plan=plan)
    plan.revert()
    of_both = torch.optim.SGD([p for m in models for p in m.parameters()], 0.1)
    given = list(models[1].parameters())
    halves = [torch.optim.SGD(part, 0.1) for part in (given[::2], given[1::2])]

    def realness(d: nn.Module, batch: Batch) -> Tensor:
        return d(batch[0]).mean()

    for some in ((models, of_both, [loss_of_d]), (models[1], halves, [realness] * 2)):
        plan = ox.accelerate(*some[:2], some[2], batches(), strategies=[], remember=False)
        with pytest.raises(ValueError, match="plan is of several models or optimizers"):
            ox.Trainer(models[1], of_both, plan=plan)
        plan.revert()
    with pytest.raises(TypeError, match=r"model is a list: plan\.trainer takes one model and one optimizer"):
        ox.PerformanceOptimizer().prepare(models, optimizers, batches(), LOSSES)
