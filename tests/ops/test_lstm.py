"""LSTM layers: what test_recurrent.py does not ask of both kinds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from .recurrent import installed

pytestmark = pytest.mark.cpu_only("the kernel is the CPU's")


def test_what_it_does_not_serve_stays_with_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8)
    modules = [(nn.LSTM(8, 12).double(), x.double()), (nn.GRU(8, 12), x), (nn.LSTM(8, 12, proj_size=5), x)]
    packed = pack_padded_sequence(x, [4, 4, 3, 2, 1, 1])
    plain = nn.LSTM(8, 12)
    expected = [module(given)[0] for module, given in modules]
    expected_packed = plain(packed)[0].data
    with installed("lstm"):
        assert all(module(given)[0].equal(right) for (module, given), right in zip(modules, expected, strict=True))
        assert plain(packed)[0].data.equal(expected_packed)
        assert plain(torch.randn(3, 8))[0].shape == (3, 12)  # without a batch
