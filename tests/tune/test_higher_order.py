"""Torch's higher-order operators while kernels of ours serve: they fall through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oxytorch import _C
from torch import Tensor

SCOPES = [_C.tune.DeferredScores, _C.tune.DeferredNorms, _C.tune.DeferredLogits]


@pytest.mark.parametrize("scope", SCOPES, ids=lambda kind: str(kind.__name__))
def test_a_conditional_is_evaluated(scope: Any) -> None:
    x = torch.randn(3)
    with scope().scope():
        result = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    assert result.equal(x.sin() if x.sum() > 0 else x.cos())


def test_one_that_is_defined_later_falls_through() -> None:
    class Doubled(torch._ops.HigherOrderOperator):
        def __call__(self, x: Tensor) -> Tensor:
            result: Tensor = super().__call__(x)
            return result

    doubled = Doubled("oxytorch_test_doubled")
    doubled.py_impl(torch._C.DispatchKey.AutogradCPU)(lambda x: 2 * x)
    with _C.tune.DeferredScores().scope():
        assert doubled(torch.ones(2)).equal(torch.full((2,), 2.0))
