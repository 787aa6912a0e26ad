"""`replace`: torch's optimizers and third-party ones of the same algorithm carry on where they stand.

Third-party classes are taken from their package where it is installed, else written here with the same qualified
name, groups and state.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import pickle
from typing import Any, ClassVar

import oxytorch.optim
import pytest
import torch
import torch_device
from oxytorch.optim import replace

DEVICE = torch_device.chosen()

SHAPES = [(7, 5), (33,), ()]


class StandIn(torch.optim.Optimizer):
    """An optimizer whose classes below say where they pretend to live."""

    counts_in = "state"  # or "group", or "" for none
    names = ("exp_avg", "exp_avg_sq")

    def __init__(self, params: Any, attributes: dict[str, Any] | None = None, **defaults: Any) -> None:
        super().__init__(params, {**self.usual, **defaults})
        for key, value in {**self.extra, **(attributes or {})}.items():
            setattr(self, key, value)

    usual: ClassVar[dict[str, Any]] = {}
    extra: ClassVar[dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if self.counts_in == "group":
                group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update({name: torch.zeros_like(p) for name in self.names})
                if self.counts_in == "state":
                    state["step"] = state.get("step", 0) + 1
                self.update(p, p.grad, state, group, state.get("step", group.get("step")))


class AdamLike(StandIn):
    usual: ClassVar = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

    def decouples(self, group: dict[str, Any]) -> bool:
        return bool(getattr(self, "adam_w_mode", True))

    def update(self, p, grad, state, group, step) -> None:
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        average, square = (state[name] for name in self.names)
        if self.decouples(group):
            p.mul_(1 - lr * decay)
        else:
            grad = grad + decay * p
        average.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = square.sqrt() / (1 - beta2**step) ** 0.5 + group["eps"]
        p.sub_(lr / (1 - beta1**step) * average / denominator)


class LionLike(StandIn):
    usual: ClassVar = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}
    names = ("exp_avg",)
    counts_in = ""

    def update(self, p, grad, state, group, step) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        grad = -grad if group.get("maximize") else grad
        p.mul_(1 - lr * group["weight_decay"])
        average = state[self.names[0]]
        p.sub_(lr * average.lerp(grad, 1 - beta1).sign())
        average.lerp_(grad, 1 - beta2)


class BnbArguments:
    def __init__(self, **given: Any) -> None:
        self.__dict__.update({"optim_bits": 32, "min_8bit_size": 4096, "max_unorm": 0.0, "skip_zeros": False} | given)


def stand_in(name: str, base: type, **content: Any) -> type:
    module, _, short = name.rpartition(".")
    return type(short, (base,), {"__module__": module, **content})


BNB = {"extra": {"is_paged": False, "args": BnbArguments()}}
BNB_ADAM = {**BNB, "names": ("state1", "state2")}
FUSED = {"bias_correction": True}
STAND_INS = {
    "lion_pytorch.lion_pytorch.Lion": (LionLike, {"extra": {"decoupled_wd": False, "_init_lr": 1e-2}}),
    "timm.optim.lion.Lion": (
        LionLike,
        {"usual": {**LionLike.usual, "caution": False, "corrected_weight_decay": False, "maximize": False}},
    ),
    "pytorch_optimizer.optimizer.lion.Lion": (
        LionLike,
        {
            "usual": {**LionLike.usual, "weight_decouple": True, "fixed_decay": False, "foreach": None},
            "extra": {"maximize": False},
            "counts_in": "group",
        },
    ),
    "bitsandbytes.optim.lion.Lion": (LionLike, {**BNB, "names": ("state1",), "counts_in": "state"}),
    "bitsandbytes.optim.adamw.AdamW": (AdamLike, BNB_ADAM),
    "bitsandbytes.optim.adam.Adam": (AdamLike, BNB_ADAM),
    "apex.optimizers.fused_adam.FusedAdam": (
        AdamLike,
        {"usual": {**AdamLike.usual, **FUSED}, "extra": {"adam_w_mode": 1}, "counts_in": "group"},
    ),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": (
        AdamLike,
        {"usual": {**AdamLike.usual, **FUSED, "amsgrad": False}, "extra": {"adam_w_mode": True}},
    ),
}


def foreign(name: str) -> type:
    module, _, short = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), short)
    except Exception:  # not installed, or not for this machine
        base, content = STAND_INS[name]
        return stand_in(name, base, **content)


def make_params(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in SHAPES]


def set_grads(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 100)
    for p in params:
        p.grad = 0.1 * torch.randn(p.shape, generator=generator).to(p.device)


def run(opt: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range, schedule: Any = None) -> None:
    for i in steps:
        set_grads(params, i)
        opt.step()
        if schedule is not None:
            schedule.step()


def content(opt: torch.optim.Optimizer) -> str:
    """Hash of everything an optimizer holds."""
    state = {k: v for k, v in opt.state_dict().items() if k in ("state", "param_groups")}
    return hashlib.sha256(
        repr(state).encode() + pickle.dumps([p.detach() for p in opt.param_groups[0]["params"]])
    ).hexdigest()


TORCH = [
    ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("RMSprop", {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    ("Muon", {"lr": 1e-2}),
]


@pytest.mark.parametrize(("name", "options"), TORCH)
def test_torch_optimizers_carry_on_under_schedulers(name: str, options: dict) -> None:
    params, peers = make_params(), make_params()
    if name == "Muon":
        params, peers = params[:1], peers[:1]
    old, peer = (getattr(torch.optim, name)(p, **options) for p in (params, peers))
    before, peer_before = (torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (old, peer))
    run(old, params, range(3), before), run(peer, peers, range(3), peer_before)
    calls = []
    old.register_step_post_hook(lambda *_: calls.append(1))
    new = replace(old, clip_norm=1e6)
    assert type(new) is getattr(oxytorch.optim, name) and new.param_groups is old.param_groups
    after, peer_after = (torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (new, peer))
    for i in range(3, 8):
        run(new, params, range(i, i + 1), before), run(peer, peers, range(i, i + 1), peer_before)
        after.step(), peer_after.step()
    assert calls == [1] * 5
    assert new.param_groups[0]["lr"] == peer.param_groups[0]["lr"]
    rough = {"rtol": 2e-2, "atol": 2e-2} if name == "Muon" else {"rtol": 1e-5, "atol": 1e-6}  # bf16 inside
    torch.testing.assert_close(params, peers, **rough)
    order = list if DEVICE.type == "cpu" else sorted  # a step count that moves to its device is entered anew
    assert order(new.state_dict()["state"][0]) == order(peer.state_dict()["state"][0])


@pytest.mark.parametrize("name", STAND_INS)
def test_third_party_optimizers_carry_on(name: str) -> None:
    cls = foreign(name)
    params, peers = make_params(), make_params()
    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}
    old, peer = cls(params, **options), cls(peers, **options)
    schedule, peer_schedule = (torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (old, peer))
    run(old, params, range(4), schedule), run(peer, peers, range(4), peer_schedule)
    new = replace(old)
    assert isinstance(new, oxytorch.optim.Lion if name.endswith("Lion") else torch.optim.Adam)
    assert new.param_groups is old.param_groups
    run(new, params, range(4, 9), schedule), run(peer, peers, range(4, 9), peer_schedule)
    torch.testing.assert_close(params, peers, rtol=1e-5, atol=1e-6)
    if not name.endswith("Lion"):
        assert float(new.state[params[0]]["step"]) == 9
    # It is a full member from here on: its state goes to a fresh optimizer and to torch's.
    again = type(new)(copy.deepcopy(params))
    again.load_state_dict(copy.deepcopy(new.state_dict()))
    run(again, again.param_groups[0]["params"], range(9, 11)), run(new, params, range(9, 11))
    assert all(torch.equal(p, q) for p, q in zip(params, again.param_groups[0]["params"], strict=True))


@pytest.mark.parametrize("name", STAND_INS)
def test_third_party_optimizers_before_their_first_step(name: str) -> None:
    cls = foreign(name)
    params, peers = make_params(), make_params()
    new, peer = replace(cls(params, lr=1e-2)), cls(peers, lr=1e-2)
    run(new, params, range(3)), run(peer, peers, range(3))
    torch.testing.assert_close(params, peers, rtol=1e-5, atol=1e-6)


def test_l2_mode_of_fused_adam_becomes_adam() -> None:
    base, made = STAND_INS["apex.optimizers.fused_adam.FusedAdam"]
    cls = stand_in("apex.optimizers.fused_adam.FusedAdam", base, **made)
    params, peers = make_params(), make_params()
    old, peer = (cls(p, {"adam_w_mode": 0}, lr=1e-2, weight_decay=0.3) for p in (params, peers))
    run(old, params, range(2)), run(peer, peers, range(2))
    new = replace(old)
    assert type(new) is oxytorch.optim.Adam and "step" not in new.param_groups[0]
    run(new, params, range(2, 6)), run(peer, peers, range(2, 6))
    torch.testing.assert_close(params, peers, rtol=1e-5, atol=1e-6)


REFUSED = [
    ("lion_pytorch.lion_pytorch.Lion", {"decoupled_wd": True}, {}, "decoupled_wd = True"),
    ("timm.optim.lion.Lion", {}, {"caution": True}, "caution = True"),
    ("timm.optim.lion.Lion", {}, {"corrected_weight_decay": True}, "corrected_weight_decay = True"),
    ("pytorch_optimizer.optimizer.lion.Lion", {}, {"fixed_decay": True}, "fixed_decay = True"),
    ("pytorch_optimizer.optimizer.lion.Lion", {}, {"weight_decouple": False}, "weight_decouple = False"),
    ("pytorch_optimizer.optimizer.lion.Lion", {}, {"cautious": True}, "cautious = True"),
    ("bitsandbytes.optim.adamw.AdamW", {"args": BnbArguments(optim_bits=8)}, {}, "optim_bits = 8"),
    ("bitsandbytes.optim.adamw.AdamW", {"args": BnbArguments(max_unorm=0.5)}, {}, "max_unorm = 0.5"),
    ("bitsandbytes.optim.adam.Adam", {"args": BnbArguments(percentile_clipping=5)}, {}, "percentile_clipping = 5"),
    ("bitsandbytes.optim.lion.Lion", {"is_paged": True}, {}, "is_paged = True"),
    ("apex.optimizers.fused_adam.FusedAdam", {}, {"bias_correction": False}, "bias_correction = False"),
    ("apex.optimizers.fused_adam.FusedAdam", {"master_weights": True}, {}, "master_weights = True"),
    ("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam", {}, {"amsgrad": True}, "amsgrad = True"),
]


@pytest.mark.parametrize(("name", "attributes", "options", "message"), REFUSED)
def test_settings_that_change_the_algorithm_are_refused_by_name(name, attributes, options, message) -> None:
    base, made = STAND_INS[name]
    params = make_params()
    old = stand_in(name, base, **made)(params, attributes, lr=1e-2, **options)
    run(old, params, range(2))
    before = content(old)
    with pytest.raises(ValueError, match=f"{name} has {message}, which changes its algorithm"):
        replace(old)
    assert content(old) == before


def test_other_classes_are_refused_by_name() -> None:
    for name, words in (
        ("transformers.optimization.AdamW", "eps before the bias correction"),
        ("bitsandbytes.optim.adamw.AdamW8bit", "without loss"),
        ("my.optim.AdamW", "there is one for torch.optim.AdamW"),
    ):
        with pytest.raises(TypeError, match=f"no replacement for {name}.*{words}"):
            replace(stand_in(name, AdamLike)(make_params(), lr=1e-2))
    with pytest.raises(TypeError, match=r"no replacement for torch\.optim\.nadam\.NAdam"):
        replace(torch.optim.NAdam(make_params()))
    base, made = STAND_INS["bitsandbytes.optim.adamw.AdamW"]
    params = make_params()
    old = stand_in("bitsandbytes.optim.adamw.AdamW", base, **made)(params, lr=1e-2)
    run(old, params, range(1))
    old.state[params[0]]["state1"] = torch.zeros(SHAPES[0], dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"'state1' is of dtype torch\.uint8"):
        replace(old)


@pytest.mark.parametrize("options", [{"clip_norm": -1.0}, {"ema_decay": 2.0}, {"state_dtype": "int4"}])
def test_bad_options_leave_the_old_optimizer_as_it_was(options: dict) -> None:
    base, made = STAND_INS["apex.optimizers.fused_adam.FusedAdam"]
    for cls in (torch.optim.AdamW, stand_in("apex.optimizers.fused_adam.FusedAdam", base, **made)):
        params = make_params()
        old = cls(params, lr=1e-2)
        run(old, params, range(2))
        before = content(old)
        with pytest.raises(ValueError):
            replace(old, **options)
        assert content(old) == before
        assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in params)


def test_a_compiled_model_trains_on() -> None:
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(DEVICE)
        compiled = torch.compile(model, backend="eager")
        opt: torch.optim.Optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
        data = torch.randn(20, 4, 6, device=DEVICE)
        for i, batch in enumerate(data):
            if ours and i == 7:
                opt = replace(opt, norm_in_backward=True, clip_norm=1e6)
            opt.zero_grad()
            compiled(batch).square().sum().backward()
            opt.step()
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
