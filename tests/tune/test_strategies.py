"""Every built-in strategy on small models: what it may do to the numbers, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from oxytorch import _C
from oxytorch.model import ModelOptimizer
from oxytorch.model.edits import EDITS
from oxytorch.tune import STRATEGIES, Run, Strategy, observe
from oxytorch.tune.strategies import compiled
from oxytorch.tune.strategy import strategy
from torch import Tensor, nn
from torch.nn import functional as F

from ..trainer.recorder import Recorder
from .workloads import ALLOWED, LEFT_OUT, WORKLOADS, Stateful, cells, drawn, rows, tiny_average

pytestmark = pytest.mark.cpu_only("the matrix is of what applies on a CPU")


CELLS = cells()
MODELS = ("conv", "transformer", "recurrent", "stateful")
UNIT = 2.0**-24  # roundoff of float32


def make(name: str, **options: Any) -> Run:
    run = WORKLOADS[name].run()
    return Run(run.model, run.original, F.cross_entropy, run.batches, **options) if options else run


def process() -> dict[str, Any]:
    """Settings of the process that a strategy could leave changed."""
    return {
        "threads": torch.get_num_threads(),
        "denormals": _C.trainer.flush_state(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "reduced": torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
        "benchmark": torch.backends.cudnn.benchmark,
        "precision": [
            torch._C._get_fp32_precision_getter(backend, op)
            for backend in ("mkldnn", "cuda")
            for op in ("matmul", "conv", "rnn", "all")
        ],
        "random": torch.get_rng_state().tolist(),
    }


def anatomy(run: Run) -> dict[str, Any]:
    """Everything of the user's objects: identities, attributes, layouts and bits."""

    def tensor(value: Tensor) -> tuple[Any, ...]:
        return id(value), value.data_ptr(), value.stride(), value.dtype, value.detach().tolist()

    def value(item: Any) -> Any:
        return tensor(item) if isinstance(item, Tensor) else repr(item)

    found: dict[str, Any] = {"modes": [m.training for m in run.model.modules()]}
    for name, module in run.model.named_modules():
        for key, item in module.__dict__.items():
            inner = item.items() if key in ("_parameters", "_buffers") else [("", item)]
            found.update({f"{name}.{key}.{k}": value(v) for k, v in inner})
        for key, item in module._parameters.items():
            found[f"{name}.{key}.grad"] = None if item is None or item.grad is None else item.grad.tolist()
    optimizer = run.original
    found["optimizer"] = {k: repr(v) for k, v in optimizer.__dict__.items() if k not in ("state", "_opt_called")}
    found["state"] = (id(optimizer.state), type(optimizer.state))
    for p, entries in optimizer.state.items():
        found[f"state {id(p)}"] = (type(entries), {k: value(v) for k, v in entries.items()})
    return found


def losses_of(run: Run, batches: Any = None) -> list[Tensor]:
    torch.manual_seed(2)
    return [run.step(batch).clone() for batch in batches or drawn(run)]


def train(run: Run, batches: Any = None) -> list[Tensor]:
    return losses_of(run, batches) + [p.detach().clone() for p in run.params]


# ---- what a strategy may do to the numbers


def outcome(run: Run, losses: list[Tensor]) -> dict[str, list[Tensor]]:
    """What training left: losses, weights, gradients of the last step and the optimizer's averages."""
    state = [run.original.state[p] for p in run.params]
    return {
        "loss": [loss.detach().double() for loss in losses],
        "weight": [p.detach().double().clone() for p in run.params],
        "gradient": [p.grad.detach().double().clone() for p in run.params if p.grad is not None],
        "exp_avg": [entries["exp_avg"].double().clone() for entries in state],
        "exp_avg_sq": [entries["exp_avg_sq"].double().clone() for entries in state],
    }


