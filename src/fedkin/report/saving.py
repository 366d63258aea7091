"""A figure as a file to keep: the drawing that the report has, or its numbers as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from fedkin.report.figures import Bars, Columns, Figure, Heat, Lines, Panel, Strips, Timeline
from fedkin.runs.spreadsheet import inert

Kind = Literal["svg", "csv"]
KINDS: dict[Kind, str] = {"svg": "image/svg+xml", "csv": "text/csv; charset=utf-8"}
"""What a figure can be saved as, and the type of that."""


def saved(figure: Figure, kind: Kind) -> bytes:
    """The bytes of such a file."""
    if kind == "csv":
        return as_csv(figure).encode("utf-8", "replace")
    from fedkin.report import svg  # matplotlib: half a second that a table does not need

    return svg.save(svg.draw(figure), kind)


def as_csv(figure: Figure) -> str:
    """The numbers of a figure: a table for each of its panels, with an empty line between two."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for place, panel in enumerate(figure.panels):
        if place:
            writer.writerow([])
        writer.writerows([_cell(value) for value in row] for row in _table(panel))
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Numbers as they are, nothing where there is none; text that no spreadsheet takes for a formula."""
    if isinstance(value, str):
        return inert(value)
    number = float(value)
    return "" if not np.isfinite(number) else int(number) if number.is_integer() and abs(number) < 1e15 else number


def _table(panel: Panel) -> Iterator[Sequence[Any]]:
    match panel:
        case Lines():
            yield from _lines(panel)
        case Heat():
            yield [f"{panel.y} / {panel.x}", *panel.columns]
            for name, row in zip(panel.rows, panel.values, strict=True):
                yield [name, *row]
        case Bars():
            yield [panel.x, *(part.label for part in panel.parts)]
            for i, name in enumerate(panel.rows):
                yield [name, *(part.values[i] for part in panel.parts)]
        case Columns():
            yield [panel.x, panel.y, "group"]
            for name, value, group in zip(panel.names, panel.values, panel.of, strict=True):
                yield [name, value, panel.groups[group][0]]
            for line in panel.lines:
                yield [line.label, line.value, "line"]
        case Strips():
            yield ["", panel.x]
            for name, values in panel.rows.items():
                for value in values:
                    yield [name, value]
        case Timeline():
            yield [panel.y, panel.x, "what", "reason", panel.truth]
            for event in panel.events:
                marked = "yes" if event.row in panel.marked else "no"
                yield [panel.rows[event.row], event.round, panel.kinds[event.kind].words, event.reason, marked]


def _lines(panel: Lines) -> Iterator[Sequence[Any]]:
    """A row for each point, so that lines with points of their own fit into one table."""
    apart = any(s.panel for s in panel.series)
    banded = any(s.low is not None for s in panel.series)
    yield [*(["chart"] if apart else []), "line", panel.x, panel.y, *(["low", "high"] if banded else [])]
    for s in panel.series:
        name = [*([s.panel] if apart else []), s.label]
        for i, x in enumerate(s.x):
            band = [bound[i] if bound is not None else "" for bound in (s.low, s.high)] if banded else []
            yield [*name, x, s.y[i], *band]
        if s.last is not None and len(s.x):
            yield [*name[:-1], f"{s.label}, after the last fine-tuning", s.x[-1], s.last, *([""] * 2 * banded)]
