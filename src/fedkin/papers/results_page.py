"""The pages that are made from the files in `results/`: RESULTS.md and docs/natural.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fedkin.errors import DataError
from fedkin.papers import natural
from fedkin.papers.markdown import (
    DAGGER,
    limits_of,
    markdown,
    plain_text,
    readings,
    table_of,
    tau_text,
    unmeasured,
    wrapped,
)
from fedkin.papers.result_files import read_all, write_text
from fedkin.papers.table_records import Record
from fedkin.papers.verdicts import close, comparable, count, difference, distinct, measured, sound, summary, verdicts

MADE = "<!-- made by `fedkin reproduce --render` from the files in results/: edit those -->"
INTRODUCTION = (
    "FedKin holds the tables of five papers on personalised federated learning as data. This page compares the "
    "numbers that FedKin measures with the numbers that the papers print. It begins with what came out: how many "
    "numbers agree, and what holds in each paper. Then it says how the numbers are counted. After that comes every "
    "table of which something was measured.",
    "How to read a table: each cell shows our number (± standard deviation over seeds), the paper's number, and the "
    "difference between them. ✓ means that ours is close to the paper's: within two points, or within a fifth where "
    "the number is not a percentage. ✗ means that it is further off, and – that it was not measured. A cell without ± "
    "comes from one seed; differences of a point or less between methods mean nothing there.",
)
OLDER = (
    f"{DAGGER} marks a number that was made before a change in FedKin that can move it; a remark below the table names "
    "the change."
)
COUNTED = (
    "A number counts once, however many tables of a paper print it (the same settings, metric and printed number; two "
    "numbers that merely have the same value count twice). A close number counts *strictly* if all of this holds: the "
    "way in which the paper is read was fixed before measuring; there are three seeds or more; the standard error over "
    "them is no more than what counts as close; there is something to reproduce; and nothing that can move the number "
    "has changed in FedKin since."
)
NATURAL = (
    "Most tables of the papers divide one data set among the clients by its classes. Which method to choose is another "
    "question where each client is a real person with data of their own. [docs/natural.md](docs/natural.md) answers it "
    "with all methods at both points of evaluation."
)
LEADS = (
    "All numbers are accuracies in percent: the mean over clients, ± standard deviation over seeds. Each method is "
    "represented by its better point of evaluation. A lead is the mean ± deviation of the difference at the same "
    "seeds. A lead that is no larger than its deviation does not count, and of the methods that are level the simplest "
    "is the one to try first."
)
YOUR_OWN = (
    "You can ask the same question of your own data: put them in place of `digits` ([your data](your-data.md)). "
    "`eval_point` says when models are evaluated. Local and FedAvg-FT are cheap to try, and a personal method has to "
    "beat them."
)
EXAMPLE = """
```python
import fedkin as fk

results, table = fk.compare(["local", "fedavg-ft", "fedper"], data="digits", rounds=3, lr=0.05, seeds=2)
print(table)
```
"""


def write_results_page(folder: str | Path, page: str | Path) -> Path:
    return write_text(Path(page), results_page(read_all(folder)))


def write_natural_page(folder: str | Path, page: str | Path) -> Path:
    return write_text(Path(page), natural_page(read_all(folder)))


def _apart(*texts: str) -> Iterator[str]:
    """Paragraphs, each followed by an empty line; empty ones are left out."""
    for text in filter(None, texts):
        yield from (wrapped(text), "")


def _listed(heading: str, items: Sequence[str]) -> list[str]:
    return [*_apart(heading), *(wrapped(item, "- ") for item in items), ""] if items else []


def _kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [r for r in records if r["kind"] == kind]


# ------------------------------------------------------------ RESULTS.md


def results_page(records: Sequence[Record]) -> str:
    """All of RESULTS.md."""
    tables, claims, people = (_kind(records, kind) for kind in ("table", "claim", "comparison"))
    older = any(c.get("since") for r in records for c in measured(r))
    lines = ["# Results on real data", "", MADE, "", *_apart(*INTRODUCTION, OLDER if older else "")]
    lines += ["## What came out", "", *_headline(tables), *_by_paper(tables), "", *_found(tables)]
    if people:
        lines += [f"## {people[0]['paper_title']}", "", *_apart(NATURAL), *natural.overview(people), ""]
        lines += _apart(natural.plainly(people))
    lines += ["## How the numbers are counted", "", *_apart(COUNTED, *_kinds_of_close(tables)), *_how_read(tables)]
    lines += ["## All tables at a glance", "", *_by_table(tables), ""]
    if claims:
        answers = [(f"{r['title']}: {v['says']}", v) for r in claims for v in verdicts(r)]
        rows = ((plain_text(says), _answer(verdict)) for says, verdict in answers)
        lines += ["## Claims beyond the tables", "", *table_of(["claim", "holds"], rows, left=2), ""]
    for paper in dict.fromkeys(r["paper"] for r in (*tables, *claims)):
        mine = [r for r in records if r["paper"] == paper]
        lines += [f"## {mine[0]['paper_title']}", "", *_apart(f"{mine[0]['cite']}. {mine[0]['paper_about']}")]
        lines += [markdown(record, 3, everything=False) for record in mine if measured(record)]
        idle = [f"{r['title']}: {unmeasured(r)[0]}" for r in mine if not measured(r)]
        lines += _listed("Nothing has been measured yet of:", idle)
    return "\n".join(lines).rstrip() + "\n"


def _headline(records: Sequence[Record]) -> Iterator[str]:
    """How many numbers come out, counted generously and strictly."""
    cells = distinct(records)
    found, total = count(cells), _added(records)
    told = sum(close(c) is False and bool(c["note"]) for c in cells)
    return _apart(
        f"**{found.close} of {found.compared}** numbers that can be compared are close to the paper's"
        f"{_share(found.close, found.compared)}. Counted strictly it is **{found.strict} of {found.compared}**"
        f"{_share(found.strict, found.compared)}; many numbers have too few seeds for that, or needed a guess about "
        f"what the paper does. {found.sound} numbers meet the strict conditions, close or not, and of these "
        f"{found.strict} are close{_share(found.strict, found.sound)}.",
        f"Of the {found.compared - found.close} numbers that are not close, {told} have a remark below their table: "
        "where the difference comes from, or that this is not known. The best of the measured methods is the paper's "
        f"best in **{total['best_agrees']} of {total['lines']}** rows or columns that compare methods. In "
        f"{total['best_level']} more, the paper's best is within a point of ours, and a few seeds cannot tell them "
        f"apart. In {total['best_mixed']} of the {total['lines']}, methods are evaluated at different points, because "
        "the papers do so or because their numbers are read so; each table says at which. "
        f"{total['measured']} of {total['cells']} cells are measured.",
    )


def _kinds_of_close(records: Sequence[Record]) -> list[str]:
    """What the numbers are that are close but do not count strictly."""
    cells = distinct(records)
    found = count(cells)
    rates = sum(c["metric"] in ("dacc", "fpr", "fnr") and bool(close(c)) and sound(c) for c in cells)
    return [
        f"The other {found.close - found.strict} numbers that are close: {found.chosen} under a reading chosen after "
        f"measuring because it fits; {found.nothing + found.chance} that reproduce nothing ({found.nothing} where the "
        f"paper loses more than a point and we lose no more than one, and {found.chance} where the mean is close by "
        f"chance, since its seeds are far apart); {found.few} with fewer than three seeds; and {found.older} made "
        f"before a change in FedKin that can move them ({DAGGER}).",
        f"Of the numbers that count strictly, {rates} are detection rates. There are three of them for each attack, of "
        "which the first follows from the other two."
        if rates
        else "",
    ]


def _share(part: int, total: int) -> str:
    return f" ({100 * part / total:.0f} %)" if total else ""


def in_short(records: Sequence[Record]) -> str:
    """The headline in a few sentences, as the README has it."""
    found = count(distinct(_kind(records, "table")))
    return (
        f"{found.close} of the {found.compared} numbers that can be compared are close to the paper's (within two "
        f"points, or within a fifth where the number is not a percentage). {found.strict} of these meet strict "
        "conditions: the paper was read in one way before measuring, and there are three seeds or more with a small "
        f"spread. Of the others, {found.chosen} depend on a reading that was chosen because it fits, "
        f"{found.nothing + found.chance} do not show anything, {found.few} have fewer than three seeds, and "
        f"{found.older} were measured before a later change in FedKin that can move them"
    )


def _by_paper(records: Sequence[Record]) -> list[str]:
    kinds = ("strictly", "chosen reading", "reproduce nothing", "fewer than 3 seeds", "older")
    rows = []
    for paper in dict.fromkeys(r["paper"] for r in records):
        mine = [r for r in records if r["paper"] == paper]
        cells = distinct(mine)
        if cells:
            found, gaps = count(cells), [abs(difference(c) or 0.0) for c in cells if c["unit"] == "%"]
            parts = (found.strict, found.chosen, found.nothing + found.chance, found.few, found.older)
            half = f"{median(gaps):.1f} points" if gaps else "–"
            rows.append([paper, f"{found.close} of {found.compared}", *parts, half, _best_text(_added(mine))])
    return table_of(["paper", "close", *kinds, "median difference", "best method agrees"], rows)


def _found(records: Sequence[Record]) -> list[str]:
    """What came out of each paper that something was measured of, in words."""
    papers = {r["paper"]: r for r in records if measured(r) and r.get("paper_found")}
    mine = {name: [r for r in records if r["paper"] == name] for name in papers}
    items = [f"**{p}** ({r['cite']}): {filled(r['paper_found'], mine[p])}" for p, r in papers.items()]
    return _listed("Where the papers hold, and where they do not:", items)


NUMBER = re.compile(r"\{(close|ours|paper):([^:{}]+)(?::([^:{}]+))?(?::([^:{}]+))?\}")


def filled(text: str, records: Sequence[Record]) -> str:
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
    chosen: dict[str, list[str]] = {}
    for record in records:
        for text, places in readings(record).items():
            some = count([c for c in comparable(record) if c["reading"] == text])
            said = f"{record['title'].partition(':')[0]}, {places}: {some.close} of {some.compared} close"
            chosen.setdefault(f"{record['paper']}: {text}", []).append(said)
    settled = {text: r["paper"] for r in records for text in r.get("paper_settled", ())}
    return [
        *_listed(
            "Papers leave things open. These readings were chosen after measuring, because they fit the paper's "
            "numbers; their numbers are counted apart:",
            [f"{text} ({'; '.join(at)})" for text, at in chosen.items()],
        ),
        *_listed(
            "These readings were settled when some numbers had been measured already, but by the paper's words or by "
            "the authors' code; their numbers count as all others do:",
            [f"{paper}: {text}" for text, paper in settled.items()],
        ),
    ]


def _by_table(records: Sequence[Record]) -> list[str]:
    heads = ("table", "measured", "close", "strictly", "best method agrees", "Kendall's tau", "claims that hold")
    rows, idle = [], []
    for record in records:
        facts, found = summary(record), count(comparable(record))
        if not facts["measured"]:
            idle.append(f"{record['paper']} {record['table']}")
            continue
        near = (f"{found.close} of {found.compared}", found.strict) if found.compared else ("–", "–")
        claims = f"{facts['hold']} of {facts['checks']}" if facts["checks"] else "–"
        name, done = plain_text(f"{record['paper']}, {record['title']}"), f"{facts['measured']} of {facts['cells']}"
        rows.append((name, done, *near, _best_text(facts), tau_text(facts["tau"]), claims))
    more = ["", wrapped(f"Nothing has been measured yet of: {', '.join(idle)}.")] if idle else []
    return [*table_of(heads, rows), *more]


def _added(records: Sequence[Record]) -> dict[str, int]:
    keys, sums = ("cells", "measured", "lines", "best_agrees", "best_level", "best_mixed"), [*map(summary, records)]
    return {k: sum(s[k] for s in sums) for k in keys}


def _best_text(found: dict[str, Any]) -> str:
    level = f", {found['best_level']} level" if found["best_level"] else ""
    return f"{found['best_agrees']} of {found['lines']}{level}" if found["lines"] else "–"


def _answer(verdict: dict[str, Any]) -> str:
    if verdict["holds"] is None:
        return "not tested yet"
    more = "".join(f", {text}" for text in limits_of(verdict))
    found = f"; {verdict['found']}" if verdict["found"] and not verdict["holds"] else ""
    return f"{'**yes**' if verdict['holds'] else '**no**'} ({verdict['held']} of {verdict['of']}{more}){found}"


# ------------------------------------------------------------ docs/natural.md


def natural_page(records: Sequence[Record]) -> str:
    """All of docs/natural.md."""
    people = _kind(records, "comparison")
    lines = ["# Natural federations: which method to try first", "", MADE.replace("results/", "results/natural"), ""]
    lines += [*_apart(people[0]["paper_about"] if people else ""), *natural.overview(people), ""]
    lines += _apart(natural.plainly(people), LEADS)
    lines += [markdown(record, 2) for record in (*people, *_kind(records, "choice"))]
    lines += ["## For your own clients", "", wrapped(YOUR_OWN), EXAMPLE.rstrip()]
    return "\n".join(lines).rstrip() + "\n"
