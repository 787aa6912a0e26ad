"""What users do to parameters and optimizer state between two steps: other memory, other layouts, other entries."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import oxytorch.optim
import pytest
import torch
from mutations import MOVES, cloned, state_tensors, with_gaps
from referee import moments_of
from test_state import FORMATS, OPTIONS, digest, tensors_of
from torch import Tensor, nn
from ways import NATIVE_STEP, WAYS, Way

pytestmark = pytest.mark.cpu_only("memory is looked at")

SHAPES = [(8, 3, 5, 5), (8, 3, 5, 5), (7, 33), (257,), ()]
CLASSES = ["AdamW", "SGD", "RMSprop", "Adagrad"]
HYPER: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1, "amsgrad": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {"lr_decay": 0.1},
}
Edit = Callable[[Any, list[Tensor]], None]


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def grads_of(step: int, dtype: torch.dtype = torch.float32, count: int = len(SHAPES)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES[:count]]


# ---- edits that keep all values


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("tail", FORMATS)
@pytest.mark.parametrize("name", OPTIONS)
def test_memory_given_to_state_changes_no_bit(name: str, tail: str, move: str) -> None:
    """All that the step reads or writes besides gradients: moments, scales, counters, masters, averages, copies."""
    if move == "with_gaps" and tail in ("int8", "seven bytes"):
        pytest.skip("codes are read in the order of memory: refused, see below")
    shapes = [(16, 33), (5, 5)] if name == "Muon" else SHAPES
    options = {**FORMATS[tail], "ema_decay": 0.9, **({} if "copy_dtype" in FORMATS[tail] else {"copy_dtype": "fp16"})}

    def trained(edit: Callable[[Tensor], None] | None) -> Any:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]
        opt = getattr(oxytorch.optim, name)(params, lr=1e-2, **OPTIONS[name], **options)
        for step in range(4):
            for p in params:
                p.grad = (0.1 * torch.randn(p.shape, generator=generator)).bfloat16()
            opt.step()
            if edit is not None and step % 2 == 0:
                for t in tensors_of(opt)[len(params) :]:
                    edit(t)
        assert opt._tail.native or name == "Muon"
        return opt

    assert digest(trained(MOVES[move])) == digest(trained(None))


@pytest.mark.parametrize("move", MOVES)
def test_memory_given_to_parameters_and_gradients_changes_no_bit(move: str) -> None:
    def trained(edit: Callable[[Tensor], None] | None) -> Any:
        params = make_params()
        opt = oxytorch.optim.AdamW(params, lr=0.1, ema_decay=0.9)
        for step in range(4):
            for p, g in zip(params, grads_of(step), strict=True):
                p.grad = g
                if edit is not None:
                    edit(p.grad)
            if edit not in (None, with_gaps) and step % 2 == 1:  # views with gaps are stepped by torch's operators
                with torch.no_grad():
                    for p in params:
                        edit(p)
            opt.step()
        return opt

    assert digest(trained(MOVES[move])) == digest(trained(None))


# ---- edits as in torch


def moved(opt: Any, params: list[Tensor]) -> None:
    for t in state_tensors(opt):
        cloned(t)


def moved_with_gaps(opt: Any, params: list[Tensor]) -> None:
    for t in state_tensors(opt):
        with_gaps(t)


def shared_out_anew(opt: Any, params: list[Tensor]) -> None:
    """The state of two parameters of one shape, exchanged behind its tensors."""
    for key, one in opt.state[params[0]].items():
        other = opt.state[params[1]][key]
        if isinstance(one, Tensor):
            one.data, other.data = other.data, one.data


def entries_exchanged(opt: Any, params: list[Tensor]) -> None:
    a, b = params[:2]
    opt.state[a], opt.state[b] = opt.state[b], opt.state[a]


def weights_last(opt: Any, params: list[Tensor]) -> None:
    for p in params:
        if p.dim() == 4:
            last = p.is_contiguous()
            p.data = p.data.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def state_last(opt: Any, params: list[Tensor]) -> None:
    for t in state_tensors(opt):
        if t.dim() == 4:
            t.data = t.data.to(memory_format=torch.channels_last)


def weights_and_state_last(opt: Any, params: list[Tensor]) -> None:
    weights_last(opt, params)
    state_last(opt, params)


def transposed(opt: Any, params: list[Tensor]) -> None:
    for p in params:
        if p.dim() >= 2:
            p.data = p.data.transpose(0, 1).contiguous().transpose(0, 1)


def weights_with_gaps(opt: Any, params: list[Tensor]) -> None:
    for p in params:
        with_gaps(p)


def popped(opt: Any, params: list[Tensor]) -> None:
    opt.state.pop(params[2], None)
    opt.state.pop(params[4], None)


def popped_item(opt: Any, params: list[Tensor]) -> None:
    opt.state.popitem()


def deleted(opt: Any, params: list[Tensor]) -> None:
    del opt.state[params[1]]


def cleared(opt: Any, params: list[Tensor]) -> None:
    opt.state.clear()


def cleared_inside(opt: Any, params: list[Tensor]) -> None:
    opt.state[params[0]].clear()


def doubled(entries: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if k == "step" else v * 2 for k, v in entries.items() if isinstance(v, Tensor)}


def updated_inside(opt: Any, params: list[Tensor]) -> None:
    opt.state[params[2]].update(doubled(opt.state[params[2]]))


def merged_inside(opt: Any, params: list[Tensor]) -> None:
    opt.state[params[3]] |= doubled(opt.state[params[3]])


def set_inside(opt: Any, params: list[Tensor]) -> None:
    for key, value in doubled(opt.state[params[0]]).items():
        opt.state[params[0]][key] = value


def popped_and_set_by_default(opt: Any, params: list[Tensor]) -> None:
    new = doubled(opt.state[params[1]])
    for key in list(new):
        opt.state[params[1]].pop(key)
    for key, value in new.items():
        opt.state[params[1]].setdefault(key, value)


def updated(opt: Any, params: list[Tensor]) -> None:
    opt.state.update({params[0]: doubled(opt.state[params[0]])})


def merged(opt: Any, params: list[Tensor]) -> None:
    opt.state |= {params[3]: doubled(opt.state[params[3]])}


def state_assigned(opt: Any, params: list[Tensor]) -> None:
    opt.state = defaultdict(dict, {p: doubled(entries) for p, entries in opt.state.items()})


def empty_state_assigned(opt: Any, params: list[Tensor]) -> None:
    opt.state = defaultdict(dict)


def groups_assigned(opt: Any, params: list[Tensor]) -> None:
    opt.param_groups = [{**group, "lr": 0.5 * group["lr"]} for group in opt.param_groups]


def fewer_parameters(opt: Any, params: list[Tensor]) -> None:
    opt.param_groups[0]["params"] = list(params[1:])
    opt.state.pop(params[0], None)


def order_changed(opt: Any, params: list[Tensor]) -> None:
    opt.param_groups[0]["params"].reverse()


def split_into_groups(opt: Any, params: list[Tensor]) -> None:
    group = opt.param_groups[0]
    opt.param_groups = [{**group, "params": params[:2]}, {**group, "params": params[2:], "lr": 0.01}]


def reloaded(opt: Any, params: list[Tensor]) -> None:
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def reloaded_and_rescheduled(opt: Any, params: list[Tensor]) -> None:
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt.param_groups[0]["lr"] *= 0.1


def users_own_entries(opt: Any, params: list[Tensor]) -> None:
    opt.state[params[0]]["mask"] = torch.ones(3)
    opt.state[params[1]]["seen"] = 7


EDITS: dict[str, Edit] = {
    f.__name__: f
    for f in (
        moved,
        moved_with_gaps,
        shared_out_anew,
        entries_exchanged,
        weights_last,
        state_last,
        weights_and_state_last,
        transposed,
        weights_with_gaps,
        popped,
        popped_item,
        deleted,
        cleared,
        cleared_inside,
        updated_inside,
        merged_inside,
        set_inside,
        popped_and_set_by_default,
        updated,
        merged,
        state_assigned,
        empty_state_assigned,
        groups_assigned,
        fewer_parameters,
        order_changed,
        split_into_groups,
        reloaded,
        reloaded_and_rescheduled,
        users_own_entries,
    )
}


def ways_of(name: str) -> list[str]:
    return [way for way in WAYS if way != "native_step" or name in NATIVE_STEP]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("name", "way"), [(name, way) for name in CLASSES for way in ways_of(name)])
def test_edits_between_steps_are_as_in_torch(name: str, way: str, edit: str) -> None:
    """The same edits of an fp64 optimizer of torch; the bound is a few roundings of fp32."""
    params = make_params()
    peers = [nn.Parameter(p.detach().double()) for p in params]
    ours = Way(way, name, params, lr=0.05, **HYPER[name])
    theirs = getattr(torch.optim, name)(peers, lr=0.05, foreach=False, **HYPER[name])
    for step in range(7):
        grads = grads_of(step)
        if step == 4:
            grads[2] = None
        ours.step(grads)
        for p, g in zip(peers, grads, strict=True):
            p.grad = None if g is None else g.double()
        try:
            theirs.step()
        except KeyError as error:
            pytest.skip(f"this torch's own {name} needs the state that was taken away: {error}")
        if step in (1, 3, 4):
            with torch.no_grad():
                EDITS[edit](ours.opt, list(params))
                EDITS[edit](theirs, list(peers))
    for p, q in zip(params, peers, strict=True):
        torch.testing.assert_close(p.detach().double(), q.detach(), rtol=2e-6, atol=2e-6)
    for p, q in zip(params, peers, strict=True):
        for key, value in theirs.state.get(q, {}).items():
            mine = ours.opt.state[p][key]
            if isinstance(value, Tensor):
                torch.testing.assert_close(mine.double(), value.double(), rtol=1e-5, atol=1e-5)
            else:
                assert mine == value
    assert ours.opt.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()


@pytest.mark.parametrize("way", ["optim", "step_tail"])
def test_a_momentum_buffer_that_was_taken_away_starts_anew(way: str) -> None:
    params, peers = make_params(), make_params()
    ours = Way(way, "SGD", params, lr=0.1, momentum=0.9, dampening=0.5)
    theirs = torch.optim.SGD(peers, lr=0.1, momentum=0.9, dampening=0.5)
    for step in range(6):
        for p, g in zip(peers, grads_of(step), strict=True):
            p.grad = g
        theirs.step()
        ours.step(grads_of(step))
        for opt, held in ((ours.opt, params), (theirs, peers)):
            if step == 1:
                opt.state[held[0]].pop("momentum_buffer")
            if step == 3:
                opt.state[held[1]]["momentum_buffer"] = None
    torch.testing.assert_close(params, peers, rtol=1e-6, atol=2e-6)


# ---- layouts


LAYOUTS = {"weights_last": weights_last, "transposed": transposed, "weights_with_gaps": weights_with_gaps}


@pytest.mark.parametrize("composite", [False, True], ids=["native", "composite"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tail", ["plain", "masters"])
@pytest.mark.parametrize("name", OPTIONS)
def test_averages_masters_and_copies_follow_the_layout(name: str, tail: str, layout: str, composite: bool) -> None:
    """Element by element nothing tells that the layout changed in mid-run."""

    def trained(edit: Edit | None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(16, 33), (5, 5)] if name == "Muon" else SHAPES
        params = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]
        options = {**OPTIONS[name], **FORMATS[tail], "ema_decay": 0.5, "copy_dtype": "fp16"}
        opt = getattr(oxytorch.optim, name)(params, lr=0.05, force_composite=composite, **options)
        for step in range(6):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            opt.step()
            if edit is not None and step in (1, 3):
                edit(opt, list(params))
        if layout != "weights_with_gaps" and not composite and name != "Muon":
            assert opt._tail.native
        return tensors_of(opt)

    for mine, wanted in zip(trained(LAYOUTS[layout]), trained(None), strict=True):
        if (
            composite or name == "Muon" or layout == "weights_with_gaps"
        ):  # torch's operators, or both kinds of evaluation
            torch.testing.assert_close(mine, wanted, rtol=2.0**-7, atol=2.0**-7 * 0.05)
        else:
            assert torch.equal(mine, wanted)


@pytest.mark.parametrize("edit", [weights_last, state_last, weights_and_state_last, transposed])
@pytest.mark.parametrize("name", [n for n in OPTIONS if n != "Muon"])
def test_codes_and_low_bits_are_converted_by_index(name: str, edit: Edit) -> None:
    params = make_params(torch.bfloat16)
    options = {"state_dtype": "int8", "master_weights": "int8", "stochastic_rounding": False}
    opt = getattr(oxytorch.optim, name)(params, lr=0.05, **OPTIONS[name], **options)
    for step in range(3):
        for p, g in zip(params, grads_of(step, torch.bfloat16), strict=True):
            p.grad = g
        opt.step()
    before = [moments_of(name, opt.state[p]) for p in params]
    low = [opt.state[p]["low_bits"].clone() for p in params]
    weights = [p.detach().clone() for p in params]
    edit(opt, list(params))
    for group in opt.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    for p in params:
        p.grad = torch.zeros_like(p)
    before_steps = [opt._step_tail().decoded_state(i) for i in range(len(params))]
    opt.step()
    for p, old, given, bits, weight in zip(params, before, before_steps, low, weights, strict=True):
        assert torch.equal(p, weight) and torch.equal(opt.state[p]["low_bits"], bits)
        for key, value in old.items():
            torch.testing.assert_close(given[key].double(), value, rtol=1e-6, atol=0)
            group = next(g for g in opt.param_groups if any(q is p for q in g["params"]))
            after = moments_of(name, opt.state[p])[key]
            decay = {"exp_avg": "betas", "exp_avg_sq": "betas"}.get(key)
            rate = (
                group[decay][0 if key == "exp_avg" else 1]
                if decay
                else {
                    "momentum_buffer": group.get("momentum"),
                    "square_avg": group.get("alpha"),
                    "grad_avg": group.get("alpha"),
                }.get(key, 1.0)
            )
            if name == "Lion":
                rate = group["betas"][1]
            # Two roundings to codes: each half a step of its group's largest, at most this share of all's largest.
            assert ((after - rate * value).abs() <= 0.03 * value.abs().max()).all(), key


def test_state_dict_shows_what_the_step_uses() -> None:
    params = make_params()
    opt = oxytorch.optim.AdamW(params, lr=0.1)
    opt_state = []
    for step in range(4):
        for p, g in zip(params, grads_of(step), strict=True):
            p.grad = g
        opt.step()
        if step == 1:
            opt_state = state_tensors(opt)
            weights_last(opt, list(params))
    assert params[0].is_contiguous(memory_format=torch.channels_last)
    for p in params:
        for key in ("exp_avg", "exp_avg_sq"):
            assert opt.state[p][key].stride() == p.stride()
    assert all(a is b for a, b in zip(opt_state, state_tensors(opt), strict=True)), "the same tensor objects"
    again = oxytorch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in params], lr=0.1)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for o in (opt, again):
        for p, g in zip(o.param_groups[0]["params"], grads_of(9), strict=True):
            p.grad = g
        o.step()
    for p, q in zip(params, again.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict"])
def test_copies_made_in_another_layout_carry_on(way: str) -> None:
    def trained(copied: bool) -> list[Tensor]:
        params = make_params()
        opt = oxytorch.optim.AdamW(params, lr=0.1, ema_decay=0.9, state_dtype="fp32")
        for step in range(6):
            if step == 3 and copied:
                weights_last(opt, list(params))
                if way == "state_dict":
                    new = [nn.Parameter(p.detach().clone()) for p in params]
                    made = oxytorch.optim.AdamW(new, lr=0.1, ema_decay=0.9)
                    made.load_state_dict(opt.state_dict())
                    made.load_ema_state_dict(opt.ema_state_dict())
                    opt = made
                else:
                    opt = copy.deepcopy(opt) if way == "deepcopy" else pickle.loads(pickle.dumps(opt))
                params = opt.param_groups[0]["params"]
            for p, g in zip(params, grads_of(step), strict=True):
                p.grad = g
            opt.step()
        return tensors_of(opt)

    for a, b in zip(trained(True), trained(False), strict=True):
        assert torch.equal(a, b)


# ---- what cannot be served is refused by name, and nothing is changed


def freed(t: Tensor) -> None:
    t.untyped_storage().resize_(0)


WRONG: dict[str, tuple[Callable[[Tensor], None], type[Exception], str]] = {
    "shape": (lambda t: setattr(t, "data", torch.zeros(9)), ValueError, r"shape \[9\]"),
    "one element": (lambda t: setattr(t, "data", torch.zeros(())), ValueError, r"shape \[\]"),
    "dtype": (lambda t: setattr(t, "data", t.data.to(torch.int32)), TypeError, "dtype Int"),
    "device": (lambda t: setattr(t, "data", t.data.to("meta")), ValueError, "is on meta"),
    "freed": (freed, RuntimeError, "was freed"),
    "smaller": (lambda t: t.resize_(2), ValueError, r"shape \[2\]"),
}


@pytest.mark.parametrize("composite", [False, True], ids=["native", "composite"])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("entry", ["exp_avg", "exp_avg_sq", "ema", "copy"])
def test_state_that_no_longer_fits_is_refused_by_name(entry: str, wrong: str, composite: bool) -> None:
    params = make_params()
    named = [(f"layer.{i}", p) for i, p in enumerate(params)]
    options = {"ema_decay": 0.9, "copy_dtype": "bf16", "force_composite": composite}
    opt = oxytorch.optim.AdamW(named, lr=0.1, **options)
    opt_step = [p.detach().clone() for p in params]
    for p, g in zip(params, grads_of(0), strict=True):
        p.grad = g
    opt.step()
    opt_step = [p.detach().clone() for p in params]
    one = {"ema": lambda: opt._tail.ema(2), "copy": lambda: opt.copies()[2]}.get(
        entry, lambda: opt.state[params[2]][entry]
    )()
    edit, kind, text = WRONG[wrong]
    try:
        edit(one)
    except RuntimeError as error:
        pytest.skip(f"torch refuses it: {error}")
    with pytest.raises(kind, match=rf"parameter layer\.2.*{text}|{text}.*parameter layer\.2|layer\.2"):
        opt.step()
    assert all(torch.equal(p, kept) for p, kept in zip(params, opt_step, strict=True))


@pytest.mark.parametrize("way", ["optim", "step_tail", "Trainer"])
def test_a_model_that_changes_dtype_is_refused_and_comes_back(way: str) -> None:
    """As torch's AdamW refuses it; brought back, it carries on as if nothing had been."""

    def trained(change: bool) -> list[Tensor]:
        params = make_params()
        ours = Way(way, "AdamW", params, lr=0.1)
        for step in range(4):
            ours.step(grads_of(step))
            if change and step == 1:
                for dtype in (torch.float64, torch.bfloat16, torch.float16):
                    kept = [p.data for p in params]
                    for p in params:
                        p.grad = None
                        p.data = p.data.to(dtype)
                    with pytest.raises(RuntimeError, match="was of dtype Float when the optimizer was built"):
                        ours.step(grads_of(9, dtype))
                    for p, data in zip(params, kept, strict=True):
                        p.grad = None
                        p.data = data
        return [p.detach() for p in params]

    for a, b in zip(trained(True), trained(False), strict=True):
        assert torch.equal(a, b)


