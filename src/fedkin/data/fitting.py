"""What fills missing values and standardises numbers, fitted on training samples: of each client alone, or of all.

Federated, a client gives three things away, and never a sample: how many values each column of numbers has and their
sum; then, told the mean of all, the sum of the squared distances from it; and how often each word of a category occurs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from fedkin.data.dataset import Dataset
from fedkin.data.precision import blurred
from fedkin.data.sample_keys import table_keys
from fedkin.data.split import Split
from fedkin.errors import DataError, UsageError
from fedkin.options import named_spec, option, validated
from fedkin.preparation import Column, Floats, Preparation

From = Literal["none", "local", "federated"]


@dataclass(frozen=True)
class Filling:
    """The options of `impute`."""

    numbers: Literal["mean", "median"] = option("mean", "what fills a missing number")
    words: Literal["category", "frequent"] = option(
        "category", "what a missing word becomes: a category of its own, or the most frequent one"
    )


@dataclass(frozen=True)
class Preparing:
    """What is asked for."""

    impute: From = "none"
    scale: From = "none"
    filling: Filling = Filling()

    @classmethod
    def of(cls, impute: str, scale: From) -> Preparing:
        """From settings: `impute` may have options, as in local:numbers=median."""
        name, options = named_spec(impute)
        if name not in get_args(From) or (options and name == "none"):
            raise UsageError(
                f"impute={impute!r}: accepts none, local or federated; options follow a colon, as in "
                "local:numbers=median"
            )
        filling = validated(Filling, options, "impute")
        if name == "federated" and filling.numbers == "median":
            raise UsageError(
                f"impute={impute!r}: a median of all clients does not follow from sums that each of them gives away; "
                "take numbers=mean, or local:numbers=median"
            )
        return cls(name, scale, filling)  # type: ignore[arg-type]


AS_IT_IS = Preparing()


def prepare_table(
    dataset: Dataset, split: Split, raw: Floats, columns: Sequence[Column], wish: Preparing, lacks: str
) -> Dataset:
    """The data set with its table's rows as a network takes them. `lacks`: where a value is missing, in words."""
    if wish.impute == "none" and lacks:
        raise DataError(
            f"{lacks}; impute='local' (or 'federated') fills missing values from the training samples, or drop such "
            "samples"
        )
    numbers = [c.name for c in columns if not c.categories]
    if wish.scale != "none" and not numbers:
        raise UsageError(f"scale={wish.scale!r} would change nothing: the table has no column of numbers; leave it out")
    train = [raw[rows] for rows in split.train]
    common = fit(columns, train, wish, "federated", "all clients together have")
    if "local" not in (wish.impute, wish.scale):
        made = [Preparation(common)]
    else:
        rows = np.concatenate([np.concatenate(parts) for parts in zip(*_parts(split), strict=True)])
        if len(np.unique(rows)) < len(rows):
            raise UsageError("some samples are of several clients: impute and scale can be 'federated', not 'local'")
        each = zip(train, split.names, strict=True)
        made = [Preparation(fit(common, [x], wish, "local", f"client {name!r} has")) for x, name in each]
    if len(made) == 1:
        x = made[0](raw)
    else:
        x = np.zeros((len(raw), len(made[0].inputs())), np.float32)
        for one, parts in zip(made, zip(*_parts(split), strict=True), strict=True):
            for rows in parts:
                x[rows] = one(raw[rows])
    plain = [i for i, c in enumerate(columns) if not c.categories] if wish.scale == "none" else []
    said = next((said for i in plain if (said := blurred(raw[:, i], f"column {columns[i].name!r}"))), "")
    shown = () if made[0].plain else tuple(made)
    return replace(
        dataset,
        note=dataset.note or said,
        x=x,
        columns=made[0].inputs(),
        keys=table_keys(raw, columns),
        preparations=shown,
        prepared=told(made, raw, wish) if shown else (),
    )


