"""What a program may do to parameters, gradients, state and groups between two steps, by name and at random."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

# ---- other memory behind the same tensor; all values stay


def cloned(t: Tensor) -> None:
    t.data = t.data.clone()


def set_to_copy(t: Tensor) -> None:
    t.set_(t.detach().clone())


def resized(t: Tensor) -> None:
    kept, shape = t.detach().clone(), t.shape
    t.data = t.new_empty(0)
    part = t.detach() if t.requires_grad else t
    part.resize_(shape).copy_(kept)
    t.data = part


def offloaded(t: Tensor) -> None:
    kept, storage = t.detach().clone(), t.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    torch.zeros(max(size // 4, 1), device=t.device)  # somebody else may get the memory
    storage.resize_(size)
    t.copy_(kept)


def with_gaps(t: Tensor) -> None:
    wider = t.new_zeros((*t.shape, 2))
    wider[..., 0] = t
    t.data = wider[..., 0]


def with_offset(t: Tensor) -> None:
    wider = t.new_zeros(t.numel() + 3)
    wider[3:] = t.flatten()
    t.data = wider[3:].view(t.shape)


MOVES: dict[str, Callable[[Tensor], None]] = {
    f.__name__: f for f in (cloned, set_to_copy, resized, offloaded, with_gaps, with_offset)
}

# ---- other layouts behind the same tensor; the values of all indices stay


def transposed(t: Tensor) -> None:
    if t.dim() >= 2:
        t.data = t.data.transpose(0, -1).contiguous().transpose(0, -1)


def channels_last(t: Tensor) -> None:
    if t.dim() == 4:
        t.data = t.data.contiguous(memory_format=torch.channels_last)


def contiguous(t: Tensor) -> None:
    t.data = t.data.contiguous()


LAYOUTS = (transposed, channels_last, contiguous, with_gaps)


def state_tensors(opt: Any) -> list[Tensor]:
    """All tensors that torch's `state` shows."""
    return [v for entries in opt.state.values() for v in entries.values() if isinstance(v, Tensor)]


def _coded(opt: Any) -> bool:
    return any(t.dtype in (torch.int8, torch.uint8) for t in state_tensors(opt))


