"""The metrics of a run in one SQLite file: six tables, one commit per round, readable while the run goes on."""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedkin.errors import DataError, unknown


def _columns(text: str) -> dict[str, str]:
    kinds = {"i": "INTEGER", "r": "REAL", "t": "TEXT"}
    return {name: kinds[kind] for name, _, kind in (word.partition(":") for word in text.split())}


TABLES: dict[str, dict[str, str]] = {
    "rounds": _columns(
        "round:i final:i micro:r macro:r worst_decile:r std:r test_loss:r train_loss:r bytes_down:i bytes_up:i "
        "seconds:r participants:i failed:i removed:i client_steps:i training:r evaluating:r writing:r wall:r judged:i "
        "judgeable:i lr:r metrics:t validation_micro:r validation_macro:r validation_worst_decile:r validation_std:r "
        "validation_loss:r validation_metrics:t validated:i"
    ),
    "clients": _columns("round:i final:i client:i name:t correct:i count:i accuracy:r loss:r metrics:t validation:r"),
    "exchanges": _columns("id:i round:i phase:t asked:i answered:i bytes_down:i bytes_up:i seconds:r"),
    "traffic": _columns("round:i phase:t exchange:i client:i bytes_down:i bytes_up:i seconds:r"),
    "events": _columns("round:i phase:t client:i kind:t reason:t"),
    "notes": _columns("round:i name:t value:t"),
}
ACCURACIES = ("micro", "macro", "worst_decile", "std")
FIRST = {"rounds": 15, "clients": 8}
"""How many columns a table had in the first version: later ones come after these, and may be missing in an old file."""
KEYS = {"rounds": "round, final", "clients": "round, final, client", "exchanges": "id"}
MOST_ROWS = 20_000_000
PATIENCE = 10.0  # seconds a reader waits for a commit
BRIEF, LONG = 1.0, 60.0  # seconds a commit waits for readers: one that can be made up for, one that cannot


def create(path: Path) -> None:
    with sqlite3.connect(path) as base:
        for name in TABLES:
            create_table(base, name)
    base.close()


def create_table(base: sqlite3.Connection, name: str, rows: Iterable[Sequence[Any]] = ()) -> None:
    """One of the tables, with these rows."""
    columns = TABLES[name]
    lines = [f"{c} {kind}" for c, kind in columns.items()]
    if name == "exchanges":
        lines[0] += " PRIMARY KEY"
    elif name in KEYS:
        lines.append(f"PRIMARY KEY ({KEYS[name]})")
    base.execute(f"CREATE TABLE {name} ({', '.join(lines)})")
    _insert(base, name, (tuple(_plain(v) for v in row) for row in rows))


def _insert(base: sqlite3.Connection, name: str, rows: Iterable[Sequence[Any]]) -> None:
    base.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(TABLES[name]))})", rows)


class Database:
    """The writing end: rows gather in memory and are written by `commit`, all or none."""

    def __init__(self, path: Path) -> None:
        self._base = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=BRIEF, isolation_level=None, check_same_thread=False
        )
        self._base.execute("PRAGMA journal_mode=DELETE")
        self._base.execute("PRAGMA synchronous=NORMAL")
        for table, columns in TABLES.items():
            found = self._base.execute(f"SELECT name FROM pragma_table_info('{table}')").fetchall()
            for name in list(columns)[len(found) :] if found else ():  # a run that an older version began
                self._base.execute(f"ALTER TABLE {table} ADD COLUMN {name} {columns[name]}")
        self._waiting: dict[str, list[tuple[Any, ...]]] = {}

    def add(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        width = len(TABLES[table])
        found = [tuple(_plain(v) for v in row) for row in rows]
        assert all(len(row) == width for row in found)
        self._waiting.setdefault(table, []).extend(found)

    def commit(self, must: bool = True) -> None:
        """Write what has gathered. A reader in the way delays it to the next time, unless it `must` be now."""
        if not any(self._waiting.values()):
            return
        end = time.monotonic() + LONG
        while True:
            try:
                return self._commit()
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or (must and time.monotonic() > end):
                    raise
                if not must:
                    return

    def _commit(self) -> None:
        self._base.execute("BEGIN IMMEDIATE")
        try:
            for table, rows in self._waiting.items():
                _insert(self._base, table, rows)
            self._base.execute("COMMIT")
        except BaseException:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
            raise
        self._waiting.clear()

    def check(self) -> None:
        """An error if the file is damaged anywhere, not only where one happens to read."""
        found = self._base.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(str(found).splitlines()[-1])
        for table in TABLES:
            self._base.execute(f"SELECT 1 FROM {table} LIMIT 1")

    def marks(self) -> dict[str, int]:
        """How far each table is written: what a checkpoint remembers."""
        return {t: self._base.execute(f"SELECT coalesce(max(rowid), 0) FROM {t}").fetchone()[0] for t in TABLES}

    def rewind(self, marks: Mapping[str, int]) -> None:
        """Forget what was written after these marks."""
        self._waiting.clear()
        self._base.execute("BEGIN IMMEDIATE")
        for table in TABLES:
            self._base.execute(f"DELETE FROM {table} WHERE rowid > ?", (marks[table],))
        self._base.execute("COMMIT")

    def close(self) -> None:
        self._base.close()


@contextmanager
def _reading(path: Path, patience: float) -> Iterator[sqlite3.Connection]:
    """A file that may be anybody's: nothing in it is run."""
    base = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=patience)
    try:
        base.execute("PRAGMA trusted_schema=OFF")
        yield base
    finally:
        base.close()


