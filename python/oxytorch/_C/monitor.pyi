"""
Step and phase times, reports.
"""

from __future__ import annotations
import collections.abc
import os
import typing

__all__: list[str] = [
    "Bar",
    "Callback",
    "Cell",
    "Column",
    "Console",
    "Distribution",
    "Jsonl",
    "PerformanceMonitor",
    "Phase",
    "PhaseSummary",
    "Report",
    "Scalar",
    "ScalarSummary",
    "Series",
    "Sink",
    "Step",
    "Summary",
]

class Sink:
    """
    Where finished steps go.
    """

class Jsonl(Sink):
    """
    Appends one JSON object per step to a file: step, time, duration, gap, samples, phases, scalars; seconds. Raises OSError, which names the path, if it cannot be written.
    """
    def __init__(self, path: str | os.PathLike[str]) -> None: ...

class Callback(Sink):
    """
    Calls a function with each batch of steps, a list of dicts, on the thread that drains.
    """
    def __init__(self, function: collections.abc.Callable[[list[dict[str, typing.Any]]], typing.Any]) -> None: ...

class Column:
    """
    A table's column. `align` is 'left', 'right' or 'center'; `unit` stands beside the title.
    """
    def __init__(self, title: str, align: str = "left", unit: str = "") -> None: ...

class Cell:
    """
    A table's cell: a text, the number behind it if there is one, and whether it stands out.
    """
    def __init__(
        self, text: str, value: typing.SupportsFloat | typing.SupportsIndex | None = None, strong: bool = False
    ) -> None: ...

class Series:
    """
    A curve: y over x, with a band from `low` to `high` if both are given. Points that are not finite break the line.
    """
    def __init__(
        self,
        name: str,
        x: collections.abc.Iterable[float],
        y: collections.abc.Iterable[float],
        low: collections.abc.Iterable[float] | None = None,
        high: collections.abc.Iterable[float] | None = None,
        dashed: bool = False,
    ) -> None: ...

class Bar:
    """
    A bar, with an interval if `low` and `high` are given. Bars of one `group` stand together; equal labels share a colour.
    """
    def __init__(
        self,
        label: str,
        value: typing.SupportsFloat | typing.SupportsIndex,
        low: typing.SupportsFloat | typing.SupportsIndex | None = None,
        high: typing.SupportsFloat | typing.SupportsIndex | None = None,
        group: str = "",
    ) -> None: ...

class Report:
    """
    A document of headings, paragraphs, tables and charts.

    Every method that adds something returns the report. Texts are data and are escaped. The HTML is one file with
    inline style and SVG, light and dark, that needs nothing else.
    """
    @staticmethod
    def of_training(
        level: str,
        settings: collections.abc.Sequence[
            tuple[str, str, str, str, typing.SupportsFloat | typing.SupportsIndex | None]
        ],
        timings: collections.abc.Sequence[tuple[str, typing.SupportsFloat | typing.SupportsIndex]],
        counters: collections.abc.Sequence[tuple[str, typing.SupportsFloat | typing.SupportsIndex]],
        verdict: str,
    ) -> Report:
        """
        A trainer's report. `settings` are lists of name, state, reason, cost and gain, or None for the last; `timings` seconds of a step by phase.
        """
    def __init__(self, title: str = "Report") -> None: ...
    def append(self, other: Report) -> Report:
        """
        The blocks of another report under a heading with its title.
        """
    def bar_chart(
        self,
        bars: collections.abc.Sequence[Bar],
        title: str = "",
        axis_label: str = "",
        unit: str = "",
        reference: typing.SupportsFloat | typing.SupportsIndex | None = None,
        reference_label: str = "",
        notes: collections.abc.Sequence[str] = [],
    ) -> Report:
        """
        Horizontal bars with intervals.

        Parameters
        ----------
        bars
            In order from the top. Each bar is drawn with its value.
        axis_label, unit
            What the axis shows, and the unit written after each value ("ms", "%", "x").
        reference, reference_label
            A line across all bars, for example at 1.0.

        Raises
        ------
        ValueError
            If a bar has one end of an interval.
        """
    def heading(self, text: str, level: typing.SupportsInt | typing.SupportsIndex = 2) -> Report:
        """
        A heading of level 2 or 3.
        """
    def line_chart(
        self,
        series: collections.abc.Sequence[Series],
        title: str = "",
        x_label: str = "",
        y_label: str = "",
        log_x: bool = False,
        log_y: bool = False,
        zero_based: bool = False,
        notes: collections.abc.Sequence[str] = [],
    ) -> Report:
        """
        Curves over a common x axis.

        Parameters
        ----------
        series
            The curves. More than one get a legend.
        x_label, y_label
            What the axes show, with the unit.
        log_x, log_y
            Logarithmic axes; points that are not positive are left out.
        zero_based
            The y axis includes 0.

        Raises
        ------
        ValueError
            If the lengths of a series' parts differ.
        """
    def metadata(self, name: str, value: str) -> Report:
        """
        A name and a value shown at the top.
        """
    def paragraph(self, text: str) -> Report:
        """
        A paragraph of text.
        """
    def preformatted(self, text: str) -> Report:
        """
        Fixed-width text kept as it is.
        """
    def subtitle(self, text: str) -> Report:
        """
        A line under the title.
        """
    def table(
        self,
        columns: collections.abc.Sequence[Column | str],
        rows: collections.abc.Iterable[collections.abc.Iterable[typing.Any]],
        title: str = "",
        notes: collections.abc.Sequence[str] = [],
    ) -> Report:
        """
        A table.

        Parameters
        ----------
        columns
            Titles, or `Column`s for those with an alignment or a unit.
        rows
            Each with as many cells as columns: texts, numbers (shown with four significant digits; integers whole), None for
            an empty cell, or `Cell`s.
        title, notes
            A line above, and lines below.

        Raises
        ------
        ValueError
            If a row has the wrong number of cells.
        """
    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """
        The report as one HTML file; written to `path` if given, whole or not at all. Raises OSError, which names the path.
        """
    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """
        The report as JSON with "schema": "oxytorch-report/1"; written to `path` if given. Numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity".
        """
    def to_text(
        self,
        path: str | os.PathLike[str] | None = None,
        unicode: bool | None = None,
        width: typing.SupportsInt | typing.SupportsIndex = 100,
    ) -> str:
        """
        The report as plain text; box-drawing characters if `unicode`, by default on a UTF-8 terminal only.
        """
    @property
    def title(self) -> str: ...

