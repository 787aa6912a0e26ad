"""The precision levels O0 to O3: dtypes, masters, normalisation layers, an optimizer that exists already, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_device
from oxytorch import amp, optim
from torch import nn

DEVICE = torch_device.chosen()

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _fast_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests hold on every machine: what this processor lacks is not the subject."""
    monkeypatch.setattr(amp, "hardware_support", lambda _device, dtype: (True, f"{dtype}: this one has it."))
    monkeypatch.setattr(amp, "recommend_dtype", lambda _device: (BF16, "bfloat16: this one has it."))


class LlamaRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is self.weight.dtype or torch.is_autocast_enabled(DEVICE.type)
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 6),
        nn.LayerNorm(6), LlamaRMSNorm(6), nn.RMSNorm(6), nn.Linear(6, 3),
    ).to(DEVICE)  # fmt: skip


NORMS = {"1", "2", "6", "7", "8"}


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def masters(model: nn.Module, **options: Any) -> optim.AdamW:
    return optim.AdamW(model.parameters(), **{"lr": 1e-2, "master_weights": "fp32", **options})


def step(run: amp.Prepared, optimizer: torch.optim.Optimizer, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    with run.autocast():
        loss: torch.Tensor = run.model(x).square().mean()
    run.scaler.scale(loss * factor).backward()
    run.scaler.step(optimizer)
    run.scaler.update()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("level", amp.LEVELS)
def test_levels_set_the_dtypes_of_weights_and_products(level: str, dtype: torch.dtype) -> None:
    run = amp.prepare(make(), None, level, None if level == "O0" else dtype)
    narrow = {"O0": FP32, "O1": FP32}.get(level, dtype)
    norms = dtype if level == "O3" else FP32
    for name, tensor in run.model.state_dict().items():
        if tensor.is_floating_point():
            assert tensor.dtype is (norms if name.split(".")[0] in NORMS else narrow), name
    seen: list[torch.dtype] = []
    run.model[5].register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))
    run.model[8].register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))
    with run.autocast():
        loss = run.model(batch()).square().mean()
    assert seen[0] is (FP32 if level == "O0" else dtype)
    assert level in ("O0", "O1") or seen[1] is dtype
    # Autocast squares in float32 on every device but the CPU.
    assert loss.dtype is (dtype if level == "O1" and DEVICE.type == "cpu" else FP32)
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in run.model.parameters())
    assert run.dtype is (FP32 if level == "O0" else dtype)
    assert run.scaler.is_enabled() == (level != "O0" and dtype is FP16)
    assert run.explain().startswith(f"level {level}: ")


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (lambda: nn.BatchNorm1d(6), (4, 6)),
        (lambda: nn.BatchNorm2d(6), (4, 6, 3, 3)),
        (lambda: nn.BatchNorm3d(6), (2, 6, 3, 3, 3)),
        (lambda: nn.SyncBatchNorm(6), (4, 6)),
        (lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True), (4, 6, 5)),
        (lambda: nn.InstanceNorm2d(6, affine=True), (4, 6, 3, 3)),
        (lambda: nn.GroupNorm(2, 6), (4, 6, 3)),
        (lambda: nn.LayerNorm(6), (4, 6)),
        (lambda: nn.RMSNorm(6), (4, 6)),
        (lambda: LlamaRMSNorm(6), (4, 6)),
    ],
)
def test_normalisation_in_float32_is_that_of_the_inputs(
    norm: Callable[[], nn.Module], shape: tuple[int, ...], train: bool, dtype: torch.dtype, recwarn: Any
) -> None:
    """The layer's result is the float32 layer's on the same 16-bit inputs, rounded once."""
    layer = norm().train(train).to(DEVICE)
    reference = copy.deepcopy(layer)
    model = nn.Sequential(nn.Identity(), layer)
    run = amp.prepare(model, None, "O2", dtype)
    assert all(t.dtype is FP32 for t in layer.state_dict().values() if t.is_floating_point())
    seen: list[torch.Tensor] = []
    layer.register_forward_hook(lambda _m, _a, out: seen.append(out))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    y = run.model(x)
    expected = reference(x.to(dtype).float())
    assert seen[0].dtype is dtype
    ulp = 2.0**-8 if dtype is BF16 else 2.0**-11
    torch.testing.assert_close(y, expected, rtol=1.01 * ulp, atol=2 * ulp)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is FP32 for p in layer.parameters())
    assert not [w for w in recwarn if "Mismatch dtype" in str(w.message)]


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("keep", [True, False])
def test_normalisation_layers_follow_the_setting(level: str, keep: bool) -> None:
    model = amp.prepare(make(), None, level, BF16, keep_norm_fp32=keep).model
    kinds = {name.split(".")[0]: p.dtype for name, p in model.named_parameters()}
    assert all(kind is (FP32 if keep and name in NORMS else BF16) for name, kind in kinds.items())
    model(batch()).sum().backward()


