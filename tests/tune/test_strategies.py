"""Every built-in strategy on small models: what it may do to the numbers, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oxytorch import _C
from oxytorch.tune import STRATEGIES, Run, Strategy
from oxytorch.tune.strategies import compiled, host
from torch import Tensor, nn
from torch.nn import functional as F

from ..trainer.recorder import Recorder

pytestmark = pytest.mark.cpu_only("the matrix is of what applies on a CPU")


class Conv(nn.Module):
    """Convolutions, batch normalisation, pooling, an activation that may be in place and one that may not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.head((F.relu(y) + y).mean((2, 3)))


class Transformer(nn.Module):
    """Attention by torch's kernel, dropout, and an output that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.qkv = nn.Linear(16, 48, bias=False)  # keys with a bias get gradients that are all rounding
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.out = nn.Linear(16, 16, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        q, k, v = self.qkv(h).view(*h.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        h = h + F.dropout(self.down(F.gelu(self.up(h))), 0.1, self.training)
        return self.out(h).flatten(0, 1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0]).flatten(0, 1)


class Stateful(nn.Module):
    """Counts and averages in forward, in a buffer, in a plain tensor and in a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.1), nn.Linear(12, 4))
        self.register_buffer("mean", torch.zeros(6))
        self.last = torch.zeros(6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.last.copy_(x[0])
        return self.fc(x - self.mean)


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3, 12, 12), torch.randint(4, (6,))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(16, (4, 10)), torch.randint(16, (40,))


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 6), torch.randint(4, (6,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "conv": (Conv, images),
    "transformer": (Transformer, tokens),
    "recurrent": (Recurrent, tokens),
    "stateful": (Stateful, rows),
}
COMPILING = {"compile", "compile_dynamic", "compile_max_autotune", "compile_reduce_overhead"}
HERE = sorted(set(STRATEGIES) - COMPILING)
CLOSE = {"exact": (0.0, 0.0), "tolerance": (1e-3, 2e-5), "precision": (0.2, 5e-3), "trade": (0.2, 5e-3)}


def make(name: str, **options: Any) -> Run:
    torch.manual_seed(1)
    build, batch = MODELS[name]
    model, batches = build(), [batch() for _ in range(3)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Run(model, optimizer, F.cross_entropy, batches, **options)


def needed(name: str) -> list[str]:
    return [*STRATEGIES[name].requires, name]


def brought(run: Run, name: str) -> bool:
    """Put a strategy and what it needs in force; False where one does not apply here."""
    if name.startswith("split_") and isinstance(run.model, Stateful):
        return False  # an average kept in forward sees the pieces: for the referee to find
    if any(run.strategy(one).applies(run) is not True for one in needed(name)):
        return False
    run.bring(needed(name))
    return True


def assert_as_claimed(name: str, got: list[Tensor], expected: list[Tensor]) -> None:
    rtol, atol = CLOSE[STRATEGIES[name].kind]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


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


def train(run: Run, batches: Any = None) -> list[Tensor]:
    torch.manual_seed(2)
    losses = [run.step(batch).clone() for batch in batches or run.batches]
    return losses + [p.detach().clone() for p in run.params]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = process()
    yield
    after = process()
    before.pop("random"), after.pop("random")
    assert after == before


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", HERE)
def test_numbers_are_of_the_kind_that_it_claims(name: str, model: str) -> None:
    run, plain = make(model), make(model)
    if not brought(run, name):
        pytest.skip("does not apply")
    got, expected = train(run), train(plain)
    run.bring([])
    assert_as_claimed(name, got, expected)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("steps", [0, 2])
def test_reverting_leaves_everything_as_it_was(name: str, model: str, steps: int) -> None:
    run = make(model)
    train(run, run.batches[:steps]) if steps else None
    if any(run.strategy(one).applies(run) is not True for one in needed(name)):
        pytest.skip("does not apply")
    before, settings = anatomy(run), process()
    for _ in range(3):
        run.bring(needed(name))
        run.bring([])
        assert anatomy(run) == before
        assert process() == settings


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", HERE)
def test_training_goes_on_through_switching(name: str, model: str) -> None:
    """Steps with and without it in turn end where steps of one kind do, so no state is lost on the way."""
    run, plain = make(model), make(model)
    if not brought(run, name):
        pytest.skip("does not apply")
    identities = [id(p) for p in run.params]
    torch.manual_seed(3)
    for i in range(6):
        run.bring(needed(name) if i % 2 else [])
        run.step(run.batches[i % 3])
    run.bring([])
    torch.manual_seed(3)
    for i in range(6):
        plain.step(plain.batches[i % 3])
    assert [id(p) for p in run.params] == identities
    assert_as_claimed(name, run.params, plain.params)
    assert [p.stride() for p in run.params] == [p.stride() for p in plain.params]
    for p, q in zip(run.params, plain.params, strict=True):
        mine, theirs = run.original.state[p], plain.original.state[q]
        assert mine.keys() == theirs.keys()
        assert torch.equal(mine["step"], theirs["step"])
        assert all(mine[key].dtype == theirs[key].dtype and mine[key].stride() == theirs[key].stride() for key in mine)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", HERE)
def test_copies_and_files_of_the_model_know_nothing_of_it(name: str, model: str) -> None:
    run = make(model)
    if not brought(run, name):
        pytest.skip("does not apply")
    for twin in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
        plain = make(model).model
        assert {n: set(m.__dict__) for n, m in twin.named_modules()} == {
            n: set(m.__dict__) for n, m in plain.named_modules()
        }
        assert repr(twin) == repr(plain)
        for key, value in plain.state_dict().items():
            assert torch.equal(twin.state_dict()[key], value)
    run.bring([])


def test_a_failure_on_the_way_in_leaves_nothing_behind() -> None:
    for model in MODELS:
        for name in HERE:
            run = make(model)
            if any(run.strategy(one).applies(run) is not True for one in needed(name)):
                continue
            before, settings = anatomy(run), process()

            class Bad(Strategy):
                name = "bad"

                def apply(self, run: Run) -> None:
                    raise MemoryError("no room")

            run.strategies["bad"] = Bad
            with pytest.raises(MemoryError):
                run.bring([*needed(name), "bad"])
            assert run.in_force == ()
            assert anatomy(run) == before
            assert process() == settings


def test_a_step_that_throws_leaves_no_flag_set() -> None:
    run = make("conv")
    run.bring(["inplace_activations", "bf16_autocast", "fused"])
    with pytest.raises(RuntimeError):
        run.model(torch.randn(2, 5, 8, 8))
    assert not run.model.body[2].inplace  # type: ignore[index, union-attr]
    assert not torch.is_autocast_enabled("cpu")
    assert run.original.param_groups[0]["fused"] is None
    run.bring([])


@pytest.mark.parametrize("tail", [(), ("step_tail",)])
def test_everything_cheap_together_and_in_any_order(tail: tuple[str, ...]) -> None:
    run = make("conv")
    before = anatomy(run)
    names = [*tail, "inplace_activations", "channels_last", "bf16_autocast"]
    for order in (names, names[::-1], names[1:] + names[:1]):
        run.bring(order)
        train(run)
        run.bring(order[1:])
        train(run)
        run.bring([])
        assert all(t.is_contiguous() for t in run.params)
    assert anatomy(run).keys() >= before.keys()


def test_channels_last_takes_the_optimizers_state_along() -> None:
    run = make("conv")
    train(run)
    run.bring(["channels_last"])
    weight = run.model.body[0].weight  # type: ignore[index, union-attr]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    for key in ("exp_avg", "exp_avg_sq"):
        assert run.original.state[weight][key].stride() == weight.stride()  # type: ignore[index]
    run.step(run.batches[0])
    assert weight.grad.stride() == weight.stride()  # type: ignore[union-attr]
    run.bring([])


def test_channels_last_of_three_dimensions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8, 3))
    batches = [(torch.randn(2, 2, 4, 4, 4), torch.tensor([0, 1]))]
    run = Run(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, batches)
    expected = run.loss(batches[0]).item()
    assert run.strategy("channels_last").applies(run) == "no weight has 4 dimensions"
    assert run.strategy("channels_last_3d").applies(run) is True
    run.bring(["channels_last_3d"])
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last_3d)  # type: ignore[operator]
    assert run.loss(batches[0]).item() == pytest.approx(expected, rel=1e-4)
    run.bring([])
    assert model[0].weight.is_contiguous()  # type: ignore[operator]


