"""Tables of a paper with our numbers as one page of HTML, for `fedkin reproduce --html`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from fedkin.papers.markdown import QUICK, evaluation, lines_of, number, ours_of, point_at, remarks, signed
from fedkin.papers.table_records import Record
from fedkin.papers.verdicts import close, difference

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#1c2733;background:#fff}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem}p,li{max-width:60rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
th,td{padding:.3rem .7rem;text-align:right;border-bottom:1px solid #d9e0e7;white-space:nowrap}
th{white-space:normal}th:first-child{text-align:left}small{display:block;color:#5b6b7b}
.close{background:#e4f4e8}.far{background:#fbe6e3}.none{color:#8a97a5}
.quick{background:#fff3cd;padding:.5rem 1rem;border-left:4px solid #e0a800}
@media (prefers-color-scheme:dark){body{color:#dbe3ea;background:#12181f}th,td{border-color:#2c3742}
.close{background:#163a22}.far{background:#45201b}small,.none{color:#8fa0b0}.quick{background:#3b3212}}
"""
HOW = (
    "Each cell shows our number (± standard deviation over seeds) and below it the paper's number and the difference. "
    "Green means that ours is within two points, or within a fifth where the number is not a percentage."
)


def html_page(records: Sequence[Record], title: str = "The papers' numbers and ours") -> str:
    """A page that needs nothing else: no script, no font, no picture."""
    body = "".join(part for record in records for part in _section(record))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_safe(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{_safe(title)}</h1><p>{HOW}</p>{body}</body></html>\n"
    )


def _section(record: Record) -> Iterable[str]:
    yield f"<h2>{_safe(record['title'])}</h2><p>{_safe(record['paper_title'])} ({_safe(record['cite'])})</p>"
    if record["quick"]:
        yield f'<p class="quick">{_safe(QUICK)}</p>'
    for text in filter(None, (evaluation(record), record["about"])):
        yield f"<p>{_safe(text)}</p>"
    cells = {(c["row"], c["column"]): c for c in record["cells"]}
    rows, columns = lines_of(record, cells)
    yield "<table><tr><th></th>" + "".join(_title(record, "column", c) for c in columns) + "</tr>"
    for row in rows:
        yield f"<tr>{_title(record, 'row', row)}{''.join(_cell(cells.get((row, c))) for c in columns)}</tr>"
    yield "</table><ul>"
    for text in remarks(record):
        yield f"<li>{_safe(text.replace('**', '').replace('`', ''))}</li>"
    yield "</ul>"


def _title(record: Record, axis: str, title: str) -> str:
    point = point_at(record, axis, title)
    return f"<th>{_safe(title)}{f'<small>{_safe(point)}</small>' if point else ''}</th>"


def _cell(cell: Record | None) -> str:
    if cell is None:
        return "<td></td>"
    paper = number(cell["paper"], cell["unit"])
    if cell["ours"] is None:
        return f'<td class="none" title="{_safe(cell["note"])}">–<small>{paper}</small></td>'
    kind = {True: ' class="close"', False: ' class="far"', None: ""}[close(cell)]
    below = f"{paper} &nbsp;{signed(difference(cell), cell['unit'])}" if cell["paper"] is not None else "no number"
    return f'<td{kind} title="{_safe(cell["note"])}">{ours_of(cell)}<small>{below}</small></td>'


def _safe(text: Any) -> str:
    return html.escape(str(text), quote=True)