def test_masters_follow_weights_that_were_exchanged() -> None:
    params = [nn.Parameter(torch.randn(40, generator=torch.Generator().manual_seed(0)).bfloat16())]
    opt = oxytorch.optim.SGD(params, lr=1e-3, master_weights=True)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    params[0].data = torch.full((40,), 3.0, dtype=torch.bfloat16)
    params[0].grad = torch.zeros_like(params[0])
    opt.step()
    assert torch.equal(params[0], torch.full_like(params[0], 3.0))
    assert torch.equal(opt.state[params[0]]["master"], torch.full((40,), 3.0))


@pytest.mark.parametrize("way", ["replace", "Trainer", "step_tail"])
def test_a_scheduler_of_the_old_object_steers_also_after_loading(way: str) -> None:
    params = make_params()
    ours = Way(way, "AdamW", params, lr=0.1)
    ours.step(grads_of(0))
    for opt in {id(o): o for o in (ours.opt, ours.stepping)}.values():
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        ours.opt.param_groups[0]["lr"] = 0.0
        ours.opt.param_groups[0]["weight_decay"] = 0.0
        kept = [p.detach().clone() for p in params]
        ours.step(grads_of(1))
        assert all(torch.equal(p, q) for p, q in zip(params, kept, strict=True))
        assert ours.stepping.state is ours.opt.state and ours.stepping.param_groups is ours.opt.param_groups


