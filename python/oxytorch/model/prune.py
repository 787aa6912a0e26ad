"""Weights set to zero, and channels taken out, through torch's pruning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import prune as _torch_prune

from .compare import Evaluate, Smaller, compare, duplicate

__all__ = ["prune"]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Each channel of their output is made of the same channel of their input alone.
_CHANNELWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.Identity,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.Flatten,
)  # fmt: skip
_FUNCTIONS = {torch.relu, torch.tanh, torch.sigmoid, nn.functional.relu, nn.functional.gelu, nn.functional.silu}
torch_prune: Any = _torch_prune  # without types of its own
_METHODS = {"global", "magnitude", "random"}


def prune(
    model: nn.Module,
    amount: float,
    kind: str = "unstructured",
    method: str = "magnitude",
    *,
    example: Any,
    evaluate: Evaluate | None = None,
    permanent: bool = True,
) -> Smaller:
    """Return a pruned copy of a model, compared with it on the example.

    Parameters
    ----------
    model : torch.nn.Module
        Its Linear and convolution layers are pruned. It is not changed.
    amount : float
        Share to prune, in (0, 1): of the weights, or with ``"structured"`` of each layer's channels. ``"2:4"`` prunes
        half whatever it says, and wants 0.5.
    kind : {"unstructured", "structured", "2:4"}
        ``"unstructured"`` sets weights to zero: the model is as large and as fast as before, unless stored or run by
        something that skips zeros. ``"structured"`` takes channels out, where one layer alone reads them, and makes
        the model smaller and faster. ``"2:4"`` zeroes the two smallest of every four in a row, which NVIDIA's sparse
        tensor cores can skip; nothing here does.
    method : {"magnitude", "global", "random"}
        Smallest weights (or channels, by their 2-norm) layer by layer, smallest over all layers (``"unstructured"``
        only), or random ones.
    example : Any
        What the model is called with; a tuple or list is positions, a dict keywords.
    evaluate : callable, optional
        ``evaluate(model) -> float`` on the user's data, before and after.
    permanent : bool
        False keeps torch's masks (``weight_orig``, ``weight_mask``), so that fine-tuning keeps the zeros; they make
        the model larger. Structured pruning has none.

    Returns
    -------
    Smaller
        ``str()`` is the table.

    Raises
    ------
    ValueError
        For an unknown kind or method, an amount out of range, or a model of which nothing can be pruned; the message
        says why.
    """
    if kind not in ("unstructured", "structured", "2:4"):
        raise ValueError(f"kind is {kind!r}; there are 'unstructured', 'structured' and '2:4'")
    if method not in _METHODS or (method == "global" and kind != "unstructured") or (method, kind) == ("random", "2:4"):
        raise ValueError(f"method is {method!r} for {kind!r}; there are {', '.join(sorted(_METHODS))}, global only for "
                         "'unstructured' and magnitude only for '2:4'")  # fmt: skip
    if not 0.0 < amount < 1.0:
        raise ValueError(f"amount is {amount}, a share in (0, 1)")
    if kind == "2:4" and amount != 0.5:
        raise ValueError(f"amount is {amount}; '2:4' prunes 0.5, two of every four")
    smaller = duplicate(model)
    layers: dict[str, Any] = {name: m for name, m in smaller.named_modules() if isinstance(m, _LAYERS)}
    if not layers:
        raise ValueError("the model has no Linear or convolution layer to prune")
    skipped: dict[str, str] = {}
    if kind == "structured":
        changed = _take_out(smaller, amount, method, skipped)
        note = "channels were chosen by torch.nn.utils.prune and taken out; train on to regain what was lost."
    else:
        changed = _zero(layers, amount, method, kind, permanent, skipped)
        note = "weights are zero and stored as before: size and speed come only with what skips zeros."
    if not changed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise ValueError(f"no layer could be pruned. {reasons}")
    return Smaller(smaller, compare(model, smaller, example, evaluate), tuple(changed), skipped, (note,))


def _zero(
    layers: dict[str, Any], amount: float, method: str, kind: str, permanent: bool, skipped: dict[str, str]
) -> list[str]:
    if kind == "2:4":
        skipped |= {
            n: f"{m.weight[0].numel()} inputs, no multiple of 4" for n, m in layers.items() if m.weight[0].numel() % 4
        }
        layers = {name: module for name, module in layers.items() if name not in skipped}
        for module in layers.values():
            torch_prune.custom_from_mask(module, "weight", _two_of_four(module.weight))
    elif method == "global":
        torch_prune.global_unstructured(
            [(module, "weight") for module in layers.values()], torch_prune.L1Unstructured, amount=amount
        )
    else:
        choose: Any = torch_prune.l1_unstructured if method == "magnitude" else torch_prune.random_unstructured
        for module in layers.values():
            choose(module, "weight", amount)
    if permanent:
        for module in layers.values():
            torch_prune.remove(module, "weight")
    return list(layers)


def _two_of_four(weight: Tensor) -> Tensor:
    groups = weight.detach().abs().reshape(-1, 4)
    mask = torch.zeros_like(groups).scatter_(1, groups.topk(2, dim=1).indices, 1.0)
    return mask.reshape(weight.shape)


def _take_out(model: nn.Module, amount: float, method: str, skipped: dict[str, str]) -> list[str]:
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:
        raise ValueError(
            f"channels cannot be taken out: the way of the data cannot be traced ({type(error).__name__}: {error}). "
            "Use kind='unstructured'."
        ) from error
    modules = dict(model.named_modules())
    runs: dict[int, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            key = id(modules[str(node.target)])
            runs[key] = runs.get(key, 0) + 1
    shared = _shared(model)
    changed = []
    for node in list(graph.nodes):
        if node.op != "call_module" or not isinstance(modules[str(node.target)], _LAYERS):
            continue
        name = str(node.target)
        reason = _follow(node, modules, runs, shared)
        if isinstance(reason, str):
            skipped[name] = reason
            continue
        _cut(modules[name], *reason, amount, method)
        changed.append(name)
    for name, module in modules.items():
        if isinstance(module, _LAYERS) and name not in changed:
            skipped.setdefault(name, "its weight is read by something other than a call of the layer")
    return changed


def _shared(model: nn.Module) -> set[int]:
    """Ids of modules of which a parameter is another module's too."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(id(module))
    return {owner for found in owners.values() if len(found) > 1 for owner in found}


