"""Columns of tables as numbers: which are numbers and which categories, agreed over all clients, and what is missing.

A column whose values are words (or true and false, or of pandas' type category) is a category. One that holds numbers
and words is refused: nobody knows what was meant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkin.data.columns import Table, from_frame, is_frame
from fedkin.data.dataset import MISSING, Array, Bools
from fedkin.errors import DataError, UsageError
from fedkin.preparation import Column, Floats

MOST_CATEGORIES = 1000
"""Words that a category may have: each becomes an input of the network."""
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Cells:
    """The values of a column: which are missing, and the others as numbers, or as words."""

    missing: Bools
    numbers: Floats | None
    words: list[str]


def cells(table: Table, name: str, category: bool = False) -> Cells:
    """A column's values. `category`: numbers are words here, too."""
    values = table.column(name)
    if values.dtype.kind in "mMcV":
        kind = {"c": "complex numbers", "V": "records"}.get(values.dtype.kind, "dates")
        raise DataError(f"{table.where}: column {name!r} is not numeric ({kind}); encode it as numbers first")
    if values.dtype.kind in "iuf" and not category:
        with np.errstate(over="ignore"):
            return _finite(table, name, values.astype(np.float64), np.isnan(values))
    each = values.tolist()
    if any(isinstance(v, list | dict | tuple | set | np.ndarray) for v in each):
        raise DataError(f"{table.where}: column {name!r} is not numeric (a nested value); encode it as numbers first")
    try:
        said = [v.decode() if isinstance(v, bytes) else str(v).strip() for v in each]
    except UnicodeDecodeError as error:
        raise DataError(f"{table.where}: column {name!r} is not valid text ({error})") from None
    missing = np.array([word in MISSING for word in said], bool)
    if {word.lower() for word, absent in zip(said, missing.tolist(), strict=True) if not absent} <= {"true", "false"}:
        said = [word if absent else word.capitalize() for word, absent in zip(said, missing.tolist(), strict=True)]
    if category:
        return Cells(missing, None, [_named(word) for word in said])
    numeric = [not isinstance(v, bool) and _is_number(word) for v, word in zip(each, said, strict=True)]
    present = [n for n, absent in zip(numeric, missing.tolist(), strict=True) if not absent]
    if not any(present):
        return Cells(missing, None, said)
    if not all(present):
        i = next(i for i, n in enumerate(numeric) if not n and not missing[i])
        raise DataError(
            f"{table.where}: column {name!r} is not numeric (row {table.rows[i]}: {said[i][:40]!r}), but holds "
            f"numbers, too: mend it (a missing value is an empty cell), or say categories={name!r} if these are names"
        )
    found = np.array([float("nan") if absent else float(w) for w, absent in zip(said, missing, strict=True)])
    return _finite(table, name, found, missing)


def _finite(table: Table, name: str, found: Floats, missing: Bools) -> Cells:
    odd = ~missing & ~(np.abs(found) <= LARGEST)
    if odd.any():
        row = table.rows[int(np.argmax(odd))]
        raise DataError(
            f"{table.where}: column {name!r} holds a value that is not finite in row {row}; mend or drop such samples"
        )
    return Cells(missing, found, [])


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _named(word: str) -> str:
    """The word that a number is as a category: 1.0 is 1."""
    return str(int(float(word))) if _is_number(word) and float(word).is_integer() else word


def agreed(tables: Sequence[Table], names: Sequence[str], categories: Collection[str]) -> tuple[Column, ...]:
    """What each column is in all tables: a number, or a category with all words of all tables, sorted."""
    for name in categories:
        if name not in names:
            raise UsageError(f"categories={name!r}: no such column; there are {', '.join(names)}")
    return tuple(_agreed(tables, name, name in categories) for name in names)


def _agreed(tables: Sequence[Table], name: str, category: bool) -> Column:
    category = category or any(name in table.categories for table in tables)
    found = [(table, cells(table, name, category)) for table in tables]
    filled = [(table, c) for table, c in found if not c.missing.all()]
    if not filled:
        raise DataError(f"{tables[0].where}: column {name!r} has no value in any row; leave it out")
    numbers, words = ([t for t, c in filled if (c.numbers is None) is kind] for kind in (False, True))
    if not words:
        return Column(name)
    if numbers:
        raise DataError(
            f"{words[0].where}: column {name!r} is not numeric, but it is in {numbers[0].where}: mend it, or say "
            f"categories={name!r} if its numbers are names"
        )
    every = sorted({w for _, c in filled for w, absent in zip(c.words, c.missing, strict=True) if not absent})
    if len(every) > MOST_CATEGORIES:
        raise DataError(
            f"{words[0].where}: column {name!r} has {len(every):,} different words, and each would be an input of the "
            f"network; group them, or leave the column out (at most {MOST_CATEGORIES:,}). Texts need a tokenizer, from "
            "Python: fk.run(..., tokenizer=..., length=...)"
        )
    return Column(name, tuple(every))


def encoded(table: Table, columns: Sequence[Column]) -> Floats:
    """The table's rows [n, columns], missing values as NaN, categories as the numbers of their words."""
    made = [_encoded(table, column) for column in columns]
    return np.stack(made, axis=1) if made else np.zeros((len(table.rows), 0))


