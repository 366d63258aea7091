"""Results on paper: Markdown, a page of HTML, the files in `results/`, and RESULTS.md made from them.

`python -m fedkin.papers.render results RESULTS.md` writes RESULTS.md anew."""

from __future__ import annotations

import html as markup
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fedkin.errors import DataError, UsageError
from fedkin.papers import natural
from fedkin.papers.measures import metric_of
from fedkin.papers.published import NAMES, NO_DATA, Paper, Table, load_paper, table_names
from fedkin.papers.verdicts import (
    CHOICE,
    FAILED,
    NOT_RUN,
    Record,
    changed_since,
    close,
    comparable,
    count,
    difference,
    distinct,
    empty,
    former_settings,
    joined,
    measured,
    outline,
    rankings,
    seeds_text,
    sound,
    summary,
    united,
    verdicts,
)

PROVENANCE = ("seeds", "command", "commit", "device")
CELL_KEYS = (
    "row",
    "column",
    "metric",
    "unit",
    "lower",
    "paper",
    "ours",
    "std",
    "seeds",
    "values",
    "rounds",
    "command",
    "commit",
    "device",
    "settings",
    "note",
)
DEFINED = ("judged", "reading")  # of a cell: what its definition says of it; files from before have no such words
LACKING = (NO_DATA, *(f"{what} not there yet" for what in ("method", "model", "attack", "rule")))
DAGGER = "†"
DIRTY = "a tree with changes that are in no commit"
QUICK = "quick: far fewer rounds and samples; no number here means anything"


# ------------------------------------------------------------ numbers as text


def number(value: float | None, unit: str = "%") -> str:
    if value is None:
        return "–"
    if unit in ("%", "times", "MiB"):
        return f"{value:.2f}".replace("-", "−")
    return f"{value:.0f}" if unit == "rounds" else f"{value:.4g}"


def ours_of(cell: Record) -> str:
    """Our number, ± its deviation; with a star if it is from a quick run, a dagger if it was made before a change."""
    spread = f" ±{cell['std']:.2f}" if cell["std"] is not None else ""
    star = "*" * bool(cell.get("quick")) + DAGGER * bool(cell.get("since"))
    return number(cell["ours"], cell["unit"]) + (spread + star if cell["ours"] is not None else "")


def signed(gap: float | None, unit: str = "%") -> str:
    if gap is None:
        return ""
    text = f"{gap:+.0f}" if unit == "rounds" else f"{gap:+.2f}"
    return text.replace("-", "−")


def mark(cell: Record) -> str:
    """✓: close to the paper; ✗: not; nothing where there is no number to compare with."""
    found = close(cell)
    return "" if found is None else "✓ " if found else "✗ "


def tau_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}".replace("-", "−")


# ------------------------------------------------------------ Markdown


def markdown(record: Record, level: int = 2, everything: bool = True) -> str:
    """One table; `everything`: also rows and columns in which nothing was measured."""
    lines = [f"{'#' * level} {record['title']}", ""]
    if evaluation(record):
        lines += [wrapped(evaluation(record)), ""]
    if record["about"]:
        lines += [wrapped(record["about"]), ""]
    if record.get("common"):
        lines += [wrapped(record["common"]), ""]
    lines += [*_grid(record, everything), "", *(wrapped(text, "- ") for text in remarks(record))]
    return "\n".join(lines).rstrip() + "\n"


def wrapped(text: str, bullet: str = "") -> str:
    return textwrap.fill(
        text,
        119,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_on_hyphens=False,
        break_long_words=False,
    )


def evaluation(record: Record) -> str:
    """A table's measure and its point of evaluation, in a sentence; where they differ, of which rows or columns."""
    cells = [c for c in measured(record) or record["cells"] if c["judged"]]
    if not cells:
        return ""
    what = list(dict.fromkeys(metric_of(c["metric"]).about for c in cells))
    words = list(dict.fromkeys(c["judged"] for c in cells))
    if len(words) == 1:
        return f"Judged: {'; '.join(what)}. Evaluation point: {words[0]}."
    said, left = {}, list(cells)
    for word in sorted(words, key=lambda w: sum(c["judged"] == w for c in cells)):  # exceptions first
        places = _lines(cells, "judged", word) or _lines(left, "judged", word) or _cells(cells, "judged", word)
        said[word] = f"{word} ({', '.join(places)})"
        left = [c for c in left if c["judged"] != word]
    return f"Judged: {'; '.join(what)}. Evaluation points differ: {'; '.join(said[word] for word in words)}."


