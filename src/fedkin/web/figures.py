"""What the figures of the run page are drawn from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedkin.errors import DataError
from fedkin.runs.arrays import read_arrays
from fedkin.runs.folder import SPLIT, RunFolder
from fedkin.web.queries import MOST_ROWS, select
from fedkin.web.values import Row, clean, columns, number, record, text

MOST_CLIENTS = 5_000
MOST_NOTE_BYTES = 4 << 20  # one note; an answer with many is cut earlier
MOST_ANSWER_BYTES = 1 << 20
MOST_VECTOR_BYTES = 200_000
MOST_SPLIT_BYTES = 256 << 20
MOST_COUNTS_BYTES = 32 << 20
MOST_SIDE = 300  # rows or columns of a matrix


def phases_page(run: RunFolder) -> Row:
    """Bytes and seconds of every kind of exchange."""
    names = ("phase", "exchanges", "asked", "answered", "bytes_down", "bytes_up", "seconds")
    rows = select(
        run.path,
        "phase, count(*), sum(asked), sum(answered), sum(bytes_down), sum(bytes_up), sum(seconds)",
        "exchanges",
        "GROUP BY phase ORDER BY min(id)",
        most=100,
    )
    return {"phases": [record(names, row) for row in rows]}


def events_page(run: RunFolder) -> Row:
    """What happened to whom and when."""
    rows = select(run.path, "round, phase, client, kind, reason", "events", "ORDER BY rowid", most=MOST_ROWS + 1)
    found = columns(("round", "phase", "client", "kind", "reason"), rows[:MOST_ROWS])
    return {"events": found, "more": len(rows) > MOST_ROWS}


# ---------------------------------------------------------------- notes


def notes_page(run: RunFolder, name: str, start: int, limit: int) -> Row:
    """What the method noted under this name from round `start` on, until the answer is large enough."""
    rows = select(
        run.path,
        "round, value",
        "notes",
        "WHERE name = ? AND round >= ? AND length(value) <= ? ORDER BY round, rowid",
        (name, start, MOST_NOTE_BYTES),
        min(limit, 2000) + 1,
    )
    found: list[Row] = []
    size = 0
    for round, value in rows[: min(limit, 2000)]:
        size += len(value) if isinstance(value, str) else 0
        if found and size > MOST_ANSWER_BYTES and round != found[-1]["round"]:
            break
        found.append({"round": number(round), "value": clean(_parsed(value))})
    more = len(found) < len(rows)
    return {"name": name, "notes": found, "next": rows[len(found)][0] if more else None}


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        return None


def _note(folder: Path, name: str, round: int) -> Any:
    rows = select(
        folder,
        "value",
        "notes",
        "WHERE name = ? AND round = ? AND length(value) <= ? ORDER BY rowid DESC",
        (name, round, MOST_NOTE_BYTES),
        1,
    )
    return _parsed(rows[0][0]) if rows else None


MATRICES = {"collaborators": "participants", "weights": "members"}
"""Notes that hold who learns from whom, and the note that says whose rows they are."""


def matrix_page(run: RunFolder, round: int | None) -> Row:
    """Who learns from whom in a round (by default the last): a row per client, a column per source."""
    folder = run.path
    for name, who in MATRICES.items():
        rows = select(
            folder, "DISTINCT round", "notes", "WHERE name = ? AND substr(value, 1, 2) = '[[' ORDER BY round", (name,)
        )
        rounds = [r for (r,) in rows if number(r) is not None]
        if not rounds:
            continue
        at = rounds[-1] if round is None else round
        values = _matrix(_note(folder, name, at))
        if values is None:
            raise DataError(f"round {at} has no readable matrix of {name}")
        ids = _ids(_note(folder, who, at))
        whose = ids if ids is not None and len(ids) == len(values) else None
        return {
            "name": name,
            "rounds": rounds,
            "round": at,
            "clients": whose,
            "values": values,
            "order": _order(values),
        }
    return {"name": None, "rounds": [], "round": None, "clients": None, "values": [], "order": []}


def _matrix(value: Any) -> list[list[float | None]] | None:
    """At most MOST_SIDE rows of equal length, or nothing."""
    if not isinstance(value, list) or not value or not all(isinstance(row, list) for row in value):
        return None
    if len({len(row) for row in value}) != 1 or not value[0]:
        return None
    return [[number(v) for v in row[:MOST_SIDE]] for row in value[:MOST_SIDE]]


def _ids(value: Any) -> list[int] | None:
    if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return None
    return value[:MOST_SIDE]


def _order(values: list[list[float | None]]) -> list[int]:
    """Rows so that similar ones stand together: along the second eigenvector of their likeness."""
    import numpy as np

    table = np.nan_to_num(np.array(values, float))
    if len(table) < 3 or len(table) != table.shape[1]:
        return list(range(len(table)))
    table = (table + table.T) / 2
    np.fill_diagonal(table, 0)
    laplacian = np.diag(table.sum(1)) - table
    if not np.isfinite(laplacian).all() or not table.any():
        return list(range(len(table)))
    return [int(i) for i in np.argsort(np.linalg.eigh(laplacian)[1][:, 1], kind="stable")]


def judgements_page(run: RunFolder) -> Row:
    """What the server judged clients by, round by round: a committee's scores, or the lengths of their updates."""
    for name, limit, what in (("scores", "threshold", "score"), ("norms", "t_norm", "norm")):
        found = _by_round(run, name)
        limits, seats, judged = _by_round(run, limit), _by_round(run, "committee"), _by_round(run, "judged")
        rounds = [
            {
                "round": at,
                "limit": number(limits.get(at)),
                "committee": _ids(seats.get(at)),
                **_judged(value, judged.get(at)),
            }
            for at, value in found.items()
            if isinstance(value, list)
        ]
        if rounds:
            return {"what": what, "rounds": rounds}
    return {"what": None, "rounds": []}


