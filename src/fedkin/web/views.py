"""What the pages show, as plain values: from run folders that may be anybody's to JSON of a bounded size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedkin.config import LATER
from fedkin.core import notes
from fedkin.errors import DataError, FedKinError, UsageError, unknown
from fedkin.report import one_client, several_runs
from fedkin.report.figures import Figure, LeftOut, attempt
from fedkin.report.gather import CURVES, RunData, parsed, rounds_after
from fedkin.report.one_run import FIGURES, figure
from fedkin.report.queries import PAGE, select
from fedkin.report.saving import KINDS, saved
from fedkin.runs.catalogue import Broken, Catalogue
from fedkin.runs.database import TABLES
from fedkin.runs.folder import ACCURACIES, REPORT, RunFolder, RunInfo
from fedkin.runs.found_out import found_out
from fedkin.runs.metric import ShownMetric
from fedkin.sweep.groups import told_apart
from fedkin.web.advice import next_steps
from fedkin.web.values import Row, clean, columns, number, record, shown, text

MOST_RUNS = 1000  # in one answer
MOST_COMPARED = 24
MOST_ANSWER_BYTES = 1 << 20  # of notes
MOST_CLIENTS = 5_000  # in a list
FACETS = ("method", "data", "status", "attack")


def part(info: RunInfo, *keys: str) -> Any:
    """A value inside the result, or inside what is known of a run under way."""
    for value in (info.result, info.progress):
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def metric_facts(info: RunInfo) -> Row:
    """What its numbers are."""
    return {**info.metric.facts(), "metric": text(info.metric.name, 40)}


# ---------------------------------------------------------------- the list


def summary(info: RunInfo) -> Row:
    """One line of the list."""
    config = info.config
    sent = [number(part(info, "bytes", way)) for way in ("down", "up")]
    return {
        "id": info.id,
        "status": info.status,
        **{k: text(config.get(k), 120) for k in ("method", "data", "partition", "attack", "rule")},
        "clients": len(info.names) or number(info.prepared.get("clients")),
        "seed": number(config.get("seed")),
        "rounds": number(info.rounds_done),
        "rounds_total": number(config.get("rounds")),
        **{k: number(part(info, "accuracy", k)) for k in ACCURACIES},
        "bytes": None if None in sent else sum(n for n in sent if n is not None),
        **{k: number(part(info, k)) for k in ("seconds", "wall")},
        **metric_facts(info),
        "diverged": None if info.diverged is None else text(info.diverged, 500),
        "created": text(info.created, 40),
    }


ALSO = {"accuracy": "macro"}
"""What `fedkin runs --sort` calls a column."""


def listing(
    catalogue: Catalogue, wanted: Mapping[str, str | None], words: str, sort: str, up: bool, offset: int, limit: int
) -> Row:
    """The runs that fit, a page of them, and what there is to filter by."""
    entries = catalogue.entries()
    infos = [e for e in entries if isinstance(e, RunInfo)]
    differs = told_apart(infos, beside=("attack", "rule", "rounds", "clients", "partition"))
    rows = [{**summary(info), "differs": text(told, 120)} for info, told in zip(infos, differs, strict=True)]
    broken = [{"name": text(e.name, 100), "reason": text(e.reason)} for e in entries if isinstance(e, Broken)]
    facets = {k: sorted({row[k] for row in rows})[:200] for k in FACETS}
    fits = [row for row in rows if all(row[k] == v for k, v in wanted.items() if v)]
    for word in words.lower().split():
        fits = [row for row in fits if word in " ".join(str(v) for v in row.values()).lower()]
    sort = ALSO.get(sort, sort)
    if rows and sort not in rows[0]:
        raise UsageError(f"sort={sort[:40]!r}: sort by {', '.join(rows[0])}")
    fits.sort(key=lambda row: row["id"])
    known = [row for row in fits if row[sort] is not None]
    unknown = [row for row in fits if row[sort] is None]  # last, whichever way
    known.sort(key=lambda row: row[sort], reverse=not up)
    page = [*known, *unknown][offset : offset + min(limit, MOST_RUNS)]
    running = sum(row["status"] == "running" for row in rows)
    counts = {"all": len(rows), "total": len(fits), "offset": offset, "running": running}
    return {**counts, "runs": page, "facets": facets, "broken": broken[:100]}


# ---------------------------------------------------------------- one run


def curves(folder: Path) -> tuple[dict[str, list[Any]], Row | None]:
    """The rounds column by column, and the state after the method's last word, if it had one."""
    rows = rounds_after(folder)
    final = [row[1:] for row in rows if row[0]][-1:]
    ending = {k: v[0] for k, v in columns(CURVES, final).items()} if final else None
    return columns(CURVES, [row[1:] for row in rows if not row[0]]), ending


