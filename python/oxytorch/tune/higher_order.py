"""Torch's higher-order operators (`torch.cond`, those of its compiler and others) where kernels of ours serve."""

from __future__ import annotations

import torch


def let_thread_key_through() -> None:
    """Have them fall through the dispatch key by which a thread asks for our kernels.

    Operators of C++ do by a fallback of the key (`src/tune/thread_key.h`); these keep a table of their own, made when
    one is defined, and refuse a key that is not in it.
    """
    key = torch._C._dispatch_key_parse("TESTING_ONLY_GenericMode")
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)  # of those to come
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(key)  # type: ignore[no-untyped-call]
