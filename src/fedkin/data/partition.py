"""Who holds which rows. A partition deals the rows of a data set to clients; it never touches the rows themselves.

Each one is a frozen dataclass that is also written as text, ``name[:argument[:argument]]``, so that a config file, the
command line and Python code say the same thing: ``dirichlet:0.1`` is ``dirichlet(0.1)``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar, Self

import numpy as np

from fedkin.data.dataset import Dataset
from fedkin.data.targets import Ints
from fedkin.errors import DataError, UsageError
from fedkin.registry import Registry

MAX_DRAWS = 1000
LEAST_SAMPLES = 40
"""PFLlib asks for a batch of 10 in the test quarter, so 40 samples, unless the data are too few for that."""


@dataclass(frozen=True, eq=False)
class Deal:
    """What a partition hands out: rows per client, and test rows where the partition decides those as well."""

    rows: list[Ints]
    test: list[Ints] | None = None
    names: tuple[str, ...] = ()


class Partition(ABC):
    """One way to deal rows to clients. ``form`` is how it is written, ``about`` one line for listings, and `by_class`
    says whether it looks at the class of each sample."""

    form: ClassVar[str]
    about: ClassVar[str]
    by_class: ClassVar[bool] = False

    def __str__(self) -> str:
        """As ``parse`` reads it: the name, then the fields that say something."""
        values = (getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]
        words = (f"{value:g}" if isinstance(value, float) else str(value) for value in values if value is not None)
        return ":".join([self.form.partition("[")[0].partition(":")[0], *words])

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Self:
        """The partition from the words after its name: numbers, in the order of its fields."""
        known = fields(cls)  # type: ignore[arg-type]
        if not sum(f.default is MISSING for f in known) <= len(arguments) <= len(known):
            raise ValueError
        return cls(
            *(float(word) if "float" in f.type else int(word) for f, word in zip(known, arguments, strict=False))
        )

    @abstractmethod
    def deal(self, dataset: Dataset, clients: int | None, rng: np.random.Generator) -> Deal:
        """Rows for each client. ``clients`` is None only where the data themselves say how many there are."""


PARTITIONS: Registry[type[Partition]] = Registry("partition")


def unwritten(partition: Partition) -> Partition | None:
    """A partition that its text does not stand for: one of the user's own."""
    try:
        return None if parse_partition(str(partition)) == partition else partition
    except UsageError:
        return partition


def parse_partition(spec: str | Partition) -> Partition:
    """``"pathological:2:shuffled"`` as the object it stands for; an object is returned as it is."""
    if isinstance(spec, Partition):
        return spec
    name, *arguments = spec.strip().split(":")
    kind = PARTITIONS[name]
    try:
        return kind.parse(arguments)
    except ValueError:
        raise UsageError(f"partition {spec!r} is not understood: write {kind.form}") from None


def needed(clients: int | None) -> int:
    if clients is None:
        raise UsageError("this partition needs a number of clients")
    return clients


def rows_by_class(dataset: Dataset, rows: Ints | None = None) -> list[Ints]:
    """The rows of each class, in the order of the data set."""
    rows = np.arange(len(dataset)) if rows is None else rows
    labels = dataset.y[rows]
    return [rows[labels == c] for c in range(dataset.classes)]


def cut(rows: Ints, counts: Sequence[int] | Ints) -> list[Ints]:
    """Consecutive pieces of the given lengths."""
    return np.split(rows, np.cumsum(counts)[:-1])


