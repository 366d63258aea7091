"""What the pages show, as plain values: from run folders that may be anybody's to JSON of a bounded size."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedkin.errors import DataError, FedKinError, UsageError, unknown
from fedkin.report import several_runs
from fedkin.report.figures import Figure, LeftOut, attempt
from fedkin.report.gather import CURVES, RunData, parsed, rounds_after
from fedkin.report.one_run import FIGURES, figure
from fedkin.report.queries import PAGE, select
from fedkin.runs.catalogue import Broken, Catalogue, runs_folder
from fedkin.runs.database import TABLES
from fedkin.runs.folder import METRICS, REPORT, RunFolder, RunInfo
from fedkin.web.values import Row, clean, columns, number, record, shown, text

MOST_RUNS = 1000  # in one answer
MOST_COMPARED = 24
MOST_ANSWER_BYTES = 1 << 20  # of notes
MOST_CLIENTS = 5_000  # in a list
FACETS = ("method", "data", "status", "attack")
ACCURACIES = ("micro", "macro", "worst_decile", "std")


def part(info: RunInfo, *keys: str) -> Any:
    """A value inside the result, or inside what is known of a run under way."""
    for found in (info.result, info.progress):
        value: Any = found
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


# ---------------------------------------------------------------- the list


def summary(info: RunInfo) -> Row:
    """One line of the list."""
    config = info.config
    accuracy = part(info, "accuracy")
    parts = accuracy if isinstance(accuracy, Mapping) else {}
    sent = [number(part(info, "bytes", way)) for way in ("down", "up")]
    return {
        "id": info.id,
        "status": info.status,
        **{k: text(config.get(k), 120) for k in ("method", "data", "partition", "attack", "rule")},
        "clients": len(info.names) or number(info.prepared.get("clients")),
        "seed": number(config.get("seed")),
        "rounds": number(info.rounds_done),
        "rounds_total": number(config.get("rounds")),
        **{k: number(parts.get(k)) for k in ACCURACIES},
        "bytes": None if None in sent else sum(n for n in sent if n is not None),
        "seconds": number(part(info, "seconds")),
        "wall": number(part(info, "wall")),
        "diverged": None if info.diverged is None else text(info.diverged, 500),
        "created": text(info.created, 40),
    }


def listing(
    catalogue: Catalogue, wanted: Mapping[str, str | None], words: str, sort: str, up: bool, offset: int, limit: int
) -> Row:
    """The runs that fit, a page of them, and what there is to filter by."""
    entries = catalogue.entries()
    rows = [summary(e) for e in entries if isinstance(e, RunInfo)]
    broken = [{"name": text(e.name, 100), "reason": text(e.reason)} for e in entries if isinstance(e, Broken)]
    facets = {k: sorted({row[k] for row in rows})[:200] for k in FACETS}
    fits = [row for row in rows if all(row[k] == v for k, v in wanted.items() if v)]
    for word in words.lower().split():
        fits = [row for row in fits if word in " ".join(str(v) for v in row.values()).lower()]
    if rows and sort not in rows[0]:
        raise UsageError(f"sort={sort[:40]!r}: sort by {', '.join(rows[0])}")
    fits.sort(key=lambda row: row["id"])
    known = [row for row in fits if row[sort] is not None]
    unknown = [row for row in fits if row[sort] is None]  # last, whichever way
    known.sort(key=lambda row: row[sort], reverse=not up)
    page = [*known, *unknown][offset : offset + min(limit, MOST_RUNS)]
    running = sum(row["status"] == "running" for row in rows)
    return {
        "all": len(rows),
        "total": len(fits),
        "offset": offset,
        "runs": page,
        "facets": facets,
        "broken": broken[:100],
        "running": running,
    }


# ---------------------------------------------------------------- one run


def curves(folder: Path) -> tuple[dict[str, list[Any]], Row | None]:
    """The rounds column by column, and the state after the method's last word, if it had one."""
    try:
        rows = rounds_after(folder)
    except DataError:
        if (folder / METRICS).exists():
            raise
        rows = []  # so early that there is no file yet
    final = [row[1:] for row in rows if row[0]][-1:]
    ending = {k: v[0] for k, v in columns(CURVES, final).items()} if final else None
    return columns(CURVES, [row[1:] for row in rows if not row[0]]), ending


