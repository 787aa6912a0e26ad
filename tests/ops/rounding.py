"""What tests of operators share: roundings of the dtypes, a number of threads for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
