"""How results look from Python: in a notebook, as a drawing, as a data frame. The figures are those of the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from fedkin.errors import UsageError, unknown
from fedkin.rounds import shown, words

if TYPE_CHECKING:
    from fedkin.report.figures import Figure, LeftOut
    from fedkin.report.tables import Sheet
    from fedkin.rounds import Result

NAME = "fedkin-shown"
NIGHT = ('body[data-jp-theme-light="false"]', 'html[theme="dark"]', "body.vscode-dark")  # JupyterLab, Colab, VS Code
STYLE = f"""
.{NAME} {{ background: var(--paper); color: var(--ink); padding: .6rem .8rem; max-width: 76rem; line-height: 1.4;
  overflow-x: auto; }}
.{NAME} table {{ border-collapse: collapse; font-size: .9em; font-variant-numeric: tabular-nums; margin: .3rem 0; }}
.{NAME} :is(th, td) {{ background: none; color: var(--ink); padding: .2rem 1.2rem .2rem 0;
  border: 0 solid var(--grid); border-bottom-width: 1px; }}
.{NAME} tr:nth-child(n) {{ background: none; }}
.{NAME} .w {{ text-align: left; }}
.{NAME} .n {{ text-align: right; }}
.{NAME} p {{ color: var(--muted); font-size: .85em; margin: .15rem 0; max-width: 60rem; }}
.{NAME} p.title {{ color: var(--ink); font-size: .95em; font-weight: 600; margin-top: .5rem; }}
.{NAME} p.bad {{ color: var(--bad); }}
.{NAME} .figures {{ display: flex; flex-wrap: wrap; gap: .4rem 1.5rem; }}
.{NAME} figure {{ flex: 1 1 22rem; min-width: 0; margin: .5rem 0 0; }}
.{NAME} figcaption {{ font-size: .9em; font-weight: 600; }}
.{NAME} svg {{ width: 100%; height: auto; display: block; }}
"""
BESIDE = (5.6, 3.0)  # inches
TABLES = ("rounds", "clients", "exchanges", "events", "notes")
NUMBERS = ("macro", "micro", "worst_decile", "std")


def box(tables: Sequence[Sheet], figures: Sequence[Figure | LeftOut], warnings: Sequence[str] = ()) -> str:
    """Tables and drawings as a part of a page that may be somebody else's."""
    from fedkin.report import palette, svg
    from fedkin.report.figures import Figure
    from fedkin.report.written import html

    shown = [f for f in figures if isinstance(f, Figure)]
    drawn = ""
    for figure in shown:
        made = svg.draw(figure)
        if len(shown) > 1:  # they stand beside each other, and words keep their size
            made.set_size_inches(BESIDE)
        picture = svg.inline_svg(made, figure.alt, token_hex(4))
        drawn += f"<figure><figcaption>{escape(figure.title)}</figcaption>{picture}</figure>"
    said = "".join(f"<p class=bad>{escape(warning)}</p>" for warning in warnings)
    style = f"<style>{palette.within(NAME, NIGHT)}{STYLE}</style>"
    body = f"{''.join(map(html, tables))}{said}<div class=figures>{drawn}</div>"
    return f"<div class={NAME}>{style}{body}</div>"


def drawing(made: Figure | LeftOut) -> Any:
    """A figure as matplotlib has it, or the reason why there is none."""
    from fedkin.report import svg
    from fedkin.report.figures import Figure

    if not isinstance(made, Figure):
        raise UsageError(f"there is no figure {made.title!r}: {made.why}")
    return svg.draw(made)


def data_frame(rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> Any:
    """Rows as pandas has them."""
    try:
        from pandas import DataFrame
    except ImportError:
        raise UsageError("a data frame needs pandas: pip install 'fedkin[pandas]'") from None
    return DataFrame(rows, columns=columns)


class OfResults:
    """`rounds.shown.Looks` by the report's figures."""

    def html(self, result: Result) -> str:
        from fedkin.report.of_result import ResultData
        from fedkin.report.one_run import figure
        from fedkin.report.tables import Entry, Sheet

        run, unit = ResultData(result), result.accuracy.unit and ", percent"
        head = [f"{words.whose(result)}{unit}", "macro", "micro", "worst decile", "std over clients"]
        lines = [
            [Entry(name), *(Entry(a.said(getattr(a, n)), number=True) for n in NUMBERS)]
            for name, a in words.reached(result)
        ]
        sent, method = result.bytes, words.method_of(result)
        notes = [
            f"{method}; {words.size(sent['down'])} down, {words.size(sent['up'])} up; {words.seconds(result.wall)} on "
            f"{result.prepared.device}{f'; folder {result.run}' if result.run else ''}"
        ]
        figures = [figure(name, run) for name in ("accuracy-per-round", "loss-per-round")]
        return box([Sheet(words.title(result), head, lines, notes)], figures, result.remarks)

    def plot(self, result: Result, figure: str) -> Any:
        from fedkin.report import one_run
        from fedkin.report.of_result import ResultData

        if figure not in one_run.FIGURES:
            raise unknown("figure", figure, one_run.FIGURES)
        return drawing(one_run.figure(figure, ResultData(result)))

    def frame(self, result: Result, table: str) -> Any:
        from fedkin.runs.database import TABLES as COLUMNS
        from fedkin.runs.entries import Told

        if table not in TABLES:
            raise unknown("table", table, TABLES)
        columns = list(COLUMNS[table])
        rows = [dict(zip(columns, row, strict=True)) for row in Told.by(result).rows(table)]
        for name in (name for name in ("metrics", "validation_metrics") if name in columns):
            front = name.removesuffix("metrics")
            found = [json.loads(row.pop(name) or "{}") for row in rows]
            for row, more in zip(rows, found, strict=True):
                row.update({f"{front}{metric}": value for metric, value in more.items()})
            more_columns = dict.fromkeys(f"{front}{metric}" for more in found for metric in more)
            columns = [*(c for c in columns if c != name), *more_columns]
        return data_frame(rows, columns)


shown.looks = OfResults()
