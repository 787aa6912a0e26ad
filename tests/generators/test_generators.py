"""The state of every random generator that a step may draw from is kept and put back, and nothing else moves."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from oxytorch.generators import generator_states, rng_state, seed_generators, set_rng_state, unmoved_generators


def draws(device: torch.device) -> list[float]:
    """One number of each generator."""
    made = [
        torch.rand(()),
        torch.rand((), device=device),
        torch.tensor(random.random()),
        torch.tensor(np.random.rand()),
    ]
    return [float(one) for one in made]


def test_a_state_is_put_back(device: torch.device) -> None:
    params = [torch.zeros(1, device=device)]
    state = rng_state(params)
    first = draws(device)
    assert draws(device) != first
    set_rng_state(state)
    assert draws(device) == first


def test_a_seed_decides_every_generator(device: torch.device) -> None:
    seed_generators(7)
    first = draws(device)
    seed_generators(7)
    assert draws(device) == first
    seed_generators(2**40)  # numpy takes no more than 32 bits
    assert draws(device) != first


def test_generators_stand_still_also_where_something_throws(device: torch.device) -> None:
    seed_generators(3)
    expected = draws(device)
    seed_generators(3)
    with pytest.raises(KeyError), unmoved_generators([torch.zeros(1, device=device)]):
        draws(device)
        raise KeyError
    assert draws(device) == expected


def test_states_are_named_by_device(device: torch.device) -> None:
    states = generator_states([device, torch.device("cpu")])
    assert "cpu" in states
    assert torch.device(next(iter(states))).type == "cpu"
    assert len(states) <= 2
