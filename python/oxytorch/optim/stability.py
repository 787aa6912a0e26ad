"""Spikes in loss and gradient norm: found without a host read, and skipped, backed off from or rolled back."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from .._C import optim as _native
from ..base import log
from ..generators import generator_states, set_generator_states
from .origin import Origin, nan_origin
from .slot import params_of

if TYPE_CHECKING:
    from .tail import TailOptimizer

__all__ = ["NumericalStabilityManager", "Recovery", "StabilityEvent"]

_POLICIES = ("skip", "backoff", "rollback", "warn")


class Stateful(Protocol):
    """What a rollback can bring back besides model and optimizer: a scheduler, a loader."""

    def state_dict(self) -> dict[str, Any]:
        """State to go back to."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Go back to it."""


@dataclass(frozen=True)
class StabilityEvent:
    """Something that was not as before, and what was done about it.

    Attributes
    ----------
    step : int
        Counted by the manager, from 1.
    kind : {"loss", "grad_norm", "nonfinite_loss", "nonfinite_grad"}
    value, limit : float
        What was seen, and above what it counts as a spike; inf during warm-up.
    action : str
        ``"noted"``, ``"skipped"``, ``"skipped, learning rate reduced"``, ``"rolled back to step 300"``.
    """

    step: int
    kind: str
    value: float
    limit: float
    action: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind} {self.value:.4g} (limit {self.limit:.4g}), {self.action}"