def _lines(cells: Sequence[Record], key: str, word: str) -> list[str]:
    """The rows of these cells that all say this under a key, else the columns; none if it is said here and there."""
    mine = [c for c in cells if c[key] == word]
    for axis in ("row", "column"):
        names = dict.fromkeys(c[axis] for c in mine)
        if all(c[key] == word for c in cells if c[axis] in names):
            return list(names)
    return []


def _cells(cells: Sequence[Record], key: str, word: str) -> list[str]:
    return [f"{c['row']}: {c['column']}" for c in cells if c[key] == word]


def point_at(record: Record, axis: str, title: str) -> str:
    """When the models of a row or a column are judged, where that is not the same in the whole table."""
    cells = [c for c in measured(record) or record["cells"] if c["judged"]]
    mine = {c["judged"] for c in cells if c[axis] == title}
    other = "column" if axis == "row" else "row"
    split = any(len({c["judged"] for c in cells if c[other] == name}) > 1 for name in {c[other] for c in cells})
    point = next(iter(mine)) if len(mine) == 1 and split else ""
    return "" if point in title else point


def remarks(record: Record) -> list[str]:
    """What there is to say below a table: claims, rankings, notes, what is missing, where the numbers come from."""
    ranks, checks = ([], []) if record["quick"] else (rankings(record), verdicts(record))
    told_ = [natural.said(record)] if record["kind"] == "comparison" and not record["quick"] else []
    return [
        *([f"*: {QUICK}."] if record["quick"] else []),
        *told_,
        *map(_verdict_text, checks),
        *([_ranking_text(ranks)] if ranks else []),
        *_readings(record),
        *_notes(record),
        *_older(record),
        *(f"Not measured: {text}" for text in _unmeasured(record)),
        *_origins(record),
    ]


def _grid(record: Record, everything: bool) -> list[str]:
    cells = {(c["row"], c["column"]): c for c in record["cells"]}
    done = {k for k, c in cells.items() if c["ours"] is not None}
    kept = set(cells) if everything else done
    rows = [r["title"] for r in record["rows"] if any(k[0] == r["title"] for k in kept)]
    columns = [c["title"] for c in record["columns"] if any(k[1] == c["title"] for k in kept)]
    titles = [_titled(record, "column", column) for column in columns]
    lines = ["| | " + " | ".join(titles) + " |", "| --- |" + " ---: |" * len(columns)]
    for row in rows:
        shown = [_shown(cells[row, column]) if (row, column) in cells else "" for column in columns]
        lines.append(f"| {_titled(record, 'row', row)} | " + " | ".join(shown) + " |")
    return lines


def _titled(record: Record, axis: str, title: str) -> str:
    point = point_at(record, axis, title)
    return _cell_text(title) + (f" *({_cell_text(point)})*" if point else "")


def _shown(cell: Record) -> str:
    """Ours, the paper's, the difference."""
    if cell["ours"] is None:
        return f"– · {number(cell['paper'], cell['unit'])}" if cell["paper"] is not None else "–"
    if cell["paper"] is None:
        return ours_of(cell)
    gap = signed(difference(cell), cell["unit"])
    return f"{mark(cell)}{ours_of(cell)} · {number(cell['paper'], cell['unit'])} · {gap}"


def _cell_text(text: str) -> str:
    return text.replace("|", "\\|")


def _verdict_text(verdict: dict[str, Any]) -> str:
    if verdict["holds"] is None:
        return f"Claim: {verdict['says']}: not tested yet."
    if verdict["holds"]:
        limits = "".join(f", {text}" for text in _limits(verdict))
        return f"Claim: {verdict['says']}: **holds** ({verdict['held']} of {verdict['of']} comparisons{limits})."
    where = "; ".join(verdict["broken"][:6]) + (" ..." if len(verdict["broken"]) > 6 else "")
    found = f" {verdict['found']}." if verdict["found"] else ""
    tested = f"{len(verdict['broken'])} of {verdict['of']}" + _by_a_point(verdict["level"], len(verdict["broken"]))
    limits = f" Of the comparisons {', '.join(_limits(verdict))}." if _limits(verdict) else ""
    return f"Claim: {verdict['says']}: **does not hold** in {tested} ({where}).{found}{limits}"