def _follow(
    node: fx.Node, modules: dict[str, nn.Module], runs: dict[int, int], shared: set[int]
) -> tuple[list[nn.Module], nn.Module] | str:
    """(normalisations on the way, the one layer that reads the channels), or why there is none."""
    first: Any = modules[str(node.target)]
    if getattr(first, "groups", 1) != 1:
        return "a grouped convolution"
    on_way: list[nn.Module] = []
    flat = isinstance(first, nn.Linear)
    for here in _chain(node):
        if isinstance(here, str):
            return here
        if here.op == "call_function" and here.target in _FUNCTIONS:
            continue
        module: Any = modules[str(here.target)] if here.op == "call_module" else None
        if isinstance(module, _LAYERS):
            if getattr(module, "groups", 1) != 1:
                return "a grouped convolution reads its channels"
            if any(runs.get(id(m), 0) > 1 or id(m) in shared for m in (first, module, *on_way)):
                return "it, or a layer behind it, runs twice or shares its weight"
            if isinstance(module, nn.Linear) and not isinstance(first, nn.Linear) and not flat:
                return "a Linear reads its images without nn.Flatten between"
            return on_way, module
        if not isinstance(module, _CHANNELWISE):
            what = type(module).__name__ if module is not None else f"{here.op} {here.target}"
            return f"{what} reads its channels, which may mix them"
        if isinstance(module, nn.Flatten):
            if (module.start_dim, module.end_dim) != (1, -1):
                return "nn.Flatten with other dimensions than (1, -1) reads its channels"
            flat = True
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if flat and not isinstance(first, nn.Linear):
                return "batch normalisation reads its channels behind nn.Flatten"
            if module.num_features != first.weight.shape[0]:
                return "a normalisation over another dimension reads its channels"
            on_way.append(module)
        if isinstance(first, nn.Linear) and not isinstance(module, _ANYWHERE):
            return f"{type(module).__name__} reads features as channels"
    return "its channels are the model's output"


_ANYWHERE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.Identity,
    nn.Dropout, nn.BatchNorm1d,
)  # fmt: skip


def _chain(node: fx.Node) -> list[fx.Node | str]:
    """Nodes behind this one, as long as one alone reads each."""
    found: list[fx.Node | str] = []
    while True:
        readers = list(node.users)
        if len(readers) != 1:
            return [*found, f"{len(readers)} operations read its channels"]
        node = readers[0]
        if node.op == "output":
            return found
        if node.op not in ("call_module", "call_function"):
            return [*found, f"{node.op} {node.target} reads its channels"]
        found.append(node)


def _cut(first: Any, on_way: list[Any], last: Any, amount: float, method: str) -> None:
    """Take channels out of `first`, of the normalisations behind it and of the inputs of `last`."""
    choose: Any = torch_prune.ln_structured if method == "magnitude" else torch_prune.random_structured
    count = first.weight.shape[0]
    take = min(count - 1, round(amount * count))
    scratch: Any = nn.Module()
    scratch.weight = nn.Parameter(first.weight.detach().clone())
    options = {"n": 2} if method == "magnitude" else {}
    choose(scratch, "weight", amount=take, dim=0, **options) if take else None
    mask = scratch.weight_mask if take else torch.ones_like(first.weight)
    keep = mask.flatten(1).any(1).nonzero().flatten()
    _select(first, "weight", 0, keep)
    _select(first, "bias", 0, keep)
    size = len(keep)
    setattr(first, "out_features" if isinstance(first, nn.Linear) else "out_channels", size)
    for norm in on_way:
        for name in ("weight", "bias", "running_mean", "running_var"):
            _select(norm, name, 0, keep)
        norm.num_features = size
    inputs = last.weight.shape[1]
    each = inputs // count  # behind nn.Flatten a channel is several features in a row
    columns = (keep[:, None] * each + torch.arange(each, device=keep.device)).flatten()
    _select(last, "weight", 1, columns)
    setattr(last, "in_features" if isinstance(last, nn.Linear) else "in_channels", len(columns))


def _select(module: nn.Module, name: str, dim: int, index: Tensor) -> None:
    tensor = getattr(module, name, None)
    if tensor is None:
        return
    chosen = tensor.detach().index_select(dim, index).clone()
    if isinstance(tensor, nn.Parameter):
        module._parameters[name] = nn.Parameter(chosen, requires_grad=tensor.requires_grad)
    else:
        module._buffers[name] = chosen
