"""Your own data: arrays, a folder with one file per client, data frames or torch data sets.

Each client's rows stay its own. A client that brings test rows keeps them; the others get theirs from a random share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from fedkin.data.columns import Table, from_frame, is_frame, read_table
from fedkin.data.dataset import Array, Dataset, as_samples, checked_labels, encode_labels
from fedkin.data.files import MissingFile, column, read_npz
from fedkin.data.partition import Deal, Partition
from fedkin.data.split import (
    Split,
    check_names,
    check_shares,
    check_sizes,
    held_out,
    make_split,
    resized,
    skewed,
    split_deal,
)
from fedkin.data.targets import Ints, Targets, alike, outputs_of, read_targets
from fedkin.errors import DataError, UsageError
from fedkin.parts import Part, pack, words_of

KINDS = (".npz", ".parquet", ".csv")
PAIR, FOUR = ("x", "y"), ("x_train", "y_train", "x_test", "y_test")
LABEL = "label"


@dataclass(frozen=True, eq=False)
class OwnClient:
    """One client's rows, checked as far as one client can be."""

    name: str
    x: Array
    y: Array
    tests: int | None
    """How many of the last rows are for testing; None where nobody has said."""
    columns: tuple[str, ...] = ()
    """What the features are called, where they came as a table."""
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, eq=False)
class OwnClients:
    """Clients with rows of their own, before they are split into training, validation and test rows."""

    name: str
    parts: tuple[OwnClient, ...]
    vocabulary: int = 0
    columns: tuple[str, ...] = ()
    targets: Targets = "classes"

    def __post_init__(self) -> None:
        if not self.parts:
            raise UsageError("no clients: give at least one")
        check_names([part.name for part in self.parts])
        first = self.parts[0]
        for part in self.parts[1:]:
            if part.parts != first.parts:
                raise DataError(
                    f"client {first.name!r} has samples of {words_of(first.parts)}, client {part.name!r} of "
                    f"{words_of(part.parts)}; they must be alike"
                )
            if (part.x.shape[1:], part.x.dtype) != (first.x.shape[1:], first.x.dtype):
                raise DataError(
                    f"client {first.name!r} has {first.x.dtype} samples of shape {first.x.shape[1:]}, "
                    f"client {part.name!r} {part.x.dtype} of shape {part.x.shape[1:]}; they must be alike"
                )
            if (part.y.dtype.kind == "U") != (first.y.dtype.kind == "U"):
                raise DataError(
                    f"client {first.name!r} and client {part.name!r} label with numbers and with words; use one kind"
                )
        alike(self.targets, [(part.name, part.y) for part in self.parts])

    def split(
        self,
        *,
        seed: int = 0,
        test_share: float = 0.25,
        validation_share: float = 0.0,
        samples_per_client: int | None = None,
        quantity_skew: float | None = None,
    ) -> tuple[Dataset, Split]:
        """All rows as one data set, and who trains and tests on which."""
        check_shares(test_share, validation_share)
        check_sizes(samples_per_client, quantity_skew)
        parts, sizes = self.parts, [len(part.x) for part in self.parts]
        y, classes, class_names = _together(self.targets, [part.y for part in parts], self.vocabulary)
        dataset = Dataset(
            self.name,
            np.concatenate([part.x for part in parts]),
            y,
            classes,
            class_names,
            user=np.repeat(np.arange(len(parts)), sizes),
            vocabulary=self.vocabulary,
            columns=self.columns,
            parts=self.parts[0].parts,
            targets=self.targets,
        )
        labels = dataset.strata
        factors = skewed(len(parts), quantity_skew, np.random.Generator(np.random.PCG64([seed, len(parts), 1])))
        split = []
        for place, (part, end) in enumerate(zip(parts, np.cumsum(sizes), strict=True)):
            begin = end - len(part.x)
            own = split_client(
                labels[begin:end],
                part.tests,
                place,
                seed,
                test_share,
                validation_share,
                samples_per_client,
                float(factors[place]),
            )
            split.append([rows + begin for rows in own])
        train, validation, test = zip(*split, strict=True)
        unused = {}
        if samples_per_client is None and all(part.tests is not None for part in parts):
            unused["test_share"] = "every client brings its own test samples"
        return dataset, Split(train, validation, test, tuple(part.name for part in parts), "natural", unused)


def _together(targets: Targets, each: Sequence[Array], vocabulary: int = 0) -> tuple[Array, int, tuple[str, ...]]:
    """All clients' targets, how many classes or outputs they ask for, and what the classes are called."""
    y = np.concatenate(each)
    if targets != "classes":
        return y, outputs_of(targets, y, vocabulary), ()
    codes, names = encode_labels(y)
    return codes, len(names), names