class Distribution:
    """
    A distribution of seconds; quantiles are within 1.6 % of the value.
    """
    @property
    def count(self) -> int: ...
    @property
    def max(self) -> float: ...
    @property
    def mean(self) -> float: ...
    @property
    def median(self) -> float: ...
    @property
    def min(self) -> float: ...
    @property
    def p10(self) -> float: ...
    @property
    def p90(self) -> float: ...
    @property
    def sum(self) -> float: ...

class PhaseSummary:
    """
    What is known of a phase; shares are of all step time, 0 to 1.
    """
    @property
    def depth(self) -> int:
        """
        0 directly under the step.
        """
    @property
    def entries(self) -> int:
        """
        Entries over all steps.
        """
    @property
    def name(self) -> str: ...
    @property
    def self_share(self) -> float:
        """
        Without nested phases.
        """
    @property
    def share(self) -> float:
        """
        With nested phases.
        """
    @property
    def time(self) -> Distribution:
        """
        Seconds per step that entered it, with nested phases.
        """

class ScalarSummary:
    """
    What is known of a scalar; min, max and mean are of its finite values.
    """
    @property
    def count(self) -> int: ...
    @property
    def last(self) -> float: ...
    @property
    def max(self) -> float: ...
    @property
    def mean(self) -> float: ...
    @property
    def min(self) -> float: ...
    @property
    def name(self) -> str: ...
    @property
    def non_finite(self) -> int: ...

class Summary:
    """
    Statistics of all finished steps.
    """
    @property
    def between_seconds(self) -> float:
        """
        Time between steps.
        """
    @property
    def cancelled(self) -> int:
        """
        Steps left by an exception: not timed.
        """
    @property
    def dropped(self) -> int:
        """
        Records that no sink received because the ring was full.
        """
    @property
    def failed_sinks(self) -> list[str]:
        """
        "name: why" of sinks that failed.
        """
    @property
    def other_share(self) -> float:
        """
        Share of step time in no phase.
        """
    @property
    def phases(self) -> list[PhaseSummary]:
        """
        In order of first entry, children after their parents.
        """
    @property
    def phases_outside(self) -> int:
        """
        Phases entered outside any step: not timed.
        """
    @property
    def samples(self) -> int: ...
    @property
    def samples_per_second(self) -> float:
        """
        Samples over the time inside steps.
        """
    @property
    def scalars(self) -> list[ScalarSummary]: ...
    @property
    def step(self) -> Distribution:
        """
        Step durations, seconds.
        """
    @property
    def steps(self) -> int: ...

class Step:
    """
    A context manager: one training step.
    """
    def __enter__(self) -> None:
        """
        Begin the step.
        """
    def __exit__(self, *exception: typing.Any) -> None:
        """
        End the step.
        """
    def prepare(self, samples: int) -> Step:
        """
        Set the samples of the next step; returns self.
        """

class Phase:
    """
    A context manager: one phase of a step.
    """
    def __enter__(self) -> None:
        """
        Begin the phase.
        """
    def __exit__(self, *exception: typing.Any) -> None:
        """
        End the phase.
        """

class Scalar:
    """
    A named value of each step.
    """
    def record(self, value: typing.Any) -> None:
        """
        Record a number or a tensor of one element.
        """

class PerformanceMonitor:
    """
    The native side of oxytorch.PerformanceMonitor.
    """
    def __init__(
        self,
        *,
        sinks: collections.abc.Sequence[Sink],
        ring_records: typing.SupportsInt | typing.SupportsIndex,
        max_phases: typing.SupportsInt | typing.SupportsIndex,
        max_scalars: typing.SupportsInt | typing.SupportsIndex,
        curve_points: typing.SupportsInt | typing.SupportsIndex,
        drain_seconds: typing.SupportsFloat | typing.SupportsIndex,
    ) -> None: ...
    def add_sink(self, sink: Sink) -> None: ...
    def close(self) -> None: ...
    def flush(self) -> None: ...
    def phase(self, name: str) -> typing.Any: ...
    def report(self, title: str) -> Report: ...
    def scalar(self, name: str) -> typing.Any: ...
    def set_next_step(self, step: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def set_samples(self, samples: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def step(self) -> typing.Any: ...
    def summary(self) -> Summary: ...
    def table(self, unicode: bool | None) -> str: ...
    @property
    def current_step(self) -> int: ...
    @property
    def lost_tensors(self) -> int: ...

def Console(every: typing.SupportsFloat | typing.SupportsIndex = 5.0) -> Sink:
    """
    A sink that prints a line at most every so many seconds of training; 0: at each flush.
    """