# No `model.snapshot.Snapshot`: that one is taken a few times, walks every object and waits for the device. This one is
# written again every few steps of the run, into buffers that it keeps, by copies that wait for nothing.
@dataclass
class _RollbackPoint:
    """Named tensors and values of training after a step."""

    step: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class NumericalStabilityManager:
    """Watches loss and gradient norm, and steps an optimizer only where they are as they were before.

    A value is a spike where it lies more than `threshold` spreads above the median of the last `window` values, both
    measured robustly (median, and the larger of 1.4826 times the median and 1.2533 times the mean of the deviations
    above it), on logarithms where all values are positive. inf and NaN always are spikes; under a loss scaler only in
    the loss, since overflowing gradients are handled by the scaler. Spikes do not enter the window, until `patience`
    of them in a row make a new normal.

    With an optimizer of ``oxytorch.optim`` the verdict stays on the device: no value is read on the host, and the
    optimizer itself leaves out the step. Other optimizers are served with one host read and one more pass over the
    gradients a step. In a process group the loss is averaged first, so that every process decides the same.

    Policies, for a step with a spike:

    ``"skip"``
        The step is left out; parameters, state and averages keep every byte.
    ``"backoff"``
        It is left out, and the steps after it are taken with the learning rate times `backoff_factor`, which returns to
        1 over `backoff_steps` steps.
    ``"rollback"``
        It is left out, and parameters, buffers, optimizer state, hyperparameters, scaler, random generators of torch
        and everything in `extra` go back, bit for bit, to the last snapshot before it. The data goes on unless a loader
        is in `extra`. Where the same stretch spikes again, older snapshots are taken, and after `max_rollbacks` an
        error is raised.
    ``"warn"``
        Nothing is done; events are noted.

    On CPU the reaction of "backoff" and "rollback" comes within the step; on other devices a step later, when the
    verdict has reached the host: the step that spiked is left out by the device itself.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    policy : {"skip", "backoff", "rollback", "warn"}
    model : torch.nn.Module, optional
        Its buffers and the parameters that the optimizer does not own are rolled back too; needed by `explain`.
    scaler : torch.amp.GradScaler, optional
        `step` then calls ``scaler.step(optimizer)``; calling ``scaler.update()`` after it stays yours.
    extra : mapping of str to objects with ``state_dict`` and ``load_state_dict``, optional
        Rolled back as well: schedulers, loaders.
    window, threshold, floor, warmup, patience
        Of the detector: values looked back on; spreads above the median; least spread as a share of the median; values
        before anything but inf and NaN is judged; spikes in a row that make a new normal.
    backoff_factor : float
        In (0, 1).
    backoff_steps : int
    every, keep : int
        A snapshot each `every` steps, of which the last `keep` are kept. Each takes as much memory as parameters and
        optimizer state together.
    max_rollbacks : int
        Rollbacks without progress past the step that spiked.
    snapshot_device : torch.device or str, optional
        Where snapshots lie; beside their originals where not given. ``"cpu"`` saves device memory.
    process_group : torch.distributed.ProcessGroup, optional
        Group the loss is averaged over; the default group where torch.distributed is initialised.

    Attributes
    ----------
    rolled_back : bool
        Whether the last `step` ended in a rollback; a running loader iterator may need to be made anew.

    Raises
    ------
    ValueError
        A policy, size or option out of range, with what to do.

    Examples
    --------
    >>> guard = NumericalStabilityManager(optimizer, "rollback", model=model)
    >>> for batch in loader:
    ...     loss = compute_loss(model, batch)
    ...     loss.backward()
    ...     guard.step(loss)
    ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        policy: str = "skip",
        *,
        model: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
        extra: Mapping[str, Stateful] | None = None,
        window: int = 128,
        threshold: float = 6.0,
        floor: float = 0.02,
        warmup: int = 32,
        patience: int = 16,
        backoff_factor: float = 0.1,
        backoff_steps: int = 100,
        every: int = 100,
        keep: int = 2,
        max_rollbacks: int = 3,
        snapshot_device: torch.device | str | None = None,
        process_group: Any = None,
    ) -> None:
        if policy not in _POLICIES:
            raise ValueError(f"policy is {policy!r}; give one of {', '.join(map(repr, _POLICIES))}.")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor is {backoff_factor}; give a number between 0 and 1.")
        for name, value in (
            ("backoff_steps", backoff_steps),
            ("every", every),
            ("keep", keep),
            ("max_rollbacks", max_rollbacks),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; give at least 1.")
        for name, thing in (extra or {}).items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise ValueError(f"extra[{name!r}] has no state_dict and load_state_dict, so it cannot be rolled back.")
        params = params_of(optimizer)
        if not params:
            raise ValueError("the optimizer has no parameters.")
        self._tail = cast("TailOptimizer", optimizer) if hasattr(optimizer, "tail_stats") else None
        if self._tail is not None and policy != "warn":
            self._refuse(self._tail)
        self.optimizer = optimizer
        self.policy = policy
        self.model = model
        self.scaler = scaler
        self.rolled_back = False
        self._extra = dict(extra or {})
        self._device = params[0].device
        self._detector = _native.SpikeDetector(
            str(self._device), window=window, threshold=threshold, floor=floor, warmup=warmup, patience=patience
        )
        self._backoff = (backoff_factor, backoff_steps)
        self._every = every
        self._max_rollbacks = max_rollbacks
        self._snapshot_device = snapshot_device
        self._group = process_group
        self._free = [_RollbackPoint() for _ in range(keep)] if policy == "rollback" else []
        self._snapshots: list[_RollbackPoint] = []  # oldest first
        self._events: deque[StabilityEvent] = deque(maxlen=10_000)
        self._spikes = 0
        self._step = 0
        self._rate = 1.0
        self._attempts = 0
        self._rollbacks = 0
        self._furthest = 0
        self._bad_steps: set[int] = set()

    # -- the step

    def step(self, loss: Tensor | float | None = None) -> None:
        """Take the optimizer's step unless loss or gradient norm is a spike; in place of ``optimizer.step()``.

        Parameters
        ----------
        loss : Tensor or float, optional
            The step's loss, one number, not scaled; a tensor is not read on the host. Without it the gradient norm
            alone is judged.

        Raises
        ------
        RuntimeError
            More than `max_rollbacks` rollbacks that led nowhere; and what the optimizer's step raises.
        """
        self._step += 1
        self.rolled_back = False
        self._detector.judge(self._shared(loss))
        with self._reduced_rate():
            norm = self._step_torch() if self._tail is None else self._step_tail(self._tail)
        self._record(norm, self._scaled)

    def _shared(self, loss: Tensor | float | None) -> Tensor | None:
        if loss is None:
            return None
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return value
        size = distributed.get_world_size(self._group)
        if size == 1:
            return value
        total = value.to(self._device, torch.float32, copy=True)
        distributed.all_reduce(total, group=self._group)
        return total / size

    def _step_tail(self, optimizer: TailOptimizer) -> Tensor:
        conditions = {"skip": self._detector.loss_flag, "norm_limit": self._detector.norm_limit}
        for name, value in conditions.items() if self.policy != "warn" else ():
            setattr(optimizer, name, value)
        try:
            self._apply()
        finally:
            for name in conditions:
                optimizer.__dict__.pop(name, None)
        return optimizer._grad_norm()

    def _step_torch(self) -> Tensor:
        scaler = self.scaler if self._scaled else None
        if scaler is not None and scaler._per_optimizer_states[id(self.optimizer)]["stage"] is OptState.READY:
            scaler.unscale_(self.optimizer)
        grads = [p.grad for p in params_of(self.optimizer) if p.grad is not None]
        norm = nn.utils.get_total_norm(grads) if grads else torch.zeros((), device=self._device)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm.to(self._device)
        bad = self._detector.loss_flag.bool() | (norm > self._detector.norm_limit)
        if scaler is None:
            bad = bad | ~norm.isfinite()
        if self.policy == "warn" or not bool(bad):
            self._apply()
        return norm.float()

    def _apply(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)

    @property
    def _scaled(self) -> bool:
        return self.scaler is not None and self.scaler.is_enabled()

    @contextmanager
    def _reduced_rate(self) -> Iterator[None]:
        if self._rate == 1:
            yield
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * self._rate
        try:
            yield
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _record(self, norm: Tensor, scaled: bool) -> None:
        """Judge a step that was taken, and react to what the host knows of spikes by now."""
        reacts = self.policy in ("backoff", "rollback")
        if self._device.type == "cpu":
            self._detector.record(self._step, norm, scaled)
            spikes = self._detector.arrived(False)
        else:
            # The verdict of the step before this one: every process knows the same.
            spikes = self._detector.arrived(reacts)
            self._detector.record(self._step, norm, scaled)
        if self.policy == "backoff":
            factor, steps = self._backoff
            self._rate = factor if spikes else min(1.0, self._rate + (1 - factor) / steps)
        if spikes and self.policy == "rollback":
            self._roll_back(spikes)
        elif spikes:
            self._note(spikes, self._usual_action)
        elif self.policy == "rollback" and (not self._snapshots or self._step % self._every == 0):
            self._save()

    def _refuse(self, optimizer: TailOptimizer) -> None:
        options = optimizer._tail_options
        if options["step_in_backward"]:
            raise ValueError(
                "the optimizer steps in backward, before loss and gradient norm are judged; use it without "
                'step_in_backward, or policy="warn".'
            )
        if options["nonfinite"] in ("propagate", "rollback"):
            does = "takes steps with inf and NaN" if options["nonfinite"] == "propagate" else "goes back on its own"
            raise ValueError(
                f'the optimizer has nonfinite="{options["nonfinite"]}" and {does}; give it "skip", or the manager '
                'policy="warn".'
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ValueError('a step with differentiable=True cannot be left out; use policy="warn".')

    # -- what is told

    @property
    def _usual_action(self) -> str:
        return {"warn": "noted", "backoff": "skipped, learning rate reduced"}.get(self.policy, "skipped")

    def _note(self, spikes: list[_native.Spike], action: str) -> None:
        for spike in spikes:
            self._spikes += 1
            for flag, kind, rest, value, limit in (
                (spike.loss, "loss", "loss", spike.loss_value, spike.loss_limit),
                (spike.grad_norm, "grad_norm", "grad", spike.grad_norm_value, spike.grad_norm_limit),
            ):
                if flag:
                    name = kind if math.isfinite(value) else f"nonfinite_{rest}"
                    self._events.append(StabilityEvent(spike.step, name, value, limit, action))
                    log("warn", f"stability: {self._events[-1]}", "optim")

    @property
    def events(self) -> list[StabilityEvent]:
        """All events, oldest first, the last 10,000 at most. Off the CPU this waits for the device."""
        self._note(self._detector.drain(), self._usual_action)
        return list(self._events)

    def report(self) -> str:
        """Counts of what happened, the active limits, and the last events. Off the CPU this waits for the device."""
        events = self.events
        kinds = {kind: sum(event.kind == kind for event in events) for kind in dict.fromkeys(e.kind for e in events)}
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        lines = [
            f"{self._step} steps, policy {self.policy}: {self._spikes} with a spike"
            + (f" ({counted})" if kinds else ""),
            f"limits now: loss {float(self._detector.loss_limit):.4g}, "
            f"gradient norm {float(self._detector.norm_limit):.4g}",
        ]
        if self.policy == "rollback":
            lines.append(f"{self._rollbacks} rollbacks; snapshots of steps {[s.step for s in self._snapshots]}")
        if self.policy == "backoff":
            lines.append(f"learning rate times {self._rate:.3g}")
        return "\n".join(lines + [f"  {event}" for event in events[-5:]])

    def explain(self, compute_loss: Callable[[], Tensor]) -> Origin | None:
        """Repeat a bad step's forward and backward under `nan_origin`; nothing of the training changes.

        Parameters
        ----------
        compute_loss : callable
            Runs the model on the batch in question and returns the loss: ``lambda: loss_fn(model(x), y)``. Dropout
            draws other numbers than it did then.

        Returns
        -------
        Origin or None
            Where inf or NaN came from; None where there is none.

        Raises
        ------
        ValueError
            The manager was made without `model`.
        """
        model = self.model
        if model is None:
            raise ValueError("the manager was made without model=, so it cannot name modules.")
        params = [*params_of(self.optimizer), *model.parameters()]
        grads = [p.grad for p in params]
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        generators = generator_states([self._device])
        for p in params:
            p.grad = None
        try:
            with nan_origin(model) as finder, torch.enable_grad():
                compute_loss().backward()  # type: ignore[no-untyped-call]
        finally:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            set_generator_states(generators)
        return finder.origin

    # -- rollback

    def skip_batch(self) -> bool:
        """Whether the coming batch is one that spiked before a rollback; it then counts as done, and is to be left out.

        For loops whose loader is rolled back too, so that the same batches come again::

            for batch in loader:
                if guard.skip_batch():
                    continue
        """
        if self._step + 1 not in self._bad_steps:
            return False
        self._step += 1
        return True

    def _roll_back(self, spikes: list[_native.Spike]) -> None:
        place = spikes[0].step
        self._bad_steps.update(spike.step for spike in spikes)
        before = [snapshot for snapshot in self._snapshots if snapshot.step < place]
        if not before:
            self._note(spikes, "skipped, no snapshot before it")
            return
        self._attempts += 1
        self._furthest = max(self._furthest, self._step)
        if self._attempts > self._max_rollbacks:
            self._note(spikes, "gave up")
            raise RuntimeError(
                f"{self._max_rollbacks} rollbacks did not get training past step {self._furthest}: "
                f"{self._events[-1]}. Look at the data around it, lower the learning rate, or see explain()."
            )
        target = before[max(0, len(before) - self._attempts)]
        while self._snapshots[-1] is not target:
            self._free.append(self._snapshots.pop())
        self._note(spikes, f"rolled back to step {target.step}")
        self._note(self._detector.drain(), "undone by the rollback")
        self._restore(target)
        self._step = target.step
        self._rollbacks += 1
        self.rolled_back = True

    def _live(self) -> dict[str, Tensor]:
        """Every tensor that training changes, by name."""
        optimizer: Any = self.optimizer
        owned = params_of(optimizer)
        live = {f"parameter {i}": p for i, p in enumerate(owned)}
        known = {id(p) for p in owned}
        if self.model is not None:
            others = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in known)
            live |= {f"model {name}": p for name, p in others}
            live |= {f"buffer {name}": buffer for name, buffer in self.model.named_buffers()}
        for i, p in enumerate(owned):
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    live[f"state {i} {key}"] = value
        for i, group in enumerate(optimizer.param_groups):
            live |= {f"group {i} {key}": value for key, value in group.items() if isinstance(value, Tensor)}
        if self._tail is not None:
            live |= self._tail._unpublished()
        scaler: Any = self.scaler
        if self._scaled and scaler._scale is not None:
            live["scale"], live["growth"] = scaler._scale, scaler._growth_tracker
            # update() is still to come, and is to find what it found then.
            for i, state in enumerate(scaler._per_optimizer_states.values()):
                live |= {f"found {i} {device}": found for device, found in state["found_inf_per_device"].items()}
        live |= {f"detector {i}": tensor for i, tensor in enumerate(self._detector.state())}
        return {name: tensor.detach() for name, tensor in live.items()}

    def _host_values(self) -> dict[str, Any]:
        optimizer = self.optimizer
        return {
            "groups": [
                {key: value for key, value in group.items() if key != "params" and not isinstance(value, Tensor)}
                for group in optimizer.param_groups
            ],
            "state": [
                {key: value for key, value in optimizer.state.get(p, {}).items() if not isinstance(value, Tensor)}
                for p in params_of(optimizer)
            ],
            "generators": generator_states([self._device]),
            "extra": {name: thing.state_dict() for name, thing in self._extra.items()},
        }

    @torch.no_grad()
    def _save(self) -> None:
        snapshot = self._free.pop() if self._free else self._snapshots.pop(0)
        live = self._live()
        for name, tensor in live.items():
            kept = snapshot.tensors.get(name)
            # Scales of 8-bit codes follow their order in memory.
            if (
                kept is None
                or kept.shape != tensor.shape
                or kept.dtype != tensor.dtype
                or kept.stride() != tensor.stride()
            ):
                where = torch.device(self._snapshot_device or tensor.device)
                pinned = where.type == "cpu" and tensor.device.type != "cpu"
                snapshot.tensors[name] = torch.empty_like(tensor, device=where, pin_memory=pinned)
        for name in snapshot.tensors.keys() - live.keys():
            del snapshot.tensors[name]
        torch._foreach_copy_([snapshot.tensors[name] for name in live], list(live.values()), non_blocking=True)
        snapshot.values = copy.deepcopy(self._host_values())
        snapshot.step = self._step
        self._snapshots.append(snapshot)
        if self._step > self._furthest:
            self._attempts = 0

    @torch.no_grad()
    def _restore(self, snapshot: _RollbackPoint) -> None:
        optimizer = self.optimizer
        owned = params_of(optimizer)
        for i, p in enumerate(owned):
            # State that was made since then was not there.
            for key in [key for key in optimizer.state.get(p, {}) if f"state {i} {key}" not in snapshot.tensors]:
                if key not in snapshot.values["state"][i]:
                    del optimizer.state[p][key]
            if p in optimizer.state and not optimizer.state[p]:
                del optimizer.state[p]
        if self._tail is not None:
            self._tail._drop_unpublished(snapshot.tensors.keys())
        live = self._live()
        for i, p in enumerate(owned):
            # Laid out anew since then, and their scales with them.
            for key, value in optimizer.state.get(p, {}).items():
                kept = snapshot.tensors.get(f"state {i} {key}")
                if kept is not None and f"{key}_scale" in optimizer.state[p] and kept.stride() != value.stride():
                    optimizer.state[p][key] = kept.to(value.device, copy=True)
        names = [name for name in snapshot.tensors if name in live]
        torch._foreach_copy_([live[name] for name in names], [snapshot.tensors[name] for name in names])
        values = copy.deepcopy(snapshot.values)
        for group, kept in zip(optimizer.param_groups, values["groups"], strict=True):
            group.update(kept)
        for p, kept in zip(owned, values["state"], strict=True):
            if kept:
                optimizer.state[p].update(kept)
        if self._tail is not None:
            self._tail._adopt_restored()
        for name, thing in self._extra.items():
            thing.load_state_dict(values["extra"][name])
        set_generator_states(values["generators"])

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Detector, counters and learning-rate factor, for a checkpoint; snapshots are not in it."""
        return {
            "step": self._step,
            "rate": self._rate,
            "rollbacks": self._rollbacks,
            "attempts": self._attempts,
            "furthest": self._furthest,
            "bad_steps": sorted(self._bad_steps),
            "detector": [tensor.clone() for tensor in self._detector.state()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. A window of another length raises ValueError, with nothing changed."""
        mine = self._detector.state()
        if [t.shape for t in state["detector"]] != [t.shape for t in mine]:
            raise ValueError(
                f"the state has a window of {state['detector'][0].shape[-1]} values, this manager one of "
                f"{mine[0].shape[-1]}; give the same window=."
            )
        for tensor, value in zip(mine, state["detector"], strict=True):
            tensor.copy_(value)
        self._step, self._rate = state["step"], state["rate"]
        self._rollbacks, self._attempts = state["rollbacks"], state["attempts"]
        self._furthest, self._bad_steps = state["furthest"], set(state["bad_steps"])


class Recovery(NumericalStabilityManager):
    """What ``nonfinite="rollback"`` of an optimizer does: a manager that reacts to inf and NaN in gradients alone.

    It takes its snapshots and goes back within ``optimizer.step()``. See `events` and `report`.
    """

    def __init__(self, optimizer: TailOptimizer) -> None:
        super().__init__(optimizer, "rollback", threshold=math.inf)

    def _refuse(self, optimizer: TailOptimizer) -> None:
        pass  # its own options were checked with it

    def after_step(self, scaled: bool) -> None:
        """React to the step that the optimizer took; `scaled`: under a loss scaler, which handles overflows."""
        self._step += 1
        self.rolled_back = False
        self._detector.judge(None)
        assert self._tail is not None
        self._record(self._tail._grad_norm(), scaled)