def _limits(verdict: dict[str, Any]) -> list[str]:
    """What takes away from a verdict."""
    said = (
        (verdict["single"], "at one seed"),
        (verdict["mixed"], "between different evaluation points"),
        (verdict["chosen"], "under a reading chosen after measuring"),
        (verdict["older"], f"of numbers made before a change that can move them ({DAGGER})"),
        (verdict["unknown"], "not measured"),
    )
    return [f"{number_} {text}" for number_, text in said if number_]


def _by_a_point(level: int, among: int) -> str:
    return f", {'each' if level == among else f'{level} of them'} by a point or less" if level else ""


def _ranking_text(ranks: Sequence[dict[str, Any]]) -> str:
    agree, level = sum(r["agrees"] for r in ranks), sum(r["level"] for r in ranks)
    near = f", within a point of the best in {level} more" if level else ""
    mixed = sum(r["mixed"] for r in ranks)
    points = f"; methods are judged at different points in {mixed} of them" if mixed else ""
    taus = [r["tau"] for r in ranks if r["tau"] is not None]
    mean = f"; Kendall's tau {tau_text(sum(taus) / len(taus))} on average" if taus else ""
    other = [f"{r['line']}: {r['ours']} instead of {r['paper']}" for r in ranks if not r["agrees"]]
    tail = f" ({'; '.join(other[:6])}{' ...' if len(other) > 6 else ''})" if other else ""
    return f"Best of those measured is the paper's best in {agree} of {len(ranks)} lines{near}{tail}{mean}{points}."


def _notes(record: Record) -> list[str]:
    """What is worth saying about measured cells, each note once."""
    found: dict[str, list[str]] = {}
    for cell in measured(record):
        if cell["note"]:
            found.setdefault(cell["note"], []).append(f"{cell['row']}, {cell['column']}")
    return [f"{'; '.join(places[:4])}{' ...' if len(places) > 4 else ''}: {note}" for note, places in found.items()]


def _older(record: Record) -> list[str]:
    """What has changed since numbers were made, and how many."""
    found = Counter(what for cell in measured(record) for what in cell.get("since", []))
    return [
        f"{DAGGER}: made before this changed, and not measured again yet: {what} ({n} cell{'s' * (n > 1)})."
        for what, n in found.items()
    ]


def _readings(record: Record) -> list[str]:
    """Readings that were chosen because they fit, each once."""
    return [f"Reading chosen after measuring ({places}): {text}." for text, places in _read_so(record).items()]


def _read_so(record: Record) -> dict[str, str]:
    """Each reading that was chosen because it fits, and where it is used."""
    cells = measured(record)
    texts = dict.fromkeys(c["reading"] for c in cells if c["reading"])
    return {text: "; ".join(_lines(cells, "reading", text) or _cells(cells, "reading", text)) for text in texts}


def _unmeasured(record: Record) -> list[str]:
    """Why cells are empty: how many for which reason; what they lack is listed by name."""
    reasons: Counter[str] = Counter()
    names: dict[str, list[str]] = {}
    for cell in record["cells"]:
        if cell["ours"] is None:
            reason, colon, rest = (cell["note"] or NOT_RUN).partition("; ")[0].partition(": ")
            known = bool(colon) and reason in LACKING
            reasons[reason if known else reason + colon + rest] += 1
            if known and rest not in names.setdefault(reason, []):
                names[reason].append(rest)
    said = [f"{r}{': ' * (r in names)}{', '.join(names.get(r, []))} ({n})" for r, n in reasons.most_common()]
    return [f"{'; '.join(said)}."] if said else []