def run_page(run: RunFolder) -> Row:
    info = run.info
    rounds, final = curves(info.path)
    noted = _noted(info.path)
    return {
        **summary(info),
        "updated": text(info.updated, 40),
        "error": None if info.error is None else text(info.error, 5000),
        "rounds_done": number(info.rounds_done),
        "config": clean({k: v for k, v in info.config.items() if k != "options"}),
        "options": clean(info.options),
        "environment": clean(info.environment),
        "prepared": clean(info.prepared),
        "identity": text(info.identity, 80),
        "malicious": info.malicious[:MOST_CLIENTS],
        "names": [text(n, 80) for n in info.names[:MOST_CLIENTS]],
        "best": clean(part(info, "best")),
        "judged": number(part(info, "judged")),
        "judgeable": number(part(info, "judgeable")),
        "deployed": info.deployed,
        "resume": _resume(info),
        "partly": _partly(info.path),
        "detection": clean(part(info, "detection")),
        "curves": rounds,
        "final": final,
        "notes": noted,
        "report": (info.path / REPORT).is_file(),
    }


def _resume(info: RunInfo) -> str | None:
    """What to type to go on with a run that stopped."""
    if info.status not in ("interrupted", "failed"):
        return None
    where = "" if info.path.parent == runs_folder().resolve() else f" --runs-dir {shlex.quote(str(info.path.parent))}"
    return text(f"fedkin {'server --resume' if info.deployed else 'resume'} {info.id}{where}", 500)


def _partly(folder: Path) -> list[Any]:
    """Rounds whose accuracy is not of everybody: some sites gave none."""
    if not (folder / METRICS).exists():
        return []
    return [number(row[0]) for row in select(folder, "DISTINCT round", "events", "WHERE kind = 'unjudged'")]


def _noted(folder: Path) -> list[Row]:
    if not (folder / METRICS).exists():
        return []
    rows = select(
        folder,
        "name, count(*), min(round), max(round), sum(length(value))",
        "notes",
        "GROUP BY name ORDER BY name",
        most=200,
    )
    return [{"name": text(n, 80), "count": c, "first": a, "last": b, "characters": s} for n, c, a, b, s in rows]


def table_page(run: RunFolder, name: str, where: Mapping[str, int | None], offset: int, limit: int) -> Row:
    """Rows of a table, as they are."""
    if name not in TABLES or name == "notes":
        raise UsageError(f"table {name[:40]!r}: there are {', '.join(t for t in TABLES if t != 'notes')}; and /notes")
    asked = {k: v for k, v in where.items() if v is not None}
    for key in asked:
        if key not in TABLES[name]:
            raise UsageError(f"table {name!r} has no column {key!r}")
    conditions = " AND ".join(f"{k} = ?" for k in asked) or "1"
    rows = select(
        run.path,
        ", ".join(TABLES[name]),
        name,
        f"WHERE {conditions} ORDER BY rowid",
        list(asked.values()),
        limit + 1,
        offset,
    )
    return {"columns": columns(list(TABLES[name]), rows[:limit]), "offset": offset, "more": len(rows) > limit}


def clients_page(run: RunFolder, offset: int, limit: int) -> Row:
    """Every client as it stands: accuracy in the newest evaluated round, traffic and events so far."""
    folder, info = run.path, run.info
    kept, sums = ("client", "name", "accuracy", "loss", "correct", "count"), ("bytes_down", "bytes_up", "seconds")
    newest = select(folder, "round, final", "clients", "ORDER BY round DESC, final DESC", most=1)
    rows = newest and select(
        folder,
        ", ".join(kept),
        "clients",
        "WHERE round = ? AND final = ? ORDER BY client",
        newest[0],
        min(limit, MOST_CLIENTS),
        offset,
    )
    totals = ", ".join(f"sum({k})" for k in sums)
    traffic = {row[0]: row[1:] for row in select(folder, f"client, {totals}", "traffic", "GROUP BY client")}
    events: dict[Any, dict[str, int]] = {}
    for client, kind, count in select(folder, "client, kind, count(*)", "events", "GROUP BY client, kind"):
        events.setdefault(client, {})[text(kind, 40)] = count
    truth = set(info.malicious)
    return {
        "round": number(newest[0][0]) if newest else None,
        "total": len(info.names),
        "clients": [
            {
                **record(kept, row),
                **record(sums, traffic.get(row[0], (None,) * 3)),
                "malicious": row[0] in truth,
                "events": events.get(row[0], {}),
            }
            for row in rows
        ],
    }