def trained(workload: str, how: str = "plain") -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Train by torch alone, without a strategy; return what is left, and the weights it began with.

    `how` is "plain", "float64", "bfloat16": under torch's own autocast, or "zero gradients" and "wrong gradients".
    """
    run = WORKLOADS[workload].run(torch.float64 if how == "float64" else torch.float32)
    start = [p.detach().double().clone() for p in run.params]
    losses = []
    torch.manual_seed(2)
    for batch in run.batches:
        run.original.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "bfloat16"):
            result = run.model(batch[0])
        loss = F.cross_entropy(result.double() if how == "float64" else result.float(), batch[1])
        loss.backward()
        for p in run.params:
            if how in ("zero gradients", "wrong gradients"):
                p.grad.mul_(0 if how == "zero gradients" else 1.05)  # type: ignore[union-attr]
        run.original.step()
        losses.append(loss)
    return outcome(run, losses), start


@cache
def reference(workload: str) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Train in float64."""
    return trained(workload, "float64")


def errors(workload: str, got: dict[str, list[Tensor]]) -> dict[str, list[float]]:
    """Return how far off float64 each tensor is, as a part of its size; a weight, as a part of its change."""
    exact, start = reference(workload)
    sizes = {**exact, "weight": [w - s for w, s in zip(exact["weight"], start, strict=True)]}
    return {
        key: [
            float((mine - true).norm() / size.norm().clamp_min(1e-300))
            for mine, true, size in zip(got[key], exact[key], sizes[key], strict=True)
        ]
        for key in exact
    }


@cache
def bounds(workload: str, kind: str) -> dict[str, list[float]]:
    """Return the errors that are allowed: a few times those of torch's own training at that precision.

    "tolerance" rounds as often as plain float32 training, elsewhere. "precision" has the bfloat16 of autocast.
    "trade" may be off by its code: the averages by half a step of 1/127 on a curve of square or fourth roots
    (`kStateError` of the largest in a block of 32), which the step sees, and nothing else.
    """
    exact, start = reference(workload)
    plain = errors(workload, trained(workload)[0])
    # Below this two ways of rounding differ by luck: some units of the last place, of a weight of itself.
    floor = {key: [32 * UNIT for _ in tensors] for key, tensors in exact.items()}
    floor["weight"] = [
        32 * UNIT * max(1.0, float(w.norm() / (w - s).norm())) for w, s in zip(exact["weight"], start, strict=True)
    ]
    if kind == "precision":
        plain = errors(workload, trained(workload, "bfloat16")[0])
        floor = {key: [2.0**-9 + value for value in values] for key, values in floor.items()}  # bfloat16's roundoff
    times = 3 if kind == "precision" else 4
    found = {key: [times * a + b for a, b in zip(plain[key], floor[key], strict=True)] for key in plain}
    if kind == "trade":
        coded = {"weight": 0.02, "exp_avg": 0.03, "exp_avg_sq": 0.03, "gradient": 5e-4, "loss": 2e-5}
        found = {key: [value + coded[key] for value in values] for key, values in found.items()}
    return found


def assert_within(workload: str, kind: str, got: dict[str, list[Tensor]]) -> None:
    allowed = bounds(workload, kind)
    for key, values in errors(workload, got).items():
        for number, (error, bound) in enumerate(zip(values, allowed[key], strict=True)):
            where = f"{key} {number} of {workload}"
            assert error <= bound, f"{where} is off by {error:.2g} of its size, allowed {bound:.2g}"


@pytest.mark.parametrize("model", WORKLOADS)
@pytest.mark.parametrize("kind", ["tolerance", "precision", "trade"])
def test_the_bounds_tell_training_from_none(kind: str, model: str) -> None:
    """What no strategy may do is not within them: no gradients, or where rounding is small, gradients 5 % too large."""
    with WORKLOADS[model].around():
        assert_within(model, kind, trained(model)[0])
        for how in ["zero gradients", *(["wrong gradients"] if kind != "precision" else [])]:
            with pytest.raises(AssertionError, match="off by"):
                assert_within(model, kind, trained(model, how)[0])


