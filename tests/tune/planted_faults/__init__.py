"""Faults that real accelerators have had, each a strategy under a claim that is believable, and healthy ones beside."""

from importlib import import_module

from .planting import FAULTS, HEALTHY, LARGE, Fault, ruling
from .workloads import workload

__all__ = ["FAULTS", "HEALTHY", "LARGE", "Fault", "ruling", "workload"]

# Each registers its own; their order is the order of the books.
for _noun in ("gradients", "update", "model", "random_numbers", "loop", "bits", "intermittent", "healthy", "numerics"):
    import_module(f".{_noun}", __name__)