def _origins(record: Record) -> list[str]:
    """Where the numbers come from: device, commit, seeds, command."""
    groups = Counter((c["device"], c["commit"], len(c["seeds"]), c["rounds"]) for c in measured(record))
    lines = []
    for (device, commit, seeds, rounds), number_ in groups.most_common():
        what = f"{number_} cells" if number_ > 1 else "1 cell"
        dirty = f": made from {DIRTY}" if "+" in commit else ""
        lines.append(f"{what}: {rounds} rounds, {seeds} seed{'s' * (seeds != 1)}, {device}, commit {commit}{dirty}.")
    commands = list(dict.fromkeys(c["command"] for c in measured(record)))
    if commands:
        every = {tuple(c["seeds"]) for c in measured(record)}
        named = f" --seeds {seeds_text(next(iter(every)))}" if len(every) == 1 and 0 not in next(iter(every)) else ""
        whole = f"fedkin reproduce {record['paper']} {record['table']}{named}{' --quick' if record['quick'] else ''}"
        said = commands[0] if len(commands) == 1 else whole
        lines.append(f"Again: `{said}`")
    return lines


# ------------------------------------------------------------ HTML

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


def html(records: Sequence[Record], title: str = "The papers' tables beside ours") -> str:
    """A page that needs nothing else: no script, no font, no picture."""
    how = (
        "In each cell ours (± standard deviation over seeds); below it the paper's number and the difference. "
        "Green: within two points, or a fifth where it is no percentage."
    )
    body = [f"<h1>{_safe(title)}</h1>", f"<p>{how}</p>"]
    body += [part for record in records for part in _section(record)]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_safe(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"{''.join(body)}</body></html>\n"
    )


def _section(record: Record) -> Iterable[str]:
    yield f"<h2>{_safe(record['title'])}</h2><p>{_safe(record['paper_title'])} ({_safe(record['cite'])})</p>"
    if record["quick"]:
        yield f'<p class="quick">{_safe(QUICK)}</p>'
    if evaluation(record):
        yield f"<p>{_safe(evaluation(record))}</p>"
    if record["about"]:
        yield f"<p>{_safe(record['about'])}</p>"
    cells = {(c["row"], c["column"]): c for c in record["cells"]}
    columns = [c["title"] for c in record["columns"] if any(k[1] == c["title"] for k in cells)]
    yield "<table><tr><th></th>" + "".join(_html_title(record, "column", c) for c in columns) + "</tr>"
    for row in (r["title"] for r in record["rows"] if any(k[0] == r["title"] for k in cells)):
        shown = "".join(_html_cell(cells.get((row, c))) for c in columns)
        yield f"<tr>{_html_title(record, 'row', row)}{shown}</tr>"
    yield "</table><ul>"
    for text in remarks(record):
        yield f"<li>{_safe(text.replace('**', '').replace('`', ''))}</li>"
    yield "</ul>"


def _html_title(record: Record, axis: str, title: str) -> str:
    point = point_at(record, axis, title)
    return f"<th>{_safe(title)}{f'<small>{_safe(point)}</small>' if point else ''}</th>"


def _html_cell(cell: Record | None) -> str:
    if cell is None:
        return "<td></td>"
    paper = number(cell["paper"], cell["unit"])
    if cell["ours"] is None:
        return f'<td class="none" title="{_safe(cell["note"])}">–<small>{paper}</small></td>'
    kind = {True: ' class="close"', False: ' class="far"', None: ""}[close(cell)]
    below = f"{paper} &nbsp;{signed(difference(cell), cell['unit'])}" if cell["paper"] is not None else "no number"
    return f'<td{kind} title="{_safe(cell["note"])}">{ours_of(cell)}<small>{below}</small></td>'


def _safe(text: Any) -> str:
    return markup.escape(str(text), quote=True)


# ------------------------------------------------------------ the files in results/


def save(records: Iterable[Record], folder: str | Path) -> list[Path]:
    """Puts newly measured cells into results/<paper>/<table>.json; what was measured before stays, and seeds add up."""
    paths = []
    for record in records:
        if record["quick"]:
            raise UsageError("--quick numbers mean nothing and are not saved: leave out --quick or --save")
        paper = load_paper(record["paper"])
        path = Path(folder) / record["paper"] / f"{record['table']}.json"
        before = read(path) if path.exists() else None
        _write(path, merged(paper, paper.table(record["table"]), before, record["cells"]))
        paths.append(path)
    return paths


