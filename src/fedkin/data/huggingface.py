"""Data sets of Hugging Face's `datasets`: their columns as tables, arrays or images, by the types that they name.

The package itself is never imported: whoever has such an object has it. A data set in splits (`DatasetDict`) is one of
training and test rows; its split is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedkin.data.columns import Table, owners_of
from fedkin.data.dataset import Array
from fedkin.data.image_folder import alike, pixels
from fedkin.data.manner import USUAL, Reading
from fedkin.errors import DataError, UsageError

TRAIN, TEST = "train", "test"
ARRAYS = ("Sequence", "List", "LargeList", "Array2D", "Array3D", "Array4D", "Array5D")
"""Types of columns that hold numbers, many a row."""


def is_huggingface(value: object) -> bool:
    """Whether this is a data set of `datasets`, or one in splits."""
    return _is_set(value) or (isinstance(value, Mapping) and bool(value) and all(map(_is_set, value.values())))


def _is_set(value: object) -> bool:
    return all(hasattr(value, name) for name in ("features", "column_names", "with_format"))


def splits_of(where: str, data: Any) -> dict[str, Any]:
    """The data sets in it: train, and perhaps test."""
    found = dict(data) if isinstance(data, Mapping) else {TRAIN: data}
    if TRAIN not in found or not set(found) <= {TRAIN, TEST}:
        raise UsageError(
            f"{where} has the splits {', '.join(map(repr, found))}: give one that has 'train', or 'train' and 'test' "
            "(validation samples are set aside by validation_share), or one data set, as in data['train']"
        )
    for name, one in found.items():
        if not (hasattr(one, "__len__") and hasattr(one, "__getitem__")):
            raise UsageError(f"{where}: {name!r} is a stream of samples: give a data set that has a length")
        if _format(one)[0] == "custom":
            raise UsageError(
                f"{where}: {name!r} makes its samples anew each time they are asked for (set_transform): do it once, "
                "with data.map(...)"
            )
    return found


def has_images(data: Any) -> bool:
    """Whether a column holds images."""
    sets = data.values() if isinstance(data, Mapping) else [data]
    return any(type(kind).__name__ == "Image" for one in sets for kind in (one.features or {}).values())


def class_names(data: Any, label: str) -> tuple[str, ...]:
    """What the classes are called, in their order, where the labels' type says so."""
    one = next(iter(data.values())) if isinstance(data, Mapping) else data
    kind: Any = (one.features or {}).get(label)
    return tuple(kind.names) if type(kind).__name__ == "ClassLabel" else ()


def read_huggingface(where: str, data: Any, how: Reading) -> Table | list[Any]:
    """A table where each row has single values; else x and y, or those of training and of testing."""
    splits = splits_of(where, data)
    first = splits[TRAIN]
    header = _columns(first)
    for name, one in splits.items():
        if set(_columns(one)) != set(header):
            raise DataError(
                f"{where}: {name!r} has the columns {', '.join(_columns(one))}, 'train' {', '.join(header)}; all need "
                "the same"
            )
    sizes = [len(one) for one in splits.values()]
    if not sizes[0]:
        raise DataError(f"{where} has no samples: leave it out or give it some")
    single = [name for name in header if _is_single(where, name, first.features[name])]
    table = _table(where, list(splits.values()), single, sizes[1] if TEST in splits else None)
    if len(single) == len(header):
        return table
    aside: tuple[str, ...] = (how.label,)
    if how.label in header and how.label not in single:
        y = _arrays(where, splits, how.label)
    else:
        aside = table.target_columns(how.label, how.targets)
        y = table.labels(aside, how.targets)
    x = _inputs(where, splits, [name for name in header if name not in aside], how)
    if TEST not in splits:
        return [x, y]
    return [part for rows in (slice(sizes[0]), slice(sizes[0], None)) for part in (_rows(x, rows), y[rows])]


def new_samples(where: str, data: Any) -> Any:
    """Samples without targets: a table, one array, or several by name."""
    if isinstance(data, Mapping):
        raise UsageError(f"{where} are in splits ({', '.join(map(repr, data))}): give one of them")
    splits = splits_of(where, data)
    header = _columns(data)
    single = [_is_single(where, name, data.features[name]) for name in header]
    if all(single):
        return _table(where, [data], header)
    return _inputs(where, splits, header, USUAL)


def by_client(where: str, data: Any, column: str) -> dict[str, Any]:
    """The rows of each client that a column names, as data sets without that column."""
    parts: dict[str, dict[str, Any]] = {}
    for name, one in splits_of(where, data).items():
        if column not in _columns(one):
            raise UsageError(
                f"client_column={column!r}: {where} has no such column; it has {', '.join(_columns(one)) or 'nothing'}"
            )
        if not len(one):
            continue
        owners, whose = owners_of(_table(f"{where}: {name!r}", [one], [column]), column)
        rest = one.remove_columns([column])
        for number, owner in enumerate(owners):
            parts.setdefault(owner, {})[name] = rest.select(np.flatnonzero(whose == number))
    untrained = [owner for owner, own in parts.items() if TRAIN not in own]
    if untrained:
        raise DataError(f"{where}: client {untrained[0]!r} has test samples, and none for training; leave it out")
    in_splits = isinstance(data, Mapping) and TEST in data
    none = {owner: own[TRAIN].select([]) for owner, own in parts.items()} if in_splits else {}
    return {
        owner: {TRAIN: own[TRAIN], TEST: own.get(TEST, none[owner])} if in_splits else own[TRAIN]
        for owner, own in parts.items()
    }


