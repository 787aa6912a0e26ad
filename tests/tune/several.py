"""Steps of several models and several optimizers, and faults in one of them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from oxytorch.model.snapshot import Snapshot
from oxytorch.optim.slot import OptimizerSlot
from oxytorch.optim.slot import plain_step as plain_optimizer_step
from oxytorch.tune import Run, Strategy
from oxytorch.tune.verify import Ruling, Verifier
from torch import Tensor, nn
from torch.nn import functional as F

Models = Sequence[nn.Module]
Optimizers = Sequence[torch.optim.Optimizer]
Batch = tuple[Tensor, Tensor]


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(6, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
        nn.Conv2d(8, 1, 4, bias=False), nn.Flatten(),
    )  # fmt: skip


def gan() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """A generator and a discriminator, and their optimizers in the order in which they step."""
    torch.manual_seed(0)
    g, d = generator(), discriminator()
    return [g, d], [torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.999)) for m in (d, g)]


def batches(count: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(6, 3, 8, 8, generator=generator), torch.randn(6, 6, 1, 1, generator=generator))
        for _ in range(count)
    ]


def loss_of_d(models: Models, batch: Batch) -> Tensor:
    g, d = models
    real, noise = batch
    right, wrong = d(real), d(g(noise).detach())
    return F.binary_cross_entropy_with_logits(right, torch.ones_like(right)) + F.binary_cross_entropy_with_logits(
        wrong, torch.zeros_like(wrong)
    )


def loss_of_g(models: Models, batch: Batch) -> Tensor:
    g, d = models
    judged = d(g(batch[1]))
    return F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))


LOSSES = [loss_of_d, loss_of_g]


def plain_step(models: Models, optimizers: Optimizers, batch: Batch) -> Tensor:
    """The loop that everybody writes."""
    total = torch.zeros(())
    for optimizer, loss_fn in zip(optimizers, LOSSES, strict=True):
        optimizer.zero_grad()
        loss = loss_fn(models, batch)
        loss.backward()
        optimizer.step()
        total = total + loss.detach()
    return total


def state(models: Models, optimizers: Optimizers) -> list[Tensor]:
    found = [t.detach().clone() for m in models for t in m.state_dict().values()]
    for optimizer in optimizers:
        for entries in optimizer.state_dict()["state"].values():
            found += [v.clone() for v in entries.values() if isinstance(v, Tensor)]
    return found


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def run_of(way: str = "losses", **options: Any) -> Run:
    models, optimizers = gan()
    if way == "step":
        return Run(models, optimizers, None, batches(), step=lambda b: plain_step(models, optimizers, b), **options)
    return Run(models, optimizers, LOSSES, batches(), **options)


def verifier_of(run: Run) -> Verifier:
    return Verifier(run, Snapshot.of(run.given_models, run.given_optimizers, reach=run.functions))


def ruling_on(run: Run, names: Sequence[str], kind: Any) -> Ruling:
    verifier = verifier_of(run)
    run.set_active(names)
    return verifier.check(kind)


# -- faults ----------------------------------------------------------------------------------------------------------


class PlantedFault(Strategy):
    """Something wrong with one model or one optimizer alone."""

    name = "fault"


def wrong_gradient(which: int, factor: float) -> type[Strategy]:
    class Fault(PlantedFault):
        def apply(self, run: Run) -> None:
            weight = next(p for p in run.models[which].parameters() if p.dim() > 1)
            self.hook = weight.register_hook(lambda grad: grad * factor)

        def revert(self, run: Run) -> None:
            self.hook.remove()

    return Fault


def wrong_output(which: int, factor: float) -> type[Strategy]:
    class Fault(PlantedFault):
        def apply(self, run: Run) -> None:
            run.calls[which].outputs("fault", lambda out: out * factor)

        def revert(self, run: Run) -> None:
            run.calls[which].outputs("fault", None)

    return Fault


def stepping(which: int, make: Callable[[OptimizerSlot], Callable[[Any], Any]]) -> type[Strategy]:
    """A fault in what one optimizer does when it is stepped."""

    class Fault(PlantedFault):
        def apply(self, run: Run) -> None:
            run.slots[which].replace_step(make(run.slots[which]))

        def revert(self, run: Run) -> None:
            run.slots[which].replace_step(None)

    return Fault


def wrong_update(which: int, factor: float) -> type[Strategy]:
    """The optimizer steps too far, with the settings that it should have."""

    def make(slot: OptimizerSlot) -> Callable[[Any], Any]:
        def step(closure: Any) -> Any:
            before = [p.detach().clone() for p in slot.params]
            result = plain_optimizer_step(slot.original, closure)
            with torch.no_grad():
                for p, old in zip(slot.params, before, strict=True):
                    p.copy_(old + factor * (p - old))
            return result

        return step

    return stepping(which, make)


def wrong_state(which: int, factor: float) -> type[Strategy]:
    def make(slot: OptimizerSlot) -> Callable[[Any], Any]:
        def step(closure: Any) -> Any:
            result = plain_optimizer_step(slot.original, closure)
            slot.original.state[slot.params[0]]["exp_avg_sq"].mul_(factor)
            return result

        return step

    return stepping(which, make)


def no_step(which: int, _factor: float) -> type[Strategy]:
    return stepping(which, lambda _slot: lambda _closure: None)


def wrong_buffer(_which: int, factor: float) -> type[Strategy]:
    class Fault(PlantedFault):
        def apply(self, run: Run) -> None:
            def change(module: Any, *_: Any) -> None:
                module.running_mean.data.add_(factor - 1)  # out of autograd's sight

            self.hook = next(
                m for m in run.model.modules() if isinstance(m, nn.BatchNorm2d)
            ).register_forward_hook(change)  # fmt: skip

        def revert(self, run: Run) -> None:
            self.hook.remove()

    return Fault


# -- normal cases ----------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embed(tokens)).mean(1)


def token_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randint(12, (8, 5), generator=generator), torch.randint(12, (8,), generator=generator)) for _ in range(4)
    ]


def loss_of_tokens(models: Models, batch: Batch) -> Tensor:
    encoder, head = models
    return F.cross_entropy(head(encoder(batch[0])), batch[1])


def encoder_and_head(*, tied: bool) -> list[nn.Module]:
    torch.manual_seed(2)
    encoder, head = Encoder(), nn.Linear(8, 12)
    if tied:
        head.weight = encoder.embed.weight
    return [encoder, head]


def unique(models: Models) -> list[Tensor]:
    return list({id(p): p for m in models for p in m.parameters()}.values())


def trained(run: Run, names: Sequence[str]) -> list[Tensor]:
    run.set_active(names)
    for batch in run.batches:
        run.step(batch)
    run.set_active(())
    return state(run.models, [slot.original for slot in run.slots])


def tied() -> Run:
    models = encoder_and_head(tied=True)
    return Run(models, torch.optim.Adam(unique(models), 1e-2), loss_of_tokens, token_batches())


def tied_in_two_optimizers() -> Run:
    models = encoder_and_head(tied=True)
    head = models[1]
    optimizers = [torch.optim.Adam(models[0].parameters(), 1e-2), torch.optim.SGD(head.parameters(), 0.1, momentum=0.9)]
    losses = [loss_of_tokens, lambda models, batch: loss_of_tokens(models, (batch[0].flip(1), batch[1]))]
    return Run(models, optimizers, losses, token_batches())


def frozen() -> Run:
    models = encoder_and_head(tied=False)
    models[0].requires_grad_(False)
    return Run(models, torch.optim.Adam(unique(models), 1e-2), loss_of_tokens, token_batches())


def frozen_while_the_other_steps() -> Run:
    models, optimizers = gan()

    def of_g(models: Models, batch: Batch) -> Tensor:
        models[1].requires_grad_(False)
        try:
            return loss_of_g(models, batch)
        finally:
            models[1].requires_grad_(True)

    return Run(models, optimizers, [loss_of_d, of_g], batches())


def a_part() -> Run:
    models = encoder_and_head(tied=False)
    part = [*models[0].body.parameters(), models[1].bias]  # type: ignore[operator, union-attr]
    return Run(models, torch.optim.Adam(part, 1e-2), loss_of_tokens, token_batches())


def one_loss_of_two() -> Run:
    """One model, of which two optimizers step a part each."""
    model = encoder_and_head(tied=False)[0]
    optimizers = [torch.optim.Adam(model.embed.parameters(), 1e-2), torch.optim.SGD(model.body.parameters(), 0.1)]  # type: ignore[operator, union-attr]
    return Run(model, optimizers, lambda model, b: F.cross_entropy(model(b[0]), b[1] % 8), token_batches())


def steps_more_often() -> Run:
    """A critic whose weights are bounded, and which steps twice for each step of the generator."""
    models, optimizers = gan()

    def step(batch: Batch) -> Tensor:
        for which in (0, 0, 1):
            optimizers[which].zero_grad()
            loss = LOSSES[which](models, batch)
            loss.backward()
            optimizers[which].step()
            with torch.no_grad():
                for p in models[1].parameters():
                    p.clamp_(-0.1, 0.1)
        return loss.detach()

    return Run(models, optimizers, None, batches(), step=step)


CASES = [
    tied, tied_in_two_optimizers, frozen, frozen_while_the_other_steps, a_part, one_loss_of_two, steps_more_often,
]  # fmt: skip
