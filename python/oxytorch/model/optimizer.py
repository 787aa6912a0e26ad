"""`ModelOptimizer`: advice on a model, and edits that are checked and can be undone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from . import advise
from .call import Call
from .change import Change
from .edits import make
from .finding import Advice
from .loss import Loss, outputs_and_loss, tensors_in
from .recorder import OperatorRecorder
from .snapshot import untouched

__all__ = ["ModelOptimizer", "Outcome"]

_TIMES = 3.0  # how much farther from float64 than before an edit may take a result
_SLACK = 1e-5  # relative error allowed on top: sums in another order
_PLAIN = 1e-4  # relative difference allowed where float64 cannot judge
_OF_OWN = 0.1  # or this share of how far the model as given is from float64


@dataclass(frozen=True)
class Outcome:
    """What became of one edit.

    Attributes
    ----------
    name : str
    applied : bool
    reason : str
        What the check found, or why the edit was refused.
    error_before, error_after : float or None
        Largest relative error (norm of the difference over norm) of outputs, gradients and buffers against the same
        model in float64; None where it was compared with the model before the edit.
    """

    name: str
    applied: bool
    reason: str
    error_before: float | None = None
    error_after: float | None = None

    def __str__(self) -> str:
        return f"{self.name}: {'applied' if self.applied else 'refused'}: {self.reason}"


class ModelOptimizer:
    """Says what costs time in a model and why, and makes edits that keep the function, each checked and undoable.

    `advise` never changes the model: values, gradients, buffers, attributes, hooks, modes and random states are those
    of before, also where the model throws. `apply` does change it, keeps an edit only where outputs and gradients on
    the example stay what they were, and `revert` undoes all of them bit for bit.

    An example is what the model is called with: a dict is keywords, a tuple or list positions, anything else one
    argument. With ``loss_fn`` it is a batch: ``loss_fn(model, batch)``, or with a torch criterion (inputs, targets).

    Parameters
    ----------
    rules : iterable of str, optional
        Rules that advise asks; all of ``oxytorch.model.RULES`` unless given.

    Raises
    ------
    ValueError
        For a rule that is not known.

    Examples
    --------
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> [f.rule for f in ModelOptimizer().advise(model, torch.randn(4, 3, 8, 8))]
    ['bias_before_norm']
    """

    def __init__(self, rules: Iterable[str] | None = None) -> None:
        self._rules = None if rules is None else list(rules)
        advise._chosen(self._rules)
        self._applied: list[tuple[_Example, Change]] = []

    def advise(self, model: nn.Module, example: Any, loss_fn: Loss | None = None) -> Advice:
        """Return what was found, largest share of the step's time first.

        The step (forward, loss, backward) runs a few times: to warm up, to be timed, to record its operators, for the
        memory that backward keeps, and once in evaluation mode. Compiled modules run eagerly while recorded.

        Parameters
        ----------
        model : torch.nn.Module
            In the mode and on the device that it is used in. It is not changed.
        example : Any
            One batch of the size that is used: shares of time are those of this batch.
        loss_fn : callable, optional
            Without it the mean squared distance of the floating-point outputs from a fixed wave stands in for the loss.

        Returns
        -------
        Advice
            A list of `Finding`.

        Raises
        ------
        ValueError
            For a model with lazy parameters.
        Exception
            What the model or the loss throws passes through; the model is restored first.
        """
        return advise.read(model, example, loss_fn, self._rules)

    def apply(
        self, model: nn.Module, edits: Sequence[str] | str, example: Any, loss_fn: Loss | None = None
    ) -> list[Outcome]:
        """Apply edits in order, check each on the example, and undo those that do not hold.

        ============================  =====================================================================
        ``channels_last``             weights of convolutions, and images on entry, in channels_last
        ``channels_last_3d``          the same of 3-D convolutions and volumes
        ``sdpa:KERNEL``               kernel of attention: ``math``, ``native``, ``flash``, ``efficient``, ``cudnn``
        ``checkpoint:MODULE``         the block runs forward again in backward; bit for bit
        ``fuse_conv_bn``              batch normalisation folded into the layer before; evaluation mode only
        ``drop_bias_before_norm``     biases before batch normalisation moved into its running mean
        ============================  =====================================================================

        An edit holds where outputs, loss, gradients and buffers are at most 3 times as far from the same model in
        float64 as they were before, and 1e-5 more; exact ones must be the same bit for bit. Where float64 cannot run or
        does not draw the same random numbers, they must be within 1e-4 of before.

        Returns
        -------
        list of Outcome
            One an edit.

        Raises
        ------
        ValueError
            For a name that is no edit; nothing is applied then.
        """
        chosen = [make(name) for name in ([edits] if isinstance(edits, str) else edits)]
        return [self._apply(_Example(model, example, loss_fn), edit) for edit in chosen]

    def _apply(self, run: _Example, edit: Change) -> Outcome:
        if (fits := edit.applies(run)) is not True:
            return Outcome(edit.name, False, f"{fits}.")
        before = _results(run.model, run.example, run.loss_fn, edit.inference)
        reference = None if edit.kind == "exact" else _double(run.model, run.example, run.loss_fn, edit.inference)
        edit.apply(run)
        try:
            after = _results(run.model, run.example, run.loss_fn, edit.inference)
            outcome = _judge(edit, before, after, reference)
        except Exception as error:  # an edit that breaks the model is undone, whatever it broke
            outcome = Outcome(edit.name, False, f"the model does not run with it: {type(error).__name__}: {error}")
        except BaseException:
            edit.revert(run)
            raise
        if outcome.applied:
            self._applied.append((run, edit))
        else:
            edit.revert(run)
        return outcome

    def revert(self, model: nn.Module | None = None) -> list[str]:
        """Undo all edits, the last first; of one model where given. Returns their names.

        Weights that were trained since keep their values.
        """
        undone = [pair for pair in reversed(self._applied) if model is None or pair[0].model is model]
        for pair in undone:
            run, edit = pair
            edit.revert(run)
            self._applied.remove(pair)
        return [edit.name for _, edit in undone]

    @property
    def applied(self) -> list[str]:
        """Names of the active edits."""
        return [edit.name for _, edit in self._applied]


class _Example:
    """A model and an example: what an edit sees where there is no training run."""

    def __init__(self, model: nn.Module, example: Any, loss_fn: Loss | None) -> None:
        self.model = model
        self.example = example
        self.loss_fn = loss_fn
        self.call = Call.of(model)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def forward(self) -> Any:
        return outputs_and_loss(self.model, self.example, self.loss_fn)

    def uses(self, part: str) -> bool:
        with OperatorRecorder(self.model) as recorder, torch.no_grad(), untouched(self.model):
            self.forward()
        return any(part in op.name for op in recorder.ops)

    def state_of(self, param: Tensor) -> Mapping[str, Any]:  # noqa: ARG002
        return {}


Results = dict[str, Tensor]


def _results(model: nn.Module, example: Any, loss_fn: Loss | None, inference: bool) -> Results:
    """Outputs, loss, gradients and floating-point buffers of one step, from the model's present state."""
    with untouched(model), torch.set_grad_enabled(not inference):
        outputs, loss = outputs_and_loss(model, example, loss_fn)
        found = {f"output {i}": t for i, t in enumerate(tensors_in(outputs)) if t.is_floating_point()}
        if loss is not None and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
            found["loss"] = loss
            for name, p in model.named_parameters():
                if p.grad is not None and not p.grad.is_sparse:
                    found[f"gradient of {name}"] = p.grad
        found |= {f"buffer {n}": b for n, b in model.named_buffers() if b.is_floating_point() and not inference}
        return {name: tensor.detach().clone() for name, tensor in found.items()}