@dataclass(frozen=True, eq=False)
class Brought:
    """Data as Python objects: clients with rows of their own, a whole data set and how it is dealt, or a data set with
    a split that was made before."""

    what: OwnClients | Dataset | tuple[Dataset, Split]
    partition: Partition | None = None


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
        from_frame(where, one) if is_frame(one) else _arrays(where, one)
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
        parts.append(_client(client, where, data, vocabulary, targets))
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
    x, labels = _torch_arrays(repr(name), data)
    read = labels if targets == "classes" else read_targets(targets, labels, repr(name))
    y, classes, class_names = _together(targets, [read], vocabulary)
    samples = as_samples(x, vocabulary)
    dataset = Dataset(name, samples, y, classes, class_names, vocabulary=vocabulary, targets=targets)
    return dataset, make_split(dataset, clients, partition, **shares)


def _client_names(names: Sequence[str] | None, clients: int) -> list[str]:
    if names is None:
        return [f"client-{i}" for i in range(clients)]
    if len(names) != clients:
        raise UsageError(f"{clients} clients, but {len(names)} names")
    return [str(name) for name in names]


def _arrays(where: str, data: Any) -> Sequence[Any]:
    """What a client's data hold, two or four arrays."""
    if isinstance(data, Mapping):
        keys = next((keys for keys in (PAIR, FOUR) if set(keys) == set(data)), None)
        if keys is None:
            raise UsageError(
                f"{where} is a dictionary with {', '.join(map(repr, data)) or 'nothing'}: give (x, y), or "
                "the keys 'x' and 'y', or 'x_train', 'y_train', 'x_test' and 'y_test'"
            )
        return [data[key] for key in keys]
    if isinstance(data, list | tuple):
        return data
    if isinstance(data, np.ndarray | str | bytes | int | float) or data is None:
        raise UsageError(f"{where} is a single {type(data).__name__}: give (x, y), its samples and their labels")
    return _torch_arrays(where, data)


def _client(name: str, where: str, arrays: Sequence[Any], vocabulary: int, targets: Targets = "classes") -> OwnClient:
    """One client's arrays in one form, checked as far as one client can be."""
    if len(arrays) not in (2, 4):
        raise UsageError(f"{where} has {len(arrays)} arrays: give (x, y) or (x_train, y_train, x_test, y_test)")
    pairs = []
    parts: tuple[Part, ...] = ()
    for i in range(0, len(arrays), 2):
        if isinstance(arrays[i], Mapping):
            x, parts = pack(arrays[i], where, parts)
        else:
            x = _samples(where, arrays[i], vocabulary)
        pairs.append((x, _targets_of(where, arrays[i + 1], len(x), targets)))
    if not len(pairs[0][0]):
        raise DataError(f"{where} has no samples: leave it out or give it some")
    if len(pairs) == 2 and len(pairs[1][0]) and pairs[0][0].shape[1:] != pairs[1][0].shape[1:]:
        raise DataError(
            f"{where}: training samples of shape {pairs[0][0].shape[1:]}, test samples of shape {pairs[1][0].shape[1:]}"
        )
    filled = [(x, y) for x, y in pairs if len(x)]
    if len({y.dtype.kind == "U" for _, y in filled}) > 1:
        raise DataError(f"{where} labels with numbers and with words; use one kind")
    tests = len(pairs[1][0]) if len(pairs) == 2 else None
    x, y = (np.concatenate([pair[i] for pair in filled]) for i in (0, 1))
    return OwnClient(name, x, y, tests, parts=parts)


def _targets_of(where: str, given: Any, samples: int, targets: Targets) -> Array:
    """A client's targets, one for each of its samples."""
    y = _array(where, given)
    if y.ndim == 0 or len(y) != samples:
        raise DataError(
            f"{where}: {samples} samples, but {'labels' if targets == 'classes' else 'targets'} of shape {y.shape}"
        )
    if targets != "classes":
        return read_targets(targets, y, where)
    if y.ndim != 1 and y.shape[1:] != (1,):
        raise DataError(
            f"{where}: {samples} samples, but labels of shape {y.shape}; if they are no classes, say what they are "
            "for, as in task='multi-label'"
        )
    return checked_labels(y, where)


def _array(where: str, value: Any) -> Array:
    try:
        return np.asarray(value)
    except Exception as error:  # somebody else's class can fail in any way
        raise DataError(
            f"{where}: a {type(value).__name__} that does not become an array ({error}); all samples need "
            "one shape, and tensors must be on the CPU without gradients"
        ) from error


