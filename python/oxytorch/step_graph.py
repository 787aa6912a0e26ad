"""A whole training step recorded once and replayed as one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from . import _C

Stateful: TypeAlias = Tensor | nn.Module | Optimizer | GradScaler


def _tensors(owner: Stateful) -> Iterator[Tensor]:
    if isinstance(owner, Tensor):
        yield owner
    elif isinstance(owner, nn.Module):
        yield from owner.parameters()
        yield from owner.buffers()
    elif isinstance(owner, Optimizer):
        for group in owner.param_groups:
            yield from group["params"]
            yield from (value for value in group.values() if isinstance(value, Tensor))
        for state in owner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        averages = getattr(owner, "ema_state_dict", None)
        if averages is not None:
            yield from averages()["ema"].values()
    elif isinstance(owner, GradScaler):
        yield from (value for value in (owner._scale, owner._growth_tracker) if value is not None)
    else:
        raise TypeError(
            f"state of a StepGraph is a {type(owner).__name__}; give modules, optimizers, tensors or a GradScaler"
        )


def _settings(optimizers: Iterable[Optimizer]) -> str:
    """Return everything that the optimizers read on the host; tensors by identity, since a replay reads them anew."""

    def text(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"tensor {id(value)}"
        return ",".join(map(text, value)) if isinstance(value, list | tuple) else repr(value)

    return ";".join(
        f"{name}={text(value)}"
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, value in group.items()
        if name not in ("params", "initial_lr")
    )


def _recorder(state: Iterable[Tensor]) -> Callable[[], Any] | None:
    # Before torch 2.13 only Python's class of the device records; None leaves it to torch's graphs for any device.
    on_card = any(tensor.is_cuda for tensor in state)
    return torch.cuda.CUDAGraph if on_card and not hasattr(torch.accelerator, "Graph") else None


class StepGraph:
    """Replays a training step (zero the gradients, forward, backward, optimizer) as one launch of the device.

    What may go wrong with graphs is looked after. A replay runs no Python, so a learning rate set on the host would be
    ignored: hyperparameters are compared at each call and a change is recorded anew; with a learning rate that is a
    tensor on the device nothing is. A recording is verified: one step is taken both ways from the same state, and
    the graph is used only where every byte comes out the same. What cannot be recorded runs eagerly from then on, and
    `reason` says why.

    Parameters
    ----------
    step : callable
        ``step(*inputs)`` runs one whole step and returns a tensor, or any nest of tensors in lists, tuples and dicts.
        It must not read a device value on the host.
    *state : torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler or Tensor
        Everything that the step changes and that lives on.
    warmup : int
        Steps taken eagerly first, at least 1.
    verify : bool
        Take one step both ways and compare. It costs a copy of the state for its duration.
    max_recordings : int
        After that many changes of hyperparameters the graph is given up.
    recorder : callable, optional
        Makes an object with ``capture_begin``, ``capture_end`` and ``replay``; torch's graphs of the device unless
        given.

    Raises
    ------
    ValueError
        For a warmup or max_recordings below 1.
    TypeError
        For state of another kind.

    Examples
    --------
    >>> model = nn.Linear(4, 1)
    >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def step(x):
    ...     opt.zero_grad()
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     opt.step()
    ...     return loss.detach()
    >>> graph = StepGraph(step, model, opt, warmup=1)
    >>> losses = [float(graph(torch.ones(2, 4))) for _ in range(3)]
    >>> graph.replayed, graph.reason.split(";")[0]
    (False, 'the step could not be recorded: the CPU has no graphs')
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *state: Stateful,
        warmup: int = 3,
        verify: bool = True,
        max_recordings: int = 8,
        recorder: Callable[[], Any] | None = None,
    ) -> None:
        given = [tensor for owner in state for tensor in _tensors(owner)]
        optimizers = [owner for owner in state if isinstance(owner, Optimizer)]
        self._spec: TreeSpec | None = None

        def flat_step(inputs: Sequence[Tensor]) -> list[Tensor]:
            leaves, self._spec = tree_flatten(step(*inputs))
            return [leaf.detach() for leaf in leaves]

        def all_state() -> list[Tensor]:
            unique = {id(tensor): tensor for owner in state for tensor in _tensors(owner)}
            return list(unique.values())

        self._graph = _C.trainer.StepGraph(
            flat_step,
            all_state,
            lambda: _settings(optimizers),
            recorder or _recorder(given),
            warmup,
            max_recordings,
            verify,
        )

    def __call__(self, *inputs: Tensor) -> Any:
        """Take one step.

        Parameters
        ----------
        *inputs : Tensor
            Copied to where the recording reads. Inputs of other shapes, dtypes or devices are stepped eagerly.

        Returns
        -------
        What the step returns. Its tensors are the recording's own, overwritten by the next call.
        """
        outputs = self._graph(list(inputs))
        assert self._spec is not None
        return tree_unflatten(outputs, self._spec)

    @property
    def replayed(self) -> bool:
        """Whether the last call replayed a recording."""
        return self._graph.replayed

    @property
    def reason(self) -> str:
        """Why the last call did not, or how the recording was proven."""
        return self._graph.reason

    @property
    def replays(self) -> int:
        """Steps replayed so far."""
        return self._graph.replays

    @property
    def recordings(self) -> int:
        """Recordings made so far."""
        return self._graph.recordings