def merged(paper: Paper, table: Table, before: Record | None, new: Sequence[Record] = ()) -> Record:
    """All cells of the table as it is defined now, with what was measured before and now: the seeds of both. What was
    measured under another definition of the cell does not count any more, unless the paper says what changed: then it
    stays, marked, until there is a number of today's."""
    old = {(c["row"], c["column"]): c for c in (before or {}).get("cells", [])}
    fresh = {(c["row"], c["column"]): c for c in new}
    cells = []
    for cell in table.cells:
        at, blank = (cell.row, cell.column), empty(table, cell)
        usable = {blank["settings"], *former_settings(paper, cell)}
        known = [c for c in (old.get(at), fresh.get(at)) if c is not None and c["settings"] in usable]
        measured_ = [c for c in known if c["ours"] is not None]
        found = [c for c in measured_ if c["settings"] == blank["settings"]] or measured_
        if not found:
            told = next((c["note"] for c in reversed(known)), "")
            news = told.startswith(("failed", NO_DATA)) and blank["note"] == NOT_RUN  # not to be known from the table
            cells.append({**blank, "note": told} if news else blank)
        else:
            kept = united(table, cell, *found) if len(found) > 1 else found[0]
            note = joined(cell.note, *CHOICE.findall(kept["note"]), *FAILED.findall(kept["note"]))
            now = {**{k: blank[k] for k in ("unit", "lower", "paper", *DEFINED)}, "note": note}
            since = changed_since(paper, cell, kept)
            cells.append({**{k: kept[k] for k in CELL_KEYS}, **now, **({"since": since} if since else {})})
    return {**outline(paper, table), "cells": cells}


def refresh(folder: str | Path) -> list[Path]:
    """Every table's file, made anew from its definition and what it holds: after a table or a method was added."""
    paths = []
    for name in NAMES:
        paper = load_paper(name)
        for table in paper.tables:
            path = Path(folder) / name / f"{table.name}.json"
            _write(path, merged(paper, table, read(path) if path.exists() else None))
            paths.append(path)
    return paths


