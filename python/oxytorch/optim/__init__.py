"""Optimizers whose whole step after backward is one native call.

`AdamW`, `Adam`, `SGD`, `Adagrad`, `RMSprop` and `Muon` are the `torch.optim` classes of the same names: subclasses
with the same arguments, `param_groups`, `state_dict`, hooks and schedulers; `Lion` is made the same way. They take the
tail's options besides: clipping, an exponential moving average of the parameters, narrow state, master weights, a
low-precision copy, a policy for inf and NaN, statistics. On CPU, fp32, bf16 and fp16 parameters are updated in two
passes over memory; other dtypes and devices, and Muon's matrix products, use torch's own operators with the same
algorithm.
"""

from .optimizers import SGD, Adagrad, Adam, AdamW, Lion, Muon, RMSprop
from .options import TailOptions, TailStats
from .origin import Origin, OriginFinder, TensorFacts, nan_origin
from .replace import replace
from .stability import NumericalStabilityManager, StabilityEvent
from .tail import TailOptimizer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "NumericalStabilityManager",
    "Origin",
    "OriginFinder",
    "RMSprop",
    "StabilityEvent",
    "TailOptimizer",
    "TailOptions",
    "TailStats",
    "TensorFacts",
    "nan_origin",
    "replace",
]
