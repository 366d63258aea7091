"""Your own data: arrays, a folder with one file per client, or torch data sets.

Each client's rows stay its own. A client that brings test rows keeps them; the others get theirs from a random share.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.data.dataset import Array, Dataset, Ints, as_samples, encode_labels
from fedkin.data.files import MissingFile, column, read_npz
from fedkin.data.partition import Deal, Partition
from fedkin.data.split import Split, check_shares, held_out, make_split, split_deal
from fedkin.errors import DataError, UsageError


@dataclass(frozen=True, eq=False)
class _Client:
    name: str
    x: Array
    y: Array
    tests: int | None
    """How many of the last rows are for testing; None where nobody has said."""


def from_arrays(
    clients: Sequence[Sequence[Any]],
    *,
    names: Sequence[str] | None = None,
    name: str = "own",
    seed: int = 0,
    test_share: float = 0.25,
    validation_share: float = 0.0,
    vocabulary: int = 0,
) -> tuple[Dataset, Split]:
    """One ``(x, y)`` or ``(x_train, y_train, x_test, y_test)`` per client, as a data set and its split.

    Labels may be any whole numbers or strings: they become 0..C-1, and ``class_names`` keeps what they were.
    Integer samples are token ids where ``vocabulary`` (the number of ids) is given.
    """
    names = _client_names(names, len(clients))
    parts = [_client(n, arrays, vocabulary) for n, arrays in zip(names, clients, strict=True)]
    return _assemble(parts, name, seed, test_share, validation_share, vocabulary)


def from_folder(
    path: str | Path,
    *,
    label: str = "label",
    seed: int = 0,
    test_share: float = 0.25,
    validation_share: float = 0.0,
    vocabulary: int = 0,
) -> tuple[Dataset, Split]:
    """One ``.npz``, ``.parquet`` or ``.csv`` file per client, named after it, in alphabetical order.

    An npz holds x and y, or x_train, y_train, x_test and y_test. A table has a column ``label``; the other columns are
    numbers.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder: give one with a file per client (.npz, .parquet or .csv)")
    kinds = (".npz", ".parquet", ".csv")
    files = sorted((f for f in path.iterdir() if f.suffix in kinds), key=lambda f: f.stem)
    if not files:
        raise DataError(f"{path} holds no .npz, .parquet or .csv file; put one per client there")
    stems = [file.stem for file in files]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise DataError(f"{path}: client {twice[0]!r} has more than one file; keep one per client")
    parts = [_client(file.stem, _read_client(file, label), vocabulary) for file in files]
    return _assemble(parts, path.name, seed, test_share, validation_share, vocabulary)


def from_torch(
    data: Any,
    *,
    clients: int | None = None,
    partition: str | Partition = "iid",
    names: Sequence[str] | None = None,
    name: str = "own",
    seed: int = 0,
    test_share: float = 0.25,
    validation_share: float = 0.0,
    vocabulary: int = 0,
) -> tuple[Dataset, Split]:
    """A list of map-style torch data sets, one per client, or a single one that ``partition`` deals to ``clients``.

    Items are ``(x, y)``: tensors, arrays, numbers or pictures. Transforms run once, here; nothing random should be
    among them.
    """
    shares: dict[str, Any] = {"seed": seed, "test_share": test_share, "validation_share": validation_share}
    if isinstance(data, list | tuple):
        names = _client_names(names, len(data))
        arrays = [_torch_arrays(client, part) for client, part in zip(names, data, strict=True)]
        return from_arrays(arrays, names=names, name=name, vocabulary=vocabulary, **shares)
    if clients is None:
        raise UsageError("one torch data set is to be dealt to clients: say how many, from_torch(data, clients=10)")
    x, labels = _torch_arrays(name, data)
    y, class_names = encode_labels(labels)
    dataset = Dataset(name, as_samples(x, vocabulary), y, len(class_names), class_names, vocabulary=vocabulary)
    return dataset, make_split(dataset, clients, partition, **shares)