def _encoded(table: Table, column: Column) -> Floats:
    found = cells(table, column.name, bool(column.categories))
    if not column.categories:
        if found.numbers is not None or found.missing.all():
            return np.full(len(found.missing), np.nan) if found.numbers is None else found.numbers
        i = int(np.argmin(found.missing))
        raise DataError(
            f"{table.where}: column {column.name!r} is not numeric (row {table.rows[i]}: {found.words[i][:40]!r}), but "
            "the model takes a number there"
        )
    codes = {word: float(code) for code, word in enumerate(column.categories)}
    unknown = [i for i, w in enumerate(found.words) if w not in codes and not found.missing[i]]
    if unknown:
        i = unknown[0]
        raise DataError(
            f"{table.where}: column {column.name!r} holds {found.words[i][:40]!r} in row {table.rows[i]}, a word that "
            f"no client had; known are {', '.join(column.categories[:20])}"
        )
    pairs = zip(found.words, found.missing, strict=True)
    return np.array([float("nan") if absent else codes[word] for word, absent in pairs])


def aligned(own: Sequence[Column], raw: Floats, wanted: Sequence[Column], by: str) -> Floats:
    """Rows that were encoded by their own columns, with the columns in the order, and the words with the numbers, that
    `by` has."""
    places = {column.name: i for i, column in enumerate(own)}
    kinds, theirs = ({c.name: bool(c.categories) for c in columns} for columns in (own, wanted))
    for name in {**theirs, **kinds}:
        said = "is missing, which {} has" if name not in kinds else "is not in {}" if name not in theirs else ""
        if kinds.get(name) is not theirs.get(name):
            said = said or f"is {_sort(kinds[name])}, in {{}} it is {_sort(theirs[name])}"
            raise DataError(f"column {name!r} {said.format(by)}; all need the same columns")
    made = np.empty((len(raw), len(wanted)))
    for i, column in enumerate(wanted):
        values, words = raw[:, places[column.name]], own[places[column.name]].categories
        unknown = [word for word in words if word not in column.categories]
        if unknown:
            raise DataError(f"column {column.name!r} has the word {unknown[0]!r}, which nobody in {by} has")
        if words:
            codes = np.array([column.categories.index(word) for word in words], np.float64)
            values = np.array([np.nan if np.isnan(v) else codes[int(v)] for v in values])
        made[:, i] = values
    return made


def _sort(words: bool) -> str:
    return "a category" if words else "a number"


def lacking(table: Table, columns: Sequence[Column], raw: Floats) -> str:
    """Where the first missing value is, in words; nothing where none is missing."""
    missing = np.isnan(raw)
    if not missing.any():
        return ""
    row, place = (int(v) for v in np.argwhere(missing)[0])
    return f"{table.where}: column {columns[place].name!r} has no value in row {table.rows[row]}"


def table_of(x: Any, names: Sequence[str], where: str = "the samples") -> Table:
    """Samples as a table: a data frame, a dictionary of columns, a list of dictionaries, or rows in the order of
    `names`."""
    if isinstance(x, Table):
        return x
    if is_frame(x):
        return from_frame(where, x)
    if isinstance(x, Mapping):
        return _of_columns({str(k): v for k, v in x.items()}, where)
    if isinstance(x, list | tuple) and x and all(isinstance(item, Mapping) for item in x):
        return from_items(x, where)
    try:
        array = np.asarray(x, dtype=None if isinstance(x, np.ndarray) else object)
    except Exception as error:  # somebody else's class can fail in any way
        raise DataError(f"{where}: a {type(x).__name__} that does not become a table ({error})") from error
    if array.ndim != 2 or array.shape[1] != len(names):
        raise DataError(
            f"{where} have shape {array.shape}: give a data frame, a dictionary of columns, a list of dictionaries, or "
            f"rows of {len(names)} values ({', '.join(names[:20])})"
        )
    return Table(where, tuple(names), tuple(array[:, i] for i in range(len(names))), range(len(array)))


def from_items(items: Sequence[Mapping[Any, Any]], where: str) -> Table:
    """A list of dictionaries, one a row. All have the same keys."""
    keys = [str(key) for key in items[0]]
    for i, item in enumerate(items):
        if {str(key) for key in item} != set(keys):
            found = ", ".join(map(repr, item)) or "nothing"
            raise DataError(f"{where}: item {i} has {found}, the first {', '.join(map(repr, keys))}; give all the same")
    return _of_columns({str(key): [item[key] for item in items] for key in items[0]}, where)


def _of_columns(columns: Mapping[str, Any], where: str) -> Table:
    made = {name: _column(values, name, where) for name, values in columns.items()}
    sizes = {len(values) for values in made.values()}
    if len(sizes) != 1:
        raise DataError(f"{where}: columns of different lengths; give one value a row")
    return Table(where, tuple(made), tuple(made.values()), range(sizes.pop()))


def _column(values: Any, name: str, where: str) -> Array:
    try:
        found = values if isinstance(values, np.ndarray) else np.array([*values, None], object)[:-1]
    except Exception as error:  # somebody else's class can fail in any way
        raise DataError(f"{where}: {name!r} does not become a column ({error}); give one value a row") from error
    if found.ndim != 1:
        raise DataError(f"{where}: {name!r} has values of shape {found.shape[1:]} a row; a column holds single ones")
    return found
