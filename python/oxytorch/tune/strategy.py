"""What a strategy is, and the register of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .._C import tune as _native
from ..model.change import KINDS, Change, Kind, widest

if TYPE_CHECKING:
    from .run import Run

__all__ = ["KINDS", "STRATEGIES", "Kind", "Strategy", "offer", "strategy", "widest"]


class Strategy(Change):
    """A change to a training run that may make its step faster, and what the tuner has to know of it.

    A subclass, or any class with ``apply`` and ``revert``, such as an edit of a model, is registered by the decorator
    `strategy`. An object is made for each run, so what `apply` needs to remember for `revert` goes on ``self``. Both
    are called many times in turn while the step is measured: expensive objects (a compiled function, a copy of the
    weights in another layout) are created once and kept. They run between steps, never inside one.

    Attributes
    ----------
    name, kind, cost
        See `Change`.
    group : str
        At most one strategy of a group is active.
    requires : tuple of str
        Tried only where these are active.
    interacts : tuple of str
        Judged again, on or off, after one of these has been accepted.
    part_of : tuple of str
        Not tried where one of these is active: they do all that it does.
    renewed_by : tuple of str
        Of one with an expected cost: it takes that cost anew where one of these is turned on or off; of what interacts
        with it where empty.
    needs_loop : bool
        Tried only where the plan takes the steps (``plan.step(batch)``), as it changes the loop itself.
    feeds : bool
        It changes what batches are drawn from, ``run.data``, and nothing of the step.
    unseen_memory : bool
        Its steps take memory that `Meter` does not see, such as the pool of a graph: what they take is not known.
    settle : int
        Steps that are not measured after it was switched; one fewer where a step lasts over 50 ms.
    max_speedup : float
        A speedup that it cannot exceed: where even that cannot repay `expected_cost`, it is not tried.
    expected_speedup : float
        Where it pays at all. The highest is tried first, which makes every later trial cheaper. That of what
        feeds follows from the time that drawing takes.
    """

    group: str = ""
    requires: tuple[str, ...] = ()
    interacts: tuple[str, ...] = ()
    part_of: tuple[str, ...] = ()
    renewed_by: tuple[str, ...] = ()
    needs_loop: bool = False
    feeds: bool = False
    unseen_memory: bool = False
    settle: int = 1
    max_speedup: float = 3.0
    expected_speedup: float = 1.05

    def likely_speedup(self, run: Run) -> float | None:  # noqa: ARG002
        """Return what it is likely to make of the step as it is now, by a look at where its time goes; None: no idea.

        Asked of one with an expected cost, right before its trial, with what was accepted so far active.
        """
        return None

    def settle_in(self, run: Run) -> None:
        """Let go of what is kept for trials alone: they are over, and this stays active."""

    def expected_cost(self, run: Run) -> float:  # noqa: ARG002
        """Return the seconds that turning it on takes once, such as compiling, as far as one can tell beforehand."""
        return 0.0


def offer(name: str, cls: type[Strategy], refused: str = "", *, active: Sequence[str] = ()) -> _native.Offer:
    """Return what the tuner knows of a strategy.

    `refused`: why settings or the loop do not allow it. `active`: what is active in any case and need not be required.
    """
    return _native.Offer(
        name,
        kind=cls.kind,
        group=cls.group,
        requires=[one for one in cls.requires if one not in active],
        interacts=cls.interacts,
        part_of=cls.part_of,
        renewed_by=cls.renewed_by,
        settle=cls.settle,
        cost=cls.cost,
        max_speedup=cls.max_speedup,
        expected_speedup=cls.expected_speedup,
        feeds=cls.feeds,
        refused=refused,
    )


#: Registered classes by name; of two that promise as much, the first is tried first.
STRATEGIES: dict[str, type[Strategy]] = {}

_Class = TypeVar("_Class", bound=type)


def strategy(name: str, *, kind: Kind, **attributes: Any) -> Callable[[_Class], _Class]:
    """Register a class as a strategy; the attributes of `Strategy` may be given here.

    Parameters
    ----------
    name : str
        Not taken yet.
    kind : {"exact", "tolerance", "precision", "trade"}
        "exact" promises the same bits, and is held to it.
    **attributes
        Of `Strategy`: ``group``, ``requires``, ``interacts``, ``part_of``, ``renewed_by``, ``needs_loop``, ``feeds``,
        ``unseen_memory``, ``settle``, ``cost``, ``max_speedup``, ``expected_speedup``.

    Raises
    ------
    ValueError
        For a name that is taken, a kind or an attribute that does not exist.
    TypeError
        For a class without ``apply`` and ``revert``.

    Examples
    --------
    >>> @strategy("fewer_threads", kind="tolerance", group="threads")
    ... class FewerThreads:
    ...     def apply(self, run):
    ...         self.before = torch.get_num_threads()
    ...         torch.set_num_threads(1)
    ...
    ...     def revert(self, run):
    ...         torch.set_num_threads(self.before)
    """
    if name in STRATEGIES:
        raise ValueError(f"a strategy {name!r} is registered already; choose another name.")
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}.")
    known = {key for key in vars(Strategy) if not key.startswith("_") and not callable(getattr(Strategy, key))}
    known.add("cost")
    if unknown := set(attributes) - known:
        raise ValueError(f"a strategy has no attribute {sorted(unknown)[0]!r}; there are {', '.join(sorted(known))}.")

    def register(cls: _Class) -> _Class:
        for method in ("apply", "revert"):
            if not callable(getattr(cls, method, None)):
                raise TypeError(f"the strategy {name!r} ({cls.__name__}) has no method {method}(run).")
        bases = (cls,) if issubclass(cls, Strategy) else (cls, Strategy)
        STRATEGIES[name] = type(cls.__name__, bases, {"name": name, "kind": kind, **attributes, "__doc__": cls.__doc__})
        return cls

    return register
