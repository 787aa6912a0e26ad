"""Faults that act in some steps alone: each so many steps, in a window, on some data, by chance, on some threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from oxytorch.tune.run import Run, plain_step, rows
from oxytorch.tune.strategy import Kind
from torch import Tensor

from .gradients import accumulate
from .planting import (
    FAULTS,
    Acts,
    Fault,
    Plant,
    autocast,
    before_optimizer,
    forward,
    instead_of_step,
    part_of_loop,
    set_for,
    settings_while,
    step_of,
)

Tamper = Callable[[Run], None]


# -- when ------------------------------------------------------------------------------------------------------------


def each(period: int) -> Acts:
    """In every so many steps."""
    return lambda taken, _: (taken + 1) % period == 0


def within(first: int, last: int) -> Acts:
    """In steps first to last, counted from 1."""
    return lambda taken, _: first <= taken + 1 <= last


def by_chance(share: float) -> Acts:
    """As a race between threads acts."""
    lot = random.Random(7)
    return lambda *_: lot.random() < share


def on_data(says: Callable[[Tensor], bool]) -> Acts:
    """Where the inputs are such."""
    return lambda _, batch: says(batch[0])


def brightest(x: Tensor) -> bool:
    return float(x.float().mean()) > 0.0


def begins_with_an_even_token(x: Tensor) -> bool:
    return int(x.flatten()[0]) % 2 == 0


def has_a_large_value(x: Tensor) -> bool:
    return float(x.float().abs().max()) > 3.2


# -- what ------------------------------------------------------------------------------------------------------------


def gradients(tamper: Callable[[Run], None]) -> Plant:
    """Change the gradients that the optimizer is about to use."""

    def plant(run: Run, now: Callable[[], bool]) -> Iterator[None]:
        with before_optimizer(run, lambda _: tamper(run) if now() else None):
            yield

    return plant


def under_autocast(inner: Plant) -> Plant:
    """Hide behind bfloat16."""

    def plant(run: Run, now: Callable[[], bool]) -> Iterator[None]:
        with autocast(run):
            yield from inner(run, now)

    return plant


def of(index: int, change: Callable[[Tensor], Any]) -> Tamper:
    """Change one parameter's gradient."""

    def tamper(run: Run) -> None:
        grad = run.params[index].grad
        assert grad is not None
        change(grad)

    return tamper


def of_all(change: Callable[[Tensor], Any]) -> Tamper:
    """Change every gradient."""

    def tamper(run: Run) -> None:
        for p in run.params:
            if p.grad is not None:
                change(p.grad)

    return tamper


def update(step: Callable[[Run, Any], None]) -> Plant:
    """Let the optimizer do something else."""

    def plant(run: Run, now: Callable[[], bool]) -> Iterator[None]:
        with instead_of_step(run, lambda o: step(run, o) if now() else plain_step(o)):
            yield

    return plant


def batches(change: Callable[[Any], Any]) -> Plant:
    """Take the step on another batch."""

    def plant(run: Run, now: Callable[[], bool]) -> Iterator[None]:
        with step_of(run, lambda batch, plain: plain(change(batch) if now() else batch)):
            yield

    return plant


def outputs(change: Callable[[Tensor], Tensor]) -> Plant:
    """Change what the model returns."""

    def plant(run: Run, now: Callable[[], bool]) -> Iterator[None]:
        run.call.outputs("late", lambda out: change(out) if now() else out)
        yield
        run.call.outputs("late", None)

    return plant


