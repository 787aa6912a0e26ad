"""Importing it gives torch the (fake) device `hpu`, as importing the bridge does."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[4] / "device"))
import torch_device

torch_device.load("hpu")
# `torch.hpu` is this package's own module.
hpu = torch.hpu
hpu.__path__ = [str(Path(__file__).with_name("hpu"))]
sys.modules[f"{__name__}.hpu"] = hpu

from . import core as core  # noqa: E402
from .hpu import metrics as _metrics  # noqa: E402
from .utils.internal import is_lazy as _is_lazy  # noqa: E402

hpu.metrics = _metrics

if _is_lazy():

    def _none(*_: object, **__: object) -> None:
        raise NotImplementedError("the fake hpu records no graphs")

    for _name in ("HPUGraph", "graph", "make_graphed_callables", "ModuleCacher"):
        setattr(hpu, _name, _none)
    hpu.wrap_in_hpu_graph = lambda module, **_: module