# ---- gradients


@pytest.mark.parametrize("composite", [False, True], ids=["native", "composite"])
@pytest.mark.parametrize("name", [n for n in OPTIONS if n not in ("Muon", "Lion")])
def test_gradients_with_the_conjugate_or_negative_bit(name: str, composite: bool) -> None:
    def trained(lazy: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(5, 7, generator=generator, dtype=torch.complex64)) for _ in range(2)]
        params.append(nn.Parameter(torch.randn(5, 7, generator=generator)))
        opt = getattr(oxytorch.optim, name)(params, lr=0.1, force_composite=composite, **HYPER.get(name, {}))
        for _ in range(3):
            grad = torch.randn(5, 7, generator=generator, dtype=torch.complex64)
            params[0].grad = grad.conj() if lazy else grad.conj().resolve_conj()
            params[1].grad = grad.t().conj().t() if lazy else grad.conj().resolve_conj()
            imaginary = grad.conj().imag
            assert imaginary.is_neg()
            params[2].grad = imaginary if lazy else imaginary.resolve_neg()
            opt.step()
        return tensors_of(opt)

    for a, b in zip(trained(True), trained(False), strict=True):
        assert torch.equal(a, b)


# ---- 8-bit codes that were laid out anew before somebody reads, copies or hands them over


