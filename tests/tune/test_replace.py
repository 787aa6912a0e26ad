"""The user's optimizer object, stepped by another: hooks, schedulers, state and copies as if it were none."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from oxytorch import optim
from oxytorch.tune import Run
from torch import Tensor, nn

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    (torch.optim.RMSprop, {"lr": 1e-2, "centered": True}),
]


def make(cls: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = cls(model.parameters(), **(options or {"lr": 1e-2}))
    batches = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(3)]
    return Run(model, optimizer, nn.functional.cross_entropy, batches)


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return type(left) is type(right) and left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_the_state_is_torchs_own_before_while_and_after(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], steps_before: int
) -> None:
    run, plain = make(cls, **options), make(cls, **options)
    own = run.original
    attributes = set(own.__dict__)
    state = own.state
    for i in range(steps_before):
        run.step(run.batches[i])
        plain.step(plain.batches[i])
    for _ in range(2):
        run.replace_optimizer(optim.replace(own, nonfinite="propagate"))
        for batch, same in zip(run.batches, plain.batches, strict=True):
            run.step(batch)
            plain.step(same)
        told, expected = own.state_dict(), plain.original.state_dict()
        assert told["state"].keys() == expected["state"].keys()
        assert told["param_groups"] == expected["param_groups"]
        for index, entries in expected["state"].items():
            assert type(told["state"][index]) is dict
            assert told["state"][index].keys() == entries.keys()
            for key, value in entries.items():
                mine = told["state"][index][key]
                # Averages of squares are as small as 1e-5: a part of their size.
                assert float((mine - value).norm()) <= 1e-5 * float(value.norm()), key
                assert mine.dtype == value.dtype and mine.shape == value.shape
        run.replace_optimizer(None)
        assert own.state is state
        assert set(own.__dict__) - {"_opt_called"} == attributes - {"_opt_called"}
        assert all(type(entries) is dict for entries in own.state.values())
        run.step(run.batches[0])
        plain.step(plain.batches[0])
    for p, q in zip(run.params, plain.params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("when", ["before", "while"])
def test_schedulers_steer_and_do_not_warn(when: str) -> None:
    run = make()
    scheduler = torch.optim.lr_scheduler.StepLR(run.original, 1, 0.5) if when == "before" else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            run.replace_optimizer(optim.replace(run.original))
            if scheduler is None:
                scheduler = torch.optim.lr_scheduler.StepLR(run.original, 1, 0.5)
            for batch in run.batches:
                run.step(batch)
                scheduler.step()
            run.replace_optimizer(None)
            run.step(run.batches[0])
            scheduler.step()
    assert run.original.param_groups[0]["lr"] == pytest.approx(1e-2 / 2**8)
    assert float(run.original.state[run.params[0]]["step"]) == 8


def test_hooks_on_the_users_object_fire_once_and_get_it() -> None:
    run = make()
    seen: list[Any] = []
    run.original.register_step_pre_hook(lambda optimizer, *_: seen.append(("pre", optimizer)))
    run.replace_optimizer(optim.replace(run.original))
    run.original.register_step_post_hook(lambda optimizer, *_: seen.append(("post", optimizer)))
    run.original.step()
    assert seen == [("pre", run.original), ("post", run.original)]
    run.replace_optimizer(None)
    run.original.step()
    assert len(seen) == 4


def test_a_closure_is_called() -> None:
    run = make()
    run.replace_optimizer(optim.replace(run.original))

    def closure() -> Tensor:
        run.original.zero_grad()
        loss = run.loss(run.batches[0])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    first = run.original.step(closure).item()
    assert run.original.step(closure).item() < first


def test_state_dicts_are_loaded_and_copies_are_torchs_own() -> None:
    run = make()
    for batch in run.batches:
        run.step(batch)
    saved = copy.deepcopy(run.original.state_dict())
    run.replace_optimizer(optim.replace(run.original))
    file = io.BytesIO()
    torch.save(run.original.state_dict(), file)
    file.seek(0)
    assert equal(torch.load(file, weights_only=True), saved)
    twin = copy.deepcopy(run.original)
    assert type(twin.state).__name__ == "defaultdict"
    assert {type(entries) for entries in twin.state.values()} == {dict}
    run.step(run.batches[0])
    run.original.load_state_dict(saved)
    assert equal(run.original.state_dict(), saved)
    run.step(run.batches[0])
    run.replace_optimizer(None)
    assert float(run.original.state[run.params[0]]["step"]) == 4
    run.original.load_state_dict(saved)
    assert equal(run.original.state_dict(), saved)


def test_a_group_added_while_replaced_is_stepped_and_stays() -> None:
    run = make()
    run.replace_optimizer(optim.replace(run.original))
    run.step(run.batches[0])
    late = nn.Parameter(torch.ones(3))
    run.original.add_param_group({"params": [late]})
    late.grad = torch.ones(3)
    run.original.step()
    assert not torch.equal(late, torch.ones(3))
    run.replace_optimizer(None)
    assert len(run.original.param_groups) == 2
    assert float(run.original.state[late]["step"]) == 1