def test_every_strategy_has_a_workload() -> None:
    """Or, where there can be none, its name in `LEFT_OUT` with the reason."""
    tried = {name for name, _ in CELLS}
    built_in = {name for name, cls in STRATEGIES.items() if cls.__mro__[1].__module__.startswith("oxytorch.")}
    assert built_in - tried == set(LEFT_OUT), "give it a workload in workloads.py"
    assert all(len(reason.split()) > 3 for reason in LEFT_OUT.values())
    unused = set(WORKLOADS) - {workload for _, workload in CELLS}
    assert not unused, "no strategy applies there any more"
    assert [(name, w) for w, its in WORKLOADS.items() for name in its.of if (name, w) not in CELLS] == []


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = process()
    yield
    after = process()
    before.pop("random"), after.pop("random")
    assert after == before


@pytest.mark.parametrize(("name", "model"), CELLS)
def test_numbers_are_of_the_kind_that_it_claims(name: str, model: str) -> None:
    workload = WORKLOADS[model]
    with workload.around():
        run, plain = workload.run(), workload.run()
        run.set_active(workload.needed(name))
        losses = losses_of(run)
        run.set_active([])
        got, expected = outcome(run, losses), outcome(plain, losses_of(plain))
        kind = STRATEGIES[name].kind
        if kind == "exact":
            assert all(torch.equal(a, b) for key in got for a, b in zip(got[key], expected[key], strict=True))
        elif workload.prepare is tiny_average:  # begins after a step, in which a number below 1e-37 is planted
            for key, tensors in got.items():
                for mine, theirs in zip(tensors, expected[key], strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=32 * UNIT, atol=1e-37)
        else:
            assert_within(model, kind, got)


@pytest.mark.parametrize(("name", "model"), CELLS)
@pytest.mark.parametrize("steps", [0, 2])
def test_reverting_leaves_everything_as_it_was(name: str, model: str, steps: int) -> None:
    workload = WORKLOADS[model]
    with workload.around():
        run = workload.run()
        train(run, run.batches[:steps]) if steps else None
        before, settings = anatomy(run), process()
        for _ in range(3):
            run.set_active(workload.needed(name))
            run.set_active([])
            assert anatomy(run) == before
            assert process() == settings


@pytest.mark.parametrize(("name", "model"), CELLS)
def test_training_goes_on_through_switching(name: str, model: str) -> None:
    """Steps with and without it in turn end where steps of one kind do, so no state is lost on the way."""
    workload = WORKLOADS[model]
    with workload.around():
        run, plain = workload.run(), workload.run()
        identities = [id(p) for p in run.params]
        torch.manual_seed(2)
        losses = []
        for i, batch in enumerate(run.batches):
            run.set_active(workload.needed(name) if i % 2 else [])
            losses.append(run.step(batch).clone())
        run.set_active([])
        expected = outcome(plain, losses_of(plain, plain.batches))
        got = outcome(run, losses)
        assert [id(p) for p in run.params] == identities
        if STRATEGIES[name].kind == "exact":
            assert all(torch.equal(a, b) for key in got for a, b in zip(got[key], expected[key], strict=True))
        elif workload.prepare is not tiny_average:
            assert_within(model, STRATEGIES[name].kind, got)
        assert [p.stride() for p in run.params] == [p.stride() for p in plain.params]
        for p, q in zip(run.params, plain.params, strict=True):
            mine, theirs = run.original.state[p], plain.original.state[q]
            assert mine.keys() == theirs.keys()
            assert torch.equal(mine["step"], theirs["step"])
            for key in mine:
                assert mine[key].dtype == theirs[key].dtype and mine[key].stride() == theirs[key].stride()


@pytest.mark.parametrize(("name", "model"), CELLS)
def test_copies_and_files_of_the_model_know_nothing_of_it(name: str, model: str) -> None:
    workload = WORKLOADS[model]
    with workload.around():
        run, plain = workload.run(), workload.run().model
        run.set_active(workload.needed(name))
        for twin in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
            assert {n: set(m.__dict__) for n, m in twin.named_modules()} == {
                n: set(m.__dict__) for n, m in plain.named_modules()
            }
            assert repr(twin) == repr(plain)
            for key, value in plain.state_dict().items():
                assert torch.equal(twin.state_dict()[key], value)
        run.set_active([])


