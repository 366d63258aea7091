"""Your own data: arrays, a folder with one file per client, data frames, torch's or Hugging Face's data sets.

Each client's rows stay its own. A client that brings test rows keeps them; the others get theirs from a random share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from fedkin.data.brought import FOUR, PAIR, arrays_of, one_client, torch_arrays
from fedkin.data.clients import OwnClient, OwnClients, WholeTable, together
from fedkin.data.columns import Table, from_frame, is_frame, owners_of, read_table
from fedkin.data.dataset import Array, Dataset, as_samples
from fedkin.data.encoding import agreed, encoded, from_items, lacking
from fedkin.data.files import MissingFile, column, read_npz
from fedkin.data.huggingface import by_client, class_names, has_images, is_huggingface, read_huggingface, splits_of
from fedkin.data.image_folder import class_folders, holds_images, image_set, images_of_clients, read_classes
from fedkin.data.manner import USUAL, Reading
from fedkin.data.partition import Partition
from fedkin.data.precision import blurred
from fedkin.data.split import Split, check_names, make_split
from fedkin.data.targets import Targets, read_targets
from fedkin.errors import DataError, UsageError
from fedkin.preparation import Column

TABLES = (".parquet", ".csv")
KINDS = (".npz", *TABLES)
LABEL = "label"
OF_IMAGES = ("image_size", "image_mode")


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
    how = Reading(vocabulary=vocabulary, targets=targets)
    return own_clients(clients, how, names=names, name=name).split(**shares)


def own_clients(
    clients: Any, how: Reading = USUAL, *, names: Sequence[str] | None = None, name: str = "own"
) -> OwnClients:
    """A list with the data of each client, or a mapping from their names to them.

    A client's data are (x, y), (x_train, y_train, x_test, y_test), a mapping with these names, a data frame with a
    column for the labels, a list of dictionaries (a row each), one of Hugging Face's data sets, or a torch data set of
    (x, y)."""
    clients = listed(clients)
    if isinstance(clients, Mapping):
        if set(clients) in (set(PAIR), set(FOUR)):
            raise UsageError(
                f"clients is one dictionary with {', '.join(map(repr, clients))}, which are one client's data: give a "
                "list with such a dictionary for each client"
            )
        names, clients = [str(key) for key in clients], list(clients.values())
    if is_frame(clients):
        raise UsageError(
            "clients is one data frame: give data=frame and client_column='...', the column that says whose a row is "
            "(or clients=10 and a partition), or a list with a frame for each client"
        )
    if not isinstance(clients, list | tuple):
        raise UsageError(
            f"the clients' data come as a {type(clients).__name__}: give a list with one (x, y) for each, "
            "or a dictionary from names to them"
        )
    if any(map(is_huggingface, clients)) and set(names or ()) & {"train", "test"}:
        raise UsageError("clients is a data set in splits: give data=..., or a dictionary from clients' names to such")
    called = _client_names(names, len(clients))
    places = [f"client {client!r}" for client in called]
    data = [_brought(where, one, how) for where, one in zip(places, clients, strict=True)]
    found = gathered(name, list(zip(called, places, data, strict=True)), how, _class_names(places, clients, how))
    return replace(found, named=names is not None)


def listed(clients: Any) -> Any:
    """Clients that come one after another, from a generator or as the values of a dictionary, as a list."""
    return list(clients) if isinstance(clients, Iterator | ValuesView) else clients


def _class_names(places: Sequence[str], clients: Sequence[Any], how: Reading) -> tuple[str, ...]:
    """What all clients' data say that the classes are called; nothing where none says so."""
    each = [class_names(one, how.label) if is_huggingface(one) else () for one in clients]
    for where, names in zip(places, each, strict=True):
        if names != each[0]:
            said = [", ".join(map(repr, n)) or "not known by name" for n in (each[0], names)]
            raise DataError(f"the classes of {places[0]} are {said[0]}, those of {where} {said[1]}; they must be alike")
    return each[0] if how.targets == "classes" and each else ()


def _brought(where: str, data: Any, how: Reading) -> Table | Sequence[Any]:
    if is_huggingface(data):
        return read_huggingface(where, data, how)
    if is_frame(data):
        return from_frame(where, data)
    if isinstance(data, list) and data and all(isinstance(item, Mapping) for item in data):
        return from_items(data, where)
    return arrays_of(where, data, how)


