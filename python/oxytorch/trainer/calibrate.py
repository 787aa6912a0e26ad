"""Decides a setting by timing forward and backward on the user's own batch, and leaves no trace of having done so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..optim.generators import rng_state, set_rng_state

_FEWEST = 3  # pairs after which a clear difference ends a comparison
_CLEAR = 0.9  # clear: the slowest with is faster than this share of the fastest without, or the reverse


class Escrow:
    """Holds everything that a forward and a backward change, and puts it back.

    That is: gradients, buffers (values and identity), the training flag of each module and the random generators.
    Python attributes that a module changes in ``forward`` are out of reach.
    """

    def __init__(self, model: nn.Module, params: list[torch.Tensor]) -> None:
        self._params = params
        self._grads = [p.grad for p in params]
        for p in params:
            p.grad = None
        self._buffers = [
            (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        self._modes = [(module, module.training) for module in model.modules()]
        self._rng = rng_state(params)

    def rewind(self) -> None:
        """Undo the buffers, the generators and the gradients of one trial."""
        for p in self._params:
            p.grad = None
        with torch.no_grad():
            for owner, name, buffer, copy in self._buffers:
                owner[name] = buffer
                if buffer is not None and copy is not None:
                    buffer.copy_(copy)
        set_rng_state(self._rng)

    def release(self) -> None:
        """Undo everything, gradients included."""
        self.rewind()
        for p, grad in zip(self._params, self._grads, strict=True):
            p.grad = grad
        for module, training in self._modes:
            module.training = training


@dataclass
class Trial:
    """What one comparison found."""

    times: tuple[float, float]  # least seconds without and with the setting; noise only ever adds
    losses: tuple[float, float]  # without, with
    rounds: int

    @property
    def ratio(self) -> float:
        """Time with the setting over time without it."""
        return self.times[1] / self.times[0]

    @property
    def drift(self) -> float:
        """How far the loss moved, relative."""
        before, after = self.losses
        if not math.isfinite(after) or not math.isfinite(before):
            return 0.0 if math.isfinite(after) == math.isfinite(before) else math.inf
        return abs(after - before) / max(abs(before), 1e-3)


class Bench:
    """Times forward and backward of ``run`` with settings switched on and off, in turn.

    Parameters
    ----------
    run
        Computes the loss of the first batch under the settings in force.
    escrow
        Rewound before each trial, so that all trials compute the same thing.
    budget
        Seconds to spend on one comparison; 5 to 25 pairs are timed, fewer where
        the first three leave no doubt.
    """

    def __init__(self, run: Callable[[], torch.Tensor], escrow: Escrow, budget: float = 0.8) -> None:
        self._run = run
        self._escrow = escrow
        self._budget = budget

    def once(self) -> tuple[float, float]:
        """Return the seconds and the loss of one forward and backward."""
        self._escrow.rewind()
        start = time.perf_counter()
        loss = self._run()
        loss.backward()  # type: ignore[no-untyped-call]
        seconds = time.perf_counter() - start
        return seconds, float(loss.detach())

    def compare(self, switch: Callable[[bool], None]) -> Trial:
        """Time pairs with ``switch(False)`` and ``switch(True)``; leaves it switched off."""
        switch(True)
        try:
            warm, after = self.once()
            switch(False)
            cold, before = self.once()
            rounds = int(min(25, max(5, self._budget / max(warm + cold, 1e-6))))
            off: list[float] = []
            on: list[float] = []
            for i in range(rounds):
                for state in (False, True) if i % 2 == 0 else (True, False):
                    switch(state)
                    (on if state else off).append(self.once()[0])
                if len(on) >= _FEWEST and (max(on) < _CLEAR * min(off) or max(off) < _CLEAR * min(on)):
                    break
        finally:
            switch(False)
        return Trial((min(off), min(on)), (before, after), len(on))


class ChannelsLast:
    """Switches the 4-D weights of a model between their own layout and channels_last, storage and all."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        tensors = [t for t in (*model.parameters(), *model.buffers()) if t.dim() == 4]
        self._own = [(t, t.data) for t in tensors]
        self._last = [(t, t.data.contiguous(memory_format=torch.channels_last)) for t in tensors]

    @staticmethod
    def applies(model: nn.Module) -> bool:
        """True where the model has a 2-D convolution."""
        return any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in model.modules())

    def switch(self, on: bool) -> None:
        """Put the one or the other layout in place; the values are the same."""
        for tensor, data in self._last if on else self._own:
            tensor.data = data
