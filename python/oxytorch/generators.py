"""The state of the random generators: torch's of the CPU and of any device, Python's and numpy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def _owner(device: torch.device) -> Any:
    """The module that keeps the device's random state; None where there is none. Gaudi's has a module `random`."""
    module = getattr(torch, device.type, None)
    for owner in (module, getattr(module, "random", None)):
        if hasattr(owner, "get_rng_state") and hasattr(owner, "set_rng_state"):
            return owner
    return None


def generator_states(devices: Iterable[torch.device]) -> dict[str, Tensor]:
    """Return the states of the default generators of the CPU and of `devices`, by name of the device."""
    states = {"cpu": torch.get_rng_state()}
    for device in sorted({d for d in devices if d.type != "cpu"}, key=str):
        owner = _owner(device)
        if owner is not None:
            states[str(device)] = owner.get_rng_state(device)
    return states


def set_generator_states(states: dict[str, Tensor]) -> None:
    """Put back what `generator_states` returned; devices that are not here are left out."""
    for name, state in states.items():
        device = torch.device(name)
        if device.type == "cpu":
            torch.set_rng_state(state)
        elif (owner := _owner(device)) is not None:
            owner.set_rng_state(state, device)


def rng_state(params: Iterable[Tensor]) -> dict[str, Any]:
    """Return the state of every random generator that a training step of the parameters may draw from."""
    state: dict[str, Any] = {"torch": generator_states(p.device for p in params), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what ``rng_state`` returned."""
    set_generator_states(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state:
        import numpy as np  # noqa: PLC0415  (only where the caller used it)

        np.random.set_state(state["numpy"])


def seed_generators(seed: int) -> None:
    """Seed the generators of torch on every device, of Python, and of numpy where it is in use."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)  # it takes no more bits


@contextmanager
def unmoved_generators(params: Iterable[Tensor]) -> Iterator[None]:
    """Leave every generator at the end where it is now."""
    state = rng_state(params)
    try:
        yield
    finally:
        set_rng_state(state)
