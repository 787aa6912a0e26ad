"""Linear layers with 8-bit and 4-bit weights for inference, by torch's and torchao's own code."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .compare import Evaluate, Smaller, compare, duplicate

__all__ = ["Int4Linear", "quantize"]

_GROUPS = (32, 64, 128, 256)
_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Int4Linear(nn.Module):
    """A Linear layer with 4-bit weights on a CPU; groups of inputs have a scale and a zero of their own.

    The product is torch's ``_weight_int4pack_mm_for_cpu`` in bfloat16; results have the input's dtype.
    """

    packed: Tensor
    scales_and_zeros: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, group: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group = linear.in_features, linear.out_features, group
        weight = linear.weight.detach().float().reshape(linear.out_features, -1, group)
        low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
        scale = ((high - low) / 15).clamp(min=1e-9)
        levels = ((weight - low) / scale).round().clamp(0, 15).to(torch.int32).flatten(1)
        # The kernel takes a level q as (q - 8) * scale + zero.
        both = torch.cat([scale, low + 8 * scale], -1).transpose(0, 1).contiguous().bfloat16()
        self.register_buffer("packed", torch._convert_weight_to_int4pack_for_cpu(levels, 1))
        self.register_buffer("scales_and_zeros", both)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        rows = x.reshape(-1, self.in_features).bfloat16()
        y = torch._weight_int4pack_mm_for_cpu(rows, self.packed, self.group, self.scales_and_zeros).to(x.dtype)
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}, group={self.group}"


def quantize(
    model: nn.Module,
    kind: str = "int8",
    *,
    example: Any,
    evaluate: Evaluate | None = None,
    by: str = "auto",
    group: int = 32,
) -> Smaller:
    """Return a copy of a model with quantised Linear layers, for inference, compared with it on the example.

    Parameters
    ----------
    model : torch.nn.Module
        It is not changed. The copy is in evaluation mode.
    kind : {"int8", "int4"}
        ``"int8"``: weights of 8 bits, a scale a row, inputs quantised as they come. ``"int4"``: weights of 4 bits with
        a scale and a zero for every `group` inputs.
    example : Any
        What the model is called with; a tuple or list is positions, a dict keywords.
    evaluate : callable, optional
        ``evaluate(model) -> float`` on the user's data, before and after.
    by : {"auto", "torchao", "torch"}
        Whose code. ``"auto"`` takes torchao for int8 where it is installed (``pip install oxytorch[quantize]``), and
        torch otherwise. torch's int8 is ``torch.ao.quantization.quantize_dynamic``, which torch has deprecated in
        favour of torchao; int4 is torch's kernel for CPUs.
    group : int
        Inputs that share a scale: 32, 64, 128 or 256; int4 only.

    Returns
    -------
    Smaller
        Its comparison says whether the copy is faster; 4-bit weights on a CPU often are not.

    Raises
    ------
    ValueError
        For an unknown kind, group or `by`, a model that is not on a CPU, or one without a layer that fits.
    ModuleNotFoundError
        For ``by="torchao"`` where it is missing.
    """
    if kind not in ("int8", "int4"):
        raise ValueError(f"kind is {kind!r}; there are 'int8' and 'int4'")
    if by not in ("auto", "torchao", "torch") or (kind, by) == ("int4", "torchao"):
        raise ValueError(f"by is {by!r} for {kind!r}; there are 'auto', 'torch' and, for int8, 'torchao'")
    if group not in _GROUPS:
        raise ValueError(f"group is {group}; there are {', '.join(map(str, _GROUPS))}")
    devices = {p.device.type for p in model.parameters()}
    if devices - {"cpu"}:
        raise ValueError(
            f"the model is on {', '.join(sorted(devices))}; this is for CPUs. On a GPU use torchao itself."
        )
    smaller = duplicate(model).eval()
    held = {id(inner) for m in smaller.modules() if isinstance(m, _READERS) for inner in m.modules()}
    layers = {n: m for n, m in smaller.named_modules() if isinstance(m, nn.Linear)}
    skipped = {
        n: "torch's attention or encoder layer reads its weight itself" for n, m in layers.items() if id(m) in held
    }
    if kind == "int4":
        skipped |= {
            n: f"{m.in_features} inputs and {m.out_features} outputs; multiples of {group} and of 16 are wanted"
            for n, m in layers.items()
            if m.in_features % group or m.out_features % 16
        }
    layers = {name: module for name, module in layers.items() if name not in skipped}
    if not layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise ValueError(f"the model has no Linear layer to quantise. {reasons}".strip())
    if "" in layers:
        smaller = nn.Sequential(smaller).eval()
        layers = {"0": layers[""]}
    if kind == "int4":
        for name, module in layers.items():
            _put(smaller, name, Int4Linear(module, group))
        note = "4-bit weights, products in bfloat16 by torch's kernel for CPUs."
    elif by != "torch":
        note = _by_torchao_if_there(smaller, layers, by)
    else:
        note = _by_torch(smaller, layers)
    comparison = compare(model, smaller, example, evaluate)
    notes = [note]
    if comparison.slower:
        notes.append("it is slower than the model it was made of: keep it for its size, if at all.")
    return Smaller(smaller, comparison, tuple(layers), skipped, tuple(notes))


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, last = name.rpartition(".")
    model.get_submodule(owner)._modules[last] = module


def _torchao() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torchao = importlib.import_module("torchao")
            importlib.import_module("torchao.quantization")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "torchao is not installed: pip install oxytorch[quantize], or by='torch'"
            ) from error
        except ImportError as error:
            raise ImportError(
                f"this torchao does not work with torch {torch.__version__} ({error}); install another, or by='torch'"
            ) from error
    return torchao


def _by_torchao_if_there(model: nn.Module, layers: dict[str, nn.Linear], by: str) -> str:
    try:
        torchao = _torchao()
    except ImportError as error:
        if by == "torchao":
            raise
        missing = isinstance(error, ModuleNotFoundError)
        return _by_torch(model, layers) + ("" if missing else f" Not by torchao: {error}.")
    return _by_torchao(torchao, model, set(map(id, layers.values())))


def _by_torchao(torchao: Any, model: nn.Module, wanted: set[int]) -> str:
    library = torchao.quantization
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.quantize_(model, library.Int8DynamicActivationInt8WeightConfig(), lambda m, _: id(m) in wanted)
    return f"by torchao {torchao.__version__}: int8 weights, int8 inputs quantised as they come."


def _by_torch(model: nn.Module, layers: dict[str, nn.Linear]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the note says it
        torch_ao: Any = importlib.import_module("torch.ao.quantization")
        for name, module in layers.items():
            whole = torch_ao.quantize_dynamic(nn.Sequential(module), {nn.Linear}, dtype=torch.qint8)
            _put(model, name, whole[0])
    return "by torch.ao.quantization.quantize_dynamic, which torch has deprecated: torchao is its successor."
