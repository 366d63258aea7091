"""Our numbers beside the papers': the record of a table, as it is kept in `results/`, and what follows from it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedkin.config import NOT_IDENTITY, Config
from fedkin.papers.cell_settings import spelled_out
from fedkin.papers.measures import Outcome, metric_of, value_of
from fedkin.papers.plan import Plan, Planned
from fedkin.papers.published import Cell, Line, Paper, Table

Record = dict[str, Any]
Look = Callable[[Config], Outcome | None]

POINTS, SHARE = 2.0, 0.2  # what counts as close: points of a percentage, else a share of the paper's number
TIE = 0.05  # numbers this close are equal when best methods are compared: tables print two digits
LEVEL = 1.0  # points between two methods that a few seeds do not tell apart
SEEDS = 3  # so many at least make a number that counts strictly
JUDGED = {"received": "as received", "after_local": "after local training", "last_round": "as the last round left them"}
NOT_RUN = "not run yet"
CHOICE = re.compile(r"best of \d+: [^;]*")  # in a note: which of several settings the number belongs to
FAILED = re.compile(r"failed: .*")  # and which runs are missing
DEVICE = re.compile(r"[^, ][^,]*(?:, [^,]+)?")  # one of those a cell names: device, precision


# ------------------------------------------------------------ records


def records(plan: Plan, look: Look, failed: Mapping[str, str] | None = None) -> list[Record]:
    """One record per table of the plan, with the planned cells in it."""
    tables = list(dict.fromkeys(p.table for p in plan.cells))
    return [
        {
            **outline(plan.paper, table),
            "quick": plan.quick,
            "cells": [
                {**_filled(plan, p, look, failed or {}), "quick": plan.quick} for p in plan.cells if p.table is table
            ],
        }
        for table in tables
    ]


def outline(paper: Paper, table: Table) -> Record:
    """A table without its cells."""
    return {
        "paper": paper.name,
        "paper_title": paper.title,
        "cite": paper.cite,
        "paper_about": paper.about,
        "paper_found": paper.found,
        "paper_settled": list(paper.settled),
        "table": table.name,
        "title": table.title,
        "kind": table.kind,
        "about": table.about,
        "common": common(table) if table.kind == "comparison" else "",
        "methods": table.methods,
        "rows": [_line(r) for r in table.rows],
        "columns": [_line(c) for c in table.columns],
        "checks": [asdict(c) for c in table.checks],
        "quick": False,
        "cells": [],
    }


COMMON = ("data", "partition", "clients", "participation", "model", "rounds", "epochs", "batch", "optimiser", "lr")


def common(table: Table) -> str:
    """The settings that all cells of a table share, and the options in which its rows leave the methods' own."""
    rows: dict[str, list[Config]] = {}
    for cell in table.cells:
        rows.setdefault(cell.row, []).extend(cell.variants)
    all_ = [config for configs in rows.values() for config in configs]
    shared = [
        f"{key}={_word(getattr(all_[0], key))}" for key in COMMON if len({getattr(config, key) for config in all_}) == 1
    ]
    own = [
        f"{row} {', '.join(f'{k}={v}' for k, v in configs[0].options.items() if _all_have(configs, k, v))}"
        for row, configs in rows.items()
        if any(_all_have(configs, k, v) for k, v in configs[0].options.items())
    ]
    return f"Settings: {', '.join(shared)}. Options that are not the methods' own: {'; '.join(own) or 'none'}."


def _all_have(configs: Sequence[Config], key: str, value: Any) -> bool:
    return all(key in c.options and c.options[key] == value for c in configs)


def _word(value: Any) -> str:
    return "all" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _line(line: Line) -> dict[str, str]:
    return {"group": line.group, "name": line.name, "title": line.title}


def empty(table: Table, cell: Cell, why: str = "") -> Record:
    """A cell that has not been measured, and why."""
    return {
        "row": cell.row,
        "column": cell.column,
        "metric": cell.metric,
        "unit": _unit(cell),
        "lower": _lower(cell),
        "paper": published(table, cell),
        "ours": None,
        "std": None,
        "seeds": [],
        "values": [],
        "rounds": None,
        "command": "",
        "commit": "",
        "device": "",
        "settings": settings_of(cell),
        "judged": judged(cell),
        "reading": cell.reading,
        "note": why or cell.missing or NOT_RUN,
    }


