"""Early stopping: when a metric no longer improves, and the weights of its best evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .. import _C

__all__ = ["EarlyStopping"]


class EarlyStopping:
    """Stops a run whose metric no longer improves, and brings back the weights of its best evaluation.

    The rule is that of C++'s ``oxytorch::EarlyStopping``. A NaN is no improvement.

    Parameters
    ----------
    patience
        Evaluations without improvement after which the run is over; at least 1.
    min_delta
        An improvement is more than this; at least 0.
    mode
        ``"min"`` for a loss, ``"max"`` for a metric that is to grow.
    restore_best
        Keep a copy of the parameters and buffers of the best evaluation.

    Raises
    ------
    ValueError
        For a setting out of its range.
    """

    def __init__(
        self, patience: int = 10, min_delta: float = 0.0, mode: str = "min", restore_best: bool = False
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode is {mode!r}, expected 'min' or 'max'.")
        self._rule = _C.trainer.EarlyStopping(patience, min_delta, mode == "min")
        self._restore_best = restore_best
        self._kept: dict[str, torch.Tensor] | None = None

    @property
    def best(self) -> float:
        """The best metric so far; infinite before the first improvement."""
        return self._rule.best

    @property
    def best_evaluation(self) -> int:
        """Which evaluation was the best, from 0; -1 before the first improvement."""
        return self._rule.best_evaluation

    @property
    def bad_evaluations(self) -> int:
        """Evaluations since the best one."""
        return self._rule.bad_evaluations

    @property
    def improved(self) -> bool:
        """Whether the last evaluation was the best so far."""
        return self._rule.improved

    def step(self, metric: float, model: nn.Module | None = None) -> bool:
        """Report the metric of one more evaluation.

        Parameters
        ----------
        metric
            A number on the host.
        model
            With ``restore_best``, whose parameters and buffers are copied where the metric improved.

        Returns
        -------
        bool
            Whether the run is over.
        """
        over = self._rule.step(metric)
        if self.improved and self._restore_best and model is not None:
            self._kept = {name: value.detach().clone() for name, value in _tensors(model).items()}
        return over

    def restore(self, model: nn.Module) -> bool:
        """Write the copied parameters and buffers into ``model``.

        Returns
        -------
        bool
            False where there are none.

        Raises
        ------
        ValueError
            For a model of other tensors; nothing is changed then.
        """
        if self._kept is None:
            return False
        now = _tensors(model)
        if {n: t.shape for n, t in now.items()} != {n: t.shape for n, t in self._kept.items()}:
            raise ValueError("the model has other tensors than the one whose weights were kept.")
        with torch.no_grad():
            for name, value in now.items():
                value.copy_(self._kept[name])
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return where the rule stands, and the copied tensors."""
        return {"rule": self._rule.state(), "kept": self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self._rule.load_state(state["rule"])
        self._kept = state["kept"]


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