@pytest.mark.parametrize(("name", "model"), CELLS)
def test_a_failure_on_the_way_in_leaves_nothing_behind(name: str, model: str) -> None:
    workload = WORKLOADS[model]
    with workload.around():
        run = workload.run()
        before, settings = anatomy(run), process()

        class Bad(Strategy):
            name = "bad"

            def apply(self, run: Run) -> None:
                raise MemoryError("no room")

        run.strategies["bad"] = Bad
        with pytest.raises(MemoryError):
            run.set_active([*workload.needed(name), "bad"])
        assert run.active == ()
        assert anatomy(run) == before
        assert process() == settings


# What each shows while it is active: a strategy that did nothing would keep every number, too.
SHOWS = {
    "native_step": "operators", "foreach": "operators", "fused": "operators", "step_tail": "operators",
    "int8_state": "operators", "math_attention": "operators", "math_attention_bf16": "products",
    "channels_last": "strides", "channels_last_3d": "strides", "bf16_autocast": "dtypes",
    "onednn_bf16": "precision", "tf32": "precision", "cudnn_benchmark": "precision",
    "one_thread": "threads", "physical_cores": "threads",
    "flash_attention": "kernels", "efficient_attention": "kernels", "cudnn_attention": "kernels",
    "split_2": "loop", "split_4": "loop", "split_8": "loop", "step_graph": "loop",
    "prefetch": "data", "loader_workers": "data",
    "compile": "function", "compile_dynamic": "function", "compile_max_autotune": "function",
    "compile_reduce_overhead": "function",
}  # fmt: skip
SHOWN_ELSEWHERE = {
    "allocator": "tests/base/host_allocator_test.cpp",
    "keep_heap": "tests/base/host_allocator_test.cpp",
    "host_pool": "tests/memory/test_host_pool.py",
    "native_operators": "tests/tune/test_operators.py",
    "pinned_threads": "tests/trainer/host_test.cpp",
    "flush_denormals": "tests/tune/test_strategies.py",
}
IMPLEMENTATION = {"foreach": "_foreach_", "fused": "_fused_adam"}


def test_every_strategy_is_known_to_show_something() -> None:
    tried = {name for name, _ in CELLS}
    assert tried <= {*SHOWS, *SHOWN_ELSEWHERE}, "say by what one sees that it is active"
    assert all((Path(__file__).resolve().parents[2] / file).exists() for file in SHOWN_ELSEWHERE.values())


def shown(run: Run) -> dict[str, Any]:
    """What can be seen of a step and of the settings around it."""
    dtypes: list[torch.dtype] = []
    handles = [
        m.register_forward_hook(lambda _m, _a, out: dtypes.append(out.dtype if isinstance(out, Tensor) else None))
        for m in run.model.modules()
        if isinstance(m, nn.Linear)
    ]
    ALLOWED.clear()
    with observe.Operators() as seen:
        run.step(run.batches[0])
    for handle in handles:
        handle.remove()
    precisions = [
        torch._C._get_fp32_precision_getter(backend, op) for backend in ("mkldnn", "cuda") for op in ("matmul", "conv")
    ]
    softmax = {str(func) for func in seen.seen if "softmax" in func._schema.name}
    return {
        "operators": seen.names,
        "products": (seen.uses("_flash_attention"), softmax),
        "dtypes": dtypes,
        "strides": [p.stride() for p in run.params],
        "precision": [*precisions, torch.backends.cudnn.benchmark],
        "threads": torch.get_num_threads(),
        "kernels": list(ALLOWED),
        "loop": (run.micro_batches, run.whole_step is None),
        "data": (type(run.data), getattr(run.data, "num_workers", None)),
        "function": run.call._function is None,
    }


@pytest.mark.parametrize(("name", "model"), [cell for cell in CELLS if cell[0] in SHOWS])
def test_what_is_active_shows(name: str, model: str) -> None:
    workload = WORKLOADS[model]
    with workload.around():
        run = workload.run()
        run.step(run.batches[0])
        before = shown(run)
        run.set_active([one for one in workload.needed(name) if one != name])
        without = shown(run)
        run.set_active(workload.needed(name))
        within = shown(run)
        key = SHOWS[name]
        assert within[key] != without[key], within[key]
        if name in IMPLEMENTATION:
            assert any(IMPLEMENTATION[name] in operator for operator in within["operators"])
        run.set_active([])
        assert shown(run)[key] == before[key]