def test_o2_is_float32_training_on_gradients_of_the_rounded_weights() -> None:
    """The oracle: torch's SGD on float32 weights, whose gradients come from a rounded copy of them.

    Adam would blow up the rounding of the gradient of a bias before BatchNorm, which is zero.
    """
    model = make()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, master_weights="fp32")
    run = amp.prepare(model, optimizer, "O2", BF16)
    rounded = amp.prepare(make(), None, "O2", BF16).model
    wide = [p.detach().clone().requires_grad_() for p in make().parameters()]
    reference = torch.optim.SGD(wide, lr=0.05, momentum=0.9, weight_decay=0.1)
    for seed in range(6):
        step(run, optimizer, batch(seed))
        rounded(batch(seed)).square().mean().backward()
        for w, p in zip(wide, rounded.parameters(), strict=True):
            assert p.grad is not None
            w.grad, p.grad = p.grad.float(), None
        reference.step()
        with torch.no_grad():
            for w, p in zip(wide, rounded.parameters(), strict=True):
                p.copy_(w)
    for w, p in zip(wide, model.parameters(), strict=True):
        kept = optimizer.state[p]["master"] if p.dtype is BF16 else p
        torch.testing.assert_close(kept, w, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(p.detach().float(), kept.detach().to(p.dtype).float(), rtol=0, atol=0)


def test_masters_start_from_the_float32_weights_and_parameters_stay_the_same_objects() -> None:
    model, before = make(), [p.detach().clone() for p in make().parameters()]
    model[9].weight = nn.Parameter(model[9].weight.detach())
    params = list(model.parameters())
    optimizer = masters(model, lr=0.0)
    run = amp.prepare(model, optimizer, "O2", BF16)
    step(run, optimizer, batch())
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    for p, was in zip(params, before, strict=True):
        assert torch.equal(p.detach(), was.to(p.dtype))
        if p.dtype is BF16:
            assert torch.equal(optimizer.state[p]["master"], was)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_an_optimizer_that_has_stepped_goes_on(level: str, dtype: torch.dtype) -> None:
    model = make()
    optimizer = masters(model, ema_decay=0.5) if level == "O2" else optim.AdamW(model.parameters(), ema_decay=0.5)
    for seed in range(3):
        model(batch(seed)).square().mean().backward()
        optimizer.step()
    weights = [p.detach().clone() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg_sq"].clone() for p in model.parameters()]
    averages = [t.clone() for t in optimizer.ema_state_dict()["ema"].values()]
    run = amp.prepare(model, optimizer, level, dtype)
    assert all(p.grad is None for p in model.parameters())
    for p, was, moment in zip(model.parameters(), weights, moments, strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], moment)
        if level == "O2" and p.dtype is dtype:
            assert torch.equal(optimizer.state[p]["master"], was)
    for was, now in zip(averages, optimizer.ema_state_dict()["ema"].values(), strict=True):
        assert torch.equal(was, now)
    if dtype is FP16:
        run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 64.0})
    step(run, optimizer, batch(9))
    assert all(float(optimizer.state[p]["step"]) == 4 for p in model.parameters())


def test_a_torch_optimizer_that_has_stepped_goes_on_at_o3() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(2):
        model(batch(seed)).square().mean().backward()
        optimizer.step()
    run = amp.prepare(model, optimizer, "O3", BF16)
    step(run, optimizer, batch(5))
    for p in model.parameters():
        assert optimizer.state[p]["exp_avg"].dtype is p.dtype is BF16
        assert float(optimizer.state[p]["step"]) == 3


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_float16_scales_the_loss_and_skips_overflows(level: str) -> None:
    model = make()
    optimizer = masters(model) if level == "O2" else optim.AdamW(model.parameters(), lr=1e-2)
    run = amp.prepare(model, optimizer, level, FP16)
    run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 1024.0})
    for seed, factor in enumerate((1.0, 1e8, 1.0)):
        before = [p.detach().clone() for p in model.parameters()]
        step(run, optimizer, batch(seed), factor)
        still = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert still == (factor > 1)
    assert run.scaler.get_scale() == 512.0


