"""A user's optimizer replaced where it stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._C import optim as _native
from .optimizers import SGD, Adagrad, Adam, AdamW, Lion, Muon, RMSprop
from .options import TailOptions, native_options, with_defaults
from .tail import TailOptimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["replace"]

Target = type[TailOptimizer]

_TORCH: dict[type, Target] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
    torch.optim.RMSprop: RMSprop,
    torch.optim.Muon: Muon,
}


@dataclass(frozen=True)
class _Foreign:
    """A third-party optimizer whose algorithm is that of one here.

    Attributes
    ----------
    target : type or callable
        The class here, or what tells it from the optimizer.
    averages : mapping
        Names of the state tensors there and here.
    neutral : mapping
        Settings, on the optimizer or in its groups, that leave the algorithm as it is here only at this value.
    hyperparameters : mapping
        What its groups do not say and is the same for all.
    shares_count : bool
        Whether the steps of a group are counted in the state of one of its parameters.
    refusal : callable, optional
        Tells what else about an optimizer changes its algorithm; empty where nothing does.
    """

    target: Target | Callable[[Any], Target]
    averages: Mapping[str, str]
    neutral: Mapping[str, Any] = field(default_factory=dict)
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    shares_count: bool = False
    refusal: Callable[[Any], str] | None = None


_LION = {"exp_avg": "exp_avg"}
_ADAM = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def _by_decay(optimizer: Any) -> Target:
    target: Target = AdamW if optimizer.adam_w_mode else Adam
    return target


def _several_dtypes(optimizer: Any) -> str:
    mixed = any(len({param.dtype for param in group["params"]}) > 1 for group in optimizer.param_groups)
    return "counts each dtype of a group as a step of its bias correction; give each dtype a group" if mixed else ""


def _overridden(optimizer: Any) -> str:
    """Settings of single parameters: bitsandbytes keeps them by id, and those of modules until its first step."""
    manager = getattr(optimizer, "mng", None)
    named = set(getattr(manager, "pid2config", ()))
    for module, name, _ in getattr(manager, "module_weight_config_triple", ()):
        named.add(id(getattr(module, name)))
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return "has own settings for single parameters; it can be replaced without them only" if named & own else ""


_FUSED_ADAM = _Foreign(
    _by_decay,
    _ADAM,
    {"bias_correction": True, "amsgrad": False, "use_master": False, "master_weights": False},
)
_BITS = {
    "optim_bits": 32,
    "max_unorm": 0.0,
    "skip_zeros": False,
    "percentile_clipping": 100,
    "is_paged": False,
    "index2config": {},  # overrides for single parameters
}
_BNB_ADAM = {"state1": "exp_avg", "state2": "exp_avg_sq"}
_BNB_LION = _Foreign(Lion, {"state1": "exp_avg"}, _BITS, refusal=_overridden)
_BNB_ADAMW = _Foreign(AdamW, _BNB_ADAM, _BITS, refusal=_overridden)
# Its Adam decays the weights themselves, as its AdamW.
_BNB_PLAIN_ADAM = _Foreign(Adam, _BNB_ADAM, _BITS, {"decoupled_weight_decay": True}, refusal=_overridden)

# By qualified name, so that nothing is imported.
_FOREIGN: dict[str, _Foreign] = {
    "lion_pytorch.lion_pytorch.Lion": _Foreign(Lion, _LION, {"decoupled_wd": False}),
    "timm.optim.lion.Lion": _Foreign(Lion, _LION, {"caution": False, "corrected_weight_decay": False}),
    "pytorch_optimizer.optimizer.lion.Lion": _Foreign(
        Lion,
        _LION,
        {"weight_decouple": True, "fixed_decay": False, "use_gc": False, "adanorm": False, "cautious": False},
    ),
    "bitsandbytes.optim.lion.Lion": _BNB_LION,
    "bitsandbytes.optim.lion.Lion32bit": _BNB_LION,
    "bitsandbytes.optim.adamw.AdamW": _BNB_ADAMW,
    "bitsandbytes.optim.adamw.AdamW32bit": _BNB_ADAMW,
    "bitsandbytes.optim.adam.Adam": _BNB_PLAIN_ADAM,
    "bitsandbytes.optim.adam.Adam32bit": _BNB_PLAIN_ADAM,
    "apex.optimizers.fused_adam.FusedAdam": _FUSED_ADAM,
    "deepspeed.ops.adam.fused_adam.FusedAdam": dataclasses.replace(
        _FUSED_ADAM, shares_count=True, refusal=_several_dtypes
    ),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": _FUSED_ADAM,
}

# Why classes whose name promises an algorithm of this module are no such thing.
_DIFFERENT = {
    "transformers.optimization.AdamW": (
        "it adds eps before the bias correction and decays the weights after the update; "
        "build oxytorch.optim.AdamW in its place"
    ),
    **{
        f"bitsandbytes.optim.{module}8bit": "its codes cannot be converted without loss; "
        "build the optimizer of this module with state_dtype='int8' in its place"
        for module in ("adam.Adam", "adamw.AdamW", "lion.Lion")
    },
}


def replace(optimizer: torch.optim.Optimizer, **tail: Unpack[TailOptions]) -> TailOptimizer:
    """Return the Oxytorch optimizer of the same algorithm, carrying on where `optimizer` stands.

    Parameter groups are shared, not copied, so a scheduler built on the old optimizer steers the new one; step hooks
    are taken over. With an optimizer of torch state is shared as well, and either object follows where the other is
    given other groups or another state later. State of other libraries is taken over. Stop using the old optimizer's
    `step`.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Exactly `torch.optim.AdamW`, `Adam`, `SGD`, `Adagrad`, `RMSprop` or `Muon`; or `Lion` of lion_pytorch, timm,
        pytorch_optimizer or bitsandbytes; `AdamW` or `Adam` of bitsandbytes with 32-bit state; `FusedAdam` of apex or
        deepspeed; `DeepSpeedCPUAdam`. An Oxytorch optimizer is returned as it is when no option is given.
    **tail
        Options of the tail, see `TailOptions`.

    Raises
    ------
    TypeError
        Another class, or an unknown option.
    ValueError
        A setting that changes the algorithm, named with its value. The old optimizer is left as it was.
    """
    options = with_defaults(tail)
    if isinstance(optimizer, TailOptimizer):
        if tail:
            raise TypeError(f"{type(optimizer).__name__} already is an Oxytorch optimizer; give it its options there.")
        return optimizer
    target = _TORCH.get(type(optimizer))
    if target is not None:
        _check_options(target, options, optimizer.param_groups)
        made = _carry_on(target, options, optimizer, optimizer.defaults, optimizer.state)
        made._replaced, made._shared = optimizer, (optimizer.param_groups, optimizer.state)
        return made
    foreign = _FOREIGN.get(_name(optimizer))
    if foreign is None:
        raise TypeError(_no_replacement(_name(optimizer)))
    return _convert(foreign, options, optimizer)


def _name(optimizer: object) -> str:
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def _no_replacement(name: str) -> str:
    if name in _DIFFERENT:
        return f"no replacement for {name}: {_DIFFERENT[name]}."
    known = ", ".join([*(f"torch.optim.{cls.__name__}" for cls in _TORCH), *_FOREIGN])
    return f"no replacement for {name}; there is one for {known}."


def _check_options(target: Target, options: TailOptions, groups: list[dict[str, Any]]) -> None:
    """Refuse before anything is taken over."""
    _native.StepTail(target._algorithm, native_options(options))
    if any(group.get("differentiable") for group in groups):
        raise ValueError("this optimizer has differentiable=True, which only torch's own step can serve.")


def _carry_on(
    target: Target, options: TailOptions, optimizer: torch.optim.Optimizer, defaults: dict[str, Any], state: Any
) -> TailOptimizer:
    made = target.__new__(target)
    made._tail_options = options
    hooks = {key: value for key, value in optimizer.__dict__.items() if key.startswith("_optimizer_")}
    made.__setstate__(
        {
            "defaults": defaults,
            "state": state,
            "param_groups": optimizer.param_groups,
            "_loaded_ema": None,
            **hooks,
        }
    )
    # The scheduler would else warn that its optimizer never steps; it is the replacement that does.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return made


def _settings(optimizer: torch.optim.Optimizer, key: str) -> Iterator[Any]:
    """Values of a setting wherever it may be kept; bitsandbytes has two more places."""
    places = (optimizer, getattr(optimizer, "args", None), getattr(optimizer, "mng", None))
    yield from (getattr(place, key) for place in places if hasattr(place, key))
    yield from (group[key] for group in optimizer.param_groups if key in group)


def _convert(foreign: _Foreign, options: TailOptions, optimizer: torch.optim.Optimizer) -> TailOptimizer:
    for key, neutral in foreign.neutral.items():
        for value in _settings(optimizer, key):
            if value != neutral:
                raise ValueError(
                    f"this {_name(optimizer)} has {key} = {value!r}, which changes its algorithm; "
                    f"it can be replaced with {key} = {neutral!r} only."
                )
    if foreign.refusal is not None and (reason := foreign.refusal(optimizer)):
        raise ValueError(f"this {_name(optimizer)} {reason}.")
    target = foreign.target if isinstance(foreign.target, type) else foreign.target(optimizer)
    _check_options(target, options, optimizer.param_groups)
    state = {
        param: _converted_state(foreign, target, optimizer.state[param], _steps(foreign, optimizer, group, param))
        for group in optimizer.param_groups
        for param in group["params"]
        if optimizer.state.get(param)
    }
    fixed = dict(foreign.hyperparameters)
    if getattr(optimizer, "maximize", False):
        fixed["maximize"] = True
    usual = target([torch.zeros(())]).defaults
    defaults = {**usual, **{k: v for k, v in optimizer.defaults.items() if k in usual}, **fixed}
    for group in optimizer.param_groups:
        group.update(fixed)
        for key, value in defaults.items():
            group.setdefault(key, value)
        group.pop("step", None)  # counted for each parameter from here on
    return _carry_on(target, options, optimizer, defaults, state)


def _steps(foreign: _Foreign, optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor) -> float:
    """Return the count that the bias correction of a parameter is made of; 0 where its class counts nothing."""
    own = optimizer.state[param]
    if foreign.shares_count:
        return max(float(optimizer.state[p].get("step", 0)) for p in group["params"] if p in optimizer.state)
    return float(own["step"] if "step" in own else group.get("step", 0))


def _converted_state(foreign: _Foreign, target: Target, old: dict[str, Any], steps: float) -> dict[str, Tensor]:
    new: dict[str, Tensor] = {}
    if "step" in target._required_state:
        new["step"] = torch.tensor(steps, dtype=torch.float32)
    for theirs, ours in foreign.averages.items():
        if not old[theirs].is_floating_point():
            raise ValueError(
                f"state {theirs!r} is of dtype {old[theirs].dtype}, a code that cannot be converted without loss; "
                "only 32-bit state is carried over."
            )
        new[ours] = old[theirs]
    return new