def run_page(run: RunFolder) -> Row:
    info, data = run.info, RunData(run, PAGE)
    rounds, final = curves(info.path)
    partly = data.select("DISTINCT round", "events", "WHERE kind = ?", (notes.NOT_EVALUATED.kind,))
    sums = "name, count(*), min(round), max(round), sum(length(value))"
    noted = data.select(sums, "notes", "GROUP BY name ORDER BY name")[:200]
    return {
        **summary(info),
        "updated": text(info.updated, 40),
        "error": None if info.error is None else text(info.error, 5000),
        "rounds_done": number(info.rounds_done),
        "config": clean({k: v for k, v in info.config.items() if k != "options"}),
        **{k: clean(getattr(info, k)) for k in ("options", "environment", "prepared")},
        "identity": text(info.identity, 80),
        "malicious": info.malicious[:MOST_CLIENTS],
        "names": [text(n, 80) for n in info.names[:MOST_CLIENTS]],
        **{k: clean(part(info, k)) for k in ("best", "detection")},
        "found": _found(info),
        **{k: number(part(info, k)) for k in ("judged", "judgeable")},
        "deployed": info.deployed,
        "next": [{"words": step.words, "command": step.command} for step in next_steps(info)],
        "partly": [number(round) for (round,) in partly],  # rounds whose accuracy is not of everybody
        "curves": rounds,
        "final": final,
        "notes": [record(("name", "count", "first", "last", "characters"), row) for row in noted],
        "report": (info.path / REPORT).is_file(),
    }


def _found(info: RunInfo) -> str:
    """How many attackers were found."""
    rates, bad = part(info, "detection"), len(info.malicious)
    return found_out(rates, bad, len(info.names) - bad) if isinstance(rates, Mapping) else ""


def table_page(run: RunFolder, name: str, where: Mapping[str, int | None], offset: int, limit: int) -> Row:
    """Rows of a table, as they are."""
    if name not in TABLES or name == "notes":
        raise UsageError(f"table {name[:40]!r}: there are {', '.join(t for t in TABLES if t != 'notes')}; and /notes")
    asked = {k: v for k, v in where.items() if v is not None}
    for key in asked:
        if key not in TABLES[name]:
            raise UsageError(f"table {name!r} has no column {key!r}")
    conditions = " AND ".join(f"{k} = ?" for k in asked) or "1"
    rest = f"WHERE {conditions} ORDER BY rowid"
    rows = select(run.path, ", ".join(TABLES[name]), name, rest, [*asked.values()], limit + 1, offset)
    return {"columns": columns(list(TABLES[name]), rows[:limit]), "offset": offset, "more": len(rows) > limit}


SUMS = ("bytes_down", "bytes_up", "seconds")
TOTALS = ", ".join(f"sum({k})" for k in SUMS)