def _samples(where: str, x: Any, vocabulary: int) -> Array:
    try:
        samples = as_samples(_array(where, x), vocabulary)
    except (DataError, ValueError, OverflowError) as error:
        front = "" if str(error).startswith(where) else f"{where}: "
        raise DataError(f"{front}{error}") from error
    if samples.dtype == np.float32 and not np.isfinite(samples).all():
        row = int(np.argwhere(~np.isfinite(samples))[0][0])
        raise DataError(f"{where}: sample {row} holds a value that is not finite; impute or drop such samples")
    return samples


def split_client(
    labels: Ints,
    tests: int | None,
    place: int,
    seed: int,
    test_share: float,
    validation_share: float,
    cap: int | None = None,
    factor: float = 1.0,
) -> tuple[Ints, Ints, Ints]:
    """Training, validation and test rows of one client, numbered from 0: `place` is its number among all clients.

    Nothing else enters, so a site that knows its place draws alone what a simulation of all of them draws for it.
    `cap` and `factor`: at most so many samples, and this part of them."""
    rng = np.random.Generator(np.random.PCG64([seed, place]))
    own, factors = np.arange(len(labels)), np.array([factor])
    if tests is None:
        own = resized(Deal([own]), labels, cap, factors, test_share, rng).rows[0]
        own = rng.permutation(own)
        held = held_out(len(own), test_share)
        deal = Deal([own[: len(own) - held]], [own[len(own) - held :]])
    else:
        whole = Deal([own[: len(own) - tests]], [own[len(own) - tests :]])
        deal = resized(whole, labels, cap, factors, test_share, rng)
    split = split_deal(deal, labels, [""], test_share, validation_share, rng)
    return split.train[0], split.validation[0], split.test[0]


def split_sizes(samples: int, tests: int | None, test_share: float, validation_share: float) -> tuple[int, int, int]:
    """How many rows `split_client` gives to training, validation and test, whatever the labels, without drawing any."""
    held = held_out(samples, test_share) if tests is None else tests
    rest = samples - held
    aside = min(max(round(rest * validation_share), 1), rest - 1) if validation_share > 0 else 0
    return rest - aside, aside, held


def read_site(
    file: str | Path, name: str, label: str = LABEL, vocabulary: int = 0, targets: Targets = "classes"
) -> OwnClient:
    """One client's own file, checked as `from_folder` checks each of its files."""
    file = Path(file).expanduser()
    if file.suffix not in KINDS or not file.is_file():
        raise UsageError(f"{file}: give a file, .npz, .parquet or .csv, with this client's samples")
    own = _gathered(name, [(name, f"{file}: client {name!r}", _read(file))], label, vocabulary, targets)
    part = own.parts[0]
    y, classes, names = _together(targets, [part.y], vocabulary)
    Dataset(name, part.x, y, classes, names, vocabulary=vocabulary, targets=targets)
    whole = part.y.astype(np.int64) if part.y.dtype.kind in "biu" else part.y
    return OwnClient(name, part.x, whole, part.tests, own.columns)


def _torch_arrays(where: str, data: Any) -> tuple[Array, Array]:
    """All items of a map-style data set, stacked."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UsageError(
            f"{where} is a {type(data).__name__}: give (x, y), or a data set with a length and items by number"
        )
    if not len(data):
        raise DataError(f"{where} has no samples: leave it out or give it some")
    samples, labels = [], []
    for i in range(len(data)):
        x, y = _item(where, data, i)
        samples.append(x)
        labels.append(y)
    try:
        return np.stack(samples), np.stack(labels)
    except ValueError as error:
        raise DataError(f"{where}: items must be (x, y) of one shape ({error})") from error


def _item(where: str, data: Any, i: int) -> tuple[Array, Array]:
    try:
        item = data[i]
    except Exception as error:  # somebody else's class can fail in any way
        raise DataError(f"{where}: item {i} cannot be had ({type(error).__name__}: {error})") from error
    if isinstance(item, Mapping):
        raise UsageError(
            f"{where}: items are dictionaries with {', '.join(map(repr, item))}; give pairs (x, y), for "
            "example [(item['x'], item['label']) for item in data] turned into two arrays"
        )
    if not isinstance(item, list | tuple) or len(item) != 2:
        raise DataError(f"{where}: items must be (x, y) of one shape (item {i} is a {type(item).__name__})")
    return _array(where, item[0]), _array(where, item[1])
