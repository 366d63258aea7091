"""What follows from the records of tables: which numbers are close, which method is best, which claims hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedkin.papers.measures import metric_of
from fedkin.papers.table_records import Record

POINTS, SHARE = 2.0, 0.2  # what counts as close: points of a percentage, else a share of the paper's number
TIE = 0.05  # numbers this close are equal when best methods are compared: tables print two digits
LEVEL = 1.0  # points between two methods that a few seeds do not tell apart
SEEDS = 3  # so many at least make a number that counts strictly


def measured(record: Record) -> list[Record]:
    return [c for c in record["cells"] if c["ours"] is not None]


def comparable(record: Record) -> list[Record]:
    """Cells with a number of ours and of the paper's (a multiple of itself is no comparison)."""
    return [c for c in measured(record) if close(c) is not None]


def _is_reference(cell: Record) -> bool:
    return bool(cell["unit"] == "times" and cell["paper"] == 1.0 and cell["ours"] == 1.0)


def repeated(record: Record, cell: Record) -> tuple[Any, ...]:
    """What makes two cells one number that a paper prints twice: the same settings, metric and printed number. That two
    values happen to be equal does not."""
    return (record["paper"], cell["settings"], cell["metric"], cell["paper"])


def distinct(records: Iterable[Record]) -> list[Record]:
    """The cells that can be compared, a number that a paper repeats once: with most seeds, then with its note."""
    found: dict[tuple[Any, ...], Record] = {}
    for record in records:
        for cell in comparable(record):
            key = repeated(record, cell)
            if key not in found or _worth(cell) > _worth(found[key]):
                found[key] = cell
    return list(found.values())


def _worth(cell: Record) -> tuple[int, bool]:
    return len(cell["seeds"]), bool(cell["note"])


def difference(cell: Record) -> float | None:
    return None if cell["ours"] is None or cell["paper"] is None else float(cell["ours"] - cell["paper"])


def close(cell: Record) -> bool | None:
    """Within two points of the paper, or a fifth where the number is no percentage; None where nothing can be said."""
    gap = difference(cell)
    if gap is None or cell.get("quick") or _is_reference(cell):
        return None
    return abs(gap) <= tolerance(cell) + 1e-9


def tolerance(cell: Record) -> float:
    return POINTS if cell["unit"] == "%" else SHARE * abs(float(cell["paper"]))


def by_chance(cell: Record) -> bool:
    """Whether the seeds are too far apart for their mean to be close or not: its standard error is beyond what counts
    as close."""
    return cell["std"] is not None and cell["std"] / math.sqrt(len(cell["seeds"])) > tolerance(cell)


def nothing_lost(cell: Record) -> bool:
    """Whether the paper's loss does not occur here: the paper prints more than a point, ours is no more than one, which
    a few seeds do not tell from none. A small loss is close to none without anything being reproduced."""
    is_loss = cell["lower"] and not metric_of(cell["metric"]).lower
    return bool(is_loss and cell["unit"] == "%" and abs(cell["ours"]) <= LEVEL < cell["paper"])


def sound(cell: Record) -> bool:
    """Whether a comparison counts strictly: the reading of the paper was fixed before measuring, there are three seeds
    and they lie near each other, there is something to reproduce, and nothing that can move it has changed since."""
    few = len(cell["seeds"]) < SEEDS
    return not (cell["reading"] or few or by_chance(cell) or nothing_lost(cell) or cell.get("since"))


@dataclass(frozen=True)
class Count:
    """How many of some numbers are close. `close` = `chosen` + `nothing` + `chance` + `few` + `older` + `strict`."""

    compared: int
    close: int
    chosen: int  # close under a reading chosen after measuring
    nothing: int  # close to a loss that does not occur here
    chance: int  # close in the mean of seeds that are far apart
    few: int  # close with fewer than three seeds
    older: int  # close as made before a change that can move it
    strict: int
    sound: int  # close or not, as many as could have counted strictly


def count(cells: Sequence[Record]) -> Count:
    hits = [c for c in cells if close(c)]
    kinds = [_kind(c) for c in hits]
    kept = ("chosen", "nothing", "chance", "few", "older", "strict")
    chosen, nothing, chance, few, older, strict = map(kinds.count, kept)
    return Count(len(cells), len(hits), chosen, nothing, chance, few, older, strict, sum(map(sound, cells)))


def _kind(cell: Record) -> str:
    if cell["reading"]:
        return "chosen"
    if nothing_lost(cell):
        return "nothing"
    if by_chance(cell):
        return "chance"
    return "few" if len(cell["seeds"]) < SEEDS else "older" if cell.get("since") else "strict"


def rankings(record: Record) -> list[dict[str, Any]]:
    """For every line across the methods (and group of them): whether the best method is the paper's, else whether that
    one is level with ours, whether all are judged at the same point, and Kendall's tau, over the methods that have both
    numbers. Only where there are two."""
    if record["methods"] == "none":
        return []
    found = []
    for place, cells in _lines(record):
        both = {n: c for n, c in cells.items() if c["paper"] is not None and c["ours"] is not None}
        if len(both) < 2 or len({(c["metric"], c["unit"]) for c in both.values()}) > 1:
            continue
        sign = -1.0 if next(iter(both.values()))["lower"] else 1.0
        ours, theirs = ({n: sign * c[key] for n, c in both.items()} for key in ("ours", "paper"))
        best = [max(side, key=lambda n, side=side: side[n]) for side in (ours, theirs)]  # type: ignore[misc]
        agrees = ours[best[1]] >= ours[best[0]] - TIE
        level = not agrees and _level(both[best[0]], both[best[1]])
        found.append(
            {
                "line": place,
                "methods": len(both),
                "ours": best[0],
                "paper": best[1],
                "agrees": agrees,
                "level": level,
                "mixed": len({c["judged"] for c in both.values()}) > 1,
                "tau": kendall(list(ours.values()), list(theirs.values())),
            }
        )
    return found


