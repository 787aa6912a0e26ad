"""The built-in strategies, registered in the order in which they are tried: cheap and sure ones first."""

from __future__ import annotations

# Order matters here: it is the order of trials.
from . import host  # isort: skip
from . import optimizer  # isort: skip
from . import layout  # isort: skip
from . import precision  # isort: skip
from . import attention  # isort: skip
from . import loop  # isort: skip
from . import saved  # isort: skip
from . import feed  # isort: skip
from . import compiled  # isort: skip

__all__ = ["attention", "compiled", "feed", "host", "layout", "loop", "optimizer", "precision", "saved"]