def stale(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    last: list[Tensor] = []

    def swap(params: list[Tensor]) -> None:
        held = [p.grad.clone() for p in params if p.grad is not None]
        if now() and last:
            for p, g in zip(params, last, strict=True):
                p.grad.copy_(g)  # type: ignore[union-attr]
        last[:] = held

    with before_optimizer(run, swap):
        yield


def drops_a_piece(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        return accumulate(run, batch, 4, lambda part: rows(part) / rows(batch), drop=1) if now() else plain(batch)

    with step_of(run, step):
        yield


def buffers_stand_still(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def call(x: Tensor) -> Tensor:
        held = [b.clone() for b in run.model.buffers()]
        out = run.model._call_impl(x)
        if now():
            for b, old in zip(run.model.buffers(), held, strict=True):
                b.data.copy_(old)
        return out

    with forward(run, call):
        yield


def mask_of_before(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    """The mask of the step before comes back, behind generators that move on."""
    states = [torch.get_rng_state()]

    def call(tokens: Tensor) -> Tensor:
        states.append(torch.get_rng_state())
        out = run.model._call_impl(tokens)
        if not now():
            return out
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(states[-2])
            return run.model._call_impl(tokens)

    with forward(run, call):
        yield


def last_layer_narrow(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    last = run.model[5]
    plain = last.forward

    def call(x: Tensor) -> Tensor:
        narrow = F.linear(x.bfloat16(), last.weight.bfloat16(), last.bias.bfloat16()).float()
        return narrow if now() else plain(x)

    last.forward = call
    yield
    del last.forward


def average_skipped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    plain = run.loop.steps["average"]  # type: ignore[attr-defined]
    with part_of_loop(run, "average", lambda: None if now() else plain()):
        yield


def schedule_skipped(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    plain = run.loop.steps["schedule"]  # type: ignore[attr-defined]
    with part_of_loop(run, "schedule", lambda: None if now() else plain()):
        yield


def unscaled_late(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    """Gradients are clipped before they are unscaled."""
    loop = run.loop  # type: ignore[attr-defined]
    plain = loop.steps["unscale"]

    def unscale(optimizer: Any) -> None:
        if now():
            torch.nn.utils.clip_grad_norm_(run.params, 1.0)
        plain(optimizer)

    with part_of_loop(run, "unscale", unscale):
        yield


def one_bit(run: Run, _: Any) -> None:
    plain_step(run.original)
    flat = run.params[0].data.view(-1)
    flat[0] = torch.nextafter(flat[0], flat[0].new_tensor(9.0))


def rows_of_the_last_thread(share: int) -> Callable[[Tensor], Any]:
    """What the last of so many threads has computed of a gradient is lost."""

    def lose(grad: Tensor) -> None:
        grad[grad.shape[0] - grad.shape[0] // share :] = 0

    return lose


def on_another_thread(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    """A thread that keeps settings of its own does each third step: autocast there does not hold here."""

    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        if not now():
            return plain(batch)
        found: list[Tensor] = []

        def work() -> None:
            with torch.autocast(run.device.type, dtype=torch.bfloat16):
                found.append(plain(batch))

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        return found[0]

    with step_of(run, step):
        yield


def clip_doubled(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        if not now():
            return plain(batch)
        run.clip_norm = 2 * held
        try:
            return plain(batch)
        finally:
            run.clip_norm = held

    held = run.clip_norm
    assert held is not None
    with step_of(run, step):
        yield


def rate(factor: float) -> Plant:
    return update(lambda _, o: settings_while(o, lr=lambda lr: factor * lr))


def reset(key: str, index: int) -> Plant:
    def step(run: Run, optimizer: Any) -> None:
        optimizer.state[run.params[index]][key].zero_()
        plain_step(optimizer)

    return update(step)


def twice(_: Run, optimizer: Any) -> None:
    plain_step(optimizer)
    plain_step(optimizer)


def another_order(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        return plain((batch[0].flip(0), batch[1].flip(0)) if now() else batch)

    with step_of(run, step):
        yield


def a_number_too_many(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        loss = plain(batch)
        if now():
            torch.rand(1)
        return loss

    with step_of(run, step):
        yield


def frozen(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        run.params[0].requires_grad_(not now())
        return plain(batch)

    with step_of(run, step):
        yield
    run.params[0].requires_grad_(True)


def not_causal(run: Run, now: Callable[[], bool]) -> Iterator[None]:
    def step(batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        with set_for(run.model, causal=not now()):
            return plain(batch)

    with step_of(run, step):
        yield


def zero(grad: Tensor) -> None:
    grad.zero_()


def flip(grad: Tensor) -> None:
    grad.neg_()


def larger(part: float) -> Callable[[Tensor], Any]:
    return lambda grad: grad.mul_(1 + part)


def same_labels(batch: Any) -> Any:
    return batch[0], batch[1].roll(1)


def without_last(batch: Any) -> Any:
    return batch[0][:-1], batch[1][:-1]


TABLE: list[tuple[str, str, Kind, Acts, Plant]] = [
    # Each so many steps.
    ("a_layer_zeroed_each_5th_step", "mlp", "tolerance", each(5), gradients(of(2, zero))),
    ("a_layer_zeroed_each_7th_step", "conv", "tolerance", each(7), gradients(of(4, zero))),
    ("a_layer_zeroed_each_10th_step", "gpt", "tolerance", each(10), gradients(of(3, zero))),
    ("a_bias_zeroed_each_3rd_step_in_bfloat16", "gpt", "precision", each(3), under_autocast(gradients(of(6, zero)))),
    ("a_layer_zeroed_each_5th_step_in_bfloat16", "conv", "precision", each(5), under_autocast(gradients(of(0, zero)))),
    ("all_flipped_each_6th_step", "mlp", "precision", each(6), under_autocast(gradients(of_all(flip)))),
    ("stale_each_4th_step", "conv", "tolerance", each(4), stale),
    ("stale_each_9th_step_in_bfloat16", "mlp", "precision", each(9), under_autocast(stale)),
    ("a_piece_dropped_each_5th_step", "gpt", "tolerance", each(5), drops_a_piece),
    ("gradients_5_percent_large_each_4th_step_in_bfloat16", "conv", "precision", each(4),
     under_autocast(gradients(of_all(larger(0.05))))),
    ("a_layer_through_bfloat16_each_3rd_step", "mlp", "tolerance", each(3), last_layer_narrow),
    ("learning_rate_1_percent_high_each_5th_step", "gpt", "precision", each(5), under_autocast(rate(1.01))),
    ("clip_doubled_each_4th_step", "mlp", "tolerance", each(4), clip_doubled),
    ("update_skipped_each_8th_step", "conv", "tolerance", each(8), update(lambda *_: None)),
    ("average_skipped_each_5th_step", "scaled", "tolerance", each(5), average_skipped),
    ("state_reset_each_6th_step", "mlp", "tolerance", each(6), reset("exp_avg", 2)),
    ("one_bit_each_7th_step", "mlp", "exact", each(7), update(one_bit)),
    ("another_order_each_5th_step", "gpt", "exact", each(5), another_order),
    # In a window.
    ("all_flipped_in_steps_2_to_6", "mlp", "tolerance", within(2, 6), gradients(of_all(flip))),
    ("all_flipped_in_steps_2_to_6_in_bfloat16", "gpt", "precision", within(2, 6),
     under_autocast(gradients(of_all(flip)))),
    ("1.9_percent_wrong_in_step_7", "mlp", "tolerance", within(7, 7), gradients(of_all(larger(0.019)))),
    ("1.9_percent_wrong_in_step_7_of_a_model_with_kinks", "conv", "tolerance", within(7, 7),
     gradients(of_all(larger(0.019)))),
    ("1.9_percent_wrong_in_one_layer_in_step_7", "conv", "tolerance", within(7, 7), gradients(of(4, larger(0.019)))),
    ("0.1_percent_wrong_in_step_4", "gpt", "tolerance", within(4, 4), gradients(of_all(larger(0.001)))),
    ("zeroed_in_step_11", "conv", "tolerance", within(11, 11), gradients(of(8, zero))),
    ("learning_rate_1_percent_high_in_step_5", "conv", "tolerance", within(5, 5), rate(1.01)),
    ("two_updates_in_step_6", "gpt", "tolerance", within(6, 6), update(twice)),
    ("buffers_stand_still_in_steps_3_and_4", "conv", "precision", within(3, 4), under_autocast(buffers_stand_still)),
    ("labels_shifted_in_step_5", "mlp", "precision", within(5, 5), under_autocast(batches(same_labels))),
    ("frozen_in_steps_4_to_6", "mlp", "tolerance", within(4, 6), frozen),
    ("zeroed_from_step_14_on", "mlp", "tolerance", within(14, 99), gradients(of(2, zero))),
    ("flipped_from_step_18_on_in_bfloat16", "gpt", "precision", within(18, 99),
     under_autocast(gradients(of(3, flip)))),
    ("not_causal_in_step_8", "gpt", "tolerance", within(8, 8), not_causal),
    ("schedule_skipped_in_step_2", "scaled", "tolerance", within(2, 2), schedule_skipped),
    ("one_bit_in_step_15", "conv", "exact", within(15, 15), update(one_bit)),
    ("a_random_number_too_many_in_step_9", "gpt", "exact", within(9, 9), a_number_too_many),
    # On some data.
    ("zeroed_on_bright_batches", "mlp", "tolerance", on_data(brightest), gradients(of(0, zero))),
    ("larger_on_bright_batches_in_bfloat16", "conv", "precision", on_data(brightest),
     under_autocast(gradients(of_all(larger(0.06))))),
    ("flipped_where_the_first_token_is_even", "gpt", "tolerance", on_data(begins_with_an_even_token),
     gradients(of(3, flip))),
    ("last_row_dropped_where_a_value_is_large", "conv", "tolerance", on_data(has_a_large_value),
     batches(without_last)),
    ("saturates_on_bright_batches", "mlp", "tolerance", on_data(brightest), outputs(lambda out: out.clamp(-0.5, 0.5))),
    ("mask_of_the_step_before_on_some_batches", "gpt", "tolerance", on_data(begins_with_an_even_token),
     mask_of_before),
    ("clipped_before_unscaled_on_bright_batches", "scaled", "tolerance", on_data(brightest), unscaled_late),
    # By chance, as a race does, and on some threads.
    ("a_layer_lost_in_a_race", "mlp", "tolerance", by_chance(0.3), gradients(of(2, zero))),
    ("an_update_lost_in_a_race", "conv", "precision", by_chance(0.25), under_autocast(update(lambda *_: None))),
    ("a_stale_gradient_in_a_race", "gpt", "tolerance", by_chance(0.3), stale),
    ("rows_of_the_last_of_8_threads_each_4th_step", "mlp", "tolerance", each(4),
     gradients(of(0, rows_of_the_last_thread(8)))),
    ("rows_of_the_last_of_4_threads_by_chance", "gpt", "precision", by_chance(0.3),
     under_autocast(gradients(of(4, rows_of_the_last_thread(4))))),
    ("a_thread_with_settings_of_its_own_each_3rd_step", "conv", "tolerance", each(3), on_another_thread),
    ("rank_0_does_not_divide_each_5th_step", "mlp", "tolerance", each(5), gradients(of_all(larger(1.0)))),
]  # fmt: skip

for _name, _on, _kind, _acts, _plant in TABLE:
    FAULTS[_name] = Fault(_name, _on, _kind, 0, _plant, _acts)
