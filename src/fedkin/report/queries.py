"""Short questions to a run's metrics file, bounded in time and size.

The file may be anybody's, and a run may be writing to it: it is opened for reading alone, its schema is not trusted,
and only our own columns of plain tables of ours are asked for. Never for writing, not even to roll back a commit that
was cut short: what is in somebody else's journal is theirs to say.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkin.errors import DataError
from fedkin.runs.database import source_of, unreadable
from fedkin.runs.folder import METRICS

PATIENCE = 2.0  # seconds to wait for a commit
LARGEST = 64 << 20  # bytes of one value


@dataclass(frozen=True)
class Limits:
    """How much of a run is read at most."""

    seconds: float  # for one question
    rows: int  # of one answer
    vector: int  # bytes of a note with something for each client
    matrix: int  # bytes of a note with something for each pair of clients
    side: int  # rows or columns of a map over clients


PAGE = Limits(seconds=4.0, rows=20_000, vector=200_000, matrix=4 << 20, side=300)
"""For an answer that somebody waits for, perhaps one of many."""
FILE = Limits(seconds=60.0, rows=2_000_000, vector=4 << 20, matrix=32 << 20, side=2_000)
"""For a report that is written once."""


def select(
    folder: Path,
    columns: str,
    table: str,
    rest: str = "",
    values: Sequence[Any] = (),
    most: int | None = None,
    offset: int = 0,
    limits: Limits = PAGE,
) -> list[tuple[Any, ...]]:
    """SELECT columns FROM table rest; the texts are ours, only `values` come from outside."""
    path = folder / METRICS
    if path.is_symlink() or not path.is_file():
        raise DataError(f"{METRICS} is missing or not a plain file")
    try:
        base = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=PATIENCE)
        try:
            source = _guarded(base, table, limits.seconds)
            query = f"SELECT {columns} FROM {source} {rest} LIMIT {most or limits.rows:d} OFFSET {offset:d}"
            return base.execute(query, values).fetchall()
        finally:
            base.close()
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        raise unreadable(path, error) from None


def _guarded(base: sqlite3.Connection, table: str, seconds: float) -> str:
    """What to select from, once it is known to be a table of ours."""
    end = time.monotonic() + seconds
    base.set_progress_handler(lambda: time.monotonic() > end, 20_000)
    base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST)
    base.execute("PRAGMA trusted_schema=OFF")
    base.execute("PRAGMA query_only=ON")
    kinds = base.execute("SELECT type FROM sqlite_master WHERE name = ?", (table,)).fetchall()
    if kinds != [("table",)]:
        raise DataError(f"{METRICS} has no table {table!r}")
    return source_of(base, METRICS, table)
