"""What a comparison of methods says to somebody who has to choose one: which to take first, and how far it is ahead.

The tables are those of kind "comparison" (`natural.toml`): rows are methods, from the simplest to the most elaborate;
columns are points of evaluation, of which each method counts by its better one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from fedkin.papers.verdicts import Record, measured

BASELINE = "FedAvg-FT"
FIVE = ("PFedCS", "FedPKDA", "FedCAP", "C-PFL", "CO-PFL")  # the papers that FedKin holds the tables of
COUNTED = "macro"
OWN_RATE = "CO-PFL"  # the one method whose rate was chosen for itself
RATES = (
    f"{OWN_RATE}'s rate was chosen for it (Adam, the best of four), the others' for FedAvg as received (SGD, the "
    "best of five): how much of its lead it owes to that is not measured."
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
    """How far one method is ahead of another at the seeds that both have; `spread`: the deviation of the difference
    over these seeds, None at one seed."""

    by: float
    spread: float | None
    seeds: int

    @property
    def clear(self) -> bool:
        """More than the spread: a lead to count on as far as these seeds go. One seed tells nothing."""
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
    """`first`: the simplest of those that the best one is not clearly ahead of."""

    best: Entry
    level: list[Entry]  # not clearly behind the best, in the order of the table
    first: Entry
    baseline: Entry | None
    five: list[Entry]  # the papers' methods, best first


def advice(record: Record) -> Advice | None:
    """None where nothing is measured yet."""
    found = entries(record)
    if not found:
        return None
    best = max(found, key=lambda e: e.mean)
    level = [e for e in found if e is best or not lead(best, e).clear]
    baseline = next((e for e in found if e.name == BASELINE), None)
    five = sorted((e for e in found if e.name in FIVE), key=lambda e: -e.mean)
    return Advice(best, level, level[0], baseline, five)


def said(record: Record) -> str:
    """The advice of one table, in words."""
    found = advice(record)
    if found is None:
        return "Nothing measured yet."
    best, first = found.best, found.first
    others = [e for e in entries(record) if e.name != best.name]
    if len(found.level) > 1:
        names = ", ".join(e.name for e in found.level if e is not best)
        text = (
            f"Take {first.name} first ({first.text}, {first.judged}). {best.name} has the highest mean "
            f"({best.text}, {best.judged}), but is ahead of {names} by no more than the spread over seeds"
            f"{_seeds(record)}; {first.name} is the simplest of them."
        )
        if first is best:
            text = (
                f"Take {first.name} first ({first.text}, {first.judged}): it has the highest mean and is the "
                f"simplest of those that are level with it{_seeds(record)} ({names})."
            )
    else:
        text = f"Take {best.name} first ({best.text}, {best.judged})"
        if others:
            second = max(others, key=lambda e: e.mean)
            text += f": ahead of the next, {second.name}, by {lead(best, second).text} points at the same seeds"
        text += "."
    favoured = OWN_RATE in {best.name, first.name, *(e.name for e in _ahead(found))}
    return " ".join(filter(None, (text, _against_the_baseline(found), RATES if favoured else "")))


def _ahead(found: Advice) -> list[Entry]:
    """The papers' methods that are clearly ahead of the baseline, best first."""
    return [e for e in found.five if found.baseline and lead(e, found.baseline).clear]


def _seeds(record: Record) -> str:
    return " (one seed tells nothing)" if all(len(e.values) == 1 for e in entries(record)) else ""


def _against_the_baseline(found: Advice) -> str:
    base = found.baseline
    if base is None or not found.five:
        return ""
    ahead, best = _ahead(found), found.five[0]
    told = f"{best.name} {best.text}, {best.judged}: {lead(best, base).text} points against {BASELINE}'s {base.text}"
    if not ahead:
        return f"None of the five papers' methods is ahead of {BASELINE} by more than the spread (the best is {told})."
    names = ", ".join(e.name for e in ahead)
    return f"Of the five papers' methods {names} {'is' if len(ahead) == 1 else 'are'} ahead of {BASELINE} ({told})."


def rates(record: Record) -> dict[tuple[str, str], str]:
    """By federation and method, the rate with the highest accuracy, of a table whose rows are METHOD RATE."""
    found: dict[tuple[str, str], Record] = {}
    for cell in measured(record):
        at = (cell["column"], cell["row"].rpartition(" ")[0])
        if at not in found or cell["ours"] > found[at]["ours"]:
            found[at] = cell
    return {at: cell["row"].rpartition(" ")[2] for at, cell in found.items()}


def overview(records: Sequence[Record]) -> list[str]:
    """One line of a Markdown table for each federation."""
    lines = [
        f"| federation | take first | {BASELINE} | Local | best of the five papers' | its lead over {BASELINE} |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in records:
        found = advice(record)
        if found is None:
            lines.append(f"| {record['title']} | not measured yet | – | – | – | – |")
            continue
        local = next((e for e in entries(record) if e.name == "Local"), None)
        five = found.five[0] if found.five else None
        gap = lead(five, found.baseline).text if five and found.baseline else "–"
        shown: list[Any] = [
            _named(found.first),
            found.baseline.text if found.baseline else "–",
            local.text if local else "–",
            _named(five) if five else "–",
            gap,
        ]
        lines.append(f"| {record['title']} | {' | '.join(shown)} |")
    return lines


def plainly(records: Sequence[Record]) -> str:
    """How the five papers' methods do against the baseline, over all federations that are measured."""
    found = [a for a in map(advice, records) if a is not None and a.baseline is not None and a.five]
    if not found:
        return ""
    none = sum(not _ahead(a) for a in found)
    rates = f" {RATES}" if any(e.name == OWN_RATE for a in found for e in a.five) else ""
    return (
        f"In {none} of {len(found)} federations none of the five papers' methods ({', '.join(FIVE)}) is ahead of "
        f"{BASELINE}, FedAvg's model trained on by each client, by more than the spread over seeds."
        f"{rates}"
    )


def _named(entry: Entry) -> str:
    return f"{entry.name}, {entry.text}"
