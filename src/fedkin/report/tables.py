"""A sweep as a table: for the screen, for a paper (LaTeX), for a page (Markdown), for other programs (CSV).

Rows are methods (with the rule, where there are several), columns the conditions that vary. With a single condition
the columns are the measures."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkin.config import POINTS
from fedkin.errors import DataError
from fedkin.methods import METHODS
from fedkin.rounds.clock import PARTS
from fedkin.sweep.statistics import METRICS, Group, Paired, compared, summary

SIGNIFICANT = 0.05
TITLES = {
    "macro": "macro",
    "micro": "micro",
    "worst-decile": "worst decile",
    "best-macro": "best macro",
    "best-micro": "best micro",
    "best-worst-decile": "best worst decile",
}
SHORT = ("macro", "micro", "worst-decile", "best-micro")


@dataclass(frozen=True)
class Entry:
    """One field: text, or a number with its spread. `best` of its column; `mark` after it (a footnote's sign)."""

    text: str
    spread: str = ""
    best: bool = False
    mark: str = ""
    number: bool = False

    def plain(self) -> str:
        return f"{self.text}{f' ±{self.spread}' if self.spread else ''}{self.mark}"


@dataclass
class Sheet:
    title: str
    head: list[str]
    rows: list[list[Entry]]
    notes: list[str] = field(default_factory=list)
    left: int = 1  # so many columns from the left are words
    label: str = "comparison"


def sheet(groups: Sequence[Group], metric: str = "macro", baseline: str | None = None) -> Sheet:
    """With one condition, all measures of a method in one line; with several, one column each."""
    tests = compared(groups, baseline, metric) if baseline is not None else {}
    columns = list(dict.fromkeys(g.column for g in groups))
    rules = list(dict.fromkeys(g.config.rule for g in groups))
    if metric != "macro" or len(columns) > 1:
        made = _matrix(groups, columns, rules, metric, tests)
    else:
        made = _lines(groups, rules, tests)
    made.notes += _notes(groups, rules, tests, metric if metric != "macro" or len(columns) > 1 else None)
    return made


def _lines(groups: Sequence[Group], rules: Sequence[str], tests: dict[int, Paired]) -> Sheet:
    several, judged = len(rules) > 1, len(_points(groups)) > 1
    head = [
        "method",
        *(["rule"] if several else []),
        *(TITLES[m] for m in SHORT),
        "best round",
        "sent",
        "wall s",
        "rounds s",
        *(["evaluated"] if judged else []),
    ]
    rows = []
    tops = {m: _top(groups, m) for m in SHORT}
    for i, group in enumerate(groups):
        start = [Entry(group.row), *([Entry(group.config.rule)] if several else [])]
        if not group.outcomes:
            rows.append([*start, Entry("failed"), *[Entry("-")] * (len(head) - len(start) - 1)])
            continue
        scores = [_score(group, m, group.metric(m)["mean"] == tops[m] and m != "best-micro") for m in SHORT]
        scores[0] = _marked(scores[0], group, tests.get(i))
        sent = group.over_seeds(lambda o: o.sent)["mean"]
        rest = [
            Entry(_rounds(group)),
            Entry(megabytes(sent), number=True),
            _seconds(group.over_seeds(lambda o: o.wall)["mean"]),
            _seconds(group.over_seeds(lambda o: o.seconds)["mean"]),
            *([Entry(_judged(group))] if judged else []),
        ]
        rows.append([*start, *scores, *rest])
    return Sheet(_title(groups), head, rows, left=2 if several else 1)


def _matrix(
    groups: Sequence[Group], columns: Sequence[str], rules: Sequence[str], metric: str, tests: dict[int, Paired]
) -> Sheet:
    several, judged = len(rules) > 1, len(_points(groups)) > 1
    tops = {c: _top([g for g in groups if g.column == c], metric) for c in columns}
    lines: dict[tuple[str, str], dict[str, Entry]] = {}
    when: dict[tuple[str, str], str] = {}
    for i, group in enumerate(groups):
        line = lines.setdefault((group.row, group.config.rule), {})
        if group.outcomes:
            when[group.row, group.config.rule] = _judged(group)
            entry = _score(group, metric, group.metric(metric)["mean"] == tops[group.column])
            line[group.column] = _marked(entry, group, tests.get(i))
        else:
            line[group.column] = Entry("failed")
    order = list(dict.fromkeys(row for row, _ in lines))
    rows = [
        [
            Entry(row),
            *([Entry(rule)] if several else []),
            *(line.get(c, Entry("-")) for c in columns),
            *([Entry(when.get((row, rule), "-"))] if judged else []),
        ]
        for (row, rule), line in sorted(lines.items(), key=lambda item: order.index(item[0][0]))
    ]
    head = [
        "method",
        *(["rule"] if several else []),
        *(c or TITLES[metric] for c in columns),
        *(["evaluated"] if judged else []),
    ]
    return Sheet(_title(groups), head, rows, left=2 if several else 1)


def _top(groups: Sequence[Group], metric: str) -> float:
    values = [g.metric(metric)["mean"] for g in groups if not g.diverged]
    return max((v for v in values if not math.isnan(v)), default=math.nan)


def _score(group: Group, metric: str, best: bool) -> Entry:
    stats = group.metric(metric)
    spread = "" if math.isnan(stats["std"]) else f"{stats['std']:.2f}"
    return Entry("-" if math.isnan(stats["mean"]) else f"{stats['mean']:.2f}", spread, best, number=True)


def _marked(entry: Entry, group: Group, test: Paired | None) -> Entry:
    mark = "*" if test is not None and test.p_holm < SIGNIFICANT else ""
    if group.diverged:
        all_ = len(group.diverged) == len(group.outcomes)
        mark += " (diverged)" if all_ else f" ({len(group.diverged)} of {len(group.outcomes)} diverged)"
    if len(group.outcomes) < len(group.asked):
        mark += f" ({len(group.outcomes)} of {len(group.asked)} seeds)"
    return Entry(entry.text, entry.spread, entry.best and not group.diverged, mark, True)


def paired_sheet(groups: Sequence[Group], baseline: str, metric: str = "macro") -> Sheet:
    """Every row against the baseline, test by test."""
    tests = compared(groups, baseline, metric)
    wide = len({g.column for g in groups}) > 1
    several = len({g.config.rule for g in groups}) > 1
    head = [
        "method",
        *(["rule"] if several else []),
        *(["condition"] if wide else []),
        "median difference",
        "p",
        "p (Holm)",
        "n",
        "over",
    ]
    rows = []
    for i, test in tests.items():
        g = groups[i]
        start = [Entry(g.row), *([Entry(g.config.rule)] if several else []), *([Entry(g.column)] if wide else [])]
        if test.over is None:
            rows.append([*start, Entry("no test"), Entry("-"), Entry("-"), Entry(str(test.n)), Entry("-")])
        else:
            numbers = (f"{test.difference:+.2f}", p_text(test.p), p_text(test.p_holm), str(test.n))
            rows.append([*start, *(Entry(v, number=True) for v in numbers), Entry(test.over)])
    name = next(iter(tests.values())).baseline if tests else baseline
    title = f"Against {name}, points of {TITLES[metric]} accuracy per pair, {_when(groups)}"
    return Sheet(title, head, rows, _test_notes(groups, tests), left=1 + several + wide, label="comparison-tests")


def p_text(p: float) -> str:
    return "<0.0001" if p < 0.0001 else f"{p:.4f}"


def _rounds(group: Group) -> str:
    rounds = [o.best_round for o in group.outcomes]
    return str(rounds[0]) if len(set(rounds)) == 1 else f"{min(rounds)}-{max(rounds)}"


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB" if count else "0 B"


def _title(groups: Sequence[Group]) -> str:
    every = all(_benign(g) for g in groups)
    return f"Accuracy of the personal models{' of benign clients' if every else ''}, {_when(groups)}, percent"


def _points(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(point for g in groups for point in g.points))


def _when(groups: Sequence[Group]) -> str:
    """The point at which models were evaluated, where it is one for all."""
    points = _points(groups)
    return "evaluated as each row says" if len(points) > 1 else f"evaluated {''.join(POINTS.get(p, p) for p in points)}"


def _judged(group: Group) -> str:
    return "; ".join(POINTS.get(p, p) for p in group.points)


def _seconds(value: float) -> Entry:
    return Entry("-" if math.isnan(value) else f"{value:.1f}", number=True)


def _benign(group: Group) -> bool:
    return group.config.attack != "none" and group.config.attackers != "redrawn"


# ---------------------------------------------------------------- what the numbers are numbers of


def _notes(groups: Sequence[Group], rules: Sequence[str], tests: dict[int, Paired], metric: str | None) -> list[str]:
    seeds = sorted({s for g in groups for s in g.asked})
    over = f"mean ± standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    if metric is None:
        notes = [
            f"{over}; macro: mean over clients, micro: over test samples; sent: down and up, all rounds",
            "wall s: seconds from preparing a run to its result, evaluation and writing included; rounds s: of "
            "those, training and the server's work",
        ]
    else:
        when, key = METRICS[metric]
        what = {
            "macro": "the mean over clients (macro)",
            "micro": "the share of right answers (micro)",
            "worst_decile": "the mean of the worst tenth of the clients",
        }[key]
        at = "after the last round" if when == "last" else "at the round with the best micro accuracy"
        notes = [f"{over}; in the cells {what} {at}"]
    notes += [*_threat(groups), *_elsewhere(groups), *_broken(groups)]
    if len(rules) == 1 and rules[0] != "mean":
        notes.append(f"rule: {rules[0]}")
    if metric not in (None, "macro"):
        notes += [f"no stars: {why}" for why in dict.fromkeys(t.why for t in tests.values() if t.over is None)]
    if any(t.p_holm < SIGNIFICANT for t in tests.values()):
        notes.append(f"* differs from {next(iter(tests.values())).baseline}, p < {SIGNIFICANT:g} (Wilcoxon, Holm)")
    return notes


def _elsewhere(groups: Sequence[Group]) -> list[str]:
    """Methods whose models are what local training makes of them, evaluated before it."""
    own = dict(METHODS.items())
    found = dict.fromkeys(
        g.config.method
        for g in groups
        if g.points == ["received"] and g.config.method in own and own[g.config.method].eval_point != "received"
    )
    said = {"fedavg-ft": "fedavg-ft as received is fedavg"}
    before = "is evaluated before the local training that makes its models"
    return [
        f"{said.get(m, f'{m} {before}')}: --eval-point after_local evaluates all methods after local training, auto "
        "each at its own point"
        for m in found
    ]


def _broken(groups: Sequence[Group]) -> list[str]:
    """Which runs diverged, by reason."""
    who: dict[str, list[str]] = {}
    for group in groups:
        rule = "" if group.config.rule == "mean" else group.config.rule
        where = ", ".join(part for part in (group.column, rule) if part)
        for seed, why in group.diverged.items():
            who.setdefault(why, []).append(f"{group.row}{f' ({where})' if where else ''} seed {seed}")
    return [f"diverged: {', '.join(names)}: {why}" for why, names in who.items()]


def _threat(groups: Sequence[Group]) -> list[str]:
    """How many are malicious, and whose accuracy is shown."""
    found = []
    for group in groups:
        if group.config.attack == "none" or not group.outcomes:
            continue
        clients = len(group.outcomes[0].per_client)
        if _benign(group):
            bad = len(group.outcomes[0].malicious)
            whose = f"accuracy of the {clients - bad} benign ones only"
            if any(g.config.attack == "none" for g in groups):
                whose += f" (no attack: of all {clients})"
        else:
            bad = int(group.config.malicious * clients + 1e-9)
            whose = "others every round; accuracy of all clients"
        found.append(f"under attack {bad} of {clients} clients are malicious; {whose}")
    return list(dict.fromkeys(found))


def _test_notes(groups: Sequence[Group], tests: dict[int, Paired]) -> list[str]:
    if not tests:
        return []
    made = [t for t in tests.values() if t.over is not None]
    notes = []
    for over in dict.fromkeys(t.over for t in made):
        counts = sorted({t.n for t in made if t.over == over})
        n = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
        mine = f"{TITLES[made[0].metric]} accuracy of each seed"
        how = "each client's accuracy averaged over the seeds" if over == "clients" else mine
        notes.append(
            f"against {made[0].baseline}: Wilcoxon signed-rank test over {over}, two-sided, {n} pairs "
            f"({how}); p (Holm): corrected for {len(made)} tests"
        )
    notes += list(dict.fromkeys(t.why for t in made if t.why))
    for why in dict.fromkeys(t.why for t in tests.values() if t.over is None):
        who = [
            f"{groups[i].row}{f' ({groups[i].column})' if groups[i].column else ''}"
            for i, t in tests.items()
            if t.over is None and t.why == why
        ]
        notes.append(f"no test for {', '.join(who)}: {why}")
    return notes


# ---------------------------------------------------------------- written out


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


TEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    '"': "''",
}


