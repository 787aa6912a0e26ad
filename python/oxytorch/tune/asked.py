"""What a configuration asks for by name: settings of the process, strategies taken out, strategies put in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import _C
from .._C import tune as _native
from ..base import log, parse_size, system_info
from ..config import PerformanceConfig
from ..data.loader_settings import LOADER_SETTINGS, with_settings
from ..memory import set_limit
from ..monitor import Report
from ..report import SettingLine
from .checkpointing import Checkpointing
from .strategy import Strategy, offer

if TYPE_CHECKING:
    import torch

    from .run import Run

__all__ = ["Asked", "named_by_user", "put"]

Classes = Mapping[str, type[Strategy]]


def named_by_user(settings: PerformanceConfig) -> dict[str, Any]:
    """Settings that the user named, against those that come with the level."""
    return {name: value for name, value in settings if not settings.origin(name).startswith("level ")}


class Asked:
    """What the user's own settings decide before anything is measured.

    Parameters
    ----------
    settings : PerformanceConfig
    strategies : mapping
        Classes on offer by name.
    excluded : iterable of str
        Names that the caller does not want tried.
    by_trainer : bool
        A trainer asks: every value but "auto" counts as named, those that come with the level too; what is named is
        made active by `activate`, at any level, and nothing else of its kind is tried.

    Attributes
    ----------
    named : dict
        Settings that were named, and their values.
    skipped : dict
        Why strategies are not tried.
    required : list of Requirement
        By setting, the strategies of which one is made active whatever it gains.
    refused : dict
        By setting, why `activate` could put none of them active.
    host : list
        Settings of the process that are applied, to be taken back in the reverse order.

    Raises
    ------
    NotImplementedError
        For a value that no strategy brings about.
    ValueError
        For one whose strategies are all excluded, not offered or above the level.
    """

    def __init__(
        self,
        settings: PerformanceConfig,
        strategies: Classes,
        excluded: Iterable[str] = (),
        *,
        by_trainer: bool = False,
    ) -> None:
        self.settings = settings
        self.named = {k: v for k, v in settings if v != "auto"} if by_trainer else named_by_user(settings)
        self.host: list[Any] = []
        self._fed: list[tuple[Any, Any, list[Any]]] = []  # with the lines, whose end takes their settings back
        self.checkpointing: str = _C.base.checkpointing_of(settings._native)  # asked for at each step
        self.saved_tensors: str = settings.saved_tensors
        self._by_trainer = by_trainer
        self.max_slowdown: float = settings.max_slowdown  # of "least", against a step as it is then
        offers = [offer(name, cls) for name, cls in strategies.items()]
        self.skipped, self.required, self.refused = _native.asked_of(
            settings._native, offers, list(excluded), by_trainer=by_trainer
        )

    # -- strategies without a trial ------------------------------------------------------------------------------

    def activate(self, run: Run) -> None:
        """Make active what is wanted and can be, for good and without a trial; its kind is not tried then."""
        run.asked = {**self.named, "retain_limit": self.retain_limit}
        self.skipped, self.refused = _native.activate(
            self.settings._native,
            [offer(name, cls) for name, cls in run.strategies.items()],
            self.skipped,
            self.required,
            self.refused,
            is_active=lambda name: name in run.active,
            put=lambda name: put(run, name, ask=True),
        )
        self.required = []
        run.required = run.active

    # -- the process ---------------------------------------------------------------------------------------------

    @property
    def retain_limit(self) -> int | None:
        """Bytes that the allocator may keep; None: its own choice."""
        limit = self.settings.allocator_retain_limit
        return None if limit == "auto" else parse_size(limit, system_info()["memory"]["limit"])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the settings of the process; they are taken back where the body throws."""
        try:
            if self.settings.memory_limit != "auto":
                self._add(set_limit(self.settings.memory_limit))
            if self.settings.deterministic:
                self._add(_C.trainer.use_deterministic_algorithms())
            if isinstance(threads := self.named.get("threads"), int):
                self._add(_C.trainer.size_threads(threads))
            if isinstance(threads := self.named.get("interop_threads"), int):
                self._add(_C.trainer.size_interop_threads(threads))
            if self.named.get("flush_denormals") == "on":
                self._add(_C.trainer.flush_denormals())
            if self.named.get("allocator") == "retain":
                self._add(_C.trainer.tune_allocator(self.retain_limit))
            yield
        except BaseException:
            self.revert()
            raise

    def feed(self, data: Any, device: torch.device | None = None) -> Any:
        """Return a loader of the same batches with what the settings name of one; the same each time.

        Where a device is given, an `oxytorch.data.Loader` that has none puts its batches there.
        """
        for given, made, _ in self._fed:
            if data is given or data is made:
                return made
        made, lines = with_settings(data, {key: getattr(self.settings, key) for key in LOADER_SETTINGS}, device)
        self.host = [one for one in self.host if one.name not in {line.name for line in lines}]
        for line in lines:
            self._add(line)
        if made is not data or lines:
            self._fed.append((data, made, lines))
        return made

    def given_of(self, data: Any) -> Any:
        """Return the loader that `feed` was given for one that it returned."""
        return next((given for given, made, _ in self._fed if data is made), data)

    def fit_memory(self, run: Run, why: str = "", *, tighter: bool = False) -> None:
        """Have blocks of the run's models recomputed as `gradient_checkpointing` says, for the step as it is now.

        Parameters
        ----------
        run : Run
        why : str
            What the setting's line begins with.
        tighter : bool
            To less than the plan before took, which was too much.

        Raises
        ------
        torch.OutOfMemoryError
            Where no choice of blocks is within the budget; nothing is run again then.
        """
        if self.checkpointing == "off":
            return
        most = None
        for setting in [one for one in self.host if isinstance(one, Checkpointing)]:
            if tighter and setting.plan is not None:
                most = _native.tighter_budget(setting.plan.measured_peak)
            setting.revert()
            self.host.remove(setting)
        fitted = Checkpointing.of(
            run,
            self.checkpointing,
            why,
            self.max_slowdown,
            saved_tensors=self.saved_tensors,
            can_repeat=self._by_trainer,
            most=most,
        )
        self._add(fitted)

    @property
    def fits_memory(self) -> bool:
        """Whether `gradient_checkpointing` is in effect."""
        return self.checkpointing != "off" and any(
            isinstance(one, Checkpointing) and one.is_in_effect for one in self.host
        )

    @property
    def fitted_peak(self) -> int | None:
        """Bytes that a step was measured to take where a plan has changed its blocks; else None."""
        plans = [one.plan for one in self.host if isinstance(one, Checkpointing) and one.plan is not None]
        return next((plan.measured_peak for plan in plans if plan.is_active), None)

    @property
    def has_budget(self) -> bool:
        """Whether steps are held to a budget, or to what was found for the goal memory, that a copy would exceed."""
        plans = [one.plan for one in self.host if isinstance(one, Checkpointing) and one.plan is not None]
        recomputes = any(plan.is_active for plan in plans) if plans else None
        return bool(_native.has_budget(self.settings._native, recomputes))

    def refuse_memory(self, reason: str) -> None:
        """Say why `gradient_checkpointing` has no effect, where it was asked for."""
        if self.checkpointing != "off":
            self._add(Checkpointing(None, reason))

    def _add(self, setting: Any) -> None:
        self.host.append(setting)
        if not setting.is_in_effect:
            log("warn", f"accelerate: {setting.name} was asked for and is left out: {setting.reason}", "tune")

    def lines(self) -> list[SettingLine]:
        """Return a line for a report of each setting of the process that was asked for."""
        return [SettingLine(s.name, "on" if s.is_in_effect else "refused", s.reason, s.cost) for s in self.host]

    def pages(self) -> list[Callable[[], Report]]:
        """Return functions that make what stands below those lines in a page: what `gradient_checkpointing` found."""
        return [s.plan.report for s in self.host if isinstance(s, Checkpointing) and s.plan is not None]

    def revert(self) -> None:
        """Take the settings of the process back."""
        while self.host:
            self.host.pop().revert()
        self._fed.clear()


def put(run: Run, name: str, *, ask: bool = False) -> str:
    """Make one more strategy active, where `ask` only if it says that it applies; why it is not, empty where it is."""
    if name not in run.strategies:
        return f"there is no strategy {name}"
    try:
        applies = run.strategy(name).applies(run) if ask else True
        if applies is not True:
            return applies or f"{name} does not apply"
        run.set_active([*run.active, name])
    except Exception as error:  # whatever it throws, the run goes on without it
        return f"{name}: {type(error).__name__}: {error}"
    return ""