def _client_names(names: Sequence[str] | None, clients: int) -> list[str]:
    if names is None:
        return [f"client-{i}" for i in range(clients)]
    if len(names) != clients:
        raise UsageError(f"{clients} clients, but {len(names)} names")
    return list(names)


def _client(name: str, arrays: Sequence[Any], vocabulary: int) -> _Client:
    """One client's arrays in one form, checked as far as one client can be."""
    if len(arrays) not in (2, 4):
        raise UsageError(f"client {name!r} has {len(arrays)} arrays: give (x, y) or (x_train, y_train, x_test, y_test)")
    pairs = [(_named(name, arrays[i], vocabulary), np.asarray(arrays[i + 1])) for i in range(0, len(arrays), 2)]
    for x, y in pairs:
        if y.ndim != 1 or len(x) != len(y):
            raise DataError(f"client {name!r}: {len(x)} samples, but labels of shape {y.shape}")
    if not len(pairs[0][0]):
        raise DataError(f"client {name!r} has no samples: leave it out or give it some")
    if len(pairs) == 2 and len(pairs[1][0]) and pairs[0][0].shape[1:] != pairs[1][0].shape[1:]:
        raise DataError(f"client {name!r}: training samples of shape {pairs[0][0].shape[1:]}, "
                        f"test samples of shape {pairs[1][0].shape[1:]}")
    filled = [(x, y) for x, y in pairs if len(x)]
    tests = len(pairs[1][0]) if len(pairs) == 2 else None
    return _Client(name, np.concatenate([x for x, _ in filled]), np.concatenate([y for _, y in filled]), tests)


def _named(name: str, x: Any, vocabulary: int) -> Array:
    try:
        return as_samples(x, vocabulary)
    except (DataError, ValueError) as error:
        raise DataError(f"client {name!r}: {error}") from error


def _assemble(parts: Sequence[_Client], name: str, seed: int, test_share: float, validation_share: float,
              vocabulary: int) -> tuple[Dataset, Split]:
    check_shares(test_share, validation_share)
    if not parts:
        raise UsageError("no clients: give at least one")
    for part in parts[1:]:
        if (part.x.shape[1:], part.x.dtype) != (parts[0].x.shape[1:], parts[0].x.dtype):
            raise DataError(f"client {parts[0].name!r} has {parts[0].x.dtype} samples of shape {parts[0].x.shape[1:]}, "
                            f"client {part.name!r} {part.x.dtype} of shape {part.x.shape[1:]}; they must be alike")
    y, class_names = encode_labels(_labels(parts))
    sizes = [len(part.x) for part in parts]
    dataset = Dataset(name, np.concatenate([part.x for part in parts]), y, len(class_names), class_names,
                      user=np.repeat(np.arange(len(parts)), sizes), vocabulary=vocabulary)
    split = []
    for place, (part, end) in enumerate(zip(parts, np.cumsum(sizes), strict=True)):
        begin = end - len(part.x)
        own = split_client(y[begin:end], part.tests, place, seed, test_share, validation_share)
        split.append([rows + begin for rows in own])
    train, validation, test = zip(*split, strict=True)
    return dataset, Split(train, validation, test, tuple(part.name for part in parts))


def split_client(labels: Ints, tests: int | None, place: int, seed: int, test_share: float,
                 validation_share: float) -> tuple[Ints, Ints, Ints]:
    """Training, validation and test rows of one client, numbered from 0: `place` is its number among all clients.

    Nothing else enters, so a site that knows its place draws alone what a simulation of all of them draws for it."""
    rng = np.random.Generator(np.random.PCG64([seed, place]))
    own = np.arange(len(labels))
    held = held_out(len(own), test_share) if tests is None else tests
    own = rng.permutation(own) if tests is None else own
    deal = Deal([own[: len(own) - held]], [own[len(own) - held :]])
    split = split_deal(deal, labels, [""], test_share, validation_share, rng)
    return split.train[0], split.validation[0], split.test[0]