def _by_round(run: RunFolder, name: str) -> dict[int, Any]:
    """Notes that are no matrices: a number, a list or a table by round."""
    rows = select(
        run.path,
        "round, value",
        "notes",
        "WHERE name = ? AND length(value) <= ? AND substr(value, 1, 2) != '[[' ORDER BY round, rowid",
        (name, MOST_VECTOR_BYTES),
        2000,
    )
    return {at: _parsed(value) for at, value in rows if number(at) is not None}


def _judged(value: list[Any], judged: Any) -> Row:
    """Numbers and whose they are: of those that another note names, else of all clients."""
    ids = _ids(judged.get("clients")) if isinstance(judged, Mapping) else None
    whose = ids if ids is not None and len(ids) == len(value) else list(range(len(value)))
    pairs = [(c, n) for c, v in zip(whose, value, strict=True) if (n := number(v)) is not None]
    return {"clients": [c for c, _ in pairs], "values": [n for _, n in pairs]}


def contributions_page(run: RunFolder) -> Row:
    """The weight of each client in the average, [clients][rounds], where the method notes one."""
    clients = len(run.info.names)
    members = _by_round(run, "members")
    for name in ("alpha", "weights"):
        rounds, rows = [], []
        for at, value in _by_round(run, name).items():
            ids = _ids(members.get(at)) if name == "weights" else list(range(clients))
            if isinstance(value, list) and ids is not None and len(value) == len(ids) and number(value[0]) is not None:
                own = dict(zip(ids, map(number, value), strict=True))
                rounds.append(at)
                rows.append([own.get(c) for c in range(min(clients, MOST_SIDE))])
        if rounds:
            return {"name": name, "rounds": rounds, "values": [list(column) for column in zip(*rows, strict=True)]}
    return {"name": None, "rounds": [], "values": []}


# ---------------------------------------------------------------- the split


def split_page(run: RunFolder) -> Row:
    """Training samples per client and class."""
    if run.info.deployed:
        raise DataError("only the sites know how many samples of each class they have")
    names = run.info.names
    counts = class_counts(run.path)
    if len(counts) != len(names):
        raise DataError(f"{SPLIT} has {len(counts)} clients, {len(names)} are in the run")
    return {
        "hash": text(run.info.prepared.get("split_hash"), 80),
        "clients": [text(n, 80) for n in names[:MOST_CLIENTS]],
        "classes": [str(c) for c in range(counts.shape[1])],
        "counts": counts[:MOST_CLIENTS].tolist(),
    }


def class_counts(folder: Path) -> Any:
    """[clients, classes] from the stored split. Only this member is unpacked, and only if it is small when unpacked."""
    found = read_arrays(folder / SPLIT, {"class_counts": "iu"}, MOST_SPLIT_BYTES, MOST_COUNTS_BYTES).get("class_counts")
    if found is None:
        raise DataError("the run did not store how many samples of each class a client has")
    if found.ndim != 2:
        raise DataError(f"{SPLIT}: the class counts are no table")
    return found