def join(pieces: Sequence[Ints]) -> Ints:
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def least_samples(dataset: Dataset, clients: int) -> int:
    return max(1, min(LEAST_SAMPLES, len(dataset) // clients // 2))


@PARTITIONS.register("iid")
@dataclass(frozen=True)
class Iid(Partition):
    """Every client gets a random part of equal size; written `iid`."""

    form: ClassVar[str] = "iid"
    about: ClassVar[str] = "every client gets a random part of equal size"

    def deal(self, dataset: Dataset, clients: int | None, rng: np.random.Generator) -> Deal:
        return Deal([part.copy() for part in np.array_split(rng.permutation(len(dataset)), needed(clients))])


@PARTITIONS.register("pathological")
@dataclass(frozen=True)
class Pathological(Partition):
    """PFLlib's partition "pat": K classes per client, dealt class by class to the first clients that still want one.

    Clients therefore come in blocks with identical class sets (20 clients, 10 classes, k = 2: blocks of 4), and the
    last block can get fewer classes. A method that finds similar clients profits from that; `shuffled` gives the
    same class sets to clients in random order, so that at least the numbering says nothing.

    `k` is the number of classes per client. The clients that have a class get equal shares of it; with `unbalanced`
    (in Python `balanced=False`) the shares are drawn. `pathological(2)` is written `pathological:2`.
    """

    k: int
    balanced: bool = True
    shuffled: bool = False
    form: ClassVar[str] = "pathological:K[:unbalanced][:shuffled]"
    by_class: ClassVar[bool] = True
    about: ClassVar[str] = "K classes per client, in blocks of clients with the same classes (PFLlib)"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UsageError(f"pathological: {self.k} classes per client; give at least 1")

    def __str__(self) -> str:
        return f"pathological:{self.k}" + ":unbalanced" * (not self.balanced) + ":shuffled" * self.shuffled

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Pathological:
        words = set(arguments[1:])
        if (
            not 1 <= len(arguments) <= 3
            or words - {"balanced", "unbalanced", "shuffled"}
            or {"balanced", "unbalanced"} <= words
        ):
            raise ValueError
        return cls(int(arguments[0]), balanced="unbalanced" not in words, shuffled="shuffled" in words)

    def deal(self, dataset: Dataset, clients: int | None, rng: np.random.Generator) -> Deal:
        clients = needed(clients)
        if self.k > dataset.classes:
            raise DataError(f"{self} asks for {self.k} classes per client, but {dataset.name} has {dataset.classes}")
        least = least_samples(dataset, clients) / dataset.classes
        pieces: list[list[Ints]] = [[] for _ in range(clients)]
        for holders, rows in zip(self.holders(clients, dataset), rows_by_class(dataset), strict=True):
            shares = self._shares(len(rows), len(holders), least, rng)
            for client, piece in zip(holders, cut(rows, shares), strict=True):
                pieces[client].append(piece)
        order = rng.permutation(clients) if self.shuffled else np.arange(clients)
        return Deal([join(pieces[i]) for i in order])

    def holders(self, clients: int, dataset: Dataset) -> list[list[int]]:
        """For each class the clients that get a share of it."""
        quota = [self.k] * clients
        width = math.ceil(clients * self.k / dataset.classes)
        holders: list[list[int]] = []
        for c in range(dataset.classes):
            chosen = [i for i in range(clients) if quota[i]][:width]
            if not chosen:
                step = dataset.classes // math.gcd(dataset.classes, self.k)
                raise DataError(
                    f"{self} over {clients} clients leaves class {c} of {dataset.name} to nobody: take a "
                    f"multiple of {step} clients, more classes per client, or 'shards:{self.k}'"
                )
            for i in chosen:
                quota[i] -= 1
            holders.append(chosen)
        return holders

    def _shares(self, total: int, holders: int, least: float, rng: np.random.Generator) -> list[int]:
        average = total / holders
        if self.balanced:
            first = [int(average)] * (holders - 1)
        else:
            low = min(int(max(average / 10, least)), int(average))
            first = rng.integers(low, max(int(average), low + 1), holders - 1).tolist()
        return [*first, total - sum(first)]


@PARTITIONS.register("shards")
@dataclass(frozen=True)
class Shards(Partition):
    """LG-FedAvg's deal (Liang et al. 2020), also FedSelect's: cut each class into k * clients / classes shards, deal
    k random shards to each client, keep the first ``bound`` samples of each.

    A client may draw the same class twice. Test rows come from the published test set with the same classes per
    client; where nothing is published, a quarter of each class is set aside for it first.

    `k` is the number of shards per client, `train_bound` and `test_bound` the most samples that are kept of a shard.
    `shards(2, 50, 100)` is written `shards:2:50:100`.
    """

    k: int
    train_bound: int | None = None
    test_bound: int | None = None
    form: ClassVar[str] = "shards:K[:TRAIN_BOUND[:TEST_BOUND]]"
    by_class: ClassVar[bool] = True
    about: ClassVar[str] = "K random one-class shards per client, at most BOUND samples of each (LG-FedAvg, FedSelect)"

    def __post_init__(self) -> None:
        for name in ("k", "train_bound", "test_bound"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"shards: {name} is {value}; give at least 1")

    def deal(self, dataset: Dataset, clients: int | None, rng: np.random.Generator) -> Deal:
        clients = needed(clients)
        if self.k * clients < dataset.classes:
            raise DataError(
                f"{self} over {clients} clients makes {self.k * clients} shards, fewer than the "
                f"{dataset.classes} classes of {dataset.name}: take more clients or more shards per client"
            )
        test = dataset.official_test if dataset.official_test is not None else _set_aside(dataset, 0.25, rng)
        per_class = np.full(dataset.classes, self.k * clients // dataset.classes)
        per_class[rng.permutation(dataset.classes)[: self.k * clients % dataset.classes]] += 1
        hands = rng.permutation(np.repeat(np.arange(dataset.classes), per_class)).reshape(clients, self.k)
        return Deal(
            self._hand_out(rows_by_class(dataset, np.flatnonzero(~test)), per_class, hands, self.train_bound, rng),
            self._hand_out(rows_by_class(dataset, np.flatnonzero(test)), per_class, hands, self.test_bound, rng),
        )

    @staticmethod
    def _hand_out(
        rows: list[Ints], per_class: Ints, hands: Ints, bound: int | None, rng: np.random.Generator
    ) -> list[Ints]:
        piles = [np.array_split(rows[c], n) for c, n in enumerate(per_class)]
        order = [iter(rng.permutation(n)) for n in per_class]
        return [join([piles[c][next(order[c])][:bound] for c in hand]) for hand in hands]


def _set_aside(dataset: Dataset, share: float, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Marks a share of every class, as a published test set would."""
    marked = np.zeros(len(dataset), np.bool_)
    for rows in rows_by_class(dataset):
        marked[rng.permutation(rows)[: int(len(rows) * share)]] = True
    return marked


@PARTITIONS.register("dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partition):
    """PFLlib's ``dir``: each class is spread by proportions from Dir(alpha * 1_N), where a client that holds n/N
    samples already gets no more; the whole draw is repeated until every client has ``least`` samples.

    Only the counts are drawn again, at most a thousand times, so an impossible request ends in seconds.

    The smaller `alpha` is, the more clients differ; `least` is the number of samples that every client must get
    (default: 40, or fewer where the data are few). `dirichlet(0.5)` is written `dirichlet:0.5`.
    """

    alpha: float
    least: int | None = None
    form: ClassVar[str] = "dirichlet:ALPHA[:LEAST_SAMPLES]"
    by_class: ClassVar[bool] = True
    about: ClassVar[str] = (
        "class proportions drawn from a Dirichlet distribution; a small ALPHA is very uneven (PFLlib)"
    )

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise UsageError(f"dirichlet: alpha is {self.alpha}; give a positive number such as 0.1")
        if self.least is not None and self.least < 1:
            raise UsageError(f"dirichlet: least samples is {self.least}; give at least 1")

    def deal(self, dataset: Dataset, clients: int | None, rng: np.random.Generator) -> Deal:
        clients = needed(clients)
        least = least_samples(dataset, clients) if self.least is None else self.least
        if least * clients > len(dataset):
            raise DataError(
                f"{self}: {clients} clients of at least {least} samples need {least * clients}, "
                f"but {dataset.name} has {len(dataset)}"
            )
        counts = self._counts(np.bincount(dataset.y, minlength=dataset.classes), clients, least, rng)
        if counts is None:
            raise DataError(
                f"{self}: in {MAX_DRAWS} draws over {clients} clients somebody always had fewer than "
                f"{least} samples; take a larger alpha, fewer clients, or accept smaller clients with "
                f"'dirichlet:{self.alpha:g}:{max(1, least // 4)}'"
            )
        pieces = [cut(rng.permutation(rows), counts[c]) for c, rows in enumerate(rows_by_class(dataset))]
        return Deal([join([of_class[i] for of_class in pieces]) for i in range(clients)])

    def _counts(self, sizes: Ints, clients: int, least: int, rng: np.random.Generator) -> Ints | None:
        """Samples of each class for each client, or None where no draw gave everybody enough."""
        full = sizes.sum() / clients
        for _ in range(MAX_DRAWS):
            counts = np.zeros((len(sizes), clients), np.int64)
            held = np.zeros(clients, np.int64)
            for c, size in enumerate(sizes):
                share = rng.dirichlet(np.full(clients, self.alpha)) * (held < full)
                if not share.sum() > 0:
                    break
                ends = (np.cumsum(share / share.sum()) * size).astype(np.int64)
                ends[-1] = size
                counts[c] = np.diff(ends, prepend=0)
                held += counts[c]
            else:
                if held.min() >= least:
                    return counts
        return None


@PARTITIONS.register("groups")
@dataclass(frozen=True)
class Groups(Partition):
    """FedCAP's EMNIST: three groups of clients (digits, lower case, upper case); ``dominant`` of a client's samples
    are of its group's classes, the rest come from all classes.

    Every class is cut at ``dominant``: the first part goes to the clients of its group, the second to everybody, in
    proportion to what they have. So the mix is exact, all rows are used, and a group with more data has larger
    clients (``samples_per_client`` evens that out). `groups(0.8)` is written `groups:0.8`.
    """

    dominant: float = 0.8
    form: ClassVar[str] = "groups[:SHARE]"
    by_class: ClassVar[bool] = True
    about: ClassVar[str] = "three groups (digits, lower case, upper case); SHARE of a client is from its group (FedCAP)"

    def __post_init__(self) -> None:
        if not 0 < self.dominant <= 1:
            raise UsageError(f"groups: the dominant share is {self.dominant}; give a number above 0, at most 1")

    def deal(self, dataset: Dataset, clients: int | None, rng: np.random.Generator) -> Deal:
        clients = needed(clients)
        groups = self._groups(dataset)
        if clients < len(groups):
            raise DataError(f"{self} makes {len(groups)} groups, but there are {clients} clients")
        shuffled = [rng.permutation(rows) for rows in rows_by_class(dataset)]
        cuts = [round(len(rows) * self.dominant) for rows in shuffled]
        own: list[Ints] = []
        for group, members in zip(groups, np.array_split(np.arange(clients), len(groups)), strict=True):
            pool = rng.permutation(join([shuffled[c][: cuts[c]] for c in group]))
            own += np.array_split(pool, len(members))
        common = rng.permutation(join([rows[end:] for rows, end in zip(shuffled, cuts, strict=True)]))
        ends = np.round(np.cumsum([len(rows) for rows in own]) / sum(cuts) * len(common)).astype(np.int64)
        return Deal([join([a, b]) for a, b in zip(own, np.split(common, ends[:-1]), strict=True)])

    def _groups(self, dataset: Dataset) -> list[list[int]]:
        tests: tuple[Callable[[str], bool], ...] = (str.isdigit, str.islower, str.isupper)
        found = [[c for c, name in enumerate(dataset.class_names) if test(name)] for test in tests]
        groups = [group for group in found if group]
        single = all(len(name) == 1 for name in dataset.class_names)
        if not single or len(groups) < 2 or sum(map(len, groups)) < dataset.classes:
            raise DataError(
                f"{self} needs classes named by single characters of at least two kinds (digits, lower "
                f"case, upper case); {dataset.name} has {', '.join(dataset.class_names[:5]) or 'no names'}"
            )
        return groups


@PARTITIONS.register("natural")
@dataclass(frozen=True)
class Natural(Partition):
    """One client per person who wrote, wore or typed the samples, or per place that they come from; with fewer clients,
    those with the most samples. Where a published split leaves everybody samples for both, it is kept."""

    form: ClassVar[str] = "natural"
    about: ClassVar[str] = "one client per person in the data set; with fewer clients, those with the most samples"

    def deal(self, dataset: Dataset, clients: int | None, rng: np.random.Generator) -> Deal:
        if dataset.user is None:
            raise DataError(f"natural: {dataset.name} does not say who made each sample; take another partition")
        users, sizes = np.unique(dataset.user, return_counts=True)
        if clients is not None and clients > len(users):
            raise DataError(f"natural: {clients} clients asked for, but {dataset.name} has {len(users)} users")
        largest = np.sort(np.argsort(-sizes, kind="stable")[:clients])
        order = np.argsort(dataset.user, kind="stable")
        pools = np.split(order, np.cumsum(sizes)[:-1])
        names = tuple(dataset.users[users[i]] if dataset.users else f"user-{users[i]}" for i in largest)
        test = dataset.official_test
        if test is None or not all(test[rows].any() and not test[rows].all() for rows in pools):
            return Deal([pools[i] for i in largest], names=names)
        chosen = [pools[i] for i in largest]
        return Deal([rows[~test[rows]] for rows in chosen], [rows[test[rows]] for rows in chosen], names)


iid, pathological, shards, dirichlet, groups, natural = Iid, Pathological, Shards, Dirichlet, Groups, Natural
