"""A table written out: for a paper (LaTeX), for a page (Markdown, HTML), for a terminal, for other programs (CSV)."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedkin.errors import DataError
from fedkin.report.tables import Entry, Sheet
from fedkin.rounds.clock import PARTS
from fedkin.runs.spreadsheet import inert
from fedkin.sweep.statistics import METRICS, Group, summary


def markdown(made: Sheet) -> str:
    """A pipe table, the best of each column in bold."""

    def cell(entry: Entry) -> str:
        text = f"**{_md(entry.text)}**" if entry.best else _md(entry.text)
        return f"{text}{f' ± {entry.spread}' if entry.spread else ''}{_after(entry.mark, _md)}"

    rule = [":--" if i < made.left else "--:" for i in range(len(made.head))]
    lines = [f"**{_md(made.title)}**", "", _piped(map(_md, made.head)), _piped(rule)]
    lines += [_piped(map(cell, row)) for row in made.rows]
    return "\n".join([*lines, "", *(f"{_md(note)}  " for note in made.notes), ""])


def _after(mark: str, escape: Callable[[str], str]) -> str:
    """A mark behind a number, with the space before it."""
    return " " * mark.startswith(" ") + escape(mark)


def _piped(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _md(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", " ".join(text.split()))


TEX: dict[str, str | int | None] = {
    **{c: f"\\{c}" for c in "{}$&#_%"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    '"': "''",
}


def _tex(text: str) -> str:
    return " ".join(text.split()).translate(str.maketrans(TEX))


def latex(made: Sheet) -> str:
    r"""A floating table for \usepackage{booktabs}."""

    def cell(entry: Entry) -> str:
        text = rf"\textbf{{{_tex(entry.text)}}}" if entry.best else _tex(entry.text)
        star = entry.mark.startswith("*")
        mark = ("$^{*}$" if star else "") + _after(entry.mark[1:] if star else entry.mark, _tex)
        spread = r" $\pm$ " + entry.spread if entry.spread else ""
        return f"{text}{spread}{mark}"

    columns = "l" * made.left + "r" * (len(made.head) - made.left)
    caption = " ".join(f"{_tex(n[:1].upper() + n[1:])}." for n in [made.title, *made.notes])
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{caption}}}",
        rf"  \label{{tab:{made.label}}}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        f"    {' & '.join(map(_tex, made.head))} \\\\",
        r"    \midrule",
        *(f"    {' & '.join(map(cell, row))} \\\\" for row in made.rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
        "",
    ]
    return "\n".join(lines)


def comma_separated(groups: Sequence[Group], baseline: str | None = None, metric: str = "macro") -> str:
    """One line per group with every number in full."""
    lines = flat(groups, baseline, metric)
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(lines[0]) if lines else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: inert(value) for name, value in line.items()} for line in lines)
    return file.getvalue()


def flat(groups: Sequence[Group], baseline: str | None = None, metric: str = "macro") -> list[dict[str, Any]]:
    """Every number of every group, by the name of its column."""
    rows = summary(groups, baseline, metric)
    settings = list(dict.fromkeys(k for r in rows for k in r["settings"] if k != "attack"))
    measures = [m.replace("-", "_") for m in METRICS] + ["validation", "std", "megabytes", "seconds", "wall"]
    tests = ["baseline", "metric", "over", "n", "p", "p_holm", "difference", "why"] if baseline is not None else []
    return [
        {
            "method": r["method"],
            "options": ";".join(f"{k}={v}" for k, v in r["options"].items()),
            "attack": r["attack"],
            "rule": r["rule"],
            **{k: r["settings"].get(k, "") for k in settings},
            "seeds": _joined(r["seeds"]),
            "missing_seeds": _joined(r["missing"]),
            "eval_point": r["eval_point"],
            "benign_only": r["benign_only"],
            **{k: (r["score"] or {}).get(k, "") for k in ("metric", "unit", "higher")},
            **{f"{m}_{part}": _exact(r[m][part]) for m in measures for part in ("mean", "std")},
            **{f"{part}_mean": _exact(r["times"][part]["mean"]) for part in PARTS},
            "best_rounds": _joined(r["best_rounds"]),
            "best_by": " ".join(r["best_by"]),
            **{f"select_{k}": _exact(v) for k, v in (r["select"] or {}).items() if k != "passed_over"},
            "diverged_seeds": " ".join(r["diverged"]),
            "diverged": " | ".join(dict.fromkeys(r["diverged"].values())),
            "stopped": " ".join(f"{seed}:{round}" for seed, round in r["stopped"].items()),
            "seen_seeds": " ".join(r["seen"]),
            **{f"paired_{t}": _exact((r["paired"] or {}).get(t, "")) for t in tests},
        }
        for r in rows
    ]


def _joined(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def _exact(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def straight(made: Sheet, most: int = 40) -> str:
    """Columns that stand straight in a terminal, at most so many rows."""
    cells = [made.head, *([entry.plain() for entry in row] for row in made.rows[:most])]
    widths = [max(len(row[i]) for row in cells) for i in range(len(made.head))]
    lines = [
        "  ".join(c.ljust(w) if i < made.left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    more = [f"... and {len(made.rows) - most} more rows"] if len(made.rows) > most else []
    return "\n".join([made.title, *(line.rstrip() for line in lines), *more])


def html(made: Sheet) -> str:
    """A table for a page, the best of each column in bold."""

    def tag(name: str, i: int, text: str) -> str:
        return f"<{name} class={'w' if i < made.left else 'n'}>{text}</{name}>"

    def cell(entry: Entry) -> str:
        text = f"<b>{escape(entry.text)}</b>" if entry.best else escape(entry.text)
        return f"{text}{f' ± {entry.spread}' if entry.spread else ''}{_after(entry.mark, escape)}"

    head = "".join(tag("th", i, escape(name)) for i, name in enumerate(made.head))
    rows = ("".join(tag("td", i, cell(entry)) for i, entry in enumerate(row)) for row in made.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    notes = "".join(f"<p>{escape(note)}</p>" for note in made.notes)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<p class=title>{escape(made.title)}</p>{table}{notes}"


def write(path: str | Path, text: str) -> Path:
    """A text file, its folder made if need be."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror or error}") from None
    return target