CARD = {
    "flash_attention": (True, False, False, False),
    "efficient_attention": (False, True, False, False),
    "cudnn_attention": (False, False, True, False),
}


@pytest.mark.parametrize(("name", "model"), [cell for cell in CELLS if cell[0] in CARD])
def test_attention_may_use_the_kernel_of_its_name_alone(name: str, model: str) -> None:
    workload = WORKLOADS[model]
    with workload.around():
        run = workload.run()
        run.set_active([name])
        ALLOWED.clear()
        run.step(run.batches[0])
        assert set(ALLOWED) == {CARD[name]}
        run.set_active([])
        ALLOWED.clear()
        run.step(run.batches[0])
        assert set(ALLOWED) == {(True, True, True, True)}


def test_settings_of_a_card_are_on_while_they_are_active() -> None:
    workload = WORKLOADS["card"]

    def found() -> list[Any]:
        precisions = [torch._C._get_fp32_precision_getter("cuda", op) for op in ("matmul", "conv", "rnn")]
        return [*precisions, torch.backends.cudnn.benchmark]

    with workload.around():
        run, before = workload.run(), found()
        run.set_active(["tf32", "cudnn_benchmark"])
        assert found() == ["tf32", "tf32", "tf32", True] != before
        run.set_active([])
        assert found() == before


def test_onednn_is_told_to_multiply_in_bfloat16_while_it_is_active() -> None:
    def found() -> list[str]:
        return [torch._C._get_fp32_precision_getter("mkldnn", op) for op in ("matmul", "conv", "rnn")]

    run, before = make("conv"), found()
    run.set_active(["onednn_bf16"])
    assert found() == ["bf16", "bf16", "bf16"] != before
    run.set_active([])
    assert found() == before


def test_a_step_that_throws_leaves_no_flag_set() -> None:
    run = make("conv")
    run.set_active(["bf16_autocast", "fused"])
    with pytest.raises(RuntimeError):
        run.model(torch.randn(2, 5, 8, 8))
    assert not torch.is_autocast_enabled("cpu")
    assert run.original.param_groups[0]["fused"] is None
    run.set_active([])


@pytest.mark.parametrize("tail", [(), ("step_tail",)])
def test_everything_cheap_together_and_in_any_order(tail: tuple[str, ...]) -> None:
    run = make("conv")
    before = anatomy(run)
    names = [*tail, "channels_last", "bf16_autocast"]
    for order in (names, names[::-1], names[1:] + names[:1]):
        run.set_active(order)
        train(run)
        run.set_active(order[1:])
        train(run)
        run.set_active([])
        assert all(t.is_contiguous() for t in run.params)
    assert anatomy(run).keys() >= before.keys()


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("channels_last", "channels_last"),
        ("channels_last_3d", "channels_last_3d"),
        ("math_attention", "sdpa:math"),
        ("math_attention_bf16", "sdpa:math"),
        ("flash_attention", "sdpa:flash"),
        ("efficient_attention", "sdpa:efficient"),
        ("cudnn_attention", "sdpa:cudnn"),
    ],
)
def test_what_a_model_is_edited_by_is_what_is_tried(name: str, edit: str) -> None:
    assert issubclass(STRATEGIES[name], EDITS[edit])
    assert STRATEGIES[name].apply is EDITS[edit].apply and STRATEGIES[name].revert is EDITS[edit].revert


def test_an_edit_is_a_strategy_as_it_is() -> None:
    strategy("no_bias", kind="tolerance")(EDITS["drop_bias_before_norm"])
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        batches = [(torch.randn(8, 6), torch.randint(2, (8,)))]
        run = Run(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches)
        bias, expected = model[0].bias, run.loss(batches[0]).item()
        assert run.strategy("no_bias").applies(run) is True
        run.set_active(["no_bias"])
        assert model[0].bias is None
        assert run.loss(batches[0]).item() == pytest.approx(expected, rel=1e-5)
        run.set_active([])
        assert model[0].bias is bias
    finally:
        del STRATEGIES["no_bias"]