def _level(a: Record, b: Record) -> bool:
    return bool(a["unit"] == "%" and abs(a["ours"] - b["ours"]) <= LEVEL)


def _lines(record: Record) -> Iterator[tuple[str, dict[str, Record]]]:
    """The cells to be compared with each other: by name of the method, for every line and group of methods."""
    across, along = ("column", "row") if record["methods"] == "rows" else ("row", "column")
    kinds = record["rows"] if record["methods"] == "rows" else record["columns"]
    at = {(c[across], c[along]): c for c in record["cells"]}
    for line in record["columns"] if record["methods"] == "rows" else record["rows"]:
        for group in dict.fromkeys(k["group"] for k in kinds):
            cells = {
                k["name"]: at[line["title"], k["title"]]
                for k in kinds
                if k["group"] == group and (line["title"], k["title"]) in at
            }
            if cells:
                yield f"{group} {line['title']}".strip(), cells


def kendall(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Kendall's tau-b; None where one side is all ties."""
    pairs = [(i, j) for i in range(len(a)) for j in range(i)]
    agree = sum(_sign(a[i] - a[j]) * _sign(b[i] - b[j]) for i, j in pairs)
    untied = [sum(_sign(s[i] - s[j]) != 0 for i, j in pairs) for s in (a, b)]
    return agree / math.sqrt(untied[0] * untied[1]) if all(untied) else None


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def verdicts(record: Record) -> list[dict[str, Any]]:
    """Each check of the table: in how many of its comparisons it holds, where it does not, and how many of them are at
    one seed (`single`), between models judged at different points (`mixed`), of a reading chosen after measuring
    (`chosen`) or of numbers made before a change that can move them (`older`)."""
    return [_verdict(record, check) for check in record["checks"]]


def _verdict(record: Record, check: Mapping[str, Any]) -> dict[str, Any]:
    told = Counter(dict.fromkeys(("held", "unknown", "level", "single", "mixed", "chosen", "older"), 0))
    broken = []
    for place, left, right in _compared(record, check):
        both = [left] if right is None else [left, right]
        if any(c["ours"] is None for c in both):
            told["unknown"] += 1
            continue
        told["single"] += min(len(c["seeds"]) for c in both) == 1
        told["chosen"] += any(c["reading"] for c in both)
        told["older"] += any(bool(c.get("since")) for c in both)
        told["mixed"] += len({c["judged"] for c in both}) > 1
        if _holds(check, left, right):
            told["held"] += 1
        else:
            broken.append(place)
            told["level"] += right is not None and not check["by"] and _level(left, right)
    tested = told["held"] + len(broken)
    holds = None if not tested else not broken
    return {
        "says": check["says"],
        **told,
        "of": tested,
        "broken": broken,
        "holds": holds,
        "found": check.get("found", ""),
    }


def _compared(record: Record, check: Mapping[str, Any]) -> Iterator[tuple[str, Record, Record | None]]:
    for place, cells in _lines(record if record["methods"] != "none" else {**record, "methods": "rows"}):
        line = next(iter(cells.values()))["row" if record["methods"] == "columns" else "column"]
        if check["where"] and line not in check["where"] and place not in check["where"]:
            continue
        left = cells.get(check["left"]) or next((c for c in cells.values() if check["left"] == c["row"]), None)
        if left is None:
            continue
        if not check["right"]:
            yield place, left, None
            continue
        wanted = [n for n in cells if cells[n] is not left] if "*" in check["right"] else check["right"]
        for name in wanted:
            if name in cells:
                yield f"{place}: {name}", left, cells[name]


def _holds(check: Mapping[str, Any], left: Record, right: Record | None) -> bool:
    if right is None:
        if check.get("target") is not None:
            return bool(abs(left["ours"] - check["target"]) <= check["within"] + 1e-9)
        return bool(left["ours"] >= check["at_least"] - 1e-9)
    gap = left["ours"] - right["ours"]
    if check["within"] is not None:
        return bool(abs(gap) <= check["within"])
    return bool((-gap if left["lower"] else gap) >= check["by"])


def summary(record: Record) -> dict[str, Any]:
    """A table in a few numbers."""
    both, ranks, checks = comparable(record), rankings(record), verdicts(record)
    taus = [r["tau"] for r in ranks if r["tau"] is not None]
    return {
        "cells": len(record["cells"]),
        "measured": len(measured(record)),
        "compared": len(both),
        "close": sum(bool(close(c)) for c in both),
        "lines": len(ranks),
        "best_agrees": sum(r["agrees"] for r in ranks),
        "best_level": sum(r["level"] for r in ranks),
        "best_mixed": sum(r["mixed"] for r in ranks),
        "tau": sum(taus) / len(taus) if taus else None,
        "checks": len([c for c in checks if c["holds"] is not None]),
        "hold": sum(c["holds"] is True for c in checks),
    }
