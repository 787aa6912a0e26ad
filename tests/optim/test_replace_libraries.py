"""`replace` of third-party optimizers, held to the libraries themselves.

lion-pytorch, timm, pytorch-optimizer and bitsandbytes are installed with the other needs of the tests (the extra
`peers` of pyproject.toml). apex and deepspeed are built with a compiler for CUDA, so theirs are written here by their
sources: `csrc/multi_tensor_adam.cu` and `apex/optimizers/fused_adam.py`, `csrc/adam/cpu_adam_impl.cpp` and
`deepspeed/ops/adam/{cpu_adam,fused_adam}.py`, line by line where a line decides a number.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import importlib.machinery
import importlib.util
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import oxytorch.optim
import pytest
import torch
import torch_device
from oxytorch.optim import replace
from torch import Tensor

from .test_replace import make_params, run

DEVICE = torch_device.chosen()
FLOAT32 = 2.0**-24  # the unit roundoff
STEPS, LR = 9, 1e-2


def content(opt: torch.optim.Optimizer) -> str:
    """Hash of everything an optimizer holds."""
    state = {k: v for k, v in opt.state_dict().items() if k in ("state", "param_groups")}
    return hashlib.sha256(
        repr(state).encode() + pickle.dumps([p.detach() for p in opt.param_groups[0]["params"]])
    ).hexdigest()


def timm_lion() -> type:
    """timm's own file. Its package imports all its models, and with them torchvision, which no test needs."""
    if "timm.optim.lion" not in sys.modules:
        found = importlib.util.find_spec("timm")
        assert found is not None and found.submodule_search_locations, "timm is not installed: make setup"
        root = Path(found.submodule_search_locations[0])
        for name, folder in (("timm", root), ("timm.optim", root / "optim")):
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
            package = importlib.util.module_from_spec(spec)
            sys.modules[name] = package
    return importlib.import_module("timm.optim.lion").Lion


# --- apex and deepspeed, as their sources compute --------------------------------------------------------------------


class _ByItsSource(torch.optim.Optimizer):
    def __init__(self, params: Any, adam_w_mode: Any, **options: Any) -> None:
        super().__init__(params, {**self.usual, **options})  # type: ignore[attr-defined]
        self.adam_w_mode = adam_w_mode

    usual: ClassVar = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def multi_tensor_adam(p: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int, mode: int) -> None:
    """AdamFunctor of csrc/multi_tensor_adam.cu, which apex and deepspeed share."""
    (beta1, beta2), lr, decay, g = group["betas"], group["lr"], group["weight_decay"], p.grad
    beta1_correction = 1 - beta1**step if group["bias_correction"] else 1.0
    beta2_correction = 1 - beta2**step if group["bias_correction"] else 1.0
    if mode == 0:  # ADAM_MODE_0: L2
        g = g + decay * p
    m.copy_(beta1 * m + (1 - beta1) * g)
    v.copy_(beta2 * v + (1 - beta2) * g * g)
    update = (m / beta1_correction) / ((v / beta2_correction).sqrt() + group["eps"])
    if mode == 1:  # ADAM_MODE_1: decoupled, of the weight before the update
        update = update + decay * p
    p.sub_(lr * update)


class ApexFusedAdam(_ByItsSource):
    """apex/optimizers/fused_adam.py: counts steps in the group."""

    def __init__(self, params: Any, adam_w_mode: bool = True, use_master: bool = False, **options: Any) -> None:
        super().__init__(params, 1 if adam_w_mode else 0, **options)
        self.use_master = use_master

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                multi_tensor_adam(p, *state.values(), group, group["step"], self.adam_w_mode)