def test_an_edit_and_strategies_of_one_model_do_not_take_each_other_away() -> None:
    run, tuner = make("conv"), ModelOptimizer()
    images, seen = run.batches[0][0], []
    handle = run.model.register_forward_pre_hook(
        lambda _, args: seen.append((args[0].is_contiguous(), torch.is_autocast_enabled("cpu")))
    )

    def entered() -> tuple[bool, bool]:
        run.model(images)
        return seen[-1]

    assert entered() == (True, False)
    for first in ("edit", "strategy"):
        if first == "strategy":
            run.set_active(["bf16_autocast"])
        (outcome,) = tuner.apply(run.model, "channels_last", run.batches[0], run.loss_fn)
        assert outcome.applied, outcome
        run.set_active(["bf16_autocast"])
        assert entered() == (False, True)
        run.set_active([])
        assert entered() == (False, False)
        run.set_active(["bf16_autocast"])
        tuner.revert()
        assert entered() == (True, True)
        run.set_active([])
        assert entered() == (True, False)
    assert "_compiled_call_impl" not in vars(run.model)
    handle.remove()


@pytest.mark.parametrize("name", ["tf32", "onednn_bf16"])
def test_a_precision_that_is_inherited_is_so_afterwards(name: str) -> None:
    run = make("conv")
    backend = {"tf32": "cuda", "onednn_bf16": "mkldnn"}[name]
    try:
        torch._C._set_fp32_precision_setter("generic", "all", "ieee")
        run.set_active([name])
        assert torch._C._get_fp32_precision_getter(backend, "matmul") == name[-4:]
        run.set_active([])
        torch._C._set_fp32_precision_setter("generic", "all", "tf32")
        assert torch._C._get_fp32_precision_getter(backend, "matmul") == "tf32"
    finally:
        torch._C._set_fp32_precision_setter("generic", "all", "none")


def test_what_the_user_compiled_meanwhile_is_kept() -> None:
    run = make("conv")
    run.set_active(["bf16_autocast"])
    run.set_active([])
    assert not run.call.was_compiled
    run.model.compile(backend="eager")
    own = run.model._compiled_call_impl
    run.set_active(["bf16_autocast"])
    assert run.call.was_compiled and run.model._compiled_call_impl is not own
    run.set_active([])
    assert run.model._compiled_call_impl is own


def test_channels_last_takes_the_optimizers_state_along() -> None:
    run = make("conv")
    train(run)
    run.set_active(["channels_last"])
    weight = run.model.body[0].weight  # type: ignore[index, union-attr]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    for key in ("exp_avg", "exp_avg_sq"):
        assert run.original.state[weight][key].stride() == weight.stride()  # type: ignore[index]
    run.step(run.batches[0])
    assert weight.grad.stride() == weight.stride()  # type: ignore[union-attr]
    run.set_active([])


def test_channels_last_of_three_dimensions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8, 3))
    batches = [(torch.randn(2, 2, 4, 4, 4), torch.tensor([0, 1]))]
    run = Run(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches)
    expected = run.loss(batches[0]).item()
    assert run.strategy("channels_last").applies(run) == "the model has no 2-D convolution"
    assert run.strategy("channels_last_3d").applies(run) is True
    run.set_active(["channels_last_3d"])
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last_3d)  # type: ignore[operator]
    assert run.loss(batches[0]).item() == pytest.approx(expected, rel=1e-6)
    run.set_active([])
    assert model[0].weight.is_contiguous()  # type: ignore[operator]


def test_denormals_are_flushed_only_where_there_may_be_some() -> None:
    run = make("stateful")
    train(run)
    assert "near the denormal" in str(run.strategy("flush_denormals").applies(run))
    run.original.state[run.params[0]]["exp_avg"].view(-1)[0] = 1e-40
    assert run.strategy("flush_denormals").applies(run) is True
    run.set_active(["flush_denormals"])
    flushing, threads = _C.trainer.flush_state()
    assert flushing == threads
    run.set_active([])