class Mutations:
    """Random edits of an optimizer as a user holds it; every one is valid with torch's own class too.

    Parameters
    ----------
    pick : random.Random
    opt : torch.optim.Optimizer
        The user's object.
    stepping : callable
        Gives the object that steps; the same one or its replacement.
    """

    def __init__(self, pick: random.Random, opt: Any, stepping: Callable[[], Any]) -> None:
        self.pick, self.opt, self.stepping = pick, opt, stepping
        self.done: list[str] = []

    def apply(self) -> None:
        """Between none and three edits."""
        edits = [
            self.move_state,
            self.move_params,
            self.lay_out_params,
            self.lay_out_state,
            self.move_unpublished,
            self.exchange_two,
            self.drop,
            self.replace_entries,
            self.replace_dicts,
            self.assign_state,
            self.assign_groups,
            self.reload,
        ]
        with torch.no_grad():
            for edit in self.pick.sample(edits, self.pick.choice([0, 1, 1, 2, 3])):
                edit()
                self.done.append(edit.__name__)

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.opt.param_groups for p in group["params"]]

    def _some(self, tensors: list[Tensor]) -> list[Tensor]:
        share = self.pick.choice([0.3, 1.0])
        return [t for t in tensors if self.pick.random() < share]

    def _move(self, t: Tensor) -> None:
        # The reference decodes codes in the order of their memory, which the others may change.
        coded = t.dtype in (torch.int8, torch.uint8)
        moves = [cloned, set_to_copy, offloaded] if coded else list(MOVES.values())
        self.pick.choice(moves)(t)

    def move_state(self) -> None:
        for t in self._some(state_tensors(self.opt)):
            self._move(t)

    def move_params(self) -> None:
        for p in self._some(self.params):
            cloned(p)

    def lay_out_params(self) -> None:
        layout = self.pick.choice(LAYOUTS)
        for p in self._some(self.params):
            layout(p)

    def lay_out_state(self) -> None:
        if _coded(self.opt):
            return  # scales belong to an order in memory
        layout = self.pick.choice(LAYOUTS)
        for t in self._some(state_tensors(self.opt)):
            layout(t)

    def move_unpublished(self) -> None:
        """Averages and copies of an optimizer of oxytorch."""
        own = self.stepping()
        if not hasattr(own, "copies"):
            return
        tensors = [t for t in (*own._averages(), *own.copies()) if t is not None]
        for t in self._some(tensors):
            self.pick.choice([self._move, *LAYOUTS])(t)

    def exchange_two(self) -> None:
        """The entries of two parameters of one shape and dtype, in the dict or behind the tensors."""
        held = [p for p in self.params if self.opt.state.get(p)]
        pairs = [
            (a, b)
            for i, a in enumerate(held)
            for b in held[i + 1 :]
            if a.shape == b.shape and a.dtype == b.dtype and self.opt.state[a].keys() == self.opt.state[b].keys()
            if not {"master", "low_bits"} & self.opt.state[a].keys()  # the weights' own
        ]
        if not pairs:
            return
        a, b = self.pick.choice(pairs)
        state = self.opt.state
        if self.pick.random() < 0.5 or _coded(self.opt):
            state[a], state[b] = state[b], state[a]
            return
        for key, one in state[a].items():
            if isinstance(one, Tensor):
                one.data, state[b][key].data = state[b][key].data, one.data

    @property
    def _starts_anew(self) -> bool:
        """Whether the class makes state that is missing; Adagrad makes it with the optimizer alone."""
        return type(self.opt).__name__ != "Adagrad"

    def drop(self) -> None:
        state = self.opt.state
        if not state or not self._starts_anew:
            return
        param = self.pick.choice(list(state))
        kind = self.pick.choice(["pop", "popitem", "del", "clear", "inside"])
        if kind == "pop":
            state.pop(param)
        elif kind == "popitem":
            state.popitem()
        elif kind == "del":
            del state[param]
        elif kind == "clear":
            state.clear()
        else:
            state[param].clear()

    def _new_entries(self, entries: dict[str, Any]) -> dict[str, Any]:
        """The same state in other tensors."""
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries.items()}

    def replace_entries(self) -> None:
        """Within a parameter's dict, by each operation that dicts have for it."""
        for entries in self.opt.state.values():
            new = self._new_entries(entries)
            kind = self.pick.choice(["set", "update", "or", "setdefault"])
            if kind == "set":
                for key, value in new.items():
                    entries[key] = value
            elif kind == "update":
                entries.update(new)
            elif kind == "or":
                entries |= new
            else:
                for key in new:
                    entries.pop(key)
                for key, value in new.items():
                    entries.setdefault(key, value)

    def replace_dicts(self) -> None:
        state = self.opt.state
        new = {param: self._new_entries(entries) for param, entries in state.items()}
        if self.pick.random() < 0.5:
            state.update(new)
        else:
            for param, entries in new.items():
                state[param] = entries

    def assign_state(self) -> None:
        items = list(self.opt.state.items())
        self.pick.shuffle(items)
        keep = self.pick.random() < 0.8 or not self._starts_anew
        self.opt.state = defaultdict(dict, {p: self._new_entries(e) for p, e in items} if keep else {})

    def assign_groups(self) -> None:
        groups = [dict(group) for group in self.opt.param_groups]
        for group in groups:
            group["params"] = list(group["params"])
            if isinstance(group["lr"], float):
                group["lr"] *= self.pick.choice([1.0, 0.5])
        big = next((g for g in groups if len(g["params"]) > 1), None)
        if big is not None and self.pick.random() < 0.5:  # split one
            rest = {**big, "params": big["params"][1:]}
            big["params"] = big["params"][:1]
            groups.append(rest)
        self.opt.param_groups = groups

    def reload(self) -> None:
        self.opt.load_state_dict(copy.deepcopy(self.opt.state_dict()))


def refused_and_back(step: Callable[[], Any], params: list[Tensor]) -> None:
    """A model in another dtype for a moment: the step names the parameter and nothing has happened."""
    kept = [(p, p.data, p.grad) for p in params]
    changed = [p for p in params if p.grad is not None]
    if not changed or any(p.is_complex() for p in params):
        return
    for p, data, _ in kept:
        p.grad = None
        p.data = data.to(torch.float64 if data.dtype != torch.float64 else torch.float32)
    for p in changed:
        p.grad = torch.zeros_like(p)
    before = [data.clone() for _, data, _ in kept]
    with pytest.raises(RuntimeError, match="when the optimizer was built"):
        step()
    for p, data, grad in kept:
        p.grad = None
        p.data = data
        p.grad = grad
    assert all(torch.equal(p, b) or b.isnan().any() for p, b in zip(params, before, strict=True))
