"""Clients whose rows are their own: what each brings, and how its rows become training, validation and test rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkin.data.dataset import Array, Dataset, checked_labels, encode_labels, numbered
from fedkin.data.fitting import AS_IT_IS, Preparing, prepare_table
from fedkin.data.partition import Deal, Partition
from fedkin.data.split import Split, check_names, check_shares, check_sizes, held_out, resized, skewed, split_deal
from fedkin.data.targets import Ints, Targets, alike, outputs_of
from fedkin.errors import DataError, UsageError
from fedkin.parts import Part, words_of
from fedkin.preparation import Column, Floats, Texts


@dataclass(frozen=True, eq=False)
class OwnClient:
    """One client's rows, checked as far as one client can be."""

    name: str
    x: Array
    y: Array
    tests: int | None
    """How many of the last rows are for testing; None where nobody has said."""
    parts: tuple[Part, ...] = ()
    lacks: str = ""
    """Where a table has no value, in words; nothing where none is missing."""
    note: str = ""
    """What became of the samples and targets as they came that somebody should know."""
    cut: int = 0
    """How many texts were cut."""


@dataclass(frozen=True, eq=False)
class OwnClients:
    """Clients with rows of their own, before they are split into training, validation and test rows."""

    name: str
    parts: tuple[OwnClient, ...]
    vocabulary: int = 0
    columns: tuple[Column, ...] = ()
    """Of a table: x has their values, yet to be prepared."""
    targets: Targets = "classes"
    by_column: bool = False
    """Whether they came in one table with a column of clients."""
    class_names: tuple[str, ...] = ()
    """The classes in their order, where the data say so; else they are sorted."""
    texts: Texts | None = None
    """How samples that are texts became token ids."""
    named: bool = True
    """Whether somebody gave the clients their names."""

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

    def of_texts(self) -> dict[str, Any]:
        """What a data set says of texts that it was made of."""
        if self.texts is None:
            return {}
        cut, count = sum(part.cut for part in self.parts), sum(len(part.x) for part in self.parts)
        note = f"{cut} of {count} texts have more than {self.texts.length} tokens and were cut" if cut else ""
        return {"texts": self.texts, "prepared": (self.texts.told(),), "note": note}

    def split(
        self,
        *,
        seed: int = 0,
        test_share: float = 0.25,
        validation_share: float = 0.0,
        samples_per_client: int | None = None,
        quantity_skew: float | None = None,
        preparing: Preparing = AS_IT_IS,
    ) -> tuple[Dataset, Split]:
        """All rows as one data set, and who trains and tests on which."""
        check_shares(test_share, validation_share)
        check_sizes(samples_per_client, quantity_skew)
        parts, sizes = self.parts, [len(part.x) for part in self.parts]
        y, classes, class_names = together(self.targets, [part.y for part in parts], self.vocabulary, self.class_names)
        x = np.concatenate([part.x for part in parts])
        dataset = Dataset(
            self.name,
            np.nan_to_num(x).astype(np.float32) if self.columns else x,
            y,
            classes,
            class_names,
            user=np.repeat(np.arange(len(parts)), sizes),
            vocabulary=self.vocabulary,
            **{
                "note": next((part.note for part in parts if part.note), ""),
                "parts": self.parts[0].parts,
                "targets": self.targets,
                **self.of_texts(),
            },
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
        made = Split(train, validation, test, tuple(part.name for part in parts), "natural", unused, self.named)
        if self.columns:
            lacks = next((part.lacks for part in parts if part.lacks), "")
            return prepare_table(dataset, made, x, self.columns, preparing, lacks), made
        return dataset, made


def together(
    targets: Targets, each: Sequence[Array], vocabulary: int = 0, named: tuple[str, ...] = ()
) -> tuple[Array, int, tuple[str, ...]]:
    """All clients' targets, how many classes or outputs they ask for, and what the classes are called. `named`: all
    classes in their order, where that is known."""
    y = np.concatenate(each)
    if targets != "classes":
        return y, outputs_of(targets, y, vocabulary), ()
    if not named:
        codes, names = encode_labels(y)
        return codes, len(names), names
    names = tuple(str(name) for name in checked_labels(named).tolist())  # written as labels are
    codes, foreign = numbered(y, names)
    if foreign:
        raise DataError(f"label {foreign[0]!r} is none of the classes {', '.join(map(repr, named[:20]))}")
    return codes, len(names), names


@dataclass(frozen=True, eq=False)
class WholeTable:
    """The rows of a table that is to be dealt to clients. `dataset` is what a split is made of; its x has yet to be
    prepared, and `raw` are the rows as they came."""

    dataset: Dataset
    raw: Floats
    columns: tuple[Column, ...]
    lacks: str

    def prepared(self, split: Split, preparing: Preparing) -> Dataset:
        return prepare_table(self.dataset, split, self.raw, self.columns, preparing, self.lacks)


@dataclass(frozen=True, eq=False)
class Brought:
    """Data as Python objects: clients with rows of their own, a whole data set or table and how it is dealt, or a data
    set with a split that was made before."""

    what: OwnClients | WholeTable | Dataset | tuple[Dataset, Split]
    partition: Partition | None = None
    applied: frozenset[str] = frozenset()
    """Settings that had their part in how the objects were read."""


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
