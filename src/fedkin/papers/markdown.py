"""One table of a paper with our numbers as Markdown, and the remarks below it."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fedkin.papers import natural
from fedkin.papers.cell_settings import NO_DATA
from fedkin.papers.measures import metric_of
from fedkin.papers.table_records import NOT_RUN, Record, seeds_text
from fedkin.papers.verdicts import close, difference, measured, rankings, verdicts

LACKING = (NO_DATA, *(f"{what} not there yet" for what in ("method", "model", "attack", "rule")))
DAGGER = "†"
QUICK = "quick: far fewer rounds and samples; no number here means anything"


# ------------------------------------------------------------ numbers as text


def number(value: float | None, unit: str = "%") -> str:
    if value is None:
        return "–"
    digits = ".2f" if unit in ("%", "times", "MiB") else ".0f" if unit == "rounds" else ".4g"
    return f"{value:{digits}}".replace("-", "−")


def signed(gap: float | None, unit: str = "%") -> str:
    return "" if gap is None else f"{gap:{'+.0f' if unit == 'rounds' else '+.2f'}}".replace("-", "−")


def ours_of(cell: Record) -> str:
    """Our number ± its deviation, with a star if it is from a quick run and a dagger if it was made before a change."""
    spread = f" ±{cell['std']:.2f}" if cell["std"] is not None else ""
    marks = "*" * bool(cell.get("quick")) + DAGGER * bool(cell.get("since"))
    return number(cell["ours"], cell["unit"]) + (spread + marks if cell["ours"] is not None else "")


# ------------------------------------------------------------ a table


def markdown(record: Record, level: int = 2, everything: bool = True) -> str:
    """One table; `everything`: also rows and columns in which nothing was measured."""
    above = filter(None, (evaluation(record), record["about"], record.get("common")))
    lines = [f"{'#' * level} {record['title']}", ""]
    for text in above:
        lines += [wrapped(text), ""]
    lines += [*_grid(record, everything), "", *(wrapped(text, "- ") for text in remarks(record))]
    return "\n".join(lines).rstrip() + "\n"


def wrapped(text: str, bullet: str = "") -> str:
    indent = " " * len(bullet)
    return textwrap.fill(
        text, 119, initial_indent=bullet, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def row_of(cells: Iterable[object]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_of(heads: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """A Markdown table whose columns after the first `left` ones hold numbers."""
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return [row_of(heads), row_of(rule), *map(row_of, rows)]


def plain_text(text: str) -> str:
    """Text that cannot end a cell of a Markdown table."""
    return text.replace("|", "\\|")


def evaluated_cells(record: Record) -> list[Record]:
    """The cells with a point of evaluation: those that were measured, or all where none was."""
    return [c for c in measured(record) or record["cells"] if c["judged"]]


def evaluation(record: Record) -> str:
    """A table's metric and point of evaluation in a sentence; where they differ, of which rows or columns."""
    cells = evaluated_cells(record)
    if not cells:
        return ""
    what = "; ".join(dict.fromkeys(metric_of(c["metric"]).about for c in cells))
    words = list(dict.fromkeys(c["judged"] for c in cells))
    if len(words) == 1:
        return f"Metric: {what}. Evaluation point: {words[0]}."
    said, left = {}, list(cells)
    for word in sorted(words, key=lambda w: sum(c["judged"] == w for c in cells)):  # exceptions first
        places = _lines(cells, "judged", word) or _lines(left, "judged", word) or _cells(cells, "judged", word)
        told = all(word in place for place in places)
        said[word] = f"{word} ({'where the title says so' if told else ', '.join(places)})"
        left = [c for c in left if c["judged"] != word]
    return f"Metric: {what}. Evaluation points differ: {'; '.join(said[word] for word in words)}."


def _lines(cells: Sequence[Record], key: str, word: str) -> list[str]:
    """The rows of these cells that all say this under a key, else the columns; none if it is said here and there."""
    mine = [c for c in cells if c[key] == word]
    for axis in ("row", "column"):
        names = dict.fromkeys(c[axis] for c in mine)
        if all(c[key] == word for c in cells if c[axis] in names):
            return list(names)
    return []