def _given_back(opt: Any) -> Any:
    tail = opt._step_tail()
    for i in range(tail.param_count):
        tail.set_state(i, tail.state(i), tail.ema(i), tail.copy(i))
    return opt


def _restored(opt: Any) -> Any:
    opt._adopt_restored()
    return opt


def _loaded(opt: Any) -> Any:
    again = oxytorch.optim.AdamW([p.detach().clone() for p in opt._params()], state_dtype="int8")
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    return again


def _grown(opt: Any) -> Any:
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    return opt


def _regrouped(opt: Any) -> Any:
    opt.param_groups[0]["params"] = opt.param_groups[0]["params"][:-1]
    return opt


def _rolled_back(opt: Any) -> Any:
    manager = oxytorch.optim.NumericalStabilityManager(opt, "rollback")
    manager._save()
    for p in opt._params():
        p.grad = torch.ones_like(p)
    opt.step()
    manager._restore(manager._snapshots[-1])
    return opt


def _rolled_back_over_a_new_layout(opt: Any) -> Any:
    manager = oxytorch.optim.NumericalStabilityManager(opt, "rollback")
    manager._save()
    for p in opt._params():
        if p.dim() == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
        p.grad = torch.ones_like(p)
    opt.step()
    manager._restore(manager._snapshots[-1])
    return opt