def gathered(
    name: str,
    brought: Sequence[tuple[str, str, Table | Sequence[Any]]],
    how: Reading,
    classes: tuple[str, ...] = (),
) -> OwnClients:
    """The clients of which each came with its name, how errors speak of it, and its table or arrays. `classes`: their
    names in their order, where the data say so."""
    if how.texts is not None:
        told = [data.texts(how.label, how.targets) if isinstance(data, Table) else data for _, _, data in brought]
        brought = [(client, where, data) for (client, where, _), data in zip(brought, told, strict=True)]
    tables = [(where, data) for _, where, data in brought if isinstance(data, Table)]
    if not tables:
        if how.categories:
            raise UsageError(f"categories={'+'.join(how.categories)!r} would change nothing: the data are no tables")
        parts = [one_client(client, where, data, how) for client, where, data in brought]  # type: ignore[arg-type]
        rest = (how.vocabulary, (), how.targets)
        return OwnClients(name, tuple(parts), *rest, class_names=classes, texts=how.texts)
    columns = _columns(tables, how)
    parts = []
    for client, where, data in brought:
        if isinstance(data, Table):
            parts.append(_of_table(client, where, data, columns, how))
            continue
        if any(column.categories for column in columns):
            raise DataError(f"{where} brings arrays, other clients tables with categories; give all as tables")
        found = one_client(client, where, data, how)
        parts.append(replace(found, x=found.x.astype(np.float64)))
    return OwnClients(name, tuple(parts), how.vocabulary, columns, how.targets, class_names=classes)


def _columns(tables: Sequence[tuple[str, Table]], how: Reading) -> tuple[Column, ...]:
    """What the features of all tables are, in the order of the first."""
    first = tables[0][1]
    names = first.features(first.target_columns(how.label, how.targets))
    for where, table in tables:
        table.features(table.target_columns(how.label, how.targets), names, first.where)
        if not len(table.rows):
            raise DataError(f"{where} has no samples: leave it out or give it some")
    return agreed([table for _, table in tables], names, how.categories)


def _of_table(client: str, where: str, table: Table, columns: tuple[Column, ...], how: Reading) -> OwnClient:
    raw = encoded(table, columns)
    aside = table.target_columns(how.label, how.targets)
    y = table.labels(aside, how.targets)
    exact = [] if how.targets == "classes" else [(f"{where}: column {n!r}", table.column(n)) for n in aside]
    said = next((said for name, values in exact if (said := blurred(values, name))), "")
    return OwnClient(client, raw, y, table.tests, lacks=lacking(table, columns, raw), note=said)


def is_whole(data: object) -> bool:
    """Whether that is what `own_whole` takes."""
    return is_frame(data) or is_huggingface(data)


def applied(objects: Iterable[Any], how: Reading) -> frozenset[str]:
    """Settings that have a part in how such objects are read, although they become no table."""
    found = [one for one in objects if is_huggingface(one)]
    labelled = [*found, *(one for one in objects if how.texts is not None and _has_columns(one))]
    return frozenset(("label",) if labelled else ()) | frozenset(OF_IMAGES if any(map(has_images, found)) else ())


def _has_columns(data: Any) -> bool:
    return is_frame(data) or (isinstance(data, list) and bool(data) and isinstance(data[0], Mapping))


def own_whole(data: Any, how: Reading) -> OwnClients | WholeTable | Dataset:
    """One data frame, or one data set of Hugging Face's: the rows of each client where a column says whose they are,
    else a whole to be dealt; or the samples that are to be dealt, in the form in which a client's own come."""
    if is_frame(data):
        return own_table("own", from_frame("the data frame", data), how)
    if not is_huggingface(data):
        return _one_set(gathered("own", [("own", "the data", _brought("the data", data, how))], how))
    where = "the data set"
    if how.client_column is not None:
        return replace(own_clients(by_client(where, data, how.client_column), how), by_column=True)
    splits, classes = splits_of(where, data), _class_names([where], [data], how)
    if len(splits) > 1:
        raise UsageError(
            f"{where} is split into {' and '.join(splits)}, and a partition deals all samples before it splits each "
            "client's: give client_column='...', the column that says whose a row is, or a data set without splits, "
            "datasets.concatenate_datasets([data['train'], data['test']])"
        )
    read = read_huggingface(where, data, how)
    if isinstance(read, Table):
        return own_table("own", read, how, classes)
    return _one_set(gathered("own", [("own", where, read)], how, classes))


def _one_set(own: OwnClients) -> Dataset:
    """The rows of one that are to be dealt to clients."""
    part = own.parts[0]
    y, classes, names = together(own.targets, [part.y], own.vocabulary, own.class_names)
    rest: dict[str, Any] = {"parts": part.parts, "targets": own.targets, "note": part.note, **own.of_texts()}
    return Dataset(own.name, part.x, y, classes, names, **rest)