def settings_of(cell: Cell) -> str:
    """What a cell is a number of, in a word: another one when the table's definition changes what is run. Defaults do
    not count, so that a new setting leaves all words as they are."""
    usual = Config().to_dict()
    kept = [
        {k: v for k, v in c.to_dict().items() if k not in (*NOT_IDENTITY, "seed") and v != usual[k]}
        for c in cell.variants
    ]
    text = json.dumps([kept, cell.ratio_to, cell.drop_from], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def former_settings(paper: Paper, cell: Cell) -> set[str]:
    """What numbers may be numbers of that were made under a definition the cell had before."""
    return {settings_of(then) for change in paper.changed if (then := change.before(cell)) is not None}


def changed_since(paper: Paper, cell: Cell, record: Record) -> list[str]:
    """What is done otherwise since a cell was measured."""
    made_by = {word.rstrip("+") for word in record["commit"].split(", ")}
    found = []
    for change in paper.changed:
        then = change.before(cell)
        if change.touches(cell) and (
            made_by.intersection(change.made_by) or (then and record["settings"] == settings_of(then))
        ):
            found.append(change.what)
    return found


def judged(cell: Cell) -> str:
    """When, and by which of its models, a cell's clients are judged; empty where no model is."""
    from fedkin.methods import METHODS

    if not metric_of(cell.metric).judged or any(v.method not in METHODS for v in cell.variants):
        return ""
    found = [_judged(cell.metric, v) for v in cell.variants]
    when = list(dict.fromkeys(w for w, _ in found))
    by = list(dict.fromkeys(m for _, m in found if m))
    text = when[0] if len(when) == 1 else f"the better of {' and '.join(when)}"
    if not by or (len(by) == 1 and not _chosen_output(cell.variants[0])):
        return text
    return f"{text}, by the {by[0]} model" if len(by) == 1 else f"{text}, by the better of {' and '.join(by)} model"


def _judged(metric: str, config: Config) -> tuple[str, str]:
    """When the models of a run are judged, and which of a method's several."""
    from fedkin.methods import METHODS

    settings = spelled_out(config)
    tuned, which = int(settings.get("finetune_epochs", 0)), [str(settings[n]) for n in METHODS[config.method].outputs]
    if tuned and metric == "best_untuned":
        return "before the tuning at the end", ", ".join(which)
    when = f"tuned at the end for {tuned} epochs" if tuned else JUDGED[settings["eval_point"]]
    return when, ", ".join(which)


def _chosen_output(config: Config) -> bool:
    """Whether a run is judged by another of the method's models than usual."""
    from fedkin.methods import METHODS

    return any(name in config.options for name in METHODS[config.method].outputs)


def joined(*notes: str) -> str:
    return "; ".join(dict.fromkeys(n for n in notes if n))


def published(table: Table, cell: Cell) -> float | None:
    """The paper's number, as a multiple of another's where the cell is one."""
    if cell.printed is None or not cell.ratio_to:
        return cell.printed
    base = table.base_of(cell)
    if base is None:
        return 1.0
    return None if not base.printed else cell.printed / base.printed


def _unit(cell: Cell) -> str:
    return "times" if cell.ratio_to else metric_of(cell.metric).unit


def _lower(cell: Cell) -> bool:
    return bool(cell.drop_from) or metric_of(cell.metric).lower


def _filled(plan: Plan, planned: Planned, look: Look, failed: Mapping[str, str]) -> Record:
    table, cell = planned.table, planned.cell
    record = empty(table, cell, planned.why_not)
    best, choice = _best(planned, look)
    errors = [failed[c.identity()] for variant in planned.runs for c in variant if c.identity() in failed]
    trouble = f"failed: {errors[0]}" if errors else ""
    values = {seed: value_of(o, cell.metric) for seed, o in best.items()}
    base = plan.base_of(planned)
    if base is not None:
        others = {seed: value_of(o, cell.metric) for seed, o in _best(base, look)[0].items()}
        pairs = {s: (v, others[s]) for s, v in values.items() if s in others}
        values = {s: v / b if cell.ratio_to else b - v for s, (v, b) in pairs.items() if b or cell.drop_from}
    elif cell.ratio_to:
        values = {s: 1.0 for s, v in values.items() if not math.isnan(v)}
    known = {s: v for s, v in values.items() if math.isfinite(v)}
    if not known:
        reached = f"{cell.metric} has no value in this run" if values else ""
        return {**record, "note": trouble or reached or planned.why_not or NOT_RUN}
    used = [best[s] for s in known]
    return {
        **record,
        **_over_seeds(table, cell, known, plan.quick),
        "rounds": int(used[0].config["rounds"]),
        "commit": _all(o.commit for o in used),
        "device": _all(f"{o.device}, {o.precision}" for o in used),
        "note": joined("" if plan.quick else cell.note, choice, trouble),  # the table's is about real numbers
    }


def _over_seeds(table: Table, cell: Cell, values: Mapping[int, float], quick: bool = False) -> Record:
    """What follows from a cell's values by seed: their mean and deviation, and what to type to get them."""
    mean = sum(values.values()) / len(values)
    spread = sum((v - mean) ** 2 for v in values.values())
    return {
        "ours": mean,
        "std": math.sqrt(spread / (len(values) - 1)) if len(values) > 1 else None,
        "seeds": list(values),
        "values": list(values.values()),
        "command": command(table, cell, list(values), quick),
    }


def united(table: Table, cell: Cell, old: Record, new: Record) -> Record:
    """A cell measured before and now, with the seeds of both; of a seed in both the new value counts. Only the new one
    where the two cannot be put together, or where all seeds of the old one were measured again."""
    if not _alike(old, new) or set(old["seeds"]) <= set(new["seeds"]):
        return new
    values = {s: v for c in (old, new) for s, v in zip(c["seeds"], c["values"], strict=True)}
    return {
        **new,
        **_over_seeds(table, cell, dict(sorted(values.items()))),
        "commit": _all(word for c in (old, new) for word in c["commit"].split(", ")),
        "device": _all(word for c in (old, new) for word in DEVICE.findall(c["device"])),
    }


def _alike(old: Record, new: Record) -> bool:
    """Whether two cells measure the same, with a value for each seed."""
    same = all(old[key] == new[key] for key in ("metric", "unit", "lower", "rounds"))
    whole = all(len(c["seeds"]) == len(c["values"] or ()) for c in (old, new))
    return same and whole and CHOICE.findall(old["note"]) == CHOICE.findall(new["note"])


def _all(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _best(planned: Planned, look: Look) -> tuple[dict[int, Outcome], str]:
    """Of a cell's variants the one with the best mean (over as many seeds as any has), and in words which it is."""
    lower, metric, among = metric_of(planned.cell.metric).lower, planned.cell.metric, len(planned.runs)
    found = [{c.seed: o for c in variant if (o := look(c)) is not None} for variant in planned.runs]
    most = max((len(f) for f in found), default=0)
    if not most:
        return {}, ""

    def worth(i: int) -> float:
        mean = sum(value_of(o, metric) for o in found[i].values()) / most
        return -math.inf if math.isnan(mean) else -mean if lower else mean

    tried = [i for i, f in enumerate(found) if len(f) == most]
    best = max(tried, key=worth)
    short = "" if len(tried) == among else f" ({len(tried)} of {among} measured)"
    return found[best], f"best of {among}: {_apart(planned, best)}{short}" if among > 1 else ""


def _apart(planned: Planned, best: int) -> str:
    """The settings in which the variants differ, of one of them."""
    flat = [spelled_out(v[0]) for v in planned.runs]
    keys = dict.fromkeys(k for table in flat for k in table)
    return ", ".join(f"{k}={flat[best].get(k)}" for k in keys if len({repr(t.get(k)) for t in flat}) > 1)


def command(table: Table, cell: Cell, seeds: Sequence[int], quick: bool = False) -> str:
    """What to type to get a cell."""
    words = f"fedkin reproduce {table.paper} {table.name} --rows {_quoted(cell.row)} --cols {_quoted(cell.column)}"
    return f"{words} --seeds {seeds_text(seeds)}{' --quick' if quick else ''}"


def seeds_text(seeds: Sequence[int]) -> str:
    """Seeds as `--seeds` takes them: how many from 0 on, or which; a comma behind one that is not 0."""
    if list(seeds) == list(range(len(seeds))):
        return str(len(seeds))
    return ",".join(map(str, seeds)) + "," * (len(seeds) == 1)


def _quoted(text: str) -> str:
    return f'"{text}"' if set(text) & set(" ()*&;|<>$,=%") else text


# ------------------------------------------------------------ what follows from records


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
    held, broken, level, unknown_, single, mixed, chosen, older = 0, [], 0, 0, 0, 0, 0, 0
    for place, left, right in _compared(record, check):
        if left["ours"] is None or (right is not None and right["ours"] is None):
            unknown_ += 1
            continue
        single += min(len(c["seeds"]) for c in (left, right or left)) == 1
        chosen += any(c["reading"] for c in (left, right or left))
        older += any(bool(c.get("since")) for c in (left, right or left))
        mixed += right is not None and left["judged"] != right["judged"]
        if _holds(check, left, right):
            held += 1
        else:
            broken.append(place)
            level += right is not None and not check["by"] and _level(left, right)
    tested = held + len(broken)
    return {
        "says": check["says"],
        "held": held,
        "of": tested,
        "unknown": unknown_,
        "broken": broken,
        "level": level,
        "single": single,
        "mixed": mixed,
        "chosen": chosen,
        "older": older,
        "holds": None if not tested else not broken,
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
    if right is None and check.get("target") is not None:
        return bool(abs(left["ours"] - check["target"]) <= check["within"] + 1e-9)
    if right is None:
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