def shaped(columns: Sequence[Column], wish: Preparing) -> tuple[str, ...]:
    """What the inputs of a network will be called, before anything is fitted."""
    own = wish.impute != "none" and wish.filling.words == "category"
    made = (replace(c, fill=float(len(c.categories))) if own and c.categories else c for c in columns)
    return Preparation(tuple(made)).inputs()


def _parts(split: Split) -> tuple[Any, Any, Any]:
    return split.train, split.validation, split.test


def fit(
    columns: Sequence[Column], clients: Sequence[Floats], wish: Preparing, which: From, who: str
) -> tuple[Column, ...]:
    """The columns with what is fitted `which` way on the training rows of these clients; what is fitted the other way
    stays as it is. `who` has them, in words."""
    made = []
    for place, column in enumerate(columns):
        values = [x[:, place] for x in clients]
        made.append(_category(column, values, wish, which, who) if column.categories else column)
        if not column.categories and which in (wish.impute, wish.scale):
            made[-1] = _number(column, values, wish, which, who)
    return tuple(made)


def _number(column: Column, clients: Sequence[Floats], wish: Preparing, which: From, who: str) -> Column:
    known = [x[~np.isnan(x)] for x in clients]
    count = sum(map(len, known))
    if not count:
        setting = "impute" if wish.impute == which else "scale"
        other = f"; {setting}='federated' goes by all clients" if which == "local" else ""
        raise DataError(f"{who} no value of column {column.name!r} among the training samples{other}, or leave it out")
    mean = sum(float(x.sum()) for x in known) / count
    if wish.impute == which:
        median = wish.filling.numbers == "median"
        column = replace(column, fill=float(np.median(np.concatenate(known))) if median else mean)
    if wish.scale == which:
        std = float(np.sqrt(sum(float(((x - mean) ** 2).sum()) for x in known) / count))
        column = replace(column, mean=mean, std=std if std > 1e-10 * abs(mean) else 1.0)
    return column


def _category(column: Column, clients: Sequence[Floats], wish: Preparing, which: From, who: str) -> Column:
    if wish.impute != which:
        return column
    size = len(column.categories)
    if wish.filling.words == "category":
        return replace(column, fill=float(size))
    counts = sum(np.bincount(x[~np.isnan(x)].astype(np.int64), minlength=size) for x in clients)
    if not np.sum(counts):
        other = "; impute='federated' goes by all clients" if which == "local" else ""
        raise DataError(f"{who} no value of column {column.name!r} among the training samples{other}, or leave it out")
    return replace(column, fill=float(np.argmax(counts)))


def told(made: Sequence[Preparation], raw: Floats, wish: Preparing) -> tuple[str, ...]:
    """A sentence for each column: what it is, and what was done with it."""
    missing = np.isnan(raw).sum(0)
    return tuple(_told([p.columns[i] for p in made], int(missing[i]), wish) for i in range(len(made[0].columns)))


def _told(columns: Sequence[Column], missing: int, wish: Preparing) -> str:
    first = columns[0]
    said = [f"{first.name}: a category of {len(first.categories)}" if first.categories else f"{first.name}: a number"]
    if first.categories:
        said.append(
            f"{first.codes} inputs, one for each word{' and one for none' * (first.codes > len(first.categories))}"
        )
    elif wish.scale != "none":
        spans = f"mean {_span([c.mean for c in columns])}, standard deviation {_span([c.std for c in columns])}"
        said.append(f"standardised ({wish.scale}: {spans})")
    if missing and first.categories and wish.filling.words == "frequent":
        words = sorted({first.categories[int(c.fill or 0)] for c in columns})
        said.append(f"{missing} missing, filled ({wish.impute}) with {', '.join(words[:5])}")
    elif missing and not first.categories:
        said.append(f"{missing} missing, filled ({wish.impute} {wish.filling.numbers}) with {_span(_fills(columns))}")
    elif missing:
        said.append(f"{missing} missing")
    return ", ".join(said)


def _fills(columns: Sequence[Column]) -> list[float]:
    return [c.fill for c in columns if c.fill is not None]


def _span(values: Sequence[float]) -> str:
    low, high = (f"{v:.4g}" for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
