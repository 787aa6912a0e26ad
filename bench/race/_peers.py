"""8-bit optimizers of other packages on CPU; none is needed, and one that is missing is reported as absent.

`make bench` installs them into build/peers, beside the torch that Oxytorch was built against (tools/peers.sh).
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PEERS = Path(__file__).resolve().parents[2] / "build/peers"
BITSANDBYTES, TORCHAO = "bitsandbytes AdamW8bit", "torchao AdamW8bit, compiled"


def _bitsandbytes(params: list[Tensor], **hyperparameters: float) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit  # noqa: PLC0415

    made: torch.optim.Optimizer = AdamW8bit(params, **hyperparameters)
    return made


def _torchao(params: list[Tensor], **hyperparameters: float) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit  # noqa: PLC0415  (its step compiles itself, with g++)

    made: torch.optim.Optimizer = AdamW8bit(params, **hyperparameters)
    return made


_MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {BITSANDBYTES: _bitsandbytes, TORCHAO: _torchao}
NAMES = tuple(_MAKERS)


@contextmanager
def _quiet() -> Any:
    """Without their words about GPU extensions that a CPU does not load."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def make(name: str, params: list[Tensor], **hyperparameters: float) -> torch.optim.Optimizer | str:
    """The peer after its first step (state made, code compiled), or why there is none."""
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))  # Last: what the environment has comes first.
    with _quiet():
        try:
            optimizer = _MAKERS[name](params, **hyperparameters)
            optimizer.step()
        except ImportError as missing:
            return f"not installed ({missing}); see bench/race/requirements.txt"
        except Exception as failed:  # whatever it is, the race goes on and says so
            return f"does not run here: {type(failed).__name__}: {str(failed).partition(chr(10))[0]}"
    return optimizer
