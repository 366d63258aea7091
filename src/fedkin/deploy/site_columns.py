"""The columns of sites' tables: what each site tells of its own, what all agree on, and a site's rows in that form.

A site tells the names of its columns and the words of its categories, as it tells the names of its classes; the server
puts the words of all together. Numbers never travel, nor how often a word occurs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedkin.data.encoding import MOST_CATEGORIES, aligned
from fedkin.errors import DataError
from fedkin.preparation import Column, Floats

MOST_COLUMNS = 10_000
MOST_WORDS = 10_000  # of all columns, at all sites
LONGEST = 200  # characters of a name or a word

Told = tuple[tuple[str, tuple[str, ...]], ...]


def told(columns: object, samples: int = MOST_CATEGORIES) -> Told:
    """What came over the network, checked; DataError for anything else. `samples`: how many rows there are."""
    if not isinstance(columns, list) or len(columns) > MOST_COLUMNS:
        raise DataError("its columns are no proper list")
    found: list[tuple[str, tuple[str, ...]]] = []
    for entry in columns:
        name, words = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if not isinstance(name, str) or not isinstance(words, list) or not _texts([name, *words]):
            raise DataError("its columns are not names with the words of each")
        most = min(samples, MOST_CATEGORIES)
        if len(set(words)) < len(words) or len(words) > most:
            raise DataError(f"its column {name!r} has a word twice, or more than {most} words")
        found.append((name, tuple(words)))
    if len({name for name, _ in found}) < len(found):
        raise DataError("two of its columns have one name")
    return tuple(found)


def _texts(values: Sequence[object]) -> bool:
    return all(isinstance(value, str) and len(value) <= LONGEST for value in values)


def kinds(columns: Told) -> tuple[tuple[str, bool], ...]:
    """What must be alike at all sites: the names, and which are categories. The order is each site's own."""
    return tuple(sorted((name, bool(words)) for name, words in columns))


def united(each: Sequence[Told]) -> tuple[Column, ...]:
    """The columns in the order of the first site, categories with the words of all."""
    found: dict[str, set[str]] = {name: set() for name, _ in each[0]}
    for columns in each:
        for name, words in columns:
            found[name] |= set(words)
    return tuple(Column(name, tuple(sorted(every))) for name, every in found.items())


def too_many_words(sites: Sequence[tuple[str, Told]]) -> dict[str, str]:
    """Sites with whose words there would be more than a network may have inputs for, and that in words. Those that name
    few come first, so that nobody keeps others out by naming many."""
    odd: dict[str, str] = {}
    found: dict[str, set[str]] = {}
    for name, columns in sorted(sites, key=lambda site: sum(len(words) for _, words in site[1])):
        after = {column: found.get(column, set()).union(words) for column, words in columns}
        each, total = max(map(len, after.values()), default=0), sum(map(len, after.values()))
        if each > MOST_CATEGORIES or total > MOST_WORDS:
            odd[name] = f"with its words a table has more than {MOST_CATEGORIES} in a column, or {MOST_WORDS} in all"
        else:
            found |= after
    return odd


def plain(columns: Sequence[Column]) -> list[list[Any]]:
    return [[column.name, list(column.categories)] for column in columns]


def as_agreed(own: Sequence[Column], raw: Floats, agreed: object) -> tuple[tuple[Column, ...], Floats]:
    """This site's rows with the columns and words as all have agreed on."""
    columns = tuple(Column(name, words) for name, words in told(agreed))
    return columns, aligned(own, raw, columns, "the federation")
