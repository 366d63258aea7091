"""What a figure is: its words, its numbers and how they are to be shown. `svg` draws it for the report, the scripts of
the web page draw it in the browser: titles, labels, units, colours and order are said here. Nothing here draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from fedkin.core.notes import Event
from fedkin.errors import DataError
from fedkin.report.palette import DASHES, SERIES
from fedkin.runs.metric import ShownMetric

Floats = np.ndarray[Any, np.dtype[Any]]
Unit = Literal["%", "B", "s", ""]
Mark = Literal["", "dot", "ring", "cross", "triangle", "square"]


ACCURACY = "test accuracy"
LOSSES = ShownMetric("loss", "", higher=False)


class Missing(DataError):
    """There is nothing to draw; the text says why."""


@dataclass(frozen=True, eq=False)
class Series:
    """A line, or a cloud of points where it has a `mark`. `low` and `high` bound its band; `last` is a point that
    stands apart from it, above the last x."""

    label: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    last: float | None = None
    panel: str = ""  # the condition: lines of different ones may stand in charts of their own
    colour: int = 0  # a place in palette.SERIES
    dash: int = 0
    mark: Mark = ""
    step: bool = False
    column: str = ""  # of the table of rounds, and the column with its spread: as a run goes on, so does the line
    spread: str = ""

    def at(self, place: int) -> Series:
        """In the colour and with the dashes of the line at this place."""
        return replace(self, colour=place % len(SERIES), dash=place // len(SERIES) % len(DASHES))


@dataclass(frozen=True, eq=False)
class Lines:
    x: str
    y: str
    unit: Unit
    series: Sequence[Series]
    title: str = ""
    same_scale: bool = True  # else values that lie `far` apart get a logarithmic scale, and others each chart its own
    far: float = 50  # the largest by the smallest
    marks: bool = False  # few points, each of which counts
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, eq=False)
class Heat:
    """A map [rows, columns], NaN where there is nothing."""

    x: str
    y: str
    what: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Floats
    most: float  # where the scale ends
    title: str = ""
    order: Sequence[int] = ()  # of rows and columns alike: similar ones stand together
    marked: Sequence[int] = ()  # rows of malicious clients
    written: bool = False  # its numbers are few and whole
    colour: int | None = None  # of all that is there, where nothing is more than other things


@dataclass(frozen=True, eq=False)
class Part:
    label: str
    colour: int
    values: Floats


@dataclass(frozen=True, eq=False)
class Bars:
    """One bar a row, its parts side by side."""

    x: str
    unit: Unit
    rows: Sequence[str]
    parts: Sequence[Part]


@dataclass(frozen=True)
class Across:
    """A line across the first `until` columns."""

    label: str
    value: float
    until: int


@dataclass(frozen=True, eq=False)
class Columns:
    """Many thin columns in order; each belongs to one of the `groups`, (label, colour)."""

    x: str
    y: str
    unit: Unit
    names: Sequence[str]
    values: Floats
    groups: Sequence[tuple[str, int]]
    of: Sequence[int]
    lines: Sequence[Across]
    high: float | None = None  # where the scale ends, if not with the values


@dataclass(frozen=True, eq=False)
class Strips:
    """For each label one dot a client, and the median."""

    x: str
    rows: dict[str, Floats]


@dataclass(frozen=True)
class Happening:
    row: int
    round: int
    kind: str
    reason: str


@dataclass(frozen=True, eq=False)
class Timeline:
    """What happened to whom, and when; malicious clients, in truth, come first."""

    x: str
    y: str
    rows: Sequence[str]
    marked: Sequence[int]
    events: Sequence[Happening]
    kinds: dict[str, Event]  # of two in one round the later is the graver
    last: int
    truth: str  # what marked rows are

    def cells(self, most: int) -> tuple[list[int], list[list[str]]]:
        """At most so many columns, as the last round of each, and the gravest kind of every row in each."""
        ranks = list(self.kinds)
        wide = -(-self.last // most)  # rounds in a column
        table = np.full((len(self.rows), -(-self.last // wide)), -1)
        for event in self.events:
            at, rank = min(max(event.round - 1, 0), self.last - 1) // wide, ranks.index(event.kind)
            end = None if self.kinds[event.kind].lasting else at + 1
            table[event.row, at:end] = np.maximum(table[event.row, at:end], rank)
        columns = range(wide, table.shape[1] * wide + 1, wide)
        return list(columns), [["" if rank < 0 else ranks[rank] for rank in row] for row in table]


Panel = Lines | Heat | Bars | Columns | Strips | Timeline


@dataclass(frozen=True, eq=False)
class Figure:
    """`panels` stand below each other, bars beside each other."""

    caption: str
    alt: str  # for those who do not see it
    panels: Sequence[Panel]
    rounds: Sequence[int] = ()  # a heat map has one frame for each of these
    frames: Floats | None = field(default=None, repr=False)
    name: str = ""
    title: str = ""


@dataclass(frozen=True)
class LeftOut:
    """A figure that cannot be drawn, and why."""

    title: str
    why: str
    damaged: bool = False  # what the run holds for it cannot be read


def attempt(name: str, title: str, build: Callable[[], Figure]) -> Figure | LeftOut:
    try:
        made = build()
        return replace(made, name=name, title=title, alt=f"{title}. {made.alt}")
    except Missing as error:
        return LeftOut(title, str(error))
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, DataError) as error:
        return LeftOut(title, f"what the run holds for it cannot be read ({str(error)[:200]})", damaged=True)


def ends(series: Sequence[Series], unit: Unit = "%") -> str:
    """The text for those who cannot see the curves: where they end."""
    last = [
        f"{s.label}{f' ({s.panel})' if s.panel else ''} {said(float(s.y[-1] if s.last is None else s.last), unit)}"
        for s in series[:20]
        if len(s.y)
    ]
    return f"At the end: {'; '.join(last)}{'; ...' if len(series) > 20 else ''}."


def said(value: float, unit: Unit) -> str:
    """A number with its unit."""
    if unit == "%":
        return f"{value:.2f} %"
    if unit == "B":
        power = next((i for i in range(4) if abs(value) < 999.5 * 1000**i), 4)
        return f"{value / 1000**power:.{0 if power == 0 else 1}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
    if unit == "" and abs(value) >= 1e6:
        return f"{value:.4g}"
    return f"{f'{value:,.0f}' if abs(value) >= 100 else f'{value:.3g}'}{unit and ' s'}"


def axis(metric: ShownMetric) -> str:
    """What an axis with values of a metric is called."""
    return f"{metric.put(ACCURACY)}{', %' if metric.unit else ''}"


def unit_of(metric: ShownMetric) -> Unit:
    return "%" if metric.unit == "%" else ""


def of_scores(x: str, metric: ShownMetric, series: Sequence[Series], whole: bool = False, marks: bool = False) -> Lines:
    """A chart of values of a metric; with the `whole` scale where that has ends."""
    unit = unit_of(metric)
    low, high = (0.0, 100.0) if whole and unit == "%" else (None, None)
    return Lines(x, axis(metric), unit, series, same_scale=unit == "%", marks=marks, low=low, high=high)


def band(mean: Floats, spread: Floats, metric: ShownMetric) -> tuple[Floats, Floats]:
    """As far to either side, but not beyond the values that there can be: a share of all, an error above nothing."""
    low, high = mean - spread, mean + spread
    if metric.unit == "%":
        return np.clip(low, 0, 100), np.clip(high, 0, 100)
    least = np.where(mean > 0, mean / 100, -np.inf)
    return low if metric.higher else np.maximum(low, least), high


def cut(shown: int, all_: int, what: str = "clients") -> str:
    """A sentence for captions, where there is more than is shown."""
    return f" {shown} of {all_} {what} are shown." if shown < all_ else ""
