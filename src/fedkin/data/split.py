"""Who trains and tests on what: the rows of a data set for each client, fixed before the first round."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedkin.data.dataset import Dataset
from fedkin.data.partition import Deal, Partition, parse_partition
from fedkin.data.targets import Ints
from fedkin.errors import DataError, UsageError

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Split:
    """Row numbers per client: ``train``, ``validation`` and ``test`` have an array for each of ``names``.

    Two splits are the same when their ``hash`` is.

    ``partition`` says how it came about, in the words of the setting; empty where it was put together by hand.
    ``unused`` are settings that had no part in it, each with the reason. ``named``: whether somebody
    gave the clients their names, which are numbers otherwise.
    """

    train: tuple[Ints, ...]
    validation: tuple[Ints, ...]
    test: tuple[Ints, ...]
    names: tuple[str, ...]
    partition: str = ""
    unused: Mapping[str, str] = field(default_factory=dict)
    named: bool = True

    def __post_init__(self) -> None:
        if not len(self.train) == len(self.validation) == len(self.test) == len(self.names):
            raise DataError(
                f"a split of {len(self.train)} training, {len(self.validation)} validation and "
                f"{len(self.test)} test parts for {len(self.names)} names"
            )
        for name, rows in zip(self.names, self.train, strict=True):
            if not len(rows):
                raise DataError(f"client {name!r} has no training samples")
        check_names(self.names)

    def __repr__(self) -> str:
        sizes = (sum(map(len, part)) for part in (self.train, self.validation, self.test))
        told = "{} training, {} validation and {} test samples".format(*sizes)
        return f"Split({self.partition or 'by hand'}: {self.clients} clients, {told})"

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.train)

    @property
    def hash(self) -> str:
        """sha256 over names and rows, the same on every machine."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation, self.test):
            for name, rows in zip(self.names, part, strict=True):
                digest.update(f"{name}\0{len(rows)}\0".encode())
                digest.update(np.ascontiguousarray(rows, dtype="<i8").tobytes())
        return digest.hexdigest()

    def class_table(self, dataset: Dataset, part: str = "train") -> Ints:
        """Samples per client and class, of the training rows or of "all" (or "validation", "test"); one column where
        samples have no class."""
        parts = {
            "train": [self.train],
            "validation": [self.validation],
            "test": [self.test],
            "all": [self.train, self.validation, self.test],
        }
        if part not in parts:
            raise UsageError(f"part {part!r} of a split: give {', '.join(parts)}")
        labels, groups = dataset.strata, dataset.groups
        table = np.zeros((self.clients, groups), np.int64)
        for of_clients in parts[part]:
            for client, rows in enumerate(of_clients):
                table[client] += np.bincount(labels[rows], minlength=groups)
        return table


def make_split(
    dataset: Dataset,
    clients: int | None,
    partition: str | Partition,
    seed: int = 0,
    *,
    samples_per_client: int | None = None,
    quantity_skew: float | None = None,
    test_share: float = 0.25,
    validation_share: float = 0.0,
) -> Split:
    """Deals the rows to clients and splits each client's rows; depends on nothing but the arguments.

    ``clients`` may be None where the partition knows (``natural``). ``samples_per_client`` caps each client and keeps
    its class mix. ``quantity_skew`` is the sigma of a log-normal size per client: the largest keeps all its samples,
    the others their share of that. Test rows are a random ``test_share`` of each client (PFLlib: 75/25, not
    stratified); validation rows a stratified share of what is left.
    """
    partition = parse_partition(partition)
    _check(dataset, clients, samples_per_client, quantity_skew, test_share, validation_share)
    if partition.by_class:
        dataset.need_classes(f"partition {partition}")
    rng = np.random.Generator(np.random.PCG64(seed))
    deal = partition.deal(dataset, clients, rng)
    names = deal.names or tuple(f"client-{i}" for i in range(len(deal.rows)))
    empty = [name for name, rows in zip(names, deal.rows, strict=True) if not len(rows)]
    if empty:
        raise DataError(
            f"{partition} over {len(names)} clients leaves {len(empty)} without samples "
            f"(the first is {empty[0]}): take fewer clients"
        )
    factors = skewed(len(deal.rows), quantity_skew, rng)
    deal = resized(deal, dataset.strata, samples_per_client, factors, test_share, rng)
    unused = {}
    if deal.test is not None and samples_per_client is None:
        unused["test_share"] = f"{partition} deals the test samples itself"
    split = split_deal(deal, dataset.strata, names, test_share, validation_share, rng)
    return replace(split, partition=str(partition), unused=unused)