def clients_page(run: RunFolder, offset: int, limit: int) -> Row:
    """Every client as it stands: accuracy in the newest evaluated round, traffic and events so far."""
    folder, data, kept = run.path, RunData(run, PAGE), ("client", "name", "accuracy", "loss", "correct", "count")
    newest = select(folder, "round, final", "clients", "ORDER BY round DESC, final DESC", most=1)
    rest, most = "WHERE round = ? AND final = ? ORDER BY client", min(limit, MOST_CLIENTS)
    rows = newest and select(folder, ", ".join(kept), "clients", rest, newest[0], most, offset)
    traffic = {row[0]: row[1:] for row in data.select(f"client, {TOTALS}", "traffic", "GROUP BY client")}
    events: dict[Any, dict[str, int]] = {}
    for client, kind, count in data.select("client, kind, count(*)", "events", "GROUP BY client, kind"):
        events.setdefault(client, {})[text(notes.event_of(str(kind)).words, 40)] = count
    truth = set(run.info.malicious)
    clients = [
        {
            **record(kept, row),
            **record(SUMS, traffic.get(row[0], (None,) * 3)),
            "malicious": row[0] in truth,
            "events": events.get(row[0], {}),
        }
        for row in rows
    ]
    return {"round": number(newest[0][0]) if newest else None, "total": len(run.info.names), "clients": clients}


def client_page(run: RunFolder, client: int) -> Row:
    info, data, own = run.info, RunData(run, PAGE), "WHERE client = ?"
    clients = len(info.names)
    if not 0 <= client < clients:
        raise UsageError(f"client {client}: this run has clients 0 to {clients - 1}")
    kept, happened = ("round", "final", "accuracy", "loss", "correct", "count"), ("round", "phase", "kind", "reason")
    rows = data.select(", ".join(kept), "clients", f"{own} ORDER BY round, final", (client,))
    traffic = data.select(f"round, {TOTALS}", "traffic", f"{own} GROUP BY round ORDER BY round", (client,))
    events = data.select(", ".join(happened), "events", f"{own} ORDER BY rowid", (client,))[:1000]
    macro = columns(("round", "macro"), data.select("round, macro", "rounds", "WHERE final = 0 ORDER BY round"))
    sums = {k: list(accumulate(number(row[i]) or 0 for row in traffic)) for i, k in enumerate(SUMS, 1)}
    try:
        counts = data.class_counts[client].tolist()
        classes, problem = [{"name": str(name), "count": n} for name, n in enumerate(counts)], None
    except FedKinError as error:
        classes, problem = [], text(error, 300)
    return {
        "client": client,
        "clients": clients,
        "name": text(info.names[client], 80),
        **metric_facts(info),
        "malicious": client in info.malicious,
        "attacked": bool(info.malicious),
        "removed": next((number(row[0]) for row in events if row[2] == notes.WAS_REMOVED.kind), None),
        "series": columns(kept, rows),
        "macro_round": macro["round"],
        "macro": macro["macro"],
        "traffic": {"round": [number(row[0]) for row in traffic], **sums},
        **{k: found[-1] if found else 0 for k, found in sums.items()},
        "events": [record(happened, row) for row in events],
        "classes": classes,
        "classes_problem": problem,
    }


# ---------------------------------------------------------------- notes


def notes_page(run: RunFolder, name: str, start: int, limit: int) -> Row:
    """What the method noted under this name from round `start` on, until the answer is large enough."""
    rest = "WHERE name = ? AND round >= ? AND length(value) <= ? ORDER BY round, rowid"
    most = min(limit, 2000)
    rows = select(run.path, "round, value", "notes", rest, (name, start, PAGE.matrix), most + 1)
    found: list[Row] = []
    size = 0
    for round, value in rows[:most]:
        size += len(value) if isinstance(value, str) else 0
        if found and size > MOST_ANSWER_BYTES and round != found[-1]["round"]:
            break
        found.append({"round": number(round), "value": clean(parsed(value))})
    more = len(found) < len(rows)
    return {"name": name, "notes": found, "next": rows[len(found)][0] if more else None}


# ---------------------------------------------------------------- figures


def figure_page(run: RunFolder, name: str, round: int | None = None) -> Row:
    """One of the figures that the report has too; or why there is none."""
    return _told(figure_of(run, name, round))


def figure_of(run: RunFolder, name: str, round: int | None = None) -> Figure | LeftOut:
    """One of a run's figures, with its numbers."""
    if name not in FIGURES:
        raise unknown("figure", name[:60], FIGURES)
    how = {"round": round, "budget": 0} if name == "matrix" else {}
    return figure(name, RunData(run, PAGE), **how)


def client_figure_page(run: RunFolder, client: int, name: str) -> Row:
    """One of a client's figures; or why there is none."""
    return _told(client_figure_of(run, client, name))


