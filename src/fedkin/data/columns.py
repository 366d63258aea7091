"""Tables of samples: CSV, parquet, data frames. Columns go by name; what is wrong is said with the file and the row."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin.data.dataset import Array, checked_labels
from fedkin.data.targets import Targets, read_targets
from fedkin.errors import DataError, UsageError


@dataclass(frozen=True, eq=False)
class Table:
    """Named columns of one length. `where` names it in errors; `rows` are the numbers its rows go by there."""

    where: str
    header: tuple[str, ...]
    columns: tuple[Array, ...]
    rows: Sequence[int]
    categories: frozenset[str] = frozenset()
    """Columns that are categories, whatever their values: so their type says."""
    tests: int | None = None
    """How many of the last rows are for testing; None where nobody has said."""

    def __post_init__(self) -> None:
        for place, name in enumerate(self.header, start=1):
            if not name.strip():
                raise DataError(
                    f"{self.where}: column {place} of {len(self.header)} has no name; name it, or leave it "
                    "out (an index is no feature)"
                )
            if name in self.header[: place - 1]:
                raise DataError(f"{self.where}: two columns are called {name!r}; give each a name of its own")

    def take(self, rows: NDArray[np.int64], where: str) -> Table:
        """Some of the rows, which keep their numbers."""
        numbers = [self.rows[i] for i in rows.tolist()]
        return replace(self, where=where, columns=tuple(c[rows] for c in self.columns), rows=numbers)

    def only(self, names: Sequence[str], by: str) -> Table:
        """The columns of these names, which `by` asks for, in their order. Those that are not asked for stay out."""
        for name in names:
            if name not in self.header:
                raise DataError(f"{self.where}: column {name!r} is missing, which {by} has; all need the same columns")
        return replace(self, header=tuple(names), columns=tuple(self.column(name) for name in names))

    def without(self, name: str) -> Table:
        """All columns but one."""
        kept = [i for i, n in enumerate(self.header) if n != name]
        header, columns = tuple(self.header[i] for i in kept), tuple(self.columns[i] for i in kept)
        return replace(self, header=header, columns=columns)

    def target_columns(self, label: str, targets: Targets = "classes") -> tuple[str, ...]:
        """The columns that hold the targets: `label`, or of several those called `label_...`; time and event."""
        wanted: tuple[str, ...] = ("time", "event") if targets == "survival" else (label,)
        several = tuple(name for name in self.header if name.startswith(f"{label}_"))
        if targets in ("numbers", "labels") and label not in self.header and several:
            return several
        for name in wanted:
            if name not in self.header:
                found = ", ".join(self.header) or "nothing"
                raise DataError(f"{self.where}: expected a column {name!r}, found {found}")
        if targets == "tokens":
            raise DataError(f"{self.where}: a table has one target a row; give tokens as arrays (.npz)")
        return wanted

    def features(self, aside: Sequence[str], order: Sequence[str] | None = None, by: str = "") -> tuple[str, ...]:
        """The names of all columns but those of the targets; in `order` if there is one, which `by` asks for."""
        own = [name for name in self.header if name not in aside]
        if not own:
            raise DataError(
                f"{self.where}: expected at least one column beside {', '.join(map(repr, aside)) or 'none'}"
            )
        names = own if order is None else list(order)
        for name in names:
            if name not in own:
                raise DataError(f"{self.where}: column {name!r} is missing, which {by} has; all need the same columns")
        for name in own:
            if name not in names:
                raise DataError(f"{self.where}: column {name!r} is not in {by}; all need the same columns")
        return tuple(names)

    def labels(self, aside: Sequence[str], targets: Targets = "classes") -> Array:
        """The targets that stand in these columns."""

        def place(i: int) -> str:
            return f"row {self.rows[i]}"

        if targets == "classes":
            return checked_labels(self.column(aside[0]), self.where, place)
        return read_targets(targets, np.stack([self._numbers(name) for name in aside], axis=1), self.where, place)

    def texts(self, label: str, targets: Targets) -> list[Any]:
        """The texts, which stand in the one column beside the targets, and the targets; of training and of testing,
        where that is known."""
        aside = self.target_columns(label, targets)
        names = self.features(aside)
        if len(names) > 1:
            raise UsageError(
                f"{self.where}: beside the targets there are the columns {', '.join(names)}, and a tokenizer takes "
                "one, the texts; leave the others out"
            )
        x, y = self.column(names[0]), self.labels(aside, targets)
        for row, text in zip(self.rows, x.tolist(), strict=True):
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"{self.where}: column {names[0]!r} has no text in row {row} ({str(text)[:40]!r})")
        at = len(x) - (self.tests or 0)
        return [x, y] if self.tests is None else [x[:at], y[:at], x[at:], y[at:]]

    def column(self, name: str) -> Array:
        """What stands in the column of this name."""
        return self.columns[self.header.index(name)]

    def _numbers(self, name: str) -> Array:
        values = self.column(name)
        if values.dtype.kind in "mM":
            raise DataError(f"{self.where}: column {name!r} is not numeric (dates); encode it as numbers first")
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                found = values.astype(np.float32)
        except (TypeError, ValueError, OverflowError):
            each = zip(self.rows, values.tolist(), strict=True)
            row, value = next(((r, v) for r, v in each if not _is_number(v)), (self.rows[0], "a nested value"))
            if value is None or not str(value).strip():
                raise DataError(
                    f"{self.where}: column {name!r} has no value in row {row}; impute or drop such samples"
                ) from None
            raise DataError(
                f"{self.where}: column {name!r} is not numeric (row {row}: {str(value)[:40]!r}); encode it "
                "as numbers first"
            ) from None
        if not np.isfinite(found).all():
            row = self.rows[int(np.argmin(np.isfinite(found)))]
            raise DataError(
                f"{self.where}: column {name!r} holds a value that is missing or not finite in row {row}; "
                "impute or drop such samples"
            )
        return found


def owners_of(table: Table, name: str) -> tuple[list[str], NDArray[np.int64]]:
    """The clients that a column names, in order, and whose each row is."""
    if name not in table.header:
        raise UsageError(
            f"client_column={name!r}: {table.where} has no such column; it has {', '.join(table.header) or 'nothing'}"
        )
    try:
        found = checked_labels(table.column(name), table.where, lambda i: f"row {table.rows[i]}")
    except DataError as error:
        raise DataError(f"{error} (of the column {name!r}, which says whose a row is)") from None
    owners, whose = np.unique(found, return_inverse=True)
    return [str(owner) for owner in owners.tolist()], whose.astype(np.int64)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, np.ndarray | list)


def read_table(file: Path) -> Table:
    """A .csv or .parquet file."""
    return _read_csv(file) if file.suffix == ".csv" else _read_parquet(file)


def from_frame(where: str, frame: Any) -> Table:
    """A data frame (pandas, or what behaves like one)."""
    try:
        header = tuple(str(name) for name in frame.columns)
        kinds = [str(kind) for kind in frame.dtypes]
        columns = tuple(np.asarray(frame.iloc[:, i]) for i in range(len(header)))
    except Exception as error:  # somebody else's class can fail in any way
        raise DataError(f"{where} is a {type(frame).__name__} that cannot be read ({error}); give (x, y)") from error
    said = frozenset(name for name, kind in zip(header, kinds, strict=True) if kind == "category")
    return Table(where, header, columns, range(len(frame)), said)


def is_frame(value: object) -> bool:
    return hasattr(value, "columns") and hasattr(value, "iloc")


def _read_csv(file: Path) -> Table:
    rows: list[list[str]] = []
    numbers: list[int] = []
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream)
            header = next(reader, [])
            for row in reader:
                if row:
                    rows.append(row)
                    numbers.append(reader.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file}: expected a CSV file in UTF-8, found: {error}") from error
    for number, row in zip(numbers, rows, strict=True):
        if len(row) != len(header):
            raise DataError(f"{file}: expected {len(header)} columns, found {len(row)} in row {number}")
    columns = tuple(np.array([row[i] for row in rows], dtype=str) for i in range(len(header)))
    return Table(str(file), tuple(header), columns, numbers)


def _read_parquet(file: Path) -> Table:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(f"{file}: parquet needs pyarrow: pip install fedkin[data]") from error
    try:
        table = pyarrow.parquet.ParquetFile(file).read()
        columns = tuple(column.to_numpy() for column in table.columns)
        said = frozenset(f.name for f in table.schema if pyarrow.types.is_dictionary(f.type))
        for entry in (table.schema.pandas_metadata or {}).get("columns", []):
            said |= {entry["name"]} if entry["pandas_type"] == "categorical" else set()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: expected a parquet file, found: {error}") from error
    return Table(str(file), tuple(table.column_names), columns, range(1, table.num_rows + 1), said)