def read_site(file: str | Path, name: str, label: str = "label", vocabulary: int = 0) -> _Client:
    """One client's own file, checked as `from_folder` checks each of its files."""
    file = Path(file).expanduser()
    if file.suffix not in (".npz", ".parquet", ".csv") or not file.is_file():
        raise UsageError(f"{file}: give a file, .npz, .parquet or .csv, with this client's samples")
    part = _client(name, _read_client(file, label), vocabulary)
    codes, names = encode_labels(part.y)
    Dataset(name, part.x, codes, len(names), names, vocabulary=vocabulary)
    whole = part.y.astype(np.int64) if part.y.dtype.kind in "biuf" else np.asarray(names)[codes]
    return _Client(name, part.x, whole, part.tests)


def _labels(parts: Sequence[_Client]) -> Array:
    """All labels in one array; numbers and words do not mix, since "1" and 1 would become the same class."""
    words = {part.y.dtype.kind in "USO" for part in parts}
    if len(words) > 1:
        odd = next(part.name for part in parts if (part.y.dtype.kind in "USO") != (parts[0].y.dtype.kind in "USO"))
        raise DataError(f"client {parts[0].name!r} and client {odd!r} label with numbers and with words; use one kind")
    return np.concatenate([part.y for part in parts])


def _read_client(file: Path, label: str) -> list[Array]:
    if file.suffix == ".npz":
        try:
            arrays = read_npz(file)
        except MissingFile:
            raise DataError(f"{file} does not exist") from None
        keys = ("x_train", "y_train", "x_test", "y_test") if "x_train" in arrays else ("x", "y")
        return [column(arrays, key, file) for key in keys]
    header, columns = read_csv(file) if file.suffix == ".csv" else read_parquet(file)
    if label not in header:
        raise DataError(f"{file}: expected a column {label!r}, found {', '.join(header) or 'nothing'}")
    if len(header) < 2:
        raise DataError(f"{file}: expected at least one column beside {label!r}")
    features = [numbers(file, n, values) for n, values in zip(header, columns, strict=True) if n != label]
    return [np.stack(features, axis=1), whole_or_words(columns[header.index(label)])]


def read_csv(file: Path) -> tuple[list[str], list[Array]]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            header, *rows = list(csv.reader(stream)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file}: expected a CSV file in UTF-8, found: {error}") from error
    rows = [row for row in rows if row]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise DataError(f"{file}: expected {len(header)} columns, found {len(row)} in row {number}")
    return header, [np.array([row[i] for row in rows], dtype=str) for i in range(len(header))]


def read_parquet(file: Path) -> tuple[list[str], list[Array]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(f"{file}: parquet needs pyarrow: pip install fedkin[data]") from error
    try:
        table = pyarrow.parquet.read_table(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: expected a parquet file, found: {error}") from error
    return list(table.column_names), [table.column(n).to_numpy() for n in table.column_names]


def numbers(file: Path, name: str, values: Array) -> Array:
    try:
        return values.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"{file}: column {name!r} is not numeric ({error}); encode it as numbers first") from error


def whole_or_words(values: Array) -> Array:
    """A label column from text: numbers where all of it is whole numbers, so that 10 sorts after 9."""
    if values.dtype.kind not in "UO":
        return values
    text = values.astype(str)
    try:
        return text.astype(np.int64)
    except ValueError:
        return text


def _torch_arrays(name: str, data: Any) -> tuple[Array, Array]:
    """All items of a map-style data set, stacked."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UsageError(f"{name!r} is a {type(data).__name__}: give a data set with a length and items by number")
    if not len(data):
        raise DataError(f"client {name!r} has no samples: leave it out or give it some")
    items = [data[i] for i in range(len(data))]
    try:
        return np.stack([np.asarray(item[0]) for item in items]), np.stack([np.asarray(item[1]) for item in items])
    except (ValueError, TypeError, IndexError) as error:
        raise DataError(f"client {name!r}: items must be (x, y) of one shape ({error})") from error