def _cells(cells: Sequence[Record], key: str, word: str) -> list[str]:
    """The cells that say this, rows with the same columns together."""
    columns: dict[str, list[str]] = {}
    for c in (c for c in cells if c[key] == word):
        columns.setdefault(c["row"], []).append(c["column"])
    rows: dict[str, list[str]] = {}
    for row, names in columns.items():
        rows.setdefault(_and(names), []).append(row)
    return [f"{_and(mine)}: {names}" for names, mine in rows.items()]


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def point_at(record: Record, axis: str, title: str) -> str:
    """When the models of a row or a column are evaluated, where that is not the same everywhere in the table."""
    cells = evaluated_cells(record)
    mine = {c["judged"] for c in cells if c[axis] == title}
    other = "column" if axis == "row" else "row"
    split = any(len({c["judged"] for c in cells if c[other] == name}) > 1 for name in {c[other] for c in cells})
    point = next(iter(mine)) if len(mine) == 1 and split else ""
    return "" if point in title else point


def lines_of(record: Record, kept: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """The titles of the rows and of the columns that hold one of these cells."""
    rows, columns = ({at[i] for at in kept} for i in (0, 1))
    return (
        [r["title"] for r in record["rows"] if r["title"] in rows],
        [c["title"] for c in record["columns"] if c["title"] in columns],
    )


def _grid(record: Record, everything: bool) -> list[str]:
    cells = {(c["row"], c["column"]): c for c in record["cells"]}
    rows, columns = lines_of(record, [k for k, c in cells.items() if everything or c["ours"] is not None])

    def titled(axis: str, title: str) -> str:
        point = point_at(record, axis, title)
        return plain_text(title) + (f" *({plain_text(point)})*" if point else "")

    shown = ([titled("row", r), *(_shown(cells.get((r, c))) for c in columns)] for r in rows)
    made = table_of(["", *(titled("column", c) for c in columns)], shown)
    return ["|" + made[0][2:], *made[1:]]


def _shown(cell: Record | None) -> str:
    """Our number, the paper's and the difference; ✓ where they are close and ✗ where they are not."""
    if cell is None:
        return ""
    if cell["paper"] is None:
        return ours_of(cell)
    paper = number(cell["paper"], cell["unit"])
    if cell["ours"] is None:
        return f"– · {paper}"
    mark = {True: "✓ ", False: "✗ ", None: ""}[close(cell)]
    return f"{mark}{ours_of(cell)} · {paper} · {signed(difference(cell), cell['unit'])}"


# ------------------------------------------------------------ what is said below it


def remarks(record: Record) -> list[str]:
    """What there is to say below a table: claims, rankings, notes, what is missing, where the numbers come from."""
    quick = [f"*: {QUICK}."] if record["quick"] else []
    found = [] if record["quick"] else [*map(_verdict_text, verdicts(record)), *_ranking_text(rankings(record))]
    advice = [natural.said(record)] if record["kind"] == "comparison" and not record["quick"] else []
    read_so = [f"Reading chosen after measuring ({places}): {text}." for text, places in readings(record).items()]
    missing = [f"Not measured: {text}" for text in unmeasured(record)]
    return [*quick, *advice, *found, *read_so, *_notes(record), *_older(record), *missing, *_origins(record)]


def _some(texts: Sequence[str], most: int) -> str:
    return "; ".join(texts[:most]) + (" ..." if len(texts) > most else "")


def _verdict_text(verdict: dict[str, Any]) -> str:
    limits = ", ".join(limits_of(verdict))
    if verdict["holds"] is None:
        return f"Claim: {verdict['says']}: not tested yet."
    if verdict["holds"]:
        tested = f"{verdict['held']} of {verdict['of']} comparisons{f', {limits}' if limits else ''}"
        return f"Claim: {verdict['says']}: **holds** ({tested})."
    broken, level = verdict["broken"], verdict["level"]
    near = f", {'each' if level == len(broken) else f'{level} of them'} by a point or less" if level else ""
    found = f" {verdict['found']}." if verdict["found"] else ""
    more = f" Of the comparisons: {limits}." if limits else ""
    tested = f"{len(broken)} of {verdict['of']}{near}"
    return f"Claim: {verdict['says']}: **does not hold** in {tested} ({_some(broken, 6)}).{found}{more}"


def limits_of(verdict: dict[str, Any]) -> list[str]:
    """What takes away from a verdict."""
    said = {
        "single": "at one seed",
        "mixed": "between different evaluation points",
        "chosen": "under a reading chosen after measuring",
        "older": f"of numbers made before a change that can move them ({DAGGER})",
        "unknown": "not measured",
    }
    return [f"{verdict[key]} {text}" for key, text in said.items() if verdict[key]]


def tau_text(value: float | None) -> str:
    return "–" if value is None else number(value)


def _ranking_text(ranks: Sequence[dict[str, Any]]) -> list[str]:
    if not ranks:
        return []
    agree, level, mixed = (sum(r[key] for r in ranks) for key in ("agrees", "level", "mixed"))
    near = f", within a point of the best in {level} more" if level else ""
    points = f"; methods are evaluated at different points in {mixed} of them" if mixed else ""
    taus = [r["tau"] for r in ranks if r["tau"] is not None]
    mean = f"; Kendall's tau {tau_text(sum(taus) / len(taus))} on average" if taus else ""
    other = [f"{r['line']}: {r['ours']} instead of {r['paper']}" for r in ranks if not r["agrees"]]
    tail = f" ({_some(other, 6)})" if other else ""
    said = f"The best of the measured methods is the paper's best in {agree} of {len(ranks)} lines"
    return [f"{said}{near}{tail}{mean}{points}."]


def _notes(record: Record) -> list[str]:
    """What is worth saying about measured cells, each note once."""
    found: dict[str, list[str]] = {}
    for cell in measured(record):
        if cell["note"]:
            found.setdefault(cell["note"], []).append(f"{cell['row']}, {cell['column']}")
    return [f"{_some(places, 4)}: {note}" for note, places in found.items()]


def _older(record: Record) -> list[str]:
    """What has changed since numbers were made, and how many."""
    found = Counter(what for cell in measured(record) for what in cell.get("since", []))
    return [
        f"{DAGGER}: made before this changed, and not measured again yet: {what} ({_cells_text(n)})."
        for what, n in found.items()
    ]


def readings(record: Record) -> dict[str, str]:
    """Each reading of the paper that was chosen because it fits, and where it is used."""
    cells = measured(record)
    texts = dict.fromkeys(c["reading"] for c in cells if c["reading"])
    return {text: "; ".join(_lines(cells, "reading", text) or _cells(cells, "reading", text)) for text in texts}


def unmeasured(record: Record) -> list[str]:
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


def _cells_text(count: int) -> str:
    return f"{count} cell{'s' * (count > 1)}"


def _origins(record: Record) -> list[str]:
    """Where the numbers come from: device, commit, seeds, command."""
    cells = measured(record)
    groups = Counter((c["device"], c["commit"], len(c["seeds"]), c["rounds"]) for c in cells)
    lines = []
    for (device, commit, seeds, rounds), count in groups.most_common():
        dirty = ": made from a tree with changes that are in no commit" if "+" in commit else ""
        made = f"{rounds} rounds, {seeds} seed{'s' * (seeds != 1)}, {device}, commit {commit}{dirty}"
        lines.append(f"{_cells_text(count)}: {made}.")
    commands = list(dict.fromkeys(c["command"] for c in cells))
    if len(commands) > 1:
        every = {tuple(c["seeds"]) for c in cells}
        named = f" --seeds {seeds_text(next(iter(every)))}" if len(every) == 1 and 0 not in next(iter(every)) else ""
        quick = " --quick" if record["quick"] else ""
        commands = [f"fedkin reproduce {record['paper']} {record['table']}{named}{quick}"]
    return [*lines, *(f"To run it again: `{command}`" for command in commands)]
