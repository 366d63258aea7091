"""Tables of samples: CSV, parquet, data frames. Columns go by name; what is wrong is said with the file and the row."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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

    def __post_init__(self) -> None:
        for place, name in enumerate(self.header, start=1):
            if not name.strip():
                raise DataError(
                    f"{self.where}: column {place} of {len(self.header)} has no name; name it, or leave it "
                    "out (an index is no feature)"
                )
            if name in self.header[: place - 1]:
                raise DataError(f"{self.where}: two columns are called {name!r}; give each a name of its own")

    def split(
        self, label: str, like: Table | None = None, targets: Targets = "classes"
    ) -> tuple[tuple[str, ...], Array, Array]:
        """The names of the features, the features [n, d] and the targets; features in the order of `like`."""
        aside = self.target_columns(label, targets)
        order = None if like is None else [n for n in like.header if n not in like.target_columns(label, targets)]
        names, features = self.features(aside, order, "" if like is None else like.where)
        return names, features, self.labels(aside, targets)

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

    def features(
        self, aside: Sequence[str], order: Sequence[str] | None = None, by: str = ""
    ) -> tuple[tuple[str, ...], Array]:
        """All columns but those of the targets, as numbers; in `order` if there is one, which `by` asks for."""
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
        return tuple(names), np.stack([self._numbers(name) for name in names], axis=1)

    def labels(self, aside: Sequence[str], targets: Targets = "classes") -> Array:
        """The targets that stand in these columns."""

        def place(i: int) -> str:
            return f"row {self.rows[i]}"

        if targets == "classes":
            return checked_labels(self._column(aside[0]), self.where, place)
        return read_targets(targets, np.stack([self._numbers(name) for name in aside], axis=1), self.where, place)

    def _column(self, name: str) -> Array:
        return self.columns[self.header.index(name)]

    def _numbers(self, name: str) -> Array:
        values = self._column(name)
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
        columns = tuple(np.asarray(frame.iloc[:, i]) for i in range(len(header)))
    except Exception as error:  # somebody else's class can fail in any way
        raise DataError(f"{where} is a {type(frame).__name__} that cannot be read ({error}); give (x, y)") from error
    return Table(where, header, columns, range(len(frame)))


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
    except (OSError, ValueError, TypeError, KeyError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: expected a parquet file, found: {error}") from error
    return Table(str(file), tuple(table.column_names), columns, range(1, table.num_rows + 1))
