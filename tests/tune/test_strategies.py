"""Every built-in strategy on small models: what it may do to the numbers, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from oxytorch.tune import STRATEGIES, Run, Strategy, observe
from torch import Tensor, nn

from .strategy_numbers import (
    CELLS,
    UNIT,
    anatomy,
    as_before,
    assert_within,
    losses_of,
    outcome,
    process,
    train,
    trained,
)
from .workloads import ALLOWED, LEFT_OUT, WORKLOADS, Recurrent, bfloat16_lstm, tiny_average

pytestmark = pytest.mark.cpu_only("the matrix is of what applies on a CPU")
__all__ = ["as_before"]
MODELS = ("conv", "transformer", "recurrent", "stateful")


@pytest.mark.parametrize("model", WORKLOADS)
@pytest.mark.parametrize("kind", ["tolerance", "precision", "trade"])
def test_the_bounds_tell_training_from_none(kind: str, model: str) -> None:
    """What no strategy may do is not within them: no gradients, or where rounding is small, gradients 5 % too large."""
    if kind == "precision" and WORKLOADS[model].build is Recurrent and not bfloat16_lstm():
        pytest.skip("torch computes no LSTM in bfloat16 on this CPU")
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
            if name == "update_in_backward":
                assert got.pop("gradient") == [], "none stays"
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
    "native_attention": "tests/ops/test_attention.py",
    "native_convolution": "tests/ops/test_convolution.py",
    "native_lstm": "tests/ops/test_recurrent.py",
    "native_gru": "tests/ops/test_recurrent.py",
    "native_activation": "tests/ops/test_activation.py",
    "native_linear": "tests/ops/test_linear.py",
    "packed_weights": "tests/ops/test_accumulation.py",
    "native_batch_norm": "tests/tune/test_deferred_norms.py",
    "native_layer_norm": "tests/tune/test_deferred_sums.py",
    "native_gate": "tests/tune/test_deferred_gates.py",
    "native_cross_entropy": "tests/tune/test_deferred_logits.py",
    "pinned_threads": "tests/trainer/host_test.cpp",
    "saved_bf16": "tests/memory/test_pack_saved_tensors.py",
    "saved_in_file": "tests/memory/test_pack_saved_tensors.py",
    "state_in_file": "tests/tune/test_state_memory.py",
    "update_in_backward": "tests/tune/test_state_memory.py",
    "flush_denormals": "tests/tune/test_single_strategies.py",
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


# ---- the page


def test_the_guide_lists_the_register() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "strategies.md").read_text()
    told = [line for line in page.splitlines() if line.startswith("| `")]
    built_in = {name: cls for name, cls in STRATEGIES.items() if cls.__mro__[1].__module__.startswith("oxytorch.")}
    loop = {name: "yes" if c.needs_loop else "data" if c.feeds else "" for name, c in built_in.items()}
    assert told == [
        f"| `{name}` | {c.kind} | {c.group} | {loop[name]} | {str(c.__doc__).splitlines()[0]} |"
        for name, c in built_in.items()
    ]


def test_names_that_strategies_refer_to_exist() -> None:
    for cls in STRATEGIES.values():
        assert {*cls.requires, *cls.interacts, *cls.part_of} <= set(STRATEGIES), cls.name