def client_page(run: RunFolder, client: int) -> Row:
    info, folder = run.info, run.path
    clients = len(info.names)
    if not 0 <= client < clients:
        raise UsageError(f"client {client}: this run has clients 0 to {clients - 1}")
    kept = ("round", "final", "accuracy", "loss", "correct", "count")
    rows = select(folder, ", ".join(kept), "clients", "WHERE client = ? ORDER BY round, final", (client,))
    traffic = select(
        folder,
        "round, sum(bytes_down), sum(bytes_up), sum(seconds)",
        "traffic",
        "WHERE client = ? GROUP BY round ORDER BY round",
        (client,),
    )
    events = select(folder, "round, phase, kind, reason", "events", "WHERE client = ? ORDER BY rowid", (client,), 1000)
    macro = select(folder, "round, macro", "rounds", "WHERE final = 0 ORDER BY round")
    sums = [_running(number(row[i]) or 0 for row in traffic) for i in (1, 2, 3)]
    try:
        counts = RunData(run, PAGE).class_counts[client].tolist()
        classes, problem = [{"name": str(name), "count": n} for name, n in enumerate(counts)], None
    except FedKinError as error:
        classes, problem = [], text(error, 300)
    return {
        "client": client,
        "clients": clients,
        "name": text(info.names[client], 80),
        "malicious": client in info.malicious,
        "attacked": bool(info.malicious),
        "removed": next((number(row[0]) for row in events if row[2] == "removed"), None),
        "series": columns(kept, rows),
        "macro_round": [number(row[0]) for row in macro],
        "macro": [number(row[1]) for row in macro],
        "traffic": {"round": [number(row[0]) for row in traffic], "bytes_down": sums[0], "bytes_up": sums[1]},
        **{k: s[-1] if s else 0 for k, s in zip(("bytes_down", "bytes_up", "seconds"), sums, strict=True)},
        "events": [record(("round", "phase", "kind", "reason"), row) for row in events],
        "classes": classes,
        "classes_problem": problem,
    }


def _running(values: Iterable[float]) -> list[float]:
    sums: list[float] = []
    for value in values:
        sums.append((sums[-1] if sums else 0) + value)
    return sums


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
    if name not in FIGURES:
        raise unknown("figure", name[:60], FIGURES)
    how = {"round": round, "budget": 0} if name == "matrix" else {}
    return _told(figure(name, RunData(run, PAGE), **how))


def _told(found: Figure | LeftOut) -> Row:
    if isinstance(found, LeftOut) and found.damaged:
        raise DataError(found.why)
    told: Row = shown(replace(found, frames=None) if isinstance(found, Figure) else found)
    return told


# ---------------------------------------------------------------- several runs


def compare_page(runs: Sequence[RunFolder], measure: str = "macro", seeds: bool = True) -> Row:
    """Runs by what they have in common, their curves in one chart (of every run, without `seeds`), and the settings in
    which they differ."""
    if measure not in several_runs.MEASURES:
        raise unknown("measure", measure[:60], several_runs.MEASURES)
    groups = several_runs.grouped([RunData(run, PAGE) for run in runs])
    alone = several_runs.one_for_each(groups)
    places = {run.info.id: i for i, group in enumerate(groups) for run in (*group.members, *group.older)}
    labels = {group.members[0].info.id: several_runs.name_of(group) for group in alone}
    lines = []
    for run in runs:
        place = places[run.info.id]
        named = {"label": labels[run.info.id], "group_label": several_runs.name_of(groups[place])}
        best = number(part(run.info, "best", "round"))
        lines.append(
            {**summary(run.info), **{k: text(v, 120) for k, v in named.items()}, "group": place, "best_round": best}
        )
    drawn = groups if seeds else alone
    makers = {"Per round": several_runs.per_round, "Per megabyte": several_runs.per_megabyte}
    found = [attempt("", title, partial(several_runs.overlaid, make, drawn, measure)) for title, make in makers.items()]
    resolved = [_settings(run.info) for run in runs]
    keys = list(dict.fromkeys(k for s in resolved for k in s))
    differing = [k for k in keys if any(s.get(k) != resolved[0].get(k) for s in resolved)]
    return {
        "runs": lines,
        "figures": [_told(each) for each in found],
        "older": [run.info.id for group in groups for run in group.older],
        "diff": [{"key": k, "values": [s.get(k) for s in resolved]} for k in differing],
        "same_split": len({str(run.info.prepared.get("split_hash"))[:80] for run in runs}) == 1,
    }


def _settings(info: RunInfo) -> dict[str, Any]:
    """All that was filled in."""
    config = clean({k: v for k, v in info.settings(given=False).items() if k != "options"})
    return {**config, **{f"options.{k}": v for k, v in clean(info.options).items()}}
