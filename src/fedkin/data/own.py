"""Your own data: arrays, a folder with one file per client, data frames or torch data sets.

Each client's rows stay its own. A client that brings test rows keeps them; the others get theirs from a random share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from fedkin.data.brought import FOUR, PAIR, arrays_of, one_client, torch_arrays
from fedkin.data.clients import OwnClient, OwnClients, together
from fedkin.data.columns import Table, from_frame, is_frame, read_table
from fedkin.data.dataset import Array, Dataset, as_samples
from fedkin.data.files import MissingFile, column, read_npz
from fedkin.data.partition import Partition
from fedkin.data.split import Split, check_names, make_split
from fedkin.data.targets import Targets, read_targets
from fedkin.errors import DataError, UsageError

KINDS = (".npz", ".parquet", ".csv")
LABEL = "label"


class Shares(TypedDict, total=False):
    """How the rows of a client that brings no test rows are split."""

    seed: int
    test_share: float
    validation_share: float


def from_arrays(
    clients: Iterable[Any],
    *,
    names: Sequence[str] | None = None,
    name: str = "own",
    vocabulary: int = 0,
    targets: Targets = "classes",
    **shares: Unpack[Shares],
) -> tuple[Dataset, Split]:
    """One ``(x, y)`` or ``(x_train, y_train, x_test, y_test)`` per client, as a data set and its split.

    Labels may be any whole numbers or strings: they become 0..C-1, and ``class_names`` keeps what they were.
    Integer samples are token ids where ``vocabulary`` (the number of ids) is given. ``targets``: of which kind the y
    are ("numbers", "labels", "tokens", "survival"), where they are no classes. ``shares``: seed, test_share and
    validation_share, as `make_split` takes them.
    """
    return own_clients(clients, names=names, name=name, vocabulary=vocabulary, targets=targets).split(**shares)


def own_clients(
    clients: Any,
    *,
    names: Sequence[str] | None = None,
    name: str = "own",
    vocabulary: int = 0,
    targets: Targets = "classes",
) -> OwnClients:
    """A list with the data of each client, or a mapping from their names to them.

    A client's data are (x, y), (x_train, y_train, x_test, y_test), a mapping with these names, a data frame with a
    column "label", or a torch data set of (x, y)."""
    if isinstance(clients, Mapping):
        names, clients = [str(key) for key in clients], list(clients.values())
    if not isinstance(clients, list | tuple):
        raise UsageError(
            f"the clients' data come as a {type(clients).__name__}: give a list with one (x, y) for each, "
            "or a dictionary from names to them"
        )
    called = _client_names(names, len(clients))
    places = [f"client {client!r}" for client in called]
    data = (
        from_frame(where, one) if is_frame(one) else arrays_of(where, one)
        for where, one in zip(places, clients, strict=True)
    )
    return _gathered(name, zip(called, places, data, strict=True), LABEL, vocabulary, targets)


def _gathered(
    name: str,
    brought: Iterable[tuple[str, str, Table | Sequence[Any]]],
    label: str,
    vocabulary: int,
    targets: Targets = "classes",
) -> OwnClients:
    """The clients of which each came with its name, how errors speak of it, and its table or arrays."""
    first: Table | None = None
    parts = []
    for client, where, data in brought:
        if isinstance(data, Table):
            first = first or data
            data = data.split(label, first, targets)[1:]
        parts.append(one_client(client, where, data, vocabulary, targets))
    aside = () if first is None else first.target_columns(label, targets)
    columns = () if first is None else tuple(column for column in first.header if column not in aside)
    return OwnClients(name, tuple(parts), vocabulary, columns, targets)


def from_folder(
    path: str | Path,
    *,
    label: str = LABEL,
    vocabulary: int = 0,
    targets: Targets = "classes",
    **shares: Unpack[Shares],
) -> tuple[Dataset, Split]:
    """One ``.npz``, ``.parquet`` or ``.csv`` file per client, named after it, in alphabetical order.

    An npz holds x and y, or x_train, y_train, x_test and y_test. A table has a column ``label``; the other columns are
    numbers, and go by name: their order is that of the first table.
    """
    return own_folder(path, label=label, vocabulary=vocabulary, targets=targets).split(**shares)


def own_folder(
    path: str | Path, *, label: str = LABEL, vocabulary: int = 0, targets: Targets = "classes"
) -> OwnClients:
    """The clients whose files lie in a folder."""
    path = Path(path).expanduser()
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder: give one with a file per client (.npz, .parquet or .csv)")
    try:
        files = sorted((f for f in path.iterdir() if f.suffix in KINDS), key=lambda f: f.stem)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): see who may open it") from error
    if not files:
        raise DataError(f"{path} holds no .npz, .parquet or .csv file; put one per client there")
    stems = [file.stem for file in files]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise DataError(f"{path}: client {twice[0]!r} has more than one file; keep one per client")
    check_names(stems)
    brought = ((file.stem, f"{file}: client {file.stem!r}", _read(file)) for file in files)
    return _gathered(path.name, brought, label, vocabulary, targets)


def _read(file: Path) -> Table | list[Array]:
    if file.suffix != ".npz":
        return read_table(file)
    try:
        arrays = read_npz(file)
    except MissingFile:
        raise DataError(f"{file} does not exist") from None
    return [column(arrays, key, file) for key in (FOUR if "x_train" in arrays else PAIR)]


def from_torch(
    data: Any,
    *,
    clients: int | None = None,
    partition: str | Partition = "iid",
    names: Sequence[str] | None = None,
    name: str = "own",
    vocabulary: int = 0,
    targets: Targets = "classes",
    **shares: Unpack[Shares],
) -> tuple[Dataset, Split]:
    """A list of map-style torch data sets, one per client, or a single one that ``partition`` deals to ``clients``.

    Items are ``(x, y)``: tensors, arrays, numbers or pictures. Transforms run once, here; nothing random should be
    among them.
    """
    if isinstance(data, list | tuple):
        return from_arrays(data, names=names, name=name, vocabulary=vocabulary, targets=targets, **shares)
    if clients is None:
        raise UsageError("one torch data set is to be dealt to clients: say how many, from_torch(data, clients=10)")
    x, labels = torch_arrays(repr(name), data)
    read = labels if targets == "classes" else read_targets(targets, labels, repr(name))
    y, classes, class_names = together(targets, [read], vocabulary)
    samples = as_samples(x, vocabulary)
    dataset = Dataset(name, samples, y, classes, class_names, vocabulary=vocabulary, targets=targets)
    return dataset, make_split(dataset, clients, partition, **shares)


def _client_names(names: Sequence[str] | None, clients: int) -> list[str]:
    if names is None:
        return [f"client-{i}" for i in range(clients)]
    if len(names) != clients:
        raise UsageError(f"{clients} clients, but {len(names)} names")
    return [str(name) for name in names]


def read_site(
    file: str | Path, name: str, label: str = LABEL, vocabulary: int = 0, targets: Targets = "classes"
) -> OwnClient:
    """One client's own file, checked as `from_folder` checks each of its files."""
    file = Path(file).expanduser()
    if file.suffix not in KINDS or not file.is_file():
        raise UsageError(f"{file}: give a file, .npz, .parquet or .csv, with this client's samples")
    own = _gathered(name, [(name, f"{file}: client {name!r}", _read(file))], label, vocabulary, targets)
    part = own.parts[0]
    y, classes, names = together(targets, [part.y], vocabulary)
    Dataset(name, part.x, y, classes, names, vocabulary=vocabulary, targets=targets)
    whole = part.y.astype(np.int64) if part.y.dtype.kind in "biu" else part.y
    return OwnClient(name, part.x, whole, part.tests, own.columns)
