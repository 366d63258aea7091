"""What a comparison of methods says to somebody who has to choose one: which to try first, and how far it is ahead.

The tables are those of kind "comparison" (`natural.toml`). Their rows are methods, from the simplest to the most
elaborate. Their columns are points of evaluation, and each method is represented by its better one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from fedkin.papers.table_records import Record
from fedkin.papers.verdicts import measured

BASELINE = "FedAvg-FT"
FIVE = ("PFedCS", "FedPKDA", "FedCAP", "C-PFL", "CO-PFL")  # the papers that FedKin holds the tables of
COUNTED = "macro"
OWN_RATE = "CO-PFL"  # the one method whose rate was chosen for itself
RATES = (
    f"{OWN_RATE}'s learning rate was chosen for {OWN_RATE} (with Adam, the best of four), that of the others for "
    "FedAvg as received (with SGD, the best of five). How much of its lead comes from that is not measured."
)


@dataclass(frozen=True)
class Entry:
    """A method at its better point of evaluation: percent by seed."""

    name: str
    judged: str
    values: dict[int, float]

    @property
    def mean(self) -> float:
        return mean(self.values.values())

    @property
    def text(self) -> str:
        spread = f" ± {stdev(self.values.values()):.1f}" if len(self.values) > 1 else " (one seed)"
        return f"{self.mean:.1f}{spread}"


@dataclass(frozen=True)
class Lead:
    """How far one method is ahead of another at the seeds that both have; `spread` is the deviation of the difference
    over these seeds, and None at one seed."""

    by: float
    spread: float | None
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether it is more than the spread. One seed tells nothing."""
        return self.spread is not None and self.by > self.spread

    @property
    def text(self) -> str:
        sign = f"{self.by:+.1f}".replace("-", "−")
        return f"{sign} ± {self.spread:.1f}" if self.spread is not None else f"{sign} (one seed)"


def entries(record: Record) -> list[Entry]:
    """Every measured method by its better point of evaluation, in the order of the table."""
    found: dict[str, Entry] = {}
    for cell in measured(record):
        if cell["metric"] == COUNTED:
            entry = Entry(cell["row"], cell["judged"], dict(zip(cell["seeds"], cell["values"], strict=True)))
            if entry.name not in found or entry.mean > found[entry.name].mean:
                found[entry.name] = entry
    return list(found.values())


def lead(one: Entry, other: Entry) -> Lead:
    gaps = [value - other.values[seed] for seed, value in one.values.items() if seed in other.values]
    if not gaps:
        return Lead(one.mean - other.mean, None, 0)
    return Lead(mean(gaps), stdev(gaps) if len(gaps) > 1 else None, len(gaps))


@dataclass(frozen=True)
class Advice:
    best: Entry
    level: list[Entry]  # the best and those that it is not clearly ahead of, in the order of the table
    baseline: Entry | None
    five: list[Entry]  # the papers' methods, best first

    @property
    def first(self) -> Entry:
        """The simplest of those that are level."""
        return self.level[0]

    @property
    def ahead(self) -> list[Entry]:
        """The papers' methods that are clearly ahead of the baseline, best first."""
        return [e for e in self.five if self.baseline and lead(e, self.baseline).clear]


def advice(record: Record) -> Advice | None:
    """None where nothing is measured yet."""
    found = entries(record)
    if not found:
        return None
    best = max(found, key=lambda e: e.mean)
    level = [e for e in found if e is best or not lead(best, e).clear]
    baseline = next((e for e in found if e.name == BASELINE), None)
    return Advice(best, level, baseline, sorted((e for e in found if e.name in FIVE), key=lambda e: -e.mean))


def said(record: Record) -> str:
    """The advice of one table, in words."""
    found = advice(record)
    if found is None:
        return "Nothing measured yet."
    best, first = found.best, found.first
    names = ", ".join(e.name for e in found.level if e is not best)
    others = sorted((e for e in entries(record) if e is not best and e.name != best.name), key=lambda e: -e.mean)
    alone = " (one seed tells nothing)" if all(len(e.values) == 1 for e in entries(record)) else ""
    text = f"Try {first.name} first ({first.text}, {first.judged})"
    if names and first is best:
        text += f": it has the highest mean and is the simplest of those that are level with it{alone} ({names})."
    elif names:
        text += (
            f". {best.name} has the highest mean ({best.text}, {best.judged}), but is ahead of {names} by no more than "
            f"the spread over seeds{alone}; {first.name} is the simplest of them."
        )
    else:
        gap = f"{lead(best, others[0]).text} points at the same seeds" if others else ""
        text += f": it is ahead of the next, {others[0].name}, by {gap}." if others else "."
    favoured = OWN_RATE in {best.name, first.name, *(e.name for e in found.ahead)}
    return " ".join(filter(None, (text, _against_the_baseline(found), RATES if favoured else "")))


def _against_the_baseline(found: Advice) -> str:
    base = found.baseline
    if base is None or not found.five:
        return ""
    best, names = found.five[0], ", ".join(e.name for e in found.ahead)
    told = f"{best.name} {best.text}, {best.judged}: {lead(best, base).text} points against {BASELINE}'s {base.text}"
    if not names:
        return f"None of the five papers' methods is ahead of {BASELINE} by more than the spread (the best is {told})."
    return f"Of the five papers' methods {names} {'are' if ',' in names else 'is'} ahead of {BASELINE} ({told})."


def overview(records: Sequence[Record]) -> list[str]:
    """One line of a Markdown table for each federation."""
    lines = [
        f"| federation | try first | {BASELINE} | Local | best of the five papers' | its lead over {BASELINE} |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in records:
        found, shown = advice(record), ["not measured yet", "–", "–", "–", "–"]
        if found is not None:
            local = [e.text for e in entries(record) if e.name == "Local"]
            base, five = found.baseline, found.five[:1]
            gaps = [lead(e, base).text for e in five if base]
            columns = [[_named(found.first)], [base.text] if base else [], local, [_named(e) for e in five], gaps]
            shown = [column[0] if column else "–" for column in columns]
        lines.append(f"| {record['title']} | {' | '.join(shown)} |")
    return lines


def plainly(records: Sequence[Record]) -> str:
    """How the five papers' methods do against the baseline, over all federations that are measured."""
    found = [a for a in map(advice, records) if a is not None and a.baseline is not None and a.five]
    if not found:
        return ""
    none = sum(not a.ahead for a in found)
    rates = f" {RATES}" if any(e.name == OWN_RATE for a in found for e in a.five) else ""
    return (
        f"In {none} of {len(found)} federations none of the five papers' methods ({', '.join(FIVE)}) is ahead of "
        f"{BASELINE} by more than the spread over seeds. ({BASELINE} is FedAvg's model, which each client trains "
        f"further on its own data.){rates}"
    )


def _named(entry: Entry) -> str:
    return f"{entry.name}, {entry.text}"