def _pickled(opt: Any) -> Any:
    return pickle.loads(pickle.dumps(opt))


@pytest.mark.parametrize(
    "through",
    [
        _given_back,
        _restored,
        _loaded,
        _grown,
        _regrouped,
        _rolled_back,
        _rolled_back_over_a_new_layout,
        _pickled,
        copy.deepcopy,
    ],
)
def test_codes_laid_out_anew_keep_their_values(through: Callable[[Any], Any]) -> None:
    params = make_params()
    opt = oxytorch.optim.AdamW(params, lr=1e-2, state_dtype="int8")
    for step in range(3):
        for p, g in zip(params, grads_of(step), strict=True):
            p.grad = g * torch.linspace(1e-3, 1, g.numel()).view_as(g)  # so that scales differ
        opt.step()
    before = [{k: v.clone() for k, v in opt._step_tail().decoded_state(i).items()} for i in range(2)]
    for p in params[:2]:
        for key in ("exp_avg", "exp_avg_sq"):
            codes = opt.state[p][key]
            codes.data = codes.data.contiguous(memory_format=torch.channels_last)
    after = through(opt)
    for i, values in enumerate(before):
        held = after._step_tail().decoded_state(i)
        for key in ("exp_avg", "exp_avg_sq"):
            # A rollback over a new layout of the parameter codes once more.
            bound = 0.01 * values[key].abs().max() if through is _rolled_back_over_a_new_layout else 0
            assert ((held[key] - values[key]).abs() <= bound).all(), key


# ---- memory that is copied on write


def test_copies_on_write_are_not_written() -> None:
    params = make_params()
    opt = oxytorch.optim.AdamW(params, lr=1e-2)
    for p, g in zip(params, grads_of(0), strict=True):
        p.grad = g
    opt.step()
    lazy = [torch._lazy_clone(t) for t in [*(p.detach() for p in params), *state_tensors(opt)]]
    kept = [t.clone() for t in lazy]
    opt.step()
    assert all(torch.equal(a, b) for a, b in zip(lazy, kept, strict=True))
    assert all(not torch.equal(p, a) for p, a in zip(params, kept, strict=False))