def client_figure_of(run: RunFolder, client: int, name: str) -> Figure | LeftOut:
    """One of a client's figures, with its numbers."""
    if name not in one_client.FIGURES:
        raise unknown("figure", name[:60], one_client.FIGURES)
    clients = len(run.info.names)
    if not 0 <= client < clients:
        raise UsageError(f"client {client}: this run has clients 0 to {clients - 1}")
    return one_client.figure(name, RunData(run, PAGE), client)


def saved_page(found: Figure | LeftOut, kind: str) -> bytes:
    """A figure as a file: `svg`, drawn as in the report, or `csv`, its numbers."""
    if kind not in KINDS:
        raise unknown("format", kind[:20], KINDS)
    if isinstance(found, LeftOut):
        raise (DataError if found.damaged else UsageError)(f"there is no figure: {found.why}")
    return saved(found, kind)


def _told(found: Figure | LeftOut) -> Row:
    if isinstance(found, LeftOut) and found.damaged:
        raise DataError(found.why)
    told: Row = shown(replace(found, frames=None) if isinstance(found, Figure) else found)
    return told


# ---------------------------------------------------------------- several runs


COMPARED = {
    "per-round": ("Per round", several_runs.per_round),
    "per-megabyte": ("Per megabyte", several_runs.per_megabyte),
}
"""The figures of several runs, in their order on the page."""


def compared_figure_of(runs: Sequence[RunFolder], name: str, measure: str, seeds: bool) -> Figure | LeftOut:
    """One of them, with its numbers."""
    if name not in COMPARED:
        raise unknown("figure", name[:60], COMPARED)
    found = _overlaid(several_runs.grouped([RunData(run, PAGE) for run in runs]), measure, seeds)
    return found[list(COMPARED).index(name)]


def _overlaid(groups: Sequence[several_runs.Group], measure: str, seeds: bool) -> list[Figure | LeftOut]:
    if measure not in several_runs.MEASURES:
        raise unknown("measure", measure[:60], several_runs.MEASURES)
    drawn = groups if seeds else several_runs.one_for_each(groups)
    return [
        attempt(name, title, partial(several_runs.overlaid, make, drawn, measure))
        for name, (title, make) in COMPARED.items()
    ]


def compare_page(runs: Sequence[RunFolder], measure: str = "macro", seeds: bool = True) -> Row:
    """Runs by what they have in common, their curves in one chart (of every run, without `seeds`), and the settings in
    which they differ."""
    groups = several_runs.grouped([RunData(run, PAGE) for run in runs])
    found = _overlaid(groups, measure, seeds)
    places = {run.info.id: i for i, group in enumerate(groups) for run in (*group.members, *group.older)}
    best = {run.info.id: number(part(run.info, "best", "round")) for run in runs}
    lines = [{**summary(r.info), "group": places[r.info.id], "best_round": best[r.info.id]} for r in runs]
    metrics = several_runs.metrics_of(groups)
    put = (metrics[0] if len(metrics) == 1 else ShownMetric()).put
    resolved = [_settings(run.info) for run in runs]
    keys = list(dict.fromkeys(k for s in resolved for k in s))
    differing = [k for k in keys if any(s.get(k) != resolved[0].get(k) for s in resolved)]
    return {
        "runs": lines,
        "figures": [_told(each) for each in found],
        "measures": {name: text(put(words)) for name, words in several_runs.MEASURES.items()},
        "older": [run.info.id for group in groups for run in group.older],
        "diff": [{"key": k, "values": [s.get(k) for s in resolved]} for k in differing],
        "same_split": len({str(run.info.prepared.get("split_hash"))[:80] for run in runs}) == 1,
    }


def _settings(info: RunInfo) -> dict[str, Any]:
    """All that was filled in."""
    told = info.settings(given=False)
    later = {k: v for k, v in LATER.items() if k not in told}  # what an older run could not say
    config = clean({k: v for k, v in {**told, **later}.items() if k != "options"})
    return {**config, **{f"options.{k}": v for k, v in clean(info.options).items()}}