def _tex(text: str) -> str:
    return "".join(TEX.get(c, c) for c in " ".join(text.split()))


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
    rows = summary(groups, baseline, metric)
    settings = list(dict.fromkeys(k for r in rows for k in r["settings"] if k != "attack"))
    measures = [m.replace("-", "_") for m in METRICS] + ["std", "megabytes", "seconds", "wall"]
    head = [
        "method",
        "options",
        "attack",
        "rule",
        *settings,
        "seeds",
        "missing_seeds",
        "eval_point",
        "benign_only",
        *(f"{m}_{part}" for m in measures for part in ("mean", "std")),
        *(f"{part}_mean" for part in PARTS),
        "best_rounds",
        "diverged_seeds",
        "diverged",
    ]
    tests = ["baseline", "metric", "over", "n", "p", "p_holm", "difference", "why"] if baseline is not None else []
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*head, *(f"paired_{t}" for t in tests)])
    for r in rows:
        options = ";".join(f"{k}={v}" for k, v in r["options"].items())
        writer.writerow(
            [
                r["method"],
                options,
                r["attack"],
                r["rule"],
                *(r["settings"].get(k, "") for k in settings),
                _joined(r["seeds"]),
                _joined(r["missing"]),
                r["eval_point"],
                r["benign_only"],
                *(_exact(r[m][part]) for m in measures for part in ("mean", "std")),
                *(_exact(r["times"][part]["mean"]) for part in PARTS),
                _joined(r["best_rounds"]),
                " ".join(r["diverged"]),
                " | ".join(dict.fromkeys(r["diverged"].values())),
                *(_exact((r["paired"] or {}).get(t, "")) for t in tests),
            ]
        )
    return file.getvalue()


def _joined(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def _exact(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def write(path: str | Path, text: str) -> Path:
    """A text file, its folder made if need be."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror or error}") from None
    return target


__all__ = ["Entry", "Sheet", "comma_separated", "latex", "markdown", "paired_sheet", "sheet", "write"]