# ---------------------------------------------------------------- columns


def _columns(one: Any) -> list[str]:
    """The columns that the data set shows."""
    shown = _format(one)[1]
    return list(one.column_names if shown is None else shown)


def _format(one: Any) -> tuple[str | None, Sequence[str] | None]:
    found = getattr(one, "format", None) or {}
    return found.get("type"), found.get("columns")


def _is_single(where: str, name: str, kind: Any) -> bool:
    """Whether a row has one value there, and not many; whatever is neither is refused."""
    called = type(kind).__name__
    if called in ("Value", "ClassLabel"):
        return True
    if called not in (*ARRAYS, "Image"):
        raise DataError(
            f"{where}: column {name!r} is of the type {called}, which is neither numbers, words, classes, images nor "
            f"sequences; take it out, data.remove_columns({name!r})"
        )
    return False


def _table(where: str, sets: Sequence[Any], names: Sequence[str], tests: int | None = None) -> Table:
    each = [[_values(where, one, name) for name in names] for one in sets]
    columns = tuple(np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*each, strict=True))
    said = frozenset(name for name in names if type(sets[0].features[name]).__name__ == "ClassLabel")
    return Table(where, tuple(names), columns, range(sum(map(len, sets))), said, tests)


def _values(where: str, one: Any, name: str) -> Array:
    """A column of single values; classes by their names, None where there is no value."""
    found: Array = one.with_format("arrow", columns=[name])[:].column(name).to_numpy()
    kind = one.features[name]
    if type(kind).__name__ != "ClassLabel":
        return found
    words = np.array([*kind.names, None], object)
    codes = np.array([-1 if v is None or v != v else int(v) for v in found.tolist()], np.int64)
    if len(codes) and codes.max() >= len(kind.names):
        raise DataError(f"{where}: column {name!r} holds class {codes.max()}, and there are {len(kind.names)} names")
    return np.asarray(words[np.where(codes < 0, len(kind.names), codes)])


def _inputs(where: str, splits: Mapping[str, Any], names: Sequence[str], how: Reading) -> Any:
    """Images; one array; or several, by name. Whole numbers stay so under their name: they may be token ids."""
    kinds = {name: type(splits[TRAIN].features[name]).__name__ for name in names}
    if "Image" in kinds.values():
        if len(names) > 1:
            images = next(name for name, kind in kinds.items() if kind == "Image")
            raise UsageError(
                f"{where}: beside the images {images!r} there are {', '.join(n for n in names if n != images)}; take "
                "them out, with data.remove_columns(...)"
            )
        return _images(where, splits, names[0], how)
    found = {name: _arrays(where, splits, name) for name in names}
    if len(found) == 1:
        (only,) = found.values()
        if only.dtype.kind == "f" or only.dtype == np.uint8:
            return only
    return found


def _arrays(where: str, splits: Mapping[str, Any], name: str) -> Array:
    made = []
    for split, one in splits.items():
        if len(one):
            found = np.asarray(one.with_format("numpy", columns=[name])[:][name])
            if found.dtype.kind not in "biuf":
                raise DataError(
                    f"{where}: column {name!r} of {split!r} does not become an array of numbers (rows of different "
                    "lengths, perhaps, or missing ones): pad them to one length, with data.map(...)"
                )
            made.append(found)
    if len({(a.shape[1:], a.dtype.kind) for a in made}) > 1:
        raise DataError(f"{where}: column {name!r} has rows of another shape or type in 'test' than in 'train'")
    return np.concatenate(made)


def _images(where: str, splits: Mapping[str, Any], name: str, how: Reading) -> Array:
    named = []
    for split, one in splits.items():
        items = one.with_format(None).select_columns([name])
        for i in range(len(one)):
            place = f"{where}: {split!r}, row {i}"
            try:
                image = items[i][name]
            except Exception as error:  # a damaged image can make a decoder fail in any way
                raise DataError(f"{place} cannot be read as an image ({error})") from error
            if not hasattr(image, "getbands"):
                raise DataError(f"{place} holds no image (Pillow's), but a {type(image).__name__}; drop such rows")
            named.append((place, pixels(place, image, how.shown)))
    return np.stack(alike(named)[0])


def _rows(x: Any, rows: slice) -> Any:
    return {name: part[rows] for name, part in x.items()} if isinstance(x, Mapping) else x[rows]
