"""Our numbers beside the papers': the record of a table with its cells, as it is kept in `results/`."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fedkin.config import NOT_IDENTITY, Config
from fedkin.papers.cell_settings import spelled_out
from fedkin.papers.measures import Measures, metric_of, value_of
from fedkin.papers.plan import Plan, Planned
from fedkin.papers.published import Cell, Line, Paper, Table

Record = dict[str, Any]
Look = Callable[[Config], Measures | None]

JUDGED = {"received": "as received", "after_local": "after local training", "last_round": "as the last round left them"}
NOT_RUN = "not run yet"
CHOICE = re.compile(r"best of \d+: [^;]*")  # in a note: which of several settings the number belongs to
FAILED = re.compile(r"failed: .*")  # and which runs are missing
DEVICE = re.compile(r"[^, ][^,]*(?:, [^,]+)?")  # one of those a cell names: device, precision


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


def _best(planned: Planned, look: Look) -> tuple[dict[int, Measures], str]:
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