def salvage(path: Path, table: str) -> list[tuple[Any, ...]]:
    """The rows of a damaged file's table up to the first that cannot be read."""
    rows: list[tuple[Any, ...]] = []
    with suppress(sqlite3.Error, UnicodeDecodeError, OverflowError), _reading(path, BRIEF) as base:
        rows.extend(base.execute(f"SELECT {', '.join(TABLES[table])} FROM {table} ORDER BY rowid"))
    return rows


def rewrite(path: Path, tables: Mapping[str, Iterable[Sequence[Any]]]) -> dict[str, int]:
    """A new file with these rows in place of what is there; where its tables end."""
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.unlink(missing_ok=True)
    create(fresh)
    base = Database(fresh)
    try:
        for table, rows in tables.items():
            base.add(table, rows)
        base.commit()
        marks = base.marks()
    finally:
        base.close()
    os.replace(fresh, path)
    Path(f"{path}-journal").unlink(missing_ok=True)
    return marks


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_table(
    path: Path, name: str, where: Mapping[str, Any] | None = None, columns: Sequence[str] | None = None
) -> dict[str, list[Any]]:
    """A table's columns. The file may be anybody's: only plain tables of ours are read, nothing is run, and nothing
    written, not even to roll back a commit that was cut short: what a journal says is its author's to say."""
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    wanted = list(columns) if columns is not None else list(TABLES[name])
    for column in [*wanted, *(where or {})]:
        if column not in TABLES[name]:
            raise unknown(f"column of {name}", column, TABLES[name])
    if path.is_symlink() or not path.is_file():
        raise DataError(f"{path} is missing or not a plain file")
    conditions = " AND ".join(f"{c} IS ?" for c in where) if where else "1"
    rest = f"WHERE {conditions} ORDER BY rowid LIMIT {MOST_ROWS}"
    try:
        rows = _query(path, name, ", ".join(wanted), rest, list((where or {}).values()))
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    return {column: [row[i] for row in rows] for i, column in enumerate(wanted)}


def source_of(base: sqlite3.Connection, file: str, name: str) -> str:
    """What to select from to have all columns: the table, with NULL for those that an older one lacks. A table that is
    none of ours is refused."""
    found = base.execute(f"SELECT name, hidden FROM pragma_table_xinfo('{name}')").fetchall()
    ours = list(TABLES[name])
    lacking = [c for c in ours[: FIRST.get(name, len(ours))] if (c, 0) not in found]  # hidden: a generated column
    if lacking:
        raise DataError(f"{file}: table {name!r} lacks the columns {', '.join(lacking)}")
    if [(c, 0) for c in ours[: len(found)]] != found:
        raise DataError(f"{file}: table {name!r} has other columns than a run's")
    missing = ", ".join(f"NULL AS {c}" for c in ours[len(found) :])
    return f"(SELECT rowid, *, {missing} FROM {name})" if missing else name


def unreadable(path: Path, error: Exception) -> DataError:
    """Why the metrics of a run cannot be read, and what helps."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_READONLY:  # there is a journal to be rolled back
        run = path.parent.name
        return DataError(f"{path}: the run was cut short while writing; fedkin resume {run} repairs it and goes on")
    return DataError(f"{path} cannot be read as the metrics of a run: {error}")


def _query(path: Path, name: str, columns: str, rest: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
    with _reading(path, PATIENCE) as base:
        base.execute("PRAGMA query_only=ON")
        if base.execute("SELECT type FROM sqlite_master WHERE name = ?", (name,)).fetchall() != [("table",)]:
            raise DataError(f"{path} has no table {name!r}")
        query = f"SELECT {columns} FROM {source_of(base, path.name, name)} {rest}"
        return base.execute(query, values).fetchall()