def test_inputs_are_cast_wherever_they_are_and_nothing_else() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.seen: list[Any] = []

        def forward(self, x: torch.Tensor, pair: Any, *, mask: Any = None) -> dict[str, Any]:
            self.seen = [x.dtype, pair[0].dtype, pair[1]["b"].dtype, mask.dtype]
            return {"y": self.body(x), "index": pair[0], "text": "kept"}

    model = amp.prepare(Net().to(DEVICE), None, "O3", BF16).model
    index = torch.arange(4, device=DEVICE)
    ones = torch.ones(2, 4, device=DEVICE)
    out = model(ones, (index, {"b": ones[0, :1].double()}), mask=ones[0, :1])
    assert model.seen == [BF16, torch.int64, BF16, BF16]
    assert (out["y"].dtype, out["index"] is index, out["text"]) == (FP32, True, "kept")


def test_tied_weights_stay_tied_and_buffers_follow() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("table", torch.ones(4))
            self.register_buffer("count", torch.ones(1, dtype=torch.int64))

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.embed(i) * self.table)
            return out

    model = Net().to(DEVICE)
    model.head.weight = model.embed.weight  # torch unties them on its way to a PrivateUse1 device
    optimizer = masters(model)
    run = amp.prepare(model, optimizer, "O2", BF16)
    assert model.head.weight is model.embed.weight
    assert (model.head.weight.dtype, model.table.dtype, model.count.dtype) == (BF16, BF16, torch.int64)
    step(run, optimizer, torch.arange(5, device=DEVICE))
    assert len(optimizer.state) == 1


def test_a_prepared_model_copies_pickles_and_compiles() -> None:
    model = amp.prepare(make(), None, "O2", BF16).model.eval()
    expected = model(batch())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(batch()), expected)
        assert other[0].weight.dtype is BF16
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(batch()), expected)


def test_slow_hardware_is_refused_unless_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = "bfloat16: this CPU has neither avx512_bf16 nor amx_bf16."
    monkeypatch.setattr(amp, "hardware_support", lambda _device, _dtype: (False, lacking))
    monkeypatch.setattr(amp, "recommend_dtype", lambda _device: (FP32, f"float32: {lacking}"))
    for level in ("O1", "O2", "O3"):
        for dtype in (None, BF16, FP16):
            model = make()
            with pytest.raises(NotImplementedError, match=r"avx512_bf16.*allow_slow=True"):
                amp.prepare(model, None, level, dtype)
            assert all(p.dtype is FP32 for p in model.parameters())
    assert amp.prepare(make(), None, "O1", allow_slow=True).dtype is BF16
    assert amp.prepare(make(), None, "O2", FP16, allow_slow=True).dtype is FP16
    assert amp.prepare(make(), None, "O0").dtype is FP32


def test_an_absent_device_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    native, reason = amp._C.amp.hardware_support("cuda", BF16)
    assert not native
    assert "no CUDA device" in reason


def test_what_cannot_be_served_is_refused_with_the_remedy() -> None:
    model = make()
    params = list(model.parameters())
    for error, text, arguments in (
        (
            NotImplementedError,
            r'ox\.optim\.replace\(optimizer, master_weights="fp32"\)',
            (torch.optim.AdamW(params), "O2"),
        ),
        (NotImplementedError, r'Give it master_weights="fp32"', (optim.AdamW(params), "O2")),
        (ValueError, "Use level O2", (masters(model), "O3")),
        (NotImplementedError, r"ox\.optim\.replace", (torch.optim.RMSprop(params), "O3", FP16)),
        (TypeError, "float64", (None, "O1", torch.float64)),
        (TypeError, "Optimizer", (3, "O1")),
        (ValueError, "O4", (None, "O4")),
    ):
        with pytest.raises(error, match=text):
            amp.prepare(model, *arguments)  # type: ignore[arg-type]
        assert all(p.dtype is FP32 for p in model.parameters())
    with pytest.raises(ValueError, match="Use O2 or O3"):
        amp.prepare(make().bfloat16(), None, "O1")
    with pytest.raises(ValueError, match="no parameters"):
        amp.prepare(nn.ReLU())
    with pytest.raises(ValueError, match="DataParallel"):
        amp.prepare(nn.DataParallel(make()))
    with pytest.raises(ValueError, match="not initialised"):
        amp.prepare(nn.LazyLinear(3))
    with pytest.raises(TypeError, match="Module"):
        amp.prepare(3)  # type: ignore[arg-type]
    amp.prepare(model, None, "O3")
    with pytest.raises(ValueError, match="prepared already"):
        amp.prepare(model, None, "O3")


def test_replace_serves_o2() -> None:
    model = make()
    old = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(batch()).sum().backward()
    old.step()
    optimizer = optim.replace(old, master_weights="fp32")
    was = model[0].weight.detach().clone()
    run = amp.prepare(model, optimizer, "O2", BF16)
    assert torch.equal(optimizer.state[model[0].weight]["master"], was)
    step(run, optimizer, batch())