def _double(model: nn.Module, example: Any, loss_fn: Loss | None, inference: bool) -> Results | None:
    wide = lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v  # noqa: E731
    try:
        reference = copy.deepcopy(model).double()
        criterion = copy.deepcopy(loss_fn).double() if isinstance(loss_fn, nn.Module) else loss_fn
        return _results(reference, tree_map(wide, example), criterion, inference)
    except Exception:
        return None


def _distance(left: Tensor, right: Tensor) -> float:
    difference = float((left.double() - right.double()).norm())
    scale = float(right.double().norm())
    return difference / scale if scale else difference


def _judge(edit: Change, before: Results, after: Results, reference: Results | None) -> Outcome:
    if edit.kind == "exact":
        moved = [n for n in before if n not in after or not torch.equal(before[n], after[n])]
        if moved:
            return Outcome(edit.name, False, f"{moved[0]} is not the same bit for bit ({len(moved)} of {len(before)}).")
        return Outcome(edit.name, True, f"{len(before)} results are the same bit for bit. {edit.cost}".strip())
    common = [name for name in before if name in after and name not in edit.moved]
    errors = {
        n: (_distance(before[n], reference[n]), _distance(after[n], reference[n]))
        for n in common
        if reference is not None and n in reference
    }
    # A gradient that is nothing but rounding has no digits to compare.
    errors = {n: e for n, e in errors.items() if e[0] < 0.1 or not n.startswith("gradient")}
    if errors and max(e[0] for e in errors.values()) < 1e-2:
        worst = max(errors, key=lambda n: errors[n][1] - _TIMES * errors[n][0])
        was, now = (max(e[i] for e in errors.values()) for i in (0, 1))
        held = all(b <= _TIMES * a + _SLACK for a, b in errors.values())
        text = f"against float64 {worst} is off by {errors[worst][1]:.1e}, before by {errors[worst][0]:.1e}"
        return Outcome(edit.name, held, f"{text}. {edit.cost if held else ''}".strip(), was, now)
    far = {n: _distance(after[n], before[n]) for n in common}
    # Under an autocast the model as given is further from float64 than that by its rounding alone.
    allowed = {n: max(_PLAIN, _OF_OWN * errors[n][0] if n in errors and errors[n][0] < 0.1 else 0.0) for n in common}
    worst = max(far, key=lambda n: far[n] / allowed[n])
    held = far[worst] <= allowed[worst]
    text = f"{worst} is within {far[worst]:.1e} of before (float64 could not judge)"
    return Outcome(edit.name, held, f"{text}. {edit.cost if held else ''}".strip())