def own_table(name: str, table: Table, how: Reading, named: tuple[str, ...] = ()) -> OwnClients | WholeTable | Dataset:
    """One table: the rows of each client where a column says whose they are, else a whole to be dealt. `named`: the
    classes in their order, where the data say so."""
    if how.client_column is None and how.texts is not None:
        return _one_set(gathered(name, [(name, table.where, table)], how, named))
    if how.client_column is None:
        columns = _columns([(table.where, table)], how)
        part = _of_table(name, table.where, table, columns, how)
        y, classes, names = together(how.targets, [part.y], how.vocabulary, named)
        like = np.nan_to_num(part.x).astype(np.float32)
        dataset = Dataset(name, like, y, classes, names, targets=how.targets, note=part.note)
        return WholeTable(dataset, part.x, columns, part.lacks)
    owners, whose = owners_of(table, how.client_column)
    rest = table.without(how.client_column)
    parts = []
    for number, owner in enumerate(owners):
        where = f"{table.where}: client {owner!r}"
        parts.append((owner, where, rest.take(np.flatnonzero(whose == number), where)))
    return replace(gathered(name, parts, how), by_column=True)


def is_image_folder(data: str) -> bool:
    """Whether data are a folder of folders, and so images in them."""
    return _is(data, Path.is_dir) and bool(class_folders(path := Path(data).expanduser())) and not _files(path)


def _files(path: Path) -> list[Path]:
    try:
        return sorted((f for f in path.iterdir() if f.suffix in KINDS and f.is_file()), key=lambda f: f.stem)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): see who may open it") from error


def own_data(data: str, how: Reading) -> OwnClients | WholeTable | Dataset | None:
    """What lies at a path: the clients of a folder, a table or images; None where it is a data set that has a name."""
    if data.endswith(TABLES):
        if not _is(data, Path.is_file):
            raise UsageError(f"{data}: no such file; give a .csv or .parquet file")
        file = Path(data).expanduser()
        return own_table(file.stem, read_table(file), how)
    if is_image_folder(data):
        path = Path(data).expanduser()
        if any(map(holds_images, class_folders(path))):
            return image_set(path, how.shown)
        return gathered(path.name, images_of_clients(path, how.shown), how)
    return own_folder(data, how) if _is(data, Path.is_dir) else None


def _is(data: str, kind: Callable[[Path], bool]) -> bool:
    try:
        return kind(Path(data).expanduser())
    except (OSError, RuntimeError, ValueError):  # a name that no file can have
        return False


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
    numbers or categories (words), and go by name: their order is that of the first table.
    """
    return own_folder(path, Reading(label, vocabulary=vocabulary, targets=targets)).split(**shares)


def own_folder(path: str | Path, how: Reading = USUAL) -> OwnClients:
    """The clients whose files lie in a folder."""
    path = Path(path).expanduser()
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder: give one with a file per client (.npz, .parquet or .csv)")
    files = _files(path)
    if not files:
        raise DataError(f"{path} holds no .npz, .parquet or .csv file; put one per client there")
    stems = [file.stem for file in files]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise DataError(f"{path}: client {twice[0]!r} has more than one file; keep one per client")
    check_names(stems)
    brought = [(file.stem, f"{file}: client {file.stem!r}", _read(file)) for file in files]
    return gathered(path.name, brought, how)


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
    note = blurred(x, f"{name}: feature") if not vocabulary else ""
    dataset = Dataset(name, samples, y, classes, class_names, vocabulary=vocabulary, note=note, targets=targets)
    return dataset, make_split(dataset, clients, partition, **shares)


def _client_names(names: Sequence[str] | None, clients: int) -> list[str]:
    if names is None:
        return [f"client-{i}" for i in range(clients)]
    if len(names) != clients:
        raise UsageError(f"{clients} clients, but {len(names)} names")
    return [str(name) for name in names]


def read_site(file: str | Path, name: str, how: Reading = USUAL) -> OwnClients:
    """One client's own file, checked as `from_folder` checks each of its files."""
    file = Path(file).expanduser()
    if not file.is_dir() and (file.suffix not in KINDS or not file.is_file()):
        raise UsageError(
            f"{file}: give a file, .npz, .parquet or .csv, with this client's samples, or a folder with a folder of "
            "images for each class"
        )
    data = read_classes(file, how.shown)[:2] if file.is_dir() else _read(file)
    own = gathered(name, [(name, f"{file}: client {name!r}", data)], how)
    part = own.parts[0]
    y, classes, names = together(how.targets, [part.y], how.vocabulary)
    like = part.x if not own.columns else np.nan_to_num(part.x).astype(np.float32)
    Dataset(name, like, y, classes, names, vocabulary=how.vocabulary, targets=how.targets)
    whole = part.y.astype(np.int64) if part.y.dtype.kind in "biu" else part.y
    return replace(own, parts=(replace(part, y=whole),))