def split_deal(
    deal: Deal, labels: Ints, names: Sequence[str], test_share: float, validation_share: float, rng: np.random.Generator
) -> Split:
    """Training, validation and test rows for each client from the rows it was dealt."""
    train, validation, test = [], [], []
    for client, rows in enumerate(deal.rows):
        own_test = None if deal.test is None else deal.test[client]
        if own_test is None:
            shuffled = rng.permutation(rows)
            size = held_out(len(rows), test_share)
            own_test, rows = shuffled[:size], shuffled[size:]
        size = round(len(rows) * validation_share)
        size = min(max(size, 1), len(rows) - 1) if validation_share > 0 else 0
        chosen = stratified(rows, labels, size, rng)
        train.append(np.setdiff1d(rows, chosen))
        validation.append(np.sort(chosen))
        test.append(np.sort(own_test))
    return Split(tuple(train), tuple(validation), tuple(test), tuple(names))


def held_out(samples: int, share: float) -> int:
    """Samples to hold out: rounded up as scikit-learn does, but at least one stays and, of two or more, one goes."""
    if share == 0:
        return 0
    return min(max(math.ceil(samples * share - 1e-9), 1), samples - 1)


def stratified(rows: Ints, labels: Ints, size: int, rng: np.random.Generator) -> Ints:
    """``size`` of the rows, at random, with the class mix kept as closely as whole numbers allow."""
    if size >= len(rows):
        return rows
    classes, counts = np.unique(labels[rows], return_counts=True)
    exact = counts * (size / len(rows))
    take = np.floor(exact).astype(np.int64)
    ties = rng.permutation(len(classes))
    order = ties[np.argsort((take - exact)[ties], kind="stable")]
    take[order[: size - take.sum()]] += 1
    return np.concatenate([rng.permutation(rows[labels[rows] == c])[:n] for c, n in zip(classes, take, strict=True)])


def skewed(clients: int, skew: float | None, rng: np.random.Generator) -> Floats:
    """Which part of its samples each client keeps: all of them without a skew."""
    if not skew:
        return np.ones(clients)
    sizes = rng.lognormal(0.0, skew, clients)
    return np.asarray(sizes / sizes.max())


def resized(
    deal: Deal, labels: Ints, cap: int | None, factors: Floats, test_share: float, rng: np.random.Generator
) -> Deal:
    """Fewer rows per client: first the cap, then the skew. Rows dealt for testing shrink in step."""

    def shrink(of_clients: list[Ints], limit: int | None) -> list[Ints]:
        smaller = []
        for rows, share in zip(of_clients, factors, strict=True):
            size = len(rows) if limit is None else min(limit, len(rows))
            smaller.append(stratified(rows, labels, max(round(size * share), min(2, size)), rng))
        return smaller

    if deal.test is None:
        return Deal(shrink(deal.rows, cap))
    for_test = None if cap is None else held_out(cap, test_share)
    for_train = None if cap is None or for_test is None else cap - for_test
    return Deal(shrink(deal.rows, for_train), shrink(deal.test, for_test))


def _check(
    dataset: Dataset,
    clients: int | None,
    cap: int | None,
    skew: float | None,
    test_share: float,
    validation_share: float,
) -> None:
    if clients is not None and clients < 1:
        raise UsageError(f"{clients} clients: give at least 1")
    if clients is not None and clients > len(dataset):
        raise DataError(f"{clients} clients, but {dataset.name} has {len(dataset)} samples")
    check_sizes(cap, skew)
    check_shares(test_share, validation_share)


def check_sizes(cap: int | None, skew: float | None) -> None:
    if cap is not None and cap < 1:
        raise UsageError(f"samples per client is {cap}; give at least 1")
    if skew is not None and not (math.isfinite(skew) and skew >= 0):
        raise UsageError(f"quantity skew is {skew}; give 0 (equal) or a positive number such as 0.5")


def check_shares(test_share: float, validation_share: float) -> None:
    for name, share in (("test share", test_share), ("validation share", validation_share)):
        if not 0 <= share < 1:
            raise UsageError(f"{name} is {share}; give a number from 0 to below 1")


def check_names(names: Sequence[str]) -> None:
    """Names tell clients apart, on screens and in files."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(f"client name {name!r} is not valid text (UTF-8): rename it") from None
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise DataError(f"two clients are called {twice!r}: give each a name of its own")