def test_denormals_are_flushed_only_where_there_may_be_some() -> None:
    run = make("stateful")
    train(run)
    assert "near the denormal" in str(run.strategy("flush_denormals").applies(run))
    run.original.state[run.params[0]]["exp_avg"].view(-1)[0] = 1e-40
    assert run.strategy("flush_denormals").applies(run) is True
    run.bring(["flush_denormals"])
    flushing, threads = _C.trainer.flush_state()
    assert flushing == threads
    run.bring([])


def test_only_activations_that_nothing_else_reads_are_overwritten() -> None:
    shared = nn.ReLU()
    model = nn.ModuleDict(
        {
            "yes": nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
            "first": nn.Sequential(nn.ReLU(), nn.Linear(2, 2)),
            "after another": nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.ReLU()),
            "shared": nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared),
            "negative": nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(-0.1)),
            "list": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]),
        }
    )
    assert list(host._overwritable(model)) == [model["yes"][1]]  # type: ignore[index]
    model["yes"][0].register_forward_hook(lambda *_: None)  # type: ignore[index, operator, union-attr]
    assert list(host._overwritable(model)) == []


def test_autocast_returns_float32_of_any_nest() -> None:
    torch.manual_seed(0)

    class Two(nn.Linear):
        def forward(self, input: Tensor) -> dict[str, Any]:  # type: ignore[override]
            y = super().forward(input)
            return {"y": y, "more": [y.double(), (y.to(torch.bfloat16), 3)]}

    model = Two(4, 4)
    run = Run(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: m(b)["y"].sum(), [torch.randn(2, 4)])
    run.bring(["bf16_autocast"])
    result = model(torch.randn(2, 4))
    run.bring([])
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
    run, plain = make("stateful", clip_norm=0.05, owns_loop=True), make("stateful", clip_norm=0.05)
    run.bring(["step_tail"])
    assert run.clip_norm is None
    for a, b in zip(train(run), train(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    run.bring([])
    assert run.clip_norm == 0.05


@pytest.mark.parametrize("strategy", ["fused", "foreach"])
def test_torchs_other_steps_leave_no_flag_in_checkpoints(strategy: str) -> None:
    run = make("stateful")
    groups = run.original.state_dict()["param_groups"]
    run.bring([strategy])
    train(run)
    assert run.original.state_dict()["param_groups"] == groups
    run.bring([])
    told = copy.deepcopy(run.original)
    told.param_groups[0]["fused"] = True
    run = Run(run.model, told, F.cross_entropy, run.batches)
    assert run.strategy(strategy).applies(run) == "the optimizer was told which implementation to use"


def test_int8_state_comes_back_wide() -> None:
    run, plain = make("stateful"), make("stateful")
    train(run), train(plain)
    run.bring(["int8_state"])
    train(run), train(plain)
    assert any(
        value.dtype is torch.uint8 or value.dtype is torch.int8 for value in run.original.state[run.params[0]].values()
    )
    run.bring([])
    for p, q in zip(run.params, plain.params, strict=True):
        for key, value in plain.original.state[q].items():
            mine = run.original.state[p][key]
            assert mine.dtype is value.dtype
            torch.testing.assert_close(mine, value, rtol=0.2, atol=float(value.abs().max()) * 0.05)


# ---- the compiler


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = tmp_path / "seconds.json"
    monkeypatch.setattr(compiled, "_record_file", lambda: file)
    return file


@pytest.mark.usefixtures("record")
def test_compiling_runs_first_keeps_masks_and_leaves_no_trace() -> None:
    run, plain = make("transformer"), make("transformer")
    strategy = run.strategy("compile")
    assert strategy.applies(run) is True
    assert strategy.expected_cost(run) == 20.0
    before, settings = anatomy(run), process()
    run.bring(["compile"])
    assert "compiling took" in strategy.cost
    assert len(strategy._functions) == 1  # type: ignore[attr-defined]
    made = torch._dynamo.utils.counters["stats"]
    once = made["unique_graphs"]
    run.bring([])
    assert anatomy(run) == before
    assert process() == settings
    run.bring(["compile"])
    got = train(run)
    for a, b in zip(got, train(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)  # dropout drew the same masks
    assert made["unique_graphs"] == once
    assert pickle.loads(pickle.dumps(run.model)) is not None
    assert strategy.expected_cost(run) != 20.0
    run.bring(["compile", "math_attention"])
    run.step(run.batches[0])
    assert made["unique_graphs"] == once + 1  # attention is in the graph
    run.bring([])


def test_compiling_that_fails_is_a_failed_strategy_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make("stateful")
    before, settings = anatomy(run), process()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    with pytest.raises(Exception, match="no C\\+\\+ compiler"):
        run.bring(["compile"])
    assert run.in_force == ()
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
    run.bring([f"split_{pieces}"])
    calls: list[Any] = []
    handle = run.model.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[0]))
    for a, b in zip(train(run), train(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert calls == [8 // pieces] * pieces * 3
    handle.remove()
    run.bring([])
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
    run.bring(["step_graph"])  # the native tail is no operator, so this recorder would miss it
    for i in range(9):
        torch.testing.assert_close(run.step(run.batches[i % 3]), plain.step(plain.batches[i % 3]), rtol=1e-5, atol=1e-6)
    assert strategy.graph.replays > 3  # type: ignore[attr-defined]
    run.bring([])
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
        assert {*cls.requires, *cls.interacts} <= set(STRATEGIES), cls.name