def test_autocast_returns_float32_of_any_nest() -> None:
    torch.manual_seed(0)

    class Two(nn.Linear):
        def forward(self, input: Tensor) -> dict[str, Any]:  # type: ignore[override]
            y = super().forward(input)
            return {"y": y, "more": [y.double(), (y.to(torch.bfloat16), 3)]}

    model = Two(4, 4)
    run = Run(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: m(b)["y"].sum(), [torch.randn(2, 4)])
    run.set_active(["bf16_autocast"])
    result = model(torch.randn(2, 4))
    run.set_active([])
    assert result["y"].dtype is torch.float32
    assert [result["more"][0].dtype, result["more"][1][0].dtype, result["more"][1][1]] == [
        torch.float64,
        torch.float32,
        3,
    ]
    assert model(torch.randn(2, 4))["more"][1][0].dtype is torch.bfloat16


def test_attention_is_tried_only_where_torchs_kernel_is_called() -> None:
    assert make("transformer").strategy("math_attention").applies(make("transformer")) is True
    run = make("conv")
    assert "no attention kernel" in str(run.strategy("math_attention").applies(run))


def test_clipping_moves_into_the_tail_where_the_loop_is_the_plans() -> None:
    run, plain, free = (
        make("stateful", clip_norm=0.05, owns_loop=True),
        make("stateful", clip_norm=0.05),
        make("stateful"),
    )
    run.set_active(["step_tail"])
    assert run.clip_norm is None
    for a, b, unclipped in zip(train(run)[3:], train(plain)[3:], train(free)[3:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        assert float((b - unclipped).abs().max()) > 1e-4
    run.set_active([])
    assert run.clip_norm == 0.05


@pytest.mark.parametrize("strategy", ["fused", "foreach"])
def test_torchs_other_steps_leave_no_flag_in_checkpoints(strategy: str) -> None:
    run = make("stateful")
    groups = run.original.state_dict()["param_groups"]
    run.set_active([strategy])
    train(run)
    assert run.original.state_dict()["param_groups"] == groups
    run.set_active([])
    told = copy.deepcopy(run.original)
    told.param_groups[0]["fused"] = True
    run = Run(run.model, told, F.cross_entropy, run.batches)
    assert run.strategy(strategy).applies(run) == "the optimizer was told which implementation to use"


def test_int8_state_comes_back_wide() -> None:
    run, plain = make("stateful"), make("stateful")
    train(run), train(plain)
    run.set_active(["int8_state"])
    train(run), train(plain)
    assert any(
        value.dtype is torch.uint8 or value.dtype is torch.int8 for value in run.original.state[run.params[0]].values()
    )
    run.set_active([])
    for p, q in zip(run.params, plain.params, strict=True):
        for key, value in plain.original.state[q].items():
            mine = run.original.state[p][key]
            assert mine.dtype is value.dtype
            assert float((mine - value).norm()) <= 0.03 * float(value.norm())  # codes of 8 bits


# ---- the compiler


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = tmp_path / "seconds.json"
    monkeypatch.setattr(compiled, "_record_file", lambda: file)
    return file


@pytest.mark.usefixtures("record")
def test_compiling_runs_first_keeps_masks_and_leaves_no_trace() -> None:
    run = make("transformer")
    strategy = run.strategy("compile")
    assert strategy.applies(run) is True
    assert strategy.expected_cost(run) == 20.0
    before, settings = anatomy(run), process()
    run.set_active(["compile"])
    assert "compiling took" in strategy.cost
    assert len(strategy._functions) == 1  # type: ignore[attr-defined]
    made = torch._dynamo.utils.counters["stats"]
    once = made["unique_graphs"]
    run.set_active([])
    assert anatomy(run) == before
    assert process() == settings
    run.set_active(["compile"])
    losses = losses_of(run)
    assert_within("transformer", "tolerance", outcome(run, losses))  # dropout drew the same masks
    assert made["unique_graphs"] == once
    assert pickle.loads(pickle.dumps(run.model)) is not None
    assert strategy.expected_cost(run) != 20.0
    run.set_active(["compile", "math_attention"])
    run.step(run.batches[0])
    assert made["unique_graphs"] == once + 1  # attention is in the graph
    run.set_active([])


def test_compiling_that_fails_is_a_failed_strategy_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make("stateful")
    before, settings = anatomy(run), process()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    with pytest.raises(Exception, match="no C\\+\\+ compiler"):
        run.set_active(["compile"])
    assert run.active == ()
    assert anatomy(run) == before
    assert process() == settings
    train(run)


def test_a_model_that_the_user_compiled_is_left_alone() -> None:
    run = make("stateful")
    model = make("stateful").model
    model.compile()
    mine = Run(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, run.batches)
    assert mine.strategy("compile").applies(mine) == "the model is compiled already"


def test_the_record_of_compiles_is_read_back(record: Path) -> None:
    run, other = make("stateful"), make("conv")
    strategy = run.strategy("compile")
    compiled._write_record(strategy._key(run), 7.0)  # type: ignore[attr-defined]
    assert strategy.expected_cost(run) == 7.0
    assert other.strategy("compile").expected_cost(other) == 7.0  # the mean of what is known
    assert other.strategy("compile_max_autotune").expected_cost(other) == 60.0
    record.write_text("not json")
    assert strategy.expected_cost(run) == 20.0


# ---- the loop


@pytest.mark.parametrize("pieces", [2, 4])
def test_pieces_of_a_batch_make_the_same_step(pieces: int) -> None:
    torch.manual_seed(0)

    def build() -> Run:
        torch.manual_seed(1)
        model = Stateful().fc
        batches = [(torch.randn(8, 6), torch.randint(4, (8,))) for _ in range(3)]
        return Run(model, torch.optim.AdamW(model.parameters(), 1e-3), F.cross_entropy, batches, owns_loop=True)

    run, plain = build(), build()
    assert run.strategy(f"split_{pieces}").applies(run) is True
    run.set_active([f"split_{pieces}"])
    calls: list[Any] = []
    handle = run.model.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[0]))
    for a, b in zip(train(run), train(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert calls == [8 // pieces] * pieces * 3
    handle.remove()
    run.set_active([])
    assert run.micro_batches == 1


def test_batches_are_not_cut_where_it_would_be_another_step() -> None:
    for name, reason in (("conv", "whole batch"), ("transformer", "random numbers")):
        run = make(name, owns_loop=True)
        assert reason in str(run.strategy("split_2").applies(run))
    run = make("stateful", owns_loop=True)
    assert "cannot be cut into 4" in str(run.strategy("split_4").applies(run))


def test_a_whole_step_is_recorded_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a recorder of operators in the place of a device's graphs: no device has met it here."""

    def build() -> Run:
        torch.manual_seed(1)
        model = Stateful().fc
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return Run(model, optimizer, F.cross_entropy, [rows() for _ in range(3)], owns_loop=True)

    run, plain = build(), build()
    strategy = run.strategy("step_graph")
    assert strategy.applies(run) == "a CPU has no graphs"
    monkeypatch.setattr(type(strategy), "_recorder", Recorder)
    assert strategy.applies(run) is True
    run.set_active(["step_graph"])  # the native tail is no operator, so this recorder would miss it
    for i in range(9):
        torch.testing.assert_close(run.step(run.batches[i % 3]), plain.step(plain.batches[i % 3]), rtol=1e-5, atol=1e-6)
    assert strategy.graph.replays > 3  # type: ignore[attr-defined]
    run.set_active([])
    assert run.whole_step is None
    for p, q in zip(run.params, plain.params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# ---- the page


def test_the_guide_lists_the_register() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "strategies.md").read_text()
    told = [line for line in page.splitlines() if line.startswith("| `")]
    built_in = {name: cls for name, cls in STRATEGIES.items() if cls.__mro__[1].__module__.startswith("oxytorch.")}
    assert told == [
        f"| `{name}` | {c.kind} | {c.group} | {'yes' if c.needs_loop else ''} | {str(c.__doc__).splitlines()[0]} |"
        for name, c in built_in.items()
    ]


def test_names_that_strategies_refer_to_exist() -> None:
    for cls in STRATEGIES.values():
        assert {*cls.requires, *cls.interacts, *cls.part_of} <= set(STRATEGIES), cls.name