def read(path: Path) -> Record:
    """A results file, checked: every measured cell says where it comes from, every other why it is empty."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        cells, table = record["cells"], record["table"]
        for key in ("paper", "paper_title", "cite", "title", "rows", "columns", "checks", "methods", "kind"):
            record[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is no results file: {error!r}") from None
    for cell in cells:
        missing = [k for k in CELL_KEYS if k not in cell]
        if missing:
            raise DataError(f"{path}: a cell lacks {', '.join(missing)}")
        for key in DEFINED:
            cell.setdefault(key, "")
        lacking = [k for k in PROVENANCE if not cell[k]] if cell["ours"] is not None else []
        if lacking or (cell["ours"] is None and not cell["note"]):
            what = ", ".join(lacking) or "a note that says why it is empty"
            raise DataError(f"{path}: {table} {cell['row']!r}, {cell['column']!r} lacks {what}")
    return dict(record)


def _write(path: Path, record: Record) -> None:
    """One cell a line: differences between versions stay readable."""
    head = {k: v for k, v in record.items() if k != "cells"}
    lines = ",\n  ".join(json.dumps(_rounded(c), ensure_ascii=False) for c in record["cells"])
    text = json.dumps(head, ensure_ascii=False, indent=1)[:-2] + f',\n "cells": [\n  {lines}\n ]\n}}\n'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None


def _rounded(cell: Record) -> Record:
    def short(value: Any) -> Any:
        return (
            round(value, 4)
            if isinstance(value, float)
            else [short(v) for v in value]
            if isinstance(value, list)
            else value
        )

    return {k: short(v) for k, v in cell.items()}


def read_all(folder: str | Path) -> list[Record]:
    """All results files, in the order of the papers and their tables."""
    found: list[Record] = []
    for name in NAMES:
        paths = (Path(folder) / name / f"{table}.json" for table in table_names(name))
        found += [read(path) for path in paths if path.exists()]
    return found


# ------------------------------------------------------------ RESULTS.md


def results_page(records: Sequence[Record]) -> str:
    """The whole of RESULTS.md."""
    tables = [r for r in records if r["kind"] == "table"]
    claims = [r for r in records if r["kind"] == "claim"]
    federations = [r for r in records if r["kind"] == "comparison"]
    lines = [
        "# Results on real data",
        "",
        "<!-- made by `python -m fedkin.papers.render results RESULTS.md` from the files in results/: edit those -->",
        "",
        "The papers' tables, run again. In each cell: ours (± standard deviation over seeds) · the paper's number ·",
        "the difference; ✓ within two points (or a fifth, where it is no percentage), ✗ further off, – not measured.",
        "A cell without ± is one run: differences of a point or less between methods mean nothing there.",
        *(
            [f"{DAGGER}: made before a change in FedKin that can move it; which one, stands below the table."]
            if any(c.get("since") for r in records for c in measured(r))
            else []
        ),
        "",
        "## At a glance",
        "",
        *_overview(tables),
        "",
    ]
    if claims:
        lines += ["| claim | holds |", "| --- | --- |"]
        for record in claims:
            lines += [
                f"| {_cell_text(record['title'])}: {_cell_text(v['says'])} | {_answer(v)} |" for v in verdicts(record)
            ]
        lines.append("")
    if federations:
        lines += [
            f"## {federations[0]['paper_title']}",
            "",
            wrapped(
                "Most of the papers' tables deal one data set to clients by classes. Where clients are "
                "people as they come, which method to take is another question: all methods, at both points "
                "of evaluation, are in [docs/natural.md](docs/natural.md)."
            ),
            "",
            *natural.overview(federations),
            "",
            *_sentence(natural.plainly(federations)),
        ]
    for paper in dict.fromkeys(r["paper"] for r in (*tables, *claims)):
        mine = [r for r in records if r["paper"] == paper]
        lines += [f"## {mine[0]['paper_title']}", "", wrapped(f"{mine[0]['cite']}. {mine[0]['paper_about']}"), ""]
        lines += [markdown(record, 3, everything=False) for record in mine if measured(record)]
        idle = [r for r in mine if not measured(r)]
        if idle:
            said = (wrapped(f"{r['title']}: {_unmeasured(r)[0]}", "- ") for r in idle)
            lines += ["Nothing measured yet:", "", *said, ""]
    return "\n".join(lines).rstrip() + "\n"


def _sentence(text: str) -> list[str]:
    return [wrapped(text), ""] if text else []


def _answer(verdict: dict[str, Any]) -> str:
    if verdict["holds"] is None:
        return "not tested yet"
    more = "".join(f", {text}" for text in _limits(verdict))
    found = f"; {verdict['found']}" if verdict["found"] and not verdict["holds"] else ""
    return f"{'**yes**' if verdict['holds'] else '**no**'} ({verdict['held']} of {verdict['of']}{more}){found}"


def _overview(records: Sequence[Record]) -> list[str]:
    sums = [(r, summary(r)) for r in records]
    lines = [
        *_headline(records, _added(sums)),
        *_by_paper(records),
        "",
        *_found(records),
        *_how_read(records),
        "| table | measured | close | strictly | best method agrees | Kendall's tau | claims that hold |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record, s in sums:
        if s["measured"]:
            found = count(comparable(record))
            near = (f"{found.close} of {found.compared}", f"{found.strict}") if found.compared else ("–", "–")
            claims = f"{s['hold']} of {s['checks']}" if s["checks"] else "–"
            name, done = _cell_text(f"{record['paper']}, {record['title']}"), f"{s['measured']} of {s['cells']}"
            best = f"{_best_text(s)} | {tau_text(s['tau'])}"
            lines.append(f"| {name} | {done} | {' | '.join(near)} | {best} | {claims} |")
    idle = [f"{r['paper']} {r['table']}" for r, s in sums if not s["measured"]]
    return [*lines, "", wrapped(f"Nothing measured yet: {', '.join(idle)}.")] if idle else lines


def _headline(records: Sequence[Record], total: dict[str, int]) -> list[str]:
    """How many numbers come out, counted generously and strictly, and by which rule."""
    cells = distinct(records)
    found = count(cells)
    told = sum(close(c) is False and bool(c["note"]) for c in cells)
    said = [
        f"**{found.close} of {found.compared}** numbers that can be compared are close to the paper's"
        f"{_share(found.close, found.compared)}; **strictly {found.strict} of {found.compared}**"
        f"{_share(found.strict, found.compared)}. Of the {found.sound} that meet the strict conditions, close or not, "
        f"{found.strict} are close{_share(found.strict, found.sound)}.",
        "How it is counted: a number counts once, however many tables of a paper print it (the same settings, metric "
        "and printed number; that two values are equal does not make them one). Strictly close: the reading of the "
        "paper was fixed before measuring, there are three seeds or more, the standard error over them is no more than "
        "what counts as close, there is something to reproduce, and nothing that can move it has changed in FedKin "
        "since.",
        f"The other {found.close - found.strict} close ones: {found.chosen} under a reading chosen after measuring "
        f"because it fits; {found.nothing + found.chance} that reproduce nothing ({found.nothing} losses of more than "
        f"a point in the paper that do not occur here, {found.chance} means close by chance, of seeds that are too far "
        f"apart); {found.few} with fewer than three seeds; {found.older} made before a change in FedKin that can move "
        f"them ({DAGGER}).{_rates(cells)}",
        f"{told} of the {found.compared - found.close} numbers that are not close have a note below their table: what "
        "the difference comes from, or that it is not known. The best of the measured methods is the paper's best in "
        f"**{total['best_agrees']} of {total['lines']}** lines; in {total['best_level']} more the paper's best is "
        f"within a point of it, which few seeds do not tell apart. In {total['best_mixed']} of these lines methods are "
        "judged at different points, as the papers do or as their numbers are read; each table says at which. "
        f"{total['measured']} of {total['cells']} cells are measured.",
    ]
    return [line for text in said for line in (wrapped(text), "")]


def _rates(cells: Sequence[Record]) -> str:
    rates = [c for c in cells if c["metric"] in ("dacc", "fpr", "fnr") and close(c) and sound(c)]
    said = f" Of those that count strictly {len(rates)} are rates of detection, three of an attack, of which the first "
    return f"{said}follows from the other two." if rates else ""


def _share(part: int, whole: int) -> str:
    return f" ({100 * part / whole:.0f} %)" if whole else ""


def in_short(records: Sequence[Record]) -> str:
    """The same in a few sentences, as the README has it."""
    found = count(distinct([r for r in records if r["kind"] == "table"]))
    return (
        f"{found.close} of the {found.compared} numbers that can be compared are close to the paper's (within two "
        f"points, or within a fifth where the number is not a percentage). {found.strict} of these meet strict "
        "conditions: the paper was read in one way before measuring, and there are three seeds or more with a small "
        f"spread. Of the others, {found.chosen} depend on a reading that was chosen because it fits, "
        f"{found.nothing + found.chance} do not show anything, {found.few} have fewer than three seeds, and "
        f"{found.older} were measured before a later change in FedKin that can move them"
    )


def _by_paper(records: Sequence[Record]) -> list[str]:
    lines = [
        "| paper | close | strictly | chosen reading | reproduce nothing | fewer than 3 seeds | older | half of "
        "its numbers differ by no more than | best method agrees |",
        "| --- |" + " ---: |" * 8,
    ]
    for paper in dict.fromkeys(r["paper"] for r in records):
        mine = [r for r in records if r["paper"] == paper]
        cells = distinct(mine)
        gaps = [abs(difference(c) or 0.0) for c in cells if c["unit"] == "%"]
        if cells:
            found, half = count(cells), f"{median(gaps):.1f} points" if gaps else "–"
            best = _best_text(_added([(r, summary(r)) for r in mine]))
            parts = f"{found.strict} | {found.chosen} | {found.nothing + found.chance} | {found.few} | {found.older}"
            lines.append(f"| {paper} | {found.close} of {found.compared} | {parts} | {half} | {best} |")
    return lines


def _found(records: Sequence[Record]) -> list[str]:
    """What came out of each paper that something was measured of, in words."""
    done = {r["paper"] for r in records if measured(r)}
    said = {
        r["paper"]: told(r.get("paper_found", ""), [o for o in records if o["paper"] == r["paper"]])
        for r in records
        if r["paper"] in done
    }
    lines = [wrapped(f"**{paper}**: {text}", "- ") for paper, text in said.items() if text]
    return ["Where the papers hold, and where they do not:", "", *lines, ""] if lines else []


NUMBER = re.compile(r"\{(close|ours|paper):([^:{}]+)(?::([^:{}]+))?(?::([^:{}]+))?\}")


def told(text: str, records: Sequence[Record]) -> str:
    """A text with its numbers filled in from the tables: {close:TABLE}, {close:TABLE:LINE} as "4 of 6", and
    {ours:TABLE:ROW:COLUMN}, {paper:TABLE:ROW:COLUMN} as 44.9."""

    def fill(found: re.Match[str]) -> str:
        what, table, first, second = found.groups()
        cells = [c for r in records if r["table"] == table for c in r["cells"]]
        if what == "close":
            some = [c for c in cells if first in (None, c["row"], c["column"])]
            both = [c for c in some if close(c) is not None]
            said = f"{sum(bool(close(c)) for c in both)} of {len(both)}"
        else:
            some = [c for c in cells if (c["row"], c["column"]) == (first, second)]
            said = "–" if not some or some[0][what] is None else f"{some[0][what]:.1f}".replace("-", "−")
        if not some:
            raise DataError(f"{found[0]}: there is no such cell")
        return said

    return NUMBER.sub(fill, text)


def _how_read(records: Sequence[Record]) -> list[str]:
    """Which readings were chosen because they fit, and which were changed for a better reason."""
    chosen: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for text, places in _read_so(record).items():
            some = count([c for c in comparable(record) if c["reading"] == text])
            said = f"{record['title'].partition(':')[0]}, {places}: {some.close} of {some.compared} close"
            chosen.setdefault((record["paper"], text), []).append(said)
    settled = {text: r["paper"] for r in records for text in r.get("paper_settled", ())}
    lines: list[str] = []
    if chosen:
        lines += [
            "Readings chosen after measuring because they fit, whose numbers count apart:",
            "",
            *(wrapped(f"{paper}: {text} ({'; '.join(at)})", "- ") for (paper, text), at in chosen.items()),
            "",
        ]
    if settled:
        lines += [
            "Readings that were settled with a number at hand, but by the paper's words or the authors' code; "
            "their numbers",
            "count as the others do:",
            "",
            *(wrapped(f"{paper}: {text}", "- ") for text, paper in settled.items()),
            "",
        ]
    return lines


def _added(sums: Sequence[tuple[Record, dict[str, Any]]]) -> dict[str, int]:
    keys = ("cells", "measured", "lines", "best_agrees", "best_level", "best_mixed")
    return {k: sum(s[k] for _, s in sums) for k in keys}


def _best_text(found: dict[str, Any]) -> str:
    level = f", {found['best_level']} level" if found["best_level"] else ""
    return f"{found['best_agrees']} of {found['lines']}{level}" if found["lines"] else "–"


EXAMPLE = """
```python
import fedkin as fk

results, table = fk.compare(["local", "fedavg-ft", "fedper"], data="digits", rounds=3, lr=0.05, seeds=2)
print(table)
```
"""


def natural_page(records: Sequence[Record]) -> str:
    """The whole of docs/natural.md."""
    mine = [r for r in records if r["kind"] == "comparison"]
    choices = [r for r in records if r["kind"] == "choice"]
    lines = [
        "# Natural federations: which method to take first",
        "",
        "<!-- made by `fedkin reproduce --render` from the files in results/natural: edit those -->",
        "",
        wrapped(mine[0]["paper_about"]) if mine else "",
        "",
        *natural.overview(mine),
        "",
        *_sentence(natural.plainly(mine)),
        wrapped(
            "Accuracy in percent, mean over clients, ± standard deviation over seeds; each method by its better "
            "point of evaluation. A lead is the mean ± deviation of the difference at the same seeds; one that is "
            "no larger than its deviation is none, and the simplest method of those that are level is the one to "
            "take first."
        ),
        "",
        *(markdown(record, 2) for record in (*mine, *choices)),
        "## For your own clients",
        "",
        wrapped(
            "The same question, asked of your own data: put them in place of `digits` ([your data](your-data.md)); "
            "`eval_point` says when models are judged. Local and FedAvg-FT cost nothing to try and are what a "
            "personal method has to beat."
        ),
        EXAMPLE.rstrip(),
        "",
    ]
    return "\n".join(lines).rstrip() + "\n"


def write_natural_page(folder: str | Path, page: str | Path) -> Path:
    return _written(Path(page), natural_page(read_all(folder)))


def write_results_page(folder: str | Path, page: str | Path) -> Path:
    return _written(Path(page), results_page(read_all(folder)))


def _written(path: Path, text: str) -> Path:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


if __name__ == "__main__":
    source, target = (*sys.argv[1:], *("results", "RESULTS.md")[len(sys.argv) - 1 :])
    write_results_page(source, target)