class DeepSpeedFusedAdam(_ByItsSource):
    """deepspeed/ops/adam/fused_adam.py: a launch for each dtype, counted in the state of the last parameter alone."""

    def __init__(self, params: Any, adam_w_mode: bool = True, **options: Any) -> None:
        super().__init__(params, 1 if adam_w_mode else 0, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group.setdefault("step", 0)
            launches: dict[torch.dtype, list[Tensor]] = {torch.float16: [], torch.bfloat16: [], torch.float32: []}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state.update(step=group.get("step", 0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                launches[p.dtype].append(p)
            for together in filter(None, launches.values()):
                state["step"] += 1  # of whichever parameter came last
                for p in together:
                    averages = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                    multi_tensor_adam(p, *averages, group, state["step"], self.adam_w_mode)


class DeepSpeedCPUAdam(_ByItsSource):
    """deepspeed/ops/adam/cpu_adam.py over Step_1 of csrc/adam/cpu_adam_impl.cpp."""

    usual: ClassVar = {**_ByItsSource.usual, "amsgrad": False}

    def __init__(self, params: Any, adamw_mode: bool = True, **options: Any) -> None:
        super().__init__(params, adamw_mode, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                correction1 = 1 - beta1 ** state["step"] if group["bias_correction"] else 1.0
                correction2 = 1 / (1 - beta2 ** state["step"]) ** 0.5 if group["bias_correction"] else 1.0
                grad, momentum, variance = p.grad, state["exp_avg"], state["exp_avg_sq"]
                if decay > 0 and not self.adam_w_mode:
                    grad = p * decay + grad
                momentum.mul_(beta1).add_(grad * (1 - beta1))
                variance.mul_(beta2).add_(grad * grad * (1 - beta2))
                update = momentum / (variance.sqrt() * correction2 + group["eps"])
                if decay > 0 and self.adam_w_mode:
                    p.add_(-group["lr"] * decay * p)
                p.add_(update * (-group["lr"] / correction1))


for cls, module in (
    (ApexFusedAdam, "apex.optimizers.fused_adam"),
    (DeepSpeedFusedAdam, "deepspeed.ops.adam.fused_adam"),
    (DeepSpeedCPUAdam, "deepspeed.ops.adam.cpu_adam"),
):
    cls.__module__, cls.__qualname__ = module, cls.__name__.removeprefix("Apex")
DeepSpeedFusedAdam.__qualname__ = "FusedAdam"


# --- the classes -----------------------------------------------------------------------------------------------------

LIBRARIES = {
    "lion_pytorch.lion_pytorch.Lion": None,
    "timm.optim.lion.Lion": timm_lion,
    "pytorch_optimizer.optimizer.lion.Lion": None,
    "bitsandbytes.optim.lion.Lion": None,
    "bitsandbytes.optim.lion.Lion32bit": None,
    "bitsandbytes.optim.adamw.AdamW": None,
    "bitsandbytes.optim.adamw.AdamW32bit": None,
    "bitsandbytes.optim.adam.Adam": None,
    "bitsandbytes.optim.adam.Adam32bit": None,
    "apex.optimizers.fused_adam.FusedAdam": lambda: ApexFusedAdam,
    "deepspeed.ops.adam.fused_adam.FusedAdam": lambda: DeepSpeedFusedAdam,
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": lambda: DeepSpeedCPUAdam,
}
# bitsandbytes has kernels for these devices alone.
HERE = [name for name in LIBRARIES if DEVICE.type in ("cpu", "cuda") or not name.startswith("bitsandbytes")]


def library(name: str) -> type:
    module, _, short = name.rpartition(".")
    special = LIBRARIES.get(name)
    found: type = special() if special else getattr(importlib.import_module(module), short)
    assert f"{found.__module__}.{found.__qualname__}" == name
    return found


def assert_same(params: list[Tensor], peers: list[Tensor], start: list[Tensor]) -> None:
    """Both round each step's update and sum in float32: the bound is some of that, far less than what was trained."""
    for p, q, s in zip(params, peers, start, strict=True):
        bound = 8 * STEPS * FLOAT32 * max(float(s.detach().abs().max()), 1.0)
        assert float((q - s).detach().abs().max()) > 1e3 * bound
        torch.testing.assert_close(p, q, rtol=0, atol=bound)


def test_each_class_that_is_replaced_has_its_library_here() -> None:
    replaced = importlib.import_module("oxytorch.optim.replace")
    assert set(replaced._FOREIGN) == set(LIBRARIES)


@pytest.mark.parametrize("name", HERE)
def test_they_carry_on(name: str) -> None:
    cls = library(name)
    params, peers, start = make_params(), make_params(), make_params()
    options = {"lr": LR, "weight_decay": 0.1, "betas": (0.8, 0.95)}
    old, peer = cls(params, **options), cls(peers, **options)
    schedule, peer_schedule = (torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (old, peer))
    run(old, params, range(4), schedule), run(peer, peers, range(4), peer_schedule)
    new = replace(old)
    lion = "Lion" in name
    assert isinstance(new, oxytorch.optim.Lion if lion else torch.optim.Adam)
    assert new.param_groups is old.param_groups
    run(new, params, range(4, STEPS), schedule), run(peer, peers, range(4, STEPS), peer_schedule)
    assert_same(params, peers, start)
    if not lion:
        assert [float(new.state[p]["step"]) for p in params] == [STEPS] * len(params)
    # It is a full member from here on: its state goes to a fresh optimizer and to torch's.
    again = type(new)(copy.deepcopy(params))
    again.load_state_dict(copy.deepcopy(new.state_dict()))
    run(again, again.param_groups[0]["params"], range(9, 11)), run(new, params, range(9, 11))
    assert all(torch.equal(p, q) for p, q in zip(params, again.param_groups[0]["params"], strict=True))


@pytest.mark.parametrize("name", HERE)
def test_before_their_first_step(name: str) -> None:
    cls = library(name)
    params, peers, start = make_params(), make_params(), make_params()
    new, peer = replace(cls(params, lr=LR)), cls(peers, lr=LR)
    run(new, params, range(3)), run(peer, peers, range(3))
    assert_same(params, peers, start)


L2 = {
    "apex.optimizers.fused_adam.FusedAdam": "adam_w_mode",
    "deepspeed.ops.adam.fused_adam.FusedAdam": "adam_w_mode",
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": "adamw_mode",
}


@pytest.mark.parametrize("name", L2)
def test_l2_mode_becomes_adam(name: str) -> None:
    params, peers, start = make_params(), make_params(), make_params()
    options = {"lr": LR, "weight_decay": 0.3, L2[name]: False}
    old, peer = (library(name)(p, **options) for p in (params, peers))
    run(old, params, range(2)), run(peer, peers, range(2))
    new = replace(old)
    assert type(new) is oxytorch.optim.Adam and "step" not in new.param_groups[0]
    run(new, params, range(2, 6)), run(peer, peers, range(2, 6))
    assert_same(params, peers, start)


@pytest.mark.parametrize("name", ["timm.optim.lion.Lion", "pytorch_optimizer.optimizer.lion.Lion"])
def test_maximizing_goes_on(name: str) -> None:
    params, peers, start = make_params(), make_params(), make_params()
    old, peer = (library(name)(p, lr=LR, maximize=True) for p in (params, peers))
    run(old, params, range(2)), run(peer, peers, range(2))
    run(replace(old), params, range(2, 5)), run(peer, peers, range(2, 5))
    assert_same(params, peers, start)


def test_steps_of_deepspeeds_fused_adam_in_several_groups_and_after_frozen_weights() -> None:
    """It counts in the last parameter of a group that had a gradient, whichever that is."""
    params, peers, start = make_params(), make_params(), make_params()

    def build(ps: list[Any]) -> torch.optim.Optimizer:
        return DeepSpeedFusedAdam([{"params": ps[:1], "lr": 2 * LR}, {"params": ps[1:]}], lr=LR)

    old, peer = build(params), build(peers)
    run(old, params, range(5)), run(peer, peers, range(5))
    new = replace(old)
    assert [float(new.state[p]["step"]) for p in params] == [5, 5, 5]
    run(new, params, range(5, 8)), run(peer, peers, range(5, 8))
    assert_same(params, peers, start)


def test_deepspeeds_fused_adam_over_two_dtypes_is_refused() -> None:
    params = [*make_params()[:1], torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16, device=DEVICE))]
    old = DeepSpeedFusedAdam(params, lr=LR)
    run(old, params, range(2))
    with pytest.raises(ValueError, match="counts each dtype of a group as a step"):
        replace(old)


# --- what is refused -------------------------------------------------------------------------------------------------


def bnb_arguments(**given: Any) -> types.SimpleNamespace:
    """What its optimizers take for `args`; versions before 0.47 clipped by percentile."""
    usual: ClassVar = {"optim_bits": 32, "min_8bit_size": 4096, "max_unorm": 0.0, "skip_zeros": False}
    return types.SimpleNamespace(**usual | given)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("lion_pytorch.lion_pytorch.Lion", {"decoupled_weight_decay": True}, "decoupled_wd = True"),
    ("timm.optim.lion.Lion", {"caution": True}, "caution = True"),
    ("timm.optim.lion.Lion", {"corrected_weight_decay": True}, "corrected_weight_decay = True"),
    ("pytorch_optimizer.optimizer.lion.Lion", {"fixed_decay": True}, "fixed_decay = True"),
    ("pytorch_optimizer.optimizer.lion.Lion", {"weight_decouple": False}, "weight_decouple = False"),
    ("pytorch_optimizer.optimizer.lion.Lion", {"cautious": True}, "cautious = True"),
    ("pytorch_optimizer.optimizer.lion.Lion", {"use_gc": True}, "use_gc = True"),
    ("pytorch_optimizer.optimizer.lion.Lion", {"adanorm": True, "adanorm_r": 0.9}, "adanorm = True"),
    ("bitsandbytes.optim.adamw.AdamW", {"optim_bits": 8}, "optim_bits = 8"),
    ("bitsandbytes.optim.adamw.AdamW", {"args": bnb_arguments(max_unorm=0.5)}, "max_unorm = 0.5"),
    ("bitsandbytes.optim.adam.Adam", {"args": bnb_arguments(skip_zeros=True)}, "skip_zeros = True"),
    ("bitsandbytes.optim.adam.Adam", {"args": bnb_arguments(percentile_clipping=5)}, "percentile_clipping = 5"),
    ("bitsandbytes.optim.lion.Lion", {"is_paged": True}, "is_paged = True"),
    ("apex.optimizers.fused_adam.FusedAdam", {"bias_correction": False}, "bias_correction = False"),
    ("apex.optimizers.fused_adam.FusedAdam", {"use_master": True}, "use_master = True"),
    ("deepspeed.ops.adam.fused_adam.FusedAdam", {"bias_correction": False}, "bias_correction = False"),
    ("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam", {"amsgrad": True}, "amsgrad = True"),
]


@pytest.mark.parametrize(("name", "options", "message"), [case for case in REFUSED if case[0] in HERE])
def test_settings_that_change_the_algorithm_are_refused_by_name(name: str, options: dict, message: str) -> None:
    params = make_params()
    old = library(name)(params, lr=LR, **options)
    run(old, params, range(2))
    before = content(old)
    with pytest.raises(ValueError, match=f"{name} has {message}, which changes its algorithm"):
        replace(old)
    assert content(old) == before


@contextlib.contextmanager
def bnb_overrides() -> Iterator[Any]:
    """bitsandbytes' register of settings for single parameters, empty again afterwards."""
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    manager.initialize()
    try:
        yield manager
    finally:
        manager.initialize()


@pytest.mark.skipif("bitsandbytes.optim.adamw.AdamW" not in HERE, reason="bitsandbytes has no kernels for the device")
@pytest.mark.parametrize("before", [True, False])
def test_bitsandbytes_settings_of_single_parameters_are_refused(before: bool) -> None:
    with bnb_overrides() as manager:
        params = make_params()
        if before:  # as its documentation has it: registered, built, overridden
            manager.register_parameters(params)
        old = library("bitsandbytes.optim.adamw.AdamW")(params, lr=LR)
        manager.override_config(params[1], "betas", (0.5, 0.5))
        run(old, params, range(2))
        with pytest.raises(ValueError, match="own settings for single parameters"):
            replace(old)
        # Those of another model's parameters say nothing of this one.
        others = make_params()
        fine = library("bitsandbytes.optim.adamw.AdamW")(others, lr=LR)
        run(fine, others, range(1))
        assert type(replace(fine)) is oxytorch.optim.AdamW


@pytest.mark.skipif("bitsandbytes.optim.adamw.AdamW" not in HERE, reason="bitsandbytes has no kernels for the device")
def test_bitsandbytes_settings_of_a_modules_weight_are_refused() -> None:
    with bnb_overrides() as manager:
        model = torch.nn.Linear(3, 2).to(DEVICE)
        manager.register_module_override(model, "weight", {"optim_bits": 8})
        old = library("bitsandbytes.optim.adamw.AdamW")(model.parameters(), lr=LR)  # it looks at its first step
        with pytest.raises(ValueError, match="own settings for single parameters"):
            replace(old)


@pytest.mark.skipif("bitsandbytes.optim.adamw.AdamW" not in HERE, reason="bitsandbytes has no kernels for the device")
def test_eight_bit_state_is_refused() -> None:
    params = make_params()
    with pytest.raises(TypeError, match=r"no replacement for bitsandbytes\.optim\.adamw\.AdamW8bit.*without loss"):
        replace(library("bitsandbytes.optim.adamw.AdamW8bit")(params, lr=LR))
    old = library("bitsandbytes.optim.adamw.AdamW")(params, lr=LR)
    run(old, params, range(1))
    old.state[params[0]]["state1"] = torch.zeros(params[0].shape, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"'state1' is of dtype torch\.uint8"):
        replace(old)


@pytest.mark.parametrize("options", [{"clip_norm": -1.0}, {"ema_decay": 2.0}, {"state_dtype": "int4"}])
@pytest.mark.parametrize(
    "name", ["torch.optim.adamw.AdamW", "lion_pytorch.lion_pytorch.Lion", "apex.optimizers.fused_adam.FusedAdam"]
)
def test_bad_options_leave_the_old_optimizer_as_it_was(name: str, options: dict) -> None:
    params = make_params()
    old = library(name)(params, lr=LR)
    run(old, params, range(2))
    before = content(old)
    with pytest.raises(ValueError):
        replace(old, **options)
    assert content(old) == before
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in params)
